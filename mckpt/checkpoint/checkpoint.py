"""A checkpoint of any format as a mapping of its logical tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mckpt import mapping
from mckpt.checkpoint import description, masters
from mckpt.checkpoint.files import CheckpointFiles, open_files
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.checkpoint.model import ModelDescription
from mckpt.errors import CoverError, MappingError, MckptError, SourceError, shown
from mckpt.formats import carried
from mckpt.formats.base import Names, Opened
from mckpt.formats.megatron.interface import as_megatron
from mckpt.formats.megatron.optimizer import Optimizer, masters_alone
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.options import SourceOptions
from mckpt.storage.manifest import Facts
from mckpt.storage.staging import MANIFEST

if TYPE_CHECKING:
    from typing_extensions import Self


class Addition(ABC):
    """A change of a checkpoint that is made while it is read.

    It adds an adapter or other checkpoints to the weights, or it edits the model, which then has
    other dims.
    """

    @property
    def summands(self) -> Sequence[Checkpoint]:
        """Returns the checkpoints that are summed, the base among them; none for an adapter."""
        return ()

    @property
    @abstractmethod
    def path(self) -> Path:
        """Returns the directory of the adapter, or of the checkpoint."""

    def made_of(self, file: str) -> Sequence[str]:
        """Returns the files of the source that a file of the layout depends on. For most files this
        is the file itself; a temporary file was made of others, or of none.
        """
        return (file,)

    def dims(self, dims: Dims) -> Dims:
        """Returns the dims of the changed model."""
        return dims

    def layers(self, before: list[int]) -> list[int] | None:
        """Returns those of the layers `before` that the changed model has, in its order, None if it
        has layers of several models.
        """
        return before

    @property
    def dialect(self) -> str:
        """Returns the name of the dialect that can hold the changed model, "" if others can."""
        return ""

    @property
    def anew(self) -> Mapping[str, Any]:
        """Returns the dims of parts that the changed model has anew, as they are without these."""
        return {}

    def family(self, family: MappingFile | None) -> MappingFile | None:
        """Returns the family of the changed model, None if it has none. family: that of the model
        before.
        """
        return family

    def beside(self, files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
        """Returns the files beside the weights of the changed model, by name, as paths or as their
        content. files: those of the model before.
        """
        return files

    @abstractmethod
    def layout(self, base: Layout) -> Layout:
        """Returns the layout of the base with what is added to its pieces."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """Returns entries of the manifest."""

    @property
    def notes(self) -> list[str]:
        """Returns sentences on the values."""
        return []


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint(Mapping[str, LogicalTensor]):
    """The logical tensors of a checkpoint of any format, by name.

    `Checkpoint.open` opens one. A method that returns a `Checkpoint` leaves this one as it is.
    `ckpt["layers.3.attn.q.weight"][:8].numpy()` reads those rows and nothing else.
    """

    files: CheckpointFiles
    model: ModelDescription
    borrows: bool = False  # takes tensors from the directory of --like; see `borrowing`
    has_states: bool = False  # the optimizer's states are among its tensors
    merging: Addition | None = None  # what changes it while it is read
    allow_overflow: bool = False  # values that scales make infinite are read as they are
    masters_alone: bool = False  # weights that have a master copy are not among its tensors

    @classmethod
    def open(cls, path: str | Path, options: SourceOptions | None = None) -> Self:
        """Opens a checkpoint. The arguments and errors are those of `open_files`."""
        files = open_files(path, options or SourceOptions())
        return cls(files, ModelDescription(files))

    # ------------------------------------------------------------ the same files, read otherwise

    def named_as(self, other: Checkpoint) -> Self:
        """Returns this checkpoint. If it is a Hugging Face directory without a known family, reads
        it with the family file that `other` keeps; without the tensors that no layer computes with,
        if `other` does not have them.
        """
        own, theirs = self.model.options.mapping, other.model.options.mapping
        if not self.is_megatron and not own and theirs:
            try:
                _ = self.mapping
            except MappingError:
                return self.open(self.path, self.files.options.with_(mapping=theirs))
        keeps = self.is_megatron or not self.mapping.has_unread
        return self if keeps else self.without_unread(other.names)

    def without_unread(self, other: Names) -> Self:
        """Returns this checkpoint, without the tensors that no layer computes with if `other` does
        not have them.
        """
        lacking = self.mapping.has_unread and self.names.unread_beyond(other)
        return replace(self, model=replace(self.model, unread=False)) if lacking else self

    def with_dims(self, dims: Dims) -> Self:
        return replace(self, model=replace(self.model, given_dims=dims))

    def with_vocab_size(self, rows: int) -> Self:
        """Returns the same tensors with this number of rows of the vocabulary."""
        return replace(self, model=self.model.with_vocab_size(rows))

    def with_default_vocab_size(self, rows: int) -> Self:
        """Returns this checkpoint, whose vocabulary has this number of rows, and not more than are
        stored, if nothing states its size.
        """
        try:
            _ = self.dims
        except description.VocabSizeUnknown:
            stored = self.opened.padded_vocab(self.mapping) or rows
            return self.open(self.path, self.files.options.with_(vocab_size=min(rows, stored)))
        return self

    def with_padding(self) -> Self | None:
        """Returns the same tensors with the padding rows of the vocabulary, for a conversion from
        Megatron to Megatron; None if the embedding is not stored by rows.
        """
        model = self.model.with_padding()
        return None if model is None else replace(self, model=model)

    def borrowing(self) -> Self:
        """Returns the same checkpoint, which takes from --like the tensors that are not in
        Megatron's model, if DST/hf does not have them. For conversions only: a comparison would
        compare these tensors with themselves.
        """
        return replace(self, borrows=True)

    def with_optimizer(self) -> Self:
        """Returns the same checkpoint, whose layout has the optimizer's state of each weight too,
        as logical tensors WEIGHT@STATE.
        """
        return replace(self, has_states=True)

    def with_training(self) -> Self:
        """Returns the same checkpoint as one of Megatron, with the optimizer of the training that
        saved it in the names of Hugging Face; itself, if there is none.
        """
        files = self.files.training
        return replace(self, files=files, model=ModelDescription(files)) if files else self

    # --------------------------------------------------------------- of the files and the model

    @property
    def path(self) -> Path:
        """Returns the directory; of a URL, the temporary directory in its place."""
        return self.files.path

    @property
    def opened(self) -> Opened:
        return self.files.opened

    @property
    def format(self) -> str:
        return self.files.opened.format.name

    @property
    def is_megatron(self) -> bool:
        """Returns True for a Megatron checkpoint, False for a Hugging Face directory."""
        return self.files.is_megatron

    @property
    def args(self) -> dict[str, Any] | None:
        """Returns Megatron's args as plain values; None if the checkpoint has none."""
        return self.files.args

    @property
    def mapping(self) -> MappingFile:
        """Returns the family (Hugging Face) or dialect (Megatron) that names the stored keys."""
        return self.model.mapping

    @property
    def dims(self) -> Dims:
        """Returns the sizes and hyperparameters of the model. Raises MappingError if the sources
        that describe it disagree.
        """
        dims = self.model.dims
        return dims if self.merging is None else self.merging.dims(dims)

    @cached_property
    def family(self) -> MappingFile | None:
        """Returns the family of the model; None if no config.json describes a Megatron
        checkpoint.
        """
        family = self.model.family
        return family if self.merging is None or family is None else self.merging.family(family)

    @property
    def changes_family(self) -> bool:
        """Returns whether an edit makes a model of another family."""
        return self.merging is not None and self.family is not self.model.family

    @cached_property
    def undescribed(self) -> bool:
        """Returns whether an edit makes a model that no config.json describes: no family has it, or
        that of the source lacks a value, such as a tied output layer. Layers of multi-token
        prediction alone may be lacking.
        """
        before, after = self.model.family, self.family
        if before is None or after is None or not self.edited:
            return self.changes_family and after is None
        lost = after.inexact(self.dims).keys() - before.inexact(self.model.dims).keys()
        return bool(lost - {"mtp_layers"})

    @property
    def edited(self) -> list[str]:
        """Returns the names of the dims that edits have changed."""
        stored = self.model.dims if self.merging else {}
        return [name for name, value in stored.items() if not mapping.equal(self.dims[name], value)]

    @property
    def kept_layers(self) -> list[int] | None:
        """Returns the number that each layer had before the edits, None if they have layers of
        several models.
        """
        before = list(range(self.model.dims["num_layers"]))
        return before if self.merging is None else self.merging.layers(before)

    def files_beside(self, files: Mapping[str, Path | bytes]) -> dict[str, Path | bytes]:
        """Returns files beside the weights, as what changes the model changes them."""
        return dict(files if self.merging is None else self.merging.beside(files))

    @property
    def parallel(self) -> Parallel:
        """Returns the parallel sizes with which the checkpoint was saved, without the layers that
        are left out.
        """
        saved = self.model.parallel
        return saved.without_mtp() if self.files.options.no_mtp else saved

    @property
    def names(self) -> Names:
        """Returns the mapping, dims and choices that turn stored keys into logical tensors."""
        return self.model.names

    def left_behind(self) -> list[str]:
        """Returns the names of everything stored that is not a weight: optimizer, random states,
        schedules.
        """
        return self.opened.beside(self.mapping)

    # --------------------------------------------------------------------------------- tensors

    @cached_property
    def layout(self) -> Layout:
        """Returns the logical box that each stored tensor holds."""
        try:
            layout = self.opened.layout(self.names)
            if self.mapping.whole:
                self._refuse_incomplete_towers(layout)
            description.refuse_changed(self.opened.root, self.files.manifest)
            if self.has_states and (optimizer := self.optimizer) is not None:
                layout = carried.joined(layout, optimizer.layout)
                ignored = {k: why for k, why in layout.ignored.items() if k not in optimizer.keys}
                layout = replace(layout, ignored=ignored)
                layout = masters_alone(layout) if self.masters_alone else layout
            if self.files.options.no_mtp and self.is_megatron:
                layout = without_mtp_layers(layout, self.model.dims["num_layers"])
            layout = layout if self.carried is None else carried.joined(layout, self.carried)
            return layout if self.merging is None else self.merging.layout(layout)
        except (SourceError, CoverError) as e:
            error: MckptError = e
            if dims := self.files.options.dims:
                given = ", ".join(f"{name} {value!r}" for name, value in dims.items())
                error = e.with_hint(
                    f"--set or --vocab-size gave {given}: correct or leave out what is wrong."
                    + " --no-mtp leaves out the layers of multi-token prediction."
                    * ("mtp_layers" in dims)
                )
            if self.is_megatron and self.model.dims["mtp_layers"] and not self.model.stores_mtp:
                error = error.with_hint(
                    "No layer of multi-token prediction is stored. If the training left these"
                    " layers out, give --no-mtp."
                )
            raise self.model.with_hint(error) from None

    def _refuse_incomplete_towers(self, layout: Layout) -> None:
        """Raises SourceError if the towers of a whole model have not the tensors that its manifest
        records, or that the directory of --like has.
        """
        found = carried.of(layout)
        recorded = self.files.manifest.get("carried")
        if isinstance(recorded, dict) and carried.facts(found)["digest"] != recorded.get("digest"):
            raise SourceError(
                f"{self.path}: its towers have {len(found):,} tensors, and {MANIFEST} records"
                f" {recorded.get('tensors')} of other names, shapes or dtypes. Copy the checkpoint"
                " again"
            )
        if missing := carried.gaps(row.key for row in found):
            raise SourceError.of(f"{self.path}: its towers miss tensors:", missing)
        if missing := sorted(self.model.described_towers - {row.key for row in found}):
            raise SourceError.of(
                f"{self.path}: its towers lack tensors that {self.files.options.like} has:", missing
            )

    @cached_property
    def optimizer(self) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none."""
        megatron = as_megatron(self.opened)
        return masters.read(megatron, self.names) if megatron else None

    @cached_property
    def carried(self) -> Layout | None:
        """Returns the tensors that a Megatron checkpoint has beside it and that its model does not
        have, such as a vision tower: from DST/hf, else, if it borrows, from --like. None if there
        are none.
        """
        if not self.is_megatron or self.mapping.whole:
            return None
        given = self.files.options.like
        like = Path(given) if given and self.borrows else None
        recorded = self.files.manifest.get("carried")
        return carried.of_checkpoint(like, self.files.hf_directory, self.model.family, recorded)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.layout, self.allow_overflow)

    def tensors(self) -> Mapping[str, LogicalTensor]:
        """Returns the logical tensors by name, which are those of the checkpoint as a mapping."""
        return self.reader

    def __getitem__(self, name: str) -> LogicalTensor:
        return self.reader[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader)

    def __len__(self) -> int:
        return self.layout.num_tensors

    def __repr__(self) -> str:
        # the tensors are not counted: that would read the mapping files
        sizes = ""
        with suppress(MckptError):
            sizes = f", {self.files.opened.parallel()}" * self.is_megatron
        return shown(f"{type(self).__name__}({self.format} {self.path}{sizes})")

    def __reduce__(self) -> tuple[Any, ...]:
        # without the tensors' places: they would be large
        parts = self.files, self.model, self.borrows, self.has_states, self.merging
        return type(self), (*parts, self.allow_overflow, self.masters_alone)


def without_mtp_layers(layout: Layout, num_layers: int) -> Layout:
    """Returns a layout without the layers of multi-token prediction, which follow those of the
    decoder.
    """
    stored, ignored = [], dict(layout.ignored)
    for s in layout.stored:
        inside = s.layer < num_layers
        arrays = {name: getattr(s, name)[inside] for name in ("layer", "expert", "file", "at")}
        stored.append(replace(s, **arrays))
        for number in set((s.layer[~inside] - num_layers).tolist()):
            ignored[s.key.replace("{mtp}", str(number))] = mapping.NO_MTP
    stored = [s for s in stored if len(s)]
    held = {name for s in stored for name in s.tensors}
    shapes = {name: shape for name, shape in layout.shapes.items() if name in held}
    return replace(layout, stored=stored, shapes=shapes, ignored=ignored)
