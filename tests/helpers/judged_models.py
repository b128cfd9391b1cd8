"""Args of models that Megatron-Core saves and trains without a conversion. A test file that
imports this one is skipped where Megatron-Core or transformers is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

# find_spec, because importing both would cost every run 5 s
if not (find_spec("megatron.core") and find_spec("transformers")):
    pytest.skip("megatron-core or transformers is not installed", allow_module_level=True)

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
TE = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
