"""Tensors, casts and configs beside those of torch and transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.conversion.streaming import Named
from mckpt.values.dtypes import itemsize, numpy_dtype
from tests.helpers import tiny
from tests.helpers.commands import good
from tests.helpers.lazy import torch
from tests.unit.test_execute import RNG, copies, copy, run
from tests.unit.test_quantisation import BF16, same, weight, worth


def test_a_slice_converts_to_a_torch_tensor(dist_dir):
    found = mckpt.open(dist_dir)["layers.0.mlp.up.weight"][:3].torch()
    wanted = tiny.tensors(tiny.config("qwen3"))["model.layers.0.mlp.up_proj.weight"][:3]
    assert found.dtype == torch.bfloat16 and np.array_equal(
        found.float().numpy(), wanted.astype("f4")
    )


def test_numpy_and_dlpack_take_tensors(src, dist_dir, monkeypatch):
    wanted = tiny.tensors(tiny.config("qwen3"))["model.embed_tokens.weight"]
    for path in (src, dist_dir):
        tensor = mckpt.open(path).tensors()["embed.weight"][3:9]
        assert np.array_equal(np.asarray(tensor).view("u2"), wanted[3:9].view("u2"))
        assert np.asarray(tensor, "f4").dtype == "f4" and np.array(tensor, copy=True).shape[0] == 6
        with pytest.raises(ValueError, match="leave copy=False out"):
            np.asarray(tensor, copy=False)
        found = torch.from_dlpack(tensor)
        assert found.dtype == torch.bfloat16 and torch.equal(found, tensor.torch())
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BufferError, match=r"embed\.weight is bfloat16.*install torch"):
        tensor.__dlpack__()


def test_write_takes_arrays_of_every_kind(src: Path, dist_dir: Path, tmp_path: Path) -> None:
    ckpt = mckpt.open(dist_dir)

    def stream() -> Iterator[Named]:
        for number, (name, tensor) in enumerate(ckpt.hf_tensors().items()):
            strided = torch.stack([tensor.torch()] * 2, -1)[..., 0]
            yield name, (tensor, tensor.numpy(), tensor.torch(), strided)[number % 4]

    config = json.loads((src / "config.json").read_text())
    mckpt.write(tmp_path / "a", config, stream())
    assert not mckpt.diff(src, tmp_path / "a")


def specials():
    """Returns float32 bit patterns at every edge: subnormals, ties, infinities, NaN, and values
    that float16 or bfloat16 cannot hold.
    """
    edges = [
        0,
        1,
        0x007FFFFF,
        0x00800000,
        0x33000000,
        0x33000001,
        0x38800000,
        0x387FFFFF,
        0x477FE000,
        0x477FEFFF,
        0x477FF000,
    ]
    edges += [
        0x3F808000,
        0x3F818000,
        0x3F807FFF,
        0x3F808001,
        0x7F7FFFFF,
        0x7F7F8000,
        0x7F7F7FFF,
        0x7F800000,
        0x7F800001,
        0x7FC12345,
    ]
    bits = np.array(edges, "u4")
    return np.concatenate(
        [bits, bits | np.uint32(1 << 31), RNG.integers(0, 1 << 32, 1 << 17, dtype="u4")]
    )


@pytest.mark.parametrize("src", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dst", ["float32", "float16", "bfloat16"])
def test_casts_are_those_of_torch(tmp_path, src, dst):
    """The values are equal bit for bit, except the payload of NaN, in which torch's vector and
    scalar loops differ themselves.
    """
    bits = specials() if src == "float32" else np.arange(1 << 16, dtype="u2")
    (got,), _ = run(
        tmp_path,
        copies(copy(1, len(bits), (0, 0, 0, itemsize(src)), (0, 0, 0, itemsize(dst)))),
        [(src, dst)],
        [bits.view("u1")],
        [len(bits) * itemsize(dst)],
        allow_overflow=True,
    )
    held = torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, src)).to(
        getattr(torch, dst)
    )
    want = (
        held.view(torch.int32 if dst == "float32" else torch.int16)
        .numpy()
        .view(f"u{itemsize(dst)}")
    )
    ours, nan = np.frombuffer(got, want.dtype), held.isnan().numpy()
    assert np.array_equal(ours[~nan], want[~nan])
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.frombuffer(got, numpy_dtype(dst))[nan]).all()


def test_torch_computes_the_same_values_of_fp8():
    codes, scales = weight((200, 72), (16, 32))
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    spread = (
        torch.from_numpy(scales).repeat_interleave(16, 0)[:200].repeat_interleave(32, 1)[:, :72]
    )
    theirs = (wide * spread).bfloat16().view(torch.int16).numpy().view(BF16)
    same(theirs, worth(codes, scales, (16, 32)))


def test_transformers_loads_the_corrected_config(headless: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    good("hf-to-megatron", headless, tmp_path / "d", "--set", "mtp_layers=0")
    good("megatron-to-hf", tmp_path / "d", tmp_path / "back")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
