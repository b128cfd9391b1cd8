"""Finds what changed in a segment of a bucket, by functions of torch or by kernels that read the
segment and what was held of it once.

    segment   [block of 2048 elements | block | ...]   --> the elements of each block that differ
                q rows 0..8, k rows 0..4 ...

Which element of which tensor changed is in the plan. A group is what one rank sends of one tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mckpt.live.buckets import ALIGN, Bucket
from mckpt.live.devices import has_kernels
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

PIECE = 1 << 22  # elements that are compared or added up at once, in the cache of a processor
ON_DEVICE = 8  # as many pieces at once on a device, where each step has a kernel to start
BLOCK, LANES = 2048, 64  # elements of a block, and how many of its changes a kernel takes at once
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes: the bits of an element
STEPS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd numbers without a pattern


class Changes:
    """The elements of a segment that have changed."""

    new: torch.Tensor  # the bits of all its elements
    # changes of each group, behind them of the digest of each tensor, and a 0 for `live.deltas`
    tally: torch.Tensor

    def write(self, place: torch.Tensor, bits: torch.Tensor) -> None:
        """Writes the places in the bucket of all changes, ascending, and their bits."""
        raise NotImplementedError  # the two classes below do it


class Places:
    """Which element of which tensor is at a place of a bucket. A place counts elements, which have
    one size in all tensors of the bucket.
    """

    def __init__(self, bucket: Bucket, rank: int, device: torch.device) -> None:
        """rank: the own one."""
        import torch

        def tensor(numbers: Any, kind: str = "i8") -> torch.Tensor:  # torch takes no records
            return torch.from_numpy(np.array(numbers, kind)).to(device)

        self.width = width = itemsize(bucket.tensors[0].dtype)
        self.bits = getattr(torch, INTEGERS[width])
        self.kind = torch.int32 if bucket.nbytes // width < 1 << 31 else torch.int64
        c, starts = bucket.copies, bucket.at // width
        byte = np.array([t.byte for t in bucket.tensors], "i8")[bucket.tensor]
        index, steps = (c["dst_at"] - byte) // width, (c["dst_pitch"], c["dst_step"])
        numel = c["rows"] * c["run"]
        # the copies of a group lie one after the other
        new = np.diff(bucket.tensor, prepend=-1) != 0
        new |= np.diff(bucket.rank, prepend=-2) != 0
        group = np.cumsum(new) - 1
        self.rank_of = bucket.rank[new].tolist()  # of each group
        self.groups: list[list[int]] = [[] for _ in bucket.tensors]  # of each tensor
        for number, of in enumerate(bucket.tensor[new].tolist()):
            self.groups[of].append(number)
        numbers = group, len(self.rank_of) + bucket.tensor  # of a tally
        columns = starts, index, c["run"], *(step // width for step in steps), numel, *numbers
        self.starts, self.rows = tensor(starts), tensor(np.stack(columns, axis=1))
        # of a rank: its first place, and its elements
        self.first = {r: a // width for r, (a, _) in bucket.segments.items()}
        self.count = {r: int(numel[bucket.rank == r].sum()) for r in self.first}
        self.size = sum(self.count.values())
        # of each block of the own segment: its first and its last copy
        ends = np.arange(0, self.count.get(rank, 0) + BLOCK, BLOCK) + self.first.get(rank, 0)
        first = np.searchsorted(starts, ends[:-1], side="right") - 1
        last = np.searchsorted(starts, ends[1:] - 1, side="right") - 1
        mine = np.flatnonzero(bucket.rank == rank)
        last = np.minimum(last, mine[-1]) if len(mine) else last
        self.blocks = tensor(np.stack([first, last], axis=1), "i4")

    def tally(self) -> torch.Tensor:
        """Returns zeros for `Changes.tally`."""
        return self.rows.new_zeros(len(self.rank_of) + len(self.groups) + 1)

    def counts(self, tally: np.ndarray) -> dict[int, int]:
        """Returns the number of changes on each rank that has some. tally: that of all ranks."""
        found = defaultdict[int, int](int)
        # strict=False: behind the groups a tally has digests
        for rank, count in zip(self.rank_of, tally.tolist(), strict=False):
            found[rank] += count
        return {rank: count for rank, count in found.items() if count}

    def indices(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the indices in the tensors of the elements at places."""
        import torch

        if self._has_kernels(places):
            from mckpt.live.kernels import find_indices

            found = torch.empty(places.shape, dtype=torch.int64, device=places.device)
            copies = len(self.starts)
            given = places, self.starts, self.rows, self.rows.shape[1], found, len(places), copies
            find_indices[(-(-len(places) // BLOCK),)](*given, copies.bit_length(), BLOCK)
            return found
        return self._located(places.long())[1]

    def _located(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the copies that have the elements at places, and their indices in the tensors."""
        import torch

        copy = torch.searchsorted(self.starts, places, right=True) - 1
        start, index, run, pitch, step = self.rows[copy, :5].unbind(1)
        inside = places - start
        return copy, index + inside // run * pitch + inside % run * step

    def changes(
        self, new: torch.Tensor, held: torch.Tensor | None, rank: int, most: float
    ) -> Changes:
        """Returns what changed in the segment of a rank, which are all elements if nothing is held.

        most: changes that may have to be written; more are only counted.
        """
        if held is not None and self._has_kernels(new):
            return _ByKernels(self, new, held.to(new.device, non_blocking=True), self.first[rank])
        tally, count = self.tally(), 0
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for where, now, before in _differing(new, held):
            where += self.first[rank]
            copy, index = self._located(where)
            mixed = _mixed(index, now)
            if before is not None:
                mixed -= _mixed(index, before)
            self._add(tally, copy, mixed)
            count += len(where)
            if held is not None and count <= most:
                parts.append((where.to(self.kind), now))
        return _ByTorch(new, tally, parts)

    def _has_kernels(self, tensor: torch.Tensor) -> bool:
        return self.kind.itemsize == 4 and len(tensor) > 0 and has_kernels(tensor.device)

    def _add(self, tally: torch.Tensor, copy: torch.Tensor, mixed: torch.Tensor) -> None:
        """Adds the changes of ascending copies to a tally."""
        import torch

        total = torch.nn.functional.pad(mixed.cumsum(0), (1, 0))
        every = torch.arange(len(self.starts) + 1, device=copy.device)
        bounds = torch.searchsorted(copy, every)
        group, tensor = self.rows[:, 6:].unbind(1)
        tally.index_add_(0, group, bounds.diff())
        tally.index_add_(0, tensor, total[bounds].diff())

    def room(self, count: int) -> int:
        """Returns the bytes of so many places and values."""
        return _aligned(count * self.kind.itemsize) + _aligned(count * self.width)

    def views(self, segment: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the places and the bits in a segment of this room."""
        place, bits = count * self.kind.itemsize, count * self.width
        values = segment[_aligned(place) :][:bits].view(self.bits)
        return segment[:place].view(self.kind), values


class _ByTorch(Changes):
    """Changes that are listed: their places in the bucket, and their bits."""

    def __init__(
        self,
        new: torch.Tensor,
        tally: torch.Tensor,
        parts: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.new, self.tally, self.parts = new, tally, parts

    def write(self, place: torch.Tensor, bits: torch.Tensor) -> None:
        import torch

        torch.cat([where for where, _ in self.parts], out=place)
        torch.cat([values for _, values in self.parts], out=bits)


class _ByKernels(Changes):
    """Changes of each block: their number, and in the first of as many slots as the block has
    elements their places in the block.
    """

    def __init__(self, places: Places, new: torch.Tensor, held: torch.Tensor, first: int) -> None:
        import torch

        from mckpt.live.kernels import add_to_tally, compare

        self.new, self.first, self.tally = new, first, places.tally()
        grid = (len(places.blocks),)
        self.slots = torch.empty(grid[0] * BLOCK, dtype=torch.int16, device=new.device)
        self.counts = torch.empty(grid, dtype=torch.int32, device=new.device)
        compare[grid](new, held, self.slots, self.counts, len(new), BLOCK)
        tables = places.blocks, places.rows, places.rows.shape[1]
        given = new, held, self.slots, self.counts, first, *tables, self.tally
        add_to_tally[grid](*given, *STEPS, BLOCK, LANES, num_warps=2)

    def write(self, place: torch.Tensor, bits: torch.Tensor) -> None:
        from mckpt.live.kernels import collect

        ends = self.counts.cumsum(0)
        given = self.new, self.slots, self.counts, ends, self.first, place, bits
        collect[(len(self.counts),)](*given, BLOCK, LANES, num_warps=2)
        del self.slots, self.counts  # which are as large as the segment


def _differing(
    new: torch.Tensor, held: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yields the numbers of the elements that differ, these, and what was held in their place: all
    elements, if nothing was held.
    """
    import torch

    piece = PIECE * (1 if new.device.type == "cpu" else ON_DEVICE)
    for start in range(0, len(new), piece):
        now = new[start : start + piece]
        if held is None:
            yield torch.arange(start, start + len(now), device=new.device), now, None
            continue
        before = held[start : start + piece].to(new.device, non_blocking=True)
        where = (now != before).nonzero()[:, 0]
        yield where + start, now[where], before[where]


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
