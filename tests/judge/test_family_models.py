"""Megatron-Core computes the logits of transformers for every family in fixtures/families, and
transformers those of checkpoints that Megatron-Core saved.

mckpt converts what transformers itself saved, so the names and shapes of the Hugging Face side are
proved as well: a tensor that a family does not name is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import made_models, tiny
from tests.helpers.judging import LOGITS_ATOL, ask, ask_all, limit, record
from tests.helpers.made_models import CASES
from tests.helpers.tiny import TinyModel

pytestmark = [pytest.mark.judge, pytest.mark.newest]

VERSION = [int(part) for part in version("megatron-core").split(".")[:2]]
# (case, dialect) -> the dims that the dialect cannot compute exactly; `mckpt plan` refuses these
REFUSED: dict[tuple[str, str], str] = {
    **{("gemma", dialect): "activation" for dialect in ("gpt", "hybrid")},
    **{("granite", dialect): "residual_scale" for dialect in ("gpt", "hybrid")},
    **{("gpt_neox_parallel", dialect): "parallel_residual" for dialect in ("gpt", "hybrid")},
    **{("ministral3", dialect): "position_scale" for dialect in ("gpt", "hybrid")},
    **{("ministral3_vl", dialect): "position_scale" for dialect in ("gpt", "hybrid")},
    ("helium", "hybrid"): "rope_interleaved",
    ("ernie4_5", "hybrid"): "rope_interleaved",
    ("ernie4_5_bias", "hybrid"): "rope_interleaved",
    ("glm", "hybrid"): "rope_interleaved",
    ("hunyuan_v1_dense", "gpt"): "qk_norm_after_rope",
    ("hunyuan_v1_dense", "hybrid"): "qk_norm_after_rope",
    ("hunyuan_v1_moe", "gpt"): "qk_norm_after_rope",
    ("hunyuan_v1_moe", "hybrid"): "qk_norm_after_rope",
    ("llama4", "hybrid"): "rope_type rope_factor rope_interleaved",
    ("llama4_qk_norm", "hybrid"): "rope_interleaved",
    ("llama4_scout", "gpt"): "attn_chunk attn_temperature attn_temperature_floor qk_l2_norm",
    ("llama4_scout", "hybrid"): "attn_chunk attn_temperature attn_temperature_floor qk_l2_norm"
    " rope_interleaved",
    ("llama4_vl", "hybrid"): "rope_interleaved",
    ("moonlight", "gpt"): "norm_eps",
    **{("baichuan2", dialect): "normed_head" for dialect in ("gpt", "hybrid")},
    ("exaone", "hybrid"): "rope_type rope_factor",
    ("cwm", "hybrid"): "rope_type rope_factor",
    **{("granitemoeshared", dialect): "residual_scale" for dialect in ("gpt", "hybrid")},
    **{("minimax_m3_sparse", d): "attn_blocks attn_block_size" for d in ("gpt", "hybrid")},
}
# case -> the dim of REFUSED that changes nothing for its weights: rows of length 1
UNCHANGED = {"baichuan2": "normed_head"}
# (case, dialect) that Megatron cannot even load
UNLOADABLE = {
    # a second norm where q has no latent
    ("deepseek_v2_lite", "hybrid"),
    ("kimi_vl", "hybrid"),
    ("moonlight", "hybrid"),
    ("sarvam_mla", "hybrid"),
    # mlps of several widths
    ("llama_nemotron", "hybrid"),
    # GPTModel has no Mamba-2
    ("bamba", "gpt"),
    ("granitemoehybrid", "gpt"),
    ("granitemoehybrid_dense", "gpt"),
    ("mamba2", "gpt"),
    ("nemotron_h", "gpt"),
    ("nemotron_h_latent", "gpt"),
    ("nemotron_h_moe", "gpt"),
}
# the cases that Megatron computes exactly
EXACT = [case for case in CASES if (case, "gpt") not in REFUSED]
# the cases that Transformer Engine cannot compute exactly with the newest megatron-core
LOCAL = {"deepseek_v2_lite", "kimi_vl", "moonlight", "sarvam_mla"}
# (case, dialect) with modules that only Transformer Engine has; tests/helpers/fake_te stands for it
WITH_TE = {
    ("gemma_silu", "gpt"),
    ("gemma_silu", "hybrid"),
    ("minimax_m3", "gpt"),
    ("minimax_m3", "hybrid"),
    ("nemotron", "gpt"),
    ("nemotron", "hybrid"),
    ("qwen3_5", "gpt"),
    ("qwen3_5_moe", "gpt"),
    ("qwen3_5_vl", "gpt"),
    ("qwen3_5_moe_vl", "gpt"),
    ("qwen3_next", "gpt"),
    ("lara_mini", "gpt"),
    ("deepseek_v32", "gpt"),
    ("deepseek_v32", "hybrid"),
    ("glm_moe_dsa", "gpt"),
    ("glm_moe_dsa", "hybrid"),
}
# case -> the oldest megatron-core that has its layers
SINCE: dict[str, list[int]] = {
    "arcee_yarn": [0, 19],
    "cwm": [0, 16],
    "solar_open": [0, 19],
    "gemma_silu": [0, 19],
    "granite_residual_1": [0, 19],
    "granite_swa": [0, 19],
    "granitemoe": [0, 19],
    "granitemoehybrid": [0, 19],
    "granitemoehybrid_dense": [0, 19],
    "granitemoehybrid_micro": [0, 19],
    "granitemoe_swa": [0, 19],
    "gpt_oss": [0, 19],
    "exaone_moe": [0, 16],
    "minimax_m3": [0, 19],
    "qwen3_next": [0, 19],
    "lara_mini": [0, 19],
    "qwen3_5": [0, 19],
    "qwen3_5_moe": [0, 19],
    "qwen3_5_vl": [0, 19],
    "qwen3_5_moe_vl": [0, 19],
    "deepseek_v32": [0, 19],
    "glm_moe_dsa": [0, 19],
    "bamba": [0, 19],
    "mamba2": [0, 19],
    "nemotron_h": [0, 19],
    "nemotron_h_latent": [0, 19],
    "nemotron_h_moe": [0, 19],
}
# (case, dialect) -> the sizes it runs at, where those of `sizes_of` do not do
SIZES: dict[tuple[str, str], dict[str, int]] = {
    # experts with biases
    ("gpt_oss", "hybrid"): {"tp": 2, "pp": 2, "ep": 1, "etp": 1},
    # one head of k and v
    ("gpt_bigcode", "gpt"): {"tp": 1, "pp": 2},
    ("gpt_bigcode", "hybrid"): {"tp": 1, "pp": 2},
}
# one model of each mechanism, whose layers the common run judges in the second dialect too
IN_BOTH = {
    *("gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "stablelm", "phi3", "nemotron", "seed_oss"),
    *("bailing_moe_v2", "deepseek_v32", "exaone_moe", "gemma_silu", "glm4_moe", "granite_swa"),
    *("minimax_m3", "qwen2_moe", "qwen3_next", "smollm3"),
}
# encoders, which have a dialect of their own
ENCODERS = {"megatron_bert": "bert"}


def dialects(case: str) -> list[str]:
    """The dialects that the installed megatron-core runs this case in."""
    if case in ENCODERS:
        return [ENCODERS[case]]
    if SINCE.get(case, [0, 12]) > VERSION:
        return []
    known = ["gpt", "hybrid"] if VERSION >= [0, 19] else ["gpt"]
    return [name for name in known if (case, name) not in {*REFUSED, *UNLOADABLE}]


def sizes_of(case: str, dialect: str) -> dict[str, int]:
    if (case, dialect) in SIZES:
        return SIZES[case, dialect]
    described = made_models.text(made_models.config(case))
    moe = any("expert" in key and value for key, value in described.items())
    if dialect == "hybrid":
        return {"tp": 2, "pp": 2}
    return {"pp": 2, "ep": 2, "tp": 1, "etp": 1} if moe else {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def made(tiny_model: TinyModel) -> Callable[[str], Path]:
    return lambda case: tiny_model(case, "float32")


def args_of(converted: Path, impl: str) -> dict[str, Any]:
    """Returns the args of a run that trains this model, as plain values."""
    checkpoint = mckpt.open(converted)
    given = {"dtype": "float32", "padded_vocab_size": 512, "transformer_impl": impl}
    given["experts"] = "sequential" if impl == "local" else "grouped"
    args = mapping.load("megatron", checkpoint.mapping.name).write(checkpoint.dims, given)
    chosen = {"transformer_impl": impl, "dialect": checkpoint.mapping.name}
    return {**args, "params_dtype": "float32", **chosen}


# the text models of whole ones; those without a tower judge the same layers
TEXT = re.compile("_vl|omni|llava|internvl")


def judged(case: str) -> Any:
    return pytest.param(case, marks=[pytest.mark.slow] if TEXT.search(case) else [])


@pytest.mark.parametrize("case", [judged(case) for case in EXACT])
def test_megatron_core_and_transformers_compute_the_same_logits(
    case: str, work: Path, made: Callable[[str], Path]
) -> None:
    """In each dialect, of a conversion, and in the first one, of a model that Megatron-Core saved.
    The model of transformers comes back bit for bit, also config.json: a config that mckpt writes
    from the args describes the same model. The tables of JUDGED have both of every model in each
    dialect and at all sizes; without it, those not in IN_BOTH are judged in the first, and files of
    any sizes are loaded at one half of the sizes and saved at the other.
    """
    source, tokens = made(case), made_models.tokens(case)
    names = dialects(case)
    if not names:
        wanted = {"format": "torch", "parallel": Parallel(**sizes_of(case, "hybrid"))}
        mckpt.plan(source, work / "there" / case, **wanted).run()
        expect_back(source, work / "there" / case)
        pytest.skip(f"this megatron-core cannot compute {case}")
    reference = tiny.hf_logits(source, tokens)
    family = mckpt.open(source).mapping
    # the tensors that are not in Megatron's model come from the model's own directory
    like = source if mapping.is_part(family.forms) else None
    known = SourceOptions(like=like, family=None if like else family.name)
    for dialect in names if case in IN_BOTH or "JUDGED" in os.environ else names[:1]:
        out, saved, back = (work / name / dialect / case for name in ("to", "saved", "back"))
        impl = "transformer_engine" if (case, dialect) in WITH_TE else "local"
        form, size = "torch" if dialect == "hybrid" else "torch_dist", sizes_of(case, dialect)
        wanted = {} if dialect == "hybrid" else {"transformer_impl": impl}
        parallel, few = Parallel(**size), "JUDGED" not in os.environ
        mckpt.plan(source, out, format=form, dialect=dialect, parallel=parallel, **wanted).run()
        given = {"impl": impl, "format": form, "tokens": tokens}
        pp, others = {"pp": size["pp"]}, {k: n for k, n in size.items() if k != "pp"}
        loaded, stored = (pp, others) if few and form == "torch_dist" else (size, size)
        asked = [{"kind": "forward", "checkpoint": out, "args": {"dialect": dialect}} | loaded]
        if dialect == names[0] or not few:
            asked += [{"kind": "save", "destination": saved, "args": args_of(out, impl)} | stored]
        first, *more = ask_all([given | one for one in asked], te=impl != "local")
        assert first["unread"] == []
        expect_same(reference, first["logits"], "forward", case, form, str(parallel), dialect)
        expect_back(source, out)
        for result in more:
            mckpt.plan(mckpt.Checkpoint.open(saved, known), back, format="hf").run()
            judge, found = "saved by megatron-core", tiny.hf_logits(back, tokens)
            expect_same(result["logits"], found, judge, case, form, str(parallel), dialect)


def expect_same(wanted: np.ndarray, found: np.ndarray, judge: str, *row: str) -> None:
    apart, largest = np.abs(found - wanted).max(), np.abs(wanted).max()
    record(judge, *row[:3], apart, largest, *row[3:])
    assert apart < limit(wanted)


def expect_back(source: Path, converted: Path) -> None:
    back = Path(f"{converted}-again")
    mckpt.plan(converted, back, format="hf").run(check_replicas=True)
    assert not mckpt.diff(source, back)


@pytest.mark.parametrize(("case", "dialect"), REFUSED)
def test_a_dialect_that_cannot_compute_a_model_is_refused(
    case: str, dialect: str, work: Path, made: Callable[[str], Path]
) -> None:
    """If the user accepts the difference, the weights still come back bit for bit."""
    wanted = {"format": "torch", "dialect": dialect, "parallel": Parallel(tp=2, pp=2)}
    if case in LOCAL:
        wanted["transformer_impl"] = "local"
    out, dims = work / "refused" / f"{case}-{dialect}", REFUSED[case, dialect].split()
    with pytest.raises(MappingError) as caught:
        mckpt.plan(made(case), out, **wanted)
    for dim in dims:
        assert f"--allow-inexact {dim}" in str(caught.value)
    mckpt.plan(made(case), out, allow_inexact=dims, **wanted).run()
    expect_back(made(case), out)
    record("accepted", case, "torch", f"`--allow-inexact {' '.join(dims)}`", 0, 1, dialect=dialect)


@pytest.mark.parametrize("case", UNCHANGED)
def test_a_refused_feature_that_changes_nothing_leaves_the_logits_equal(
    case: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    size, tokens = sizes_of(case, "gpt"), made_models.tokens(case)
    wanted = {"parallel": Parallel(**size), "transformer_impl": "local"}
    mckpt.plan(made(case), tmp_path / "out", allow_inexact=[UNCHANGED[case]], **wanted).run()
    given = {"tokens": tokens, "format": "torch_dist", "impl": "local", **size}
    found = ask("forward", checkpoint=tmp_path / "out", args={"dialect": "gpt"}, **given)["logits"]
    reference = tiny.hf_logits(made(case), tokens)
    expect_same(reference, found, "forward", case, "torch_dist", str(Parallel(**size)), "gpt")


@pytest.mark.parametrize(("case", "dialect"), sorted(UNLOADABLE))
def test_a_dialect_that_cannot_load_a_model_is_refused(
    case: str, dialect: str, work: Path, made: Callable[[str], Path]
) -> None:
    with pytest.raises(MappingError, match="Megatron could not load"):
        mckpt.plan(made(case), work / "unloadable", format="torch", dialect=dialect)


def test_groups_that_rank_by_other_scores_are_refused(
    work: Path, made: Callable[[str], Path]
) -> None:
    """As in the published DeepSeek-V2: 6 experts of 3 groups, and groups rank by their best."""
    model = work / "ranked"
    shutil.copytree(made("deepseek_v2_groups"), model)
    changed = made_models.config("deepseek_v2_groups") | {"num_experts_per_tok": 6}
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(MappingError, match="router_group_experts"):
        mckpt.plan(model, work / "refused", format="torch")
    wanted = {"format": "torch", "allow_inexact": ["router_group_experts"]}
    mckpt.plan(model, work / "accepted-groups", **wanted).run()
    expect_back(model, work / "accepted-groups")


def test_a_smallest_time_step_is_refused(work: Path, made: Callable[[str], Path]) -> None:
    """A published Nemotron-H has time_step_min 0.001, which bounds no step, and no limit."""
    model = work / "stepped"
    shutil.copytree(made("nemotron_h"), model)
    config = made_models.config("nemotron_h") | {"time_step_min": 0.001}
    (model / "config.json").write_text(json.dumps(config))
    mckpt.plan(model, work / "planned", format="torch")
    limits = {"time_step_limit": [0.0, 0.5]}
    (model / "config.json").write_text(json.dumps(config | limits))
    with pytest.raises(MappingError, match="no largest time step"):
        mckpt.plan(model, work / "refused", format="torch")
    limits = {"time_step_limit": [0.001, float("inf")]}
    (model / "config.json").write_text(json.dumps(config | limits))
    with pytest.raises(MappingError, match="--allow-inexact mamba_min_step"):
        mckpt.plan(model, work / "refused", format="torch")
    wanted = {"format": "torch", "allow_inexact": ["mamba_min_step"], "parallel": Parallel(tp=2)}
    mckpt.plan(model, work / "accepted-steps", **wanted).run()
    expect_back(model, work / "accepted-steps")


def test_transformers_bounds_no_time_step_for_verify(
    work: Path, made: Callable[[str], Path]
) -> None:
    import torch

    from mckpt.trainer import reference

    def logits(**values: float) -> Any:
        job = {"config": values, "carried": []}
        model = reference.load(str(made("nemotron_h")), "float32", torch.device("cpu"), job)
        return reference.logits(model, [3, 1, 4, 1, 5])

    unbounded, given = logits(), mapping.load("hf", "nemotron_h").verify
    assert torch.equal(logits(**given), unbounded)
    assert (logits(time_step_min=0.3) - unbounded).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.skipif(VERSION < [0, 19], reason="older ones do not load this model")
def test_verify_passes_a_model_with_a_smallest_time_step(
    work: Path, made: Callable[[str], Path]
) -> None:
    """Without the value that its family gives to transformers, the logits are apart by 6."""
    model = work / "bounded"
    shutil.copytree(made("nemotron_h"), model)
    config = made_models.config("nemotron_h") | {"time_step_min": 0.3}
    (model / "config.json").write_text(json.dumps(config))
    mckpt.plan(model, work / "bounded-megatron", format="torch").run()
    assert mckpt.verify(model, work / "bounded-megatron", sequences=1).verdict == "pass"


def test_blocks_of_keys_change_nothing_up_to_their_number(
    work: Path, made: Callable[[str], Path]
) -> None:
    """As the published MiniMax-M3 with its 16 blocks of 128 keys. The model without a choice is the
    one that Megatron-Core computes.
    """
    model, case = work / "chosen", "minimax_m3_sparse"
    shutil.copytree(made("minimax_m3"), model)
    (model / "config.json").write_text(json.dumps(made_models.config(case)))
    tokens = made_models.tokens(case)
    apart = np.abs(tiny.hf_logits(model, tokens) - tiny.hf_logits(made("minimax_m3"), tokens))
    sparse = made_models.text(made_models.config(case))["sparse_attention_config"]
    same = sparse["sparse_topk_blocks"] * sparse["sparse_block_size"]
    assert apart[:, :same].max() < LOGITS_ATOL
    assert apart[:, same:].max() > 0.1


def test_experts_with_biases_are_refused_above_etp_1(
    tmp_path: Path, made: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=r"etp is 2; give --etp 1"):
        mckpt.plan(made("gpt_oss"), tmp_path / "out", parallel=Parallel(tp=2))
