"""Checkpoints of Orbax, as MaxText saves them.

    DIR/items/_METADATA, manifest.ocdbt, d/*    the tree of arrays (`orbax_arrays`)
    DIR/_CHECKPOINT_METADATA, commit_success.txt

MaxText saves the training's state: the weights below `params.params`, `opt_state` and `step`. A
checkpoint of weights alone has the first. `items` itself is a checkpoint too.

The arrays of all layers of a weight are one, whose second axis counts the layers, unless
scan_layers is false: then the keys have their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.formats.base import Format, Names, packed, stored_shape
from mckpt.formats.megatron.chunked import Chunked
from mckpt.formats.megatron.orbax_arrays import METADATA, Arrays
from mckpt.formats.megatron.orbax_writing import ITEMS, lay_out
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.formats.scaling import with_factors
from mckpt.geometry.box import Layout, row_major
from mckpt.mapping import Bound


def place(path: Path) -> Path:
    """Returns the directory with the arrays of a checkpoint."""
    return path / ITEMS if (path / ITEMS / METADATA).is_file() else path


class _View(NamedTuple):
    """How an array is read."""

    order: tuple[int, ...]  # of its axes in the file: the layers first
    shape: tuple[int, ...]  # as its rule has it
    turned: bool = False  # the last two axes of `shape` are in the other order in the file


class _Directory(Chunked):
    """The arrays as whole chunks, in a directory with a file for each."""

    def __init__(self, arrays: Arrays, views: Mapping[str, _View]) -> None:
        tensors, items = dict[str, Any](), dict[Any, tuple[str, int, int]]()
        for key, array in arrays.opened.items():
            shape = views[key].shape if key in views else array.shape
            at = (0,) * len(shape)
            tensors[key] = (array.dtype.name, shape, [(at, shape)])
            items[key, at] = (key, 0, arrays.objects[key].size)
        root = arrays.in_order({key: view.order for key, view in views.items()})
        super().__init__(root, Metadata(tensors, arrays.others, items, {}))
        self.views = views

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        if not self.views[key].turned:
            return None
        *lead, rows, columns = sizes
        return (*row_major((*lead, columns, rows))[:-2], 1, rows)

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        for (key, _), (file, at, nbytes) in self.metadata.items.items():
            yield Span(key, str(self.root / file), at, nbytes, self.metadata.tensors[key][0])


class Orbax(TorchDist):
    """An opened checkpoint. The dialect of MaxText names its arrays."""

    def __init__(self, path: Path) -> None:
        self.arrays = Arrays(place(path))
        super().__init__(_Directory(self.arrays, {}), FORMAT)
        self.root = path

    def layout(self, names: Names) -> Layout:
        scope, opened = names.scope(), self.arrays.opened
        views = {
            key: _view(b, opened[key].shape, scope)
            for b in names.bound
            for key, _ in b.global_keys()
            if key in opened
        }
        self.directory = _Directory(self.arrays, views)
        self.metadata = self.directory.metadata
        factors = {name: 1 / factor for name, factor in names.factors.items()}
        return with_factors(super().layout(names), factors)

    def optimizer(self, names: Names) -> None:
        """Returns None: the state of MaxText's optimizer is not read."""


def _view(b: Bound, stored: tuple[int, ...], scope: dict[str, Any]) -> _View:
    """Returns how an array of this shape is read."""
    order = tuple(range(len(stored)))
    if "layer" in b.rule.stacked() and len(stored) > 1:
        order = (1, 0, *order[2:])
    shape = tuple(stored[axis] for axis in order)
    axes, inner = b.axes(scope), stored_shape(b.rule, packed(b.rule, scope))
    own, lead = tuple(e(scope) for e in b.rule.shape) or inner, len(axes)
    if shape != (*axes, *own):  # an error, or a vocabulary with padding
        return _View(order, shape)
    if b.rule.transposed:  # the file has long ranges of the matrix's rows
        ends = (math.prod(shape[lead:n]) for n in range(lead, len(shape)))
        end = lead + [*ends].index(inner[0])
        order = (*order[:lead], *order[end:], *order[lead:end])
    return _View(order, (*axes, *inner), b.rule.transposed)


FORMAT = Format(
    "orbax",
    f"{METADATA} of Orbax",
    megatron=True,
    detect=lambda path: (place(path) / METADATA).is_file(),
    open=Orbax,
    lay_out=lay_out,
    parts=(f"{ITEMS}/*", f"{ITEMS}/*/*", "_CHECKPOINT_METADATA", "commit_success.txt"),
    global_keys=True,
    layer_keys=True,
    last=f"{ITEMS}/{METADATA}",
)
