"""Trains a model of Megatron-Core, sharded by Megatron-FSDP v2 over two ranks of a CPU, and goes on
from what mckpt makes of its checkpoint.

    python -m tests.helpers.mfsdp_v2 HF_DIR RUN OUT     RUN: the model as torch_dist

OUT/saved     after two steps
OUT/whole     the same by mckpt, as torch_dist; OUT/written: that as mfsdp_v2
OUT/ends      after the third step
OUT/goes-on   after the third step of a run that loads OUT/written

Megatron-LM's own save_checkpoint and load_checkpoint are called if it has them, which the wheel of
0.19.2 does not. Else their four calls of torch are made here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import mckpt
from mckpt.options import SourceOptions
from mckpt.trainer import build, cpu, forked, load

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
RANKS = 2


class Stream:
    """STUB: a stream of CUDA."""

    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...


def sharded(args: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Returns a model with weights of 0 and its optimizer, as a trainer would make them."""
    own = importlib.import_module(f"{FSDP}.experimental.fully_shard")
    from megatron.core.transformer.transformer_layer import TransformerLayer

    (model,) = build.build(args, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.zero_()
    flat = getattr(importlib.import_module(f"{FSDP}.experimental"), "Flat", None)
    names = {field.name for field in dataclasses.fields(own.Placements)} - {"dp_axes"}
    places = own.Placements(dp_axes=[0], **{n: [flat() if flat else Shard(0)] for n in names})
    mesh = init_device_mesh("cpu", (RANKS,))
    with contextlib.ExitStack() as stack:
        if hasattr(own, "_FSDP_CONTEXT"):
            context = own.FsdpContext(device=torch.device("cpu"))  # STUB: the device
            token = own._FSDP_CONTEXT.set(context)
            stack.callback(own._FSDP_CONTEXT.reset, token)
            stack.callback(context.finalize)
        layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
        for module in (*reversed(layers), model):
            own.fully_shard(module, mesh=mesh, placements=places)
    for parameter in model.parameters():
        parameter.grad_dtype = parameter.dtype
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Updates the weights by gradients that are made of them."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 3 + 0.01
    optimizer.step()


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    uneven = importlib.import_module(f"{FSDP}.uneven_dtensor")
    found = {
        "model": dcp.get_model_state_dict(model),
        "optimizer": dcp.get_optimizer_state_dict(model, optimizer),
    }
    for own in found.values():
        uneven.preprocess_state_dict_for_uneven_dtensor(own)
    return found


def save(model: Any, optimizer: torch.optim.Optimizer, place: Path) -> None:
    checkpoint.save(states(model, optimizer), checkpoint_id=place)


def resume(model: Any, optimizer: torch.optim.Optimizer, place: Path) -> None:
    step(model, optimizer)  # makes its states
    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=place)
    dcp.set_model_state_dict(model, found["model"])
    dcp.set_optimizer_state_dict(model, optimizer, found["optimizer"])


def main(hf: Path, run: Path, out: Path) -> None:
    cpu.install()
    torch.cuda.Stream = Stream  # STUB, as the next two
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    args = build.at_sizes(load.read_args(run), transformer_impl="auto")
    store = dist.FileStore(str(out / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=RANKS)
    build.initialize(args)
    experimental = importlib.import_module(f"{FSDP}.experimental")
    saves: Callable[..., None] = getattr(experimental, "save_checkpoint", save)
    loads: Callable[..., None] = getattr(experimental, "load_checkpoint", resume)
    if loads is not resume:
        # STUB: the weights in bf16 are made of the new ones on a stream
        own = importlib.import_module(f"{FSDP}.experimental.checkpoint")
        own.sync_model_weights_from_main_weights = lambda _: None
    (plain,) = build.build(args, torch.bfloat16)
    load.load([plain], args, run)
    weights = plain.state_dict()
    model, optimizer = sharded(args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.empty_like(parameter)
            whole.copy_(_cut(parameter, weights[name]))
            parameter.copy_(whole)
    for _ in range(2):
        step(model, optimizer)
    saves(model, optimizer, out / "saved")
    if dist.get_rank() == 0:
        like = mckpt.Checkpoint.open(out / "saved", SourceOptions(like=str(hf)))
        kept: dict[str, Any] = {"keep_padding": True}
        mckpt.plan(like, out / "whole", format="torch_dist", dtype="bf16", **kept).run()
        mckpt.plan(out / "whole", out / "written", format="mfsdp_v2", **kept).run()
    step(model, optimizer)
    saves(model, optimizer, out / "ends")
    again, other = sharded(args)
    (written,) = (out / "written").glob("iter_*")
    loads(again, other, written)
    step(again, other)
    saves(again, other, out / "goes-on")


def _cut(parameter: Any, whole: torch.Tensor) -> Any:
    """Returns the rows of a weight that this rank has, as a DTensor."""
    counts: list[Any] = [None] * RANKS
    dist.all_gather_object(counts, parameter.to_local().shape[0])
    first = sum(counts[: dist.get_rank()])
    local = whole[first : first + parameter.to_local().shape[0]].float()
    made = torch.distributed.tensor.DTensor.from_local
    kept = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return made(local, parameter.device_mesh, parameter.placements, **kept)


if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = str(RANKS)
    paths = [Path(name).absolute() for name in sys.argv[1:]]
    sys.exit(forked.fork_ranks(lambda: main(*paths)))
