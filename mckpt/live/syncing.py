"""Gives the Hugging Face tensors of a live model to other programs, such as engines that serve it,
again and again: the plan is made once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mckpt import formats
from mckpt.conversion.target import TargetOptions
from mckpt.errors import UsageError
from mckpt.formats.hf_encodings import WRITTEN, Scheme
from mckpt.geometry.join import Cast
from mckpt.live.buckets import Bucket, Tensor, To, plan
from mckpt.live.memory import Memory
from mckpt.live.model import Described, collected, release
from mckpt.live.together import call, gathered, own_result, rank_and_world
from mckpt.values.dtypes import itemsize
from mckpt.values.quantisation import LARGEST
from mckpt.values.sizes import parse_size

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

BAND = 1024  # rows that are quantised at a time; a multiple of each block


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
    stays valid as long as it is used. Beside the tensors that the caller still holds, a call needs
    at most twice `bucket_bytes` of memory on the device.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        *,
        bucket_bytes: int | str | None = None,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        quantize: Literal["fp8"] | None = None,
        to: To = None,
        slices: bool = False,
        allow_inexact: Collection[str] = (),
        allow_overflow: bool = False,
        **described: Unpack[Described],
    ) -> None:
        """Makes the plan, and proves that it has every element of every parameter once.

        described: the keywords of `Described`, such as `like`.
        bucket_bytes: the most bytes that are sent at once, and that one tensor has. Without it 1
            GiB, or as many as the largest tensor has.
        dtype: of all tensors; without it, each has that of the parameter.
        quantize: "fp8" gives the weights of linear layers as codes, and their scales.
        to: the ranks that receive the tensors: None for all, the number of one rank, or a function
            that returns the names for a rank, which must return the same on all ranks.
        slices: yield a `Slice` for each tensor, so that a larger one can come in several.
        allow_inexact, allow_overflow: as for mckpt.convert.

        Raises one error on all ranks: those of a conversion to Hugging Face, or UsageError for a
        tensor that is too large for the buckets.
        """
        most = None if bucket_bytes is None else parse_size(bucket_bytes, "bucket_bytes")
        self.slices = slices
        self.allow_overflow = allow_overflow
        self.scheme: Scheme | None = WRITTEN[quantize] if quantize else None
        self.memory = own_result(lambda: Memory(model_chunks))
        model = collected(self.memory, described)
        self.rank, self.world = rank_and_world()
        target = TargetOptions(
            formats.HUGGING_FACE, dtype=dtype, quantize=quantize, allow_inexact=allow_inexact
        )
        self._plan = own_result(lambda: plan(model, target, most, to, slices, self.world))
        release(model)
        self.config: dict[str, Any] = self._plan.config  # the content of config.json
        self._device = self.memory.weights[0].tensor().device

    @property
    def names(self) -> list[str]:
        """Returns the names of the tensors, in the order in which they come."""
        return list(dict.fromkeys(t.name for bucket in self._plan.listed for t in bucket.tensors))

    def __call__(self) -> Iterator[Any]:
        """Yields the name and the tensor of each tensor that this rank receives, or a `Slice`.

        Raises one error on all ranks at the end if a value was infinite in `dtype`, or could not be
        quantised.
        """
        self.memory.refresh()
        self._bad: list[tuple[str, torch.Tensor]] = []  # what was infinite: name, and a flag
        for bucket in self._plan.listed:
            segments = self._exchange(bucket)
            if self.rank in bucket.to:
                yield from self._tensors(bucket, segments)
            del segments
        gathered(self._check)
        self.memory.refresh()

    def _check(self) -> None:
        found = [name for name, flag in self._bad if flag.item()]
        self._bad.clear()
        if found:
            raise UsageError.of(
                "tensors have values that their dtype cannot hold; give another dtype, or"
                " allow_overflow=True, which makes them infinite:",
                found,
            )

    def _exchange(self, bucket: Bucket) -> torch.Tensor | None:
        """Packs this rank's segment of a bucket, and sends it. Returns all segments on a rank that
        receives them.
        """
        import torch

        start, size = bucket.segments.get(self.rank, (0, 0))
        if self.rank not in bucket.to:
            if size:
                segment = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._pack(bucket, segment, start)
                self._send(bucket, segment, None)
            return None
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        self._pack(bucket, buffer[start : start + size], start)
        self._send(bucket, buffer[start : start + size], buffer)
        return buffer

    def _pack(self, bucket: Bucket, segment: torch.Tensor, start: int) -> None:
        """Fills this rank's segment, which begins at byte `start` of the bucket."""
        own = np.flatnonzero(bucket.rank == self.rank)
        casts = self._plan.joined.casts
        given, wanted = [], []
        for c, at, number in zip(
            bucket.copies[own].tolist(),
            (bucket.at[own] - start).tolist(),
            bucket.tensor[own].tolist(),
            strict=True,
        ):
            copy = _Copy(*c)
            cast = casts[copy.cast]
            width = itemsize(cast.source)
            strides = copy.src_pitch // width, copy.src_step // width
            view = self.memory.view(copy.src_at, cast.source, (copy.rows, copy.run), strides)
            place = _packed(segment, at, cast.target, copy)
            if not cast.offset and cast.target != "float16":
                given.append(view)
                wanted.append(place)
                continue
            place.copy_(_shifted(view, cast))
            if cast.target == "float16" and not self.allow_overflow:
                flag = (place.isinf() & view.isfinite()).any()
                self._bad.append((bucket.tensors[number].name, flag))
        _copy_all(wanted, given)

    def _send(self, bucket: Bucket, own: torch.Tensor, buffer: torch.Tensor | None) -> None:
        """Sends the segments of a bucket to all ranks that receive it."""
        import torch.distributed as dist

        if self.world == 1:
            return
        parts = {
            rank: buffer[at : at + size] if buffer is not None else own
            for rank, (at, size) in bucket.segments.items()
        }
        if len(bucket.to) == self.world:
            if dist.get_backend() == "nccl" and len(parts) > 1:
                assert buffer is not None
                every = [parts.get(rank, buffer[:0]) for rank in range(self.world)]
                call(dist.all_gather, every, own)
            else:  # gloo gathers pieces of one size only
                for rank, part in parts.items():
                    call(dist.broadcast, part, rank)
            return
        messages = []
        for rank, part in parts.items():
            for receiver in sorted(bucket.to - {rank}):
                if rank == self.rank:
                    messages.append(dist.P2POp(dist.isend, part, receiver))
                elif receiver == self.rank:
                    messages.append(dist.P2POp(dist.irecv, part, rank))
        if messages:
            for request in call(dist.batch_isend_irecv, messages):
                call(request.wait)

    def _tensors(self, bucket: Bucket, segments: torch.Tensor | None) -> Iterator[Any]:
        """Yields the tensors of a bucket whose segments are here."""
        assert segments is not None
        order = np.argsort(bucket.tensor, kind="stable")
        bounds = np.searchsorted(bucket.tensor[order], np.arange(len(bucket.tensors) + 1))
        for number, tensor in enumerate(bucket.tensors):
            rows = order[bounds[number] : bounds[number + 1]]
            whole = self._assembled(bucket, tensor, rows, segments)
            for name, found, first, shape in self._forms(tensor, whole):
                if self.slices:
                    yield Slice(name, found, first, shape)
                else:
                    yield name, found

    def _assembled(
        self, bucket: Bucket, tensor: Tensor, rows: np.ndarray, segments: torch.Tensor
    ) -> torch.Tensor:
        """Returns a tensor, made of its parts in the segments."""
        import torch

        out = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self._device)
        width, given, wanted = itemsize(tensor.dtype), [], []
        for c, at in zip(bucket.copies[rows].tolist(), bucket.at[rows].tolist(), strict=True):
            copy = _Copy(*c)
            strides = copy.dst_pitch // width, copy.dst_step // width
            start = (copy.dst_at - tensor.byte) // width
            wanted.append(out.as_strided((copy.rows, copy.run), strides, start))
            given.append(_packed(segments, at, tensor.dtype, copy))
        _copy_all(wanted, given)
        return out

    def _forms(
        self, tensor: Tensor, whole: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, int, tuple[int, ...]]]:
        """Yields a tensor, or its codes and its scales if it is quantised: name, elements, first
        row, and shape of the whole tensor.
        """
        if self.scheme is None or not tensor.quantised:
            yield tensor.name, whole, tensor.first, tensor.whole
            return
        codes, scales, finite = _quantised(whole, self.scheme.block)
        self._bad.append((tensor.name, ~finite))
        yield tensor.name, codes, tensor.first, tensor.whole
        rows = self.scheme.block[0]
        shape = tuple(-(-n // b) for n, b in zip(tensor.whole, self.scheme.block, strict=True))
        yield tensor.name + self.scheme.scales, scales, tensor.first // rows, shape


def hf_tensors(model_chunks: Sequence[Any], **options: Any) -> Iterator[Any]:
    """Yields the Hugging Face tensors of a live model once. The keywords are those of `Sync`."""
    return Sync(model_chunks, **options)()


class _Copy(NamedTuple):
    """One record of join.COPY as Python numbers."""

    tensor: int
    src_file: int
    dst_file: int
    cast: int
    grid: int
    rows: int
    run: int
    src_at: int
    dst_at: int
    src_pitch: int
    dst_pitch: int
    src_step: int
    dst_step: int


def _packed(segment: torch.Tensor, at: int, dtype: str, copy: _Copy) -> torch.Tensor:
    """Returns the place of a copy in a segment, in which its elements are neighbours."""
    import torch

    size = copy.rows * copy.run * itemsize(dtype)
    return segment[at : at + size].view(getattr(torch, dtype)).view(copy.rows, copy.run)


def _shifted(view: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Returns the values of a view with the offset of their cast, as `values.casting.shift`."""
    import torch

    if not cast.offset:
        return view
    wide = torch.float64 if "float64" in (cast.source, cast.target) else torch.float32
    return view.to(wide) + cast.offset


def _copy_all(wanted: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """Copies and casts each tensor of a list, in as few kernels as torch can."""
    import torch

    if wanted:
        torch._foreach_copy_(wanted, given)


def _quantised(
    values: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes and the scales of a matrix, and whether all its values are finite. The
    formula is that of `execute.quantising.quantise`.
    """
    import torch

    rows, columns = values.shape
    down, along = -(-rows // block[0]), -(-columns // block[1])
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(down, along, dtype=torch.float32, device=values.device)
    for first in range(0, rows, BAND):
        band = values[first : first + BAND].float()
        count = len(band)
        wide = torch.zeros(-(-count // block[0]) * block[0], along * block[1], device=values.device)
        wide[:count, :columns] = band
        blocks = wide.view(-1, block[0], along, block[1])
        scale = blocks.abs().amax((1, 3)) / LARGEST
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        blocks /= scale[:, None, :, None]
        wide.clamp_(-LARGEST, LARGEST)
        codes[first : first + count] = wide[:count, :columns].to(torch.float8_e4m3fn)
        scales[first // block[0] : first // block[0] + len(scale)] = scale
    return codes, scales, scales.isfinite().all()
