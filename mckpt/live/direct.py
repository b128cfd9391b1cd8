"""The plan of a sync whose receivers hold parts of tensors: each element goes from one rank that
has it to each rank that holds it, and to no other.

A receiver is described as a sender is (`live.memory`): all boxes that it holds count as one file.
The join of the model with these files has the copies.

    rank 3     [q_proj.weight, rows 0..8 | down_proj.weight, columns 16..32 | ...]
    place       0                          1024

Every rank of the trainer makes the plan of all ranks, and a receiver gets its part of it.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import UsageError
from mckpt.formats.hf_files import Row
from mckpt.geometry.box import Box, Layout, Stored, crop, row_major
from mckpt.geometry.join import Joined, join
from mckpt.live.buckets import (
    ALIGN,
    BUCKET,
    FILE,
    OWN,
    Bucket,
    Buckets,
    ExportedTensor,
    Transfer,
    exported,
    parts_of_copies,
)
from mckpt.live.model import RankParts, ranks_of
from mckpt.options import TargetOptions
from mckpt.values.dtypes import itemsize

PEERS = 16  # a receiver takes pieces of this part of a bucket from one sender after the other
Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each axis of a tensor
Boxes = Mapping[str, Sequence[Bounds]]  # what a rank holds, by Hugging Face names


class Held(NamedTuple):
    """The boxes of all receivers, in the order of their places. The arrays have an entry for each:
    a model has as many boxes as it has experts, on each receiver, and few that differ.
    """

    rows: list[Row]  # the tensors of the Hugging Face directory
    kinds: list[Box]
    row: np.ndarray  # the number of its tensor
    kind: np.ndarray
    rank: np.ndarray  # the receiver
    at: np.ndarray  # its place: the number of the file, shifted by FILE, and the byte
    nbytes: np.ndarray

    def tensor(self, number: int, received: bool = True) -> ExportedTensor:
        """Returns a box as a tensor of a bucket."""
        row, box = self.rows[self.row[number]], self.kinds[self.kind[number]]
        to, at = frozenset([int(self.rank[number])] * received), int(self.at[number])
        given = row.key, row.dtype, box.shape, 0, row.shape, at, False, box.offset
        return ExportedTensor(*given, to)


class Links(NamedTuple):
    """The plan of all ranks. The arrays have an entry for each copy."""

    config: dict[str, Any]  # of the Hugging Face directory
    joined: Joined  # source places of copies are those of the sender
    held: Held
    transfers: Transfers
    most: int  # bytes of a bucket
    num_buckets: int
    box: np.ndarray  # its number in `held`
    sender: np.ndarray
    receiver: np.ndarray
    bucket: np.ndarray

    def digest(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks."""
        found = hashlib.sha256(repr((self.held[:2], self.transfers.sources)).encode())
        for array in (*self.held[2:], *self.transfers.columns, self.bucket):
            found.update(array.tobytes())
        return {"the plan, which `like`, `args` and `to` decide": found.hexdigest()[:16]}

    def of(self, rank: int, all_transfers: bool = False) -> Buckets:
        """Returns the part of the plan that a rank of the group carries out."""
        mine = np.flatnonzero((self.sender == rank) | (self.receiver == rank))
        mine = mine[np.argsort(self.bucket[mine], kind="stable")]
        ends = np.searchsorted(self.bucket[mine], np.arange(self.num_buckets + 1)).tolist()
        listed = [self._bucket(rank, mine[a:b]) for a, b in pairwise(ends)]
        joined = structs.replace(self.joined, copies=self.joined.copies[:0])
        every = self.transfers
        if not all_transfers:
            every = every.of(rank)
        own = every if all_transfers else list(every)  # a list has nothing of other receivers
        return Buckets(self.config, joined, listed, self.most, own, every.links())

    def _bucket(self, rank: int, rows: np.ndarray) -> Bucket:
        """Returns what a rank sends and receives at once: behind the messages to other ranks those
        from other ranks. In a message, copies are in the order of `buckets._bucket`.
        """
        copies, box, sender, receiver = (
            every[rows] for every in (self.joined.copies, self.box, self.sender, self.receiver)
        )
        items = np.array([itemsize(c.target) for c in self.joined.casts], "i8")[copies["cast"]]
        _, part = np.unique(np.stack([box, sender]), axis=1, return_inverse=True)
        part = part.reshape(-1)
        first = np.full(len(rows), np.iinfo("i8").max)
        np.minimum.at(first, part, copies["src_at"])
        keys = copies["dst_at"], first[part], -items, receiver, sender, sender != rank
        order = np.lexsort(keys)
        copies, box, sender, receiver, items = (
            every[order] for every in (copies, box, sender, receiver, items)
        )
        sizes, at = copies["rows"] * copies["run"] * items, np.zeros(len(rows), "i8")
        sent, received, end = dict[int, tuple[int, int]](), dict[int, tuple[int, int]](), 0
        changes = np.flatnonzero((np.diff(sender) != 0) | (np.diff(receiver) != 0)) + 1
        for a, b in pairwise([0, *changes.tolist(), len(rows)] if len(rows) else []):
            source, target, nbytes = int(sender[a]), int(receiver[a]), int(sizes[a:b].sum())
            if source == target:
                continue
            at[a:b] = end + np.cumsum(sizes[a:b]) - sizes[a:b]
            of_peer, peer = (sent, target) if source == rank else (received, source)
            of_peer[peer] = end, nbytes
            end += -(-nbytes // ALIGN) * ALIGN
        mine = np.unique(box[receiver == rank])
        others = np.setdiff1d(box, mine)
        tensors = [self.held.tensor(n) for n in mine.tolist()]
        tensors += [self.held.tensor(n, received=False) for n in others.tolist()]
        listed = np.concatenate([mine, others])
        order = np.argsort(listed)
        number = order[np.searchsorted(listed[order], box)]
        return Bucket(
            tensors,
            frozenset([rank] if len(mine) else []),
            copies,
            number,
            np.where(sender == receiver, OWN, sender),
            at,
            np.zeros(len(rows), "i8"),
            received,
            end,
            sent,
        )


def plan_boxes(
    model: Checkpoint,
    target: TargetOptions,
    most: int | None,
    boxes: Mapping[int, Boxes],
    ranks: Sequence[int],
) -> Links:
    """Returns the plan by which all ranks send the boxes of receivers, in buckets of which each
    rank sends and receives at most half of `most` bytes, or one box.

    boxes: by the ranks of the group that holds trainers and receivers. ranks: the number in this
    group of each rank of the trainer.

    Raises the errors of a conversion to Hugging Face, and UsageError for boxes that do not exist or
    are larger than a bucket.
    """
    config, layout, rows, _ = exported(model, target)
    rows = sorted(rows, key=lambda row: row[1])
    held = _held([row for row, _ in rows], boxes, len(layout.files))
    stored = _stored(layout, [at for _, at in rows], held)
    most = most or max(BUCKET, int(held.nbytes.max(initial=0)))
    if large := held.row[held.nbytes > most].tolist():
        names = [held.rows[n].key for n in large]
        raise UsageError.of(f"boxes are larger than bucket_bytes, {most:,}; give more:", names)
    files = [*layout.files, *(f"receiver {rank}" for rank in sorted(boxes))]
    joined = join(model.layout, replace(layout, files=files, stored=[*layout.stored, *stored]))
    copies = joined.copies[joined.copies["dst_file"] >= len(layout.files)]
    items = np.array([itemsize(cast.target) for cast in joined.casts], "i8")[copies["cast"]]
    where = (copies["dst_file"].astype("i8") << FILE) + copies["dst_at"]
    box = np.searchsorted(held.at, where, "right") - 1
    sources = _Sources(ranks_of(model), ranks)
    part = parts_of_copies(copies, ranks_of(model))
    pairs, pair = np.unique(box * len(sources.boxes) + part, return_inverse=True)
    nbytes = np.zeros(len(pairs), "i8")
    np.add.at(nbytes, pair, copies["rows"] * copies["run"] * items)
    of_box, of_part = np.divmod(pairs, max(len(sources.boxes), 1))
    sender = senders(nbytes, held.rank[of_box], sources.holders, of_part)
    copies["src_at"] += sources.shifts(of_part, sender)[pair]
    transfers = Transfers(held, sources.boxes, (of_box, of_part, sender, held.rank[of_box], nbytes))
    bucket = _buckets(transfers, most // 2)
    joined = structs.replace(joined, copies=copies)
    of_copy = box, sender[pair], held.rank[box], bucket[box]
    return Links(config, joined, held, transfers, most, 1 + max(bucket, default=-1), *of_copy)


class Transfers(Sequence[Transfer]):
    """Who sends which part of a box. Each `Transfer` is made when it is asked for."""

    def __init__(self, held: Held, sources: list[Any], columns: tuple[np.ndarray, ...]) -> None:
        """sources: the key and the box of each part. columns: of each transfer the number of its
        box, of the part, its sender, its receiver and its bytes.
        """
        self.held, self.sources, self.columns = held, sources, columns
        self.box, self.part, self.sender, self.receiver, self.nbytes = columns

    def __len__(self) -> int:
        return len(self.box)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        box, part, sender, receiver, nbytes = (int(column[number]) for column in self.columns)
        name, own = self.held.rows[self.held.row[box]].key, self.held.kinds[self.held.kind[box]]
        key, source = self.sources[part]
        return Transfer(sender, receiver, name, bounds_of(own), key, bounds_of(source), nbytes)

    def of(self, rank: int) -> Transfers:
        """Returns those to one receiver."""
        mine = self.receiver == rank
        return Transfers(self.held, self.sources, tuple(column[mine] for column in self.columns))

    def links(self) -> dict[tuple[int, int], int]:
        """Returns the bytes from each sender to each other rank."""
        ends = np.stack([self.sender, self.receiver])[:, self.sender != self.receiver]
        pairs, number = np.unique(ends, axis=1, return_inverse=True)
        sums = np.zeros(pairs.shape[1], "i8")
        np.add.at(sums, number.reshape(-1), self.nbytes[self.sender != self.receiver])
        return dict(zip(zip(*pairs.tolist(), strict=True), sums.tolist(), strict=True))


class _Sources:
    """The parts of a model, and the ranks of the group that hold each."""

    def __init__(self, parts: RankParts, ranks: Sequence[int]) -> None:
        """ranks: as for `plan_boxes`."""
        listed = parts.holders.items()
        self.boxes = [(key, Box(at, same[0][1].sizes)) for (key, at), same in listed]
        self.holders = [tuple(ranks[rank] for rank, _ in same) for _, same in listed]
        self._width = 1 + max(ranks, default=0)
        # of each part on each rank that has it: both numbers, and its distance from the place that
        # the layout has; the first comes first, because a rank may have a part twice
        found = [
            (n * self._width + ranks[rank], part.at - parts.metadata.items[at][1])
            for n, (at, same) in enumerate(listed)
            for rank, part in same
        ]
        places = np.array(found, "i8").reshape(-1, 2)
        self._places = places[np.argsort(places[:, 0], kind="stable")].T

    def shifts(self, part: np.ndarray, sender: np.ndarray) -> np.ndarray:
        """Returns the bytes by which senders have parts behind their places in the layout."""
        wanted, shifts = self._places
        found: np.ndarray = shifts[np.searchsorted(wanted, part * self._width + sender)]
        return found


def bounds_of(box: Box) -> Bounds:
    """Returns a box as (start, stop) along each axis."""
    return tuple((low, low + n) for low, n in zip(box.offset, box.shape, strict=True))


def _held(rows: list[Row], boxes: Mapping[int, Boxes], first: int) -> Held:
    """Returns the boxes of all receivers. Each receiver is a file.

    rows: in the order of their places. first: the number of the first receiver's file. Raises
    UsageError for a box that does not exist.
    """
    number = {row.key: n for n, row in enumerate(rows)}
    kinds = dict[Bounds, int]()
    # of lists, which tensors share; each is kept, so that no other one gets its number
    known = dict[int, tuple[Any, tuple[int, ...]]]()
    tensor, found_kinds, counts = list[int](), list[tuple[int, ...]](), list[int]()
    for _, held in sorted(boxes.items()):
        before = len(found_kinds)
        for listed in held.values():
            if id(listed) not in known:
                of = tuple(kinds.setdefault(box, len(kinds)) for box in listed)
                known[id(listed)] = listed, of
            found_kinds.append(known[id(listed)][1])
        tensor += [number.get(name, -1) for name in held]
        counts.append(sum(map(len, found_kinds[before:])))
    row = np.repeat(np.array(tensor, "i8"), np.fromiter(map(len, found_kinds), "i8"))
    kind = np.fromiter(chain.from_iterable(found_kinds), "i8")
    _refuse_unknown({row.key: row.shape for row in rows}, boxes)
    found = [Box(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in kinds]
    items = np.array([itemsize(row.dtype) for row in rows], "i8")
    nbytes = np.array([math.prod(box.shape) for box in found], "i8")[kind] * items[row]
    file = np.repeat(np.arange(len(counts)), counts)
    padded = -(-nbytes // ALIGN) * ALIGN
    at = _running(padded, file)[0] - padded + (file + first << FILE)
    return Held(rows, found, row, kind, np.array(sorted(boxes), "i8")[file], at, nbytes)


def _stored(layout: Layout, places: Sequence[int], held: Held) -> list[Stored]:
    """Returns boxes as stored tensors: those of one geometry are one.

    layout: of the Hugging Face directory. places: of the first bytes of its tensors.
    """
    by_row, starts, stored = np.argsort(held.row, kind="stable"), np.array(places), list[Stored]()
    first = np.searchsorted(held.row[by_row], np.arange(len(places) + 1))  # box of each tensor
    shapes = dict.fromkeys(row.shape for row in held.rows)
    numbers = {shape: n for n, shape in enumerate(shapes)}
    form = np.array([numbers[row.shape] for row in held.rows], "i8")[held.row]
    form = form * len(held.kinds) + held.kind
    for s in layout.stored:
        at = (s.file.astype("i8") << FILE) + s.at
        row = np.searchsorted(starts, at, "right") - 1
        skipped = (at - starts[row]) // itemsize(s.dtype) // s.numel
        count = first[row + 1] - first[row]
        one = np.repeat(np.arange(len(row)), count)  # of each pair of a stored tensor and a box
        turn = np.arange(len(one)) - np.repeat(np.cumsum(count) - count, count)
        box = by_row[first[row][one] + turn]
        for number in np.unique(form[box]).tolist():
            here = form[box] == number
            shape, kind = held.rows[held.row[box[here][0]]].shape, number % len(held.kinds)
            part = _part(s, held.kinds[kind], shape, one[here], skipped, held.at[box[here]])
            stored += [part] if part is not None else []
    return stored


def _part(
    s: Stored,
    box: Box,
    shape: tuple[int, ...],
    one: np.ndarray,
    skipped: np.ndarray,
    at: np.ndarray,
) -> Stored | None:
    """Returns the part of some stored tensors that boxes of one geometry hold.

    shape: of the tensors of the Hugging Face directory. one: the numbers of the stored tensors.
    skipped: of all of `s`, the experts that come before them in their tensor. at: places of boxes.
    """
    axes = len(shape) - len(s.shape)  # of the experts that one tensor holds
    region, skip = Box(box.offset[axes:], box.shape[axes:]), np.zeros(len(one), "i8")
    inside = np.ones(len(one), bool)
    # of the axes of experts, which come first
    for step, size, low, count in zip(row_major(shape[:axes]), shape, *box, strict=False):
        own = skipped[one] // step % size - low
        inside &= (own >= 0) & (own < count)
        skip = skip * count + own
    try:
        pieces = tuple(p for one in s.pieces if (p := crop(one, s.shape, region)))
    except ValueError as error:
        raise UsageError(f"{s.key}: cannot be cut to the box {region}: {error}") from None
    at = at + skip * math.prod(region.shape) * itemsize(s.dtype)
    files = at >> FILE, at & ((1 << FILE) - 1)
    where = (column[inside] for column in (s.layer[one], s.expert[one], *files))
    part = Stored(s.key, s.dtype, region.shape, pieces, *where, replica=True)
    return replace(part, carried=s.carried) if len(part) else None


def index_of(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of an element by its number in row-major order."""
    return tuple(number // step % n for step, n in zip(row_major(shape), shape, strict=True))


def _refuse_unknown(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[int, Boxes]) -> None:
    problems = []
    # lists of boxes that tensors share; each is kept, so that no other one gets its number
    exist: dict[tuple[int, tuple[int, ...]], Any] = {}
    for rank, held in sorted(boxes.items()):
        for name, listed in held.items():
            if (shape := shapes.get(name)) is None:
                problems.append(f"rank {rank}: the model has no {name}")
                continue
            if (id(listed), shape) in exist:
                continue
            before = len(problems)
            for box in listed:
                ends = zip(box, shape, strict=False)  # a box may have other axes: see below
                if len(box) != len(shape) or not all(0 <= a < b <= n for (a, b), n in ends):
                    problems.append(f"rank {rank}: {name} is {list(shape)}, and a box {list(box)}")
            if len(problems) == before:
                exist[id(listed), shape] = listed
    if problems:
        raise UsageError.of("to: the receivers hold boxes that do not exist:", problems)


def senders(
    nbytes: np.ndarray, receiver: np.ndarray, holders: Sequence[Sequence[int]], part: np.ndarray
) -> np.ndarray:
    """Returns the rank that sends each part of a box: the receiver itself if it is one of the
    holders, else the holder that has least to send, and least to this receiver.

    holders: of each part of the model. The others have an entry for each part of a box.
    """
    chosen, sent, link = [0] * len(part), defaultdict[int, int](int), defaultdict[Any, int](int)
    order = np.argsort(-nbytes, kind="stable")
    columns = (column[order].tolist() for column in (nbytes, receiver, part))
    for n, size, to, p in zip(order.tolist(), *columns, strict=True):
        if to in (listed := holders[p]):
            chosen[n] = to
            continue
        one = listed[0]
        for rank in listed:  # a million times for a large model, so without tuples where it can
            more = sent[rank] - sent[one]
            if more < 0 or (more == 0 and (link[rank, to], rank) < (link[one, to], one)):
                one = rank
        chosen[n] = one
        sent[one] += size
        link[one, to] += size
    return np.array(chosen, "i8")


def _buckets(transfers: Transfers, most: int) -> np.ndarray:
    """Returns the number of the bucket of each box. Boxes come in an order in which all receivers
    have something to receive until the end.

    most: bytes that a rank sends and receives in a bucket, if these are several boxes.
    """
    count, order = len(transfers.held.at), _order(transfers, most)
    place, number = np.empty(count, "i8"), np.empty(count, "i8")
    place[order] = np.arange(count)
    box, _, sender, receiver, nbytes = transfers.columns
    sent = sender != receiver
    ends = np.concatenate([receiver, sender[sent]]) * count + place[np.append(box, box[sent])]
    ends, load = np.unique(ends, return_inverse=True)
    loads = np.zeros(len(ends), "i8")
    np.add.at(loads, load, np.append(nbytes, nbytes[sent]))
    loads, _ = _running(loads, ends // count)
    cuts = np.flatnonzero(np.diff(ends // count)) + 1
    # of each rank: the places of its boxes, and the bytes that it sends and receives until then
    ranks = [
        (places.tolist(), sums.tolist())
        for places, sums in zip(np.split(ends % count, cuts), np.split(loads, cuts), strict=True)
    ]
    start, bucket, done = 0, 0, [0] * len(ranks)
    while start < count:
        stop = count
        for (places, sums), n in zip(ranks, done, strict=True):
            n = max(n + 1, bisect_right(sums, most + (sums[n - 1] if n else 0)))
            stop = min(stop, places[n]) if n < len(places) else stop
        number[order[start:stop]] = bucket
        done = [bisect_left(places, stop) for places, _ in ranks]
        start, bucket = stop, bucket + 1
    return number


def _order(transfers: Transfers, most: int) -> np.ndarray:
    """Returns the numbers of the boxes in the order in which they are sent. Each receiver takes a
    piece from one sender after the other, and begins with another one than other receivers:

        receiver 0    a a b b c c | a b c        of each sender two boxes, then one
        receiver 1    b b c c a a | b c a

    So a bucket has few messages of some size, and no link is idle until the others have ended.
    """
    box, _, sender, receiver, nbytes = transfers.columns
    listed = np.lexsort((receiver, sender, nbytes, box))
    # of each box, the part that has most of its bytes
    main = listed[np.flatnonzero(np.diff(box[listed], append=-1))]
    nbytes = nbytes[main]
    senders, link = np.unique(sender[main], return_inverse=True)
    receivers, to = np.unique(receiver[main], return_inverse=True)
    turn = (link - to * len(senders) // max(len(receivers), 1)) % max(len(senders), 1)
    end, whole = _running(nbytes, to * len(senders) + link)
    pieces = -(-whole // max(most // PEERS, 1))
    sizes = transfers.held.nbytes
    # all receivers have their largest boxes, which fill buckets, at the same time
    order = np.lexsort((turn, -(-end * pieces // whole) / pieces, sizes <= most, to))
    end, whole = _running(sizes[order], to[order])
    found: np.ndarray = order[np.argsort(end / whole, kind="stable")]
    return found


def _running(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of the values of each group until each value, and those of whole groups."""
    order = np.argsort(group, kind="stable")
    sums, last = np.cumsum(values[order]), np.diff(group[order], append=-1) != 0
    ends = sums[last]
    before, number = np.append(0, ends[:-1]), np.cumsum(last) - last
    until, whole = np.empty_like(values), np.empty_like(values)
    until[order], whole[order] = sums - before[number], (ends - before)[number]
    return until, whole
