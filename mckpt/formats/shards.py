"""Lays out safetensors files: which tensor is in which file, and at which byte."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.storage.files import TargetFile
from mckpt.values import dtypes

ALIGN = 8  # header length is padded to this, so that data is aligned for mmap


class Row(NamedTuple):
    """A tensor to be written."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


class Placed(NamedTuple):
    """The files of some tensors, and the place of each."""

    names: list[str]
    file: np.ndarray  # of each tensor
    at: np.ndarray  # the byte at which it starts
    outputs: list[TargetFile]


def place(rows: list[Row], most: int, stem: str) -> Placed:
    """Returns safetensors files of tensors in this order: STEM.safetensors, or several with a
    number each.

    A file exceeds `most` bytes only if it contains a single tensor.
    """
    sizes = [row.nbytes for row in rows]
    file_of = cut(sizes, most)
    count = file_of[-1] + 1
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    headers: list[dict[str, Any]] = [{"__metadata__": {"format": "pt"}} for _ in names]
    at = np.zeros(len(rows), "i8")
    ends = [0] * count
    for i, row in enumerate(rows):
        f = file_of[i]
        at[i], ends[f] = ends[f], ends[f] + sizes[i]
        headers[f][row.key] = {
            "dtype": dtypes.TABLE[row.dtype].safetensors,
            "shape": list(row.shape),
            "data_offsets": [int(at[i]), ends[f]],
        }
    heads = []
    for header in headers:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGN)
        heads.append(struct.pack("<Q", len(text)) + text)
    at += np.array([len(heads[f]) for f in file_of])
    outputs = [TargetFile.headed(n, h, e) for n, h, e in zip(names, heads, ends, strict=True)]
    return Placed(names, np.array(file_of, "i4"), at, outputs)


def tensors_of(output: TargetFile) -> Iterator[tuple[Row, int]]:
    """Yields the tensors of a file that `place` made, and the byte at which each starts."""
    ((_, head),) = output.fixed(None)
    for key, entry in json.loads(head[struct.calcsize("<Q") :]).items():
        if key != "__metadata__":
            row = Row(key, dtypes.OF_SAFETENSORS[entry["dtype"]], tuple(entry["shape"]))
            yield row, len(head) + entry["data_offsets"][0]


def cut(sizes: list[int], most: int) -> list[int]:
    """Assigns a file to each tensor, of these bytes and in this order. The files have about the
    same size, so that the threads that write them end together.

    A file exceeds `most` bytes only if it contains a single tensor.
    """
    each = np.array(sizes, "i8")
    total = int(each.sum())
    middle = np.cumsum(each) - each / 2
    least = max(1, -(-total // most))
    for count in range(least, least + least // 8 + 2):  # the fewest, or a few more
        _, even = np.unique(
            np.minimum(middle * count // max(1, total), count - 1), return_inverse=True
        )
        if not ((np.bincount(even, each) > most) & (np.bincount(even) > 1)).any():
            return [int(file) for file in even]
    # tensors about as large as `most`: as many as fit, one file after the other
    files, filled = [0], 0
    for i, size in enumerate(sizes):
        full = i > 0 and filled + size > most
        filled = size if full else filled + size
        files.append(files[-1] + full)
    return files[1:]
