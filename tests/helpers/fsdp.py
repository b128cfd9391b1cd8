"""Shards a model of the real Megatron-Core over the data-parallel ranks as its trainer does, on
CPU: with torch's FSDP2 (`torch_dcp` checkpoints) or with Megatron-FSDP (`fsdp_dtensor`). Trains it
with made-up gradients.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.models import dist_utils
from torch.distributed import DeviceMesh

from mckpt.trainer import train

STATE_DICT = ChainedOptimizer.state_dict
TORCH_ADAM = False  # of Megatron-Core without Transformer Engine and Apex


def stub() -> None:
    """Replaces what asks for a GPU in either way to shard."""
    on_mesh = DeviceMesh.from_group
    # STUB: the device of the mesh
    DeviceMesh.from_group = lambda group, device_type, *a, **k: on_mesh(group, "cpu", *a, **k)
    if not TORCH_ADAM:
        train.install_adam()
    # STUB: it skips empty shards, of which the stand-in for FusedAdam then has no state; the ranks
    # would load different tensors
    DistributedOptimizer._init_optimizer_states_with_dummy_values = empty_step
    ChainedOptimizer.state_dict = state_dict_of_one


def state_dict_of_one(self: Any, is_loading: bool = False) -> Any:
    """Returns what 0.19 needs to load torch_dcp. It asks its own ChainedOptimizer for it with a
    keyword that this does not take, and the optimizer in it for no `step`.
    """
    if len(self.chained_optimizers) > 1:  # torch_dcp has one
        return STATE_DICT(self)
    (one,) = self.chained_optimizers
    for group in one.optimizer.param_groups if is_loading else ():
        group.setdefault("step", 0)
    return one.state_dict(is_loading) if is_loading else one.state_dict()


def empty_step(self: Any) -> None:
    """Makes the states of an optimizer, of any values."""
    for group in self.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    self.optimizer.step()
    self.optimizer.zero_grad()


def wrapped(args: Namespace, chunks: list[Any]) -> list[Any]:
    """Returns the chunks, wrapped as --use-torch-fsdp2 or --use-megatron-fsdp do, or in DDP."""
    stub()
    host = torch.cuda.current_device
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        torch.cuda.current_device = lambda: 0
    if args.use_megatron_fsdp:
        for chunk in chunks:
            mark_parallel(chunk)
        wrapper = dist_utils.FullyShardedDataParallel
        init = wrapper.__init__
        # STUB: its default is a CUDA device
        wrapper.__init__ = lambda *a, **k: init(*a, **(k | {"device": torch.device("cpu")}))
    try:
        return dist_utils._ddp_wrap(
            chunks,
            False,
            training.get_megatron_ddp_config(args),
            False,
            use_megatron_fsdp=args.use_megatron_fsdp,
            use_torch_fsdp2=args.use_torch_fsdp2,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    finally:
        torch.cuda.current_device = host
        if args.use_megatron_fsdp:
            wrapper.__init__ = init


def mark_parallel(chunk: torch.nn.Module) -> None:
    """Marks the weights that tensor-parallel ranks split, as Transformer Engine does and its
    stand-in does not.
    """
    for module in chunk.modules():
        axis = {"column": 0, "row": 1}.get(getattr(module, "parallel_mode", None))
        if axis is not None and module.tp_size > 1:
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith("weight"):
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim, parameter.partition_stride = axis, 1


def optimizer_of(args: Namespace, chunks: list[Any]) -> tuple[Any, Any]:
    """Returns the trainer's optimizer for wrapped chunks, and its scheduler."""
    config, overrides = training.get_megatron_optimizer_config(args)
    optimizer = training.get_megatron_optimizer(config, chunks, config_overrides=overrides)
    return optimizer, training.get_optimizer_param_scheduler(optimizer)


def step(args: Namespace, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Updates the weights once. The gradient of each element is made of its weight alone, so it is
    the same at all sizes and in all ways to shard.
    """
    if args.use_megatron_fsdp:
        for group in optimizer.param_groups:
            for master in group["params"]:
                master.grad = gradient(master)
    else:
        for chunk in chunks:
            for parameter in chunk.parameters():
                if args.use_torch_fsdp2:
                    parameter.grad = gradient(parameter)
                else:
                    parameter.main_grad.copy_(gradient(parameter))
    updated, _, _ = optimizer.step()
    assert updated
    scheduler.step(increment=args.global_batch_size)


def gradient(weight: torch.Tensor) -> torch.Tensor:
    """Returns a made-up gradient that bfloat16 can represent, in the dtype of the weight."""
    return ((weight.detach().bfloat16() * 3).bfloat16() + 0.01).bfloat16().to(weight.dtype)
