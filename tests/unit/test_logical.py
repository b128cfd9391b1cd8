"""Functions that read whole logical tensors hold only a few MB of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mckpt.checkpoint import logical
from mckpt.checkpoint.logical import Reader
from mckpt.containers.entries import Entry
from mckpt.errors import SourceError
from mckpt.formats.base import Problems, group
from mckpt.geometry.box import Box, Layout, Piece, Stored

ROWS, WIDTH = 24_000, 1024  # 94 MiB of float32


def stored(pieces: list[Piece], shape: tuple[int, ...], at: int, **more: bool) -> Stored:
    zero = np.zeros(1, "i4")
    return Stored("key", "float32", shape, tuple(pieces), zero, zero, zero, np.array([at]), **more)


def pair(
    path: Path, rows: int, width: int, transposed: bool
) -> tuple[np.memmap, np.memmap, Reader]:
    """A file with a tensor and a replica of it, both zero and sparse."""
    size = rows * width * 4
    with open(path, "wb") as f:
        f.truncate(2 * size)
    box = Box((0, 0), (rows, width))
    one = stored([Piece("w", box, 0, (width, 1))], box.shape, 0)
    other = stored(
        [Piece("w", box, 0, (1, rows) if transposed else (width, 1))],
        box.shape[::-1] if transposed else box.shape,
        size,
        replica=True,
    )
    first = np.memmap(path, "f4", "r+", 0, box.shape)
    second = np.memmap(path, "f4", "r+", size, other.shape)
    return (
        first,
        second.T if transposed else second,
        Reader(Layout([str(path)], [one, other], {"w": box.shape})),
    )


def peak(call: Callable[[], list[str]]) -> tuple[list[str], int]:
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_replicas_are_compared_in_blocks(tmp_path):
    first, second, reader = pair(tmp_path / "file", ROWS, WIDTH, transposed=False)
    found, nbytes = peak(reader.check_replicas)
    assert found == [] and nbytes < 40 << 20
    second[-1, -1] = 1
    assert "w: its copy in" in reader.check_replicas()[0]
    first[-1, -1] = 1
    assert reader.check_replicas() == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("most", [4, 12, 100, 1 << 20])
def test_every_element_of_a_replica_is_compared(tmp_path, monkeypatch, most, transposed):
    monkeypatch.setattr(logical, "BLOCK_BYTES", most)
    first, second, reader = pair(tmp_path / "file", 5, 7, transposed)
    first[:] = second[:] = np.arange(35).reshape(5, 7)
    assert reader.check_replicas() == []
    for i in range(35):
        second[divmod(i, 7)] += 1
        assert len(reader.check_replicas()) == 1
        second[divmod(i, 7)] -= 1


def test_padding_is_read_in_blocks(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with open(path, "wb") as f:
        f.truncate(ROWS * WIDTH * 4)
    box = Box((0, 0), (10, WIDTH))
    reader = Reader(
        Layout(
            [str(path)],
            [stored([Piece("w", box, 0, (WIDTH, 1))], (ROWS, WIDTH), 0, padding=True)],
            {"w": box.shape},
        )
    )
    found, nbytes = peak(reader.padding)
    assert found == [] and nbytes < 30 << 20
    held = np.memmap(path, "f4", "r+", 0, (ROWS, WIDTH))
    held[[9, 10, 5000, 5001, ROWS - 1], [0, 3, 4, 5, WIDTH - 1]] = 1
    assert reader.padding() == [
        "key: 4 rows beyond the vocabulary are not zero (largest 1), and are dropped"
    ]
    monkeypatch.setattr(logical, "BLOCK_BYTES", 3 * WIDTH * 4)
    assert reader.padding() == [
        "key: 4 rows beyond the vocabulary are not zero (largest 1), and are dropped"
    ]


@pytest.mark.parametrize("padding", [False, True])
def test_bytes_between_the_elements_of_a_view_are_not_padding(tmp_path, padding):
    np.full(100, 7, "f4").tofile(tmp_path / "file")
    box = Box((0, 0), (4, 3))
    held = group(
        "key",
        (4, 3),
        (Piece("w", box, 0, (3, 1)),),
        [(0, 0, Entry("float32", (4, 3), 0, 8, (20, 2)))],
        Problems("x"),
        padding=padding,
    )
    assert [(s.view, s.padding) for s in held] == [(True, padding)]
    reader = Reader(Layout([str(tmp_path / "file")], held, {"w": (4, 3)}))
    assert reader.padding() == [] and (reader["w"].numpy() == 7).all()


def test_a_tensor_that_the_files_have_in_part_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(np.arange(8, dtype="f4").tobytes())
    piece = Piece("w", Box((2, 0), (2, 4)), 0, (4, 1))
    where = np.zeros((4, 1), "i8")
    stored = Stored("key", "float32", (2, 4), (piece,), *where)
    tensor = Reader(Layout([str(file)], [stored], {"w": (4, 4)}))["w"]
    assert tensor[3].numpy().tolist() == [4, 5, 6, 7]
    with pytest.raises(SourceError, match="w: key has 8 of the 16 elements"):
        tensor.numpy()
