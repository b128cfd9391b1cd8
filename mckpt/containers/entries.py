"""The buffers of a file or of many files, as their headers describe them."""

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
    """One stored buffer: `shape` elements of `dtype` from byte `at` of file number `file`; strides
    in elements, None if dense.
    """

    dtype: str
    shape: tuple[int, ...]
    file: int
    at: int
    strides: tuple[int, ...] | None = None


class Kind(NamedTuple):
    """What buffers may have in common: dtype, shape, and strides if they are not dense."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class Columns(NamedTuple):
    """Of each buffer its kind (index into `Entries.kinds`, 4 bytes), file (4 bytes) and first byte
    (8 bytes).
    """

    kind: array[int]
    file: array[int]
    at: array[int]


class Entries(Mapping[str, Entry]):
    """Buffers by key, in columns: there may be 10**5 of them, so that each must cost little.

    `kind`, `file` and `at` are `columns` as numpy arrays, made when they are asked for. Of a key
    that is there twice, the last counts.
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
        """Columns of (key, entry) pairs."""
        number: defaultdict[Kind, int] = defaultdict(itertools.count().__next__)
        rows = [
            (key, number[Kind(e.dtype, e.shape, e.strides)], e.file, e.at) for key, e in entries
        ]
        names, kind, file, at = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            list(names), list(number), Columns(array("i", kind), array("i", file), array("q", at))
        )

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """The row of each key, [keys]; -1 if it is not there."""
        return np.fromiter(map(self._row.get, keys, itertools.repeat(-1)), "i8")

    def are(self, rows: np.ndarray, wanted: list[bool]) -> np.ndarray:
        """Which of these rows are there, and of a kind that is `wanted`, which is parallel to
        `kinds`.
        """
        out: np.ndarray = rows >= 0
        out[out] = np.array(wanted, bool)[self.kind[rows[out]]]
        return out

    def __getitem__(self, key: str) -> Entry:
        return self.entry(self._row[key])

    def entry(self, row: int) -> Entry:
        """The buffer of a row."""
        kind, file, at = (column[row] for column in self.columns)
        dtype, shape, strides = self.kinds[kind]
        return Entry(dtype, shape, file, at, strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def entry_of(view: safe_pickle.TensorView, data: dict[str, tuple[int, int]], file: int) -> Entry:
    """A tensor of a torch.save file as an entry."""
    dense = view.strides == safe_pickle.contiguous(view.shape) or math.prod(view.shape) <= 1
    at = data[view.storage][0] + view.offset * dtypes.itemsize(view.dtype)
    return Entry(view.dtype, view.shape, file, at, None if dense else view.strides)
