"""Arrays of zarr 3 in files of their elements in C order, for zarr's sharding of plain chunks:

zarr.json     the shape, the dtype, the shapes of files and chunks, and more (JSON)
0.7.0         a file: its elements, and the index of its chunks, which is the offset and the
              bytes of each, and a checksum of these numbers
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.errors import MckptError, SourceError
from mckpt.lazy import numpy as np
from mckpt.storage import descriptors
from mckpt.storage.files import opened, read_json
from mckpt.values.dtypes import TABLE, itemsize

DESCRIPTION = "zarr.json"
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


class Array(NamedTuple):
    """The contents of a zarr.json."""

    dtype: str
    shape: tuple[int, ...]
    file: tuple[int, ...]  # shape of the elements in a file
    chunk: tuple[int, ...]

    def described(self) -> dict[str, Any]:
        """Returns the content of the zarr.json."""
        index = [LITTLE, {"name": "crc32c"}]
        chunks = {"chunk_shape": self.chunk, "codecs": [LITTLE], "index_codecs": index}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.file}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": chunks}],
            "fill_value": 0.0,
        }

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * itemsize(self.dtype)

    @property
    def end(self) -> bytes:
        """The index of each file, whose chunks follow each other."""
        return _index(self.nbytes(self.file), self.nbytes(self.chunk))

    def files(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields the first element of each file, and its name."""
        for number in np.ndindex(*_counts(self.shape, self.file)):
            first = (i * n for i, n in zip(number, self.file, strict=True))
            yield tuple(first), ".".join(map(str, number))

    def check(self, path: Path) -> None:
        """Raises SourceError if a file is not there, or does not end with the index."""
        whole, found = self.nbytes(self.file), b""
        if path.is_file():
            with opened(path) as fd:
                found = descriptors.pread(fd, len(self.end) + 1, whole)
        if found != self.end:
            raise SourceError(
                f"{path}: is not there, or does not end with the index of its {whole:,} bytes; copy"
                " the checkpoint again"
            )


def _counts(shape: tuple[int, ...], part: tuple[int, ...]) -> list[int]:
    return [n // size for n, size in zip(shape, part, strict=True)]


def read_array(folder: Path) -> Array | None:
    """Returns the array in a directory; None if mckpt would describe it otherwise, or if the chunks
    of a file do not have its elements in order.
    """
    try:
        found = read_json(folder / DESCRIPTION, 1 << 20)
        grid, (sharding,) = found["chunk_grid"], found["codecs"]
        shapes = (
            found["shape"],
            grid["configuration"]["chunk_shape"],
            sharding["configuration"]["chunk_shape"],
        )
        array = Array(found["data_type"], *map(tuple, shapes))
        same = [json.dumps(one, sort_keys=True) for one in (found, array.described())]
        even = zip((*array.shape, *array.file), (*array.file, *array.chunk), strict=True)
        cut = [i for i, count in enumerate(_counts(array.file, array.chunk)) if count > 1]
        in_order = not cut or math.prod(array.chunk[: cut[-1]]) == 1  # the elements of a file
        known = array.dtype in TABLE and all(n % size == 0 for n, size in even)
        return array if same[0] == same[1] and known and in_order else None
    except (MckptError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


@cache
def _index(nbytes: int, size: int) -> bytes:
    index = np.array([(at, size) for at in range(0, nbytes, size)], "<u8").tobytes()
    return index + crc32c(index).to_bytes(4, "little")


def crc32c(data: bytes) -> int:
    """Returns the checksum of Castagnoli's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
