"""The state of Adam that verl saves by FSDP2. torch itself trains, saves, and gathers the state
that is expected.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions
from tests.formats.test_deepspeed import next_of
from tests.helpers import damages, made_models, tiny
from tests.helpers.commands import Pt, good, refused, save_hostile
from tests.helpers.commands import mckpt as run

OPTIM, MODEL = (f"{part}_world_size_4_rank_{{}}.pt".format for part in ("optim", "model"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the runs `verl` and `hsdp` of a tied model, of which rank 0 gathered
    the state too.
    """
    folder = tmp_path_factory.mktemp("saved")
    config = tiny.config("llama-tied")
    (folder / "hf").mkdir()
    tiny.write_json(folder / "hf/config.json", config)
    tiny.write_weights(folder / "hf", tiny.tensors(config))
    return made_models.save_by_ranks(folder, "steps")


@pytest.fixture
def actor(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "verl/global_step_3/actor", tmp_path / "global_step_3/actor")
    return tmp_path / "global_step_3/actor"


@pytest.mark.parametrize("name", ["verl", "hsdp"])
def test_the_state_is_that_which_torch_gathers(name: str, saved: Path, tmp_path: Path) -> None:
    checkpoints = []
    for step in (3, 4):
        source, out = saved / name / f"global_step_{step}/actor", tmp_path / f"run{step}"
        args = ("reshard", source, out, "--target-tp", 2, "--dtype", "bf16")
        said = good(*args, "--workers", step - 2).err  # which open the source again
        assert "of 38 weights the master copy, when rounded, is the weight" in said
        assert "left behind: extra_state" in said and "inv_freq (a buffer" in said
        own = Checkpoint.open(out, SourceOptions()).with_optimizer()
        assert own.files.iteration == step and own.optimizer is not None
        assert [
            (g["wd_mult"], g["weight_decay"], g["step"], g["lr"], g["betas"], g["eps"])
            for g in own.optimizer.groups[0]
        ] == [(1.0, 0.1, step, 1e-3, (0.9, 0.95), 1e-8), (0.0, 0.0, step, 1e-3, (0.9, 0.95), 1e-8)]
        for state in ("exp_avg", "exp_avg_sq"):
            expected = Checkpoint.open(saved / f"{state}-{step}")
            assert len(expected) == 38
            for weight in expected:
                theirs = expected[weight].numpy().tobytes()
                assert own[f"{weight}@{state}"].numpy().tobytes() == theirs, (weight, state)
        checkpoints.append(own)
    # torch decays all weights, Megatron matrices only
    for weight in (key for key in checkpoints[0] if "@" not in key):
        next_of(weight, checkpoints[0], checkpoints[1], decay=0.1)


def test_a_run_is_inspected_checked_and_compared(actor: Path, tmp_path: Path) -> None:
    assert "format: hf_sharded" in good("inspect", actor).out
    assert "sound" in good("check", actor).out
    said = good("reshard", actor, tmp_path / "out", "--dry-run")
    assert "every element of the source is used" in said.out + said.err
    good("reshard", actor, tmp_path / "out")
    same = "the same to the last bit: 152 logical tensors equal"
    assert same in good("diff", actor, tmp_path / "out").out
    assert "38 logical tensors equal" in good("diff", actor, tmp_path / "out", "--no-optimizer").out
    good("reshard", actor, tmp_path / "weights", "--no-optimizer")
    assert "states of the optimizer" not in good("inspect", tmp_path / "weights").out
    other = Pt(actor / OPTIM(1))
    own = other.value["state"][7]["exp_avg"].args[3][1]["_local_tensor"].args[0]
    other.data[own.key] = bytes(len(other.data[own.key]))
    other.save()
    assert "exp_avg" in run("diff", actor, tmp_path / "out").out


# ------------------------------------------------------------------------------------------ damage


def changed(change: Callable[[Any], object], rank: int = 0) -> Callable[[Path], object]:
    """Returns a damage of the state dict of a rank."""

    def damage(folder: Path) -> None:
        file = Pt(folder / OPTIM(rank))
        change(file.value)
        file.save()

    return damage


def regrouped(value: Any) -> None:
    (group,) = value["param_groups"]
    value["param_groups"] = [{**group, "params": group["params"][:5]}, {**group, "params": [5]}]


def counted(value: Any) -> None:
    value["state"][3]["step"] = 9.0


DAMAGES: dict[str, tuple[int, Callable[[Path], object], tuple[str, ...]]] = {
    "cut": (
        3,
        lambda f: (f / OPTIM(2)).write_bytes((f / OPTIM(2)).read_bytes()[:-99]),
        (OPTIM(2),),
    ),
    "gone": (3, lambda f: (f / OPTIM(2)).unlink(), ("not of the ranks that have weights",)),
    "renamed": (3, lambda f: (f / OPTIM(2)).rename(f / OPTIM(5)), ("not of the ranks",)),
    "of another rank": (
        3,
        lambda f: shutil.copy(f / OPTIM(0), f / OPTIM(1)),
        ("not a mesh of [4]",),
    ),
    "weights": (3, lambda f: shutil.copy(f / MODEL(1), f / OPTIM(1)), (OPTIM(1), "not the state")),
    "no state": (3, changed(lambda v: v["state"].pop(4), 1), ("4.exp_avg: is in 3 files",)),
    "no moment": (
        3,
        lambda f: [changed(lambda v: v["state"][4].pop("exp_avg"), r)(f) for r in range(4)],
        ("up_proj.weight has no exp_avg",),
    ),
    "another weight's": (
        3,
        lambda f: [
            changed(lambda v: v["state"].update({0: v["state"][1], 1: v["state"][0]}), r)(f)
            for r in range(4)
        ],
        ("is not a state of model.embed_tokens.weight",),
    ),
    "two groups": (2, changed(regrouped), ("6 parameters in 2 groups", "has 38")),
    "two counts": (2, changed(counted), ("2 counts of steps",)),
    "two steps of the run": (
        2,
        changed(lambda v: [one.update(step=4.0) for one in v["state"].values()], 1),
        ("2 counts of steps",),
    ),
    "no number": (
        3,
        changed(lambda v: v["state"][3].update(step="x")),
        ("a step is not a number",),
    ),
    "no step": (
        3,
        lambda f: [changed(lambda v: v["state"][3].pop("step"), r)(f) for r in range(4)],
        ("1 of 38 states have no step",),
    ),
    "hostile": (8, lambda f: save_hostile(f / OPTIM(1), f / "mark"), (OPTIM(1),)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_an_error(name: str, actor: Path, tmp_path: Path) -> None:
    code, damage, words = DAMAGES[name]
    damage(actor)
    args = ("reshard", actor, tmp_path / "out")
    refused(code, *words, args=args)
    assert not (tmp_path / "out").exists() and not (actor / "mark").exists()
    good("hf-to-megatron", actor, tmp_path / "weights")  # whose files are whole


def test_damage_of_each_file_is_found(actor: Path, tmp_path: Path) -> None:
    unread = damages.of_each_file(actor, tmp_path / "out", commands=damages.BOTH)
    assert unread == {f"extra_state_world_size_4_rank_{rank}.pt" for rank in range(4)}
