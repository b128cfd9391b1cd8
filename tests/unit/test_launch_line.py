"""The launch line: flags of the trainer that state the model and the settings of the run."""

from __future__ import annotations

import json
from pathlib import Path

import mckpt
from mckpt import mapping
from mckpt.conversion import planning
from mckpt.geometry.parallel import Parallel
from tests.helpers import tiny
from tests.helpers.commands import as_trained
from tests.helpers.tiny import TinyModel


def test_the_launch_line_has_args_that_older_checkpoints_name_differently(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = as_trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.pop("layernorm_epsilon")
    )
    mckpt.plan(run, tmp_path / "dist", format="torch_dist").run()
    assert (
        "--norm-epsilon 0.003" in (tmp_path / "dist" / "release" / "megatron_args.sh").read_text()
    )


def test_every_dim_of_a_model_is_in_its_launch_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    dialect = mapping.load("megatron", "gpt")
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
    run = as_trained(source, tmp_path / "run", lambda args: args.update(seq_length=8192))
    assert (
        mckpt.plan(run, tmp_path / "b", format="torch_dist").facts["args"]["--seq-length"] == 8192
    )
    assert planning.launch(mckpt.open(run)).run["--seq-length"] == 8192


def test_every_flag_is_a_fact_of_the_model_or_a_setting_of_the_run(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    dialect = mapping.load("megatron", "gpt")
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
    run = as_trained(tiny_model("qwen3-moe"), tmp_path / "run")
    follows = {"--no-persist-layer-norm", "--no-rope-fusion", "--no-gradient-accumulation-fusion"}
    local = mckpt.plan(run, tmp_path / "a", format="torch_dist", transformer_impl="local").facts[
        "args"
    ]
    assert follows <= local.keys()
    wider = mckpt.plan(run, tmp_path / "b", format="torch_dist", parallel=Parallel(tp=2)).facts[
        "args"
    ]
    assert not follows & wider.keys()
    assert "--sequence-parallel" in wider  # megatron-core requires it to train experts at tp > 1


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


def test_the_launch_line_of_latent_attention_fuses_rope_only_with_yarn(tmp_path: Path) -> None:
    """megatron-core refuses the fusion otherwise: "apply_rope_fusion for MLA only works with YARN
    RoPE".
    """
    for case, off in (("deepseek-v3", None), ("deepseek-v3-plain", True)):
        source = tiny.tiny_random(case, tmp_path / case)
        said = mckpt.plan(source, tmp_path / f"{case}-out", megatron_version="0.18").facts["args"]
        assert said.get("--no-rope-fusion") is off
