"""Quantises rows of one weight from source files to a target file, through one thread's buffer.

The scale of a block depends on all of its elements, so one thread takes whole bands of blocks, cell
by cell. A cell is a band, or as many of its blocks as the buffer takes:

    copies that fill the band --> cell [128, n * 128] float32 --> codes, and n scales
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mckpt.errors import UsageError
from mckpt.execute.clusters import GAP, Copy
from mckpt.geometry.join import Cast
from mckpt.lazy import numpy as np
from mckpt.values import quantisation
from mckpt.values.dtypes import numpy_dtype
from mckpt.values.quantisation import Grid

# Bytes for each element of a cell: its value, a temporary value, and the bytes that are read.
VALUE, READ, TEMPORARY = 4, 8, 4
CELL = 4 << 20  # bytes of one cell, unless its band has one block only

Read = Callable[[int, memoryview, int], None]  # (file, view, offset)


class NotFinite(Exception):
    """A block has an element that is infinite or not a number."""


class Cell(NamedTuple):
    """Rows and columns of a weight, in elements."""

    row: int
    rows: int
    column: int
    columns: int


class _Part(NamedTuple):
    """The elements of one copy that lie in a cell, as a box of the source and of the cell."""

    at: int  # byte of the first element in the source
    shape: tuple[int, int]
    strides: tuple[int, int]  # bytes, in the source
    place: tuple[slice, slice]  # in the cell


def cells(grid: Grid, row: int, rows: int, memory: int) -> list[Cell]:
    """Returns the cells of one band of a weight, for a buffer of `memory` bytes.

    Raises UsageError if the buffer is too small for one block.
    """
    most = min(memory, CELL) // (rows * (VALUE + READ + TEMPORARY))
    columns = max(most // grid.columns, 1) * grid.columns
    if most < min(grid.columns, grid.width):
        raise UsageError(
            f"--max-memory leaves {memory} bytes a thread, too few for one block of"
            f" {rows} x {grid.columns} elements; raise it, or lower --threads"
        )
    return [
        Cell(row, rows, at, min(columns, grid.width - at)) for at in range(0, grid.width, columns)
    ]


def fill(
    copies: list[Copy],
    casts: Sequence[Cast],
    grid: Grid,
    cell: Cell,
    values: np.ndarray,
    read: Read,
    memory: memoryview,
) -> None:
    """Fills `values` [rows, columns], of float32, with a cell's elements.

    memory: receives the bytes that are read.
    """
    for c in copies:
        part = _part(c, grid, cell)
        if part is not None:
            dtype = numpy_dtype(casts[c.cast].source)
            _fill(part, c.src_file, dtype, values[part.place], read, memory)


def _fill(
    part: _Part, file: int, dtype: np.dtype, out: np.ndarray, read: Read, memory: memoryview
) -> None:
    """Reads a part in spans along the axis whose elements are closer in the source."""
    at, (rows, run), (pitch, step) = part.at, part.shape, part.strides
    if (run == 1 and rows > 1) or (rows > 1 and run > 1 and step > pitch):
        out, rows, run, pitch, step = out.T, run, rows, step, pitch
    width = (run - 1) * step + dtype.itemsize if run > 1 else dtype.itemsize
    if width > len(memory):
        half = run // 2
        for first, last in ((0, half), (half, run)):
            some = part._replace(
                at=at + first * step, shape=(rows, last - first), strides=(pitch, step)
            )
            _fill(some, file, dtype, out[:, first:last], read, memory)
        return
    near = rows > 1 and width <= pitch <= width + GAP
    apart = pitch if near else -(-width // 8) * 8
    count = max(1, (len(memory) - width) // apart + 1) if rows > 1 else 1
    for i in range(0, rows, count):
        num = min(count, rows - i)
        if near:
            read(file, memory[: (num - 1) * pitch + width], at + i * pitch)
        else:
            for n in range(num):
                read(file, memory[n * apart : n * apart + width], at + (i + n) * pitch)
        values = np.ndarray((num, run), dtype, memory, 0, (apart, step))
        with np.errstate(all="ignore"):
            np.copyto(out[i : i + num], values, casting="unsafe")


def _part(c: Copy, grid: Grid, cell: Cell) -> _Part | None:
    """Returns the elements of a copy that lie in a cell, None if there are none."""
    row, column = divmod(c.dst_at - grid.weight_at, grid.width)
    n, down, src_down = c.rows, c.dst_pitch, c.src_pitch
    m, along, src_along = c.run, c.dst_step, c.src_step
    if (m > 1 and along % grid.width == 0) or (n > 1 and down % grid.width):  # the run goes down
        n, down, src_down, m, along, src_along = m, along, src_along, n, down, src_down
    down = max(1, down // grid.width) if n > 1 else 1
    along = along if m > 1 else 1
    i, i_end = _within(row, down, n, cell.row, cell.rows)
    j, j_end = _within(column, along, m, cell.column, cell.columns)
    if i >= i_end or j >= j_end:
        return None
    first, left = row + i * down - cell.row, column + j * along - cell.column
    place = (
        slice(first, first + (i_end - i - 1) * down + 1, down),
        slice(left, left + (j_end - j - 1) * along + 1, along),
    )
    at = c.src_at + i * src_down + j * src_along
    return _Part(at, (i_end - i, j_end - j), (src_down, src_along), place)


def _within(start: int, step: int, num: int, first: int, length: int) -> tuple[int, int]:
    """Returns the k in [0, num) for which start + k * step is in [first, first + length)."""
    return max(0, -(-(first - start) // step)), min(num, -(-(first + length - start) // step))


def quantise(grid: Grid, values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Fills `out` with the codes of `values` [rows, columns], and returns the scale of each block.

    `values`, of float32, is overwritten. A scale is the largest absolute value of its block,
    divided by 448; a code is the value divided by the scale, limited to +-448 and rounded to even.
    DeepSeek's kernels compute the same. A block of zeros has the scale 1. All is computed in
    float32. Raises NotFinite.
    """
    at = np.arange(0, values.shape[1], grid.columns)
    largest = np.maximum.reduceat(np.maximum(values.max(0), -values.min(0)), at)
    if not np.isfinite(largest).all():
        raise NotFinite
    scales = largest / np.float32(quantisation.LARGEST)
    scales[scales == 0] = 1  # also of a block whose scale would be too small for float32
    values /= np.repeat(scales, grid.columns)[: values.shape[1]]
    np.clip(values, -quantisation.LARGEST, quantisation.LARGEST, out=values)
    out[...] = values.astype(numpy_dtype(quantisation.CODES))
    return scales
