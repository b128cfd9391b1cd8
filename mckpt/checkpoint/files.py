"""An opened checkpoint: its directory, its format, and the files that lie beside its tensors."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt import formats
from mckpt.errors import MckptError, SourceError, UsageError, counted, shown
from mckpt.formats import foreign, places
from mckpt.formats.base import FAMILY, Format, Opened
from mckpt.formats.hf_config import (
    ADAPTER,
    CONFIG,
    FAST_TOKENIZER,
    described_in,
    has_tokenizer,
    is_side_file,
    side_files,
)
from mckpt.formats.megatron.interface import Common, as_megatron
from mckpt.formats.megatron.save_directory import (
    MAPPING,
    TOKENIZER_DIRECTORY,
    VERL_HF,
    VERL_WEIGHTS,
    IterationDirectory,
    find,
    is_iteration_name,
    is_save_directory,
    iteration_of,
    verl_hf,
    verl_weights,
)
from mckpt.options import SourceOptions
from mckpt.storage import manifest, sparse_copy
from mckpt.storage.files import read_file
from mckpt.storage.manifest import Manifest, Recorded
from mckpt.storage.staging import refuse_half_sent, unfinished

# checkpoints that an error names, and directories among which it looks for them
MOST_SHOWN, MOST_LOOKED_AT = 6, 200


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint of any format, of which only the headers are read.

    `open_files` makes it.
    """

    path: Path  # a local directory; a temporary one in place of a URL
    options: SourceOptions  # the user's description, in which `like` is a local directory
    iteration_directory: IterationDirectory | None  # of a Megatron checkpoint
    opened: Opened

    @property
    def is_megatron(self) -> bool:
        """Returns True for a Megatron checkpoint, False for a Hugging Face directory."""
        return self.opened.format.megatron

    @property
    def save_directory(self) -> Path | None:
        """Returns the save directory of a Megatron checkpoint whose directory has the name of an
        iteration or of a release; else None.
        """
        own = self.iteration_directory
        return own.root if own is not None and is_iteration_name(own.name) else None

    @property
    def iteration(self) -> int | None:
        """Returns the iteration in the name of a Megatron checkpoint's directory; None if the name
        has none.
        """
        own = self.iteration_directory
        return iteration_of(own.name) if own is not None and self.save_directory else None

    @property
    def root(self) -> Path:
        """Returns the directory that no destination may overlap: the save directory, or the
        directory of the checkpoint itself.
        """
        return self.save_directory or self.path

    @cached_property
    def hf_directory(self) -> Path | None:
        """Returns the directory `hf` with the Hugging Face files of the model: inside a Megatron
        checkpoint, where Megatron-Bridge and NeMo-RL write it, else in the save directory. For verl
        it is the directory `huggingface` beside the weights. None if it is missing.
        """
        own = self.iteration_directory
        parents = [own.path if own else None, self.save_directory]
        sides = [parent / "hf" for parent in parents if parent is not None]
        if own and own.name == VERL_WEIGHTS:
            sides.append(own.root / VERL_HF)
        if self.opened.format.trainer == FAMILY:
            sides.append(described_in(self.path))
        return next((side for side in sides if (side / CONFIG).is_file()), None)

    @cached_property
    def tokenizer_directory(self) -> Path | None:
        """Returns the directory `tokenizer` in a Megatron checkpoint, in which the training saved
        its tokenizer; None if it is missing or has none that Hugging Face reads.
        """
        own = self.iteration_directory
        found = own.path / TOKENIZER_DIRECTORY if own is not None else None
        if found is None or not found.is_dir():
            return None
        names = side_files(found).kept
        if FAST_TOKENIZER in names:
            # Megatron copies the vocabulary of TikTokenizer, which is a list, to this name
            return found if read_file(found / FAST_TOKENIZER).lstrip()[:1] == b"{" else None
        return found if has_tokenizer(names) else None

    @property
    def side_directory(self) -> Path | None:
        """Returns the directory with config.json, the tokenizer and the other files that a
        conversion copies: the Hugging Face directory itself, the one that a training put into it,
        or `hf_directory`.
        """
        return self.hf_directory if self.is_megatron else described_in(self.path)

    @property
    def described_by(self) -> Path | None:
        """Returns the Hugging Face directory whose config.json describes the model: the checkpoint
        itself, or for a Megatron checkpoint --like, else `hf_directory`.
        """
        like = self.options.like if self.is_megatron else None
        return Path(like) if like else self.side_directory

    @cached_property
    def manifest(self) -> Manifest:
        """Returns the content of mckpt.json; {} if mckpt did not write this checkpoint."""
        return manifest.read(
            self.iteration_directory.path if self.iteration_directory else self.path
        )

    @property
    def recorded_side(self) -> dict[str, Recorded]:
        """Returns what the manifest records of the files that are copied beside the weights: their
        bytes and checksums, by name. Without the family file, which has a digest of its own.
        """
        names = self.manifest.get("hf", {}) if self.is_megatron else self.manifest.get("files", {})
        return {n: f for n, f in names.items() if n == CONFIG or (is_side_file(n) and n != MAPPING)}

    @property
    def inexact(self) -> dict[str, str]:
        """Returns the differences that --allow-inexact accepted when mckpt wrote this checkpoint:
        name -> reason.
        """
        return self.manifest.get("inexact", {})

    @property
    def casts(self) -> list[str]:
        """Returns the dtypes to which all tensors were cast since the first source, in order, as
        recorded in the manifests.
        """
        return self.manifest.get("casts", [])

    @property
    def from_hugging_face(self) -> bool:
        """Returns whether the manifest records a conversion from a Hugging Face directory."""
        return self.manifest.get("source", {}).get("format") in formats.names(megatron=False)

    @property
    def common(self) -> Common | None:
        """Returns Megatron's args and other plain values; None for a Hugging Face directory."""
        megatron = as_megatron(self.opened)
        return megatron.common if megatron else None

    @property
    def args(self) -> dict[str, Any] | None:
        """Returns Megatron's args as plain values; None if the checkpoint has none."""
        return self.common.args if self.common else None

    @property
    def training(self) -> CheckpointFiles | None:
        """Returns the same checkpoint with the optimizer that lies beside its weights, if these are
        in the names of Hugging Face; else None.
        """
        if self.is_megatron:
            return None
        from mckpt.formats.megatron import fsdp_training, verl_training

        known = (fsdp_training.FORMAT, verl_training.FORMAT)
        found = next((format for format in known if format.detect(self.path)), None)
        return replace(self, opened=found.open(self.path)) if found else None

    def __reduce__(self) -> tuple[Any, ...]:
        # opened anew: a pickle of open headers would be large
        like = self.options.like and shown(str(self.options.like))
        opened = shown(str(self.path)), self.options.with_(like=like)
        training = self.opened.format.name not in formats.FORMATS
        return (open_training if training else open_files), opened


def open_files(path: str | Path, options: SourceOptions) -> CheckpointFiles:
    """Opens a checkpoint of any format and reads its headers.

    path: a directory, a name on the Hugging Face Hub such as "org/name@revision", which is
        downloaded, or a URL, of which only the needed bytes are downloaded.

    Raises SourceError if no checkpoint is there or if it is damaged, and UsageError if `options`
    name an iteration that it cannot have.
    """
    local = places.local(path)
    if options.like is not None:
        options = options.with_(like=places.local(options.like, weights=False))
    if not local.exists():
        raise SourceError(f"{local}: does not exist{places.hint(local)}")
    sparse_copy.refuse_empty(local)
    if not local.is_dir():
        other = foreign.program_of(local)
        raise SourceError(other or f"{local}: is a file; give the directory of a checkpoint")
    format, named = formats.detect(local, megatron=False), (local, options.iteration)
    others = format is None and not is_save_directory(local) and verl_weights(*named) is None
    hf = verl_hf(*named) if others else None
    if hf and (format := formats.detect(hf, megatron=False)):
        local, options = hf, options.with_(iteration=None)
    if format is not None:
        if options.iteration is not None:
            raise UsageError(
                f"{local}: is a Hugging Face directory, which has no iterations;"
                " --iteration has no meaning there"
            )
        refuse_half_sent(local)
        return CheckpointFiles(local, options, None, _hugging_face(local, format))
    if others and (other := foreign.program_of(local)):
        raise SourceError(other)
    directory = find(*named)
    refuse_half_sent(directory.path)
    places.ready(local, directory.path)
    format = formats.detect(directory.path, megatron=True)
    if format is not None:
        if format.name == formats.MEGATRON and directory.name == VERL_WEIGHTS:
            return _of_verl(local, options, directory)
        return CheckpointFiles(local, options, directory, format.open(directory.path))
    if state := unfinished(local):
        raise SourceError(f"{local}: no checkpoint is here yet. {state}")
    refuse_parent(local)
    raise SourceError(
        f"{directory.path}: no checkpoint that mckpt knows: neither"
        f" {', nor '.join(formats.get(name).seen_as for name in formats.FORMATS)}, nor"
        f" {ADAPTER[0]} of an adapter"
    )


def _of_verl(local: Path, options: SourceOptions, directory: IterationDirectory) -> CheckpointFiles:
    """Opens what verl saved in torch_dist, or the Hugging Face directory beside an optimizer."""
    from mckpt.formats.megatron.verl_training import VerlTorchDist

    opened, beside = VerlTorchDist(directory.path), directory.path.parent / VERL_HF
    if not opened.has_weights and (format := formats.detect(beside, megatron=False)):
        options = options.with_(iteration=None)
        return CheckpointFiles(beside, options, None, _hugging_face(beside, format))
    return CheckpointFiles(local, options, directory, opened)


def _hugging_face(local: Path, format: Format) -> Opened:
    """Opens a Hugging Face directory, which may be the weights of a training."""
    if local.name == VERL_HF:
        from mckpt.formats.megatron import verl_training

        if verl_training.detect(local):
            return verl_training.VerlTraining(local, trained=False)
    return format.open(local)


def open_training(path: str | Path, options: SourceOptions) -> CheckpointFiles:
    """Opens a checkpoint as `open_files`, with the optimizer beside its weights."""
    files = open_files(path, options)
    return files.training or files


def refuse_parent(folder: Path) -> None:
    """Raises SourceError for the parent of checkpoints or of adapters, such as the named ones that
    PEFT saves into one directory.
    """
    if below := _checkpoints_below(folder):
        every = all((path / ADAPTER[0]).is_file() for path in below)
        kind = "adapter" if every else "checkpoint"
        raise SourceError(
            f"{folder}: is not {'an' if every else 'a'} {kind}, but has"
            f" {counted(len(below), kind)} below it; give"
            f" {' or '.join(map(str, below[:MOST_SHOWN]))}"
            + f" ({len(below) - MOST_SHOWN:,} more)"
            * (len(below) > MOST_SHOWN)
        )


def _checkpoints_below(folder: Path) -> list[Path]:
    """Returns the directories in a local directory that are checkpoints, save directories or
    adapters.
    """
    if sparse_copy.of(folder) is not None or not folder.is_dir():
        return []
    inner = itertools.islice((p for p in folder.iterdir() if p.is_dir()), MOST_LOOKED_AT)
    return [path for path in sorted(inner) if _is_checkpoint(path)]


def _is_checkpoint(folder: Path) -> bool:
    with suppress(OSError, MckptError):
        return (
            (folder / ADAPTER[0]).is_file()
            or is_save_directory(folder)
            or formats.detect(folder, megatron=False) is not None
            or formats.detect(folder, megatron=True) is not None
        )
    return False
