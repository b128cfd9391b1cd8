"""`mckpt verify --contract`: a result that is not that of its edits is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.editing import layers, steps, vocabulary
from mckpt.values import summing
from tests.formats.test_edit import Tensors, written
from tests.formats.test_merge import noisy
from tests.helpers import tiny
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as run

SOURCE = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3"
RECIPE = "- layers: {{silent_after: [0]}}\n- kv_heads: {{times: 2}}\n- vocab: {{map: {}}}\n"


def edited(directory: Path, recipe: str = RECIPE) -> Path:
    """Returns the result of edits that move rows and layers."""
    ids = {str(n + n // 50): old for n, old in enumerate(reversed(range(20, 271)))}
    (directory / "ids.json").write_text(json.dumps(ids))
    recipe = recipe.format(directory / "ids.json")
    good("edit", SOURCE, directory / "out", "--recipe", written(recipe, directory))
    return directory / "out"


def swapped(tensors: Tensors, first: str, second: str) -> None:
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def one_bit(tensors: Tensors) -> None:
    tensors["model.norm.weight"].view("u1")[0] ^= 1


def a_row(tensors: Tensors) -> None:
    rows = tensors["lm_head.weight"]
    rows[7], rows[8] = rows[8].copy(), rows[7].copy()


def a_new_row(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][50] = 0


def a_silent_layer(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name.replace("1", "2")]


FAULTS: list[tuple[Callable[[Tensors], None], str]] = [
    (one_bit, "final_norm.weight: 1 element differs"),
    (a_row, "lm_head.weight"),
    (a_new_row, "embed.weight"),
    (a_silent_layer, "layers.1.mlp.down.weight"),
    (lambda tensors: swapped(tensors, "layers.2.", "layers.3."), "layers.2.attn.q.weight"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_wrong_value_of_the_result_is_found(
    fault: Callable[[Tensors], None], words: str, tmp_path: Path
) -> None:
    out = edited(tmp_path)
    good("verify", SOURCE, out, "--contract", "--level", "bytes")
    path = out / "model.safetensors"
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    fault(tensors)
    save_file(tensors, path, {"format": "pt"})
    said = run("verify", SOURCE, out, "--contract", "--level", "bytes")
    assert said.code == 1 and words in said.out and "FAIL" in said.out, said.out


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_the_logits_of_kept_tokens_are_compared(tmp_path: Path) -> None:
    out = edited(tmp_path)
    dist, megatron = tmp_path / "dist", tmp_path / "megatron"
    mckpt.convert(SOURCE, dist, tp=2)
    good("edit", dist, megatron, "--recipe", tmp_path / "recipe.yaml", "--tp", 1)
    for source, result in ((SOURCE, out), (dist, megatron)):
        said = good("verify", source, result, "--contract", "--length", 32, "--sequences", 2)
        assert "logits of 251 tokens, in float32: max 0, tolerance" in said.out, said.out
    # an edit that says that it keeps them, and does not
    manifest = json.loads((out / "mckpt.json").read_text())
    (tmp_path / "other").mkdir()
    other = edited(tmp_path / "other", "- layers: {{order: [0, 0, 1, 2, 3]}}\n")
    said = good("verify", SOURCE, other, "--contract", "--length", 32)
    assert "the edits do not keep them" in said.out and manifest["edits"]


def test_a_moment_that_was_not_moved_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "source")
    count = mckpt.open(source).dims["vocab_size"]
    (tmp_path / "ids.json").write_text(json.dumps({n: (n + 3) % count for n in range(count)}))
    recipe = f"- vocab: {{map: {tmp_path / 'ids.json'}}}\n- layers: {{order: [1, 0, 1]}}\n"
    args = "--recipe", written(recipe, tmp_path), "--format", "torch", "--target-tp", 1
    good("edit", source, tmp_path / "out", *args)
    good("verify", source, tmp_path / "out", "--contract", "--level", "bytes")
    with monkeypatch.context() as patch:
        rows = re.compile(r"(embed|lm_head)\.(weight|bias)(@master)?")
        patch.setattr(vocabulary, "ROWS", rows)
        good("edit", source, tmp_path / "wrong", *args)
    said = run("verify", source, tmp_path / "wrong", "--contract", "--level", "bytes")
    assert said.code == 1, said.out
    assert "embed.weight@exp_avg: " in said.out and "embed.weight: " not in said.out


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_an_edit_that_changes_logits_and_should_not_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of the edit, which is wrong itself: silent layers are not silent."""
    monkeypatch.setattr(layers, "OUTPUTS", re.compile(r"layers\.\{layer\}\.attn\.o\.weight"))
    out = edited(tmp_path, "- layers: {{silent_after: [1]}}\n")
    good("verify", SOURCE, out, "--contract", "--level", "bytes")
    said = run("verify", SOURCE, out, "--contract", "--length", 32)
    assert said.code == 1 and "the edits should keep them" in said.out, said.out


def test_a_checkpoint_without_a_contract_is_refused(tmp_path: Path) -> None:
    good("hf-to-megatron", SOURCE, tmp_path / "dist")
    args = ("verify", SOURCE, tmp_path / "dist", "--contract")
    refused(2, "has no edits, so `mckpt edit` did not write it", args=args)
    refused(2, "--tp has no effect", args=(*args, "--tp", 2))


def flipped(path: Path, name: str) -> None:
    tensors = {key: tensor.copy() for key, tensor in load_file(path).items()}
    tensors[name].view("u1").reshape(-1)[0] ^= 1
    save_file(tensors, path, {"format": "pt"})


def exchanged(path: Path, name: str) -> None:
    tensors = {key: tensor.copy() for key, tensor in load_file(path).items()}
    swapped(tensors, "layers.1.mlp.gate", "layers.1.mlp.up")
    save_file(tensors, path, {"format": "pt"})


TAKEN, KEPT = "model.layers.1.mlp.gate_proj.weight", "model.layers.2.mlp.gate_proj.weight"


@pytest.mark.parametrize(("fault", "name"), [(flipped, TAKEN), (flipped, KEPT), (exchanged, TAKEN)])
def test_a_wrong_value_of_a_graft_is_found(
    fault: Callable[[Path, str], None], name: str, tmp_path: Path
) -> None:
    one, two = (noisy(SOURCE, tmp_path / f"{seed}", seed) for seed in (1, 2))
    other = tmp_path / "other"
    mckpt.convert(one, other, tp=2)
    out = edited(tmp_path, f"- graft: {{{{from: {other}, take: layers.0-1}}}}\n")
    args = ("verify", SOURCE, out, "--contract", "--level", "bytes")
    said = good(*args, "--with", other)
    assert "47 logical tensors are equal" in said.out
    refused(2, "give it with --with", args=args)
    refused(2, "take nothing from it", args=(*args, "--with", other, "--with", two))
    refused(2, "or has changed since", args=(*args, "--with", two))
    fault(out / "model.safetensors", name)
    said = run(*args, "--with", other)
    logical = name.removeprefix("model.").replace("_proj", "")
    assert said.code == 1 and f"{logical}: " in said.out, said.out
    assert ("1 element differs" in said.out) is (fault is flipped)


MERGES = {
    "sum": ("--weights", "0.3,0.6,-0.1"),
    "average": (),
    "linear": ("--method", "linear", "--weights", "1,2,4"),
    "ties": ("--method", "ties", "--parameters", "density=0.5"),
    "slerp": ("--method", "nuslerp", "--weights", "1,2"),
}


@pytest.mark.parametrize("method", MERGES)
def test_a_wrong_value_of_a_merge_is_found(method: str, tmp_path: Path) -> None:
    others = [noisy(SOURCE, tmp_path / f"{seed}", seed) for seed in (1, 2)]
    mckpt.convert(others[0], tmp_path / "dist", tp=2)
    others[0] = tmp_path / "dist"
    out, with_ = tmp_path / "out", [word for one in others for word in ("--with", one)]
    good("merge", SOURCE, *others, out, *MERGES[method])
    args = ("verify", SOURCE, out, "--contract")
    words = good(*args, *with_).out
    exact = method in ("sum", "average", "linear")
    assert ("computed again by other code" in words) is exact
    assert ("not the formula" in words) is not exact
    refused(2, "was made of 3 checkpoints, and 2 are given", args=(*args, *with_[:2]))
    refused(2, "or has changed since", args=(*args, *with_[2:], *with_[:2]))
    for fault in (flipped, exchanged):
        good("merge", SOURCE, *others, out, *MERGES[method], "--overwrite")
        fault(out / "model.safetensors", TAKEN)
        said = run(*args, *with_)
        assert said.code == 1 and "layers.1.mlp.gate.weight: " in said.out, said.out
        assert ("gate.weight: is not the sum" in said.out) is exact
    good("merge", SOURCE, *others, out, *MERGES[method], "--overwrite")
    manifest = json.loads((out / "mckpt.json").read_text())
    for one in manifest["average"]["inputs"][1:]:
        if "coefficient" in one:
            one["coefficient"] = (float.fromhex(one["coefficient"]) + 2**-10).hex()
        one["weight"] = one.get("weight", 1) * 1.01 + 0.01 * (
            one is manifest["average"]["inputs"][1]
        )
    (out / "mckpt.json").write_text(json.dumps(manifest))
    said = run(*args, *with_)
    assert said.code == 1 and "layers.1.mlp.gate.weight: " in said.out, said.out


def test_the_merge_of_a_run_and_its_masters_is_verified(tmp_path: Path) -> None:
    source = tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "source")
    for summed in ("weights", "masters", "states"):
        good("merge", source, source, tmp_path / summed, "--weights", "0.3,0.6", "--from", summed)
        args = ("verify", source, tmp_path / summed, "--contract", "--with", source)
        assert "computed again by other code" in good(*args).out


def test_a_sum_that_the_code_of_the_merge_computes_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = noisy(SOURCE, tmp_path / "1", 1), summing.total_of

    def wrong(*of: Any) -> np.ndarray:
        return np.nextafter(real(*of), np.float32(np.inf))

    good("merge", SOURCE, other, tmp_path / "right", "--weights", "0.3,0.6", "--dtype", "fp32")
    args = ("--contract", "--with", other)
    good("verify", SOURCE, tmp_path / "right", *args)
    good("merge", SOURCE, other, tmp_path / "slerp", "--method", "nuslerp", "--dtype", "fp32")
    said = run("verify", SOURCE, tmp_path / "slerp", *args)
    assert said.code == 1 and "INCOMPLETE" in said.out and "another dtype" in said.out, said.out
    monkeypatch.setattr(summing, "total_of", wrong)
    good("merge", SOURCE, other, tmp_path / "wrong", "--weights", "0.3,0.6", "--dtype", "fp32")
    said = run("verify", SOURCE, tmp_path / "wrong", *args)
    assert said.code == 1 and "embed.weight: is not the sum" in said.out, said.out


STEPS = {
    "layers": "{silent_after: [1, 1]}",
    "untie": "{}",
    "tie": "{}",
    "kv_heads": "{times: 2}",
    "kv_heads ": "{mean: 2}",
    "vocab": "{size: 500, init: normal, seed: 4}",
    "mtp": "{add: 1}",
    "upcycle": "{experts: 4, topk: 2, granularity: 2}",
    "prune": "{ffn: 0-5}",
    "hybrid": '{pattern: "M*-*-*-*-*-*-", mamba_num_groups: 2, mamba_num_heads: 4}',
}


def test_each_edit_but_the_graft_can_be_done_again() -> None:
    assert {name.strip() for name in STEPS} == steps.EDITS.keys() - {"graft"}


@pytest.mark.parametrize("name", STEPS)
def test_the_manifest_has_each_edit_as_data(name: str, tmp_path: Path) -> None:
    case = "qwen3" if name == "tie" else "qwen3-tied"
    source = mckpt.open(tiny.tiny_random(case, tmp_path / "source"))
    recipe = written(f"- {name}: {STEPS[name]}\n", tmp_path)
    (edit,) = steps.read(recipe, source.dims)
    data = json.loads(json.dumps({type(edit).__name__: edit.data}))
    assert steps.again([data], source, source.dims) == [edit]
