"""The files of a delta of weights, in the form that slime, miles and their engines share. In these
safetensors files each tensor is a zstd frame, and the metadata has the digest of each new tensor.

    xor        [new byte XOR old byte, ...]
    overwrite  [count u4 | position u4, ... | new byte, ...] of the bytes that changed
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mckpt.errors import MissingExtra, SourceError

LEVEL = 1  # of zstd, which all writers of this form take
WIDEST = 1 << 62  # an offset that takes as much room in a header as any other
BATCH = 1 << 16  # bytes that are skipped, and positions that are read, at once


class _Adler32:
    value = 1

    def update(self, data: Any) -> None:
        self.value = zlib.adler32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def hasher(kind: str) -> Any:
    """Returns a new digest with `update` and `hexdigest`: xxh3-128, blake3 or adler32."""
    if kind == "xxh3-128":
        return _package("xxhash").xxh3_128()
    return _Adler32() if kind == "adler32" else _package("blake3").blake3()


def require(kind: str) -> None:
    """Raises MissingExtra unless what deltas with digests of this kind need is installed."""
    _package("zstandard")
    hasher(kind)


def _package(name: str) -> Any:
    """Raises MissingExtra if a package is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtra(f"a delta needs {name}; run pip install 'mckpt[delta]'") from None


class DeltaWriter:
    """A file of a delta. Its header comes first and is known last, so it gets as much room as it
    can need; spaces fill the rest.
    """

    def __init__(self, path: Path, names: Iterable[str], kind: str) -> None:
        """names: of all tensors that may be added. kind: of their digests."""
        self.entries: dict[str, Any] = {}
        self.sums: dict[str, str] = {}  # the digests of the tensors that were added
        widest = {name: _entry(WIDEST, 2 * WIDEST) for name in names}
        room = len(_header(widest, dict.fromkeys(widest, hasher(kind).hexdigest())))
        self.room, self.at = -(-room // 8) * 8, 0
        self.zstd = _package("zstandard")
        self.file = open(path, "wb")  # noqa: SIM115
        self.file.seek(8 + self.room)

    def add(self, name: str, parts: Iterable[Any], nbytes: int) -> None:
        """Adds a tensor of `nbytes` bytes, which come in parts."""
        # with the size, without which decompress() of zstandard refuses the frame
        packer = self.zstd.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)
        start = self.at
        for part in parts:
            self.at += self.file.write(packer.compress(part))
        self.at += self.file.write(packer.flush())
        self.entries[name] = _entry(start, self.at)

    def end(self) -> None:
        """Writes the header, and syncs the file."""
        self.file.seek(0)
        header = _header(self.entries, self.sums).ljust(self.room)
        self.file.write(struct.pack("<Q", self.room) + header)
        self.file.flush()
        os.fsync(self.file.fileno())


def _entry(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def _header(entries: dict[str, Any], sums: dict[str, str]) -> bytes:
    return json.dumps({"__metadata__": sums, **entries}, separators=(",", ":")).encode()


class PackedTensor(NamedTuple):
    """A tensor of a delta: its frame of `nbytes` bytes from byte `at` of a file on."""

    name: str
    path: str
    at: int
    nbytes: int


class Patch:
    """Changes the old bytes of a tensor, block by block in their order, into the new ones."""

    def __init__(self, of: PackedTensor, encoding: str, whole: int) -> None:
        """whole: bytes of the tensor. All methods raise SourceError if the delta is damaged."""
        self.of, self.xor, self.whole = of, encoding == "xor", whole
        self.stream, self.places = self._opened(), None
        if not self.xor:  # the positions and the values are read side by side
            self.left, self.last = int(self._take(4).view("<u4")[0]), -1
            self.stream, self.places = self._opened(), self.stream
            for skipped in range(0, 4 + 4 * self.left, BATCH):
                self._take(min(BATCH, 4 + 4 * self.left - skipped))
            self.at, self.values = np.zeros(0, "i8"), np.zeros(0, "u1")

    def apply(self, block: np.ndarray, start: int) -> None:
        """Changes a block, which begins at byte `start` of the tensor."""
        if self.xor:
            block ^= self._take(len(block))
            return
        end = start + len(block)
        while self.left and (not len(self.at) or self.at[-1] < end):
            count = min(self.left, BATCH)
            at = self._take(4 * count, self.places).view("<u4").astype("i8")
            if (np.diff(at, prepend=self.last) <= 0).any() or at[-1] >= self.whole:
                raise self._damaged("its positions do not ascend, or lie behind the tensor")
            self.left, self.last = self.left - count, int(at[-1])
            self.at = np.append(self.at, at)
            self.values = np.append(self.values, self._take(count))
        here = int(np.searchsorted(self.at, end))
        block[self.at[:here] - start] = self.values[:here]
        self.at, self.values = self.at[here:], self.values[here:]

    def end(self) -> None:
        """Refuses bytes that are left."""
        if self._read(self.stream, 1):
            raise self._damaged("has more bytes than the tensor")

    def _opened(self) -> Any:
        frame = np.memmap(self.of.path, "u1", "r", self.of.at, (self.of.nbytes,))
        return _package("zstandard").ZstdDecompressor().stream_reader(frame)

    def _take(self, count: int, stream: Any = None) -> np.ndarray:
        """Returns exactly so many of the bytes that are packed."""
        parts = [b""]
        while count and (data := self._read(stream or self.stream, count)):
            parts.append(data)
            count -= len(data)
        if count:
            raise self._damaged(f"ends {count:,} bytes too early")
        return np.frombuffer(b"".join(parts), "u1")

    def _read(self, stream: Any, most: int) -> bytes:
        try:
            data: bytes = stream.read(most)
            return data
        except _package("zstandard").ZstdError as error:
            raise self._damaged(error) from None

    def _damaged(self, why: object) -> SourceError:
        return SourceError(f"{self.of.path}: {self.of.name}: {why}; copy the delta again")
