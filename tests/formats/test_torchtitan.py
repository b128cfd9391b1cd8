"""The checkpoints of torchtitan, which torch writes here with four ranks. What mckpt reads equals
the Hugging Face model of which a formula made the names and the order of rows
(tests/helpers/titan_steps.py), and its optimizer is Adam after one step, by another formula.
"""

from __future__ import annotations

import functools
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions
from tests.helpers import damages, tiny
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as run

CASES = ("llama", "llama-tied", "qwen3", "qwen3-moe", "deepseek-v3")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the function that returns a directory with `hf` and `step-10` of a model."""
    return functools.cache(lambda case: sample(case, tmp_path_factory.mktemp("titan")))


def sample(case: str, folder: Path) -> Path:
    config = tiny.config(case)
    (folder / "hf").mkdir()
    tiny.write_json(folder / "hf/config.json", config)
    tiny.write_weights(folder / "hf", tiny.tensors(config, "float32"))
    program = [sys.executable, "-m", "tests.helpers.titan_steps", folder / "hf", folder]
    subprocess.run(list(map(str, program)), check=True, cwd=tiny.FIXTURES.parent)
    return folder


@pytest.fixture(params=CASES)
def saved(request: pytest.FixtureRequest, samples: Callable[[str], Path]) -> Path:
    return samples(request.param)


def test_weights_are_those_of_the_model(saved: Path, tmp_path: Path) -> None:
    step, hf = saved / "step-10", saved / "hf"
    said = run("diff", step, hf, "--like", hf)
    if "routed" in good("inspect", step).out and "wkv_a" not in good("inspect", step).out:
        assert said.code == 1 and "0 differ, 0 missing, 0 extra, 1 dropped" in said.out
        assert "layers.0.moe.expert_bias_E" in said.out
    else:
        assert said.out.startswith("the same to the last bit")
    assert "format: torchtitan" in good("inspect", step).out
    assert "sound" in good("check", step, "--like", hf).out
    good("megatron-to-hf", step, tmp_path / "hf", "--like", hf)
    assert not mckpt.diff(tmp_path / "hf", hf)


def test_states_go_into_a_megatron_optimizer(saved: Path, tmp_path: Path) -> None:
    step, hf = saved / "step-10", saved / "hf"
    args = ("reshard", step, tmp_path / "run", "--like", hf, "--target-tp", 2, "--dtype", "bf16")
    said = good(*args)
    assert "every element of the source is used" in said.err + said.out
    assert "neither the schedule of the learning rate" in said.err + said.out
    own = Checkpoint.open(tmp_path / "run", SourceOptions(like=str(hf)))
    assert own.files.iteration == 10 and own.optimizer is not None
    assert own.optimizer.form == "fully_reshardable"
    assert own.args and own.args["no_save_optim"] is False  # else Megatron loads no state
    groups = own.optimizer.groups[0]
    assert [(g["wd_mult"], g["weight_decay"]) for g in groups] == [(1.0, 0.1), (0.0, 0.0)]
    assert {(g["step"], g["lr"], g["max_lr"], g["betas"]) for g in groups} == {
        (1, 2e-4, 3e-4, (0.9, 0.999))
    }
    model, both = Checkpoint.open(hf), own.with_optimizer()
    for name in model:
        weight = model[name].numpy()
        if "score_correction" in name:
            assert f"{name}@exp_avg" not in both
            continue
        assert (both[f"{name}@master"].numpy() == weight).all()
        # one step of Adam: gradients are three times the weights
        gradient = weight * np.float32(3)
        expected = np.float32(1 - 0.9) * gradient
        assert (both[f"{name}@exp_avg"].numpy() == expected).all()
        squared = both[f"{name}@exp_avg_sq"].numpy()
        np.testing.assert_allclose(squared, 1e-3 * gradient.astype("f8") ** 2, rtol=1e-5)
    assert own["final_norm.weight"].dtype == "bfloat16"
    assert (own["final_norm.weight"].numpy() == model["final_norm.weight"].numpy()).mean() < 1
    assert not mckpt.diff(tmp_path / "run", rounded(hf, tmp_path), no_optimizer=True)


def rounded(hf: Path, folder: Path) -> Path:
    mckpt.convert(hf, folder / "rounded", dtype="bf16")
    return folder / "rounded"


# ------------------------------------------------------------------------------------------ damage


@pytest.fixture
def step(samples: Callable[[str], Path], tmp_path: Path) -> Path:
    """Returns a copy of a checkpoint that a test may change."""
    shutil.copytree(samples("llama"), tmp_path / "src")
    return tmp_path / "src/step-10"


def restated(step: Path, change: Callable[[dict[str, Any], dict[Any, Any]], object]) -> None:
    """Changes the tensors and the items in the .metadata."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata.state_dict_metadata, metadata.storage_data)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def without(*keys: str) -> Callable[[dict[str, Any], dict[Any, Any]], object]:
    def change(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        for key in keys:
            del tensors[key]
            for place in [place for place in items if place.fqn == key]:
                del items[place]

    return change


UP = "layers.1.feed_forward.w3.weight"


def test_a_model_needs_its_config(step: Path, tmp_path: Path) -> None:
    refused(2, "give --like HF_DIR", args=("megatron-to-hf", step, tmp_path / "out"))


def test_the_directory_of_all_steps_is_an_error_with_its_cure(step: Path, tmp_path: Path) -> None:
    refused(3, "torchtitan", "step-N", args=("megatron-to-hf", step.parent, tmp_path / "out"))


def test_nothing_is_written_in_its_names(step: Path, tmp_path: Path) -> None:
    args = ("reshard", step, tmp_path / "out", "--like", step.parent / "hf")
    refused(2, "torchtitan", "torch_dist", args=(*args, "--target-format", "torchtitan"))
    refused(2, "no dialect 'torchtitan'", args=(*args, "--target-dialect", "torchtitan"))


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_cut_or_lost_is_an_error(cut: bool, step: Path, tmp_path: Path) -> None:
    path = sorted(step.glob("__2*.distcp"))[0]
    raw = path.read_bytes()
    path.unlink()
    if cut:
        path.write_bytes(raw[:-500])
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", step.parent / "hf")
    refused(3, path.name, args=args)


def test_damage_of_each_file_is_found(step: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"like": step.parent / "hf", "commands": damages.BOTH}
    assert damages.of_each_file(step, tmp_path / "out", **how) == set()


def test_tensors_and_states_that_are_lost_are_named(step: Path, tmp_path: Path) -> None:
    like = ("--like", step.parent / "hf")
    restated(step, without(f"optimizer.state.{UP}.exp_avg"))
    words = (f"optimizer.state.exp_avg.{UP} is missing", "--no-optimizer")
    refused(3, *words, args=("reshard", step, tmp_path / "out", *like))
    good("reshard", step, tmp_path / "weights", *like, "--no-optimizer")
    restated(step, without(UP))
    refused(3, f"{UP} is missing", args=("megatron-to-hf", step, tmp_path / "out", *like))


def test_weights_of_two_settings_are_refused(step: Path, tmp_path: Path) -> None:
    def exchanged(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        lr, eps = (f"optimizer.param_groups.{UP}.{name}" for name in ("lr", "eps"))
        places = {place.fqn: place for place in items if place.fqn in (lr, eps)}
        items[places[lr]] = items[places[eps]]

    restated(step, exchanged)
    words = ("2 groups of settings", "--no-optimizer")
    args = ("reshard", step, tmp_path / "out", "--like", step.parent / "hf")
    refused(2, *words, args=args)


def test_another_model_is_refused(
    step: Path, samples: Callable[[str], Path], tmp_path: Path
) -> None:
    like = samples("qwen3") / "hf"
    refused(3, "should be", args=("megatron-to-hf", step, tmp_path / "out", "--like", like))
