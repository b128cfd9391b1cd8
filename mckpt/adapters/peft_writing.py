"""Lays out the directory of an adapter of PEFT."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from mckpt.adapters.factors import A, B, Place, name_of
from mckpt.adapters.fitting import (
    Shapes,
    of_tower,
    tower_key,
    tower_scope,
    turned_by_version,
)
from mckpt.adapters.peft import is_adapter, open_adapter, rules
from mckpt.formats.base import Format, Names, packed
from mckpt.formats.hf_config import ADAPTER
from mckpt.formats.hf_files import Row, place
from mckpt.geometry.box import Box, Layout, Piece, Stored, whole_box
from mckpt.geometry.packing import Packed
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, Rule, in_memory, is_part
from mckpt.mapping.schema import MAGNITUDE
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

STEM, ONE_FILE = ADAPTER[1].partition(".")[0], 1 << 62


class AdaptedWeight(NamedTuple):
    """A stored weight of the base with factors: a matrix, or those of all experts of a layer."""

    key: str
    bound: Bound
    whole: Packed  # one matrix
    layer: int
    experts: list[int]  # [0] of a matrix that belongs to no expert
    there: list[str]  # templates of the packed weights that have factors
    rank: int
    stacked: bool  # the key holds the matrices of all experts
    turned: bool  # of these, A of the file multiplies the output, as PEFT has it for some families


class Written(NamedTuple):
    """The files of an adapter of PEFT."""

    layout: Layout
    outputs: list[TargetFile]
    adapted: list[AdaptedWeight]


def loaded_names(names: Names, places: Set[Place]) -> Names:
    """Returns the names under which PEFT loads the factors of these weights: those that
    transformers has in memory. The factors of experts have the names of the files where PEFT itself
    puts those of all experts together, which it does for all linears of all experts only.

    names: those of the base as a Hugging Face directory.
    """
    apart: set[Place] = set()
    for b in names.bound:
        if "{expert}" in b.rule.key and b.rule.key.endswith(".weight") and not b.rule.mtp:
            layers, experts = (column.tolist() for column in b.instances())
            apart.update((b.rule.of[0], *at) for at in zip(layers, experts, strict=True))
    name, known = names.mapping.name, rules()["peft"]
    whole = name in known["unconverted"] or not (apart and apart <= places)
    whole &= name not in known["modules"]
    return replace(names, mapping=in_memory(names.mapping, experts=whole))


def lay_out(
    names: Names,
    ranks: Mapping[Place, int],
    dtype: str,
    towers: Shapes,
    dora: bool = False,
) -> Written:
    """Lays out the factors of an adapter.

    names: those of the base as a Hugging Face directory. ranks: of each weight with factors.
    towers: the shapes of tensors of towers, by their keys there. dora: each weight has magnitudes
    too.
    """
    sides = (A, B, MAGNITUDE) if dora else (A, B)
    adapted = [*_adapted(names, ranks), *_of_towers(names, ranks, towers)]
    keys = {one.key for one in adapted}
    rows = [row for one in adapted for row in _rows(one, keys, dtype)[: len(sides)]]
    places = place(rows, ONE_FILE, STEM)
    size = itemsize(dtype)
    # layers and experts of one geometry -> their layer, expert, file and first byte
    alike: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for number, one in enumerate(adapted):
        count, part = len(one.experts), len(one.there) < len(one.bound.rule.of)
        for index, side in enumerate(sides, number * len(sides)):
            key = f"{one.bound.rule.key}:{side}"
            kind = key, *_factor(one, side, count), part, one.stacked and side == B
            found = alike.setdefault(kind, [])
            file, at = int(places.file[index]), int(places.at[index])
            for nth, expert in enumerate(one.experts):
                width = one.whole.shape[0 if one.turned else 1]
                skipped = nth * (one.rank * width if side == A else 1) * size
                found.append((one.layer, expert, file, at + skipped))
    stored = [
        Stored(key, dtype, shape, pieces, *np.array(found, "i8").T, padding=part, view=view)
        for (key, shape, pieces, part, view), found in alike.items()
    ]
    return Written(Layout(places.names, stored, {}), places.outputs, adapted)


def _adapted(names: Names, ranks: Mapping[Place, int]) -> Iterable[AdaptedWeight]:
    """Yields the stored weights of the base that have factors."""
    scope, version = names.scope(), rules()["peft"]["version"]
    for b in names.bound:
        if b.rule.alias or not b.rule.written:
            continue
        whole, keys, (layers, experts) = packed(b.rule, scope), b.keys(), b.instances()
        count = len(b.experts) if b.axes(scope) else 1
        for at in range(0, len(keys), count):
            of, layer = experts[at : at + count].tolist(), int(layers[at])
            there = [name for name in b.rule.of if (name, layer, of[0]) in ranks]
            if there and len(whole.shape) == 2:
                rank = ranks[there[0], layer, of[0]]
                turned = count > 1 and bool(turned_by_version(version, names.mapping.name))
                yield AdaptedWeight(keys[at], b, whole, layer, of, there, rank, count > 1, turned)


def _of_towers(names: Names, ranks: Mapping[Place, int], towers: Shapes) -> Iterable[AdaptedWeight]:
    """Yields the weights of towers that have factors."""
    family, scope = names.mapping, tower_scope(names, towers)
    for key in towers:
        b = of_tower(key)
        if rank := ranks.get((name := b.rule.of[0], 0, 0)):
            there = tower_key(family, key, family.form(scope))
            whole = packed(b.rule, scope)
            yield AdaptedWeight(there, b, whole, 0, [0], [name], rank, False, False)


def _rows(one: AdaptedWeight, keys: set[str], dtype: str) -> list[Row]:
    """Returns the two factors and the magnitudes of a weight in a file of PEFT.

    keys: of all weights with factors. The adapter of a parameter of all experts wraps those of the
    parameters before it, whose names then have a part more (PEFT, ParamWrapper).
    """
    known = rules()["peft"]
    module, _, end = one.key.rpartition(".")
    if one.stacked:
        parameters = list(known["parameters"])
        outer = parameters[parameters.index(end) + 1 :] if end in parameters else []
        module += f".{known['inside'][0]}" * sum(f"{module}.{name}" in keys for name in outer)
    (out, into), count = one.whole.shape, len(one.experts)
    if one.turned:
        out, into = into, out
    shapes = {
        f"{A}.weight": (one.rank * count, into),
        f"{B}.weight": (out, one.rank * count),
        known["ends"]["magnitude"][0]: (out,),
    }
    return [Row(f"{known['prefix']}{module}.{end}", dtype, shape) for end, shape in shapes.items()]


def _factor(one: AdaptedWeight, side: str, count: int) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Returns the shape and the pieces of a factor of one matrix.

    count: of the experts whose factors B take turns in its columns.
    """
    (out, into), rank = one.whole.shape, one.rank
    if one.turned and side == A:
        columns = [
            Piece(
                name_of(one.bound.rule.of[member], B, rank),
                box._replace(offset=(box.offset[0], 0), shape=(box.shape[0], rank)),
                at[0],
                (step, out),
            )
            for member, box, at, step in one.whole.placed
            if one.bound.rule.of[member] in one.there
        ]
        return (rank, out), tuple(columns)
    if one.turned:
        box, steps = whole_box((rank, into)), (count, rank * count)
        whole = (Piece(name_of(one.there[0], A, rank), box, 0, steps),)
        return ((into * rank - 1) * count + 1,), whole
    if side == A:
        box = whole_box((rank, into))
        return box.shape, (Piece(name_of(one.there[0], A, rank), box, 0, (into, 1)),)
    if side == MAGNITUDE:
        vectors = [
            Piece(
                name_of(one.bound.rule.of[member], MAGNITUDE, rank),
                Box(box.offset[:1], box.shape[:1]),
                at[0],
                (step,),
            )
            for member, box, at, step in one.whole.placed
            if one.bound.rule.of[member] in one.there
        ]
        return (out,), tuple(vectors)
    pieces, width = [], rank * count
    for member, box, at, step in one.whole.placed:
        if (name := one.bound.rule.of[member]) in one.there:
            rows = box._replace(offset=(box.offset[0], 0), shape=(box.shape[0], rank))
            strides = (step * width, count)
            pieces.append(Piece(name_of(name, B, rank), rows, at[0] * width, strides))
    return ((out * rank - 1) * count + 1,) if one.stacked else (out, rank), tuple(pieces)


def config(
    adapted: Iterable[AdaptedWeight],
    names: Names,
    scale_of: Callable[[str], float],
    dora: bool,
    base: str | None,
) -> bytes:
    """Returns the adapter_config.json of these weights.

    scale_of: the scale of the product of a weight, by its template. base: the path or the id on the
    Hub of the model.
    """
    found = list(adapted)
    experts = {
        _leaf(b.rule.key) for b in names.bound if "{expert}" in b.rule.key and not b.rule.alias
    }
    modules: set[str] = set()
    parameters = _ends({one.key for one in found if one.stacked}, names)
    for one in found:
        if one.stacked:
            continue
        if "{expert}" not in one.bound.rule.key and (
            # PEFT takes such a module for one of the experts, and then does not load it
            _leaf(one.key) in experts or one.there[0] in rules()["peft"]["no_linears"]
        ):
            parameters.add(one.key)
        else:
            modules.add(one.key)
    rank = max(one.rank for one in found)
    alpha = next(scale_of(one.there[0]) * rank for one in found if one.rank == rank)
    patterns: dict[str, dict[str, float]] = {"rank_pattern": {}, "alpha_pattern": {}}
    stacked = _stacked(names)
    for one in found:
        own = scale_of(one.there[0]) * one.rank
        keys = {one.key: 1}
        if not one.stacked and (rule := stacked.get(one.there[0])):
            keys[rule.key.replace("{layer}", "0")] = len(rule.of)
        for key, count in keys.items():
            pattern = _pattern(key, parameters)
            if one.rank != rank:
                patterns["rank_pattern"][pattern] = one.rank * count
            if not math.isclose(own, alpha, rel_tol=1e-12):
                patterns["alpha_pattern"][pattern] = _number(own * count)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "peft_version": rules()["peft"]["version"],
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": _number(alpha),
        **{name: found for name, found in patterns.items() if found},
        "target_modules": sorted(_exact(modules, experts, names)),
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": dora,
        "fan_in_fan_out": any(one.bound.rule.transposed for one in found if not one.stacked),
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _stacked(names: Names) -> dict[str, Rule]:
    """Returns the parameter of all experts that transformers has in memory, by the templates of the
    weights in it. PEFT puts the factors of an expert's weights into one pair there, whose rank and
    alpha are their sums, and reads no pattern of the modules.
    """
    return {
        template: rule
        for rule in in_memory(names.mapping).rules
        for template in rule.of
        if "{expert}" in template and "{expert}" not in rule.key
    }


def _number(value: float) -> float:
    """Returns a number that JSON writes without a fraction if it is whole."""
    return int(value) if float(value).is_integer() else value


def _pattern(key: str, parameters: Set[str]) -> str:
    """Returns the regular expression by which PEFT finds the module of a weight, and those of the
    same weight in other layers and of other experts.

    parameters: `target_parameters`, of which PEFT matches the whole path.
    """
    module = key if key in parameters else key.removesuffix(".weight")
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in module.split("."))


def _is_linear(key: str) -> bool:
    """Returns whether a key can be that of the weight of a module."""
    return key.count(".") > 1 and key.endswith(".weight")


def _leaf(key: str) -> str:
    """Returns the last name of the module of a weight."""
    return key.split(".")[-2]


def _ends(keys: set[str], names: Names) -> set[str]:
    """Returns `target_parameters` for parameters of all experts: their ends, if all parameters of
    the model with it are among them, else their paths.
    """
    every: dict[str, set[str]] = {}
    for b in names.bound:
        for key in b.keys() if b.axes(names.scope()) else ():
            every.setdefault(_end(key), set()).add(key)
    return {_end(key) if every[_end(key)] <= keys else key for key in keys}


def _end(key: str) -> str:
    """Returns the last names of a path, without the number of the layer."""
    return ".".join(key.split(".")[-3:])


def _exact(keys: set[str], experts: set[str], names: Names) -> set[str]:
    """Returns names of the modules of these weights: the last part, if all modules of the model
    with it are among them, else the whole name, as in a model with towers, whose modules may have
    the same last parts.

    experts: last parts for which PEFT takes the modules of experts only.
    """
    if is_part(names.mapping.forms):
        return {key.removesuffix(".weight") for key in keys}
    every: dict[str, set[str]] = {}
    for b in names.bound:
        if not (b.rule.alias or b.rule.mtp) and b.rule.written:
            for key in filter(_is_linear, b.keys()):
                if _leaf(key) not in experts or "{expert}" in b.rule.key:
                    every.setdefault(_leaf(key), set()).add(key)
    whole = {leaf for leaf, there in every.items() if there <= keys}
    return {_leaf(key) if _leaf(key) in whole else key.removesuffix(".weight") for key in keys}


# A directory of PEFT as a destination. It is not among the formats of whole checkpoints.
PEFT = Format(
    "peft",
    ADAPTER[0],
    megatron=False,
    detect=is_adapter,
    open=open_adapter,  # type: ignore[arg-type]  # it is not an Opened: nothing reads it as a model
    lay_out=lambda request: lay_out(*request)[:2],
    parts=ADAPTER,
    last=ADAPTER[0],
)
