"""Compares the logical tensors of two checkpoints, across formats, parallel sizes and the casts
that were made between them.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mckpt.checkpoint.logical import LogicalTensor
from mckpt.errors import counted
from mckpt.progress import OnProgress, Progress, refuse_cancelled
from mckpt.values.dtypes import cast, itemsize, numpy_dtype, shift

# Measured on two cores, 2 x 2.5 GB in memory, which `cat` reads in 0.30 s: 0.43 s with blocks of
# 1 MiB, 0.30 s with 2 MiB, 0.28 s with 4 MiB. Smaller blocks pay for Python in every block.
BLOCK_BYTES = 2 << 20  # of either side that one thread holds at once
THREADS = 32  # at most; each holds 2 blocks, and about 12 where values differ
AHEAD = 4  # blocks for each thread that wait their turn

# The dtypes that a value passed through on its way from the left side to the right, by logical
# template. An empty list means that both sides must hold the same bits of the same dtype.
Casts = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Changed:
    """One tensor that differs.

    `first`, the index of the first differing element, and `max_abs` are set only if `what` is
    values.
    """

    name: str
    what: str  # shape, dtype or values
    left: str
    right: str
    first: tuple[int, ...] | None = None
    max_abs: float | None = None
    count: int = 0

    def __str__(self) -> str:
        if self.what != "values":
            return f"{self.name}: {self.what} {self.left} against {self.right}"
        elements = f"{counted(self.count, 'element')} differ{'s' * (self.count == 1)}"
        at = f"first at {list(self.first or ())} ({self.left} against {self.right})"
        return f"{self.name}: {elements}, {at}, max abs {self.max_abs:g}"


@dataclass(repr=False)
class Difference:
    """The result of `diff`. It is false if the two sides are the same and no weight was dropped."""

    missing: list[str] = field(default_factory=list)  # in the first only
    extra: list[str] = field(default_factory=list)  # in the second only
    changed: list[Changed] = field(default_factory=list)
    # weights of either side that its mapping drops
    dropped: list[str] = field(default_factory=list)
    # further copies of a tensor, on either side, that differ from the one compared
    replicas: list[str] = field(default_factory=list)
    # tensors in which a cast made finite values infinite
    infinite: list[str] = field(default_factory=list)
    # tensors of which one side stores values less a number, and was rounded for it
    rounded: list[str] = field(default_factory=list)
    same: int = 0
    cast: int = 0  # tensors among the `same` that are equal to a cast of the first side
    nbytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.changed or self.dropped or self.replicas)

    def __repr__(self) -> str:
        apart: dict[str, Sequence[object]] = {
            "differ": self.changed,
            "missing": self.missing,
            "extra": self.extra,
        }
        others = {"dropped": self.dropped, "replicas apart": self.replicas}
        apart |= {name: found for name, found in others.items() if found}
        counts = ", ".join(f"{len(found):,} {name}" for name, found in apart.items())
        first = next((f"; first: {found[0]}" for found in apart.values() if found), "")
        return f"Difference({counted(self.same, 'logical tensor')} equal, {counts}{first})"

    def swapped(self) -> Difference:
        """Returns the same difference with the two sides exchanged."""
        changed = [replace(c, left=c.right, right=c.left) for c in self.changed]
        return replace(self, missing=self.extra, extra=self.missing, changed=changed)

    def json(self) -> dict[str, Any]:
        return {
            "tensors_equal": self.same,
            "equal_after_cast": self.cast,
            "bytes_compared": self.nbytes,
            "missing": self.missing,
            "extra": self.extra,
            "dropped": self.dropped,
            "replicas": self.replicas,
            "infinite": self.infinite,
            "rounded": self.rounded,
            "changed": [vars(c) for c in self.changed],
        }


class _Block(NamedTuple):
    """Some rows of one tensor that both sides have."""

    name: str
    row: int
    rows: int


class _Found(NamedTuple):
    """The differing elements of one block: the first one, its two values, their number and the
    largest distance.
    """

    first: tuple[int, ...]
    left: str
    right: str
    num: int
    max_abs: float
    infinite: int  # values that a cast made infinite
    rounded: int  # values that an offset rounded; these two may be set although no value differs


class _Buffers(threading.local):
    """Each thread's two buffers, kept from one block to the next: fresh memory costs a page fault
    for every 4 KiB.
    """

    def __init__(self) -> None:
        self._arrays = [np.empty(BLOCK_BYTES, "u1") for _ in range(2)]

    def take(self, side: int, nbytes: int) -> np.ndarray:
        """Returns an array of at least `nbytes` bytes. A single row may be longer than a block."""
        if len(self._arrays[side]) < nbytes:
            self._arrays[side] = np.empty(nbytes, "u1")
        return self._arrays[side]


def diff(
    a: Mapping[str, LogicalTensor],
    b: Mapping[str, LogicalTensor],
    atol: float | None = None,
    progress: OnProgress | None = None,
    *,
    casts: Casts = lambda name: (),
    threads: int = 0,
) -> Difference:
    """Compares every logical tensor bit for bit (NaN payloads count), or within `atol`, which
    allows different dtypes too.

    `casts(name)` returns the dtypes to which a tensor was cast between the two sides; the second
    side must then equal exactly that cast of the first. threads=0 means one per core.
    """
    out = Difference([n for n in a if n not in b], [n for n in b if n not in a])
    compared = []
    for name in (n for n in a if n in b):
        left, right = a[name], b[name]
        way = list(casts(name))
        expected = way[-1] if way else left.dtype
        if left.shape != right.shape:
            out.changed.append(
                Changed(name, "shape", str(list(left.shape)), str(list(right.shape)))
            )
        elif expected != right.dtype and atol is None:
            out.changed.append(Changed(name, "dtype", expected, right.dtype))
        else:
            compared.append(name)
            out.cast += any(dtype != left.dtype for dtype in way)
    total = sum(a[n].nbytes for n in compared)
    different: dict[str, list[tuple[int, _Found]]] = {}
    buffers = _Buffers()

    def one(block: _Block) -> tuple[_Block, _Found | None]:
        return block, _compare(a, b, block, atol, casts(block.name), buffers)

    blocks = (block for name in compared for block in _blocks(a[name], b[name]))
    threads = threads or min(len(os.sched_getaffinity(0)), THREADS)
    infinite, rounded = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(threads, "compare") as pool:
        try:
            waiting = deque(
                pool.submit(one, block) for block in itertools.islice(blocks, AHEAD * threads)
            )
            while waiting:
                block, differs = waiting.popleft().result()
                waiting.extend(pool.submit(one, later) for later in itertools.islice(blocks, 1))
                if differs:
                    rounded[block.name] += differs.rounded
                    infinite[block.name] += differs.infinite
                    if differs.num:
                        different.setdefault(block.name, []).append((block.row, differs))
                whole = a[block.name]
                out.nbytes += whole.nbytes // max(1, len(whole) if whole.shape else 1) * block.rows
                if progress is not None:
                    progress(Progress(out.nbytes, total))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    out.changed += [_merged(name, parts) for name, parts in different.items()]
    order = {name: i for i, name in enumerate(a)}
    out.changed.sort(key=lambda c: order[c.name])
    out.same = len(compared) - len(different)
    out.cast -= sum(any(dtype != a[name].dtype for dtype in casts(name)) for name in different)
    out.infinite = [
        f"{name}: {counted(n, 'value')} became infinite in the cast to {b[name].dtype}"
        for name, n in infinite.items()
        if n
    ]
    out.rounded = [
        f"{name}: {counted(n, 'value')} of {a[name].nbytes // itemsize(a[name].dtype):,} compared"
        f" after rounding, because one side stores the values {a[name].offset or b[name].offset:+g}"
        for name, n in rounded.items()
        if n
    ]
    out.dropped = [text for side in (a, b) for text in _dropped(side)]
    return out


def copies_apart(sides: Sequence[Any], cancel: threading.Event | None = None) -> list[str]:
    """Returns the tensors of one checkpoint whose copies, on several ranks or under several keys,
    differ.

    Raises Cancelled soon after `cancel` is set.
    """
    return [
        f"{side.path}: {text}"
        for side in sides
        for text in side.reader.check_replicas(lambda: refuse_cancelled(cancel))
    ]


def _dropped(side: Any) -> list[str]:
    """Returns the weights of a checkpoint that its mapping drops; none for a plain dictionary of
    tensors.
    """
    layout = getattr(side, "layout", None)
    dropped = layout.dropped.items() if layout is not None else ()
    return [f"{side.path}: {key} ({why})" for key, why in dropped]


def _blocks(left: LogicalTensor, right: LogicalTensor) -> Iterator[_Block]:
    """Yields the tensor's rows in blocks of about BLOCK_BYTES."""
    rows = left.shape[0] if left.shape else 1
    row_bytes = math.prod(left.shape[1:]) * max(itemsize(left.dtype), itemsize(right.dtype))
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for row in range(0, rows, step):
        yield _Block(left.name, row, min(step, rows - row))


def _compare(
    a: Mapping[str, LogicalTensor],
    b: Mapping[str, LogicalTensor],
    block: _Block,
    atol: float | None,
    way: Sequence[str],
    buffers: _Buffers,
) -> _Found | None:
    """Returns the differences of one block, None if it has none."""
    rows = slice(block.row, block.row + block.rows)
    left, right = a[block.name], b[block.name]
    left, right = left[rows] if left.shape else left, right[rows] if right.shape else right
    x, y = left.numpy(buffers.take(0, left.nbytes)), right.numpy(buffers.take(1, right.nbytes))
    before, rounded = x, 0
    for dtype in way:
        x = _as(x, dtype)
    if left.offset != right.offset and atol is None:
        x, y, rounded = _shifted(x, y, before, left.offset, right.offset)
    infinite = 0 if x is before else int(np.isinf(x).sum()) - int(np.isinf(before).sum())
    if atol is None:
        if _same_bytes(x, y):
            nothing = _Found((), "", "", 0, 0.0, infinite, rounded)
            return nothing if infinite or rounded else None
        bits = f"u{x.dtype.itemsize}"
        apart = x.view(bits) != y.view(bits)
    wide = np.float64 if x.dtype.itemsize == 8 else np.float32
    xf, yf = x.astype(wide), y.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.asarray(np.abs(xf - yf))
    distance[(xf == yf) | (np.isnan(xf) & np.isnan(yf))] = 0
    distance[np.isnan(distance)] = np.inf
    if atol is not None:
        apart = distance > atol
        if not apart.any():
            return None
    apart = np.asarray(apart)
    at = tuple(map(int, np.unravel_index(int(np.argmax(apart)), apart.shape)))
    first = (block.row + at[0], *at[1:]) if at else ()
    return _Found(
        first,
        _show(x[at]),
        _show(y[at]),
        int(apart.sum()),
        float(distance[apart].max()),
        infinite,
        rounded,
    )


def _shifted(
    x: np.ndarray, y: np.ndarray, before: np.ndarray, left: float, right: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns both sides of a tensor that only one side stores with an offset, and the number of
    values that the offset rounds. The other side's values are rounded as they would be stored.

    before: the left side without its casts. left, right: the offset of each side.
    """
    if right:
        through = _through(before, right, x.dtype)
        return through, y, int((_bits(through) != _bits(x)).sum())
    if x.dtype != before.dtype:  # the sum was cast
        return x, y, 0
    through = _through(y, left, y.dtype)
    return x, through, int((_bits(through) != _bits(y)).sum())


def _through(values: np.ndarray, offset: float, kind: np.dtype) -> np.ndarray:
    """Returns the values after they were stored with an offset in a dtype, and read again."""
    flat = values.reshape(1, -1)
    stored, out = np.empty(flat.shape, kind), np.empty(flat.shape, kind)
    shift(flat, stored, offset)
    shift(stored, out, -offset)
    return out.reshape(values.shape)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


def _same_bytes(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether two dense arrays hold the same bytes. Compares eight bytes at a time if the
    length is a multiple of eight.
    """
    words = "u8" if x.nbytes % 8 == 0 else "u1"
    return np.array_equal(x.reshape(-1).view(words), y.reshape(-1).view(words))


def _as(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values cast to a dtype, as a conversion casts them."""
    if values.dtype == numpy_dtype(dtype):
        return values
    out = np.empty(values.shape, numpy_dtype(dtype))
    cast(values.reshape(1, -1), out.reshape(1, -1))
    return out


def _merged(name: str, parts: list[tuple[int, _Found]]) -> Changed:
    """Returns the differences of a tensor's blocks as one."""
    _, first = min(parts)
    count, worst = sum(p.num for _, p in parts), max(p.max_abs for _, p in parts)
    return Changed(name, "values", first.left, first.right, first.first, worst, count)


def _show(value: Any) -> str:
    """Returns the value with enough digits to distinguish it from its neighbours; for a NaN, its
    bits.
    """
    if np.isnan(float(value)):
        bits = np.asarray(value).reshape(1).view(f"u{value.dtype.itemsize}")[0]
        return f"nan 0x{bits:x}"
    digits = {2: 6, 4: 9, 8: 17}.get(value.dtype.itemsize, 6)
    return f"{float(value):.{digits}g}"
