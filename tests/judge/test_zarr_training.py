"""Training goes on from a `zarr` checkpoint that an old release of megatron-core saved itself, with
optimizer and schedule: today's release, at other parallel sizes, has the losses and gradient norms
of the old one, which went on itself (tests/helpers/zarr_training.py).
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers.commands import good
from tests.helpers.commands import mckpt as command
from tests.helpers.judging import ask
from tests.helpers.tiny import unpack

pytestmark = [pytest.mark.judge, pytest.mark.newest]

# largest relative difference in another order of additions
ORDER = 2e-5


class Case(NamedTuple):
    """A sample in the form in which it was saved, and the sizes at which its training goes on."""

    form: str
    sizes: dict[str, int]
    ranks: int = 2
    forgets: bool = False  # whether the first moments of Adam are lost

    @property
    def name(self) -> str:
        sizes = "".join(f"{k}{v}" for k, v in self.sizes.items())
        return f"{self.form}-{sizes}{'-forgets' * self.forgets}"


FORMS = {
    "fully_sharded_model_space": "fully_sharded_model_space",  # saved at tp 2, dp 2
    "dp_zero_gather_scatter": "dp_zero_gather_scatter",  # at pp 2, dp 2
    "float16": "not distributed",  # at tp 2, pp 2
}
CASES = [
    Case("fully_sharded_model_space", {"pp": 2, "vpp": 2}),
    Case("float16", {"tp": 2}),
]
MORE = [
    Case("dp_zero_gather_scatter", {"tp": 2}),
    Case("fully_sharded_model_space", {"tp": 2}, 4),
    Case("fully_sharded_model_space", {"tp": 1}, 4),
    Case("fully_sharded_model_space", {"pp": 2, "vpp": 2}, forgets=True),
]
PARAMETERS = [
    *(pytest.param(case, id=case.name) for case in CASES),
    *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in MORE),
]


def unpacked(form: str, directory: Path) -> Path:
    """Returns a directory with the checkpoint `zarr` of a sample, and its `run.json`."""
    if not (directory / form).exists():
        unpack(f"zarr/0.12-trained-{form}", directory / form)
    return directory / form


@pytest.mark.parametrize("case", PARAMETERS)
def test_losses_go_on_as_in_the_old_release(case: Case, tmp_path: Path) -> None:
    """Without the first moments they do not, so the comparison can fail."""
    sample, moved = unpacked(case.form, tmp_path), tmp_path / "moved"
    for chunk in (sample / "zarr").glob("iter_*/optimizer.state.exp_avg.*/[0-9]*"):
        if case.forgets:
            chunk.write_bytes(bytes(chunk.stat().st_size))
    sizes = {"tp": 1, "pp": 1, "vpp": 1} | case.sizes
    options = [x for k, v in sizes.items() for x in (f"--target-{k}", v)]
    # other padding would be other rows in the softmax, and so other losses
    options += ["--target-format", "torch_dist", "--keep-padding"]
    good("reshard", sample / "zarr", moved, *options)
    old = json.loads((sample / "run.json").read_text())
    job = {**old["job"], **case.sizes, "checkpoint": moved, "world": case.ranks, "resume": True}
    mine = ask(**job | {"kind": "train"})["steps"]
    expected = old["steps"][-len(mine) :]
    assert len(mine) == 10 and [s["step"] for s in mine] == [s["step"] for s in expected]
    apart = {
        key: max(abs(a[key] / b[key] - 1) for a, b in zip(mine, expected, strict=True))
        for key in ("loss", "grad_norm", "lr")
    }
    assert apart["lr"] == 0
    if case.forgets:
        assert apart["loss"] > 1e-3 and apart["grad_norm"] > 1e-3
    else:
        assert apart["loss"] < ORDER and apart["grad_norm"] < ORDER, apart


@pytest.mark.parametrize("form", FORMS)
def test_the_schedule_is_kept(form: str, tmp_path: Path) -> None:
    source = unpacked(form, tmp_path) / "zarr"
    checkpoint = Checkpoint.open(source)
    assert checkpoint.optimizer is not None and checkpoint.optimizer.form == FORMS[form]
    good("repair", source, tmp_path / "out")
    before, after = (Checkpoint.open(p).opened.common for p in (source, tmp_path / "out"))
    assert before is not None and after is not None
    schedule = after.fields["opt_param_scheduler"]
    assert schedule == before.fields["opt_param_scheduler"] and schedule["num_steps"] == 8


@pytest.mark.usefixtures("forked_verify")
@pytest.mark.filterwarnings("ignore")  # torch and transformers cause it by their imports
def test_todays_megatron_core_judges_the_weights(tmp_path: Path) -> None:
    saved = unpacked("float16", tmp_path) / "zarr"
    mckpt.convert(saved, tmp_path / "hf", format="hf")
    assert mckpt.verify(tmp_path / "hf", saved).verdict == "pass"
    said = command("train", saved, "--steps", 1)
    assert said.code == 3 and "loads up to 0.15; write another: mckpt reshard" in said.err
