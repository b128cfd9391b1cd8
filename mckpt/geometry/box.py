"""Integer geometry: boxes of logical tensors, and their places in stored buffers.

No torch and no I/O. Names are opaque.

A *piece* is a box of one logical tensor, placed in a flat buffer by an affine map:

    logical k [16, 64]     box (8,0)+(4,64)               rows 8..12
    stored linear_qkv      start 40*64, strides (64, 1)   rows 40..44 of a row-major [64, 64]

All numbers are elements. Two layouts of the same logical tensors are joined by intersecting their
boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from mckpt.lazy import distinct
from mckpt.lazy import numpy as np


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: along each axis, `shape` elements from `offset` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """One box of a logical tensor and its place in a buffer.

    Element `i` of the box is at `start + sum(i * strides)` of the buffer.
    """

    tensor: str  # a logical name, with {layer} and {expert} if it has them
    box: Box
    start: int
    strides: tuple[int, ...]
    offset: float = 0.0  # the buffer holds the logical values plus this number
    copy: bool = False  # another piece of the buffer holds the same box; written and not read


class Move(NamedTuple):
    """`rows` rows of `run` elements that move from one buffer into another.

    All numbers are elements: a pitch is the distance of rows, a step that of neighbours in a row.
    """

    rows: int
    run: int
    src_start: int
    src_pitch: int
    src_step: int
    dst_start: int
    dst_pitch: int
    dst_step: int


class Rows(Sequence[Piece]):
    """Pieces of one buffer that hold scattered rows of one tensor, as arrays: a vocabulary in a new
    order has a hundred thousand.

    Piece i has the `rows[i]` rows from row `first[i]` on, and starts at element `start[i]`. In all
    else it is like the piece `like`.
    """

    def __init__(self, like: Piece, first: np.ndarray, rows: np.ndarray, start: np.ndarray) -> None:
        self.like, self.first, self.rows, self.start = like, first, rows, start

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, i: Any) -> Any:
        first, rows, start = (int(x[i]) for x in (self.first, self.rows, self.start))
        (_, *offset), (_, *shape) = self.like.box
        return self.like._replace(box=Box((first, *offset), (rows, *shape)), start=start)

    def take(self, which: np.ndarray) -> Rows:
        """Returns some of the pieces. which: their numbers, or a mask."""
        return Rows(self.like, self.first[which], self.rows[which], self.start[which])

    def alike(self) -> Iterator[Rows]:
        """Yields the pieces that have equally many rows."""
        for number in distinct(self.rows):
            yield self.take(self.rows == number)

    def within(self, low: int, high: int) -> Rows:
        """Returns the pieces that have any of the rows low to high of the tensor."""
        return self.take((self.first < high) & (low < self.first + self.rows))

    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets and the shapes of the boxes, as [pieces, axes]."""
        offset, shape = (np.tile(np.array(x, "i8"), (len(self), 1)) for x in self.like.box)
        offset[:, 0], shape[:, 0] = self.first, self.rows
        return offset, shape

    def moves(self, target: Piece) -> np.ndarray:
        """Returns what `moves` does for all pieces, as an array of [moves, fields of Move]."""
        low, high = target.box.offset[0], target.box.offset[0] + target.box.shape[0]
        end = self.first + self.rows
        inside = (low <= self.first) & (end <= high)
        cut = self.take(~inside).within(low, high)
        found = [np.array([*m], "i8")[None] for piece in cut for m in moves(piece, target)]
        for same in self.take(inside).alike():
            for m in moves(same[0], target):
                out = np.tile(np.array([*m], "i8"), (len(same), 1))
                out[:, Move._fields.index("src_start")] += same.start - same.start[0]
                to = (same.first - same.first[0]) * target.strides[0]
                out[:, Move._fields.index("dst_start")] += to
                found.append(out)
        return np.concatenate([np.empty((0, len(Move._fields)), "i8"), *found])


class Scales(NamedTuple):
    """The encoding of quantised tensors: elements of `dtype`, and grids of scales."""

    dtype: str
    grids: np.ndarray  # one row, a quantisation.Grid, for each stored tensor
    per_byte: int = 1  # elements
    description: str = ""  # the encoding and its blocks, for messages


@dataclass(frozen=True, eq=False)
class Stored:
    """Stored tensors of one geometry: one shard of one rule, for many layers, experts and files.

    `layer`, `expert`, `file` and `at` are parallel arrays, with one entry for each stored tensor:
    the indices that fill the pieces' names, the number of the file in `Layout.files`, and the byte
    at which the buffer starts.
    """

    key: str  # template of the stored key, for messages
    dtype: str  # of the values
    shape: tuple[int, ...]  # of one buffer, row-major
    pieces: Sequence[Piece]
    layer: np.ndarray
    expert: np.ndarray
    file: np.ndarray
    at: np.ndarray
    _: KW_ONLY
    # a further copy of boxes that another stored tensor holds: it is written, but not read
    replica: bool = False
    padding: bool = False  # elements that no piece covers are padding, and zero
    # the buffer is the range that a strided view spans; its other elements are unknown
    view: bool = False
    shared: bool = False  # several pieces may read the same elements of the buffer
    scales: Scales | None = None  # the scales by which the elements are multiplied
    # the dtype of the elements in the buffer, if the values are these elements rounded to `dtype`
    rounded_from: str | None = None
    carried: bool = False  # no mapping describes it: its bytes are copied and never cast
    # number of a piece -> the product that is added to it (values/adding.py), or the sum of which
    # it is a term (values/summing.py), as an array of [stored tensors, rows, WIDTH]
    added: Mapping[int, np.ndarray] = field(default_factory=dict)
    term: str = "product"  # "sum", "mix" or "draw": the kind of what `added` has

    def __post_init__(self) -> None:
        for name in ("layer", "expert", "file"):  # digests of plans need one dtype
            object.__setattr__(self, name, getattr(self, name).astype("i4", copy=False))

    def __len__(self) -> int:
        return len(self.file)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_as(self) -> str:
        """The dtype of the elements in the buffer."""
        return self.scales.dtype if self.scales else self.rounded_from or self.dtype

    @property
    def tensors(self) -> list[str]:
        """The names of the logical tensors, in the order of the pieces."""
        return [*self.by_name()]

    def by_name(self) -> dict[str, Sequence[Piece]]:
        """Returns the pieces of each logical tensor."""
        if isinstance(self.pieces, Rows):
            return {self.pieces.like.tensor: self.pieces}
        out: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            out.setdefault(piece.tensor, []).append(piece)
        return {**out}

    def groups(self) -> list[tuple[str, Sequence[Piece], int | None]]:
        """Returns the pieces that are read, in groups whose values are computed alike: each piece
        to which a product is added, with its number; all others of a logical tensor, with None. The
        name of the tensor comes first.
        """
        if isinstance(self.pieces, Rows):
            return [(self.pieces.like.tensor, self.pieces, None)]
        plain: dict[str, list[Piece]] = {}
        groups: list[tuple[str, Sequence[Piece], int | None]] = []
        for i, piece in enumerate(self.pieces):
            if not piece.copy and i in self.added:
                groups.append((piece.tensor, [piece], i))
            elif not piece.copy:
                plain.setdefault(piece.tensor, []).append(piece)
        return [*groups, *((name, pieces, None) for name, pieces in plain.items())]

    def phased(self, listed: Iterable[Move]) -> list[tuple[Move, int]]:
        """Returns moves out of the buffer, each with the phase of its elements. Those of a
        quantised weight are cut so that one row of scales belongs to a row of elements.
        """
        if self.scales is None:
            return [(m, 0) for m in listed]
        straight = (part for m in listed for part in by_rows(m, self.shape[-1]))
        return [part for m in straight for part in phased(m, self.scales.per_byte)]


# The file of tensors that a source does not have and whose values are known (`absent` of a rule).
# It has a zero at each byte and no end.
ZEROS = "/dev/zero"
NEW = "new: "  # starts the keys of tensors that an edit makes


@dataclass(eq=False)
class Layout:
    """The places of all stored tensors in the files of a checkpoint."""

    files: list[str]
    stored: list[Stored]
    shapes: dict[str, tuple[int, ...]]  # of each logical tensor, by template
    ignored: dict[str, str] = field(default_factory=dict)  # stored key that is not read -> reason
    # the entries of `ignored` that are weights of the model
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def own_files(self) -> list[str]:
        """The files of the checkpoint, without ZEROS."""
        return [file for file in self.files if file != ZEROS]

    def filled(self) -> list[Stored]:
        """Returns the stored tensors whose values are known and in no file of the checkpoint,
        without those that an edit makes.
        """
        number = self.files.index(ZEROS) if ZEROS in self.files else -1
        filled = (s for s in self.stored if len(s) and s.file[0] == number)
        return [s for s in filled if not s.key.startswith(NEW)]

    @property
    def num_tensors(self) -> int:
        """The number of logical tensors in the layout."""
        places: dict[str, list[np.ndarray]] = {}
        experts = 1 + max((int(s.expert.max()) for s in self.stored if len(s)), default=0)
        for s in self.stored:
            for name in s.tensors if not s.replica else ():
                places.setdefault(name, []).append(s.layer.astype("i8") * experts + s.expert)
        return sum(
            int(np.count_nonzero(np.bincount(np.concatenate(ids)))) for ids in places.values()
        )

    def num_stored(self, by_file: bool) -> int:
        """Returns the number of stored tensors: keys, each of which may have pieces for several
        layers and in several files.

        by_file: each file has tensors of its own, so that a key counts once in each.
        """
        places: dict[str, list[np.ndarray]] = {}
        for s in self.stored:
            numbers = np.zeros((len(s), 3), "i8")
            for column, (values, counts) in enumerate(
                (
                    (s.layer, "{layer}" in s.key or "{mtp}" in s.key),
                    (s.expert, "{expert}" in s.key),
                    (s.file, by_file),
                )
            ):
                if counts:
                    numbers[:, column] = values
            places.setdefault(s.key, []).append(numbers)
        return sum(len(np.unique(np.concatenate(of), axis=0)) for of in places.values())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a dense tensor of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes, None if it is empty."""
    low = tuple(map(max, a.offset, b.offset))
    shape = tuple(
        min(x + n, y + m) - z
        for x, n, y, m, z in zip(a.offset, a.shape, b.offset, b.shape, low, strict=True)
    )
    return Box(low, shape) if min(shape, default=1) > 0 else None


def range_boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Returns the boxes of a row-major tensor that its elements from `low` to `high` fill, in their
    order. The elements of each box follow each other.

        shape [3, 4], 2 to 9    . . a b | c c c c | d . . .   ->   boxes of a, c and d
    """
    if low >= high:
        return []
    if len(shape) <= 1:
        return [Box((low,) * len(shape), (high - low,) * len(shape))]
    inner = math.prod(shape[1:])

    def within(row: int, begin: int, end: int) -> list[Box]:
        parts = range_boxes(shape[1:], begin, end)
        return [Box((row, *b.offset), (1, *b.shape)) for b in parts]

    first, last = -(-low // inner), high // inner  # the whole rows
    if first > last:
        return within(last, low - last * inner, high - last * inner)
    out = within(first - 1, low - (first - 1) * inner, inner) if first * inner > low else []
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        out.append(Box((first, *zeros), (last - first, *shape[1:])))
    return out + (within(last, 0, high - last * inner) if high > last * inner else [])


def restride(piece: Piece, shape: Sequence[int], strides: Sequence[int]) -> Piece | None:
    """Returns the piece as placed in a strided buffer of the same shape (a view).

    Returns None if no affine map describes that place.
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


def crop(piece: Piece, shape: Sequence[int], region: Box) -> Piece | None:
    """Returns the part of a piece of a dense buffer of this shape that lies in a region of it, as a
    piece of a buffer of the region alone. None if no element lies there.

    Raises ValueError if an axis of the piece runs along several axes of the buffer.
    """
    dense, inner = row_major(shape), row_major(region.shape)
    place, rest = [], piece.start
    for step in dense:
        place.append(rest // step)
        rest %= step
    place = [at - low for at, low in zip(place, region.offset, strict=True)]
    offset, sizes, strides = list(piece.box.offset), list(piece.box.shape), list(piece.strides)
    free = set(range(len(dense)))
    for axis, (count, stride) in enumerate(zip(piece.box.shape, piece.strides, strict=True)):
        if count == 1:
            continue
        along = next((d for d in sorted(free) if stride >= dense[d] and shape[d] > 1), None)
        if (
            along is None
            or stride % dense[along]
            or (count - 1) * stride >= shape[along] * dense[along]
        ):
            raise ValueError(f"strides {list(piece.strides)} in a buffer {list(shape)}")
        free.remove(along)
        step, first = stride // dense[along], place[along]
        low = max(0, (step - 1 - first) // step)
        high = min(count, (region.shape[along] - first + step - 1) // step)
        if low >= high:
            return None
        offset[axis] += low
        sizes[axis], strides[axis] = high - low, step * inner[along]
        place[along] = first + low * step
    if not all(0 <= at < size for at, size in zip(place, region.shape, strict=True)):
        return None
    start = sum(at * step for at, step in zip(place, inner, strict=True))
    box = Box(tuple(offset), tuple(sizes))
    return piece._replace(box=box, start=start, strides=tuple(strides))


def clip(piece: Piece, low: int, high: int) -> list[Piece]:
    """Returns the parts of a piece that lie in elements low..high of its buffer, as pieces of a
    buffer of these elements alone.

        [2, 4] at start 0, elements 3..6    . . . a | b c . .   ->   a at 0, [b c] at 1
    """
    first = piece.start
    last = first + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
    if last < low or first >= high:
        return []
    if low <= first and last < high:
        return [piece._replace(start=first - low)]
    # Slabs along the axis of the largest step are inside, outside, or cut on their own.
    axis = max((a for a, n in enumerate(piece.box.shape) if n > 1), key=lambda a: piece.strides[a])
    step, count = piece.strides[axis], piece.box.shape[axis]
    width = last - first - (count - 1) * step  # from the first to the last element of a slab
    begin = min(max(-(-(low - first) // step), 0), count)
    end = min(max((high - 1 - width - first) // step + 1, begin), count)
    touched = min(max((low - width - first) // step, 0), count)
    beyond = min(max(-(-(high - first) // step), end), count)
    out: list[Piece] = []
    for at, rows in (
        *((k, 1) for k in range(touched, begin)),
        (begin, end - begin),
        *((k, 1) for k in range(end, beyond)),
    ):
        if rows:
            offset, shape = list(piece.box.offset), list(piece.box.shape)
            offset[axis], shape[axis] = offset[axis] + at, rows
            box = Box(tuple(offset), tuple(shape))
            out += clip(piece._replace(box=box, start=first + at * step), low, high)
    return out


def moves(source: Piece, target: Piece) -> list[Move]:
    """Returns as few 2-D moves as possible that copy the intersection of both boxes."""
    box = overlap(source.box, target.box)
    if box is None:
        return []
    src, dst = source.start, target.start
    # (size, source stride, target stride); axes are merged if they are contiguous on both sides
    axes: list[tuple[int, int, int]] = []
    ends = zip(source.box.offset, source.strides, target.box.offset, target.strides, strict=True)
    for n, at, (a, s, b, t) in zip(box.shape, box.offset, ends, strict=True):
        src += (at - a) * s
        dst += (at - b) * t
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
        from_ = src + sum(i * s for i, (_, s, _) in zip(index, axes, strict=True))
        to = dst + sum(i * t for i, (_, _, t) in zip(index, axes, strict=True))
        out.append(Move(rows, run, from_, src_pitch, src_step, to, dst_pitch, dst_step))
    return out


def by_axes(source: Piece, target: Piece) -> list[Move]:
    """Returns moves that copy the intersection of two boxes, of which each axis is one of a matrix:
    the first axis of the tensor, and the others together, whose elements follow each other.
    """
    box = overlap(source.box, target.box)
    if box is None:
        return []
    rows = box.shape[0] if len(box.shape) > 1 else 1
    ends = []
    for piece in (source, target):
        skipped = (o - p for o, p in zip(box.offset, piece.box.offset, strict=True))
        start = piece.start + sum(n * s for n, s in zip(skipped, piece.strides, strict=True))
        ends += [start, piece.strides[0] if rows > 1 else 0, piece.strides[-1]]
    return [Move(rows, math.prod(box.shape) // rows, *ends)]


def coalesce(listed: Iterable[Move]) -> list[Move]:
    """Returns fewer moves that copy the same elements.

    Single rows that follow each other on both sides become one row. Rows at a constant pitch become
    one move.
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
    """Returns moves of the same elements of which each axis goes along the rows of a source
    [.., width] or down its columns.

    So the row of an element depends on one of its two indices, and its column on the other. Runs
    that pass the end of a row are cut there:

        width 3, one row of 8 from 2 on    . . a | b c d | e f g | h . .   ->   a, [b c d][e f g], h
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


def phased(move: Move, per_byte: int) -> list[tuple[Move, int]]:
    """Returns moves of the same elements whose source numbers are bytes that hold `per_byte`
    elements each, with the place of their elements in these bytes.

        2 in a byte, one row of 5    a b | c d | e .   ->   a c e at place 0, b d at place 1
    """
    down = per_byte // math.gcd(per_byte, move.src_pitch) if move.rows > 1 else 1
    along = per_byte // math.gcd(per_byte, move.src_step) if move.run > 1 else 1
    out = []
    for i, j in itertools.product(range(min(down, move.rows)), range(min(along, move.run))):
        start, phase = divmod(move.src_start + i * move.src_pitch + j * move.src_step, per_byte)
        part = Move(
            -(-(move.rows - i) // down),
            -(-(move.run - j) // along),
            start,
            down * move.src_pitch // per_byte,
            along * move.src_step // per_byte,
            move.dst_start + i * move.dst_pitch + j * move.dst_step,
            down * move.dst_pitch,
            along * move.dst_step,
        )
        out.append((part, phase))
    return out


def boxes_of(pieces: Sequence[Piece], axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offsets and the shapes of the boxes of the pieces that are read, as
    [pieces, axes].
    """
    if isinstance(pieces, Rows):
        return pieces.boxes()
    return _as_arrays([p.box for p in pieces if not p.copy], axes)


def _as_arrays(boxes: Sequence[Box], axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offsets and the shapes of boxes. A single number has one axis here."""
    offset = np.array([b.offset or (0,) for b in boxes], "i8").reshape(-1, axes or 1)
    return offset, np.array([b.shape or (1,) for b in boxes], "i8").reshape(-1, axes or 1)


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Returns None if the boxes cover a tensor of this shape exactly once, else the problem."""
    return tiled(*_as_arrays(boxes, len(shape)), shape)


def tiled(low: np.ndarray, sizes: np.ndarray, shape: Sequence[int]) -> str | None:
    """Does what `tiles` does. low, sizes: the offsets and the shapes of the boxes."""
    high = low + sizes

    def said(i: int) -> str:
        axes = len(shape)
        return f"{sizes[i, :axes].tolist()} at {low[i, :axes].tolist()}"

    outside = (low < 0) | (high > np.array(shape or (1,)))
    if outside.any():
        return f"the box {said(int(outside.any(1).argmax()))} reaches outside {list(shape)}"
    if len(low) > 1:
        # only boxes that meet on the axis with most places are compared: there may be a box for
        # each row of a vocabulary, or for each column that is kept
        axis = max(range(low.shape[1]), key=lambda axis: len(distinct(low[:, axis])))
        order = np.argsort(low[:, axis], kind="stable")
        first, last = low[order, axis], high[order, axis]
        count = np.maximum(np.searchsorted(first, last) - np.arange(len(low)) - 1, 0)
        a = np.repeat(np.arange(len(low)), count)
        b = a + 1 + np.arange(len(a)) - np.repeat(np.cumsum(count) - count, count)
        pairs = np.sort(np.stack([order[a], order[b]], 1), axis=1)
        meet = np.maximum(low[pairs[:, 0]], low[pairs[:, 1]])
        meet = (meet < np.minimum(high[pairs[:, 0]], high[pairs[:, 1]])).all(1)
        if meet.any():
            i, j = min(map(tuple, pairs[meet].tolist()))
            return f"boxes overlap: {said(i)} and {said(j)}"
    volume = int(sizes.prod(1).sum())
    if volume != math.prod(shape):
        return f"{volume:,} of {math.prod(shape):,} elements are covered"
    return None


def num_free(pieces: Sequence[Piece], numel: int, shared: bool = False) -> tuple[int, str | None]:
    """Returns the number of elements of a flat buffer that no piece covers, and the problem as
    `gaps` does. Needs little memory for pieces that repeat row by row, such as columns of a matrix.

    shared: pieces may overlap, and the number is 0.
    """
    alike = _alike(pieces)
    if shared:
        first = min(int(at.min()) for at in alike.values())
        ends = (
            int(at.max()) + (rows - 1) * pitch + (run - 1) * step
            for (rows, pitch, run, step), at in alike.items()
        )
        return 0, _outside(numel) if first < 0 or max(ends) >= numel else None
    found: dict[tuple[int, ...], np.ndarray] = {}
    for (rows, pitch, run, step), at in alike.items():
        # a column of single elements has as many rows as wider columns
        way = (run, step, 1, 1) if rows == 1 and step > 1 else (rows, pitch, run, step)
        found[way] = np.concatenate([found[way], at]) if way in found else at
    if len({way[:2] for way in found}) == 1:
        rows, pitch = next(iter(found))[:2]
        first = min(int(at.min()) for at in found.values())
        end = max(int(at.max()) + (run - 1) * step + 1 for (_, _, run, step), at in found.items())
        if rows > 1 and first >= 0 and end - first <= pitch and end + (rows - 1) * pitch <= numel:
            row = {(1, 0, *way[2:]): at for way, at in found.items()}
            holes, wrong = _gaps(row, numel)
            return (0, wrong) if wrong else (numel - rows * (numel - int(holes[:, 1].sum())), None)
    holes, wrong = _gaps(alike, numel)
    return int(holes[:, 1].sum()), wrong


def gaps(pieces: Sequence[Piece], numel: int) -> tuple[np.ndarray, str | None]:
    """Returns [(start, length)] of the elements of a flat buffer that no piece covers, and the
    problem if two pieces overlap or one reaches outside.
    """
    return _gaps(_alike(pieces), numel)


def _alike(pieces: Sequence[Piece]) -> dict[tuple[int, ...], np.ndarray]:
    """Returns the first elements of the rows of pieces by their (rows, pitch, run, step)."""
    found: dict[tuple[tuple[int, ...], ...], tuple[Piece, list[int]]] = {}
    if isinstance(pieces, Rows):
        groups = [(rows[0], rows.start) for rows in pieces.alike()]
    else:
        for p in pieces:
            found.setdefault((p.box.shape, p.strides), (p, []))[1].append(p.start)
        groups = [(p, np.array(starts, "i8")) for p, starts in found.values()]
    alike: dict[tuple[int, ...], list[np.ndarray]] = {}
    for piece, starts in groups:
        for row in moves(piece, piece):
            both = (row.run, row.src_step), (row.rows, row.src_pitch)
            # the inner one has the smaller stride: the elements of a transpose's column are
            # neighbours
            (run, step), (rows, pitch) = sorted(both, key=lambda way: (way[0] == 1, way[1]))
            at = starts + (row.src_start - piece.start)
            alike.setdefault((rows, pitch, run, step), []).append(at)
    return {way: np.concatenate(at) for way, at in alike.items()}


def _gaps(alike: dict[tuple[int, ...], np.ndarray], numel: int) -> tuple[np.ndarray, str | None]:
    starts, lengths = [], []
    for (rows, pitch, run, step), firsts in alike.items():
        first = np.sort(firsts)
        # strided elements are intervals of 1 each, and those that take turns are one interval
        if step > 1 and len(first) % step == 0:
            turns = first.reshape(-1, step)
            if (turns == turns[:, :1] + np.arange(step)).all():
                first, run, step = turns[:, 0], run * step, 1
        flat = first[:, None] + np.arange(rows, dtype="i8") * pitch
        if step != 1:
            flat = flat[..., None] + np.arange(run, dtype="i8") * step
        starts.append(flat.ravel())
        lengths.append(np.full(flat.size, run if step == 1 else 1, "i8"))
    start, length = (np.concatenate(x) if x else np.empty(0, "i8") for x in (starts, lengths))
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + length)[order]
    nothing = np.empty((0, 2), "i8")
    if len(start) and (start[0] < 0 or (end > numel).any()):
        return nothing, _outside(numel)
    if (end[:-1] > start[1:]).any():
        return (
            nothing,
            f"two pieces share element {int(start[1:][end[:-1] > start[1:]][0]):,} of the buffer",
        )
    low, high = np.concatenate([[0], end]), np.concatenate([start, [numel]])
    free = low < high
    return np.stack([low[free], (high - low)[free]], 1), None


def _outside(numel: int) -> str:
    return f"a piece reaches outside the {numel:,} elements of the buffer"
