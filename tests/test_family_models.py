"""Megatron-Core computes the logits of transformers for every family in fixtures/families, and
transformers those of checkpoints that Megatron-Core saved.

mckpt converts what transformers itself saved, so the names and shapes of the Hugging Face side are
proved as well: a tensor that a family does not name is an error.
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
from tests import made_models, tiny
from tests.judging import explain, judge, record
from tests.made_models import CASES

pytestmark = pytest.mark.judge

VERSION = [int(part) for part in version("megatron-core").split(".")[:2]]
WORLD = 4
LOGITS_ATOL = 1e-4  # of fp32 logits of size 1 to 10
# case -> why one dialect, or any, cannot compute it exactly; `mckpt plan` refuses these
REFUSED: dict[tuple[str, str], str] = {
    ("qwen3_next", "gpt"): "mckpt writes gated delta nets for HybridModel only",
}
# case -> the oldest megatron-core that has its layers
SINCE: dict[str, list[int]] = {"qwen3_next": [0, 19]}


def dialects(case: str) -> list[str]:
    """The dialects that the installed megatron-core runs this case in."""
    if SINCE.get(case, [0, 12]) > VERSION:
        return []
    known = ["gpt", "hybrid"] if VERSION >= [0, 19] else ["gpt"]
    return [name for name in known if (case, name) not in REFUSED]


def sizes_of(case: str, dialect: str) -> dict[str, int]:
    moe = any("expert" in key and value for key, value in made_models.config(case).items())
    if dialect == "hybrid":
        return {"tp": 2, "pp": 2}
    return {"pp": 2, "ep": 2, "tp": 1, "etp": 1} if moe else {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    made_models.make(CASES, work / "hf")
    return work / "hf"


@pytest.fixture(scope="module")
def ran(work: Path, made: Path) -> dict[str, dict[str, Any]]:
    """Every case converted in each dialect, run by Megatron-Core; and saved by it."""
    cases = []
    for case in CASES:
        tokens = made_models.tokens(case).tolist()
        for dialect in dialects(case):
            form, size = "torch" if dialect == "hybrid" else "torch_dist", sizes_of(case, dialect)
            wanted = {"format": form, "dialect": dialect, "parallel": Parallel(**size)}
            if dialect == "gpt":
                wanted["transformer_impl"] = "local"
            out = work / dialect / case
            mckpt.plan(made / case, out, **wanted).run()
            given = {"tokens": tokens, "format": form, "impl": "local", **size}
            name = f"{case}-{dialect}"
            cases.append({"name": name, "kind": "forward", "checkpoint": str(out), **given})
            saved = {"destination": str(work / "saved" / name), "args": args_of(out), **given}
            cases.append({"name": f"saved-{name}", "kind": "save", **saved})
    return judge(cases, WORLD, work / "ran", timeout=1200)


def args_of(converted: Path) -> dict[str, Any]:
    """Returns the args of a run that trains this model, as plain values."""
    checkpoint = mckpt.open(converted)
    given = {"dtype": "float32", "padded_vocab_size": 512, "transformer_impl": "local"}
    given["experts"] = "sequential"
    args = mapping.load("megatron", checkpoint.mapping.name).write(checkpoint.dims, given)
    return {**args, "params_dtype": "float32", "transformer_impl": "local"}


@pytest.mark.parametrize("case", CASES)
def test_megatron_core_and_transformers_compute_the_same_logits(
    case: str, work: Path, made: Path, ran: dict[str, dict[str, Any]]
) -> None:
    names = dialects(case)
    if not names:
        pytest.skip(f"{case} needs megatron-core {'.'.join(map(str, SINCE[case]))}")
    tokens = made_models.tokens(case)
    reference = tiny.hf_logits(made / case, tokens)
    for dialect in names:
        result, saved = ran[f"{case}-{dialect}"], ran[f"saved-{case}-{dialect}"]
        assert result["ok"], explain(result)
        assert result["unread"] == []
        apart = np.abs(result["logits"] - reference).max()
        form, largest = "torch" if dialect == "hybrid" else "torch_dist", np.abs(reference).max()
        said = str(Parallel(**sizes_of(case, dialect)))
        record("forward", case, form, said, apart, largest, dialect=dialect)
        assert apart < LOGITS_ATOL
        assert saved["ok"], explain(saved)
        back = work / "back" / f"{case}-{dialect}"
        known = mckpt.Known(family=mckpt.open(made / case).mapping.name)
        mckpt.plan(work / "saved" / f"{case}-{dialect}", back, format="hf", known=known).run()
        apart = np.abs(tiny.hf_logits(back, tokens) - saved["logits"]).max()
        record("saved by megatron-core", case, form, said, apart, largest, dialect=dialect)
        assert apart < LOGITS_ATOL


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_comes_back_bit_for_bit(case: str, work: Path, made: Path) -> None:
    """Also config.json: a config that mckpt writes from the args describes the same model."""
    wanted = {"format": "torch", "parallel": Parallel(tp=2, pp=2)}
    mckpt.plan(made / case, work / "there" / case, **wanted).run()
    mckpt.plan(work / "there" / case, work / "again" / case, format="hf").run(check_replicas=True)
    assert not mckpt.diff(made / case, work / "again" / case)
