"""The stored buffers of one or many files, as the headers of the files describe them."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from mckpt.containers import safe_pickle
from mckpt.lazy import numpy as np
from mckpt.values import dtypes


class Entry(NamedTuple):
    """One stored buffer."""

    dtype: str
    shape: tuple[int, ...]
    file: int  # number of its file
    at: int  # offset of its first byte in the file
    strides: tuple[int, ...] | None = None  # elements; None if it is dense


class Span(NamedTuple):
    """The bytes of one tensor or record, for a check of the whole file."""

    name: str
    path: str
    at: int  # offset of the first byte in the file
    nbytes: int
    dtype: str = ""  # "": a record, whose values are not looked at
    crc: int | None = None  # the crc32 that the file states for these bytes


class Kind(NamedTuple):
    """The dtype, shape and strides that many buffers share."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # elements; None if they are dense


class Columns(NamedTuple):
    """The kinds, files and offsets of buffers, as three parallel arrays."""

    kind: array[int]  # index into `Entries.kinds`, 4 bytes each
    file: array[int]  # number of the file, 4 bytes each
    at: array[int]  # offset of the first byte in the file, 8 bytes each


class Entries(Mapping[str, Entry]):
    """Buffers by key. They are stored in columns, since there may be 10**5 of them.

    `kind`, `file` and `at` are the columns as numpy arrays, made on first use. If a key occurs
    twice, the last one counts.
    """

    def __init__(self, names: list[str], kinds: list[Kind], columns: Columns) -> None:
        self.names, self.kinds, self.columns = names, kinds, columns

    @cached_property
    def kind(self) -> np.ndarray:
        return np.frombuffer(self.columns.kind, "i4")

    @cached_property
    def file(self) -> np.ndarray:
        return np.frombuffer(self.columns.file, "i4")

    @cached_property
    def at(self) -> np.ndarray:
        return np.frombuffer(self.columns.at, "i8")

    @cached_property
    def _row(self) -> dict[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]]) -> Entries:
        """Makes the columns from (key, entry) pairs."""
        number: defaultdict[Kind, int] = defaultdict(itertools.count().__next__)
        rows = [
            (key, number[Kind(e.dtype, e.shape, e.strides)], e.file, e.at) for key, e in entries
        ]
        names, kind, file, at = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            list(names), list(number), Columns(array("i", kind), array("i", file), array("q", at))
        )

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Returns the row of each key, [keys]; -1 for a key that is missing."""
        return np.fromiter(map(self._row.get, keys, itertools.repeat(-1)), "i8")

    def are(self, rows: np.ndarray, wanted: list[bool]) -> np.ndarray:
        """Returns a mask of the rows that are not -1 and whose kind is wanted.

        `wanted` is parallel to `kinds`.
        """
        out: np.ndarray = rows >= 0
        out[out] = np.array(wanted, bool)[self.kind[rows[out]]]
        return out

    def __getitem__(self, key: str) -> Entry:
        return self.entry(self._row[key])

    def entry(self, row: int) -> Entry:
        """Returns the buffer in a row."""
        kind, file, at = (column[row] for column in self.columns)
        dtype, shape, strides = self.kinds[kind]
        return Entry(dtype, shape, file, at, strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def entry_of(view: safe_pickle.TensorView, data: dict[str, tuple[int, int]], file: int) -> Entry:
    """Returns the entry of a tensor in file number `file`, written by torch.save.

    data: storage key -> (offset in the file, bytes).
    """
    dense = view.strides == safe_pickle.contiguous(view.shape) or math.prod(view.shape) <= 1
    at = data[view.storage][0] + view.offset * dtypes.itemsize(view.dtype)
    return Entry(view.dtype, view.shape, file, at, None if dense else view.strides)
