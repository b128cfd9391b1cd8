"""The edit of layers: kept, left out, repeated, in a new order, and silent copies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import EXACT, KEPT, Edit
from mckpt.editing.pieces import again, file_of, is_moment, new_values, number_of, zeroed
from mckpt.errors import UsageError, counted
from mckpt.formats.base import Names
from mckpt.geometry.box import ZEROS, Layout, Stored
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, plain
from mckpt.mapping.schema import CARRIED, SHAPE, schema

LAYER = "{layer}"
# dims that are lists, and not one value for each layer
NOT_BY_LAYER = ("mamba_multipliers", "mlp_multipliers")
# what the dims start with that describe experts
OF_EXPERTS = ("num_experts", "expert", "router_", "shared_", "normalize_topk", "moe_latent")
INDEXERS = ("indexer_period", "indexer_offset")  # dims that state which layers have one
# the tensors that make what a layer adds to the residual stream
OUTPUTS = re.compile(
    r"layers\.\{layer\}\.(attn\.o|cross\.o|linear\.out|mamba\.out|mlp\.down|embed\.proj"
    r"|moe\.(experts\.\{expert\}\.down|shared\.down|latent_up))\.(weight|bias)(@.*)?"
)


# factors of the residual stream itself, which are 1 in a silent layer
FACTORS = re.compile(r"layers\.\{layer\}\.scale(@.*)?")


@dataclass(frozen=True)
class Layers(Edit):
    """Keeps, drops and repeats layers, in a new order, and inserts silent copies.

    order: for each new layer the number of the source's, and whether the copy is silent: its
        outputs are multiplied by zero, so that it adds nothing to the residual stream.
    starts: what stands before the number of a layer in the keys of its carried tensors.
    """

    order: tuple[tuple[int, bool], ...]
    starts: tuple[str, ...] = ()

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Layers:
        if len(given) != 1:
            raise ValueError("give one of keep, drop, order and silent_after")
        ((how, value),) = given.items()
        count = dims["num_layers"]
        numbers = ranges(value, count)
        if wrong := [n for n in numbers if not 0 <= n < count]:
            raise ValueError(f"layer {wrong[0]} of {count}, which are numbered from 0")
        heard = [(n, False) for n in range(count)]
        if how == "order":
            return Layers(tuple((n, False) for n in numbers))
        if how in ("keep", "drop"):
            return Layers(tuple(one for one in heard if (one[0] in numbers) == (how == "keep")))
        if how != "silent_after":
            raise ValueError(f"{how!r} is not one of keep, drop, order and silent_after")
        silent = ((one, *([(one[0], True)] * numbers.count(one[0]))) for one in heard)
        return Layers(tuple(itertools.chain.from_iterable(silent)))

    def of_source(self, source: Checkpoint, dims: Dims, before: Sequence[Edit]) -> Layers:
        return replace(self, starts=_starts(source))

    @property
    def contract(self) -> str:
        """Returns EXACT if all layers are kept in their order, and the others are silent."""
        heard = [number for number, silent in self.order if not silent]
        whole = heard == list(range(max(heard, default=-1) + 1))
        return EXACT if whole else KEPT

    @property
    def words(self) -> str:
        silent = sum(silent for _, silent in self.order)
        return f"{counted(len(self.order), 'layer')}" + f", {silent} of them silent" * bool(silent)

    def dims(self, dims: Dims) -> Dims:
        count = dims["num_layers"]
        self._refuse(dims)
        out = {**dims, "num_layers": len(self.order)}
        for name, value in dims.items():
            if isinstance(value, list | tuple) and name not in NOT_BY_LAYER:
                if len(value) < count:
                    continue
                out[name] = [value[number] for number, _ in self.order] + [*value[count:]]
        held = [has_indexer(number, dims) for number, _ in self.order]
        for (number, silent), own, after in zip(self.order[:-1], held[:-1], held[1:], strict=True):
            if silent and own and not after:
                raise UsageError(
                    f"layers: silent_after {number}: the next layer takes the keys that layer"
                    f" {number} chose, and would take those of its copy; put the copy behind the"
                    " last layer that takes them"
                )
        held += [has_indexer(count + number, dims) for number in range(dims["mtp_layers"])]
        return with_indexers("layers", fitted(out), held)

    def layers(self, before: list[int] | None) -> list[int] | None:
        return before and [before[number] for number, _ in self.order]

    def _refuse(self, dims: Dims) -> None:
        count = dims["num_layers"]
        wrong = sorted({number for number, _ in self.order if not 0 <= number < count})
        if wrong or not self.order:
            raise UsageError(
                f"layers: {', '.join(map(str, wrong)) or 'none'} of {counted(count, 'layer')},"
                f" which are numbered from 0 to {count - 1}"
            )
        refuse_apart("layers", dims)

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        count = dims["num_layers"]
        places: dict[int, list[tuple[int, bool]]] = {}
        for new, (old, quiet) in enumerate(self.order):
            places.setdefault(old, []).append((new, quiet))
        for number in range(dims["mtp_layers"]):
            places[count + number] = [(len(self.order) + number, False)]
        files = [*layout.files]
        stored, dropped = list[Stored](), dict(layout.dropped)
        shapes = dict(layout.shapes)
        starts = "|".join(map(re.escape, self.starts))
        carried = re.compile(rf"({re.escape(CARRIED)}(?:{starts}))(\d+)(\..*)")
        for s in layout.stored:
            if self.starts and s.carried and (found := carried.fullmatch(s.pieces[0].tensor)):
                old, shape = int(found[2]), layout.shapes[found[0]]
                for new, _ in places.get(old, ()):
                    name = f"{found[1]}{new}{found[3]}"
                    pieces = tuple(piece._replace(tensor=name) for piece in s.pieces)
                    stored.append(replace(s, pieces=pieces))
                    shapes[name] = shape
                if old not in places:
                    dropped[s.key] = f"layer {old} is left out"
                continue
            if not any(LAYER in name for name in s.tensors):
                stored.append(s)
                continue
            heard, silent = list[tuple[int, int]](), list[tuple[int, int]]()
            for row, old in enumerate(s.layer.tolist()):
                for new, quiet in places.get(old, ()):
                    (silent if quiet else heard).append((row, new))
                if old not in places and not s.replica:
                    dropped[s.key.format(layer=old, mtp=old, expert=int(s.expert[row]))] = (
                        f"layer {old} is left out"
                    )
            stored += again(s, heard)
            stored += _silent(s, silent, files)
        out = replace(
            layout,
            files=files,
            stored=stored,
            shapes=shapes,
            dropped=dropped,
            ignored={**layout.ignored, **dropped},
        )
        return numbered(out, dims, self.dims(dims))


def numbered(layout: Layout, before: Dims, after: Dims) -> Layout:
    """Returns the layout with the numbers of shapes that its templates have in a model with the
    dims `after`, which may have layers of other shapes. before: those that its numbers are of.
    """
    old, new = (schema().kinds(dims) for dims in (before, after))
    if old == new:
        return layout
    # without numbers, all layers have the sizes of the model
    old = old or sorted(set(schema().sizes(before)))
    marks = {n: new.index(sizes) + 1 for n, sizes in enumerate(old, 1) if sizes in new}

    def renamed(name: str) -> str:
        weight, at, state = plain(name).partition("@")
        if not schema().differs(weight):
            return name
        return f"{weight}{SHAPE * marks.get(name.count(SHAPE) or 1, 0)}{at}{state}"

    stored = [
        replace(s, pieces=tuple(p._replace(tensor=renamed(p.tensor)) for p in s.pieces))
        if any(renamed(name) != name for name in s.tensors)
        else s
        for s in layout.stored
    ]
    held = {name for s in layout.stored for name in s.tensors}
    shapes = {renamed(name): shape for name, shape in layout.shapes.items() if name in held}
    return replace(layout, stored=stored, shapes=shapes)


def refuse_apart(edit: str, dims: Dims) -> None:
    """Raises UsageError for a model whose layers are parts of more than a decoder."""
    for name, why in (
        ("encoder_layers", "an encoder, whose layers no edit changes"),
        ("layer_embed_dim", "an embedding that has a part for each layer"),
        ("kv_sharing_layers", "layers that take the keys of an earlier layer"),
    ):
        if dims.get(name):
            raise UsageError(f"{edit}: the model has {why} ({name} {dims[name]})")


def _silent(s: Stored, rows: Sequence[tuple[int, int]], files: list[str]) -> Iterator[Stored]:
    """Yields stored tensors of silent layers: their outputs are zero, factors of the residual
    stream are 1, and moments are zero. files: those of the layout, to which new ones are added.
    """
    factors = {p.tensor for p in s.pieces if FACTORS.fullmatch(p.tensor)}
    quiet = factors.union(
        p.tensor for p in s.pieces if OUTPUTS.fullmatch(plain(p.tensor)) or is_moment(p.tensor)
    )
    heard = tuple(p for p in s.pieces if p.tensor not in quiet)
    if heard:
        yield from again(replace(s, pieces=heard, view=s.view or bool(quiet)), rows)
    for name in sorted(quiet) if rows and not s.replica else ():
        for piece in (p for p in s.pieces if p.tensor == name and not p.copy):
            if name in factors and not is_moment(name):
                ones = str(file_of(np.ones(piece.box.shape, "f4").tobytes()))
                for _, new in rows:
                    yield new_values(files, ones, name, new, piece.box, s.dtype)
                continue
            for one in again(s, rows):
                yield zeroed(one, piece, name, s.dtype, number_of(files, ZEROS))


def ranges(value: Any, count: int) -> list[int]:
    """Returns the numbers of a list of ranges: "0-3,8" or [0-3, 8] are 0, 1, 2, 3 and 8.

    count: how many things are numbered. A range that ends behind them has one number of these.
    Raises ValueError for anything else.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    found: list[int] = []
    for part in parts:
        first, dash, last = (text.strip() for text in str(part).partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"{part!r} is not a number or a range such as 0-3")
        start, end = int(first), int(last)
        found += [start] if start >= count else range(start, min(end, count) + 1)
    return found


def fitted(dims: Dims) -> Dims:
    """Returns dims in which the width of the mlp is that of the widest one, which layers without an
    mlp have too, and without what describes layers that the model does not have any more, such as
    the sizes of Mamba-2 layers, gated delta nets and experts of a hybrid.

    Raises UsageError for two layers that are one layer in a hybrid.
    """
    every = list(zip(dims["layer_parts"], dims["ffn_sizes"], strict=True))
    parts = {part for listed, _ in every for part in listed.split()}
    starts = ("mamba_",) * ("mamba" not in parts and not dims["parallel_mamba"])
    starts += ("linear_",) * (not any(dims["linear_layers"]))
    for at, pair in enumerate(pairwise(dims["layer_parts"])) if "mamba" in parts else ():
        if pair[0] in ("mamba", "attn") and pair[1] in ("mlp", "moe"):
            raise UsageError(
                f"the new layer {at} would be `{pair[0]}`, and layer {at + 1} `{pair[1]}`, which"
                " are one layer in a hybrid; keep another layer between them"
            )
    starts += ("attn_block_",) * (not any(dims["attn_blocks"]))
    starts += ("attn_temperature",) * all(dims["rope_layers"])
    if "moe" not in parts and any(len(listed.split()) < 2 for listed, _ in every):  # of a hybrid
        starts += OF_EXPERTS
    lost = (name for name in schema().dims if name.startswith(starts) and name != "linear_layers")
    out = {**dims, **{n: neutral(dims) for n in lost if (neutral := schema().dims[n].neutral)}}
    widths = [width for listed, width in every if "mlp" in listed.split()]
    if widths:
        out["ffn_size"] = widest = max(widths)
        out["ffn_sizes"] = [width if "mlp" in one.split() else widest for one, width in every]
    return out


def has_indexer(layer: int, dims: Dims) -> bool:
    """Returns whether a layer chooses keys itself; others take those of the layer before."""
    first = max(dims["indexer_offset"], 1)
    return bool(max(layer + 1 - first, 0) % dims["indexer_period"] == 0)


def with_indexers(edit: str, dims: Dims, held: Sequence[bool]) -> Dims:
    """Returns dims with the period and the offset of the indexers that layers hold.

    dims: with those of the model before. held: whether each layer of the edited model has one.
    Raises UsageError for layers that no period describes.
    """
    if dims["indexer_period"] == 1:
        return dims
    numbers = range(1, len(held) + 1)
    for period, offset in [
        (dims["indexer_period"], dims["indexer_offset"]),
        *product(numbers, numbers),
    ]:
        found = {**dims, "indexer_period": period, "indexer_offset": offset if period > 1 else 0}
        if all(has_indexer(layer, found) == one for layer, one in enumerate(held)):
            return found
    having = ", ".join(str(layer) for layer, one in enumerate(held) if one)
    raise UsageError(
        f"{edit}: the edited model would have indexers in the layers {having or 'none'} of"
        f" {len(held)}, and a config has a first layer with one and a period alone"
        f" ({dims['indexer_period']} before the edit); keep and leave out whole periods of layers"
        + ", or do `mtp: {drop: true}` first"
        * bool(dims["mtp_layers"])
    )


def _starts(source: Checkpoint) -> tuple[str, ...]:
    """Returns what stands before the number of a layer in the keys of Hugging Face files, in each
    form that the model's family has.
    """
    if (family := source.model.family) is None:
        return ()
    forms = [{"form": name} for name in family.forms] or [{}]
    names = (Names(family, source.model.dims, choices, Parallel()) for choices in forms)
    keys = (b.rule.key for one in names for b in one.bound)
    return tuple(sorted({key.partition(LAYER)[0] for key in keys if LAYER in key}))
