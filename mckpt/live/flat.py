"""Buckets of tensors in one piece of memory each, so that one handle of CUDA IPC, or one message,
is enough for all tensors of a bucket:

    buffer   [q_proj.weight | ... | k_proj.weight | ... ]
    offset    0                     4096                   multiples of `align`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mckpt.errors import UsageError

if TYPE_CHECKING:
    import torch


class FlatTensor(NamedTuple):
    """The name, the form and the place of a tensor in the buffer of its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FlatBucket(NamedTuple):
    """Tensors in one piece of memory.

    buffer: bytes. It belongs to the caller: no later call or bucket writes into it.
    tensors: ascending, without overlap, each at a multiple of `align` bytes and of its elements.
    ready: an event behind the kernels that fill the buffer, for other streams and processes; None
        on the CPU.
    """

    buffer: torch.Tensor
    tensors: list[FlatTensor]
    ready: torch.cuda.Event | None

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the name of each tensor, and its part of the buffer."""
        return [
            (t.name, self.buffer[t.offset : t.offset + t.nbytes].view(t.dtype).view(t.shape))
            for t in self.tensors
        ]


def refuse_align(align: int) -> None:
    """Raises UsageError unless a number is a power of two."""
    if align < 1 or align & (align - 1):
        raise UsageError(f"align is {align!r}, and must be a power of two, in bytes")


def offsets(sizes: Iterable[tuple[int, int]], align: int) -> tuple[list[int], int]:
    """Returns where tensors begin that lie one after the other, and the bytes of all.

    sizes: of each tensor, its bytes and those of an element.
    """
    found, end = [], 0
    for nbytes, width in sizes:
        unit = max(align, width)
        found.append(-(-end // unit) * unit)
        end = found[-1] + nbytes
    return found, -(-end // align) * align


def flat_bucket(
    named: Sequence[tuple[str, torch.Tensor]],
    align: int,
    device: torch.device,
    *,
    copies: bool = False,
) -> FlatBucket:
    """Returns the bucket of some tensors. They are copied, unless they lie in one piece of memory
    as the bucket has them.

    copies: always copy, because the tensors belong to the caller or lie on another device.
    """
    import torch

    starts, nbytes = offsets([(t.nbytes, t.element_size()) for _, t in named], align)
    listed = [
        FlatTensor(name, tensor.dtype, tuple(tensor.shape), start)
        for (name, tensor), start in zip(named, starts, strict=True)
    ]
    storage = named[0][1].untyped_storage()
    lies = not copies and storage.nbytes() >= nbytes
    lies = lies and all(
        tensor.data_ptr() == storage.data_ptr() + start and tensor.is_contiguous()
        for (_, tensor), start in zip(named, starts, strict=True)
    )
    buffer = torch.empty(0 if lies else nbytes, dtype=torch.uint8, device=device)
    event = torch.cuda.Event() if device.type == "cuda" else None
    bucket = FlatBucket(buffer, listed, event)
    if lies:
        buffer.set_(storage, 0, (nbytes,), (1,))
    else:
        for (_, target), (_, tensor) in zip(bucket.named(), named, strict=True):
            target.copy_(tensor)
    if event is not None:
        event.record(torch.cuda.current_stream(device))
    return bucket
