"""Edits of heads: an output layer of its own, and more or fewer heads of keys and values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mckpt.checkpoint.logical import Reader
from mckpt.editing.averaging import Matrix, Origin, Place, places_of, terms, with_terms
from mckpt.editing.edits import EXACT, FORMULA, Edit
from mckpt.editing.pieces import only, rows, under
from mckpt.errors import UsageError
from mckpt.formats.megatron.optimizer import MASTER
from mckpt.geometry.box import Layout, Piece, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, plain
from mckpt.mapping.schema import schema
from mckpt.values.adding import FACTORS
from mckpt.values.element import SUM
from mckpt.values.summing import Sum

ROWS = 1024  # of the vocabulary that are compared at once


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
class Tie(Edit):
    """Leaves out an output layer that equals the embedding bit for bit, as a tied model does.

    rows: those of the vocabulary, without padding. The states are those of the embedding.
    """

    rows: int
    contract = EXACT
    words = "the embedding is the output layer too"

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Tie:
        if given:
            raise ValueError("has no parameters")
        return Tie(dims["vocab_size"])

    def dims(self, dims: Dims) -> Dims:
        if dims["tied"]:
            raise UsageError("tie: the embedding of the model is its output layer already")
        return {**dims, "tied": True}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        pair = ("embed.weight", "lm_head.weight")
        compared = list(only(layout.stored, lambda name: name in pair))
        reader = Reader(
            replace(layout, stored=compared, shapes={n: layout.shapes[n] for n in pair})
        )
        apart = 0
        for at in range(0, self.rows, ROWS):
            end = min(at + ROWS, self.rows)
            one, other = (
                np.ascontiguousarray(reader[name][at:end].numpy()).view("u1").reshape(end - at, -1)
                for name in pair
            )
            same = one.shape == other.shape
            apart += int((one != other).any(axis=1).sum()) if same else end - at
        if apart:
            raise UsageError(
                f"tie: {apart:,} of {self.rows:,} rows of the output layer differ from the"
                " embedding; leave tie out"
            )
        why = "it equals the embedding"
        return replace(
            layout,
            stored=list(only(layout.stored, lambda name: name.partition("@")[0] != pair[1])),
            dropped={**layout.dropped, pair[1]: why},
            ignored={**layout.ignored, pair[1]: why},
        )


@dataclass(frozen=True)
class RepeatHeads(Edit):
    """Repeats each key and value head, so that more tensor-parallel ranks can have one."""

    times: int
    contract = EXACT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Edit:
        if given.keys() == {"mean"} and type(given["mean"]) is int:
            return MeanHeads(given["mean"])
        if given.keys() != {"times"} or type(given["times"]) is not int:
            raise ValueError("wants times or mean, a number")
        return RepeatHeads(given["times"])

    @property
    def words(self) -> str:
        return f"each key and value head is there {self.times} times"

    def dims(self, dims: Dims) -> Dims:
        refuse_other_heads(dims)
        groups = dims["num_query_groups"] * self.times
        each = [n * self.times for n in dims["query_groups"]]
        if self.times < 2 or any(dims["num_heads"] % n for n in {groups, *each}):
            raise UsageError(
                f"kv_heads: {dims['num_query_groups']} heads times {self.times} do not divide the"
                f" {dims['num_heads']} heads of the queries"
            )
        return {**dims, "num_query_groups": groups, "query_groups": each}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        shapes, stored = dict(layout.shapes), list[Stored]()
        for name, shape in layout.shapes.items():
            if width_of(name, dims):
                shapes[name] = (shape[0] * self.times, *shape[1:])
        for s in layout.stored:
            wide = [p for p in s.pieces if width_of(p.tensor, dims)]
            if not wide:
                stored.append(s)
                continue
            rest = tuple(p for p in s.pieces if p not in wide)
            stored += [replace(s, pieces=rest, view=True)] if rest else []
            for at in range(self.times):
                pieces = itertools.chain.from_iterable(
                    _spread(p, width_of(p.tensor, dims), self.times, at) for p in wide
                )
                stored.append(replace(s, pieces=tuple(pieces), view=True))
        return replace(layout, stored=stored, shapes=shapes)


def refuse_other_heads(dims: Dims) -> None:
    """Raises UsageError for a model without such heads of keys and values in each layer."""
    others = ("mla", "kv_sharing_layers", "full_qk_norm", "encoder_layers")
    if any(map(dims.get, others)) or any(dims["linear_layers"]):
        raise UsageError("kv_heads: the model has an attention without such heads in each layer")


def width_of(name: str, dims: Dims) -> int:
    """Returns the rows of one head of a tensor with heads of keys or values, else 0."""
    found = re.fullmatch(r"layers\.\{layer\}\.attn\.([kv])\.(weight|bias)(@.*)?", plain(name))
    if not found:
        return 0
    return int(schema().of_shape(name, dims)["head_dim" if found[1] == "k" else "v_head_dim"])


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


@dataclass(frozen=True)
class MeanHeads(Edit):
    """Makes `mean` heads of keys and values, each the mean of as many neighbours.

    An element is the sum of float32 values times 1/n, by fused multiply-adds in the order of the
    heads, rounded once. Means of master copies and moments are computed alike; a weight that has a
    master copy is the rounded mean of the master copies.
    """

    mean: int
    contract = FORMULA
    last = True

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> MeanHeads:
        return MeanHeads(given["mean"])

    @property
    def words(self) -> str:
        return (
            f"{self.mean} heads of keys and values are the means of neighbours: fused multiply-adds"
            " in float32 in their order, rounded once"
        )

    def dims(self, dims: Dims) -> Dims:
        refuse_other_heads(dims)
        old = dims["num_query_groups"]
        if (
            not 0 < self.mean < old
            or old % self.mean
            or any(n % (old // self.mean) for n in dims["query_groups"])
        ):
            raise UsageError(f"kv_heads: mean {self.mean}: does not divide the {old} heads")
        each = [n * self.mean // old for n in dims["query_groups"]]
        return {**dims, "num_query_groups": self.mean, "query_groups": each}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        num = dims["num_query_groups"] // self.mean
        widths = {name: width for name in layout.shapes if (width := width_of(name, dims))}
        shapes = {
            name: (shape[0] // num, *shape[1:]) if name in widths else shape
            for name, shape in layout.shapes.items()
        }
        wide = list(_from_masters(layout, widths.__contains__))
        # the heads with the place `at` in their group, as if they were all
        inputs = [[_heads(s, widths, num, at) for s in wide if not s.replica] for at in range(num)]
        others = {at: places_of(replace(layout, stored=s), 0) for at, s in enumerate(inputs)}

        def words(place: Origin, of: Place, own: Matrix, turned: bool) -> list[int]:
            found = terms(of, own, turned, [1 / num] * num, 0, others, _refuse_computed)
            return Sum(*place, tuple(found)).words()

        rest = list(only(layout.stored, lambda name: name not in widths))
        for s in inputs[0]:
            _refuse_computed(s)
        stored = rest + [with_terms(s, shapes, SUM, words) for s in inputs[0] if s.pieces]
        return replace(layout, stored=stored, shapes=shapes)


def _from_masters(layout: Layout, wanted: Any) -> Iterator[Stored]:
    """Yields the wanted tensors; weights are read from their master copies, if they have some."""
    dtypes = {name: s.dtype for s in layout.stored for name in s.tensors}
    suffix = f"@{MASTER}"
    yield from only(
        layout.stored, lambda name: wanted(name) and f"{name}{suffix}" not in layout.shapes
    )
    for s in only(layout.stored, lambda name: wanted(name) and name.endswith(suffix)):
        for piece in s.pieces:
            name = piece.tensor.removesuffix(suffix)
            wide = s.stored_as if s.stored_as != dtypes[name] else None
            own = (piece._replace(tensor=name),)
            yield replace(s, pieces=own, dtype=dtypes[name], rounded_from=wide, view=True)


def _heads(s: Stored, widths: dict[str, int], num: int, at: int) -> Stored:
    """Returns the heads at, at + num and so on of stored tensors, as the heads 0, 1 and so on."""
    found: list[Piece] = []
    for piece in (p for p in s.pieces if not p.copy):
        width, end = widths[piece.tensor], piece.box.offset[0] + piece.box.shape[0]
        for new, first in enumerate(range(at * width, end, num * width)):
            for part in rows(piece, first, first + width):
                row, *others = part.box.offset
                offset = (row - first + new * width, *others)
                found.append(part._replace(box=part.box._replace(offset=offset)))
    return replace(s, pieces=tuple(found), view=True)


def _refuse_computed(s: Stored, _: int = 0) -> None:
    if s.scales or s.added or s.stored_as not in FACTORS:
        raise UsageError(
            f"kv_heads: mean: {s.key} is stored quantised or as {s.stored_as}; convert the"
            " checkpoint to one of plain weights first"
        )
