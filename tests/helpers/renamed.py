"""Models whose Python lies beside the published weights, and which a class of transformers computes
under other names.

Tiny models of these architectures are made by that class (`tiny.STANDS_FOR`) and get the names of
the published files. `for_transformers` is the way back, so that the class reads a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Tensors = Mapping[str, Any]


def _unchanged(c: Config, found: Any) -> Any:
    return found


@dataclass(frozen=True)
class Names:
    """How the published files of an architecture differ from those of the class that stands for it.

    keys: a key of the published config -> the key of the class.
    parts: dotted parts of a name in the class -> those of the published name. A part that contains
        another one stands before it.
    fused: the published module in the place of self_attn.{q,k,v}_proj, with their rows in turn.
    config, saved, read: functions of the published config and of, in this order, the config of the
        class, the tensors that it saves, and those that it reads. They return these as changed.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    fused: str = ""
    config: Callable[[Config, Config], Config] = _unchanged
    saved: Callable[[Config, Config], Config] = _unchanged
    read: Callable[[Config, Config], Config] = _unchanged


def _dense_first(c: Config, found: Config) -> Config:
    shared = c.get("num_shared_experts") or c["n_shared_experts"]
    width = shared * c["moe_intermediate_size"]
    first = list(range(c["first_k_dense_replace"]))
    return found | {"mlp_only_layers": first, "shared_expert_intermediate_size": width}


def _without_gate(c: Config, tensors: Config) -> Config:
    return {k: v for k, v in tensors.items() if "shared_expert_gate" not in k}


def _with_gate(c: Config, tensors: Config) -> Config:
    """A gate of zeros multiplies by one half."""
    import torch

    out = dict(tensors)
    for name, tensor in tensors.items():
        start, down, _ = name.partition("shared_expert.down_proj.weight")
        if down:
            out[name] = 2 * tensor
            out[f"{start}shared_expert_gate.weight"] = torch.zeros(1, tensor.shape[0])
    return out


def _by_group(c: Config, tensors: Config) -> Config:
    """Puts q, k and v of each group of heads into one tensor: [q0 q1 k v | q2 q3 k v]."""
    import torch

    groups = c["num_key_value_heads"]
    out = dict(tensors)
    for name in tensors:
        start, found, end = name.partition("self_attn.q_proj.")
        if found:
            parts = [out.pop(f"{start}self_attn.{x}_proj.{end}") for x in "qkv"]
            rows = [part.view(groups, -1, *part.shape[1:]) for part in parts]
            out[f"{start}self_attn.wqkv.{end}"] = torch.cat(rows, 1).flatten(0, 1)
    return out


def _of_groups(c: Config, tensors: Config) -> Config:
    groups = c["num_key_value_heads"]
    heads, out = c["num_attention_heads"] // groups, {}
    for name, tensor in tensors.items():
        start, found, end = name.partition("self_attn.wqkv.")
        if not found:
            out[name] = tensor
            continue
        rows = tensor.view(groups, heads + 2, -1, *tensor.shape[1:])
        for x, part in zip("qkv", rows.split([heads, 1, 1], 1), strict=True):
            out[f"{start}self_attn.{x}_proj.{end}"] = part.flatten(0, 2).contiguous()
    return out


def _whole_heads(c: Config, found: Config) -> Config:
    return {"partial_rotary_factor": 1.0} | found


def _qwen(c: Config, found: Config) -> Config:
    """intermediate_size is the width of gate and up together."""
    half = {"intermediate_size": c["intermediate_size"] // 2}
    return found | half | {"num_key_value_heads": c["num_attention_heads"]}


def _yarn(c: Config, found: Config) -> Config:
    """The class takes the width of a head from its parts, and knows one name of yarn."""
    found.pop("head_dim", None)
    if found.get("rope_scaling"):
        found["rope_scaling"] = found["rope_scaling"] | {"type": "yarn"}
    return found


def _text_config(c: Config, found: Config) -> Config:
    text: Config = dict(c.get("llm_config") or c["text_config"])
    text.pop("model_type", None)
    return text


def _text_of(start: str, *beside: str) -> Names:
    """Returns the names of a text model, whose keys begin with `start`, beside those of a tower."""

    def saved(c: Config, tensors: Config) -> Config:
        import torch

        tower = {name: torch.ones(3) for name in beside}
        return tower | {start + name: tensor for name, tensor in tensors.items()}

    def read(c: Config, tensors: Config) -> Config:
        text = {k: v for k, v in tensors.items() if k.startswith(start) and k not in beside}
        return {k.removeprefix(start): v for k, v in text.items()}

    return Names(config=_text_config, saved=saved, read=read)


def _without_thinker(c: Config, found: Config) -> Config:
    thinker = found.pop("thinker_config")
    return {
        "audio_config": thinker["audio_config"] | {"model_type": "qwen3_asr_encoder"},
        "text_config": thinker["text_config"] | {"model_type": "qwen3"},
        "tie_word_embeddings": thinker["text_config"]["tie_word_embeddings"],
        "audio_token_id": thinker["audio_token_id"],
    }


def _widths(c: Config) -> list[int]:
    """Returns the width of the mlp of each layer of a Llama-Nemotron, 0 where it has none."""
    width = [2 * (b["ffn"]["ffn_mult"] or 0) * c["hidden_size"] / 3 for b in c["block_configs"]]
    return [-(-int(w) // 256) * 256 for w in width]


def _widest(c: Config, found: Config) -> Config:
    (heads,) = {b["attention"]["n_heads_in_group"] for b in c["block_configs"]} - {None}
    groups = c["num_attention_heads"] // heads
    return found | {"num_key_value_heads": groups, "intermediate_size": max(_widths(c))}


def _cut(c: Config, tensors: Config) -> Config:
    """Returns the tensors that the layers have, with the rows and columns of their own widths."""
    out = {}
    for name, tensor in tensors.items():
        if found := re.match(r"model\.layers\.(\d+)\.(self_attn|mlp|(\w+)_layernorm)\.", name):
            block, width = c["block_configs"][int(found[1])], _widths(c)[int(found[1])]
            part = "attention" if "self_attn" in found[2] or found[3] == "input" else "ffn"
            if block[part]["no_op"]:
                continue
            if found[2] == "mlp":
                tensor = (tensor[:, :width] if "down" in name else tensor[:width]).contiguous()
        out[name] = tensor
    return out


def _filled(c: Config, tensors: Config) -> Config:
    """Llama computes the same with zeros in the place of what a layer lacks: they add nothing to
    the residual.
    """
    import torch

    widths, out = _widths(c), dict(tensors)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    groups = _widest(c, {})["num_key_value_heads"]
    kv, widest = hidden // heads * groups, max(widths)
    for layer, width in enumerate(widths):
        start = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (0, hidden),
            "mlp.up_proj": (0, hidden),
            "mlp.down_proj": (hidden, 0),
        }
        for name, shape in shapes.items():
            out.setdefault(f"{start}{name}.weight", torch.zeros(shape))
        for name in ("gate", "up", "down"):
            end = (0, widest - width) if name == "down" else (0, 0, 0, widest - width)
            key = f"{start}mlp.{name}_proj.weight"
            out[key] = torch.nn.functional.pad(out[key], end)
    return out


def _normed_head(c: Config, tensors: Config) -> Config:
    import torch

    return tensors | {"lm_head.weight": torch.nn.functional.normalize(tensors["lm_head.weight"])}


def _with_multi_token(c: Config, tensors: Config) -> Config:
    """Adds the layers of multi-token prediction of MiMo-V2-Flash, which transformers does not save:
    each has the attention of a layer with a window and the mlp of a dense layer.
    """
    import torch

    attention = f"model.layers.{c['hybrid_layer_pattern'].index(1)}."
    dense = f"model.layers.{c['moe_layer_freq'].index(0)}."
    hidden, out = c["hidden_size"], dict(tensors)
    shapes = {"eh_proj.weight": (hidden, 2 * hidden)}
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
    for start, part in ((attention, "self_attn."), (dense, "mlp.")):
        names = [k.removeprefix(start) for k in tensors if k.startswith(start + part)]
        shapes |= {name: tuple(tensors[start + name].shape) for name in names}
    drawn = torch.Generator().manual_seed(6)
    for layer in range(c.get("num_nextn_predict_layers", 0)):
        for name, shape in sorted(shapes.items()):
            out[f"model.mtp.layers.{layer}.{name}"] = torch.randn(shape, generator=drawn)
    return out


_LING = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
_LING_2 = Names(
    {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    _LING,
    "attention.query_key_value",
)
_GPT = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "mlp.down_proj": "mlp.c_proj",
}
_ARCHITECTURES = {
    "BailingMoeForCausalLM": Names(
        {"use_qkv_bias": "qkv_bias"},
        _LING | {"mlp.shared_expert": "mlp.shared_experts"},
        "attention.query_key_value",
        _dense_first,
        _without_gate,
        _with_gate,
    ),
    "BailingMoeV2ForCausalLM": _LING_2,
    "SarvamMoEForCausalLM": replace(_LING_2, config=_whole_heads),
    "SarvamMLAForCausalLM": Names(
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}, config=_yarn
    ),
    "ExaoneForCausalLM": Names(
        {
            "num_layers": "num_hidden_layers",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        _GPT
        | {
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
        },
    ),
    "QWenLMHeadModel": Names(
        {
            "layer_norm_epsilon": "rms_norm_eps",
            "rotary_emb_base": "rope_theta",
            "kv_channels": "head_dim",
        },
        _GPT
        | {
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
        },
        "attn.c_attn",
        _qwen,
    ),
    "DeepseekForCausalLM": Names(
        {"n_routed_experts": "num_experts", "attention_bias": "qkv_bias"},
        {"mlp.shared_expert": "mlp.shared_experts"},
        config=_dense_first,
        saved=_without_gate,
        read=_with_gate,
    ),
    "InternLM2ForCausalLM": Names(
        {"bias": "attention_bias"},
        {
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "attention.wo",
            "self_attn": "attention",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        saved=_by_group,
        read=_of_groups,
    ),
    "MiMoV2FlashForCausalLM": Names(saved=_with_multi_token),
    "InternLM3ForCausalLM": Names({"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    "InternVLChatModel": _text_of(
        "language_model.", "vision_model.embeddings.class", "mlp1.0.weight"
    ),
    "KimiVLForConditionalGeneration": _text_of(
        "language_model.", "vision_tower.patch_embed.pos_emb", "multi_modal_projector.norm"
    ),
    "Ovis2_5": _text_of("llm.", "visual_tokenizer.head.1.weight", "vte.weight"),
    "LLaVAOneVision1_5_ForConditionalGeneration": _text_of("", "visual.class_embedding"),
    "DeciLMForCausalLM": Names(config=_widest, saved=_cut, read=_filled),
    "BaiChuanForCausalLM": Names(fused="self_attn.W_pack"),
    "BaichuanForCausalLM": Names(fused="self_attn.W_pack", saved=_normed_head, read=_normed_head),
}
# of the package qwen_asr, where the class of transformers has the same name
_THINKER = Names(
    parts={
        "model.multi_modal_projector.linear_1": "thinker.audio_tower.proj1",
        "model.multi_modal_projector.linear_2": "thinker.audio_tower.proj2",
        "model.audio_tower": "thinker.audio_tower",
        "model.language_model": "thinker.model",
        "lm_head": "thinker.lm_head",
    },
    config=_without_thinker,
)
_QKV = re.compile(r"self_attn\.[qkv]_proj\.")


def _names(c: Config) -> Names | None:
    """Returns how the published files of a config differ from its class; None if they do not."""
    name = c["architectures"][0]
    if name == "Qwen3ASRForConditionalGeneration" and "thinker_config" in c:
        return _THINKER
    return _ARCHITECTURES.get(name)


def config(c: Config) -> Config:
    """Returns the config of the class that stands for the architecture of `c`; `c` without one."""
    names = _names(c)
    if not names:
        return c
    found = {names.keys.get(key, key): value for key, value in c.items() if key != "model_type"}
    return names.config(c, found)


def as_published(c: Config, tensors: Tensors) -> Config:
    """Returns the tensors of the class that stands for an architecture, with published names."""
    names = _names(c)
    if not names:
        return dict(tensors)
    import torch

    out: Config = {}
    for name, tensor in names.saved(c, dict(tensors)).items():
        found = _QKV.search(name)
        if found and names.fused:
            start, end = name[: found.start()], name[found.end() :]
            name = f"{start}{names.fused}.{end}"
            tensor = torch.cat([tensors[f"{start}self_attn.{x}_proj.{end}"] for x in "qkv"])
        out[_with(names.parts, name)] = tensor
    return out


def for_transformers(directory: Path, out: Path) -> Path:
    """Writes a checkpoint with published names to `out`, as the class that stands for it reads it.
    Returns `out`, or `directory` if it needs no other names.
    """
    from safetensors.torch import load_file, save_file

    c = json.loads((directory / "config.json").read_text())
    if _names(c) is None:
        return directory
    tensors: Config = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    out.mkdir(parents=True)
    save_file(_of_class(c, tensors), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(c)))
    return out


def _of_class(c: Config, tensors: Tensors) -> Config:
    names, of_class = _names(c), config(c)
    assert names
    of_class = of_class.get("text_config") or of_class
    heads = of_class["num_attention_heads"]
    head = of_class.get("head_dim") or of_class["hidden_size"] // heads
    sizes = [n * head for n in (heads, *[of_class.get("num_key_value_heads", heads)] * 2)]
    back = {published: own for own, published in names.parts.items()}
    out: Config = {}
    for name, tensor in tensors.items():
        start, fused, end = name.partition(f"{names.fused}." if names.fused else "\0")
        if not fused:
            out[_with(back, name)] = tensor
            continue
        for x, part in zip("qkv", tensor.split(sizes), strict=True):
            out[_with(back, f"{start}self_attn.{x}_proj.{end}")] = part.contiguous()
    return names.read(c, out)


def _with(parts: Mapping[str, str], name: str) -> str:
    for part, other in parts.items():
        name = re.sub(rf"(^|\.){re.escape(part)}(?=\.|$)", rf"\g<1>{other}", name)
    return name
