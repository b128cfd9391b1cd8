"""The hybrid dialect: each attention and each mlp is a layer of its own, listed by a pattern."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt import launching
from mckpt.errors import MappingError, MissingExtra, SourceError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.verification import levels, requirements
from tests.helpers.commands import as_trained
from tests.helpers.tiny import TinyModel

Made = Callable[..., Path]


def written(source: Path, out: Path, **wanted: Any) -> Path:
    wanted = {"allow_inexact": ["rope_factor"], **wanted}
    mckpt.plan(source, out, **wanted).run()
    return out


def pattern(checkpoint: Path) -> str:
    args = mckpt.open(checkpoint).args
    assert args is not None
    return str(args["hybrid_layer_pattern"])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("qwen3", "*-*-*-*-"),
        ("qwen3-moe", "*E*E*E*E"),
        ("deepseek-v3", "+-+E+E+E/+E"),
    ],
)
def test_the_pattern_of_a_model(
    case: str, expected: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    made = written(tiny_model(case), tmp_path / "made", dialect="hybrid")
    assert pattern(made) == expected
    args = mckpt.open(made).args
    assert args is not None and args["num_layers"] == len(expected.split("/")[0])


def test_a_checkpoint_of_another_dialect_keeps_its_pipeline(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    uneven = Parallel(pp=2, first_stage_layers=1)
    gpt = written(tiny_model("qwen3"), tmp_path / "gpt", parallel=uneven)
    kept = mckpt.open(gpt).parallel
    hybrid = written(gpt, tmp_path / "hybrid", dialect="hybrid", parallel=kept)
    assert pattern(hybrid) == "*-|*-*-*-"
    kept = mckpt.open(hybrid).parallel
    back = written(hybrid, tmp_path / "back", dialect="gpt", parallel=kept)
    assert mckpt.open(back).parallel.stages(4) == uneven.stages(4)
    again = written(hybrid, tmp_path / "again", parallel=kept.with_(tp=2))
    assert pattern(again) == "*-|*-*-*-"
    assert pattern(written(hybrid, tmp_path / "even", parallel=kept.with_(pp=4))) == "*-|*-|*-|*-"


def test_a_stage_that_ends_in_a_layer_has_no_place_in_gpt(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    cut = Parallel(pp=2, layout="Ettt|tttttL")
    hybrid = written(tiny_model("qwen3"), tmp_path / "hybrid", dialect="hybrid", parallel=cut)
    assert pattern(hybrid) == "*-*|-*-*-"
    kept = mckpt.open(hybrid).parallel
    with pytest.raises(UsageError, match=r"\[3, 5\] layers.*cannot cut a layer in two.*target-pp"):
        mckpt.plan(hybrid, tmp_path / "gpt", dialect="gpt", parallel=kept)


OLD = {"hybrid_layer_pattern": None, "is_hybrid_model": True}


@pytest.mark.parametrize(
    ("case", "change"),
    [
        # pretrain_mamba.py requires a spec
        ("qwen3", {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]}),
        # megatron-core up to 0.16
        ("qwen3", OLD | {"hybrid_override_pattern": "*-*-*-*-"}),
        # 0.17 and later keep the old arg beside the new one
        ("qwen3", {"hybrid_override_pattern": "*-*-*-*-"}),
        (
            "deepseek-v3",
            OLD | {"hybrid_override_pattern": "+-+E+E+E", "mtp_hybrid_override_pattern": "+E"},
        ),
    ],
)
def test_args_of_older_trainers_are_read(
    case: str, change: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(case)
    parallel = Parallel(tp=2)
    run = as_trained(
        source,
        tmp_path / "run",
        lambda args: args.update(change),
        dialect="hybrid",
        parallel=parallel,
    )
    plan = mckpt.plan(run, tmp_path / "hf", format="hf")
    assert not [note for note in plan.facts["notes"] if "args have" in note]
    plan.run()
    assert not mckpt.diff(source, tmp_path / "hf")
    more = written(run, tmp_path / "more", parallel=Parallel(tp=2, pp=2), format="torch")
    assert pattern(more) == ("+-+E|+E+E/+E" if case == "deepseek-v3" else "*-*-|*-*-")
    args = mckpt.open(more).args
    assert args is not None and not args.get("hybrid_override_pattern")
    assert args.get("spec") == change.get("spec")
    assert not mckpt.diff(source, more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "-*-*-*-*"}, "'-.*its newer name, has another value"),
        (OLD, "hybrid_layer_pattern is None: mckpt knows patterns"),
    ],
)
def test_patterns_that_differ_are_refused(
    change: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("qwen3")
    run = as_trained(source, tmp_path / "run", lambda args: args.update(change), dialect="hybrid")
    with pytest.raises(MappingError, match=message):
        mckpt.plan(run, tmp_path / "hf", format="hf")


def test_a_spec_that_is_not_megatrons_is_lost_only_on_purpose(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, spec = tiny_model("qwen3"), ["my.models.specs", "mamba_stack_spec"]
    run = as_trained(source, tmp_path / "run", lambda args: args.update(spec=spec))
    with pytest.raises(
        MappingError, match=r"my.models.specs.* does not know this value"
    ) as refused:
        mckpt.plan(run, tmp_path / "hf", format="hf")
    assert "--allow-inexact args.spec" in str(refused.value)
    plan = mckpt.plan(run, tmp_path / "hf", format="hf", allow_inexact=["args.spec"])
    assert [note for note in plan.facts["notes"] if "does not know: spec ['my.models" in note]
    more = written(run, tmp_path / "more", parallel=Parallel(tp=2))
    args = mckpt.open(more).args
    assert args is not None and args["spec"] == spec


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        *((one, "'.*mckpt knows patterns of") for one in ("*-*-*-*-/*", "*-*-*-*-/*-*-")),
        *((one, "'.*mckpt knows patterns of") for one in ("*-*-*-*-/M-", "W-*-*-*-")),
        ("**--*-*-", r"layer_parts is \['attn', 'attn mlp', 'mlp', "),
        ("*-|*-|*-*-", "has 3 stages, which is not a multiple of pp 2"),
    ],
)
def test_another_pattern_is_another_model(
    pattern: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    sizes = Parallel(pp=2 if "|" in pattern else 1)
    made = mckpt.open(
        written(tiny_model("qwen3"), tmp_path / "made", dialect="hybrid", parallel=sizes)
    )
    assert made.args is not None
    made.args["hybrid_layer_pattern"] = pattern
    with pytest.raises((MappingError, SourceError), match=message):
        _ = made.parallel, made.dims


@pytest.mark.parametrize(
    ("pattern", "parts", "numbers"),
    [
        ("*-*-", ["attn mlp", "attn mlp"], [0, 2]),
        ("**-|--M*", ["attn", "attn mlp", "mlp", "mlp", "mamba", "attn"], [0, 1, 3, 4, 5, 6]),
        ("-M|-ME|EM", ["mlp", "mamba mlp", "mamba moe", "moe", "mamba"], [0, 1, 3, 5, 6]),
    ],
)
def test_any_order_of_layers_is_read_and_written_again(
    pattern: str, parts: list[str], numbers: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    opened = mckpt.open(written(tiny_model("qwen3-moe"), tmp_path / "made", dialect="hybrid"))
    assert opened.args is not None
    dialect = opened.mapping
    dims = dialect.read({**opened.args, "hybrid_layer_pattern": pattern})
    assert dims["layer_parts"] == parts and dims["num_layers"] == len(parts)
    assert dialect.num_numbers(dims) == len(pattern.replace("|", ""))
    scope = dialect.scope(dims, keys="global", layers="per_layer", pp=1, transformer_impl="")
    first = {}
    for bound in dialect.bind(scope):
        for number, layer in zip(bound.numbers.tolist(), bound.layers.tolist(), strict=True):
            if "decoder.layers." in bound.rule.key:
                first[layer] = min(number, first.get(layer, number))
    assert [first[layer] for layer in range(len(parts))] == numbers
    stages = [len(stage) for stage in pattern.split("|")]
    ends = [sum(stages[: i + 1]) for i in range(len(stages))]
    cut = [list(range(end - size, end)) for end, size in zip(ends, stages, strict=True)]
    assert dialect.write(dims, {"stages": cut})["hybrid_layer_pattern"] == pattern


def test_the_launch_line_has_the_pattern_and_none_of_the_flags_that_megatron_refuses_beside_it(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    sizes = Parallel(tp=2, pp=2, vpp=2)
    made = written(tiny_model("deepseek-v3"), tmp_path / "made", dialect="hybrid", parallel=sizes)
    text = (made / "release" / "megatron_args.sh").read_text()
    assert "pretrain_hybrid.py" in text and "--hybrid-layer-pattern '+-|+E|+E|+E/+E'" in text
    for flag in ("num-layers", "virtual", "moe-layer-freq", "mtp-num-layers", "account-for"):
        assert f"--{flag}" not in text and f"-{flag}" not in text


@pytest.mark.parametrize(
    ("case", "dialect", "installed", "since"),
    [
        ("qwen3", "hybrid", "0.16.1", "0.18"),
        ("deepseek-v3", "hybrid", "0.18.2", "0.19"),
        ("deepseek-v3", "gpt", "0.16.1", None),
        ("qwen3-moe", "hybrid", "0.18.0", None),
    ],
)
def test_an_old_megatron_core_is_refused_before_a_model_runs(
    case: str,
    dialect: str,
    installed: str,
    since: str | None,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = written(tiny_model(case), tmp_path / "made", dialect=dialect)
    monkeypatch.setattr(requirements, "version", lambda name: installed)
    if since is None:
        return requirements.require_core(mckpt.open(made))
    words = f"dialect {dialect}.* from {since} on.*megatron-core {installed}: pip install"
    monkeypatch.setattr(launching, "require", lambda *modules: None)
    monkeypatch.setattr(launching, "launch", lambda *job: pytest.fail("a model ran"))
    with pytest.raises(MissingExtra, match=words):
        levels.verify(tiny_model(case), made)
    return None


def test_an_optimizer_of_fixed_sizes_is_refused_before_a_model_runs(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    made = written(tiny_model("qwen3"), tmp_path / "made", dialect="gpt", parallel=Parallel(tp=2))
    source = mckpt.open(made)
    common = source.opened.common
    assert common is not None
    common.fields["content_metadata"] |= {"distrib_optim_sharding_type": "dp_reshardable"}
    own = {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 2, "cp": 1}
    requirements.refuse_resume(source, own)
    with pytest.raises(SourceError, match=r"dp_reshardable.*`mckpt repair SRC DST`"):
        requirements.refuse_resume(source, own | {"tp": 1})


def test_a_family_that_chooses_the_dialect_says_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: qwen3\narchitectures: [Qwen3ForCausalLM]\ndialect: hybrid\n")
    said = "the other choice: --dialect gpt"
    source = mckpt.open(tiny_model("qwen3"), mapping=mine)
    plan = mckpt.plan(source, tmp_path / "a")
    assert [note for note in plan.facts["notes"] if note.endswith(said)]
    for asked in ({"dialect": "hybrid"}, {"dialect": "gpt"}):
        plan = mckpt.plan(source, tmp_path / "a", **asked)
        assert not [note for note in plan.facts["notes"] if said in note]
    for version, other in (
        ("0.16", "--dialect gpt$"),
        ("0.1", "0.18 to 0.19$"),
        ("x", "or 0.19.2$"),
    ):
        with pytest.raises(UsageError, match=f"--megatron-version .*(?s:.*){other}"):
            mckpt.plan(source, tmp_path / "a", megatron_version=version)
