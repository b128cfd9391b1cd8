"""Damaged, hostile and mistaken Hugging Face directories.

Each gives one error that names the place, a stable exit code, and writes nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny
from tests.helpers.commands import (
    edit_json,
    good,
    hf,
    mckpt,
    refuse_copy,
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
    "a directory": (lambda src: ((src / ONE).unlink(), (src / ONE).mkdir()), (ONE, "not a file")),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_damaged_safetensors_file_is_refused(made, tmp_path, case):
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
        (NORM, "places it in model-00001"),
    ),
    "index forgets a tensor": (index(lambda m: m.pop(NORM)), (NORM, "does not name it")),
    "index names an absent tensor": (
        index(lambda m: m.update(foo=m[NORM])),
        ("foo", "does not contain it"),
    ),
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
def test_shards_that_contradict_their_index_are_refused(made, tmp_path, case):
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
def test_tensors_that_contradict_the_config_are_refused(made, tmp_path, case):
    damage, code, words = TENSORS[case]
    refuse_copy(made, tmp_path, "one", damage, code, words)


def test_a_dtype_option_casts_mixed_dtypes(made, tmp_path):
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
    "rope_scaling of a number": (config(rope_scaling=0), 4, ("rope_scaling is 0", "an object")),
    "half of a surrogate pair": (config(model_type="\ud800"), 3, (CONFIG, "JSON")),
    "rope_scaling unknown": (
        config(rope_scaling={"rope_type": "longrope", "factor": 4}),
        4,
        ("'longrope'",),
    ),
    "rope_scaling half": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        4,
        ("low_freq_factor",),
    ),
    "tied of a string": (config(tie_word_embeddings="yes"), 4, ("'yes'", "bool")),
    "quantised": (config(quantization_config={"quant_method": "awq"}), 4, ("quantization_config",)),
    "unknown key": (config(num_experts=3), 4, ("num_experts", "--allow-inexact num_experts")),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_is_refused(made, tmp_path, case):
    damage, code, words = CONFIGS[case]
    refuse_copy(made, tmp_path, "one", damage, code, words)


# ---- pytorch_model.bin


def write_bin(
    directory: Path, found: dict[str, Any], view: Any = None, name: str = "pytorch_model.bin"
) -> Path:
    """Writes a .bin file and its config.json without torch; returns the directory. `view(key,
    array)` returns (elements of a storage, offset, strides), or None for a dense tensor.
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


@pytest.mark.parametrize("view", [None, transposed, inside])
def test_dense_and_strided_tensors_of_a_bin_file_convert(made, tmp_path, view):
    src = write_bin(tmp_path / "src", tiny.tensors(tiny.config("qwen3")), view)
    good("hf-to-megatron", src, tmp_path / "dst", "--format", "torch", "--tp", 2)
    assert mckpt("diff", made["one"], src).code == 0
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_bin_files_with_an_index_convert_and_a_lost_one_is_refused(made, tmp_path):
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


def test_a_damaged_bin_file_is_refused(tmp_path):
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
    refused(3, "'a' is not a tensor", args=args, untouched=tmp_path)


# ---- values


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
