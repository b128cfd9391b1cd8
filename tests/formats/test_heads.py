"""Models around the decoder of a causal language model: without an output layer, or with a head
that is carried.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused
from tests.helpers.tiny import tensors, tiny_random, write_weights


def saved(path: Path, case: str, kind: str) -> Path:
    """Writes a model with transformers, in bfloat16 with random weights."""
    import torch
    import transformers

    c = tiny.config(case) if case in tiny.CASES else made_models.config(case)
    config = transformers.AutoConfig.for_model(**{**c, "torch_dtype": None})
    model = getattr(transformers, kind).from_config(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.rand_like(parameter) + 0.5
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def same(a: Path, b: Path) -> None:
    """Asserts that two directories have the same tensors, by name and bytes."""
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)


def flat(path: Path, **changed: Any) -> Path:
    """Writes a model as Qwen3-Embedding is published: of the class of a causal language model,
    without `model.` in its names and without an output layer.
    """
    config = json.loads((tiny_random("qwen3", path, **changed) / "config.json").read_text())
    arrays = tensors(config).items()
    write_weights(path, {k.removeprefix("model."): a for k, a in arrays if k != "lm_head.weight"})
    return path


def test_an_untied_model_without_output_layer_becomes_tied(tmp_path: Path) -> None:
    source = flat(tmp_path / "hf", tie_word_embeddings=False)
    said = good("hf-to-megatron", source, tmp_path / "a").err
    assert "tied: config.json has tie_word_embeddings False; True is used, because" in said
    good("megatron-to-hf", tmp_path / "a", tmp_path / "back")
    same(source, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"]
    # a trainer's checkpoint does not tell the names, and AutoModel reads both
    (tmp_path / "a" / "release" / "mckpt.json").unlink()
    good("megatron-to-hf", tmp_path / "a", tmp_path / "trained")
    assert "model.norm.weight" in load_file(tmp_path / "trained" / "model.safetensors")


def test_a_head_that_is_lost_is_an_error_with_its_cure(tmp_path: Path) -> None:
    source = saved(tmp_path / "hf", "qwen3", "AutoModelForSequenceClassification")
    good("hf-to-megatron", source, tmp_path / "a")
    for name in ("hf/carried.safetensors", "release/mckpt.json"):
        (tmp_path / "a" / name).unlink()
    args = ("megatron-to-hf", tmp_path / "a", tmp_path / "back")
    refused(4, "describes a Qwen3ForSequenceClassification, whose tensors score.*", args=args)
    good(*args, "--like", source)
    same(source, tmp_path / "back")


@pytest.mark.parametrize("end", ["ForRewardModel", "ForProcessRewardModel"])
def test_a_reward_model_is_no_base_model(end: str) -> None:
    """Both names end with Model."""
    from mckpt.mapping import heads

    assert heads.decoder_of(f"Qwen3{end}") == "Qwen3ForCausalLM"
    assert heads.decoder_of("Qwen3Model") == "Qwen3ForCausalLM"
