"""Builds the model of a checkpoint's args as pretrain_gpt of Megatron-LM does:

    args -> TransformerConfig -> GPTModel chunks, or HybridModel's if args have a layer pattern

The rules are those of core_transformer_config_from_args (megatron/training/arguments.py),
gpt_builders.py and get_model (megatron/training/training.py) of Megatron-LM core_r0.16.0.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import importlib.util
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mckpt.errors import MissingExtra, UsageError
from mckpt.trainer import cpu, gpt, hybrid

# Args that change the logits and that every run of pretrain_gpt has in its Namespace. An absent one
# is an error, because a default would be a guess.
REQUIRED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "max_position_embeddings",
    "normalization",
    "position_embedding_type",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "num_experts",
    "transformer_impl",
)
REQUIRED_ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling")
REQUIRED_MOE = (
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_load_balancing_type",
    "moe_grouped_gemm",
    "moe_layer_freq",
)

# Fields that make a run faster or smaller and do not change its result. Their kernels are absent on
# a CPU, and logits are compared across machines, so all of them are off everywhere, whatever the
# args of the checkpoint. Two of them, bias_activation_fusion and use_te_activation_func, replace
# gelu by its tanh form; `fuses_gelu` does that instead.
PLAIN = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "memory_efficient_layer_norm": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_enable_deepep": False,
    "moe_token_dispatcher_type": "alltoall",
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "dsa_indexer_rotate_activation": False,
    "dsa_kernel_backend": "none",
    "fused_residual_rmsnorm": False,
    "moe_paged_stash": False,
    "cuda_graph_modules": [],
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_scope": [],
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "distribute_saved_activations": False,
    "fine_grained_activation_offloading": False,
    "fp8": None,
    "fp8_param": False,
    "fp4": None,
    "fp4_param": False,
    "init_model_with_meta_device": False,
    "config_logger_dir": "",
    "cp_comm_type": None,
    "hierarchical_context_parallel_sizes": None,
    # These depend on the tp and etp of the run that saved; None computes them for the sizes here.
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
}

# Args that place the layers on stages. They fit the pipeline sizes they were written for alone.
PIPELINE_SPLIT = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}


def namespace(args: Namespace | Mapping[str, Any]) -> Namespace:
    """Copies args to a Namespace. Text such as "torch.bfloat16" or "bfloat16" becomes the dtype."""
    out = Namespace(**copy.copy(dict(args) if isinstance(args, Mapping) else vars(args)))
    if isinstance(getattr(out, "params_dtype", None), str):
        out.params_dtype = getattr(torch, out.params_dtype.removeprefix("torch."))
    hybrid.upgrade(out)
    return out


def at_sizes(
    args: Namespace | Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
    **others: Any,
) -> Namespace:
    """Copies args with other parallel sizes; `others` replaces any other arg.

    A pipeline split in `args` is kept only at the pp and vpp it was written for; one in `others` is
    for the sizes given here. A hybrid layer pattern in `args` is cut again for other sizes. `etp`
    None is tp, as in Megatron. transformer_impl "auto" becomes the result of `choose_impl`.
    """
    out = namespace(args)
    old_pp = getattr(out, "pipeline_model_parallel_size", 1)
    old_vpp = getattr(out, "virtual_pipeline_model_parallel_size", None) or 1
    if (old_pp, old_vpp) != (pp, vpp or 1):
        vars(out).update(PIPELINE_SPLIT)
        if pattern := hybrid.pattern(out):
            out.hybrid_layer_pattern = hybrid.cut(pattern, pp * (vpp or 1))
    vars(out).update(others)
    vars(out).update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp and vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
        context_parallel_size=cp,
    )
    if getattr(out, "transformer_impl", None) == "auto":
        out.transformer_impl = choose_impl(out)
    return namespace(out)


def choose_impl(args: Namespace) -> str:
    """Returns the layer spec of all layers: `transformer_engine` where it is installed beside a GPU
    that can run it, else `local`.

    Both compute the same function from the same checkpoint, so args.transformer_impl of the run
    that wrote the checkpoint is not used.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return "local"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    # HAVE_TE is False if it was installed for another CUDA or torch
    return "transformer_engine" if HAVE_TE else "local"


def check(args: Namespace) -> None:
    """Raises UsageError with every arg that is absent, contradicts another, or belongs to a model
    that this trainer does not build.
    """
    needed = list(REQUIRED)
    if getattr(args, "position_embedding_type", None) in ("rope", "yarn"):
        needed += REQUIRED_ROPE
    if getattr(args, "use_rope_scaling", False):
        needed.append("rope_scaling_factor")
    if getattr(args, "group_query_attention", False):
        needed.append("num_query_groups")
    if getattr(args, "num_experts", None):
        needed += REQUIRED_MOE
    if hybrid.pattern(args):  # says which layers have experts
        needed = [name for name in needed if name != "moe_layer_freq"]
    nullable = ("num_experts",)
    problems = [f"{name} is absent" for name in needed if not hasattr(args, name)]
    problems += [
        f"{name} is None"
        for name in needed
        if name not in nullable and hasattr(args, name) and getattr(args, name) is None
    ]
    spec = getattr(args, "spec", None)
    if spec and spec[0] != "local" and not str(spec[0]).startswith("megatron.core.models."):
        problems.append(f"spec is {spec!r}: not built here")
    if getattr(args, "is_hybrid_model", False) and not hybrid.pattern(args):
        problems.append("is_hybrid_model is True, but the args have no hybrid_layer_pattern")
    if epsilon(args) is None:
        problems.append("layernorm_epsilon (norm_epsilon before Megatron-Core 0.16) is absent")
    tp = args.tensor_model_parallel_size
    if getattr(args, "padded_vocab_size", None) and args.padded_vocab_size % tp:
        problems.append(
            f"padded_vocab_size {args.padded_vocab_size} is not a multiple of"
            f" tensor_model_parallel_size {tp}"
        )
    problems += hybrid.problems(args) if hybrid.pattern(args) else gpt.problems(args)
    if problems:
        raise UsageError.of(
            "these args do not describe a model that can be built:",
            problems,
            "Give them with the args of the run.",
        )


def epsilon(args: Namespace) -> float | None:
    """Returns the norms' epsilon: --norm-epsilon is stored as `norm_epsilon` up to megatron-core
    0.15, and as `layernorm_epsilon` since. Raises UsageError if both are there and differ.
    """
    both = (getattr(args, name, None) for name in ("layernorm_epsilon", "norm_epsilon"))
    values = {value for value in both if value is not None}
    if len(values) > 1:
        raise UsageError(
            f"layernorm_epsilon {args.layernorm_epsilon} and norm_epsilon {args.norm_epsilon}"
            " disagree in the args"
        )
    return values.pop() if values else None


def join(timeout_s: float = 1800) -> None:
    """Makes the default process group of torchrun's ranks: NCCL with a GPU for each, else gloo."""
    cpu.install()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


def initialize(args: Namespace, timeout_s: float = 1800, gloo_groups: bool = False) -> None:
    """Makes megatron-core's process groups for these sizes, over all ranks of the default group.

    `gloo_groups` adds those on the host, through which the optimizer state of `torch` files moves.
    """
    cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        context_parallel_size=getattr(args, "context_parallel_size", None) or 1,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=gloo_groups,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(getattr(args, "seed", None) or 1234)


def transformer_config(
    args: Namespace, dtype: torch.dtype = torch.float32, training: bool = False
) -> Any:
    """Returns the TransformerConfig of these args for a model that computes in `dtype`."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    check(args)
    latent = getattr(args, "multi_latent_attention", False)
    config_class: Any = MLATransformerConfig if latent else TransformerConfig
    if gpt.layers_differ(args):
        from megatron.core.transformer.heterogeneous import heterogeneous_config

        config_class = heterogeneous_config.HeterogeneousTransformerConfig
    fields = {f.name for f in dataclasses.fields(config_class)}
    # Most args have the name of their field.
    config = {name: value for name, value in vars(args).items() if name in fields}

    # The name or the meaning of these args differs from that of the field.
    config["num_moe_experts"] = args.num_experts or None
    config["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    for end in ("first", "last"):
        layers = getattr(args, f"decoder_{end}_pipeline_num_layers", None)
        config[f"num_layers_in_{end}_pipeline_stage"] = layers
    config["layernorm_epsilon"] = epsilon(args)
    if hasattr(args, "apply_layernorm_1p"):  # the name up to megatron-core 0.15
        config["layernorm_zero_centered_gamma"] = args.apply_layernorm_1p
    if args.swiglu:
        config.update(activation_func=F.silu, gated_linear_unit=True)
    elif getattr(args, "squared_relu", False):
        config.update(activation_func=squared_relu)
    elif getattr(args, "quick_geglu", False):
        config.update(activation_func=quick_gelu, gated_linear_unit=True)
    elif fuses_gelu(args):
        config.update(activation_func=functools.partial(F.gelu, approximate="tanh"))
    if getattr(args, "rope_type", None) is None:
        config.pop("rope_type", None)
    balancing = getattr(args, "moe_router_load_balancing_type", None)
    if isinstance(balancing, list) and len(balancing) == 1:
        config["moe_router_load_balancing_type"] = balancing[0]
    if not args.num_experts:  # a dense run stores these as None
        config = {name: value for name, value in config.items() if not name.startswith("moe_")}

    if hybrid.pattern(args):
        config |= hybrid.config(args)
    elif gpt.linear_attention(args):
        config |= gpt.config(args)
    if args.transformer_impl != "transformer_engine":
        # The grouped experts of the local spec need a CUDA extension. Sequential experts load the
        # same `torch_dist`.
        config["moe_grouped_gemm"] = False
    # At tp > 1, a mixture of experts requires sequence parallelism to train, and an attention with
    # an indexer always does.
    wanted = bool(getattr(args, "sequence_parallel", False) or args.num_experts)
    wanted = (training and wanted) or config.get("experimental_attention_variant") == "dsa"
    config["sequence_parallel"] = wanted and args.tensor_model_parallel_size > 1

    config.update({name: value for name, value in PLAIN.items() if name in fields})
    if not args.num_experts:
        config.pop("moe_token_dispatcher_type", None)
    if training:
        # The interleaved schedule sends both ways at once. With two stages both would be one batch
        # of messages to one peer, which would match them wrongly.
        interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
        config.update(overlap_p2p_comm=interleaved, batch_p2p_comm=not interleaved)
        # Both values give the mean over tokens here, where all micro batches have the same number
        # of them. But with True megatron-core 0.16 divides the gradient of the auxiliary loss of a
        # mixture of experts by tp once more under sequence parallelism.
        config["calculate_per_token_loss"] = False
    config.update(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        autocast_dtype=dtype,
        # rotary tables then have the same digits on every device
        use_cpu_initialization=not training or not torch.cuda.is_available(),
        # also marks the parameters that are cut over tp, which the gradient's norm needs
        perform_initialization=training,
        deallocate_pipeline_outputs=torch.cuda.is_available(),  # gloo may still send an output
    )
    if config.get("window_size"):
        config["window_size"] = tuple(config["window_size"])
    built = config_class(**config)
    if args.position_embedding_type == "yarn" and not latent:
        vars(built).update(yarn(args))
    return built


def yarn(args: Namespace) -> dict[str, Any]:
    """Returns what GPTModel and HybridModel read of a config that has no field for it
    (megatron/training/argument_utils.py, _apply_yarn_config_from_args).
    """
    fields = (
        ("rotary_scaling_factor", "rotary_scaling_factor", 1.0),
        ("original_max_position_embeddings", "yarn_original_max_position_embeddings", 4096),
        ("beta_fast", "yarn_beta_fast", 32.0),
        ("beta_slow", "yarn_beta_slow", 1.0),
        ("mscale", "mscale", 1.0),
        ("mscale_all_dim", "mscale_all_dim", 0.0),
        ("correction_range_round_to_int", "yarn_correction_range_round_to_int", True),
    )
    found = ((field, getattr(args, name, None), default) for field, name, default in fields)
    return {f"yarn_{field}": default if value is None else value for field, value, default in found}


def fuses_gelu(args: Namespace) -> bool:
    """Returns whether Megatron-LM computes gelu in its tanh form, for a model that is neither gated
    nor of squared ReLUs.

    Its fused kernel of bias and gelu does. It is used by default (--no-bias-gelu-fusion turns it
    off) where the linears have biases and are no experts: validate_args in arguments.py,
    MLP.forward in mlp.py, fused_bias_gelu.py. Transformer Engine's activation does too.
    """
    by_te = bool(getattr(args, "use_te_activation_func", False))
    wanted = getattr(args, "bias_gelu_fusion", True) is not False
    return by_te or (wanted and bool(args.add_bias_linear) and not args.num_experts)


def uses_te(args: Namespace) -> bool:
    """Returns whether the layers are Transformer Engine's. Raises MissingExtra if they must be and
    it is not installed.
    """
    te = bool(args.transformer_impl == "transformer_engine")
    if te and importlib.util.find_spec("transformer_engine") is None:
        raise MissingExtra(
            "args.transformer_impl is transformer_engine, which is not installed here;"
            " --transformer-impl local needs none"
        )
    if not te and (gpt.sparse_attention(args) or "D" in (hybrid.pattern(args) or "")):
        raise MissingExtra(
            "megatron-core builds an attention with an indexer (--experimental-attention-variant"
            " dsa) of modules of Transformer Engine only, which is not in use"
        )
    cp = getattr(args, "context_parallel_size", None) or 1
    if cp > 1 and not te:
        raise MissingExtra(
            f"context_parallel_size {cp} needs Transformer Engine's"
            " attention, which is not in use: the local spec attends within one rank only"
        )
    return te


def build(args: Namespace, dtype: torch.dtype = torch.float32, training: bool = False) -> list[Any]:
    """Builds this rank's chunks, one for each virtual stage, in eval mode. Their parameters are not
    set yet. Requires `initialize`.

    Parameters are in `dtype` whatever the checkpoint's: fp32 to compare logits, args.params_dtype
    to train. With `training` sequence parallelism is on where args or megatron-core require it.
    """
    from megatron.core import parallel_state

    config, te = transformer_config(args, dtype, training), uses_te(args)
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    rope = args.position_embedding_type in ("rope", "yarn")
    chunks = []
    for stage in range(num_chunks):
        vp_stage = stage if num_chunks > 1 else None
        options = {
            "config": config,
            "vp_stage": vp_stage,
            "vocab_size": args.padded_vocab_size,
            "max_sequence_length": args.max_position_embeddings,
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=True)
            and stage == 0,
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and stage == num_chunks - 1,
            "parallel_output": True,
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "position_embedding_type": args.position_embedding_type,
            "rotary_percent": args.rotary_percent if rope else 1.0,
            "rotary_base": args.rotary_base if rope else 10000,
            "seq_len_interpolation_factor": getattr(
                args, "rotary_seq_len_interpolation_factor", None
            ),
        }
        model = hybrid if hybrid.pattern(args) else gpt
        chunk = model.build(args, te, **options)
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(cast(chunk, dtype).eval())
    return chunks


def cast(chunk: Any, dtype: torch.dtype) -> Any:
    """Casts the chunk's parameters to `dtype`. A router's expert_bias stays in fp32, as
    Float16Module and the router keep it.
    """
    chunk.to(dtype)
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return chunk


def rank_names() -> str:
    """Returns the name of this process for errors: "rank 3 (tp 1, pp 1, ep 0)"."""
    from megatron.core import parallel_state as ps

    tp = ps.get_tensor_model_parallel_rank()
    pp = ps.get_pipeline_model_parallel_rank()
    ep = ps.get_expert_model_parallel_rank()
    return f"rank {dist.get_rank()} (tp {tp}, pp {pp}, ep {ep})"
