"""Sums of checkpoints, computed without the code that merges: whole logical tensors are read, and
each step rounds to odd, so that float64 is enough for one rounding.

    wide, lost = total + c * x    in float64, and exactly the part that its rounding lost
    wide       = its neighbour towards `lost`, if something was lost and its last bit is 0
    total      = wide, rounded to float32; with that last bit it is not in the middle of two
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import BLOCK_BYTES, Reader
from mckpt.editing.averaging import Averaging
from mckpt.editing.methods import Mixing
from mckpt.geometry.box import Layout
from mckpt.values.dtypes import numpy_dtype


def coefficients_of(merging: Averaging) -> Sequence[float] | None:
    """Returns the coefficients of a sum. Returns None if the method of the merge is not a sum."""
    if not isinstance(merging, Mixing):
        return merging.coefficients
    how = merging.how
    stated = [{**how.method.parameters, **how.shared, **one} for one in how.each]
    weights = [one["weight"] for one in stated if isinstance(one["weight"], int | float)]
    if (how.name, how.arithmetic, len(weights)) != ("linear", "float32", len(stated)):
        return None
    total = math.fsum(weights) if stated[0]["normalize"] else 1.0
    return [weight / total for weight in weights]


def wrong_sums(
    merging: Averaging, coefficients: Sequence[float], right: Checkpoint
) -> Iterator[str]:
    """Yields the tensors of `right` that are not the sums of those of the inputs, bit for bit."""
    inputs = [Reader(_wide(merging.read(one, merging.states))) for one in merging.inputs]
    plain = [
        replace(s, pieces=tuple(p._replace(offset=0.0) for p in s.pieces))
        for s in right.layout.stored
    ]
    stored = Reader(replace(right.layout, stored=plain))
    for name in (name for name in stored if name in inputs[0]):
        tensor, offset = stored[name], np.float32(right.reader.offset(name))
        count = max(1, BLOCK_BYTES // (4 * math.prod(tensor.shape[1:])))
        for rows in (slice(i, i + count) for i in range(0, tensor.shape[0], count)):
            total = np.zeros(tensor[rows].shape, "f4")
            for one, coefficient in zip(inputs, coefficients, strict=True):
                total = fused(np.float32(coefficient), one[name][rows].numpy(), total)
            total = total + offset if offset else total
            if total.astype(numpy_dtype(tensor.dtype)).tobytes() != tensor[rows].numpy().tobytes():
                yield f"{name}: is not the sum, first in the rows from {rows.start} on"
                break


def _wide(layout: Layout) -> Layout:
    """Returns the layout with its values in float32."""
    kinds = [(s, None if s.stored_as == "float32" else s.stored_as) for s in layout.stored]
    return replace(
        layout, stored=[replace(s, dtype="float32", rounded_from=kind) for s, kind in kinds]
    )


def fused(coefficient: np.float32, values: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Returns coefficient * values + total in float32, with one rounding."""
    product, more = np.float64(coefficient) * values, total.astype("f8")
    wide = product + more
    back = wide - product
    lost = (product - (wide - back)) + (more - back)
    bits = wide.view("i8")
    even = (lost != 0) & (bits & 1 == 0) & np.isfinite(wide)
    bits += np.where(even, np.where((lost > 0) == (wide > 0), 1, -1), 0)
    return wide.astype("f4")
