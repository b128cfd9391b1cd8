"""The stock trainer of the megatron-core wheel shards models over its ranks, trains and saves them
as `torch_dcp` and `fsdp_dtensor`, and mckpt reads weights and optimizer state bit for bit as those
that the same run saves as torch_dist. The trainer goes on from what mckpt writes of them.

Gradients are made of the weights (tests/helpers/fsdp.py), so they are equal in all ways to shard.
"""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.training", "einops")):
    pytest.skip("needs megatron.training and einops", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.options import SourceOptions
from tests.helpers import fsdp_samples, tiny
from tests.helpers.commands import refused
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


# what mckpt writes
WRITTEN = [
    Sample("qwen3-moe", {"ep": 2}, "fsdp_dtensor"),
    Sample("qwen3", {}, "torch_dcp"),
]
AT_LENGTH = [
    Sample("qwen3-tied", {}, "fsdp_dtensor"),
    Sample("qwen3", {"tp": 2}, "fsdp_dtensor"),
    Sample("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, "fsdp_dtensor"),
    Sample("deepseek-v3", {"ep": 2}, "fsdp_dtensor"),
]


@pytest.mark.parametrize(
    "sample",
    [*WRITTEN, *(pytest.param(one, marks=pytest.mark.slow) for one in AT_LENGTH)],
    ids=lambda sample: sample.name,
)
def test_the_trainer_goes_on_from_what_mckpt_writes_as_from_the_source(
    sample: Sample, tmp_path: Path
) -> None:
    """Megatron-FSDP starts from the weights of a Hugging Face model; then each way to shard goes on
    from a run without sharding. The same run, never sharded, ends with the same bits.
    """
    whole = sample._replace(form=EQUAL[sample.form])
    start = fsdp_samples.source(sample, tmp_path / "start", {})
    plain = fsdp_samples.case(whole, start, tmp_path)
    flags = plain["flags"][: -len(fsdp_samples.FORMS[whole.form])]
    sharded = {"flags": flags + fsdp_samples.FORMS[sample.form], "name": sample.name}
    ask(**plain)
    first = Checkpoint.open(plain["save"])
    written, begun = tmp_path / "written", tmp_path / "begun"
    if sample.form == "fsdp_dtensor":
        (hf,) = (tmp_path / "start").glob("hf-*")
        sizes = first.parallel
        mckpt.plan(hf, tmp_path / "hf", format=sample.form, parallel=sizes, divisible_by=4).run()
        starts = {"checkpoint": tmp_path / "hf", "save": begun, "resume": True}
        starts["flags"] = [*sharded["flags"], "--no-strict-fsdp-dtensor-load"]
        ask(**plain | sharded | starts)
        difference = mckpt.diff(begun, first)
        assert not difference and difference.same == len(first.with_optimizer())
        begins = Checkpoint.open(begun).optimizer
        assert begins and first.optimizer and begins.groups == first.optimizer.groups
        assert not mckpt.diff(tmp_path / "hf", hf)
    mckpt.plan(first, written, format=sample.form, parallel=first.parallel, keep_padding=True).run()
    on = {"resume": True, "steps": 3}
    for own in (sharded | {"checkpoint": written}, {"checkpoint": first.path}):
        ask(**plain | own | on | {"save": tmp_path / f"{own['checkpoint'].name}-on"})
    ends = [Checkpoint.open(tmp_path / f"{path.name}-on") for path in (written, first.path)]
    states = [one.optimizer for one in ends]
    assert states[0] is not None and states[1] is not None
    assert states[0].groups == states[1].groups and states[0].groups[0][0]["step"] == 5
    assert not mckpt.diff(*ends)
    assert mckpt.diff(ends[0], first).changed


def test_the_steps_that_the_adam_of_torch_counts_are_read(tmp_path: Path) -> None:
    """Without Transformer Engine and Apex, each weight has a number of steps, and no group has one.
    Megatron's torch_dist of the same run has it in the groups.
    """
    sample = Sample("qwen3-moe", {"ep": 2}, "fsdp_dtensor")
    start = fsdp_samples.source(sample, tmp_path / "start", fsdp_samples.SMALL_MOE)
    opened = []
    for one in (sample, sample._replace(form=EQUAL[sample.form])):
        case = fsdp_samples.case(one, start, tmp_path)
        ask(**case, torch_adam=True)
        opened.append(Checkpoint.open(case["save"]))
    own, same = opened
    mckpt.plan(own.path, tmp_path / "written", format="torch_dist", parallel=own.parallel).run()
    written = Checkpoint.open(tmp_path / "written")
    assert own.optimizer and same.optimizer and written.optimizer
    assert own.optimizer.groups == same.optimizer.groups == written.optimizer.groups
    assert {g["step"] for groups in own.optimizer.groups for g in groups} == {fsdp_samples.STEPS}
    for one in (own, written):
        difference = mckpt.diff(one, same)
        assert not difference and difference.same == 4 * len(own)
    key = "optimizer.state.module.module.module.embedding.word_embeddings.weight.step"
    index = next(Path(own.path).rglob(".metadata"))
    file, at, length = read_metadata(index).items[key, ()]
    path = index.with_name(file)
    data = path.read_bytes()
    item = data[at : at + length].replace(struct.pack("<f", 2), struct.pack("<f", 3))
    path.write_bytes(data[:at] + item + data[at + length :])
    refused(3, "numbers of steps (2, 3)", args=("reshard", own.path, tmp_path / "unequal"))


def test_megatron_fsdp_v2_goes_on_from_what_mckpt_writes(tmp_path: Path) -> None:
    """Two ranks of its `fully_shard` save after two steps; mckpt writes that as torch_dist, and
    this as `mfsdp_v2`. A new run that loads it makes the same third step. MEGATRON_LM names a copy
    of Megatron-LM with save_checkpoint and load_checkpoint, which the wheel of 0.19.2 lacks.
    """
    start = fsdp_samples.source(Sample("qwen3-moe", {}, "v2"), tmp_path, fsdp_samples.SMALL_MOE)
    hf = tmp_path / "hf-qwen3-moe"
    program = [sys.executable, "-m", "tests.helpers.mfsdp_v2", hf, start, tmp_path]
    folders = [os.environ.get("MEGATRON_LM", ""), str(tiny.FIXTURES.parent)]
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, folders))}
    subprocess.run(list(map(str, program)), check=True, cwd=folders[1], env=env)
    saved, ends, goes_on = (
        Checkpoint.open(tmp_path / name, SourceOptions(like=str(hf))).with_optimizer()
        for name in ("saved", "ends", "goes-on")
    )
    assert saved.format == "mfsdp_v2"
    whole = Checkpoint.open(tmp_path / "whole").with_optimizer()
    for name in saved:
        own = saved[name].numpy()
        assert (own.astype(whole[name].numpy().dtype) == whole[name].numpy()).all(), name
    assert whole.optimizer and whole.optimizer.groups[0][0]["step"] == 2
    difference = mckpt.diff(goes_on, ends)
    assert not difference and difference.same == len(ends) == 4 * sum(
        "@" not in name for name in ends
    )
    assert len(mckpt.diff(ends, saved).changed) == len(ends)
