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
from tests.helpers.judging import expect_keys, explain, judge, record
from tests.judge.test_stock import FORMATS, LOGITS_ATOL, launch_line

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
RUNS = [(case, form) for case in CASES for form in FORMATS]


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    made_models.make([case for case in CASES if case != PREDICTS], work / "hf")
    predicting(work / "hf" / "nemotron_h_latent", work / "hf" / PREDICTS)
    return work / "hf"


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


@pytest.fixture(scope="module")
def written(work: Path, made: Path) -> dict[tuple[str, str, str], Path]:
    """(model, size, format) -> checkpoint."""
    out = {}
    for case, size in LAYOUTS:
        for form in FORMATS:
            place = work / "written" / f"{case}-{size}-{form}".replace(" ", "-")
            wanted = {"format": form, "parallel": Parallel(**SIZES[size])}
            mckpt.plan(made / case, place, **wanted).run()
            out[case, size, form] = place
    return out


@pytest.fixture(scope="module")
def results(work: Path, written: dict[tuple[str, str, str], Path]) -> dict[str, dict[str, Any]]:
    """All cases in one launch."""
    cases: list[dict[str, Any]] = []
    for case, size in LAYOUTS:
        parallel = Parallel(**SIZES[size])
        flags, world = launch_line(written[case, size, "torch"]), parallel.tp * parallel.pp
        keys = {"name": f"keys {case} {size}", "flags": flags, "world": world, "keys": True}
        cases.append(keys | {"checkpoint": None})
    for case, form in RUNS:
        out = written[case, RUN[case], form]
        given = {"flags": launch_line(out), "checkpoint": str(out), "world": 4}
        given["tokens"] = tokens(case).tolist()
        given["save"] = str(work / "saved" / f"{case}-{form}")
        cases.append({"name": f"{case}-{form}", **given})
    return judge(cases, 4, work / "judged", fake_te=True, program="stock.py")


@pytest.mark.parametrize(("case", "size"), LAYOUTS)
def test_the_keys_are_those_of_the_real_model(
    case: str,
    size: str,
    written: dict[tuple[str, str, str], Path],
    results: dict[str, dict[str, Any]],
) -> None:
    dist, files = (written[case, size, form] / "release" for form in FORMATS)
    expect_keys(results[f"keys {case} {size}"], dist, files)


@pytest.mark.parametrize(("case", "form"), RUNS)
def test_the_stock_trainer_computes_the_logits_of_transformers(
    case: str, form: str, made: Path, results: dict[str, dict[str, Any]]
) -> None:
    result = results[f"{case}-{form}"]
    assert result["ok"], explain(result)
    reference = tiny.hf_logits(made / case, tokens(case))
    apart, largest = np.abs(result["logits"] - reference).max(), np.abs(reference).max()
    sizes = f"{Parallel(**SIZES[RUN[case]])} (names of Transformer Engine)"
    record("stock trainer", case.partition(" ")[0], form, sizes, apart, largest, dialect="hybrid")
    assert apart < LOGITS_ATOL


@pytest.mark.parametrize(("case", "form"), RUNS)
def test_a_checkpoint_of_the_stock_trainer_comes_back_bit_for_bit(
    case: str, form: str, work: Path, made: Path, results: dict[str, dict[str, Any]]
) -> None:
    assert results[f"{case}-{form}"]["ok"], explain(results[f"{case}-{form}"])
    out = work / "back" / f"{case}-{form}"
    mckpt.plan(work / "saved" / f"{case}-{form}", out, format="hf").run(check_replicas=True)
    assert not mckpt.diff(made / case, out)
    # config.json, made of the stock trainer's own args
    assert mckpt.open(out).dims == mckpt.open(made / case).dims
