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
from tests.helpers.judging import explain, judge
from tests.helpers.tiny import TinyModel

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


@pytest.fixture(scope="module")
def ran(work: Path, tiny_model: TinyModel) -> dict[str, dict[str, Any]]:
    """The results of every case, all from one launch."""
    cases = cases_of(CASES, "local", work, tiny_model)
    base, attention = tiny_model("qwen3"), next(c for c in cases if c["name"] == "attention")
    attention["adapters"], attention["refused"] = [], []
    for name, (modules, rank, alpha) in PEFT.items():
        adapter = peft(base, work / "peft" / name, modules, rank, alpha)
        attention["adapters"].append([str(adapter), str(work / "peft" / f"{name} merged")])
        mckpt.convert(mckpt.open(base, adapter=adapter), attention["adapters"][-1][1], format="hf")
    for name, (modules, rank, alpha) in UNFIT.items():
        attention["refused"].append(str(peft(base, work / "peft" / name, modules, rank, alpha)))
    return judge(cases, WORLD, work / "live", timeout=900)


def peft(base: Path, directory: Path, modules: tuple[str, ...], rank: int, alpha: int) -> Path:
    """Writes an adapter of PEFT whose products float32 holds exactly."""
    weights, drawn = lora.tensors(base), np.random.RandomState(rank)
    stored = lora.factors(weights, [m for m in lora.matrices(weights) if m.endswith(modules)], rank)
    exact = {k: drawn.randint(-8, 9, v.shape).astype("f4") / 64 for k, v in stored.items()}
    return lora.save(directory, exact, r=rank, lora_alpha=alpha)


@pytest.fixture(scope="module")
def with_bridge(work: Path, tiny_model: TinyModel) -> dict[str, dict[str, Any]]:
    """The same for BRIDGE."""
    cases = cases_of(BRIDGE, "transformer_engine", work / "bridge", tiny_model)
    for case in cases:
        case["lora"]["bridge"] = True
    given: dict[str, Any] = {"fake_te": True, "python": PYTHON, "timeout": 900}
    return judge(cases, WORLD, work / "bridge" / "live", **given)


def cases_of(
    named: dict[str, tuple[str, dict[str, Any], dict[str, Any]]],
    impl: str,
    work: Path,
    tiny_model: TinyModel,
) -> list[dict[str, Any]]:
    """Returns the cases of live models for tests/helpers/judge.py."""
    cases: list[dict[str, Any]] = []
    options: dict[str, Any] = {"transformer_impl": impl, "allow_inexact": ["rope_factor"]}
    for name, (model, sizes, wrapped) in named.items():
        source, converted = tiny_model(model), work / "dist" / model
        if not converted.exists():
            mckpt.convert(source, converted, **options)
        cases.append(
            {
                "name": name,
                "kind": "live",
                "checkpoint": str(converted),
                "like": str(source),
                "loads": [[str(source), {}]],
                "saved": str(work / name),
                "lora": dict(wrapped),
                "impl": impl,
                "world": WORLD,
                **sizes,
            }
        )
    return cases


@pytest.mark.parametrize("case", CASES)
def test_a_wrapped_model_goes_the_way_of_files(case: str, ran: dict[str, dict[str, Any]]) -> None:
    assert ran[case]["ok"], explain(ran[case])
    assert not any(ran[case]["wrong"].values()), ran[case]["wrong"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "adapters of the rank 8, and those of the model have the rank 4"),
        (1, "multiplied by 4 (alpha / r), and those of the model's adapters by 2"),
        (2, "has no factors for some adapters of the model:\n  - layers.0.attn.o.weight"),
        (3, "the adapter changes weights that have no adapter in Megatron"),
    ],
)
def test_an_adapter_that_the_model_cannot_have_is_refused(
    number: int, said: str, ran: dict[str, dict[str, Any]]
) -> None:
    assert ran["attention"]["ok"], explain(ran["attention"])
    assert said in ran["attention"]["refused"][number]


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_is_that_of_files(
    case: str, work: Path, ran: dict[str, dict[str, Any]]
) -> None:
    assert ran[case]["ok"], explain(ran[case])
    expect_saved(work / case)


def expect_saved(directory: Path) -> None:
    """Fails unless a case saved what the conversions of files write."""
    for choice in ("merged", "none", "only"):
        wanted, saved = directory / choice, directory / f"live-{choice}"
        files = sorted(path.name for path in wanted.iterdir())
        assert files == sorted(path.name for path in saved.iterdir())
        for file in files:
            if file != "mckpt.json":  # it describes the source
                assert (saved / file).read_bytes() == (wanted / file).read_bytes(), file


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_refuse_an_adapter_that_one_rank_has(
    case: str, ran: dict[str, dict[str, Any]]
) -> None:
    assert ran[case]["ok"], explain(ran[case])
    (alpha, unknown), *others = ran[case]["errors"]
    assert "must have one alpha" in alpha
    assert "adapter.linear_mid.weight: belongs to an adapter of a kind" in unknown
    assert all(other == [alpha, unknown] for other in others)


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
)
@pytest.mark.parametrize("case", BRIDGE)
def test_a_model_that_megatron_bridge_wraps_goes_the_way_of_files(
    case: str, work: Path, with_bridge: dict[str, dict[str, Any]]
) -> None:
    result = with_bridge[case]
    assert result["ok"], explain(result)
    assert not any(result["wrong"].values()), result["wrong"]
    expect_saved(work / "bridge" / case)
    assert [("are DoRA" in said) for said in result["refused"]] == [True] * (case == "dora")
