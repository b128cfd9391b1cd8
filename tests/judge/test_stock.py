"""The stock trainer of the megatron-core wheel reads what mckpt writes, with the launch line that
mckpt writes, and saves what mckpt reads.

Each checkpoint of tests/helpers/tiny.py goes from Hugging Face to Megatron by mckpt, through
megatron.training (tests/helpers/stock.py: its argument parser, model builder, loader, forward pass
and saver), and back to Hugging Face by mckpt. The logits are those of transformers, and the tensors
that come back are those of the source, bit for bit.

    layer spec            sizes                    families    load, save, back    logits
    local                 tp2, pp2 vpp2 / ep2, pp2   all but MLA    yes               yes
    Transformer Engine    tp2 pp2 (ep2 etp1)         all but one    yes               yes

Transformer Engine is the stand-in of tests/helpers/fake_te, which has its names and a forward pass
of its own: the logits say that the flags, the sharding and the model are right, and nothing of the
real kernels. What cannot be judged on CPU:

- The local spec with experts at tp > 1: megatron.training demands sequence parallelism for it,
  which the local norms refuse.
- The local spec with MLA: its attention takes no head widths (`k_channels`), as
  test_the_local_spec_cannot_build_mla shows.
- MLA without q LoRA (deepseek-v3-plain): with Transformer Engine, 0.19 asks for a norm that the
  model does not have, and mckpt refuses to write for it, as
  test_the_stock_trainer_cannot_load_mla_without_q_lora shows. Its launch line is judged.
- Fused kernels: MLA rotates without --apply-rope-fusion here, after its config was checked with it.
- Training.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.formats.megatron import megatron_args
from mckpt.geometry.parallel import Parallel
from tests.helpers import tiny
from tests.helpers.judging import explain, judge, record

absent = (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.training") is None
)
pytestmark = [
    pytest.mark.judge,
    pytest.mark.skipif(
        absent,
        reason="megatron.training is not installed: wheels of megatron-core have it from 0.17 on",
    ),
    pytest.mark.filterwarnings("ignore"),  # torch and transformers cause it by their imports
]

TE, LOCAL = "transformer_engine", "local"
FORMATS = ("torch_dist", "torch")
MLA = ("deepseek-v3", "deepseek-v3-plain")
MOE = ("mixtral", "qwen3-moe", "qwen3-moe-raw", *MLA)
NOT_LOADABLE = "deepseek-v3-plain"  # cannot be loaded with Transformer Engine from 0.19 on
# llama-rope-scaled: the stock trainer computes with 8, whatever the value of --rope-scaling-factor
INEXACT = ["rope_factor"]
LOGITS_ATOL = 1e-4  # tolerance of fp32 logits of size 1 to 10
CONFIGS = sorted((tiny.FIXTURES / "configs").glob("*.json"))


def size_of(case: str, form: str, impl: str) -> dict[str, int]:
    if impl == TE:
        return {"tp": 2, "pp": 2, "ep": 2, "etp": 1} if case in MOE else {"tp": 2, "pp": 2}
    if form == "torch_dist":
        return {"ep": 2, "etp": 1} if case in MOE else {"tp": 2}
    return (
        {"pp": 2, "vpp": 2}
        if case not in MOE and tiny.config(case)["num_hidden_layers"] % 4 == 0
        else {"pp": 2}
    )


CASES = [
    (case, form, impl)
    for impl, left_out in ((LOCAL, MLA), (TE, (NOT_LOADABLE,)))
    for case in tiny.CASES
    if case not in left_out
    for form in FORMATS
]


def named(case: str, form: str, impl: str) -> str:
    return f"{case}-{form}-{'te' if impl == TE else 'local'}"


def launch_line(checkpoint: Path) -> list[str]:
    """Returns the words that bash reads from the megatron_args.sh of a checkpoint, and checks that
    megatron_args.json has the same. NullTokenizer takes the place of the tokenizer in DST/hf, which
    a tiny model has not trained.
    """
    unit = checkpoint / "release"
    script = f'. {unit / megatron_args.SHELL} && printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    words = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    words = ["../hf" if word == f"{unit}/../hf" else word for word in words]
    assert words == flat(json.loads((unit / megatron_args.JSON).read_text()))
    if megatron_args.MODEL in words:
        at = words.index(megatron_args.MODEL)
        del words[at : at + 2]
        words[words.index(megatron_args.TYPE) + 1] = "NullTokenizer"
    return words


def flat(flags: dict[str, Any]) -> list[str]:
    return [
        word
        for flag, value in flags.items()
        for word in ([flag] if value is True else [flag, str(value)])
    ]


def without(flag: str, flags: list[str]) -> list[str]:
    """Returns the launch line without a flag that has no value."""
    assert flag in flags
    return [word for word in flags if word != flag]


def convert(
    work: Path,
    sources: dict[str, Path],
    case: str,
    form: str,
    impl: str,
    megatron: str | None = None,
) -> dict[str, Any]:
    """Converts by mckpt; returns the case for tests/helpers/stock.py, at the sizes of the launch
    line.
    """
    out, size = work / named(case, form, impl), Parallel(**size_of(case, form, impl))
    wanted = {
        "format": form,
        "parallel": size,
        "transformer_impl": impl,
        "allow_inexact": INEXACT,
        "megatron_version": megatron,
    }
    mckpt.plan(sources[case], out, **wanted).run()
    return {
        "name": named(case, form, impl),
        "world": 4 if impl == TE else 2,
        "flags": launch_line(out),
        "checkpoint": str(out),
        "tokens": tiny.tokens(case).tolist(),
        "save": str(work / f"{named(case, form, impl)}-saved"),
    }


@pytest.fixture(scope="module")
def results(work: Path, sources: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Results of all cases, from one launch for each layer spec."""
    local = [convert(work, sources, *one) for one in CASES if one[2] == LOCAL]
    local.append(convert(work, sources, "deepseek-v3", "torch_dist", LOCAL))
    te = [convert(work, sources, *one) for one in CASES if one[2] == TE]
    te.append(convert(work, sources, NOT_LOADABLE, "torch", TE, megatron="0.18"))
    by_name = {case["name"]: case for case in te}
    te += padded(work, sources["qwen3"])
    parsed = {"checkpoint": None, "world": 4}
    flags = by_name[named("qwen3", "torch_dist", TE)]["flags"]
    te.append(
        {
            "name": "appended",
            "flags": [*flags, "--seq-length", "64", "--max-position-embeddings", "1024"],
            **parsed,
        }
    )
    plain = by_name[named(NOT_LOADABLE, "torch", TE)]["flags"]
    te.append({"name": "plain-rope", "flags": plain, **parsed})
    te.append({"name": "fused-rope", "flags": without("--no-rope-fusion", plain), **parsed})
    te += [
        {
            "name": f"config-{path.stem}",
            "flags": flat(published(path).flags),
            "checkpoint": None,
            "world": 8,
        }
        for path in CONFIGS
    ]
    return judge(local, 2, work / "local", program="stock.py") | judge(
        te, 4, work / "te", fake_te=True, program="stock.py"
    )


def padded(work: Path, source: Path) -> list[dict[str, Any]]:
    """Returns cases whose embedding had 512 rows at tp 4, where Megatron makes 256 of the 193 at
    tp 2. Their launch lines do not state the rows, so that Megatron computes them.
    """
    wide = work / "wide"
    mckpt.plan(source, wide, format="torch", parallel=Parallel(tp=4)).run()
    cases = []
    for name, keep in (("padded-anew", False), ("padding-kept", True)):
        out, size = work / name, Parallel(tp=2, pp=2)
        mckpt.plan(wide, out, format="torch", parallel=size, keep_padding=keep).run()
        flags = launch_line(out)
        at = flags.index("--padded-vocab-size")
        assert flags[at + 1] == ("512" if keep else "256")
        cases.append(
            {
                "name": name,
                "world": 4,
                "flags": flags[:at] + flags[at + 2 :],
                "checkpoint": str(out),
                "tokens": tiny.tokens("qwen3").tolist(),
            }
        )
    divisor = ["--make-vocab-size-divisible-by", "128"]
    return [*cases, cases[1] | {"name": "padding-not-said", "flags": cases[1]["flags"] + divisor}]


def published(path: Path) -> megatron_args.Launch:
    """Returns the launch line of a published model for 8 ranks, from its config.json alone."""
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims = family.read(config)
    size = Parallel(tp=2, ep=4, etp=1) if dims["num_experts"] else Parallel(tp=2)
    if dims["num_heads"] % 2:
        size = Parallel(pp=2)
    given = {"padded_vocab_size": -(-dims["vocab_size"] // 256) * 256, "tp": size.tp}
    dialect = mapping.load("megatron", "gpt")
    args = dialect.write(dims, given)
    if family.dialect == "hybrid":  # GPTModel lacks these layers; a pattern describes them
        args = {name: args[name] for name in args if not name.startswith("heterogeneous_layers")}
    return megatron_args.launch(dialect, {**args, **size.args()})


@pytest.fixture(scope="module")
def references(work: Path, sources: dict[str, Path]) -> dict[str, np.ndarray]:
    """Returns transformers' logits of each source, computed as the stock trainer will:
    llama-rope-scaled with a factor of 8.
    """
    scaling = {**tiny.config("llama-rope-scaled")["rope_scaling"], "factor": 8.0}
    stock = tiny.tiny_random(
        "llama-rope-scaled", work / "hf" / "factor-8", dtype="float32", rope_scaling=scaling
    )
    used = sources | {"llama-rope-scaled": stock}
    return {
        case: tiny.hf_logits(used[case], tiny.tokens(case))
        for case in tiny.CASES
        if case != NOT_LOADABLE
    }


@pytest.mark.parametrize(("case", "form", "impl"), CASES, ids=[named(*one) for one in CASES])
def test_the_stock_trainer_computes_the_logits_of_transformers(
    case: str,
    form: str,
    impl: str,
    results: dict[str, dict[str, Any]],
    references: dict[str, np.ndarray],
) -> None:
    result = results[named(case, form, impl)]
    assert result["ok"], explain(result)
    apart = np.abs(result["logits"] - references[case]).max()
    assert apart < LOGITS_ATOL
    sizes = (
        f"{mckpt.Parallel(**size_of(case, form, impl))}"
        f" ({'names of Transformer Engine' if impl == TE else 'local'})"
    )
    record("stock trainer", case, form, sizes, apart, np.abs(references[case]).max())


@pytest.mark.parametrize(("case", "form", "impl"), CASES, ids=[named(*one) for one in CASES])
def test_a_checkpoint_of_the_stock_trainer_comes_back_bit_for_bit(
    case: str,
    form: str,
    impl: str,
    work: Path,
    sources: dict[str, Path],
    results: dict[str, dict[str, Any]],
) -> None:
    from safetensors.numpy import load_file

    assert results[named(case, form, impl)]["ok"], explain(results[named(case, form, impl)])
    saved, out = work / f"{named(case, form, impl)}-saved", work / f"{named(case, form, impl)}-back"
    assert mckpt.open(saved).format == form
    mckpt.plan(saved, out, format="hf", allow_inexact=INEXACT).run(check_replicas=True)
    back = {
        name: array for path in out.glob("*.safetensors") for name, array in load_file(path).items()
    }
    wanted = tiny.tensors(tiny.config(case), "float32")
    assert back.keys() == wanted.keys()
    assert [
        name
        for name in wanted
        if back[name].dtype != wanted[name].dtype or back[name].tobytes() != wanted[name].tobytes()
    ] == []
    assert [back[name].shape for name in wanted] == [array.shape for array in wanted.values()]
    # config.json is made from the stock trainer's own args
    assert mckpt.open(out).dims == mckpt.open(sources[case]).dims


def test_the_vocabulary_has_the_rows_that_the_stock_trainer_computes(
    results: dict[str, dict[str, Any]], references: dict[str, np.ndarray]
) -> None:
    """The files of `torch` load only if both agree; padding that is kept is in the launch line."""
    for name in ("padded-anew", "padding-kept"):
        assert results[name]["ok"], explain(results[name])
        assert np.abs(results[name]["logits"] - references["qwen3"]).max() < LOGITS_ATOL
    assert "size mismatch" in explain(results["padding-not-said"])


def test_the_stock_trainer_ignores_the_rope_factor(
    sources: dict[str, Path], results: dict[str, dict[str, Any]], references: dict[str, np.ndarray]
) -> None:
    """mckpt therefore requires --allow-inexact. With the source's own factor the logits differ."""
    case = "llama-rope-scaled"
    own = tiny.hf_logits(sources[case], tiny.tokens(case))
    assert (
        np.abs(own - results[named(case, "torch_dist", LOCAL)]["logits"]).max() > 100 * LOGITS_ATOL
    )


def test_the_local_spec_cannot_build_mla(results: dict[str, dict[str, Any]]) -> None:
    result = results[named("deepseek-v3", "torch_dist", LOCAL)]
    assert "unexpected keyword argument 'k_channels'" in explain(result)


def test_the_stock_trainer_cannot_load_mla_without_q_lora(
    sources: dict[str, Path], work: Path, results: dict[str, dict[str, Any]]
) -> None:
    """mckpt refuses the model for this reason: a checkpoint for 0.18 lacks the weight that the
    error names.
    """
    with pytest.raises(mckpt.errors.MckptError, match=r"linear_q_proj\.layer_norm_weight"):
        mckpt.plan(sources[NOT_LOADABLE], work / "nowhere")
    if version("megatron-core") >= "0.19":
        assert "linear_q_proj.layer_norm_weight" in explain(
            results[named(NOT_LOADABLE, "torch", TE)]
        )


def test_a_flag_after_the_launch_line_overrides_it(results: dict[str, dict[str, Any]]) -> None:
    assert results["appended"]["ok"], explain(results["appended"])
    assert results["appended"]["args"]["seq_length"] == 64
    assert results["appended"]["args"]["max_position_embeddings"] == 1024


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_launch_line_of_a_published_model_is_accepted(
    path: Path, results: dict[str, dict[str, Any]]
) -> None:
    result = results[f"config-{path.stem}"]
    assert result["ok"], explain(result)
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    most = family.read(config)["max_positions"]
    assert (result["args"]["seq_length"], result["args"]["max_position_embeddings"]) == (
        min(most, 4096),
        most,
    )


def test_mla_with_plain_rope_needs_the_flag_that_mckpt_writes(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["plain-rope"]["ok"], explain(results["plain-rope"])
    assert "apply_rope_fusion for MLA only works with YARN RoPE" in explain(results["fused-rope"])
