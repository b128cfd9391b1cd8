"""The Python API: the Hugging Face tensors of any checkpoint."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from tests.formats.test_quantised_checkpoints import tiny_quantised
from tests.helpers import tiny
from tests.helpers.commands import hf, shard


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns dtype, shape and bytes of the tensors in a directory, in the order of its files."""
    out = {}
    for file in sorted(path.glob("*.safetensors")):
        header, data = shard(file)
        for name, e in header.items():
            if name != "__metadata__":
                out[name] = e["dtype"], e["shape"], data[slice(*e["data_offsets"])]
    return out


def same(ckpt: mckpt.Checkpoint, path: Path) -> None:
    """Asserts that the tensors of a checkpoint are those of a Hugging Face directory."""
    wanted, found = tensors(path), ckpt.hf_tensors()
    assert list(found) == list(wanted) and len(found) == len(wanted)
    for name, (letters, shape, data) in wanted.items():
        tensor = found[name]
        whole = tensor.numpy()
        assert (tensor.name, list(tensor.shape), tensor.nbytes) == (name, shape, len(data))
        assert tiny.LETTERS[whole.dtype] == letters and whole.tobytes() == data, name
        for rows in (np.s_[1:3], np.s_[-2:], np.s_[:1], np.s_[2:2]):
            assert np.array_equal(tensor[rows].numpy().view("u1"), whole[rows].view("u1")), name
        assert tensor[-1].numpy().tobytes() == whole[-1].tobytes()
    assert ckpt.hf_config() == json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(
    ("case", "format", "sizes"),
    [
        ("qwen3", "torch", {"tp": 2, "pp": 2}),
        ("qwen3-moe", "torch_dist", {"tp": 2}),
        ("llama-tied", "torch_dist", {}),
        ("deepseek-v3", "torch", {"tp": 2, "pp": 2}),
    ],
)
def test_hf_tensors_are_those_of_the_conversion(
    case: str, format: Any, sizes: dict[str, Any], tmp_path: Path
) -> None:
    mckpt.convert(hf(tmp_path / "src", case), tmp_path / "ckpt", format=format, **sizes)
    mckpt.convert(tmp_path / "ckpt", tmp_path / "hf", format="hf")
    same(mckpt.open(tmp_path / "ckpt"), tmp_path / "hf")


def test_hf_tensors_of_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    tiny_quantised("qwen3", tmp_path / "fp8", (16, 32))
    mckpt.convert(tmp_path / "fp8", tmp_path / "hf", format="hf")
    same(mckpt.open(tmp_path / "fp8"), tmp_path / "hf")


def test_hf_tensors_of_a_directory_are_its_own(src: Path) -> None:
    found = mckpt.open(src).hf_tensors()
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == {
        name: data for name, (_, _, data) in tensors(src).items()
    }


def test_an_hf_tensor_can_be_pickled_and_refuses_other_slices(torch_dir: Path) -> None:
    ckpt = mckpt.open(torch_dir)
    tensor = ckpt.hf_tensors()["model.layers.2.mlp.up_proj.weight"]
    piece = pickle.loads(pickle.dumps(tensor[3:5]))
    assert np.array_equal(piece.numpy().view("u2"), tensor.numpy()[3:5].view("u2"))
    again = pickle.loads(pickle.dumps(ckpt))
    assert list(again.hf_tensors()) == list(ckpt.hf_tensors())
    for index in (np.s_[::2], 10_000):
        with pytest.raises(IndexError, match=re.escape(tensor.name)):
            tensor[index]
