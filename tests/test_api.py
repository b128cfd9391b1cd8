"""The Python API: open, plan, convert and diff."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import mckpt as package
from tests import tiny
from tests.door import hf, tree


def test_open_reads_tensors_and_slices_of_every_format(src, torch_dir, dist_dir):
    arrays = tiny.tensors(tiny.config("qwen3"))
    q = arrays["model.layers.3.self_attn.q_proj.weight"]
    for path in (src, torch_dir, dist_dir):
        ckpt = package.open(path)
        tensor = ckpt["layers.3.attn.q.weight"]
        assert (tensor.shape, tensor.dtype, tensor.nbytes, len(tensor)) == (
            (384, 48),
            "bfloat16",
            384 * 48 * 2,
            384,
        )
        assert tensor.numpy().dtype == ml_dtypes.bfloat16 and np.array_equal(
            tensor.numpy().view("u2"), q.view("u2")
        )
        for index in (
            np.s_[:8],
            np.s_[-3:],
            np.s_[5],
            np.s_[-1],
            np.s_[7:7],
            np.s_[3:9, 40:],
            np.s_[2, 3],
            np.s_[..., :4],
            np.s_[..., 3],
            np.s_[2, ...],
            np.s_[...],
            np.s_[np.int64(4)],
            np.s_[100:1000],
        ):
            assert tensor[index].shape == q[index].shape, index
            assert np.array_equal(tensor[index].numpy().astype("f4"), q[index].astype("f4")), index
        assert np.array_equal(tensor[4:8][1:3].numpy().astype("f4"), q[5:7].astype("f4"))
        for index in (384, -385, np.s_[::2], np.s_[0, 0, 0]):
            with pytest.raises(IndexError, match=r"layers\.3\.attn\.q\.weight"):
                tensor[index]
        assert len(ckpt) == 47 and "nope" not in ckpt and "layers.3.attn.q.weight" in ckpt
        for name in (
            "nope",
            "layers.4.attn.q.weight",
            "layers.{layer}.attn.q.weight",
            "model.norm.weight",
        ):
            with pytest.raises(KeyError, match=re.escape(name)):
                ckpt[name]
        assert (ckpt.format, ckpt.dims["num_layers"]) == (ckpt.opened.format.name, 4)


def test_an_opened_checkpoint_can_be_pickled_and_read_by_threads(torch_dir):
    ckpt = package.open(torch_dir)
    again = pickle.loads(pickle.dumps(ckpt))
    piece = pickle.loads(pickle.dumps(ckpt["embed.weight"][3:5]))
    assert np.array_equal(piece.numpy().view("u2"), again["embed.weight"][3:5].numpy().view("u2"))
    fresh = package.open(torch_dir)
    with ThreadPoolExecutor(8) as pool:
        read = dict(
            zip(ckpt, pool.map(lambda name: fresh[name].numpy().tobytes(), ckpt), strict=True)
        )
    assert read == {name: tensor.numpy().tobytes() for name, tensor in again.items()}


def test_open_reads_no_tensor_until_it_is_used(tmp_path):
    src = hf(tmp_path / "src")
    ckpt = package.open(src)
    tensor = ckpt["embed.weight"][:2]
    (src / "model.safetensors").unlink()
    with pytest.raises(package.errors.StorageError, match=r"model\.safetensors"):
        tensor.numpy()


def test_a_slice_converts_to_a_torch_tensor(dist_dir):
    torch = pytest.importorskip("torch")
    found = package.open(dist_dir)["layers.0.mlp.up.weight"][:3].torch()
    wanted = tiny.tensors(tiny.config("qwen3"))["model.layers.0.mlp.up_proj.weight"][:3]
    assert found.dtype == torch.bfloat16 and np.array_equal(
        found.float().numpy(), wanted.astype("f4")
    )


def test_python_plans_and_converts(src, torch_dir, tmp_path):
    plan = package.plan(src, tmp_path / "d", format="torch", parallel=package.Parallel(tp=2, pp=2))
    assert "47 logical tensors" in plan.summary() and not (tmp_path / "d").exists()
    assert plan.run(max_memory="1MiB", threads=2)["plan"] == plan.digest
    assert tree(tmp_path / "d") == tree(torch_dir)
    package.convert(tmp_path / "d", tmp_path / "hf", format="hf")
    assert not package.diff(src, tmp_path / "hf")
    with pytest.raises(package.errors.UsageError, match="no format 'gguf'"):
        package.plan(src, tmp_path / "e", format="gguf")
    with pytest.raises(package.errors.UsageError, match="unknown dtype 'int4'"):
        package.plan(src, tmp_path / "e", dtype="int4")
    with pytest.raises(package.errors.DestinationError, match="--overwrite"):
        package.plan(torch_dir, tmp_path / "hf", format="hf")
