"""A checkpoint understood: which format, which names, which dims, and so which logical tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.errors import MappingError, MckptError, SourceError, UsageError
from mckpt.formats import hf
from mckpt.formats.megatron import torch, torch_dist
from mckpt.formats.megatron.save_directory import MAPPING, Unit, find, is_unit_name
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.storage.files import read_file
from mckpt.storage.staging import MANIFEST, unfinished

CONFIG = "config.json"
RUN_CONFIG = "run_config.yaml"  # what Megatron-Bridge writes instead of args
DIALECT = "mcore"
BRIDGE = "bridge"
Stored = hf.Checkpoint | torch.Checkpoint | torch_dist.Checkpoint


class VocabSizeUnknown(UsageError):
    """Nothing says the true rows of the vocabulary."""


@dataclass(frozen=True)
class Known:
    """What the user says about a checkpoint that may not say it itself.

    Of a Megatron checkpoint `vocab_size` and `settings` win over its args.
    """

    like: str | Path | None = None  # a Hugging Face directory whose config.json describes the model
    family: str | None = None
    mapping: str | None = None  # the user's own family file
    vocab_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # dim -> value
    iteration: int | None = None

    @property
    def dims(self) -> dict[str, Any]:
        """The dims that the user says."""
        return {
            **self.settings,
            **({} if self.vocab_size is None else {"vocab_size": self.vocab_size}),
        }


class Checkpoint(Mapping[str, LogicalTensor]):
    """A checkpoint of any format as its logical tensors:
    `ckpt["layers.3.attn.q.weight"][:8].numpy()` reads those rows and nothing else.
    """

    def __init__(self, path: str | Path, known: Known | None = None) -> None:
        self.path, self.known = Path(path), known or Known()
        if not self.path.exists():
            raise SourceError(f"{self.path}: does not exist{_download(self.path)}")
        if not self.path.is_dir():
            raise SourceError(f"{self.path}: is a file; the directory of a checkpoint is wanted")
        self.unit: Unit | None = None  # of a Megatron save directory
        self.stored = self._open()

    def _open(self) -> Stored:
        if hf.detect(self.path):
            if self.known.iteration is not None:
                raise UsageError(
                    f"{self.path}: is a Hugging Face directory, which has no iterations;"
                    " --iteration has no meaning there"
                )
            return hf.Checkpoint(self.path)
        unit = find(self.path, self.known.iteration)
        assert unit is not None
        self.unit = unit
        if torch_dist.detect(unit.path):
            return torch_dist.Checkpoint(unit.path)
        if torch.detect(unit.path):
            return torch.Checkpoint(unit.path)
        if said := unfinished(self.path):
            raise SourceError(f"{self.path}: no checkpoint is here yet. {said}")
        raise SourceError(
            f"{unit.path}: no checkpoint that mckpt knows: neither safetensors or"
            " pytorch_model*.bin, nor mp_rank_*, nor .metadata with metadata.json"
        )

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def root(self) -> Path:
        """The directory that a destination must keep away from: the save directory, or the
        checkpoint's own.
        """
        return self.unit.root if self.unit and is_unit_name(self.unit.name) else self.path

    @cached_property
    def side_directory(self) -> Path | None:
        """Where a Megatron save directory keeps the Hugging Face files of its model, if it does."""
        if self.unit is None:
            return None
        side = self.unit.root / "hf"
        return side if is_unit_name(self.unit.name) and (side / CONFIG).is_file() else None

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """mckpt.json, if mckpt wrote this checkpoint."""
        return _manifest(self.unit.path if self.unit else self.path)

    @cached_property
    def naming(self) -> Known:
        """Returns what the user says; where the user names no family, with the family file that is
        kept beside the checkpoint, or with the family that its manifest records.

        MappingError if the kept file is not the one that the manifest names.
        """
        # the name of a family that mckpt has
        if self.known.mapping and not self.known.mapping.endswith((".yaml", ".yml")):
            return replace(self.known, mapping=None, family=self.known.mapping)
        if self.known.mapping or self.known.family:
            return self.known
        own = self.path if isinstance(self.stored, hf.Checkpoint) else self.side_directory
        like = Path(self.known.like) if self.known.like else None
        kept = like and _kept_mapping(like, _manifest(like))
        if kept is None and own is not None:
            kept = _kept_mapping(own, self.manifest)
        if kept is not None:
            return replace(self.known, mapping=str(kept))
        family = self.manifest.get("family")
        return replace(self.known, family=family) if family in mapping.names("hf") else self.known

    def named_as(self, other: Checkpoint) -> Checkpoint:
        """Returns this checkpoint; a Hugging Face directory of which mckpt knows no family is read
        with the family file that `other` keeps.
        """
        if (
            isinstance(self.stored, hf.Checkpoint)
            and not self.naming.mapping
            and other.naming.mapping
        ):
            try:
                _ = self.mapping
            except MappingError:
                return Checkpoint(self.path, replace(self.known, mapping=other.naming.mapping))
        return self

    @cached_property
    def allowed(self) -> dict[str, str]:
        """Returns what --allow-inexact let pass when mckpt wrote this checkpoint: name -> why it is
        inexact.
        """
        found = self.manifest.get("inexact")
        return found if isinstance(found, dict) else {}

    @cached_property
    def granted(self) -> dict[str, Any]:
        """Returns the dims that --allow-inexact let pass when mckpt wrote this Megatron checkpoint:
        its args may not be able to say them.
        """
        dims = self.manifest.get("dims")
        if isinstance(self.stored, hf.Checkpoint) or not isinstance(dims, dict):
            return {}
        return {
            n: v
            for n, v in dims.items()
            if n in mapping.hub().dims and (n in self.allowed or "config" in self.allowed)
        }

    @cached_property
    def overruled(self) -> dict[str, Any]:
        """Returns the dims for which the user's word wins over config.json, because the tensors do
        not agree with config.json.

        MappingError if the user denies a dim of config.json that no tensor shows, or that the
        tensors agree with.
        """
        said = self.known.dims
        if not isinstance(self.stored, hf.Checkpoint) or not said:
            return {}
        config, where = self.stored.config, str(self.path / CONFIG)
        try:
            self.mapping.read(config, said, where)
        except MappingError as denied:
            try:
                plain = self.mapping.read(config, {}, where)
            except MappingError:
                raise denied from None
            free = {n for n, spec in self.mapping.dims.items() if spec.free}
            apart = {
                n: v for n, v in said.items() if n not in free and not mapping.equal(plain[n], v)
            }
            shown = self.mapping.stored(plain)
            if any(
                self.mapping.stored(self.mapping.read(config, {}, where, {n: v})) == shown
                for n, v in apart.items()
            ):
                raise
            try:
                self.stored.layout(self.mapping, plain, self.parallel, {})
            except MckptError:
                return apart
            raise
        return {}

    @cached_property
    def notes(self) -> list[str]:
        """Returns sentences on everything that was taken from elsewhere than the user, config.json
        or args, or against them.
        """
        out = []
        unasked = not (self.known.mapping or self.known.family)
        if unasked and self.naming.mapping:
            out.append(
                f"{MAPPING}, the family file that is kept with the checkpoint, is used; --mapping"
                " overrides it"
            )
        if unasked and self.naming.family:
            out.append(
                f"family {self.naming.family} is taken from {MANIFEST}: --family was given when the"
                " checkpoint was made"
            )
        for name, value in self.overruled.items():
            said = ", ".join(
                f"{k} {v!r}"
                for k, v in self.mapping.said_of(name, hf.read_config(self.path)).items()
            )
            out.append(
                f"{name}: config.json says {said}; {value!r} is taken, as --set says and as the"
                " tensors are"
            )
        made = "was given when the checkpoint was made"
        if "config" in self.allowed and self.granted:
            return [*out, f"all dims are those of {MANIFEST}: --allow-inexact config {made}"]
        taken = {n: v for n, v in self.granted.items() if n not in self.known.dims}
        return out + [
            f"{n}: {v!r} is taken from {MANIFEST}: --allow-inexact {n} {made}"
            for n, v in taken.items()
        ]

    @cached_property
    def args(self) -> dict[str, Any] | None:
        """Megatron's args, as plain values; None where there are none."""
        return self.stored.common.args if self.stored.common else None

    @cached_property
    def mapping(self) -> MappingFile:
        """The family (hf) or dialect (Megatron) whose names its keys are."""
        if isinstance(self.stored, hf.Checkpoint):
            return family_of(self.stored.config, self.naming, str(self.path / CONFIG))
        return mapping.load("megatron", DIALECT)

    @cached_property
    def dims(self) -> Dims:
        """Sizes and hyperparameters, from every source that says them; sources that disagree are an
        error, but the user's word wins.
        """
        if isinstance(self.stored, hf.Checkpoint):
            return self.mapping.read(
                self.stored.config, self.known.dims, str(self.path / CONFIG), self.overruled
            )
        return self._megatron_dims(self.known.dims)

    def _megatron_dims(self, said: Mapping[str, Any]) -> Dims:
        root = self.stored.root
        known: dict[str, Any] = {}
        if (described := self.described_by) is not None:
            config = hf.read_config(described)
            where = str(described / CONFIG)
            known = family_of(config, self.naming, where).read(config, {}, where, said)
        granted = {
            n: v for n, v in self.granted.items() if n not in known or mapping.equal(known[n], v)
        }
        recorded = self.manifest.get("dims")
        if isinstance(recorded, dict):
            known = {**recorded, **known}
        if self.args is not None:
            if all(
                v is None
                for v in (
                    self.args.get("vocab_size"),
                    known.get("vocab_size"),
                    said.get("vocab_size"),
                )
            ):
                padded = self.args.get("padded_vocab_size")
                raise VocabSizeUnknown(
                    f"{root}: its args say no true vocab_size"
                    + (f", only the padded {padded}" if padded else "")
                    + "; say --vocab-size N (the tokenizer may be shorter than the model's), or"
                    " --like HF_DIR"
                )
            return self.mapping.read(self.args, known, f"args of {root}", {**granted, **said})
        bridge = root / RUN_CONFIG
        if bridge.exists():
            return mapping.load("megatron", BRIDGE).read(
                _run_config(bridge), known, str(bridge), said
            )
        known.update(said)
        missing = [
            n for n, dim in mapping.hub().dims.items() if n not in known and dim.neutral is None
        ]
        if missing:
            raise UsageError(
                f"{root}: has no args, so nothing says its {', '.join(missing)}; give --like"
                " HF_DIR, a directory whose config.json does"
            )
        neutral = {
            n: dim.neutral(known)
            for n, dim in mapping.hub().dims.items()
            if n not in known and dim.neutral is not None
        }
        return {**known, **neutral}

    def padded(self) -> Checkpoint | None:
        """The same with the vocabulary's padding as part of it: what moves from Megatron to
        Megatron.

        None where it is not stored by rows.
        """
        assert not isinstance(self.stored, hf.Checkpoint)
        rows = self.stored.padded_vocab(self.mapping, self.parallel)
        if rows is None:
            return None
        try:
            dims = self.dims
        except VocabSizeUnknown:
            dims = self._megatron_dims({**self.known.dims, "vocab_size": rows})
        if rows < dims["vocab_size"]:
            raise SourceError(
                f"{self.path}: holds {rows:,} rows of the vocabulary, and vocab_size is"
                f" {dims['vocab_size']:,}"
            )
        return self.with_dims({**dims, "vocab_size": rows})

    def with_dims(self, dims: Dims) -> Checkpoint:
        """The same files, read with these dims."""
        other = object.__new__(Checkpoint)
        other.__dict__.update(
            path=self.path, known=self.known, unit=self.unit, stored=self.stored, dims=dims
        )
        return other

    @property
    def casts(self) -> list[str]:
        """The dtypes that all its tensors were cast to, one after the other, since the first
        source; from its manifests.
        """
        found = self.manifest.get("casts")
        return [str(dtype) for dtype in found] if isinstance(found, list) else []

    @property
    def quantised(self) -> bool:
        """Whether config.json says that weights are stored in 8 bits with scales."""
        return isinstance(self.stored, hf.Checkpoint) and self.stored.block is not None

    @property
    def described_by(self) -> Path | None:
        """The Hugging Face directory that describes the model: this one, or of a Megatron
        checkpoint --like, else DST/hf.
        """
        if self.format == "hf":
            return self.path
        return Path(self.known.like) if self.known.like else self.side_directory

    @cached_property
    def parallel(self) -> Parallel:
        """The sizes it was saved with."""
        return self.stored.parallel()

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """The dialect's choices as this checkpoint made them."""
        self._check_sizes()
        return self.stored.choices(
            self.mapping, self.dims, self.parallel, self.mapping.say_choices(self.args or {})
        )

    @cached_property
    def layout(self) -> Layout:
        """What is stored where."""
        return self.stored.layout(self.mapping, self.dims, self.parallel, self.chosen)

    def _check_sizes(self) -> None:
        if self.format == "torch":
            try:
                self.parallel.check(self.dims["num_experts"])
                self.parallel.stages(self.dims["num_layers"], self.dims["mtp_layers"])
            except UsageError as e:
                raise SourceError(
                    f"{self.path}: its sizes ({self.parallel}) do not fit its model: {e}"
                ) from None

    def left_behind(self) -> list[str]:
        """What it holds that is no weight: optimizer, random states, schedules."""
        return self.stored.beside(self.mapping)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.layout)

    def __getitem__(self, name: str) -> LogicalTensor:
        return self.reader[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader)

    def __len__(self) -> int:
        return self.layout.num_tensors

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "known": self.known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # opened anew: a pickle of open headers would be large
        self.__dict__.update(Checkpoint(**state).__dict__)


def _download(path: Path) -> str:
    """Returns how to get a model whose name on the Hugging Face hub this may be; nothing for what
    looks like a path.
    """
    name = str(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or path.parent.exists():
        return ""
    return (
        f"; a model of that name on the Hugging Face hub is fetched with `hf download {name}"
        f" --local-dir {path.name}`"
    )


def _manifest(directory: Path) -> dict[str, Any]:
    """Returns a directory's mckpt.json; {} if there is none."""
    path = directory / MANIFEST
    if not path.exists():
        return {}
    try:
        found = json.loads(read_file(path, 1 << 28))
    except ValueError as e:
        raise SourceError(f"{path}: no JSON: {e}") from None
    return found if isinstance(found, dict) else {}


def _kept_mapping(directory: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Returns the family file kept in a directory, if any.

    MappingError if it is not the one that the checkpoint's manifest names.
    """
    path, recorded = directory / MAPPING, manifest.get("mapping_file")
    wanted = recorded.get("digest") if isinstance(recorded, dict) else None
    cure = "put back the file with which the checkpoint was made, or say --mapping FILE"
    if not path.is_file():
        if wanted is not None and directory.is_dir():
            raise MappingError(
                f"{path}: is not there, and {MANIFEST} names it with the digest {wanted}; {cure}"
            )
        return None
    found = mapping.digest_of(read_file(path, 1 << 24).decode("utf-8", "replace"))
    if wanted not in (None, found):
        raise MappingError(
            f"{path}: has the digest {found}, and {MANIFEST} names it with {wanted}; {cure}"
        )
    return path


def _run_config(path: Path) -> dict[str, Any]:
    """The model section of a run_config.yaml; its tags of Python objects are read as
    plain values.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return (
            loader.construct_sequence(node, deep=True)
            if isinstance(node, yaml.SequenceNode)
            else getattr(node, "value", None)
        )

    Loader.add_multi_constructor("", plain)
    try:
        found = yaml.load(read_file(path, 1 << 24), Loader)  # a SafeLoader: nothing is imported
    except yaml.YAMLError as e:
        raise SourceError(f"{path}: no YAML: {e}") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict):
        raise SourceError(f"{path}: has no `model` section")
    return model


def family_of(config: Mapping[str, Any], known: Known, where: str) -> MappingFile:
    """The family that the user names, or that the config's architectures do."""
    if known.mapping:
        return mapping.load("hf", known.mapping)
    if known.family:
        return mapping.load("hf", known.family)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise MappingError(
            f"{where}: names no architectures; say --family with one of"
            f" {', '.join(mapping.names('hf'))}"
        )
    try:
        return mapping.load("hf", mapping.family_of(str(architectures[0])))
    except MappingError as e:
        raise MappingError(f"{where}: {e}") from None
