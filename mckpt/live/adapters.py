"""Adapters (LoRA) that wrap the modules of a live model: merged into its weights, or on their own.

The factors lie on the ranks as `sharded_state_dict()` describes them. Under the names of PEFT they
are whole, in one file that has a header and no data: its bytes are only places, by which the plan
of a merge knows the factors, as it knows those of an adapter on disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mckpt.adapters import merging
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.adapters.forms import PeftForm, peft_form
from mckpt.adapters.peft import PeftAdapter, open_adapter
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import UsageError
from mckpt.formats.hf_config import ADAPTER
from mckpt.formats.hf_files import tensors_of
from mckpt.geometry.join import UNSCALED
from mckpt.live.buckets import OWN, Buckets
from mckpt.live.model import adapter_of, required
from mckpt.values.adding import NO_AXIS, Factor, Product, lines
from mckpt.values.dtypes import sum_dtype

if TYPE_CHECKING:
    import torch

    from mckpt.live.steps import LiveMove

# sums that exist at a time: 128 MiB in float64. An H100 then adds an adapter of rank 32 to half of
# Llama 8B in 0.053 s, and in 0.036 s with products in float32, whose last bits would be its own.
SUMS = 16 << 20


class LiveTensors(NamedTuple):
    """The tensors of a live model that are asked for."""

    model: Checkpoint  # its weights, or the factors of its adapters
    merged: AdapterCheckpoint | None = None  # the adapters whose products are added to the weights
    form: PeftForm | None = None  # the same as a directory of PEFT


def chosen(model: Checkpoint, choice: str) -> LiveTensors:
    """Returns a live model with its adapters merged into its weights, its adapters only, or the
    model without them.

    choice: `adapter` of `SaveOptions`. Raises UsageError if the model lacks adapters.
    """
    found = adapter_of(model)
    if choice == "only":
        return LiveTensors(required(found))
    if found is None or choice == "none":
        return LiveTensors(model)
    form = peft_form(found)
    merged = merging.merge(model, without_values(model.path, form), look=False)
    return LiveTensors(merged, found, form)


def without_values(root: Path, form: PeftForm) -> PeftAdapter:
    """Returns a new directory of PEFT below `root`, whose factors are a hole in their file."""
    directory = root / "adapter"
    directory.mkdir()
    for output in form.outputs:
        with open(directory / output.path, "wb") as file:
            for _, head in output.fixed(None):
                file.write(head)
            file.truncate(output.size)
    (directory / ADAPTER[0]).write_bytes(form.config)
    return open_adapter(directory)


class _PeftTensor(NamedTuple):
    """A tensor of PEFT."""

    at: int  # its first byte in the file
    name: str


class Products:
    """The products of adapters that the ranks add to the weights that they send."""

    def __init__(self, buckets: Buckets, form: PeftForm, own: int) -> None:
        """buckets: the plan of the merged weights. form: the adapters. own: this rank in the plan.

        Raises UsageError for DoRA.
        """
        self._grids = buckets.joined.grids
        (output,) = form.outputs
        self._places = sorted(_PeftTensor(at, row.key) for row, at in tensors_of(output))
        self._known: dict[int, Product] = {}
        self._held: dict[str, torch.Tensor] = {}
        self.needed: set[str] = set()  # the tensors of PEFT that the products of this rank need
        for bucket in buckets.listed:
            pairs = zip(bucket.copies["grid"].tolist(), bucket.rank.tolist(), strict=True)
            for grid, rank in {pair for pair in pairs if pair[0] != UNSCALED}:
                product = self._product(grid)
                if rank == own or (rank == OWN and own in bucket.to):
                    self.needed |= {self._place(f).name for f in (product.left, product.right)}

    def _product(self, grid: int) -> Product:
        if (found := self._known.get(grid)) is None:
            found = self._known[grid] = Product.of(self._grids[grid:])
            if found.axis != NO_AXIS:
                raise UsageError(
                    "the adapters of the live model are DoRA, whose lengths of rows mckpt does not"
                    " compute in memory: give adapter='only', or write the merged weights with"
                    " mckpt.live.save_hf"
                )
        return found

    def _place(self, factor: Factor) -> _PeftTensor:
        return self._places[bisect_right(self._places, (factor.at, "\U0010ffff")) - 1]

    def take(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keeps the factors that this rank received, until `forget`."""
        self._held = {name: tensor.reshape(-1) for name, tensor in tensors}

    def forget(self) -> None:
        """Frees the factors."""
        self._held = {}

    def add(self, move: LiveMove, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Fills `out` [m, n] with the sums of `weights` [m, n] and their product, as `adding.add`
        does, to the same bits. Neither TF32 nor autocast changes products in float64.
        """
        import torch

        product = self._product(move.grid)
        item, (pitch, step) = weights.element_size(), move.src_strides
        start = (move.origin - product.at) // item
        turned, row, down, column, along = lines(product, move.shape, start, pitch, step)
        weights, out = weights.view(move.shape), out.view(move.shape)
        if turned:
            weights, out = weights.T, out.T
        m, n = weights.shape
        left = self._rows(product.left, row, down, (m, product.rank))
        right = self._rows(product.right.turned, column, along, (n, product.rank)).T.double()
        wide = getattr(torch, sum_dtype(item, out.element_size()))
        for first in range(0, m, height := max(1, SUMS // n)):
            part = slice(first, first + height)
            sums = (left[part].double() * product.scale) @ right
            out[part].copy_(sums.to(wide).add_(weights[part]))

    def _rows(self, factor: Factor, first: int, step: int, shape: tuple[int, int]) -> torch.Tensor:
        """Returns every `step`-th row of a factor, from row `first` on."""
        place = self._place(factor)
        held = self._held[place.name]
        start = (factor.at - place.at) // held.element_size() + first * factor.down
        strides = step * factor.down, factor.along
        return held.as_strided(shape, strides, held.storage_offset() + start)
