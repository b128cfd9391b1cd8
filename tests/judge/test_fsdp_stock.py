"""The stock trainer of the megatron-core wheel shards models over its ranks, trains and saves them
as `torch_dcp` and `fsdp_dtensor`, and mckpt reads weights and optimizer state bit for bit as those
that the same run saves as torch_dist. The trainer goes on from what mckpt writes of them.

Gradients are made of the weights (tests/helpers/fsdp.py), so they are equal in all ways to shard.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.training", "einops")):
    pytest.skip("needs megatron.training and einops", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers import fsdp_samples
from tests.helpers.fsdp_samples import EQUAL, Sample
from tests.helpers.judging import ask

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


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_weights_and_states_are_those_of_a_run_without_sharding(
    sample: Sample, tmp_path: Path
) -> None:
    """The trainer goes on from what mckpt writes of both, to the same end."""
    whole = sample._replace(form=EQUAL[sample.form])
    start = fsdp_samples.source(sample, tmp_path / "start", {})
    first = [fsdp_samples.case(one, start, tmp_path) for one in (sample, whole)]
    for case in first:
        ask(**case)
    own, same = (Checkpoint.open(tmp_path / one.name) for one in (sample, whole))
    assert own.format == sample.form and own.optimizer is not None
    assert same.optimizer is not None and own.optimizer.groups == same.optimizer.groups
    written = tmp_path / "written"
    mckpt.plan(own.path, written, format="torch_dist", parallel=own.parallel).run()
    states = [name for name in own.with_optimizer() if "@" in name]
    for one in (own, Checkpoint.open(written)):
        difference = mckpt.diff(one, same)
        assert not difference and difference.same == len(own) + len(states)
    ends = []
    for case, form, path in zip(
        first, (sample.form, whole.form), (written, same.path), strict=True
    ):
        flags = case["flags"][: -len(fsdp_samples.FORMS[form])] + fsdp_samples.FORMS[whole.form]
        end = tmp_path / f"{form}-on"
        changed = {"checkpoint": path, "flags": flags, "resume": True, "save": end, "shards": None}
        ask(**case | changed)
        ends.append(Checkpoint.open(end))
    assert ends[0].optimizer is not None and ends[0].optimizer.groups[0][0]["step"] == 4
    assert not mckpt.diff(*ends)
    assert mckpt.diff(ends[0], own).changed
