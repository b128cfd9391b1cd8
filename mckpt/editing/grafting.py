"""The edit that takes tensors from another checkpoint, of any format and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.edits import EXACT, KEPT, Edit
from mckpt.editing.layers import LAYER, NOT_BY_LAYER, fitted, numbered, ranges
from mckpt.editing.pieces import (
    ADAM,
    again,
    digest_of,
    in_files,
    kinds_of,
    number_of,
    only,
    parted,
    rows,
    under,
    with_new_states,
)
from mckpt.errors import UsageError
from mckpt.geometry.box import Layout, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims, equal, plain
from mckpt.mapping.schema import CARRIED, schema

MTP, TOWER, HEAD, EMBEDDING = "mtp", "tower", "head", "embedding"
# dims that may be others in the other checkpoint
FREE = {"num_layers", "mtp_layers", "tied", "vocab_size", "max_positions"}
BY_ROW = ("embed.", "lm_head.")  # start the names of tensors with a row for each token


@dataclass(frozen=True)
class Graft(Edit):
    """Takes some logical tensors from another checkpoint.

    take: mtp, tower, head, embedding, layers.RANGES or a pattern of logical names such as
        layers.*.attn.*. digest: of the places of the other's tensors.
    """

    take: str
    digest: str
    other: Checkpoint = field(repr=False, compare=False)

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Graft:
        if given.keys() != {"from", "take"} or not all(isinstance(v, str) for v in given.values()):
            raise ValueError("wants from, a checkpoint, and take, what is taken from it")
        other = Checkpoint.open(given["from"]).with_default_vocab_size(dims["vocab_size"])
        graft = Graft(given["take"], digest_of(other.layout), other)
        graft._refuse_apart(dims)
        return graft

    @property
    def contract(self) -> str:
        """Returns EXACT for layers of multi-token prediction, which the logits do not need."""
        return EXACT if self.take == MTP else KEPT

    @property
    def data(self) -> dict[str, Any]:
        return {"take": self.take, "digest": self.digest}

    @property
    def words(self) -> str:
        return f"the tensors of {self.take} are those of another {self.other.format} checkpoint"

    def _refuse_apart(self, dims: Dims) -> None:
        """Raises UsageError for a checkpoint whose tensors are not those of a model of `dims`."""
        theirs, where = self.other.dims, f"graft: {self.other.path}:"
        if self.take == MTP and not theirs["mtp_layers"]:
            raise UsageError(f"{where} has no layers of multi-token prediction")
        named = {HEAD: {"hidden_size", "vocab_size"}, TOWER: {"hidden_size"}}
        named[EMBEDDING] = named[HEAD]
        names = named.get(self.take, {*schema().dims} - FREE - schema().by_layer().keys())
        layers = list(range(0 if self.take == MTP else dims["num_layers"]))
        if self._layers is not None:
            layers, counts = self._layers, (theirs["num_layers"], dims["num_layers"])
            if max(layers) >= min(counts):
                raise UsageError(
                    f"{where} {self.take}: it has {counts[0]} layers and SRC {counts[1]}, numbered"
                    " from 0, so no tensor has such a name"
                )
        elif self.take not in (MTP, *named):  # a pattern may be that of the embedding
            names = {*names, "vocab_size"}
        apart = []
        for name in sorted(names):
            own, other = dims[name], theirs[name]
            if isinstance(own, list | tuple) and name not in NOT_BY_LAYER:
                own, other = (
                    [value[n] for n in layers if n < len(value)] for value in (own, other)
                )
            if not equal(own, other):
                apart.append(f"{name}: {other!r}, and {own!r} in SRC")
        if apart:
            raise UsageError.of(
                f"{where} its {self.take} belongs to a model of other dims:",
                apart,
                "Give a checkpoint of the same model.",
            )
        if self.take == EMBEDDING and dims["tied"] and not theirs["tied"]:
            raise UsageError(
                f"{where} has an output layer of its own, and the embedding of SRC is its output"
                " layer too; do `- untie` first"
            )

    @property
    def _layers(self) -> list[int] | None:
        """Returns the layers that layers.RANGES names; None if something else is taken."""
        first, _, rest = self.take.partition(".")
        plain = first == "layers" and rest.replace("-", "").replace(",", "").isdecimal()
        return ranges(rest, self.other.dims["num_layers"]) if plain else None

    def _wanted(self, count: int) -> Callable[[str, int, int], bool]:
        """Returns whether a weight is taken, by template, layer and expert; `count` layers are
        those of the decoder.
        """
        take = self.take
        if take == MTP:
            return lambda name, layer, _: LAYER in name and layer >= count
        if take in (HEAD, EMBEDDING, TOWER):
            start = {HEAD: "lm_head.", EMBEDDING: "embed.", TOWER: CARRIED}[take]
            return lambda name, *_: name.startswith(start)
        if self._layers is not None:
            chosen = set(self._layers)
            return lambda name, layer, _: LAYER in name and layer in chosen and layer < count
        return lambda name, layer, expert: fnmatchcase(
            plain(name).format(layer=layer, expert=expert), take
        )

    def dims(self, dims: Dims) -> Dims:
        if self.take == HEAD:
            return {**dims, "tied": False}
        if self.take != MTP:
            return dims
        own, theirs = dims["num_layers"], self.other.dims
        lists = {
            name: [*value[:own], *theirs[name][theirs["num_layers"] :]]
            for name, value in dims.items()
            if isinstance(value, list | tuple) and name not in NOT_BY_LAYER
        }
        return fitted({**dims, **lists, "mtp_layers": theirs["mtp_layers"]})

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        wanted = self._wanted(dims["num_layers"])
        layout = numbered(layout, dims, self.dims(dims))
        if self.take == HEAD and dims["tied"]:  # rows of padding stay those of SRC
            head = under(layout, {"embed.weight": "lm_head.weight"})
            layout = replace(
                layout,
                stored=[*layout.stored, *head.stored],
                shapes={**layout.shapes, **head.shapes},
            )
        with_states = any("@" in name for name in layout.shapes)
        theirs = self._taken(layout, wanted, dims, with_states)
        shapes = theirs.shapes
        stored, dropped = list[Stored](), dict(layout.dropped)
        replaced: set[tuple[str, int, int]] = set()
        for s in layout.stored:
            out, kept = parted(s, wanted)
            stored += kept
            for part in (part for part in out if not part.replica):
                stored += padding(part, shapes)
                replaced |= _weights(part)
        taken = {one for s in theirs.stored for one in _weights(s)}
        if (self.take != MTP and taken != replaced) or not taken:
            lacking = sorted(f"{n.format(layer=i, expert=e)}" for n, i, e in taken ^ replaced)
            raise UsageError.of(
                f"graft: {self.other.path}: {self.take}: SRC and it do not have the same tensors:",
                lacking or ["no tensor has such a name"],
                "Logical names are those that `mckpt inspect --tensors` prints.",
            )
        wrong = [
            f"{name}: {list(shape)}, and {list(layout.shapes[name])} in SRC"
            for name, shape in shapes.items()
            if shape != layout.shapes.get(name, shape)
            and not (name.startswith(BY_ROW) and shape[1:] == layout.shapes[name][1:])
        ]
        if wrong:
            raise UsageError.of(f"graft: {self.other.path}: has tensors of other shapes:", wrong)
        for name, layer, expert in sorted(replaced):
            one = name.format(layer=layer, expert=expert)
            dropped[f"{one} of SRC"] = "the tensor of the other checkpoint takes its place"
        return replace(
            layout,
            files=theirs.files,
            stored=[*stored, *theirs.stored],
            shapes={**shapes, **layout.shapes},
            dropped=dropped,
            ignored={**layout.ignored, **dropped},
        )

    def _taken(
        self, base: Layout, wanted: Callable[[str, int, int], bool], dims: Dims, states: bool
    ) -> Layout:
        """Returns the taken tensors as SRC names them; `files` has those of SRC first."""
        other, own = self.other, dims["num_layers"]
        count = other.dims["num_layers"]
        layout = (other.with_optimizer() if states else other).layout
        if self.take == HEAD and other.dims["tied"]:
            layout = under(layout, {"embed.weight": "lm_head.weight"})
        files = [*base.files]
        numbers = np.array([number_of(files, file) for file in layout.files], "i4")
        stored = list[Stored]()
        for s in (s for s in layout.stored if not s.replica):
            placed = in_files(s, numbers)
            within = [
                (row, layer - count + own if layer >= count else layer)
                for row, layer in enumerate(s.layer.tolist())
                if layer < own or layer >= count  # else it has the number of another layer
            ]
            for one in again(placed, within):
                stored += parted(one, wanted)[0]
        found = replace(layout, files=files, stored=stored)
        names = {name for s in stored for name in s.tensors}
        shapes = {name: layout.shapes[name.partition("@")[0]] for name in names}
        found = replace(layout, files=files, stored=stored, shapes=shapes)
        found = numbered(found, other.dims, self.dims(dims))
        return self._with_states(found, kinds_of(base)) if states else found

    def _with_states(self, found: Layout, held: Mapping[str, Mapping[str, str]]) -> Layout:
        """Returns the taken weights with the states that SRC has of them: those of the other
        checkpoint, or new ones if it lacks some.

        held: the states of each weight of SRC.
        """
        own = kinds_of(found)
        wanted = {name: held.get(name, held["embed.weight"]) for name in own}
        if all(kinds.keys() <= own[name].keys() for name, kinds in wanted.items()):
            kept = {f"{name}@{kind}" for name, kinds in wanted.items() for kind in kinds}
            stored = list(only(found.stored, lambda name: "@" not in name or name in kept))
            return replace(found, stored=stored)
        if strange := {kind for kinds in wanted.values() for kind in kinds} - ADAM:
            raise UsageError(
                f"graft: {self.other.path}: has no state of the optimizer, and mckpt makes no new"
                f" {', '.join(sorted(strange))}; give --no-optimizer"
            )
        return with_new_states(found, wanted)


def _weights(s: Stored) -> set[tuple[str, int, int]]:
    """Returns the weights of which stored tensors have a part: template, layer and expert."""
    names = {name for name in s.tensors if "@" not in name}
    places = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
    return {(name, *place) for name in names for place in places}


def padding(s: Stored, shapes: Mapping[str, Sequence[int]]) -> Iterator[Stored]:
    """Yields the rows of the vocabulary that the taken tensors do not have."""
    parts = [
        part
        for p in s.pieces
        if p.tensor.startswith(BY_ROW) and p.tensor in shapes
        for part in rows(p, shapes[p.tensor][0], p.box.offset[0] + p.box.shape[0])
    ]
    if parts:
        yield replace(s, pieces=tuple(parts), view=True)
