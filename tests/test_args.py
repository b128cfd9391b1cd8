"""Megatron's args: reading them, keeping them, and the launch line made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import api, mapping
from mckpt.containers import safe_pickle
from mckpt.errors import MappingError, UsageError
from mckpt.geometry.parallel import Parallel
from tests import tiny
from tests.door import PT, Pt
from tests.tiny import TinyModel


def trained(
    source: Path,
    out: Path,
    change: Callable[[dict[str, Any]], Any] = lambda args: None,
    **wanted: Any,
) -> Path:
    """A `torch` checkpoint as a run would leave it: changed args, and nothing of mckpt's
    beside it.
    """
    mckpt.plan(source, out, format="torch", **wanted).run()
    for path in (out / "release").glob(f"mp_rank_*/{PT}"):
        file = Pt(path)
        args = dict(safe_pickle.fields(file.value["args"]))
        change(args)
        file.value["args"] = safe_pickle.namespace(**args)
        file.save()
    for stray in (out / "release" / "mckpt.json", *(out / "hf").glob("*")):
        stray.unlink()
    (out / "hf").rmdir()
    return out


def args_of(path: Path) -> dict[str, Any]:
    args = mckpt.open(path).args
    assert args is not None
    return args


def test_padding_keeps_its_values_from_megatron_to_megatron(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("qwen3"), tmp_path / "run", parallel=Parallel(tp=2))
    last = Pt(run / "release" / "mp_rank_01" / PT)
    storage = safe_pickle.as_tensor(last.value["model"]["output_layer.weight"])
    assert storage is not None
    last.data[storage.storage] = bytes(np.full(128 * 48, 0x3F80, "<u2"))  # ones, in the padding too
    last.save()
    for form in ("torch_dist", "torch"):
        manifest = mckpt.plan(run, tmp_path / form, format=form, parallel=Parallel(tp=4)).run()
        assert manifest["dropped"] == []
        whole = mckpt.open(tmp_path / form).padded()
        assert whole is not None
        assert (whole["lm_head.weight"][193:].numpy() == 1).all()
    dropped = mckpt.plan(tmp_path / "torch", tmp_path / "hf-out", format="hf").run()["dropped"]
    assert any("63 rows" in text for text in dropped), dropped


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_keys_that_leave_a_choice_open_are_read_as_the_args_say(
    impl: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    mckpt.plan(
        tiny_model("qwen3-moe"), tmp_path / "a", transformer_impl=impl, grouped_experts=False
    ).run()
    mckpt.plan(tmp_path / "a", tmp_path / "b", format="torch").run()
    kept = args_of(tmp_path / "b")
    assert (kept["transformer_impl"], kept["moe_grouped_gemm"]) == (impl, False)
    keys = mckpt.open(tmp_path / "b").opened.keys()
    assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight" in keys
    assert ("decoder.layers.0.input_layernorm.weight" in keys) == (impl == "local")


def test_a_list_of_moe_layers_asks_for_per_layer_keys(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(
        tiny_model("qwen3-moe"),
        tmp_path / "run",
        lambda args: args.update(moe_layer_freq=[1, 1, 1, 1]),
    )
    mckpt.plan(run, tmp_path / "dist", format="torch_dist").run()
    assert (
        "decoder.layers.3.mlp.router.weight"
        in mckpt.open(tmp_path / "dist").opened.metadata.tensors
    )
    assert not mckpt.diff(tiny_model("qwen3-moe"), tmp_path / "dist")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_rope_freq", 4),
        ("qk_l2_norm", True),
        ("window_attn_skip_freq", 2),
        ("softmax_scale", 0.5),
        ("spec", ["a", "b"]),
        ("moe_shared_expert_gate", True),
        ("rotary_interleaved", True),
        ("layernorm_zero_centered_gamma", True),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_mlp_glu_interleave_size", 32),
        ("mla_down_proj_fusion", True),
        ("mtp_use_repeated_layer", True),
        ("gtp_weight_remat_size", 2),
        ("moe_single_grouped_weight", True),
    ],
)
def test_args_that_change_the_model_are_not_overlooked(
    name: str, value: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("qwen3"), tmp_path / "run", lambda args: args.update({name: value}))
    with pytest.raises(MappingError, match=f"{name} is {re.escape(repr(value))}"):
        mckpt.plan(run, tmp_path / "hf", format="hf")


@pytest.mark.parametrize("value", ["none", ["seq_aux_loss"], ["aux_loss", "global_aux_loss"]])
def test_auxiliary_losses_do_not_change_the_model(
    value: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(
        tiny_model("qwen3-moe"),
        tmp_path / "run",
        lambda args: args.update(moe_router_load_balancing_type=value),
    )
    mckpt.plan(run, tmp_path / "hf", format="hf")


@pytest.mark.parametrize(
    ("name", "value", "dim"),
    [
        ("moe_router_score_function", "sigmoid", "router_score"),
        ("moe_router_num_groups", 4, "router_groups"),
        ("moe_router_topk_scaling_factor", 2.5, "router_scale"),
    ],
)
def test_a_router_that_no_family_with_these_tensors_has_is_refused(
    name: str, value: Any, dim: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(
        tiny_model("qwen3-moe"), tmp_path / "run", lambda args: args.update({name: value})
    )
    with pytest.raises(
        MappingError,
        match=(
            rf"(?s)no family computes.*deepseek_v3: it is for models where mla.*qwen3_moe: .*{dim}"
            rf" is {value!r}"
        ),
    ):
        mckpt.plan(run, tmp_path / "hf", format="hf")


def test_sizes_that_the_trainer_derives_are_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    """megatron-core 0.19 stores tp times gtp_weight_remat_size in every run."""
    for remat, shards in ((1, 2), (2, 4)):
        derived = {
            "gtp_weight_remat_size": remat,
            "tensor_parallel_num_weight_shards": shards,
            "expert_tensor_parallel_num_weight_shards": 2,
        }
        run = trained(
            tiny_model("qwen3"),
            tmp_path / f"run{remat}",
            lambda args, new=derived: args.update(new),
            parallel=Parallel(tp=2),
        )
        if remat == 1:
            mckpt.plan(run, tmp_path / "hf", format="hf")
        else:
            with pytest.raises(MappingError, match="gtp_weight_remat_size is 2"):
                mckpt.plan(run, tmp_path / "hf", format="hf")


def test_a_window_in_the_args_is_read_and_written(tiny_model: TinyModel, tmp_path: Path) -> None:
    run = trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.update(window_size=(31, 0))
    )
    out = tmp_path / "hf"
    planned = mckpt.plan(run, out, format="hf")
    planned.run()
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    mckpt.plan(run, tmp_path / "dist", format="torch_dist").run()
    assert "--window-size 31,0" in (tmp_path / "dist" / "release" / "megatron_args.sh").read_text()


def test_the_launch_line_has_args_that_older_checkpoints_name_differently(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("llama"), tmp_path / "run", lambda args: args.pop("layernorm_epsilon"))
    mckpt.plan(run, tmp_path / "dist", format="torch_dist").run()
    assert (
        "--norm-epsilon 0.003" in (tmp_path / "dist" / "release" / "megatron_args.sh").read_text()
    )


def test_every_dim_of_a_model_is_in_its_launch_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    dialect = mapping.load("megatron", "mcore")
    for case in ("llama", "qwen3", "qwen3-moe", "llama-rope-scaled"):
        said = mckpt.plan(tiny_model(case), tmp_path / case, allow_inexact=["rope_factor"]).facts[
            "args"
        ]
        ckpt = mckpt.open(tiny_model(case))
        for name, spec in dialect.dims.items():
            if spec.keys and (spec.when is None or spec.when(ckpt.dims)):
                flag = {**dialect.flags, **dialect.run_flags}.get(spec.keys[0], "none")
                assert flag != "none", f"{name}: no flag says {spec.keys[0]}"
        assert said["--num-layers"] == ckpt.dims["num_layers"]


def test_the_launch_line_has_a_sequence_length_that_a_run_can_hold(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf", max_position_embeddings=131072)
    said = mckpt.plan(source, tmp_path / "a").facts["args"]
    assert (said["--seq-length"], said["--max-position-embeddings"]) == (4096, 131072)
    run = trained(source, tmp_path / "run", lambda args: args.update(seq_length=8192))
    assert (
        mckpt.plan(run, tmp_path / "b", format="torch_dist").facts["args"]["--seq-length"] == 8192
    )
    assert api.launch(mckpt.open(run)).run["--seq-length"] == 8192


def test_every_flag_is_a_fact_of_the_model_or_a_setting_of_the_run(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    dialect = mapping.load("megatron", "mcore")
    assert not dialect.flags.keys() & dialect.run_flags.keys()
    mckpt.plan(tiny_model("qwen3"), tmp_path / "a", parallel=Parallel(tp=2)).run()
    lines = (tmp_path / "a" / "release" / "megatron_args.sh").read_text().splitlines()
    facts = next(i for i, line in enumerate(lines) if "# Facts of the model" in line)
    settings = next(i for i, line in enumerate(lines) if "# Settings of the run" in line)
    assert (
        facts
        < lines.index("    --max-position-embeddings 88")
        < lines.index("    --qk-layernorm")
        < settings
    )
    assert (
        settings
        < lines.index("    --seq-length 88")
        < lines.index("    --tensor-model-parallel-size 2")
    )
    flags = json.loads((tmp_path / "a" / "release" / "megatron_args.json").read_text())
    assert [line.split()[0] for line in lines if line.startswith("    --")] == list(flags)


def test_settings_follow_the_layer_spec_and_the_sizes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("qwen3-moe"), tmp_path / "run")
    follows = {"--no-persist-layer-norm", "--no-rope-fusion", "--no-gradient-accumulation-fusion"}
    local = mckpt.plan(run, tmp_path / "a", format="torch_dist", transformer_impl="local").facts[
        "args"
    ]
    assert follows <= local.keys()
    wider = mckpt.plan(run, tmp_path / "b", format="torch_dist", parallel=Parallel(tp=2)).facts[
        "args"
    ]
    assert not follows & wider.keys()
    assert "--sequence-parallel" in wider  # megatron-core trains experts at tp > 1 with it only


def test_the_launch_line_has_a_layout_or_virtual_stages_but_not_both(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    said = mckpt.plan(
        tiny_model("llama"), tmp_path / "a", parallel=Parallel(pp=2, layout="Et|t|t|tL")
    ).facts["args"]
    assert said["--pipeline-model-parallel-layout"] == "Et|t|t|tL"
    assert "--num-virtual-stages-per-pipeline-rank" not in said
    said = mckpt.plan(tiny_model("llama"), tmp_path / "a", parallel=Parallel(pp=2, vpp=2)).facts[
        "args"
    ]
    assert said["--num-virtual-stages-per-pipeline-rank"] == 2


def test_settings_of_one_plan_do_not_apply_to_the_next(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("llama"), tmp_path / "run", lambda args: args.update(vocab_size=None))
    ckpt = mckpt.open(run)
    mckpt.plan(ckpt, tmp_path / "a", format="torch_dist")
    with pytest.raises(UsageError, match="--vocab-size"):
        mckpt.plan(ckpt, tmp_path / "b", format="hf")
    mckpt.plan(run, tmp_path / "c", format="hf", known=mckpt.Known(vocab_size=131)).run()
    assert not mckpt.diff(tiny_model("llama"), tmp_path / "c")


def test_a_rope_factor_that_the_trainer_ignores_is_asked_about(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = trained(tiny_model("llama-rope-scaled"), tmp_path / "run", allow_inexact=["rope_factor"])
    with pytest.raises(MappingError, match="rope_factor"):
        mckpt.plan(run, tmp_path / "a", format="hf")
    mckpt.plan(
        run, tmp_path / "b", format="hf", known=mckpt.Known(settings={"rope_factor": 8.0})
    ).run()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["rope_scaling"]["factor"] == 8.0


def test_a_setting_wins_over_the_args(tiny_model: TinyModel, tmp_path: Path) -> None:
    run = trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.update(max_position_embeddings=32)
    )
    mckpt.plan(
        run, tmp_path / "a", format="hf", known=mckpt.Known(settings={"max_positions": 112})
    ).run()
    assert (
        json.loads((tmp_path / "a" / "config.json").read_text())["max_position_embeddings"] == 112
    )


def test_an_empty_first_stage_reads_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    for case, impl in (("llama", "local"), ("qwen3-moe", "local")):
        out = tmp_path / case
        mckpt.plan(
            tiny_model(case),
            out,
            format="torch",
            parallel=Parallel(pp=3, layout="E|tt|ttL"),
            transformer_impl=impl,
        ).run()
        assert not mckpt.diff(tiny_model(case), out)


def test_a_renamed_checkpoint_keeps_its_iteration(tiny_model: TinyModel, tmp_path: Path) -> None:
    mckpt.plan(tiny_model("llama"), tmp_path / "run", iteration=500).run()
    (tmp_path / "run" / "iter_0000500").rename(tmp_path / "best")
    planned = mckpt.plan(
        tmp_path / "best", tmp_path / "out", format="torch_dist", parallel=Parallel(tp=2)
    )
    assert planned.destination.unit == "iter_0000500"


def test_files_that_no_rank_saved_are_not_asked_for(tiny_model: TinyModel, tmp_path: Path) -> None:
    """At tp 3 and ep 2 Megatron-LM writes only three of the six files that its ranks ask for.

    Those three hold all weights.
    """
    root = tmp_path / "moe"
    config = {
        **tiny.config("qwen3-moe"),
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "moe_intermediate_size": 64,
    }
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    tiny.write_weights(root, tiny.tensors(config))
    sizes = Parallel(tp=3, ep=2, etp=1)
    mckpt.plan(root, tmp_path / "run", format="torch", parallel=sizes).run()
    kept = {sizes.directory(t, 0, e) for t, e in sizes.files(True, saved=True)}
    for directory in (tmp_path / "run" / "release").glob("mp_rank_*"):
        if directory.name not in kept:
            (directory / PT).unlink()
            directory.rmdir()
    assert len(kept) == 3
    assert not mckpt.diff(root, tmp_path / "run")


def test_eight_bit_floats_without_scales_are_refused(tmp_path: Path) -> None:
    root = tiny.tiny_random("llama", tmp_path / "hf")
    path = root / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
    start, end = header[name]["data_offsets"]
    header[name].update(dtype="F8_E4M3", data_offsets=[start, start + (end - start) // 2])
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little")
        + text
        + raw[8 + length : 8 + length + start + (end - start) // 2]
    )
    with pytest.raises(mckpt.errors.MckptError, match=f"{re.escape(name)}.*float8_e4m3fn"):
        mckpt.plan(root, tmp_path / "out")


def test_per_layer_keys_stay_so_until_asked(tiny_model: TinyModel, tmp_path: Path) -> None:
    mckpt.plan(tiny_model("qwen3"), tmp_path / "a", layer_keys="per_layer").run()
    mckpt.plan(tmp_path / "a", tmp_path / "b", format="torch").run()
    mckpt.plan(tmp_path / "b", tmp_path / "c", format="torch_dist").run()
    mckpt.plan(tmp_path / "c", tmp_path / "d", format="torch_dist", layer_keys="stacked").run()
    per_layer = "decoder.layers.3.mlp.linear_fc2.weight"
    assert [per_layer in mckpt.open(tmp_path / d).opened.metadata.tensors for d in "acd"] == [
        True,
        True,
        False,
    ]
    assert [fields(tmp_path / d)["non_homogeneous_layers"] for d in "acd"] == [True, True, False]
    assert not mckpt.diff(tiny_model("qwen3"), tmp_path / "d")
    mckpt.plan(tiny_model("qwen3-moe"), tmp_path / "e").run()
    run = trained(
        tiny_model("qwen3-moe"),
        tmp_path / "run",
        lambda args: args.update(moe_layer_freq=[1, 1, 1, 1]),
    )
    with pytest.raises(UsageError, match="per-layer"):
        mckpt.plan(run, tmp_path / "f", format="torch_dist", layer_keys="stacked")


def fields(path: Path) -> dict[str, Any]:
    common = mckpt.open(path).opened.common
    assert common is not None
    return dict(common.fields["content_metadata"])


# ------------------------------------------------------------------------ versions of megatron-core

# up to 0.16, and from 0.17 on
OLD, NEW = "mtp.layers.0.transformer_layer.", "mtp.layers.0.mtp_model_layer."


def mtp_prefixes(path: Path) -> set[str]:
    """The prefixes OLD and NEW that occur in the keys of any rank of a `torch` checkpoint."""
    files = (path / "release").glob(f"mp_rank_*/{PT}")
    return {
        prefix
        for file in files
        for key in Pt(file).value["model"]
        for prefix in (OLD, NEW)
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("version", "prefix", "recorded"),
    [
        (None, NEW, "0.19"),
        ("0.19.2", NEW, "0.19"),
        ("0.17", NEW, "0.17"),
        ("0.16.1", OLD, "0.16"),
        ("0.12", OLD, "0.12"),
    ],
)
def test_mtp_layers_are_named_for_the_megatron_version_that_will_load_them(
    tiny_model: TinyModel, version: str | None, prefix: str, recorded: str, tmp_path: Path
) -> None:
    source = tiny_model("deepseek-v3")
    wanted: dict[str, Any] = {
        "parallel": Parallel(tp=2, pp=2),
        "transformer_impl": "local",
        "megatron_version": version,
    }
    manifest = mckpt.plan(source, tmp_path / "torch", format="torch", **wanted).run()
    assert mtp_prefixes(tmp_path / "torch") == {prefix}
    assert manifest["megatron_version"] == recorded
    assert not mckpt.diff(source, tmp_path / "torch")  # the reader takes either name
    mckpt.plan(source, tmp_path / "dist", format="torch_dist", **wanted).run()
    keys = mckpt.open(tmp_path / "dist").opened.metadata.tensors
    assert any(key.startswith(OLD) for key in keys)  # torch_dist has kept the name
    assert not any(key.startswith(NEW) for key in keys)


def test_reshard_names_mtp_layers_for_the_newest_megatron_version_unless_told(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    source = tiny_model("deepseek-v3")
    mckpt.plan(
        source, tmp_path / "old", format="torch", transformer_impl="local", megatron_version="0.16"
    ).run()
    mckpt.plan(tmp_path / "old", tmp_path / "new", format="torch").run()
    mckpt.plan(tmp_path / "new", tmp_path / "back", format="torch", megatron_version="0.16").run()
    assert [mtp_prefixes(tmp_path / d) for d in ("old", "new", "back")] == [{OLD}, {NEW}, {OLD}]
    for a, b in (("old", "new"), ("new", "back")):
        assert not mckpt.diff(tmp_path / a, tmp_path / b)


def test_a_model_without_mtp_has_the_same_bytes_for_every_megatron_version(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    for form in ("torch", "torch_dist"):
        plans = [
            mckpt.plan(
                tiny_model("qwen3-moe"),
                tmp_path / f"{form}-{version}",
                format=form,
                megatron_version=version,
            )
            for version in ("0.16", "0.19")
        ]
        files = [planned.run()["files"] for planned in plans]
        assert files[0] == files[1]  # bytes and checksums
        assert plans[0].digest != plans[1].digest


@pytest.mark.parametrize("version", ["0.11", "0.20", "1.0", "core_v0.16", "16", ""])
def test_a_megatron_version_that_no_mapping_covers_is_refused(
    version: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"--megatron-version .*0\.19"):
        mckpt.plan(tiny_model("llama"), tmp_path / "out", megatron_version=version)


def test_a_model_that_a_megatron_version_cannot_load_is_refused_for_that_version(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    """Latent attention without a latent of the queries, with Transformer Engine: exact up to
    megatron-core 0.18, not loadable from 0.19 on.
    """
    source = tiny_model("deepseek-v3-plain")
    said = r"q_lora_rank is None \(written for megatron-core 0\.19\): .*--megatron-version 0\.18"
    for wanted in ({}, {"megatron_version": "0.19.2"}, {"allow_inexact": ["q_lora_rank"]}):
        with pytest.raises(MappingError, match=said) as caught:
            mckpt.plan(source, tmp_path / "new", **wanted)
        assert "--allow-inexact" not in str(caught.value)
    mckpt.plan(source, tmp_path / "old", format="torch", megatron_version="0.18").run()
    # which the trainer here builds in every version
    mckpt.plan(source, tmp_path / "local", transformer_impl="local")
    with pytest.raises(MappingError, match=said):
        mckpt.plan(tmp_path / "old", tmp_path / "resharded", format="torch_dist")
    mckpt.plan(
        tmp_path / "old", tmp_path / "resharded", format="torch_dist", megatron_version="0.18"
    ).run()
    assert not mckpt.diff(source, tmp_path / "resharded")


def test_a_trained_checkpoint_is_not_called_inexact_for_another_megatron_version(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    source = tiny_model("deepseek-v3-plain")
    run = trained(source, tmp_path / "run", megatron_version="0.18")
    manifest = mckpt.plan(run, tmp_path / "back", format="hf").run()
    assert manifest["inexact"] == {}


def test_the_launch_line_of_latent_attention_fuses_rope_only_with_yarn(tmp_path: Path) -> None:
    """megatron-core refuses the other: "apply_rope_fusion for MLA only works with YARN RoPE"."""
    for case, off in (("deepseek-v3", None), ("deepseek-v3-plain", True)):
        source = tiny.tiny_random(case, tmp_path / case)
        said = mckpt.plan(source, tmp_path / f"{case}-out", megatron_version="0.18").facts["args"]
        assert said.get("--no-rope-fusion") is off


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (
            {"format": "torch", "layer_keys": "stacked"},
            "the format torch has no choice",
        ),
        ({"format": "zip"}, "no format 'zip'; the formats are hf, torch_dist, torch"),
        ({"format": "torch", "common_as_object": True}, "the format torch cannot keep the common"),
        (
            {"common_as_object": True, "megatron_version": "0.18"},
            r"megatron-core reads it from 0\.19 on, and --megatron-version is 0\.18",
        ),
    ],
)
def test_an_option_that_the_target_has_no_use_for_is_refused(
    wanted: dict[str, Any], why: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(mckpt.errors.UsageError, match=why):
        mckpt.plan(tiny_model("llama"), tmp_path / "out", **wanted)
    assert not (tmp_path / "out").exists()
