"""Block-quantised weights of 8-bit floats: finds the scale of an element, and computes its value.

    weight [rows, width] float8_e4m3fn      scales [ceil(rows / 128), ceil(width / 128)]
    value of (r, c) = bfloat16(float32(weight[r, c]) * float32(scales[r // 128, c // 128]))

The product is rounded once. transformers (integrations/finegrained_fp8.py) and DeepSeek's own
inference/kernel.py (weight_dequant) compute the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.casting import cast, pieces
from mckpt.values.dtypes import itemsize, numpy_dtype

CODES = "float8_e4m3fn"
VALUES = "bfloat16"
SCALES = ("float32", "bfloat16", "float16")  # dtypes of scales; all are exact in float32
# elements at a time: their float32 values stay in L2, and threads seldom wait for the GIL
CHUNK = 128 << 10
# mask of a float32: the sign, the lower 4 bits of the exponent, the upper 3 of the mantissa
KEPT = -0x78100000
LIFT = 2.0**120  # from the exponent bias of float8_e4m3fn, 7, to that of float32, 127

Read = Callable[[int, int, int], Any]  # (file, offset, nbytes) -> a buffer of those bytes


class Grid(NamedTuple):
    """The row-major grid of the scales of one weight [.., width]."""

    weight_at: int  # offset of the weight in its file, bytes
    width: int
    rows: int  # of a block, which shares one scale
    columns: int  # of a block
    file: int  # number of the scales' file, which may be another than the weight's
    at: int  # offset of the scales in that file, bytes
    kind: int  # dtype of the scales, an index into SCALES

    def scales(self, row: int, first: int, last: int, read: Read) -> np.ndarray:
        """Returns the scale of each element [first, last) of one row, in float32."""
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
    """Returns the bytes of scratch memory that `dequantise` needs for [rows, run] elements, without
    those that casting.scratch counts.
    """
    return 8 * min(rows * run, CHUNK) + 12 * max(rows, run)


def dequantise(
    grid: Grid, codes: np.ndarray, out: np.ndarray, at: int, pitch: int, step: int, read: Read
) -> None:
    """Fills `out` [m, n], of any float dtype, with the values of `codes` [m, n].

    codes[i, j] is the byte at + i * pitch + j * step of its file. One axis goes along a row of the
    weight, the other down its columns (box.by_rows). Values are rounded to bfloat16 before they are
    cast to the dtype of `out`, so that they are equal in every dtype.
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
        # up to the row where the next row of blocks begins
        end = min(m, i + -(-(grid.rows - here % grid.rows) // down))
        scale = grid.scales(here, column, column + (n - 1) * step + 1, read)[::step]
        for part in pieces(end - i, n, CHUNK):
            _values(codes[i:end][part], scale[part[1]], out[i:end][part])
        i = end


def _values(codes: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [m, n] with codes [m, n] times scale [n].

    The bits of an e4m3 number, shifted to the exponent and mantissa of a float32, are 2**-120 of
    that number, because the exponents' biases differ; that holds for subnormals too. A scale that
    is 2**120 larger makes up for it, with the same rounding. This takes 2 ns per element, rounding
    included, and ml_dtypes' cast 14 ns.
    """
    with np.errstate(all="ignore"):
        bits = np.left_shift(codes.view("i1"), 20, dtype="i4")  # the sign goes all the way up
        bits &= KEPT
        marks = codes | 0x80
        if marks.max(initial=0) == 0xFF:
            np.bitwise_or(bits, 0x7FC00000, out=bits, where=marks == 0xFF)  # nan keeps its sign
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
