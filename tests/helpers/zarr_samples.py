"""Checkpoints that old releases of megatron-core save as `zarr`. It runs with one of these
releases, from 0.6 to 0.13, on CPU, in an environment of its own (CONTRIBUTING.md):

    python -m torch.distributed.run --nproc-per-node 2 tests/helpers/zarr_samples.py ARGS OUT FORM

ARGS: a common.pt with the args of the model. It makes a model of random weights, trains it for one
step, and saves it twice: as OUT/zarr, and as each rank's own files in OUT/torch. FORM is a form of
the distributed optimizer's state, or float16 for the optimizer that is not distributed, or weights
for no optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
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

HERE = Path(__file__).resolve().parent
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
    sys.path.insert(0, str(HERE / "fake_te"))
    # 0.6 and 0.7 ask for the version of the package
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "2.8.0" if name == "transformer-engine" else version(name)
    )
    OnHost().__enter__()


def start(args: Namespace) -> None:
    without_gpu()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    experts = args.expert_model_parallel_size
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        **({"expert_model_parallel_size": experts} if experts > 1 else {}),
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


def optimizer_of(config: Any, model: Any, distributed: bool) -> Any:
    """Returns the optimizer of a model, with gradients that are made of the weights."""
    from megatron.core import optimizer as core_optimizer
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    sys.path.insert(0, str(HERE.parents[1]))
    from mckpt.trainer.train import Adam

    for module in (core_optimizer, distrib_optimizer):
        module.Adam = Adam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(config, settings, model)
    for weight in model.parameters():
        weight.main_grad.copy_(weight.detach().float() * 3 + 0.25)
    wrapped.start_grad_sync()
    wrapped.finish_grad_sync()
    options = {"lr": 1e-2, "weight_decay": 0.01, "clip_grad": 0.0, "bf16": True}
    options |= {"params_dtype": torch.bfloat16, "use_distributed_optimizer": distributed}
    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), [wrapped])


def sharded(args: Namespace, model: Any, optimizer: Any, form: str) -> Any:
    """Returns what dist_checkpointing saves."""
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
    state["model"] = model.sharded_state_dict()
    if optimizer is not None:
        given = {} if form == "float16" else {"sharding_type": form}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], False, **given)
    return state


def run(args: Namespace, out: Path, form: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    config, model = model_of(args)
    fill(model)
    optimizer = None
    if form != "weights":
        optimizer = optimizer_of(config, model, form != "float16")
    if optimizer is not None:
        updated, _, _ = optimizer.step()
        assert updated
    ranks = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}"
    if args.expert_model_parallel_size > 1:
        ranks += f"_{parallel_state.get_expert_model_parallel_rank():03}"
    folder = out / "torch" / FOLDER / ranks
    folder.mkdir(parents=True, exist_ok=True)
    own = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model.state_dict()}
    if optimizer is not None:
        own["optimizer"] = optimizer.state_dict()
        if form != "float16":
            optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0 or args.expert_model_parallel_size > 1:
        torch.save(own, folder / "model_optim_rng.pt")
    path = out / "zarr" / FOLDER
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    state = sharded(args, model, optimizer, form)
    dist_checkpointing.save(state, str(path), ("zarr", 1))


def main() -> None:
    described, out, form = sys.argv[1:]
    # the default of torch.load when 0.8 was released
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    args = torch.load(described)["args"]
    start(args)
    run(args, Path(out).absolute(), form)


if __name__ == "__main__":
    main()
