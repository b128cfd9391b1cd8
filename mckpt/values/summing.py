"""Weighted sums of the tensors of several checkpoints: computes the average of iterations.

    total = 0                                   -0 for a single term, which keeps its sign then
    total = fma(coefficient, value, total)      for each input, in the order of the inputs

The values and the coefficients are float32, and so is the total. A fused multiply-add has one
rounding, so these are the bits of torch's `total.add_(value, alpha=coefficient)` on processors that
have such an instruction. The total is rounded once more, to the dtype of the target.

The input that is copied is the base; the others are read for each part of it.
"""

from __future__ import annotations

from typing import NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.adding import CHUNK, WIDTH, Factor, Lengths, Read, lines

BASE = -1  # the file of the term that stands for the base
# the bits of a float64 that a float32 does not have, and those of a value in the middle of two
LOST, MIDDLE = (1 << 29) - 1, 1 << 28
BLOCK = 8 << 10  # elements; float64 values of more than 128 KiB get fresh pages each time
NORMAL = 2.0**-126  # the smallest float32 of full precision; below it, they are 2**-149 apart


class Term(NamedTuple):
    """A part of one input, from element (row, column) of the tensor on."""

    part: Factor
    coefficient: float
    shift: float  # added to each stored element, in float32
    row: int
    column: int
    rows: int
    columns: int


class Sum(NamedTuple):
    """The sum that replaces a part of the base's tensor, and the place of the part in its file.

    Element (i, j) of the part is i * down + j * along elements behind byte `at`, and is element
    (row + i, column + j) of the tensor. `down` is larger than `along`.
    """

    at: int  # bytes
    down: int  # elements
    along: int  # elements
    row: int
    column: int
    terms: tuple[Term, ...]  # in the order of the inputs; that of the base has BASE as its file

    @property
    def files(self) -> set[int]:
        """The numbers of the files of the other inputs."""
        return {term.part.file for term in self.terms} - {BASE}

    def fill(
        self,
        base: np.ndarray,
        out: np.ndarray,
        place: tuple[int, int, int],
        read: Read,
        lengths: Lengths,
        offset: float,
    ) -> None:
        """Does what `average` does."""
        average(self, base, out, *place, read, offset)

    def words(self) -> list[int]:
        """Returns the numbers of `of`, [(1 + terms) * WIDTH]."""
        head = [self.at, self.down, self.along, self.row, self.column, len(self.terms)]
        words = head + [0] * (WIDTH - len(head))
        for part, *numbers, row, column, rows, columns in self.terms:
            bits = np.array(numbers, "f8").view("i8").tolist()
            one = [*part, *bits, row, column, rows, columns]
            words += one + [0] * (WIDTH - len(one))
        return words

    @classmethod
    def of(cls, words: np.ndarray) -> Sum:
        """Returns the sum of its numbers, which start at the first row of [rows, WIDTH]."""
        at, down, along, row, column, count = words[0, :6].tolist()
        terms = (
            Term(Factor(*one[:5]), *np.array(one[5:7], "i8").view("f8").tolist(), *one[7:11])
            for one in words[1 : 1 + count].tolist()
        )
        return cls(at, down, along, row, column, tuple(terms))


def average(
    of: Sum,
    base: np.ndarray,
    out: np.ndarray,
    at: int,
    pitch: int,
    step: int,
    read: Read,
    offset: float = 0.0,
) -> None:
    """Fills `out` [m, n], of any float dtype, with the sums of the inputs.

    offset: added to the sums, if they are stored as the base is; they are if it is 0.
    base[i, j] is the base's element at byte at + i * pitch + j * step of its file.
    """
    item = base.itemsize
    numbers = (at - of.at) // item, pitch // item, step // item
    turned, row, down, column, along = lines(of, base.shape, *numbers)
    if turned:
        base, out = base.T, out.T
    m, n = base.shape
    offset -= sum(term.shift for term in of.terms if term.part.file == BASE)
    width = max(1, min(n, CHUNK))
    height = max(1, min(m, CHUNK // width))
    for top in range(0, m, height):
        for left in range(0, n, width):
            part = slice(top, min(m, top + height)), slice(left, min(n, left + width))
            values = base[part]
            total = np.full(values.shape, 0.0 if len(of.terms) > 1 else -0.0, "f4")
            for number, term in enumerate(of.terms):
                first = number == 0
                if term.part.file == BASE:
                    own = shifted(np.asarray(values, "f4"), term.shift)
                    add(total, own, term.coefficient, first)
                    continue
                rows = within(row + top * down, down, values.shape[0], term.row, term.rows)
                columns = within(
                    column + left * along, along, values.shape[1], term.column, term.columns
                )
                if rows and columns:
                    found = term.part.block(
                        *(rows.first - term.row, rows.extent),
                        *(columns.first - term.column, columns.extent),
                        read,
                    )
                    here = total[rows.there, columns.there]
                    other = shifted(found[::down, ::along], term.shift)
                    add(here, other, term.coefficient, first)
            if offset:
                total += np.float32(offset)
            np.copyto(out[part], total, casting="unsafe")


def shifted(values: np.ndarray, shift: float) -> np.ndarray:
    return values + np.float32(shift) if shift else values


class _Span(NamedTuple):
    """Some of the lines of a part that lie in a term."""

    there: slice  # in the part
    first: int  # line of the tensor
    extent: int  # lines of the tensor from the first to the last


def within(start: int, step: int, count: int, low: int, num: int) -> _Span | None:
    """Returns those of the lines start, start + step, ... that are in low .. low + num."""
    first = max(0, -(-(low - start) // step))
    end = min(count, -(-(low + num - start) // step))
    if first >= end:
        return None
    return _Span(slice(first, end), start + first * step, (end - first - 1) * step + 1)


def add(total: np.ndarray, values: np.ndarray, coefficient: float, first: bool = False) -> None:
    """Adds values times a coefficient to the total [m, n], all in float32, with one rounding.

    first: the total is zero.
    """
    m, n = total.shape
    width = min(n, BLOCK) or 1
    height = BLOCK // width
    for top in range(0, m, height):
        for left in range(0, n, width):
            part = slice(top, top + height), slice(left, left + width)
            here = total[part]
            fused = _fused(here.ravel(), values[part].ravel(), coefficient, first)
            total[part] = fused.reshape(here.shape)


def _fused(total: np.ndarray, values: np.ndarray, coefficient: float, first: bool) -> np.ndarray:
    """Returns fma(coefficient, values, total) of flat arrays.

    The product of two float32 is exact in float64. Its sum with a third is rounded to float64 and
    then to float32, which differs from one rounding only if the first result lies in the middle of
    two float32: there, what the first rounding lost decides. One in 80 sums of bfloat16 does.
    """
    product = np.multiply(values, np.float64(coefficient), dtype="f8")
    wide = product + total
    out = wide.astype("f4")
    if first:  # nothing was lost
        return out
    middle = (wide.view("i8") & LOST) == MIDDLE
    at = np.flatnonzero(middle | (np.abs(out) <= NORMAL))
    if not at.size:
        return out
    tied, p, t, w = middle[at], product[at], total[at], wide[at]
    if (small := np.abs(w) < NORMAL).any():
        scaled = w[small] * 2.0**149
        tied[small] = scaled - np.floor(scaled) == 0.5
    back = w - t
    lost = (t - (w - back)) + (p - back)
    tied &= lost != 0
    if tied.any():
        w[tied] = np.nextafter(w[tied], np.copysign(np.inf, lost[tied]))
        out[at] = w
    return out
