"""Reading Megatron's args from a checkpoint, and keeping them when it is converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers import safe_pickle
from mckpt.errors import MappingError, UsageError
from mckpt.formats.megatron.run_config import restated
from mckpt.geometry.parallel import Parallel
from mckpt.mapping.inert import inert_word, is_listed
from tests.helpers import tiny
from tests.helpers.commands import PT, Pt, as_trained, refused, restate
from tests.helpers.tiny import TinyModel


def args_of(path: Path) -> dict[str, Any]:
    args = mckpt.open(path).args
    assert args is not None
    return args


@pytest.fixture
def ones(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A run at tp 2 whose output layer is ones from row 128 on, in the padding too: 193 rows of the
    vocabulary, padded to 256.
    """
    run = as_trained(tiny_model("qwen3"), tmp_path / "run", parallel=Parallel(tp=2))
    last = Pt(run / "release" / "mp_rank_01" / PT)
    storage = safe_pickle.as_tensor(last.value["model"]["output_layer.weight"])
    assert storage is not None
    last.data[storage.storage] = bytes(np.full(128 * 48, 0x3F80, "<u2"))
    last.save()
    return run


def padding(path: Path) -> np.ndarray:
    """Returns the first value of each row of the output layer's padding."""
    whole = mckpt.open(path).with_padding()
    assert whole is not None
    return whole["lm_head.weight"][193:].numpy()[:, 0].astype("f4")


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_the_vocabulary_is_padded_for_the_target(ones: Path, tmp_path: Path, form: str) -> None:
    """As Megatron's own vocab_utils.py pads it: 193 rows, to a multiple of 128 times tp."""
    more = mckpt.plan(ones, tmp_path / "more", format=form, parallel=Parallel(tp=4))
    assert "of 193 tokens has 512 rows in the target, as Megatron pads it at tp 4" in more.summary()
    assert more.run()["dropped"] == []
    assert padding(tmp_path / "more").tolist() == [1] * (256 - 193) + [0] * 256
    assert args_of(tmp_path / "more")["padded_vocab_size"] == 512
    less = mckpt.plan(tmp_path / "more", tmp_path / "less", format=form, parallel=Parallel())
    assert less.run()["dropped"] == []  # rows that are zero
    assert padding(tmp_path / "less").tolist() == [1] * 63
    same = mckpt.plan(ones, tmp_path / "same", format=form, parallel=Parallel(tp=2))
    assert "rows in the target" not in same.summary()


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_rows_that_are_dropped_are_reported(ones: Path, tmp_path: Path, form: str) -> None:
    less = mckpt.plan(ones, tmp_path / "less", format=form, tp=1, divisible_by=4)
    assert less.json()["notes"] == [
        "the vocabulary of 193 tokens has 196 rows in the target, as Megatron pads it at tp 1, and"
        " 256 in the source; --keep-padding keeps those"
    ]
    assert less.run()["dropped"] == [
        "output_layer.weight: 60 rows beyond the vocabulary are not zero (largest 1), and are"
        " dropped"
    ]
    assert padding(tmp_path / "less").tolist() == [1] * 3
    kept = args_of(tmp_path / "less")
    assert (kept["padded_vocab_size"], kept["make_vocab_size_divisible_by"]) == (196, 4)
    # the divisor of the args is that of the user's launch line
    mckpt.plan(tmp_path / "less", tmp_path / "again", format=form, parallel=Parallel(tp=2)).run()
    assert len(padding(tmp_path / "again")) == 200 - 193


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_padding_that_is_kept(ones: Path, tmp_path: Path, form: str) -> None:
    plan = mckpt.plan(
        ones, tmp_path / "kept", format=form, parallel=Parallel(tp=4), keep_padding=True
    )
    assert plan.run()["dropped"] == [] and padding(tmp_path / "kept").tolist() == [1] * 63
    flags = json.loads((tmp_path / "kept/release/megatron_args.json").read_text())
    assert flags["--padded-vocab-size"] == 256 and flags["--vocab-size"] == 193
    # so that a Megatron that computes the number arrives at it
    assert flags["--make-vocab-size-divisible-by"] == 64
    with pytest.raises(UsageError, match=r"256 padded rows .* not divisible by tp 3"):
        mckpt.plan(ones, tmp_path / "no", format=form, parallel=Parallel(tp=3), keep_padding=True)


def test_padding_of_an_unknown_vocabulary_is_kept(ones: Path, tmp_path: Path) -> None:
    for path in (ones / "release").glob(f"mp_rank_*/{PT}"):
        pt = Pt(path)
        pt.value["args"].state.pop("vocab_size", None)
        pt.save()
    assert (
        "rows of the vocabulary" not in mckpt.plan(ones, tmp_path / "a", format="torch").summary()
    )
    plan = mckpt.plan(mckpt.open(ones, vocab_size=193), tmp_path / "a", format="torch")
    assert "rows in the target" not in plan.summary()


def test_a_hugging_face_directory_has_no_padding_rows(ones: Path, tmp_path: Path) -> None:
    dropped = mckpt.plan(ones, tmp_path / "hf-out", format="hf").run()["dropped"]
    assert dropped == [
        "output_layer.weight: 63 rows beyond the vocabulary are not zero (largest 1), and are"
        " dropped"
    ]
    with pytest.raises(UsageError, match=r"--keep-padding: .* is a Hugging Face directory"):
        mckpt.plan(tmp_path / "hf-out", tmp_path / "back", keep_padding=True)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_args_decide_where_the_keys_fit_two_layer_specs(
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


def test_a_list_of_moe_layers_requires_per_layer_keys(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = as_trained(
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
        ("input_embeddings_multiplier", 50.0),
        ("swish_gate", True),
        ("cap", "tanh"),
        # each has a word of inert_args.yaml: log, log, profile, interval and data
        ("attn_logit_log_scale", 2.0),
        ("moe_router_log_temperature", 0.5),
        ("rope_profile_scale", 4.0),
        ("nope_layer_interval", 4),
        ("data_dependent_gate", True),
    ],
)
def test_an_arg_that_no_megatron_has_is_refused_where_it_would_be_lost(
    name: str, value: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = as_trained(tiny_model("qwen3"), tmp_path / "run", lambda args: args.update({name: value}))
    note = f"its args have names or values that mckpt does not know: {name} {value!r}"
    with pytest.raises(MappingError, match=rf"{name} is {value!r}.*(?s:.*)inexact args.{name}$"):
        mckpt.plan(run, tmp_path / "hf", format="hf")
    plan = mckpt.plan(run, tmp_path / "hf", format="hf", allow_inexact=[f"args.{name}"])
    assert note in plan.facts["notes"] and [*plan.facts["inexact"]] == [f"args.{name}"]
    # a reshard keeps it, unless the target is of another model class
    mckpt.plan(run, tmp_path / "more", parallel=Parallel(tp=2)).run()
    assert args_of(tmp_path / "more")[name] == value
    assert note in Checkpoint.open(tmp_path / "more").model.notes
    for lost in ({"dialect": "hybrid"}, {"run_config": True, "format": "torch_dist"}):
        with pytest.raises(MappingError, match=f"--allow-inexact .*args.{name}"):
            mckpt.plan(run, tmp_path / "other", **lost)


def test_args_that_change_nothing_are_accepted(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The stock args are those that Megatron-LM and its trainer loop set in every run."""
    by_word = {"wandb_flavour": "x", "my_profile_level": 3, "extra_data_mix": 0.5, "muon_ns": 5}
    stock = {"curr_iteration": 7, "iteration": 7, "_latest_batch_num_sequences": 4}
    unset = {"source_model": "org/name", "recipe": None, "sparks": [], "enable_sparks": False}
    neutral = {"sparks_scale": 1.0, "num_sparks": 0}  # listed, because they may be more elsewhere
    more = by_word | stock | unset | neutral
    run = as_trained(tiny_model("qwen3"), tmp_path / "run", lambda args: args.update(more))
    notes = mckpt.plan(run, tmp_path / "hf", format="hf").facts["notes"]
    assert notes[0].endswith(" does not know: sparks_scale 1.0, num_sparks 0")
    assert notes[1].endswith(
        "by a word of their names only, and takes them for settings of the run:"
        " wandb_flavour 'x', my_profile_level 3, extra_data_mix 0.5, muon_ns 5"
    )


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("my_weight_decay_end", "weight_decay"),
        ("my_lr", "lr"),
        ("logs", "logs"),
        ("blog", None),
        ("lr_scale_mlp", None),
        ("embed_dropout_rate", None),
        ("expert_dispatcher", None),
    ],
)
def test_a_word_explains_the_args_of_forks(name: str, word: str | None) -> None:
    assert inert_word(name) == word and not is_listed(name)


def test_no_part_of_a_model_is_called_inert() -> None:
    """The words stand for the args of forks, so they must not be those of a dim."""
    for kind in ("megatron", "run_config"):
        for file in (mapping.load(kind, name) for name in mapping.names(kind)):
            keys = {key for dim in file.dims.values() for key in dim.keys}
            keys -= {"heterogeneous_layers_config_path"}  # written, and its value is not read
            assert not [key for key in keys if inert_word(f"my_{key}")]


@pytest.mark.parametrize("run_config", [False, True])
def test_a_damaged_list_is_refused_before_anything_is_written(
    run_config: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run, change = tmp_path / "run", {"moe_layer_freq": [1]}
    if run_config:
        mckpt.plan(tiny_model("qwen3-moe"), run, run_config=True).run()
        path = run / "release" / "run_config.yaml"
        path.write_bytes(restated(path, change, {}))
        common = Pt(path.with_name("common.pt"))
        del common.value["args"]
        common.save()
        shutil.rmtree(run / "hf")
        (path.parent / "mckpt.json").unlink()
    else:
        as_trained(tiny_model("qwen3-moe"), run, lambda args: args.update(change))
    words = ("moe_layer_freq has 1 item, and num_layers is 4", "another checkpoint of the run")
    refused(4, *words, args=("megatron-to-hf", run, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["none", ["seq_aux_loss"], ["aux_loss", "global_aux_loss"]])
def test_auxiliary_losses_do_not_change_the_model(
    value: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, change = tiny_model("qwen3-moe"), {"moe_router_load_balancing_type": value}
    plain = as_trained(source, tmp_path / "plain")
    run = as_trained(source, tmp_path / "run", lambda args: args.update(change))
    wanted, found = (mckpt.plan(at, tmp_path / "hf", format="hf").facts for at in (plain, run))
    for what in ("dims", "inexact", "notes"):
        assert found[what] == wanted[what]


def test_sizes_that_the_trainer_derives_are_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    """megatron-core 0.19 stores the product of tp and gtp_weight_remat_size in every run."""
    for remat, shards in ((1, 2), (2, 4)):
        derived = {
            "gtp_weight_remat_size": remat,
            "tensor_parallel_num_weight_shards": shards,
            "expert_tensor_parallel_num_weight_shards": 2,
        }
        run = as_trained(
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
    run = as_trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.update(window_size=(31, 0))
    )
    out = tmp_path / "hf"
    planned = mckpt.plan(run, out, format="hf")
    planned.run()
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    mckpt.plan(run, tmp_path / "dist", format="torch_dist").run()
    assert "--window-size 31,0" in (tmp_path / "dist" / "release" / "megatron_args.sh").read_text()


def test_settings_of_one_plan_do_not_apply_to_the_next(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = as_trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.update(vocab_size=None)
    )
    ckpt = mckpt.open(run)
    mckpt.plan(ckpt, tmp_path / "a", format="torch_dist")
    with pytest.raises(UsageError, match="--vocab-size"):
        mckpt.plan(ckpt, tmp_path / "b", format="hf")
    mckpt.plan(mckpt.open(run, vocab_size=131), tmp_path / "c", format="hf").run()
    assert not mckpt.diff(tiny_model("llama"), tmp_path / "c")


def test_a_rope_factor_that_the_trainer_ignores_must_be_confirmed(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run = as_trained(
        tiny_model("llama-rope-scaled"), tmp_path / "run", allow_inexact=["rope_factor"]
    )
    with pytest.raises(MappingError, match="rope_factor"):
        mckpt.plan(run, tmp_path / "a", format="hf")
    mckpt.plan(mckpt.open(run, settings={"rope_factor": 8.0}), tmp_path / "b", format="hf").run()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["rope_scaling"]["factor"] == 8.0


def test_a_setting_wins_over_the_args(tiny_model: TinyModel, tmp_path: Path) -> None:
    run = as_trained(
        tiny_model("llama"), tmp_path / "run", lambda args: args.update(max_position_embeddings=32)
    )
    mckpt.plan(mckpt.open(run, settings={"max_positions": 112}), tmp_path / "a", format="hf").run()
    assert (
        json.loads((tmp_path / "a" / "config.json").read_text())["max_position_embeddings"] == 112
    )


def test_a_renamed_checkpoint_keeps_its_iteration(tiny_model: TinyModel, tmp_path: Path) -> None:
    mckpt.plan(tiny_model("llama"), tmp_path / "run", target_iteration=500).run()
    (tmp_path / "run" / "iter_0000500").rename(tmp_path / "best")
    planned = mckpt.plan(
        tmp_path / "best", tmp_path / "out", format="torch_dist", parallel=Parallel(tp=2)
    )
    assert planned.destination.iteration_name == "iter_0000500"


def test_files_that_no_rank_saved_are_not_required(tiny_model: TinyModel, tmp_path: Path) -> None:
    """At tp 3 and ep 2 Megatron-LM writes only three of the six files that its ranks look for.
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
            restate(directory / PT)
            directory.rmdir()
    assert len(kept) == 3
    assert not mckpt.diff(root, tmp_path / "run")


def test_per_layer_keys_stay_until_stacked_keys_are_requested(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
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
    run = as_trained(
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
