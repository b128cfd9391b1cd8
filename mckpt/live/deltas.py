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
from itertools import chain
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mckpt.errors import MckptError, SourceError, UsageError
from mckpt.live.asking import Asked
from mckpt.live.buckets import Bucket
from mckpt.live.changes import Changes, Places, digest
from mckpt.live.steps import SentBucket, steps_of
from mckpt.live.together import call, gathered

if TYPE_CHECKING:
    import torch

# of the elements of a bucket; where more have changed, it is sent whole. A change takes 6 bytes for
# an element of 2, so this bounds what is sent to three quarters.
SHARE = 0.25
# a message of this rank to all others about a bucket: the tally, and 1 if it has not failed, which
# become the sums of all ranks; and works of torch.distributed
Message = tuple["torch.Tensor", list[Any]]


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
        self.base_version, self.version = kept.versions
        self.refused: MckptError | None = None  # why this rank cannot apply them
        self.nbytes, self._kept, self.asked = 0, kept, asked

    def __iter__(self) -> Iterator[Delta]:
        """Raises one error on all ranks: before anything is yielded, if a rank is at another
        version or its weights are not as the plan has them; and at a later bucket, if a rank stops
        early or fails, as without memory. The next call then sends all tensors whole.
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
        # of a call, by the numbers of buckets: segments and what changed, until they are kept and
        # sent; and what is on its way
        self.new: dict[int, torch.Tensor] = {}
        self.found, self.sent = dict[int, Changes](), dict[int, SentBucket]()
        pack = [bucket._replace(to=frozenset()) for bucket in sync._plan.listed]
        given = sync._plan.joined.casts, sync.rank, sync.memory, sync._is_special
        self.pack = [(bucket, steps_of(bucket, *given)) for bucket in pack]

    @property
    def versions(self) -> tuple[int, int]:
        """Returns the versions before and after the next call; 0 if it sends all tensors whole."""
        return self.sync.version * self.valid, self.sync.version + 1

    def given(self, of: Deltas) -> Iterator[Delta]:
        sync, work = self.sync, self._work(of)
        try:
            yield from chain(work)  # which an exit does not close
        except GeneratorExit:
            early = "a rank has stopped before it had all deltas; iterate to the end"
            sync._refused = sync._refused or MckptError(early)
            with suppress(MckptError):  # all ranks raise it
                deque(work, 0)
            raise
        except MckptError as error:
            with suppress(MckptError):
                while self.sent:  # as in `Sync._given`
                    self.sent.popitem()[1].wait()
            clear_frames(error.__traceback__)
            raise
        finally:
            sync._free()
            self.sent.clear()
            if not self.valid:
                self.forget()

    def forget(self) -> None:
        """Frees what a call that fails leaves on the device."""
        self.found.clear()
        self.new.clear()
        if self.where == "device":
            self.held = [None] * len(self.places)

    def _work(self, of: Deltas) -> Iterator[Delta]:
        sync, every = self.sync, range(len(self.places))
        before: Iterator[Delta] = iter(())
        replaced = of.asked.weights is not None
        sync.memory.complete(replaced)
        sync.memory.refresh()
        said = {"version": of.version, "base_version": of.base_version}
        gathered(lambda: self._refuse(of), stated=lambda _: said | sync._said)
        sync._refused = None
        if sync.snapshot and not replaced:
            sync._tried(sync.memory.keep)
        based, self.valid = of.base_version > 0, False
        sync._begin()
        ahead = self._compared(0, based)
        for at in every:  # one bucket is compared and one is on its way, while one is yielded
            told, ahead = ahead, self._compared(at + 1, based)
            ready, before = before, self._bucket(at, told, based, of)
            yield from ready
        yield from before
        extra = (of.asked.extra or {}).items() if sync._receives else ()
        yield from sync._noted(Delta(name, None, t, digest(t)) for name, t in extra)
        self._agree(self._tell(len(every)))
        sync._end()
        sync._done()
        self.valid = True

    def _refuse(self, of: Deltas) -> None:
        """Raises the error that this rank finds before a call."""
        self.sync._take(of.asked)
        if of.refused is not None:
            raise of.refused
        if (of.base_version, of.version) != self.versions:
            raise UsageError(f"these are the deltas of version {of.version}; call the Sync again")
        for held, places in zip(self.held, self.places, strict=True) if of.base_version else ():
            count = places.count.get(self.sync.rank, 0)
            if held is None or held.shape != (count,) or held.dtype is not places.bits:
                raise UsageError(
                    "the values that this rank has kept do not fit the plan; make the Sync again"
                )

    def _bucket(self, at: int, told: Message | None, based: bool, of: Deltas) -> Iterator[Delta]:
        """Returns what this rank receives of a bucket, of which it begins to send what changed. A
        bucket that goes whole is sent when it is asked for.
        """
        sync, places, bucket = self.sync, self.places[at], self.sync._plan.listed[at]
        assert told is not None
        tally, groups = self._agree(told), len(places.rank_of)
        counts = places.counts(tally)
        self.digests[at] = self.digests[at] * based + tally[groups:]
        digests = self.digests[at].tolist()
        if not based or sum(counts.values()) > SHARE * places.size:
            of.nbytes += bucket.nbytes
            self.found.pop(at, None)  # whose memory the next comparison can have
            return self._whole(at, digests)
        segments, end = dict[int, tuple[int, int]](), 0
        for rank, count in counts.items():
            segments[rank] = end, places.room(count)
            end += places.room(count)
        of.nbytes += end
        if counts:
            self._send(at, bucket._replace(segments=segments, nbytes=end), counts)
        self._keep(at, sync.rank in counts)
        self.found.pop(at, None)
        return self._some(at, counts, tally[:groups].tolist(), digests) if counts else iter(())

    def _whole(self, at: int, digests: list[int]) -> Iterator[Delta]:
        """Sends all of a bucket, and yields its tensors."""
        sync = self.sync
        sent = sync._send(sync._plan.listed[at], sync._steps[at])
        self._keep(at)
        listed = zip(sent.bucket.tensors, sync._received(sent)[0], strict=False)
        # strict=False: a rank that does not receive the bucket has no tensors
        for number, (tensor, whole) in enumerate(listed):
            yield Delta(tensor.name, None, whole, digests[number])

    def _some(
        self, at: int, counts: dict[int, int], of_groups: list[int], digests: list[int]
    ) -> Iterator[Delta]:
        """Waits for the changes of a bucket, and yields those that this rank receives.

        counts, of_groups: their number from each rank and in each group.
        """
        places, sent = self.places[at], self.sent[at]
        sent.wait()
        del self.sent[at]
        self.sync._refuse_lost(sent)
        if self.sync.rank in sent.bucket.to:
            segments = sent.bucket.segments.items()
            parts = [places.views(sent.buffer[at:][:n], counts[rank]) for rank, (at, n) in segments]
            split = _split(sent.bucket, places, parts, of_groups, digests)
            yield from self.sync._noted(split)

    def _compared(self, at: int, based: bool) -> Message | None:
        """Finds what changed in this rank's segment of a bucket, if there is one, and begins to
        tell the other ranks.
        """
        if at == len(self.places):
            return None
        self.sync._tried(lambda: self._compare(at, based))
        return self._tell(at)

    def _compare(self, at: int, based: bool) -> None:
        import torch

        sync, places, (bucket, steps) = self.sync, self.places[at], self.pack[at]
        buffer = torch.empty(steps.buffer, dtype=torch.uint8, device=sync._device)
        sync._copy(steps.send, bucket, buffer)
        self.new[at] = new = buffer.view(places.bits)[: places.count.get(sync.rank, 0)]
        held = self.held[at] if based else None
        self.found[at] = places.changes(new, held, sync.rank, SHARE * places.size)

    def _tell(self, at: int) -> Message:
        """Begins to add up the tallies of all ranks for a bucket. Behind the last bucket the ranks
        only tell each other that they are there.
        """
        import torch
        import torch.distributed as dist

        if at == len(self.places):
            told = torch.zeros(1, dtype=torch.int64, device=self.sync._device)
        else:
            told = self.found[at].tally if at in self.found else self.places[at].tally()
        told[-1:].fill_(self.sync._refused is None)
        works: list[Any] = []
        if dist.is_initialized():
            works.append(call(dist.all_reduce, told, async_op=True))
        return told, works

    def _agree(self, message: Message) -> np.ndarray:
        """Returns the sum of the tallies of all ranks.

        Raises one error on all ranks if a rank has failed.
        """
        told, works = message
        for work in works:
            call(work.wait)
        *tally, here = call(told.tolist)
        if here != self.sync.world:
            self.sync._fail("what changed in a bucket has not reached all ranks")
        return np.array(tally, "i8")

    def _keep(self, at: int, changed: bool = True) -> None:
        """Keeps the values of a segment for the next call."""
        import torch

        def keep(new: torch.Tensor) -> None:
            if self.where == "device":
                self.held[at] = new
                return
            if (held := self.held[at]) is None:
                pinned = new.device.type == "cuda"
                held = torch.empty(new.shape, dtype=new.dtype, pin_memory=pinned)
                self.held[at] = held
            held.copy_(new)

        if changed:
            self.sync._tried(lambda: keep(self.new[at]))
        self.new.pop(at, None)

    def _send(self, at: int, bucket: Bucket, counts: dict[int, int]) -> None:
        """Begins to send the changes of a bucket, as whose segments they are."""
        sync, places = self.sync, self.places[at]
        receives = sync.rank in bucket.to
        start, size = bucket.segments.get(sync.rank, (0, 0))

        def write(buffer: torch.Tensor) -> None:
            if size:
                own = buffer[start * receives :][:size]
                self.found[at].write(*places.views(own, counts[sync.rank]))

        buffer = sync._filled(bucket.nbytes if receives else size, write)
        self.sent[at] = sync._exchange(bucket, sync._steps[at], buffer)


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
