"""Weights with a low-rank adapter (LoRA): computes the sum of a weight and the adapter's product.

    value of (r, c) = weight[r, c] + scale * sum over k of left[r, k] * right[k, c]

The product is computed in float64 and rounded to float32, so its bits depend neither on the
processor nor on the zeros that a block form adds. It is added to the weight in float32 (float64 for
a weight of float64). The sum is rounded once, to the dtype of the target.

With DoRA (https://huggingface.co/papers/2402.09353), a vector of magnitudes gives each row of the
sums its length:

    value of (r, c) = sum of (r, c) * (magnitude[r] / length of row r of the sums)

So one element depends on a whole row of the weight, whose parts may lie in several files. They are
read and summed again for the lengths, once for each block of rows: `Lengths` keeps the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mckpt.lazy import numpy as np
from mckpt.values.dtypes import NoValue, bfloat16_bits, itemsize, numpy_dtype, sum_dtype
from mckpt.values.quantisation import Grid
from mckpt.values.shared import Shared

# elements of each array that is in use at a time: with their float32 values they stay in L2, and
# all of them take no more memory than quantisation.scratch counts for a tile
CHUNK = 64 << 10
# one product takes ROWS rows of a table with WIDTH columns, which is that of the grids (geometry/
# join.py), and one row more for each of its segments
ROWS, WIDTH = 2, len(Grid._fields)
# rows whose lengths are computed together: few enough that threads share the work, and so many that
# the factor `right` is read rarely
BLOCK = 512
KEPT = 4 << 20  # lengths that are kept, of 4 bytes
# which axis of a product has magnitudes: none, or a magnitude for each row, or for each column
NO_AXIS, ROW_WISE, COLUMN_WISE = range(3)
FACTORS = ("float32", "bfloat16", "float16", "float64")  # the dtypes that a factor can have

# (file, offset, nbytes) -> those bytes, until the next call; a fourth argument is memory for them
Read = Callable[..., Any]


class Factor(NamedTuple):
    """A matrix in a file: element (i, j) is i * down + j * along elements behind byte `at`."""

    file: int
    at: int  # bytes
    down: int  # elements
    along: int  # elements
    dtype: int  # an index into FACTORS

    @property
    def turned(self) -> Factor:
        return self._replace(down=self.along, along=self.down)

    def block(
        self,
        row: int,
        rows: int,
        column: int,
        columns: int,
        read: Read,
        kind: str | None = "f4",
        own: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns [rows, columns] of the matrix from (row, column) on, in the dtype `kind`.
        None: as stored, in memory that may last until the next call of `read`. They are read into
        `own`, of the same shape and dtype, where they are one range of bytes.
        """
        dtype, wide = numpy_dtype(FACTORS[self.dtype]), itemsize(FACTORS[self.dtype])
        if self.down < self.along:
            return self.turned.block(column, columns, row, rows, read, kind).T
        span = (columns - 1) * self.along + 1
        near = self.down < 2 * span  # then the bytes between the rows are few
        step = rows if near else 1
        strides = self.down * wide, self.along * wide
        one = self.along == 1 and (rows == 1 or self.down == columns)
        if one and own is not None and own.flags.c_contiguous:
            first = self.at + (row * self.down + column) * wide
            read(self.file, first, own.nbytes, own.reshape(-1).view("u1").data)
            return own
        out = np.empty((0 if kind is None and near else rows, columns), kind or dtype)
        for i in range(0, rows, step):
            first = self.at + ((row + i) * self.down + column * self.along) * wide
            raw = read(self.file, first, ((step - 1) * self.down + span) * wide)
            found = np.ndarray((step, columns), dtype, raw, strides=strides)
            if not len(out):
                return found
            out[i : i + step] = found
        return out


class Segment(NamedTuple):
    """A part of a weight with magnitudes, from element (row, column) of the weight on. The weight
    is turned, if necessary, so that each row has a magnitude.
    """

    part: Factor
    row: int
    column: int
    rows: int
    columns: int


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
    axis: int = NO_AXIS  # of the product that has the magnitudes
    magnitudes: Factor = Factor(0, 0, 0, 0, 0)  # [n, 1]
    segments: tuple[Segment, ...] = ()  # the whole weight, if it has magnitudes

    @property
    def files(self) -> set[int]:
        """The numbers of the files that have the factors, and what the lengths of rows need."""
        magnitudes = {self.magnitudes.file} if self.axis != NO_AXIS else set()
        return {self.left.file, self.right.file, *magnitudes, *(s.part.file for s in self.segments)}

    def words(self) -> list[int]:
        """Returns the numbers of `of`, [(ROWS + segments) * WIDTH]."""
        place = [self.at, self.down, self.along, self.row, self.column, self.rank]
        words = [*place, int(np.float64(self.scale).view("i8")), *self.left, *self.right]
        words += [self.axis, *self.magnitudes, len(self.segments)]
        words += [0] * (ROWS * WIDTH - len(words))
        for part, *box in self.segments:
            words += [*part, *box] + [0] * (WIDTH - len(part) - len(box))
        return words

    @classmethod
    def of(cls, words: np.ndarray) -> Product:
        """Returns the product of its numbers, which start at the first row of [rows, WIDTH]."""
        at, down, along, row, column, rank, scale, *more = words[:ROWS].ravel()[:24].tolist()
        left, right, magnitudes = Factor(*more[:5]), Factor(*more[5:10]), Factor(*more[11:16])
        axis, count = more[10], more[16]
        segments = words[ROWS : ROWS + count].tolist()
        return cls(
            at,
            down,
            along,
            row,
            column,
            rank,
            float(np.int64(scale).view("f8")),
            left,
            right,
            axis,
            magnitudes,
            tuple(Segment(Factor(*one[:5]), *one[5:9]) for one in segments),
        )


class _Part(Protocol):
    """A part of a matrix in a file, whose element (i, j) is i * down + j * along elements behind
    its first one, and element (row + i, column + j) of the matrix.
    """

    @property
    def down(self) -> int: ...
    @property
    def along(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def column(self) -> int: ...


def lines(
    part: _Part, shape: tuple[int, ...], start: int, pitch: int, step: int
) -> tuple[bool, int, int, int, int]:
    """Returns where elements [m, n] of a part lie in its matrix: whether n goes down, the first row
    and the distance of rows, the first column and the distance of columns.

    Element (i, j) is start + i * pitch + j * step elements behind the first one of the part.
    """
    m, n = shape
    turned = (n > 1 and step >= part.down) or (n == 1 and m > 1 and pitch < part.down)
    if turned:
        m, n, pitch, step = n, m, step, pitch
    down = max(1, pitch // part.down) if m > 1 else 1
    along = max(1, step // part.along) if n > 1 else 1
    row, column = start // part.down + part.row, start % part.down // part.along + part.column
    return turned, row, down, column, along


class Lengths:
    """Computes the numbers that multiply the rows of sums with magnitudes, and keeps them.

    It belongs to the files of one layout. Several threads can use it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], np.ndarray] = {}
        self._count = 0
        self.shared = Shared()  # what merges need of whole tensors (values/mixing.py)

    def of(self, product: Product, first: int, count: int, read: Read) -> np.ndarray:
        """Returns magnitude / length of `count` rows from `first` on, in float32.

        Raises NoValue for a row of zeros, to which no magnitude can give a length.
        """
        near = product.segments[0].part
        # down the file, lengths are computed for all rows at once
        end = max(s.row + s.rows for s in product.segments)
        block = BLOCK if near.down >= near.along else end
        found = []
        for number in range(first // block, -(-(first + count) // block)):
            key = product.magnitudes.file, product.magnitudes.at, number
            if (one := self._kept.get(key)) is None:
                low, high = number * block, min(end, (number + 1) * block)
                one = _lengths(product, low, high - low, read)
                if self._count > KEPT:
                    self._kept, self._count = {}, 0
                self._kept[key] = one
                self._count += len(one)
            found.append(one)
        skipped = first % block
        return np.concatenate(found)[skipped : skipped + count]


def _lengths(product: Product, first: int, count: int, read: Read) -> np.ndarray:
    """Returns magnitude / length of rows of sums in float32. The squares are added in float64."""
    left, right, rank = product.left, product.right, product.rank
    if product.axis == COLUMN_WISE:
        left, right = right.turned, left.turned
    total = np.zeros(count, "f8")
    for part, row, column, num_rows, num_columns in product.segments:
        low, high = max(first, row), min(first + count, row + num_rows)
        if low >= high:
            continue
        kind = "f8" if itemsize(FACTORS[part.dtype]) == 8 else "f4"
        most = max(1, CHUNK // rank)
        if part.down >= part.along:
            width = min(num_columns, most)
            height = max(1, min(high - low, CHUNK // max(width, rank)))
        else:
            height = min(high - low, most)
            width = max(1, min(num_columns, CHUNK // max(height, rank)))
        for c in range(0, num_columns, width):
            columns = min(width, num_columns - c)
            beside = np.ascontiguousarray(right.block(0, rank, column + c, columns, read, "f8"))
            for r in range(low, high, height):
                rows = min(height, high - r)
                sums = left.block(r, rows, 0, rank, read, "f8") * product.scale @ beside
                weights = part.block(r - row, rows, c, columns, read, kind)
                sums = sums.astype(kind, copy=False) + weights
                at = slice(r - first, r - first + rows)
                total[at] += np.einsum("ij,ij->i", sums, sums, dtype="f8")
    if not total.all():
        axis = "row" if product.axis == ROW_WISE else "column"
        raise NoValue(
            f"{axis} {first + int(np.argmin(total))} of the weight with the adapter's product is"
            " zero, and DoRA divides by its length, so PEFT computes NaN; train the adapter again"
        )
    magnitudes = product.magnitudes.block(first, count, 0, 1, read, "f8")[:, 0]
    return np.asarray(magnitudes / np.sqrt(total), "f4")


def add(
    product: Product,
    weights: np.ndarray,
    out: np.ndarray,
    at: int,
    pitch: int,
    step: int,
    read: Read,
    lengths: Lengths,
) -> None:
    """Fills `out` [m, n], of any float dtype, with the sums of `weights` [m, n] and the product.

    weights[i, j] is the element at byte at + i * pitch + j * step of its file. One axis goes along
    the product's rows, the other down its columns. Raises NoValue.
    """
    item, rank = weights.itemsize, product.rank
    numbers = (at - product.at) // item, pitch // item, step // item
    turned, row, down, column, along = lines(product, weights.shape, *numbers)
    if turned:
        weights, out = weights.T, out.T
    (m, n), wide = weights.shape, sum_dtype(item, out.itemsize)
    times: list[np.ndarray | None] = [None, None]  # of the rows, of the columns
    if product.axis == ROW_WISE:
        times[0] = lengths.of(product, row, (m - 1) * down + 1, read)[::down, None]
    elif product.axis == COLUMN_WISE:
        times[1] = lengths.of(product, column, (n - 1) * along + 1, read)[::along]
    for cols in range(0, n, width := max(1, min(n, CHUNK // rank))):
        num = min(width, n - cols)
        columns = column + cols * along, (num - 1) * along + 1
        right = product.right.block(0, rank, *columns, read, "f8")
        right = np.ascontiguousarray(right[:, ::along])
        height = max(1, CHUNK // max(num, rank))
        for rows in range(0, m, height):
            count = min(height, m - rows)
            first = row + rows * down
            left = product.left.block(first, (count - 1) * down + 1, 0, rank, read, "f8")[::down]
            sums = (left * product.scale @ right).astype(wide, copy=False)
            part = slice(rows, rows + count), slice(cols, cols + num)
            if product.axis == NO_AXIS:
                _add_and_round(weights[part], sums, out[part])
                continue
            sums += weights[part]
            for each, some in zip(times, part, strict=True):
                if each is not None:
                    sums *= each[some]
            np.copyto(out[part], sums, casting="unsafe")


def _add_and_round(weights: np.ndarray, sums: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` with the sums of `weights` and `sums`, which is overwritten.

    ml_dtypes takes 3 ns for an element of bfloat16, and this takes 0.7.
    """
    half = "bfloat16" == weights.dtype == out.dtype and sums.dtype == np.float32
    if not half:
        sums += weights
        np.copyto(out, sums, casting="unsafe")
        return
    bits = weights.view("u2").astype("u4")  # a cast alone, and a shift of u4: both are vectorised
    bits <<= 16
    sums += bits.view("f4")
    if np.isnan(sums.max()):
        np.copyto(out, sums, casting="unsafe")
    else:
        np.copyto(out.view("u2"), bfloat16_bits(sums.view("u4"), bits), casting="unsafe")
