"""Models without some experts, units, heads or hidden elements: each element beside numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.editing import pruning, steps
from mckpt.editing.edits import edited
from mckpt.editing.pruning import Prune
from tests.formats.test_edit import Tensors, made, same, written
from tests.helpers import tiny
from tests.helpers.commands import good, refused

Kept = Mapping[int, list[int]]  # layer -> indices
LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.")
ROUTER = re.compile(r"\.(gate|router)\.(weight|bias|e_score_correction_bias)$")
STACKED = re.compile(r"\.experts\.(gate_up|down)_proj(_bias)?$")  # of gpt_oss
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


def layer_of(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else -1


def without_experts(own: Tensors, kept: Kept) -> Tensors:
    out: Tensors = {}
    for name, tensor in own.items():
        indices, found = kept.get(layer_of(name), []), EXPERT.fullmatch(name)
        if found and int(found[2]) in indices:
            out[f"{found[1]}{indices.index(int(found[2]))}{found[3]}"] = tensor
        elif ROUTER.search(name) or STACKED.search(name):
            out[name] = tensor[indices]
        elif not found:
            out[name] = tensor
    return out


def without_units(own: Tensors, kept: Kept) -> Tensors:
    out = dict(own)
    for name, tensor in own.items():
        if re.search(r"(mlp|feed_forward)\.(gate|up)_proj\.(weight|bias)$", name):
            out[name] = tensor[kept[layer_of(name)]]
        elif re.search(r"(mlp|feed_forward)\.down_proj\.weight$", name):
            out[name] = tensor[:, kept[layer_of(name)]]
    return out


def without_units_of_experts(own: Tensors, kept: Kept) -> Tensors:
    out = dict(own)
    for name, tensor in own.items():
        units = kept.get(layer_of(name), [])
        if re.search(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", name):
            out[name] = tensor[units]
        elif re.search(r"\.experts\.\d+\.(down_proj|w2)\.weight$", name):
            out[name] = tensor[:, units]
        elif re.search(r"\.experts\.gate_up_proj(_bias)?$", name):  # of gpt_oss, in turns
            out[name] = tensor[..., [2 * unit + half for unit in units for half in (0, 1)]]
        elif name.endswith(".experts.down_proj"):
            out[name] = tensor[:, units]
    return out


def without_heads(own: Tensors, kept: Kept, groups: int) -> Tensors:
    """groups: the number of heads of keys and values."""
    out = dict(own)
    for name, tensor in own.items():
        if re.search(r"attn\.([qkv]|q_b|kv_b)_proj\.(weight|bias)$", name):
            heads = tensor.reshape(groups, -1, *tensor.shape[1:])
            out[name] = heads[kept[layer_of(name)]].reshape(-1, *tensor.shape[1:])
        elif name.endswith("attn.sinks"):
            out[name] = tensor.reshape(groups, -1)[kept[layer_of(name)]].reshape(-1)
        elif re.search(r"attn\.o_proj\.weight$", name):
            heads = tensor.reshape(tensor.shape[0], groups, -1)
            out[name] = heads[:, kept[layer_of(name)]].reshape(tensor.shape[0], -1)
    return out


def without_hidden(own: Tensors, kept: list[int], width: int) -> Tensors:
    out = {}
    for name, tensor in own.items():
        for axis, size in enumerate(tensor.shape):
            if size == width:
                tensor = tensor.take(kept, axis)
            elif name.endswith("eh_proj.weight") and size == 2 * width:
                tensor = tensor.take([*kept, *(width + n for n in kept)], axis)
        out[name] = tensor
    return out


def drawn(count: int, size: int, seed: int) -> list[int]:
    """Returns `size` of the numbers below `count`, in no order."""
    found: list[int] = np.random.RandomState(seed).permutation(count)[:size].tolist()
    return found


def pruned(
    source: Path, directory: Path, given: dict[str, Any], expected: Tensors, **sizes: Any
) -> Path:
    """Returns the pruned Hugging Face directory, which must have these tensors, and compares it
    with a pruned Megatron checkpoint.
    """
    (directory / "decision.json").write_text(json.dumps(given))
    recipe = written(f"- prune: {directory / 'decision.json'}\n", directory)
    name = "-".join(given)
    out, dist, megatron = (directory / f"{name}-{end}" for end in ("hf", "dist", "megatron"))
    said = good("edit", source, out, "--recipe", recipe)
    assert "edited, kept: kept are " in said.err
    same(out, expected)
    mckpt.convert(source, dist, **sizes)
    good("edit", dist, megatron, "--recipe", recipe, "--tp", 1, "--pp", 2)
    assert not mckpt.diff(out, megatron)
    assert mckpt.check(megatron).verdict == "sound"
    return out


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3-tied", "bamba"])
def test_units_of_the_mlp_are_left_out(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    own, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    layers, units = range(dims["num_layers"]), dims["ffn_size"]
    kept = {layer: drawn(units, units // 2, layer) for layer in layers}
    expected = without_units(own, kept)
    assert len(expected) == len(own)
    out = pruned(source, tmp_path, {"ffn": kept}, expected, tp=2, pp=1 if case == "bamba" else 2)
    assert json.loads((out / "config.json").read_text())["intermediate_size"] == units // 2
    assert mckpt.open(out).dims["ffn_size"] == units // 2


# dense; biases, and a width of heads that follows from other sizes; tied; experts; latent
# attention; a gate and gated delta nets; sinks
HEADS = ("llama", "qwen2", "qwen3-tied", "qwen3-moe", "deepseek-v3", "qwen3_next", "gpt_oss")


@pytest.mark.parametrize("case", HEADS)
def test_heads_are_left_out(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    own, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    groups = dims["num_query_groups"]
    layers = [n for n, linear in enumerate(dims["linear_layers"]) if not linear]
    kept = {layer: drawn(groups, groups // 2, layer) for layer in layers}
    experts = {"ep": 2, "etp": 1} if dims["num_experts"] else {}
    expected = without_heads(own, kept, groups)
    assert len(layers) >= 1 + dims["mtp_layers"]
    out = pruned(source, tmp_path, {"heads": kept}, expected, tp=2, pp=2, **experts)
    after = mckpt.open(out).dims
    assert after["num_query_groups"] == groups // 2
    assert after["num_heads"] == dims["num_heads"] // 2
    assert after["head_dim"] == dims["head_dim"]


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "deepseek-v3", "gpt_oss"])
def test_experts_are_left_out(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    own, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    count, groups = dims["num_experts"], dims["router_groups"]
    each = count // groups
    size = each // 2 + each // 2 % 2  # even, for ep 2
    kept: dict[int, list[int]] = {}
    for layer, has in enumerate(dims["moe_layers"]):
        if has:
            order = drawn(groups, groups, layer)
            kept[layer] = [each * g + n for g in order for n in drawn(each, size, layer + g)]
    expected = without_experts(own, kept)
    assert len(expected) < len(own) or case == "gpt_oss"
    out = pruned(source, tmp_path, {"experts": kept}, expected, tp=2, pp=2, ep=2, etp=1)
    assert mckpt.open(out).dims["num_experts"] == size * groups < count


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "gpt_oss"])
def test_units_of_experts_are_left_out(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    own, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    units = dims["expert_ffn_size"]
    layers = [n for n, has in enumerate(dims["moe_layers"]) if has]
    kept = {layer: drawn(units, units // 2, layer) for layer in layers}
    expected = without_units_of_experts(own, kept)
    out = pruned(source, tmp_path, {"expert_ffn": kept}, expected, tp=2, pp=2, ep=2, etp=1)
    assert mckpt.open(out).dims["expert_ffn_size"] == units // 2


def test_shared_experts_whose_width_is_stated_in_experts_keep_it(tmp_path: Path) -> None:
    """As the config of DeepSeek-V3 does: 64 units are 2 experts of 32, or 4 of 16."""
    source, out, dist = made("deepseek-v3", tmp_path), tmp_path / "out", tmp_path / "dist"
    mckpt.edit(source, out, ["prune: {expert_ffn: 0-15}"])
    assert json.loads((out / "config.json").read_text())["n_shared_experts"] == 4
    assert mckpt.open(out).dims["shared_ffn_size"] == 64
    mckpt.edit(source, dist, ["prune: {expert_ffn: 0-10}"], format="torch_dist")
    assert not (dist / "hf").exists()  # no config.json can have it
    assert mckpt.open(dist).dims["expert_ffn_size"] == 11 and mckpt.check(dist).verdict == "sound"
    recipe = written("- prune: {expert_ffn: 0-10}\n", tmp_path)
    given = ("edit", source, tmp_path / "no", "--recipe", recipe)
    refused(4, "shared_ffn_size is 64", args=given, untouched=tmp_path / "no")


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "qwen3-moe", "deepseek-v3", "qwen3_next"])
def test_the_residual_stream_is_narrower(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    own, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    width = dims["hidden_size"]
    kept = sorted(drawn(width, width // 2, 0))
    experts = {"ep": 2, "etp": 1} if dims["num_experts"] else {}
    expected = without_hidden(own, kept, width)
    out = pruned(source, tmp_path, {"hidden": kept}, expected, tp=2, **experts)
    after = mckpt.open(out).dims
    assert (after["hidden_size"], after["head_dim"]) == (width // 2, dims["head_dim"])


def states(directory: Path) -> Tensors:
    """Returns the logical tensors of a checkpoint, with the states of its optimizer."""
    found = mckpt.open(directory).with_optimizer()
    return {name: found[name][:].numpy() for name in found}


def test_the_optimizers_state_follows_experts(tmp_path: Path) -> None:
    source = tiny.unpack("muon/moe-tp2-ep2-by-layers", tmp_path / "source") / "torch_dist"
    dims, out = mckpt.open(source).dims, tmp_path / "out"
    layers = [n for n, has in enumerate(dims["moe_layers"]) if has]
    kept = {layer: [3, 0] if layer % 2 else [2, 1] for layer in layers}
    recipe = written(f"- prune: {{experts: {json.dumps(kept)}}}\n", tmp_path)
    mckpt.edit(source, out, recipe, format="torch_dist", tp=1, pp=1)
    before, after = states(source), states(out)
    seen: set[str] = set()
    for name, values in after.items():
        found = re.fullmatch(r"layers\.(\d+)\.moe\.(?:experts\.(\d+)\.|router\.)(.*)", name)
        wanted = before[name]
        if found and found[2]:
            old = kept[int(found[1])][int(found[2])]
            wanted = before[name.replace(f".experts.{found[2]}.", f".experts.{old}.")]
            seen.add(found[3])
        elif found:
            wanted = wanted[kept[int(found[1])]]
            seen.add(f"router.{found[3]}")
        assert values.tobytes() == np.ascontiguousarray(wanted).tobytes(), name
    assert {"down.weight", "router.weight"} < seen and any("@" in name for name in seen)
    assert mckpt.check(out).verdict == "sound"

    units = [2, 0, 5, 3]
    recipe = written(f"- prune: {{expert_ffn: {units}}}\n", tmp_path)
    mckpt.edit(source, tmp_path / "narrow", recipe, format="torch_dist", tp=1, pp=1)
    for name, values in states(tmp_path / "narrow").items():
        found = re.search(r"\.experts\.\d+\.(gate|up|down)\.", name)
        axis = {"gate": 0, "up": 0, "down": 1}[found[1]] if found else None
        wanted = before[name] if axis is None else before[name].take(units, axis)
        assert values.tobytes() == np.ascontiguousarray(wanted).tobytes(), name


def test_the_logits_of_experts_that_no_token_chose_are_the_same(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = tiny.tiny_random("deepseek-v3", tmp_path / "source", "float32")
    own = load_file(source / "model.safetensors")
    kept = [0, 3, 5, 6, 8, 9, 14, 15]  # 2 of each group of 4
    for name, tensor in own.items():
        if name.endswith("e_score_correction_bias"):
            tensor[[n for n in range(16) if n not in kept]] = -100
    tiny.write_weights(source, own)
    recipe, out = written(f"- prune: {{experts: {kept}}}", tmp_path), tmp_path / "out"
    good("edit", source, out, "--recipe", recipe)
    units = mckpt.open(source).dims["ffn_size"]
    order = written(f"- prune: {{ffn: {drawn(units, units, 0)}}}", tmp_path)
    good("edit", source, tmp_path / "units", "--recipe", order)
    tokens = torch.arange(40)[None] % 190
    with torch.no_grad():
        before, after, units_moved = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (source, out, tmp_path / "units")
        )
    # sums in another order: those of the router's matrix, which is smaller, and those of units
    assert (before - after).abs().max() < 1e-5
    assert (before - units_moved).abs().max() < 1e-5


def test_too_many_short_ranges_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both axes at once give the product of their ranges, and one after the other the sum."""
    monkeypatch.setattr(pruning, "MOST", 3_000_000)
    source, out = made("qwen3", tmp_path), tmp_path / "out"
    dims = mckpt.open(source).dims
    ffn = {"ffn": [*range(0, dims["ffn_size"], 2)]}
    hidden = {"hidden": [*range(0, dims["hidden_size"], 2)]}
    for number, what in enumerate([ffn | hidden, ffn, hidden]):
        (tmp_path / f"{number}.json").write_text(json.dumps(what))
    both, first, second = (f"prune: {tmp_path}/{number}.json" for number in range(3))
    refused(2, "prune one axis at a time", args=("edit", source, out, "--edit", both))
    assert not out.exists()
    good("edit", source, tmp_path / "half", "--edit", first)
    good("edit", tmp_path / "half", out, "--edit", second)
    monkeypatch.undo()
    good("edit", source, tmp_path / "both", "--edit", both)
    good("diff", tmp_path / "both", out)


def test_several_axes_at_once(tmp_path: Path) -> None:
    source = made("deepseek-v3", tmp_path)
    own = load_file(source / "model.safetensors")
    experts, units, heads = [4, 5, 0, 1, 10, 9, 15, 12], drawn(96, 40, 1), [6, 1, 2, 3]
    hidden = sorted(drawn(48, 32, 2))
    expected = without_experts(own, dict.fromkeys(range(1, 5), experts))
    expected = without_units(expected, {0: units})
    expected = without_heads(expected, dict.fromkeys(range(5), heads), 8)
    expected = without_hidden(expected, hidden, 48)
    given = {"experts": experts, "ffn": {"0": units}, "heads": heads, "hidden": hidden}
    out = pruned(source, tmp_path, given, expected, tp=2, pp=2, ep=2, etp=1)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 4)
    said = good("edit", source, tmp_path / "dry", "--recipe", tmp_path / "recipe.yaml", "--dry-run")
    for words in (
        "8 of 16 experts",
        "56 of 96 units",
        "4 of 8 heads",
        "16 of 48 elements of the residual",
    ):
        assert words in said.out, words
    plain = mckpt.open(source)
    (recorded,) = json.loads((out / "mckpt.json").read_text())["edits"]
    assert recorded["Prune"]["experts"] == "4-5,0-1,10-10,9-9,15-15,12-12"
    assert Prune.of(recorded["Prune"], plain.dims) == Prune.of(given, plain.dims)
    dropped = edited(plain, steps.read(tmp_path / "recipe.yaml", plain.dims)).layout.dropped
    left = {re.sub(r"layers\.\d+|(gate|up|down)\.weight", "", name) for name in dropped}
    assert {f".moe.experts.{n}." for n in range(16) if n not in experts} < left
    assert not {f".moe.experts.{n}." for n in experts} & left
    for name in (
        "ffn of layers.{layer}.mlp.down.weight",
        "hidden of layers.{layer}.mlp.down.weight",
    ):
        assert name in dropped


@pytest.mark.parametrize(
    ("case", "given", "words"),
    [
        ("qwen3", "{}", "wants indices of experts, ffn, expert_ffn, heads, hidden"),
        ("qwen3", "{depth: [1]}", "wants indices of"),
        ("qwen3", "missing.json", "No such file"),
        ("qwen3", "3", "wants its parameters"),
        ("qwen3", "{experts: [0]}", "experts: the layers of the model have none"),
        ("qwen3", "{ffn: []}", "are different ones from 0 to"),
        ("qwen3", "{ffn: [1, 1]}", "are different ones from 0 to"),
        ("qwen3", "{ffn: [0, 100000]}", "layer 0: the indices are different ones from 0 to"),
        ("qwen3", "{ffn: {0: [1], 1: [1]}}", "ffn: the layers with them are [0, 1, 2, 3"),
        ("qwen3", "{hidden: {0: [1]}}", "hidden is one list"),
        ("qwen3-moe", "{experts: [0-2]}", "3 experts: a token takes 5"),
        ("deepseek-v3", "{experts: [0-8]}", "9 experts are not 4 groups of one size"),
        (
            "deepseek-v3",
            "{experts: [0-2, 4, 8-9, 12-13]}",
            "[2, 4] are one group of 2, and were not",
        ),
    ],
)
def test_a_decision_that_cannot_be_applied_names_the_line(
    case: str, given: str, words: str, tmp_path: Path, tiny_model: tiny.TinyModel
) -> None:
    recipe, out = written(f"- prune: {given}", tmp_path), tmp_path / "out"
    source = tiny_model(case)
    refused(2, "recipe.yaml:1", words, args=("edit", source, out, "--recipe", recipe))
    assert not out.exists()
