"""Gives the Hugging Face tensors of a live model to other programs, such as engines that serve it,
again and again: the plan is made once.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

from mckpt import formats
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError, UsageError
from mckpt.formats.hf_encodings import WRITTEN, Scheme
from mckpt.geometry.box import Box
from mckpt.live.adapters import LiveTensors, Products, chosen
from mckpt.live.asking import ASKED, Asked, Given
from mckpt.live.buckets import Bucket, Buckets, ExportedTensor, To, Transfer, plan
from mckpt.live.deltas import Deltas, Kept
from mckpt.live.direct import Bounds, Boxes, Links, bounds_of, plan_boxes
from mckpt.live.flat import FlatBucket, flat_bucket, refuse_align
from mckpt.live.meeting import Meeting
from mckpt.live.memory import Memory
from mckpt.live.model import Described, collected, release, stated
from mckpt.live.overall import Overall
from mckpt.live.quantising import block_of, quantise, quantised
from mckpt.live.settings import refuse_other_settings
from mckpt.live.steps import LiveMove, Moves, SentBucket, Steps, ViewRun, even_rooms, steps_of
from mckpt.live.together import (
    call,
    gathered,
    lost,
    own_result,
    rank_and_world,
    refusal_of,
    told,
)
from mckpt.options import SyncOptions, TargetOptions
from mckpt.values.dtypes import itemsize, sum_dtype
from mckpt.values.element import Cast

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

T = TypeVar("T")


class Slice(NamedTuple):
    """Rows of a Hugging Face tensor: rows `first` to `first + len(tensor)` of a tensor of `shape`.
    They are all of its rows where it fits into a bucket.
    """

    name: str
    tensor: torch.Tensor
    first: int
    shape: tuple[int, ...]


class Shard(NamedTuple):
    """A box of a Hugging Face tensor: (start, stop) along each axis."""

    name: str
    box: Bounds
    tensor: torch.Tensor


class Sync:
    """The Hugging Face tensors of a live model, gathered in buckets each time it is called.

        sync = mckpt.live.Sync(model_chunks, like="Qwen/Qwen3-30B-A3B")
        for step in range(steps):
            train()
            for name, tensor in sync():
                ...

    All ranks make it, and all ranks iterate to the end, also those that receive nothing. A tensor
    stays valid as long as it is used, and may keep the memory of its bucket. Beside the tensors
    that the caller still holds, a call needs at most twice `bucket_bytes` on the device.

    On a device, a call reads the weights, and its tensors become ready, on the stream that is
    current where the next tensor is asked for.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        *,
        bucket_bytes: int | str | None = None,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        quantize: Literal["fp8", "mxfp8", "nvfp4"] | None = None,
        to: To | Mapping[int, Boxes] = None,
        group: Any = None,
        slices: bool = False,
        adapter: Literal["merged", "only", "none"] = "merged",
        allow_inexact: Collection[str] = (),
        allow_overflow: bool = False,
        snapshot: bool = False,
        delta: Literal["host", "device"] | None = None,
        **described: Unpack[Described],
    ) -> None:
        """Makes the plan, and proves that it has every element of every parameter once.

        described: the keywords of `Described`, such as `like`.
        bucket_bytes: the most bytes that are sent at once, and that one tensor has. Without it 1
            GiB, or as many as the largest tensor has.
        dtype: of all tensors; without it, each has that of the parameter.
        quantize: "fp8", "mxfp8" or "nvfp4" gives the weights of linear layers as codes, and their
            scales.
        to: the ranks that receive the tensors: None for all, the number of one rank, or a function
            that returns the names for a rank, which must return the same on all ranks. Or the
            boxes that ranks hold: rank -> name -> boxes, as (start, stop) along each axis. Each
            rank then receives these boxes and nothing else, as `Shard`s.
        group: a process group of all ranks of the trainer and other processes, which receive boxes
            by a `Receiver`; its ranks are those of `to`. Without `to`, receivers state theirs.
        slices: yield a `Slice` for each tensor, so that a larger one can come in several.
        adapter: of a model whose modules are wrapped by adapters (LoRA): "merged" gives the weights
            with the products of the adapters added, "none" without them, and "only" gives the
            tensors of the adapter under the names of PEFT, and its adapter_config.json as `config`.
        allow_inexact, allow_overflow: as for mckpt.convert.

        snapshot: each call first copies the weights of this rank on its device, and gives the
            values of that moment. Without it, weights must not change while a call runs.
        delta: a call returns `Deltas`: what changed since the call before, whose values each rank
            keeps on the "host" or the "device".

        Raises one error on all ranks: those of a conversion to Hugging Face, or UsageError for a
        tensor that is too large for the buckets, or if the ranks give other keywords.
        """
        given: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "dtype": dtype,
            "quantize": quantize,
            "to": to if not isinstance(to, Mapping) else "boxes",  # which the plan compares
            "slices": slices,
            "adapter": adapter,
            "allow_inexact": set(allow_inexact),
            "allow_overflow": allow_overflow,
            "snapshot": snapshot,
            "delta": delta,
            **stated(described),
        }

        def begun() -> tuple[Memory, int | None]:
            names = SyncOptions.__struct_fields__
            listed: dict[str, Any] = {name: given[name] for name in names}
            listed["allow_inexact"] = allow_inexact
            checked = SyncOptions(**listed)
            return Memory(model_chunks), checked.bucket_bytes

        def make() -> tuple[torch.device, Callable[[int], Buckets] | None]:
            memory, most = own_result(begun, lambda _: {"function": "Sync", **given})
            self.memory: Memory | None = memory
            self.slices, self.snapshot, self.allow_overflow = slices, snapshot, allow_overflow
            self.scheme: Scheme | None = WRITTEN[quantize] if quantize else None
            model = collected(memory, described)
            target = TargetOptions(
                formats.HUGGING_FACE, dtype=dtype, quantize=quantize, allow_inexact=allow_inexact
            )

            def wanted() -> LiveTensors:
                refuse_other_settings(memory.chunks, model)
                return chosen(model, adapter)

            self._factors: Sync | None = None
            found, merged, form = own_result(wanted)
            receivers = own_result(lambda: met.receivers(given)) if met.boxes else to
            self._make(found, target, most, receivers, delta)
            if merged is not None and form is not None:
                self._products = own_result(lambda: Products(self._plan, form, self.rank))
                needed = gathered(lambda: self._products.needed)
                self._factors = Sync.of_factors(memory, merged, lambda rank: needed[rank])
            release(model)
            return self._device, self._of_rank

        self._group = group
        met = Meeting(group, to, trains=True)
        met.make(make)
        del self._of_rank  # the plan of all ranks, which is needed no more

    @classmethod
    def of_factors(cls, memory: Memory, adapter: AdapterCheckpoint, to: To = None) -> Sync:
        """Returns what gathers the factors of the adapters of a live model."""
        return cls._bare(memory, adapter, TargetOptions(formats.HUGGING_FACE), None, to, True)

    @classmethod
    def of_files(
        cls,
        memory: Memory,
        model: Checkpoint,
        target: TargetOptions,
        most: int,
        to: To,
        allow_overflow: bool,
    ) -> Sync:
        """Returns what gathers slices of the tensors of a live model for the ranks that write them,
        file beside file.
        """
        return cls._bare(memory, model, target, most, to, allow_overflow, slices=True)

    @classmethod
    def _bare(
        cls,
        memory: Memory,
        model: Checkpoint,
        target: TargetOptions,
        most: int | None,
        to: To,
        allow_overflow: bool,
        slices: bool = False,
    ) -> Sync:
        found = cls.__new__(cls)
        found.memory, found.slices, found.scheme, found.snapshot = memory, slices, None, False
        found.allow_overflow, found._factors, found._group = allow_overflow, None, None
        found._make(model, target, most, to, turns=slices)
        return found

    def _make(
        self,
        model: Checkpoint,
        target: TargetOptions,
        most: int | None,
        to: To | Mapping[int, Boxes],
        delta: Literal["host", "device"] | None = None,
        turns: bool = False,
    ) -> None:
        """Makes the plan. The arguments are those of `plan`."""
        self.rank, self.world = rank_and_world(self._group)
        self._of_rank: Callable[[int], Buckets] | None = None
        if isinstance(to, Mapping):
            ranks = gathered(lambda: self.rank)
            links = own_result(lambda: plan_boxes(model, target, most, to, ranks), Links.digest)
            self._of_rank, made = links.of, links.of(self.rank, all_transfers=True)
        else:
            args = target, most, to, self.slices, self.world, self.rank, delta is not None, turns
            made = own_result(lambda: plan(model, *args), _digest)
        assert self.memory is not None
        self._adopt(made, self.memory.device, bool(target.quantize))
        self._kept = Kept(self, delta) if delta else None

    def _adopt(self, made: Buckets, device: torch.device, quantises: bool = False) -> None:
        """Prepares the work of this rank for a plan."""
        self._plan, self._device = made, device
        self._overall: Overall | None = None
        if made.peers and self.scheme is not None and self.memory is not None:
            self._overall = Overall(made, self.rank, self.memory, self.scheme)
        self._said: dict[str, Any] = {}  # of the call, which must be equal on all ranks
        # flags that are not 0 for values that were infinite, and the numbers of their tensors
        self._bad: list[tuple[list[ExportedTensor], list[int], torch.Tensor]] = []
        self._calls = 0  # the number of calls that have begun
        self.version = 0  # and of those that came to their end
        # of the last of these: "version", "seconds", "buckets", and the bytes that this rank
        # "sent" and "received", for the log of a trainer
        self.last: dict[str, float] = {}
        self.config: dict[str, Any] = made.config  # the content of config.json
        casts = self._plan.joined.casts
        # whether a value may not fit into its dtype, which all ranks learn at the end
        self._checks = quantises or any(self._overflows(cast) for cast in casts)
        self._steps = self._steps_of()
        self._flat: tuple[int, list[Steps]] = 0, []  # the last `align` of flat buckets, their steps
        self._posted = len(self._steps)  # the buckets that a call has begun to send
        self._side = None
        if self._device.type == "cuda":
            import torch

            self._side = torch.cuda.Stream(self._device)

    def _steps_of(self, flat: int = 0) -> list[Steps]:
        """Returns the work of this rank for all buckets. flat: as for `steps_of`."""
        given = self._plan.joined.casts, self.rank, self.memory, self._is_special, flat
        return even_rooms([steps_of(b, *given) for b in self._plan.listed], self._plan.most)

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns the dtype and the shape of each tensor, in the order in which they come."""
        import torch

        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for tensor in (tensor for bucket in self._plan.listed for tensor in bucket.tensors):
            every = tensor.coded(self.scheme) if self.scheme and tensor.quantised else [tensor]
            found |= {one.name: (getattr(torch, one.dtype), one.whole) for one in every}
        return found

    @property
    def names(self) -> list[str]:
        """Returns the names of the tensors, in the order in which they come."""
        return list(self.tensors)

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Returns the bytes that a call sends from each rank to each other rank, if no rank sends
        a segment to several at once: (sender, receiver) -> bytes.
        """
        return self._plan.links

    @property
    def transfers(self) -> list[Transfer]:
        """Returns what each rank sends to each other rank, and copies of its own, of boxes."""
        return list(self._plan.transfers)

    def fill(self, tensors: Mapping[tuple[str, Bounds], torch.Tensor]) -> None:
        """Makes a call, and copies each box that this rank receives into a tensor.

        Raises one error on all ranks if a box has no tensor, or one of another dtype or shape.
        """
        with closing(self()) as received:
            for name, box, tensor in received:
                target = tensors.get((name, box))
                if target is None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                    raise UsageError(
                        f"{name} {list(box)}: comes as {tensor.dtype} {list(tensor.shape)}, and"
                        " there is no such tensor to fill"
                    )
                target.copy_(tensor)

    def __call__(
        self,
        *,
        weights: Given | None = None,
        named: Iterable[tuple[str, Any]] | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Returns an iterator as of `_given_now`, or with `delta` the `Deltas`.

        weights: tensors whose values are sent in the place of those of the model, by the names of
            its weights. They may be on the host, and must not change during the call.
        named: these names: pairs of a name and a parameter or buffer of the model. Without it, they
            are those of `named_parameters()` and `named_buffers()` of the chunks.
        extra: further tensors, such as the scales of a KV cache, equal on all ranks. They come
            last, to each rank that receives tensors.
        """
        asked = Asked(weights, named, extra)
        return self._given_now(asked) if self._kept is None else Deltas(self._kept, asked)

    def buckets(
        self,
        align: int = 256,
        *,
        weights: Given | None = None,
        named: Iterable[tuple[str, Any]] | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[FlatBucket]:
        """Makes a call, and yields the tensors that this rank receives in flat buckets, which the
        caller may keep. `extra` has a bucket of its own, the last one.

        align: bytes, a power of two: each tensor begins at the next multiple, and the buffer ends
            at one; 1 packs tensors of one dtype without gaps.

        Raises UsageError for a `Sync` with `slices`, `delta` or boxes, and the errors of a call.
        """
        refuse_align(align)
        if self.slices or self._kept is not None or self._is_direct:
            raise UsageError(
                "buckets have whole tensors: make the Sync without slices, delta, boxes"
            )
        return self._given_now(Asked(weights, named, extra, align))

    def _given_now(self, asked: Asked) -> Iterator[Any]:
        """Yields the name and the tensor of each tensor that this rank receives, or a `Slice`.

        While the caller uses the tensors of a bucket, the next one is on its way, unless both and a
        tensor need more than twice `bucket_bytes`.

        Raises one error on all ranks before the first tensor if the weights of a rank are not as
        they were described, or not in memory; and at the end if a value was infinite in `dtype`, or
        could not be quantised. If a rank is lost, no rank yields the tensors of a bucket that has
        not reached all of them. Raises UsageError where it goes on after another call has begun.
        """
        memory, number = self.memory, self._calls + 1
        assert memory is not None
        replaced = asked.weights is not None
        # receivers in other processes learn of it as the ranks of the model do
        self._refused = refusal_of(lambda: memory.complete(replaced))
        memory.refresh()
        self._tried(lambda: self._take(asked))
        if self.snapshot and not replaced:
            self._tried(memory.keep)
        try:
            yield from self._given(asked)
        except MckptError as error:
            clear_frames(error.__traceback__)  # which hold buckets
            raise
        finally:
            if self._is_newest(number):
                self._free()

    def _is_newest(self, number: int) -> bool:
        """Returns whether no other call has begun after that of a number."""
        return self._calls <= number

    def _newest(self, given: Iterator[T], number: int) -> Iterator[T]:
        """Yields what a call gives. Raises UsageError once another call has begun, with which it
        shares the copies of the weights and the messages.
        """
        for one in given:
            yield one
            del one  # whose memory the caller may have let go
            if not self._is_newest(number):
                raise UsageError(
                    "another call of this Sync has begun before this one has come to its end;"
                    " iterate each to its end, or make a second Sync"
                )

    def _tried(self, work: Callable[[], T]) -> list[T]:
        """Does work of this rank alone, and returns its result; nothing if it fails, or if it has
        failed before in this call. The other ranks learn of it by the next message.
        """
        try:
            return [work()] if self._refused is None else []
        except Exception as error:  # of any kind, because the other ranks wait for this one
            self._note(error)
        return []

    def _note(self, error: Exception) -> None:
        """Notes the error of this rank, and frees what a call that fails does not need."""
        self._refused = self._refused or told(error)
        self._free()
        if self._kept is not None:
            self._kept.forget()

    def _free(self) -> None:
        """Frees what a call holds beside its buckets."""
        self._bad.clear()
        if self.memory is not None:
            self.memory.refresh()
        if self._factors is not None:
            self._products.forget()

    def _take(self, asked: Asked) -> None:
        """Prepares a call on this rank. Raises the errors that this rank finds."""
        assert self.memory is not None
        if asked.weights is not None:
            self.memory.take(asked.weights, asked.named)
        self.memory.refuse_changed()
        if asked.extra is not None and self._is_direct:
            raise UsageError("extra is for whole tensors, and this Sync sends boxes")
        if asked.extra is not None and (twice := asked.extra.keys() & self.tensors.keys()):
            raise UsageError.of("extra: the model has tensors of these names:", sorted(twice))
        self._said = asked.said() if self._group is None else {}

    @property
    def _receives(self) -> bool:
        return any(self.rank in bucket.to for bucket in self._plan.listed)

    def _given(self, asked: Asked = ASKED) -> Iterator[Any]:
        """Does the work of a call, with the weights where they are now or were kept."""
        flat = asked.flat
        self._begin()
        number = self._calls
        if flat and self._flat[0] != flat:
            self._flat = flat, self._steps_of(flat)
        of_buckets = self._flat[1] if flat else self._steps
        sent: list[SentBucket] = []
        self._posted = 0
        try:
            for bucket, steps in zip(self._plan.listed, of_buckets, strict=True):
                if sent and sent[0].steps.memory + steps.room > 2 * self._plan.most:
                    yield from self._newest(self._yielded(sent.pop(), flat), number)
                sent.append(self._send(bucket, steps))
                if len(sent) > 1:
                    yield from self._newest(self._yielded(sent.pop(0), flat), number)
            if sent:
                yield from self._newest(self._yielded(sent.pop(), flat), number)
            if asked.extra and self._receives:
                yield from self._newest(self._extra(asked.extra, flat), number)
        except GeneratorExit:
            if self._is_direct and self._is_newest(number):
                with suppress(MckptError):
                    self._stop(sent)
            raise
        except MckptError:
            with suppress(MckptError):
                for one in sent:  # a message that nobody takes would come in the place of another
                    one.wait()
            raise
        self._end()
        self._done()

    def _yielded(self, sent: SentBucket, flat: int) -> Iterator[Any]:
        """Waits for a bucket, and yields its tensors, or the flat bucket that has them."""
        tensors = self._tensors(sent)
        del sent  # whose memory `_tensors` frees
        if not flat:
            yield from tensors
        elif named := list(tensors):
            yield from self._tried(lambda: flat_bucket(named, flat, self._device))

    def _extra(self, extra: Mapping[str, torch.Tensor], flat: int) -> Iterator[Any]:
        if flat:
            yield flat_bucket(list(extra.items()), flat, self._device, copies=True)
        else:
            for name, tensor in extra.items():
                yield Slice(name, tensor, 0, tuple(tensor.shape)) if self.slices else (name, tensor)

    def _done(self) -> None:
        """Counts a call that came to its end."""
        self.version += 1
        self.last = {
            "version": self.version,
            "seconds": time.monotonic() - self._began,
            **self._counted,
        }

    def _stop(self, sent: list[SentBucket]) -> None:
        """Tells all ranks that this one does not take the tensors that are left."""
        self._refused = MckptError(
            "a rank has stopped before it had all tensors; iterate to the end"
        )
        if self._posted < len(self._steps):
            sent.append(self._send(self._plan.listed[self._posted], self._steps[self._posted]))
        try:
            for one in sent:
                self._received(one)
        finally:
            for one in sent:
                one.wait()
        self._end()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._calls += 1
        # a rank that has left a call before its end may begin another one while others go on
        self._said |= {"calls": self._calls}
        # what a rank adds to the sum behind a bucket: 1, and above it what it states of the call
        self._token = 1 + ((zlib.crc32(repr(self._said).encode()) & 0x3FFFFF) << 20)
        self._counted = {"buckets": 0, "sent": 0, "received": 0}
        if (factors := self._factors) is not None:
            factors._refused = self._refused
            failed = refusal_of(lambda: self._products.take(factors._given()))
            self._refused = self._refused or failed
        if (overall := self._overall) is not None:
            overall.begin()
            self._tried(overall.measure)
            overall.agree()

    @property
    def _is_direct(self) -> bool:
        """Returns whether ranks receive boxes."""
        return any(bucket.sent is not None for bucket in self._plan.listed)

    def _end(self) -> None:
        if self._checks or self._is_direct:
            gathered(self._check, self._group)
        self._refuse_noted()  # what this rank could not make of the last bucket

    def _check(self) -> None:
        import torch

        every = [flags.reshape(-1).int() for _, _, flags in self._bad]
        names = [listed[n].name for listed, numbers, _ in self._bad for n in numbers]
        flags = torch.cat(every).tolist() if every else []
        found = [name for name, flag in zip(names, flags, strict=True) if flag]
        self._refuse_noted()
        if found:
            raise UsageError.of(
                "tensors have values that their dtype cannot hold; give another dtype, or"
                " allow_overflow=True, which makes them infinite:",
                list(dict.fromkeys(found)),
            )

    def _overflows(self, cast: Cast) -> bool:
        """Returns whether finite values may become infinite that must not."""
        return cast.overflows and not self.allow_overflow

    def _is_special(self, cast: Cast) -> bool:
        return bool(cast.offset or cast.term) or self._overflows(cast)

    def _send(self, bucket: Bucket, steps: Steps) -> SentBucket:
        """Packs this rank's segment of a bucket, and begins to send it to all ranks that receive
        the bucket.
        """
        self._posted += 1
        buffer = self._filled(steps.buffer, lambda memory: self._pack(steps, bucket, memory))
        return self._exchange(bucket, steps, buffer)

    def _pack(self, steps: Steps, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Fills this rank's segment, of which some boxes are quantised."""
        import torch

        self._copy(steps.send, bucket, buffer)
        if not steps.codings:
            return
        assert self.scheme is not None
        packed = torch.empty(steps.packed, dtype=torch.uint8, device=self._device)
        self._copy(steps.pack, bucket, packed)
        for dtype, numbers, *places in steps.codings:
            kinds = dtype, *(bucket.tensors[numbers[0] + more].dtype for more in (0, 1))
            values, codes, scales = (
                run.views(memory.view(getattr(torch, kind)))
                for run, memory, kind in zip(places, (packed, buffer, buffer), kinds, strict=True)
            )
            overall = self._scales(bucket, numbers)
            bad = quantise(values, codes, scales, block_of(self.scheme), overall)
            self._bad.append((bucket.tensors, numbers, bad))

    def _filled(self, nbytes: int, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Returns memory of a bucket, in which a function has put this rank's segment. If it fails,
        there are other values: all ranks take part in the bucket, and learn of it behind that.
        """
        import torch

        def made() -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

        (memory,) = self._tried(made) or [made()]
        self._tried(lambda: fill(memory))
        return memory

    def _exchange(
        self,
        bucket: Bucket,
        steps: Steps,
        buffer: torch.Tensor,
        numbers: torch.Tensor | None = None,
    ) -> SentBucket:
        """Begins to send the segments of a bucket, of which `buffer` has that of this rank.

        numbers: whose sums over all ranks go with the bucket.
        """
        import torch
        import torch.distributed as dist

        start, size = bucket.segments.get(self.rank, (0, 0))
        receives = self.rank in bucket.to
        own = buffer[start : start + size] if receives else buffer[:size]
        parts = {
            rank: buffer[at : at + count] if receives else own
            for rank, (at, count) in bucket.segments.items()
        }
        self._count(bucket)
        works: list[Any] = []
        if self.world == 1:
            pass
        elif bucket.sent is None and len(bucket.to) == self.world:
            sizes = {count for _, count in bucket.segments.values()}
            if len(parts) == self.world and len(sizes) == 1:
                whole = buffer[: bucket.nbytes]
                works = [call(dist.all_gather_into_tensor, whole, own, async_op=True)]
            elif self._device.type == "cuda" and "nccl" in dist.get_backend() and len(parts) > 1:
                every = [parts.get(rank, buffer[:0]) for rank in range(self.world)]
                works = [call(dist.all_gather, every, own, async_op=True)]
            else:  # gloo gathers pieces of one size only
                works = [
                    call(dist.broadcast, part, rank, async_op=True) for rank, part in parts.items()
                ]
        elif messages := self._messages(bucket, parts, buffer):
            works = call(dist.batch_isend_irecv, messages)
        token = self._token - (self._refused is not None)
        count = 1 if numbers is None else 1 + len(numbers)
        ready = torch.full((count,), token, dtype=torch.int64, device=self._device)
        if numbers is not None:
            ready[1:] = numbers
        if self._group or dist.is_initialized():  # behind the bucket, on the same stream
            works.append(call(dist.all_reduce, ready, async_op=True, group=self._group))
        return SentBucket(bucket, steps, buffer, works, ready, self._posted)

    def _count(self, bucket: Bucket) -> None:
        """Counts the bytes that this rank sends and receives."""
        others = [size for rank, (_, size) in bucket.segments.items() if rank != self.rank]
        if bucket.sent is not None:
            sent = sum(size for _, size in bucket.sent.values())
        else:  # once, whatever the number of receivers
            sent = bucket.segments.get(self.rank, (0, 0))[1] * bool(bucket.to - {self.rank})
        self._counted["buckets"] += 1
        self._counted["sent"] += sent
        self._counted["received"] += sum(others) * (self.rank in bucket.to)

    def _messages(
        self, bucket: Bucket, parts: dict[int, torch.Tensor], buffer: torch.Tensor
    ) -> list[Any]:
        """Returns what this rank sends to and receives from single ranks.

        parts: what each rank sends, as far as it is this rank's to send or to receive.
        """
        import torch.distributed as dist

        group, own = self._group, self.rank
        if bucket.sent is not None:
            sent = {rank: buffer[at : at + size] for rank, (at, size) in bucket.sent.items()}
        else:
            sent = {rank: parts[own] for rank in sorted(bucket.to - {own}) if own in parts}
        received = {rank: part for rank, part in parts.items() if rank != own and own in bucket.to}
        return [
            dist.P2POp(function, part, dist.get_global_rank(group, rank) if group else rank, group)
            for function, listed in ((dist.isend, sent), (dist.irecv, received))
            for rank, part in listed.items()
        ]

    def _copy(
        self,
        listed: list[Moves],
        bucket: Bucket,
        target: torch.Tensor,
        source: torch.Tensor | None = None,
    ) -> None:
        """Does copies into `target`, from the memory `source` or else from the weights."""
        import torch

        for cast, several, moves, sources, targets in listed:
            wanted = _views(target.view(getattr(torch, cast.target)), targets)
            if source is None:
                given = self._weights(moves, cast.source)
            else:
                given = _views(source.view(getattr(torch, cast.source)), sources)
            if several:
                with torch.no_grad():
                    torch._foreach_copy_(wanted, given)  # in as few kernels as torch can
                continue
            if cast.term:
                for m, place, values in zip(moves, wanted, given, strict=True):
                    self._products.add(m, values, place)
            for m, place, values in zip(moves, wanted, given, strict=True):
                if not cast.term:
                    place.copy_(_shifted(values, cast))
                if self._overflows(cast):
                    flag = (place.isinf() & values.isfinite()).any()
                    self._bad.append((bucket.tensors, [m.tensor], flag))
        if source is None and self.memory is not None:
            self.memory.give_back()

    def _weights(self, moves: list[LiveMove], dtype: str) -> list[torch.Tensor]:
        """Returns the elements of weights that copies read: the weight itself if they are all."""
        assert self.memory is not None
        whole, view = self.memory.whole, self.memory.view
        return [
            view(move.src, dtype, move.shape, move.src_strides)
            if move.weight is None
            else whole(move.weight)
            for move in moves
        ]

    def _tensors(self, sent: SentBucket) -> Iterator[Any]:
        """Waits for a bucket, and yields its tensors if this rank receives them: the codes and the
        scales of those that are quantised.
        """
        found, has_boxes = self._received(sent), sent.bucket.sent is not None
        del sent  # the memory of a bucket whose tensors have been made
        for tensor, values in found:
            if has_boxes:
                yield Shard(tensor.name, bounds_of(Box(tensor.start, tensor.shape)), values)
            elif self.slices:
                yield Slice(tensor.name, values, tensor.first, tensor.whole)
            else:
                yield tensor.name, values

    def _received(self, sent: SentBucket) -> list[tuple[ExportedTensor, torch.Tensor]]:
        """Waits for a bucket, and returns its tensors, none if this rank does not receive them."""
        sent.wait()
        found = self._tried(lambda: self._made(sent))
        self._refuse_lost(sent)  # only now, so that a device has its work while this waits
        return found[0] if found else []

    def _made(self, sent: SentBucket) -> list[tuple[ExportedTensor, torch.Tensor]]:
        import torch

        bucket, steps = sent.bucket, sent.steps
        made = torch.empty(steps.made, dtype=torch.uint8, device=self._device)
        self._copy(steps.own, bucket, made)
        self._copy(steps.receive, bucket, made, sent.buffer)
        tensors: dict[int, torch.Tensor] = {}
        coded: dict[int, tuple[torch.Tensor, ...]] = {}
        for (is_made, dtype, is_quantised), listed in steps.tensors.items():
            memory = (made if is_made else sent.buffer).view(getattr(torch, dtype))
            for run in listed:
                values = run.views(memory)
                if self.scheme is not None and is_quantised:
                    overall = self._scales(bucket, run.numbers)
                    *pair, bad = quantised(values, self.scheme, overall)
                    pair += [] if overall is None else [overall]
                    coded.update(zip(run.numbers, zip(*pair, strict=True), strict=True))
                    self._bad.append((bucket.tensors, run.numbers, bad))
                else:
                    tensors.update(zip(run.numbers, values.unbind(0), strict=True))
        if self._overall is not None:
            own = [n for n in tensors if self._overall.is_scale(bucket.tensors[n].name)]
            self._overall.write(bucket, own, [tensors[n] for n in own])
        out = list[tuple[ExportedTensor, torch.Tensor]]()
        for number in range(len(tensors) + len(coded)):
            tensor = bucket.tensors[number]
            if number in coded and self.scheme is not None:
                # strict=False: of several slices, the first one has the scale of the whole
                out += zip(tensor.coded(self.scheme), coded[number], strict=False)
            else:
                out.append((tensor, tensors[number]))
        return out

    def _scales(self, bucket: Bucket, numbers: list[int]) -> torch.Tensor | None:
        """Returns the scales [n, 1] of whole matrices, by the numbers of tensors of a bucket; None
        if the form has none.
        """
        return None if self._overall is None else self._overall.of(bucket, numbers)

    def _refuse_lost(self, sent: SentBucket) -> list[int]:
        """Returns the sums of the numbers that were sent with a bucket. Raises the error of a rank
        whose weights could not be sent, on all ranks; or MckptError unless the bucket has reached
        all ranks.

        With NCCL, a work that was aborted, because a rank ended or after the timeout, looks like
        one that is done. The sum behind the bucket is right only if nothing before it was aborted.
        """
        import torch

        side = self._side
        # the stream of the caller has its work while this process waits
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for work in sent.works[-1:]:
                call(work.wait)
            ready, *sums = call(sent.ready.tolist)
        if ready != self.world * self._token:
            # other ranks may have begun to send the next bucket, and all must do the same
            if sent.number == self._posted < len(self._steps):
                self._send(self._plan.listed[self._posted], self._steps[self._posted]).wait()
            self._fail("a bucket has not reached all ranks")
        return sums

    def _fail(self, reason: str) -> NoReturn:
        """Raises the errors that ranks have noted, on all ranks; otherwise that ranks are lost."""
        gathered(self._refuse_noted, self._group, stated=lambda _: self._said)
        raise lost(reason)

    def _refuse_noted(self) -> None:
        if self._refused is not None:
            raise self._refused


def hf_tensors(model_chunks: Sequence[Any], **options: Any) -> Iterator[Any]:
    """Yields the Hugging Face tensors of a live model once. The keywords are those of `Sync`."""
    return Sync(model_chunks, **options)()


def _digest(made: Buckets) -> dict[str, Any]:
    """Returns what must be equal on all ranks of their plans: which bytes of which tensors they
    send to which ranks.
    """
    found = hashlib.sha256()
    for bucket in made.listed:
        tensors = [tensor[:-1] for tensor in bucket.tensors]  # without the receivers of each
        given = tensors, sorted(bucket.to), bucket.segments, bucket.coded
        found.update(repr(given).encode())
    return {"the plan, which `like`, `args` and `to` decide": found.hexdigest()[:16]}


def _views(memory: torch.Tensor, listed: list[ViewRun]) -> list[torch.Tensor]:
    """Returns the views of all runs in the order of their numbers."""
    if len(listed) == 1:
        return list(listed[0].views(memory).unbind(0))
    found: dict[int, torch.Tensor] = {}
    for run in listed:
        found.update(zip(run.numbers, run.views(memory).unbind(0), strict=True))
    return [found[number] for number in range(len(found))]


def _shifted(view: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Returns the values of a view with the offset of their cast, as `dtypes.shift` does."""
    import torch

    if not cast.offset:
        return view
    wide = sum_dtype(itemsize(cast.source), itemsize(cast.target))
    return view.to(getattr(torch, wide)) + cast.offset
