"""The stock trainer of the megatron-core wheel goes on from the optimizer state that mckpt writes.

megatron.training (tests/helpers/stock.py) builds its own optimizer at the sizes of the launch line
that mckpt wrote. All of its numbers are NaN until its `load_checkpoint` sets them. Then it saves,
and every weight, master copy and moment is that of the source, bit for bit, with the number of
steps and the schedule.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.training")):
    pytest.skip("wheels of megatron-core have it from 0.17 on", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.formats.megatron import megatron_args
from tests.formats import test_orbax, test_torchtitan
from tests.helpers import fsdp_samples, maxtext
from tests.helpers.commands import good
from tests.helpers.judged_models import DENSE, MOE, QWEN3
from tests.helpers.judging import ask, explain, judge
from tests.helpers.tiny import TinyModel
from tests.judge.test_optimizer import FORMS, FP16, JOB, MUON
from tests.judge.test_stock import flat

pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers cause it by their imports
]

DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
# Megatron-core 0.19 finds the groups of parameters by these values, so they must be the same.
SAME = ["--lr", str(JOB["lr"]), "--min-lr", "0", "--use-checkpoint-opt_param-scheduler"]
WITH_MUON = ["--optimizer", "muon", "--muon-tp-mode", "duplicated"]
BY_LAYERS = [*WITH_MUON, "--use-distributed-optimizer", "--no-use-layer-wise-param-layout"]
MODELS = {"dense": DENSE | QWEN3, "moe": MOE | QWEN3}
PLAIN = {"distributed_optimizer": False, "dtype": "bfloat16"}
# the name of a checkpoint -> its model, and options of the training that saves it
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"dtype": "bfloat16"}),
    "moe": ("moe", {"dtype": "bfloat16"}),
    "plain": ("moe", PLAIN),
    "half": ("dense", FP16),
    "muon": ("dense", MUON | {"dtype": "bfloat16"}),
    "layers": ("dense", FORMS["muon_by_layers"]),
}


class Run(NamedTuple):
    """A checkpoint that mckpt writes from a source, or from what another run wrote."""

    source: str
    format: str
    sizes: dict[str, int]
    flags: list[str]

    @property
    def name(self) -> str:
        return "-".join([self.source, self.format, *(f"{k}{v}" for k, v in self.sizes.items())])


RUNS = [
    Run("dense", "torch_dist", {"tp": 2}, DISTRIBUTED),
    Run("dense", "torch_dist", {"pp": 2}, DISTRIBUTED),
    Run("dense", "torch", {"tp": 2, "pp": 2}, DISTRIBUTED),
    Run("dense", "torch", {"tp": 1}, DISTRIBUTED),
    Run("moe", "torch_dist", {"ep": 2}, DISTRIBUTED),
    Run("moe", "torch", {"ep": 2}, DISTRIBUTED),
    Run("moe-torch-ep2", "torch_dist", {"ep": 1, "pp": 2}, DISTRIBUTED),
    Run("plain", "torch", {"ep": 2}, []),
    Run("plain", "torch_dist", {"pp": 2}, []),
    Run("half", "torch_dist", {"tp": 2}, DISTRIBUTED),
    Run("half", "torch", {"tp": 2}, [*DISTRIBUTED, "--accumulate-allreduce-grads-in-fp32"]),
    Run("muon", "torch_dist", {"tp": 2}, WITH_MUON),
    Run("layers", "torch_dist", {"tp": 1}, BY_LAYERS),
]


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """The directory of the checkpoints of TRAINED."""
    cases: list[dict[str, Any]] = [
        {
            "kind": "save",
            "args": args,
            "format": "torch_dist",
            "destination": work / f"start-{name}",
        }
        for name, args in MODELS.items()
    ]
    for name, (model, options) in TRAINED.items():
        paths = {"checkpoint": work / f"start-{model}", "save": work / name}
        cases.append(JOB | {"world": 2, "steps": 2} | options | paths)
    for result in judge(cases, work / "trained").values():
        assert result["ok"], explain(result)
    return work


def flags_of(checkpoint: Path) -> list[str]:
    unit = Checkpoint.open(checkpoint).opened.root
    return flat(json.loads((unit / megatron_args.JSON).read_text()))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_stock_trainer_loads_all_of_it(trained: Path, run: Run) -> None:
    source, out, saved = (trained / name for name in (run.source, run.name, f"{run.name}-saved"))
    sizes = {"tp": 1, "pp": 1, "ep": 1} | run.sizes
    options = [x for k, v in sizes.items() for x in (f"--target-{k}", v)]
    options += ["--target-format", run.format, "--target-etp", sizes["tp"]]
    good("reshard", source, out, *options)
    world = 4 if run.sizes == {"tp": 2, "pp": 2} else 2
    given = {"optimizer": [*run.flags, *SAME], "checkpoint": out, "save": saved}
    ask("stock", world=world, flags=flags_of(out), **given)
    ours, theirs = Checkpoint.open(out), Checkpoint.open(saved)
    assert ours.optimizer is not None and theirs.optimizer is not None
    states = [name for name in ours.with_optimizer() if "@" in name]
    difference = mckpt.diff(ours, theirs)
    assert not difference and difference.same == len(ours) + len(states)
    assert theirs.optimizer.scalers == ours.optimizer.scalers
    scaler = {"scale": 4096.0, "growth_tracker": 2, "hysteresis_tracker": 1}
    assert ours.optimizer.scalers == [scaler] * (run.source == "half")
    for mine, other in zip(ours.optimizer.groups, theirs.optimizer.groups, strict=True):
        # that of experts loads no group without decay, which would be empty
        for one, two in zip(mine, other, strict=False):
            # Muon counts no steps
            assert one.get("step") == two.get("step")
            assert one.get("step", 0) > 0 or (run.source in ("muon", "layers"))
            assert one["lr"] == two["lr"] and one["wd_mult"] == two["wd_mult"]
    key = "opt_param_scheduler"
    fields = [c.opened.common.fields.get(key) for c in (ours, theirs) if c.opened.common]
    if fields[0] is not None:
        assert fields[0]["num_steps"] == fields[1]["num_steps"] > 0


def test_a_step_of_torchtitan_goes_on(tmp_path: Path) -> None:
    """The trainer makes of torchtitan's weights and states what torch's own AdamW makes of them."""
    import torch

    saved = test_torchtitan.sample("llama", tmp_path)
    args = ("reshard", saved / "step-10", tmp_path / "run", "--like", saved / "hf")
    good(*args, "--dtype", "bf16", "--target-format", "torch_dist", "--target-tp", 1)
    flags = [*flags_of(tmp_path / "run"), *fsdp_samples.FLAGS, *DISTRIBUTED]
    flags += ["--ckpt-format", "torch_dist", "--weight-decay", "0.1"]
    flags += ["--override-opt_param-scheduler", "--lr", "3e-4", "--min-lr", "0"]
    paths = {"checkpoint": tmp_path / "run", "save": tmp_path / "on"}
    ask("stock", te=True, world=2, flags=flags, resume=True, steps=1, **paths)
    after = Checkpoint.open(tmp_path / "on").with_optimizer()
    assert after.optimizer is not None
    groups = [(g["step"], g["lr"], g["weight_decay"]) for g in after.optimizer.groups[0]]
    assert groups == [(2, 3e-4, 0.1), (2, 3e-4, 0.0)]
    model = Checkpoint.open(saved / "hf")
    for name in model:
        weight = torch.from_numpy(model[name].numpy().copy()).requires_grad_()
        adam = torch.optim.AdamW([weight], lr=0.0, weight_decay=0.0)
        weight.grad = weight.detach() * 3  # as tests/helpers/rank_files.py
        adam.step()
        adam.param_groups[0] |= {"lr": 3e-4, "weight_decay": 0.1 * (weight.ndim > 1)}
        rounded = weight.detach().bfloat16()  # as tests/helpers/fsdp.py
        weight.grad = ((rounded * 3) + 0.01).float()
        adam.step()
        expected = {"master": weight.detach(), **adam.state[weight]}
        for state in ("master", "exp_avg", "exp_avg_sq"):
            own = after[f"{name}@{state}"].numpy()
            np.testing.assert_allclose(own, expected[state].numpy(), rtol=2e-6, atol=1e-9)


@pytest.mark.skipif(not maxtext.PYTHON, reason="ORBAX_PYTHON names no Python with Orbax")
@pytest.mark.parametrize(
    ("case", "form", "how"),
    [
        ("qwen3", "torch_dist", ()),
        ("qwen3", "torch", ("unscanned",)),
        ("qwen3-moe", "torch_dist", ()),
        ("qwen3-moe", "torch_dist", ("unscanned",)),
        ("qwen3-moe", "torch", ()),
    ],
)
def test_a_step_of_maxtext_goes_on(
    case: str, form: str, how: tuple[str, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The trainer makes of the weights and states of optax what torch's own AdamW makes of them."""
    import torch

    source, step = test_orbax.trained(case, tiny_model, tmp_path, "ocdbt", "zarr3", *how)
    is_moe = case == "qwen3-moe"
    sizes = ["--target-tp", 1 + is_moe, *["--target-ep", 2, "--target-etp", 1] * is_moe]
    args = ("reshard", step, tmp_path / "start", "--like", source, *sizes)
    good(*args, "--dtype", "bf16", "--target-format", form)
    flags = [*flags_of(tmp_path / "start"), *fsdp_samples.FLAGS, *DISTRIBUTED]
    flags += ["--ckpt-format", form, "--weight-decay", "0.1", "--adam-beta2", "0.95"]
    flags += ["--override-opt_param-scheduler", "--lr", "1e-3", "--min-lr", "0"]
    paths = {"checkpoint": tmp_path / "start", "save": tmp_path / "on"}
    ask("stock", te=True, world=2, flags=flags, resume=True, steps=1, **paths)
    after = Checkpoint.open(tmp_path / "on").with_optimizer()
    assert after.optimizer is not None
    for group, decay in zip(after.optimizer.groups[0], (0.1, 0.0), strict=True):
        assert (group["step"], group["lr"]) == (maxtext.STEPS + 1, 1e-3)
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), decay)
    model, start = Checkpoint.open(source), Checkpoint.open(tmp_path / "start")
    for name in model:
        weight = torch.from_numpy(model[name].numpy().copy()).requires_grad_()
        adam = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(maxtext.STEPS):  # as optax: all weights decay
            weight.grad = torch.from_numpy(maxtext.gradient(weight.detach().numpy()))
            adam.step()
        adam.param_groups[0]["weight_decay"] = 0.1 * (weight.ndim > 1)
        # as tests/helpers/fsdp.py. The last bit of a master copy can change how it is rounded.
        rounded = torch.from_numpy(start[name].numpy().astype("f4")).bfloat16()
        assert (rounded - weight.detach()).abs().max() < 2**-8 * weight.detach().abs().max()
        weight.grad = (rounded * 3 + 0.01).float()
        adam.step()
        expected = {"master": weight.detach(), **adam.state[weight]}
        for state in ("master", "exp_avg", "exp_avg_sq"):
            own = after[f"{name}@{state}"].numpy()
            np.testing.assert_allclose(own, expected[state].numpy(), rtol=2e-6, atol=2e-8)
