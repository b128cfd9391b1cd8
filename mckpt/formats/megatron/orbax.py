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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.formats.base import Format, Names, packed, stored_shape
from mckpt.formats.megatron.chunked import Chunked
from mckpt.formats.megatron.orbax_arrays import METADATA, Arrays
from mckpt.formats.megatron.orbax_writing import ITEMS, lay_out
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.formats.scaling import scaled
from mckpt.geometry.box import Layout, row_major
from mckpt.mapping import Bound
from mckpt.values.dtypes import itemsize


def place(path: Path) -> Path:
    """Returns the directory with the arrays of a checkpoint."""
    return path / ITEMS if (path / ITEMS / METADATA).is_file() else path


def open_directory(path: Path) -> Orbax:
    return Orbax(path)


class _Directory(Chunked):
    """The arrays as whole chunks, in a directory with a file for each."""

    def __init__(
        self,
        arrays: Arrays,
        orders: Mapping[str, tuple[int, ...]],
        shapes: Mapping[str, tuple[int, ...]],
        turned: Collection[str],
    ) -> None:
        """orders: of the axes in the files. shapes: of arrays as their rules have them. turned: the
        arrays whose files have the last two of these axes in the other order.
        """
        tensors, items = dict[str, Any](), dict[Any, tuple[str, int, int]]()
        for key, array in arrays.arrays.items():
            shape = shapes.get(key, array.shape)
            at = (0,) * len(shape)
            tensors[key] = (array.dtype, shape, [(at, shape)])
            items[key, at] = (key, 0, math.prod(shape) * itemsize(array.dtype))
        super().__init__(arrays.in_order(orders), Metadata(tensors, arrays.others, items, {}))
        self.turned = turned

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        if key not in self.turned:
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
        super().__init__(_Directory(self.arrays, {}, {}, ()), FORMAT)
        self.root = path

    def layout(self, names: Names) -> Layout:
        scope, factors, turned = names.scope(), dict[str, float](), set[str]()
        shapes, orders = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
        for b in names.bound:
            if b.rule.scale is not None:
                factors[b.rule.key] = 1 / b.rule.scale(scope)
            inner, lead = stored_shape(b.rule, packed(b.rule, scope)), len(b.axes(scope))
            for key in (key for key, _ in b.global_keys() if key in self.arrays.arrays):
                order, shape, fits = _in_order(b, self.arrays.arrays[key].shape, scope)
                if fits and b.rule.transposed:  # the file has long ranges of the matrix's rows
                    turned.add(key)
                    ends = (math.prod(shape[lead:n]) for n in range(lead, len(shape)))
                    end = lead + [*ends].index(inner[0])
                    order = (*order[:lead], *order[end:], *order[lead:end])
                orders[key], shapes[key] = order, (*shape[:lead], *inner) if fits else shape
        self.directory = _Directory(self.arrays, orders, shapes, turned)
        self.metadata = self.directory.metadata
        layout = super().layout(names)
        layout.stored = [
            scaled(s, factors[s.key]) if s.key in factors else s for s in layout.stored
        ]
        return layout

    def optimizer(self, names: Names) -> None:
        """Returns None: the state of MaxText's optimizer is not read."""


def _in_order(
    b: Bound, shape: tuple[int, ...], scope: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Returns the axes of an array, that of the layers first; its shape with the axes in this
    order; and whether that is the shape that its rule states.
    """
    order = tuple(range(len(shape)))
    if "layer" in b.rule.stacked() and len(shape) > 1:
        order = (1, 0, *order[2:])
    shape = tuple(shape[axis] for axis in order)
    own = tuple(e(scope) for e in b.rule.shape) or stored_shape(b.rule, packed(b.rule, scope))
    return order, shape, shape == (*b.axes(scope), *own)


FORMAT = Format(
    "orbax",
    f"{METADATA} of Orbax",
    megatron=True,
    detect=lambda path: (place(path) / METADATA).is_file(),
    open=open_directory,
    lay_out=lay_out,
    parts=(f"{ITEMS}/*", f"{ITEMS}/d/*", "_CHECKPOINT_METADATA", "commit_success.txt"),
    global_keys=True,
    layer_keys=True,
    last=f"{ITEMS}/{METADATA}",
)
