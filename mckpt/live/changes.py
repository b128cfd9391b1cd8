"""Finds what changed in a segment of a bucket, by functions of torch or by kernels, which read the
weights where they are.

    segment   [copy: q rows 0..8                  | copy: k rows 0..4 | ...]
    blocks     2048 elements | 2048 | those left  | 2048 | ...       --> which of each differ

Which element of which tensor changed is in the plan. A group is what one rank sends of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mckpt.live.buckets import ALIGN, Bucket
from mckpt.live.devices import has_kernels
from mckpt.live.memory import Memory
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

PIECE = 1 << 22  # elements that are compared or added up at once, in the cache of a processor
ON_DEVICE = 8  # as many pieces at once on a device, where each step has a kernel to start
BLOCK = 2048  # elements of a block of the kernels
WORDS = BLOCK // 32  # that have a bit for each element of a block
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes: the bits of an element
STEPS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd numbers without a pattern


class Places:
    """Which elements of which tensors are in the segment of this rank in a bucket. Its copies lie
    one after the other.
    """

    def __init__(self, bucket: Bucket, rank: int, memory: Memory) -> None:
        """rank: the own one. memory: its weights."""
        import torch

        self.width = width = itemsize(bucket.tensors[0].dtype)
        self.bits = getattr(torch, INTEGERS[width])
        largest = max(np.prod(t.shape, dtype="i8") for t in bucket.tensors)
        self.kind = torch.int32 if largest < 1 << 31 else torch.int64  # of an index
        self.size = int((bucket.copies["rows"] * bucket.copies["run"]).sum())  # of all segments
        # the copies of a group lie one after the other
        new = np.diff(bucket.tensor, prepend=-1) != 0
        new |= np.diff(bucket.rank, prepend=-2) != 0
        self.rank_of, self.tensor_of = bucket.rank[new], bucket.tensor[new]  # of each group
        self.num_tensors = len(bucket.tensors)
        mine = bucket.rank == rank
        c, number, group = bucket.copies[mine], bucket.tensor[mine], (np.cumsum(new) - 1)[mine]
        # long rows with gaps between them in the weights are copies of their own, without gaps
        apart = (c["src_pitch"] != c["run"] * width) & (c["run"] >= BLOCK)
        times = np.where(apart, c["rows"], 1)
        c, number, group = (np.repeat(one, times) for one in (c, number, group))
        row = np.arange(len(c)) - np.repeat(np.cumsum(times) - times, times)
        c["src_at"] += row * c["src_pitch"]
        c["dst_at"] += row * c["dst_pitch"]
        c["rows"][np.repeat(apart, times)] = 1
        numel = (c["rows"] * c["run"]).astype("i8")
        first, self.count = np.cumsum(numel) - numel, int(numel.sum())
        byte = np.array([t.byte for t in bucket.tensors], "i8")[number]
        there, here = (
            (c[f"{side}_pitch"] // width, c[f"{side}_step"] // width) for side in ("src", "dst")
        )
        gapless = [
            ((pitch == c["run"]) | (c["rows"] == 1)) & ((step == 1) | (c["run"] == 1))
            for pitch, step in (there, here)
        ]
        # a copy that has no gaps has one row, whose elements need no division
        run = np.where(gapless[0] & gapless[1], numel, c["run"])
        # of each copy: its first element, its elements, the index of the first, and so on
        index = (c["dst_at"] - byte) // width
        self.columns = np.stack([first, numel, run, index, *here, group, number], axis=1)
        # where the weights are: the number of its weight, the byte, and the strides
        self.weight, self.inside = memory.located(c["src_at"])
        self.pitch, self.step = np.where(gapless[0], [run, np.ones_like(run)], there)

    def has_kernels(self, segment: torch.Tensor) -> bool:
        return self.count < 1 << 31 and has_kernels(segment.device)

    def add_whole(self, segment: torch.Tensor, digests: torch.Tensor) -> None:
        """Adds all elements of the segment to the digest of each tensor."""
        import torch

        if self.has_kernels(segment):
            Blocks([self], segment.device).add_whole(segment, digests)
            return
        table = torch.from_numpy(self.columns).to(segment.device)
        for start, part in _pieces(segment):
            where = torch.arange(start, start + len(part), device=part.device)
            copy, index = _located(table, where)
            _add(table, copy, _mixed(index, part), digests)


class ByTorch:
    """Changes in one bucket, that are listed: their indices, and their bits."""

    def __init__(
        self,
        places: Places,
        new: torch.Tensor,
        held: torch.Tensor,
        tally: torch.Tensor,
        most: float,
    ) -> None:
        """new, held: the segment as it is now, and as it was. tally: gets the number of changes in
        each group. most: changes that may have to be written; more are only counted.
        """
        import torch

        self.held, count = held, 0
        self.digests = tally.new_zeros(places.num_tensors)
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        table = torch.from_numpy(places.columns).to(held.device)
        for start, now in _pieces(new):
            before = held[start : start + len(now)]
            where = (now != before).nonzero()[:, 0]
            now, was = now[where], before[where]
            copy, index = _located(table, where + start)
            _add(table, copy, _mixed(index, now) - _mixed(index, was), self.digests, tally)
            before[where] = now
            count += len(where)
            if count <= most:
                self.parts.append((index.to(places.kind), now))

    def write(
        self, part: slice, start: int, to: tuple[torch.Tensor, torch.Tensor], digests: torch.Tensor
    ) -> None:
        """Writes the indices in their tensors of all changes in some of the buckets, group after
        group, and their bits. Adds to the digest of each tensor of all the buckets. What was held
        is then as the segments are now.

        start: the changes in the buckets before these. to: the memory of the indices and the bits.
        """
        import torch

        torch.cat([indices for indices, _ in self.parts], out=to[0])
        torch.cat([values for _, values in self.parts], out=to[1])
        digests += self.digests


class Blocks:
    """The segments of some buckets as kernels see them. A block has elements of one copy."""

    def __init__(self, places: Sequence[Places], device: torch.device) -> None:
        import torch

        def tensor(numbers: np.ndarray, kind: str = "i8") -> torch.Tensor:
            return torch.from_numpy(numbers.astype(kind)).to(device)

        self.places, self.width = places, places[0].width
        columns = np.concatenate([p.columns for p in places])
        copies = [len(p.columns) for p in places]
        groups, tensors = [len(p.rank_of) for p in places], [p.num_tensors for p in places]
        columns[:, 6] += np.repeat(np.cumsum(groups) - groups, copies)
        columns[:, 7] += np.repeat(np.cumsum(tensors) - tensors, copies)
        self.first, self.numel, self.run = columns[:, :3].T.copy()
        blocks = -(-self.numel // BLOCK)
        columns[:, 0] = np.cumsum(blocks) - blocks
        new = np.diff(columns[:, 6], prepend=-1) != 0
        # the blocks of a group lie one after the other; the first of each, and behind the last
        self.bounds = tensor(np.append(columns[new, 0], blocks.sum()))
        self.groups, self.tensors = tensor(columns[new, 6]), tensor(columns[new, 7])
        self.rows = tensor(columns[:, :6])
        self.copy_of = tensor(np.repeat(np.arange(len(blocks)), blocks), "i4")
        ends = np.cumsum([0, *blocks])[np.cumsum([0, *copies])]
        self.ends: list[int] = ends.tolist()  # before each bucket, and behind the last
        self._table = np.empty(0, "i8"), self.rows

    def table(
        self, new: torch.Tensor | np.ndarray, held: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, int, bool]:
        """Returns the address and the strides of each copy where it is now, and the address where
        it is held; a number of elements, of which each copy has a multiple, and at a multiple of
        which it starts; and whether no copy has gaps.

        new: the addresses of all weights; or the segment, of one bucket.
        """
        import torch

        if isinstance(new, np.ndarray):
            at = np.concatenate([new[p.weight] + p.inside for p in self.places])
            pitch = np.concatenate([p.pitch for p in self.places])
            step = np.concatenate([p.step for p in self.places])
        else:
            at, pitch = new.data_ptr() + self.first * self.width, self.run
            step = np.ones(len(at), "i8")
        copies = [len(p.columns) for p in self.places]
        starts = np.repeat([one.data_ptr() for one in held], copies) + self.first * self.width
        table = np.stack([at, pitch, step, starts], axis=1)
        if not np.array_equal(table, self._table[0]):
            self._table = table, torch.from_numpy(table).to(self.rows.device)
        uneven = ((at | starts | self.numel * self.width) % ALIGN).any()
        dense = bool(((pitch == self.run) & (step == 1)).all())
        return self._table[1], 1 if uneven else ALIGN // self.width, dense

    def add_whole(self, segment: torch.Tensor, digests: torch.Tensor) -> None:
        from mckpt.live.kernels import add_all

        table, *_ = self.table(segment, [segment])
        sums = digests.new_empty(len(self.copy_of))
        add_all[(len(sums),)](table, self.rows, self.copy_of, segment, sums, *STEPS, BLOCK)
        self.add(summed(sums), digests, self.tensors)

    def add(
        self, before: torch.Tensor, to: torch.Tensor, which: torch.Tensor, first: int = 0
    ) -> None:
        """Adds up a number of each block, for each group.

        before: of each block from `first` on, the sum of those before it, and the sum of all.
        which: the number in `to` of each group: `groups` or `tensors`.
        """
        bounds = self.bounds.clamp(first, first + len(before) - 1) - first
        to.index_add_(0, which, before[bounds].diff())


class ByKernels:
    """Changes of each block: their number, and a bit for each element."""

    def __init__(
        self,
        blocks: Blocks,
        new: torch.Tensor | np.ndarray,
        held: Sequence[torch.Tensor],
        tally: torch.Tensor,
    ) -> None:
        """new: as for `Blocks.table`. held: the segments as they were. tally: as for ByTorch."""
        import torch

        from mckpt.live.kernels import compare

        self.blocks, self.new, self.held, grid = blocks, new, held[-1], len(blocks.copy_of)
        table, unit, dense = blocks.table(new, held)
        masks = torch.empty(grid * WORDS, dtype=torch.int32, device=tally.device)
        self.counts = torch.empty(grid, dtype=torch.int32, device=tally.device)
        self.given = table, blocks.rows, blocks.copy_of, masks, self.counts
        compare[(grid,)](*self.given, self.held, unit, blocks.width, dense, BLOCK)
        self.before = summed(self.counts)
        blocks.add(self.before, tally, blocks.groups)

    def write(
        self, part: slice, start: int, to: tuple[torch.Tensor, torch.Tensor], digests: torch.Tensor
    ) -> None:
        """Does what `ByTorch.write` does."""
        from mckpt.live.kernels import collect

        first, *_, end = self.blocks.ends[part.start : part.stop + 1]
        sums = digests.new_zeros(end - first)
        given = *self.given, self.before, *to, sums, first, start
        collect[(end - first,)](*given, *STEPS, BLOCK, num_warps=2)
        self.blocks.add(summed(sums), digests, self.blocks.tensors, first)


Changes = ByTorch | ByKernels  # the elements of some segments that have changed


class Parcel:
    """Changes of some buckets as they are sent at once. Of each rank, the indices of all its
    changes, group after group, and behind them their bits.
    """

    def __init__(self, places: Sequence[Places], counts: np.ndarray) -> None:
        """counts: the changes of each group of the buckets."""
        self.kind, self.bits, self.width = places[0].kind, places[0].bits, places[0].width
        self.groups = counts
        self.rank_of = np.concatenate([p.rank_of for p in places])
        tensors = [p.num_tensors for p in places]
        before = np.cumsum(tensors) - tensors
        parts = zip(places, before, strict=True)
        self.tensor_of = np.concatenate([p.tensor_of + first for p, first in parts])
        self.num_tensors = sum(tensors)
        totals = np.bincount(self.rank_of, counts).astype("i8").tolist()
        # of each rank that has changes: their number, and the bytes where they are sent
        self.counts = {rank: count for rank, count in enumerate(totals) if count}
        self.segments: dict[int, tuple[int, int]] = {}
        self.nbytes = 0
        for rank, count in self.counts.items():
            room = _aligned(count * self.kind.itemsize) + _aligned(count * self.width)
            self.segments[rank] = self.nbytes, room
            self.nbytes += room

    def views(self, segment: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices and the bits in the segment of a rank."""
        count = self.counts[rank]
        index, bits = count * self.kind.itemsize, count * self.width
        return segment[:index].view(self.kind), segment[_aligned(index) :][:bits].view(self.bits)

    def arranged(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Returns the indices and the bits of all ranks, tensor after tensor, and the number of
        changes of each tensor.
        """
        import torch

        lengths = np.bincount(self.tensor_of, self.groups, self.num_tensors).astype("i8")
        sent = buffer[: self.nbytes]
        sources = sent.view(self.kind), sent.view(self.bits)
        starts = np.zeros((2, len(self.groups)), "i8")  # of each group in both
        for rank, (at, _) in self.segments.items():
            mine = self.rank_of == rank
            before = np.cumsum(self.groups[mine]) - self.groups[mine]
            bits_at = at + _aligned(self.counts[rank] * self.kind.itemsize)
            starts[0, mine] = at // self.kind.itemsize + before
            starts[1, mine] = bits_at // self.width + before
        order = np.argsort(self.tensor_of, kind="stable")
        order = order[self.groups[order] > 0]
        starts, counts = starts[:, order], self.groups[order]
        if not has_kernels(buffer.device):
            index, bits = (
                torch.cat([source[a:b] for a, b in zip(*rows.tolist(), strict=True)])
                for source, rows in zip(
                    sources, np.stack([starts, starts + counts], 1), strict=True
                )
            )
            return index.long(), bits, lengths
        from mckpt.live.kernels import arrange

        index = torch.empty(int(counts.sum()), dtype=torch.int64, device=buffer.device)
        bits = torch.empty(len(index), dtype=self.bits, device=buffer.device)
        columns = np.stack([*starts, np.cumsum(counts) - counts, counts], axis=1)
        pieces = torch.from_numpy(columns).to(buffer.device)
        programs = -(-len(index) // (BLOCK * len(pieces)))  # for the mean of the pieces
        arrange[(len(pieces), programs)](pieces, *sources, index, bits, BLOCK)
        return index, bits, lengths


def _located(table: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the copies that have these elements of a segment, and the indices of the elements in
    their tensors. table: the columns of the copies.
    """
    import torch

    copy = torch.searchsorted(table[:, 0].contiguous(), where, right=True) - 1
    first, _, run, index, pitch, step = table[copy, :6].unbind(1)
    inside = where - first
    return copy, index + inside // run * pitch + inside % run * step


def _add(
    table: torch.Tensor,
    copy: torch.Tensor,
    mixed: torch.Tensor,
    digests: torch.Tensor,
    tally: torch.Tensor | None = None,
) -> None:
    """Adds the elements of ascending copies to the digests, and to the number in each group."""
    import torch

    total = summed(mixed)
    bounds = torch.searchsorted(copy, torch.arange(len(table) + 1, device=copy.device))
    digests.index_add_(0, table[:, 7], total[bounds].diff())
    if tally is not None:
        tally.index_add_(0, table[:, 6], bounds.diff())


def _pieces(segment: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields pieces of a segment, and the number of the first element of each."""
    piece = PIECE * (1 if segment.device.type == "cpu" else ON_DEVICE)
    for start in range(0, len(segment), piece):
        yield start, segment[start : start + piece]


def summed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the numbers before each one, and of all."""
    import torch

    return torch.nn.functional.pad(numbers.cumsum(0), (1, 0))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _mixed(index: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Returns a number of 64 bits for each element."""
    mixed = (index + 1) * STEPS[0] + bits.long() * STEPS[1]
    mixed = (mixed ^ (mixed >> 31)) * STEPS[2]
    return mixed ^ (mixed >> 29)


def digest(tensor: torch.Tensor) -> int:
    """Returns the digest of a whole tensor, as `Delta.digest`."""
    import torch

    bits = tensor.detach().reshape(-1).view(getattr(torch, INTEGERS[tensor.element_size()]))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), PIECE):
        part = bits[start : start + PIECE]
        total += _mixed(torch.arange(start, start + len(part), device=bits.device), part).sum()
    return int(total)
