"""Weights with a low-rank adapter (LoRA): computes the sum of a weight and the adapter's product.

    value of (r, c) = weight[r, c] + scale * sum over k of left[r, k] * right[k, c]

The factors are converted to float32, `scale` multiplies `left`, and the product is added to the
weight in float32 (float64 for a weight of float64). The sum is rounded once, to the dtype of the
target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.dtypes import bfloat16_bits, itemsize, numpy_dtype
from mckpt.values.quantisation import Grid

# elements of each array that is in use at a time: with their float32 values they stay in L2, and
# all of them take no more memory than quantisation.scratch counts for a tile
CHUNK = 64 << 10
# one product takes ROWS rows of a table with WIDTH columns, which is that of the grids (geometry/
# join.py)
ROWS, WIDTH = 2, len(Grid._fields)
FACTORS = ("float32", "bfloat16", "float16", "float64")  # the dtypes that a factor can have

Read = Callable[[int, int, int], Any]  # (file, offset, nbytes) -> a buffer of those bytes


class Factor(NamedTuple):
    """A matrix in a file: element (i, j) is i * down + j * along elements behind byte `at`."""

    file: int
    at: int  # bytes
    down: int  # elements
    along: int  # elements
    dtype: int  # an index into FACTORS

    @property
    def turned(self) -> Factor:
        """The transpose."""
        return self._replace(down=self.along, along=self.down)

    def block(self, row: int, rows: int, column: int, columns: int, read: Read) -> np.ndarray:
        """Returns [rows, columns] of the matrix from (row, column) on, in float32."""
        dtype, wide = numpy_dtype(FACTORS[self.dtype]), itemsize(FACTORS[self.dtype])
        if self.down < self.along:
            return self.turned.block(column, columns, row, rows, read).T
        out = np.empty((rows, columns), "f4")
        span = (columns - 1) * self.along + 1
        near = self.down < 2 * span  # then the bytes between the rows are few
        step = rows if near else 1
        for i in range(0, rows, step):
            first = self.at + ((row + i) * self.down + column * self.along) * wide
            raw = read(self.file, first, ((step - 1) * self.down + span) * wide)
            out[i : i + step] = np.lib.stride_tricks.as_strided(
                np.frombuffer(raw, dtype),
                (step, columns),
                (self.down * wide, self.along * wide),
                writeable=False,
            )
        return out


class Product(NamedTuple):
    """The product that is added to a part of a weight, and the place of the part in its file.

    Element (i, j) of the part is i * down + j * along elements behind byte `at`, and is element
    (row + i, column + j) of the product. `down` is larger than `along`.
    """

    at: int  # bytes
    down: int  # elements
    along: int  # elements
    row: int
    column: int
    rank: int  # columns of `left`, rows of `right`
    scale: float
    left: Factor
    right: Factor

    def words(self) -> list[int]:
        """Returns the numbers of `of`, [ROWS * WIDTH]."""
        place = [self.at, self.down, self.along, self.row, self.column, self.rank]
        words = [*place, int(np.float64(self.scale).view("i8")), *self.left, *self.right]
        return words + [0] * (ROWS * WIDTH - len(words))

    @classmethod
    def of(cls, words: np.ndarray) -> Product:
        """Returns the product of its numbers, [ROWS, WIDTH]."""
        at, down, along, row, column, rank, scale, *factors = words.ravel()[:17].tolist()
        value = float(np.int64(scale).view("f8"))
        left, right = Factor(*factors[:5]), Factor(*factors[5:])
        return cls(at, down, along, row, column, rank, value, left, right)


def add(
    product: Product,
    weights: np.ndarray,
    out: np.ndarray,
    at: int,
    pitch: int,
    step: int,
    read: Read,
) -> None:
    """Fills `out` [m, n], of any float dtype, with the sums of `weights` [m, n] and the product.

    weights[i, j] is the element at byte at + i * pitch + j * step of its file. One axis goes along
    the product's rows, the other down its columns.
    """
    item = weights.itemsize
    start, pitch, step = (at - product.at) // item, pitch // item, step // item
    m, n = weights.shape
    if (n > 1 and step >= product.down) or (n == 1 and m > 1 and pitch < product.down):
        weights, out, pitch, step, m, n = weights.T, out.T, step, pitch, n, m
    down = max(1, pitch // product.down) if m > 1 else 1
    along = max(1, step // product.along) if n > 1 else 1
    row, column = start // product.down, start % product.down // product.along
    row, column, rank = row + product.row, column + product.column, product.rank
    wide = "f8" if 8 in (item, out.itemsize) else "f4"
    for cols in range(0, n, width := max(1, min(n, CHUNK // rank))):
        num = min(width, n - cols)
        right = product.right.block(0, rank, column + cols * along, (num - 1) * along + 1, read)
        right = np.ascontiguousarray(right[:, ::along])
        height = max(1, CHUNK // max(num, rank))
        for rows in range(0, m, height):
            count = min(height, m - rows)
            first = row + rows * down
            left = product.left.block(first, (count - 1) * down + 1, 0, rank, read)[::down]
            sums = (left * np.float32(product.scale)) @ right
            part = slice(rows, rows + count), slice(cols, cols + num)
            _add_and_round(weights[part], sums.astype(wide, copy=False), out[part])


def _add_and_round(weights: np.ndarray, sums: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` with the sums of `weights` and `sums`, which is overwritten.

    ml_dtypes takes 3 ns for an element of bfloat16, and this takes 1.
    """
    half = "bfloat16" == weights.dtype == out.dtype and sums.dtype == np.float32
    if not half:
        sums += weights
        np.copyto(out, sums, casting="unsafe")
        return
    sums += np.left_shift(weights.view("u2"), 16, dtype="u4").view("f4")
    if np.isnan(sums.sum()):  # NaN, or infinities of both signs
        np.copyto(out, sums, casting="unsafe")
    else:
        out.view("u2")[...] = bfloat16_bits(sums.view("u4"))
