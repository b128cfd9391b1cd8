"""Models around the decoder of a causal language model: without an output layer, or with a head
that is carried.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused
from tests.helpers.tiny import tensors, tiny_random, write_weights

INEXACT = ("activation",)  # of Gemma 1
CASES = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "gemma")
SAVED = [(case, "AutoModel") for case in CASES] + [
    (case, f"AutoModelFor{head}")
    for case in ("llama", "qwen3-moe")
    for head in ("SequenceClassification", "TokenClassification")
]


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


def there_and_back(source: Path, tmp_path: Path, *, trained: bool = False) -> Path:
    """Converts a model to Megatron, to other sizes there, and back; returns the result.

    trained: Megatron's checkpoint has no manifest, as one that a trainer has saved.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    mckpt.plan(source, a, parallel=Parallel(tp=2), allow_inexact=INEXACT).run()
    if trained:
        (a / "release" / "mckpt.json").unlink()
    mckpt.plan(a, b, format="torch", parallel=Parallel(pp=2)).run()
    if trained:
        (b / "release" / "mckpt.json").unlink()
    mckpt.plan(b, tmp_path / "back", format="hf").run(check_replicas=True)
    return tmp_path / "back"


@pytest.mark.parametrize(("case", "kind"), SAVED)
def test_a_model_of_transformers_comes_back(case: str, kind: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "hf", case, kind)
    back = there_and_back(source, tmp_path)
    same(source, back)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    notes = " ".join(json.loads((tmp_path / "a" / "release" / "mckpt.json").read_text())["notes"])
    assert "the model has no output layer" in notes
    assert ("are carried in hf/carried" in notes) == (kind != "AutoModel")


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_trained_model_comes_back_as_its_class(kind: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "hf", "qwen3", kind)
    same(source, there_and_back(source, tmp_path, trained=True))


def flat(path: Path, **changed: Any) -> Path:
    """Writes a model as Qwen3-Embedding is published: of the class of a causal language model,
    without `model.` in its names and without an output layer.
    """
    config = json.loads((tiny_random("qwen3", path, **changed) / "config.json").read_text())
    arrays = tensors(config).items()
    write_weights(path, {k.removeprefix("model."): a for k, a in arrays if k != "lm_head.weight"})
    return path


def test_names_without_model_come_back(tmp_path: Path) -> None:
    source = flat(tmp_path / "hf", tie_word_embeddings=True)
    back = there_and_back(source, tmp_path)
    same(source, back)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


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


@pytest.mark.parametrize("trained", [False, True])
def test_a_value_head_is_carried(trained: bool, tmp_path: Path) -> None:
    source = tiny_random("qwen3", tmp_path / "hf")
    arrays = tensors(json.loads((source / "config.json").read_text()))
    head = {"weight": np.ones((1, 5), np.float32), "bias": np.zeros(1, ml_dtypes.bfloat16)}
    arrays |= {f"v_head.summary.{name}": array for name, array in head.items()}
    write_weights(source, arrays)
    same(source, there_and_back(source, tmp_path, trained=trained))


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
