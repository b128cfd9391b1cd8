"""Saves the chunks as Megatron-LM's save_checkpoint does: `torch_dist` by dist_checkpointing, `torch` one file per model-parallel rank.

The order matters in both: weights, then a barrier, then the tracker file, so that a save that dies is not found by a loader.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mckpt.trainer.load import MODEL_FILE, TRACKER, model_keys, rank_directory, sharded_state

CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}  # Megatron-LM's, without an optimizer


def save(chunks: list[Any], args: Namespace, directory: str | Path, format: str, iteration: int | None = 1, with_args: bool = True) -> Path:
    """Writes DIRECTORY/iter_XXXXXXX (or DIRECTORY/release for iteration None) and the tracker; returns the former.

    `with_args` False leaves args out, as Megatron-Bridge does.
    """
    unit = Path(directory) / ("release" if iteration is None else f"iter_{iteration:07d}")
    common: dict[str, Any] = {"args": args} if with_args else {}
    common |= {"checkpoint_version": 3.0, "iteration": iteration or 0, "num_floating_point_operations_so_far": 0}
    {"torch_dist": save_torch_dist, "torch": save_torch}[format](chunks, args, unit, common)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(directory) / TRACKER).write_text("release" if iteration is None else str(iteration))
    dist.barrier()
    return unit


def save_torch_dist(chunks: list[Any], args: Namespace, unit: Path, common: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        unit.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(common | sharded_state(chunks, CONTENT_METADATA), str(unit), content_metadata=dict(CONTENT_METADATA))


def save_torch(chunks: list[Any], args: Namespace, unit: Path, common: dict[str, Any]) -> None:
    if not writes_torch_file():
        return
    path = unit / rank_directory(args) / MODEL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    models = {key: chunk.state_dict_for_save_checkpoint() for key, chunk in zip(model_keys(chunks), chunks, strict=True)}
    torch.save(common | models, path)


def writes_torch_file() -> bool:
    """Whether this rank writes its mp_rank file.

    Every (tp, pp, ep) has to be written once. Neither group alone sees to that when dense and expert ranks are laid out differently
    (tp > etp * ep); the union does. Megatron-LM core_r0.16.0 asks for the second only and leaves files out.
    """
    from megatron.core import parallel_state as ps

    return ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0
