"""Saves the chunks as Megatron-LM's save_checkpoint does.

`torch_dist` is written by dist_checkpointing, `torch` as one file per model-parallel rank. In both
the tracker file is written last, behind a barrier, so that no loader finds a save that died.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mckpt import formats
from mckpt.errors import UsageError
from mckpt.formats.megatron.save_directory import RELEASE, TRACKER, iteration_name
from mckpt.trainer import rng
from mckpt.trainer.load import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    layer_wise_file,
    model_keys,
    rank_directory,
    sharded_state,
    with_group,
)

# as Megatron-LM saves it without an optimizer
CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def save(
    chunks: list[Any],
    args: Namespace,
    directory: str | Path,
    format: str,
    iteration: int | None = 1,
    with_args: bool = True,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    optimizer_format: str | None = "fully_reshardable",
) -> Path:
    """Writes the directory of the iteration (None: a release) and the tracker; returns the former.

    `with_args` False leaves args out, as Megatron-Bridge does. With `optimizer` its state and those
    of the scheduler and of the random generators are saved too. `optimizer_format` is the
    distrib_optim_sharding_type of torch_dist: fully_reshardable or dp_reshardable. It is None if
    the optimizer is not distributed.
    """
    place, sharded = Path(directory) / iteration_name(iteration), formats.get(format).global_keys
    state: dict[str, Any] = {"args": args} if with_args else {}
    state |= {
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0,
    }
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    if optimizer is not None:
        state["rng_state"] = rng.collect(sharded)
    if sharded:
        save_torch_dist(chunks, place, state, optimizer, optimizer_format)
    else:
        save_torch(chunks, args, place, state, optimizer, optimizer_format is not None)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(directory) / TRACKER).write_text(RELEASE if iteration is None else str(iteration))
    dist.barrier()
    return place


def save_torch_dist(
    chunks: list[Any],
    place: Path,
    state: dict[str, Any],
    optimizer: Any,
    optimizer_format: str | None,
) -> None:
    from megatron.core import dist_checkpointing

    metadata: dict[str, Any] = dict(CONTENT_METADATA)
    if optimizer is not None and optimizer_format is not None:
        metadata["distrib_optim_sharding_type"] = optimizer_format
        if optimizer_format == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    models = sharded_state(chunks, metadata)
    state |= models
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(models, metadata=with_group(metadata))
    if dist.get_rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(place), content_metadata=metadata)


def save_torch(
    chunks: list[Any],
    args: Namespace,
    place: Path,
    state: dict[str, Any],
    optimizer: Any,
    distributed: bool,
) -> None:
    path = place / rank_directory(args) / MODEL_FILE
    if writes_torch_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        state |= {
            key: chunk.state_dict_for_save_checkpoint()
            for key, chunk in zip(model_keys(chunks), chunks, strict=True)
        }
        if optimizer is not None:
            state["optimizer"] = optimizer.state_dict()
        torch.save(state, path)
    if optimizer is not None and getattr(args, "use_layer_wise_distributed_optimizer", False):
        if not hasattr(optimizer, "save_state_dict_to_file"):
            raise UsageError(
                "megatron-core cannot save this optimizer, which is distributed by layers, in the"
                " format torch; save it as torch_dist, or train with the arg"
                " use_layer_wise_param_layout false"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        optimizer.save_state_dict_to_file(str(layer_wise_file(path)))
    # Every data-parallel rank takes part, because the state is gathered over them.
    elif optimizer is not None and distributed:
        optimizer.save_parameter_state(str(path.with_name(OPTIMIZER_FILE)))


def writes_torch_file() -> bool:
    """Returns whether this rank writes its mp_rank file.

    Every (tp, pp, ep) must be written. Where dense and expert ranks are laid out differently (tp >
    etp * ep) the first ranks of neither group cover all of them, and those of both do. Megatron-LM
    core_r0.16.0 takes those of the second group only, and leaves files out.
    """
    from megatron.core import parallel_state as ps

    return ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0
