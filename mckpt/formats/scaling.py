"""Stored tensors whose values are multiplied by a number on their way."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from mckpt.errors import UsageError
from mckpt.formats.base import Names
from mckpt.geometry.box import Layout, Stored
from mckpt.lazy import numpy as np
from mckpt.values.adding import WIDTH, Factor
from mckpt.values.dtypes import itemsize, numpy_dtype
from mckpt.values.element import SUM
from mckpt.values.summing import BASE, Sum, Term


def scaled(s: Stored, factor: float, names: Collection[str] | None = None) -> Stored:
    """Returns stored matrices with their values times a factor, a float32 (values/summing.py).

    names: those of the logical tensors that are multiplied; None: all.
    """
    term = Term(Factor(BASE, 0, 0, 0, 0), 0, float(np.float32(factor)), 0.0, 0, 0, 0, 0)
    added = {}
    for number, piece in enumerate(s.pieces):
        if names is None or piece.tensor in names:
            along, down = sorted(piece.strides)
            start = piece.start * itemsize(s.stored_as)
            words = [Sum(at + start, down, along, 0, 0, (term,)).words() for at in s.at.tolist()]
            added[number] = np.array(words, "i8").reshape(len(s), -1, WIDTH)
    # `Rows` have no numbers of their pieces
    return replace(s, pieces=tuple(s.pieces), added=added, term=SUM)


def with_factors(layout: Layout, factors: Mapping[str, float]) -> Layout:
    """Returns a layout in which some logical tensors are multiplied, by template. One whose values
    are multiplied already, so that both factors together are 1, keeps its own values.

    Raises UsageError for values that are computed otherwise.
    """
    stored = []
    for s in layout.stored:
        here = {name: factors[name] for name in s.tensors if name in factors}
        if here and not s.replica:
            factor = next(iter(here.values()))  # each rule has one, and q alone
            own = _factor(s)
            if own is None:
                raise UsageError(
                    f"{s.key}: its values are computed from several tensors or from scales, and"
                    " the target multiplies them by a number; write them to a checkpoint of another"
                    " format first"
                )
            s = replace(s, added={})
            if not math.isclose(own * factor, 1, rel_tol=1e-6):
                s = scaled(s, own * factor, here)
        stored.append(s)
    return replace(layout, stored=stored)


def scaled_again(layout: Layout) -> Layout:
    """Returns a layout whose stored tensors are multiplied as before their pieces were cut, joined
    or put elsewhere. All computed values of the layout are such products.
    """
    stored = list[Stored]()
    for s in layout.stored:
        if s.added:
            factor = Sum.of(next(iter(s.added.values()))[0]).terms[0].coefficient
            s = scaled(s, factor)
        stored.append(s)
    return replace(layout, stored=stored)


def _factor(s: Stored) -> float | None:
    """Returns the factor of stored values, 1 without one; None if more is done to them."""
    if s.scales or not s.added:
        return None if s.scales else 1.0
    sums = [Sum.of(table[0]) for table in s.added.values()] if s.term == SUM else []
    if len(sums) < len(s.pieces) or any(one.files or len(one.terms) > 1 for one in sums):
        return None
    factors = {one.terms[0].coefficient for one in sums}
    return factors.pop() if len(factors) == 1 else None


def factor_notes(names: Names, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence on each logical tensor that one side stores times a number that is not a
    power of two. dtypes: of the logical tensors.
    """
    for name, factor in names.factors.items():
        if (share := _share_kept(dtypes[name], factor)) < 1:
            yield (
                f"{name}: {names.mapping.trainer} stores it times {factor:.6g}, rounded to"
                f" {dtypes[name]}; of all values of this dtype {share:.0%} are the same after the"
                " way there and back, and the others differ in their last bit"
            )


def _share_kept(dtype: str, factor: float) -> float:
    """Returns the share of the values of a dtype that are the same after they were multiplied by a
    factor, rounded, divided by it and rounded again: of all mantissas, or of a million of them.
    """
    size = itemsize(dtype)
    one, four = (int(numpy_dtype(dtype).type(n).view(f"u{size}")) for n in (1, 4))
    bits = np.arange(one, four, ((four - one) >> 20) | 1, dtype=f"u{size}")
    values = bits.view(numpy_dtype(dtype))
    there = (values.astype("f4") * np.float32(factor)).astype(values.dtype)
    back = (there.astype("f4") * np.float32(1 / factor)).astype(values.dtype)
    return float((back == values).mean())
