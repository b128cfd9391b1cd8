"""Models around the decoder of a causal language model: without an output layer, or with a head
that is carried.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt import mapping
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused
from tests.helpers.tiny import tensors, tiny_random, write_json, write_weights


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
    mckpt.plan(source, a, parallel=Parallel(tp=2)).run()
    if trained:
        (a / "release" / "mckpt.json").unlink()
    mckpt.plan(a, b, format="torch", parallel=Parallel(pp=2)).run()
    if trained:
        (b / "release" / "mckpt.json").unlink()
    mckpt.plan(b, tmp_path / "back", format="hf").run(check_replicas=True)
    return tmp_path / "back"


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


@pytest.mark.parametrize("end", ["ForRewardModel", "ForProcessRewardModel", "Model"])
def test_a_reward_model_is_no_base_model(end: str) -> None:
    """All of these names end with Model."""
    from mckpt.mapping import heads

    assert "Qwen3ForCausalLM" in heads.language_models(f"Qwen3{end}")


def test_a_text_model_belongs_to_the_language_model_before_the_one_with_images() -> None:
    """Gemma3Model has a tower, and Gemma3TextModel has none."""
    assert mapping.family_with("Gemma3Model") == "gemma3_vl"
    assert mapping.family_with("Gemma3TextModel") == "gemma3"
    assert mapping.family_with("Qwen3VLTextModel") == "qwen3_vl"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("head", ["v_head.summary", "rm_head", "value_head", "score"])
def test_heads_beside_an_output_layer_are_carried(head: str, trained: bool, tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "hf", {f"{head}.weight": np.ones((1, 5), np.float32)})
    same(source, there_and_back(source, tmp_path, trained=trained))


@pytest.mark.parametrize("head", ["rm_head", "v_head.0", "regression_head", "classifier.out"])
def test_a_reward_model_has_one_of_the_known_heads(head: str, tmp_path: Path) -> None:
    more = {f"{head}.{kind}": np.ones(5, np.float32) for kind in ("weight", "bias")}
    source = with_tensors(tmp_path / "hf", more, architectures=["Qwen3ForRewardModel"])
    back = there_and_back(source, tmp_path, trained=True)
    same(source, back)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_an_unknown_head_is_an_error(tmp_path: Path) -> None:
    more = {"score.weight": np.ones(5, np.float32), "my_head.weight": np.ones(5, np.float32)}
    source = with_tensors(tmp_path / "hf", more, architectures=["Qwen3ForRewardModel"])
    refused(5, "my_head.weight [5] is in no rule", args=("plan", source, tmp_path / "a"))


def with_tensors(path: Path, more: dict[str, Any], **changed: Any) -> Path:
    """Writes a Qwen3 with further tensors, without an output layer if its class has none."""
    source = tiny_random("qwen3", path)
    config = json.loads((source / "config.json").read_text()) | changed
    arrays = tensors(config) | more
    if changed:
        arrays.pop("lm_head.weight")
    write_weights(source, arrays)
    write_json(source / "config.json", config)
    return source


def test_answers_to_questions_need_the_names_of_the_decoder(tmp_path: Path) -> None:
    """transformers calls the decoder `transformer` in some of these classes, and not in others."""
    head = {f"qa_outputs.{kind}": np.ones(2, np.float32) for kind in ("weight", "bias")}
    source = with_tensors(tmp_path / "hf", head, architectures=["Qwen3ForQuestionAnswering"])
    arrays = load_file(source / "model.safetensors")
    start = ("model.", "transformer.")
    write_weights(source, {key.replace(*start): array for key, array in arrays.items()})
    same(source, there_and_back(source, tmp_path))
    (tmp_path / "b" / "release" / "mckpt.json").unlink()
    args = ("megatron-to-hf", tmp_path / "b", tmp_path / "again")
    refused(4, "begin with model. or transformer.", "give --like HF_DIR", args=args)
    good(*args, "--like", source)
    same(source, tmp_path / "again")


def test_the_modules_of_sentence_transformers_come_back(tmp_path: Path) -> None:
    """As EmbeddingGemma is published: a pooling and a dense layer behind the decoder."""
    source = saved(tmp_path / "hf", "qwen3", "AutoModel")
    module = {
        "idx": 2,
        "name": "2",
        "path": "2_Dense",
        "type": "sentence_transformers.models.Dense",
    }
    write_json(source / "modules.json", [module])
    for name in ("1_Pooling", "2_Dense"):
        (source / name).mkdir()
        write_json(source / name / "config.json", {"in_features": 48})
    write_weights(source / "2_Dense", {"linear.weight": np.ones((2, 3), np.float32)})
    back = there_and_back(source, tmp_path)
    same(source, back)
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    kept = back / "2_Dense" / "model.safetensors"
    assert kept.read_bytes() == (source / "2_Dense" / "model.safetensors").read_bytes()
