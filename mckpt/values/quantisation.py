"""Weights of 8-bit floats whose blocks have a scale each: where the scale of an element lies, and
what the element is worth.

    weight [rows, width] float8_e4m3fn      scales [ceil(rows / 128), ceil(width / 128)]
    value of (r, c) = bfloat16(float32(weight[r, c]) * float32(scales[r // 128, c // 128]))        rounded once

This is what transformers (integrations/finegrained_fp8.py) and DeepSeek's own inference/kernel.py
(weight_dequant) compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.casting import cast, pieces
from mckpt.values.dtypes import itemsize, numpy_dtype

CODES = "float8_e4m3fn"
VALUES = "bfloat16"
SCALES = ("float32", "bfloat16", "float16")  # all are exact in float32
# elements at a time: their float32 stay in L2, and threads wait little for each other to say what
# comes next
CHUNK = 128 << 10
# of 32 bits: the sign, the lower 4 bits of the exponent, the upper 3 of the mantissa
KEPT = -0x78100000
LIFT = 2.0**120  # of float32's exponent bias, 127, over that of float8_e4m3fn, 7

Read = Callable[[int, int, int], Any]  # (file, offset, nbytes) -> a buffer of those bytes


class Grid(NamedTuple):
    """One weight [.., width] from byte `weight_at` of its file on, and the row-major grid of its
    scales, one per [rows, columns] elements.
    """

    weight_at: int
    width: int
    rows: int
    columns: int
    file: int  # of the scales, which need not be the weight's
    at: int
    kind: int  # index into SCALES

    def scales(self, row: int, first: int, last: int, read: Read) -> np.ndarray:
        """Float32 scales of the elements [first, last) of one row."""
        dtype = SCALES[self.kind]
        left, right = first // self.columns, -(-last // self.columns)
        at = row // self.rows * -(-self.width // self.columns) + left
        size = itemsize(dtype)
        found = np.frombuffer(
            read(self.file, self.at + at * size, (right - left) * size), numpy_dtype(dtype)
        ).astype("f4")
        return np.repeat(found, self.columns)[
            first - left * self.columns : last - left * self.columns
        ]


def scratch(rows: int, run: int) -> int:
    """Bytes that dequantise takes, beside its arguments and what casting.scratch counts, for [rows,
    run] elements side by side.
    """
    return 8 * min(rows * run, CHUNK) + 12 * max(rows, run)


def dequantise(
    grid: Grid, codes: np.ndarray, out: np.ndarray, at: int, pitch: int, step: int, read: Read
) -> None:
    """Fills `out` [m, n], of any float dtype, with the values of `codes` [m, n]; codes[i, j] is the
    byte at + i * pitch + j * step of its file.

    One axis lies along a row of the weight, the other down its columns (box.by_rows). Values are
    rounded to bfloat16 before they become what `out` holds, so that a value is one and the same in
    every dtype that is asked for.
    """
    codes = codes.view("u1")
    m, n = codes.shape
    if step % grid.width == 0 if n > 1 else m > 1 and pitch % grid.width:  # j goes down
        codes, out, pitch, step, m, n = codes.T, out.T, step, pitch, n, m
    down, step = max(1, pitch // grid.width), step if n > 1 else 1
    row, column = divmod(at - grid.weight_at, grid.width)
    i = 0
    while i < m:
        here = row + i * down
        # where the next row of blocks begins
        end = min(m, i + -(-(grid.rows - here % grid.rows) // down))
        scale = grid.scales(here, column, column + (n - 1) * step + 1, read)[::step]
        for part in pieces(end - i, n, CHUNK):
            _values(codes[i:end][part], scale[part[1]], out[i:end][part])
        i = end


def _values(codes: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """Codes [m, n] times scale [n].

    An e4m3 shifted to where float32 keeps its exponent is the same number but for the exponents'
    biases, subnormals included: 2**-120 of it. Times a scale 2**120 larger it is the product,
    rounded as it would be. With the rounding, 2 ns per element; through ml_dtypes' cast 14.
    """
    with np.errstate(all="ignore"):
        bits = np.left_shift(codes.view("i1"), 20, dtype="i4")  # the sign goes all the way up
        bits &= KEPT
        marks = codes | 0x80
        if marks.max(initial=0) == 0xFF:
            np.bitwise_or(bits, 0x7FC00000, out=bits, where=marks == 0xFF)  # nan, of its sign
        values, lift = bits.view("f4"), np.float32(LIFT)
        if np.isfinite(lifted := scale * lift).all():
            values *= lifted
        else:
            values *= lift
            values *= scale
        rounded = (
            out if out.dtype == numpy_dtype(VALUES) else np.empty(out.shape, numpy_dtype(VALUES))
        )
        np.copyto(rounded, values, casting="unsafe")
        if rounded is not out:
            cast(rounded, out)
