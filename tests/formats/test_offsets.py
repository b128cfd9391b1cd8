"""Tensors that one side stores less 1: what is rounded, and what the plan, the manifest and a
comparison say about it.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models
from tests.helpers.commands import good, restate

NORM = "model.layers.0.linear_attn.norm.weight"
# the first two are exact; the others lose one bit, and all
WEIGHTS = (0.5, 1.7578125, 0.302734375, 0.00106048583984375)
BACK = (0.5, 1.7578125, 0.3046875, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 in bfloat16. One norm begins with these values, and all others are exact."""
    made_models.make(["qwen3_5"], out := tmp_path_factory.mktemp("offsets"))
    path = out / "qwen3_5" / "model.safetensors"
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(path).items()}
    tensors[NORM][:4] = WEIGHTS
    save_file(tensors, path, {"format": "pt"})
    return out / "qwen3_5"


@pytest.mark.parametrize(("dialect", "form"), [("hybrid", "torch"), ("gpt", "torch_dist")])
def test_a_norm_that_is_stored_less_1_is_rounded_once(
    model: Path, tmp_path: Path, dialect: str, form: str
) -> None:
    wanted = {"format": form, "dialect": dialect, "parallel": Parallel(tp=2)}
    plan = mckpt.plan(model, tmp_path / "there", **wanted)
    (note,) = [text for text in plan.facts["notes"] if "sum of the value and -1" in text]
    assert "layers.0.linear.norm.weight" in note and "rounded to bfloat16" in note
    assert note in plan.summary()
    plan.run()
    manifest = json.loads(next((tmp_path / "there").rglob("mckpt.json")).read_text())
    assert note in manifest["notes"]
    there = mckpt.open(tmp_path / "there")["layers.0.linear.norm.weight"].numpy()
    assert there[:4].tolist() == list(BACK)
    mckpt.plan(tmp_path / "there", tmp_path / "back", format="hf").run()
    back, before = (
        load_file(tmp_path / "back/model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    assert back[NORM][:4].tolist() == list(BACK)
    before[NORM][:4] = BACK
    assert all(np.array_equal(back[name].view("u2"), before[name].view("u2")) for name in before)


def test_a_comparison_says_what_was_rounded_and_finds_other_differences(
    model: Path, tmp_path: Path
) -> None:
    mckpt.plan(model, tmp_path / "there", dialect="hybrid", format="torch").run()
    for sides in ((model, tmp_path / "there"), (tmp_path / "there", model)):
        found = mckpt.diff(*sides)
        assert not found
        (text,) = found.rounded
        assert text.startswith(
            "layers.0.linear.norm.weight: 2 values of 28 compared after rounding"
        )
        assert "the same but for this rounding" in good("diff", *sides).out
    other = tmp_path / "other"
    mckpt.plan(tmp_path / "there", other, format="hf").run()
    assert mckpt.diff(model, other).changed  # both store the weight itself
    tensors = load_file(other / "model.safetensors")
    tensors[NORM][1] = 1.75  # the next number below
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    restate(other / "model.safetensors")
    (changed,) = mckpt.diff(other, tmp_path / "there").changed
    assert changed.count == 1 and changed.first == (1,)
