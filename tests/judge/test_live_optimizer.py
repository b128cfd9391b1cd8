"""The optimizer of a live model gets the bits of `mckpt reshard` and of megatron-core's own load,
trains on as after these, and is saved so that megatron-core loads it at other sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from tests.formats.test_lost_states import PROJ, SECOND, STATE, keys_with
from tests.helpers import optimizer_samples as samples
from tests.helpers import tiny
from tests.helpers.judging import explain, judge

pytestmark = [pytest.mark.judge, pytest.mark.newest]

WORLD = 4
PLAIN: dict[str, Any] = {"distributed_optimizer": False}
FP32: dict[str, Any] = {"dtype": "float32"}
# the loss is scaled without an overflow, so that each step updates
FP16: dict[str, Any] = {"initial_loss_scale": 2**12, "loss_scale_window": 3, "hysteresis": 1}
# trainings: name -> model, sizes, options of the trainer
TRAINED: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "dense": ("qwen3", {"tp": 2, "pp": 2}, {"optimizer_format": "dp_reshardable"}),
    "tied": ("llama-tied", {"tp": 2}, {"optimizer_format": "dp_reshardable"}),
    "experts": ("qwen3-moe", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"format": "torch"}),
    "latent": ("deepseek-v3", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {}),
    "plain": ("qwen3", {"pp": 2}, PLAIN),
    "fp32": ("qwen3", {"tp": 2, "pp": 2}, FP32),
    "fp16": ("qwen3", {"tp": 2, "pp": 2}, {"dtype": "float16", "args": FP16}),
    "sgd": ("qwen3", {"tp": 2}, PLAIN | {"optimizer": "sgd"}),
}
# loads: name -> training, sizes of the live model, options of its trainer, options of a save.
# megatron-core loads what mckpt.reshard made of the training at these sizes.
LOADS: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dense": ("dense", {"tp": 2}, {}, {}),
    "tied": ("tied", {"pp": 2}, {}, {}),
    "experts": ("experts", {"ep": 2}, {}, {"format": "torch", "tp": 2, "ep": 2, "etp": 1}),
    "latent": ("latent", {"pp": 2, "ep": 2}, {}, {}),
    "plain": ("plain", {"tp": 2}, PLAIN, {}),
    "fp16": ("fp16", {"tp": 2}, {"dtype": "float16"}, {}),
}
# megatron-core loads what the load of that name saved, or this one: the live model has then an
# optimizer of another kind than the training
SAVED: dict[str, tuple[str, str, dict[str, int], dict[str, Any]]] = {
    "dense-saved": ("dense", "dense", {"pp": 2, "vpp": 2}, {}),
    "experts-saved": ("experts", "experts", {"tp": 2, "ep": 2, "etp": 1}, {}),
    "plain-saved": ("plain", "plain", {"tp": 2, "pp": 2}, PLAIN),
    "to-distributed": ("plain", "to-distributed", {"tp": 2}, {}),
    "to-plain": ("fp32", "to-plain", {"tp": 2}, FP32 | PLAIN),
}
# what the live model loads, options of its trainer, and the error
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-state": ("made/qwen3", {}, "has no state of an optimizer; leave out load_optimizer"),
    "hugging-face": ("made/qwen3-hf", {}, "has no state of an optimizer"),
    "live-sgd": ("dense", PLAIN | {"optimizer": "sgd"}, "the live optimizer is sgd, and"),
    "sgd": ("sgd", PLAIN, "has the states master, momentum_buffer, and the live one exp_avg"),
    "dtype": ("fp32", PLAIN, "embed.weight: float32 in the checkpoint, bfloat16 in the model"),
    "lost": (
        "lost",
        {},
        "the exp_avg_sq of layers.0.attn.o.weight and 1 more of its kind is missing",
    ),
    "settings": ("dense", {}, "'wd_mult': 0.25"),
    "other": ("dense", {}, "the state of parameters that the model chunks do not have"),
}


@pytest.fixture(scope="module")
def place(work: Path) -> Path:
    return work / "live-optimizer"


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, dict[str, Any]]:
    """The results of every case, all from one launch."""
    for model in {model for model, _, _ in TRAINED.values()}:
        source = tiny.tiny_random(model, place / "made" / f"{model}-hf", "bfloat16")
        mckpt.convert(source, place / "made" / model, transformer_impl="local")
    keys_with(STATE + SECOND, PROJ)(tiny.unpack("fsdp/qwen3-plain", place / "lost"))
    cases = [
        samples.case(name, place / "made" / model, place, {"world": WORLD, **sizes}, options)
        for name, (model, sizes, options) in TRAINED.items()
    ]

    def add(name: str, training: str, sizes: dict[str, int], options: Any, **more: Any) -> None:
        args = FP16 if training == "fp16" else {}
        source = {"checkpoint": str(place / training), "resumes": options, "args": args}
        cases.append(
            {"name": f"load-{name}", "kind": "live", "world": WORLD, **source} | sizes | more
        )

    for name, (training, sizes, options, saving) in LOADS.items():
        whole = {"tp": 1, "pp": 1, "format": "torch_dist", **sizes}
        saves = [[str(place / f"saved-{name}"), saving]]
        theirs = str(place / f"resharded-{name}")
        more = {"reshard": whole, "theirs": theirs, "saves": saves, "overlap": name == "dense"}
        more |= {"like": str(place / "made" / "qwen3-hf")} if name == "dense" else {}
        add(name, training, sizes, options, **more)
    for name, (training, saved, sizes, options) in SAVED.items():
        saves = [[str(place / f"saved-{name}"), {}]] if saved == name else []
        theirs = str(place / f"saved-{saved}")
        add(name, training, sizes, options, theirs=theirs, saves=saves)
    for name, (source, options, _) in REFUSED.items():
        more = {"refused": name, "source": str(place / source), "world": 2}
        add(name, "dense", {"tp": 2}, options, **more)
    return judge(cases, place / "results")


@pytest.mark.parametrize("case", [*LOADS, *SAVED])
def test_an_optimizer_goes_on_with_the_bits_of_the_file_route(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[f"load-{case}"]
    assert result["ok"], explain(result)
    assert result["differs"] == {"before": [], "after": [], "again": []}
    assert result["states"] > 30


def test_ranks_that_do_not_agree_on_their_weights_raise_an_error(
    results: dict[str, dict[str, Any]],
) -> None:
    """With overlap_param_gather those that give none gather the parameters first."""
    errors = results["load-dense"]["errors"]
    for delta in (None, "host"):
        said = errors.pop(f"{delta} one")
        assert "weights: True on rank 0, False on rank 1, 2, 3" in said[0]
        assert len(set(said)) == 1
    assert list(errors.values()) == [[""] * 4] * 4


@pytest.mark.parametrize("case", [*LOADS, *(name for name, row in SAVED.items() if row[1] == name)])
def test_a_saved_optimizer_has_every_value(
    case: str, place: Path, results: dict[str, dict[str, Any]]
) -> None:
    result = results[f"load-{case}"]
    assert result["ok"], explain(result)
    saved = mckpt.open(place / f"saved-{case}").with_optimizer()
    source = mckpt.open(place / (LOADS | SAVED)[case][0]).with_optimizer()
    assert saved.optimizer is not None and source.optimizer is not None
    assert mckpt.check(saved.path).exit_code == 0
    of_fp32 = {name for name in source if source[name.partition("@")[0]].dtype == "float32"}
    aside = {name for name in of_fp32 if name.endswith("@master")}  # they are the weights
    assert {*source} - aside == {*saved} - aside
    for name in {*source} & {*saved}:
        assert np.array_equal(source[name].numpy().view("u1"), saved[name].numpy().view("u1")), name
    assert saved.optimizer.scalers == source.optimizer.scalers
    assert {group["step"] for own in saved.optimizer.groups for group in own} == {samples.STEPS}
    mckpt.convert(saved.path, place / f"again-{case}", format="torch_dist", tp=4)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[f"load-{case}"]
    assert result["ok"], explain(result)
    assert REFUSED[case][2] in result["errors"][0]
    assert len(set(result["errors"])) == 1
