"""Models whose Python lies beside the published weights, and which a class of transformers computes
under other names.

Tiny models of these architectures are made by that class (`tiny.STANDS_FOR`) and get the names of
the published files. `for_transformers` is the way back, so that the class reads a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# key of the published config -> the key of the class that stands for it
_KEYS = {
    "BailingMoeForCausalLM": {"use_qkv_bias": "qkv_bias"},
    "BailingMoeV2ForCausalLM": {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
}
# the end of a name in the class -> the end of the published name
_LING = {
    "embed_tokens.weight": "word_embeddings.weight",
    "self_attn.o_proj.weight": "attention.dense.weight",
    "self_attn.q_norm.weight": "attention.query_layernorm.weight",
    "self_attn.k_norm.weight": "attention.key_layernorm.weight",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
_QKV = re.compile(r"self_attn\.[qkv]_proj\.")
_SHARED = re.compile(r"mlp\.shared_expert\.")
_GATE = "mlp.shared_expert_gate.weight"
Tensors = Mapping[str, Any]


def config(c: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the class that stands for the architecture of `c`; `c` without one."""
    named = c["architectures"][0]
    if named not in _KEYS:
        return c
    found = {_KEYS[named].get(key, key): value for key, value in c.items() if key != "model_type"}
    if named == "BailingMoeForCausalLM":
        found["mlp_only_layers"] = list(range(c["first_k_dense_replace"]))
        found["shared_expert_intermediate_size"] = (
            c["num_shared_experts"] * c["moe_intermediate_size"]
        )
    return found


def as_published(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the tensors of the class that stands for an architecture, with published names."""
    if c["architectures"][0] not in _KEYS:
        return dict(tensors)
    import torch

    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith(_GATE):
            continue  # the published model has none
        if found := _QKV.search(name):
            start, end = name[: found.start()], name[found.end() :]
            parts = [tensors[f"{start}self_attn.{x}_proj.{end}"] for x in "qkv"]
            out[f"{start}attention.query_key_value.{end}"] = torch.cat(parts)
        else:
            out[_renamed(_SHARED.sub("mlp.shared_experts.", name), _LING)] = tensor
    return out


def for_transformers(directory: Path, out: Path) -> Path:
    """Writes a checkpoint with published names to `out`, as the class that stands for it reads it.
    Returns `out`, or `directory` if it needs no other names.
    """
    from safetensors.torch import load_file, save_file

    c = json.loads((directory / "config.json").read_text())
    named = c["architectures"][0]
    if named not in _KEYS:
        return directory
    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    out.mkdir(parents=True)
    save_file(_of_class(c, tensors), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(c)))
    return out


def _of_class(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    import torch

    head = c["head_dim"]
    sizes = [n * head for n in (c["num_attention_heads"], *[c["num_key_value_heads"]] * 2)]
    gated = c["architectures"][0] == "BailingMoeForCausalLM"
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        start, middle, end = name.partition("attention.query_key_value.")
        if middle:
            for x, part in zip("qkv", tensor.split(sizes), strict=True):
                out[f"{start}self_attn.{x}_proj.{end}"] = part.contiguous()
            continue
        name = _renamed(name, {published: own for own, published in _LING.items()})
        start, middle, end = name.partition("mlp.shared_experts.")
        if middle and gated:
            name = f"{start}mlp.shared_expert.{end}"
            if end == "down_proj.weight":
                # a gate of zeros multiplies by one half
                out[f"{start}{_GATE}"] = torch.zeros(1, tensor.shape[0])
                tensor = 2 * tensor
        out[name] = tensor
    return out


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for end, other in names.items():
        if name.endswith(f".{end}"):
            return name.removesuffix(end) + other
    return name
