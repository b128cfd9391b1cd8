"""The stock trainer of the megatron-core wheel shards models over its ranks, trains and saves them
as `torch_dcp` and `fsdp_dtensor`, and mckpt reads weights and optimizer state bit for bit as those
that the same run saves as torch_dist. The trainer goes on from what mckpt writes of them.

Gradients are made of the weights (tests/helpers/fsdp.py), so they are equal in all ways to shard.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.training", "einops")):
    pytest.skip("needs megatron.training and einops", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers import fsdp_samples
from tests.helpers.fsdp_samples import EQUAL, Sample
from tests.helpers.judging import explain, judge

pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers cause it by their imports
]

SAMPLES = [
    Sample("qwen3", {}, "torch_dcp"),
    Sample("qwen3-moe", {}, "torch_dcp"),
    Sample("qwen3", {"tp": 2}, "fsdp_dtensor"),
    Sample("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, "fsdp_dtensor"),
    Sample("deepseek-v3", {"ep": 2}, "fsdp_dtensor"),
]


class Runs(NamedTuple):
    work: Path
    results: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    work = tmp_path_factory.mktemp("fsdp")
    pairs = [one for s in SAMPLES for one in (s, s._replace(form=EQUAL[s.form]))]
    start = [
        fsdp_samples.source(s, work / f"start-{s.name}", {}) for s in SAMPLES for _ in range(2)
    ]
    cases = [fsdp_samples.case(*pair, work) for pair in zip(pairs, start, strict=True)]
    results = judge(cases, 4, work / "results", fake_te=True, program="stock.py")
    go_on = []
    for sample, first in zip(pairs, cases, strict=True):
        if not results[sample.name]["ok"]:
            continue
        path = work / sample.name
        if sample.form in EQUAL:
            parallel = Checkpoint.open(path).parallel
            path = work / f"{sample.name}-written"
            mckpt.plan(work / sample.name, path, format="torch_dist", parallel=parallel).run()
        flags = [*first["flags"][: -len(fsdp_samples.FORMS[sample.form])]]
        flags += fsdp_samples.FORMS[EQUAL.get(sample.form, sample.form)]
        name = f"{sample.name}-on"
        changed = {"checkpoint": str(path), "flags": flags, "name": name, "resume": True}
        go_on.append(first | changed | {"save": str(work / name), "shards": None})
    results |= judge(go_on, 4, work / "on", fake_te=True, program="stock.py")
    return Runs(work, results)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_weights_and_states_are_those_of_a_run_without_sharding(runs: Runs, sample: Sample) -> None:
    other = sample._replace(form=EQUAL[sample.form])
    for name in (sample.name, other.name):
        assert not explain(runs.results[name])
    own, same = Checkpoint.open(runs.work / sample.name), Checkpoint.open(runs.work / other.name)
    assert own.format == sample.form and own.optimizer is not None
    assert same.optimizer is not None and own.optimizer.groups == same.optimizer.groups
    states = [name for name in own.with_optimizer() if "@" in name]
    for one in (own, Checkpoint.open(runs.work / f"{sample.name}-written")):
        difference = mckpt.diff(one, same)
        assert not difference and difference.same == len(own) + len(states)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_the_trainer_goes_on_from_what_mckpt_writes(runs: Runs, sample: Sample) -> None:
    other = sample._replace(form=EQUAL[sample.form])
    names = [f"{one.name}-on" for one in (sample, other)]
    for name in names:
        assert not explain(runs.results[name])
    first, second = (Checkpoint.open(runs.work / name) for name in names)
    assert first.optimizer is not None and first.optimizer.groups[0][0]["step"] == 4
    assert not mckpt.diff(first, second)
    assert mckpt.diff(first, runs.work / sample.name).changed
