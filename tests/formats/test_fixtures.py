"""The files in fixtures/: transformers reads the configs and the shipped model as mckpt does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.make_fixture import (
    CHAT_TEMPLATE,
    MERGES,
    SPECIAL,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    V5,
    byte_letters,
    write_model,
)
from tests.helpers.tiny import CASES, FIXTURES, Config, config, decoder_only, hf_logits, shapes

# the number of parameters in billions, from the model cards
PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-3.1-8b": 8.03,
    "llama-3-8b": 8.03,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "tinyllama-1.1b-chat": 1.10,
    "smollm2-135m": 0.13,
    "deepseek-coder-6.7b": 6.74,
    "deepseek-r1-distill-qwen-1.5b": 1.78,
    "qwen2.5-0.5b-instruct": 0.49,
    "qwen2.5-1.5b-instruct": 1.54,
    "qwen2.5-3b-instruct": 3.09,
    "qwen2.5-14b-instruct": 14.77,
    "qwen2.5-32b-instruct": 32.76,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-14b": 14.77,
    "llama-3.3-70b": 70.55,
    "mistral-7b-v0.1": 7.24,
    "deepseek-v3": 684.49,
    "kimi-k2": 1026.41,
    "mistral-7b-v0.3": 7.25,
    "mistral-nemo": 12.25,
    "mixtral-8x22b": 140.62,
    "mixtral-8x7b": 46.70,
    "qwen2-0.5b": 0.49,
    "qwen2-7b": 7.62,
    "qwen2.5-72b": 72.71,
    "qwen2.5-7b-instruct": 7.62,
    "qwen3-0.6b": 0.60,
    "qwen3-235b-a22b": 235.09,
    "qwen3-30b-a3b": 30.53,
    "qwen3-32b": 32.76,
    "qwen3-8b": 8.19,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_those_of_transformers_for_published_configs(name: str) -> None:
    """transformers reads each config, and its model on the meta device has the tensors
    of shapes().
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    c = json.loads((FIXTURES / "configs" / f"{name}.json").read_text())
    assert "torch_dtype" in c and "rope_parameters" not in c
    # transformers has this model under another name
    kind = "deepseek_v3" if c["model_type"] == "kimi_k2" else c["model_type"]
    assert kind in {c["model_type"] for c in map(config, CASES)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**c, "model_type": kind}))
    whole = shapes(c)
    table = {key: whole[key] for key in decoder_only(c, whole)}
    biases = [
        tensor for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias")
    ]
    assert sum(tensor.numel() for tensor in [*model.parameters(), *biases]) == sum(
        int(np.prod(shape)) for shape in table.values()
    )
    for key, tensor in model.state_dict().items():
        if ".experts." not in key and not (key == "lm_head.weight" and c["tie_word_embeddings"]):
            assert (
                table[
                    (
                        key.replace(".mlp.gate.", ".block_sparse_moe.gate.")
                        if c["model_type"] == "mixtral"
                        else key
                    )
                ]
                == tensor.shape
            )


def test_published_models_have_the_size_of_their_model_card() -> None:
    found = {}
    for name in PUBLISHED:
        table = shapes(json.loads((FIXTURES / "configs" / f"{name}.json").read_text()))
        found[name] = round(sum(int(np.prod(shape)) for shape in table.values()) / 1e9, 2)
    assert found == PUBLISHED


@pytest.mark.parametrize("name", V5)
def test_v5_configs_have_the_content_of_the_published_ones(name: str) -> None:
    """The configs in v5/ differ from the published ones only in keys that transformers
    5 renamed.
    """
    from transformers import AutoConfig

    path = FIXTURES / "configs" / "v5" / f"{name}.json"
    old, new = (
        AutoConfig.from_pretrained(p).to_dict()
        for p in (FIXTURES / "configs" / f"{name}.json", path)
    )
    for key in ("transformers_version", "_name_or_path"):
        old.pop(key), new.pop(key)
    assert old == new
    written = json.loads(path.read_text())
    assert {"rope_parameters", "dtype"} <= set(written) and not {
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
    } & set(written)


@pytest.mark.parametrize(
    ("name", "config"), [("tiny-qwen3", TINY_QWEN3), ("tiny-qwen3-moe", TINY_QWEN3_MOE)]
)
def test_the_shipped_models_can_be_made_again_and_load(
    name: str, config: Config, tmp_path: Path
) -> None:
    """They are what `python -m tests.helpers.make_fixture` makes, and transformers and tokenizers
    read them.
    """
    from transformers import AutoTokenizer

    shipped = FIXTURES / name
    write_model(tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in shipped.iterdir()
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name
    assert sum(path.stat().st_size for path in shipped.iterdir()) < 300_000

    tokenizer = AutoTokenizer.from_pretrained(shipped)
    text = "the man in the rain: 12 \N{SNOWMAN}\n\ttabs"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and 256 + MERGES.index("Ġ the") in ids
    assert len(tokenizer) == 256 + len(MERGES) + len(SPECIAL) < TINY_QWEN3["vocab_size"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        TINY_QWEN3["bos_token_id"],
        TINY_QWEN3["eos_token_id"],
    )
    assert tokenizer.chat_template == CHAT_TEMPLATE
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(set(byte_letters())) == 256

    found = hf_logits(shipped, np.array([ids]))
    assert np.isfinite(found).all() and 0.5 < found.std() < 5


@pytest.mark.parametrize(
    ("family", "config_class"),
    [
        ("llama", "LlamaConfig"),
        ("mistral", "MistralConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
        ("mixtral", "MixtralConfig"),
        ("qwen3_moe", "Qwen3MoeConfig"),
    ],
)
def test_an_absent_key_has_the_default_of_transformers(family: str, config_class: str) -> None:
    """Published configs leave keys out, so the defaults of a family file must be those of the
    config class.
    """
    import transformers

    from mckpt import mapping

    needed = (
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "intermediate_size",
    )
    known = getattr(transformers, config_class)()
    dims = mapping.load("hf", family).read({key: getattr(known, key) for key in needed})
    rope = known.rope_parameters
    said = {
        "num_query_groups": known.num_key_value_heads,
        "max_positions": known.max_position_embeddings,
        "norm_eps": known.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "tied": known.tie_word_embeddings,
        "sliding_window": (
            known.sliding_window
            if getattr(known, "use_sliding_window", True) and hasattr(known, "sliding_window")
            else None
        ),
        "head_dim": (
            getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
        ),
    }
    if family in ("mixtral", "qwen3_moe"):
        said |= {"experts_per_token": known.num_experts_per_tok}
    if family == "qwen3_moe":
        said |= {
            "expert_ffn_size": known.moe_intermediate_size,
            "normalize_topk": known.norm_topk_prob,
        }
    assert {name: dims[name] for name in said} == said
