"""Training goes on after a reshard as if nothing had happened: losses and gradient norms of the
real megatron-core, for every way in which it stores the state of its optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

# importing it here would cost every run 5 s, also a run that deselects this file
if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers.commands import Pt, good, refused
from tests.helpers.judged_models import DENSE, LLAMA3, MOE, QWEN3
from tests.helpers.judging import ask, ask_all
from tests.helpers.tiny import TinyModel

pytestmark = pytest.mark.judge

# steps, of the slow runs and of the others; the latter are enough to see another state
SAVED_AT, STEPS, FEW_STEPS = 2, 10, 5
JOB = {
    "kind": "train",
    "world": 4,
    "lr": 1e-2,
    "warmup": 1,
    "decay_steps": SAVED_AT + STEPS,
    "global_batch_size": 4,
    "seq_length": 16,
    "dtype": "float32",
}
# The scale doubles after every third step. At the save, two of three steps are counted.
FP16: dict[str, Any] = {
    "dtype": "float16",
    "args": {"initial_loss_scale": 2**12, "loss_scale_window": 3, "hysteresis": 1},
}
# In the mode `duplicated`, its update does not depend on the number of tensor ranks.
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "distributed_optimizer": False,
    "args": {"muon_tp_mode": "duplicated"},
}
# with a master copy of each weight, which megatron-core requires here
BY_LAYERS: dict[str, Any] = MUON | {
    "dtype": "bfloat16",
    "args": MUON["args"] | {"use_layer_wise_distributed_optimizer": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "fully_reshardable": {},
    "dp_reshardable": {"optimizer_format": "dp_reshardable"},
    "distrib_optim": {"format": "torch"},
    "not_distributed": {"distributed_optimizer": False},
    "not_distributed_torch": {"distributed_optimizer": False, "format": "torch"},
    "bf16": {"dtype": "bfloat16"},
    "bf16_not_distributed": {"dtype": "bfloat16", "distributed_optimizer": False},
    "fp16": FP16,
    "fp16_dp_reshardable": FP16 | {"optimizer_format": "dp_reshardable"},
    "fp16_torch": FP16 | {"format": "torch"},
    "fp16_not_distributed": FP16 | {"distributed_optimizer": False},
    "muon": MUON,
    "muon_torch": MUON | {"format": "torch"},
    "muon_by_layers": BY_LAYERS
    | {"args": BY_LAYERS["args"] | {"use_layer_wise_param_layout": False}},
    "muon_by_layers_torch": BY_LAYERS
    | {"args": BY_LAYERS["args"] | {"use_layer_wise_param_layout": False}, "format": "torch"},
    "muon_and_distributed": BY_LAYERS,
    "muon_and_dp_reshardable": BY_LAYERS | {"optimizer_format": "dp_reshardable"},
}
MODELS = {
    "tied": DENSE | LLAMA3 | {"use_rope_scaling": False},
    "dense": DENSE | QWEN3,
    "moe": MOE | QWEN3,
}


class Run(NamedTuple):
    """A run that is saved at one layout in one form, resharded, and continued at another."""

    model: str
    form: str
    before: dict[str, int]
    after: dict[str, int]
    target: str = "torch_dist"  # format of the resharded checkpoint
    command: str = "reshard"

    @property
    def saved(self) -> str:
        sizes = "".join(f"{k}{v}" for k, v in self.before.items())
        return f"{self.model}-{self.form}-{sizes}"

    @property
    def name(self) -> str:
        more = [self.command] * (self.command != "reshard")
        return "-".join([self._moved, *more, self.target])

    @property
    def _moved(self) -> str:
        return f"{self.saved}-to-{''.join(f'{k}{v}' for k, v in self.after.items())}"

    @property
    def native(self) -> str | None:
        """The name of the run in which megatron-core itself changes the layout, if it can."""
        forms = ("fully_reshardable", "not_distributed", "fp16", "muon", "muon_and_distributed")
        # it cannot change the number of optimizers that Muon has with experts
        can = self.form in forms and (self.form != "muon" or self.model == "dense")
        return f"{self._moved}-natively" if can else None

    @property
    def has_curve(self) -> bool:
        """Whether the test compares it with the run that was never resharded. At another layout,
        rounding makes the routers of the latent models choose other experts, so those are left out.
        """
        return self.model != "mla" or self.before == self.after

    @property
    def options(self) -> dict[str, Any]:
        """The trainer's options that say which optimizer runs."""
        kept = ("distributed_optimizer", "dtype", "args", "optimizer")
        return {k: v for k, v in FORMS[self.form].items() if k in kept}


LATENT = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
RUNS = [
    Run("dense", "dp_reshardable", {"tp": 2, "pp": 2}, {"tp": 4}),
    Run("tied", "dp_reshardable", {"pp": 2}, {"tp": 2}),
    Run("moe", "dp_reshardable", {"ep": 2}, {"ep": 4}),
    Run("moe", "distrib_optim", {"ep": 2}, {"ep": 1}),
    Run("dense", "fully_reshardable", {"tp": 2, "pp": 2}, {"tp": 2}),
    Run("dense", "not_distributed_torch", {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}),
    Run("mla", "fully_reshardable", {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}),
    Run("moe", "dp_reshardable", LATENT, {"tp": 2, "ep": 2, "etp": 1}, command="repair"),
    Run("moe", "dp_reshardable", {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}),
    Run("moe", "distrib_optim", {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1, "pp": 2}, "torch"),
    Run("moe", "muon_by_layers", {"ep": 2}, {"pp": 2}),
    Run("tied", "fp16", {"pp": 2}, {"tp": 2}),
    # of Llama-Nemotron, whose layers have mlps of several widths, or lack a part
    Run("different", "fully_reshardable", {"tp": 2, "pp": 2}, {"tp": 2}),
    Run("different", "distrib_optim", {"pp": 2}, {"tp": 2}),
    Run("tied", "fp16_torch", {"pp": 2}, {"pp": 2}),
]
# these take minutes, and are slow
MORE = [
    Run("moe", "dp_reshardable", LATENT, {"tp": 4}),
    Run("moe", "dp_reshardable", LATENT, {"tp": 4, "ep": 2, "etp": 2}, command="repair"),
    Run("dense", "fully_reshardable", {"tp": 2, "pp": 2}, {"tp": 4}),
    Run("dense", "muon", {"tp": 2, "pp": 2}, {"tp": 4}),
    Run("dense", "dp_reshardable", {"tp": 2, "pp": 2}, {"pp": 4}),
    Run("dense", "dp_reshardable", {"tp": 2, "pp": 2}, {"tp": 1}),
    Run("dense", "distrib_optim", {"tp": 2, "pp": 2}, {"pp": 2}),
    Run("tied", "distrib_optim", {"pp": 2}, {"tp": 2}),
    Run("dense", "not_distributed", {"tp": 2, "pp": 2}, {"tp": 4}),
    Run("mla", "fully_reshardable", {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}, "torch"),
    Run("dense", "fully_reshardable", {"tp": 2, "pp": 2}, {"tp": 4}, "torch"),
    Run("dense", "dp_reshardable", {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, "torch"),
    Run("tied", "distrib_optim", {"pp": 2}, {"tp": 2, "pp": 2}, "torch"),
    Run("dense", "not_distributed_torch", {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, "torch"),
    Run("moe", "not_distributed", {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, "torch"),
    Run("moe", "bf16", {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 1}, "torch"),
    Run("tied", "bf16_not_distributed", {"pp": 2}, {"pp": 2}, "torch"),
    Run("mla", "distrib_optim", LATENT, LATENT),
    Run("tied", "not_distributed", {"pp": 2}, {"tp": 2}),
    Run("moe", "muon", {"ep": 2}, {"tp": 2}),
    Run("moe", "muon", {"ep": 2}, {"ep": 2}, "torch"),
    Run("dense", "muon_torch", {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}),
    Run("dense", "muon_and_distributed", {"tp": 2}, {"pp": 2}),
    Run("moe", "muon_by_layers_torch", {"ep": 2}, {"ep": 2}),
    Run("tied", "muon_by_layers_torch", {"pp": 2}, {"tp": 2}),
    Run("moe", "muon_by_layers_torch", {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}),
    Run("dense", "muon_and_dp_reshardable", {"tp": 2}, {"tp": 2}),
    Run("dense", "muon_and_dp_reshardable", {"tp": 2, "pp": 2}, {"tp": 2}),
    Run("moe", "fp16_dp_reshardable", {"ep": 2}, {"ep": 2}, "torch"),
    Run("tied", "fp16_not_distributed", {"pp": 2}, {"pp": 2}, "torch"),
]


OLD = tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 19)


def known(runs: list[Run]) -> list[Run]:
    """Returns the runs that the installed packages have."""
    # The files of `torch` are the same in all versions, so that one of them is enough for these.
    if OLD:
        runs = [run for run in runs if run.target != "torch"]
    if not find_spec("emerging_optimizers"):  # which needs Python 3.12
        runs = [run for run in runs if "muon" not in run.form]
    return runs


RUNS, MORE = known(RUNS), known(MORE)
if OLD:  # one of each form; CI runs the others with the newest version
    one = {r.form: r for r in reversed(RUNS) if r.model != "mla" and r.command != "repair"}
    MORE += [run for run in RUNS if run not in one.values()]
    RUNS = [run for run in RUNS if run in one.values()]
PARAMETERS = [
    *(pytest.param(run, id=run.name) for run in RUNS),
    *(pytest.param(run, id=run.name, marks=pytest.mark.slow) for run in MORE),
]


@pytest.fixture(scope="module")
def saved(work: Path, tiny_model: TinyModel) -> Callable[[Run], Path]:
    """A function: a run -> the checkpoint that megatron-core saved at its step 2."""

    def start(model: str) -> Path:
        out = work / model
        if out.exists():
            return out
        if model in MODELS:
            ask_all([new(MODELS[model], out)])
        elif model == "mla":
            mckpt.plan(tiny_model("deepseek-v3", "float32"), out, format="torch_dist").run()
        else:
            options = {"transformer_impl": "local", "format": "torch_dist"}
            mckpt.plan(tiny_model("llama_nemotron", "float32"), out, **options).run()
        return out

    def trained(run: Run) -> Path:
        out = work / run.saved
        if not out.exists():
            job = JOB | run.before | FORMS[run.form]
            ask(**job | {"checkpoint": start(run.model), "steps": SAVED_AT, "save": out})
        return out

    return trained


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, int], list[Any]]:
    """The steps of the runs that are not resharded, by name and number of steps."""
    return {}


def new(args: dict[str, Any], destination: Path) -> dict[str, Any]:
    """Returns the case that saves a model with random weights."""
    return {"kind": "save", "args": args, "format": "torch_dist", "destination": destination}


def resumed(checkpoint: Path, run: Run, sizes: dict[str, int], steps: int) -> dict[str, Any]:
    """Returns the case that goes on from a checkpoint."""
    job = JOB | {"checkpoint": checkpoint, "resume": True, "steps": SAVED_AT + steps}
    return job | sizes | run.options


@pytest.mark.parametrize("run", PARAMETERS)
def test_losses_go_on_as_without_a_reshard(
    run: Run, work: Path, saved: Callable[[Run], Path], whole: dict[tuple[str, int], list[Any]]
) -> None:
    """Two layouts add in another order, so their losses differ by rounding, and those of a router
    by more. Where megatron-core can change the layout itself, nothing may differ. In fp16 the loss
    is scaled as before. There and back is bitwise.
    """
    source, out, steps = saved(run), work / run.name, STEPS if run in MORE else FEW_STEPS
    sizes = {"tp": 1, "pp": 1, "ep": 1, "vpp": 1} | run.after
    sizes.setdefault("etp", sizes["tp"])
    options = [x for k, v in sizes.items() for x in (f"--target-{k}", v)]
    # other padding would be other rows in the softmax, and so other losses
    options += ["--target-format", run.target, "--keep-padding"]
    good(run.command, source, out, *options * (run.command == "reshard"))
    at, cases = (run.saved, steps), [resumed(out, run, run.after, steps)]
    if run.native:
        cases.append(resumed(source, run, run.after, steps))
    if run.has_curve and at not in whole:
        cases.append(resumed(source, run, run.before, steps))
    mine, *others = [found["steps"] for found in ask_all(cases)]
    native = others.pop(0) if run.native else None
    expected = whole.setdefault(at, *others) if run.has_curve else None
    scaled = "fp16" in run.form
    if scaled:
        scales = curve(mine, "loss_scale")
        assert expected and scales == curve(expected, "loss_scale")
        assert scales[:5] == [2**12, *[2**13] * 3, 2**14]
    assert native or expected
    for key in ("loss", "grad_norm"):
        found = curve(mine, key)
        assert len(found) == steps
        if native:
            assert found == curve(native, key), key
        if expected and run.before == run.after:
            assert found == curve(expected, key), key
        elif expected and not scaled:
            # Muon makes all directions of a gradient equally long, also those of rounding
            rtol = 5e-2 if "muon" in run.form else 2e-5
            np.testing.assert_allclose(found, curve(expected, key), rtol=rtol, err_msg=key)
    kinds = ("dp_reshardable", "muon")
    if run.target == "torch" or any(kind in run.form for kind in kinds):
        expect_back(run, source, out)


def curve(steps: list[dict[str, Any]], key: str) -> list[float]:
    return [step[key] for step in steps]


def expect_back(run: Run, source: Path, moved: Path) -> None:
    """Fails unless a checkpoint that was resharded has all values, and another reshard too."""
    back = Path(f"{moved}-back")
    sizes = [x for k, v in run.before.items() for x in (f"--target-{k}", v)]
    sizes += ["--target-format", run.target] if "muon" in run.form else []
    good("reshard", moved, back, "--target-tp", 1, *sizes, "--keep-padding")
    first = Checkpoint.open(source)
    states = {name.partition("@")[2] for name in first.with_optimizer() if "@" in name}
    assert first.optimizer and first.optimizer.states == sorted(states)
    assert states >= {"exp_avg", "exp_avg_sq"}
    assert ("momentum_buffer" in states) == ("muon" in run.form)
    number = sum("@" in name for name in first.with_optimizer())
    for other in (moved, back):
        difference = mckpt.diff(first, other)
        assert not difference and difference.same == len(first) + number


def test_the_steps_of_experts_are_kept_where_the_first_stage_has_none(tmp_path: Path) -> None:
    """The first rank, whose groups Megatron saves, counts no steps of experts. The loss goes on as
    in the run of `torch`, of which each rank has its own groups, and all count the same steps.
    """
    start = tmp_path / "start"
    args = MOE | QWEN3 | {"moe_layer_freq": [0, 0, 1, 1]}
    forms = ("distrib_optim", "fully_reshardable", "dp_reshardable")
    job = JOB | {"pp": 2, "ep": 2, "checkpoint": start, "steps": SAVED_AT}
    ask_all([new(args, start), *(job | FORMS[form] | {"save": tmp_path / form} for form in forms)])
    last = {"resume": True, "steps": SAVED_AT + 2}
    cases = [JOB | last | {"pp": 2, "ep": 2, "checkpoint": tmp_path / "distrib_optim"}]
    for form in forms:
        moved, saved = tmp_path / f"{form} moved", tmp_path / f"{form} saved"
        sizes = ("--target-pp", 1, "--target-ep", 2, "--target-format", "torch_dist")
        good("reshard", tmp_path / form, moved, *sizes, "--keep-padding")
        cases.append(JOB | last | {"ep": 2, "checkpoint": moved, "save": saved})
    expected, *others = (curve(found["steps"], "loss") for found in ask_all(cases))
    for form, losses in zip(forms, others, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        optimizer = Checkpoint.open(tmp_path / f"{form} saved").optimizer
        assert optimizer is not None and len(optimizer.groups) == 2
        assert {g["step"] for own in optimizer.groups for g in own} == {SAVED_AT + 2}


def test_the_first_rank_may_have_an_old_number_of_steps(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint with all steps keeps those of experts on a first stage
    that has no expert. The losses at one stage are those of the run itself.
    """
    start = tmp_path / "start"
    args = MOE | QWEN3 | {"moe_layer_freq": [0, 0, 1, 1]}
    job = JOB | FORMS["not_distributed_torch"] | {"pp": 2, "ep": 2}
    made, moved, late, last = (tmp_path / name for name in ("made", "moved", "late", "last"))
    ask_all([new(args, start), job | {"checkpoint": start, "steps": SAVED_AT, "save": made}])
    good("reshard", made, moved, "--target-pp", 2, "--target-ep", 2, "--keep-padding")
    job |= {"resume": True}
    ask(**job | {"checkpoint": moved, "steps": SAVED_AT + 2, "save": late})
    first = Pt(next(late.rglob("mp_rank_00_000_000/model_optim_rng.pt"))).value
    stale = [g["step"] for g in first["optimizer"][1]["param_groups"]]
    assert set(stale) == {SAVED_AT}
    sizes = ("--target-pp", 1, "--target-ep", 2, "--target-format", "torch_dist")
    good("reshard", late, last, *sizes, "--keep-padding")
    cases = [job | {"checkpoint": late}, job | {"pp": 1, "checkpoint": last}]
    expected, found = ask_all([case | {"steps": SAVED_AT + 4} for case in cases])
    np.testing.assert_allclose(
        curve(found["steps"], "loss"), curve(expected["steps"], "loss"), rtol=2e-5
    )


@pytest.mark.newest
def test_an_optimizer_that_has_made_no_step_is_sound(tmp_path: Path) -> None:
    """The gradient of its first iteration overflows in fp16. Megatron loads no such state from
    torch_dist, and saves none of a distributed optimizer in the other forms.
    """
    start = tmp_path / "start"
    job = JOB | {"world": 2, "tp": 2, "steps": 1, "dtype": "float16", "checkpoint": start}
    job |= {"args": FP16["args"] | {"initial_loss_scale": 2.0**24}}
    forms = ("dp_reshardable", "not_distributed", "not_distributed_torch")
    cases = [job | FORMS[form] | {"save": tmp_path / form} for form in forms]
    _, *results = ask_all([new(DENSE | QWEN3, start), *cases])
    assert not any("grad_norm" in result["steps"][0] for result in results)
    sizes = ("--target-tp", 2, "--keep-padding")
    for form in forms:
        assert "sound" in good("check", tmp_path / form).out
        optimizer = Checkpoint.open(tmp_path / form).optimizer
        assert optimizer is not None and optimizer.states == ["master"]
        args = ("reshard", tmp_path / form, tmp_path / "out", *sizes)
        refused(2, "has made no step", args=(*args, "--target-format", "torch_dist"))
    for name in ("from_dist", "from_torch"):
        source = tmp_path / {"from_dist": "not_distributed"}.get(name, "not_distributed_torch")
        good("reshard", source, tmp_path / name, *sizes, "--target-format", "torch")
        assert not mckpt.diff(source, tmp_path / name)
    on = job | {"resume": True, "steps": 12, "distributed_optimizer": False}
    # Of one data-parallel rank, a parameter begins at a multiple of 64, and the memory between two
    # parameters, which megatron-core does not set, does not.
    flat = tmp_path / "dp_reshardable"
    every = [s for s in Checkpoint.open(flat).opened.spans([]) if s.dtype]
    stored = [s for s in every if "bucket_idx_0.param" in s.name]
    for wanted in (0, 1):
        span = next(s for s in stored if (int(s.name.split("[")[1][:-1]) % 64 == 0) == wanted)
        with open(span.path, "r+b") as file:
            file.seek(span.at)
            file.write(np.float32(np.nan).tobytes())
        assert len(mckpt.check(flat).suspicious) == wanted
    names = ("not_distributed_torch", "from_dist", "from_torch")
    results = ask_all([on | {"checkpoint": tmp_path / name} for name in names])
    first, *others = (result["steps"] for result in results)
    assert any("grad_norm" in step for step in first)  # the scale has become small enough
    assert all(curve(one, "loss") == curve(first, "loss") for one in others)


# The files of `torch` name no parameter. What was trained -> the model, the sizes, and the patterns
# of the parameters that were not
FROZEN: dict[str, tuple[str, dict[str, int], list[str]]] = {
    "all but a tied embedding": ("tied", {"pp": 2}, ["*embedding*", "*output_layer*"]),
    "all but experts": ("moe", {"ep": 2}, ["*.experts.*"]),
    "routers and attention": ("moe", {"ep": 2}, ["*embedding*", "*norm*", "*.experts.*"]),
    "norms": ("dense", {"tp": 2}, ["*embedding*", "*_layer.weight", "*linear_*.weight"]),
    "all but one of two norms": ("dense", {"tp": 2}, ["*q_layernorm*"]),
}


@pytest.mark.newest
def test_parameters_that_were_not_trained_are_found(tmp_path: Path) -> None:
    """The states in the files are those that megatron-core saves with names in the same run."""
    import torch

    cases = [new(args, tmp_path / name) for name, args in MODELS.items()]
    job = JOB | {"world": 2, "dtype": "bfloat16"}
    for name, (model, sizes, patterns) in FROZEN.items():
        for form in ("distrib_optim", "fully_reshardable"):
            own = {"steps": 2, "frozen": patterns, "checkpoint": tmp_path / model}
            cases.append(job | sizes | FORMS[form] | own | {"save": tmp_path / f"{name} {form}"})
    ask_all(cases)
    for name in FROZEN:
        files, named = (tmp_path / f"{name} {x}" for x in ("distrib_optim", "fully_reshardable"))
        number = len(Checkpoint.open(named).with_optimizer())
        assert len(Checkpoint.open(named)) < number < 4 * len(Checkpoint.open(named))
        sizes = ("--target-tp", 1, "--target-format", "torch_dist", "--keep-padding")
        good("reshard", files, tmp_path / f"{name} moved", *sizes)
        for other in (files, tmp_path / f"{name} moved"):
            difference = mckpt.diff(named, other)
            assert not difference and difference.same == number
    # with equal values, either norm may be the one in the buffer
    for file in files.rglob("model_optim_rng.pt"):
        saved = torch.load(file, weights_only=False)
        for key in [key for key in saved["model"] if "q_layernorm.weight" in key]:
            saved["model"][key] = saved["model"][key.replace("q_", "k_")]
        torch.save(saved, file)
    words = ("either", "q_layernorm", "k_layernorm", "--ckpt-format torch_dist", "--no-optimizer")
    refused(2, *words, args=("reshard", files, tmp_path / "out", "--target-tp", 1))
