"""What megatron-core asks of CUDA on its build, load, forward and save paths, answered on a machine without a GPU.

One function, `install()`; where CUDA is available it mends only what lacks Transformer Engine.
Checked with megatron-core 0.16.1 and torch 2.13 (CPU build).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


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


def install() -> None:
    """Patches torch.cuda and megatron-core in this process. Idempotent."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm") or (moe_utils.te_general_gemm is not None and not torch.cuda.is_available()):
        # 0.16.1 reads it in every router, but binds it only if Transformer Engine imports; None is its own word for "use torch.mm"
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    stream = _Stream()
    shims: dict[str, Any] = {
        # the device of nearly every buffer that megatron-core allocates: rotary tables, the router, gathered activations
        "current_device": lambda: torch.device("cpu"),
        # dist_checkpointing waits for copies to the host before it writes
        "synchronize": lambda *args, **kwargs: None,
        # the alltoall dispatcher of MoE moves its split sizes to the host on a side stream
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
    }
    for name, shim in shims.items():
        setattr(torch.cuda, name, shim)
    # tied embeddings: LanguageModule moves the shared weight to the GPU before it all-reduces it over the embedding group
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import utils
    from megatron.core.transformer.moe import token_dispatcher

    # there are no CUDA generators to fork; dropout's random stream is then torch's own
    CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    # written with device="cuda"; only reached if no mask is given
    utils.get_default_causal_mask = lambda sq: torch.ones(sq, sq, dtype=torch.bool).triu(1)
    # all_to_all_single wants its split sizes on the host; 0.16.1 takes them out of the tensor only if that is on a GPU
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
