"""`mckpt mappings new` drafts a family file, and `mckpt mappings check` reads the headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.inspection import stored_model
from mckpt.errors import MappingError
from mckpt.mapping.drafting import draft
from mckpt.mapping.forms import NameForm
from mckpt.options import SourceOptions
from tests.helpers import tiny
from tests.helpers.commands import good, refused
from tests.helpers.tiny import TinyModel


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
    assert "extends: [parts/" in text and "architectures: [OurForCausalLM]" in text
    assert "has the shape of [ q | k | v ]: check the order" in text
    assert ": the shape of layers.{layer}.mlp_norm.weight" in text
    assert len(text.splitlines()) < 60
    file.write_text(text)
    less = tmp_path / "less.yaml"
    less.write_text(text.replace("  pre_mlp_norm.weight: mlp_norm.weight\n", ""))
    assert "pre_mlp_norm.weight" in refused(5, args=("mappings", "check", less, fork))
    said = good("mappings", "check", file, fork).out
    assert "every stored tensor has a rule" in said and "`mckpt verify`" in said
    mckpt.convert(mckpt.open(fork, mapping=str(file)), tmp_path / "ours")
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
    assert "The nearest family is llama" in text and "another family has this name" in text
    assert "block_sparse_moe.gate.weight: moe.router.weight" in text


def tiny_draft(case: str, changed: dict[str, Any], *without: str) -> str:
    """Returns the draft for a tiny model of an unknown class; `without` are parts of names."""
    config = {**tiny.config(case), "architectures": ["OurForCausalLM"], **changed}
    shapes = {n: a.shape for n, a in tiny.tensors(tiny.config(case)).items()}
    shapes = {n: s for n, s in shapes.items() if not any(part in n for part in without)}
    return draft(config, shapes, "here")


def test_a_draft_says_which_dims_the_config_does_not_decide() -> None:
    text = tiny_draft("llama", {})
    assert "they are those of llama: norm rmsnorm, gated" in text
    assert "# What is special about llama: llama3 rope scaling" in text


def test_a_draft_shows_how_other_families_read_a_key() -> None:
    text = tiny_draft("llama", {"norm_epsilon": 1e-5, "layer_types": ["sliding_attention"] * 4})
    line = "norm_eps: {key: norm_epsilon, default: 1e-05}  # as starcoder2 reads it"
    assert f"#   norm_epsilon: 1e-05\n#     {line}\n" in text
    assert "For llama layer_types changes nothing, and other families read it" in text
    assert "#     window_layers: see `mckpt mappings show " in text


def test_a_line_of_another_family_that_has_a_list_stays_a_comment() -> None:
    text = tiny_draft("llama", {"num_layers": 4})
    assert "#     num_layers: {key: [num_layers, num_hidden_layers]}  # as exaone" in text
    assert "- num_hidden_layers\n" not in text


def test_a_draft_keeps_the_gate_where_only_experts_have_one() -> None:
    """The nearest family has it in a dense layer too, which the model lacks."""
    text = tiny_draft("deepseek-v3", {}, "layers.0.mlp")
    assert "mlp.{gate,up,down}_proj.weight: null" in text
    assert "\n  gated: {const: false}" not in text


def test_a_draft_switches_off_what_the_model_lacks(tmp_path: Path) -> None:
    """Without the norms of q and k, Megatron must not have them: the draft is complete."""
    text = tiny_draft("qwen3-moe", {}, "q_norm", "k_norm")
    assert "extends: [parts/plain, " in text and "parts/qk_norm" not in text
    file, config = tmp_path / "draft.yaml", tmp_path / "config.json"
    file.write_text(text)
    tiny.write_json(config, {**tiny.config("qwen3-moe"), "architectures": ["OurForCausalLM"]})
    said = good("mappings", "check", file, "--config", config).out
    assert "each of which has a place in Megatron" in said
    (file := tmp_path / "with.yaml").write_text(
        text.replace("canonical: false\n", "constants: {qk_norm: true}\n")
    )
    said = refused(4, args=("mappings", "check", file, "--config", config))
    assert "a model without it has `qk_norm: {const: false}` under `dims`" in said
    (file := tmp_path / "without.yaml").write_text(
        "extends: qwen3_moe\ndims:\n  qk_norm: {const: false}\n"
    )
    said = refused(4, args=("mappings", "check", file, "--config", config))
    assert "it has one where the dim qk_norm is true" in said


def test_a_draft_prefers_the_family_that_knows_the_keys_of_the_config() -> None:
    said = {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "attention_multiplier": 0.5}
    assert "extends: granite\n" in tiny_draft("llama", {**said, "residual_multiplier": 1.0})


def test_a_draft_says_what_to_do_with_an_unknown_name(tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    fork.mkdir()
    config = {**tiny.config("llama"), "architectures": ["OurForCausalLM"]}
    arrays = tiny.tensors(tiny.config("llama"))
    odd = {f"model.layers.{i}.odd.weight": np.ones(3, np.float32) for i in range(4)}
    tiny.write_weights(fork, {**arrays, **odd})
    tiny.write_json(fork / "config.json", config)
    text = draft(*stored_model(fork), "fork")
    words = " ".join(text.replace("#", "").split())
    assert "If none stands for it, Megatron has no such part" in words
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    said = refused(5, args=("mappings", "check", file, fork))
    assert said.count("is in no rule of mine.yaml") == 1
    assert "layers.0.odd.weight [3] is in no rule of mine.yaml, and 3 more of this name" in said


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
    form = NameForm(names, ())
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
    known = SourceOptions(mapping=str(tmp_path / "my.yaml"))
    mckpt.convert(mckpt.Checkpoint.open(model, known), tmp_path / "there")
    mckpt.convert(tmp_path / "there", tmp_path / "again")
    assert not mckpt.diff(
        mckpt.Checkpoint.open(model, known), mckpt.Checkpoint.open(tmp_path / "again", known)
    )
    said = good("mappings", "check", tmp_path / "my.yaml", model).out
    assert "every stored tensor has a rule" in said


def test_a_draft_knows_the_names_that_many_programs_give() -> None:
    config = {**tiny.config("llama"), "architectures": ["OurForCausalLM"]}
    usual = {"gate": "w1", "up": "w3", "down": "w2"}
    shapes = {name: array.shape for name, array in tiny.tensors(config).items()}
    for part, word in usual.items():
        shapes = {
            name.replace(f"mlp.{part}_proj", f"feed_forward.{word}"): shape
            for name, shape in shapes.items()
        }
    text = draft(config, shapes, "here")
    for part, word in usual.items():
        assert f"\n  feed_forward.{word}.weight: mlp.{part}.weight\n" in text
    assert "square" not in text


def test_a_draft_says_which_matrices_may_be_stored_transposed() -> None:
    """c_fc has a transposed shape; c_proj is square, and no shape tells how it is stored."""
    config = {**tiny.config("llama"), "architectures": ["OurForCausalLM"]}
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    changed = {"mlp.up_proj": "mlp.c_fc", "self_attn.o_proj": "attn.c_proj"}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in tiny.tensors(config).items():
        for was, now in changed.items():
            name = name.replace(was, now)
        shapes[name] = array.shape[::-1] if "c_fc" in name else array.shape
    text = draft(config, shapes, "here")
    assert "\n  mlp.c_fc.weight: {of: mlp.up.weight, transposed: true}\n" in text
    assert "\n  attn.c_proj.weight: attn.o.weight\n" in text
    words = " ".join(text.replace("#", "").split())
    assert "The shapes of attn.c_proj.weight are square" in words and "Run `mckpt verify`" in words


def test_a_draft_adds_a_part_of_which_the_model_has_all_tensors(tmp_path: Path) -> None:
    """A Llama with biases and with norms of q and k has the part of Qwen3, and is read at once."""
    biased = {"architectures": ["OurForCausalLM"], "attention_bias": True, "mlp_bias": True}
    config = {**tiny.config("llama"), **biased}
    arrays = dict(tiny.tensors(config))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in "qk":
            arrays[f"{at}self_attn.{name}_norm.weight"] = np.ones(head_dim, np.float32)
        for name in [n for n in arrays if n.startswith(at) and n.endswith("_proj.weight")]:
            bias = np.ones(len(arrays[name]), np.float32)
            arrays[name.replace("weight", "bias")] = bias
    model, file = tmp_path / "model", tmp_path / "my.yaml"
    model.mkdir()
    tiny.write_weights(model, arrays)
    tiny.write_json(model / "config.json", config)
    file.write_text(text := good("mappings", "new", model).out)
    assert "parts/qk_norm]" in text and "null" not in text
    assert "every stored tensor has a rule" in good("mappings", "check", file, model).out
