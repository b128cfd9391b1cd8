"""Decides how the factors of an adapter lie in the modules of Megatron's adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from mckpt.adapters import factors
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.adapters.factors import A, AdapterNames, Member, Module, Place, name_of
from mckpt.conversion.args import Decided
from mckpt.errors import UsageError
from mckpt.geometry.box import Layout
from mckpt.lazy import numpy as np
from mckpt.mapping.schema import CARRIED, MAGNITUDE

EQUAL = "equals the factor A of another weight of its linear, of which Megatron has one"


class Placement(NamedTuple):
    """The places that the factors of an adapter have in a new checkpoint."""

    how: str  # as AdapterOptions has it
    names: AdapterNames
    members: dict[Place, Member]  # the place of the factors of each weight in those of its module
    equal: set[Place]  # factors A that equal another one of their module
    notes: list[str]


def choose(
    source: AdapterCheckpoint, decided: Decided, how: str | None, whole: bool = False
) -> Placement:
    """Returns how the factors of an adapter lie in a new checkpoint.

    how: None: fused, or canonical if weights of one linear have different factors A
    and canonical has a place for each. whole: the weights are in the checkpoint as well.

    Raises UsageError for factors that adapters of Megatron-Bridge cannot have.
    """
    places, notes = factors.weights_in(source.layout), list[str]()
    asked, how = how, how or "fused"
    swift = how.startswith("swift")
    names = _names_of(source, decided, how, whole)
    equal, apart = set[Place](), list[str]()
    if not (block := "block" in how):
        equal, apart = _alike(source, names.modules, places)
    if apart and asked is None and not names.dora:  # CanonicalLoRA has no magnitudes
        with suppress(UsageError):  # a linear for whose parts CanonicalLoRA has no adapters
            other = _names_of(source, decided, "canonical", whole)
            found, still_apart = _alike(source, other.modules, places)
            if not still_apart:
                more = f", and {len(apart) - 1} more" * (len(apart) > 1)
                notes.append(
                    "--layout canonical (CanonicalLoRA), because"
                    f" {apart[0].partition(': ')[2]} have factors A of their own{more}"
                )
                how, names, equal, apart = "canonical", other, found, []
    if apart:
        raise UsageError.of(
            f"{source.path}: an adapter of Megatron has one factor A for all weights that a linear"
            " packs, and here they differ:",
            apart,
            f"Give --layout {'swift-' * swift}block, whose adapters have the sum of their ranks and"
            " compute the same.",
        )
    members = _members(names.modules, places, block)
    _refuse_homeless(places, names)
    rank, ranks = _ranks(source, names, members)
    names = replace(names, rank=rank, ranks=ranks)
    if names.dora:
        _refuse_dora(names, members, how, decided.padded_vocab_size)
    if swift and names.parallel.expert_tp > 1 and any(map(of_experts, names.modules)):
        raise UsageError(
            f"etp {names.parallel.expert_tp}: ms-swift has no adapters of experts with tensor"
            " parallelism; give --etp 1"
        )
    if swift and ranks:
        raise UsageError(
            f"--layout {how}: experts have another scale (alpha / r) than other weights, and the"
            " adapters of ms-swift have one; merge the adapter with `mckpt adapter merge` instead"
        )
    if rank % names.parallel.tp and not swift:
        raise UsageError(
            f"the rank {rank} is not divisible by tp {names.parallel.tp}: Megatron-Bridge cuts the"
            " factor A of most linears along the rank; choose a tp that divides it"
        )
    return Placement(how, names, members, equal, notes)


def _names_of(source: AdapterCheckpoint, decided: Decided, how: str, whole: bool) -> AdapterNames:
    """Returns the names of the adapters of a new checkpoint, whose rank is not known yet."""
    own, places = decided.names, factors.weights_in(source.layout)
    return AdapterNames(
        own.mapping,
        own.dims,
        own.choices,
        own.parallel,
        weights=frozenset(place[0] for place in places),
        program="swift" if how.startswith("swift") else "megatron",
        canonical=how == "canonical",
        dora=has_magnitudes(source),
        mtp=any(layer >= own.dims["num_layers"] for _, layer, _ in places),
        whole=whole,
    )


def placed(
    source: AdapterCheckpoint,
    names: AdapterNames,
    laid: Layout,
    members: Mapping[Place, Member],
    equal: Collection[Place],
) -> tuple[Layout, Layout]:
    """Returns the factors of `source`, and their places in a layout of the names of `names`.

    equal: factors A that equal another one of their module, which are left out and listed as
    ignored. All others must have a place: the join of both layouts proves it.
    """
    layout = factors.placed(laid, names.modules, members)
    held = factors.without(source.layout, equal, EQUAL)
    if source.named is not None:  # which stores one factor A for all of them
        held = replace(held, ignored=source.layout.ignored)
    return held, replace(layout, shapes=dict(held.shapes))


def into_model(
    source: AdapterCheckpoint,
    names: AdapterNames,
    laid: Layout,
    scale_of: Callable[[str], float],
    where: str,
) -> tuple[Layout, Layout]:
    """Returns the factors of `source`, and their places in a model that has adapters already.

    names, laid: of the adapters of the model. scale_of: the scale of their products, by the
    template of the weight. where: the adapter in messages.

    Raises UsageError if they cannot have the factors.
    """
    places = factors.weights_in(source.layout)
    _refuse_homeless(places, names)
    for name in sorted({name for name, _, _ in places}):
        if (own := source.scale_of(name)) != (scale := scale_of(name)):
            raise UsageError(
                f"{where}: its products are multiplied by {own:g} (alpha / r), and those"
                f" of the model's adapters by {scale:g}; wrap the model with the alpha"
                f" {own * names.rank_of(name):g}"
            )
    equal, apart = _alike(source, names.modules, places)
    if apart:
        equal = set()
    members = _members(names.modules, places, bool(apart))
    for (name, *_), member in members.items():
        if (rank := _needed([member])) > (own := names.rank_of(name)):
            rank = _needed(members.values())
            raise UsageError(
                f"{where}: its factors need adapters of the rank {rank}, and those of the model"
                f" have the rank {own}; wrap the model with dim {rank} and alpha"
                f" {source.scale_of(name) * rank:g}"
            )
    without = [
        name.format(layer=layer, expert=expert)
        for module in names.modules
        for layer, expert in zip(*map(list, module.bound.instances()), strict=True)
        for name in module.of[:1]
        if not any((one, layer, expert) in members for one in module.of)
    ]
    if without:
        raise UsageError.of(
            f"{where}: has no factors for some adapters of the model:",
            without,
            "Wrap the modules only that the adapter changes.",
        )
    held, layout = placed(source, names, laid, members, equal)
    _refuse_shared(source, layout, where)
    return held, layout


def _refuse_shared(source: AdapterCheckpoint, layout: Layout, where: str) -> None:
    """Raises UsageError for different factors that have one place: the experts of a rank share an
    adapter.
    """
    taken: dict[tuple[int, int, tuple[Any, ...]], str] = {}
    found = []
    for s in layout.stored:
        columns = (c.tolist() for c in (s.layer, s.expert, s.file, s.at))
        for layer, expert, file, at in zip(*columns, strict=True):
            for piece in s.pieces:
                name = piece.tensor.format(layer=layer, expert=expert)
                first = taken.setdefault((file, at, piece[1:]), name)
                if first != name and not np.array_equal(
                    source[first].numpy(), source[name].numpy()
                ):
                    found.append(f"{name} and {first}")
    if found:
        raise UsageError.of(
            f"{where}: the experts of a rank share one adapter in the model, and have"
            " different factors here:",
            found,
            "Wrap the model with share_expert_adapters=False.",
        )


def _members(
    modules: list[Module], places: Mapping[Place, int], block: bool
) -> dict[Place, Member]:
    """Returns the place of the factors of each weight in those of its module.

    block: the factors of the weights of a module lie one after the other along the rank; else all
    of them have the factor A of the first.
    """
    members: dict[Place, Member] = {}
    for module in modules:
        for layer, expert in _instances(module):
            first = 0
            for number, name in enumerate(_adapted_of(module, layer, expert, places)):
                own = places[name, layer, expert]
                members[name, layer, expert] = Member(name, own, first, block or not number)
                first += own if block else 0
    return members


def _needed(members: Iterable[Member]) -> int:
    """Returns the rank that modules must have to hold these factors."""
    return max((member.first + member.rank for member in members), default=1)


def _ranks(
    source: AdapterCheckpoint, names: AdapterNames, members: Mapping[Place, Member]
) -> tuple[int, dict[str, int]]:
    """Returns the rank of all modules, and those of the weights of experts, by their templates, if
    they have another scale. Megatron-Bridge has one alpha, and with normalize_moe_lora the rank of
    experts is that of other modules, divided by the number of experts that a token takes.

    Raises UsageError for scales that this cannot give.
    """
    if not source.scales:
        return _needed(members.values()), {}
    experts = {name for module in names.modules if of_experts(module) for name in module.of}
    needed, scales = [1, 1], [set[float](), set[float]()]
    for (name, *_), member in members.items():
        kind = name in experts
        needed[kind] = max(needed[kind], _needed([member]))
        scales[kind].add(source.scale_of(name))
    chosen, step = names.dims.get("experts_per_token", 0), names.parallel.expert_tp
    (scale, *more), (expert_scale, *others) = (sorted(found) or [0.0] for found in scales)
    if more or others or not math.isclose(expert_scale, scale * chosen, rel_tol=1e-12):
        raise UsageError(
            f"{source.path}: its weights have different scales (alpha / r): those of experts"
            f" {', '.join(f'{one:g}' for one in sorted(scales[1])) or 'none'}, all others"
            f" {', '.join(f'{one:g}' for one in sorted(scales[0])) or 'none'}. An adapter of"
            " Megatron-Bridge has one scale, or with normalize_moe_lora one for experts that is"
            f" {chosen} times the other (the experts that a token takes). Merge the adapter with"
            " `mckpt adapter merge` instead"
        )
    # Megatron-Bridge cuts the factors of experts along the rank, which it makes divisible
    rank = math.ceil(max(needed[1], needed[0] / chosen) / step) * step
    return rank * chosen, dict.fromkeys(experts, rank)


def _instances(module: Module) -> Iterator[tuple[int, int]]:
    """Yields the (layer, expert) of the adapters of a module."""
    layers, experts = module.bound.instances()
    yield from zip(layers.tolist(), experts.tolist(), strict=True)


def _adapted_of(module: Module, layer: int, expert: int, places: Mapping[Place, int]) -> list[str]:
    """Returns the weights of one adapter of a module that have factors."""
    return [name for name in module.of if (name, layer, expert) in places]


def _alike(
    source: AdapterCheckpoint, modules: Iterable[Module], places: Mapping[Place, int]
) -> tuple[set[Place], list[str]]:
    """Compares the factors A of the weights of each module. Returns those that equal the one of the
    first weight, bit for bit, and texts that name the adapters of which others differ.
    """
    equal, apart = set[Place](), list[str]()
    for module in modules:
        for layer, expert in _instances(module):
            there = _adapted_of(module, layer, expert, places)
            same = equal_factors(source, there, layer, expert, places)
            equal |= same
            if len(same) < len(there[1:]):
                names = ", ".join(name.format(layer=layer, expert=expert) for name in there)
                apart.append(f"{module.stem.rstrip('.')}, layer {layer}: {names}")
    return equal, apart


def equal_factors(
    source: AdapterCheckpoint,
    names: list[str],
    layer: int,
    expert: int,
    places: Mapping[Place, int],
) -> set[Place]:
    """Returns the factors A of some weights that equal the one of the first, bit for bit."""
    at = [(name_of(name, A, places[name, layer, expert]), layer, expert) for name in names]
    read = [source[name.format(layer=layer, expert=expert)] for name, *_ in at]
    if len(read) < 2:
        return set()
    first = read[0].numpy()
    return {
        place
        for place, one in zip(at[1:], read[1:], strict=True)
        if one.shape == read[0].shape
        and one.dtype == read[0].dtype
        and np.array_equal(one.numpy(), first)
    }


def of_experts(module: Module) -> bool:
    return "expert" in module.bound.rule.indices


def _refuse_homeless(places: Mapping[Place, int], names: AdapterNames) -> None:
    """Raises UsageError for weights that no adapter of Megatron has."""
    there = {
        (name, int(layer), int(expert))
        for module in names.modules
        if module.bound.rule.stage != "first" or module.bound.rule.of_tower
        for layer, expert in zip(*module.bound.instances(), strict=True)
        for name in module.of
    }
    if lost := [place for place in places if place not in there]:
        beside = not names.mapping.whole and any(name.startswith(CARRIED) for name, *_ in lost)
        other = "Give --towers, if the trainer builds the whole model, or merge"
        raise UsageError.of(
            "the adapter changes weights that have no adapter in Megatron:",
            [
                name.removeprefix(CARRIED).format(layer=layer, expert=expert)
                for name, layer, expert in lost
            ],
            f"{other if beside else 'Merge'} the adapter with `mckpt adapter merge` instead.",
        )


def _refuse_dora(
    names: AdapterNames, members: Mapping[Place, Member], how: str, rows: int | None
) -> None:
    """Raises UsageError for magnitudes that the DoRA of Megatron-Bridge does not have, or with
    which it computes something else.

    rows: of the vocabulary with padding.
    """
    cure = "merge the adapter with `mckpt adapter merge` instead"
    if cut := names.without_lengths:
        raise UsageError.of(
            f"DoRA at tp {names.parallel.tp}: the ranks do not have whole rows of these weights,"
            " and Megatron-Bridge divides by the lengths of their parts, which PEFT does not:",
            cut,
            f"Give --tp 1, or {cure}.",
        )
    if how == "canonical":
        raise UsageError(
            "--layout canonical: CanonicalLoRA of Megatron-Bridge has no magnitudes (DoRA); give"
            " --layout fused or block"
        )
    lost = []
    for module in names.modules:
        if of_experts(module):
            raise UsageError(
                f"{module.of[0]}: Megatron-Bridge has no DoRA for the experts of a layer; {cure}"
            )
        if module.bound.rule.tp == "vocab" and rows != names.dims["vocab_size"]:
            raise UsageError(
                f"{module.of[0]}: Megatron pads the vocabulary of {names.dims['vocab_size']:,} to"
                f" {rows:,} rows, and DoRA divides by the length of each, which is 0; {cure}"
            )
        for layer, expert in zip(*map(list, module.bound.instances()), strict=True):
            there = [(name, int(layer), int(expert)) in members for name in module.of]
            if not all(there):  # a magnitude of 0 would make the row 0
                lost += [
                    name.format(layer=layer, expert=expert)
                    for name, found in zip(module.of, there, strict=True)
                    if not found
                ]
    if lost:
        raise UsageError.of(
            "Megatron has one linear for several weights, and one key for all layers, and with DoRA"
            " all or none of them must have magnitudes; these have none:",
            lost,
            f"Train them too, or {cure}.",
        )


def has_magnitudes(source: AdapterCheckpoint) -> bool:
    """Returns whether the adapters are DoRA."""
    return any(MAGNITUDE in name for name in source.layout.shapes)
