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
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import UsageError
from mckpt.formats.hf_files import Row
from mckpt.geometry.box import Box, Layout, Stored, crop, overlap, row_major
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
from mckpt.live.model import ranks_of
from mckpt.options import TargetOptions
from mckpt.values.dtypes import itemsize

Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each axis of a tensor
Boxes = Mapping[str, Sequence[Bounds]]  # what a rank holds, by Hugging Face names


class Links(NamedTuple):
    """The plan of all ranks. The arrays have an entry for each copy."""

    config: dict[str, Any]  # of the Hugging Face directory
    joined: Joined  # source places of copies are those of the sender
    tensors: list[ExportedTensor]  # the boxes of all receivers
    transfers: list[Transfer]
    most: int  # bytes of a bucket
    num_buckets: int
    box: np.ndarray  # its number in `tensors`
    sender: np.ndarray
    receiver: np.ndarray
    bucket: np.ndarray

    def digest(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks."""
        found = hashlib.sha256(repr((self.tensors, self.transfers)).encode())
        found.update(self.bucket.tobytes())
        return {"the plan, which `like`, `args` and `to` decide": found.hexdigest()[:16]}

    def of(self, rank: int, all_transfers: bool = False) -> Buckets:
        """Returns the part of the plan that a rank of the group carries out."""
        mine = np.flatnonzero((self.sender == rank) | (self.receiver == rank))
        mine = mine[np.argsort(self.bucket[mine], kind="stable")]
        ends = np.searchsorted(self.bucket[mine], np.arange(self.num_buckets + 1)).tolist()
        listed = [self._bucket(rank, mine[a:b]) for a, b in pairwise(ends)]
        joined = structs.replace(self.joined, copies=self.joined.copies[:0])
        own = [one for one in self.transfers if all_transfers or one.receiver == rank]
        return Buckets(self.config, joined, listed, self.most, own)

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
        tensors = [self.tensors[n] for n in mine.tolist()]
        tensors += [self.tensors[n]._replace(to=frozenset()) for n in others.tolist()]
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
    held, tensors = _held(layout, rows, boxes)
    files = [*layout.files, *(f"receiver {rank}" for rank in sorted(boxes))]
    joined = join(model.layout, replace(layout, files=files, stored=[*layout.stored, *held]))
    copies = joined.copies[joined.copies["dst_file"] >= len(layout.files)]
    items = np.array([itemsize(cast.target) for cast in joined.casts], "i8")[copies["cast"]]
    where = (copies["dst_file"].astype("i8") << FILE) + copies["dst_at"]
    box = np.searchsorted(np.array([t.at for t in tensors], "i8"), where, "right") - 1
    part = parts_of_copies(copies, ranks_of(model))
    holders = list(ranks_of(model).holders.items())
    pairs, pair = np.unique(box * len(holders) + part, return_inverse=True)
    nbytes = np.zeros(len(pairs), "i8")
    np.add.at(nbytes, pair, copies["rows"] * copies["run"] * items)
    wanted = [divmod(one, len(holders)) for one in pairs.tolist()]
    chosen = senders(
        nbytes.tolist(),
        [next(iter(tensors[b].to)) for b, _ in wanted],
        [[ranks[rank] for rank, _ in holders[p][1]] for _, p in wanted],
    )
    shifts, transfers = np.zeros(len(pairs), "i8"), list[Transfer]()
    for n, ((b, p), sender) in enumerate(zip(wanted, chosen, strict=True)):
        (key, offset), same = holders[p]
        its = next(one for rank, one in same if ranks[rank] == sender)
        shifts[n] = its.at - ranks_of(model).metadata.items[key, offset][1]
        (receiver,), source = tensors[b].to, bounds_of(Box(offset, its.sizes))
        own = tensors[b].name, bounds_of(Box(tensors[b].start, tensors[b].shape))
        transfers.append(Transfer(sender, receiver, *own, key, source, int(nbytes[n])))
    copies["src_at"] += shifts[pair]
    sizes = [math.prod(t.shape) * itemsize(t.dtype) for t in tensors]
    most = most or max([BUCKET, *sizes])
    if large := [t.name for t, n in zip(tensors, sizes, strict=True) if n > most]:
        raise UsageError.of(f"boxes are larger than bucket_bytes, {most:,}; give more:", large)
    bucket = _buckets(transfers, [b for b, _ in wanted], len(tensors), most // 2)
    ends = np.array([(one.sender, one.receiver) for one in transfers], "i8").reshape(-1, 2)
    joined = structs.replace(joined, copies=copies)
    count = 1 + max(bucket, default=-1)
    of_copy = ends[pair, 0], ends[pair, 1], np.array(bucket, "i8")[box]
    return Links(config, joined, tensors, transfers, most, count, box, *of_copy)


def bounds_of(box: Box) -> Bounds:
    """Returns a box as (start, stop) along each axis."""
    return tuple((low, low + n) for low, n in zip(box.offset, box.shape, strict=True))


def _held(
    layout: Layout, rows: list[tuple[Row, int]], boxes: Mapping[int, Boxes]
) -> tuple[list[Stored], list[ExportedTensor]]:
    """Returns the boxes of all receivers as stored tensors, in one file for each, and as tensors of
    a bucket in the order of their places.

    layout, rows: of the Hugging Face directory. Raises UsageError for a box that does not exist.
    """
    rows = sorted(rows, key=lambda row: row[1])
    number = {row.key: n for n, (row, _) in enumerate(rows)}
    _refuse_unknown({row.key: row.shape for row, _ in rows}, boxes)
    wanted: list[list[tuple[int, Box, int]]] = [[] for _ in rows]  # file, box and place
    tensors: list[ExportedTensor] = []
    for file, (rank, held) in enumerate(sorted(boxes.items()), len(layout.files)):
        end = 0
        for name, bounds in ((name, one) for name, listed in held.items() for one in listed):
            row, _ = rows[number[name]]
            box = Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
            at, to = (file << FILE) + end, frozenset([rank])
            tensors.append(
                ExportedTensor(name, row.dtype, box.shape, 0, row.shape, at, False, box.offset, to)
            )
            wanted[number[name]].append((file, box, end))
            end += -(-math.prod(box.shape) * itemsize(row.dtype) // ALIGN) * ALIGN
    starts = np.array([at for _, at in rows], "i8")
    stored: list[Stored] = []
    for s in layout.stored:
        places, item = (s.file.astype("i8") << FILE) + s.at, itemsize(s.dtype)
        numbers = np.searchsorted(starts, places, "right") - 1
        found: dict[Box, list[tuple[int, ...]]] = {}
        for i, n in enumerate(numbers.tolist()):
            row, first = rows[n]
            axes = len(row.shape) - len(s.shape)  # of the experts that one tensor holds
            own = index_of((int(places[i]) - first) // item // s.numel, row.shape[:axes])
            for file, box, at in wanted[n]:
                expert = Box(own, (1,) * axes)
                held_experts = Box(box.offset[:axes], box.shape[:axes])
                if axes and overlap(expert, held_experts) is None:
                    continue
                region, skipped = Box(box.offset[axes:], box.shape[axes:]), 0
                for index, low, size in zip(own, *held_experts, strict=True):
                    skipped = skipped * size + index - low
                at += skipped * math.prod(region.shape) * item
                found.setdefault(region, []).append((int(s.layer[i]), int(s.expert[i]), file, at))
        for region, where in found.items():
            try:
                pieces = tuple(p for one in s.pieces if (p := crop(one, s.shape, region)))
            except ValueError as error:
                raise UsageError(f"{s.key}: cannot be cut to the box {region}: {error}") from None
            columns = np.array(where, "i8").T
            part = Stored(s.key, s.dtype, region.shape, pieces, *columns, replica=True)
            stored.append(replace(part, carried=s.carried))
    return stored, tensors


def index_of(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of an element by its number in row-major order."""
    return tuple(number // step % n for step, n in zip(row_major(shape), shape, strict=True))


def _refuse_unknown(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[int, Boxes]) -> None:
    problems = []
    for rank, held in sorted(boxes.items()):
        for name, listed in held.items():
            if (shape := shapes.get(name)) is None:
                problems.append(f"rank {rank}: the model has no {name}")
                continue
            for box in listed:
                ends = zip(box, shape, strict=False)
                if len(box) != len(shape) or not all(0 <= a < b <= n for (a, b), n in ends):
                    problems.append(f"rank {rank}: {name} is {list(shape)}, and a box {list(box)}")
    if problems:
        raise UsageError.of("to: the receivers hold boxes that do not exist:", problems)


def senders(
    nbytes: Sequence[int], receivers: Sequence[int], holders: Sequence[Collection[int]]
) -> list[int]:
    """Returns the rank that sends each part of a box: the receiver itself if it is one of the
    holders, else the holder that has least to send, and least to this receiver.
    """
    chosen, sent, link = [0] * len(nbytes), defaultdict[int, int](int), defaultdict[Any, int](int)
    for n in sorted(range(len(nbytes)), key=lambda n: -nbytes[n]):
        to = receivers[n]
        if to in holders[n]:
            chosen[n] = to
            continue
        one = chosen[n] = min(holders[n], key=lambda rank: (sent[rank], link[rank, to], rank))
        sent[one] += nbytes[n]
        link[one, to] += nbytes[n]
    return chosen


def _buckets(
    transfers: Sequence[Transfer], boxes: Sequence[int], count: int, most: int
) -> list[int]:
    """Returns the number of the bucket of each of `count` boxes, so that all links have something
    to send until the end: boxes come in the order of the share of its link that is sent by then.

    boxes: of each transfer, the number of its box. most: bytes that a rank sends and receives in
    a bucket of several boxes.
    """
    loads: list[dict[int, int]] = [{} for _ in range(count)]  # rank -> bytes sent and received
    main: list[tuple[int, tuple[int, int]]] = [(0, (0, 0))] * count  # the link that has most of it
    for one, box in zip(transfers, boxes, strict=True):
        for rank in {one.sender, one.receiver}:
            loads[box][rank] = loads[box].get(rank, 0) + one.nbytes
        main[box] = max(main[box], (one.nbytes, (one.sender, one.receiver)))
    sums, shares = defaultdict[tuple[int, int], int](int), list[tuple[int, tuple[int, int]]]()
    for nbytes, link in main:
        sums[link] += nbytes
        shares.append((sums[link], link))
    order = sorted(range(count), key=lambda n: (shares[n][0] / sums[shares[n][1]], n))
    numbers, bucket, full = [0] * count, 0, dict[int, int]()
    for box in order:
        if full and any(full.get(rank, 0) + n > most for rank, n in loads[box].items()):
            bucket, full = bucket + 1, {}
        for rank, n in loads[box].items():
            full[rank] = full.get(rank, 0) + n
        numbers[box] = bucket
    return numbers
