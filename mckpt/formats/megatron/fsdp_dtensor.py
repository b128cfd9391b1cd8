"""Megatron's `fsdp_dtensor` format, which its trainer saves with --use-megatron-fsdp.

It is stored as `torch_dcp` is, with other keys:

    model.module.KEY                                    a weight, in fp32: its master copy
    model.module.(...).linear_fc1.weight_w, _v          with SwiGLU, gate and up by themselves
    model.module.(...).experts.linear_fc2.weight7       experts are numbered over all ranks
    optimizer.state.module.(...)module.KEY.exp_avg      its state
    optimizer.state.module.(...)module.KEY.step         a tensor of one element; with torch's Adam,
                                                        where the groups have no number of steps
    optimizer.param_to_group_meta.module.(...)KEY.lr    an object: the settings of its group

The weights of the model are the master copies, rounded to the dtype in which it computes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.errors import SourceError
from mckpt.formats.base import Format, Names, Problems
from mckpt.formats.megatron import optimizer
from mckpt.formats.megatron.chunked import has_keys, names_of, single_keys
from mckpt.formats.megatron.fsdp_writing import (
    HALVES,
    PREFIX,
    STEP,
    by_ranks,
    halves,
    lay_out_fsdp_dtensor,
)
from mckpt.formats.megatron.optimizer import CURE, MASTER, Optimizer, kinds
from mckpt.formats.megatron.torch_dcp import States, TorchDcp
from mckpt.formats.megatron.torch_dist_writing import METADATA
from mckpt.geometry.box import Layout, Stored
from mckpt.mapping import Bound, MappingFile

MASTER_DTYPE = "float32"
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.([^.]+)")
_WRAPPERS = re.compile(r"^(?:module\.)+")
_GROUP = re.compile(r"optimizer\.param_to_group_meta\.(.+)\.([^.]+)")


def detect(path: Path) -> bool:
    return has_keys(path, PREFIX)


class FsdpDtensor(TorchDcp):
    """An opened `fsdp_dtensor` checkpoint."""

    prefix = PREFIX

    def __init__(self, path: Path, format: Format | None = None) -> None:
        super().__init__(path, format or FORMAT)
        # names of dialects, for the halves as for the whole
        self.weights = {self._whole(k): k for k in self.weights}

    def _whole(self, name: str) -> str:
        """Returns the name of the weight of which a stored tensor is a half, or its own name."""
        stem = name[:-2]
        both = all(self.prefix + stem + half in self.metadata.tensors for half in HALVES)
        return stem if name.endswith(HALVES) and both else name

    def _bound(self, names: Names, problems: Problems) -> list[Bound]:
        """Returns the dialect's rules, those of packed gates and ups as two rules each."""
        out = []
        for b in super()._bound(names, problems):
            first = next((key for key, _, _ in single_keys(b)), "")
            if len(b.rule.of) == 2 and first + HALVES[0] in self.metadata.tensors:
                out += halves(b)
                continue
            if why := by_ranks(b, names):
                problems.append(f"{why}, which mckpt does not read")
            out.append(b)
        return out

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        found = super().layout(names)
        fixed = {name for b in names.bound if b.rule.dtype for name in b.rule.of}
        return replace(found, stored=[self._rounded(s, fixed) for s in found.stored])

    def _rounded(self, s: Stored, fixed: set[str]) -> Stored:
        """Returns a stored master copy as the weight: its elements are rounded when they are read.

        fixed: the tensors that have the same dtype in the model, whatever the model computes in.
        """
        dtype = self._dtype()
        if s.dtype != MASTER_DTYPE or dtype == MASTER_DTYPE or fixed & set(s.tensors):
            return s
        return replace(s, dtype=dtype, rounded_from=MASTER_DTYPE)

    def _dtype(self) -> str:
        """Returns the dtype in which the model computes."""
        args = self.common.args or {}
        stated = str(args.get("params_dtype") or "").removeprefix("torch.")
        return stated or ("bfloat16" if args.get("bf16") else MASTER_DTYPE)

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none."""
        found: States = {}
        for key in self.metadata.tensors:
            if (one := _STATE.fullmatch(key)) and one[2] != STEP:
                found.setdefault(self.prefix + one[1], {})[one[2]] = key
        grouped = self._grouped
        if self._begins:
            return None
        if not found:
            kinds.refuse_empty(
                {"param_groups": [{} for _ in grouped]},
                f"{self.root}: has no state of any weight",
                self.common.fields,
            )
            return None
        problems = self._problems_of_optimizer()
        rules = [b for b in self._bound(names, problems) if not b.rule.alias]
        # a weight is its master copy; one that no group updates is frozen
        trained = found.keys() | {key + half for key in grouped for half in ("", *HALVES)}
        states = {
            key: {MASTER: key, **found.get(key, {})}
            for keys in map(single_keys, rules)
            for key, _, _ in keys
            if key in trained
        }
        layout = self._states(rules, states, names, problems)
        known = names_of(rules)
        problems.extend(
            f"{key}: the state of a weight that {names.mapping.path.name} does not have"
            for key in found
            if key not in known
        )
        problems.extend(
            f"{key}: has settings, but {names.mapping.path.name} does not have this weight"
            for key in grouped
            if not known & {key, *(key + half for half in HALVES)}
        )
        problems.check()
        experts = names_of(b for b in rules if "expert" in b.rule.indices)
        groups = self._settings(experts if names.parallel.ep > 1 else set())
        return Optimizer(self.format.name, layout, groups, self._keys_of_optimizer(), [])

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the same, without the steps of an optimizer that has made none."""
        return [name for name in super().beside(dialect) if name != "optimizer" or not self._begins]

    @property
    def _begins(self) -> bool:
        """Returns whether it has no optimizer, but the number 0 for the steps of a new one."""
        fields = {field for own in self._grouped.values() for field, _ in own}
        return fields == {STEP} and not any(map(_STATE.fullmatch, self.metadata.tensors))

    @cached_property
    def _grouped(self) -> dict[str, list[tuple[str, str]]]:
        """Returns the weights that the optimizer updates, by their keys, and for each the settings
        of its group: the name and the key of each.
        """
        fields: dict[str, list[tuple[str, str]]] = {}
        for one, key in self.directory.settings(_GROUP):
            weight = self.prefix + _WRAPPERS.sub("", one[1])
            fields.setdefault(weight, []).append((one[2], key))
        return {weight: sorted(own) for weight, own in fields.items()}

    @cached_property
    def _counts(self) -> set[float]:
        """Returns the numbers of steps that torch's Adam counts for each weight."""
        found = ((_STATE.fullmatch(key), key) for key in self.metadata.tensors)
        keys = [key for one, key in found if one and one[2] == STEP]
        distinct = dict(zip(self.directory.raw(keys), keys, strict=True))  # compared as bytes
        return {self.directory.number_at(key) for key in distinct.values()}

    def _settings(self, experts: set[str]) -> list[list[dict[str, Any]]]:
        """Returns the param_groups of each optimizer.

        Each parameter has a copy of its group's settings. Groups are told apart by the bytes of
        these copies, because there may be a million of them.

        experts: the keys of the experts, if they are spread over ranks. Elsewhere in Megatron they
        then have an optimizer of their own.
        """
        distinct: dict[tuple[bool, tuple[str, ...], tuple[bytes, ...]], str] = {}
        for name, own in self._grouped.items():
            raw = tuple(self.directory.raw(key for _, key in own))
            # the settings are those of the whole, and not of a half
            expert = name in experts or name + HALVES[0] in experts
            distinct.setdefault((expert, tuple(field for field, _ in own), raw), name)
        by_fields = {fields: name for (_, fields, _), name in distinct.items()}
        every = {field for fields in by_fields for field in fields}
        if lacking := [(name, every - {*own}) for own, name in by_fields.items() if every - {*own}]:
            what = f"{self.root}: weights lack settings of the optimizer that others have:"
            lines = [f"{name}: {', '.join(sorted(fields))}" for name, fields in lacking]
            raise SourceError.of(what, lines, CURE)
        if len(self._counts) > 1:
            counts = ", ".join(f"{count:g}" for count in sorted(self._counts))
            raise SourceError(
                f"{self.root}: its weights have made different numbers of steps ({counts}), and"
                f" Megatron's optimizers have one for all. {CURE}"
            )
        out: list[list[dict[str, Any]]] = [[], []]
        for (expert, _, _), name in distinct.items():
            group = {field: self.directory.setting(key) for field, key in self._grouped[name]}
            if self._counts:
                (group[STEP],) = map(int, self._counts)
            # as each has parameters, other numbers of steps are those of another save
            group |= {"is_expert_parallel": expert, "params": [0]}
            if group not in out[expert]:  # bytes of one value can differ, in its padding
                out[expert].append(group)
        if not distinct:
            raise SourceError(
                f"{self.root}: has the state of an optimizer without its param_to_group_meta; give"
                " --no-optimizer to convert the weights alone"
            )
        listed = [{"param_groups": groups} for groups in out if groups]
        return optimizer.groups_of(listed, str(self.root))


FORMAT = Format(
    "fsdp_dtensor",
    ".metadata with keys model.module.*",
    megatron=True,
    detect=detect,
    open=FsdpDtensor,
    lay_out=lay_out_fsdp_dtensor,
    optimizer=True,
    masters_alone=True,
    one_optimizer=True,
    first_iteration=1,
    flag_of_weights="--no-strict-fsdp-dtensor-load",
    parts=(METADATA, "*.distcp"),
    last=METADATA,
)
