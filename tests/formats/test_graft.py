"""Tensors taken from another checkpoint, and layers of multi-token prediction: each element beside
numpy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from tests.formats.test_edit import Tensors, same, written
from tests.formats.test_towers import write
from tests.helpers import tiny
from tests.helpers.commands import good, refused

SIZES: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
COPIES = re.compile(r".*\.(embed_tokens|shared_head\.head)\.weight")  # of the main model's


def weights(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def states(directory: Path) -> Tensors:
    """Returns the logical tensors of a checkpoint, with the states of its optimizer."""
    found = mckpt.open(directory).with_optimizer()
    return {name: found[name][:].numpy() for name in found}


def test_layers_of_multi_token_prediction_come_from_the_base(tmp_path: Path) -> None:
    base = tiny.tiny_random("deepseek-v3", tmp_path / "base")
    run = tiny.tiny_random("deepseek-v3", tmp_path / "run", seed=3)
    trained, megatron = tmp_path / "trained", tmp_path / "megatron"
    mckpt.convert(mckpt.open(run, no_mtp=True), trained, **SIZES)
    mckpt.convert(base, megatron, format="torch", tp=2)
    own, theirs = weights(run), weights(base)
    expected = {
        name: theirs[name] if ".layers.4." in name and not COPIES.match(name) else tensor
        for name, tensor in own.items()
    }
    assert any(expected[name].tobytes() != own[name].tobytes() for name in own)
    for number, other in enumerate((base, megatron)):
        recipe = written(f"- graft: {{from: {other}, take: mtp}}\n", tmp_path)
        out, dist = tmp_path / f"out{number}", tmp_path / f"dist{number}"
        said = good("edit", trained, out, "--recipe", recipe, "--format", "hf")
        assert "edited, exact: the tensors of mtp are those of another" in said.err
        same(out, expected)
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
        (edit,) = json.loads((out / "mckpt.json").read_text())["edits"]
        assert edit["Graft"]["take"] == "mtp"
        assert re.fullmatch("[0-9a-f]{64}", edit["Graft"]["digest"])
        good("edit", trained, dist, "--recipe", recipe, "--tp", 1, "--pp", 2, "--ep", 2)
        assert not mckpt.diff(out, dist)
        assert (mckpt.open(dist).args or {})["mtp_num_layers"] == 1
        assert mckpt.check(dist).verdict == "sound"
    # what the run has already, with other values
    good("edit", run, tmp_path / "again", "--recipe", recipe)
    same(tmp_path / "again", expected)


def test_a_changed_file_of_the_other_checkpoint_is_another_source(tmp_path: Path) -> None:
    src, other = (tiny.tiny_random("qwen3", tmp_path / n, seed=i) for i, n in enumerate("ab"))
    recipe = written(f"- graft: {{from: {other}, take: head}}\n", tmp_path)
    out = tmp_path / "out"
    good("edit", src, out, "--recipe", recipe)
    assert "already" in good("edit", src, out, "--recipe", recipe).out
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    at = content.index(weights(other)["lm_head.weight"].tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    refused(6, "already contains", args=("edit", src, out, "--recipe", recipe), untouched=out)


@pytest.mark.parametrize("case", ["qwen3", "qwen3-tied", "mixtral"])
def test_parts_of_a_model_come_from_another(case: str, tmp_path: Path) -> None:
    src, other = (tiny.tiny_random(case, tmp_path / n, seed=i) for i, n in enumerate("ab"))
    own, theirs, tied = weights(src), weights(other), case == "qwen3-tied"
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    sizes: dict[str, Any] = {"tp": 2, "pp": 2, **({"ep": 2, "etp": 1} if case == "mixtral" else {})}
    dist, torch = tmp_path / "dist", tmp_path / "torch"
    mckpt.convert(src, dist, divisible_by=128, **sizes)
    mckpt.convert(other, torch, format="torch", tp=2)
    cases = {
        "head": {head: theirs[embed if tied else head]},
        "embedding": {embed: theirs[embed]},
        "layers.1-2": {n: t for n, t in theirs.items() if re.search(r"layers\.[12]\.", n)},
        "layers.*.attn.[qk].weight": {
            n: t for n, t in theirs.items() if re.search(r"attn\.[qk]_proj", n)
        },
        "layers.3.*": {n: t for n, t in theirs.items() if ".layers.3." in n},
    }
    if case == "mixtral":
        cases["layers.2.moe.experts.1.*"] = {
            n: t for n, t in theirs.items() if ".2.block_sparse_moe.experts.1." in n
        }
    for number, (take, taken) in enumerate(cases.items()):
        recipe = written(f'- graft: {{from: {torch}, take: "{take}"}}\n', tmp_path)
        out, megatron = tmp_path / f"hf{number}", tmp_path / f"megatron{number}"
        said = good("edit", src, out, "--recipe", recipe)
        assert (
            taken and f"edited, kept: the tensors of {take} are those of another torch" in said.err
        )
        same(out, {**own, **taken})
        good("edit", dist, megatron, "--recipe", recipe, "--tp", 1, "--pp", 1)
        assert not mckpt.diff(out, megatron), take
        config = json.loads((out / "config.json").read_text())
        assert config["tie_word_embeddings"] == (tied and take != "head")


def test_a_quantised_checkpoint_gives_values_times_its_own_scales(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    src, plain = (
        tiny.tiny_random("qwen3", tmp_path / n, "bfloat16", seed=i) for i, n in enumerate("ab")
    )
    quantised, own = tmp_path / "fp8", load_torch(src / "model.safetensors")
    mckpt.convert(plain, quantised, format="hf", quantize="fp8")
    theirs = load_torch(quantised / "model.safetensors")
    values = {n: t for n, t in theirs.items() if not n.endswith("_scale_inv")}
    for name, tensor in values.items():
        if (scale := theirs.get(f"{name}_scale_inv")) is not None:  # of blocks of 128 x 128
            assert tensor.dtype == torch.float8_e4m3fn
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = tensor.shape
            values[name] = (tensor.float() * spread[:rows, :columns].float()).bfloat16()

    def wanted(layers: dict[int, dict[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
        kept = {n: t for n, t in start.items() if ".layers." not in n}
        parts = {n: f".layers.{n}." for n in layers}
        return kept | {n: t for k, of in layers.items() for n, t in of.items() if parts[k] in n}

    step = f"graft: {{from: {quantised}, take: layers.1-2}}"
    mckpt.edit(src, tmp_path / "out", [step])
    mckpt.edit(src, tmp_path / "dist", [step], format="torch_dist", tp=2)
    assert not mckpt.diff(tmp_path / "out", tmp_path / "dist")
    models = {0: own, 1: values, 2: values, 3: own}
    slices = [
        {"sources": [{"model": str(quantised if n in (1, 2) else src), "layer_range": [n, n + 1]}]}
        for n in range(4)
    ]
    tiny.write_json(tmp_path / "merge.json", {"merge_method": "passthrough", "slices": slices})
    mckpt.merge([], tmp_path / "passed", recipe=tmp_path / "merge.json")
    for out in ("out", "passed"):
        found = load_torch(tmp_path / out / "model.safetensors")
        expected = wanted(models, own)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tower_comes_from_another_model(tmp_path: Path) -> None:
    src, other = (write(tmp_path / name, "mistral3") for name in "ab")
    held, own = weights(other), weights(src)
    towers = {name for name in held if not name.startswith("language_model.")}
    changed = {n: t[::-1].copy() if n in towers and t.ndim else t for n, t in held.items()}
    save_file(changed, other / "model.safetensors")
    mckpt.convert(src, tmp_path / "dist", tp=2)
    recipe = written(f"- graft: {{from: {other}, take: tower}}\n", tmp_path)
    for number, source in enumerate((src, tmp_path / "dist")):
        out = tmp_path / f"out{number}"
        good("edit", source, out, "--recipe", recipe, "--format", "hf")
        found = weights(out)
        for name, tensor in own.items():
            wanted = changed[name] if name in towers else tensor
            assert found[name].tobytes() == wanted.tobytes(), name
    assert found.keys() == own.keys()
    plain = tiny.tiny_random("qwen3", tmp_path / "plain")
    recipe = written(f"- graft: {{from: {plain}, take: tower}}\n", tmp_path)
    refused(
        2,
        "vision_tower.scale",
        "do not have the same",
        args=("edit", src, tmp_path / "no", "--recipe", recipe),
    )


@pytest.mark.parametrize("stated", [True, False])
def test_the_optimizers_state_comes_along_or_is_new(stated: bool, tmp_path: Path) -> None:
    src = tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "src")
    other = tiny.unpack("optimizer/dp_zero_gather_scatter", tmp_path / "other")
    if not stated:
        mckpt.convert(other, tmp_path / "plain")
        other = tmp_path / "plain"
    out = tmp_path / "out"
    recipe = written(f'- graft: {{from: {other}, take: "layers.1"}}\n', tmp_path)
    mckpt.edit(src, out, recipe, format="torch_dist", tp=1, pp=2)
    before, after, theirs = states(src), states(out), states(other)
    assert after.keys() == before.keys() and len(after) > 60
    apart = 0
    for name, values in after.items():
        weight, _, kind = name.partition("@")
        wanted = before[name]
        if name.startswith("layers.1."):
            wanted = theirs[name] if stated or not kind else theirs[weight]
            if not stated and kind.startswith("exp"):
                wanted = np.zeros_like(before[name])
            elif not stated and kind:
                wanted = wanted.astype("f4")
            apart += wanted.tobytes() != before[name].tobytes()
        assert values.tobytes() == wanted.tobytes(), name
    assert apart
    assert mckpt.check(out).verdict == "sound"


@pytest.mark.parametrize(
    ("graft", "words"),
    [
        ("{from: OTHER, take: mtp}", ["recipe.yaml:1", "has no layers of multi-token prediction"]),
        ("{from: OTHER, take: layers.9}", ["no tensor has such a name"]),
        ("{from: OTHER, take: guess}", ["no tensor has such a name", "mckpt inspect --tensors"]),
        ("{take: mtp}", ["wants from, a checkpoint, and take"]),
        ("{from: OTHER, take: 3}", ["wants from, a checkpoint, and take"]),
        (
            "{from: NARROW, take: layers.1}",
            ["ffn_sizes: [80], and [96] in SRC", "of the same model"],
        ),
        ("{from: SHORT, take: head}", ["vocab_size: 64, and"]),
        ("{from: SHORT, take: embed.*}", ["vocab_size: 64, and"]),
        ("{from: WIDE, take: embedding}", ["do `- untie` first"]),
    ],
)
def test_a_graft_that_cannot_be_done_names_the_line(
    graft: str, words: list[str], tmp_path: Path
) -> None:
    src = tiny.tiny_random("qwen3-tied", tmp_path / "src")
    changes: dict[str, dict[str, Any]] = {
        "OTHER": {},
        "NARROW": {"intermediate_size": 80},
        "SHORT": {"vocab_size": 64},
        "WIDE": {"tie_word_embeddings": False},
    }
    for name, changed in changes.items():
        if name in graft:
            other = tiny.tiny_random("qwen3-tied", tmp_path / name, **changed)
            graft = graft.replace(name, str(other))
    recipe, out = written(f"- graft: {graft}", tmp_path), tmp_path / "out"
    refused(2, *words, args=("edit", src, out, "--recipe", recipe))
    assert not out.exists()


def with_mtp(own: Tensors, count: int) -> Tensors:
    """Returns the tensors with a layer of multi-token prediction, made of the last one."""
    start, new = f"model.layers.{count - 1}.", f"model.layers.{count}."
    out = own | {n.replace(start, new): t for n, t in own.items() if n.startswith(start)}
    end = own["model.norm.weight"]
    out |= {f"{new}{name}.weight": np.ones_like(end) for name in ("enorm", "hnorm")}
    out[f"{new}shared_head.norm.weight"] = end
    width = len(end)
    zeros, identity = np.zeros((width, width)), np.eye(width)
    out[f"{new}eh_proj.weight"] = np.concatenate([zeros, identity], 1).astype(end.dtype)
    return out


@pytest.mark.parametrize("case", ["deepseek-v3", "qwen3-tied", "mixtral"])
def test_a_layer_of_multi_token_prediction_is_made_and_dropped(case: str, tmp_path: Path) -> None:
    src = tiny.tiny_random(case, tmp_path / "src", num_nextn_predict_layers=0)
    own, dims = weights(src), mckpt.open(src).dims
    count = dims["num_layers"]
    expected = with_mtp(own, count)
    if case == "deepseek-v3":
        expected[f"model.layers.{count}.embed_tokens.weight"] = own["model.embed_tokens.weight"]
        expected[f"model.layers.{count}.shared_head.head.weight"] = own["lm_head.weight"]
    recipe, out = written("- mtp: {add: 1}\n", tmp_path), tmp_path / "out"
    said = good("edit", src, out, "--recipe", recipe)
    assert "edited, exact: 1 layer of multi-token prediction more" in said.err
    assert "no layer computes" not in said.err
    same(out, expected)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    sizes: dict[str, Any] = {"tp": 2, "pp": 2} | ({} if case == "qwen3-tied" else SIZES)
    mckpt.convert(src, tmp_path / "dist", **sizes)
    mckpt.edit(tmp_path / "dist", tmp_path / "megatron", recipe, tp=1, pp=2)
    assert not mckpt.diff(out, tmp_path / "megatron")
    assert mckpt.check(tmp_path / "megatron").verdict == "sound"
    drop = written("- mtp: {drop: true}\n", tmp_path)
    for number, with_layer in enumerate((out, tmp_path / "megatron")):
        without = tmp_path / f"without{number}"
        good("edit", with_layer, without, "--recipe", drop, "--format", "hf")
        same(without, own)
        assert json.loads((without / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_the_main_model_computes_the_same_with_a_new_layer(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    src = tiny.tiny_random("qwen3-tied", tmp_path / "src")
    recipe = written("- mtp: {add: 2}\n", tmp_path)
    mckpt.edit(src, tmp_path / "out", recipe)
    tokens = torch.arange(40)[None] % 190
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(tokens).logits
            for path in (src, tmp_path / "out")
        )
    assert before.equal(after)  # to the last bit


def test_norms_that_are_stored_less_1_are_0(tiny_model: tiny.TinyModel, tmp_path: Path) -> None:
    src = tiny_model("qwen3_next")
    assert mckpt.open(src).dims["norm_offset"]
    mckpt.edit(src, tmp_path / "out", written("- mtp: {add: 1}\n", tmp_path), format="torch_dist")
    made = states(tmp_path / "out")
    count = mckpt.open(src).dims["num_layers"]
    for name in ("embed_norm", "hidden_norm"):
        assert not made[f"layers.{count}.mtp.{name}.weight"].any()
    one = made[f"layers.{count - 1}.attn.o.weight"]
    assert made[f"layers.{count}.attn.o.weight"].tobytes() == one.tobytes()


@pytest.mark.parametrize(
    ("case", "recipe", "words"),
    [
        ("qwen3", "{drop: true}", ["recipe.yaml:1", "has no layers of multi-token prediction"]),
        ("qwen3", "{add: 0}", ["wants add, a number of layers, or drop: true"]),
        ("qwen3", "{add: 1, drop: true}", ["wants add"]),
        ("gpt2", "{add: 1}", ["mtp_layers is 1", "--allow-inexact"]),
        ("mamba2", "{add: 1}", ["the last layer of the model is `mamba`"]),
    ],
)
def test_a_model_without_such_layers_is_refused(
    case: str, recipe: str, words: list[str], tiny_model: tiny.TinyModel, tmp_path: Path
) -> None:
    path, out = written(f"- mtp: {recipe}", tmp_path), tmp_path / "out"
    code = 4 if case == "gpt2" else 2
    refused(code, *words, args=("edit", tiny_model(case), out, "--recipe", path))
    assert not out.exists()
