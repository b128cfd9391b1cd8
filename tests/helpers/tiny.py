"""Tiny Hugging Face checkpoints of every case in fixtures/tiny, and transformers' logits of a
checkpoint.

Every tensor is filled from a seeded normal distribution, because transformers fills biases with 0
and norms with 1, so that a converter that loses such a tensor would pass. Names and shapes are
written out below by hand, apart from mappings/ and from mckpt, to check both.
"""

from __future__ import annotations

import functools
import json
import math
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers import renamed

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = tuple(sorted(path.stem for path in (FIXTURES / "tiny").glob("*.json")))

DTYPES = {
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
LETTERS = {
    np.dtype(kind): letter
    for letter, kind in [
        *DTYPES.values(),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("I8", np.int8),
        ("U8", np.uint8),
        ("I32", np.int32),
        ("I64", np.int64),
    ]
}

# an architecture that is not in transformers -> the class that is like it or has its decoder;
# tests/helpers/renamed.py has the other names of some
STANDS_FOR = {
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",  # as published
    "BaiChuanForCausalLM": "LlamaForCausalLM",
    "BaichuanForCausalLM": "LlamaForCausalLM",
    "BailingMoeForCausalLM": "Qwen2MoeForCausalLM",
    "BailingMoeV2ForCausalLM": "Glm4MoeForCausalLM",
    "DeciLMForCausalLM": "LlamaForCausalLM",
    "DeepseekForCausalLM": "Qwen2MoeForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneForCausalLM": "LlamaForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "InternLM2ForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "InternVLChatModel": "Qwen3ForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "LLaVAOneVision1_5_ForConditionalGeneration": "Qwen3ForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "Ovis2_5": "Qwen3ForCausalLM",
    "QWenLMHeadModel": "Qwen2ForCausalLM",
    "SarvamMLAForCausalLM": "DeepseekV3ForCausalLM",
    "SarvamMoEForCausalLM": "Glm4MoeForCausalLM",
}

Config = dict[str, Any]
TinyModel = Callable[..., Path]  # of the fixture tiny_model: (case, dtype) -> directory


def unpack(sample: str, directory: Path) -> Path:
    """Unpacks fixtures/SAMPLE.tar.xz into a directory, which is returned."""
    with tarfile.open(FIXTURES / f"{sample}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def config(case: str) -> Config:
    """Returns the config.json of a case, with the keys of transformers 4 (rope_theta, rope_scaling,
    torch_dtype) as published ones have them.
    """
    found: Config = json.loads((FIXTURES / "tiny" / f"{case}.json").read_text())
    return found


def tokens(case: str, rows: int = 2, seed: int = 1) -> np.ndarray:
    """Returns random tokens [rows, length] over the whole vocabulary, as long as the model allows,
    at most 512.

    Llama 3's rope scaling needs 512, because it begins at a wavelength of 2048: over 64 tokens it
    turns no pair by more than 0.06 radians.
    """
    c = config(case)
    return np.random.RandomState(seed).randint(
        0, c["vocab_size"], (rows, min(c["max_position_embeddings"], 512))
    )


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor on disk, for a config.json of one of the seven
    families.
    """
    hidden, heads, groups, vocab = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["vocab_size"],
    )
    head_dim = c.get("head_dim") or hidden // heads
    deepseek = c["architectures"] == ["DeepseekV3ForCausalLM"]
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    decoder, mtp = c["num_hidden_layers"], c.get("num_nextn_predict_layers", 0)
    for layer in range(decoder + mtp):
        at = f"model.layers.{layer}"
        if layer >= decoder:
            table.update(
                {
                    f"{at}.{name}.weight": (hidden,)
                    for name in ("enorm", "hnorm", "shared_head.norm")
                }
            )
            table.update(
                {
                    f"{at}.embed_tokens.weight": (vocab, hidden),
                    f"{at}.shared_head.head.weight": (vocab, hidden),
                }
            )
            table[f"{at}.eh_proj.weight"] = (hidden, 2 * hidden)
        table[f"{at}.input_layernorm.weight"] = (hidden,)
        if deepseek:
            table.update(_latent_attention(c, at))
        else:
            table[f"{at}.self_attn.q_proj.weight"] = (heads * head_dim, hidden)
            table[f"{at}.self_attn.k_proj.weight"] = (groups * head_dim, hidden)
            table[f"{at}.self_attn.v_proj.weight"] = (groups * head_dim, hidden)
            table[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if c["model_type"] == "qwen2":
            table[f"{at}.self_attn.q_proj.bias"] = (heads * head_dim,)
            table[f"{at}.self_attn.k_proj.bias"] = (groups * head_dim,)
            table[f"{at}.self_attn.v_proj.bias"] = (groups * head_dim,)
        if c["model_type"] in ("qwen3", "qwen3_moe"):
            table[f"{at}.self_attn.q_norm.weight"] = (head_dim,)
            table[f"{at}.self_attn.k_norm.weight"] = (head_dim,)
        table[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if c["model_type"] == "mixtral":
            ffn = c["intermediate_size"]
            table[f"{at}.block_sparse_moe.gate.weight"] = (c["num_local_experts"], hidden)
            for expert in range(c["num_local_experts"]):
                table[f"{at}.block_sparse_moe.experts.{expert}.w1.weight"] = (ffn, hidden)
                table[f"{at}.block_sparse_moe.experts.{expert}.w2.weight"] = (hidden, ffn)
                table[f"{at}.block_sparse_moe.experts.{expert}.w3.weight"] = (ffn, hidden)
        elif (c["model_type"] == "qwen3_moe" and layer not in c["mlp_only_layers"]) or (
            deepseek and layer >= c["first_k_dense_replace"]
        ):
            ffn = c["moe_intermediate_size"]
            experts = c["n_routed_experts" if deepseek else "num_experts"]
            table[f"{at}.mlp.gate.weight"] = (experts, hidden)
            if deepseek:
                shared = ffn * c["n_shared_experts"]
                table[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
                table[f"{at}.mlp.shared_experts.gate_proj.weight"] = (shared, hidden)
                table[f"{at}.mlp.shared_experts.up_proj.weight"] = (shared, hidden)
                table[f"{at}.mlp.shared_experts.down_proj.weight"] = (hidden, shared)
            for expert in range(experts):
                table[f"{at}.mlp.experts.{expert}.gate_proj.weight"] = (ffn, hidden)
                table[f"{at}.mlp.experts.{expert}.up_proj.weight"] = (ffn, hidden)
                table[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (hidden, ffn)
        else:
            ffn = c["intermediate_size"]
            table[f"{at}.mlp.gate_proj.weight"] = (ffn, hidden)
            table[f"{at}.mlp.up_proj.weight"] = (ffn, hidden)
            table[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
    table["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        table["lm_head.weight"] = (vocab, hidden)
    return table


def _latent_attention(c: Config, at: str) -> dict[str, tuple[int, ...]]:
    """Returns the projections of DeepSeek's attention in the layer `at`."""
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value, rank = (
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
        c["v_head_dim"],
        c["q_lora_rank"],
    )
    query: dict[str, tuple[int, ...]] = {"q_proj": (heads * (nope + rope), hidden)}
    if rank is not None:
        query = {
            "q_a_proj": (rank, hidden),
            "q_a_layernorm": (rank,),
            "q_b_proj": (heads * (nope + rope), rank),
        }
    rest = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    return {f"{at}.self_attn.{name}.weight": shape for name, shape in {**query, **rest}.items()}


@functools.cache
def values(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns one tensor in fp32, which depends on its name, its shape and the seed alone.

    It is read-only, because every test of a process gets the same array. RandomState, because
    numpy promises its stream for ever; Generator's may change with a version.
    """
    found = _values(name, np.random.RandomState([seed, zlib.crc32(name.encode())]), shape)
    found.flags.writeable = False
    return found


def _values(name: str, drawn: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Returns normal values, scaled such that the logits depend on every tensor."""
    normal: np.ndarray = drawn.standard_normal(shape).astype(np.float32)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # scores are nearly symmetric in q and k: at 0.2, exchanging them hardly moves the logits
        return 1 + np.float32(0.6) * normal
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.2) * normal
    if name.endswith("e_score_correction_bias"):
        # sigmoid scores lie in 0 to 1: a larger bias chooses the same experts for all tokens
        return np.float32(0.05) * normal
    if name.endswith(".bias"):
        # without rotation, a bias of k is the same for all keys: at 0.2 it hardly moves the logits
        return np.float32(0.6) * normal
    if name == "model.embed_tokens.weight":
        return np.float32(0.25) * normal
    # In units of 1/sqrt(inputs), so that no layer dominates the others. Attention adds a part that
    # all tokens of a row share: with 1.3 for o_proj too, 128 tokens leave some experts unused
    gain = 0.9 if name.endswith("o_proj.weight") else 1.3
    return np.float32(gain / math.sqrt(shape[-1])) * normal


def tensors(c: Config, dtype: str = "bfloat16", seed: int = 0) -> dict[str, np.ndarray]:
    """Returns every tensor of a config, in `dtype` (ml_dtypes.bfloat16 for bfloat16)."""
    copies = {
        ".embed_tokens.weight": "model.embed_tokens.weight",
        ".shared_head.head.weight": "lm_head.weight",
    }  # tensors of multi-token prediction are copies
    of = {
        name: next((whole for end, whole in copies.items() if name.endswith(end)), name)
        for name in shapes(c)
    }
    # published checkpoints have this dtype
    kinds = {
        name: "float32" if name.endswith("e_score_correction_bias") else dtype for name in shapes(c)
    }
    return {
        name: values(of[name], shape, seed).astype(DTYPES[kinds[name]][1])
        for name, shape in shapes(c).items()
    }


def decoder_only(c: Config, names: Iterable[str]) -> list[str]:
    """Returns the names that do not belong to a layer of multi-token prediction."""
    return [
        name
        for name in names
        if not (found := re.match(r"model\.layers\.(\d+)\.", name))
        or int(found[1]) < c["num_hidden_layers"]
    ]


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes one .safetensors file with json and tobytes alone. Wider dtypes come first, then the
    order is that of the names, as in the safetensors library.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        start, end = end, end + arrays[name].nbytes
        header[name] = {
            "dtype": LETTERS[arrays[name].dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(arrays[name].tobytes() for name in order)
    )


def write_weights(
    directory: Path, arrays: Mapping[str, np.ndarray], max_shard_size: int | None = None
) -> None:
    """Writes model.safetensors, or model-0000i-of-0000n.safetensors of at most max_shard_size bytes
    of data each, and their index.
    """
    files = _files(arrays, max_shard_size, "model", "safetensors")
    for file, names in files.items():
        write_safetensors(directory / file, {name: arrays[name] for name in names})
    _write_index(directory / "model.safetensors.index.json", arrays, files)


def _files(
    arrays: Mapping[str, np.ndarray], max_shard_size: int | None, stem: str, suffix: str
) -> dict[str, list[str]]:
    """Returns file -> the names in it, filled in the order given. A tensor larger than
    max_shard_size has a file of its own.
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, array in arrays.items():
        if groups[-1] and max_shard_size is not None and held + array.nbytes > max_shard_size:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += array.nbytes
    if len(groups) == 1:
        return {f"{stem}.{suffix}": groups[0]}
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.{suffix}": names for i, names in enumerate(groups, 1)
    }


def _write_index(
    path: Path, arrays: Mapping[str, np.ndarray], files: Mapping[str, Iterable[str]]
) -> None:
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        write_json(
            path,
            {
                "metadata": {"total_size": sum(a.nbytes for a in arrays.values())},
                "weight_map": dict(sorted(where.items())),
            },
        )


def write_json(path: Path, content: Any) -> None:
    """Writes as transformers writes config.json: two spaces, sorted keys, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_side_files(directory: Path, c: Config) -> None:
    """Writes generation_config.json and the tokenizer's files. They are valid JSON, but the
    tokenizer does not work.
    """
    write_json(
        directory / "generation_config.json",
        {k: c[k] for k in ("bos_token_id", "eos_token_id", "transformers_version")},
    )
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(8)}, "unk_token": "t0"}
    write_json(directory / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}\n{%"
        " endfor %}"
    )
    write_json(
        directory / "tokenizer_config.json",
        {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    write_json(
        directory / "special_tokens_map.json",
        {"bos_token": "t1", "eos_token": "t2", "unk_token": "t0"},
    )


def tiny_random(
    case: str,
    directory: Path,
    dtype: str = "bfloat16",
    seed: int = 0,
    max_shard_size: int | None = None,
    **changes: Any,
) -> Path:
    """Writes the checkpoint that transformers' own save_pretrained writes, byte for byte, in
    milliseconds and without torch and transformers, so that property tests can use it.

    `changes` replace entries of the case's config.json.
    """
    c = {**config(case), **changes, "torch_dtype": dtype}
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, tensors(c, dtype, seed), max_shard_size)
    write_json(directory / "config.json", c)
    _write_side_files(directory, c)
    return directory


def class_of(c: Config) -> Any:
    """Returns the class of transformers that builds the model of a config.json."""
    import transformers

    named = c["architectures"][0]
    return getattr(transformers, STANDS_FOR.get(named, named), transformers.AutoModelForCausalLM)


def load(directory: Path, dtype: str = "float32") -> Any:
    """Returns the transformers model of a checkpoint. Raises AssertionError if a tensor is missing,
    unexpected or of another shape.
    """
    import torch
    from transformers import CONFIG_MAPPING, PreTrainedModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = class_of(json.loads((directory / "config.json").read_text()))
    with tempfile.TemporaryDirectory() as temporary:
        from_pretrained = kind.from_pretrained
        if issubclass(kind, PreTrainedModel):  # its own method may load other files too
            from_pretrained = functools.partial(PreTrainedModel.from_pretrained.__func__, kind)
        named = renamed.for_transformers(directory, Path(temporary) / "renamed")
        known = json.loads((named / "config.json").read_text()).get("model_type") in CONFIG_MAPPING
        model, info = from_pretrained(
            named,
            # a model_type of its maker, which transformers does not have
            **({} if known or named != directory else {"model_type": kind.config_class.model_type}),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            output_loading_info=True,
        )
    # transformers' model has no layers of multi-token prediction, which follow the decoder's
    text = model.config.get_text_config().to_dict()
    info["unexpected_keys"] = decoder_only(text, info["unexpected_keys"])
    wrong = {kind: found for kind, found in info.items() if found}
    assert not wrong, f"{directory}: transformers reports {wrong}"
    return model.eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns fp32 logits [batch, seq, vocab] of tokens [batch, seq]."""
    import torch

    if type(model).forward is torch.nn.Module.forward:
        model = model.thinker  # of a model that has further ones, which speak
    with torch.no_grad():
        found = model(torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False)
    # a model with a second head has other names
    scores = found.prediction_logits if "prediction_logits" in found else found.logits
    out: np.ndarray = scores.float().numpy()
    return out


def hf_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns transformers' fp32 logits [batch, seq, vocab] of a checkpoint. Raises AssertionError
    if the checkpoint does not load completely.
    """
    return logits(load(directory), tokens)
