"""Trains with an old release of megatron-core that still saves as `zarr`, on CPU, in an environment
of its own (CONTRIBUTING.md). Trainer, data and steps are those of mckpt.trainer, so that the latter
can go on from the save with today's megatron-core, and its losses can be compared with those of the
old release, which goes on as well.

    python -m torch.distributed.run --nproc-per-node 4 tests/helpers/zarr_training.py FORM OUT
    [NAME=VALUE]

FORM is a form of the distributed optimizer's state, or float16, which is not distributed and trains
in bfloat16. All others train in float32. NAME=VALUE is a parallel size. It saves OUT/iter_0000002,
and writes OUT/run.json with the job of mckpt.trainer.train that goes on from there, and with all
steps of this run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import types
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE / "fake_te")]

from mckpt.trainer import build, load, save, train  # noqa: E402

SAVED_AT, STEPS = 2, 10
FLOAT16 = "float16"
JOB: dict[str, Any] = {
    "steps": SAVED_AT + STEPS,
    "decay_steps": SAVED_AT + STEPS,
    "lr": 1e-2,
    "warmup": 1,
    "global_batch_size": 4,
    "seq_length": 16,
    "dtype": "float32",
}
ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 6,
    "max_position_embeddings": 32,
    "seq_length": 32,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "add_position_embedding": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 30,
    "padded_vocab_size": 32,
    "make_vocab_size_divisible_by": 8,
    "num_experts": None,
    "transformer_impl": "local",
    "params_dtype": torch.float32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def as_today() -> None:
    """Gives the old release the names that today's has and mckpt's trainer uses."""
    from megatron.core import optimizer, parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import transformer_config, utils

    np.product = np.prod  # type: ignore[attr-defined]  # numpy 2 has no `product`
    transformer_engine.HAVE_TE = False
    transformer_config.TransformerConfig.qk_l2_norm = False
    # activations that the model does not have
    activations: Any = types.ModuleType("megatron.core.activations")
    activations.squared_relu = fused_bias_geglu.quick_gelu = None
    sys.modules[activations.__name__] = activations
    if not hasattr(utils, "get_sliding_window_causal_mask"):
        utils.get_sliding_window_causal_mask = None
    # its own rule is that of get_standard_config_overrides
    optimizer.get_standard_config_overrides = lambda config: None
    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    for module, name in (
        (optimizer, "get_megatron_optimizer"),
        (parallel_state, "initialize_model_parallel"),
        (gpt_layer_specs, "get_gpt_decoder_block_spec"),
        (gpt_model.GPTModel, "__init__"),
        (gpt_model.GPTModel, "sharded_state_dict"),
        (importlib.import_module("megatron.core.utils"), "get_batch_on_this_cp_rank"),
    ):
        setattr(module, name, without_unknown(getattr(module, name)))


def without_unknown(function: Any) -> Any:
    """Returns the function without the options that it does not know."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{k: v for k, v in options.items() if k in known})

    return call


@torch.no_grad()
def fill(models: list[Any], *_: Any, **__: Any) -> None:
    """Gives random values to all weights, in place of a load."""
    from megatron.core import parallel_state as ps

    (model,) = models
    stage = ps.get_pipeline_model_parallel_rank()
    for name, weight in model.named_parameters():
        rank = ps.get_tensor_model_parallel_rank() if weight.dim() > 1 else 0
        made = torch.Generator().manual_seed(zlib.crc32(f"{name} {stage} {rank}".encode()))
        values = torch.randn(weight.shape, generator=made)
        weight.copy_(values * 0.1 + (weight.dim() == 1))


def save_zarr(
    form: str,
    models: list[Any],
    args: Namespace,
    directory: str,
    format: str,
    step: int,
    **parts: Any,
) -> None:
    """Saves step SAVED_AT as the training program of the old release did."""
    from megatron.core import dist_checkpointing

    if step != SAVED_AT:
        return
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": step}
    state |= load.sharded_state(models, {})
    kind = {} if form == FLOAT16 else {"sharding_type": form}
    state["optimizer"] = parts["optimizer"].sharded_state_dict(state, **kind)
    state["opt_param_scheduler"] = parts["scheduler"].state_dict()
    unit = Path(directory) / f"iter_{step:07}"
    if dist.get_rank() == 0:
        unit.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(unit), ("zarr", 1))
    if dist.get_rank() == 0:
        unit.with_name("latest_checkpointed_iteration.txt").write_text(str(step))


def main() -> None:
    form, out, *sizes = sys.argv[1:]
    as_today()
    build.join()
    load.load = fill
    save.save = functools.partial(save_zarr, form)
    args = build.at_sizes(ARGS, **{k: int(v) for k, v in (one.split("=") for one in sizes)})
    build.initialize(args, gloo_groups=True)
    kind = {"dtype": "bfloat16", "distributed_optimizer": False} if form == FLOAT16 else {}
    job = JOB | kind
    options = train.TrainOptions(**job, save=out, save_interval=SAVED_AT)
    steps = train.train(args, out, options)
    if dist.get_rank() == 0:
        kept = [{k: step[k] for k in ("step", "loss", "grad_norm", "lr")} for step in steps]
        (Path(out) / "run.json").write_text(json.dumps({"job": job, "steps": kept}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
