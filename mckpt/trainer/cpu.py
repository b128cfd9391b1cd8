"""What megatron-core asks of CUDA on its build, load, forward, train and save paths, answered on a
machine without a GPU.

`install()` for all of it; where CUDA is available it mends only what lacks Transformer Engine.
Within `as_cuda()` the schedules and optimizers run as well, which name the device "cuda"
themselves. Checked with megatron-core 0.16.1 and torch 2.13 (CPU build).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _Stream:
    """A CUDA stream or event that has always finished: CPU work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _AsCuda(TorchFunctionMode):
    """Allocates on the host what is asked for on "cuda", and calls a tensor's type by its name on a
    GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        # the optimizers ask whether it is "torch.cuda.FloatTensor"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def as_cuda() -> contextlib.AbstractContextManager[Any]:
    """In it, megatron-core's schedules and optimizers work without a GPU; nothing where there is
    one.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _AsCuda()


_seed = [0]  # of the CUDA generator that is not there


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """The state of a CUDA generator of this seed that has drawn nothing: seed and offset, int64
    each, as bytes.
    """
    return torch.tensor([_seed[0], 0], dtype=torch.int64).view(torch.uint8)


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    _seed[0] = int(state.view(torch.int64)[0])


def _manual_seed(seed: int) -> None:
    _seed[0] = seed


def _all_gather(even: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather whose pieces may differ in their first dimension: every rank sends its
    own to all.
    """

    def gather(
        outputs: list[torch.Tensor], piece: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [len(output) for output in outputs] if piece.dim() else [0]
        if min(rows) == max(rows):
            return even(outputs, piece, group=group, async_op=async_op)
        received = piece.new_empty((sum(rows), *piece.shape[1:]))
        dist.all_to_all_single(
            received,
            piece.repeat(len(rows), *[1] * (piece.dim() - 1)),
            rows,
            [len(piece)] * len(rows),
            group=group,
        )
        for output, part in zip(outputs, received.split(rows), strict=True):
            output.copy_(part)
        return None

    return gather


def _reduce_scatter(even: Callable[..., Any]) -> Callable[..., Any]:
    """reduce_scatter (a sum) whose pieces may differ in their first dimension: every rank gets its
    piece of all, and adds.
    """

    def scatter(
        output: torch.Tensor,
        pieces: list[torch.Tensor],
        *args: Any,
        group: Any = None,
        **kwargs: Any,
    ) -> Any:
        rows = [len(piece) for piece in pieces]
        if min(rows) == max(rows):
            return even(output, pieces, *args, group=group, **kwargs)
        received = output.new_empty((len(rows), *output.shape))
        dist.all_to_all_single(
            received.flatten(0, 1), torch.cat(pieces), [len(output)] * len(rows), rows, group=group
        )
        output.copy_(received.sum(0))
        return None

    return scatter


def install() -> None:
    """Patches torch.cuda and megatron-core in this process. Idempotent."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # 0.16.1 has these names without Transformer Engine too, mocked, and takes that they import for its being there
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE

    if not hasattr(moe_utils, "te_general_gemm") or (
        moe_utils.te_general_gemm is not None and not torch.cuda.is_available()
    ):
        # 0.16.1 reads it in every router, but binds it only if Transformer Engine imports; None is its own word for "use torch.mm"
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    stream = _Stream()
    shims: dict[str, Any] = {
        # the device of nearly every buffer that megatron-core allocates: rotary tables, the router,
        # gathered activations
        "current_device": lambda: torch.device("cpu"),
        # dist_checkpointing waits for copies to the host before it writes
        "synchronize": lambda *args, **kwargs: None,
        # the alltoall dispatcher of MoE moves its split sizes to the host on a side stream
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        # the seeds of megatron-core's generators are kept, for a checkpoint saved here is to be
        # resumed on a GPU
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
    }
    for name, shim in shims.items():
        setattr(torch.cuda, name, shim)
    # tied embeddings: LanguageModule moves the shared weight to the GPU before it all-reduces it
    # over the embedding group
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self

    # gloo cannot cut unevenly, as the tokens of experts at etp > 1 are
    if dist.all_gather.__module__ != __name__:
        dist.all_gather = _all_gather(dist.all_gather)
        dist.reduce_scatter = _reduce_scatter(dist.reduce_scatter)

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import utils
    from megatron.core.transformer.moe import token_dispatcher

    # there are no CUDA generators to fork; dropout's random stream is then torch's own
    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *args, **kwargs: _get_rng_state()
    random._set_cuda_rng_state = _set_rng_state
    # written with device="cuda"; only reached if no mask is given
    utils.get_default_causal_mask = lambda sq: torch.ones(sq, sq, dtype=torch.bool).triu(1)
    # all_to_all_single wants its split sizes on the host; 0.16.1 takes them out of the tensor only
    # if that is on a GPU
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
