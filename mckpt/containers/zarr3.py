"""Arrays of zarr 3 that are not compressed, with zarr's sharding: a file has many chunks.

    DIR/zarr.json    the shape, the dtype and the chunks (JSON)
    DIR/0.7.0        the elements whose second index is 7: the chunks, one after the other, and an
                     index of them with a checksum

The elements of a file have the order of the array, so a file can be read without its index.
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mckpt.errors import MckptError
from mckpt.lazy import numpy as np
from mckpt.storage.files import TargetFile, read_file
from mckpt.values.dtypes import itemsize

DESCRIBED = "zarr.json"
LARGEST = 64 << 20  # bytes of a chunk, if it can be cut so. A loader reads whole chunks
PARTS = 16  # times as many chunks as are needed, at most
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


class Array(NamedTuple):
    """An array, its files and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    apart: bool  # each index of the second axis has a file
    cut: int  # the axis that is cut into chunks; of those before it, a chunk has one index

    @property
    def file(self) -> tuple[int, ...]:
        """Returns the shape of the elements in a file."""
        return (self.shape[0], 1, *self.shape[2:]) if self.apart else self.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        """Returns the shape of a chunk."""
        out = [1] * self.cut + [*self.file[self.cut :]]
        least = -(-math.prod(out) * itemsize(self.dtype) // LARGEST)
        fit = (n for n in range(least, PARTS * least) if out[self.cut] % n == 0)
        out[self.cut] //= next(fit, 1)
        return tuple(out)

    @property
    def files(self) -> list[str]:
        """Returns the names of the files, in the order of the second axis."""
        zeros = ["0"] * len(self.shape)
        each = [["0", str(n), *zeros[2:]] for n in range(self.shape[1])] if self.apart else [zeros]
        return [".".join(numbers) for numbers in each]

    def targets(self, paths: list[str]) -> list[TargetFile]:
        """Returns files with these paths: the elements, the offset and size of each chunk, and the
        checksum of these.
        """
        nbytes, size = (math.prod(s) * itemsize(self.dtype) for s in (self.file, self.chunk))
        index = np.array([(at, size) for at in range(0, nbytes, size)], "<u8").tobytes()
        end = index + crc32c(index).to_bytes(4, "little")
        return [TargetFile(p, nbytes + len(end), lambda crc_of: [(nbytes, end)]) for p in paths]

    @property
    def json(self) -> bytes:
        """Returns the description of the array."""
        index = [LITTLE, {"name": "crc32c"}]
        chunks = {"chunk_shape": self.chunk, "codecs": [LITTLE], "index_codecs": index}
        described = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.file}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": chunks}],
            "fill_value": 0.0,
        }
        return json.dumps(described).encode()


def files_of(root: Path, dtype: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of an array's files, as `Array.files`, if it was written as above; nothing
    if it was not, or if a file is damaged.
    """
    with suppress(MckptError):
        stated = read_file(root / DESCRIBED, 1 << 20)
        for apart, cut in itertools.product((False, True), range(min(3, len(shape)))):
            array = Array(dtype, shape, apart, cut)
            if len(shape) > apart and array.json == stated:
                whole = all(_is_whole(root, file) for file in array.targets(array.files))
                return array.files if whole else []
    return []


def _is_whole(root: Path, file: TargetFile) -> bool:
    """Returns whether there is a file with this size and this end."""
    ((at, end),) = file.fixed(None)
    with suppress(OSError), open(root / file.path, "rb") as f:
        return f.seek(at) == at and f.read() == end
    return False


def crc32c(data: bytes) -> int:
    """Returns the checksum of Castagnoli's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
