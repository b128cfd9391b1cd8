"""The format `zarr`, from files that old releases of megatron-core saved, each beside the files of
the format `torch` that the same ranks saved of the same state (tests/helpers/zarr_samples.py).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as command
from tests.helpers.tiny import unpack

UNIT = "iter_0000001"
WEIGHTS = {
    "0.6-llama-weights": 21,
    "0.8-llama-float16": 21,
    "0.8-llama-fully_sharded_bucket_space": 21,
    "0.8-llama-fully_sharded_model_space": 21,
    "0.10-latent-weights": 40,
    "0.12-moe-dp_zero_gather_scatter": 45,
    "0.12-moe-fully_sharded_model_space": 45,
}
LLAMA, MOE = "0.8-llama-fully_sharded_model_space", "0.12-moe-fully_sharded_model_space"
PROJ = "decoder.layers.self_attention.linear_proj.weight"


def unpacked(name: str, directory: Path) -> Path:
    """Returns a directory with the checkpoints `zarr` and `torch` of a sample."""
    return unpack(f"zarr/{name}", directory / name)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return unpacked(LLAMA, tmp_path) / "zarr"


def raw(array: Path) -> np.ndarray:
    """Returns the bits of a zarr array [shape], with no code of mckpt."""
    described = json.loads((array / ".zarray").read_text())
    code = {"bfloat16": "<u2", "<f4": "<u4"}[described["dtype"]]
    chunk, shape = described["chunks"], described["shape"]
    out = np.zeros([-(-n // c) * c for n, c in zip(shape, chunk, strict=True)], code)
    for file in array.iterdir():
        if file.name != ".zarray":
            index = [int(i) for i in file.name.split(".")]
            box = tuple(slice(i * c, i * c + c) for i, c in zip(index, chunk, strict=True))
            out[box] = np.fromfile(file, code).reshape(chunk)
    return out[tuple(map(slice, shape))]


def rechunked(array: Path, chunk: list[int]) -> None:
    """Writes an array again in chunks of another shape, which may not divide that of the array."""
    bits, described = raw(array), json.loads((array / ".zarray").read_text())
    shutil.rmtree(array)
    array.mkdir()
    (array / ".zarray").write_text(json.dumps(described | {"chunks": chunk}))
    for index in np.ndindex(*(-(-n // c) for n, c in zip(bits.shape, chunk, strict=True))):
        box = tuple(slice(i * c, i * c + c) for i, c in zip(index, chunk, strict=True))
        part = np.full(chunk, 0x7F81, bits.dtype)  # beyond the shape: not a number
        inner = bits[box]
        part[tuple(map(slice, inner.shape))] = inner
        part.tofile(array / ".".join(map(str, index)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_and_states_are_those_of_the_files_of_each_rank(name: str, tmp_path: Path) -> None:
    sample = unpacked(name, tmp_path)
    own, same = Checkpoint.open(sample / "zarr"), Checkpoint.open(sample / "torch")
    assert own.format == "zarr" and len(own) == WEIGHTS[name]
    form = name.rpartition("-")[2]
    copies = 1 if form == "weights" else 4
    difference = mckpt.diff(own, same)
    assert not difference and difference.same == copies * len(own)
    if copies == 1:
        assert own.optimizer is None
        return
    assert own.optimizer is not None and same.optimizer is not None
    assert own.optimizer.form == {"float16": "not distributed"}.get(form, form)
    assert own.optimizer.groups == same.optimizer.groups
    assert own.optimizer.groups[0][0]["step"] == 1


def test_values_are_those_in_the_chunks(llama: Path) -> None:
    """The rows and columns of the chunks are in their places."""
    stored, checkpoint = raw(llama / UNIT / PROJ), Checkpoint.open(llama)
    assert stored.shape == (2, 16, 16)
    assert len(list((llama / UNIT / PROJ).iterdir())) == 5  # two layers at tp 2, and .zarray
    for layer in range(2):
        found = checkpoint[f"layers.{layer}.attn.o.weight"].numpy()
        assert (found.view("<u2") == stored[layer]).all()
    moment = raw(llama / UNIT / f"optimizer.state.exp_avg_sq.{PROJ}")
    found = checkpoint.with_optimizer()["layers.1.attn.o.weight@exp_avg_sq"].numpy()
    assert (found.view("<u4") == moment[1]).all() and moment.any()


@pytest.mark.parametrize("chunk", [[1, 5, 16], [2, 16, 7], [1, 3, 11], [2, 16, 16]])
def test_chunks_at_the_end_of_an_array_are_as_large_as_others(
    chunk: list[int], llama: Path
) -> None:
    rechunked(llama / UNIT / PROJ, chunk)
    difference = mckpt.diff(llama, llama.parent / "torch")
    assert not difference and difference.same == 4 * 21


def test_inspect_and_check_know_the_format(llama: Path) -> None:
    said = good("inspect", llama).out
    assert "format: zarr" in said and "bfloat16 [2, 16, 16] in 4 chunks" not in said.split(PROJ)[0]
    assert "sound" in good("check", llama).out


def test_overwrite_replaces_a_save_with_its_lock_files(llama: Path, tmp_path: Path) -> None:
    assert list(llama.glob(f"{UNIT}/*.sync"))
    good("repair", llama, tmp_path / "out")
    good("reshard", tmp_path / "out", llama, "--target-tp", 1, "--overwrite")
    assert sorted(p.name for p in llama.glob(f"{UNIT}/*") if p.is_dir()) == []
    assert mckpt.diff(llama, tmp_path / "out").same == 4 * 21


# ------------------------------------------------------------------------------------------- errors


def without_chunk(unit: Path) -> None:
    (unit / PROJ / "1.0.1").unlink()


def truncated(unit: Path) -> None:
    chunk = unit / PROJ / "1.0.1"
    chunk.write_bytes(chunk.read_bytes()[:-2])


def longer(unit: Path) -> None:
    chunk = unit / PROJ / "1.0.1"
    chunk.write_bytes(chunk.read_bytes() + b"\0\0")


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(unit: Path) -> None:
        path = unit / PROJ / ".zarray"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_chunk, (f"{PROJ}/1.0.1, of 4 chunks", "fill value")),
        (truncated, (f"{PROJ}/1.0.1 has 254 bytes, and should have 256",)),
        (longer, (f"{PROJ}/1.0.1 has 258 bytes, and should have 256",)),
        (changed(compressor={"id": "blosc"}), ("compressor {'id': 'blosc'}", "tensorstore")),
        (changed(filters=[{"id": "delta"}]), ("filters", "tensorstore")),
        (changed(order="F"), ("order F", "tensorstore")),
        (changed(zarr_format=3), ("zarr_format 3", "tensorstore")),
        (changed(dimension_separator="/"), ("dimension_separator /", "tensorstore")),
        (changed(dtype="<c8"), ("dtype '<c8' is not one of bfloat16",)),
        (changed(shape=[2, 16, 8]), (f"{PROJ}/0.0.1 is outside of the array",)),
        (changed(shape=[16, 16]), ("shape [16, 16] and chunks [1, 16, 8]",)),
        (changed(shape=[2, 16, 2**40]), (f"{PROJ}/0.0.2 and 274,877,906,939 more",)),
        (changed(shape=[2, 16, 2**63]), ("shape [2, 16, 9223372036854775808] and chunks",)),
        (changed(shape=[2, 16, 16.0]), ("shape [2, 16, 16.0] and chunks",)),
        (changed(shape=[2, 16, math.inf]), ("shape [2, 16, inf] and chunks",)),
        (changed(chunks=16), ("is not the description",)),
        (lambda unit: (unit / PROJ / ".zarray").write_text("{"), ("not valid JSON",)),
        (lambda unit: (unit / PROJ / ".zarray").write_text("[" * 9000), ("not valid JSON",)),
        (lambda unit: (unit / "metadata.json").write_text("[" * 9000), ("no checkpoint",)),
        (lambda unit: shutil.rmtree(unit / PROJ), (f"{PROJ} is missing",)),
        (lambda unit: (unit / "metadata.json").unlink(), ("its save never finished",)),
    ],
)
def test_damage_is_named(
    damage: Callable[[Path], None], words: tuple[str, ...], llama: Path, tmp_path: Path
) -> None:
    damage(llama / UNIT)
    assert "internal error" not in command("check", llama).err
    refused(3, *words, args=("reshard", llama, tmp_path / "out", "--target-tp", 1))
    assert not (tmp_path / "out").exists()


def test_check_names_a_chunk_of_another_size_once(llama: Path) -> None:
    truncated(llama / UNIT)
    said = command("check", llama)
    assert said.code == 3 and said.out.count(f"{PROJ}/1.0.1 has 254 bytes") == 1, said
