"""Megatron-Core's own HybridModel and trainer judge stacks of single layers: Mamba-2, attention,
mlp and experts in any order.

What transformers saved goes to Megatron by mckpt. megatron.training of the wheel
(tests/helpers/stock.py) reads the launch line and builds HybridModel with the names of Transformer
Engine. It stores every tensor under the names and shapes that mckpt wrote, loads them, computes
transformers' logits, and saves what mckpt converts back bit for bit. Plain torch stands in for the
kernels of Mamba-2 (mckpt/trainer/mamba.py).
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.geometry.parallel import Parallel
from tests.helpers import made_models, tiny
from tests.helpers.judging import LOGITS_ATOL, record
from tests.helpers.tiny import TinyModel
from tests.judge.test_stock import FORMATS, expect_keys, through_the_trainer

installed = importlib.util.find_spec("megatron") and version("megatron-core")
if not installed or [int(n) for n in installed.split(".")[:2]] < [0, 19]:
    pytest.skip("HybridModel of megatron-core 0.19 is the judge", allow_module_level=True)
pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # of what torch and transformers import
]

PREDICTS = "nemotron_h_latent with multi-token prediction"
CASES = ("bamba", "mamba2", "nemotron_h", "nemotron_h_latent", "nemotron_h_moe", PREDICTS)
MIXTURES = ("nemotron_h_latent", "nemotron_h_moe", PREDICTS)
SIZES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 pp2 ep2 etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
}
# of a mixture, only the one that stock Megatron trains: tp needs sequence parallelism
RUN = {case: "tp2 pp2 ep2 etp1" if case in MIXTURES else "tp2 pp2" for case in CASES}
LAYOUTS = [
    (case, size)
    for case in CASES
    for size in SIZES
    if size not in ("tp2 pp2", "tp2 pp2 ep2 etp1") or size == RUN[case]
]


@pytest.fixture(scope="module")
def made(work: Path, tiny_model: TinyModel) -> dict[str, Path]:
    found = {case: tiny_model(case, "float32") for case in CASES if case != PREDICTS}
    predicting(found["nemotron_h_latent"], work / PREDICTS)
    return found | {PREDICTS: work / PREDICTS}


def predicting(source: Path, out: Path) -> None:
    """Copies a model, and gives it the tensors of two layers of multi-token prediction. The names
    are those of Megatron-Bridge, because transformers ignores such tensors
    (nemotron_h_bridge.py, mapping_registry). The shapes are those of the decoder's layers.
    """
    from safetensors.numpy import load_file, save_file

    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    pattern = config["hybrid_override_pattern"]
    more = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
    (out / "config.json").write_text(json.dumps(config | more))
    tensors = load_file(source / "model.safetensors")
    drawn = np.random.RandomState(0)
    hidden = config["hidden_size"]
    shapes = {}
    for depth in range(2):
        for place, symbol in enumerate("*E"):
            like = f"backbone.layers.{pattern.index(symbol)}."
            name = f"mtp.layers.{2 * depth + place}."
            shapes |= {
                name + key.removeprefix(like): value.shape
                for key, value in tensors.items()
                if key.startswith(like)
            }
        shapes |= {
            f"mtp.layers.{2 * depth}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")
        }
        shapes[f"mtp.layers.{2 * depth}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"mtp.layers.{2 * depth + 1}.final_layernorm.weight"] = (hidden,)
    made = {key: drawn.standard_normal(shape).astype("f4") for key, shape in shapes.items()}
    save_file(tensors | made, out / "model.safetensors", {"format": "pt"})


def tokens(case: str) -> np.ndarray:
    return made_models.tokens(case.split()[0])


@pytest.mark.parametrize(("case", "size"), LAYOUTS)
def test_the_keys_are_those_of_the_real_model(
    case: str, size: str, work: Path, made: dict[str, Path]
) -> None:
    place = work / "layout" / f"{case}-{size}".replace(" ", "-")
    expect_keys(made[case], place, Parallel(**SIZES[size]), dtypes=False)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_the_stock_trainer_computes_the_logits_of_transformers_and_saves_the_weights(
    case: str, form: str, work: Path, made: dict[str, Path]
) -> None:
    out, parallel = work / f"{case}-{form}".replace(" ", "-"), Parallel(**SIZES[RUN[case]])
    mckpt.plan(made[case], out, format=form, parallel=parallel).run()
    logits = through_the_trainer(made[case], out, tokens(case), te=True, world=4)
    reference = tiny.hf_logits(made[case], tokens(case))
    apart, largest = np.abs(logits - reference).max(), np.abs(reference).max()
    sizes = f"{parallel} (names of Transformer Engine)"
    record("stock trainer", case.partition(" ")[0], form, sizes, apart, largest, dialect="hybrid")
    assert apart < LOGITS_ATOL
