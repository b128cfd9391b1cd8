"""Chooses the family of a model by its dims alone."""

from __future__ import annotations

from typing import NamedTuple

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
    others.sort(key=lambda one: ("requires" in one[1], len(one[1]), one[0]))
    return Fitting(fit, others)
