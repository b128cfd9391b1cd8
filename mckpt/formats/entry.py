"""What every format shares: one buffer as its header describes it, buffers grouped by geometry, and a file to be written."""

from __future__ import annotations

import itertools
import math
import os
import stat
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from mckpt import dtypes, safe_pickle
from mckpt.box import Layout, Piece, Stored, restride
from mckpt.errors import CoverError, SourceError, StorageError, UsageError
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, Rule, Scope, hub
from mckpt.packing import PACKINGS, Packed, PackingError, padded

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")  # 8-bit floats are nothing without their scales
BLOCK = 1 << 20  # bytes of a copied file in memory at once


class Entry(NamedTuple):
    """One stored buffer: `shape` elements of `dtype` from byte `at` of file number `file`; strides in elements, None if dense."""

    dtype: str
    shape: tuple[int, ...]
    file: int
    at: int
    strides: tuple[int, ...] | None = None


class Kind(NamedTuple):
    """What buffers may have in common: dtype, shape, and strides if they are not dense."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class Columns(NamedTuple):
    """Of each buffer its kind (index into `Entries.kinds`, 4 bytes), file (4 bytes) and first byte (8 bytes)."""

    kind: array[int]
    file: array[int]
    at: array[int]


class Entries(Mapping[str, Entry]):
    """Buffers by key, in columns: there may be 10**5 of them, so that each must cost little.

    `kind`, `file` and `at` are `columns` as numpy arrays, made when they are asked for. Of a key that is there twice, the last counts.
    """

    def __init__(self, names: list[str], kinds: list[Kind], columns: Columns) -> None:
        self.names, self.kinds, self.columns = names, kinds, columns

    @cached_property
    def kind(self) -> np.ndarray:
        return np.frombuffer(self.columns.kind, "i4")

    @cached_property
    def file(self) -> np.ndarray:
        return np.frombuffer(self.columns.file, "i4")

    @cached_property
    def at(self) -> np.ndarray:
        return np.frombuffer(self.columns.at, "i8")

    @cached_property
    def _row(self) -> dict[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]]) -> Entries:
        """Columns of (key, entry) pairs."""
        number: defaultdict[Kind, int] = defaultdict(itertools.count().__next__)
        rows = [(key, number[Kind(e.dtype, e.shape, e.strides)], e.file, e.at) for key, e in entries]
        names, kind, file, at = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(list(names), list(number), Columns(array("i", kind), array("i", file), array("q", at)))

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each key, [keys]; -1 if it is not there."""
        return np.fromiter(map(self._row.get, keys, itertools.repeat(-1)), "i8")

    def are(self, rows: np.ndarray, wanted: list[bool]) -> np.ndarray:
        """Which of these rows are there, and of a kind that is `wanted`, which is parallel to `kinds`."""
        out: np.ndarray = rows >= 0
        out[out] = np.array(wanted, bool)[self.kind[rows[out]]]
        return out

    def __getitem__(self, key: str) -> Entry:
        return self.entry(self._row[key])

    def entry(self, row: int) -> Entry:
        """The buffer of a row."""
        kind, file, at = (column[row] for column in self.columns)
        dtype, shape, strides = self.kinds[kind]
        return Entry(dtype, shape, file, at, strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def entry_of(view: safe_pickle.TensorView, data: dict[str, tuple[int, int]], file: int) -> Entry:
    """A tensor of a torch.save file as an entry."""
    dense = view.strides == safe_pickle.contiguous(view.shape) or math.prod(view.shape) <= 1
    at = data[view.storage][0] + view.offset * dtypes.itemsize(view.dtype)
    return Entry(view.dtype, view.shape, file, at, None if dense else view.strides)


class Made(Protocol):
    """Bytes whose number is known before they are made."""

    @property
    def nbytes(self) -> int: ...

    def data(self) -> bytes: ...


class TargetFile(NamedTuple):
    """A file to be written: its path in the staging directory, its size, and what in it is not tensor data.

    `fixed(crc_of)` gives (offset, bytes); `crc_of(offset, nbytes)` is the crc32 of data already written, or `crc_of` is None.
    """

    path: str
    size: int
    fixed: Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]

    @classmethod
    def whole(cls, path: str, data: bytes) -> TargetFile:
        """A small file whose every byte is known."""
        return cls.headed(path, data, 0)

    @classmethod
    def headed(cls, path: str, head: bytes, nbytes: int) -> TargetFile:
        """A file of `head` and after it `nbytes` of tensor data."""
        return cls(path, len(head) + nbytes, lambda crc_of: [(0, head)])

    @classmethod
    def pieces(cls, path: str, pieces: Sequence[Made]) -> TargetFile:
        """A file without tensor data, made when it is written, a piece at a time."""
        starts = [0, *itertools.accumulate(piece.nbytes for piece in pieces)]
        return cls(path, starts[-1], lambda crc_of: ((at, piece.data()) for at, piece in zip(starts[:-1], pieces, strict=True)))

    @classmethod
    def copy(cls, path: str, source: Path) -> TargetFile:
        """A file copied as it is, a block at a time. SourceError, now or then, if it cannot be read or is of another size then."""
        size, _ = stamp(source)

        def blocks(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
            at = 0
            try:
                with open(source, "rb") as f:
                    while (block := f.read(BLOCK)) and at + len(block) <= size:
                        yield at, block
                        at += len(block)
                    now = os.fstat(f.fileno()).st_size
            except OSError as e:
                raise StorageError(f"{source}: cannot be read: {e.strerror or e}") from e
            if block or at != size:
                raise SourceError(f"{source}: had {size:,} bytes when the plan was made, and has {now:,} now; run the command again")

        return cls(path, size, blocks)


def stamp(path: Path) -> tuple[int, int]:
    """Bytes and mtime, in ns, of a file that is to be copied whole. SourceError if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
            raise SourceError(f"{path}: is no file that could be copied; remove it")
        with open(path, "rb") as f:
            found = os.fstat(f.fileno())
    except OSError as e:
        if path.is_symlink() and not path.exists():
            raise SourceError(
                f"{path}: is a link to {os.readlink(path)}, which is not there; restore that file or remove the link"
            ) from None
        raise SourceError(f"{path}: cannot be read: {e.strerror or e}; make it readable or remove it") from e
    return found.st_size, found.st_mtime_ns


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
            again = "If it should all be there, copy the checkpoint again, with the config or args that belong to it."
            cure = self.cure or (again if self.damaged else "")
            raise (SourceError if self.damaged else CoverError).of(self.what, self, cure)


def read_file(path: str | Path, limit: int = 1 << 30) -> bytes:
    """A small file's bytes; StorageError or SourceError (larger than `limit` bytes) names it."""
    try:
        size = os.stat(path).st_size
        if size > limit:
            raise SourceError(f"{path}: {size:,} bytes, and a file of this kind has at most {limit:,}")
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}") from e


def packed(rule: Rule, scope: Scope, padded_rows: int | None = None) -> Packed:
    """The whole tensor that a rule stores, without layer and expert axes. UsageError if the model's dims do not fit the packing."""
    try:
        whole = PACKINGS[rule.pack]([hub().shape(name, scope) for name in rule.of], scope["num_query_groups"])
    except PackingError as e:
        raise UsageError(f"{rule.where}: {rule.key}: {e}") from None
    return padded(whole, padded_rows) if rule.tp == "vocab" and padded_rows else whole


def dtype_of(rule: Rule, dtypes: dict[str, str]) -> str:
    """The one dtype of a rule's members, or what the rule says; UsageError if they differ."""
    if rule.dtype is not None:
        return rule.dtype
    found = {name: dtypes[name] for name in rule.of}
    if len(set(found.values())) > 1:
        raise UsageError(f"{rule.key} packs tensors of different dtypes ({', '.join(f'{k} {v}' for k, v in found.items())}): say --dtype")
    return next(iter(found.values()))


def group(key: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], found: list[tuple[int, int, Entry]], problems: Problems, *,
          replica: bool = False, padding: bool = False) -> list[Stored]:  # fmt: skip
    """Entries of one geometry, each with its layer and expert -> stored tensors, one group for each dtype and each kind of view."""
    kinds: dict[Kind, list[tuple[int, int, int, int]]] = {}
    for layer, expert, e in found:
        kinds.setdefault(Kind(e.dtype, shape, e.strides), []).append((layer, expert, e.file, e.at))
    out = []
    for kind, members in kinds.items():
        out += stored_of(key, pieces, kind, np.array(members, "i8").T, problems, replica=replica, padding=padding)
    return out


def stored_of(key: str, pieces: tuple[Piece, ...], kind: Kind, where: np.ndarray, problems: Problems, *,
              replica: bool = False, padding: bool = False) -> list[Stored]:  # fmt: skip
    """Buffers of one kind as stored tensors; none where no copy can follow their strides. `where`: layer, expert, file, byte [4, buffers]."""
    dtype, shape, strides = kind
    if dtype not in WEIGHT_DTYPES:
        problems.missing(
            f"{key} {list(shape)} holds {dtype}, and weights are {', '.join(WEIGHT_DTYPES)}: a quantised model must be dequantised first"
        )
    placed = [p if strides is None else restride(p, shape, strides) for p in pieces]
    repeated = strides is not None and any(step == 0 and n > 1 for n, step in zip(shape, strides, strict=True))  # expand()
    if repeated or any(p is None for p in placed):
        problems.missing(
            f"{key} {list(shape)}: a view with strides {list(strides or ())} that no copy can follow; save it as a dense tensor"
        )
        return []
    layer, expert, file = where[:3].astype("i4")
    held = shape if strides is None else _extent(shape, strides)
    known = tuple(p for p in placed if p is not None)
    return [Stored(key, dtype, held, known, layer, expert, file, where[3], replica=replica, padding=padding, view=strides is not None)]


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)),)


def dtypes_of(layout: Layout) -> dict[str, str]:
    """The dtype of each logical tensor, by template. UsageError where it differs between layers or experts."""
    out: dict[str, str] = {}
    where: dict[str, dict[str, str]] = {}  # template -> dtype -> one place that holds it
    for s in layout.stored:
        for name in {p.tensor for p in s.pieces} if not s.replica and len(s) else ():
            out.setdefault(name, s.dtype)
            where.setdefault(name, {}).setdefault(
                s.dtype, f"{name.format(layer=int(s.layer[0]), expert=int(s.expert[0]))} in {layout.files[int(s.file[0])]}"
            )
    clash = [f"{d}: {place}" for held in where.values() if len(held) > 1 for d, place in sorted(held.items())]
    if clash:
        raise UsageError.of("tensors of one kind are stored in several dtypes; say one with --dtype:", clash)
    return out


def shapes_of(bound: Iterable[Bound], scope: Scope) -> dict[str, tuple[int, ...]]:
    """Shape of every logical tensor that the rules name, by template."""
    return {name: hub().shape(name, scope) for b in bound for name in b.rule.of}
