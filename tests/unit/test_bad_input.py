"""Sources that a command refuses and another option or a repair lets through, and sources that
change. What is one refusal only is in tests/refusals.py.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt as package
from mckpt.containers import safe_pickle
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.conversion import run as execute
from mckpt.errors import UsageError
from mckpt.formats.megatron import chunked, torch_dist_writing
from mckpt.formats.megatron.interface import has_tensors
from tests.helpers import tiny
from tests.helpers.commands import PT, TRACKER, Pt, edit_json, good, hf, mckpt, refused, tree
from tests.helpers.damages import (
    ALONE,
    DIST_FC2,
    DOWN,
    ONE,
    all_of,
    arrays,
    copy_of,
    gone,
    key_extra,
    metadata,
    ranks,
    tensor,
    write_bin,
)


@pytest.mark.parametrize("what", ["a weight", "the mtime", "nothing", "a file is gone"])
def test_a_source_that_changes_while_it_is_read_is_refused(src, tmp_path, monkeypatch, what):
    """Also if its size and its mtime stay. If only its times change, its content is compared."""
    src = copy_of(src, tmp_path / "src")
    planned = package.plan(src, tmp_path / "dst")
    real = execute.execute

    def slow(*args: Any, **named: Any) -> Any:
        done = real(*args, **named)
        before, data = (src / ONE).stat().st_mtime_ns, bytearray((src / ONE).read_bytes())
        data[-1] ^= what == "a weight"
        (src / ONE).write_bytes(data)
        os.utime(src / ONE, ns=(0, before + (what == "the mtime")))
        if "gone" in what:
            (src / ONE).unlink()
        return done

    monkeypatch.setattr(execute, "execute", slow)
    if what in ("the mtime", "nothing"):
        planned.run()
        monkeypatch.setattr(execute, "execute", None)  # nothing is copied again
        assert package.convert(src, tmp_path / "dst")["files"]
        return
    match = "is gone" if "gone" in what else "changed while it was read"
    with pytest.raises(package.errors.SourceError, match=match):
        planned.run()
    assert not (tmp_path / "dst" / TRACKER).exists()
    monkeypatch.undo()
    if what == "a weight":  # the staged bytes are of two states
        package.plan(src, tmp_path / "dst").run()
        assert not package.diff(src, tmp_path / "dst")


@pytest.mark.parametrize("option", ["like", "source", "destination"])
def test_a_path_with_a_nul_is_refused(src, tmp_path, option):
    where = {"source": src, "destination": tmp_path / "out", option: "a\0b"}
    with pytest.raises(UsageError, match="a path cannot have a NUL character"):
        opened = package.open(where["source"], like=where.get("like"))
        package.plan(opened, where["destination"])


def test_an_unreadable_file_is_refused(src, tmp_path, monkeypatch):
    def refuse(*args: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied", args[0])

    monkeypatch.setattr("mckpt.storage.descriptors.open_file", refuse)
    args = ("hf-to-megatron", src, tmp_path / "d")
    refused(7, ONE, "Permission denied", args=args, untouched=tmp_path)


def test_a_dtype_option_casts_mixed_dtypes(src, tmp_path):
    mixed = arrays(lambda a: a.update({DOWN: a[DOWN].astype("f4")}))
    good(
        "hf-to-megatron", copy_of(src, tmp_path / "src", mixed), tmp_path / "dst", "--dtype", "bf16"
    )
    assert mckpt("diff", src, tmp_path / "dst").code == 0


def transposed(key: str, array: Any) -> Any:
    return (array.T, 0, (1, array.shape[0])) if array.ndim == 2 else None


def inside(key: str, array: Any) -> Any:
    """Stores a matrix as every second column of a larger one that is filled with another number,
    and a vector as every third element.
    """
    if array.ndim == 2:
        store = np.full((array.shape[0] + 2, array.shape[1] * 2 + 3), 7, array.dtype)
        store[1:-1, 1:-2:2] = array
        return store, store.shape[1] + 1, (store.shape[1], 2)
    store = np.full(array.size * 3, 7, array.dtype)
    store[1::3] = array
    return store, 1, (3,)


def write_qwen3(directory: Path, view: str) -> Path:
    """Writes the tiny Qwen3 into a .bin file, as dense tensors or through `transposed` or `inside`,
    for tests/formats/test_round_trips.py.
    """
    views = {"dense": None, "transposed": transposed, "inside": inside}
    return write_bin(directory, tiny.tensors(tiny.config("qwen3")), views[view])


def test_bin_files_with_an_index_convert_and_a_lost_one_is_refused(src, tmp_path):
    found = list(tiny.tensors(tiny.config("qwen3")).items())
    other, names = tmp_path / "other", [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for part, name in zip((dict(found[:20]), dict(found[20:])), names, strict=True):
        write_bin(other, part, name=name)
    tiny.write_json(
        other / "pytorch_model.bin.index.json",
        {"weight_map": {k: names[i >= 20] for i, (k, _) in enumerate(found)}},
    )
    assert mckpt("diff", src, other).code == 0
    (other / names[1]).unlink()
    args = ("hf-to-megatron", other, tmp_path / "d")
    refused(3, names[1], "not there", args=args, untouched=tmp_path)


def test_tied_weights_that_differ_are_refused(tmp_path):
    src = hf(tmp_path / "src", "qwen3-tied")
    found = tiny.tensors(tiny.config("qwen3-tied"))
    found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
    tiny.write_weights(src, found)
    good("hf-to-megatron", src, tmp_path / "same")
    found["lm_head.weight"][3, 3] += 1
    tiny.write_weights(src, found)
    said = mckpt("hf-to-megatron", src, tmp_path / "dst")
    assert said.code == 3 and "lm_head.weight" in said.err and "differ" in said.err, said.err
    assert not (tmp_path / "dst").exists()


def test_fp16_overflow_names_the_tensor_and_leaves_nothing_loadable(src, tmp_path):
    dst = tmp_path / "dst"
    name = "model.layers.2.mlp.up_proj.weight"
    large = arrays(lambda a: a[name].__setitem__((5, 5), 1e6))
    src = copy_of(src, tmp_path / "src", large)
    said = mckpt("hf-to-megatron", src, dst, "--dtype", "fp16")
    assert (
        said.code == 2 and "layers.2.mlp.up.weight" in said.err and "Traceback" not in said.err
    ), said.err
    assert all(p.split("/")[0].startswith(".mckpt-") for p in tree(dst))
    assert mckpt("inspect", dst).code == 3
    good("hf-to-megatron", src, dst, "--dtype", "fp16", "--allow-overflow")
    assert mckpt("inspect", dst).code == 0


def test_like_replaces_args_that_are_missing(src, torch_dir, tmp_path):
    without_args = all_of(ranks(lambda pt: pt.value.pop("args")), ALONE)
    bare = copy_of(torch_dir, tmp_path / "src", without_args)
    good("megatron-to-hf", bare, tmp_path / "dst", "--like", src)
    assert mckpt("diff", src, tmp_path / "dst").code == 0


def test_check_replicas_finds_a_replica_that_differs(src, torch_dir, tmp_path):
    other = tensor("decoder.layers.0.self_attention.q_layernorm.weight", "bfloat16", (24,), 48)
    args = ("megatron-to-hf", copy_of(torch_dir, tmp_path / "src", other), tmp_path / "dst")
    said = mckpt(*args, "--check-replicas")
    words = ("layers.0.attn.q_norm.weight", "mp_rank_01_000", "differ")
    assert said.code == 3 and all(w in said.err for w in words), said.err
    assert not (tmp_path / "dst").exists()
    good(*args)  # without --check-replicas, the copy of the first rank is read
    assert mckpt("diff", src, tmp_path / "dst").code == 0


def test_unknown_tensors_are_left_behind_only_with_no_optimizer(torch_dir, tmp_path):

    def more(pt: Pt) -> None:
        pt.value["rng_state"] = [{"random": 1}]
        # a key with tensors that mckpt does not know
        pt.value["ema"] = {"weight": pt.put("float32", (2,), bytes(8))}
        pt.value["note"] = "kept"

    src = copy_of(torch_dir, tmp_path / "src", ranks(more))
    args = ("reshard", src, tmp_path / "d")
    refused(2, "ema", "--no-optimizer", args=args, untouched=tmp_path)
    plan = good("plan", src, tmp_path / "d", "--to", "hf", "--json").json
    assert {"rng_state", "ema"} <= set(plan["left_behind"])
    good("reshard", src, tmp_path / "d", "--no-optimizer", "--target-tp", 1)
    value = Pt(tmp_path / "d/release/mp_rank_00_000" / PT).value
    assert value["note"] == "kept" and not {"rng_state", "ema"} & set(value)
    assert value["args"].state["no_save_optim"] is True


def test_random_states_alone_do_not_ask_for_no_optimizer(torch_dir, tmp_path):
    states = ranks(lambda pt: pt.value.update(rng_state=[{"random": 1}]))
    src = copy_of(torch_dir, tmp_path / "src", states)
    good("reshard", src, tmp_path / "d", "--target-tp", 1)


def test_an_incomplete_optimizer_is_an_error_that_names_the_file(torch_dir, tmp_path):

    def more(pt: Pt) -> None:
        states = {0: {"exp_avg": pt.put("float32", (2,), bytes(8))}}
        pt.value["optimizer"] = {"state": states}

    src = copy_of(torch_dir, tmp_path / "src", ranks(more))
    args = ("reshard", src, tmp_path / "d", "--target-format", "torch_dist")
    refused(3, "model_optim_rng.pt", "optimizer", "--no-optimizer", args=args, untouched=tmp_path)
    good(*args, "--no-optimizer")


def test_an_optimizer_without_its_groups_is_left_behind_only_with_no_optimizer(dist_dir, tmp_path):
    name = f"optimizer.state.exp_avg.{DIST_FC2}"
    more = metadata(lambda tensors, items: key_extra(tensors, items, new=name))
    args = ("reshard", copy_of(dist_dir, tmp_path / "src", more), tmp_path / "d")
    refused(3, "optimizer", "--no-optimizer", args=args, untouched=tmp_path)
    good(*args, "--no-optimizer")
    written = read_metadata(tmp_path / "d/release/.metadata")
    assert not any("optimizer" in key for key in written.tensors)


def test_a_checkpoint_with_more_files_than_may_be_open_is_read(src, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_dist_writing, "FILE_BYTES", 1000)
    good("hf-to-megatron", src, tmp_path / "dst")
    assert len(list(tmp_path.glob("dst/release/*.distcp"))) > 35
    checkpoint = package.open(tmp_path / "dst")
    assert checkpoint.names.choices
    was, before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(chunked, "MAX_OPEN", 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 15, was[1]))
    try:
        assert checkpoint.layout.files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert len(os.listdir("/proc/self/fd")) == before
    assert mckpt("diff", src, tmp_path / "dst").code == 0


@pytest.mark.parametrize("inner", [None, safe_pickle.tensor("float32", (2,), "0")])
def test_a_value_that_is_nested_too_deeply_to_be_written_can_be_left_out(inner):
    """An export to Hugging Face needs no value of the common state but the args."""
    value = inner
    for _ in range(3000):
        value = [value]
    assert has_tensors(value) == (inner is not None)


def test_the_plan_reports_a_lost_common_state(dist_dir, tmp_path):
    lone = copy_of(dist_dir, tmp_path / "lone", gone("hf", "release/common.pt"))
    refused(3, "common.pt: is missing; mckpt.json names it", args=("plan", lone, tmp_path / "out"))
    edit_json(lone / "release/mckpt.json", lambda m: m["files"].pop("common.pt"))
    said = good("plan", lone, tmp_path / "out").out
    assert "the checkpoint has no args: the dims are taken from mckpt.json" in said
    assert "the only one that fits the dims" in said
    assert "torch_dist" in said and "(gpt, tp 1, pp 1)" in said and "(qwen3)" in said
