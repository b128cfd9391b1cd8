"""The models of test_judge.py: the args of each family, and their logits in transformers.

The conversion to transformers is written by hand with view and cat, without the converter. A test
file that imports this one is skipped where Megatron-Core or transformers is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

# find_spec, because importing both would cost every run 5 s
if not (find_spec("megatron.core") and find_spec("transformers")):
    pytest.skip("megatron-core or transformers is not installed", allow_module_level=True)

from tests.helpers.lazy import torch

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, PADDED_VOCAB = 4, 96, 16, 8, 56, 150, 160
EXPERTS, TOPK, MOE_FFN = 12, 3, 20
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 61)).tolist()

DENSE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "group_query_attention": True,
    "kv_channels": HIDDEN // HEADS,
    "max_position_embeddings": 128,
    "seq_length": 128,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "add_position_embedding": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": VOCAB,
    "padded_vocab_size": PADDED_VOCAB,
    "make_vocab_size_divisible_by": 32,
    "num_experts": None,
    "transformer_impl": "local",
    "params_dtype": "torch.float32",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "no_save_optim": True,
    "no_save_rng": True,
}
MOE = DENSE | {
    "num_experts": EXPERTS,
    "moe_ffn_hidden_size": MOE_FFN,
    "moe_router_topk": TOPK,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
    "moe_layer_freq": 1,
}
QWEN3 = {
    "qk_layernorm": True,
    "kv_channels": 10,
    "layernorm_epsilon": 1e-6,
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000,
}
LLAMA3 = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "rotary_base": 500000,
    "untie_embeddings_and_output_weights": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "llama3": DENSE | LLAMA3,
    "mistral": DENSE | {"rotary_base": 1000000},
    "qwen2": (
        DENSE
        | {
            "add_qkv_bias": True,
            "layernorm_epsilon": 1e-6,
            "norm_epsilon": 1e-6,
            "rotary_base": 1000000,
        }
    ),
    "qwen3": DENSE | QWEN3,
    "mixtral": MOE | {"rotary_base": 1000000},
    "qwen3_moe": MOE | QWEN3,
}


TE = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "group_query_attention": False,
    "num_query_groups": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}


def transformers_logits(family: str, model: dict[str, Any]) -> np.ndarray:
    """Returns the logits of the transformers model that holds the weights of `model`, a whole (tp1
    pp1) state dict of Megatron's local layer spec.
    """
    import transformers

    args = FAMILIES[family]
    config = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": args["kv_channels"],
        "num_experts_per_tok": TOPK,
        "rms_norm_eps": args["layernorm_epsilon"],
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "attn_implementation": "eager",
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args["rotary_base"])},
    }
    if family == "llama3":
        scaling = {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config["rope_parameters"] |= {"rope_type": "llama3"} | scaling
    if family == "mixtral":
        config |= {"intermediate_size": MOE_FFN, "num_local_experts": EXPERTS}
    if family == "qwen3_moe":
        config |= {"moe_intermediate_size": MOE_FFN, "num_experts": EXPERTS, "norm_topk_prob": True}
    name = {
        "llama": "Llama",
        "llama3": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "mixtral": "Mixtral",
        "qwen3_moe": "Qwen3Moe",
    }[family]
    hf = (
        getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**config)
        )
        .float()
        .eval()
    )
    weights = {
        "model.embed_tokens.weight": model["embedding.word_embeddings.weight"][:VOCAB],
        "lm_head.weight": model[
            (
                "output_layer.weight"
                if "output_layer.weight" in model
                else "embedding.word_embeddings.weight"
            )
        ][:VOCAB],
        "model.norm.weight": model["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        megatron = {
            key.removeprefix(f"decoder.layers.{layer}."): value
            for key, value in model.items()
            if key.startswith(f"decoder.layers.{layer}.")
        }
        weights |= {
            f"model.layers.{layer}.{key}": value
            for key, value in transformers_layer(megatron, args["kv_channels"]).items()
        }
    result = hf.load_state_dict(weights, strict=True)
    assert not result.missing_keys
    with torch.no_grad():
        return hf(torch.tensor(TOKENS)).logits.numpy()


def transformers_layer(layer: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns one layer of Megatron under the names that transformers uses in memory."""
    heads = HEADS // GROUPS  # of one query group: [q0 q1 k v | q2 q3 k v | ...]
    out = {
        "input_layernorm.weight": layer["input_layernorm.weight"],
        "post_attention_layernorm.weight": layer["pre_mlp_layernorm.weight"],
        "self_attn.o_proj.weight": layer["self_attention.linear_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attention.linear_qkv.{kind}" in layer:
            groups = layer[f"self_attention.linear_qkv.{kind}"].unflatten(
                0, (GROUPS, (heads + 2) * head_dim)
            )
            parts = groups.split([heads * head_dim, head_dim, head_dim], dim=1)
            out |= {
                f"self_attn.{x}_proj.{kind}": part.flatten(0, 1)
                for x, part in zip("qkv", parts, strict=True)
            }
    for x in "qk":
        if f"self_attention.{x}_layernorm.weight" in layer:
            out[f"self_attn.{x}_norm.weight"] = layer[f"self_attention.{x}_layernorm.weight"]
    if "mlp.router.weight" not in layer:
        gate, up = layer["mlp.linear_fc1.weight"].chunk(2)
        return out | {
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer["mlp.linear_fc2.weight"],
        }
    expert = "mlp.experts.local_experts.{}.linear_fc{}.weight"
    return out | {
        "mlp.gate.weight": layer["mlp.router.weight"],
        "mlp.experts.gate_up_proj": torch.stack(
            [layer[expert.format(e, 1)] for e in range(EXPERTS)]
        ),
        "mlp.experts.down_proj": torch.stack([layer[expert.format(e, 2)] for e in range(EXPERTS)]),
    }
