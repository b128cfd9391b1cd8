"""The tensors of a Hugging Face directory that a checkpoint would become, read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mckpt import formats
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.tensor import LazyTensor
from mckpt.conversion.target import TargetOptions
from mckpt.conversion.to_hf import export_of
from mckpt.errors import UsageError
from mckpt.execute.mover import Overflow
from mckpt.execute.reading import read, within
from mckpt.formats.shards import Row, tensors_of
from mckpt.geometry.join import Joined, join
from mckpt.values.dtypes import itemsize

FILE = 44  # bits of an offset in a file, which has less than 16 TiB


class HfTensor(LazyTensor):
    """One tensor under its name in the Hugging Face directory, or rows of it. `tensor[2]` and
    `tensor[2:5]` choose along the first axis and read nothing.
    """

    def __init__(
        self, of: HfTensors, row: Row, rows: range | None = None, single: bool = False
    ) -> None:
        self._of, self._row, self._single = of, row, single
        self._rows = range(row.shape[0] if row.shape else 1) if rows is None else rows
        self.name, self.dtype = row.key, row.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the number of elements along each axis."""
        first = () if self._single or not self._row.shape else (len(self._rows),)
        return (*first, *self._row.shape[1:])

    def __getitem__(self, index: int | slice) -> HfTensor:
        """Returns one row, or the rows of a slice of step 1."""
        if not self.shape or self._single:
            raise IndexError(f"{self.name}: rows are chosen once, along the first axis")
        if isinstance(index, slice):
            rows = self._rows[index]
            if rows.step != 1:
                raise IndexError(f"{self.name}: slices have step 1 here, not {rows.step}")
            return HfTensor(self._of, self._row, rows)
        try:
            at = self._rows[index]
        except IndexError:
            raise IndexError(
                f"{self.name}: index {index} is outside of the {len(self._rows)} of axis 0"
            ) from None
        return HfTensor(self._of, self._row, range(at, at + 1), single=True)

    def _read(self, buffer: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(self.nbytes, "u1") if buffer is None else buffer.view("u1")[: self.nbytes]
        if len(out):
            width = self._row.nbytes // (self._row.shape[0] if self._row.shape else 1)
            self._of.read(self.name, self._rows.start * width, out.data)
        return out


class HfTensors(Mapping[str, HfTensor]):
    """The tensors of the Hugging Face directory that a conversion would write, by name, in the
    order of its files. Only headers are read before the elements of a tensor are.
    """

    def __init__(self, source: Checkpoint) -> None:
        """Raises the errors of a conversion to Hugging Face, such as MappingError for a model that
        no family computes.
        """
        self._given = source
        export = export_of(source.borrowing(), TargetOptions(format=formats.HUGGING_FACE))
        self.config: dict[str, Any] = json.loads(export.config)
        self._source = export.source
        self._layout, outputs = formats.get(formats.HUGGING_FACE).lay_out(export.request)
        self._rows = {
            row.key: (row, number, at)
            for number, output in enumerate(outputs[: len(self._layout.files)])
            for row, at in tensors_of(output)
        }

    @cached_property
    def _joined(self) -> tuple[Joined, np.ndarray, np.ndarray]:
        """The copies that fill all tensors, these copies in the order of the target, and the places
        at which they start: the number of the file, shifted by FILE, and the byte.
        """
        joined = join(self._source.layout, self._layout)
        at = (joined.copies["dst_file"].astype("i8") << FILE) + joined.copies["dst_at"]
        order = np.argsort(at)
        return joined, joined.copies[order], at[order]

    def read(self, name: str, skipped: int, out: memoryview) -> None:
        """Reads into `out` the bytes of a tensor behind its first `skipped` bytes."""
        row, file, at = self._rows[name]
        joined, copies, starts = self._joined
        place, start = (file << FILE) + at, at + skipped
        first, last = np.searchsorted(starts, [place, place + row.nbytes])
        copies = copies[first:last]
        if len(out) < row.nbytes:
            copies = within(copies, itemsize(row.dtype), start, start + len(out))
        sources = list(map(str, self._source.layout.files))
        try:
            read(copies, joined.casts, joined.grids, sources, start, out)
        except Overflow as e:
            raise UsageError(f"{joined.name(e.tensor)}: {e.place}") from e

    def __getitem__(self, name: str) -> HfTensor:
        return HfTensor(self, self._rows[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTensors, (self._given,)
