"""`mckpt mappings new` drafts a family file, and `mckpt mappings check` reads the headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.inspection import stored_model
from mckpt.errors import MappingError
from mckpt.mapping import draft
from mckpt.mapping.forms import Form
from tests import tiny
from tests.door import good, refused
from tests.tiny import TinyModel


def write_fork(directory: Path, **config: Any) -> dict[str, np.ndarray]:
    """Writes a Llama that an unknown class stores with fused q, k, v and fused gate and up, and
    with another name for the second norm; returns the tensors of the Llama.
    """
    plain = tiny.config("llama")
    arrays = dict(tiny.tensors(plain))
    fused = dict(arrays)
    for layer in range(plain["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, parts in (
            ("self_attn.Wqkv", [f"self_attn.{x}_proj" for x in "qkv"]),
            ("mlp.w13", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            held = [fused.pop(f"{at}{part}.weight") for part in parts]
            fused[f"{at}{name}.weight"] = np.concatenate(held)
        fused[f"{at}pre_mlp_norm.weight"] = fused.pop(f"{at}post_attention_layernorm.weight")
    directory.mkdir(parents=True)
    tiny.write_weights(directory, fused)
    named = {"architectures": ["OurForCausalLM"], "model_type": "ours"}
    tiny.write_json(directory / "config.json", {**plain, **named, **config})
    return arrays


def test_a_draft_converts_a_fork_of_llama(tiny_model: TinyModel, tmp_path: Path) -> None:
    fork, file = tmp_path / "fork", tmp_path / "my.yaml"
    write_fork(fork)
    text = good("mappings", "new", fork).out
    assert "extends: phi3\n" in text and "architectures: [OurForCausalLM]" in text
    assert "has the shape of [ q | k | v ]: check the order" in text
    assert ": the shape of layers.{layer}.mlp_norm.weight" in text
    assert len(text.splitlines()) < 60
    file.write_text(text)
    less = tmp_path / "less.yaml"
    less.write_text(text.replace("      pre_mlp_norm.weight: mlp_norm.weight\n", ""))
    assert "pre_mlp_norm.weight" in refused(5, args=("mappings", "check", less, fork))
    said = good("mappings", "check", file, fork).out
    assert "every stored tensor has a rule" in said and "`mckpt verify`" in said
    mckpt.convert(fork, tmp_path / "ours", known=mckpt.Known(mapping=str(file)))
    mckpt.convert(tiny_model("llama"), tmp_path / "llama")
    assert not mckpt.diff(tmp_path / "llama", tmp_path / "ours")


def test_a_draft_lists_config_keys_that_the_nearest_family_does_not_know(tmp_path: Path) -> None:
    write_fork(tmp_path / "fork", embedding_multiplier=12.0)
    text = draft(*stored_model(tmp_path / "fork"), "fork")
    assert "#   embedding_multiplier: 12.0" in text
    (tmp_path / "my.yaml").write_text(text)
    said = refused(4, args=("mappings", "check", tmp_path / "my.yaml", tmp_path / "fork"))
    assert "embedding_multiplier: 12.0" in said and "under `expect`" in said


def test_a_draft_takes_rules_of_other_families_by_their_names(tmp_path: Path) -> None:
    arrays = tiny.tensors(tiny.config("llama"))
    shapes = {name: array.shape for name, array in arrays.items()}
    config = {**tiny.config("llama"), "architectures": ["OurForCausalLM"]}
    text = draft(config, {**shapes, "model.layers.0.block_sparse_moe.gate.weight": (4, 64)}, "here")
    assert "extends: llama" in text and "another family has this name" in text
    assert "block_sparse_moe.gate.weight: moe.router.weight" in text


def test_a_config_without_architectures_is_refused() -> None:
    with pytest.raises(MappingError, match=r"here: its config\.json names no architectures"):
        draft({}, {}, "here")


@pytest.mark.parametrize("name", ["llama", "hf/qwen3", "megatron/gpt", "hybrid", "logical"])
def test_show_prints_yaml_that_can_be_read(name: str) -> None:
    import yaml

    assert isinstance(yaml.safe_load(good("mappings", "show", name).out), dict)


def test_what_show_prints_is_the_same_family(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(good("mappings", "show", "qwen3_moe").out)
    source = tiny_model("qwen3-moe")
    own = mckpt.open(source, mapping=str(file))
    assert own.dims == mckpt.open(source).dims
    assert own.layout.num_tensors == mckpt.open(source).layout.num_tensors


def test_an_unknown_name_has_its_nearest_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: llama\ndims:\n  rope_thet: rope_theta\ntensors:\n  norm.w: final_norm.wieght\n"
    )
    said = refused(4, args=("mappings", "check", file))
    assert "no dim 'rope_thet'; the nearest names are rope_theta" in said
    assert "no tensor 'final_norm.wieght'; the nearest names are final_norm.weight" in said


@pytest.mark.parametrize(
    ("names", "carried"),
    [
        ({"": "language_model."}, ["projector.weight", "vision_tower.layers.0.norm.weight"]),
        ({"model.": "model.language_model."}, ["model.visual.blocks.0.norm.weight"]),
        ({"model.": "language_model.model."}, ["visual.norm.weight"]),
    ],
)
def test_a_draft_carries_what_is_around_a_text_model(
    names: dict[str, str], carried: list[str], tmp_path: Path
) -> None:
    plain = tiny.config("qwen3")
    form = Form(names, ())
    arrays = {form.rename(name): array for name, array in tiny.tensors(plain).items()}
    arrays |= {name: np.ones(3, np.float32) for name in carried}
    model = tmp_path / "model"
    model.mkdir()
    tiny.write_weights(model, arrays)
    around = {"architectures": ["OurForConditionalGeneration"], "model_type": "ours"}
    tiny.write_json(model / "config.json", {**around, "text_config": plain, "vision_config": {}})
    text = draft(*stored_model(model), "model")
    assert "extends: qwen3\n" in text and "config: text_config\n" in text
    (tmp_path / "my.yaml").write_text(text)
    known = mckpt.Known(mapping=str(tmp_path / "my.yaml"))
    mckpt.convert(model, tmp_path / "there", known=known)
    mckpt.convert(tmp_path / "there", tmp_path / "again")
    assert not mckpt.diff(model, tmp_path / "again", known=known)
    said = good("mappings", "check", tmp_path / "my.yaml", model).out
    assert "every stored tensor has a rule" in said


def test_check_refuses_a_tensor_under_two_keys(tmp_path: Path) -> None:
    file, config = tmp_path / "mine.yaml", tmp_path / "config.json"
    file.write_text("extends: llama\ntensors:\n  model.other.weight: final_norm.weight\n")
    tiny.write_json(config, tiny.config("llama"))
    said = refused(4, args=("mappings", "check", file, "--config", config))
    assert "final_norm.weight: in model.norm.weight and in model.other.weight" in said
