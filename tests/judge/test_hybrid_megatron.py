"""The real HybridModel computes the logits of transformers from checkpoints of the hybrid dialect,
and transformers those of checkpoints that HybridModel saved.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.geometry.parallel import Parallel
from tests.helpers import tiny
from tests.helpers.judging import explain, judge, record

VERSION = version("megatron-core")
SINCE_0_19 = [int(part) for part in VERSION.split(".")[:2]] >= [0, 19]
pytestmark = [
    pytest.mark.judge,
    pytest.mark.skipif(not SINCE_0_19, reason="HybridModel with MLA is in 0.19 and later"),
]

WORLD = 4
LOGITS_ATOL = 1e-4  # of fp32 logits of size 1 to 10
# refused: rope frequencies that HybridModel does not have; norms that 0.19 computes twice
CASES = [case for case in tiny.CASES if case not in ("llama-rope-scaled", "deepseek-v3-plain")]
CUT = {"torch_dist": "Ettt|tttttL", "torch": "Et|ttttt|t|tL"}  # at pp 2, between attention and mlp
MOE = ("mixtral", "qwen3-moe", "qwen3-moe-raw", "deepseek-v3")


def written_at(case: str, form: str) -> Parallel:
    """Stages that end with an attention; of `torch` files also two virtual stages."""
    layout = CUT[form]
    num_layers = 2 * tiny.config(case)["num_hidden_layers"]
    layout = layout[:-1] + "t" * (num_layers - layout.count("t")) + "L"
    if tiny.config(case).get("num_nextn_predict_layers"):
        layout = layout[:-1] + "mL"
    return Parallel(tp=2, pp=2, layout=layout)


def sizes_of(case: str, form: str) -> list[dict[str, Any]]:
    if form == "torch":
        return [{"tp": 2, "pp": 2, "vpp": 2}]
    return [{"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}] if case in MOE else [{"tp": 2, "pp": 2}]


def named(case: str, form: str, size: dict[str, Any]) -> str:
    return f"{case}-{form}-" + "".join(f"{k}{v}" for k, v in size.items())


@pytest.fixture(scope="module")
def forward(work: Path, sources: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Every case converted to either format, and run by HybridModel; and saved by it."""
    cases = []
    for case in CASES:
        tokens = tiny.tokens(case).tolist()
        for form in ("torch_dist", "torch"):
            written, out = written_at(case, form), work / form / case
            wanted = {"format": form, "parallel": written, "dialect": "hybrid"}
            mckpt.plan(sources[case], out, **wanted).run()
            for size in sizes_of(case, form):
                given = {"checkpoint": str(out), "format": form, "tokens": tokens, "impl": "local"}
                cases.append({"name": named(case, form, size), "kind": "forward", **given, **size})
            saved = {"args": args_of(sources[case]), "format": form, "tokens": tokens, "tp": 2}
            saved["destination"] = str(work / "saved" / f"{case}-{form}")
            cases.append({"name": f"saved-{case}-{form}", "kind": "save", **saved, "pp": 2})
    return judge(cases, WORLD, work / "forward", timeout=900)


def args_of(source: Path) -> dict[str, Any]:
    """Returns the args of a hybrid run that trains this model, as plain values."""
    given = {"dtype": "float32", "padded_vocab_size": 256}
    dims = mckpt.open(source).dims
    args = mapping.load("megatron", "hybrid").write(dims, given)
    return {**args, "params_dtype": "float32", "transformer_impl": "local"}


@pytest.mark.parametrize("case", CASES)
def test_hybrid_model_computes_the_logits_of_transformers(
    case: str, sources: dict[str, Path], forward: dict[str, dict[str, Any]]
) -> None:
    reference = tiny.hf_logits(sources[case], tiny.tokens(case))
    for form in ("torch_dist", "torch"):
        for size in sizes_of(case, form):
            result = forward[named(case, form, size)]
            assert result["ok"], explain(result)
            assert result["unread"] == []
            apart = np.abs(result["logits"] - reference).max()
            assert apart < LOGITS_ATOL
            largest = np.abs(reference).max()
            sizes = str(Parallel(**size))
            record("forward", case, form, sizes, apart, largest, dialect="hybrid")


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_checkpoints_of_hybrid_model(
    case: str, work: Path, forward: dict[str, dict[str, Any]]
) -> None:
    for form in ("torch_dist", "torch"):
        result = forward[f"saved-{case}-{form}"]
        assert result["ok"], explain(result)
        out = work / "exported" / f"{case}-{form}"
        saved = mckpt.open(work / "saved" / f"{case}-{form}")
        assert saved.mapping.name == "hybrid"
        mckpt.plan(saved, out, format="hf").run(check_replicas=True)
        apart = np.abs(tiny.hf_logits(out, tiny.tokens(case)) - result["logits"]).max()
        assert apart < LOGITS_ATOL
        largest = np.abs(result["logits"]).max()
        record("saved by megatron-core", case, form, "tp 2, pp 2", apart, largest, dialect="hybrid")
