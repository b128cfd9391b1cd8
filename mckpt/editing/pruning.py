"""The edit that leaves out experts, units of mlps, heads or parts of the residual stream.

Which ones stay is decided elsewhere, by a calibration, and given as lists of indices.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mckpt.editing.edits import KEPT, Edit
from mckpt.editing.layers import LAYER, ranges, refuse_apart
from mckpt.editing.pieces import again, rows
from mckpt.errors import UsageError
from mckpt.geometry.box import Layout, Piece, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, plain
from mckpt.mapping.schema import CARRIED, schema

EXPERTS, FFN, EXPERT_FFN, HEADS, HIDDEN = "experts", "ffn", "expert_ffn", "heads", "hidden"


class Axis(NamedTuple):
    """An axis of which a model keeps some elements, such as its experts."""

    words: str
    counted: str  # the dim that counts it
    dims: tuple[str, ...]  # all dims that change with it
    part: str  # the part of a layer that has it, "" for all


AXES = {
    EXPERTS: Axis("experts", "num_experts", ("num_experts",), "moe"),
    FFN: Axis("units of each dense mlp", "ffn_size", ("ffn_size", "ffn_sizes"), "mlp"),
    EXPERT_FFN: Axis("units of each expert", "expert_ffn_size", ("expert_ffn_size",), "moe"),
    HEADS: Axis(
        "heads of keys and values",
        "num_query_groups",
        ("num_query_groups", "query_groups", "num_heads"),
        "attn",
    ),
    HIDDEN: Axis("elements of the residual stream", "hidden_size", ("hidden_size",), ""),
}
Indices = tuple[int, ...]
# bytes of memory for the ranges of elements that are kept, of all layers: the most, and those that
# a range and its copy in a layer take
MOST, RANGE, COPY = 2 << 30, 1000, 200


@dataclass(frozen=True)
class Prune(Edit):
    """Keeps some experts, units of each dense mlp or of each expert, heads of keys and values with
    their queries, or elements of the residual stream, in the given order.

    sizes: how many are kept of each. digest: of the indices. kept: what -> layer -> indices.
    """

    sizes: tuple[tuple[str, int], ...]
    digest: str
    kept: Mapping[str, Mapping[int, Indices]] = field(repr=False, compare=False)
    contract = KEPT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Prune:
        if not given or given.keys() - AXES.keys():
            raise ValueError(f"wants indices of {', '.join(AXES)}")
        kept = {what: _by_layer(what, value, dims) for what, value in given.items()}
        sizes = tuple((what, len(next(iter(lists.values())))) for what, lists in kept.items())
        digest = hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()
        return Prune(sizes, digest, kept)

    @property
    def data(self) -> dict[str, Any]:
        """Returns the kept indices as ranges, by layer where layers differ."""
        out: dict[str, Any] = {}
        for what, kept in self.kept.items():
            texts = {
                str(layer): ",".join(f"{at}-{at + count - 1}" for at, count in _runs(one))
                for layer, one in kept.items()
            }
            alike = len(set(kept.values())) == 1
            out[what] = next(iter(texts.values())) if alike else texts
        return out

    @classmethod
    def again(cls, data: Any, dims: Dims) -> Edit:
        return cls.of(data, dims)

    @property
    def words(self) -> str:
        return "kept are " + ", ".join(f"{size} {AXES[what].words}" for what, size in self.sizes)

    def dims(self, dims: Dims) -> Dims:
        out = {**dims}
        for what, size in self.sizes:
            refuse_apart(f"prune: {what}", dims)
            old = dims[AXES[what].counted]
            names = AXES[what].dims
            if what == EXPERT_FFN and not any("mlp" in one.split() for one in dims["layer_parts"]):
                # such families state the width of experts as that of the mlps that they lack
                same = (name for name in AXES[FFN].dims if {old} == {*_listed(dims[name])})
                names = (*names, *same)
            for name in names:
                values = dims[name]
                if isinstance(values, list | tuple):
                    out[name] = [value * size // old for value in values]
                else:
                    out[name] = values * size // old
        if EXPERTS in self.kept:
            self._refuse_groups(dims, out)
        return out

    def _refuse_groups(self, before: Dims, after: Dims) -> None:
        """Raises UsageError for experts whose groups are not those of the model any more, and for
        fewer experts than a token needs.
        """
        old, new = before["num_experts"], after["num_experts"]
        groups, best = before["router_groups"], before["router_best_groups"]
        problems = []
        if new % groups:
            problems.append(f"{new} experts are not {groups} groups of one size")
        elif new // groups * best < before["experts_per_token"]:
            problems.append(f"{new} experts: a token takes {before['experts_per_token']}")
        elif new // groups < before["router_group_experts"]:
            problems.append(f"{new // groups} experts of a group: its score needs more")
        else:
            size = new // groups
            for layer, kept in sorted(self.kept[EXPERTS].items()):
                for at in range(0, new, size):
                    if len({index // (old // groups) for index in kept[at : at + size]}) > 1:
                        problems.append(
                            f"layer {layer}: the experts {list(kept[at : at + size])} are one group"
                            f" of {size}, and were not"
                        )
        if problems:
            raise UsageError.of(
                "prune: experts: the router would not choose as it does:",
                problems,
                "Keep enough experts, and as many of each group, group after group.",
            )

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        if HIDDEN in self.kept and any(s.carried for s in layout.stored):
            raise UsageError(
                "prune: hidden: the model has towers, whose outputs have the width of its residual"
                " stream; leave hidden out"
            )
        for what in self.kept:
            layout = self._without(what, layout, dims)
        return layout

    def _without(self, what: str, layout: Layout, dims: Dims) -> Layout:
        """Returns the layout with what is kept on one axis of its tensors."""
        old, size = dims[AXES[what].counted], dict(self.sizes)[what]
        double = {**dims, **{name: _twice(dims[name]) for name in AXES[what].dims}}
        why = f"{old - size} of {old} {AXES[what].words} are left out"
        # of each tensor: the axis, the parts of which each has all, and the elements that one takes
        axes: dict[str, list[tuple[int, int, int]]] = {}
        shapes, dropped = dict(layout.shapes), dict(layout.dropped)
        for name, shape in layout.shapes.items():
            if name.startswith(CARRIED):
                continue
            wide, now = (schema().shape(name, one) for one in (double, dims))
            for axis in (axis for axis, n in enumerate(now) if wide[axis] != n):
                parts = 2 if what == HIDDEN and shape[axis] == 2 * old else 1
                axes.setdefault(name, []).append((axis, parts, shape[axis] // (old * parts)))
                own = shapes[name]
                shapes[name] = (*own[:axis], shape[axis] * size // old, *own[axis + 1 :])
                if size < old and "@" not in name:
                    dropped[f"{what} of {plain(name)}"] = why
        stored, left = list[Stored](), MOST
        for s in layout.stored:
            by_expert = what == EXPERTS and any("{expert}" in name for name in s.tensors)
            if not by_expert and not any(name in axes for name in s.tensors):
                stored.append(s)
                continue
            groups: dict[Indices, list[tuple[int, int]]] = {}
            for row, layer in enumerate(s.layer.tolist()):
                kept = self.kept[what][layer if LAYER in s.pieces[0].tensor else 0]
                groups.setdefault(kept, []).append((row, layer))
            for kept, numbers in groups.items():
                for part in again(s, numbers):
                    if by_expert:
                        stored += _experts(part, kept, dropped, why)
                        continue
                    cut = (q for p in s.pieces for q in _kept(p, axes.get(p.tensor, []), kept, old))
                    each = RANGE + COPY * len(part)
                    pieces = tuple(itertools.islice(cut, left // each + 1))
                    if (left := left - each * len(pieces)) < 0:
                        raise UsageError(
                            f"prune: {what}: the elements that are kept are so many short ranges"
                            f" that their copies need more than {MOST >> 30} GiB of memory; keep"
                            " longer ranges, or prune one axis at a time, each by an `mckpt edit`"
                        )
                    stored += [replace(part, pieces=pieces, view=True)] if pieces else []
        ignored = {**layout.ignored, **dropped}
        return replace(layout, stored=stored, shapes=shapes, dropped=dropped, ignored=ignored)


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _twice(value: Any) -> Any:
    return [2 * n for n in value] if isinstance(value, list | tuple) else 2 * value


def _experts(s: Stored, kept: Indices, dropped: dict[str, str], why: str) -> Iterator[Stored]:
    """Yields the tensors of the kept experts with their new numbers, and notes the others."""
    new = {old: number for number, old in enumerate(kept)}
    places = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
    for name in [n for n in s.tensors if "@" not in n]:
        left = (place for place in places if place[1] not in new)
        dropped |= {name.format(layer=layer, expert=expert): why for layer, expert in left}
    within = [(row, layer) for row, (layer, expert) in enumerate(places) if expert in new]
    for part in again(s, within):
        yield replace(part, expert=np.array([new[expert] for expert in part.expert.tolist()]))


def _kept(
    piece: Piece, axes: Sequence[tuple[int, int, int]], kept: Indices, old: int
) -> Iterator[Piece]:
    """Yields the parts of a piece that are kept of some axes of its tensor."""
    if not axes:
        yield piece
        return
    for part in _kept(piece, axes[:-1], kept, old):
        yield from _taken(part, *axes[-1], kept, old)


def _taken(
    piece: Piece, axis: int, parts: int, width: int, kept: Indices, old: int
) -> Iterator[Piece]:
    """Yields the parts of a piece that are kept of an axis, at their new places.

    The axis has `parts` times `old` elements of `width` each.
    """
    for part in range(parts):
        to = part * len(kept) * width
        for first, count in _runs(kept):
            low = (part * old + first) * width
            for one in rows(piece, low, low + count * width, axis):
                offset = list(one.box.offset)
                offset[axis] += to - low
                yield one._replace(box=one.box._replace(offset=tuple(offset)))
            to += count * width


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first number and the length of each run of numbers that follow each other."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], at - first
            first = at


def _by_layer(what: str, value: Any, dims: Dims) -> dict[int, Indices]:
    """Returns the kept indices of each layer that has what is left out."""
    _, counted, names, part = AXES[what]
    has = [n for n, parts in enumerate(dims["layer_parts"]) if part in parts.split() or not part]
    if what == HEADS:
        has = [n for n in has if not dims["linear_layers"][n]]
    lists = [dims[name] for name in names if isinstance(dims[name], list | tuple)]
    counts = {one[n] for one in lists for n in has}
    if not has or counts - {dims[counted]}:
        raise UsageError(
            f"prune: {what}: the layers of the model have {sorted(counts) if has else 'none'}, and"
            " mckpt keeps as many of each layer; leave it out"
        )
    if isinstance(value, Mapping):
        if what == HIDDEN:
            raise ValueError("hidden is one list, because all layers share the residual stream")
        if wrong := [layer for layer in value if not str(layer).isdecimal()]:
            raise ValueError(f"{what}: {wrong[0]!r} is not the number of a layer")
        kept = {int(layer): tuple(ranges(one, dims[counted])) for layer, one in value.items()}
        if apart := sorted(kept.keys() ^ set(has)):
            raise ValueError(f"{what}: the layers with them are {has}; {apart[0]} is not right")
    else:
        kept = dict.fromkeys(has, tuple(ranges(value, dims[counted])))
    if len(sizes := {len(one) for one in kept.values()}) > 1:
        raise ValueError(f"{what}: each layer keeps as many, and not {sorted(sizes)}")
    for layer, one in kept.items():
        if not one or len(set(one)) < len(one) or max(one) >= dims[counted]:
            raise ValueError(
                f"{what}: layer {layer}: the indices are different ones from 0 to"
                f" {dims[counted] - 1}"
            )
    return kept
