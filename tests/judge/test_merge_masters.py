"""Averages of the fp32 master copies that the real megatron-core saved, in several formats."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from tests.helpers import optimizer_samples, tiny
from tests.helpers.judging import ask

pytestmark = pytest.mark.judge

# how many steps, the form of the optimizer's state, and the parallel sizes
RUNS = (
    (1, "fully_reshardable", {"tp": 2, "ep": 2, "etp": 1}),
    (2, "torch", {"ep": 2}),
    (3, "float16", {"pp": 2}),
)


def test_each_weight_is_the_rounded_average_of_the_master_copies(tmp_path: Path) -> None:
    import torch

    hf = tiny.tiny_random("qwen3-moe", tmp_path / "hf", "bfloat16")
    mckpt.convert(hf, tmp_path / "start")
    runs = []
    for steps, form, sizes in RUNS:
        more = optimizer_samples.FORMS[form]
        case = optimizer_samples.case(f"of-{steps}", tmp_path / "start", tmp_path, sizes, more)
        ask(**{**case, "steps": steps})
        runs.append(tmp_path / case["name"])
    coefficients = [0.25, 0.25, 0.5]
    mckpt.merge(runs, tmp_path / "out", weights=coefficients, summed="masters", tp=2, pp=2)
    mckpt.merge(runs, tmp_path / "rounded", weights=coefficients)

    sources = [mckpt.open(run).with_optimizer() for run in runs]
    out, weights = mckpt.open(tmp_path / "out"), mckpt.open(tmp_path / "rounded")
    assert len(out) == len(weights) > 50
    apart = 0
    for name in out:
        total = torch.zeros(out[name].shape)
        for source, coefficient in zip(sources, coefficients, strict=True):
            master = source[f"{name}@master"] if f"{name}@master" in source else source[name]
            values = torch.from_numpy(np.array(master[:].numpy(), "f4"))
            total.add_(values, alpha=coefficient)
        kind = getattr(torch, out[name].dtype)
        wanted = total.to(kind).view(torch.uint8).numpy()
        assert out[name][:].numpy().tobytes() == wanted.tobytes(), name
        apart += int(weights[name][:].numpy().tobytes() != wanted.tobytes())
    assert apart > 20  # the average of rounded weights is another one
    assert mckpt.open(tmp_path / "out").files.manifest["average"]["of"] == "masters"
    assert mckpt.check(tmp_path / "out").verdict == "sound"
