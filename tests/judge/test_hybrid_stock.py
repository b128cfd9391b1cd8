"""Megatron-Core's own HybridModel and trainer judge the hybrid dialect.

mckpt writes tiny models; megatron.training of the wheel (tests/helpers/stock.py) reads the launch
line, builds HybridModel with the names of Transformer Engine, and

- stores every tensor and object under the names and shapes that mckpt wrote, at all sizes;
- loads what mckpt wrote, computes transformers' logits, and saves what mckpt converts back bit for
  bit;
- loads a checkpoint of GPTModel by its own translation, to the same weights as mckpt's.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.geometry.parallel import Parallel
from tests.helpers import tiny
from tests.helpers.judging import expect_keys, explain, judge, record
from tests.helpers.tiny import TinyModel
from tests.judge.test_stock import FORMATS, LOGITS_ATOL, launch_line

installed = importlib.util.find_spec("megatron") and version("megatron-core")
if not installed or [int(n) for n in installed.split(".")[:2]] < [0, 19]:
    pytest.skip(
        f"HybridModel with all layers of mckpt's models is in megatron-core from 0.19 on, and"
        f" {installed or 'none'} is installed",
        allow_module_level=True,
    )
pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # of what torch and transformers import
]

# ----------------------------------------------------------------------------------------- layouts

MIXTURES = ("qwen3-moe", "qwen3-moe-mixed", "deepseek-v3")
MODELS = ("qwen3", "qwen2", "llama-tied", *MIXTURES)
SIZES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 pp2": {"tp": 2, "pp": 2},
    # "cut" lets a stage end between an attention and its mlp
    "tp2 pp2 cut": {"tp": 2, "pp": 2, "layout": "Ettt|ttttt{mtp}L"},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 vpp2 cut": {"pp": 2, "vpp": 2, "layout": "Ett|t|tttt|t{mtp}L"},
    "tp2 pp2 ep2 etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
}
LAYOUTS = [
    (case, size)
    for case in MODELS
    for size in SIZES
    if size != ("tp2 pp2" if case in MIXTURES else "tp2 pp2 ep2 etp1")
]


def sizes_of(case: str, size: str) -> Parallel:
    found = dict(SIZES[size])
    if "layout" in found:
        mtp = "m" if case == "deepseek-v3" else ""
        found["layout"] = found["layout"].format(mtp=mtp)
    return Parallel(**found)


def ranks(parallel: Parallel) -> int:
    return parallel.tp * parallel.pp  # ep 2, etp 1 takes the ranks of tp 2


def convert(source: Path, out: Path, **wanted: Any) -> Path:
    inexact = ["rope_factor"]
    mckpt.plan(source, out, dialect="hybrid", allow_inexact=inexact, **wanted).run()
    return out


# ------------------------------------------------------------------------------------ loads, saves

RUNS = {
    "qwen3": Parallel(tp=2, pp=2),
    "llama-tied": sizes_of("llama-tied", "pp2 vpp2 cut"),
    "qwen3-moe": Parallel(tp=2, pp=2, ep=2, etp=1),
    "deepseek-v3": Parallel(tp=2, pp=2, ep=2, etp=1),
}
LOADS = [(case, form) for case in RUNS for form in FORMATS]
# The models that the trainer translates from GPTModel.
TRANSLATED = {"qwen3": sizes_of("qwen3", "tp2 pp2 cut"), "qwen3-moe": RUNS["qwen3-moe"]}
# What --use-checkpoint-args takes from the checkpoint, and --use-mp-args-from-checkpoint-args of
# the sizes: the launch line may omit all of these.
IN_CHECKPOINT = """--hybrid-layer-pattern --hidden-size --ffn-hidden-size --num-attention-heads
    --group-query-attention --num-query-groups --kv-channels --max-position-embeddings --seq-length
    --position-embedding-type --rotary-base --rotary-percent --normalization --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --padded-vocab-size
    --no-position-embedding --tensor-model-parallel-size --pipeline-model-parallel-size
    """.split()  # noqa: SIM905


@pytest.fixture(scope="module")
def written(work: Path, tiny_model: TinyModel) -> dict[tuple[str, str, str], Path]:
    """(model, size, format) -> checkpoint in bfloat16; torch_dist does not depend on the size."""
    mixed = tiny.tiny_random("qwen3-moe", work / "hf" / "mixed", mlp_only_layers=[0, 2])
    out = {}
    for case, size in LAYOUTS:
        source = mixed if case == "qwen3-moe-mixed" else tiny_model(case)
        for form in FORMATS:
            place = work / "layout" / f"{case}-{size}-{form}".replace(" ", "-")
            wanted = {"format": form, "parallel": sizes_of(case, size)}
            out[case, size, form] = convert(source, place, **wanted)
    return out


@pytest.fixture(scope="module")
def results(
    work: Path, sources: dict[str, Path], written: dict[tuple[str, str, str], Path]
) -> dict[str, dict[str, Any]]:
    """All cases in one launch."""
    cases: list[dict[str, Any]] = [
        {
            "name": f"keys {case} {size}",
            "flags": launch_line(written[case, size, "torch"]),
            "checkpoint": None,
            "world": ranks(sizes_of(case, size)),
            "keys": True,
        }
        for case, size in LAYOUTS
    ]
    by_name = {}
    for case, form in LOADS:
        name, wanted = f"{case}-{form}", {"format": form, "parallel": RUNS[case]}
        out = convert(sources[case], work / name, **wanted)
        by_name[name] = {
            "name": name,
            "flags": launch_line(out),
            "checkpoint": str(out),
            "world": ranks(RUNS[case]),
            "tokens": tiny.tokens(case).tolist(),
            "weights": True,
            "save": str(work / f"{name}-saved"),
        }
    cases += by_name.values()
    only_load = {"save": None, "tokens": None}
    for case in TRANSLATED:
        gpt = work / f"{case}-gpt"
        mckpt.plan(sources[case], gpt, parallel=Parallel(tp=2, pp=1)).run()
        own = convert(gpt, work / f"{case}-resharded", parallel=TRANSLATED[case])
        again = by_name[f"{case}-torch_dist"] | only_load | {"flags": launch_line(own)}
        cases.append(again | {"name": f"translated {case}", "checkpoint": str(gpt)})
        cases.append(again | {"name": f"resharded {case}", "checkpoint": str(own)})
    for form in FORMATS:
        whole = by_name[f"qwen3-{form}"] | only_load
        short = without_flags(IN_CHECKPOINT, whole["flags"])
        assert "--hybrid-layer-pattern" not in short
        own_args = ["--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"]
        cases.append(whole | {"name": f"checkpoint-args {form}", "flags": short + own_args})
    return judge(cases, 4, work / "judged", fake_te=True, program="stock.py")


def without_flags(flags: list[str], line: list[str]) -> list[str]:
    """The launch line without these flags and their values."""
    out, dropping = [], False
    for word in line:
        dropping = word in flags if word.startswith("--") else dropping
        if not dropping:
            out.append(word)
    return out


@pytest.fixture(scope="module")
def references(sources: dict[str, Path]) -> dict[str, np.ndarray]:
    return {case: tiny.hf_logits(sources[case], tiny.tokens(case)) for case in RUNS}


@pytest.mark.parametrize(("case", "size"), LAYOUTS)
def test_the_keys_are_those_of_the_real_model(
    case: str,
    size: str,
    written: dict[tuple[str, str, str], Path],
    results: dict[str, dict[str, Any]],
) -> None:
    dist, files = (written[case, size, form] / "release" for form in FORMATS)
    expect_keys(results[f"keys {case} {size}"], dist, files, dtypes=True)


@pytest.mark.parametrize(("case", "form"), LOADS)
def test_the_stock_trainer_computes_the_logits_of_transformers(
    case: str, form: str, results: dict[str, dict[str, Any]], references: dict[str, np.ndarray]
) -> None:
    result = results[f"{case}-{form}"]
    assert result["ok"], explain(result)
    apart = np.abs(result["logits"] - references[case]).max()
    assert apart < LOGITS_ATOL
    sizes = f"{RUNS[case]} (names of Transformer Engine)"
    largest = np.abs(references[case]).max()
    record("stock trainer", case, form, sizes, apart, largest, dialect="hybrid")


@pytest.mark.parametrize(("case", "form"), LOADS)
def test_a_checkpoint_of_the_stock_trainer_comes_back_bit_for_bit(
    case: str, form: str, work: Path, sources: dict[str, Path], results: dict[str, dict[str, Any]]
) -> None:
    from safetensors.numpy import load_file

    assert results[f"{case}-{form}"]["ok"], explain(results[f"{case}-{form}"])
    saved, out = work / f"{case}-{form}-saved", work / f"{case}-{form}-back"
    opened = mckpt.open(saved)
    assert (opened.format, opened.mapping.name) == (form, "hybrid")
    mckpt.plan(saved, out, format="hf").run(check_replicas=True)
    back = load_file(out / "model.safetensors")
    wanted = tiny.tensors(tiny.config(case), "float32")
    assert back.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape), name
        assert back[name].tobytes() == array.tobytes(), name
    # config.json, made of the stock trainer's own args
    assert mckpt.open(out).dims == mckpt.open(sources[case]).dims


@pytest.mark.parametrize("form", FORMATS)
def test_the_args_of_the_checkpoint_describe_the_model(
    form: str, results: dict[str, dict[str, Any]]
) -> None:
    """--use-checkpoint-args takes the pattern and the sizes from it."""
    short, whole = results[f"checkpoint-args {form}"], results[f"qwen3-{form}"]
    assert short["ok"], explain(short)
    assert short["weights"] == whole["weights"]


@pytest.mark.parametrize("case", TRANSLATED)
def test_the_translation_of_the_stock_trainer_gives_the_same_weights(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    theirs, ours = results[f"translated {case}"], results[f"resharded {case}"]
    assert theirs["ok"], explain(theirs)
    assert ours["ok"], explain(ours)
    assert theirs["weights"] == ours["weights"]
