"""Trainings that megatron-core saves as verl does, weights and optimizer apart, beside the same
trainings in one checkpoint.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from tests.helpers import damages, tiny
from tests.helpers.commands import good, refused
from tests.helpers.judging import explain, judge
from tests.helpers.optimizer_samples import FORMS, case

pytestmark = pytest.mark.judge

# parallel sizes of each model, and the ways to keep the optimizer of verl
SIZES = {
    "qwen3-moe": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "llama-tied": {"pp": 2, "world": 4},
}
PARTS = ("model", "optimizer")
STATES = ("dp_reshardable", "fully_reshardable")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("runs")
    cases = []
    for model, sizes in SIZES.items():
        hf = tiny.tiny_random(model, work / f"{model}-hf", "bfloat16")
        mckpt.convert(hf, work / model)
        for form in STATES:
            one = case(f"{form}-{model}", work / model, work, sizes, FORMS[form] | {"verl": True})
            cases.append(one)
        cases.append(case(f"whole-{model}", work / model, work, sizes, FORMS[STATES[1]]))
    results = judge(cases, work / "results")
    wrong = {name: explain(one) for name, one in results.items() if not one.get("ok")}
    assert not wrong, wrong
    return work


@pytest.fixture(params=[f"{form}-{model}" for model in SIZES for form in STATES])
def saved(request: pytest.FixtureRequest, runs: Path, tmp_path: Path) -> Path:
    """Returns the copy of a run of verl, with model/huggingface beside its weights."""
    shutil.copytree(runs / request.param, tmp_path / "run")
    (tmp_path / "whole").symlink_to(runs / f"whole-{request.param.partition('-')[2]}")
    (tmp_path / "like").symlink_to(runs / f"{request.param.partition('-')[2]}-hf")
    hf = tmp_path / "run/global_step_2/actor/model/huggingface"
    good("megatron-to-hf", tmp_path / "whole", hf, "--like", tmp_path / "like")
    (hf / "mckpt.json").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("weights", ["dist_ckpt", "huggingface", "before"])
def test_weights_and_optimizer_are_joined(weights: str, saved: Path, tmp_path: Path) -> None:
    """before: verl 0.8 and older, with Megatron-Bridge or mBridge."""
    actor, whole = saved / "global_step_2/actor", tmp_path / "whole"
    states = actor / "optimizer/dist_ckpt"
    if weights != "dist_ckpt":
        shutil.rmtree(actor / "model/dist_ckpt")
    if weights == "before":
        (actor / "model/huggingface").rename(actor / "huggingface")
        states = states.rename(actor / "dist_ckpt")
    good("inspect", actor)
    assert "sound" in good("check", actor).out
    said = good("reshard", saved, tmp_path / "out", "--target-tp", 2, "--target-pp", 1)
    assert "the master copy, when rounded, is the weight bit for bit" in said.err
    assert "left behind: rng_state" in said.err
    out = tmp_path / "out"
    like = ("--like", tmp_path / "like")
    assert good("diff", out, whole, *like).out.startswith("the same to the last bit")
    assert mckpt.open(out).files.iteration == 2
    common, expected = (mckpt.open(one).files.common for one in (out, whole))
    assert common and expected
    assert common.fields["lr_scheduler"] == expected.fields["opt_param_scheduler"]
    assert common.fields["optimizer"] == expected.fields["optimizer"]
    assert good("diff", actor, out, *like).out.startswith("the same to the last bit")
    good("reshard", actor, tmp_path / "bare", "--no-optimizer")

    files = sorted(states.iterdir())
    for number, path in enumerate(file for file in files if file.name != "metadata.json"):
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
        again = ("reshard", saved, tmp_path / f"cut{number}")
        refused(8 if path.name == ".metadata" else 3, path.name, args=again)
        path.unlink()
        if path.name != ".metadata":
            refused(3, path.name, args=again)
        path.write_bytes(raw)


@pytest.mark.newest
def test_damage_of_each_file_is_found(runs: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(runs / "fully_reshardable-llama-tied", tmp_path / "run")
    actor = saved / "global_step_2/actor"
    shutil.rmtree(actor / "extra")
    (actor / "model/huggingface").mkdir(exist_ok=True)
    shutil.copy(runs / "llama-tied-hf/config.json", actor / "model/huggingface")
    unread = damages.of_each_file(saved, tmp_path / "out", commands=damages.BOTH)
    files = ("model/dist_ckpt/common.pt", *(f"{p}/dist_ckpt/metadata.json" for p in PARTS))
    # megatron-core 0.19 writes no common.pt beside weights alone
    assert unread == {f"global_step_2/actor/{f}" for f in files if (actor / f).is_file()}


def test_an_optimizer_of_another_step_is_refused(runs: Path, tmp_path: Path) -> None:
    """The master copies prove that weights and optimizer are of one step."""
    actor = tmp_path / "global_step_2/actor"
    shutil.copytree(runs / "dp_reshardable-llama-tied/global_step_2/actor", actor)
    shutil.rmtree(actor / "model/dist_ckpt")
    shutil.copytree(runs / "llama-tied-hf", actor / "model/huggingface")
    words = ("are not the weights", "not of one step", "--no-optimizer")
    refused(3, *words, args=("reshard", actor, tmp_path / "out"))
    # beside an optimizer without its index, the weights are a Hugging Face directory like others
    (actor / "optimizer/dist_ckpt/.metadata").unlink()
    hf = actor / "model/huggingface"
    assert "format: hf" in good("inspect", hf).out
    good("hf-to-megatron", hf, tmp_path / "weights")
