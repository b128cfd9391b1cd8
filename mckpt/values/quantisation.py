"""Quantised weights: finds the scale of each element, and computes its value.

    weight [rows, width] float8_e4m3fn      scales [ceil(rows / 128), ceil(width / 128)]
    value of (r, c) = bfloat16(float32(weight[r, c]) * float32(scales[r // 128, c // 128]))

The product is rounded once. If it is not finite, although the element is, it is refused: see
`dequantise`. transformers (integrations/finegrained_fp8.py and mxfp4.py), DeepSeek's
own inference/kernel.py (weight_dequant), compressed-tensors and ModelOpt (quantization/qtensor)
compute the same values.

nvfp4 has a further scale for the whole weight. The scale of a block is multiplied by it, or divided
by it, and rounded to float32 before it is used.

A byte holds one or two elements. The elements that have the same place in their bytes are one
`phase`, so that the elements of one phase are addressed by bytes:

    mxfp4, low half first    bytes [b0 b1]    elements [b0 & 15, b0 >> 4, b1 & 15, b1 >> 4]
                                              phase     0        1        0        1
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.dtypes import NoValue, cast, itemsize, numpy_dtype, pieces

CODES = "float8_e4m3fn"
VALUES = "bfloat16"
# Dtypes of scales; all are exact in float32. uint8 is E8M0: the exponent of a power of two, plus
# 127. float8_e8m0fnu is the same, but 255 is NaN.
SCALES = ("float32", "bfloat16", "float16", "uint8", "float8_e8m0fnu", "float8_e4m3fn")
# elements at a time: their float32 values stay in L2, and threads seldom wait for the GIL
CHUNK = 128 << 10
ENCODED = 32 << 10  # the same when codes are looked up
LARGEST = 448.0  # of float8_e4m3fn
LARGEST_E2M1 = 6.0

LARGEST_VALUE = (2 - 2**-7) * 2.0**127  # of bfloat16

Read = Callable[[int, int, int], Any]  # (file, offset, nbytes) -> a buffer of those bytes


class Encoding(NamedTuple):
    """One way to store the elements of quantised weights."""

    name: str
    dtype: str  # of the stored tensors
    per_byte: int = 1  # elements in a byte, the first one in its lowest bits
    offset: int = 0  # the code of an integer 0; 0 for numbers in two's complement


E4M3 = Encoding(CODES, CODES)
MXFP4 = Encoding("mxfp4", "uint8", 2)
NVFP4 = Encoding("nvfp4", "uint8", 2)
INT4 = Encoding("packed_int4", "int32", 2, 8)
PACKED_INT8 = Encoding("packed_int8", "int32", 1, 128)
INT8 = Encoding("int8", "int8")
ENCODINGS = (E4M3, MXFP4, INT4, PACKED_INT8, INT8, NVFP4)
WRITTEN = {E4M3.name: E4M3, NVFP4.name: NVFP4}  # the encodings in which mckpt writes weights
# Values of the codes 0 to 7 of E2M1, the numbers of mxfp4 and nvfp4; 8 to 15 are the same with a
# minus. Those of mxfp4 are doubled and its scales halved, so that the largest one, 2**128, is a
# float32 too.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# how the scale of a whole weight changes those of its blocks
ALONE, TIMES, OVER = range(3)


class Grid(NamedTuple):
    """The row-major grid of the scales of one weight [.., width]."""

    weight_at: int  # offset of the weight in its file, bytes
    width: int  # of a row of the weight, bytes
    rows: int  # of a block, which shares one scale
    columns: int  # of a block, elements
    file: int  # number of the scales' file, which may be another than the weight's
    at: int  # offset of the scales in that file, bytes
    kind: int  # dtype of the scales, an index into SCALES
    code: int = 0  # of the weight's elements, an index into ENCODINGS
    phase: int = 0  # the place in their bytes of the elements that are read
    overall: int = ALONE  # TIMES or OVER if there is a scale of the whole weight, a float32
    overall_file: int = 0  # number of its file
    overall_at: int = 0  # its offset in that file, bytes
    # Of a weight that is written: the number of the set of weights that have one such scale. Its
    # width counts elements, as the addresses of its copies do; see `Grid.byte`.
    peers: int = 0

    @property
    def across(self) -> int:
        """The number of scales in a row of the grid."""
        return -(-self.width * ENCODINGS[self.code].per_byte // self.columns)

    @property
    def encoding(self) -> Encoding:
        return ENCODINGS[self.code]

    @property
    def blocks(self) -> int:
        """Returns the number of scales in a row of the grid of a weight that is written."""
        return -(-self.width // self.columns)

    def byte(self, at: Any) -> Any:
        """Returns the byte at which an element lies of a weight that is written. `at`: its place
        as if each element had a byte.
        """
        return self.weight_at + (at - self.weight_at) // self.encoding.per_byte

    @property
    def files(self) -> set[int]:
        """Returns the numbers of the files that hold the scales."""
        return {self.file} if self.overall == ALONE else {self.file, self.overall_file}

    def scales(self, row: int, rows: int, left: int, right: int, read: Read) -> np.ndarray:
        """Returns the scales [rows, right - left] of the grid from its row `row` on, in float32."""
        dtype, across = SCALES[self.kind], self.across
        size = itemsize(dtype)
        first = self.at + (row * across + left) * size
        nbytes = ((rows - 1) * across + right - left) * size
        found = np.frombuffer(read(self.file, first, nbytes), numpy_dtype(dtype))
        spread = np.lib.stride_tricks.as_strided(
            found, (rows, right - left), (across * size, size), writeable=False
        )
        if size > 1:
            scales = spread.astype("f4")
        else:
            bias = 128 if ENCODINGS[self.code] == MXFP4 else 127
            scales = _scales_of_bytes(dtype, bias).take(spread.view("u1"))
        if self.overall == ALONE:
            return scales
        whole = np.frombuffer(read(self.overall_file, self.overall_at, 4), "f4")
        with np.errstate(all="ignore"):
            return scales * whole if self.overall == TIMES else scales / whole


def scratch(rows: int, run: int) -> int:
    """Returns the bytes of scratch memory that `dequantise` needs for [rows, run] elements, without
    those that casting.scratch counts.
    """
    # float32 values, indices of 8 bytes, scales as they are stored and for each element
    return 20 * min(rows * run, CHUNK) + 16 * max(rows, run)


def dequantise(
    grid: Grid,
    codes: np.ndarray,
    out: np.ndarray,
    at: int,
    pitch: int,
    step: int,
    read: Read,
    allow_overflow: bool = False,
) -> None:
    """Fills `out` [m, n], of any float dtype, with the values of `codes` [m, n].

    codes[i, j] is the byte at + i * pitch + j * step of its file. One axis goes along a row of the
    weight, the other down its columns (box.by_rows). Values are rounded to bfloat16 before they are
    cast to the dtype of `out`, so that they are equal in every dtype.

    Raises NoValue for a value that is not finite, unless its element is not or `allow_overflow`
    is set. The elements are looked at only where a scale is so large that there may be one.
    """
    codes = codes.view("u1")
    m, n = codes.shape
    if step % grid.width == 0 if n > 1 else m > 1 and pitch % grid.width:  # j goes down
        codes, out, pitch, step, m, n = codes.T, out.T, step, pitch, n, m
    down, step = max(1, pitch // grid.width), step if n > 1 else 1
    row, column = divmod(at - grid.weight_at, grid.width)
    per_byte = ENCODINGS[grid.code].per_byte
    first = column * per_byte + grid.phase
    where = (first + np.arange(n) * (step * per_byte)) // grid.columns
    left, right = int(where[0]), int(where[-1]) + 1
    where -= left
    # elements of a run that share a scale, if they are as many everywhere; np.repeat is faster
    each, rest = divmod(grid.columns, step * per_byte)
    even = not rest and first % grid.columns < step * per_byte and n <= CHUNK
    # The scales of several rows are read at once if they are about as many bytes as their values.
    most = 1
    if grid.rows == 1 and down * grid.across * itemsize(SCALES[grid.kind]) <= 4 * n:
        most = max(1, CHUNK // n)
    i = 0
    while i < m:
        here = row + i * down
        # up to the row where the next row of blocks begins
        count = min(m - i, most if most > 1 else -(-(grid.rows - here % grid.rows) // down))
        num = (count - 1) * down + 1 if most > 1 else 1
        scale = grid.scales(here // grid.rows, num, left, right, read)[::down]
        bounded = allow_overflow or is_bounded(grid, scale)
        for part in pieces(count, n, CHUNK):
            found = scale[part[0] if most > 1 else slice(None)]
            of: int | np.ndarray = each if even else where[part[1]]
            if right - left == 1:  # one scale of each row is enough
                of = 1
            some = codes[i : i + count][part]
            if not bounded:
                first = at + (i + part[0].start) * pitch + part[1].start * step
                _refuse(grid, some, found, of, first, pitch, step)
            _values(grid, some, found, of, out[i : i + count][part])
        i += count


def is_bounded(grid: Grid, scales: np.ndarray) -> bool:
    """Returns whether every element of a weight is finite with each of these scales."""
    with np.errstate(invalid="ignore"):
        largest = max(float(scales.max()), -float(scales.min()))  # NaN if one is
    return largest * _limit(grid.code) <= LARGEST_VALUE


def _refuse(
    grid: Grid,
    codes: np.ndarray,
    scale: np.ndarray,
    of: int | np.ndarray,
    at: int,
    pitch: int,
    step: int,
) -> None:
    """Raises NoValue for the first value that is not finite, although its element is.

    grid, codes, scale, of: as for `_values`. at, pitch, step: the places of the codes.
    """
    rounded = np.empty(codes.shape, numpy_dtype(VALUES))
    _values(grid, codes, scale, of, rounded)
    elements = _table(grid.code, grid.phase).take(codes, mode="wrap")
    infinite = rounded.view("u2") & 0x7F80 == 0x7F80
    infinite &= np.isfinite(elements)
    if not infinite.any():
        return
    i, j = divmod(int(infinite.argmax()), infinite.shape[1])
    element = float(elements[i, j])
    factor = float(np.broadcast_to(_spread(scale, of, codes.shape[1]), codes.shape)[i, j])
    if ENCODINGS[grid.code] == MXFP4:
        element, factor = element / 2, factor * 2
    raise NoValue(
        f"{element:g} at byte {at + i * pitch + j * step:,}, times its scale {factor:g}, is"
        f" {float(rounded[i, j]):g} in {VALUES}",
        "it",
    )


@functools.cache
def _scales_of_bytes(dtype: str, bias: int) -> np.ndarray:
    """Returns the value of each stored scale of one byte, in float32. bias: of exponents."""
    if dtype == "float8_e4m3fn":
        return np.arange(256, dtype="u1").view(numpy_dtype(dtype)).astype("f4")
    with np.errstate(over="ignore"):
        powers = (2.0 ** (np.arange(256.0) - bias)).astype("f4")
    if dtype == "float8_e8m0fnu":
        powers[255] = np.nan
    return powers


@functools.cache
def _table(code: int, phase: int) -> np.ndarray:
    """Returns the value of each byte's element of this phase, before it is scaled, in float32."""
    encoding, codes = ENCODINGS[code], np.arange(256)
    if encoding in (INT8, E4M3):
        return codes.astype("u1").view(numpy_dtype(encoding.dtype)).astype("f4")
    bits = 8 // encoding.per_byte
    fields = codes >> phase * bits & (1 << bits) - 1
    if encoding in (MXFP4, NVFP4):
        values = np.array([*E2M1, *(-value for value in E2M1)], "f4")
        return values[fields] * np.float32(2 if encoding == MXFP4 else 1)
    return (fields - encoding.offset).astype("f4")


@functools.cache
def _limit(code: int) -> float:
    """Returns the largest absolute value of an element before it is scaled."""
    values = np.abs(_table(code, 0))
    return float(values[np.isfinite(values)].max())


@functools.cache
def _codes(name: str) -> np.ndarray:
    """Returns the code of each float32 whose lower 16 bits are zero, by its upper 16 bits: that of
    the nearest number of the encoding, of the even one of two, and of the largest one of numbers
    beyond it.
    """
    values = (np.arange(1 << 16, dtype="u4") << 16).view("f4")
    if name == CODES:
        with np.errstate(all="ignore"):  # those that are not finite
            return np.clip(values, -LARGEST, LARGEST).astype(numpy_dtype(CODES)).view("u1")
    largest, middles = np.abs(values), np.convolve(E2M1, (0.5, 0.5), "valid")
    codes = np.searchsorted(middles, largest)  # an odd code is too low if `largest` is the middle
    codes += (codes % 2 == 1) & np.isin(largest, middles)
    return (codes + 8 * (values < 0)).astype("u1")


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """Returns the codes of finite float32 values [m, n], two in a byte for an encoding that packs
    them: the nearest ones, to even, and the largest one for values beyond it. -0 is 0 in nvfp4.

    The lowest bit of the upper half of a float32 is set if the lower half is not zero. So it is on
    the right side of the middle of two codes, and a table of 65,536 entries has its code.
    """
    table, (m, n) = _codes(name), values.shape
    bits, out = np.ascontiguousarray(values).view("u4").ravel(), np.empty(m * n, "u1")
    for at in range(0, m * n, ENCODED):
        part = bits[at : at + ENCODED]
        upper = part >> 16
        upper |= (part & 0xFFFF) != 0
        table.take(upper, mode="wrap", out=out[at : at + ENCODED])
    if WRITTEN[name].per_byte == 2:
        pairs = out.view("<u2")
        out = (pairs | pairs >> 4).astype("u1")
    return out.reshape(m, -1)


def _spread(scale: np.ndarray, of: int | np.ndarray, n: int) -> np.ndarray:
    """Returns the scale of each element of rows of n.

    of: the elements that share a scale, or the number of the scale of each element. 1 stands for
    rows of one scale, which numpy spreads.
    """
    if not isinstance(of, int):
        return scale.take(of, axis=1)
    return scale if of == 1 and scale.shape[1] == 1 else np.repeat(scale, of, axis=1)[:, :n]


def _values(
    grid: Grid, codes: np.ndarray, scale: np.ndarray, of: int | np.ndarray, out: np.ndarray
) -> None:
    """Fills `out` [m, n] with the values of codes [m, n] times their scales; see `_spread`."""
    with np.errstate(all="ignore"):
        values = _table(grid.code, grid.phase).take(codes, mode="wrap")
        values *= _spread(scale, of, codes.shape[1])
        # ml_dtypes rounds into a dense array in 0.4 ns per element, into one with strides in 2.2 ns
        rounded = values.astype(numpy_dtype(VALUES))
        if rounded.dtype == out.dtype:
            np.copyto(out.view("u2"), rounded.view("u2"))
        else:
            cast(rounded, out)
