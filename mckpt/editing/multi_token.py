"""The edit of layers of multi-token prediction: new ones, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mckpt.checkpoint.checkpoint import without_mtp_layers
from mckpt.editing.edits import EXACT, Edit
from mckpt.editing.layers import (
    LAYER,
    has_indexer,
    numbered,
    refuse_apart,
    with_indexers,
)
from mckpt.editing.pieces import again, file_of, kinds_of_new, new_values, under, with_new_states
from mckpt.errors import UsageError, counted
from mckpt.geometry.box import ZEROS, Box, Layout, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, without_mtp
from mckpt.mapping.schema import schema

MTP = "layers.{layer}.mtp"
BLOCK = 256  # the most rows of an identity that are in a file


@dataclass(frozen=True)
class MultiToken(Edit):
    """Adds layers of multi-token prediction, each a copy of the last decoder layer, or drops all.

    A new layer passes the hidden state through: its projection of [embedding, hidden state] is
    [0, identity], its norms of both are 1, and the norm at its end is that of the model. add: their
    number; 0 drops all.
    """

    add: int
    contract = EXACT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> MultiToken:
        add = given.get("add")
        if given == {"drop": True}:
            return MultiToken(0)
        if len(given) != 1 or isinstance(add, bool) or not isinstance(add, int) or add < 1:
            raise ValueError("wants add, a number of layers, or drop: true")
        schema().check("mtp_layers", add)
        return MultiToken(add)

    @property
    def words(self) -> str:
        many = counted(self.add, "layer")
        return f"{many} of multi-token prediction" + " more" * bool(self.add)

    def dims(self, dims: Dims) -> Dims:
        count = dims["num_layers"]
        if not self.add:
            if not dims["mtp_layers"]:
                raise UsageError("mtp: the model has no layers of multi-token prediction")
            return without_mtp(dims)
        refuse_apart("mtp", dims)
        if dims["layer_parts"][count - 1] not in ("attn mlp", "attn moe") or not dims["causal"]:
            raise UsageError(
                f"mtp: the last layer of the model is `{dims['layer_parts'][count - 1]}`, and a"
                " layer of multi-token prediction has an attention and an mlp or experts"
            )
        out = {**dims, "mtp_layers": dims["mtp_layers"] + self.add}
        for name, dim in schema().dims.items():
            names = dim.neutral.names if dim.type == "list" and dim.neutral else ()
            if "mtp_layers" in names or "moe_layers" in names:
                out[name] = [*dims[name], *[dims[name][count - 1]] * self.add]
        held = [has_indexer(layer, dims) for layer in range(count + dims["mtp_layers"])]
        return with_indexers("mtp", out, [*held, *[has_indexer(count - 1, dims)] * self.add])

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        count, first = dims["num_layers"], dims["num_layers"] + dims["mtp_layers"]
        if not self.add:
            return numbered(without_mtp_layers(layout, count), dims, self.dims(dims))
        kinds = kinds_of_new("mtp", layout)
        ends = {f"final_norm.{part}": f"{MTP}.norm.{part}" for part in ("weight", "bias")}
        end = under(layout, ends)
        files, stored = [*layout.files], [*layout.stored]
        shapes = {**layout.shapes, **end.shapes}
        for new in range(first, first + self.add):
            for s in (s for s in layout.stored if not s.replica):
                if all(LAYER in name for name in s.tensors):
                    last = [
                        (row, new) for row, at in enumerate(s.layer.tolist()) if at == count - 1
                    ]
                    stored += again(s, last)
            stored += [replace(s, layer=np.full(len(s), new)) for s in end.stored]
            made = Layout(files, [*_new(files, layout, dims, new)], {})
            made.shapes |= {
                p.tensor: _extent(made, p.tensor) for s in made.stored for p in s.pieces
            }
            wanted = dict.fromkeys(made.shapes, kinds)
            made = with_new_states(made, wanted)
            stored, files, shapes = [*stored, *made.stored], made.files, {**shapes, **made.shapes}
        return replace(layout, files=files, stored=stored, shapes=shapes)


def _extent(layout: Layout, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor from its boxes."""
    ends = [np.add(*p.box) for s in layout.stored for p in s.pieces if p.tensor == name]
    return tuple(np.max(ends, axis=0).tolist())


def _new(files: list[str], layout: Layout, dims: Dims, layer: int) -> Iterator[Stored]:
    """Yields the tensors of a layer of multi-token prediction that no decoder layer has."""
    dtypes = {name: s.dtype for s in layout.stored for name in s.tensors}
    width = dims["hidden_size"]
    block = max(n for n in range(1, BLOCK + 1) if width % n == 0)
    identity, one = np.eye(block, dtype="f4"), np.ones(width, "f4")
    values = str(file_of(identity.tobytes() + one.tobytes()))
    one_or_zero = (ZEROS, 0) if dims["norm_offset"] else (values, identity.nbytes)
    for norm in ("embed_norm", "hidden_norm"):
        for part, (path, at) in (("weight", one_or_zero), ("bias", (ZEROS, 0))):
            if dtype := dtypes.get(f"final_norm.{part}"):
                name = f"{MTP}.{norm}.{part}"
                yield new_values(files, path, name, layer, Box((0,), (width,)), dtype, at)
    name = f"{MTP}.proj.weight"
    dtype = dtypes.get(name, dtypes["embed.weight"])
    boxes = [(ZEROS, Box((0, 0), (width, width)))]  # the half of the embedding
    for row in range(0, width, block):
        boxes.append((ZEROS, Box((row, width), (block, row))))
        boxes.append((values, Box((row, width + row), (block, block))))
        boxes.append((ZEROS, Box((row, width + row + block), (block, width - row - block))))
    for path, box in boxes:
        if min(box.shape):
            yield new_values(files, path, name, layer, box, dtype)
