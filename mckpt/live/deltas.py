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

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mckpt.errors import MckptError, SourceError, UsageError
from mckpt.live.asking import Asked
from mckpt.live.buckets import Bucket
from mckpt.live.changes import Changes, Places, digest
from mckpt.live.steps import SentBucket, steps_of
from mckpt.live.together import call, gathered, lost

if TYPE_CHECKING:
    import torch

# of the elements of a bucket; where more have changed, it is sent whole. A change takes 6 bytes for
# an element of 2, so this bounds what is sent to three quarters.
SHARE = 0.25


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
        self.places = [Places(b, sync.rank, sync._device) for b in sync._plan.listed]
        self.held: list[torch.Tensor | None] = [None] * len(self.places)
        self.digests: list[Any] = [0] * len(self.places)
        pack = [bucket._replace(to=frozenset()) for bucket in sync._plan.listed]
        given = sync._plan.joined.casts, sync.rank, sync.memory, sync._is_special
        self.pack = [(bucket, steps_of(bucket, *given)) for bucket in pack]

    def given(self, of: Deltas) -> Iterator[Delta]:
        sync, every = self.sync, range(len(self.places))
        early = MckptError("a rank has stopped before it had all deltas; iterate to the end")
        at, ahead = -1, None
        before: Iterator[Delta] = iter(())
        try:
            if of.asked.weights is None:
                sync.memory.complete()
            sync.memory.refresh()
            versions = {"version": of.version, "base_version": of.base_version}
            gathered(lambda: self._refuse(of), stated=lambda _: versions | sync._said)
            sync._refused = None
            if sync.snapshot and of.asked.weights is None:
                sync.memory.keep()
            based, self.valid = of.base_version > 0, False
            sync._begin()
            ahead = self._compared(0, based)
            for at in every:  # one bucket is compared and one is on its way, while one is yielded
                found, ahead = ahead, self._compared(at + 1, based)
                ready, before = before, self._bucket(at, found, based, of)
                found = None  # whose memory the next comparison can have
                yield from ready
            yield from before
            at = len(every)
            for name, tensor in (of.asked.extra or {}).items() if sync._receives else ():
                yield Delta(name, None, tensor, digest(tensor))
            self._agree(self._tell(at))
            sync._end()
            sync._done()
            self.valid = True
        except GeneratorExit:
            with suppress(MckptError):
                # the others learn of it behind the bucket that this rank has compared already
                for later in every[at + 1 :]:
                    last = later == every[-1]
                    found, ahead = ahead, None if last else self._tell(later + 1, early)
                    rest, before = before, self._bucket(later, found, based, of)
                    deque(rest, 0)
                deque(before, 0)
                self._agree(self._tell(len(every), early))
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
            count = places.count.get(self.sync.rank, 0)
            if held is None or held.shape != (count,) or held.dtype is not places.bits:
                raise UsageError(
                    "the values that this rank has kept do not fit the plan; make the Sync again"
                )

    def _bucket(self, at: int, found: _Told | None, based: bool, of: Deltas) -> Iterator[Delta]:
        """Returns what this rank receives of a bucket, of which it begins to send what changed. A
        bucket that goes whole is sent when it is asked for.
        """
        sync, places, bucket = self.sync, self.places[at], self.sync._plan.listed[at]
        assert found is not None
        tally, groups = self._agree(found), len(places.rank_of)
        changes, counts = found.changes, places.counts(tally)
        assert changes is not None
        self.digests[at] = self.digests[at] * based + tally[groups:]
        digests = self.digests[at].tolist()
        if not based or sum(counts.values()) > SHARE * places.size:
            of.nbytes += bucket.nbytes
            return self._whole(at, changes.new, digests)
        if not counts:
            return iter(())
        segments, end = dict[int, tuple[int, int]](), 0
        for rank, count in counts.items():
            segments[rank] = end, places.room(count)
            end += places.room(count)
        of.nbytes += end
        sent = self._sent(at, bucket._replace(segments=segments, nbytes=end), counts, changes)
        if sync.rank in counts:
            self._keep(at, changes.new)
        return self._some(places, sent, counts, tally[:groups].tolist(), digests)

    def _whole(self, at: int, new: torch.Tensor, digests: list[int]) -> Iterator[Delta]:
        """Sends all of a bucket, and yields its tensors."""
        sync = self.sync
        sent = sync._send(sync._plan.listed[at], sync._steps[at])
        self._keep(at, new)
        listed = zip(sent.bucket.tensors, sync._received(sent)[0], strict=False)
        # strict=False: a rank that does not receive the bucket has no tensors
        for number, (tensor, whole) in enumerate(listed):
            yield Delta(tensor.name, None, whole, digests[number])

    def _some(
        self,
        places: Places,
        sent: SentBucket,
        counts: dict[int, int],
        of_groups: list[int],
        digests: list[int],
    ) -> Iterator[Delta]:
        """Waits for the changes of a bucket, and yields those that this rank receives.

        counts, of_groups: their number from each rank and in each group.
        """
        sent.wait()
        self.sync._refuse_lost(sent)
        if self.sync.rank in sent.bucket.to:
            segments = sent.bucket.segments.items()
            parts = [places.views(sent.buffer[at:][:n], counts[rank]) for rank, (at, n) in segments]
            yield from _split(sent.bucket, places, parts, of_groups, digests)

    def _compared(self, at: int, based: bool) -> _Told | None:
        """Finds what changed in this rank's segment of a bucket, if there is one, and begins to
        tell the other ranks.
        """
        if at == len(self.places):
            return None
        try:
            return self._tell(at, None, self._changes(at, based))
        except Exception as error:  # of any kind, because the other ranks wait for this one
            return self._tell(at, error)

    def _changes(self, at: int, based: bool) -> Changes:
        import torch

        sync, places, (bucket, steps) = self.sync, self.places[at], self.pack[at]
        buffer = torch.empty(steps.buffer, dtype=torch.uint8, device=sync._device)
        sync._copy(steps.send, bucket, buffer)
        new = buffer.view(places.bits)[: places.count.get(sync.rank, 0)]
        held = self.held[at] if based else None
        return places.changes(new, held, sync.rank, SHARE * places.size)

    def _tell(
        self, at: int, failed: Exception | None = None, changes: Changes | None = None
    ) -> _Told:
        """Begins to add up the tallies of all ranks for a bucket. Behind the last bucket the ranks
        only tell each other that they are there.
        """
        import torch
        import torch.distributed as dist

        parts = [torch.full((1,), int(failed is None), device=self.sync._device)]
        if at < len(self.places):
            parts.append(self.places[at].tally() if changes is None else changes.tally)
        told, works = torch.cat(parts), []
        if dist.is_initialized():
            works.append(call(dist.all_reduce, told, async_op=True))
        return _Told(changes, failed, told, works)

    def _agree(self, of: _Told) -> np.ndarray:
        """Returns the sum of the tallies of all ranks.

        Raises one error on all ranks if a rank has failed.
        """
        for work in of.works:
            call(work.wait)
        here, *tally = call(of.told.tolist)
        if here != self.sync.world:

            def fail() -> None:
                if of.failed is not None:
                    raise of.failed

            gathered(fail)
            raise lost("what changed in a bucket has not reached all ranks")
        return np.array(tally, "i8")

    def _keep(self, at: int, new: torch.Tensor) -> None:
        """Keeps the values of a segment for the next call."""
        import torch

        held = self.held[at]
        if self.where == "device":
            self.held[at] = new
            return
        if held is None:
            pinned = new.device.type == "cuda"
            held = torch.empty(new.shape, dtype=new.dtype, pin_memory=pinned)
            self.held[at] = held
        held.copy_(new)

    def _sent(
        self, at: int, bucket: Bucket, counts: dict[int, int], changes: Changes
    ) -> SentBucket:
        """Begins to send the changes of a bucket, as whose segments they are."""
        import torch

        sync, places = self.sync, self.places[at]
        receives = sync.rank in bucket.to
        start, size = bucket.segments.get(sync.rank, (0, 0))
        nbytes = bucket.nbytes if receives else size
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=sync._device)
        if size:
            own = buffer[start * receives :][:size]
            changes.write(*places.views(own, counts[sync.rank]))
        return sync._exchange(bucket, sync._steps[at], buffer)


class _Told(NamedTuple):
    """A message of this rank to all others about a bucket."""

    changes: Changes | None
    failed: Exception | None
    told: torch.Tensor  # 1 if it has not failed, and the tally; becomes the sum of all ranks
    works: list[Any]


def _split(
    bucket: Bucket,
    places: Places,
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    counts: list[int],
    digests: list[int],
) -> Iterator[Delta]:
    """Yields the changes of each tensor.

    parts: the places and the bits from each rank. counts: of each group.
    """
    import torch

    where, bits = (torch.cat(some) if some[1:] else some[0] for some in zip(*parts, strict=True))
    indices = places.indices(where).split(counts)
    values = {
        dtype: bits.view(getattr(torch, dtype)).split(counts)
        for dtype in {tensor.dtype for tensor in bucket.tensors}
    }
    for tensor, groups, stated in zip(bucket.tensors, places.groups, digests, strict=True):
        of_dtype, some = values[tensor.dtype], [group for group in groups if counts[group]]
        if len(some) == 1:
            yield Delta(tensor.name, indices[some[0]], of_dtype[some[0]], stated)
        elif some:
            index, bits = (torch.cat([of[g] for g in some]) for of in (indices, of_dtype))
            yield Delta(tensor.name, index, bits, stated)


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
