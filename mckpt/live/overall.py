"""The scales of whole matrices (nvfp4), which depend on values of all ranks. Each rank looks at
what it holds, and all take the largest of what they found, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mckpt.errors import UsageError
from mckpt.formats.hf_encodings import Scheme
from mckpt.live.buckets import OWN, Bucket, Buckets
from mckpt.live.quantising import overall_scales
from mckpt.live.together import call
from mckpt.values.dtypes import itemsize

if TYPE_CHECKING:
    import torch

    from mckpt.live.memory import Memory

SEVERAL = 256  # weights that are measured at once


class _Held(NamedTuple):
    """Elements of a weight, of matrices that have one scale."""

    peer: int  # the number of these matrices
    weight: int  # the number of the weight, if they are all of it, else -1
    place: int  # in the memory of this rank
    dtype: str
    shape: tuple[int, int]
    strides: tuple[int, int]


class Overall:
    """The scales of the whole matrices of a call."""

    def __init__(self, plan: Buckets, rank: int, memory: Memory, scheme: Scheme) -> None:
        """Raises UsageError if products of adapters are added to the matrices."""
        if any(cast.term for cast in plan.joined.casts):
            raise UsageError(
                "quantize='nvfp4': a scale depends on the largest value of several weights with the"
                " products of their adapters, which are not computed twice: merge the adapters"
                " into the model first, or take 'fp8' or 'mxfp8'"
            )
        self.suffix = scheme.whole
        self.memory, self.count = memory, max(plan.peers.values()) + 1
        suffixes = {"", scheme.codes, scheme.whole}  # of the names of tensors
        self.peers = {name + end: n for name, n in plan.peers.items() for end in suffixes}
        found = [
            one for bucket in plan.listed for one in _held(bucket, plan, self.peers, rank, memory)
        ]
        self.held = _whole(found, memory)

    def begin(self) -> None:
        """Forgets the call before."""
        import torch

        self._largest = torch.zeros(self.count, device=self.memory.device)

    def measure(self) -> None:
        """Looks for the largest values on this rank."""
        import torch

        memory = self.memory
        peers = torch.tensor([one.peer for one in self.held], device=memory.device)
        for first in range(0, len(self.held), SEVERAL):
            some = self.held[first : first + SEVERAL]
            views = [
                memory.whole(one.weight).detach()
                if one.weight >= 0
                else memory.view(one.place, one.dtype, one.shape, one.strides)
                for one in some
            ]
            norms = torch.stack(torch._foreach_norm(views, math.inf)).float()
            self._largest.scatter_reduce_(0, peers[first : first + SEVERAL], norms, "amax")
            memory.give_back()

    def agree(self) -> None:
        """Makes the scales. All ranks call it."""
        import torch.distributed as dist

        if dist.is_initialized():
            call(dist.all_reduce, self._largest, dist.ReduceOp.MAX)
        self.each = list(overall_scales(self._largest).view(-1, 1).unbind(0))

    def is_scale(self, name: str) -> bool:
        """Returns whether a tensor is such a scale."""
        return name.endswith(self.suffix) and name in self.peers

    def of(self, bucket: Bucket, numbers: Sequence[int]) -> torch.Tensor:
        """Returns the scales [n, 1] of the matrices that have these tensors of a bucket."""
        import torch

        return torch.stack([self.each[self.peers[bucket.tensors[n].name]] for n in numbers])

    def write(self, bucket: Bucket, numbers: list[int], tensors: list[torch.Tensor]) -> None:
        """Writes the scales that these tensors [1] of a bucket are into them."""
        import torch

        if numbers:
            torch._foreach_copy_(tensors, list(self.of(bucket, numbers).unbind(0)))


def _held(
    bucket: Bucket, plan: Buckets, peers: Mapping[str, int], rank: int, memory: Memory
) -> Iterator[_Held]:
    """Yields what a rank holds of the matrices of a bucket."""
    of_tensor = np.array([peers.get(tensor.name, -1) for tensor in bucket.tensors])
    own = [rank, OWN] if rank in bucket.to else [rank]
    chosen = np.isin(bucket.rank, own) & (of_tensor[bucket.tensor] >= 0)
    copies = bucket.copies[chosen]
    names = ("cast", "src_at", "rows", "run", "src_pitch", "src_step")
    columns = [copies[name].tolist() for name in names]
    numbers = of_tensor[bucket.tensor[chosen]].tolist()
    for peer, cast, place, rows, run, pitch, step in zip(numbers, *columns, strict=True):
        dtype = plan.joined.casts[cast].source
        width = itemsize(dtype)
        yield _Held(peer, -1, place, dtype, (rows, run), (pitch // width, step // width))


def _whole(found: list[_Held], memory: Memory) -> list[_Held]:
    """Returns the same elements, with one entry for a weight whose elements have one scale. It then
    needs no views, which would take longer than to look at small weights.
    """
    of_weight: dict[int, list[_Held]] = {}
    for one in found:
        of_weight.setdefault(memory.number(one.place), []).append(one)
    out = list[_Held]()
    for number, listed in of_weight.items():
        nbytes = sum(math.prod(one.shape) * itemsize(one.dtype) for one in listed)
        is_whole = nbytes == memory.weights[number].nbytes
        if is_whole and len({one.peer for one in listed}) == 1:
            listed = [listed[0]._replace(weight=number)]
        out += listed
    return out
