"""Makes fixtures/tiny-qwen3, the model of the README, fixtures/tiny-qwen3-moe, that of the
tutorial, and fixtures/configs/v5: `python -m tests.helpers.make_fixture`.

The models have about 120 thousand random parameters and a real byte-level tokenizer, small enough
for git. Their vocabulary is odd and larger than their tokenizer's, as in published models.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.tiny import FIXTURES, Config, tensors, write_json, write_weights

V5 = ("llama-3.1-8b", "qwen2.5-7b-instruct", "qwen3-30b-a3b")

TINY_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 264,
    "eos_token_id": 266,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 72,
    "max_position_embeddings": 128,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 30000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 271,
}

TINY_QWEN3_MOE: Config = {
    **TINY_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}

MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "Ġ the", "Ġ a")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n'"
    " }}{% endif %}"
)


def byte_letters() -> list[str]:
    """Returns the letter that byte-level BPE writes for each of the 256 bytes: itself if printable,
    else the next letter from U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + unprintable.index(byte))
        for byte in range(256)
    ]


def tokenizer() -> dict[str, Any]:
    """Returns the content of a tokenizer.json: byte-level BPE with the 256 bytes, eight merges and
    Qwen's three special tokens.
    """
    words = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(words) + i, "content": word, **flags} for i, word in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": list(MERGES),
        },
    }


def write_model(directory: Path, config: Config) -> None:
    """Writes a checkpoint with random weights, a tokenizer and a generation config."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_weights(directory, tensors(config, seed=2025))
    write_json(directory / "tokenizer.json", tokenizer())
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    settings = {"add_prefix_space": False, "chat_template": CHAT_TEMPLATE, "model_max_length": 128}
    write_json(
        directory / "tokenizer_config.json",
        {**names, **settings, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    write_json(directory / "special_tokens_map.json", names)
    generation = {
        "bos_token_id": 264,
        "do_sample": False,
        "eos_token_id": 266,
        "pad_token_id": 264,
        "transformers_version": "4.51.0",
    }
    write_json(directory / "generation_config.json", generation)


def write_v5_configs(directory: Path) -> None:
    """Writes the published configs named in V5 as the installed transformers saves them (5 or
    later).
    """
    from transformers import AutoConfig

    directory.mkdir(parents=True, exist_ok=True)
    for name in V5:
        with tempfile.TemporaryDirectory() as work:
            AutoConfig.from_pretrained(FIXTURES / "configs" / f"{name}.json").save_pretrained(work)
            (directory / f"{name}.json").write_text((Path(work) / "config.json").read_text())


if __name__ == "__main__":
    write_model(FIXTURES / "tiny-qwen3", TINY_QWEN3)
    write_model(FIXTURES / "tiny-qwen3-moe", TINY_QWEN3_MOE)
    write_v5_configs(FIXTURES / "configs" / "v5")
