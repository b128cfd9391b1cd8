"""The dtypes of checkpoints: one table of their names in numpy, safetensors and torch."""

from __future__ import annotations

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


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype; ml_dtypes provides those that numpy lacks."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        import ml_dtypes  # takes 15 ms, and most runs never cast

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype("uint8" if name in PACKED else name)
