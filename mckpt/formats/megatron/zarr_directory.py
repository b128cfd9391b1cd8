"""A directory of zarr arrays, one for each whole, unsharded tensor.

    KEY/.zarray          shape, chunks, dtype and encoding of an array (JSON; zarr version 2)
    KEY/1.0.3            one chunk: the second along axis 0, the fourth along axis 2
    KEY/shard_1_2.pt     an object, a file of torch.save: the second of two

All chunks of an array have the same size, those at its end too, whose elements beyond the shape
mean nothing. Megatron-Core compresses no chunk (dist_checkpointing/strategies/zarr.py), so the file
of a chunk is its elements in C order.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import torch_spans
from mckpt.containers.dcp_metadata import Chunk, Metadata, possible
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats.megatron.chunked import Chunked, unwrapped, wrapping
from mckpt.geometry.box import row_major
from mckpt.lazy import numpy as np
from mckpt.storage.files import read_json, unreadable
from mckpt.values.dtypes import itemsize

ARRAY = ".zarray"
LOCKS = ".sync"  # suffix of directories of lock files, which a save leaves behind
OBJECT = "shard_"  # prefix of the files of objects
# numpy's names of dtypes; Megatron-Core writes the name of bfloat16, which numpy lacks
DTYPES = {
    **{"bfloat16": "bfloat16", "<f8": "float64", "<f4": "float32", "<f2": "float16"},
    **{"<i8": "int64", "<i4": "int32", "<i2": "int16", "|i1": "int8", "|u1": "uint8"},
    "|b1": "bool",
}
# the entries of a .zarray whose chunks are plain bytes
PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}


class Array(NamedTuple):
    """The contents of a .zarray."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  # shape of each chunk

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunk, strict=True))

    def index_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the index of the chunk in a file of this name; None for another file."""
        parts = name.split(".") if self.grid else []
        index = tuple(int(part) for part in parts if part.isdigit())
        inside = len(index) == len(self.grid) and all(map(operator.lt, index, self.grid))
        return index if inside and chunk_name(index) == name else None

    def box(self, index: tuple[int, ...]) -> Chunk:
        """Returns the offsets of a chunk, and the sizes of its part inside the array."""
        offsets = tuple(map(operator.mul, index, self.chunk))
        left = map(operator.sub, self.shape, offsets)
        return offsets, tuple(map(min, self.chunk, left))


def chunk_name(index: tuple[int, ...]) -> str:
    return ".".join(map(str, index)) or "0"


def has_arrays(root: Path) -> bool:
    return next(root.glob(f"*/{ARRAY}"), None) is not None


def read_array(path: Path) -> Array:
    """Returns the contents of a .zarray.

    Raises SourceError if it is damaged, or if its chunks are not plain bytes.
    """
    found = read_json(path, 1 << 20)
    try:
        shape, chunk = (tuple(found[name]) for name in ("shape", "chunks"))
        stated = {name: found[name] for name in PLAIN}
        code, separator = found["dtype"], found.get("dimension_separator", ".")
    except (KeyError, TypeError) as e:
        raise SourceError(
            f"{path}: is not the description of a zarr array: {e!r}; copy it again"
        ) from e
    if len(shape) != len(chunk) or not all(map(possible, (shape, chunk))) or 0 in (*shape, *chunk):
        raise SourceError(f"{path}: has shape {list(shape)} and chunks {list(chunk)}")
    stated["dimension_separator"] = separator
    other = [f"{k} {v}" for k, v in stated.items() if v != {**PLAIN, "dimension_separator": "."}[k]]
    if other:
        raise SourceError(
            f"{path}: has {', '.join(other)}; mckpt reads arrays as Megatron-Core writes them:"
            " version 2, without compressor and filters, in C order. Write it again so, for example"
            " with tensorstore (driver zarr, compressor null)"
        )
    if not isinstance(code, str) or code not in DTYPES:
        raise SourceError(f"{path}: dtype {code!r} is not one of {', '.join(DTYPES)}")
    return Array(DTYPES[code], shape, chunk)


class ZarrDirectory(Chunked):
    """The arrays and objects of a directory, and the places of the chunks."""

    def __init__(self, root: Path) -> None:
        self.arrays: dict[str, Array] = {}
        self.sizes: dict[str, int] = {}  # of the files, in bytes
        self.root = root
        tensors: dict[str, Any] = {}
        objects: list[str] = []
        items: dict[Any, tuple[str, int, int]] = {}
        problems: list[str] = []
        folders = list(self._folders())
        self.notes = wrapping(folder for folder, _ in folders)
        for folder, names in folders:
            key = unwrapped(folder)
            if ARRAY in names:
                array = self.arrays[key] = read_array(root / folder / ARRAY)
                chunks = self._chunks(folder, array, names, problems)
                tensors[key] = (array.dtype, array.shape, [place for place, _ in chunks])
                nbytes = math.prod(array.chunk) * itemsize(array.dtype)
                for (offsets, _), name in chunks:
                    items[key, offsets] = (f"{folder}/{name}", 0, nbytes)
            self.sizes |= {f"{folder}/{name}": size for name, size in names.items()}
            for name in sorted(names):
                if name.startswith(OBJECT) and name.endswith(".pt"):
                    number = f"{key}/{name.removesuffix('.pt')}"
                    objects.append(number)
                    items[number, None] = (f"{folder}/{name}", 0, names[name])
        if problems:
            raise SourceError.of(
                f"{root}: chunks of its arrays are missing. Megatron-Core writes each of them, so"
                " none of them stands for a fill value; copy the checkpoint again:",
                problems,
            )
        super().__init__(root, Metadata(tensors, objects, items, {}))

    def _folders(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yields the name of each directory, with the names and sizes of the files in it."""
        try:
            for folder in sorted(os.scandir(self.root), key=lambda entry: entry.name):
                if folder.is_dir() and not folder.name.endswith(LOCKS):
                    with os.scandir(folder.path) as inner:
                        files = {e.name: e.stat().st_size for e in inner if e.is_file()}
                    yield folder.name, files
        except OSError as e:
            raise unreadable(e.filename or self.root, e) from e

    @staticmethod
    def _chunks(
        folder: str, array: Array, names: dict[str, int], problems: list[str]
    ) -> list[tuple[Chunk, str]]:
        """Returns the offsets and sizes of each chunk of an array, and the name of its file.

        What is missing, or lies outside of the array, becomes one of `problems`.
        """
        found = ((array.index_of(name), name) for name in names if name[:1].isdigit())
        chunks = sorted((index, name) for index, name in found if index is not None)
        # A damaged shape may want 2**59 chunks, so they are counted and not listed.
        total = math.prod(array.grid)
        if absent := total - len(chunks):
            expected = (np.unravel_index(number, array.grid) for number in range(total))
            # strict=False, because the search ends at the first chunk that is absent
            first = next(
                tuple(map(int, index))
                for index, (other, _) in zip(expected, [*chunks, (None, "")], strict=False)
                if index != other
            )
            more = f" and {absent - 1:,} more" if absent > 1 else ""
            problems.append(f"{folder}/{chunk_name(first)}{more}, of {total:,} chunks")
        known = {name for _, name in chunks}
        other = [n for n in sorted(names) if n.replace(".", "").isdigit() and n not in known]
        if other:
            problems.append(
                f"{folder}/{other[0]} is outside of the array, which is {list(array.shape)} in"
                f" chunks of {list(array.chunk)}"
            )
        return [(array.box(index), name) for index, name in chunks]

    def object(self, key: str) -> tuple[Any, Any]:
        """Returns the value of an object in a list, as `torch_dist` stores it, and the places of
        its storages.
        """
        value, data = self.read(str(self.root / self.metadata.items[key, None][0]))
        return [value], data

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        """Returns the chunks, the records and tensors of all objects, and of the files `beside`."""
        items = list(beside)
        for (key, offsets), (file, _, nbytes) in self.metadata.items.items():
            path = str(self.root / file)
            if offsets is None:
                items.append(Item(path, key))
            else:
                wrong = self._wrong_size(file, nbytes)
                problems += wrong
                if not wrong:
                    yield Span(f"{key} at {list(offsets)}", path, 0, nbytes, self.arrays[key].dtype)
        yield from torch_spans.spans(items, problems)

    def _wrong_size(self, file: str, nbytes: int) -> list[str]:
        """Returns the problem of a chunk's file that has another size."""
        size = self.sizes[file]
        return [] if size == nbytes else [f"{file} has {size:,} bytes, and should have {nbytes:,}"]

    def check_sizes(self) -> None:
        """Raises SourceError for chunks whose file has another size."""
        wrong = [
            text
            for (_, offsets), (file, _, nbytes) in self.metadata.items.items()
            if offsets is not None
            for text in self._wrong_size(file, nbytes)
        ]
        if wrong:
            raise SourceError.of(
                f"{self.root}: chunks are truncated, or not of this checkpoint; copy them again:",
                wrong,
            )

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the strides of a chunk at the end of an array, which its elements do not fill."""
        chunk = self.arrays[key].chunk
        return None if sizes == chunk else row_major(chunk)
