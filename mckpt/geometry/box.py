"""Integer geometry: boxes of logical tensors, and where they lie in stored buffers.

No torch, no I/O, no names but those it is given.

A *piece* is a box of one logical tensor, placed in a flat buffer by an affine map:

    logical k [16, 64]         box (8,0)+(4,64)     rows 8..12
    stored linear_qkv          start 40*64          strides (64, 1)     rows 40..44 of a row-major [64, 64]

All numbers are elements. Two layouts of the same logical tensors are joined by intersecting their
boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mckpt.lazy import numpy as np


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: `shape` elements from `offset` on, along each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """One box of the logical tensor `tensor`; element `i` of the box is at `start + sum(i *
    strides)` of the buffer.
    """

    tensor: str  # a logical name, with {layer} and {expert} where it has them
    box: Box
    start: int
    strides: tuple[int, ...]


class Move(NamedTuple):
    """`rows` rows of `run` elements from one buffer into another; all in elements."""

    rows: int
    run: int
    src_start: int
    src_pitch: int
    src_step: int
    dst_start: int
    dst_pitch: int
    dst_step: int


class Scales(NamedTuple):
    """How stored tensors keep values as `dtype` and a grid of scales.

    `grids` has a row, a quantisation.Grid, for each stored tensor.
    """

    dtype: str
    grids: np.ndarray


@dataclass(frozen=True, eq=False)
class Stored:
    """Stored tensors of one geometry: one rule and shard, at many layers, experts and files.

    `layer`, `expert`, `file` and `at` are parallel arrays, one entry for each stored tensor: the
    indices that fill the pieces' names, the number of the file in `Layout.files`, and the byte
    where the buffer starts.
    """

    key: str  # template of the stored key, for messages
    dtype: str  # of the values
    shape: tuple[int, ...]  # of one buffer, row-major
    pieces: tuple[Piece, ...]
    layer: np.ndarray
    expert: np.ndarray
    file: np.ndarray
    at: np.ndarray
    # a further copy of boxes that another stored tensor holds: written, but not read
    replica: bool = False
    padding: bool = False  # elements that no piece covers are padding, and zero
    # the buffer is all that a strided view reaches over; of its other elements nothing is said
    view: bool = False
    scales: Scales | None = None  # what the elements are to be multiplied with

    def __len__(self) -> int:
        return len(self.file)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_as(self) -> str:
        """The dtype of the elements in the buffer."""
        return self.scales.dtype if self.scales else self.dtype


@dataclass(eq=False)
class Layout:
    """What is stored where: one checkpoint form."""

    files: list[str]
    stored: list[Stored]
    shapes: dict[str, tuple[int, ...]]  # of each logical tensor, by template
    ignored: dict[str, str] = field(default_factory=dict)  # stored key -> why nothing reads it
    # those of `ignored` that are weights of the model
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        """Logical tensors that it holds."""
        places: dict[str, list[np.ndarray]] = {}
        experts = 1 + max((int(s.expert.max()) for s in self.stored if len(s)), default=0)
        for s in self.stored:
            for name in {p.tensor for p in s.pieces} if not s.replica else ():
                places.setdefault(name, []).append(s.layer.astype("i8") * experts + s.expert)
        return sum(
            int(np.count_nonzero(np.bincount(np.concatenate(held)))) for held in places.values()
        )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def whole_box(shape: tuple[int, ...]) -> Box:
    """All of a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def overlap(a: Box, b: Box) -> Box | None:
    """The box that both share, or None."""
    low = tuple(map(max, a.offset, b.offset))
    shape = tuple(
        min(x + n, y + m) - z
        for x, n, y, m, z in zip(a.offset, a.shape, b.offset, b.shape, low, strict=True)
    )
    return Box(low, shape) if min(shape, default=1) > 0 else None


def restride(piece: Piece, shape: Sequence[int], strides: Sequence[int]) -> Piece | None:
    """The piece in a buffer of the same shape that is not dense (a view); None where no affine map
    can say it.
    """
    dense = row_major(shape)

    def across(distance: int) -> tuple[int, ...]:
        out = []
        for step in dense:
            out.append(distance // step)
            distance %= step
        return tuple(out)

    start = across(piece.start)
    steps = [across(s) for s in piece.strides]
    # a step that runs over the end of an axis would carry into the next one
    for step, n in zip(steps, piece.box.shape, strict=True):
        if any(
            s * (n - 1) + at >= size for s, at, size in zip(step, start, shape, strict=True) if s
        ):
            return None

    def dot(index: Iterable[int]) -> int:
        return sum(i * s for i, s in zip(index, strides, strict=True))

    return piece._replace(start=dot(start), strides=tuple(map(dot, steps)))


def moves(source: Piece, target: Piece) -> list[Move]:
    """What brings the part of `target`'s box that `source` holds into place: as few 2-D moves as
    there are.
    """
    box = overlap(source.box, target.box)
    if box is None:
        return []

    def base(piece: Piece) -> int:
        return piece.start + sum(
            (o - p) * s for o, p, s in zip(box.offset, piece.box.offset, piece.strides, strict=True)
        )

    # (size, source stride, target stride), neighbours merged where both sides run on
    axes: list[tuple[int, int, int]] = []
    for n, s, t in zip(box.shape, source.strides, target.strides, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * s and axes[-1][2] == n * t:
            axes[-1] = (axes[-1][0] * n, s, t)
        else:
            axes.append((n, s, t))
    run, src_step, dst_step = axes.pop() if axes else (1, 1, 1)
    rows, src_pitch, dst_pitch = axes.pop() if axes else (1, 0, 0)
    out = []
    for index in itertools.product(*(range(n) for n, _, _ in axes)):
        src = base(source) + sum(i * s for i, (_, s, _) in zip(index, axes, strict=True))
        dst = base(target) + sum(i * t for i, (_, _, t) in zip(index, axes, strict=True))
        out.append(Move(rows, run, src, src_pitch, src_step, dst, dst_pitch, dst_step))
    return out


def coalesce(listed: Iterable[Move]) -> list[Move]:
    """The same moves, fewer: single rows that follow each other on both sides become one row, and
    rows a constant pitch apart one move.
    """
    out: list[Move] = []
    for m in sorted(listed, key=lambda m: m.dst_start):
        if out and m.rows == 1:
            last = out[-1]
            same = last.src_step == m.src_step == last.dst_step == m.dst_step == 1
            src, dst = m.src_start - last.src_start, m.dst_start - last.dst_start
            if same and last.rows == 1 and src == dst == last.run:
                out[-1] = last._replace(run=last.run + m.run)
                continue
            if same and last.run == m.run:
                if last.rows == 1 and src > 0:
                    out[-1] = last._replace(rows=2, src_pitch=src, dst_pitch=dst)
                    continue
                if (
                    last.rows > 1
                    and src == last.rows * last.src_pitch
                    and dst == last.rows * last.dst_pitch
                ):
                    out[-1] = last._replace(rows=last.rows + 1)
                    continue
        out.append(m)
    return out


def by_rows(move: Move, width: int) -> list[Move]:
    """The same elements in moves that go along the rows of a source [.., width] and down its
    columns, one axis each.

    So the row of an element depends on one of its two indices, and its column on the other. Runs
    that pass a row's end are cut there:

        width 3, one row of 8 from 2 on     . . a | b c d | e f g | h . .     ->     a, [b c d][e f g], h
    """
    start, src, dst = move.src_start % width, move.src_step, move.dst_step

    def along(n: int, step: int) -> bool:
        return n == 1 or start + (n - 1) * step < width

    def down(n: int, step: int) -> bool:
        return n == 1 or step % width == 0

    if (along(move.run, src) and down(move.rows, move.src_pitch)) or (
        down(move.run, src) and along(move.rows, move.src_pitch)
    ):
        return [move]
    if move.rows > 1:
        starts = [
            (move.src_start + i * move.src_pitch, move.dst_start + i * move.dst_pitch)
            for i in range(move.rows)
        ]
        return [
            part
            for s, d in starts
            for part in by_rows(move._replace(rows=1, src_start=s, dst_start=d), width)
        ]
    out, done = [], 0
    while done < move.run:
        at = move.src_start + done * src
        run = min(move.run - done, -(-(width - at % width) // src))  # as far as the row's end
        rows = (move.run - done) // run if run * src == width else 1
        out.append(Move(rows, run, at, run * src, src, move.dst_start + done * dst, run * dst, dst))
        done += rows * run
    return out


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """None if the boxes cover a tensor of this shape exactly once; else what is wrong,
    in numbers.
    """
    if any(
        o < 0 or o + n > size
        for b in boxes
        for o, n, size in zip(b.offset, b.shape, shape, strict=True)
    ):
        bad = next(
            b
            for b in boxes
            for o, n, size in zip(b.offset, b.shape, shape, strict=True)
            if o < 0 or o + n > size
        )
        return f"the box {list(bad.shape)} at {list(bad.offset)} reaches outside {list(shape)}"
    volume = sum(math.prod(b.shape) for b in boxes)
    if len(boxes) > 1:
        low = np.array([b.offset for b in boxes], "i8")
        high = low + np.array([b.shape for b in boxes], "i8")
        meet = (np.maximum(low[:, None], low[None]) < np.minimum(high[:, None], high[None])).all(2)
        if (pairs := np.argwhere(np.triu(meet, 1))).size:
            i, j = (int(x) for x in pairs[0])
            return (
                f"boxes overlap: {list(boxes[i].shape)} at {list(boxes[i].offset)} and"
                f" {list(boxes[j].shape)} at {list(boxes[j].offset)}"
            )
    if volume != math.prod(shape):
        return f"{volume:,} of {math.prod(shape):,} elements are covered"
    return None


def gaps(pieces: Sequence[Piece], numel: int) -> tuple[np.ndarray, str | None]:
    """[(start, length)] of the elements of a flat buffer that no piece covers; and what is wrong if
    two pieces share one or one lies outside.
    """
    starts, lengths = [], []
    for row in (m for p in pieces for m in moves(p, p)):
        flat = row.src_start + np.arange(row.rows, dtype="i8") * row.src_pitch
        # element by element; a run of neighbours is one interval, however long
        if row.src_step != 1:
            flat = (flat[:, None] + np.arange(row.run, dtype="i8") * row.src_step).ravel()
        starts.append(flat)
        lengths.append(np.full(len(flat), row.run if row.src_step == 1 else 1, "i8"))
    start, length = (np.concatenate(x) if x else np.empty(0, "i8") for x in (starts, lengths))
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + length)[order]
    nothing = np.empty((0, 2), "i8")
    if len(start) and (start[0] < 0 or (end > numel).any()):
        return nothing, f"a piece reaches outside the {numel:,} elements of the buffer"
    if (end[:-1] > start[1:]).any():
        return (
            nothing,
            f"two pieces share element {int(start[1:][end[:-1] > start[1:]][0]):,} of the buffer",
        )
    low, high = np.concatenate([[0], end]), np.concatenate([start, [numel]])
    free = low < high
    return np.stack([low[free], (high - low)[free]], 1), None
