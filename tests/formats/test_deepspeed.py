"""The checkpoints of DeepSpeed: files that torch.save writes here in its layout, and, with
DEEPSPEED_PYTHON, those of DeepSpeed 0.19.8 itself. DEEPSPEED_PYTHON is the Python of an environment
with it, torch and transformers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions
from tests.helpers import damages, tiny
from tests.helpers.commands import Pt, good, refused
from tests.helpers.commands import mckpt as run

DEEPSPEED = os.environ.get("DEEPSPEED_PYTHON", "")
FORMS = ("zero1", "zero3", "universal")


def sample(form: str, folder: Path, case: str = "llama-tied", prefix: str = "") -> Path:
    from tests.helpers import deepspeed_files

    return deepspeed_files.sample(form, folder, case, prefix)


@pytest.fixture(params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return sample(request.param, tmp_path)


def test_weights_and_states_are_those_of_the_model(saved: Path, tmp_path: Path) -> None:
    hf = saved.parent / "hf"
    assert run("diff", saved, hf, "--like", hf).out.startswith("the same to the last bit")
    assert "format: deepspeed" in good("inspect", saved).out
    assert "sound" in good("check", saved, "--like", hf).out
    good("megatron-to-hf", saved, tmp_path / "out", "--like", hf)
    assert not mckpt.diff(tmp_path / "out", hf)
    goes_into_megatron(saved, tmp_path)


def goes_into_megatron(step: Path, tmp_path: Path) -> None:
    import torch

    from tests.helpers.deepspeed_files import BETAS, STATES, moment

    hf = step.parent / "hf"
    args = ("reshard", step, tmp_path / "run", "--like", hf, "--target-tp", 2, "--dtype", "bf16")
    said = good(*args)
    assert "every element of the source is used" in said.err + said.out
    own = Checkpoint.open(tmp_path / "run", SourceOptions(like=str(hf)))
    assert own.files.iteration == 7 and own.optimizer is not None
    assert [
        (g["wd_mult"], g["weight_decay"], g["step"], g["lr"], g["betas"])
        for g in own.optimizer.groups[0]
    ] == [(1.0, 0.1, 5, 2e-4, BETAS), (0.0, 0.0, 5, 2e-4, BETAS)]
    model, both = Checkpoint.open(hf), own.with_optimizer()
    for name in model:
        weight = torch.from_numpy(model[name].numpy().copy())
        assert (both[f"{name}@master"].numpy() == weight.numpy()).all()
        for state in STATES[1:]:
            assert (both[f"{name}@{state}"].numpy() == moment(state, weight).numpy()).all()


def test_names_of_a_wrapper_are_read_without_it(tmp_path: Path) -> None:
    goes_into_megatron(sample("universal", tmp_path, "qwen3", "module."), tmp_path)


@pytest.mark.parametrize("form", ["zero1", "zero2", "zero3"])
def test_weights_that_are_not_trained_have_no_states(form: str, tmp_path: Path) -> None:
    from tests.helpers import deepspeed_files

    step = deepspeed_files.sample(form, tmp_path, frozen="mlp.")
    hf = tmp_path / "hf"
    assert run("diff", step, hf, "--like", hf).out.startswith("the same to the last bit")
    good("reshard", step, tmp_path / "run", "--like", hf, "--dtype", "bf16")
    own = Checkpoint.open(tmp_path / "run").with_optimizer()
    frozen = {name for name in own if "mlp." in name}
    assert frozen and not any("@" in name for name in frozen)
    assert {f"{name}@exp_avg" for name in own if "@" not in name} - own.keys() == {
        f"{name}@exp_avg" for name in frozen
    }
    part = deepspeed_files.sample(form, tmp_path / "part", frozen="layers.1.")
    args = ("reshard", part, tmp_path / "out", "--like", part.parent / "hf")
    refused(3, "state.exp_avg.model.layers.1.", "--no-optimizer", args=args)
    good(*args, "--no-optimizer")


@pytest.mark.parametrize(
    "name",
    ["layer_0_expert_3_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"],
)
def test_experts_in_files_of_their_own_are_refused(name: str, tmp_path: Path) -> None:
    step = sample("zero1", tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / name)
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", tmp_path / "hf")
    refused(3, "experts in files of their own", args=args)


# ------------------------------------------------------------------------------------------ damage


def test_damage_of_each_file_is_found(saved: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"like": saved.parent / "hf", "commands": damages.BOTH}
    assert damages.of_each_file(saved, tmp_path / "out", **how) == set()


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_each_damaged_file_is_named(how: str, saved: Path, tmp_path: Path) -> None:
    hf = saved.parent / "hf"
    files = sorted(saved.rglob("*.pt"))
    chosen = {p.name: p for p in files}.values() if saved.joinpath("zero").is_dir() else files
    for number, path in enumerate(p for p in chosen if p.name != "step.pt"):
        raw = path.read_bytes()
        path.unlink() if how == "gone" else path.write_bytes(raw[:-40])
        args = ("megatron-to-hf", saved, tmp_path / f"out{number}", "--like", hf)
        refused(3, path.name, args=args)
        path.write_bytes(raw)


def test_the_file_of_a_training_with_more_ranks_is_named(tmp_path: Path) -> None:
    step = sample("zero1", tmp_path)
    (path,) = step.glob("*rank_1_mp_rank_00_optim_states.pt")
    file = Pt(path)
    file.value["optimizer_state_dict"]["partition_count"] = [3, 4]
    file.save()
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", tmp_path / "hf")
    refused(3, f"{path}: is of a training with 4 ranks", "rank_3_", args=args)


@pytest.mark.parametrize("form", FORMS)
def test_exchanged_files_are_refused(form: str, tmp_path: Path) -> None:
    step = sample(form, tmp_path)
    first, second = sorted(
        step.glob("zero/model.norm.weight/exp_*.pt" if form == "universal" else "bf16_*[01]_mp*")
    )
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", tmp_path / "hf")
    refused(3, f"{first}: was saved as {second.name}", args=args)


@pytest.mark.parametrize("form", ["zero1", "zero3"])
def test_the_file_of_another_step_is_refused(form: str, tmp_path: Path) -> None:
    step = sample(form, tmp_path)
    (path,) = step.glob("*rank_1_mp_rank_00_optim_states.pt")
    file = Pt(path)
    own = file.value["optimizer_state_dict"]
    for state in (own.get("base_optimizer_state") or own["optimizer_state_dict"])["state"].values():
        state["step"] = 6
    file.save()
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", tmp_path / "hf")
    refused(3, f"{path}: counts other steps than the other ranks, 5, 6 in all", args=args)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    import torch

    step = sample("universal", tmp_path)
    args = ("megatron-to-hf", step, tmp_path / "out")
    refused(2, "give --like HF_DIR", args=args)
    refused(3, "such as DIR/global_stepN", args=("megatron-to-hf", parent(step), tmp_path / "out"))
    zero = step / "zero"
    name = "model.layers.1.mlp.up_proj.weight"
    torch.save(4, zero / name / "step.pt")
    like = ("--like", tmp_path / "hf")
    refused(2, "2 counts of steps", args=("reshard", step, tmp_path / "out", *like))
    good("reshard", step, tmp_path / "weights", *like, "--no-optimizer")
    (zero / name).rename(zero / "model.layers.1.mlp.other.weight")
    refused(3, name, args=(*args, *like))
    shutil.rmtree(zero)
    refused(3, "without ZeRO", "['module']", args=(*args, *like))


def parent(step: Path) -> Path:
    (step.parent / "latest").write_text(step.name)
    return step.parent


def test_hostile_pickles_do_not_run(tmp_path: Path) -> None:
    import torch

    class Hostile:
        def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    step = sample("universal", tmp_path)
    path = next(step.glob("zero/*/fp32.pt"))
    torch.save({"param": Hostile()}, path)
    args = ("megatron-to-hf", step, tmp_path / "out", "--like", tmp_path / "hf")
    refused(3, "fp32.pt", args=args)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- judge


@pytest.mark.slow
@pytest.mark.skipif(not DEEPSPEED, reason="DEEPSPEED_PYTHON names no Python with deepspeed")
def test_deepspeed_itself_writes_and_goes_on(tmp_path: Path) -> None:
    """Exports equal the tensors of zero_to_fp32.py, and the states in Megatron's checkpoint make
    the next weights of DeepSpeed, by the formula of AdamW.
    """
    hf = tmp_path / "hf"
    hf.mkdir()
    tiny.write_json(hf / "config.json", tiny.config("llama"))
    program = [DEEPSPEED, "-m", "tests.helpers.deepspeed_steps", hf, tmp_path]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, program)), check=True, cwd=tiny.FIXTURES.parent, env=env)
    for stage in (1, 2, 3):
        folder = tmp_path / f"zero{stage}"
        theirs = load_file(folder / "global_step3.safetensors")
        for form in ("", "_universal"):
            step = f"{folder}/global_step3{form}"
            out = folder / f"hf{form}"
            good("megatron-to-hf", step, out, "--like", hf)
            ours = load_file(out / "model.safetensors")
            assert {n: t.tobytes() for n, t in ours.items()} == {
                n: t.tobytes() for n, t in theirs.items()
            }
            now, after = (
                megatron(f"{folder}/global_step{n}{form}", folder / f"run{n}{form}", hf)
                for n in (3, 4)
            )
            for name in (n for n in now if "@" not in n):
                next_of(name, now, after)


def megatron(step: str, out: Path, hf: Path) -> Checkpoint:
    good("reshard", step, out, "--like", hf, "--target-tp", 2, "--dtype", "bf16")
    return Checkpoint.open(out, SourceOptions(like=str(hf))).with_optimizer()


def next_of(name: str, now: Checkpoint, after: Checkpoint, decay: float | None = None) -> None:
    """decay: of the training, if it is not that of the weight's group in Megatron."""

    def double(checkpoint: Checkpoint, state: str) -> np.ndarray:
        return checkpoint[f"{name}@{state}"].numpy().astype("f8")

    assert now.optimizer is not None
    weight, m, v = (double(now, state) for state in ("master", "exp_avg", "exp_avg_sq"))
    group = now.optimizer.groups[0][weight.ndim < 2]
    (b1, b2), lr, step = group["betas"], group["lr"], group["step"] + 1
    new_m, new_v = double(after, "exp_avg"), double(after, "exp_avg_sq")
    gradient = (new_m - b1 * m) / (1 - b1)
    np.testing.assert_allclose(new_v, b2 * v + (1 - b2) * gradient**2, rtol=1e-3, atol=1e-13)
    ratio = (new_m / (1 - b1**step)) / (np.sqrt(new_v / (1 - b2**step)) + group["eps"])
    expected = weight * (1 - lr * (decay or group["weight_decay"])) - lr * ratio
    np.testing.assert_allclose(double(after, "master"), expected, rtol=1e-5, atol=1e-8)
