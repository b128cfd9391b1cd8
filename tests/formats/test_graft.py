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
        assert re.fullmatch(r"Graft\(take='mtp', digest='[0-9a-f]{64}'\)", edit)
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
        ("{from: NARROW, take: layers.1}", ["ffn_size: 80, and 96 in SRC", "of the same model"]),
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
