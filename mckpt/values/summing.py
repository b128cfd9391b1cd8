"""Weighted sums of the tensors of several checkpoints: computes the average of iterations.

    total = 0                                   -0 for a single term, which keeps its sign then
    total = fma(coefficient, value, total)      for each input, in the order of the inputs

The values and the coefficients are float32, and so is the total. A fused multiply-add has one
rounding, so these are the bits of torch's `total.add_(value, alpha=coefficient)` on processors that
have such an instruction. The total is rounded once more, to the dtype of the target.

The input that is copied is the base; the others are read for each part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.adding import CHUNK, FACTORS, WIDTH, Factor, Lengths, Read, lines
from mckpt.values.dtypes import cast
from mckpt.values.shared import Scratch

BASE = -1  # the file of the term that stands for the base
# the bits of a float64 that a float32 does not have, and those of a value in the middle of two
LOST, MIDDLE = (1 << 29) - 1, 1 << 28
BLOCK = 8 << 10  # elements; float64 values of more than 128 KiB get fresh pages each time
LEAST = 2 << 10  # elements that are summed at a time, of any number of inputs
NORMAL = 2.0**-126  # the smallest float32 of full precision; below it, they are 2**-149 apart


class Term(NamedTuple):
    """A part of one input, from element (row, column) of the tensor on."""

    part: Factor
    input: int
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
        for part, number, coefficient, shift, *box in self.terms:
            bits = np.array([coefficient, shift], "f8").view("i8").tolist()
            one = [*part, number, *bits, *box]
            words += one + [0] * (WIDTH - len(one))
        return words

    @classmethod
    def of(cls, words: np.ndarray) -> Sum:
        """Returns the sum of its numbers, which start at the first row of [rows, WIDTH]."""
        at, down, along, row, column, count = words[0, :6].tolist()
        terms = (
            Term(
                Factor(*one[:5]), one[5], *np.array(one[6:8], "i8").view("f8").tolist(), *one[8:12]
            )
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
    coefficients = [c for _, c in sorted({(term.input, term.coefficient) for term in of.terms})]
    inputs = len(coefficients)
    most = max(LEAST, 16 * CHUNK // max(4, inputs))
    width = max(1, min(n, most))
    height = max(1, min(m, most // width))
    others = (FACTORS[term.part.dtype] for term in of.terms if term.part.file != BASE)
    narrow = {base.dtype.name, *others} == {"bfloat16"} and not any(t.shift for t in of.terms)
    kind = "bfloat16" if narrow else "float32"
    rounded = narrow and not offset and out.dtype == base.dtype
    for top in range(0, m, height):
        for left in range(0, n, width):
            part = slice(top, min(m, top + height)), slice(left, min(n, left + width))
            own = base[part]
            values = [*_scratch.of("values", (inputs, *own.shape), kind)]
            for term in of.terms:
                here = values[term.input]
                if term.part.file == BASE:
                    found = own
                    if rounded and own.flags.c_contiguous:
                        values[term.input] = here = own
                else:
                    rows = within(row + top * down, down, own.shape[0], term.row, term.rows)
                    columns = within(
                        column + left * along, along, own.shape[1], term.column, term.columns
                    )
                    if not (rows and columns):
                        continue
                    here = here[rows.there, columns.there]
                    found = term.part.block(
                        *(rows.first - term.row, rows.extent),
                        *(columns.first - term.column, columns.extent),
                        read,
                        None,
                        here if narrow and down == along == 1 else None,
                    )[::down, ::along]
                if not np.may_share_memory(here, found):
                    np.copyto(here, found, casting="unsafe")
                if term.shift:
                    here += np.float32(term.shift)
            flat = [one.reshape(-1) for one in values]
            total = total_of(flat, coefficients, rounded).reshape(own.shape)
            if offset:
                total += np.float32(offset)
            if turned:  # in the order of the file, and then that of the target
                near = _scratch.of("near", own.shape, out.dtype.name)
                np.copyto(near, total, casting="unsafe")
                cast(near.T, out[part].T)
            else:
                np.copyto(out[part], total, casting="unsafe")


_scratch = Scratch()


def total_of(
    values: Sequence[np.ndarray], coefficients: Sequence[float], rounded: bool = False
) -> np.ndarray:
    """Returns the sums of values of each input, [n] in bfloat16 or float32. They are float32, in
    memory that the next call uses again.

    rounded: the sums of bfloat16 values need only be right when they are rounded to bfloat16.
    """
    n = len(values[0])
    total = _scratch.of("total", (n,), "float32")
    if rounded:
        if (at := _sum_quickly(values, coefficients, total)).size:
            some = np.stack([np.take(one.view("u2"), at) for one in values]).view(values[0].dtype)
            found = np.empty(at.size, "f4")
            _sum(some, coefficients, found)
            total[at] = found
        return total
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        _sum(np.stack([one[part] for one in values]), coefficients, total[part])
    return total


def _sum_quickly(
    values: Sequence[np.ndarray], coefficients: Sequence[float], total: np.ndarray
) -> np.ndarray:
    """Fills the total with sums of bfloat16 values in float32, with a rounding of each product and
    one of each sum. Returns the numbers of those elements that a sum of fused multiply-adds might
    round to another bfloat16.

    No rounding is off by more than 2**-24 of the largest possible result. So both sums are at most
    `bound` such parts apart, and round to one bfloat16 if that in the middle of two, with the last
    bits 0x8000, is not as near; a zero is always near. Below a power of two the middle is half as
    far as above it.
    """
    inputs = len(values)
    product, off = _scratch.of("quick", (2, len(total)), "float32")
    for number, coefficient in enumerate(coefficients):
        into = product if number else total
        np.copyto(into, values[number])
        into *= np.float32(coefficient)
        if number:
            total += product
    # the largest as signed numbers is positive, and as others negative, if there is any
    bits = [max(one.view("i2").max(), one.view("u2").max() & 0x7FFF) for one in values]
    largest = np.array(bits, "u2").view(values[0].dtype).astype("f8")
    partial = np.cumsum(np.abs(coefficients) * largest)
    # products, sums but for that with zero, and fused sums; the least float32 is 2**-149
    bound = partial[-1] + partial[1:].sum() + partial.sum() + inputs * 2.0**-124
    steps = off.view("i4")
    np.bitwise_and(total.view("i4"), 0xFFFF, out=steps)
    steps -= 0x8000
    np.abs(steps, out=steps)
    np.minimum(steps, 0x4000, out=steps)
    np.copyto(off, steps)  # a step is more than 2**-24 of the total
    off *= total
    np.abs(off, out=off)
    return np.flatnonzero(~(off > np.float32(1.001 * bound)))


def _sizes(values: np.ndarray) -> np.ndarray:
    """Returns bfloat16 values without their signs, as uint16, which have the same order."""
    return np.bitwise_and(
        values.view("u2"), 0x7FFF, out=_scratch.of("sizes", values.shape, "uint16")
    )


def _sum(values: np.ndarray, coefficients: Sequence[float], total: np.ndarray) -> None:
    """Does what `total_of` does with few elements, whose intermediate values stay in the cache."""
    inputs, n = values.shape
    zero = 0.0 if inputs > 1 else -0.0
    total.fill(zero)
    if values.dtype == np.float32:
        _add_each(total, values, coefficients)
        return
    product, wide = _scratch.of("wide", (2, n), "float64")
    for number, coefficient in enumerate(coefficients):
        np.copyto(product, values[number])  # has all 8 + 24 bits
        product *= coefficient
        product += wide if number else zero
        np.copyto(total, product, casting="unsafe")
        if number + 1 < inputs:
            np.copyto(wide, total)
    if (at := inexact(values, coefficients)).size:
        some = np.full(at.size, zero, "f4")
        _add_each(some, values[:, at].astype("f4"), coefficients)
        total[at] = some


def _add_each(total: np.ndarray, values: np.ndarray, coefficients: Sequence[float]) -> None:
    """Adds values [inputs, n] times their coefficients to the total, which is zero."""
    for number, coefficient in enumerate(coefficients):
        add(total[None], values[number, None], coefficient, number == 0)


def inexact(values: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """Returns the numbers of those elements of bfloat16 values [inputs, n] whose sums float64 may
    have to round.

    If all products are multiples of a power of two, so are all totals, because they are rounded to
    fewer bits. Float64 has each such number up to 2**53 times that power.
    """
    sizes = _sizes(values)
    largest = (sizes.max(axis=1).astype("u4") << 16).view("f4").astype("f8")
    bound = 1.001 * float((np.abs(coefficients) * largest).sum())  # of all sums and products
    most = 0  # for the bits of a value; zero is exact
    for coefficient in coefficients:
        top, bottom = coefficient.as_integer_ratio()
        last = (top & -top) / bottom  # the last bit of the coefficient
        if not math.isfinite(bound):
            most = 0x8000
        elif last:
            # that of a value is at least 2**(bits // 128 - 134)
            most = max(most, min(0x8000, math.frexp(bound / last)[1] + 81 << 7))
    if most <= 128:
        return np.zeros(0, "i8")
    sizes -= np.uint16(1)  # the largest number in place of zero
    return np.flatnonzero(sizes.min(axis=0) < most - 1)


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
