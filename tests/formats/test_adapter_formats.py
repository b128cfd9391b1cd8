"""Adapters of Megatron-Bridge are read right, and those that mckpt writes are the same at any size.

fixtures/adapters/bridge.tar.xz has adapters that Megatron-Bridge 0.6.2 saved at tp 2 (and ep 2, of
DeepSeek-V3), and checksums of the factors that it exported to PEFT from the same models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from mckpt.containers import safe_pickle
from tests.helpers import lora
from tests.helpers.commands import Pt, edit_json, good, refused
from tests.helpers.tiny import FIXTURES, unpack

QWEN3, ADAPTER = FIXTURES / "tiny-qwen3", FIXTURES / "tiny-qwen3-lora"
# the case, the layout that its modules need, and the dialect in which Megatron-Bridge has the model
CASES = (("llama", "fused"), ("canon", "canonical"), ("q35", "fused"), ("ds", "fused"))
SIZES = (("--tp", 1), ("--tp", 2, "--pp", 2), ("--tp", 4))


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("adapters/bridge", tmp_path_factory.mktemp("bridge")) / "adapters"


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_an_adapter_of_megatron_bridge(
    case: str, layout: str, bridge: Path, tmp_path: Path
) -> None:
    place, peft = bridge / case, tmp_path / "peft"
    good("adapter", "to-hf", place / "bridge", peft, "--like", place / "hf")
    found = {
        key: hashlib.sha256(value.tobytes()).hexdigest()[:16]
        for key, value in lora.tensors(peft).items()
    }
    assert found == json.loads((place / "exported.json").read_text())
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    shown = good("adapter", "inspect", place / "bridge", "--like", place / "hf", "--json").json
    assert (shown["rank"], shown["alpha"], shown["base"]) == (4, 8, False)
    assert (shown["kind"] == "CanonicalLoRA") == (layout == "canonical")
    same = ("adapter", "reshard", place / "bridge", tmp_path / "there", "--like", place / "hf")
    for number, sizes in enumerate(SIZES):
        format = ("torch_dist", "torch")[number % 2]
        good(*same, "--target-format", format, *sizes, "--overwrite")
        good("adapter", "to-hf", tmp_path / "there", tmp_path / "back", "--like", place / "hf")
        assert lora.bytes_of(tmp_path / "back") == lora.bytes_of(peft)
        lora.remove(tmp_path / "back")


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
@pytest.mark.parametrize("layout", ["block", "canonical"])
def test_factors_that_differ_in_a_linear(layout: str, format: str, tmp_path: Path) -> None:
    merged = ("adapter", "merge", QWEN3)
    good(*merged, ADAPTER, tmp_path / "merged")
    for number, sizes in enumerate(SIZES[:2]):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        more = ("--layout", layout, "--format", format, *sizes)
        good("adapter", "to-megatron", ADAPTER, QWEN3, there, *more)
        good("adapter", "to-hf", there, back)
        good(*merged, back, tmp_path / f"merged{number}")
        good("diff", tmp_path / "merged", tmp_path / f"merged{number}")
        if layout == "canonical":
            assert lora.same(back, ADAPTER)


def test_a_rank_file_of_the_fused_layout(tmp_path: Path) -> None:
    """The rows of B are those of linear_qkv and linear_fc1; A is cut along its rank, or for a row
    of the base along its input.
    """
    import mckpt
    from mckpt.containers import torch_file

    weights = lora.tensors(QWEN3)
    parts = ("q_proj", "k_proj", "v_proj")
    modules = [f"model.layers.1.self_attn.{name}" for name in (*parts, "o_proj")]
    stored = lora.factors(weights, modules)
    for name in parts[1:]:
        key = f"{lora.PREFIX}model.layers.1.self_attn.{{}}.lora_A.weight"
        stored[key.format(name)] = stored[key.format("q_proj")]
    adapter = lora.save(tmp_path / "adapter", stored)
    mckpt.adapter_to_megatron(adapter, QWEN3, tmp_path / "torch", format="torch", tp=2)
    q, k, v, o = (stored[f"{lora.PREFIX}{module}.lora_B.weight"] for module in modules)
    a, row = (stored[f"{lora.PREFIX}{modules[i]}.lora_A.weight"] for i in (0, 3))
    groups = [np.concatenate([x.reshape(8, -1, 4)[group] for x in (q, k, v)]) for group in range(8)]
    wanted = {
        "linear_qkv.adapter.linear_in": np.split(a, 2),
        "linear_qkv.adapter.linear_out": np.split(np.concatenate(groups), 2),
        "linear_proj.adapter.linear_in": np.split(row, 2, 1),
        "linear_proj.adapter.linear_out": np.split(o, 2),
    }
    for rank in range(2):
        file = tmp_path / f"torch/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        with file.open("rb") as opened:
            value, data = torch_file.read(opened.fileno(), str(file))
        assert not [key for key in value["model"] if ".adapter." not in key]
        for name, shards in wanted.items():
            view = safe_pickle.as_tensor(
                value["model"][f"decoder.layers.1.self_attention.{name}.weight"]
            )
            assert view is not None
            at, nbytes = data[view.storage][0], shards[rank].nbytes
            there = np.frombuffer(file.read_bytes()[at : at + nbytes], "f4").reshape(view.shape)
            assert np.array_equal(there, shards[rank]), name
            empty = value["model"][f"decoder.layers.0.self_attention.{name}.weight"]
            assert safe_pickle.as_tensor(empty) is not None


def test_adapters_that_megatron_cannot_hold(tmp_path: Path) -> None:
    convert = ("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "there")
    refused(2, "Give --layout canonical", "--layout block", args=convert, untouched=convert[-1])
    refused(
        2,
        "is not divisible by tp 4",
        args=(*convert, "--layout", "canonical", "--tp", 4),
        untouched=convert[-1],
    )
    weights = lora.tensors(QWEN3)
    up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
    stored = lora.factors(weights, [up, down])
    other = lora.save(tmp_path / "a", stored, alpha_pattern={"up_proj": 3})
    refused(2, "different scales", args=("adapter", "to-megatron", other, QWEN3, convert[-1]))
    stored = lora.factors(weights, [up]) | {"lm_head.weight": weights["lm_head.weight"]}
    other = lora.save(tmp_path / "b", stored)
    refused(2, "whole tensors", args=("adapter", "to-megatron", other, QWEN3, convert[-1]))


def test_alpha_is_never_guessed(bridge: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    more = ("--layout", "block", "--format", "torch")
    good("adapter", "to-megatron", ADAPTER, QWEN3, there, *more)
    edit_json(there / "release/mckpt.json", lambda manifest: manifest.pop("adapter"))
    refused(2, "give --alpha", args=("adapter", "to-hf", there, tmp_path / "peft"))
    good("adapter", "to-hf", there, tmp_path / "peft", "--alpha", 5)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (6, 5)


def test_adapters_of_megatron_are_merged(tmp_path: Path) -> None:
    there, merged = tmp_path / "there", tmp_path / "merged"
    good("adapter", "to-megatron", ADAPTER, QWEN3, there, "--layout", "canonical", "--tp", 2)
    good("adapter", "merge", QWEN3, ADAPTER, merged)
    good("hf-to-megatron", QWEN3, tmp_path / "base", "--pp", 2)
    good("adapter", "merge", QWEN3, there, tmp_path / "a")
    good("adapter", "merge", tmp_path / "base", there, tmp_path / "b")
    for other in ("a", "b"):
        good("diff", merged, tmp_path / other)
    good("megatron-to-hf", there, tmp_path / "peft")
    assert lora.same(tmp_path / "peft", ADAPTER)
    alone = ("megatron-to-hf", there, tmp_path / "c", "--merge")
    refused(2, "without the weights", "mckpt adapter merge BASE", args=alone)
    without = ("megatron-to-hf", tmp_path / "base", tmp_path / "c", "--merge")
    refused(2, "has no adapters", args=without)


def test_weights_beside_their_adapters(tmp_path: Path) -> None:
    """As a trainer that wraps its modules saves them: the whole model under the names in memory."""
    torch = ("--format", "torch")
    good("hf-to-megatron", QWEN3, tmp_path / "base", *torch)
    factors = ("--layout", "block", *torch)
    good("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "adapter", *factors)
    own, other = (
        Pt(tmp_path / f"{name}/release/mp_rank_00/model_optim_rng.pt")
        for name in ("base", "adapter")
    )
    model = own.value["model"]
    for key, record in other.value["model"].items():
        view = safe_pickle.as_tensor(record)
        assert view is not None
        stem = key.partition(".adapter.")[0]
        model[key] = own.put("bfloat16", view.shape, other.data[view.storage])
        if f"{stem}.weight" in model:
            model[f"{stem}.to_wrap.weight"] = model.pop(f"{stem}.weight")
    own.save()
    (tmp_path / "base/release/mckpt.json").unlink()
    refused(2, "give --alpha", args=("megatron-to-hf", tmp_path / "base", tmp_path / "c"))
    # the rank is 6, and the scale of the adapter 2
    good("megatron-to-hf", tmp_path / "base", tmp_path / "whole", "--merge", "--alpha", 12)
    good("adapter", "merge", QWEN3, ADAPTER, tmp_path / "merged")
    good("diff", tmp_path / "merged", tmp_path / "whole")
