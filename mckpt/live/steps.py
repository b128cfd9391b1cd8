"""The work of one rank for each bucket of a sync, which is the same at each call and is therefore
listed once: copies between three memories.

    weights --send--> buffer of the bucket --receive--> tensors that are made
       |  |                 ^                             ^
       |  +--pack--> boxes --codings                      |
       +-----------------------own------------------------+

A tensor that lies in the buffer as a whole is given from there. Copies of neighbouring elements are
one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from mckpt.geometry.box import row_major
from mckpt.geometry.join import UNSCALED
from mckpt.live.buckets import ALIGN, OWN, UNEVEN, Bucket, Coded, ExportedTensor, Part
from mckpt.live.flat import offsets
from mckpt.live.together import call
from mckpt.values.dtypes import itemsize
from mckpt.values.element import Cast

if TYPE_CHECKING:
    import torch

    from mckpt.live.memory import Memory


class LiveMove(NamedTuple):
    """A copy of elements. Strides are elements; starts are elements of the memory, but a place
    (`live.memory`) in the weights.
    """

    tensor: int  # number in the bucket
    shape: tuple[int, ...]
    src: int
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]
    weight: int | None = None  # the number of the weight, if the copy reads all of it, in its shape
    # Joined.grids: of a copy that adds a product of an adapter, the first row of the product; and
    # the place of its first element on the rank in the plan
    grid: int = UNSCALED
    origin: int = 0


class ViewRun(NamedTuple):
    """Views of one shape at even distances in one memory, which torch makes at once: for thousands
    of experts, one call for each would take longer than sending them.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # element of the first view
    step: int  # elements from one view to the next
    numbers: list[int]  # of the views

    def views(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the views as one tensor, whose first axis has their numbers."""
        shape, strides = (len(self.numbers), *self.shape), (self.step, *self.strides)
        return memory.as_strided(shape, strides, self.start)


class Moves(NamedTuple):
    """Copies of one cast."""

    cast: Cast
    several: bool  # they may be done at once; otherwise values change, or must be looked at
    listed: list[LiveMove]
    sources: list[ViewRun]  # of the copies, if they read a buffer
    targets: list[ViewRun]


class Coding(NamedTuple):
    """Boxes of one shape that are quantised."""

    dtype: str  # of the values
    numbers: list[int]  # of the tensors with the codes
    values: ViewRun  # of the boxes that are packed
    codes: ViewRun  # of the buffer
    scales: ViewRun


class Steps(NamedTuple):
    """The work of this rank for a bucket."""

    buffer: int  # bytes: of all segments on a rank that receives them, else of its own
    made: int  # bytes of the tensors that are made
    packed: int  # bytes of the boxes that are quantised
    send: list[Moves]
    pack: list[Moves]
    codings: list[Coding]
    own: list[Moves]
    receive: list[Moves]
    # the tensors in the memory that is made (True) or in the buffer, of each dtype, and whether
    # they are quantised; none on a rank that does not receive the bucket
    tensors: dict[tuple[bool, str, bool], list[ViewRun]]

    @property
    def room(self) -> int:
        """Returns the bytes that it needs until the bucket is on its way."""
        return self.buffer + self.packed

    @property
    def memory(self) -> int:
        """Returns the bytes that it needs behind that."""
        return self.buffer + self.made


class SentBucket(NamedTuple):
    """A bucket on its way."""

    bucket: Bucket
    steps: Steps
    buffer: torch.Tensor  # all segments on a rank that receives them, else its own; and more
    works: list[Any]  # of torch.distributed
    ready: torch.Tensor  # becomes the sum of the tokens of all ranks, and of other numbers
    number: int  # of buckets that were sent until then in this call

    def wait(self) -> None:
        """Waits for all works. Gloo waits for ever for a message that was waited for before."""
        while len(self.works) > 1:
            call(self.works.pop(0).wait)
        for work in self.works:  # the sum
            call(work.wait)


def steps_of(
    bucket: Bucket,
    casts: Sequence[Cast],
    rank: int,
    memory: Memory | None,
    special: Callable[[Cast], bool],
    flat: int = 0,
) -> Steps:
    """Returns the work of a rank for a bucket.

    memory: of the weights of this rank, None if it has none. special: of a cast, whether its copies
    must be done one by one. flat: all tensors are made, as in a `FlatBucket` of this alignment.
    """
    receives = rank in bucket.to
    first, size = bucket.segments.get(rank, (0, 0))
    names = bucket.copies.dtype.names or ()
    columns = [bucket.copies[name].tolist() for name in names]
    columns += [bucket.tensor.tolist(), bucket.rank.tolist(), bucket.at.tolist()]
    columns += [bucket.shift.tolist()]
    copies = [_CopyRow(*row) for row in zip(*columns, strict=True)]
    # copies into boxes that are quantised; further copies then send the codes and the scales
    coded, known = {one.codes.number for one in bucket.coded}, len(casts)
    packs = [copy for copy in copies if copy.number in coded]
    copies = [copy for copy in copies if copy.number not in coded]
    for one in bucket.coded:
        for index, part in enumerate((one.codes, one.scales), known):
            copies.append(_row_of(part, bucket.tensors[part.number], one.rank, index))
    for part in bucket.coded[0][-2:] if bucket.coded else ():
        kind = bucket.tensors[part.number].dtype
        # torch copies few tensors of float8 at once
        casts = [*casts, Cast("uint8", "uint8") if itemsize(kind) == 1 else Cast(kind, kind)]
    parts: list[list[_CopyRow]] = [[] for _ in bucket.tensors]
    for copy in copies if receives else ():
        parts[copy.number].append(copy)
    taken = [(t, part) for t, part in zip(bucket.tensors, parts, strict=True) if rank in t.to]
    taken = taken if receives else []  # they come first
    within = [None if flat else _in_one(part, tensor, casts) for tensor, part in taken]
    sizes = [
        (0 if at is not None else math.prod(t.shape) * itemsize(t.dtype), itemsize(t.dtype))
        for (t, _), at in zip(taken, within, strict=True)
    ]
    starts, made = offsets(sizes, flat or ALIGN)
    # of each tensor: whether it is made, and its first element there
    places = [
        (at is None, (start if at is None else at) // width)
        for at, start, (_, width) in zip(within, starts, sizes, strict=True)
    ]
    made = -(-made // ALIGN) * ALIGN  # which any dtype can view
    send, pack, own, receive = (_Lists(special) for _ in range(4))
    for copy in (*packs, *copies):
        cast, shape = casts[copy.cast], (copy.rows, copy.run)
        dense = (copy.run, 1)
        width = itemsize(cast.source)
        src_strides = copy.src_pitch // width, copy.src_step // width
        weight = memory.number(copy.src_at) if memory and copy.rank in (rank, OWN) else 0
        width = itemsize(cast.target)
        at = copy.at // width
        adds = (copy.grid, copy.src_at - copy.shift) if cast.term else (UNSCALED, 0)
        is_packed = copy.number in coded and copy.cast < known
        if copy.rank == rank and copy.cast < known:
            start = at - (0 if receives or is_packed else first // width)
            move = LiveMove(copy.number, shape, copy.src_at, src_strides, start, dense, None, *adds)
            (pack if is_packed else send).add(cast, move, weight)
        if is_packed:
            continue
        if copy.number < len(places) and places[copy.number][0]:
            tensor = bucket.tensors[copy.number]
            start = places[copy.number][1] + (copy.dst_at - tensor.byte) // width
            strides = copy.dst_pitch // width, copy.dst_step // width
            if copy.rank == OWN:
                given = copy.src_at, src_strides, start, strides
                own.add(cast, LiveMove(copy.number, shape, *given, None, *adds), weight)
            else:
                move = LiveMove(copy.number, shape, at, dense, start, strides)
                receive.add(Cast(cast.target, cast.target), move, None)
    buffer = bucket.nbytes if receives or bucket.sent else size
    tensors: dict[tuple[bool, str, bool], list[View]] = {}
    for number, (is_made, start) in enumerate(places):
        tensor = bucket.tensors[number]
        view = number, tensor.shape, row_major(tensor.shape), start
        place = is_made, tensor.dtype, tensor.quantised
        tensors.setdefault(place, []).append(view)
    mine = [one.behind(0 if receives else -first) for one in bucket.coded if one.rank == rank]
    return Steps(
        buffer,
        made,
        -(-max((one.end for one in mine), default=0) // ALIGN) * ALIGN,
        send.moves(memory),
        pack.moves(memory),
        _codings(mine, bucket.tensors),
        own.moves(memory),
        receive.moves(),
        {memory: runs(views) for memory, views in tensors.items()},
    )


def even_rooms(steps: list[Steps], most: int) -> list[Steps]:
    """Returns the steps with memory of one size for most buckets, which torch's allocator can give
    again and again. Two of these buckets, and the tensors that are made of the first, need at most
    twice `most` bytes.
    """
    limit = int(UNEVEN * most / 2)
    small = [s for s in steps if max(s.buffer, s.made, s.packed) <= limit]
    buffer = max((s.buffer for s in small), default=0)
    made = max((s.made for s in small), default=0)
    packed = max((s.packed for s in small), default=0)
    return [
        s._replace(buffer=s.buffer and buffer, made=s.made and made, packed=s.packed and packed)
        if max(s.buffer, s.made, s.packed) <= limit
        else s
        for s in steps
    ]


def _codings(listed: Iterable[Coded], tensors: Sequence[ExportedTensor]) -> list[Coding]:
    """Returns boxes that are quantised, together those of one shape at even distances.

    listed: boxes of this rank, with their places in its memory.
    """
    found: dict[tuple[Any, ...], list[list[tuple[int, ...]]]] = {}
    # experts are listed one after the other, and packed as they lie in the weights
    for one in sorted(listed, key=lambda one: one.codes.number):
        parts = one.codes, one.scales
        places = (part.at // itemsize(tensors[part.number].dtype) for part in parts)
        row = one.codes.number, one.at // itemsize(one.dtype), *places
        shapes = one.shape, *(part.shape for part in parts)
        of_shape = found.setdefault((one.dtype, *shapes), [[]])
        last = of_shape[-1]
        by = [
            tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise([*last[-2:], row])
        ]
        if len({step[1:] for step in by}) > 1 or any(n < 0 for step in by for n in step[1:]):
            of_shape.append([])
        of_shape[-1].append(row)
    codings = []
    for (dtype, *of_parts), stretches in found.items():
        for rows in stretches:
            numbers, *starts = zip(*rows, strict=True)
            given = zip(of_parts, starts, strict=True)
            views = [
                [(n, size, row_major(size), at) for n, at in zip(numbers, of, strict=True)]
                for size, of in given
            ]
            codings.append(Coding(dtype, list(numbers), *(runs(of)[0] for of in views)))
    return codings


# number, shape, strides, first element
View = tuple[int, tuple[int, ...], tuple[int, ...], int]


def runs(views: Iterable[View]) -> list[ViewRun]:
    """Returns the runs that have these views."""
    found: dict[tuple[Any, ...], list[ViewRun]] = {}
    for number, shape, strides, start in views:
        listed = found.setdefault((shape, strides), [])
        if listed:
            last = listed[-1]
            count = len(last.numbers)
            step = start - last.start if count == 1 else last.step
            if step >= 0 and start == last.start + count * step:
                listed[-1] = last._replace(step=step, numbers=[*last.numbers, number])
                continue
        listed.append(ViewRun(shape, strides, start, 0, [number]))
    return [run for listed in found.values() for run in listed]


class _CopyRow(NamedTuple):
    """A copy of a bucket as numbers of Python: the fields of COPY, and those of Bucket."""

    tensor: int
    src_file: int
    dst_file: int
    cast: int
    grid: int
    rows: int
    run: int
    src_at: int
    dst_at: int
    src_pitch: int
    dst_pitch: int
    src_step: int
    dst_step: int
    number: int  # of its tensor in the bucket
    rank: int
    at: int
    shift: int


def _row_of(part: Part, tensor: ExportedTensor, rank: int, cast: int) -> _CopyRow:
    """Returns the copy of a part of a bucket into its tensor."""
    width, columns = itemsize(tensor.dtype), tensor.shape[1]
    at = tensor.byte + (part.start[0] * columns + part.start[1]) * width
    return _CopyRow(
        **dict.fromkeys(_CopyRow._fields, 0)
        | {"cast": cast, "grid": UNSCALED, "rows": part.shape[0], "run": part.shape[1]}
        | {"dst_at": at, "dst_pitch": columns * width, "dst_step": width}
        | {"number": part.number, "rank": rank, "at": part.at}
    )


def _in_one(parts: list[_CopyRow], tensor: ExportedTensor, casts: Sequence[Cast]) -> int | None:
    """Returns the byte of the buffer at which a tensor begins, if it lies there as a whole."""
    end = 0
    for copy in parts:
        width = itemsize(casts[copy.cast].target)
        strides = copy.dst_pitch // width, copy.dst_step // width
        follows = copy.at == parts[0].at + end and copy.dst_at == tensor.byte + end
        if copy.rank == OWN or not follows or not _dense((copy.rows, copy.run), strides):
            return None
        end += copy.rows * copy.run * width
    return parts[0].at if parts else None


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns whether elements of two axes lie one after the other."""
    (rows, run), (pitch, step) = shape, strides
    return (step == 1 or run == 1) and (pitch == run or rows == 1)


def _in_shape(move: LiveMove, cast: Cast, memory: Memory) -> LiveMove:
    """Returns a copy without gaps in the shape of its weight if it reads all of it. The weight then
    needs no view, which would take longer than the copy of a small one.
    """
    number = memory.number(move.src)
    weight = memory.weights[number]
    nbytes = math.prod(move.shape) * itemsize(cast.source)
    if (move.src, nbytes, cast.source) != (weight.at, weight.nbytes, weight.dtype):
        return move
    return move._replace(shape=weight.shape, dst_strides=row_major(weight.shape), weight=number)


class _Lists:
    """Collects copies by their cast; those of neighbours become one."""

    def __init__(self, special: Callable[[Cast], bool]) -> None:
        self.special = special
        self.found: dict[tuple[Cast, bool, bool], list[LiveMove]] = {}
        self.last: Any = None  # the weight of the last move

    def add(self, cast: Cast, move: LiveMove, weight: int | None) -> None:
        """Adds a copy. weight: the number of the weight that it reads, None if it is a buffer."""
        special = self.special(cast)
        flat = _dense(move.shape, move.src_strides) and _dense(move.shape, move.dst_strides)
        listed = self.found.setdefault((cast, flat, special), [])
        if not flat or special:
            listed.append(move)
            return
        count = math.prod(move.shape)
        # a place counts bytes
        width = 1 if weight is None else itemsize(cast.source)
        if listed:
            before = listed[-1]
            own = before.shape[0]
            follows = before.dst + own == move.dst and before.src + own * width == move.src
            if follows and self.last == (cast, weight):
                listed[-1] = before._replace(shape=(own + count,))
                return
        listed.append(LiveMove(move.tensor, (count,), move.src, (1,), move.dst, (1,)))
        self.last = cast, weight

    def moves(self, memory: Memory | None = None) -> list[Moves]:
        """Returns the copies. Those without gaps are apart, because one kernel can do them all.

        memory: of the weights that they read; None if they read a buffer.
        """
        found = []
        for (cast, flat, special), listed in self.found.items():
            if memory is not None and flat and not special:
                listed = [_in_shape(move, cast, memory) for move in listed]
            sources = [(i, m.shape, m.src_strides, m.src) for i, m in enumerate(listed)]
            targets = [(i, m.shape, m.dst_strides, m.dst) for i, m in enumerate(listed)]
            of_sources = runs(sources) if memory is None else []
            found.append(Moves(cast, not special, listed, of_sources, runs(targets)))
        return found
