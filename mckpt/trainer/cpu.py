"""Lets megatron-core build, load, run, train and save on a machine without a GPU.

`install()` patches torch.cuda and megatron-core; where CUDA is available it patches only what fails
without Transformer Engine. Schedules and optimizers name the device "cuda" themselves, so they run
within `as_cuda()`. Checked with megatron-core 0.16.1 and torch 2.13 (CPU build).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode


class _FinishedStream:
    """A stream or event that has always finished, because CPU work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any, **kwargs: Any) -> _FinishedStream:
        return self

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any, **kwargs: Any) -> None:
        pass


def _to_host(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _AsCuda(TorchFunctionMode):
    """Allocates tensors for "cuda" on the host, and reports a tensor's type as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        # The optimizers compare the type with "torch.cuda.FloatTensor".
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def as_cuda() -> contextlib.AbstractContextManager[Any]:
    """Lets megatron-core's schedules and optimizers run without a GPU. Does nothing with one."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _AsCuda()


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, allocating on the host what it allocates for "cuda"."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with as_cuda():
            return function(*args, **kwargs)

    return call


_seed = [0]  # of the CUDA generator, which does not exist here


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the state of a CUDA generator that has drawn nothing: the bytes of seed and offset,
    int64 each.
    """
    return torch.tensor([_seed[0], 0], dtype=torch.int64).view(torch.uint8)


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    _seed[0] = int(state.view(torch.int64)[0])


def _manual_seed(seed: int, *args: Any, **kwargs: Any) -> None:
    _seed[0] = seed


def _all_gather(even: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an all_gather whose pieces may differ in their first dimension: every rank sends its
    own piece to all.
    """

    def gather(
        outputs: list[torch.Tensor],
        piece: torch.Tensor,
        group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = [len(output) for output in outputs] if piece.dim() else [0]
        if min(rows) == max(rows):
            return even(outputs, piece, group, *args, **kwargs)
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
    """Returns a reduce_scatter (a sum) whose pieces may differ in their first dimension: every rank
    receives its piece from all, and adds.
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


class _Gloo(dist.ProcessGroupGloo):
    """A gloo group that shares its device with the other groups of this process.

    The thread of a device looks for work 100 times a second. megatron-core makes dozens of groups,
    and with a device for each, half of the processor time of all ranks goes into that.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *args: Any,
        timeout: datetime.timedelta = dist.default_pg_timeout,
        **settings: Any,
    ) -> None:
        gloo: Any = super()  # torch's stubs have only a part of it
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        if args or not all(hasattr(options, name) for name in settings):
            # arguments of a later torch: a group with a device of its own works too
            gloo.__init__(store, rank, size, *args, timeout=timeout, **settings)
            return
        options._timeout, options._devices = timeout, [_device(os.getpid())]
        for name, value in settings.items():
            setattr(options, name, value)
        gloo.__init__(store, rank, size, options)


@functools.cache
def _device(process: int) -> Any:
    """Returns the gloo device of a process: a fork needs its own."""
    return dist.ProcessGroupGloo.create_default_device()


def install() -> None:
    """Patches torch.cuda and megatron-core in this process. May be called again."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # 0.16.1 mocks these names without Transformer Engine, and then believes that it is installed.
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE

    # Every router of 0.16.1 reads this name, which is set only where Transformer Engine is
    # installed. None means torch.mm.
    if not hasattr(moe_utils, "te_general_gemm") or not torch.cuda.is_available():
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    # compiling one of Megatron's small functions takes half a minute and a C++ compiler
    torch.compiler.set_stance("force_eager")
    stream = _FinishedStream()
    shims: dict[str, Any] = {
        # megatron-core allocates nearly every buffer on this device
        "current_device": lambda: torch.device("cpu"),
        # dist_checkpointing calls it before it writes
        "synchronize": lambda *args, **kwargs: None,
        # the alltoall dispatcher of experts moves its split sizes to the host on a side stream
        "Stream": _FinishedStream,
        "Event": _FinishedStream,
        "current_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        # The seeds of megatron-core's generators are kept, so that a GPU can resume a checkpoint
        # that was saved here.
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
    }
    for name, shim in shims.items():
        setattr(torch.cuda, name, shim)
    # LanguageModule moves a tied embedding to the GPU before it all-reduces it.
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self

    c10d: Any = distributed_c10d
    c10d.ProcessGroupGloo = _Gloo

    # gloo has no uneven collectives, and the tokens of experts at etp > 1 are uneven.
    if dist.all_gather.__module__ != __name__:
        dist.all_gather = _all_gather(dist.all_gather)
        dist.reduce_scatter = _reduce_scatter(dist.reduce_scatter)

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import utils
    from megatron.core.transformer.moe import token_dispatcher

    # There are no CUDA generators to fork. Dropout then draws from torch's own generator.
    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # It allocates on "cuda", and is called only if no mask is given.
    utils.get_default_causal_mask = lambda sq: torch.ones(sq, sq, dtype=torch.bool).triu(1)
    fused_softmax.get_sliding_window_causal_mask = _on_host(utils.get_sliding_window_causal_mask)
    # all_to_all_single requires split sizes as numbers; 0.16.1 converts them from a tensor only if
    # that is on a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    # The saver keeps this queue in a process of its own, where each rank spends 4 s on importing
    # torch again. A save that is not asynchronous needs it in this process alone.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
