"""Gives the Hugging Face tensors of a live model to other programs, such as engines that serve it,
again and again: the plan is made once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mckpt import formats
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import UsageError
from mckpt.formats.hf_encodings import WRITTEN, Scheme
from mckpt.live.adapters import LiveTensors, Products, chosen
from mckpt.live.buckets import Bucket, Buckets, ExportedTensor, To, plan
from mckpt.live.deltas import Deltas, Kept
from mckpt.live.memory import Memory
from mckpt.live.model import Described, collected, release, stated
from mckpt.live.quantising import quantised
from mckpt.live.settings import refuse_other_settings
from mckpt.live.steps import LiveMove, Moves, Steps, ViewRun, even_rooms, steps_of
from mckpt.live.together import (
    call,
    gathered,
    lost,
    own_result,
    rank_and_world,
    refusal_of,
)
from mckpt.options import SyncOptions, TargetOptions
from mckpt.values.dtypes import itemsize, sum_dtype
from mckpt.values.element import Cast

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack


class Slice(NamedTuple):
    """Rows of a Hugging Face tensor: rows `first` to `first + len(tensor)` of a tensor of `shape`.
    They are all of its rows where it fits into a bucket.
    """

    name: str
    tensor: torch.Tensor
    first: int
    shape: tuple[int, ...]


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
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        *,
        bucket_bytes: int | str | None = None,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        quantize: Literal["fp8", "mxfp8"] | None = None,
        to: To = None,
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
        quantize: "fp8" or "mxfp8" gives the weights of linear layers as codes, and their scales.
        to: the ranks that receive the tensors: None for all, the number of one rank, or a function
            that returns the names for a rank, which must return the same on all ranks.
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
            "to": to,
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

        self.memory, most = own_result(begun, lambda _: {"function": "Sync", **given})
        self.slices, self.snapshot, self.allow_overflow = slices, snapshot, allow_overflow
        self.scheme: Scheme | None = WRITTEN[quantize] if quantize else None
        model = collected(self.memory, described)
        target = TargetOptions(
            formats.HUGGING_FACE, dtype=dtype, quantize=quantize, allow_inexact=allow_inexact
        )

        def wanted() -> LiveTensors:
            refuse_other_settings(self.memory.chunks, model)
            return chosen(model, adapter)

        self._factors: Sync | None = None
        found, merged, form = own_result(wanted)
        self._make(found, target, most, to, delta)
        if merged is not None and form is not None:
            self._products = own_result(lambda: Products(self._plan, form))
            needed = self._products.needed
            self._factors = Sync.of_factors(self.memory, merged, lambda rank: needed.get(rank, ()))
        release(model)

    @classmethod
    def of_factors(cls, memory: Memory, adapter: AdapterCheckpoint, to: To = None) -> Sync:
        """Returns what gathers the factors of the adapters of a live model."""
        found = cls.__new__(cls)
        found.memory, found.slices, found.scheme, found.snapshot = memory, False, None, False
        found.allow_overflow, found._factors = True, None
        found._make(adapter, TargetOptions(formats.HUGGING_FACE), None, to)
        return found

    def _make(
        self,
        model: Checkpoint,
        target: TargetOptions,
        most: int | None,
        to: To,
        delta: Literal["host", "device"] | None = None,
    ) -> None:
        """Makes the plan. The arguments are those of `plan`."""
        self.rank, self.world = rank_and_world()
        args = target, most, to, self.slices, self.world, self.rank, delta is not None
        self._plan = own_result(lambda: plan(model, *args), _digest)
        self.config: dict[str, Any] = self._plan.config  # the content of config.json
        self._device = self.memory.device
        casts = self._plan.joined.casts
        # whether a value may not fit into its dtype, which all ranks learn at the end
        self._checks = bool(target.quantize) or any(self._overflows(cast) for cast in casts)
        self._steps = [
            steps_of(bucket, casts, self.rank, self.memory, self._is_special)
            for bucket in self._plan.listed
        ]
        self._steps = even_rooms(self._steps, self._plan.most)
        self._kept = Kept(self, delta) if delta else None
        self._side = None
        if self._device.type == "cuda":
            import torch

            self._side = torch.cuda.Stream(self._device)

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns the dtype and the shape of each tensor, in the order in which they come."""
        import torch

        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for tensor in (tensor for bucket in self._plan.listed for tensor in bucket.tensors):
            dtype, shape = tensor.dtype, tensor.whole
            if (scheme := self.scheme) is not None and tensor.quantised:
                dtype, kind = scheme.encoding.dtype, scheme.dtypes[0]
                grid = scheme.grids((shape[0], shape[1]))[0]
                found[tensor.name + scheme.scales] = getattr(torch, kind), grid
            found[tensor.name] = getattr(torch, dtype), shape
        return found

    @property
    def names(self) -> list[str]:
        """Returns the names of the tensors, in the order in which they come."""
        return list(self.tensors)

    def __call__(self) -> Any:
        """Returns an iterator as of `_given_now`, or with `delta` the `Deltas`."""
        return self._given_now() if self._kept is None else Deltas(self._kept)

    def _given_now(self) -> Iterator[Any]:
        """Yields the name and the tensor of each tensor that this rank receives, or a `Slice`.

        While the caller uses the tensors of a bucket, the next one is on its way, unless both and a
        tensor need more than twice `bucket_bytes`.

        Raises one error on all ranks before the first tensor if the weights of a rank are not as
        they were described, or not in memory; and at the end if a value was infinite in `dtype`, or
        could not be quantised. If a rank is lost, no rank yields the tensors of a bucket that has
        not reached all of them.
        """
        self.memory.complete()
        self.memory.refresh()
        self._refused = refusal_of(self.memory.refuse_changed)
        if self.snapshot and self._refused is None:
            self.memory.keep()
        try:
            yield from self._given()
        finally:
            self.memory.refresh()

    def _given(self) -> Iterator[Any]:
        """Does the work of a call, with the weights where they are now or were kept."""
        self._begin()
        sent: list[_SentBucket] = []
        for bucket, steps in zip(self._plan.listed, self._steps, strict=True):
            if sent and sent[0].steps.memory + steps.buffer > 2 * self._plan.most:
                yield from self._tensors(sent.pop())
            sent.append(self._send(bucket, steps))
            if len(sent) > 1:
                yield from self._tensors(sent.pop(0))
        if sent:
            yield from self._tensors(sent.pop())
        self._end()

    def _begin(self) -> None:
        # flags that are not 0 for values that were infinite, and the numbers of their tensors
        self._bad: list[tuple[list[ExportedTensor], list[int], torch.Tensor]] = []
        if self._factors is not None:
            self._factors._refused = self._refused
            self._products.take(self._factors._given())

    def _end(self) -> None:
        if self._checks:
            gathered(self._check)
        if self._factors is not None:
            self._products.forget()

    def _check(self) -> None:
        import torch

        every = [flags.reshape(-1).int() for _, _, flags in self._bad]
        names = [listed[n].name for listed, numbers, _ in self._bad for n in numbers]
        flags = torch.cat(every).tolist() if every else []
        found = [name for name, flag in zip(names, flags, strict=True) if flag]
        self._bad.clear()
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

    def _send(self, bucket: Bucket, steps: Steps) -> _SentBucket:
        """Packs this rank's segment of a bucket, and begins to send it to all ranks that receive
        the bucket.
        """
        import torch

        buffer = torch.empty(steps.buffer, dtype=torch.uint8, device=self._device)
        if self._refused is None:
            self._copy(steps.send, bucket, buffer)
        return self._exchange(bucket, steps, buffer)

    def _exchange(self, bucket: Bucket, steps: Steps, buffer: torch.Tensor) -> _SentBucket:
        """Begins to send the segments of a bucket, of which `buffer` has that of this rank."""
        import torch
        import torch.distributed as dist

        start, size = bucket.segments.get(self.rank, (0, 0))
        receives = self.rank in bucket.to
        own = buffer[start : start + size] if receives else buffer[:size]
        parts = {
            rank: buffer[at : at + count] if receives else own
            for rank, (at, count) in bucket.segments.items()
        }
        works: list[Any] = []
        if self.world == 1:
            pass
        elif len(bucket.to) == self.world:
            sizes = {count for _, count in bucket.segments.values()}
            if len(parts) == self.world and len(sizes) == 1:
                whole = buffer[: bucket.nbytes]
                works = [call(dist.all_gather_into_tensor, whole, own, async_op=True)]
            elif dist.get_backend() == "nccl" and len(parts) > 1:
                every = [parts.get(rank, buffer[:0]) for rank in range(self.world)]
                works = [call(dist.all_gather, every, own, async_op=True)]
            else:  # gloo gathers pieces of one size only
                works = [
                    call(dist.broadcast, part, rank, async_op=True) for rank, part in parts.items()
                ]
        elif messages := self._messages(bucket, parts):
            works = call(dist.batch_isend_irecv, messages)
        ready = torch.full((1,), int(self._refused is None), device=self._device)
        if dist.is_initialized():  # behind the bucket, on the same stream
            works.append(call(dist.all_reduce, ready, async_op=True))
        return _SentBucket(bucket, steps, buffer, works, ready)

    def _messages(self, bucket: Bucket, parts: dict[int, torch.Tensor]) -> list[Any]:
        """Returns what this rank sends to and receives from single ranks."""
        import torch.distributed as dist

        messages = []
        for rank, part in parts.items():
            for receiver in sorted(bucket.to - {rank}):
                if rank == self.rank:
                    messages.append(dist.P2POp(dist.isend, part, receiver))
                elif receiver == self.rank:
                    messages.append(dist.P2POp(dist.irecv, part, rank))
        return messages

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

    def _weights(self, moves: list[LiveMove], dtype: str) -> list[torch.Tensor]:
        """Returns the elements of weights that copies read: the weight itself if they are all."""
        whole, view = self.memory.whole, self.memory.view
        return [
            view(move.src, dtype, move.shape, move.src_strides)
            if move.weight is None
            else whole(move.weight)
            for move in moves
        ]

    def _tensors(self, sent: _SentBucket) -> Iterator[Any]:
        """Waits for a bucket, and yields its tensors if this rank receives them: the codes and the
        scales of those that are quantised.
        """
        found, scales = self._received(sent)
        listed, scheme = sent.bucket.tensors, self.scheme
        del sent  # the memory of a bucket whose tensors have been made
        # strict=False: a rank that does not receive the bucket has no tensors
        for number, (tensor, whole) in enumerate(zip(listed, found, strict=False)):
            if not self.slices:
                yield tensor.name, whole
                if scheme is not None and number in scales:
                    yield tensor.name + scheme.scales, scales[number]
                continue
            yield Slice(tensor.name, whole, tensor.first, tensor.whole)
            if scheme is not None and number in scales:
                grid = scheme.grids((tensor.whole[0], tensor.whole[1]))[0]
                first = tensor.first // (scheme.block[0] or 1)
                yield Slice(tensor.name + scheme.scales, scales[number], first, grid)

    def _received(self, sent: _SentBucket) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Waits for a bucket, and returns its tensors, none if this rank does not receive them; and
        by their numbers the scales of those that are quantised.
        """
        import torch

        for work in sent.works:
            call(work.wait)
        bucket, steps = sent.bucket, sent.steps
        made = torch.empty(steps.made, dtype=torch.uint8, device=self._device)
        self._copy(steps.own, bucket, made)
        self._copy(steps.receive, bucket, made, sent.buffer)
        tensors: dict[int, torch.Tensor] = {}
        scales: dict[int, torch.Tensor] = {}
        for (is_made, dtype, is_quantised), listed in steps.tensors.items():
            memory = (made if is_made else sent.buffer).view(getattr(torch, dtype))
            for run in listed:
                values = run.views(memory)
                if self.scheme is not None and is_quantised:
                    values, grids, bad = quantised(values, self.scheme)
                    scales.update(zip(run.numbers, grids.unbind(0), strict=True))
                    self._bad.append((bucket.tensors, run.numbers, bad))
                tensors.update(zip(run.numbers, values.unbind(0), strict=True))
        self._refuse_lost(sent)  # only now, so that a device has its work while this waits
        return [tensors[number] for number in range(len(tensors))], scales

    def _refuse_lost(self, sent: _SentBucket) -> None:
        """Raises the error of a rank whose weights could not be sent, on all ranks; or MckptError
        unless the bucket has reached all ranks.

        With NCCL, a work that was aborted, because a rank ended or after the timeout, looks like
        one that is done. The sum behind the bucket is right only if nothing before it was aborted.
        """
        import torch

        side = self._side
        # the stream of the caller has its work while this process waits
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for work in sent.works[-1:]:
                call(work.wait)
            ready = call(sent.ready.item)
        if ready != self.world:
            refused = self._refused

            def fail() -> None:
                if refused is not None:
                    raise refused

            gathered(fail)
            raise lost("a bucket has not reached all ranks")


def hf_tensors(model_chunks: Sequence[Any], **options: Any) -> Iterator[Any]:
    """Yields the Hugging Face tensors of a live model once. The keywords are those of `Sync`."""
    return Sync(model_chunks, **options)()


class _SentBucket(NamedTuple):
    """A bucket on its way."""

    bucket: Bucket
    steps: Steps
    buffer: torch.Tensor  # all segments on a rank that receives them, else its own; and more
    works: list[Any]  # of torch.distributed
    ready: torch.Tensor  # becomes the number of ranks that have sent their part


def _digest(made: Buckets) -> dict[str, Any]:
    """Returns what must be equal on all ranks of their plans: which bytes of which tensors they
    send to which ranks.
    """
    found = hashlib.sha256()
    for bucket in made.listed:
        tensors = [tensor[:-1] for tensor in bucket.tensors]  # without the receivers of each
        found.update(repr((tensors, sorted(bucket.to), bucket.segments)).encode())
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
