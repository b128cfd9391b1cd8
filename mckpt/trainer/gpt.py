"""GPTModel of megatron-core with the layers that gpt_builders.py of Megatron-LM chooses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from argparse import Namespace
from typing import Any

import torch


def linear_attention(args: Namespace) -> bool:
    """Returns whether some layers are gated delta nets."""
    return getattr(args, "experimental_attention_variant", None) == "gated_delta_net"


def sparse_attention(args: Namespace) -> bool:
    """Returns whether the attention has an indexer.

    megatron-core builds it of modules of Transformer Engine only.
    """
    return getattr(args, "experimental_attention_variant", None) == "dsa"


def layers_differ(args: Namespace) -> bool:
    return bool(getattr(args, "heterogeneous_layers_config_encoded_json", None))


def problems(args: Namespace) -> list[str]:
    from megatron.core import __version__

    variant = getattr(args, "experimental_attention_variant", None)
    found = []
    if variant and not linear_attention(args) and not sparse_attention(args):
        found.append(f"experimental_attention_variant is {variant!r}: not built here")
    if linear_attention(args):
        if [int(part) for part in __version__.split(".")[:2]] < [0, 18]:
            found.append(
                f"experimental_attention_variant is {variant!r}: built here from megatron-core 0.18"
                f" on, and this is {__version__}"
            )
        if getattr(args, "mtp_num_layers", None):
            found.append(
                f"mtp_num_layers is {args.mtp_num_layers}: megatron-core builds no multi-token"
                f" prediction together with {variant}"
            )
    return found


def config(args: Namespace) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that differ for a model with gated delta nets."""
    # torch's gated delta rule instead of FLA's kernels
    with_fla = args.transformer_impl == "transformer_engine" and torch.cuda.is_available()
    return {} if with_fla else {"deterministic_mode": True}


def build(args: Namespace, uses_te: bool, **options: Any) -> Any:
    """Builds one chunk; `options` are those that GPTModel has in common with HybridModel."""
    config, vp_stage = options["config"], options["vp_stage"]
    own_modules: Any = contextlib.nullcontext()
    if linear_attention(args) and config.deterministic_mode:
        from mckpt.trainer import local_stack

        own_modules = local_stack.own_modules()
    with own_modules:
        return _model(args, uses_te, config, vp_stage, options)


def _model(
    args: Namespace, uses_te: bool, config: Any, vp_stage: int | None, options: dict[str, Any]
) -> Any:
    from megatron.core.models.gpt import GPTModel

    scaled = args.position_embedding_type == "rope" and args.use_rope_scaling
    return GPTModel(
        transformer_layer_spec=layer_spec(args, uses_te, config, vp_stage),
        mtp_block_spec=mtp_spec(args, uses_te, config, vp_stage),
        rope_scaling=scaled,
        # Megatron-LM parses --rope-scaling-factor and does not pass it on, so its own models
        # always scale by 8 (at least to main of 2026-08).
        rope_scaling_factor=args.rope_scaling_factor if scaled else 8.0,
        **options,
    )


def layer_spec(args: Namespace, uses_te: bool, config: Any, vp_stage: int | None) -> Any:
    """Returns the modules of this virtual stage's layers, as gpt_builder chooses them."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if layers_differ(args):
        from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs as different

        spec = different.get_gpt_heterogeneous_layer_spec(config, uses_te, vp_stage=vp_stage)
        return spec if uses_te else _with_own_modules(spec)
    if linear_attention(args):
        return _linear_spec(args, uses_te, config, vp_stage)
    if sparse_attention(args):
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage
        )
    if uses_te and not args.num_experts:
        return specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention
        )
    spec = specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=uses_te,
        normalization=args.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return spec if uses_te else _with_own_modules(spec)


def _linear_spec(args: Namespace, uses_te: bool, config: Any, vp_stage: int | None) -> Any:
    """Returns the modules of layers of which some are gated delta nets. megatron-core has them for
    Transformer Engine only; the local ones have the same names.
    """
    from megatron.core.models.gpt import (
        experimental_attention_variant_module_specs as variants,
    )
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if uses_te:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config=config, vp_stage=vp_stage
        )
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from mckpt.trainer import local_stack

    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = _with_own_modules(
        specs.get_gpt_decoder_block_spec(
            plain, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        )
    )
    attention = local_stack.gated_delta_net(config).submodules.self_attention
    if config.pipeline_model_parallel_layout is None:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = list(range(first, first + len(block.layer_specs)))
    else:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(vp_stage=vp_stage)
    linear = variants.get_linear_attention_pattern(config)
    block.layer_specs = [
        dataclasses.replace(
            layer,
            submodules=dataclasses.replace(
                layer.submodules, input_layernorm=IdentityOp, self_attention=attention
            ),
        )
        if linear[number]
        else layer
        for number, layer in zip(numbers, block.layer_specs, strict=True)
    ]
    return block


def mtp_spec(args: Namespace, uses_te: bool, config: Any, vp_stage: int | None) -> Any:
    """Returns the modules of the layers of multi-token prediction if this virtual stage has them.
    Each is built like the decoder's last layer.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if not config.mtp_num_layers:
        return None
    if sparse_attention(args):
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        last = variants.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    else:
        last = specs.get_gpt_decoder_layer_specs(
            config, use_transformer_engine=uses_te, normalization=args.normalization
        )[-1]
    spec = specs.get_gpt_mtp_block_spec(
        config, last, use_transformer_engine=uses_te, vp_stage=vp_stage
    )
    return spec if uses_te else _with_own_modules(spec)


def _with_own_modules(spec: Any) -> Any:
    # imported late, because it imports megatron-core, which `initialize` has to patch first
    from mckpt.trainer.local_spec import with_own_modules

    return with_own_modules(spec)
