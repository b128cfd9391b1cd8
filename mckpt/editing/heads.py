"""Edits of heads: an output layer of its own, and repeated heads of keys and values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mckpt.editing.edits import EXACT, Edit
from mckpt.editing.pieces import rows, under
from mckpt.errors import UsageError
from mckpt.geometry.box import Layout, Piece, Stored
from mckpt.mapping import Dims


@dataclass(frozen=True)
class Untie(Edit):
    """Gives a model whose embedding is also its output layer an output layer of its own."""

    contract = EXACT
    words = "the output layer is a copy of the embedding"

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Untie:
        if given:
            raise ValueError("has no parameters")
        return Untie()

    def dims(self, dims: Dims) -> Dims:
        if not dims["tied"]:
            raise UsageError("untie: the model has an output layer of its own")
        return {**dims, "tied": False}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        head = under(layout, {"embed.weight": "lm_head.weight"})
        shapes = {**layout.shapes, **head.shapes}
        return replace(layout, stored=[*layout.stored, *head.stored], shapes=shapes)


@dataclass(frozen=True)
class RepeatHeads(Edit):
    """Repeats each key and value head, so that more tensor-parallel ranks can have one."""

    times: int
    contract = EXACT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> RepeatHeads:
        if given.keys() != {"times"} or not isinstance(given["times"], int):
            raise ValueError("wants times, a number")
        return RepeatHeads(given["times"])

    @property
    def words(self) -> str:
        return f"each key and value head is there {self.times} times"

    def dims(self, dims: Dims) -> Dims:
        groups = dims["num_query_groups"] * self.times
        others = ("mla", "kv_sharing_layers", "full_qk_norm", "encoder_layers")
        if any(map(dims.get, others)) or any(dims["linear_layers"]):
            raise UsageError(
                "kv_heads: the model has an attention without such heads in each layer"
            )
        if self.times < 2 or dims["num_heads"] % groups:
            raise UsageError(
                f"kv_heads: {dims['num_query_groups']} heads times {self.times} do not divide the"
                f" {dims['num_heads']} heads of the queries"
            )
        each = [n * self.times for n in dims["query_groups"]]
        return {**dims, "num_query_groups": groups, "query_groups": each}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        heads = {"k": dims["head_dim"], "v": dims["v_head_dim"]}
        shapes, stored = dict(layout.shapes), list[Stored]()
        for name, shape in layout.shapes.items():
            if self._width(name, heads):
                shapes[name] = (shape[0] * self.times, *shape[1:])
        for s in layout.stored:
            wide = [p for p in s.pieces if self._width(p.tensor, heads)]
            if not wide:
                stored.append(s)
                continue
            rest = tuple(p for p in s.pieces if p not in wide)
            stored += [replace(s, pieces=rest, view=True)] if rest else []
            for at in range(self.times):
                pieces = itertools.chain.from_iterable(
                    _spread(p, self._width(p.tensor, heads), self.times, at) for p in wide
                )
                stored.append(replace(s, pieces=tuple(pieces), view=True))
        return replace(layout, stored=stored, shapes=shapes)

    @staticmethod
    def _width(name: str, heads: Mapping[str, int]) -> int:
        """Returns the rows of one head of a tensor with heads of keys or values, else 0."""
        found = re.fullmatch(r"layers\.\{layer\}\.attn\.([kv])\.(weight|bias)(@.*)?", name)
        return heads[found[1]] if found else 0


def _spread(piece: Piece, width: int, times: int, at: int) -> Iterator[Piece]:
    """Yields the parts of a piece as the copy number `at` of each of their heads of `width` rows,
    of which there are `times`.
    """
    first, end = piece.box.offset[0], piece.box.offset[0] + piece.box.shape[0]
    for head in range(first // width, -(-end // width)):
        for part in rows(piece, head * width, (head + 1) * width):
            within = part.box.offset[0] - head * width
            offset = ((head * times + at) * width + within, *part.box.offset[1:])
            yield part._replace(box=part.box._replace(offset=offset))
