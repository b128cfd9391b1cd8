"""Finds what changed in a live model since the last call of a `Sync`, before anything is gathered.

Each rank keeps the segments that it sends (`live.buckets`) as they were. It packs a segment anew,
compares the two, and sends the places in the bucket of what changed, with the values. By the plan,
which all ranks have, a place is an element of a tensor:

    bucket   [segment of rank 0 | segment of rank 2]     place 7 --> q_proj.weight, element 40
              q rows 0..8, k rows 0..4 ...

The digest of a tensor is the sum of a number for each element, made of its index and its bits. So
each rank adds the part of what it sends, and nobody needs the whole tensor for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mckpt.errors import MckptError, SourceError, UsageError
from mckpt.live.asking import Asked
from mckpt.live.buckets import ALIGN, Bucket
from mckpt.live.steps import steps_of
from mckpt.live.together import call, gathered, lost
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

# of the elements of a bucket; where more have changed, it is sent whole. A change takes 6 bytes for
# an element of 2, so this bounds what is sent to three quarters.
SHARE = 0.25
PIECE = 1 << 22  # elements that are compared or added up at once, in the cache of a processor
ON_DEVICE = 8  # as many pieces at once on a device, where each step has a kernel to start
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes: the bits of an element
STEPS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd numbers without a pattern


class Delta(NamedTuple):
    """What changed in a tensor."""

    name: str
    indices: torch.Tensor | None  # of the elements of the flat tensor, each once; None: all
    values: torch.Tensor  # of these elements, or the whole tensor
    digest: int  # of the whole tensor afterwards


class Deltas:
    """What changed since the last call: iterating yields a `Delta` for each tensor that this rank
    receives and that has changed. All ranks iterate to the end.

    base_version: the version to which it is to be applied; 0 if all tensors come whole.
    version: the version afterwards.
    nbytes: the bytes of all segments that were sent so far.
    """

    def __init__(self, kept: Kept, asked: Asked) -> None:
        self.base_version, self.version = kept.sync.version * kept.valid, kept.sync.version + 1
        self.refused: MckptError | None = None  # why this rank cannot apply them
        self.nbytes, self._kept, self.asked = 0, kept, asked

    def __iter__(self) -> Iterator[Delta]:
        """Raises one error on all ranks: before anything is yielded, if a rank is at another
        version or its weights are not as the plan has them; and at a later bucket, if a rank stops
        early. The next call then sends all tensors whole.
        """
        return self._kept.given(self)


class Kept:
    """The values of the last call on this rank, and the work of a call."""

    def __init__(self, sync: Any, where: Literal["host", "device"]) -> None:
        """sync: a `Sync`, which has made its plan."""
        self.sync, self.where, self.valid = sync, where, False
        self.places = [_Places(bucket, sync._device) for bucket in sync._plan.listed]
        self.held: list[torch.Tensor | None] = [None] * len(self.places)
        self.digests: list[Any] = [0] * len(self.places)
        pack = [bucket._replace(to=frozenset()) for bucket in sync._plan.listed]
        given = sync._plan.joined.casts, sync.rank, sync.memory, sync._is_special
        self.pack = [(bucket, steps_of(bucket, *given)) for bucket in pack]

    def given(self, of: Deltas) -> Iterator[Delta]:
        sync = self.sync
        if of.asked.weights is None:
            sync.memory.complete()
        sync.memory.refresh()
        versions = {"version": of.version, "base_version": of.base_version}
        gathered(lambda: self._refuse(of), stated=lambda _: versions | sync._said)
        sync._refused, at = None, 0
        if sync.snapshot and of.asked.weights is None:
            sync.memory.keep()
        base, self.valid = of.base_version, False
        try:
            sync._begin()
            for at in range(len(self.places)):
                yield from self._bucket(at, base > 0, of)
            at = len(self.places)
            for name, tensor in (of.asked.extra or {}).items() if sync._receives else ():
                yield Delta(name, None, tensor, digest(tensor))
            self._agree(at, None)
            sync._end()
            sync._done()
            self.valid = True
        except GeneratorExit:
            early = MckptError("a rank has stopped before it had all deltas; iterate to the end")
            with suppress(MckptError):
                self._agree(at + 1, None, early)
            raise
        finally:
            sync.memory.refresh()

    def _refuse(self, of: Deltas) -> None:
        """Raises the error that this rank finds before a call."""
        self.sync._take(of.asked)
        if of.refused is not None:
            raise of.refused
        if of.version != self.sync.version + 1:
            raise UsageError(f"these are the deltas of version {of.version}; call the Sync again")
        for held, places in zip(self.held, self.places, strict=True) if of.base_version else ():
            count = places.count[self.sync.rank]
            if held is None or held.shape != (count,) or held.dtype is not places.bits:
                raise UsageError(
                    "the values that this rank has kept do not fit the plan; make the Sync again"
                )

    def _bucket(self, at: int, based: bool, of: Deltas) -> Iterator[Delta]:
        """Does the work for a bucket, and yields what this rank receives of it."""
        sync, places = self.sync, self.places[at]
        failed: Exception | None = None
        found: _Found | None = None
        try:
            found = self._compare(at, based)
        except Exception as error:  # of any kind, because the other ranks wait for this one
            failed = error
        counts, sums = self._agree(at, found, failed)
        assert found is not None
        self.digests[at] = self.digests[at] * based + sums
        digests = self.digests[at].tolist()
        bucket = sync._plan.listed[at]
        if not based or sum(counts) > SHARE * sum(places.count.values()):
            of.nbytes += bucket.nbytes
            sent = sync._send(bucket, sync._steps[at])
            self._keep(at, found)
            listed = zip(bucket.tensors, sync._received(sent)[0], strict=False)
            # strict=False: a rank that does not receive the bucket has no tensors
            for number, (tensor, whole) in enumerate(listed):
                yield Delta(tensor.name, None, whole, digests[number])
        elif any(counts):
            segments, end = dict[int, tuple[int, int]](), 0
            for rank, count in enumerate(counts):
                if count:
                    segments[rank] = end, places.room(count)
                    end += places.room(count)
            of.nbytes += end
            packed = bucket._replace(segments=segments, nbytes=end)
            self._keep(at, found)
            changed = self._changed(at, packed, counts, found)
            if changed is not None:
                yield from places.split(bucket, *changed, digests)

    def _compare(self, at: int, based: bool) -> _Found:
        """Returns what changed in this rank's segment of a bucket."""
        import torch

        sync, places, (bucket, steps) = self.sync, self.places[at], self.pack[at]
        buffer = torch.empty(steps.buffer, dtype=torch.uint8, device=sync._device)
        sync._copy(steps.send, bucket, buffer)
        new = buffer.view(places.bits)[: places.count[sync.rank]]
        sums, first = places.zeros.clone(), places.first[sync.rank]
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        most, count = SHARE * sum(places.count.values()), 0
        for where, now, before in _changes(new, self.held[at] if based else None):
            where += first
            index = places.indices(where)
            mixed = _mixed(index, now)
            places.add(sums, where, mixed if before is None else mixed - _mixed(index, before))
            count += len(where)
            if based and count <= most:  # else the bucket is sent whole
                parts.append((where.to(places.kind), now))
        return _Found(new, count, sums, parts)

    def _agree(
        self, at: int, found: _Found | None, failed: Exception | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Returns the number of changes on each rank, and the sums of all ranks for the digests.
        Behind the last bucket the ranks only tell each other that they are there.

        Raises one error on all ranks if a rank has failed.
        """
        import torch
        import torch.distributed as dist

        sync, world = self.sync, self.sync.world
        num = len(self.places[at].zeros) if at < len(self.places) else 0
        told = torch.zeros(1 + world + num, dtype=torch.int64, device=sync._device)
        told[0] = int(failed is None)
        if found is not None:
            told[1 + sync.rank], told[1 + world :] = found.num, found.sums
        if dist.is_initialized():
            call(dist.all_reduce, told)
        here, *counts = call(told[: 1 + world].tolist)
        if here != world:

            def fail() -> None:
                if failed is not None:
                    raise failed

            gathered(fail)
            raise lost("what changed in a bucket has not reached all ranks")
        return counts, told[1 + world :]

    def _keep(self, at: int, found: _Found) -> None:
        """Keeps the values of a segment for the next call."""
        import torch

        held = self.held[at]
        if self.where == "device":
            self.held[at] = found.new
            return
        if held is None:
            pinned = found.new.device.type == "cuda"
            held = torch.empty(found.new.shape, dtype=found.new.dtype, pin_memory=pinned)
            self.held[at] = held
        if found.num:
            held.copy_(found.new)

    def _changed(
        self, at: int, bucket: Bucket, counts: list[int], found: _Found
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sends the changes of a bucket; returns the places, ascending, and the bits of those that
        this rank receives.
        """
        import torch

        sync, places, segments = self.sync, self.places[at], bucket.segments
        receives = sync.rank in bucket.to
        start, size = segments.get(sync.rank, (0, 0))
        nbytes = bucket.nbytes if receives else size
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=sync._device)
        if size:
            place, bits = places.views(buffer[start * receives :][:size], found.num)
            torch.cat([place for place, _ in found.parts], out=place)
            torch.cat([values for _, values in found.parts], out=bits)
        sent = sync._exchange(bucket, sync._steps[at], buffer)
        for work in sent.works:
            call(work.wait)
        sync._refuse_lost(sent)
        listed = segments.items() if receives else ()
        views = [places.views(buffer[at:][:n], counts[rank]) for rank, (at, n) in listed]
        if not views:
            return None
        return torch.cat([place for place, _ in views]), torch.cat([bits for _, bits in views])


def _changes(
    new: torch.Tensor, held: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yields the numbers of the elements that differ, these, and what was held in their place: all
    elements, if nothing was held.
    """
    import torch

    piece = PIECE * (1 if new.device.type == "cpu" else ON_DEVICE)
    found: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(new), piece):
        now = new[start : start + piece]
        if held is None:
            yield torch.arange(start, start + len(now), device=new.device), now, None
            continue
        before = held[start : start + piece].to(new.device, non_blocking=True)
        where = (now != before).nonzero()[:, 0]
        found.append((where + start, now[where], before[where]))
        # many at once, because each step on a device has a kernel to start
        if sum(len(where) for where, *_ in found) > piece or start + piece >= len(new):
            where, now, before = (torch.cat(parts) for parts in zip(*found, strict=True))
            yield where, now, before
            found.clear()


class _Found(NamedTuple):
    """What changed in a segment."""

    new: torch.Tensor  # the bits of all its elements
    num: int  # of changes
    sums: torch.Tensor  # what changes in the digest of each tensor
    parts: list[tuple[torch.Tensor, torch.Tensor]]  # places in the bucket, and bits


class _Places:
    """Which element of which tensor is at a place of a bucket. A place counts elements, which have
    one size in all tensors of the bucket.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        import torch

        def tensor(numbers: Any) -> torch.Tensor:  # torch takes no strides of records
            return torch.from_numpy(np.array(numbers, "i8")).to(device)

        self.width = width = itemsize(bucket.tensors[0].dtype)
        self.bits = getattr(torch, INTEGERS[width])
        self.kind = torch.int32 if bucket.nbytes // width < 1 << 31 else torch.int64
        c, starts = bucket.copies, bucket.at // width
        byte = np.array([t.byte for t in bucket.tensors], "i8")[bucket.tensor]
        index, steps = (c["dst_at"] - byte) // width, (c["dst_pitch"], c["dst_step"])
        self.starts = tensor(starts)
        rows = starts, index, c["run"], *(step // width for step in steps)
        self.rows = tensor(np.stack(rows, axis=1))
        self.numbers = tensor(bucket.tensor)  # of the tensors of the copies
        self.zeros = tensor(np.zeros(len(bucket.tensors)))  # of the sums of the tensors
        # the copies of one tensor from one rank lie one after the other
        new = np.diff(bucket.tensor, prepend=-1) != 0
        new |= np.diff(bucket.rank, prepend=-2) != 0
        self.groups, self.group_starts = bucket.tensor[new].tolist(), tensor(starts[new])
        numel = c["rows"] * c["run"]
        # of a rank: its first place, and its elements
        self.first = defaultdict[int, int](
            int, {r: a // width for r, (a, _) in bucket.segments.items()}
        )
        self.count = defaultdict[int, int](int)
        for rank in self.first:
            self.count[rank] = int(numel[bucket.rank == rank].sum())

    def indices(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the indices in the tensors of the elements at places."""
        import torch

        copy = torch.searchsorted(self.starts, places, right=True) - 1
        start, index, run, pitch, step = self.rows[copy].unbind(1)
        inside = places - start
        return index + inside // run * pitch + inside % run * step

    def add(self, sums: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
        """Adds values of ascending places to the sums of their tensors."""
        import torch

        total = torch.nn.functional.pad(values.cumsum(0), (1, 0))
        bounds = torch.searchsorted(places, self.starts)
        ends = torch.nn.functional.pad(bounds[1:], (0, 1), value=len(places))
        sums.index_add_(0, self.numbers, total[ends] - total[bounds])

    def room(self, count: int) -> int:
        """Returns the bytes of so many places and values."""
        return _aligned(count * self.kind.itemsize) + _aligned(count * self.width)

    def views(self, segment: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the places and the bits in a segment of this room."""
        place, bits = count * self.kind.itemsize, count * self.width
        values = segment[_aligned(place) :][:bits].view(self.bits)
        return segment[:place].view(self.kind), values

    def split(
        self, bucket: Bucket, places: torch.Tensor, values: torch.Tensor, digests: list[int]
    ) -> Iterator[Delta]:
        """Yields the changes of each tensor. places: ascending."""
        import torch

        bounds = torch.searchsorted(places, self.group_starts.to(places.dtype)).tolist()
        found: list[list[slice]] = [[] for _ in bucket.tensors]
        for number, (start, end) in zip(self.groups, pairwise([*bounds, len(places)]), strict=True):
            if start < end:
                found[number].append(slice(start, end))
        indices = self.indices(places.long())
        for tensor, parts, digest in zip(bucket.tensors, found, digests, strict=True):
            if parts:
                index, bits = (
                    torch.cat([whole[part] for part in parts]) if parts[1:] else whole[parts[0]]
                    for whole in (indices, values)
                )
                yield Delta(tensor.name, index, bits.view(getattr(torch, tensor.dtype)), digest)


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


def apply_delta(weights: Mapping[str, torch.Tensor], deltas: Deltas, version: int) -> int:
    """Applies deltas to tensors, in place, and returns the new version.

    weights: contiguous tensors by their Hugging Face names, which are those of `version`.

    Raises UsageError if the deltas build on another version, before anything changes; and
    SourceError for a tensor that is missing or of another dtype, or that does not have the digest
    that is stated afterwards. Of a `Sync`, all ranks then raise an error.
    """
    if deltas.base_version not in (0, version):
        deltas.refused = UsageError(
            f"the deltas build on version {deltas.base_version}, and the tensors are those of"
            f" version {version}"
        )
    with closing(_items(deltas)) as listed:  # so that the other ranks learn of an error
        for name, indices, values, stated in listed:
            weight = weights.get(name)
            if weight is None or weight.dtype is not values.dtype or not weight.is_contiguous():
                raise SourceError(
                    f"{name}: is not among the tensors, contiguous and {values.dtype}"
                )
            if indices is None:
                weight.detach().copy_(values)
            else:
                weight.detach().view(-1)[indices] = values
            if digest(weight) != stated:
                raise SourceError(
                    f"{name}: has another digest than is stated, so it was not that of version"
                    f" {deltas.base_version}; make the Sync again"
                )
    return deltas.version


def _items(deltas: Deltas) -> Generator[Delta, None, None]:
    yield from deltas
