"""The interface of a disk format, and code that all formats share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from mckpt.containers.entries import Entry, Kind, Span
from mckpt.errors import MAX_LISTED, CoverError, SourceError, UsageError
from mckpt.formats import foreign
from mckpt.geometry.box import Box, Layout, Piece, Stored, restride
from mckpt.geometry.packing import PACKINGS, Packed, PackingError, buffer, padded
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.lazy import pattern
from mckpt.mapping import Bound, Dims, MappingFile, Rule, Scope, schema
from mckpt.storage.files import TargetFile

NO_OPTIMIZER = "--no-load-optim"
# without 8-bit floats, which have no value without their scales
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Names:
    """The mapping, dims and choices that turn stored keys into logical tensors."""

    mapping: MappingFile
    dims: Dims
    choices: Mapping[str, Any]  # the mapping's choices, and the value of each here
    parallel: Parallel  # sizes of the saved checkpoint, or of the new one

    def scope(self) -> dict[str, Any]:
        """Returns the names that the mapping's rules can use, and their values."""
        return self.mapping.scope(self.dims, **self.choices)

    @cached_property
    def bound(self) -> list[Bound]:
        """The mapping's rules that apply to this model."""
        return self.mapping.bind(self.scope())

    def unread_beyond(self, other: Names) -> bool:
        """Returns whether it has tensors with `absent` that `other` does not have."""

        def places(names: Names, unread: bool) -> set[tuple[str, int]]:
            return {
                (tensor, layer)
                for b in names.bound
                if b.rule.absent is not None or not unread
                for tensor in b.rule.of
                for layer in b.instances()[0].tolist()
            }

        return not places(self, True) <= places(other, False)

    @property
    def objects(self) -> list[Bound]:
        """The mapping's rules of objects that are not tensors."""
        return self.mapping.bind(self.scope(), self.mapping.objects)

    @cached_property
    def factors(self) -> dict[str, float]:
        """Returns the factors of the logical tensors that are stored times a number."""
        scope = self.scope()
        scaled = [(b.rule.of, b.rule.scale) for b in self.bound if b.rule.scale]
        return {name: scale(scope) for of, scale in scaled for name in of}

    def stages(self) -> list[list[list[int]]]:
        """Returns the layers of each [pipeline rank][virtual stage], as the keys number them."""
        count = self.mapping.num_numbers(self.dims)
        return self.parallel.stages(count, self.dims["mtp_layers"])


class LayoutRequest(Struct, frozen=True):
    """The description of a new checkpoint: the input of Format.lay_out. Each family of formats adds
    what it needs in a subclass.
    """

    names: Names
    dtypes: dict[str, str]  # of each logical tensor, by template


class Shown(NamedTuple):
    """The parts of an opened checkpoint that can be shown before its names are understood."""

    facts: dict[str, Any]
    # key, dtype, shape and further facts of the first tensors
    tensors: list[tuple[str, str, tuple[int, ...], dict[str, Any]]]
    kinds: Counter[tuple[str, tuple[int, ...]]]  # how many tensors have a dtype and a shape


class Opened(Protocol):
    """A checkpoint whose headers are read and whose names are not yet understood."""

    root: Path
    format: Format

    @property
    def notes(self) -> Sequence[str]:
        """Returns sentences on how its names are read."""

    @property
    def quantised(self) -> bool:
        """Returns whether a config describes quantised weights that mckpt reads."""

    def keys(self) -> Iterable[str]:
        """Returns keys of its tensors, enough to tell which mapping has them."""

    def parallel(self) -> Parallel:
        """Returns the sizes with which the checkpoint was saved."""

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Returns the rows of the stored embedding with padding, None if not stored by rows."""

    def beside(self, mapping: MappingFile) -> list[str]:
        """Returns the keys of everything stored that is not a weight, such as optimizer state."""

    def choices(self, names: Names) -> Mapping[str, Any]:
        """Returns the mapping's choices that fit this checkpoint; `names.choices` has those of its
        args.
        """

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes.

        Raises one error with everything that is missing, left over or of another shape.
        """

    def show(self, most: int | None) -> Shown:
        """Returns the first `most` tensors, and the number of all."""

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Yields the bytes of every tensor and record that it consists of, for a check of all
        files. What cannot be read is added to `problems`.
        """


FAMILY = "family"  # in place of a trainer: the keys are those of the family that --like names


def _only_read(request: Any) -> tuple[Layout, list[TargetFile]]:
    # A target of a format that is only read is refused before, by the table of formats. This error
    # would be a mistake of mckpt.
    raise NotImplementedError("the format is only read")


class Format(Struct, frozen=True):
    """One disk format. `mckpt.formats.FORMATS` lists all of them."""

    name: str
    seen_as: str  # the files by which a person recognises it
    megatron: bool  # True: a dialect names its keys; False: a family of Hugging Face does
    detect: Callable[[Path], bool]  # whether a directory looks like a checkpoint of this format
    open: Callable[[Path], Opened]
    # File names, as patterns, that a checkpoint consists of: --overwrite replaces nothing else.
    parts: tuple[str, ...]
    # takes the LayoutRequest of this format's family
    lay_out: Callable[[Any], tuple[Layout, list[TargetFile]]] = _only_read
    # the file in mappings/trainers with the names of its keys, or FAMILY; "": a dialect
    trainer: str = ""
    global_keys: bool = False  # keys are those of the whole model, not of each rank's modules
    fixed_sizes: bool = False  # a trainer loads it only at the sizes that it was saved with
    layer_keys: bool = False  # it can have one key for all layers, or one for each
    common_object: bool = False  # it can keep the common state as an object, as from 0.19 on
    optimizer: bool = False  # the state of an optimizer can be written
    # a weight is stored as its fp32 master copy alone, if it has one
    masters_alone: bool = False
    # its optimizer is one of torch, whose states have the dtype of the weights that it updates
    torch_optimizer: bool = False
    one_optimizer: bool = False  # it updates the experts too, whatever ranks have them
    readable: bool = True  # this process can read all elements; those of a live model it cannot
    # the iteration of weights alone, where Megatron loads no release, and the flag to load them
    first_iteration: int | None = None
    flag_of_weights: str = NO_OPTIMIZER
    last: str = ""  # the file that makes the directory a checkpoint for loaders; published last

    def __str__(self) -> str:
        return self.name


def best_choices(
    names: Names, choices: Mapping[str, Iterable[Any]], mismatch: Callable[[Names], int]
) -> dict[str, Any]:
    """Returns the combination of choices with the fewest mismatched keys. If several have as few,
    it returns the one that agrees with the args.

    mismatch: counts the stored keys that the mapping lacks and its keys that are not stored.

    Raises SourceError if the args state a value that the mapping does not know.
    """
    stated = names.choices
    for name, value in stated.items():
        if name in choices and value not in (known := tuple(choices[name])):
            raise SourceError(
                f"{name} is {value!r} in the checkpoint, and {names.mapping.path.name} knows"
                f" {', '.join(map(str, known))} only"
            )
    found = []
    for picked in itertools.product(*choices.values()):
        chosen = {**dict(zip(choices, picked, strict=True)), "pp": names.parallel.pp}
        other = sum(chosen[k] != value for k, value in stated.items())
        apart = mismatch(replace(names, choices=chosen))
        if not apart and not other:
            return chosen  # as most do that mckpt meets; nothing fits better
        found.append((apart, other, chosen))
    return min(found, key=lambda row: row[:2])[2]


_NUMBER = pattern(r"\d+(?![^\[]*\])")  # outside of a shape


class Problems(list[str]):
    """All problems that were found in a source, raised as one error."""

    def __init__(self, what: str, cure: str = "") -> None:
        """cure: replaces the advice to copy the checkpoint again."""
        super().__init__()
        self.what, self.cure, self.damaged = what, cure, False
        self.num_unknown = 0  # of the problems: they come first

    def missing(self, text: str) -> None:
        """Adds a problem of a source that is incomplete or contradicts its config."""
        self.damaged = True
        self.append(text)

    def unknown(self, found: Iterable[tuple[str, str]], file: str) -> None:
        """Adds stored tensors that no rule of a mapping file names, in front of all others. Those
        whose texts differ only in numbers outside of brackets become one problem.

        found: their keys, and the keys as they are shown, with place and shape.
        """
        alike: dict[str, list[str]] = {}
        keys, texts = zip(*found, strict=True) if (found := list(found)) else ((), ())
        for text in texts:
            alike.setdefault(_NUMBER.sub("{}", text), []).append(text)
        for first, *more in alike.values():
            also = f", and {len(more):,} more of this name with other numbers" if more else ""
            self.insert(self.num_unknown, f"{first} is in no rule of {file}{also}")
            self.num_unknown += 1
        self.cure = self.cure or foreign.advice(keys)

    def check(self) -> None:
        if self:
            half = min(self.num_unknown, MAX_LISTED // 2)  # what is missing should be seen too
            listed = [*self[:half], *self[self.num_unknown :], *self[half : self.num_unknown]]
            again = (
                "If the checkpoint should be complete, copy it again together with its own"
                " config.json or args."
            )
            cure = self.cure or (again if self.damaged else "")
            raise (SourceError if self.damaged else CoverError).of(self.what, listed, cure)


def packed(rule: Rule, scope: Scope, padded_rows: int | None = None) -> Packed:
    """Returns the whole tensor that a rule stores, without layer and expert axes.

    Raises UsageError if the model's dims do not fit the packing.
    """
    try:
        # q has one shape where k and v have several
        of_layer = schema().of_shape(rule.of[-1], scope)
        groups = rule.heads(scope) if rule.heads else of_layer["num_query_groups"]
        whole = PACKINGS[rule.pack]([schema().shape(name, scope) for name in rule.of], groups)
    except PackingError as e:
        raise UsageError(f"{rule.where}: {rule.key}: {e}") from None
    whole = whole._replace(offset=rule.offset)
    return padded(whole, padded_rows) if rule.tp == "vocab" and padded_rows else whole


def stored_shape(rule: Rule, whole: Packed) -> tuple[int, ...]:
    """Returns the shape in which Megatron stores a packed tensor, without layer and expert axes."""
    if rule.stack:
        return (rule.stack, whole.shape[0] // rule.stack, *whole.shape[1:])
    return whole.shape[::-1] if rule.transposed else whole.shape


def stored_buffer(
    rule: Rule, whole: Packed, region: Box
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Returns the shape and the pieces of a buffer that holds a region of a stored tensor. Of
    several layers of a tower the region counts the rows of all.
    """
    if rule.transposed:
        region = Box(region.offset[::-1], region.shape[::-1])
    return buffer(whole, [region], rule.of, rule.transposed)


def dtype_of(rule: Rule, dtypes: dict[str, str]) -> str:
    """Returns the dtype that the rule sets, else that of its members; raises UsageError if they
    differ.
    """
    if rule.dtype is not None:
        return rule.dtype
    found = {name: dtypes[name] for name in rule.of}
    if len(set(found.values())) > 1:
        raise UsageError(
            f"{rule.key} packs tensors of different dtypes"
            f" ({', '.join(f'{k} {v}' for k, v in found.items())}); give --dtype"
        )
    return next(iter(found.values()))


def file_order(b: Bound, num_layers: int) -> np.ndarray:
    """Returns a number for each tensor of a rule, by which writers sort the tensors of all rules:
    those before the layers first, then layer after layer, as sources have them.
    """
    layers = np.repeat(b.layers, len(b.experts))
    if "layer" in b.rule.indices:
        return layers + 1
    return np.full(len(layers), 0 if b.rule.stage == "first" else num_layers + 1)


def group(
    key: str,
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
    found: list[tuple[int, int, Entry]],
    problems: Problems,
    *,
    replica: bool = False,
    padding: bool = False,
    carried: bool = False,
) -> list[Stored]:
    """Returns stored tensors for entries of one shape, grouped by dtype and strides.

    found: the layer and expert of each entry, and the entry.
    """
    kinds: dict[Kind, list[tuple[int, int, int, int]]] = {}
    for layer, expert, e in found:
        kinds.setdefault(Kind(e.dtype, shape, e.strides), []).append((layer, expert, e.file, e.at))
    out = []
    for kind, members in kinds.items():
        where = np.array(members, "i8").T
        out += stored_of(
            *(key, pieces, kind, where, problems),
            replica=replica,
            padding=padding,
            carried=carried,
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
    carried: bool = False,
) -> list[Stored]:
    """Returns buffers of one kind as stored tensors; none if no copy can follow their strides.

    where: layer, expert, file, byte [4, buffers].
    """
    dtype, shape, strides = kind
    if dtype not in WEIGHT_DTYPES and not carried:
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
    if strides is not None:  # the buffer is the range from the first to the last element
        shape = (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)),)
    known = tuple(p for p in placed if p is not None)
    return [
        Stored(
            key,
            dtype,
            shape,
            known,
            *where,
            replica=replica,
            padding=padding,
            view=strides is not None,
            carried=carried,
        )
    ]


def dtypes_of(layout: Layout) -> dict[str, str]:
    """Returns the dtype of each logical tensor, by template.

    Raises UsageError if it differs between layers or experts.
    """
    out: dict[str, str] = {}
    where: dict[str, dict[str, str]] = {}  # template -> dtype -> one place that holds it
    for s in layout.stored:
        if s.replica or s.carried or not len(s):
            continue
        for name in s.tensors:
            out.setdefault(name, s.dtype)
            where.setdefault(name, {}).setdefault(
                s.dtype,
                f"{name.format(layer=int(s.layer[0]), expert=int(s.expert[0]))} in"
                f" {layout.files[int(s.file[0])]}",
            )
    clash = [
        f"{d}: {place}"
        for places in where.values()
        if len(places) > 1
        for d, place in sorted(places.items())
    ]
    if clash:
        raise UsageError.of(
            "tensors of one kind are stored in several dtypes; choose one with --dtype:", clash
        )
    return out


def shapes_of(bound: Iterable[Bound], scope: Scope) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every logical tensor that the rules name, by template."""
    return {name: schema().shape(name, scope) for b in bound for name in b.rule.of}
