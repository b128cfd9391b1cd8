"""The factors of adapters as logical tensors: `WEIGHT:lora_A.RANK` [RANK, in] and
`WEIGHT:lora_B.RANK` [out, RANK], with DoRA also `WEIGHT:lora_magnitude.RANK` [out].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from mckpt.adapters.peft import rules
from mckpt.errors import UsageError
from mckpt.formats.base import Names
from mckpt.formats.megatron.torch_shards import instances
from mckpt.geometry.box import Box, Layout, Piece, Stored, overlap
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, Rule
from mckpt.mapping.expression import Expression
from mckpt.mapping.schema import FACTORS, MAGNITUDE, plain

INDEX = re.compile(r"\{\w+\}")
Place = tuple[str, int, int]  # of a weight: template, layer, expert
A, B = FACTORS


def name_of(weight: str, side: str, rank: int) -> str:
    """Returns the template of a factor of a weight."""
    return f"{weight}:{side}.{rank}"


def is_factor(name: str) -> bool:
    """Returns whether a template names a factor of an adapter, or a state of one."""
    return ":lora_" in name  # a template of weights whose shapes differ has a colon too (SHAPE)


def parts_of(name: str) -> tuple[str, str, int]:
    """Returns the weight, the side (A, B or MAGNITUDE) and the rank of a factor, by its name or by
    that of a state of the optimizer: `FACTOR@STATE`.
    """
    weight, _, factor = name.partition("@")[0].rpartition(":")
    side, _, rank = factor.rpartition(".")
    return weight, side, int(rank)


class Module(NamedTuple):
    """One adapter of a Megatron model: the factors that it adds, and the weights that it adapts."""

    bound: Bound  # of the weight
    stem: str  # starts the keys of its factors
    of: tuple[str, ...]  # templates of the weights
    by_rank: bool = False  # B has the rows of each tensor-parallel rank one after the other
    sections: tuple[Rule, ...] = ()  # of the weight, if B is stored in these too


@dataclass(frozen=True)
class AdapterNames(Names):
    """The names of the factors in a Megatron checkpoint with adapters."""

    weights: frozenset[str] = field(default_factory=frozenset)  # templates of adapted weights
    rank: int = 0
    # ranks other than `rank`, by the templates of the weights: those of experts, which
    # normalize_moe_lora of Megatron-Bridge divides by the number of experts that a token takes
    ranks: Mapping[str, int] = field(default_factory=dict)
    program: str = "megatron"  # the section of adapters.yaml that has the ends of the keys
    canonical: bool = False  # a pair of factors for each weight, not for each module
    mtp: bool = True  # layers of multi-token prediction have adapters too
    whole: bool = False  # the weights of the base are in the checkpoint as well
    dora: bool = False  # the adapters have magnitudes
    # the templates of the factors that all experts of a layer share, which are read only
    outer: frozenset[str] = frozenset()
    # the starts of the keys of the factors of a linear_fc1 without a gate, of whose rows torch_dist
    # has the first halves of each tensor-parallel rank and then the second halves
    halved: frozenset[str] = frozenset()
    # the weights and the layer of each adapter, if those of some layers may be left out; None: all
    there: frozenset[tuple[tuple[str, ...], int]] | None = None

    def rank_of(self, weight: str) -> int:
        """Returns the rank of the module that adapts a weight, by its template."""
        return self.ranks.get(weight, self.rank)

    @property
    def by_swift(self) -> bool:
        """Returns whether the adapters are those of ms-swift, not of Megatron-Bridge."""
        return self.program == "swift"

    @property
    def how(self) -> str:
        """The layout with which these adapters are written again."""
        return "swift" if self.by_swift else "canonical" if self.canonical else "fused"

    @property
    def module(self) -> str:
        """The name of the module that an adapter adds, and a dot; "" if it adds none."""
        name = rules()[self.program].get("module")
        return f"{name}." if name else ""

    @cached_property
    def has_rows_by_rank(self) -> bool:
        """Returns whether torch_dist has rows in the order of the tensor-parallel ranks, so that a
        program that does not know this order reads them at the same tp only.
        """
        return self.canonical or self.dora or any(module.by_rank for module in self.modules)

    @property
    def without_lengths(self) -> list[str]:
        """Returns the adapted weights of which no tensor-parallel rank has whole rows, or one has
        other rows than those of its factors. With DoRA, Megatron-Bridge then divides by lengths
        that are not those of the rows.
        """
        cut = [m for m in self.modules if m.bound.rule.tp not in ("column", "vocab")]
        found = [name for module in cut for name in module.of]
        return [INDEX.sub("*", name) for name in found] if self.parallel.tp > 1 else []

    @property
    def ungated(self) -> dict[str, int]:
        """Returns the starts of the keys of the factors of each linear_fc1 without a gate that the
        ranks cut by rows, and their number, if all ranks together have one tensor.
        """
        if self.by_swift or self.choices.get("keys") != "global":
            return {}
        return {
            module.stem: self._ways(module.bound.rule)
            for module in self.modules
            if module.stem.endswith(".linear_fc1.adapter.") and module.bound.rule.tp == "column"
            if len(module.of) == 1 and self._ways(module.bound.rule) > 1
        }

    def _ways(self, rule: Rule) -> int:
        return self.parallel.expert_tp if "expert" in rule.indices else self.parallel.tp

    @cached_property
    def modules(self) -> list[Module]:
        """The adapters of the model."""
        found: list[Module] = []
        sections: dict[str, list[Bound]] = {}
        for b in self.mapping.bind(self.scope()):
            stem, dot, end = b.rule.key.rpartition(".weight")
            if not dot or b.rule.alias or (b.rule.mtp and not self.mtp):
                continue
            if end.startswith("."):  # one of several sections of a matrix
                sections.setdefault(stem, []).append(b)
                continue
            if not self._adapts(b.rule.of):
                continue
            if b.rule.of_tower:
                found += self._of_tower(b, stem)
                continue
            if self.by_swift and b.rule.pack == "gated" and "expert" not in b.rule.indices:
                found += self._by_rank(b, b.rule.of, stem)
            else:
                found += self._modules(b, stem)
        for stem, several in sections.items():
            of = tuple(name for b in several for name in b.rule.of)
            if not self._adapts(of):
                continue
            one = self._by_rank(several[0], of, stem)
            if stem.endswith(tuple(rules()[self.program].get("sections", ()))) and not self.dora:
                rows = tuple(b.rule for b in several)
                one = (module._replace(by_rank=False, sections=rows) for module in one)
            found += one
        return found if self.there is None else [m for m in map(self._there, found) if m]

    def _adapts(self, weights: Sequence[str]) -> bool:
        """Returns whether one of these weights has an adapter."""
        # a template has the number of its shape, where layers differ
        return not self.weights.isdisjoint((*weights, *map(plain, weights)))

    def _of_tower(self, b: Bound, stem: str) -> Iterator[Module]:
        """Yields a module for each weight of a tower's key, which may have those of all layers.

        Raises UsageError for a module of CanonicalLoRA or DoRA.
        """
        if self.dora or (self.canonical and not self._is_plain(b.rule)):
            raise UsageError(
                f"{stem}: mckpt knows LoRA in the towers of Megatron-Bridge, and not"
                f" {'DoRA' if self.dora else 'CanonicalLoRA: choose the layout fused or block'}"
            )
        module = "" if self._is_plain(b.rule) else self.module
        yield from (
            Module(b, f"{stem}.{module}", (name,))
            for name in b.rule.of
            if name.endswith(".weight")  # else the model of Hugging Face has no module for it
        )

    def _is_plain(self, rule: Rule) -> bool:
        """Returns whether a tensor of a tower belongs to a module of torch, of which every rank has
        the whole, and not to one of Megatron.
        """
        entry = self.mapping.whole and self.mapping.whole.entry_of(rule.key)
        return entry is not None and entry.is_start

    def _by_rank(self, b: Bound, of: tuple[str, ...], stem: str) -> Iterator[Module]:
        """Yields a module whose B has, for each tensor-parallel rank, its part of each weight."""
        turns = b.rule._replace(of=of, pack="qkv", heads=Expression(str(self.parallel.tp)))
        for module in self._modules(b._replace(rule=turns), stem):
            yield module._replace(by_rank=True)

    def _there(self, module: Module) -> Module | None:
        """Returns a module of those layers that have the adapter; None if none has."""
        b, there = module.bound, self.there or ()
        kept = [row for row, layer in enumerate(b.layers.tolist()) if (module.of, layer) in there]
        some = b._replace(layers=b.layers[kept], numbers=b.numbers[kept])
        return module._replace(bound=some) if kept else None

    def found_in(
        self, stages: Sequence[Sequence[Collection[str]]]
    ) -> frozenset[tuple[tuple[str, ...], int]]:
        """Returns the weights and the layer of each adapter of which a factor is stored.

        stages: the keys of each [pipeline rank][virtual stage]; if keys do not depend on the stage,
        all of them as one.
        """
        ends = rules()[self.program]["factors"].values()
        found = set[tuple[tuple[str, ...], int]]()
        local = self.choices.get("keys") != "global" and len(stages) == self.parallel.pp
        split = self.stages() if local else []
        for module in self.modules:
            b = module.bound
            for named in (b._replace(rule=b.rule._replace(key=module.stem + end)) for end in ends):
                if local:
                    places = [
                        (stages[p][v], layer, key)
                        for p, stage in enumerate(split)
                        for v, layer, _, key in instances(
                            named, stage, p, self.parallel, self.dims, 0
                        )
                        if v < len(stages[p])
                    ]
                else:
                    numbers = zip(b.layers.tolist(), b.numbers.tolist(), strict=True)
                    places = [(stages[0][0], layer, named.key(number)) for layer, number in numbers]
                found.update((module.of, layer) for keys, layer, key in places if key in keys)
        return frozenset(found)

    def targets(self) -> list[str]:
        """Returns `target_modules` of the program, with which it adapts these modules and no
        others: the last part of the name if all modules with it are adapted, else a pattern.
        """
        known = rules()["megatron"]["targets"] if self.canonical else {}
        choices = {"keys": "local", "experts": "grouped", "transformer_impl": "transformer_engine"}
        local = replace(self, choices={**self.choices, **choices})  # the names of modules
        adapted = {m.stem.partition(f".{self.module or '.'}")[0].rstrip(".") for m in local.modules}
        rules_of = (b.rule for b in self.mapping.bind(local.scope()))
        # ms-swift builds layers of multi-token prediction only on request
        built = (rule for rule in rules_of if self.mtp or not (rule.mtp and self.by_swift))
        every = {rule.key.partition(".weight")[0] for rule in built}
        out: set[str] = set()
        for stem in adapted:
            before, _, leaf = stem.rpartition(".")
            # the keys of a whole model's adapters do not show which other linears it has
            alike = self.mapping.whole or any(
                one.rpartition(".")[2] == leaf for one in every - adapted
            )
            if alike:
                leaf_of = f"*{INDEX.sub('*', before)}."
            else:
                leaf_of = ""
            out.update(leaf_of + name for name in known.get(leaf, [leaf]))
        return sorted(out)

    def _modules(self, b: Bound, stem: str) -> Iterator[Module]:
        ends: Mapping[str, str] = rules()["megatron"]["canonical"]
        grouped = "expert" in b.rule.indices and "{expert}" not in stem
        if not self.canonical or len(b.rule.of) == 1 or grouped:
            yield Module(b, f"{stem}.{self.module}", b.rule.of)
            return
        for name in b.rule.of:
            added = next((ends[end] for end in ends if plain(name).endswith(f".{end}")), None)
            if added is None:
                raise UsageError(
                    f"{name}: CanonicalLoRA of Megatron-Bridge has no adapter for this part of"
                    f" {stem}; choose the layout fused or block"
                )
            one = b.rule._replace(of=(name,), pack="one", heads=None)
            yield Module(b._replace(rule=one), f"{stem}.{self.module}{added}.", (name,))

    @cached_property
    def bound(self) -> list[Bound]:
        """The rules of the factors, and those of the base's weights if they are there too."""
        out = self.mapping.bind(self.scope()) if self.whole else []
        ends = rules()[self.program]["factors"]
        # what ms-swift does not cut by the weight's rows or columns, each rank has
        halved = tuple(f".{name}." for name in rules()["megatron"]["halved"])
        stacks: dict[str, list[Module]] = {}  # of the layers of a tower that one tensor has
        for module in self.modules:
            stem = module.stem if module.bound.rule.stack else f"{len(stacks)}"
            stacks.setdefault(stem, []).append(module)
        for (b, stem, of, _, sections), *more in stacks.values():
            rule, rank = b.rule._replace(dtype=None, transposed=False), self.rank_of(of[0])
            of = (*of, *(name for module in more for name in module.of))
            rest_tp = "replicated" if self.by_swift or self._is_plain(rule) else "column"
            a = rule._replace(
                key=stem + ends["a"],
                of=tuple(name_of(name, A, rank) for name in (of if rule.stack else of[:1])),
                pack="concat" if rule.stack else "one",
                heads=None,
                tp="row" if rule.tp == "row" else rest_tp,  # its rows are the rank
            )
            if self.choices.get("keys") == "global" and (
                stem.endswith(halved) or stem in self.halved
            ):
                tp = Expression(str(self._ways(rule)))
                rule = rule._replace(pack="halved", heads=tp)
            rest = rule._replace(
                key=stem + ends["b"],
                of=tuple(name_of(name, B, rank) for name in of),
                tp=rule.tp if rule.tp in ("vocab", "column") else rest_tp,
            )
            parts = [
                section._replace(
                    key=rest.key + section.key.rpartition(".weight")[2],
                    of=tuple(name_of(name, B, rank) for name in section.of),
                    dtype=None,
                )
                for section in sections
            ]
            for one in (a, *(parts or [rest])):
                if self.outer.isdisjoint(one.of):
                    out.append(b._replace(rule=one))
                else:
                    indices = tuple(index for index in one.indices if index != "expert")
                    every = one._replace(indices=indices, tp="replicated")
                    out.append(b._replace(rule=every, experts=np.arange(1)))
            if self.dora:
                lengths = rest._replace(
                    key=stem + rules()["megatron"]["magnitude"],
                    of=tuple(name_of(name, MAGNITUDE, rank) for name in of),
                    pack=b.rule.pack,
                    heads=b.rule.heads,
                )
                if self.choices.get("keys") == "global" and rest.pack == "gated":
                    # torch_dist has those of each tensor-parallel rank one after the other
                    tp = Expression(str(self.parallel.tp))
                    lengths = lengths._replace(pack="qkv", heads=tp)
                out.append(b._replace(rule=lengths))
        return out

    @property
    def objects(self) -> list[Bound]:
        """The rules of Transformer Engine's _extra_state, which weights and the factors of ms-swift
        have.
        """
        ends = rules()[self.program].get("objects", [])
        return (super().objects if self.whole else []) + [
            b._replace(rule=b.rule._replace(key=stem + end, of=()))
            for b, stem, *_ in self.modules
            for end in ends
            if not b.rule.of_tower
        ]


class Member(NamedTuple):
    """The factors of one weight in a module: the rank, and where they begin in those of the module.

    They are rows first to first + rank of A, and columns first to first + rank of B.
    """

    weight: str
    rank: int
    first: int
    has_a: bool  # A of the module is that of this weight, or has it as rows


def placed(layout: Layout, modules: Iterable[Module], members: Mapping[Place, Member]) -> Layout:
    """Returns the layout of a new Megatron checkpoint, in which the factors of modules, and their
    states, are those of the weights in them. Elements that no weight has are zero.

    members: of each weight with an adapter.
    """
    # q has one template in all layers, k and v one for each of their shapes
    group: dict[str, dict[str, None]] = {}
    for module in modules:
        for weight in module.of:
            group.setdefault(weight, {}).update(dict.fromkeys(module.of))
    stored: list[Stored] = []
    for s in layout.stored:
        alike: dict[tuple[Piece, ...], list[int]] = {}
        for row, at in enumerate(zip(s.layer.tolist(), s.expert.tolist(), strict=True)):
            pieces: list[Piece] = []
            for piece in s.pieces:
                weight, side, _ = parts_of(piece.tensor)
                for one in group[weight] if side == A else (weight,):
                    member = members.get((one, *at))
                    if member is None or (side == A and not member.has_a):
                        continue
                    if (found := _of_member(piece, side, member)) is not None:
                        pieces.append(found)
            alike.setdefault(tuple(pieces), []).append(row)
        for held, rows in alike.items():
            index = np.array(rows)
            where = (column[index] for column in (s.layer, s.expert, s.file, s.at))
            layer, expert, file, place = where
            stored.append(
                replace(
                    s,
                    pieces=held,
                    layer=layer,
                    expert=expert,
                    file=file,
                    at=place,
                    padding=True,
                )
            )
    return replace(layout, stored=stored)


def _of_member(piece: Piece, side: str, member: Member) -> Piece | None:
    """Returns the part of a piece of a module's factor that is a factor of one weight."""
    _, at, state = piece.tensor.partition("@")
    name = name_of(member.weight, side, member.rank) + at + state
    if side == MAGNITUDE:
        return piece._replace(tensor=name)
    axis = 0 if side == A else 1
    low, size = list(piece.box.offset), list(piece.box.shape)
    low[axis], size[axis] = member.first, member.rank
    box = overlap(piece.box, Box(tuple(low), tuple(size)))
    if box is None:
        return None
    skipped = (a - b for a, b in zip(box.offset, piece.box.offset, strict=True))
    start = piece.start + sum(n * step for n, step in zip(skipped, piece.strides, strict=True))
    low = list(box.offset)
    low[axis] -= member.first
    return piece._replace(tensor=name, box=Box(tuple(low), box.shape), start=start)


def shared(layout: Layout, names: AdapterNames) -> Layout:
    """Returns the layout of a Megatron checkpoint with a factor that several weights share, and its
    states, once for each of them: the factor A of a module, and the factors of all experts.
    """
    group: dict[str, list[Module]] = {}
    for module in names.modules:
        name = name_of(module.of[0], A, names.rank_of(module.of[0]))
        group.setdefault(name, []).append(module)
    stored, shapes = [_of_each_expert(s, names) for s in layout.stored], dict(layout.shapes)
    for s in stored[:]:
        for name in s.tensors:
            factor, at, state = name.partition("@")
            for module in group.get(factor, ()):
                own = np.isin(s.layer, module.bound.layers)
                part = {one: getattr(s, one)[own] for one in ("layer", "expert", "file", "at")}
                for other in module.of[1:] if own.any() else ():
                    named = name_of(other, A, names.rank_of(other)) + at + state
                    pieces = tuple(p._replace(tensor=named) for p in s.pieces)
                    stored.append(replace(s, pieces=pieces, **part))
                    shapes[named] = shapes[name]
    return replace(layout, stored=stored, shapes=shapes)


def _of_each_expert(s: Stored, names: AdapterNames) -> Stored:
    """Returns a factor that all experts share as one of each expert; other tensors unchanged."""
    if names.outer.isdisjoint(p.tensor.partition("@")[0] for p in s.pieces):
        return s
    count = names.dims["num_experts"]
    layer, file, at = (np.repeat(column, count) for column in (s.layer, s.file, s.at))
    expert = np.tile(np.arange(count, dtype=s.expert.dtype), len(s.expert))
    return replace(s, layer=layer, expert=expert, file=file, at=at)


def kept(layout: Layout, names: Iterable[str]) -> Layout:
    """Returns the tensors of a layout that are among `names`, by template."""
    wanted = set(names)
    stored = [s for s in layout.stored if wanted.intersection(p.tensor for p in s.pieces)]
    shapes = {name: shape for name, shape in layout.shapes.items() if name in wanted}
    return replace(layout, stored=stored, shapes=shapes)


def without(layout: Layout, places: Collection[Place], why: str) -> Layout:
    """Returns a layout without the factors at these places and their states, which it lists as
    ignored, with the reason.
    """
    stored, ignored = [], dict(layout.ignored)
    left_out = {template for template, _, _ in places}
    for s in layout.stored:
        factors = {p.tensor.partition("@")[0] for p in s.pieces}
        if left_out.isdisjoint(factors):
            stored.append(s)
            continue
        (factor,) = factors
        at = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
        kept = np.array([(factor, *one) not in places for one in at])
        part = {one: getattr(s, one)[kept] for one in ("layer", "expert", "file", "at")}
        stored.append(replace(s, **part))
        for layer, expert in (one for one, keep in zip(at, kept, strict=True) if not keep):
            ignored[s.pieces[0].tensor.format(layer=layer, expert=expert)] = why
    return replace(layout, stored=[s for s in stored if len(s)], ignored=ignored)


def weights_in(layout: Layout) -> dict[Place, int]:
    """Returns the weights that the factors of a layout adapt, and the rank of each."""
    found: dict[Place, int] = {}
    for s in layout.stored:
        for name in {p.tensor for p in s.pieces if is_factor(p.tensor)}:
            weight, _, rank = parts_of(name)
            for layer, expert in zip(s.layer.tolist(), s.expert.tolist(), strict=True):
                found[weight, layer, expert] = rank
    return found
