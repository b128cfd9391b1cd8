"""The files in fixtures/: transformers reads the configs and the shipped model as mckpt does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mckpt import mapping
from tests.helpers.make_fixture import (
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    V5,
    write_model,
)
from tests.helpers.tiny import FIXTURES, Config, hf_logits


@pytest.mark.parametrize("name", V5)
def test_configs_of_transformers_5_give_the_dims_of_the_published_ones(name: str) -> None:
    paths = [FIXTURES / "configs" / folder / f"{name}.json" for folder in ("", "v5")]
    old, new = (json.loads(path.read_text()) for path in paths)
    assert {"rope_parameters", "dtype"} <= new.keys() - old.keys()
    family = mapping.load("hf", mapping.family_with(old["architectures"][0]))
    assert family.read(old) == family.read(new)


@pytest.mark.parametrize(
    ("name", "config"), [("tiny-qwen3", TINY_QWEN3), ("tiny-qwen3-moe", TINY_QWEN3_MOE)]
)
def test_the_shipped_models_can_be_made_again_and_load(
    name: str, config: Config, tmp_path: Path
) -> None:
    """`python -m tests.helpers.make_fixture` makes them, and transformers reads them."""
    from transformers import AutoTokenizer

    shipped = FIXTURES / name
    write_model(tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in shipped.iterdir()
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name
    assert sum(path.stat().st_size for path in shipped.iterdir()) < 300_000
    ids = AutoTokenizer.from_pretrained(shipped)("the man in the rain")["input_ids"]
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
