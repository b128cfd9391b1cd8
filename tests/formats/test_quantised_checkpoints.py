"""Converting a checkpoint with fp8 weights gives the bytes that its bfloat16 values would give."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mckpt as package
from tests.helpers import tiny
from tests.helpers.commands import edit_json, good, mckpt, refused, shard, write_shard

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def quantised(
    arrays: Mapping[str, np.ndarray],
    block: tuple[int, int] = (128, 128),
    scale_dtype: str = "float32",
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the tensors as block-quantised checkpoints hold them, with the scales of linears
    after all other tensors, and their dequantised values in bfloat16.

    Published checkpoints quantise linears: all matrices except embeddings, the head and routers.
    The largest value of each block becomes 448.
    """
    held, scales, worth = {}, {}, {}
    for name, array in arrays.items():
        if (
            array.ndim != 2
            or "embed" in name
            or name.endswith("head.weight")
            or name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
        ):
            held[name] = worth[name] = array
            continue
        rows, columns = (-(-n // b) for n, b in zip(array.shape, block, strict=True))
        scale = np.empty((rows, columns), tiny.DTYPES[scale_dtype][1])
        codes = np.empty(array.shape, E4M3)
        value = np.empty(array.shape, BF16)
        for i in range(rows):
            for j in range(columns):
                at = (
                    slice(i * block[0], (i + 1) * block[0]),
                    slice(j * block[1], (j + 1) * block[1]),
                )
                scale[i, j] = np.abs(array[at].astype(np.float32)).max() / 448
                codes[at] = (array[at].astype(np.float32) / np.float32(scale[i, j])).astype(
                    codes.dtype
                )
                value[at] = (codes[at].astype(np.float32) * np.float32(scale[i, j])).astype(
                    value.dtype
                )
        held[name], scales[f"{name}_scale_inv"], worth[name] = codes, scale, value
    return {**held, **scales}, worth


def tiny_quantised(
    case: str,
    directory: Path,
    block: tuple[int, int] = (128, 128),
    max_shard_size: int | None = None,
    scale_dtype: str = "float32",
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Writes the case's checkpoint with its linears in 8 bits; returns the dequantised values of
    its tensors, in bfloat16.
    """
    tiny.tiny_random(case, directory, **changes)
    held, worth = quantised(tiny.tensors({**tiny.config(case), **changes}), block, scale_dtype)
    (directory / "model.safetensors").unlink()
    tiny.write_weights(directory, held, max_shard_size)
    c = json.loads((directory / "config.json").read_text())
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    tiny.write_json(directory / "config.json", {**c, "quantization_config": method})
    return worth


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "deepseek-v3"])
def checkpoint(request, tmp_path_factory):
    """A folder with a quantised checkpoint of several files, and one of its dequantised values in
    bfloat16.
    """
    root = tmp_path_factory.mktemp(request.param)
    values = tiny_quantised(request.param, root / "fp8", (16, 32), max_shard_size=50_000)
    tiny.tiny_random(request.param, root / "plain")
    tiny.write_weights(root / "plain", values)
    where = json.loads((root / "fp8" / "model.safetensors.index.json").read_text())["weight_map"]
    # some scales are in another file than their weight
    assert any(where[k] != where[k.removesuffix("_scale_inv")] for k in where)
    return root


def test_blocks_may_be_larger_than_any_weight(tmp_path):
    """Each weight has one scale, and a huge block in config.json costs no memory."""
    values = tiny_quantised("qwen3", tmp_path / "fp8", (10**4, 10**4))
    edit_json(
        tmp_path / "fp8" / "config.json",
        lambda c: c["quantization_config"].update(weight_block_size=[10**30, 10**30]),
    )
    tiny.write_weights(tiny.tiny_random("qwen3", tmp_path / "plain"), values)
    good("hf-to-megatron", tmp_path / "fp8", tmp_path / "a")
    assert mckpt("diff", tmp_path / "a", tmp_path / "plain").code == 0


def test_a_slice_of_a_quantised_tensor_is_dequantised(checkpoint):
    name = "layers.1.attn.o.weight"
    fp8, plain = package.open(checkpoint / "fp8"), package.open(checkpoint / "plain")
    assert fp8[name].dtype == "bfloat16"
    read, expected = (ckpt[name][17:50, 3:40].numpy() for ckpt in (fp8, plain))
    assert (read.dtype, read.tobytes()) == (expected.dtype, expected.tobytes())
    assert fp8[name][17].torch().equal(plain[name][17].torch())


# ---- bad checkpoints

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A quantised checkpoint in one file."""
    root = tmp_path_factory.mktemp("one")
    tiny_quantised("qwen3", root, (16, 32))
    return root


def rewritten(change: Any) -> Any:
    """Returns a function that damages a checkpoint: it changes the arrays of its file, as (dtype,
    shape, bytes).
    """

    def damage(src: Path) -> None:
        header, data = shard(src / "model.safetensors")
        found = {
            k: [t["dtype"], t["shape"], data[slice(*t["data_offsets"])]]
            for k, t in header.items()
            if k != "__metadata__"
        }
        change(found)
        new, at = {}, 0
        for key, (dtype, shape, raw) in found.items():
            new[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
            at += len(raw)
        write_shard(src / "model.safetensors", new, b"".join(t[2] for t in found.values()))

    return damage


def put(key: str, dtype: str, shape: list[int], nbytes: int) -> Any:
    return rewritten(lambda t: t.__setitem__(key, [dtype, shape, bytes(nbytes)]))


def says(**changes: Any) -> Any:
    def change(c: dict[str, Any]) -> None:
        c["quantization_config"] = {
            k: v for k, v in {**c["quantization_config"], **changes}.items() if v is not None
        }

    return lambda src: edit_json(src / "config.json", change)


REFUSED: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "no scales": (
        rewritten(lambda t: t.pop(f"{Q}_scale_inv")),
        3,
        (f"{Q}_scale_inv", "missing", "[24, 2]", "[384, 48]"),
    ),
    "scales of another shape": (
        put(f"{Q}_scale_inv", "F32", [2, 24], 192),
        3,
        (f"{Q}_scale_inv", "[2, 24]", "[24, 2]", "model.safetensors"),
    ),
    "scales of one number": (
        put(f"{Q}_scale_inv", "F32", [], 4),
        3,
        (f"{Q}_scale_inv", "[]", "[24, 2]"),
    ),
    "scales of integers": (
        put(f"{Q}_scale_inv", "I8", [24, 2], 48),
        3,
        (f"{Q}_scale_inv", "int8", "float32"),
    ),
    "scales of no weight": (
        put("model.layers.9.x.weight_scale_inv", "F32", [1], 4),
        3,
        ("layers.9.x.weight_scale_inv", "is not there"),
    ),
    "scales of a plain weight": (
        put(Q, "BF16", [384, 48], 384 * 48 * 2),
        3,
        (f"{Q}_scale_inv", f"{Q} holds bfloat16"),
    ),
    "other 8 bits": (
        put(UP, "F8_E5M2", [64, 48], 64 * 48),
        3,
        (f"{UP}_scale_inv", f"{UP} [64, 48] holds float8_e5m2", "does not describe it"),
    ),
    "integers": (put(UP, "I8", [64, 48], 64 * 48), 3, (f"{UP}_scale_inv", "int8")),
    "a norm in 8 bits": (
        put("model.norm.weight", "F8_E4M3", [48], 48),
        3,
        ("model.norm.weight [48]", "not a matrix"),
    ),
    "a weight in no rule": (
        put("model.layers.0.x.weight", "F8_E4M3", [2, 2], 4),
        5,
        ("model.layers.0.x.weight [2, 2] is in no rule",),
    ),
    "no block size": (
        says(weight_block_size=None),
        3,
        (f"{Q}_scale_inv is [24, 2]", "should be []", "a scale for each tensor"),
    ),
    "a block size of nothing": (says(weight_block_size=[0, 128]), 3, ("[0, 128]", Q)),
    "a block size of one number": (says(weight_block_size=128), 3, ("weight_block_size", Q)),
    "another block size": (
        says(weight_block_size=[128, 128]),
        3,
        (f"{Q}_scale_inv", "[24, 2]", "[3, 1]", "128 x 128"),
    ),
    "another method": (says(quant_method="gptq"), 3, ("gptq", "quant_method fp8")),
    "another format": (says(fmt="e5m2"), 3, ("e5m2", "fmt e4m3")),
    "no config": (
        lambda src: edit_json(src / "config.json", lambda c: c.pop("quantization_config")),
        3,
        (f"{Q} [384, 48] holds float8_e4m3fn", "quantization_config", "does not describe it"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_quantised_checkpoint_is_refused(one, tmp_path, case):
    damage, code, words = REFUSED[case]
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(one, src)
    damage(src)
    refused(code, *words, args=("hf-to-megatron", src, dst), untouched=tmp_path)


def test_eight_bit_floats_without_scales_are_refused(tmp_path):
    src = tiny.tiny_random("llama", tmp_path / "hf")
    header, data = shard(src / "model.safetensors")
    name = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
    start, end = header[name]["data_offsets"]
    middle = (start + end) // 2
    header[name].update(dtype="F8_E4M3", data_offsets=[start, middle])
    write_shard(src / "model.safetensors", header, data[:middle])
    with pytest.raises(package.errors.MckptError, match=f"{re.escape(name)}.*float8_e4m3fn"):
        package.plan(src, tmp_path / "out")


def test_the_error_names_a_value_beyond_float16(one, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(one, src)
    rewritten(lambda t: t[f"{UP}_scale_inv"].__setitem__(2, np.full(8, 1e4, "f4").tobytes()))(src)
    args = ("hf-to-megatron", src, tmp_path / "dst", "--dtype", "fp16")
    said = refused(2, "layers.2.mlp.up.weight", "65504", "--allow-overflow", args=args)
    path, value, at = re.search(r"(\S+): (\S+) at byte (\d+)", said).groups()
    code = np.frombuffer(Path(path).read_bytes()[int(at) :][:1], E4M3).astype("f4")
    assert (
        abs(float(value)) > 65504
        and value == f"{float((code * np.float32(1e4)).astype(BF16)[0]):g}"
    )
    good(*args, "--allow-overflow")
