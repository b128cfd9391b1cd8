"""The dtypes of checkpoints: one table of their names in numpy, safetensors and torch, and the
casts between them, with numpy's values; also float16 at the speed of memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from mckpt.errors import SourceError, UsageError
from mckpt.lazy import numpy as np


class DType(NamedTuple):
    """One dtype: its size and its names elsewhere."""

    name: str  # torch's name, used everywhere in mckpt
    itemsize: int  # bytes
    safetensors: str
    # class name of torch's typed storage; None if torch pickles the dtype with _rebuild_tensor_v3
    storage: str | None


TABLE = {
    d.name: d
    for d in (
        DType("float64", 8, "F64", "DoubleStorage"),
        DType("float32", 4, "F32", "FloatStorage"),
        DType("float16", 2, "F16", "HalfStorage"),
        DType("bfloat16", 2, "BF16", "BFloat16Storage"),
        DType("float8_e4m3fn", 1, "F8_E4M3", None),
        DType("float8_e5m2", 1, "F8_E5M2", None),
        DType("float8_e8m0fnu", 1, "F8_E8M0", None),
        DType("int64", 8, "I64", "LongStorage"),
        DType("int32", 4, "I32", "IntStorage"),
        DType("int16", 2, "I16", "ShortStorage"),
        DType("int8", 1, "I8", "CharStorage"),
        DType("uint8", 1, "U8", "ByteStorage"),
        DType("bool", 1, "BOOL", "BoolStorage"),
    )
}
OF_SAFETENSORS = {d.safetensors: d.name for d in TABLE.values()}
OF_STORAGE = {d.storage: d.name for d in TABLE.values() if d.storage}
# names of encodings that put several elements, or one with an offset, in a byte (quantisation.py)
PACKED = ("mxfp4", "nvfp4", "packed_int4", "packed_int8")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def itemsize(name: str) -> int:
    """Returns the bytes of one element, or of those that share a byte.

    Raises SourceError for an unknown dtype.
    """
    if name in PACKED:
        return 1
    try:
        return TABLE[name].itemsize
    except KeyError:
        raise SourceError(f"dtype {name} is not one that mckpt knows: {', '.join(TABLE)}") from None


def parse(name: str) -> str:
    """Returns mckpt's name of a dtype that a user writes as bf16, bfloat16 or torch.bfloat16.

    Raises UsageError for an unknown dtype.
    """
    short = name.removeprefix("torch.")
    short = ALIASES.get(short, short)
    if short not in TABLE:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join([*ALIASES, *TABLE])}")
    return short


class NoValue(ValueError):
    """An element whose value cannot be written.

    becomes: what --allow-overflow writes for it; "" if nothing can be written.
    """

    def __init__(self, problem: str, becomes: str = "") -> None:
        super().__init__(problem)
        self.becomes = becomes


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype; ml_dtypes provides those that numpy lacks."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        import ml_dtypes  # takes 15 ms, and most runs never cast

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype("uint8" if name in PACKED else name)


PIECE = 32 << 10  # elements at a time, so that the scratch memory stays in L2
# Elements of a transposed row that are placed at a time, so that their cache lines stay in L1 for
# the next row: 2 GB/s instead of 0.3.
LINES = 512
WORD, WORDS = 8, 64  # bytes that are transposed as one, and the rows of them at a time


def scratch(elements: int) -> int:
    """Returns the bytes of scratch memory that `cast` and `has_infinity` need for `elements`."""
    # an index of 8 bytes, and a value of up to 4 bytes if `out` has strides
    return 12 * min(elements, PIECE)


def cast(src: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [m, n] with the values of `src` [m, n], rounded to even.

    Values that are too large become infinite.
    """
    m, n = src.shape
    down, along = src.strides
    if n > LINES and m > 1 and along > down:
        for j in range(0, n, LINES):
            cast(src[:, j : j + LINES], out[:, j : j + LINES])
        return
    if down == src.itemsize < min(along, WORD) and min(m, n) >= WORD:
        if src.dtype == out.dtype:
            _transpose(src, out)
            return
        if m * n > PIECE:
            for part in pieces(m, n):
                cast(src[part], out[part])
            return
        turned = np.empty(src.shape, src.dtype)
        _transpose(src, turned)
        src = turned
    table = _table(src.dtype, out.dtype)
    if table is None:
        with np.errstate(all="ignore"):
            np.copyto(out, src, casting="unsafe")
        return
    codes = src.view("u2")
    for part in pieces(m, n):
        # every code is in the table; mode="wrap" only avoids a buffer for `out`
        table.take(codes[part], out=out[part], mode="wrap")


def in_order(array: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of an array whose axes are put into an order, 4 times faster than numpy."""
    ordered, first = array.transpose(order), len(order)
    if ordered.flags.c_contiguous:
        return ordered.reshape(-1).view("u1")
    while first and (first == len(order) or order[first - 1] < order[first]):
        first -= 1  # the last axes keep their order
    rows = ordered.reshape(math.prod(ordered.shape[:first]), -1)
    out = np.empty(rows.shape, rows.dtype)
    cast(rows, out)
    return out.reshape(-1).view("u1")


def _transpose(src: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [m, n] with `src` [m, n], in which the elements of a column follow each other.

    It moves words of several rows, and then puts the parts of these into order, while they are in
    L1: 3.7 GB/s of elements of two bytes, instead of 0.4.
    """
    each, n = WORD // src.itemsize, src.shape[1]  # rows in a word
    codes, to = src.view(f"u{src.itemsize}"), out.view(f"u{src.itemsize}")
    count = len(src) // each
    words = codes[: count * each].T.view(f"u{WORD}")  # [n, count]
    # Columns of matrices are often powers of two apart, and so share few cache sets: 2.1 GB/s.
    apart = np.empty((n, WORDS + 1), words.dtype)
    rows = to[: count * each].reshape(count, each, n)
    for row in range(0, count, WORDS):
        part = words[:, row : row + WORDS]
        near = apart[:, : part.shape[1]]
        np.copyto(near, part)
        parts = near.T.copy().view(codes.dtype).reshape(-1, n, each)
        np.copyto(rows[row : row + WORDS], parts.transpose(0, 2, 1))
    np.copyto(to[count * each :], codes[count * each :])


def bfloat16_bits(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Returns the bits of float32 numbers as those of bfloat16, rounded to even, in uint32; not for
    NaN. `out` is memory for the result.
    """
    out = np.right_shift(bits, 16, out=out)
    out &= 1
    out += np.uint32(0x7FFF)
    out += bits
    out >>= 16
    return out


def sum_dtype(*sizes: int) -> str:
    """Returns the dtype in which a sum is computed before it is rounded to its target: float32, or
    float64 if either side is. sizes: the bytes of an element of both sides.
    """
    return "float64" if 8 in sizes else "float32"


def shift(src: np.ndarray, out: np.ndarray, offset: float) -> None:
    """Fills `out` [m, n] with the values of `src` [m, n] plus `offset`; see `sum_dtype`.

    In one dtype, w - 1 is exact for every w from 0.5 to 256, and so is its sum with 1.
    """
    wide = numpy_dtype(sum_dtype(src.itemsize, out.itemsize))
    with np.errstate(all="ignore"):
        for part in pieces(*src.shape):
            np.copyto(out[part], src[part].astype(wide) + wide.type(offset), casting="unsafe")


def has_infinity(values: np.ndarray) -> bool:
    """Returns whether one of at most PIECE float16 values is infinite; 6 times as fast as isinf."""
    return bool(((values.view("u2") & 0x7FFF) == 0x7C00).any())


@functools.cache
def _table(src: np.dtype, dst: np.dtype) -> np.ndarray | None:
    """Returns each of the 65,536 codes of `src` as a `dst`; None if numpy's own cast is fast.

    The table takes at most 256 KiB, which stay in L2. numpy's wheels for x86 cast float16 without
    F16C: bfloat16 to float16 takes 3 to 5 ns per element, and 1.5 to 2 ns with the table.
    """
    if src == dst or src.itemsize != 2 or dst.itemsize > 4 or "float16" not in (src.name, dst.name):
        return None
    with np.errstate(all="ignore"):
        return np.arange(1 << 16, dtype="u2").view(src).astype(dst)


def pieces(m: int, n: int, most: int = PIECE) -> Iterator[tuple[slice, slice]]:
    """Yields the slices that cut an [m, n] array into parts of at most `most` elements."""
    rows = max(1, most // max(1, n))
    for row in range(0, m, rows):
        for column in range(0, n, most):
            yield slice(row, row + rows), slice(column, column + most)
