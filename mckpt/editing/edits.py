"""Edits: a checkpoint becomes one of another shape, whose every element is a copy of an element of
the source, or zero.

An edit is a function of the layout and the dims. It renames stored tensors, stores them a second
time under other names, or leaves them out, so that whatever plans, proves, copies and reads a
checkpoint does the same with an edited one. The optimizer's state of a weight follows the weight,
because its name starts with that of the weight.

The contract of an edit says what it preserves:

    exact    the logits are those of the source
    kept     what is kept is equal bit for bit; the logits are others
    formula  new values are computed of those of the source; the logits are others
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from mckpt.checkpoint.checkpoint import Addition, Checkpoint
from mckpt.editing.pieces import is_made
from mckpt.errors import UsageError
from mckpt.formats.scaling import scaled_again
from mckpt.geometry.box import Layout
from mckpt.geometry.join import proved
from mckpt.mapping import Dims, MappingFile
from mckpt.storage.manifest import Facts

EXACT, KEPT, FORMULA = "exact", "kept", "formula"


class Edit(ABC):
    """One edit. Its methods raise UsageError for a model that cannot be edited so."""

    dialect: ClassVar[str] = ""  # the dialect that can hold the edited model, if only one can
    anew: ClassVar[Mapping[str, Any]] = {}  # see `Addition.anew`

    @staticmethod
    @abstractmethod
    def of(given: dict[str, Any], dims: Dims) -> Edit:
        """Returns the edit with the parameters that a recipe gives, of a model with these dims.

        Raises KeyError, TypeError or ValueError for parameters that it does not have.
        """

    @property
    @abstractmethod
    def contract(self) -> str:
        """Returns EXACT, KEPT or FORMULA."""

    @property
    def last(self) -> bool:
        """Returns whether no edit can follow, because its elements are sums."""
        return False

    @property
    @abstractmethod
    def words(self) -> str:
        """Returns what the edit does, in words."""

    @property
    def data(self) -> dict[str, Any]:
        """Returns the parameters as plain values without paths, of which `steps.again` makes the
        edit.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def again(cls, data: Any, dims: Dims) -> Edit:
        """Returns the edit that has this `data`, of a model with these dims. Raises
        msgspec.ValidationError or TypeError for an edit that needs more.
        """
        found: Edit = msgspec.json.decode(json.dumps(data), type=cls)
        return found

    def of_source(self, source: Checkpoint, dims: Dims, before: Sequence[Edit]) -> Edit:
        """Returns the edit with what it takes from the files beside the weights of the source.
        dims: those of the model before the edit. before: the edits that come before it.
        """
        return self

    def beside(self, files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
        """Returns the files beside the weights of the edited model; see `Addition.beside`."""
        return files

    def unfit(self, source: Checkpoint) -> str:
        """Returns why the files beside the weights of the source forbid the edit, "" if not."""
        return ""

    @abstractmethod
    def dims(self, dims: Dims) -> Dims:
        """Returns the dims of the edited model."""

    def layers(self, before: list[int] | None) -> list[int] | None:
        """Returns those of the layers `before` that the edited model has, in its order. None: they
        are of several models.
        """
        return before

    def family(self, family: MappingFile | None, dims: Dims) -> MappingFile | None:
        """Returns the family of the edited model, None if there is none. family: before. dims:
        those of the edited one.
        """
        return family

    @abstractmethod
    def layout(self, layout: Layout, dims: Dims) -> Layout:
        """Returns the layout of the edited model. dims: those of the model before."""


@dataclass(frozen=True)
class Editing(Addition):
    """Edits, one after the other, of a checkpoint while it is read."""

    edits: tuple[Edit, ...]
    source: Checkpoint

    @property
    def path(self) -> Path:
        return self.source.path

    def made_of(self, file: str) -> Sequence[str]:
        return () if is_made(file) else (file,)

    def dims(self, dims: Dims) -> Dims:
        return reduce(lambda found, edit: edit.dims(found), self.edits, dims)

    def layers(self, before: list[int] | None) -> list[int] | None:
        return reduce(lambda found, edit: edit.layers(found), self.edits, before)

    @property
    def dialect(self) -> str:
        return next((edit.dialect for edit in self.edits if edit.dialect), "")

    @property
    def anew(self) -> Mapping[str, Any]:
        return {name: value for edit in self.edits for name, value in edit.anew.items()}

    def family(self, family: MappingFile | None) -> MappingFile | None:
        dims = self.source.dims
        for edit in self.edits:
            dims = edit.dims(dims)
            family = edit.family(family, dims)
        return family

    def beside(self, files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
        return reduce(lambda found, edit: edit.beside(found), self.edits, files)

    def layout(self, base: Layout) -> Layout:
        proved(base)  # each element of the source is there once, before the edits
        dims = self.source.dims
        for edit in self.edits:
            after = edit.dims(dims)
            base, dims = edit.layout(base, dims), after
            base = base if edit.last else scaled_again(base)
            held = {name for s in base.stored for name in s.tensors}
            shapes = {name: shape for name, shape in base.shapes.items() if name in held}
            base = replace(base, shapes=shapes)  # the next edit must not see those left out
        return base

    @property
    def contract(self) -> str:
        return EXACT if all(e.contract == EXACT for e in self.edits) else KEPT

    @property
    def facts(self) -> Facts:
        return {"edits": [{type(edit).__name__: edit.data} for edit in self.edits]}

    @property
    def notes(self) -> list[str]:
        return [f"edited, {edit.contract}: {edit.words}" for edit in self.edits]


def edited(source: Checkpoint, edits: Sequence[Edit]) -> Checkpoint:
    """Returns the checkpoint with some edits. Raises UsageError for those that cannot be done."""
    if source.merging is not None:
        raise UsageError(f"{source.path}: is merged or edited already; write the result first")
    for edit in edits[:-1]:
        if edit.last:
            raise UsageError(f"{edit.words}: must be the last edit")
    for edit in edits:
        if why := edit.unfit(source):
            raise UsageError(why)
    made, dims = list[Edit](), source.dims
    for edit in edits:
        made.append(edit.of_source(source, dims, made))
        dims = edit.dims(dims)
    return replace(source, merging=Editing(tuple(made), source))
