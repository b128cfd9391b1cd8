"""The value of an element on its way from a source to a target. Whoever copies, reads or sends
elements takes its rules from here.

    source and target of one dtype              the same bytes
    of two dtypes                               cast
    with an offset                              shifted, and rounded once to the target
    of a quantised weight (`Grid`)              times its scale, rounded to bfloat16, then cast
    of a weight with an adapter (`Product`)     plus the product, and rounded once to the target
    of several checkpoints (`Sum`)              times its coefficient, added to the others' values
    of a merge by another method (`Mix`)        by its formula
    of a new tensor (`Draw`)                    drawn
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mckpt.lazy import numpy as np
from mckpt.values.adding import Lengths, Product, Read, add
from mckpt.values.dtypes import NoValue, cast, has_infinity, numpy_dtype, pieces, shift
from mckpt.values.quantisation import VALUES, Grid, dequantise

if TYPE_CHECKING:
    from mckpt.values.drawing import Draw
    from mckpt.values.mixing import Mix
    from mckpt.values.summing import Sum

PRODUCT, SUM, MIX, DRAW = "product", "sum", "mix", "draw"


class Cast(NamedTuple):
    """The change of a value on its way from the source to the target."""

    source: str  # dtype
    target: str  # dtype
    offset: float = 0.0  # added to the value
    term: str = ""  # PRODUCT, SUM, MIX or DRAW: each element is computed

    @property
    def same(self) -> bool:
        """Returns whether the target has the bytes of the source."""
        return self.source == self.target and not (self.offset or self.term)

    @property
    def overflows(self) -> bool:
        """Returns whether a finite value may become infinite: only float16 has a small range."""
        return self.target == "float16" and not self.same


class Place(NamedTuple):
    """The place of elements [m, n] in their file: element (i, j) begins at byte `at + i * pitch +
    j * step`.
    """

    at: int
    pitch: int
    step: int


class Element(NamedTuple):
    """The computation of the elements of one copy: a cast, and either scales, by which the elements
    are multiplied, a product, which is added to them, a formula of several checkpoints, or values
    that are drawn.
    """

    cast: Cast
    term: Grid | Product | Sum | Mix | Draw | None = None

    @classmethod
    def of(cls, cast: Cast, table: np.ndarray) -> Element:
        """Returns the element whose term starts in the first row of a table (Joined.grids)."""
        # the terms of merges and edits are imported where they are used
        if cast.term == SUM:
            from mckpt.values.summing import Sum

            return cls(cast, Sum.of(table))
        if cast.term == MIX:
            from mckpt.values.mixing import Mix

            return cls(cast, Mix.of(table))
        if cast.term == DRAW:
            from mckpt.values.drawing import Draw

            return cls(cast, Draw.of(table))
        return cls(cast, Product.of(table) if cast.term else Grid(*table[0].tolist()))

    def fill(
        self,
        src: np.ndarray,
        out: np.ndarray,
        place: Place,
        read: Read,
        lengths: Lengths,
        allow_overflow: bool = False,
    ) -> None:
        """Fills `out` [m, n] with the values of `src` [m, n]; both have the dtypes of the cast.

        place: that of `src`. The scales and factors are read each time, because they are few bytes
        whose pages the kernel keeps. Raises NoValue, but leaves float16 to `refuse_infinite`.
        """
        if isinstance(self.term, Product):
            add(self.term, src, out, *place, read, lengths)
        elif isinstance(self.term, Grid):
            dequantise(self.term, src, out, *place, read, allow_overflow)
        elif self.term is not None:
            self.term.fill(src, out, place, read, lengths, self.cast.offset)
        elif self.cast.offset:
            shift(src, out, self.cast.offset)
        else:
            cast(src, out)

    def refuse_infinite(
        self, src: np.ndarray, out: np.ndarray, place: Place, read: Read, lengths: Lengths
    ) -> None:
        """Raises NoValue if a finite value became infinite in `out`, which `fill` has filled."""
        for part in pieces(*out.shape) if self.cast.overflows else ():
            if not has_infinity(out[part]):
                continue
            skipped = part[0].start * place.pitch + part[1].start * place.step
            values, here = src[part], place._replace(at=place.at + skipped)
            if self.term is not None:
                values = np.empty(values.shape, numpy_dtype(VALUES))
                self.fill(src[part], values, here, read, lengths)
            for i, j in np.argwhere(np.isinf(out[part]) & np.isfinite(values)).tolist():
                at = here.at + i * place.pitch + j * place.step
                value = f"{float(values[i, j]):g} at byte {at}"
                raise NoValue(f"{value} is beyond float16's 65504", "inf")
