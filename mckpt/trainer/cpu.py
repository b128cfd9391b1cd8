"""What megatron-core asks of CUDA on its build, load, forward and save paths, answered on a machine without a GPU.

One function, `install()`; it does nothing where CUDA is available. Checked with megatron-core 0.16.1 and torch 2.13 (CPU build).
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


def install() -> None:
    """Patches torch.cuda and megatron-core in this process. Idempotent."""
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
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import utils

    # there are no CUDA generators to fork; dropout's random stream is then torch's own
    CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    # written with device="cuda"; only reached if no mask is given
    utils.get_default_causal_mask = lambda sq: torch.ones(sq, sq, dtype=torch.bool).triu(1)
