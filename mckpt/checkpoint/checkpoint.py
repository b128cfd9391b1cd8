"""A checkpoint of any format, with its mapping, its dims and its logical tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt import formats, mapping
from mckpt.checkpoint import description, masters
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.checkpoint.source_options import SourceOptions
from mckpt.errors import (
    CoverError,
    MappingError,
    MckptError,
    SourceError,
    UsageError,
    shown,
)
from mckpt.formats import carried, foreign, hf_hub, places
from mckpt.formats.base import Names, Opened
from mckpt.formats.hf_config import CONFIG, is_side_file, read_config
from mckpt.formats.megatron.common_state import Common
from mckpt.formats.megatron.interface import as_megatron
from mckpt.formats.megatron.optimizer import Optimizer
from mckpt.formats.megatron.run_config import (
    RUN_CONFIG,
    mapping_file,
    read_model,
    run_config_dims,
)
from mckpt.formats.megatron.save_directory import (
    MAPPING,
    IterationDirectory,
    find,
    is_iteration_name,
    is_save_directory,
    iteration_of,
)
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, ExpressionError, MappingFile
from mckpt.storage import manifest, sparse_copy
from mckpt.storage.manifest import Manifest, Recorded
from mckpt.storage.staging import MANIFEST, refuse_half_sent, unfinished


class Checkpoint(Mapping[str, LogicalTensor]):
    """A checkpoint of any format, as a mapping of its logical tensors.

    A path `org/name[@revision]` that is not here is downloaded from the Hugging Face Hub. Of a URL
    such as s3://bucket/path, only the bytes that are needed are downloaded.

    `ckpt["layers.3.attn.q.weight"][:8].numpy()` reads those rows and nothing else.
    """

    def __init__(self, path: str | Path, known: SourceOptions | None = None) -> None:
        self.known = known or SourceOptions()
        self.path = places.local(path)
        if self.known.like is not None:
            self.known = replace(self.known, like=places.local(self.known.like, weights=False))
        if not self.path.exists():
            raise SourceError(f"{self.path}: does not exist{hf_hub.hint(self.path)}")
        sparse_copy.refuse_empty(self.path)
        if not self.path.is_dir():
            other = foreign.program_of(self.path)
            raise SourceError(
                other or f"{self.path}: is a file; give the directory of a checkpoint"
            )
        self.iteration_directory: IterationDirectory | None = (
            None  # set only for a Megatron save directory
        )
        self._dims: Dims | None = None  # set by `with_dims`
        self._borrows = False  # set by `borrowing`
        self._with_optimizer = False  # set by `with_optimizer`
        self.opened = self._open()

    def _open(self) -> Opened:
        if (found := formats.detect(self.path, megatron=False)) is not None:
            if self.known.iteration is not None:
                raise UsageError(
                    f"{self.path}: is a Hugging Face directory, which has no iterations;"
                    " --iteration has no meaning there"
                )
            refuse_half_sent(self.path)
            return found.open(self.path)
        if not is_save_directory(self.path) and (other := foreign.program_of(self.path)):
            raise SourceError(other)
        self.iteration_directory = find(self.path, self.known.iteration)
        refuse_half_sent(self.iteration_directory.path)
        places.ready(self.path, self.iteration_directory.path)
        if (found := formats.detect(self.iteration_directory.path, megatron=True)) is not None:
            return found.open(self.iteration_directory.path)
        if said := unfinished(self.path):
            raise SourceError(f"{self.path}: no checkpoint is here yet. {said}")
        raise SourceError(
            f"{self.iteration_directory.path}: no checkpoint that mckpt knows: neither"
            f" {', nor '.join(formats.get(name).seen_as for name in formats.FORMATS)}"
        )

    @property
    def format(self) -> str:
        """Returns the name of the format."""
        return self.opened.format.name

    @property
    def is_megatron(self) -> bool:
        """Returns True for a Megatron checkpoint, False for a Hugging Face directory."""
        return self.opened.format.megatron

    @property
    def iteration(self) -> int | None:
        """Returns the iteration in the name of a Megatron checkpoint's directory; None if the name
        has none.
        """
        named = self.iteration_directory is not None and is_iteration_name(
            self.iteration_directory.name
        )
        return (
            iteration_of(self.iteration_directory.name)
            if self.iteration_directory and named
            else None
        )

    @property
    def root(self) -> Path:
        """Returns the directory that no destination may overlap: the save directory, or the
        directory of the checkpoint itself.
        """
        return (
            self.iteration_directory.root
            if self.iteration_directory and is_iteration_name(self.iteration_directory.name)
            else self.path
        )

    @cached_property
    def side_directory(self) -> Path | None:
        """Returns the directory `hf` with the Hugging Face files of the model: inside a Megatron
        checkpoint, where Megatron-Bridge and NeMo-RL write it, else in the save directory. None if
        it is missing.
        """
        if self.iteration_directory is None:
            return None
        saved = (
            [self.iteration_directory.root / "hf"]
            if is_iteration_name(self.iteration_directory.name)
            else []
        )
        sides = [self.iteration_directory.path / "hf", *saved]
        return next((side for side in sides if (side / CONFIG).is_file()), None)

    @property
    def recorded_side(self) -> dict[str, Recorded]:
        """Returns what the manifest records of the files that are copied beside the weights: their
        bytes and checksums, by name. Without the family file, which has a digest of its own.
        """
        names = self.manifest.get("hf", {}) if self.is_megatron else self.manifest.get("files", {})
        return {n: f for n, f in names.items() if n == CONFIG or (is_side_file(n) and n != MAPPING)}

    @cached_property
    def manifest(self) -> Manifest:
        """Returns the content of mckpt.json; {} if mckpt did not write this checkpoint."""
        return manifest.read(
            self.iteration_directory.path if self.iteration_directory else self.path
        )

    @cached_property
    def named(self) -> SourceOptions:
        """Returns the user's description. If it names no family, the result has the family file
        kept beside the checkpoint, or the family that its manifest records.

        Raises MappingError if the kept file is not the one that the manifest names.
        """
        # --mapping may also give the name of a family that mckpt has
        if self.known.mapping and not self.known.mapping.endswith((".yaml", ".yml")):
            return replace(self.known, mapping=None, family=self.known.mapping)
        if self.known.mapping or self.known.family:
            return self.known
        own = self.side_directory if self.is_megatron else self.path
        like = Path(self.known.like) if self.known.like else None
        kept = like and description.kept_mapping(like, manifest.read(like))
        if kept is None and own is not None:
            kept = description.kept_mapping(own, self.manifest)
        if kept is not None:
            return replace(self.known, mapping=str(kept))
        family = self.manifest.get("family")
        return replace(self.known, family=family) if family in mapping.names("hf") else self.known

    def named_as(self, other: Checkpoint) -> Checkpoint:
        """Returns this checkpoint. If it is a Hugging Face directory without a known family, reads
        it with the family file that `other` keeps.
        """
        if not self.is_megatron and not self.named.mapping and other.named.mapping:
            try:
                _ = self.mapping
            except MappingError:
                return Checkpoint(self.path, replace(self.known, mapping=other.named.mapping))
        return self

    @cached_property
    def allowed(self) -> dict[str, str]:
        """Returns the differences that --allow-inexact accepted when mckpt wrote this checkpoint:
        name -> reason.
        """
        return self.manifest.get("inexact", {})

    @cached_property
    def granted(self) -> dict[str, Any]:
        """Returns the dims that --allow-inexact accepted when mckpt wrote this Megatron checkpoint.
        Its args may be unable to express them.
        """
        return {
            n: v
            for n, v in (self._recorded if self.is_megatron else {}).items()
            if n in mapping.schema().dims and (n in self.allowed or "config" in self.allowed)
        }

    @cached_property
    def unstored(self) -> dict[str, Any]:
        """Returns the dims of a Hugging Face directory that are neutral although config.json, or
        its default, has another value: the tensor that they require is not there.
        """
        if self.is_megatron:
            return {}
        found = description.unstored(self.mapping, read_config(self.path), set(self.opened.keys()))
        return {name: value for name, value in found.items() if name not in self.known.dims}

    @cached_property
    def overruled(self) -> dict[str, Any]:
        """Returns the dims that replace those of config.json, because the tensors contradict it:
        those that the user sets, and `unstored`.

        Raises MappingError if the user contradicts a dim of config.json on which no tensor depends,
        or with which the tensors agree.
        """
        said, unstored = self.known.dims, self.unstored
        if self.is_megatron or not said:
            return unstored
        config, where = read_config(self.path), str(self.path / CONFIG)
        try:
            self.mapping.read(config, said, where, unstored)
        except MappingError as denied:
            try:
                plain = self.mapping.read(config, {}, where, unstored)
            except MappingError:
                raise denied from None
            free = {n for n, spec in self.mapping.dims.items() if spec.free}
            apart = {
                n: v for n, v in said.items() if n not in free and not mapping.equal(plain[n], v)
            }
            if not apart:
                raise
            if self.known.trusted:
                return {**unstored, **apart}
            shown = self.mapping.stored(plain)
            invisible = {
                n: v
                for n, v in apart.items()
                if self.mapping.stored(self.mapping.read(config, {}, where, {**unstored, n: v}))
                == shown
            }
            if invisible:
                raise self._contradiction(
                    invisible, plain, "no shape of a tensor depends on it"
                ) from None
            try:
                layout = self.opened.layout(Names(self.mapping, plain, {}, self.parallel))
            except MckptError:
                return {**unstored, **apart}
            if Reader(layout).check_replicas():  # such as an output layer that is not tied
                return {**unstored, **apart}
            raise self._contradiction(apart, plain, "the tensors agree with it") from None
        return unstored

    def _contradiction(self, apart: Mapping[str, Any], plain: Dims, why: str) -> MappingError:
        sized = () if self.known.vocab_size is None else ("vocab_size",)
        return description.contradiction(self.path, self.mapping, apart, plain, why, sized)

    @cached_property
    def notes(self) -> list[str]:
        """Returns a sentence for each fact that does not come from the user, config.json or args,
        or that contradicts them.
        """
        out = list(self.opened.notes)
        unasked = not (self.known.mapping or self.known.family)
        if unasked and self.named.mapping:
            out.append(
                f"{MAPPING}, the family file that is kept with the checkpoint, is used; --mapping"
                " overrides it"
            )
        if unasked and self.named.family:
            out.append(
                f"family {self.named.family} is taken from {MANIFEST}: --family was given when the"
                " checkpoint was made"
            )
        undescribed = self.is_megatron and self.args is None and self.described_by is None
        bridge = (self.opened.root / RUN_CONFIG).exists()
        if undescribed and not bridge and self._recorded:
            out.append(f"the checkpoint has no args: the dims are taken from {MANIFEST}")
        for name, value in self.overruled.items():
            tensor = self.mapping.dims[name].tensor if name in self.unstored else None
            out.append(
                description.overruled(self.mapping, read_config(self.path), name, value, tensor)
            )
        if self.unknown_args:
            listed = ", ".join(f"{name} {value!r:.80}" for name, value in self.unknown_args.items())
            out.append(f"its args have names that mckpt does not know: {listed}")
        made = "was given when the checkpoint was made"
        if "config" in self.allowed and self.granted:
            return [*out, f"all dims are those of {MANIFEST}: --allow-inexact config {made}"]
        taken = {n: v for n, v in self.granted.items() if n not in self.known.dims}
        return out + [
            f"{n}: {v!r} is taken from {MANIFEST}: --allow-inexact {n} {made}"
            for n, v in taken.items()
        ]

    @property
    def common(self) -> Common | None:
        """Returns Megatron's args and other plain values; None for a Hugging Face directory."""
        megatron = as_megatron(self.opened)
        return megatron.common if megatron else None

    @cached_property
    def args(self) -> dict[str, Any] | None:
        """Returns Megatron's args as plain values; None if the checkpoint has none."""
        return self.common.args if self.common else None

    @cached_property
    def unknown_args(self) -> dict[str, Any]:
        """Returns the args, or entries of run_config.yaml, that no Megatron known to mckpt has, and
        their values.
        """
        if not self.is_megatron:
            return {}
        if self.args is not None:
            return mapping.unknown_args(self.mapping, self.args)
        path, file = self.opened.root / RUN_CONFIG, mapping_file(self.mapping)
        return mapping.unknown_args(file, read_model(path)) if file and path.exists() else {}

    @cached_property
    def mapping(self) -> MappingFile:
        """Returns the family (Hugging Face) or dialect (Megatron) that names the stored keys."""
        if self.is_megatron:
            return mapping.dialect_of(self.opened.keys(), self.named.mapping)
        return self._family(self.path)

    def _family(self, described: Path) -> MappingFile:
        """Returns the family of the model that the config.json of a directory describes."""
        config, named = read_config(described), self.named.family_name
        keys = self._described_keys
        form = None
        if not self.is_megatron:
            keys = list(self.opened.keys())
        elif keys is None:
            keys, form = carried.keys(described), self.manifest.get("form")
        return description.family_for(config, named, str(described / CONFIG), keys, form)

    @cached_property
    def _described_keys(self) -> Collection[str] | None:
        """The stored keys in the directory that describes a Megatron checkpoint; None if it has no
        weights, as only that of --like may have.
        """
        if self.known.like is None:
            return None
        like = Path(self.known.like)
        weights = formats.detect(like, megatron=False)
        return None if weights is None else set(weights.open(like).keys())

    @cached_property
    def dims(self) -> Dims:
        """Returns the sizes and hyperparameters of the model, from all sources that have them.

        The user's values replace others. Raises MappingError if other sources disagree.
        """
        if self._dims is not None:
            return self._dims
        if self.is_megatron:
            return self._megatron_dims(self.known.dims)
        return self._read_config(self.path, self.known.dims, self.overruled)

    @cached_property
    def family(self) -> MappingFile | None:
        """Returns the family of the model; None if no config.json describes a Megatron
        checkpoint.
        """
        return None if self.described_by is None else self._family(self.described_by)

    def _read_config(
        self, described: Path, known: Mapping[str, Any], override: Mapping[str, Any]
    ) -> Dims:
        """Returns the dims that the config.json of a directory describes."""
        family, where = self._family(described), str(described / CONFIG)
        try:
            return family.read(read_config(described), known, where, override, "--set")
        except MappingError as e:
            hint = self._family_hint(described)
            raise (e.with_hint(hint) if hint else e) from None

    def _family_hint(self, described: Path | None) -> str:
        option = "--mapping" if self.known.mapping else "--family"
        return description.family_hint(described, option, self.known.family_name)

    def _megatron_dims(self, said: Mapping[str, Any]) -> Dims:
        """The dims of a Megatron checkpoint, from its args, else from run_config.yaml, else from
        what is known without them.

        said: dims that win over all others.
        """
        root, described, recorded = self.opened.root, self._described_dims(said), self._recorded
        known = {**recorded, **described}
        if self.args is not None:
            description.require_vocab_size(root, self.mapping, self.args, known, said)
            granted = {
                n: v
                for n, v in self.granted.items()
                if n not in described or mapping.equal(described[n], v)
            }
            described_by = self.described_by
            known_from = MANIFEST if described_by is None else str(described_by / CONFIG)
            try:
                return self.mapping.read(
                    self.args, known, f"args of {root}", {**granted, **said}, known_from
                )
            except MappingError as e:
                hint = self._family_hint(described_by)
                raise (e.with_hint(hint) if hint else e) from None
        bridge = root / RUN_CONFIG
        if bridge.exists() and (file := mapping_file(self.mapping)) is not None:
            return run_config_dims(bridge, file, known, said)
        return description.completed(root, {**known, **said})

    def _described_dims(self, said: Mapping[str, Any]) -> Mapping[str, Any]:
        """The dims of the config.json that describes a Megatron checkpoint; none without one."""
        if (described := self.described_by) is None:
            return {}
        # A directory with weights, as of --like, may lack some that its config.json describes.
        keys = self._described_keys
        family, config = self._family(described), read_config(described)
        lacks = {} if keys is None else description.unstored(family, config, keys)
        return self._read_config(described, {}, {**lacks, **said})

    @property
    def _recorded(self) -> dict[str, Any]:
        """The dims that its manifest records; none without one."""
        return self.manifest.get("dims", {})

    def padded(self) -> Checkpoint | None:
        """Returns the same checkpoint with the padding rows as part of the vocabulary, for a
        conversion from Megatron to Megatron; None if the embedding is not stored by rows.
        """
        rows = self.opened.padded_vocab(self.mapping)
        if rows is None:
            return None
        try:
            dims = self.dims
        except description.VocabSizeUnknown:
            dims = self._megatron_dims({**self.known.dims, "vocab_size": rows})
        if rows < dims["vocab_size"]:
            raise SourceError(
                f"{self.path}: holds {rows:,} rows of the vocabulary, and vocab_size is"
                f" {dims['vocab_size']:,}"
            )
        return self.with_dims({**dims, "vocab_size": rows})

    def with_dims(self, dims: Dims) -> Checkpoint:
        """Returns the same files, read with these dims."""
        return self._again(_dims=dims)

    def borrowing(self) -> Checkpoint:
        """Returns the same checkpoint, which takes from --like the tensors that are not in
        Megatron's model, if DST/hf does not have them. A conversion does so; a comparison would
        compare such tensors with themselves.
        """
        return self._again(_borrows=True)

    def with_optimizer(self) -> Checkpoint:
        """Returns the same checkpoint, whose layout has the optimizer's state of each weight too,
        as logical tensors WEIGHT@STATE.
        """
        return self._again(_with_optimizer=True)

    def _again(self, **changed: Any) -> Checkpoint:
        other = object.__new__(type(self))
        own = (
            "path",
            "known",
            "iteration_directory",
            "opened",
            "_dims",
            "_borrows",
            "_with_optimizer",
        )
        other.__dict__.update({name: getattr(self, name) for name in own} | changed)
        return other

    @property
    def from_hugging_face(self) -> bool:
        """Returns whether the manifest records a conversion from a Hugging Face directory."""
        return self.manifest.get("source", {}).get("format") in formats.names(megatron=False)

    @property
    def casts(self) -> list[str]:
        """Returns the dtypes to which all tensors were cast since the first source, in order, as
        recorded in the manifests.
        """
        return self.manifest.get("casts", [])

    @property
    def quantised(self) -> bool:
        """Returns whether config.json describes quantised weights that mckpt reads."""
        return self.opened.quantised

    @property
    def described_by(self) -> Path | None:
        """Returns the Hugging Face directory that describes the model: this one, or for a Megatron
        checkpoint --like, else DST/hf.
        """
        if not self.is_megatron:
            return self.path
        return Path(self.known.like) if self.known.like else self.side_directory

    @cached_property
    def parallel(self) -> Parallel:
        """Returns the parallel sizes with which the checkpoint was saved."""
        found = self.opened.parallel()
        if self.args is None or self.mapping.stage_sizes is None:
            return found
        try:
            sizes = self.mapping.stage_sizes({"config": self.args})
            return found if sizes is None else found.with_stage_sizes(sizes)
        except (ExpressionError, UsageError) as e:
            raise SourceError(f"{self.path}: its args do not fit its pipeline: {e}") from None

    @cached_property
    def names(self) -> Names:
        """Returns the mapping, dims and choices that turn stored keys into logical tensors."""
        stated = self.common.stated if self.common else {}
        dims, said = self.dims, self.mapping.say_choices(stated)
        self._check_sizes(dims)
        names = Names(self.mapping, dims, said, self.parallel)
        return names._replace(choices=self.opened.choices(names))

    @cached_property
    def layout(self) -> Layout:
        """Returns the logical box that each stored tensor holds."""
        try:
            found = self.opened.layout(self.names)
            description.refuse_changed(self.opened.root, self.manifest)
            if self._with_optimizer and (kept := self.optimizer) is not None:
                found = carried.joined(found, kept.layout)
                used = {k: why for k, why in found.ignored.items() if k not in kept.keys}
                found = replace(found, ignored=used)
            return found if self.carried is None else carried.joined(found, self.carried)
        except (SourceError, CoverError) as e:
            hints = []
            if self.known.dims:
                given = ", ".join(f"{name} {value!r}" for name, value in self.known.dims.items())
                hints.append(
                    f"--set or --vocab-size gave {given}: correct or leave out what is wrong."
                )
            if hint := self._family_hint(self.described_by):
                hints.append(hint)
            raise (e.with_hint(*hints) if hints else e) from None

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
        if not self.is_megatron:
            return None
        like = Path(self.known.like) if self.known.like and self._borrows else None
        return carried.found(like, self.side_directory, self.family, self.manifest.get("carried"))

    def _check_sizes(self, dims: Dims) -> None:
        if self.opened.format.fixed_sizes:
            try:
                self.parallel.check(dims["num_experts"])
                self.parallel.split(self.mapping.num_numbers(dims), dims["mtp_layers"])
            except UsageError as e:
                raise SourceError(
                    f"{self.path}: its sizes ({self.parallel}) do not fit its model: {e}"
                ) from None

    def left_behind(self) -> list[str]:
        """Returns the names of everything stored that is not a weight: optimizer, random states,
        schedules.
        """
        return self.opened.beside(self.mapping)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.layout)

    def tensors(self) -> Mapping[str, LogicalTensor]:
        """Returns the logical tensors by name, which are those of the checkpoint as a mapping."""
        return self.reader

    def __getitem__(self, name: str) -> LogicalTensor:
        return self.reader[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader)

    def __len__(self) -> int:
        return self.layout.num_tensors

    def __getstate__(self) -> dict[str, Any]:
        names = ("_dims", "_borrows", "_with_optimizer")
        like = self.known.like and shown(str(self.known.like))
        place = {"path": shown(str(self.path)), "known": replace(self.known, like=like)}
        return {name: getattr(self, name) for name in names} | place

    def __setstate__(self, state: dict[str, Any]) -> None:
        # opened anew: a pickle of open headers would be large
        made = Checkpoint(state.pop("path"), state.pop("known"))
        self.__dict__.update(made.__dict__ | state)
