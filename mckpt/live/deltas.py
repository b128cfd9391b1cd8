"""Finds what changed in a live model since the last call of a `Sync`, before anything is gathered.

Each rank keeps the segments that it sends (`live.buckets`) as they were, and compares them with
what they would be now. The ranks tell each other how much has changed; then they send the indices
of these elements in their tensors, and the values, of several buckets at once:

    bucket   [segment of rank 0          | segment of rank 2]
              q rows 0..8, k rows 0..4 ...                       --> q: 3, 40, ... and their values

The digest of a tensor is the sum of a number for each element, made of its index and its bits. So
each rank adds the part of what it sends, and nobody needs the whole tensor for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from itertools import chain, groupby, islice
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mckpt.errors import MckptError, SourceError, UsageError
from mckpt.live.asking import Asked
from mckpt.live.changes import Blocks, ByKernels, ByTorch, Changes, Parcel, Places, digest
from mckpt.live.steps import SentBucket, steps_of
from mckpt.live.together import call, refusal_of

if TYPE_CHECKING:
    import torch

# of the elements of a bucket; where more have changed, it is sent whole. A change takes 6 bytes for
# an element of 2, so this bounds what is sent to three quarters.
SHARE = 0.25
# numbers that become the sums of all ranks, and the works of torch.distributed that do it
Sums = tuple["torch.Tensor", list[Any]]


class Round(NamedTuple):
    """Buckets that are compared at once."""

    listed: list[int]
    told: Sums  # the changes of each group, and of each rank a 1 if it has not failed
    digests: torch.Tensor  # what the changes add to the digest of each tensor


class Unit(NamedTuple):
    """Buckets of a round that are sent at once."""

    listed: list[int]
    parcel: Parcel | None  # their changes; None: the only bucket goes whole
    part: slice  # of the round
    start: int  # the changes of this rank in the buckets of the round before these
    tensors: slice  # of those of the round


class Delta(NamedTuple):
    """What changed in a tensor."""

    name: str
    indices: torch.Tensor | None  # of the elements of the flat tensor, each once; None: all
    values: torch.Tensor  # of these elements, or the whole tensor
    digest: int  # of the whole tensor afterwards


class DeltaBucket(NamedTuple):
    """What changed in several tensors. `indices` and `values` have the changes of the first tensor,
    then those of the second one, and so on. The caller may keep both.
    """

    names: list[str]
    counts: list[int]  # of the elements of each tensor that have changed
    indices: torch.Tensor | None  # as in a `Delta`; None: the bucket is one tensor, whole
    values: torch.Tensor
    digests: list[int]

    def each(self) -> Iterator[Delta]:
        """Returns the changes of each tensor."""
        if self.indices is None:
            return iter([Delta(self.names[0], None, self.values, self.digests[0])])
        parts = self.indices.split(self.counts), self.values.split(self.counts)
        return map(Delta, self.names, *parts, self.digests)


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
        """Raises the errors of `buckets`."""
        with closing(self.buckets()) as listed:  # none in a variable, which an error would hold
            yield from chain.from_iterable(map(DeltaBucket.each, listed))

    def buckets(self) -> Generator[DeltaBucket, None, None]:
        """Yields the same as iteration, but the changes of many tensors at once, which takes less
        time where there are thousands, and a handle of CUDA IPC for all of them.

        Raises one error on all ranks: before anything is yielded, if a rank is at another version
        or its weights are not as the plan has them; and at a later bucket, if a rank stops early or
        fails, as without memory. The next call then sends all tensors whole.
        """
        return self._kept.given(self)


class Kept:
    """The values of the last call on this rank, and the work of a call."""

    def __init__(self, sync: Any, where: Literal["host", "device"]) -> None:
        """sync: a `Sync`, which has made its plan."""
        self.sync, self.where, self.valid = sync, where, False
        listed = sync._plan.listed
        self.places = [Places(bucket, sync.rank, sync.memory) for bucket in listed]
        # of each bucket, the names and the dtypes of its tensors
        self.named = [
            (np.array([t.name for t in b.tensors], "O"), np.array([t.dtype for t in b.tensors]))
            for b in listed
        ]
        self.blocks: dict[tuple[int, ...], Blocks] = {}  # of the buckets of a round
        self.held: list[torch.Tensor | None] = [None] * len(self.places)
        self.digests: list[Any] = [0] * len(self.places)
        # of a call, by the first bucket of a round, what changed; and of a unit, what is on its way
        self.changes, self.sent = dict[int, Changes](), dict[int, SentBucket]()
        # of rounds that were compared before all ranks had answered, the changes of each group
        self.early: dict[tuple[int, ...], torch.Tensor] = {}
        pack, casts = [b._replace(to=frozenset()) for b in listed], sync._plan.joined.casts
        given = casts, sync.rank, sync.memory, sync._is_special
        self.pack = [(bucket, steps_of(bucket, *given)) for bucket in pack]
        plain = [cast.source == cast.target and not sync._is_special(cast) for cast in casts]
        # of each bucket: whether it has the weights as they are
        self.plain = [all(plain[n] for n in set(b.copies["cast"].tolist())) for b in listed]

    @property
    def versions(self) -> tuple[int, int]:
        """Returns the versions before and after the next call; 0 if it sends all tensors whole."""
        return self.sync.version * self.valid, self.sync.version + 1

    def given(self, of: Deltas) -> Generator[DeltaBucket, None, None]:
        sync, work = self.sync, self._work(of)
        number = sync._calls + 1
        try:
            yield from sync._newest(work, number)  # an exit does not close `work`
        except GeneratorExit:
            if not sync._is_newest(number):
                raise
            early = "a rank has stopped before it had all deltas; iterate to the end"
            sync._refused = sync._refused or MckptError(early)
            with suppress(MckptError):  # all ranks raise it
                deque(work, 0)
            raise
        except MckptError as error:
            if sync._is_newest(number):
                self._take_messages()
            clear_frames(error.__traceback__)
            raise
        finally:
            if sync._is_newest(number):
                sync._free()
                for of_call in (self.sent, self.changes, self.early):
                    of_call.clear()
                if not self.valid:
                    self.forget()

    def _take_messages(self) -> None:
        """Waits for what is on its way, as `Sync._given` does."""
        with suppress(MckptError):
            while self.sent:
                self.sent.popitem()[1].wait()

    def forget(self) -> None:
        """Frees what a call that fails leaves on the device."""
        self.changes.clear()
        self.early.clear()
        if self.where == "device":
            self.held = [None] * len(self.places)

    def _work(self, of: Deltas) -> Iterator[DeltaBucket]:
        sync = self.sync
        before: Iterator[DeltaBucket] = iter(())
        self._take_messages()  # of a call that was left before its end
        self.early.clear()
        replaced = of.asked.weights is not None
        sync.memory.complete(replaced)
        sync.memory.refresh()
        own: list[bool] = []
        sync._refused = refusal_of(lambda: own.append(self._ready(of)))
        sync._begin()
        keeps = sync.snapshot and not replaced
        in_place = self._agreed(any(own), any(own) and not keeps)
        if keeps:
            sync._tried(sync.memory.keep)
        based, self.valid = of.base_version > 0, False
        rounds = self._rounds(in_place)
        ahead: list[Round] = [self._compared(listed, based) for listed in islice(rounds, 1)]
        while ahead:
            # a round is compared and a unit is on its way, while another one is yielded
            round_ = ahead.pop()
            ahead = [self._compared(listed, based) for listed in islice(rounds, 1)]
            for unit in self._units(round_, based):
                ready, before = before, self._unit(round_, unit, of)
                yield from ready
        yield from before
        extra = (of.asked.extra or {}).items() if sync._receives else ()
        made = sync._tried(lambda: [_whole(name, t, digest(t)) for name, t in extra])
        yield from chain.from_iterable(made)
        deque(self._units(self._compared([], based), based), 0)  # whether a rank has failed
        sync._end()
        sync._done()
        self.valid = True

    def _agreed(self, in_place: bool, early: bool) -> bool:
        """Returns whether all ranks can compare their weights where they are. Raises one error on
        all ranks if a rank has failed, or if they state other values.

        early: begin to compare while the ranks answer, which does not change what is kept.
        """
        import torch

        sync = self.sync
        own = [sync._token - (sync._refused is not None), in_place]
        answers = self._added(torch.tensor(own, dtype=torch.int64, device=sync._device))
        if early:
            refusal_of(self._compare_early)  # the comparison afterwards meets its error again
        token, able = self._sum(answers).tolist()
        if token != sync.world * sync._token:
            sync._fail("the ranks do not begin the same call")
        return bool(able == sync.world)

    def _compare_early(self) -> None:
        listed = next(self._rounds(True))
        told = self._zeros(listed)
        self._compare(listed, told)
        self.early[tuple(listed)] = told

    def _ready(self, of: Deltas) -> bool:
        """Returns whether this rank can compare its weights where they are. Raises the error that
        it finds before a call.
        """
        self.sync._take(of.asked)
        self.sync._said |= {"version": of.version, "base_version": of.base_version}
        if of.refused is not None:
            raise of.refused
        if (of.base_version, of.version) != self.versions:
            raise UsageError(f"these are the deltas of version {of.version}; call the Sync again")
        if not of.base_version:
            return False
        in_place: bool = self.where == "device" and self.sync.memory.on_device
        for held, places in zip(self.held, self.places, strict=True):
            if held is None or held.shape != (places.count,) or held.dtype is not places.bits:
                raise UsageError(
                    "the values that this rank has kept do not fit the plan; make the Sync again"
                )
            in_place &= places.has_kernels(held)
        return in_place

    def _rounds(self, in_place: bool) -> Iterator[list[int]]:
        """Yields the buckets that are compared at once: those next to each other that need no
        memory for it, and each of the others. They come in two halves, so that one is compared
        while the ranks tell each other how much has changed in the other.
        """
        places, listed = self.places, self.sync._plan.listed

        def alike(at: int) -> Any:
            if in_place and self.plain[at]:
                half = 2 * at // len(places)
                return listed[at].to, places[at].width, places[at].kind, half
            return at

        for _, group in groupby(range(len(places)), alike):
            yield [*group]

    def _compared(self, listed: list[int], based: bool) -> Round:
        """Finds what changed in this rank's segments of some buckets, and begins to add it up.
        Behind the last bucket the ranks only tell each other that they are there.
        """
        places, told = [self.places[at] for at in listed], self.early.pop(tuple(listed), None)
        if told is None:
            told = zeros = self._zeros(listed)
            if based and any(p.count for p in places):
                self.sync._tried(lambda: self._compare(listed, zeros))
        told[-1:].fill_(self.sync._refused is None)
        digests = told.new_zeros(sum(p.num_tensors for p in places))
        return Round(listed, self._added(told), digests)

    def _zeros(self, listed: list[int]) -> torch.Tensor:
        """Returns a number for each group of some buckets, and one for whether no rank failed."""
        import torch

        count = sum(len(self.places[at].rank_of) for at in listed) + 1
        return torch.zeros(count, dtype=torch.int64, device=self.sync._device)

    def _compare(self, listed: list[int], tally: torch.Tensor) -> None:
        sync, at = self.sync, listed[0]
        places = self.places[at]
        every = [
            held.to(sync._device, non_blocking=True)
            for held in (self.held[n] for n in listed)
            if held is not None  # which `_ready` has refused
        ]
        in_place = len(listed) > 1
        new = sync.memory.addresses() if in_place else self._packed(at)
        if places.has_kernels(every[0]):
            if tuple(listed) not in self.blocks:
                of = [self.places[n] for n in listed]
                self.blocks[tuple(listed)] = Blocks(of, sync._device)
            self.changes[at] = ByKernels(self.blocks[tuple(listed)], new, every, tally)
        else:
            self.changes[at] = ByTorch(places, new, every[0], tally, SHARE * places.size)

    def _packed(self, at: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Returns this rank's segment of a bucket as it is now. memory: where to put it."""
        import torch

        places, (bucket, steps) = self.places[at], self.pack[at]
        if memory is None:
            buffer = torch.empty(steps.buffer, dtype=torch.uint8, device=self.sync._device)
            memory = buffer.view(places.bits)[: places.count]
        self.sync._copy(steps.send, bucket, memory.view(torch.uint8))
        return memory

    def _added(self, numbers: torch.Tensor) -> Sums:
        """Begins to add up the numbers of all ranks."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return numbers, []
        return numbers, [call(dist.all_reduce, numbers, async_op=True)]

    def _sum(self, sums: Sums) -> np.ndarray:
        """Waits for the sum of the numbers of all ranks."""
        import torch

        numbers, works = sums
        # the stream of the caller has its work while this process waits
        side = self.sync._side if works else None
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for work in works:
                call(work.wait)
            return np.array(call(numbers.tolist), "i8")

    def _units(self, round_: Round, based: bool) -> Iterator[Unit]:
        """Yields what is sent at once of a round: a bucket that goes whole, or the changes of
        buckets next to each other.

        Raises one error on all ranks if a rank has failed.
        """
        tally, sync = self._sum(round_.told), self.sync
        if tally[-1] != sync.world:
            sync._fail("what changed in a bucket has not reached all ranks")
        places = [self.places[at] for at in round_.listed]
        counts = np.split(tally[:-1], np.cumsum([len(p.rank_of) for p in places]))[: len(places)]
        own = [int(c[p.rank_of == sync.rank].sum()) for p, c in zip(places, counts, strict=True)]
        ends = np.cumsum([0, *(p.num_tensors for p in places)]).tolist()

        def unit(first: int, end: int, whole: bool) -> Unit:
            parcel = None if whole else Parcel(places[first:end], np.concatenate(counts[first:end]))
            tensors = slice(ends[first], ends[end])
            listed = round_.listed[first:end]
            return Unit(listed, parcel, slice(first, end), sum(own[:first]), tensors)

        first, size = 0, 0
        for number, (place, of) in enumerate(zip(places, counts, strict=True)):
            count = int(of.sum())
            whole = not based or count > SHARE * place.size
            nbytes = count * (place.kind.itemsize + place.width)
            if size and (whole or size + nbytes > sync._plan.most // 2):
                yield unit(first, number, False)
                first, size = number, 0
            if whole:
                yield unit(number, number + 1, True)
                first = number + 1
            else:
                size += nbytes
        if size:
            yield unit(first, len(places), False)
        self.changes.pop(round_.listed[0] if round_.listed else -1, None)

    def _unit(self, round_: Round, unit: Unit, of: Deltas) -> Iterator[DeltaBucket]:
        """Returns what this rank receives of some buckets, of which it begins to send what changed.
        A bucket that goes whole is sent when it is asked for.
        """
        first, parcel = unit.listed[0], unit.parcel
        if parcel is None:
            of.nbytes += self.sync._plan.listed[first].nbytes
        else:
            of.nbytes += parcel.nbytes
            self.sent[first] = self._send(round_, unit, parcel)
        if unit.part.stop == len(round_.listed):  # the next comparison can have the memory
            self.changes.pop(round_.listed[0], None)
        if parcel is None:
            return self._all(first, round_.digests[unit.tensors])
        return self._some(unit, parcel)

    def _all(self, at: int, digests: torch.Tensor) -> Iterator[DeltaBucket]:
        """Sends all of a bucket, and yields its tensors."""
        sync = self.sync
        sent = sync._send(sync._plan.listed[at], sync._steps[at])
        sync._tried(lambda: self._keep(at, digests))
        added = self._added(digests)
        found = sync._received(sent)
        self.digests[at] = self._sum(added)
        # strict=False: a rank that does not receive the bucket has no tensors
        for (tensor, whole), stated in zip(found, self.digests[at].tolist(), strict=False):
            yield _whole(tensor.name, whole, stated)

    def _keep(self, at: int, digests: torch.Tensor) -> None:
        """Keeps a segment as it is now, and adds to the digests of its tensors."""
        import torch

        held = self.held[at]
        new = self._packed(at, held if self.where == "device" else None)
        self.places[at].add_whole(new, digests)
        if self.where == "host":
            if held is None:
                pinned = new.device.type == "cuda"
                held = torch.empty(new.shape, dtype=new.dtype, pin_memory=pinned)
            new = held.copy_(new)
        self.held[at] = new

    def _send(self, round_: Round, unit: Unit, parcel: Parcel) -> SentBucket:
        """Begins to send the changes of some buckets, as if they were one."""
        sync, first = self.sync, unit.listed[0]
        bucket = sync._plan.listed[first]
        bucket = bucket._replace(segments=parcel.segments, nbytes=parcel.nbytes)
        start, size = bucket.segments.get(sync.rank, (0, 0))
        receives = sync.rank in bucket.to

        def write(buffer: torch.Tensor) -> None:
            if size:
                changes = self.changes[round_.listed[0]]
                to = parcel.views(buffer[start * receives :], sync.rank)
                changes.write(unit.part, unit.start, to, round_.digests)
                if self.where == "host" and (held := self.held[first]) is not changes.held:
                    assert held is not None  # `_ready` has refused it
                    held.copy_(changes.held)

        buffer = sync._filled(bucket.nbytes if receives else size, write)
        digests = round_.digests[unit.tensors]
        return sync._exchange(bucket, sync._steps[first], buffer, digests)

    def _some(self, unit: Unit, parcel: Parcel) -> Iterator[DeltaBucket]:
        """Waits for the changes of some buckets, and yields those that this rank receives."""
        sync, sent = self.sync, self.sent[unit.listed[0]]
        sent.wait()
        del self.sent[unit.listed[0]]
        added, end = np.array(sync._refuse_lost(sent), "i8"), 0
        for at in unit.listed:
            start, end = end, end + len(self.named[at][0])
            self.digests[at] = self.digests[at] + added[start:end]
        if sync.rank in sent.bucket.to:
            columns = [self.named[at] for at in unit.listed]
            names, dtypes = (np.concatenate(one) for one in zip(*columns, strict=True))
            stated = np.concatenate([self.digests[at] for at in unit.listed])
            made = sync._tried(lambda: _buckets(parcel, sent.buffer, names, dtypes, stated))
            yield from chain.from_iterable(made)


def _whole(name: str, tensor: torch.Tensor, stated: int) -> DeltaBucket:
    return DeltaBucket([name], [tensor.numel()], None, tensor, [stated])


def _buckets(
    parcel: Parcel, buffer: torch.Tensor, names: np.ndarray, dtypes: np.ndarray, stated: np.ndarray
) -> list[DeltaBucket]:
    """Returns the changes of all tensors, those of one dtype that follow each other in a bucket.

    names, dtypes, stated: the name, the dtype and the digest of each tensor.
    """
    import torch

    indices, bits, lengths = parcel.arranged(buffer)
    changed, ends, found = np.flatnonzero(lengths), np.cumsum(lengths), list[DeltaBucket]()
    apart = np.flatnonzero(dtypes[changed[1:]] != dtypes[changed[:-1]]) + 1
    for of in np.split(changed, apart) if len(changed) else ():
        part = slice(int(ends[of[0]] - lengths[of[0]]), int(ends[of[-1]]))
        values = bits[part].view(getattr(torch, dtypes[of[0]]))
        columns = names[of].tolist(), lengths[of].tolist()
        found.append(DeltaBucket(*columns, indices[part], values, stated[of].tolist()))
    return found


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
