"""Writes a Hugging Face model as a checkpoint of torchtitan, OUT/step-10, of four ranks.

PYTHONPATH=. python -m tests.helpers.titan_steps HF_DIR OUT
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file

from tests.helpers import rank_files

NAMES = {
    r"model\.embed_tokens": "tok_embeddings",
    r"model\.norm": "norm",
    r"^model\.": "",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.([qkv])_proj": r"attention.qkv_linear.w\1",
    r"self_attn\.o_proj": "attention.wo",
    r"self_attn\.q_a_layernorm": "attention.q_norm",
    r"self_attn\.kv_a_layernorm": "attention.kv_norm",
    r"self_attn\.kv_a_proj_with_mqa": "attention.wkv_a",
    r"self_attn\.(q_a|q_b|kv_b)_proj": r"attention.w\1",
    r"self_attn\.([qk]_norm)": r"attention.\1",
    r"mlp\.gate\.e_score_correction_bias": "moe.expert_bias_E",
    r"mlp\.gate\.weight": "moe.router.gate.weight",
    r"mlp\.shared_experts\.": "moe.shared_experts.",
    r"mlp\.(\w+_proj)": r"feed_forward.\1",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    r"shared_head\.norm": "mtp_norm",
}
STACKED = re.compile(r"model\.(layers\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def turned(value: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of each head in the order of a rotary embedding that turns neighbours."""
    halves = value.reshape(heads, 2, -1, value.shape[-1])
    return halves.swapaxes(1, 2).reshape(value.shape)


def titan(arrays: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a Hugging Face model as torchtitan has them."""
    out: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    layers, paired = config["num_hidden_layers"], config["model_type"] == "llama"
    for key, value in arrays.items():
        if found := STACKED.fullmatch(key):
            name = {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}[found[3]]
            start = f"{found[1]}.moe.routed_experts.inner_experts.{name}"
            experts.setdefault(start, {})[int(found[2])] = value
            continue
        if key.endswith(("shared_head.head.weight", f"layers.{layers}.embed_tokens.weight")):
            continue  # copies
        if paired and "q_proj" in key:
            value = turned(value, config["num_attention_heads"])
        if paired and "k_proj" in key:
            value = turned(value, config["num_key_value_heads"])
        for old, new in NAMES.items():
            key = re.sub(old, new, key)
        out[key] = value
    out |= {key: np.stack([own[i] for i in range(len(own))]) for key, own in experts.items()}
    return {key.replace(f"layers.{layers}.", "mtp_layers.0."): v for key, v in out.items()}


def main(hf: Path, out: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(hf.glob("*.safetensors")):
        arrays |= {key: value.float().numpy() for key, value in load_file(file).items()}
    own = titan(arrays, config)
    if config["model_type"] == "qwen3_moe":  # torchtitan balances its experts
        own["layers.0.moe.expert_bias_E"] = np.ones(config["num_experts"], "f4")
    (out / "names").mkdir(parents=True)
    save_file({key: np.ascontiguousarray(v) for key, v in own.items()}, out / "names/a.safetensors")
    rank_files.main(out / "names", out, "titan")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
