"""The examples of slime, verl, NeMo-RL and SkyRL hand the right tensors to an engine that cuts
memory of the trainer as theirs do; in one launch, with what goes wrong beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from tests.formats.test_quantised_exports import arrays_of
from tests.helpers.tiny import TinyModel
from tests.judge.test_live import exported, live

pytestmark = [pytest.mark.judge, pytest.mark.newest]

CASE = "deepseek-v3"  # with experts, and tensors in fp32
FACTOR = {"slime": 2}  # of the copies on the host
SCALES = "attn.q_scale", "k_scale", "v_scale"


@pytest.fixture(scope="module")
def found(work: Path, tiny_model: TinyModel) -> dict[str, Any]:
    source = tiny_model(CASE)
    return live(source, work, {"tp": 2, "pp": 2}, rl=work / "rl", like=exported(source, work, "hf"))


@pytest.mark.parametrize("update", ["slime", "verl0", "verl1", "nemo_rl", "skyrl"])
def test_an_engine_receives_all_tensors(
    update: str, found: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    dtype = {"dtype": "bf16"} if update == "skyrl" else {}
    wanted = arrays_of(exported(tiny_model(CASE), work, "bf16" if dtype else "hf", **dtype))
    received = arrays_of(work / "rl" / update)
    if update == "nemo_rl":
        layers = mckpt.open(tiny_model(CASE)).dims["num_layers"]
        for name in [f"{layer}.self_attn.{kind}" for layer in range(layers) for kind in SCALES]:
            scale = received.pop(f"model.layers.{name}")
            assert scale.tolist() == [0.5 if name == "1.self_attn.k_scale" else 1]
    assert received.keys() == wanted.keys()
    for name, array in wanted.items():
        right = array * array.dtype.type(FACTOR.get(update, 1))
        if update == "skyrl":  # also the biases of the routers, which mckpt leaves in fp32
            right = right.astype(received[name].dtype)
        assert right.dtype == received[name].dtype, name
        assert np.array_equal(received[name].view("u1"), right.view("u1")), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "linear_proj.weight: is missing\nThis is the error of rank 1."),
        ("left over", "another: the model has no such weight\nThis is the error of rank 1."),
        ("shape", "and must be contiguous torch."),
        ("dtype", "linear_proj.weight: is torch.float"),
        ("one rank", "  - weights: False on rank 0, 2, 3, True on rank 1"),
        ("clash", "extra: the model has tensors of these names:"),
        ("extra", "  - extra: "),
        ("name", "  - extra: "),
        ("align", "align is 24, and must be a power of two"),
        ("chunks", "chunks of the model have the same names; give `named`"),
    ],
)
def test_all_ranks_refuse_other_weights(name: str, said: str, found: dict[str, Any]) -> None:
    errors = found["errors"][name]
    assert said in errors[0] and len(set(errors)) == 1, errors
