"""Megatron-Core's own HybridModel and trainer judge the hybrid dialect.

mckpt writes tiny models; megatron.training of the wheel (tests/helpers/stock.py) reads the launch
line, builds HybridModel with the names of Transformer Engine, and

- stores every tensor and object under the names and shapes that mckpt wrote, at all sizes;
- loads what mckpt wrote, computes transformers' logits, and saves what mckpt converts back bit for
  bit;
- loads a checkpoint of GPTModel by its own translation, to the same weights as mckpt's;
- loads, computes and saves a hybrid that an edit made, with new Mamba-2 layers.
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
from tests.helpers import made_models, tiny
from tests.helpers.commands import as_trained
from tests.helpers.judging import LOGITS_ATOL, ask, record
from tests.helpers.tiny import TinyModel
from tests.judge.test_stock import (
    FORMATS,
    expect_keys,
    launch_line,
    through_the_trainer,
)

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


def without_flags(flags: list[str], line: list[str]) -> list[str]:
    """The launch line without these flags and their values."""
    out, dropping = [], False
    for word in line:
        dropping = word in flags if word.startswith("--") else dropping
        if not dropping:
            out.append(word)
    return out


@pytest.mark.parametrize(("case", "size"), LAYOUTS)
def test_the_keys_are_those_of_the_real_model(
    case: str, size: str, work: Path, tiny_model: TinyModel
) -> None:
    if case in tiny.CASES:
        source = tiny_model(case)
    else:
        source = tiny.tiny_random("qwen3-moe", work / "hf" / "mixed", mlp_only_layers=[0, 2])
    place = work / "layout" / f"{case}-{size}".replace(" ", "-")
    expect_keys(source, place, sizes_of(case, size))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", RUNS)
def test_the_stock_trainer_computes_the_logits_of_transformers_and_saves_the_weights(
    case: str, form: str, work: Path, sources: dict[str, Path]
) -> None:
    out = convert(sources[case], work / f"{case}-{form}", format=form, parallel=RUNS[case])
    given = {"te": True, "world": ranks(RUNS[case])}
    logits = through_the_trainer(sources[case], out, tiny.tokens(case), **given)
    reference = tiny.hf_logits(sources[case], tiny.tokens(case))
    apart, largest = np.abs(logits - reference).max(), np.abs(reference).max()
    assert apart < LOGITS_ATOL
    sizes = f"{RUNS[case]} (names of Transformer Engine)"
    record("stock trainer", case, form, sizes, apart, largest, dialect="hybrid")


def weights(checkpoint: Path, case: str, flags: list[str]) -> Any:
    """Returns a hash of each parameter that the stock trainer loads."""
    given = {"te": True, "world": ranks(RUNS[case]), "weights": True}
    return ask("stock", checkpoint=checkpoint, flags=flags, **given)["weights"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_args_of_the_checkpoint_describe_the_model(
    form: str, work: Path, sources: dict[str, Path]
) -> None:
    """--use-checkpoint-args takes the pattern and the sizes from it."""
    out = convert(sources["qwen3"], work / f"args-{form}", format=form, parallel=RUNS["qwen3"])
    whole = launch_line(out)
    short = without_flags(IN_CHECKPOINT, whole)
    assert "--hybrid-layer-pattern" not in short
    short += ["--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"]
    assert weights(out, "qwen3", short) == weights(out, "qwen3", whole)


@pytest.mark.parametrize("case", TRANSLATED)
def test_the_translation_of_the_stock_trainer_gives_the_same_weights(
    case: str, work: Path, sources: dict[str, Path]
) -> None:
    gpt = work / f"{case}-gpt"
    mckpt.plan(sources[case], gpt, parallel=Parallel(tp=2, pp=1)).run()
    own = convert(gpt, work / f"{case}-resharded", parallel=TRANSLATED[case])
    flags = launch_line(own)
    assert weights(gpt, case, flags) == weights(own, case, flags)


def test_new_mamba_layers_are_loaded_and_compute_what_transformers_does(work: Path) -> None:
    """The edit makes of a GPT without a rotary embedding a model that transformers has too."""
    plain = {"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    made_models.write("arcee", work / "arcee", made_models.config("arcee") | plain)
    unrotated = {"position_embedding_type": "none"}
    gpt = as_trained(work / "arcee", work / "gpt", lambda args: args.update(unrotated), tp=2)
    edit = ['hybrid: {pattern: "M*-M-*-*M*-M", mamba_head_dim: 16, mamba_num_groups: 4}']
    hf, out = work / "nemotron", work / "hybrid"
    mckpt.edit(gpt, hf, edit, format="hf")
    mckpt.edit(gpt, out, edit, format="torch_dist", tp=2, pp=2)
    tokens = made_models.tokens("arcee")
    logits = through_the_trainer(hf, out, tokens, te=True, world=4)
    reference = tiny.hf_logits(hf, tokens)
    assert np.abs(logits - reference).max() < LOGITS_ATOL * np.abs(reference).max()
