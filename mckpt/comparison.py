"""The difference of two checkpoints in logical space, across formats and parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mckpt.dtypes import itemsize
from mckpt.errors import counted
from mckpt.logical import LogicalTensor

BLOCK_BYTES = 8 << 20  # of either side that is in memory at once


@dataclass(frozen=True)
class Changed:
    """One tensor that differs. `first` is the index of the first differing element; `max_abs` None where a dtype has no differences."""

    name: str
    what: str  # shape, dtype or values
    left: str
    right: str
    first: tuple[int, ...] | None = None
    max_abs: float | None = None
    count: int = 0

    def __str__(self) -> str:
        if self.what != "values":
            return f"{self.name}: {self.what} {self.left} against {self.right}"
        differ = f"{counted(self.count, 'element')} differ{'s' * (self.count == 1)}"
        return f"{self.name}: {differ}, first at {list(self.first or ())} ({self.left} against {self.right}), max abs {self.max_abs:g}"


@dataclass
class Difference:
    """What `diff` found; falsy if the two are the same."""

    missing: list[str] = field(default_factory=list)  # in the first only
    extra: list[str] = field(default_factory=list)  # in the second only
    changed: list[Changed] = field(default_factory=list)
    same: int = 0
    nbytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.changed)

    def json(self) -> dict[str, Any]:
        return {
            "same": not self, "tensors_equal": self.same, "bytes_compared": self.nbytes, "missing": self.missing, "extra": self.extra,
            "changed": [vars(c) for c in self.changed],
        }  # fmt: skip


def diff(a: Mapping[str, LogicalTensor], b: Mapping[str, LogicalTensor], atol: float | None = None,
         progress: Callable[[int, int], None] | None = None) -> Difference:  # fmt: skip
    """Compare every logical tensor: bit for bit (NaN payloads count), or within `atol`, where dtypes may then differ too."""
    out = Difference([n for n in a if n not in b], [n for n in b if n not in a])
    common = [n for n in a if n in b]
    total = sum(a[n].nbytes for n in common)
    for name in common:
        left, right = a[name], b[name]
        if left.shape != right.shape:
            out.changed.append(Changed(name, "shape", str(list(left.shape)), str(list(right.shape))))
        elif left.dtype != right.dtype and atol is None:
            out.changed.append(Changed(name, "dtype", left.dtype, right.dtype))
        elif (found := _values(name, left, right, atol)) is not None:
            out.changed.append(found)
        else:
            out.same += 1
        out.nbytes += left.nbytes
        if progress is not None:
            progress(out.nbytes, total)
    return out


def _values(name: str, left: LogicalTensor, right: LogicalTensor, atol: float | None) -> Changed | None:
    rows = left.shape[0] if left.shape else 1
    step = max(1, BLOCK_BYTES // max(1, math.prod(left.shape[1:]) * max(itemsize(left.dtype), itemsize(right.dtype))))
    first: tuple[int, ...] | None = None
    shown = ("", "")
    count, worst = 0, 0.0
    for start in range(0, rows, step):
        x, y = left[start : start + step].numpy(), right[start : start + step].numpy()
        if atol is None:
            bits = f"u{x.dtype.itemsize}"
            apart = x.view(bits) != y.view(bits)
            if not apart.any():
                continue
        wide = np.float64 if x.dtype.itemsize == 8 else np.float32
        xf, yf = x.astype(wide), y.astype(wide)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(xf - yf)
        distance[(xf == yf) | (np.isnan(xf) & np.isnan(yf))] = 0
        distance[np.isnan(distance)] = np.inf
        if atol is not None:
            apart = distance > atol
        if apart.any():
            if first is None:
                at = np.unravel_index(int(np.argmax(apart)), apart.shape)
                first = (start + int(at[0]), *map(int, at[1:]))
                shown = (_show(x[at]), _show(y[at]))
            count += int(apart.sum())
            worst = max(worst, float(distance[apart].max()))
    return Changed(name, "values", *shown, first, worst, count) if count else None


def _show(value: Any) -> str:
    if np.isnan(float(value)):  # two NaNs may differ in their bits alone
        return f"nan 0x{np.asarray(value).reshape(1).view(f'u{value.dtype.itemsize}')[0]:x}"
    return f"{float(value):.6g}"
