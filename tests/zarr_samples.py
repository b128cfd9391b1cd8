"""Checkpoints that old releases of megatron-core save as `zarr`, and what they load of those that
mckpt writes. It runs with one of these releases, from 0.6 to 0.13, on CPU, in an environment of its
own (CONTRIBUTING.md):

    python -m torch.distributed.run --nproc-per-node 2 tests/zarr_samples.py save ARGS OUT [FORM]
    python tests/zarr_samples.py load ARGS DIRECTORY VALUES

ARGS: a common.pt with the args of the model. `save` trains a model of random weights for one step
and writes it twice: to OUT/zarr, and as each rank's own files to OUT/torch. FORM is a form of the
distributed optimizer's state, or float16 for the optimizer that is not distributed; without it,
only weights are saved. `load` lets megatron-core load the checkpoint of DIRECTORY into a model and
writes all of its weights to VALUES, with torch.save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import os
import sys
import warnings
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent
FOLDER = "iter_0000001"

warnings.filterwarnings("ignore")


class Nothing:
    """Stands in for a CUDA stream or event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class OnHost(torch.overrides.TorchFunctionMode):
    """Makes tensors in the memory of the host, whatever device is asked for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")) or isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def without_gpu() -> None:
    """Replaces what the old releases call on GPUs without asking."""
    cuda = torch.cuda
    for name in ("synchronize", "empty_cache", "set_rng_state"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("Stream", "Event", "current_stream"):
        setattr(cuda, name, Nothing)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type
    # the optimizers look for torch.cuda.BFloat16Tensor
    torch.Tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k) if a or k else "torch.cuda." + kind(self).rpartition(".")[2]
    )
    # numpy 2 has no `product`, which 0.8 uses
    np.product = np.prod  # type: ignore[attr-defined]
    sys.path.insert(0, str(ROOT / "fake_te"))
    # 0.6 and 0.7 ask for the version of the package
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "2.8.0" if name == "transformer-engine" else version(name)
    )
    OnHost().__enter__()


def start(args: Namespace) -> None:
    without_gpu()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    sizes = args if "RANK" in os.environ else Namespace()
    experts = getattr(sizes, "expert_model_parallel_size", 1)
    parallel_state.initialize_model_parallel(
        getattr(sizes, "tensor_model_parallel_size", 1),
        **({"expert_model_parallel_size": experts} if experts > 1 else {}),
    )
    for name in ("tensor", "expert"):
        setattr(
            args, f"{name}_model_parallel_size", getattr(sizes, f"{name}_model_parallel_size", 1)
        )


def model_of(args: Namespace) -> tuple[Any, Any]:
    """Returns the config and the GPTModel that the args describe."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import transformer_config

    latent = args.multi_latent_attention
    kind = (
        transformer_config.MLATransformerConfig if latent else transformer_config.TransformerConfig
    )
    fields = {field.name for field in dataclasses.fields(kind)}
    held = {k: v for k, v in vars(args).items() if k in fields and v is not None}
    held.update(
        gated_linear_unit=args.swiglu,
        num_moe_experts=args.num_experts,
        activation_func=torch.nn.functional.silu,
        layernorm_epsilon=args.norm_epsilon,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    config = kind(**{k: v for k, v in held.items() if k in fields})
    chosen = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "qk_layernorm": args.qk_layernorm,
    }
    if (latent or args.num_experts) and hasattr(specs, "get_gpt_decoder_block_spec"):
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(**chosen)
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    return config, model.bfloat16()


def fill(model: Any) -> None:
    """Gives random values to all weights. A tensor that each rank has whole is the same on all."""
    from megatron.core import parallel_state

    ranks = {
        "tensor_model_parallel": parallel_state.get_tensor_model_parallel_rank(),
        "allreduce": parallel_state.get_expert_model_parallel_rank(),
    }
    for name, weight in model.named_parameters():
        own = ranks["tensor_model_parallel"] if weight.dim() > 1 and "router" not in name else 0
        if not getattr(weight, "allreduce", True):
            own += 10 * ranks["allreduce"]
        made = torch.Generator().manual_seed(zlib.crc32(f"{name} {own}".encode()))
        weight.data.copy_(torch.randn(weight.shape, generator=made) / 4 + (weight.dim() == 1))


def trained(config: Any, model: Any, distributed: bool) -> Any:
    """Returns the optimizer after one step, in which each gradient is made of its weight."""
    from megatron.core import optimizer as core_optimizer
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    sys.path.insert(0, str(ROOT.parent))
    from mckpt.trainer.adam import Adam

    for module in (core_optimizer, distrib_optimizer):
        module.Adam = Adam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
            weight_decay=0.01,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    for weight in model.parameters():
        weight.main_grad.copy_(weight.detach().float() * 3 + 0.25)
    wrapped.start_grad_sync()
    wrapped.finish_grad_sync()
    updated, _, _ = optimizer.step()
    assert updated
    return optimizer


def save(args: Namespace, out: Path, form: str | None) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    config, model = model_of(args)
    fill(model)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
    state = {**common, "model": model.sharded_state_dict()}
    own = {**common, "model": model.state_dict()}
    ranks = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}"
    if args.expert_model_parallel_size > 1:
        ranks += f"_{parallel_state.get_expert_model_parallel_rank():03}"
    folder = out / "torch" / FOLDER / ranks
    folder.mkdir(parents=True, exist_ok=True)
    if form is not None:
        optimizer = trained(config, model, form != "float16")
        # the optimizer finds the sharding of a parameter by the parameter
        state["model"] = model.sharded_state_dict()
        given = {} if form == "float16" else {"sharding_type": form}
        if "sharding_type" not in inspect.signature(optimizer.sharded_state_dict).parameters:
            assert not given or hasattr(optimizer, "chained_optimizers")
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], **given)
        own = {**common, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if form != "float16":
            optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0 or args.expert_model_parallel_size > 1:
        torch.save(own, folder / "model_optim_rng.pt")
    path = out / "zarr" / FOLDER
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(path), ("zarr", 1))


def load(args: Namespace, directory: Path, values: Path) -> None:
    from megatron.core import dist_checkpointing

    _, model = model_of(args)
    found = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(directory))
    model.load_state_dict(found["model"])
    assert found["args"].num_layers == args.num_layers
    torch.save(dict(model.named_parameters()), values)


def main() -> None:
    command, described, *rest = sys.argv[1:]
    args = torch.load(described, weights_only=False)["args"]
    start(args)
    if command == "save":
        save(args, Path(rest[0]).absolute(), rest[1] if len(rest) > 1 else None)
    else:
        load(args, Path(rest[0]).absolute(), Path(rest[1]))


if __name__ == "__main__":
    main()
