"""`verify --adapter` passes weights with a merged adapter, and finds a wrong merge."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.adapters.peft import PeftAdapter
from mckpt.errors import SourceError
from mckpt.verification.verdict import Verdict
from tests.helpers import adapters, made_models, tiny
from tests.helpers.commands import good
from tests.helpers.tiny import TinyModel

pytestmark = [
    pytest.mark.judge,
    pytest.mark.newest,
    pytest.mark.usefixtures("forked_verify"),
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="PEFT is not installed"),
]

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    """A folder with a base, an adapter and the merged weights in Megatron's format."""
    base = tiny.tiny_random("llama", work / "base", num_hidden_layers=2)
    made = adapters.factors(adapters.modules(base, *MODULES), rank=5, shared=False)
    adapters.write(work / "adapter", made, r=5, lora_alpha=9)
    merge(work, work / "merged")
    return work


def merge(made: Path, out: Path) -> None:
    good("hf-to-megatron", made / "base", out, "--adapter", made / "adapter", "--merge")


def verify(made: Path, checkpoint: str, adapter: str = "adapter") -> Verdict:
    return mckpt.verify(
        made / "base", made / checkpoint, adapter=made / adapter, sequences=1, length=48
    )


def test_merged_weights_pass(made: Path) -> None:
    found = verify(made, "merged")
    assert found.verdict == "pass", found.reasons
    measured = found.facts["adapter"]
    assert measured["moved"] > 100 * measured["tolerance"]
    assert measured["rounding"] > 100 * measured["noise"]
    assert measured["apart"] < measured["tolerance"] / 2


def test_a_fault_of_the_merge_is_found(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is wrong on both sides that mckpt computes; transformers with PEFT finds it."""
    scale = PeftAdapter.scale
    monkeypatch.setattr(PeftAdapter, "scale", lambda *args: 1.05 * scale(*args))
    merge(made, made / "wrong")
    found = verify(made, "wrong")
    assert found.verdict == "fail"
    assert len(found.reasons) == 1 and "from those of transformers with PEFT" in found.reasons[0]


def test_a_tensor_that_peft_leaves_out_is_named(made: Path, work: Path) -> None:
    """PEFT adapts the modules that its configuration names, and says nothing of the others."""
    config = shutil.copytree(made / "adapter", work / "partial") / adapters.CONFIG
    config.write_text(config.read_text().replace('"v_proj"', '"o_proj"'))
    words = r"PEFT does not load them(.|\n)*v_proj.lora_A"
    with pytest.raises(SourceError, match=words):
        verify(made, "merged", "partial")


def test_the_stored_values_are_compared_without_peft(made: Path) -> None:
    args = ("verify", made / "base", made / "merged", "--level", "bytes")
    good(*args, "--adapter", made / "adapter")
    key = "model.layers.1.mlp.down_proj.lora_B.weight"
    tensors = load_file(made / "adapter" / adapters.WEIGHTS)
    tensors[adapters.PREFIX + key] = np.zeros_like(tensors[adapters.PREFIX + key])
    other = adapters.write(made / "other", tensors, r=5, lora_alpha=9)
    found = mckpt.verify(made / "base", made / "merged", level="bytes", adapter=other)
    assert found.verdict == "fail"
    assert [r.partition(":")[0] for r in found.reasons] == ["layers.1.mlp.down.weight"]


# An adapter alone, which Megatron-Core runs beside the weights: the model, the modules, the layout,
# the format, and the sizes of the files and of the run
ALONE: dict[str, tuple[str, tuple[str, ...], str, str, dict[str, int], dict[str, int]]] = {
    "tp": ("llama", (*ATTENTION, *MLP), "fused", "torch_dist", {"tp": 2}, {"tp": 2}),
    "stages": ("qwen3", ("o_proj", "down_proj"), "fused", "torch_dist", {}, {"pp": 2}),
    "block": ("llama", (*ATTENTION, *MLP), "block", "torch_dist", {}, {}),
    "canonical": ("llama", ("q_proj", "v_proj", "up_proj"), "canonical", "torch", {}, {"tp": 2}),
    "experts": ("qwen3-moe", (*ATTENTION, *MLP), "fused", "torch_dist", {}, {"tp": 2, "ep": 2}),
    "latent": ("deepseek-v3", (*LATENT, *MLP), "fused", "torch", {"pp": 2}, {"tp": 2}),
    "linear attention": (
        "qwen3_5",
        (*LINEAR, *ATTENTION, *MLP),
        "fused",
        "torch_dist",
        {"tp": 2},
        {"tp": 2},
    ),
    "dora": ("llama", (*ATTENTION, *MLP), "fused", "torch_dist", {}, {}),
}


# half of a minute each, by mechanisms that the other cases have too
SLOW = ("tp", "stages", "block", "canonical", "latent", "linear attention")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in ALONE],
)
def test_an_adapter_alone_passes(case: str, work: Path, tiny_model: TinyModel) -> None:
    model, ends, layout, form, saved, sizes = ALONE[case]
    if model in made_models.CASES and VERSION < (0, 18):
        pytest.skip(f"megatron-core {version('megatron-core')} has no gated delta nets")
    base = tiny_model(model, "float32" if model in made_models.CASES else "bfloat16")
    adapter, out = work / f"{case}.peft", work / f"{case}.megatron"
    layers = made_models.text(made_models.config(model))["num_hidden_layers"]
    shapes = adapters.modules(base, *ends)
    shapes = {m: shape for m, shape in shapes.items() if int(m.split(".")[2]) < layers}
    made = adapters.factors(shapes, shared=layout == "fused")
    if case == "dora":
        made = adapters.magnitudes(base, made)
    adapters.write(adapter, made, use_dora=case == "dora")
    options = [word for name, size in saved.items() for word in (f"--{name}", size)]
    layouts = ("--layout", layout, "--format", form, "--dialect", "gpt", *options)
    good("adapter", "to-megatron", adapter, base, out, *layouts)
    if case == "latent":  # under target_parameters, PEFT loads the modules of dense layers too
        adapter = work / "loads"
        good("adapter", "to-hf", out, adapter)
    found = mckpt.verify(base, out, adapter=adapter, sequences=2, length=64, **sizes)
    assert found.verdict == "pass", found.reasons
    assert found.facts["logits"]["float32"]["below"] > 3
    assert found.facts["values"]["tensors_equal"] > 20
    measured = found.facts["adapter"]
    assert measured["moved"] > 10 * measured["tolerance"]


@pytest.mark.parametrize("level", ["forward", "bytes"])
def test_a_changed_factor_of_an_adapter_alone_is_found(level: Any, made: Path) -> None:
    key = adapters.PREFIX + "model.layers.1.mlp.down_proj.lora_B.weight"
    tensors = load_file(made / "adapter" / adapters.WEIGHTS)
    tensors[key][3, 1] *= 2
    changed = adapters.write(made / f"{level}.changed", tensors, r=5, lora_alpha=9)
    out = made / f"{level}.alone"
    good("adapter", "to-megatron", changed, made / "base", out, "--layout", "block")
    found = mckpt.verify(
        made / "base", out, adapter=made / "adapter", level=level, sequences=1, length=48
    )
    assert found.verdict == "fail"
    assert found.reasons[0].startswith("layers.1.mlp.down.weight")
    assert any(reason.startswith("logits differ") for reason in found.reasons) == (
        level == "forward"
    )


def test_an_adapter_alone_needs_an_adapter_of_peft(made: Path) -> None:
    good(
        "adapter",
        "to-megatron",
        made / "adapter",
        made / "base",
        made / "alone",
        "--layout",
        "block",
    )
    with pytest.raises(SourceError, match=r"verify.*--adapter"):
        mckpt.verify(made / "base", made / "alone", level="bytes")
