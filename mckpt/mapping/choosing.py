"""Chooses the family of a model by its dims alone."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from mckpt.mapping.file import Dims, MappingFile
from mckpt.mapping.forms import is_part
from mckpt.mapping.reading import load, names


class Fitting(NamedTuple):
    """The families that compute what some dims describe."""

    families: list[MappingFile]
    # the other families of text models, the nearest first, each with the reasons: the dims that it
    # would compute with, "requires", or "config" for dims that no config.json of it can have
    others: list[tuple[str, dict[str, str]]]

    @property
    def best(self) -> list[MappingFile]:
        """Returns the canonical families, or all of them if none is canonical."""
        return [family for family in self.families if family.canonical] or self.families


def families_for(dims: Dims) -> Fitting:
    """Returns the families that can express these dims."""
    fit, others = list[MappingFile](), list[tuple[str, dict[str, str]]]()
    for name in names("hf"):
        family = load("hf", name)
        if is_part(family.forms):  # dims do not describe the parts beside the text model
            continue
        if family.requires is not None and not family.requires(dims):
            why = {"requires": f"it is for models where {family.requires.text}"}
        else:
            why = family.inexact(dims)
        if why:
            others.append((name, why))
        else:
            fit.append(family)
    if fit:
        return Fitting(fit, others)
    ranked = sorted((_distance(name, why, dims), name, why) for name, why in others)
    return Fitting(fit, [(name, why) for _, name, why in ranked])


def _distance(name: str, why: dict[str, str], dims: Dims) -> int:
    """Returns how many dims a family would compute otherwise, and one more for values that it does
    not support or models that it is not for.
    """
    if not {"requires", "config"} & why.keys():
        return len(why)
    apart = replace(load("hf", name), expect={}).inexact(dims)
    return len(dims) if "config" in apart else len(apart) + 1
