"""Finds the weights of a base that an adapter of PEFT changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mckpt.adapters.peft import PeftAdapter, rules, without_inside
from mckpt.adapters.targets import Targets
from mckpt.errors import SourceError, counted
from mckpt.formats import carried
from mckpt.formats.base import Names, packed
from mckpt.formats.hf_config import ADAPTER
from mckpt.geometry.box import Box, row_major
from mckpt.geometry.packing import Packed
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, MappingFile, NameForm, in_memory, renamed, tower_rule
from mckpt.mapping.schema import TOWER, nearest
from mckpt.values import dtypes
from mckpt.values.adding import COLUMN_WISE, FACTORS, NO_AXIS, ROW_WISE, Factor, Segment

Place = tuple[str, int, int]  # of a logical tensor: template, layer, expert


class FactorProduct(NamedTuple):
    """The product that an adapter adds to a box of a logical tensor: scale * left @ right.

    left [rows of the box, rank] and right [rank, columns of the box] are in the adapter's files.
    """

    box: Box
    rank: int
    scale: float
    left: Factor
    right: Factor
    axis: int = NO_AXIS  # of the box that has magnitudes (DoRA)
    magnitudes: Factor | None = None  # [n, 1], n: the size of the axis
    segments: tuple[Segment, ...] = ()  # of the box in the base's files, if it has magnitudes


class AdaptedModule(NamedTuple):
    """The weights of one module, or of one parameter of all experts, that an adapter changes."""

    module: str
    keys: tuple[str, ...]  # of the base's weights
    rank: int
    scale: float


class Fit(NamedTuple):
    """An adapter beside the names of its base."""

    parts: Mapping[Place, Sequence[FactorProduct]]
    whole: Mapping[Place, tuple[Box, int]]  # what replaces a tensor: its box, and the stored row
    adapted: Sequence[AdaptedModule]
    notes: Sequence[str] = ()  # on choices that the files do not settle

    @property
    def has_magnitudes(self) -> bool:
        """Returns whether the adapter is DoRA: then each product has magnitudes."""
        return any(part.magnitudes for parts in self.parts.values() for part in parts)


Shapes = Mapping[str, tuple[int, ...]]


def fit(adapter: PeftAdapter, names: Names, towers: Shapes, *, look: bool = True) -> Fit:
    """Returns the logical tensors that an adapter changes.

    names: those of the base as a Hugging Face directory. towers: the shapes of its tensors beside
    the text model, by their keys there. look: read the values too.

    Raises SourceError with every tensor of the adapter that does not fit, or that has values which
    are not finite.
    """
    fitted = _Fitting(adapter, names, towers).fit()
    if look:
        adapter.check_finite()
    return fitted


class _BaseTensor(NamedTuple):
    """A tensor of the base: the rule that names it, and the number of its key in that rule."""

    bound: Bound
    number: int


def _by_key(names: Names) -> dict[str, list[_BaseTensor]]:
    """Returns the tensors with each key: several if the key does not name the expert."""
    found: dict[str, list[_BaseTensor]] = {}
    for b in names.bound:
        for number, key in enumerate(b.keys() if not b.rule.alias else ()):
            found.setdefault(key, []).append(_BaseTensor(b, number))
    return found


def of_tower(key: str) -> Bound:
    """Returns the rule of a tower's tensor in Hugging Face files, for its only instance."""
    one = np.zeros(1, "i8")
    return Bound(tower_rule(key), one, one, one, 0)


def tower_key(family: MappingFile, key: str, form: NameForm) -> str:
    """Returns the key that a tower's tensor has in memory, in a model of this form."""
    own = next((one for one in family.forms.values() if one.carries(key)), form)
    key = own.carried_as(key, form)
    for old, new in family.memory.items():
        key = key.replace(old, new)
    return key


def tower_scope(names: Names, towers: Shapes) -> dict[str, Any]:
    """Returns the scope of the rules of `names` and of `of_tower`."""
    return {**names.scope(), TOWER: {carried.name_of(key): towers[key] for key in towers}}


def _in_memory(names: Names) -> Iterator[Names]:
    """Yields the names that transformers and Unsloth have in memory in place of those of files."""
    ends = rules()["peft"]["linears"].get(names.mapping.name, {})
    yield replace(names, mapping=renamed(names.mapping, ends))
    family = in_memory(names.mapping)
    for form in family.forms or ("",):
        yield replace(names, mapping=family, choices={**names.choices, "form": form})


class _Fitting:
    """The tensors of an adapter that are matched so far, and what does not fit."""

    def __init__(self, adapter: PeftAdapter, names: Names, towers: Shapes) -> None:
        self.adapter, self.names, self.scope = adapter, names, tower_scope(names, towers)
        # the names of the base's files come last, since they win
        self.base = {
            key: tensors
            for one in (*_in_memory(names), names)
            for key, tensors in _by_key(one).items()
        }
        for key in towers:
            forms = names.mapping.forms.values()
            here = [_BaseTensor(of_tower(key), 0)]
            self.base |= {tower_key(names.mapping, key, form): here for form in forms}
            self.base[key] = here
        self.problems: list[str] = []
        self.ranks: list[str] = []  # modules whose factors have another rank than stated
        self.parts: dict[Place, list[FactorProduct]] = {}
        self.whole: dict[Place, tuple[Box, int]] = {}
        self.adapted: list[AdaptedModule] = []
        self.experts: list[_ExpertFactors] = []

    def fit(self) -> Fit:
        targets = self._targets()
        targets.refuse_others()
        targets.refuse_lost()
        for module, rows in self.adapter.modules.items():
            try:
                self._add(module, rows)
            except _Misfit as e:
                self.problems.append(str(e))
        notes = self._add_experts()
        for key, row in self.adapter.whole.items():
            self._replace(key, row)
        self._refuse_tied()
        if self.ranks and not self.problems:
            raise SourceError.of(
                f"{self.adapter.path}: {counted(len(self.ranks), 'module')} whose factors have"
                f" another rank than {ADAPTER[0]} gives them:",
                self.ranks,
                "Correct r or rank_pattern there, which also decide the scale alpha / r.",
            )
        if self.problems:
            raise SourceError.of(
                f"{self.adapter.path}: the adapter does not fit the base, read as family"
                f" {self.names.mapping.name}:",
                self.problems,
                "Give the base with which it was trained.",
            )
        if not (self.parts or self.whole):
            raise SourceError(f"{self.adapter.path}: the adapter has no tensors")
        notes += self._notes_on_modules(targets)
        return Fit(self.parts, self.whole, self.adapted, notes)

    def _notes_on_modules(self, targets: Targets) -> list[str]:
        """Returns notes on modules whose scale or whose factors the files do not settle."""
        notes: list[str] = []
        if lost := targets.without_factors():
            notes.append(
                f"{ADAPTER[0]} also targets {counted(len(lost), 'module')} without factors in the"
                f" adapter, such as {min(lost)}; there the weights of the base stay"
            )
        alphas = {one.module: self.adapter.alphas(one.module) for one in self.adapted}
        if unsure := [module for module, found in alphas.items() if len(found) > 1]:
            listed = " and ".join(f"{alpha:g}" for alpha in alphas[unsure[0]])
            notes.append(
                f"several patterns of alpha_pattern match {counted(len(unsure), 'module')}, such as"
                f" {unsure[0]} (alpha {listed}). The first counts, as in PEFT, which sorts the"
                " patterns when it saves them: if they had another order in the training, write"
                " one pattern for each module"
            )
        older = [
            (one, scale)
            for one in self.adapted
            if (scale := self.adapter.older_scale(one.module, one.rank)) not in (None, one.scale)
        ]
        if older:
            one, scale = older[0]
            notes.append(
                "PEFT before 0.14 matched rank_pattern and alpha_pattern in another way, and"
                f" {ADAPTER[0]} has no key of a later release. PEFT now gives {one.module} the"
                f" scale {one.scale:g}, and then gave {scale:g}; so it is for"
                f" {counted(len(older), 'module')}. If PEFT before 0.14 trained the adapter, write"
                " alpha_pattern again with the whole names of modules"
            )
        return notes

    def _targets(self) -> Targets:
        parameters: dict[str, list[str]] = {}
        for key in self.base:
            module, _, name = key.rpartition(".")
            parameters.setdefault(module, []).append(name)
        not_linear = {
            key.rpartition(".")[0]
            for key, tensors in self.base.items()
            if tensors[0].bound.rule.of[0] in rules()["peft"]["not_linear"]
        }
        return Targets(self.adapter, self.names.mapping.name, parameters, not_linear)

    def _shown(self, row: int) -> str:
        """Returns a stored tensor for a message."""
        shape = list(self.adapter.entries.entry(row).shape)
        return f"{self.adapter.key(row)} {shape}"

    def _add(self, stored: str, rows: Mapping[str, int]) -> None:
        """Adds the factors of one module; raises _Misfit if they do not fit the base."""
        first = self._shown(next(iter(rows.values())))
        if "bias" in rows:
            raise _Misfit(
                f"{self._shown(rows['bias'])}: is of a bias of the factor B, which mckpt does not"
                " compute"
            )
        if not {"a", "b"} <= rows.keys():
            raise _Misfit(f"{first}: one of the two factors A and B is missing")
        dora = bool(self.adapter.config.get("use_dora"))
        if dora != ("magnitude" in rows):
            raise _Misfit(
                f"{first}: use_dora is {str(dora).lower()} in {ADAPTER[0]}, and the module has"
                f" {'no' if dora else 'a'} lora_magnitude_vector"
            )
        module = without_inside(stored)
        if module in self.base and len(self._packed(module).shape) == 2 and not dora:
            self._adapt(module, [module], *self._of_parameter(module, rows))
            return
        a, b = (self._factor(rows[role]) for role in "ab")
        key = f"{module}.weight"
        if key in self.base:
            shape = self._packed(key).shape
            if len(shape) != 2:
                raise _Misfit(f"{first}: {key} {list(shape)} is not a matrix")
            embedding = "lora_embedding" in self.adapter.key(rows["a"])
            out, into = reversed(shape) if embedding else shape
            rank = a.shape[0]
            if a.shape != (rank, into) or b.shape != (out, rank):
                shown = " and ".join(map(self._shown, rows.values()))
                raise _Misfit(
                    f"{shown}: the base's {key} is {list(shape)}, so they must be [r, {into}] and"
                    f" [{out}, r]"
                )
            left, right = (a.factor.turned, b.factor.turned) if embedding else (b.factor, a.factor)
            # PEFT takes the lengths of the columns of an embedding [vocab, hidden]
            axis = NO_AXIS if not dora else COLUMN_WISE if embedding else ROW_WISE
            vector = self._magnitudes(rows["magnitude"], key, shape, axis) if dora else None
            self._adapt(module, [key], rank, [(left, right)], axis, vector)
            return
        for name in self._parameters(stored, module):
            keys = [f"{module}.{name}"]
            shape, experts = self._packed(keys[0]).shape, len(self.base[keys[0]])
            if dora:
                raise _Misfit(
                    f"{first}: has DoRA for a parameter of all experts, which PEFT does not have"
                )
            (out, into), rank = shape, a.shape[0] // experts
            if a.shape[0] % experts or a.shape[0] != b.shape[1]:
                continue
            sides = a.shape[1], b.shape[0]
            if sides in ((into, out), (out, into)):
                turned = None if into == out else sides == (out, into)
                # PEFT matches patterns of ranks against the path of the parameter
                self.experts.append(
                    _ExpertFactors(f"{module}.{name}", keys, rank, a, b, experts, turned)
                )
                return
        known = nearest(module, {key.removesuffix(".weight") for key in self.base})
        raise _Misfit(f"{first}: the base has no weight {key}{known}")

    def _add_experts(self) -> list[str]:
        """Adds the products of the parameters of all experts. Returns notes on their reading."""
        notes: list[str] = []
        shown = {one.turned for one in self.experts} - {None}
        square = [one for one in self.experts if one.turned is None]
        turned = False
        if square:
            name = f"{square[0].name} [{square[0].a.shape[1]}, {square[0].b.shape[0]}]"
            config = self.adapter.config
            version, stated = config.get("peft_version"), self.adapter.experts.expert_a
            told = turned_by_version(version, self.names.mapping.name)
            why = ""
            if stated is not None:
                turned, why = stated == "output", "--expert-a"
            elif len(shown) == 1:
                turned, why = shown == {True}, "the shapes of the other experts"
            elif told is not None and not shown:
                turned, why = told, f"peft_version {version} (and transformers 5)"
            else:
                self.problems.append(
                    f"{name} and {len(square) - 1} more: these matrices of experts are square, and"
                    " releases of PEFT differ in whether A multiplies the input or the output;"
                    f" peft_version in {ADAPTER[0]} is {version!r:.40}. Give --expert-a input (PEFT"
                    " from 0.19.1 on, for most models) or --expert-a output (before)"
                )
                return notes
            side = "output" if turned else "input"
            notes.append(
                f"{counted(len(square), 'parameter')} of experts with square matrices: A multiplies"
                f" the {side}, by {why}"
            )
        marked = self.adapter.config.get("lora_B_layout")
        order = self.adapter.experts.expert_b or marked or "rank_major"
        auto = self.adapter.config.get("auto_mapping")
        unsloth = isinstance(auto, dict) and auto.get("unsloth_fixed")
        unsettled = any(one.experts > 1 and one.rank > 1 for one in self.experts)
        if unsettled and order != "rank_major":
            notes.append("the columns of the factors B of experts are read grouped by expert")
        elif unsettled and unsloth and not (marked or self.adapter.experts.expert_b):
            notes.append(
                "the adapter was trained with Unsloth, and its experts are read as PEFT reads"
                " them. If Unsloth was older than September 2026, it computed with the columns of B"
                " grouped by expert: then give --expert-b grouped_by_expert"
            )
        for name, keys, rank, a, b, count, own in self.experts:
            by = _Reading(turned if own is None else own, order != "rank_major")
            factors = [_of_expert(a, b, e, count, by) for e in range(count)]
            self._adapt(name, keys, rank, factors)
        return notes

    def _of_parameter(
        self, module: str, rows: Mapping[str, int]
    ) -> tuple[int, list[tuple[Factor, Factor]]]:
        """Returns the rank and the factors, left and right, of each expert of a parameter that the
        adapter takes for a module. Megatron-Bridge and SGLang have A as [n, r, in] and B as [n,
        out, r]; n is 1 for a factor that all experts share.
        """
        (out, into), count = self._packed(module).shape, len(self.base[module])
        shown = " and ".join(map(self._shown, rows.values()))
        if self.base[module][0].bound.rule.pack == "interleaved":
            raise _Misfit(
                f"{shown}: the rows of gate and up alternate in the base's {module}, and mckpt does"
                " not know in which order a program has those of this adapter"
            )
        a, b = (self.adapter.entries.entry(rows[role]).shape for role in "ab")
        rank = a[-2] if len(a) == 3 else 0
        if not rank or {a[1:], b[1:]} != {(rank, into), (out, rank)} or {a[0], b[0]} - {1, count}:
            raise _Misfit(
                f"{shown}: the base's {module} is [{count}, {out}, {into}], so they must be"
                f" [{count} or 1, r, {into}] and [{count} or 1, {out}, r]"
            )
        return rank, [
            (self._factor(rows["b"], expert).factor, self._factor(rows["a"], expert).factor)
            for expert in range(count)
        ]

    def _factor(self, row: int, expert: int | None = None) -> _Matrix:
        """Returns a stored factor, or that of one expert of several; raises _Misfit if it is not a
        matrix of floats.
        """
        entry = self.adapter.entries.entry(row)
        axes = 2 if expert is None else 3
        if len(entry.shape) != axes or entry.dtype not in FACTORS or 0 in entry.shape:
            raise _Misfit(
                f"{self._shown(row)}: holds {entry.dtype}, and a factor is a matrix of"
                f" {', '.join(FACTORS)}"
            )
        *each, down, along = entry.strides or row_major(entry.shape)
        at = entry.at
        for step in each:
            at += (expert or 0) % entry.shape[0] * step * dtypes.itemsize(entry.dtype)
        kind = FACTORS.index(entry.dtype)
        return _Matrix(entry.shape[-2:], Factor(entry.file, at, down, along, kind))

    def _magnitudes(self, row: int, key: str, shape: tuple[int, ...], axis: int) -> Factor:
        """Returns the stored magnitudes of a weight as [n, 1]; raises _Misfit if they do not fit.

        shape: of the weight. axis: that has magnitudes.
        """
        entry, wanted = self.adapter.entries.entry(row), shape[axis - ROW_WISE]
        if entry.shape != (wanted,) or entry.dtype not in FACTORS:
            raise _Misfit(
                f"{self._shown(row)}: holds {entry.dtype}, and the base's {key} is {list(shape)},"
                f" so it must be [{wanted}] of {', '.join(FACTORS)}"
            )
        step = entry.strides[0] if entry.strides else 1
        return Factor(entry.file, entry.at, step, 1, FACTORS.index(entry.dtype))

    def _packed(self, key: str) -> Packed:
        """Returns the whole matrix with this key, without its axis of experts."""
        return packed(self.base[key][0].bound.rule, self.scope)

    def _parameters(self, stored: str, module: str) -> list[str]:
        """Returns the parameters of all experts that a module has, the likeliest first.

        stored: the module with the parts `inside`. PEFT wraps those that the configuration lists,
        one after the other, so the first one has the most of these parts.
        """
        has = [
            name
            for name in rules()["peft"]["parameters"]
            if f"{module}.{name}" in self.base and len(self._packed(f"{module}.{name}").shape) == 2
        ]
        listed = [name for name in has if self.adapter.lists(f"{module}.{name}")]
        around = stored.count(".") - module.count(".")
        return sorted(has, key=lambda name: name not in listed[-1 - around :][:1])

    def _adapt(
        self,
        module: str,
        keys: list[str],
        rank: int,
        factors: list[tuple[Factor, Factor]],
        axis: int = NO_AXIS,
        magnitudes: Factor | None = None,
    ) -> None:
        """Adds the products of a module.

        factors: left and right of each expert, or of the one matrix. axis, magnitudes: of the one
        matrix.
        """
        if (stated := self.adapter.rank(module)) != rank:
            self.ranks.append(f"{module}: rank {rank}, stated {stated}")
        scale = self.adapter.scale(module, rank)
        for number, (left, right) in enumerate(factors):
            above = 0  # rows of the weights that are packed before
            for key in keys:
                stored = self.base[key]
                one = stored[number if len(stored) > 1 else 0]
                whole = packed(one.bound.rule, self.scope)
                whole_part = FactorProduct(
                    Box((0, 0), whole.shape),
                    rank,
                    scale,
                    _moved(left, above),
                    right,
                    axis,
                    magnitudes,
                )
                self._place(one, whole, whole_part)
                above += whole.shape[0]
        self.adapted.append(AdaptedModule(module, tuple(keys), rank, scale))

    def _place(self, stored: _BaseTensor, whole: Packed, product: FactorProduct) -> None:
        """Adds the product for one matrix of the base to each logical tensor in it."""
        rule = stored.bound.rule
        layers, experts = stored.bound.instances()
        layer, expert = int(layers[stored.number]), int(experts[stored.number])
        for member, box, at, step in whole.placed:
            rows = _every(product.left, at[0], step)
            columns = _moved(product.right.turned, at[1]).turned
            magnitudes = product.magnitudes
            if magnitudes is not None:
                across = COLUMN_WISE - product.axis
                if box.shape[across] != whole.shape[across]:
                    raise _Misfit(
                        f"{rule.of[member]}: is a part of the rows to which DoRA gives a length,"
                        " which mckpt does not compute"
                    )
                first, each = (at[0], step) if product.axis == ROW_WISE else (at[1], 1)
                magnitudes = _every(magnitudes, first, each)
            self.parts.setdefault((rule.of[member], layer, expert), []).append(
                product._replace(box=box, left=rows, right=columns, magnitudes=magnitudes)
            )

    def _replace(self, key: str, row: int) -> None:
        """Adds a tensor that replaces one of the base."""
        found = self.base.get(key)
        if found is None:
            known = nearest(key, self.base)
            self.problems.append(f"{self._shown(row)}: the base has no tensor {key}{known}")
            return
        entry, (b, number) = self.adapter.entries.entry(row), found[0]
        whole = packed(b.rule, self.scope)
        if len(found) > 1 or len(whole.placed) > 1 or b.rule.transposed or entry.strides:
            self.problems.append(
                f"{self._shown(row)}: replaces a tensor that packs several weights of the base,"
                " which mckpt does not read from an adapter"
            )
        elif entry.shape != whole.shape:
            self.problems.append(
                f"{self._shown(row)}: replaces {key}, which is {list(whole.shape)} in the base"
            )
        else:
            layers, experts = b.instances()
            place = b.rule.of[0], int(layers[number]), int(experts[number])
            self.whole[place] = (whole.placed[0].box, row)

    def _refuse_tied(self) -> None:
        """Adds a problem if the adapter changes the embedding of a model whose output layer is the
        embedding.
        """
        twice = {name for b in self.names.bound if b.rule.alias for name in b.rule.of}
        if self.names.dims["tied"] and any(
            place[0] in twice for place in (*self.parts, *self.whole)
        ):
            self.problems.append(
                "the adapter changes the embedding, which is the output layer too"
                " (tie_word_embeddings); after the merge both would differ from the model that"
                " was trained"
            )


class _Misfit(Exception):
    """A module of the adapter that does not fit the base."""


class _Matrix(NamedTuple):
    """A factor as it is stored."""

    shape: tuple[int, ...]
    factor: Factor


def _moved(factor: Factor, rows: int) -> Factor:
    """Returns the factor from a row on."""
    size = dtypes.itemsize(FACTORS[factor.dtype])
    return factor._replace(at=factor.at + rows * factor.down * size)


def _every(factor: Factor, first: int, step: int) -> Factor:
    """Returns every `step`-th row of a factor from a row on."""
    return _moved(factor, first)._replace(down=factor.down * step)


class _ExpertFactors(NamedTuple):
    """The factors of a parameter of all experts."""

    name: str  # the path of the parameter
    keys: list[str]  # of the base's weights
    rank: int
    a: _Matrix
    b: _Matrix
    experts: int
    turned: bool | None  # see `_Reading`; None: the matrices are square


class _Reading(NamedTuple):
    """The order in which the factors of all experts are stored."""

    turned: bool  # their product is the transpose of the expert's matrix [out, in]
    grouped: bool  # the columns of B that belong to one expert are side by side


def _of_expert(
    a: _Matrix, b: _Matrix, expert: int, experts: int, by: _Reading
) -> tuple[Factor, Factor]:
    """Returns the factors, left and right, of one expert of a parameter of all experts.

    PEFT (tuners/lora/layer.py, ParamWrapper) reads A as [experts, r, in] and B as [out, r,
    experts]; grouped, B is [out, experts, r].
    """
    rank = a.shape[0] // experts
    right = _moved(a.factor, expert * rank)
    left = _moved(b.factor.turned, expert * rank if by.grouped else expert).turned
    if not by.grouped:
        left = left._replace(along=left.along * experts)
    return (right.turned, left.turned) if by.turned else (left, right)


def turned_by_version(version: object, family: str) -> bool | None:
    """Returns whether A multiplies the output of experts in an adapter that a release of PEFT wrote
    for a family, with transformers 5; None if the version is not known.

    Measured with PEFT 0.18.1, 0.19.0, 0.19.1, 0.20.0, 0.21.0 and 0.21.2. The parameter is [experts,
    n, m]. Up to 0.18.1, A multiplies n. 0.19.0 exchanges both for modules that are `is_transposed`,
    and later releases do it for all others.
    """
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(\..*|@.*)?", str(version))
    if found is None:
        return None
    release = tuple(map(int, found.groups()[:3]))
    if found[4] and (0, 18, 1) < release < (0, 20, 0):
        return None  # a state between two releases
    in_out: Mapping[str, bool] = rules()["peft"]["in_out"]
    exchanged = in_out.get(family, False)  # by 0.19.0
    if release > (0, 19, 0):
        exchanged = not exchanged
    elif release < (0, 19, 0):
        exchanged = False
    return exchanged == (family in in_out)
