"""Damaged, hostile and mistaken input.

Each gives one error that names the place, a stable exit code, and writes nothing.
"""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt as package
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.formats.megatron import torch_dist, torch_dist_writing
from tests import tiny
from tests.door import (
    PT,
    TRACKER,
    Pt,
    edit_json,
    emit,
    good,
    hf,
    hostile_pickle,
    mckpt,
    refused,
    save_hostile,
    save_pt,
    shard,
    tree,
    write_shard,
)

ONE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
DIST_FC2 = "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory, src, torch_dir, dist_dir):
    """One checkpoint of each format, to be copied and damaged."""
    many = hf(tmp_path_factory.mktemp("many") / "hf", max_shard_size=120_000)
    return {"one": src, "many": many, "torch": torch_dir, "dist": dist_dir}


def refuse_copy(
    made: dict[str, Path],
    tmp_path: Path,
    kind: str,
    damage: Any,
    code: int,
    words: tuple[str, ...],
    *more: Any,
) -> None:
    """Damages a copy of a checkpoint and converts it, which must fail and write nothing."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(made[kind], src)
    damage(src)
    command = "hf-to-megatron" if kind in ("one", "many") else "megatron-to-hf"
    refused(code, *words, args=(command, src, dst, *more), untouched=tmp_path)
    assert not dst.exists()


# ---- safetensors


def header(change: Any) -> Any:
    def damage(src: Path) -> None:
        head, data = shard(src / ONE)
        changed = change(head)
        write_shard(src / ONE, head if changed is None else changed, data)

    return damage


def raw(change: Any) -> Any:
    return lambda src: (src / ONE).write_bytes(change((src / ONE).read_bytes()))


def moved(by: int) -> Any:
    def change(head: dict[str, Any]) -> None:
        head[NORM]["data_offsets"] = [n + by for n in head[NORM]["data_offsets"]]

    return change


def set_entry(**fields: Any) -> Any:
    return lambda head: head[NORM].update(fields)


A = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
TWICE = b"{" + A + b"," + A + b"}"

SAFETENSORS = {
    "truncated": (raw(lambda b: b[:-100]), (ONE, "559,148", "559,248", "truncated")),
    "truncated in the header": (raw(lambda b: b[:100]), (ONE, "header", "truncated")),
    "padded": (
        raw(lambda b: b + b"xx"),
        (ONE, "559,250", "559,248", "has bytes behind its tensors"),
    ),
    "zero bytes": (raw(lambda b: b""), (ONE, "0 bytes")),
    "git-lfs pointer": (raw(lambda b: LFS), (ONE, "git lfs pull")),
    "header length lies": (raw(lambda b: b"\xff" * 8 + b[8:]), (ONE, "18,446,744,073,709,551,615")),
    "header too short": (raw(lambda b: bytes(8) + b[8:]), (ONE, "0 bytes")),
    "no JSON": (lambda src: write_shard(src / ONE, b"{nope", b""), (ONE, "JSON")),
    "deep JSON": (lambda src: write_shard(src / ONE, b"[" * 100_000, b""), (ONE, "JSON")),
    "no object": (lambda src: write_shard(src / ONE, [1], b""), (ONE, "object")),
    "key twice": (lambda src: write_shard(src / ONE, TWICE, b"1234"), (ONE, "'a' twice")),
    "unknown dtype": (header(set_entry(dtype="Q4")), (ONE, NORM, "'Q4'", "BF16")),
    "dtype of no string": (header(set_entry(dtype=["BF16"])), (ONE, NORM)),
    "entry of no object": (header(lambda h: h.update({NORM: None})), (ONE, NORM)),
    "negative size": (header(set_entry(shape=[-48])), (ONE, NORM, "-48")),
    "boolean size": (header(set_entry(shape=[True])), (ONE, NORM)),
    "huge size": (header(set_entry(shape=[1 << 70])), (ONE, NORM, "96")),
    "wrong byte count": (header(set_entry(shape=[47])), (ONE, NORM, "94", "96")),
    "overlap": (header(moved(-2)), (ONE, NORM, "overlap")),
    "hole": (
        header(lambda h: {k: v for k, v in h.items() if k != "lm_head.weight"}),
        (ONE, "hole"),
    ),
    "out of range": (header(moved(10**9)), (ONE, NORM, "1,000,554,304")),
    "a directory": (lambda src: ((src / ONE).unlink(), (src / ONE).mkdir()), (ONE, "no file")),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_damaged_safetensors(made, tmp_path, case):
    damage, words = SAFETENSORS[case]
    refuse_copy(made, tmp_path, "one", damage, 3, words)


def index(change: Any) -> Any:
    return lambda src: edit_json(src / INDEX, lambda found: change(found["weight_map"]))


def shard_name(src: Path, i: int) -> Path:
    return sorted(src.glob("model-*.safetensors"))[i]


SHARDS = {
    "missing shard": (lambda src: shard_name(src, 1).unlink(), ("model-00002", "not there")),
    "extra shard": (
        lambda src: shutil.copy(shard_name(src, 0), src / "model-00009-of-00009.safetensors"),
        ("model-00009", "does not name"),
    ),
    "truncated shard": (
        lambda src: shard_name(src, 1).write_bytes(shard_name(src, 1).read_bytes()[:-5]),
        ("model-00002", "truncated"),
    ),
    "index names ../x": (
        index(lambda m: m.update({NORM: "../x.safetensors"})),
        ("'../x.safetensors'",),
    ),
    "index names an absolute path": (
        index(lambda m: m.update({NORM: "/etc/passwd"})),
        ("'/etc/passwd'",),
    ),
    "index names ''": (index(lambda m: m.update({NORM: ""})), ("''",)),
    "index names a number": (index(lambda m: m.update({NORM: 3})), ("weight_map",)),
    "index names an absent file": (
        index(lambda m: m.update({NORM: "gone.safetensors"})),
        ("gone.safetensors", "not there"),
    ),
    "index names another shard": (
        index(lambda m: m.update({NORM: m["model.embed_tokens.weight"]})),
        (NORM, "says model-00001"),
    ),
    "index forgets a tensor": (index(lambda m: m.pop(NORM)), (NORM, "does not name it")),
    "index names an absent tensor": (index(lambda m: m.update(foo=m[NORM])), ("foo", "it is not")),
    "index is no object": (lambda src: (src / INDEX).write_text("[]"), (INDEX, "weight_map")),
    "tensor in two shards": (
        lambda src: shutil.copy(shard_name(src, 0), shard_name(src, 1)),
        ("is in model-00001", "model-00002"),
    ),
    "index and single file": (
        lambda src: shutil.copy(shard_name(src, 0), src / ONE),
        (ONE, INDEX, "move one of them away"),
    ),
}


@pytest.mark.parametrize("case", SHARDS)
def test_shards_and_their_index(made, tmp_path, case):
    damage, words = SHARDS[case]
    refuse_copy(made, tmp_path, "many", damage, 3, words)


def test_a_lost_shard_is_one_problem_not_one_for_each_tensor(made, tmp_path):
    shutil.copytree(made["many"], tmp_path / "src")
    shard_name(tmp_path / "src", 1).unlink()
    assert (
        "is missing; it should be"
        not in mckpt("hf-to-megatron", tmp_path / "src", tmp_path / "dst").err
    )


def arrays(change: Any) -> Any:
    def damage(src: Path) -> None:
        found = tiny.tensors(tiny.config("qwen3"))
        change(found)
        tiny.write_weights(src, found)

    return damage


def integers(head: dict[str, Any]) -> None:
    for key, entry in head.items():
        if "down_proj" in key:
            entry["dtype"] = "I16"


TENSORS = {
    "wrong shape": (arrays(lambda a: a.update({NORM: a[NORM][:40]})), 3, (NORM, "[40]", "[48]")),
    "transposed": (
        arrays(lambda a: a.update({DOWN: a[DOWN].T.copy()})),
        3,
        (DOWN, "[64, 48]", "[48, 64]"),
    ),
    "missing": (arrays(lambda a: a.pop(NORM)), 3, (NORM, "missing", "[48]")),
    "extra": (arrays(lambda a: a.update(foo=a[NORM])), 5, ("foo [48]", "qwen3.yaml")),
    "mixed dtypes": (
        arrays(lambda a: a.update({DOWN: a[DOWN].astype("f4")})),
        2,
        ("bfloat16", "float32", "layers.1.mlp.down", "--dtype"),
    ),
    "integers": (header(integers), 3, ("down_proj", "int16")),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_against_config(made, tmp_path, case):
    damage, code, words = TENSORS[case]
    refuse_copy(made, tmp_path, "one", damage, code, words)


def test_mixed_dtypes_can_be_cast(made, tmp_path):
    shutil.copytree(made["one"], tmp_path / "src")
    arrays(lambda a: a.update({DOWN: a[DOWN].astype("f4")}))(tmp_path / "src")
    good("hf-to-megatron", tmp_path / "src", tmp_path / "dst", "--dtype", "bf16")
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


# ---- config.json


def config(**fields: Any) -> Any:
    return lambda src: edit_json(src / CONFIG, lambda c: c.update(fields))


CONFIGS = {
    "none": (lambda src: (src / CONFIG).unlink(), 3, ("config.json",)),
    "a list": (lambda src: (src / CONFIG).write_text("[1]"), 3, (CONFIG, "list")),
    "no JSON": (lambda src: (src / CONFIG).write_text("{"), 3, (CONFIG, "JSON")),
    "no UTF-8": (lambda src: (src / CONFIG).write_bytes(b'{"a":"\xff"}'), 3, (CONFIG, "JSON")),
    "unknown architecture": (
        config(architectures=["FooForCausalLM"]),
        4,
        ("FooForCausalLM", "--mapping"),
    ),
    "no architecture": (
        lambda src: edit_json(src / CONFIG, lambda c: c.pop("architectures")),
        4,
        ("--family",),
    ),
    "architecture of no list": (config(architectures="Qwen3ForCausalLM"), 4, ("--family",)),
    "size of a string": (config(num_hidden_layers="four"), 4, (CONFIG, "'four'", "int")),
    "size of a list": (config(hidden_size=[48]), 4, (CONFIG, "[48]")),
    "half a size": (config(hidden_size=48.5), 4, ("48.5",)),
    "negative layers": (config(num_hidden_layers=-4), 4, ("-4",)),
    "no layers": (config(num_hidden_layers=0), 4, ("num_layers is 0",)),
    "a million layers": (config(num_hidden_layers=10**6), 4, ("num_layers is 1000000", "10000")),
    "a layer more": (config(num_hidden_layers=5), 3, ("model.layers.4", "missing")),
    "a layer less": (config(num_hidden_layers=3), 5, ("model.layers.3", "in no rule")),
    "no size": (
        lambda src: edit_json(src / CONFIG, lambda c: c.pop("hidden_size")),
        4,
        ("hidden_size",),
    ),
    "no heads": (config(num_attention_heads=0), 4, ("num_heads is 0",)),
    "no groups": (config(num_key_value_heads=0), 4, ("num_query_groups is 0",)),
    "another head count": (config(num_key_value_heads=7), 3, ("k_proj", "[192, 48]", "[168, 48]")),
    "hidden size of 10**30": (config(hidden_size=10**30), 4, ("hidden_size is 1000",)),
    "epsilon of a string": (config(rms_norm_eps="1e-6"), 4, ("'1e-6'",)),
    "unknown activation": (config(hidden_act="relu"), 4, ("'relu'", "silu")),
    "rope_scaling of a string": (config(rope_scaling="linear"), 4, ("rope_scaling", "'linear'")),
    "rope_scaling unknown": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4}),
        4,
        ("'yarn'",),
    ),
    "rope_scaling half": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        4,
        ("low_freq_factor",),
    ),
    "tied of a string": (config(tie_word_embeddings="yes"), 4, ("'yes'", "bool")),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), 4, ("quantization_config",)),
    "unknown key": (config(frobnicate=3), 4, ("frobnicate", "--allow-inexact frobnicate")),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(made, tmp_path, case):
    damage, code, words = CONFIGS[case]
    refuse_copy(made, tmp_path, "one", damage, code, words)


SIZES = {
    "tp of ffn": ("qwen3", ("--tp", 3), ("3",)),
    "tp of heads": (
        "qwen3",
        ("--tp", 32),
        ("16 attention heads", "tp 32", "choose a tp of 1, 2, 4, 8, 16"),
    ),
    "tp of qkv rows": ("mistral", ("--tp", 7, "--format", "torch"), ("7",)),
    "pp": ("qwen3", ("--pp", 3), ("4 layers", "pp 3")),
    "pp above the layers": ("qwen3", ("--pp", 8), ("4 layers", "pp 8")),
    "vpp": ("qwen3", ("--pp", 2, "--vpp", 3), ("vpp 3",)),
    "vpp alone": ("qwen3", ("--vpp", 2), ("pp > 1",)),
    "ep on a dense model": ("qwen3", ("--ep", 2), ("ep 2", "this model has no experts")),
    "ep": ("qwen3-moe", ("--ep", 5), ("24 experts", "ep 5")),
    "etp and torch": (
        "qwen3-moe",
        ("--tp", 4, "--etp", 8, "--format", "torch"),
        ("etp 8", "tp 4", "torch_dist"),
    ),
    "layout": (
        "qwen3",
        ("--pp", 2, "--pipeline-model-parallel-layout", "Ett|ttt|L"),
        ("Ett|ttt|L",),
    ),
    "zero": ("qwen3", ("--tp", 0), ("--tp",)),
    "a word": ("qwen3", ("--tp", "two"), ("--tp",)),
    "memory of a word": ("qwen3", ("--max-memory", "lots"), ("'lots'",)),
    "unknown setting": ("qwen3", ("--set", "foo=1"), ("foo=1", "num_layers")),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit(tiny_model, tmp_path, case):
    model, options, words = SIZES[case]
    src = tiny_model(model)
    refused(2, *words, args=("hf-to-megatron", src, tmp_path / "dst", *options), untouched=tmp_path)


def test_a_setting_or_family_that_the_config_denies(made, tmp_path):
    src = made["one"]
    refused(
        4,
        "num_layers",
        "4",
        "7",
        args=("hf-to-megatron", src, tmp_path / "d", "--set", "num_layers=7"),
        untouched=tmp_path,
    )
    refused(
        4,
        "'nope'",
        "qwen3",
        args=("hf-to-megatron", src, tmp_path / "d", "--family", "nope"),
        untouched=tmp_path,
    )
    refused(
        4,
        "/nope.yaml",
        args=("hf-to-megatron", src, tmp_path / "d", "--mapping", "/nope.yaml"),
        untouched=tmp_path,
    )


# ---- pytorch_model.bin


def write_bin(
    directory: Path, found: dict[str, Any], view: Any = None, name: str = "pytorch_model.bin"
) -> Path:
    """A .bin by hand. view(key, array) -> (elements of a storage, offset, strides) or None for a
    dense one.
    """
    from collections import OrderedDict

    from mckpt.containers import safe_pickle

    directory.mkdir(exist_ok=True)
    value, data = OrderedDict(), {}
    for i, (key, array) in enumerate(found.items()):
        placed = view(key, array) if view else None
        store, offset, strides = placed or (array, 0, safe_pickle.contiguous(array.shape))
        data[str(i)] = np.ascontiguousarray(store).tobytes()
        held = safe_pickle.tensor("bfloat16", (store.size,), str(i)).args[0]
        rebuild = safe_pickle.glob("torch._utils", "_rebuild_tensor_v2")
        value[key] = rebuild(held, offset, array.shape, strides, False, OrderedDict())
    save_pt(directory / name, value, data)
    tiny.write_json(directory / CONFIG, tiny.config("qwen3"))
    return directory


def transposed(key: str, array: Any) -> Any:
    return (array.T, 0, (1, array.shape[0])) if array.ndim == 2 else None


def inside(key: str, array: Any) -> Any:
    """Every second column of a matrix that is framed by other numbers; every third element of a
    vector.
    """
    if array.ndim == 2:
        store = np.full((array.shape[0] + 2, array.shape[1] * 2 + 3), 7, array.dtype)
        store[1:-1, 1:-2:2] = array
        return store, store.shape[1] + 1, (store.shape[1], 2)
    store = np.full(array.size * 3, 7, array.dtype)
    store[1::3] = array
    return store, 1, (3,)


@pytest.mark.parametrize("view", [None, transposed, inside])
def test_bin_dense_and_strided(made, tmp_path, view):
    src = write_bin(tmp_path / "src", tiny.tensors(tiny.config("qwen3")), view)
    good("hf-to-megatron", src, tmp_path / "dst", "--format", "torch", "--tp", 2)
    assert mckpt("diff", made["one"], src).code == 0
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_bin_with_an_index(made, tmp_path):
    found = list(tiny.tensors(tiny.config("qwen3")).items())
    src, names = (
        tmp_path / "src",
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
    )
    for part, name in zip((dict(found[:20]), dict(found[20:])), names, strict=True):
        write_bin(src, part, name=name)
    tiny.write_json(
        src / "pytorch_model.bin.index.json",
        {"weight_map": {k: names[i >= 20] for i, (k, _) in enumerate(found)}},
    )
    assert mckpt("diff", made["one"], src).code == 0
    (src / names[1]).unlink()
    refused(
        3, names[1], "not there", args=("hf-to-megatron", src, tmp_path / "d"), untouched=tmp_path
    )


def test_bin_damaged(tmp_path):
    found = tiny.tensors(tiny.config("qwen3"))
    src, mark = tmp_path / "src", tmp_path / "mark"
    args = ("hf-to-megatron", src, tmp_path / "dst")
    file = write_bin(src, found) / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-50_000])
    refused(3, str(file), "cut short", args=args, untouched=tmp_path)
    file.write_bytes(LFS)
    refused(3, str(file), "git lfs pull", args=args, untouched=tmp_path)
    save_hostile(file, mark)
    refused(8, str(file), "refused", args=args, untouched=tmp_path)
    assert not mark.exists()
    write_bin(src, found, lambda k, a: (a[:1], 0, (0,)) if k == NORM else None)
    refused(3, NORM, "dense", args=args, untouched=tmp_path)
    save_pt(file, [1], {})
    refused(3, "state dict", args=args, untouched=tmp_path)
    save_pt(file, {"a": 1}, {})
    refused(3, "'a' is no tensor", args=args, untouched=tmp_path)


# ---- torch


def ranks(change: Any, only: str = "*") -> Any:
    def damage(src: Path) -> None:
        for path in sorted((src / "release").glob(f"mp_rank_{only}/{PT}")):
            pt = Pt(path)
            change(pt)
            pt.save()

    return damage


def args_of(**fields: Any) -> Any:
    return ranks(lambda pt: pt.value["args"].state.update(fields))


def alone(damage: Any) -> Any:
    """Applies the damage, and removes the files that repeat what the args say."""
    return lambda src: (
        damage(src),
        shutil.rmtree(src / "hf"),
        (src / "release" / "mckpt.json").unlink(),
    )


def file_of(rank: str, change: Any) -> Any:
    def damage(src: Path) -> None:
        path = src / "release" / f"mp_rank_{rank}" / PT
        path.write_bytes(change(path.read_bytes()))

    return damage


RANK = "mp_rank_01_000"
TORCH = {
    "rank missing": (
        lambda src: shutil.rmtree(src / "release/mp_rank_01_001"),
        3,
        ("mp_rank_01_001 is missing",),
    ),
    "first rank missing": (
        lambda src: shutil.rmtree(src / "release/mp_rank_00_000"),
        3,
        ("mp_rank_00_000 is missing",),
    ),
    "rank extra": (
        lambda src: shutil.copytree(src / "release" / RANK, src / "release/mp_rank_02_000"),
        3,
        ("mp_rank_02_000",),
    ),
    "file missing": (lambda src: (src / "release" / RANK / PT).unlink(), 3, (RANK, PT)),
    "file truncated": (file_of("01_000", lambda b: b[:5000]), 3, (RANK, PT, "cut short")),
    "file empty": (file_of("01_000", lambda b: b""), 3, (RANK, PT)),
    "key missing": (
        ranks(lambda pt: pt.value["model"].pop(FC2), "01_000"),
        3,
        (RANK, FC2, "missing", "[48, 32]"),
    ),
    "key extra": (
        ranks(lambda pt: pt.value["model"].update(foo=pt.value["model"][FC2]), "01_000"),
        5,
        (RANK, "foo", "mcore.yaml"),
    ),
    "wrong shape": (
        ranks(
            lambda pt: pt.value["model"].update({FC2: pt.put("bfloat16", (48, 31), bytes(2976))}),
            "01_000",
        ),
        3,
        (RANK, FC2, "[48, 31]", "[48, 32]"),
    ),
    "wrong dtype": (
        ranks(
            lambda pt: pt.value["model"].update({FC2: pt.put("float32", (48, 32), bytes(6144))}),
            "01_000",
        ),
        2,
        (RANK, "float32", "bfloat16", "--dtype"),
    ),
    "no tensor": (
        ranks(lambda pt: pt.value["model"].update({FC2: "weights"}), "01_000"),
        3,
        (RANK, FC2, "no tensor"),
    ),
    "no model": (ranks(lambda pt: pt.value.pop("model"), "01_000"), 3, (RANK, "no `model`")),
    "no dict": (ranks(lambda pt: setattr(pt, "value", [1]), "01_000"), 3, (RANK, "a list")),
    "no args": (alone(ranks(lambda pt: pt.value.pop("args"))), 2, ("no args", "--like")),
    "args of a dict": (ranks(lambda pt: pt.value.update(args={"a": 1})), 3, (PT, "args", "dict")),
    "args with another tp": (
        args_of(tensor_model_parallel_size=4),
        3,
        ("tp 4", "mp_rank_02_000 is missing"),
    ),
    "args with tp of a word": (args_of(tensor_model_parallel_size="two"), 3, (PT, "'two'")),
    "args with pp that does not divide": (
        args_of(pipeline_model_parallel_size=3),
        3,
        ("pp 3", "4 layers"),
    ),
    "args with another ffn size": (
        alone(args_of(ffn_hidden_size=80)),
        3,
        ("linear_fc1", "[64, 48]", "[80, 48]"),
    ),
    "args with layers that do not divide": (alone(args_of(num_layers=5)), 3, ("5 layers", "pp 2")),
    "args with a million layers": (alone(args_of(num_layers=10**6)), 4, ("num_layers is 1000000",)),
    "args with layers of a word": (alone(args_of(num_layers="four")), 4, ("'four'",)),
    "args against DST/hf": (args_of(ffn_hidden_size=80), 4, ("ffn_size", "80", "64")),
    "args without vocab_size": (alone(args_of(vocab_size=None)), 2, ("256", "--vocab-size")),
    "tracker garbage": (lambda src: (src / TRACKER).write_text("latest"), 3, (TRACKER, "'latest'")),
    "tracker empty": (lambda src: (src / TRACKER).write_text(""), 3, (TRACKER, "''")),
    "tracker names nothing": (
        lambda src: (src / TRACKER).write_text("77"),
        3,
        ("iter_0000077", TRACKER, "it has release"),
    ),
    "tracker unreadable": (
        lambda src: ((src / TRACKER).unlink(), (src / TRACKER).mkdir()),
        7,
        (TRACKER, "cannot be read"),
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_damaged_torch(made, tmp_path, case):
    damage, code, words = TORCH[case]
    refuse_copy(made, tmp_path, "torch", damage, code, words)


@pytest.mark.parametrize("rank", ["00_000", "01_001"])
def test_hostile_rank(made, tmp_path, rank):
    mark = tmp_path / "mark"
    refuse_copy(
        made,
        tmp_path,
        "torch",
        lambda src: save_hostile(src / f"release/mp_rank_{rank}" / PT, mark),
        8,
        (rank, "refused"),
    )
    assert not mark.exists()


def test_args_missing_but_described(made, tmp_path):
    shutil.copytree(made["torch"], tmp_path / "src")
    alone(ranks(lambda pt: pt.value.pop("args")))(tmp_path / "src")
    good("megatron-to-hf", tmp_path / "src", tmp_path / "dst", "--like", made["one"])
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_vocab_size_and_iteration_that_are_not_there(made, tmp_path):
    src, dst = made["torch"], tmp_path / "d"
    refused(
        3,
        "256",
        "1500",
        args=("megatron-to-hf", src, dst, "--vocab-size", 1500),
        untouched=tmp_path,
    )
    refused(
        2, "--vocab-size", args=("megatron-to-hf", src, dst, "--vocab-size", 0), untouched=tmp_path
    )
    refused(
        3,
        "iter_0000007",
        "release",
        args=("megatron-to-hf", src, dst, "--iteration", 7),
        untouched=tmp_path,
    )
    refused(
        2,
        "--iteration 7",
        args=("megatron-to-hf", src / "release" / "mp_rank_00_000", dst, "--iteration", 7),
        untouched=tmp_path,
    )


def test_a_replica_that_differs(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)
    key = "decoder.layers.0.self_attention.q_layernorm.weight"
    ranks(
        lambda pt: pt.value["model"].update({key: pt.put("bfloat16", (24,), bytes(48))}), "01_000"
    )(src)
    args = ("megatron-to-hf", src, tmp_path / "dst")
    refused_words = ("layers.0.attn.q_norm.weight", "mp_rank_01_000", "differ")
    said = mckpt(*args, "--check-replicas")
    assert said.code == 3 and all(w in said.err for w in refused_words), said.err
    assert not (tmp_path / "dst").exists()
    good(*args)  # the first rank's is read
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_optimizer_is_left_behind_only_when_asked(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)

    def more(pt: Pt) -> None:
        pt.value["optimizer"] = {"state": pt.put("float32", (2,), bytes(8))}
        pt.value["rng_state"] = [{"random": 1}]
        # a key of tensors that nobody knows
        pt.value["ema"] = {"weight": pt.put("float32", (2,), bytes(8))}
        pt.value["note"] = "kept"

    ranks(more)(src)
    refused(
        2,
        "optimizer",
        "rng_state",
        "ema",
        "--no-optimizer",
        args=("reshard", src, tmp_path / "d"),
        untouched=tmp_path,
    )
    plan = good("plan", src, tmp_path / "d", "--to", "hf", "--json").json
    assert {"optimizer", "rng_state", "ema"} <= set(plan["left_behind"])
    good("reshard", src, tmp_path / "d", "--no-optimizer", "--target-tp", 1)
    value = Pt(tmp_path / "d/release/mp_rank_00_000" / PT).value
    assert value["note"] == "kept" and not {"optimizer", "rng_state", "ema"} & set(value)
    assert value["args"].state["no_save_optim"] is True


def test_optimizer_of_torch_dist(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["dist"], src)

    def more(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        tensors[f"optimizer.state.exp_avg.{DIST_FC2}"] = tensors[DIST_FC2]
        for offsets, _ in tensors[DIST_FC2][2]:
            items[f"optimizer.state.exp_avg.{DIST_FC2}", offsets] = items[DIST_FC2, offsets]

    metadata(more)(src)
    refused(
        2, "optimizer", "--no-optimizer", args=("reshard", src, tmp_path / "d"), untouched=tmp_path
    )
    good("reshard", src, tmp_path / "d", "--no-optimizer")
    assert not any(
        "optimizer" in k for k in read_metadata(tmp_path / "d/release/.metadata").tensors
    )


# ---- torch_dist


def metadata(change: Any) -> Any:
    """Returns a damage that calls change(tensors, items) on the content of .metadata."""

    def damage(src: Path) -> None:
        path = src / "release" / ".metadata"
        found = read_metadata(path)
        tensors = {
            k: (dtype, size, list(chunks)) for k, (dtype, size, chunks) in found.tensors.items()
        }
        items = dict(found.items)
        change(tensors, items)
        path.write_bytes(
            emit(
                {**tensors, **dict.fromkeys(found.objects)},
                [(k, o, *item) for (k, o), item in items.items()],
            )
        )

    return damage


def hole(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    offsets, _ = tensors[DIST_FC2][2].pop()
    items.pop((DIST_FC2, offsets))


def key_gone(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    for offsets, _ in tensors.pop(DIST_FC2)[2]:
        items.pop((DIST_FC2, offsets))


def key_extra(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    tensors["foo.weight"] = tensors[DIST_FC2]
    for offsets, _ in tensors[DIST_FC2][2]:
        items["foo.weight", offsets] = items[DIST_FC2, offsets]


def elsewhere(name: str) -> Any:
    return lambda tensors, items: items.update({k: (name, *item[1:]) for k, item in items.items()})


def item(change: Any) -> Any:
    def edit(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        items[DIST_FC2, (0, 0, 0)] = change(items)

    return edit


WORDS = "embedding.word_embeddings.weight"


def test_more_files_than_may_be_open(made, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_dist_writing, "FILE_BYTES", 1000)
    good("hf-to-megatron", made["one"], tmp_path / "dst")
    assert len(list(tmp_path.glob("dst/release/*.distcp"))) > 35
    checkpoint = package.open(tmp_path / "dst")
    assert checkpoint.names.choices
    was, before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(torch_dist, "MAX_OPEN", 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 15, was[1]))
    try:
        assert checkpoint.layout.files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert len(os.listdir("/proc/self/fd")) == before
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


DIST = {
    "no metadata.json": (
        lambda src: (src / "release/metadata.json").unlink(),
        3,
        ("metadata.json",),
    ),
    "metadata.json garbage": (
        lambda src: (src / "release/metadata.json").write_text("{"),
        3,
        ("metadata.json",),
    ),
    "another backend": (
        lambda src: (src / "release/metadata.json").write_text('{"sharded_backend": "x"}'),
        3,
        ("'x'", "torch_dist"),
    ),
    "no .metadata": (lambda src: (src / "release/.metadata").unlink(), 3, (".metadata",)),
    ".metadata cut": (
        lambda src: (src / "release/.metadata").write_bytes(
            (src / "release/.metadata").read_bytes()[:500]
        ),
        8,
        (".metadata",),
    ),
    "no .distcp": (
        lambda src: (src / "release/__0_0.distcp").unlink(),
        3,
        ("__0_0.distcp", "not there"),
    ),
    ".distcp without its last bytes": (
        lambda src: os.truncate(
            src / "release/__0_0.distcp", os.path.getsize(src / "release/__0_0.distcp") - 1
        ),
        3,
        ("__0_0.distcp", "truncated", "its last item ("),
    ),
    ".distcp cut": (
        lambda src: (src / "release/__0_0.distcp").write_bytes(
            (src / "release/__0_0.distcp").read_bytes()[:-60_000]
        ),
        3,
        ("__0_0.distcp", "truncated"),
    ),
    "chunk grid with a hole": (metadata(hole), 3, (DIST_FC2, "9216", "12288")),
    "chunk without an item": (
        metadata(lambda t, i: i.pop((DIST_FC2, (0, 0, 0)))),
        3,
        (DIST_FC2, "[0, 0, 0]"),
    ),
    "path ../x": (metadata(elsewhere("../x.distcp")), 3, ("'../x.distcp'",)),
    "absolute path": (metadata(elsewhere("/etc/passwd")), 3, ("'/etc/passwd'",)),
    "key missing": (metadata(key_gone), 3, (DIST_FC2, "missing")),
    "key extra": (metadata(key_extra), 5, ("foo.weight", "[4, 48, 64]", "mcore.yaml")),
    "item past the end": (
        metadata(item(lambda i: ("__0_0.distcp", 10**9, 100))),
        3,
        (DIST_FC2, "1,000,000,100"),
    ),
    "item of another tensor": (
        metadata(item(lambda i: i[WORDS, (0, 0)])),
        3,
        (DIST_FC2, "[256, 48]"),
    ),
    "common.pt cut": (
        lambda src: (src / "release/common.pt").write_bytes(b"PK\3\4"),
        3,
        ("common.pt",),
    ),
    "common.pt of a list": (
        lambda src: save_pt(src / "release/common.pt", [1], {}),
        3,
        ("common.pt", "a list"),
    ),
}


@pytest.mark.parametrize("case", DIST)
def test_damaged_torch_dist(made, tmp_path, case):
    damage, code, words = DIST[case]
    refuse_copy(made, tmp_path, "dist", damage, code, words)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_hostile_torch_dist(made, tmp_path, name):
    mark = tmp_path / "mark"

    def damage(src: Path) -> None:
        if name == ".metadata":
            (src / "release" / name).write_bytes(hostile_pickle(mark))
        else:
            save_hostile(src / "release" / name, mark)

    refuse_copy(made, tmp_path, "dist", damage, 8, (name, "refused"))
    assert not mark.exists()


def test_metadata_that_only_calls_a_function_names_its_file(made, tmp_path):
    """The call is recorded and not made; the record has no fields."""

    def damage(src: Path) -> None:
        (src / "release/.metadata").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")

    words = ("release/.metadata: contains", "Nothing in the file was run", "get the file again")
    refuse_copy(made, tmp_path, "dist", damage, 8, words)


def test_lost_common_state_is_noted(made, tmp_path):
    lone = tmp_path / "lone"
    shutil.copytree(made["dist"], lone)
    shutil.rmtree(lone / "hf")
    (lone / "release/common.pt").unlink()
    said = good("plan", lone, tmp_path / "out").out
    assert "the dims are taken from mckpt.json, because there are no args" in said
    assert "the only one that fits the dims" in said
    assert "torch_dist" in said and "(mcore, tp 1, pp 1)" in said and "(qwen3)" in said


# ---- values


def test_tied_weights_must_be_one(tmp_path):
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


def test_fp16_overflow_names_the_tensor_and_leaves_nothing_loadable(made, tmp_path):
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(made["one"], src)
    name = "model.layers.2.mlp.up_proj.weight"
    arrays(lambda a: a[name].__setitem__((5, 5), 1e6))(src)
    said = mckpt("hf-to-megatron", src, dst, "--dtype", "fp16")
    assert (
        said.code == 2 and "layers.2.mlp.up.weight" in said.err and "Traceback" not in said.err
    ), said.err
    assert all(p.split("/")[0].startswith(".mckpt-") for p in tree(dst))
    assert mckpt("inspect", dst).code == 3
    good("hf-to-megatron", src, dst, "--dtype", "fp16", "--allow-overflow")
    assert mckpt("inspect", dst).code == 0


def test_a_source_that_changes_while_it_is_read(made, tmp_path, monkeypatch):
    import mckpt as package
    from mckpt.conversion import run as execute

    src = tmp_path / "src"
    shutil.copytree(made["one"], src)
    planned = package.plan(src, tmp_path / "dst")
    real = execute.execute

    def slow(*args: Any, **named: Any) -> Any:
        done = real(*args, **named)
        (src / ONE).write_bytes((src / ONE).read_bytes())
        return done

    monkeypatch.setattr(execute, "execute", slow)
    with pytest.raises(package.errors.SourceError, match="changed while it was read"):
        planned.run()
    assert not (tmp_path / "dst" / TRACKER).exists()


def test_no_checkpoint_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for src, word in (
        ("empty", "no checkpoint"),
        ("file", "is a file"),
        ("nope", "does not exist"),
    ):
        refused(3, word, args=("inspect", tmp_path / src), untouched=tmp_path)
        refused(
            3, word, args=("hf-to-megatron", tmp_path / src, tmp_path / "d"), untouched=tmp_path
        )


def test_an_unreadable_file(made, tmp_path, monkeypatch):
    import mckpt.containers.safetensors as module

    def refuse(*args: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied", args[0])

    monkeypatch.setattr(module, "open", refuse, raising=False)
    refused(
        7,
        ONE,
        "Permission denied",
        args=("hf-to-megatron", made["one"], tmp_path / "d"),
        untouched=tmp_path,
    )
