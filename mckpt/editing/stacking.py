"""The edit that takes each layer from one of several models, as mergekit's passthrough does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import KEPT, Edit
from mckpt.editing.grafting import padding
from mckpt.editing.layers import (
    INDEXERS,
    LAYER,
    NOT_BY_LAYER,
    Layers,
    fitted,
    has_indexer,
    numbered,
    with_indexers,
)
from mckpt.editing.pieces import again, digest_of, in_files, number_of, only
from mckpt.errors import UsageError, counted
from mckpt.geometry.box import Layout, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, equal
from mckpt.mapping.schema import CARRIED, schema

BEFORE = ("embed.", "positions.", "token_types.", CARRIED)  # of tensors before the layers


@dataclass(frozen=True)
class Stack(Edit):
    """Layers of several models of one shape, one after the other.

    order: for each new layer the number of its model and of the layer there. Model 0 is SRC. What
        lies before the layers is that of the first layer's model, and what lies behind them that
        of the last one's.
    """

    order: tuple[tuple[int, int], ...]
    digests: tuple[str, ...]  # of the places of the others' tensors
    others: tuple[Checkpoint, ...] = field(repr=False, compare=False)
    contract = KEPT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Stack:
        raise ValueError("is written as a recipe of mergekit; see `mckpt merge --recipe`")

    @staticmethod
    def made(order: Sequence[tuple[int, int]], others: Sequence[Checkpoint]) -> Stack:
        return Stack(tuple(order), tuple(digest_of(o.layout) for o in others), tuple(others))

    @property
    def data(self) -> dict[str, Any]:
        return {"order": [list(one) for one in self.order], "digests": list(self.digests)}

    @property
    def words(self) -> str:
        return f"{counted(len(self.order), 'layer')} of {counted(1 + len(self.others), 'model')}"

    def of_source(self, source: Checkpoint, dims: Dims, before: Sequence[Edit]) -> Stack:
        """Returns the edit. Raises UsageError for models of other dims than the first one's."""
        free = {"num_layers", *INDEXERS, *_by_layer(dims), *schema().by_layer()}
        for other in self.others:
            apart = [
                f"{name}: {other.dims[name]!r}, and {value!r} in the first model"
                for name, value in dims.items()
                if name not in free and not equal(other.dims[name], value)
            ]
            if apart:
                raise UsageError.of(f"{other.path}: is a model of other dims:", apart)
        return self

    def dims(self, dims: Dims) -> Dims:
        models = [dims, *(other.dims for other in self.others)]
        for number, found in enumerate(models):
            own = tuple((layer, False) for model, layer in self.order if model == number)
            Layers(own).dims(found)  # refuses layers that there are not
            if found["mtp_layers"]:
                raise UsageError("passthrough: a model has layers of multi-token prediction")
        by_layer = {
            name: [models[model][name][layer] for model, layer in self.order]
            for name in _by_layer(dims)
            if len(dims[name]) == dims["num_layers"]
        }
        held = [has_indexer(layer, models[model]) for model, layer in self.order]
        out = fitted({**dims, **by_layer, "num_layers": len(self.order)})
        return with_indexers("passthrough", out, held)

    def layers(self, before: list[int] | None) -> None:
        return None

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        files, stored, dropped = [*layout.files], list[Stored](), dict(layout.dropped)
        after, shapes = self.dims(dims), dict[str, tuple[int, ...]]()
        models = [(layout, dims), *((other.layout, other.dims) for other in self.others)]
        others = {n: shape for one, _ in models[1:] for n, shape in one.shapes.items()}
        for number, (one, before) in enumerate(models):
            taken = list[Stored]()
            numbers = np.array([number_of(files, file) for file in one.files], "i4")
            places: dict[int, list[int]] = {}
            for new, (model, old) in enumerate(self.order):
                if model == number:
                    places.setdefault(old, []).append(new)
            for s in one.stored:
                placed, held = in_files(s, numbers), s.layer.tolist()
                if any(LAYER in name for name in s.tensors):
                    at = [(row, n) for row, old in enumerate(held) for n in places.get(old, ())]
                    kept, lost = list(again(placed, at)), {*held} - places.keys()
                else:
                    own = self._around(number)
                    kept = list(only([placed], own))
                    lost = set() if kept else {0}
                    if number == 0 and not s.replica:  # rows of padding are those of SRC
                        kept += padding(placed, {n: x for n, x in others.items() if not own(n)})
                taken += kept
                if number == 0 and not s.replica:
                    dropped |= {
                        s.key.format(layer=n, mtp=n, expert=0): "is not taken of the first model"
                        for n in lost
                    }
            found = numbered(replace(one, stored=taken), before, after)
            stored, shapes = [*stored, *found.stored], {**found.shapes, **shapes}
        return replace(
            layout,
            files=files,
            stored=stored,
            shapes=shapes,
            dropped=dropped,
            ignored={**layout.ignored, **dropped},
        )

    def _around(self, number: int) -> Callable[[str], bool]:
        """Returns whether a tensor outside of the layers is a model's own, by its logical name."""
        first, last = self.order[0][0], self.order[-1][0]
        return lambda name: number == (first if name.startswith(BEFORE) else last)


def _by_layer(dims: Dims) -> set[str]:
    return {n for n, v in dims.items() if isinstance(v, list | tuple)} - {*NOT_BY_LAYER}
