"""Quantises rows of one weight from source files to a target file, through one thread's buffer.

The scale of a block depends on all of its elements, so one thread takes whole bands of blocks, cell
by cell. A cell is a band, or as many of its blocks as the buffer takes:

    copies that fill the band --> cell [128, n * 128] float32 --> codes, and n scales
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mckpt.errors import UsageError
from mckpt.execute.clusters import GAP, Copy
from mckpt.lazy import numpy as np
from mckpt.values import quantisation
from mckpt.values.dtypes import numpy_dtype
from mckpt.values.element import Cast
from mckpt.values.quantisation import Grid

# Bytes for each element of a cell: its value, a temporary value, and the bytes that are read.
VALUE, READ, TEMPORARY = 4, 8, 4
CELL = 4 << 20  # bytes of one cell, unless its band has one block only
INFINITE = 0x7F800000  # the bits of an infinite float32; those of NaN are larger

Read = Callable[[int, memoryview, int], None]  # (file, view, offset)


class NotFinite(Exception):
    """A block has an element that is infinite or not a number."""


class Cell(NamedTuple):
    """Rows and columns of a weight, in elements."""

    row: int
    rows: int
    column: int
    columns: int


class _CellPart(NamedTuple):
    """The elements of one copy that lie in a cell, as a box of the source and of the cell."""

    at: int  # byte of the first element in the source
    shape: tuple[int, int]
    strides: tuple[int, int]  # bytes, in the source
    place: tuple[slice, slice]  # in the cell


def band_rows(grid: Grid, memory: int) -> int:
    """Returns the number of rows to quantise at a time, for a buffer of `memory` bytes: those of a
    block, or as many as fill a cell if a block has one row.
    """
    each = grid.width * (VALUE + READ + TEMPORARY + 1)
    return max(1, min(memory, CELL) // each) if grid.rows == 1 else grid.rows


def block_bytes(grid: Grid, rows: int) -> int:
    """Returns the bytes of a buffer that one block of `rows` rows needs."""
    return rows * min(grid.columns, grid.width) * (VALUE + READ + TEMPORARY)


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
    part: _CellPart, file: int, dtype: np.dtype, out: np.ndarray, read: Read, memory: memoryview
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


def _part(c: Copy, grid: Grid, cell: Cell) -> _CellPart | None:
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
    return _CellPart(at, (i_end - i, j_end - j), (src_down, src_along), place)


def _within(start: int, step: int, num: int, first: int, length: int) -> tuple[int, int]:
    """Returns the k in [0, num) for which start + k * step is in [first, first + length)."""
    return max(0, -(-(first - start) // step)), min(num, -(-(first + length - start) // step))


def quantise(grid: Grid, values: np.ndarray, overall: np.ndarray | None) -> tuple[Any, Any]:
    """Returns the codes of `values` [rows, columns], of float32, as rows of bytes, and the scales
    of their blocks. `values` is overwritten, and all is computed in float32.

    overall: the scale of the whole weight, for an encoding that has one. A code is the value
    divided by its scale, rounded to even and limited to the largest code. Raises NotFinite.

    fp8      the scale of a block is its largest absolute value, divided by 448; 1 for zeros.
             DeepSeek's kernels compute the same.
    mxfp8    the smallest power of two with which no value is beyond 448; 2**-127 for zeros.
             ModelOpt 0.47.0 computes the same (torch/quantization/qtensor/mxfp8_tensor.py).
    nvfp4    the largest absolute value divided by 6, times `overall`, rounded to float8_e4m3fn; the
             divisor of the values is this scale divided by `overall`. compressed-tensors 0.20.0
             computes the same of float32 weights (calculate_qparams, NVFP4PackedCompressor), also
             the scale 0.125 of blocks whose scale would be rounded to zero.
    """
    bits = _largest_bits(values, grid)
    if int(bits.max()) >= INFINITE:
        raise NotFinite
    largest, dtype = bits.view("f4"), quantisation.SCALES[grid.kind]
    top = np.float32(quantisation.LARGEST)
    if overall is not None:
        scales = overall * (largest / np.float32(quantisation.LARGEST_E2M1))
        scales = np.minimum(scales, top).astype(numpy_dtype(dtype))
        scales[scales == 0] = 0.125
        divisors = scales.astype("f4") / overall
    elif dtype == "uint8":
        # the exponent, minus that of 256; one more if the value is beyond 448, which is 1.75 * 256
        powers = np.maximum((bits + 0x1FFFFF >> 23) - 8, 0)
        scales, divisors = powers.astype("u1"), np.ldexp(np.float32(1), powers - 127)
    else:
        scales = divisors = largest / top
        scales[scales == 0] = 1  # also of a block whose scale would be too small for float32
    values /= np.repeat(divisors, grid.columns, axis=1)[:, : values.shape[1]]
    return quantisation.encode(values, grid.encoding.name), scales


def overall_scale(largest: float) -> np.ndarray:
    """Returns the scale [1] of whole nvfp4 weights whose largest absolute value is `largest`, in
    float32: 448 * 6 times its reciprocal, or 1 if that is too large for float32. compressed-tensors
    0.20.0 computes the same (generate_gparam).
    """
    with np.errstate(all="ignore"):
        most = quantisation.LARGEST * quantisation.LARGEST_E2M1
        scale = np.float32(most) * (np.float32(1) / np.array([largest], "f4"))
    return np.where(np.isfinite(scale), scale, np.float32(1))


def _largest_bits(values: np.ndarray, grid: Grid) -> np.ndarray:
    """Returns the largest absolute value of each block, as the bits of a float32. They have the
    order of the values, and integers are compared faster.

    values: of one row of blocks, or of several if a block has one row.
    """
    bits = np.ascontiguousarray(values).view("i4") & 0x7FFFFFFF
    if grid.rows > 1:
        bits = bits.max(0, keepdims=True)
    return np.maximum.reduceat(bits, np.arange(0, bits.shape[1], grid.columns), axis=1)


def largest(values: np.ndarray) -> float:
    """Returns the largest absolute value. Raises NotFinite."""
    found = max(float(values.max()), -float(values.min()))
    if not math.isfinite(found):  # also if one is NaN
        raise NotFinite
    return found
