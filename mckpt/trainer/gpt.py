"""GPTModel of megatron-core with the layers that gpt_builders.py of Megatron-LM chooses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def build(args: Namespace, uses_te: bool, **options: Any) -> Any:
    """Builds one chunk; `options` are those that GPTModel has in common with HybridModel."""
    from megatron.core.models.gpt import GPTModel

    config, vp_stage = options["config"], options["vp_stage"]
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


def variant(args: Namespace) -> str | None:
    """Returns the kind of attention that is neither the usual nor the latent one, such as dsa.

    megatron-core builds it of modules of Transformer Engine only.
    """
    return getattr(args, "experimental_attention_variant", None)


def layer_spec(args: Namespace, uses_te: bool, config: Any, vp_stage: int | None) -> Any:
    """Returns the modules of this virtual stage's layers, as gpt_builder chooses them."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if variant(args):
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


def mtp_spec(args: Namespace, uses_te: bool, config: Any, vp_stage: int | None) -> Any:
    """Returns the modules of the layers of multi-token prediction if this virtual stage has them.
    Each is built like the decoder's last layer.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if not config.mtp_num_layers:
        return None
    if variant(args):
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
