"""What a disk format is, and what every format shares: rules as packed tensors, and buffers grouped
by geometry.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mckpt.containers.entries import Entry, Kind
from mckpt.errors import CoverError, SourceError, UsageError
from mckpt.formats.megatron.common_state import Common
from mckpt.geometry.box import Layout, Piece, Stored, restride
from mckpt.geometry.packing import PACKINGS, Packed, PackingError, padded
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, Dims, MappingFile, Rule, Scope, hub
from mckpt.storage.files import TargetFile

# 8-bit floats are nothing without their scales
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Names(NamedTuple):
    """How stored keys become logical tensors. Made once, when a checkpoint is understood."""

    mapping: MappingFile
    dims: Dims
    choices: Mapping[str, Any]  # of the mapping: how this checkpoint made them
    parallel: Parallel  # the sizes that it was saved with, or is wanted for

    def scope(self) -> dict[str, Any]:
        """What the mapping's rules can name."""
        return self.mapping.scope(self.dims, **self.choices)

    def bound(self) -> list[Bound]:
        """The mapping's rules that apply to this model."""
        return self.mapping.bind(self.scope())

    def stages(self) -> list[list[list[int]]]:
        """Returns the layers of each [pipeline rank][virtual stage], as the keys number them."""
        count = self.mapping.num_numbers(self.dims)
        return self.parallel.stages(count, self.dims["mtp_layers"])


class Wanted(NamedTuple):
    """A checkpoint to be written: the input of Format.lay_out."""

    names: Names
    dtypes: dict[str, str]  # of each logical tensor, by template
    max_shard_size: int  # bytes
    padded_vocab_size: int = 0  # rows
    common: Mapping[str, Any] = {}  # Megatron's args and the like
    common_as_object: bool = False


class Shown(NamedTuple):
    """What an opened checkpoint shows of itself before its names are understood."""

    facts: dict[str, Any]
    # key, dtype, shape, and what else is said: of the tensors that were asked for
    tensors: list[tuple[str, str, tuple[int, ...], dict[str, Any]]]
    kinds: Counter[tuple[str, tuple[int, ...]]]  # how many tensors have a dtype and a shape


class Opened(Protocol):
    """A checkpoint of which the headers are read and nothing is understood yet."""

    root: Path
    format: Format

    @property
    def common(self) -> Common | None:
        """Megatron's args and the like; None in a Hugging Face directory."""

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a quantised weight that share a scale; None if none is quantised."""

    def keys(self) -> Iterable[str]:
        """Keys of its tensors, as far as they tell which mapping knows them."""

    def parallel(self) -> Parallel:
        """The sizes that it was saved with."""

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Rows of the stored embedding, padding included; None where it is not stored by rows."""

    def beside(self, mapping: MappingFile) -> list[str]:
        """Returns the keys of everything stored that is not a weight, such as optimizer state."""

    def choices(self, names: Names) -> Mapping[str, Any]:
        """How the mapping's choices were made here; `names.choices` is what the args say."""

    def layout(self, names: Names) -> Layout:
        """What is stored where, in logical boxes.

        SourceError lists everything that is missing, left over or of another shape.
        """

    def show(self, most: int | None) -> Shown:
        """Its first `most` tensors, and how many there are."""


@dataclass(frozen=True, repr=False)
class Format:
    """One disk format. `mckpt.formats.FORMATS` lists all of them."""

    name: str
    seen_as: str  # the files by which a person recognises it
    megatron: bool  # its keys are named by a dialect; else by a family of Hugging Face
    detect: Callable[[Path], bool]  # whether a directory looks like a checkpoint of this format
    open: Callable[[Path], Opened]
    lay_out: Callable[[Wanted], tuple[Layout, list[TargetFile]]]
    # File names, as patterns, that a checkpoint consists of: --overwrite replaces nothing else.
    parts: tuple[str, ...]
    global_keys: bool = False  # keys are those of the whole model, not of each rank's modules
    fixed_sizes: bool = False  # a trainer loads it only at the sizes that it was saved with
    layer_keys: bool = False  # it can have one key for all layers, or one for each
    common_object: bool = False  # it can keep the common state as an object, as from 0.19 on
    last: str = ""  # the file without which no loader takes it for a checkpoint

    def __str__(self) -> str:
        return self.name


def best_choices(
    names: Names, choices: Mapping[str, Iterable[Any]], mismatch: Callable[[Names], int]
) -> dict[str, Any]:
    """Returns the combination of choices with the fewest mismatched keys; among equals, the one
    that agrees with the args.

    mismatch: counts the stored keys that the mapping lacks and its keys that are not stored.
    """
    said = names.choices
    found = []
    for picked in itertools.product(*choices.values()):
        chosen = {**dict(zip(choices, picked, strict=True)), "pp": names.parallel.pp}
        apart = mismatch(names._replace(choices=chosen))
        found.append((apart, sum(chosen[k] != value for k, value in said.items()), chosen))
    return min(found, key=lambda row: row[:2])[2]


class Problems(list[str]):
    """Everything found wrong with a source, raised at once."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.damaged = what, False
        self.cure = ""  # a better one than to copy the checkpoint again

    def missing(self, text: str) -> None:
        """The source is incomplete or not what its config says."""
        self.damaged = True
        self.append(text)

    def check(self) -> None:
        if self:
            again = (
                "If the checkpoint should be complete, copy it again together with its own"
                " config.json or args."
            )
            cure = self.cure or (again if self.damaged else "")
            raise (SourceError if self.damaged else CoverError).of(self.what, self, cure)


def packed(rule: Rule, scope: Scope, padded_rows: int | None = None) -> Packed:
    """The whole tensor that a rule stores, without layer and expert axes.

    UsageError if the model's dims do not fit the packing.
    """
    try:
        whole = PACKINGS[rule.pack](
            [hub().shape(name, scope) for name in rule.of], scope["num_query_groups"]
        )
    except PackingError as e:
        raise UsageError(f"{rule.where}: {rule.key}: {e}") from None
    return padded(whole, padded_rows) if rule.tp == "vocab" and padded_rows else whole


def dtype_of(rule: Rule, dtypes: dict[str, str]) -> str:
    """The one dtype of a rule's members, or what the rule says; UsageError if they differ."""
    if rule.dtype is not None:
        return rule.dtype
    found = {name: dtypes[name] for name in rule.of}
    if len(set(found.values())) > 1:
        raise UsageError(
            f"{rule.key} packs tensors of different dtypes"
            f" ({', '.join(f'{k} {v}' for k, v in found.items())}); give --dtype"
        )
    return next(iter(found.values()))


def group(
    key: str,
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
    found: list[tuple[int, int, Entry]],
    problems: Problems,
    *,
    replica: bool = False,
    padding: bool = False,
) -> list[Stored]:
    """Returns stored tensors for entries of one shape, grouped by dtype and strides.

    found: the layer and expert of each entry, and the entry.
    """
    kinds: dict[Kind, list[tuple[int, int, int, int]]] = {}
    for layer, expert, e in found:
        kinds.setdefault(Kind(e.dtype, shape, e.strides), []).append((layer, expert, e.file, e.at))
    out = []
    for kind, members in kinds.items():
        out += stored_of(
            key, pieces, kind, np.array(members, "i8").T, problems, replica=replica, padding=padding
        )
    return out


def stored_of(
    key: str,
    pieces: tuple[Piece, ...],
    kind: Kind,
    where: np.ndarray,
    problems: Problems,
    *,
    replica: bool = False,
    padding: bool = False,
) -> list[Stored]:
    """Buffers of one kind as stored tensors; none where no copy can follow their strides.

    `where`: layer, expert, file, byte [4, buffers].
    """
    dtype, shape, strides = kind
    if dtype not in WEIGHT_DTYPES:
        problems.missing(
            f"{key} {list(shape)} holds {dtype}, and weights are {', '.join(WEIGHT_DTYPES)}: a"
            " quantised model must be dequantised first"
        )
    placed = [p if strides is None else restride(p, shape, strides) for p in pieces]
    # Views made by expand() repeat elements: one stored element has several places.
    repeated = strides is not None and any(
        step == 0 and n > 1 for n, step in zip(shape, strides, strict=True)
    )
    if repeated or any(p is None for p in placed):
        problems.missing(
            f"{key} {list(shape)}: a view with strides {list(strides or ())} that no copy can"
            " follow; save it as a dense tensor"
        )
        return []
    layer, expert, file = where[:3].astype("i4")
    held = shape if strides is None else _extent(shape, strides)
    known = tuple(p for p in placed if p is not None)
    return [
        Stored(
            key,
            dtype,
            held,
            known,
            layer,
            expert,
            file,
            where[3],
            replica=replica,
            padding=padding,
            view=strides is not None,
        )
    ]


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)),)


def dtypes_of(layout: Layout) -> dict[str, str]:
    """The dtype of each logical tensor, by template.

    UsageError where it differs between layers or experts.
    """
    out: dict[str, str] = {}
    where: dict[str, dict[str, str]] = {}  # template -> dtype -> one place that holds it
    for s in layout.stored:
        for name in {p.tensor for p in s.pieces} if not s.replica and len(s) else ():
            out.setdefault(name, s.dtype)
            where.setdefault(name, {}).setdefault(
                s.dtype,
                f"{name.format(layer=int(s.layer[0]), expert=int(s.expert[0]))} in"
                f" {layout.files[int(s.file[0])]}",
            )
    clash = [
        f"{d}: {place}"
        for held in where.values()
        if len(held) > 1
        for d, place in sorted(held.items())
    ]
    if clash:
        raise UsageError.of(
            "tensors of one kind are stored in several dtypes; choose one with --dtype:", clash
        )
    return out


def shapes_of(bound: Iterable[Bound], scope: Scope) -> dict[str, tuple[int, ...]]:
    """Shape of every logical tensor that the rules name, by template."""
    return {name: hub().shape(name, scope) for b in bound for name in b.rule.of}
