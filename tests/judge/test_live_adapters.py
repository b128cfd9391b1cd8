"""A live model whose modules are wrapped by adapters (LoRA) is filled, and gives its tensors, as
the conversions of its checkpoint do.

The wrappers are those of tests/helpers/lora_wrapper.py, and those of Megatron-Bridge itself if
MEGATRON_BRIDGE_PYTHON is the Python of an environment with it (CONTRIBUTING.md).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from tests.helpers import lora
from tests.helpers.judging import ask, explain, judge
from tests.helpers.tiny import TinyModel
from tests.judge.test_live import expect_files

pytestmark = [pytest.mark.judge, pytest.mark.newest]

WORLD = 4
LORA = {"kind": "lora", "dim": 4, "alpha": 8}
# the model, the sizes, and how it is wrapped
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {"tp": 2, "pp": 2}, LORA),
    "canonical": ("llama", {"tp": 2, "pp": 2, "vpp": 2}, {**LORA, "kind": "canonical"}),
    "attention": ("qwen3", {"tp": 2}, {**LORA, "target_modules": ["linear_qkv", "linear_proj"]}),
    "experts": ("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, LORA),
    "stages": ("qwen3-moe", {"pp": 2, "ep": 2}, LORA),
}


# adapters of PEFT that fit the case "attention": modules, rank, alpha. Their factors A differ.
PEFT: dict[str, tuple[tuple[str, ...], int, int]] = {
    "all": (("q_proj", "k_proj", "v_proj", "o_proj"), 1, 2),
    "some": (("q_proj", "v_proj", "o_proj"), 2, 4),
}
UNFIT: dict[str, tuple[tuple[str, ...], int, int]] = {
    "large": (("q_proj", "v_proj", "o_proj"), 4, 8),
    "scaled": (("q_proj", "v_proj", "o_proj"), 2, 8),
    "lacking": (("q_proj", "v_proj"), 2, 4),
    "homeless": (("q_proj", "v_proj", "o_proj", "up_proj"), 2, 4),
}
# with the classes of Megatron-Bridge, and the linears and grouped experts of Transformer Engine
BRIDGE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {"tp": 2, "pp": 2}, LORA),
    "canonical": ("llama", {"tp": 2, "pp": 2}, {**LORA, "kind": "canonical"}),
    "one adapter for all experts": ("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, LORA),
    "experts": (
        "qwen3-moe",
        {"tp": 2, "ep": 2, "etp": 1},
        {**LORA, "share_expert_adapters": False},
    ),
    "dora": ("llama", {"pp": 2}, {**LORA, "kind": "dora"}),
}
PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")


def peft(base: Path, directory: Path, modules: tuple[str, ...], rank: int, alpha: int) -> Path:
    """Writes an adapter of PEFT whose products float32 holds exactly."""
    weights, drawn = lora.tensors(base), np.random.RandomState(rank)
    stored = lora.factors(weights, [m for m in lora.matrices(weights) if m.endswith(modules)], rank)
    exact = {k: drawn.randint(-8, 9, v.shape).astype("f4") / 64 for k, v in stored.items()}
    return lora.save(directory, exact, r=rank, lora_alpha=alpha)


def live(
    source: Path,
    saved: Path,
    sizes: dict[str, Any],
    wrapped: dict[str, Any],
    impl: str = "local",
    **more: Any,
) -> dict[str, Any]:
    """Returns the case of a live model with adapters, which megatron-core saves in `saved`."""
    converted = saved / "dist"
    mckpt.convert(source, converted, transformer_impl=impl, allow_inexact=["rope_factor"])
    given = {"kind": "live", "checkpoint": converted, "like": source, "loads": [[source, {}]]}
    return given | {"saved": saved, "lora": wrapped, "impl": impl, "world": WORLD, **sizes, **more}


# "dense" has the sizes and kinds of the others
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "dense")) for c in CASES]
)
def test_a_wrapped_model_goes_the_way_of_files(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Its saves too. All ranks refuse an adapter that one rank has."""
    model, sizes, wrapped = CASES[case]
    result = ask(**live(tiny_model(model), tmp_path, sizes, wrapped))
    assert not any(result["wrong"].values()), result["wrong"]
    assert "merge the adapters into the model first" in result["nvfp4"]
    expect_saved(tmp_path)
    (alpha, unknown), *others = result["errors"]
    assert "must have one alpha" in alpha
    assert "adapter.linear_mid.weight: belongs to an adapter of a kind" in unknown
    assert all(other == [alpha, unknown] for other in others)


def test_a_model_loads_the_adapters_that_fit_and_refuses_others(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, sizes, wrapped = CASES["attention"]
    base, made = tiny_model(model), []
    for name, given in PEFT.items():
        adapter, merged = peft(base, tmp_path / name, *given), tmp_path / f"{name} merged"
        mckpt.convert(mckpt.open(base, adapter=adapter), merged, format="hf")
        made.append([adapter, merged])
    unfit = [peft(base, tmp_path / name, *given) for name, given in UNFIT.items()]
    case = live(base, tmp_path / "live", sizes, wrapped, adapters=made, refused=unfit)
    result = ask(**case)
    assert not any(result["wrong"].values()), result["wrong"]
    said = (
        "adapters of the rank 8, and those of the model have the rank 4",
        "multiplied by 4 (alpha / r), and those of the model's adapters by 2",
        "has no factors for some adapters of the model:\n  - layers.0.attn.o.weight",
        "the adapter changes weights that have no adapter in Megatron",
    )
    for words, refused in zip(said, result["refused"], strict=True):
        assert words in refused


def expect_saved(directory: Path) -> None:
    """Fails unless a case saved what the conversions of files write."""
    for choice in ("merged", "none", "only"):
        expect_files(directory / f"live-{choice}", directory / choice)


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
)
@pytest.mark.parametrize("case", BRIDGE)
def test_a_model_that_megatron_bridge_wraps_goes_the_way_of_files(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, sizes, wrapped = BRIDGE[case]
    source, bridge = tiny_model(model), wrapped | {"bridge": True}
    job = live(source, tmp_path / "saved", sizes, bridge, impl="transformer_engine")
    (result,) = judge([job], tmp_path / "ran", te=True, python=PYTHON).values()
    assert result["ok"], explain(result)
    assert not any(result["wrong"].values()), result["wrong"]
    expect_saved(tmp_path / "saved")
    assert [("are DoRA" in said) for said in result["refused"]] == [True] * (case == "dora")
