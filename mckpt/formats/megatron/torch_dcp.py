"""Megatron's `torch_dcp` format, which its trainer saves with --use-torch-fsdp2.

The directory is one of torch.distributed.checkpoint (`chunked`), without metadata.json and
common.pt. A state dict of dicts and lists is stored; the names on the path to a value are its key:

    model.KEY                                a weight, under the name that its module has
    optimizer.optimizer.state.N.exp_avg      the state of parameter N
    optimizer.fp32_from_fp16_params.G.I      its fp32 master copy, the I-th of group G
    optimizer.optimizer.param_groups.G.lr    an object, as are args, iteration and the like

Without master copies, as in fp32, keys begin with `optimizer.` once and not twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers.entries import Span
from mckpt.errors import SourceError
from mckpt.formats.base import Format, Names, Problems, Shown, best_choices, shapes_of
from mckpt.formats.megatron import optimizer
from mckpt.formats.megatron.chunked import MODEL, Directory, has_keys, listed, names_of, single_keys
from mckpt.formats.megatron.fsdp_writing import lay_out_torch_dcp, renamed
from mckpt.formats.megatron.interface import Common
from mckpt.formats.megatron.optimizer import (
    MASTER,
    NOT_DISTRIBUTED,
    Optimizer,
    kinds,
    state_bound,
)
from mckpt.formats.megatron.torch_dist_writing import METADATA
from mckpt.geometry.box import Layout, Stored
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Bound, MappingFile

CHOICES = {"keys": ("local",)}  # of the dialects
# the first names of the keys that belong neither to weights nor to the common state
BESIDE = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")
_STATE = re.compile(r"optimizer\.(?:optimizer\.)?state\.(\d+)\.([^.]+)")
_MASTER = re.compile(r"optimizer\.fp32_from_fp16_params\.(\d+)\.(\d+)")
GROUP = re.compile(r"optimizer\.(?:optimizer\.)?param_groups\.(\d+)\.([^.]+)")


def detect(path: Path) -> bool:
    return has_keys(path, MODEL) and not has_keys(path, f"{MODEL}module.")


class OptimizerSlot(NamedTuple):
    """The place of one parameter in an optimizer."""

    shape: tuple[int, ...]
    keys: dict[str, str]  # state -> key


States = dict[str, dict[str, str]]  # key of a weight -> state -> key of the state


class TorchDcp:
    """An opened checkpoint whose keys are those of modules, under a prefix."""

    quantised = False
    notes: tuple[str, ...] = ()
    prefix = MODEL
    member: type = int  # the type of the names of parameters in the groups: numbers

    def __init__(self, path: Path, format: Format | None = None) -> None:
        self.format = format or FORMAT
        self.root = path
        self.directory = Directory(path)
        self.metadata = self.directory.metadata

    @cached_property
    def common(self) -> Common:
        """Returns the objects that belong to neither model, optimizer nor random states."""
        return Common(self.fields(), str(self.root / METADATA))

    def fields(self) -> dict[str, Any]:
        """Reads the fields of the common state."""
        out: dict[str, Any] = {}
        for key in self.metadata.objects:
            first, _, rest = key.partition(".")
            if first == "opt_param_scheduler" and rest:
                out.setdefault(first, {})[rest] = self.directory.object(key)[0]
            elif not rest and first not in BESIDE:
                out[first] = self.directory.object(key)[0]
        return out

    def parallel(self) -> Parallel:
        """Returns the sizes of the run that saved it; reading does not depend on them."""
        return self.common.parallel()

    def keys(self) -> list[str]:
        """Returns the names of all weights, without the prefix."""
        return list(self.weights)

    @cached_property
    def weights(self) -> dict[str, str]:
        """Returns the weights: the dialect's name -> the stored name without the prefix."""
        names = (
            k.removeprefix(self.prefix) for k in self.metadata.tensors if k.startswith(self.prefix)
        )
        return {k: k for k in names if not k.endswith("_extra_state")}

    def padded_vocab(self, mapping: MappingFile) -> int | None:
        """Rows of the embedding, padding included."""
        found = self.metadata.tensors.get(self.prefix + mapping.vocabulary.key)
        return found[1][0] if found and found[1] else None

    def beside(self, dialect: MappingFile) -> list[str]:
        """Returns the first names of what is stored beside the weights and the common state."""
        firsts = {k.partition(".")[0] for k in (*self.metadata.tensors, *self.metadata.objects)}
        return sorted(firsts & {*BESIDE, *dialect.ignore})

    def show(self, most: int | None) -> Shown:
        """Returns every stored tensor, with the number of its chunks."""
        return self.directory.show(most)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Returns the records and tensors of all items."""
        return self.directory.spans(problems, [])

    def choices(self, names: Names) -> dict[str, Any]:
        """Returns the dialect's choices of this checkpoint: those whose keys fit best."""
        stored = set(self.weights)

        choices = {**names.mapping.choices, **CHOICES}
        return best_choices(names, choices, lambda chosen: len(names_of(chosen.bound) ^ stored))

    def layout(self, names: Names) -> Layout:
        """Returns the place of each stored tensor, in logical boxes, as `Opened.layout`."""
        self.directory.check_sizes()
        dialect = names.mapping
        problems = Problems(f"the tensors of {self.root} do not match its args:")
        bound = self._bound(names, problems)
        stored = self.directory.stored(bound, names, problems, single_keys)
        known = names_of(bound)
        every = (*self.metadata.tensors, *self.metadata.objects)
        ignored = {k: "not weights" for k in every if not k.startswith(MODEL)}
        ignored |= {k: dialect.ignore["_extra_state"] for k in every if k.endswith("_extra_state")}
        left = ((k, k) for k in every if k not in known and k not in ignored)
        problems.unknown(left, dialect.path.name)
        problems.check()
        shapes = shapes_of(names.bound, names.scope())
        return Layout(self.directory.paths, stored, shapes, ignored)

    def _bound(self, names: Names, problems: Problems) -> list[Bound]:
        """Returns the dialect's rules, with the keys that this checkpoint has for them."""
        if any(names.dims["linear_layers"]):
            problems.append(
                "versions of Megatron store a gated delta net in several ways in this format, so"
                " mckpt does not read one; save the run as torch_dist"
            )
        return [renamed(b, self.prefix + b.rule.key) for b in names.bound]

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none."""
        groups = self._slots()
        if not groups:
            kinds.refuse_empty(
                {"param_groups": self._groups},
                f"{self.root}: has no state of any weight",
                self.common.fields,
            )
            return None
        problems = self._problems_of_optimizer()
        states = self._assigned(names, groups, problems)
        problems.check()
        layout = self._states(self._bound(names, problems), states, names, problems)
        problems.check()
        plain = optimizer.groups_of({"param_groups": self._groups}, str(self.root))
        return Optimizer(NOT_DISTRIBUTED, layout, plain, self._keys_of_optimizer(), [])

    def _problems_of_optimizer(self) -> Problems:
        what = f"the optimizer's state of {self.root} does not match its weights:"
        return Problems(what, optimizer.CURE)

    def _keys_of_optimizer(self) -> frozenset[str]:
        every = (*self.metadata.tensors, *self.metadata.objects)
        return frozenset(key for key in every if key.startswith("optimizer."))

    def _states(
        self, bound: list[Bound], states: States, names: Names, problems: Problems
    ) -> Layout:
        """Returns the states of the weights of these rules. Those of another shape become
        `problems`.
        """
        stored: list[Stored] = []
        named: list[Bound] = []
        for b in bound:
            instances = [one for one in single_keys(b) if one[0] in states]
            for state in dict.fromkeys(s for key, _, _ in instances for s in states[key]):
                own = [
                    (states[key][state], layer, expert)
                    for key, layer, expert in instances
                    if state in states[key]
                ]
                named.append(state_bound(b, state))
                stored += self.directory.stored(named[-1:], names, problems, listed(own))
        return Layout(self.directory.paths, stored, shapes_of(named, names.scope()))

    def _slots(self) -> list[list[OptimizerSlot]]:
        """Returns the places of each group's parameters, in the order of the group."""
        states: dict[int, dict[str, str]] = {}
        masters: dict[tuple[int, int], str] = {}
        for key in self.metadata.tensors:
            if one := _STATE.fullmatch(key):
                states.setdefault(int(one[1]), {})[one[2]] = key
            elif one := _MASTER.fullmatch(key):
                masters[int(one[1]), int(one[2])] = key
        out, left = [], set(masters)
        for g, group in enumerate(self._groups if states else []):
            slots = []
            for i, number in enumerate(group["params"]):
                keys = dict(states.pop(number, {}))
                if (g, i) in masters:
                    keys[MASTER] = masters[g, i]
                    left.discard((g, i))
                shapes = [self.metadata.tensors[key][1] for key in keys.values()]
                slots.append(OptimizerSlot(shapes[0] if shapes else (), keys))
            out.append(slots)
        if states or left:
            raise SourceError(
                f"{self.root}: its optimizer has {len(states) + len(left)} states that belong to no"
                f" parameter of its groups. {optimizer.CURE}"
            )
        return out

    @cached_property
    def _groups(self) -> list[dict[str, Any]]:
        """Returns the param_groups of the optimizer, with the names of their parameters."""
        out: dict[int, dict[str, Any]] = {}
        for one, key in self.directory.settings(GROUP):
            out.setdefault(int(one[1]), {})[one[2]] = self.directory.setting(key)
        for group in out.values():
            params = group.get("params")
            if not isinstance(params, list) or not all(type(p) is self.member for p in params):
                raise SourceError(
                    f"{self.root}: a group of its optimizer does not list its parameters."
                    f" {optimizer.CURE}"
                )
        return [out[number] for number in sorted(out)]

    def _assigned(
        self, names: Names, groups: list[list[OptimizerSlot]], problems: Problems
    ) -> States:
        """Returns the states of each weight. The plan's comparison of master copies with weights
        proves the result, if there are any.
        """
        order = names.mapping.registration
        aliases = names_of(b for b in names.bound if b.rule.alias)
        keys = (key for key in self.weights if order.is_parameter(key) and key not in aliases)
        left = [list(slots) for slots in groups]
        decaying = [optimizer.decays(group) for group in self._groups]
        proved = any(MASTER in slot.keys for slots in groups for slot in slots)
        out: States = {}
        for name in order.sorted(keys):
            key = self.prefix + name
            shape = self.metadata.tensors[key][1]
            following = [slots[0].shape if slots else None for slots in left]
            number = optimizer.next_group(name, shape, following, decaying, proved)
            if number is None:
                problems.missing(
                    f"no group of its optimizer has a state of {list(shape)} next, for {key}"
                )
                return out
            out[key] = left[number].pop(0).keys
        if rest := sum(map(len, left)):
            problems.missing(f"its optimizer has {rest} more states than parameters")
        return out


FORMAT = Format(
    "torch_dcp",
    ".metadata with keys model.*",
    megatron=True,
    detect=detect,
    open=TorchDcp,
    lay_out=lay_out_torch_dcp,
    optimizer=True,
    parts=(METADATA, "*.distcp"),
    last=METADATA,
)
