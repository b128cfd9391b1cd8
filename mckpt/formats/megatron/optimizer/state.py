"""The optimizer's state of each weight: its fp32 master copy, and the moments of Adam.

In a layout, a state is a logical tensor of its own with the weight's shape and the name
WEIGHT@STATE, for example `layers.{layer}.attn.q.weight@exp_avg`. So all that plans, copies and
compares weights does the same for states. The master copy is always called `master` here; the
others have Megatron's names.

This module knows the keys of the optimizers whose state is stored parameter by parameter. In
`torch_dist` these are optimizer.state.STATE.KEY, where KEY is the key of the weight:

    fully_reshardable   param, exp_avg, exp_avg_sq        DistributedOptimizer, from 0.15 on
    fully_sharded_model_space   fp32_param, exp_avg, ...  DistributedOptimizer, up to 0.14
    (not recorded)      fp32_param, exp_avg, exp_avg_sq   Float16Optimizer, which is not distributed

Megatron-Core chains the optimizers of a rank. Each updates some of the parameters:

    adam, sgd       all parameters; if experts are on ranks of their own, two: the rest, experts
    muon            matrices, matrices of experts, the rest, the rest of experts: those with
                    parameters, and experts only if they are on ranks of their own
    muon by layers  matrices, the rest: --use-distributed-optimizer gives each data-parallel rank
                    whole matrices. The rest then has a DistributedOptimizer, or, with
                    --no-use-layer-wise-param-layout, is dealt out as the matrices are

A matrix is a parameter with two axes that is neither the embedding nor the output layer. The
param_groups of Muon have no entry `optimizer`; those of the rest have one, such as adam.

The rules are those of megatron/core/optimizer/__init__.py, megatron-core 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle
from mckpt.containers.entries import Entry, entry_of
from mckpt.containers.torch_file import Ranges
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names, packed
from mckpt.geometry.box import Layout, Piece, Stored
from mckpt.lazy import numpy as np
from mckpt.lazy import pattern
from mckpt.mapping import Bound
from mckpt.storage import descriptors
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize, numpy_dtype

MASTER = "master"
# names of the master copy: of DistributedOptimizer, and of Float16Optimizer
MASTER_KEYS = ("param", "fp32_param")
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"  # the same, up to megatron-core 0.14
NOT_DISTRIBUTED = "not distributed"
# the keys of `optimizer` in a common state that mckpt reads or replaces
_PLAIN = (
    *("optimizer", "param_groups", "state", "param_state", "param_state_sharding_type"),
    "fp32_from_fp16_params",
)
# What the param_groups of a checkpoint have and those of a target do not: classes of
# --optimizer-cpu-offload, which torch.load refuses. Megatron uses those of the new run.
_LEFT_OUT = ("cpu_optimizer_cls", "gpu_optimizer_cls")
_RENAMED = ("lr_mult", "wd_mult")  # entries of a group that NeMo calls pre_lr_mult, pre_wd_mult
# the files, one for each data-parallel rank, of an optimizer that is distributed by layers
LAYER_WISE = "layer_wise_optimizer_*.pt"
# the reason to refuse the master copies of a run with --use-precision-aware-optimizer
LOW_BITS = (
    "The run had --use-precision-aware-optimizer, with which Transformer Engine keeps only the low"
    " 16 bits of each fp32 master copy of a weight in bf16. mckpt does not convert them; give"
    " --no-optimizer to convert the weights alone"
)
# the state of a loss scaler, in which numbers stand for tensors of one element
Scaler = dict[str, Any]
SCALER = "grad_scaler"  # its name in an `optimizer`
SHARED = "share_expert_adapters"  # the choice of adapters that the experts of a rank share
CURE = "If the checkpoint should be complete, copy it again; else give --no-optimizer."
# Before `chained_optim_avoid_prefix`, the optimizers of dense weights and of experts had prefixes.
_KEY = pattern(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")


class Optimizer(NamedTuple):
    """The optimizer's state of a checkpoint."""

    form: str  # how it is stored, such as fully_reshardable
    layout: Layout  # of its tensors
    # the param_groups of each optimizer: of a model with experts on ranks of their own, the second
    # is that of the experts
    groups: list[list[dict[str, Any]]]
    keys: frozenset[str]  # under which the checkpoint stores it
    scalers: list[Scaler]  # of each optimizer in a training with fp16, else none
    live: bool = False  # it is the optimizer of a running model
    lacking: str = ""  # why its groups have no settings, with which a training could go on

    @property
    def distributed(self) -> bool:
        """Returns whether it is the state of a DistributedOptimizer."""
        return self.form != NOT_DISTRIBUTED

    @property
    def portable(self) -> bool:
        """Returns whether Megatron loads it at other sizes than those it was saved at."""
        return self.form in (FULLY_RESHARDABLE, NOT_DISTRIBUTED)

    @property
    def states(self) -> list[str]:
        return sorted({name.partition("@")[2] for name in self.layout.shapes})


def loads_at_its_sizes(place: str | Path, form: str) -> SourceError:
    """Returns the error that a run at other sizes cannot load an optimizer of this form."""
    return SourceError(
        f"{place}: has its optimizer as {form}, which loads at the parallel sizes of the checkpoint"
        " only; `mckpt repair SRC DST` makes it loadable at any sizes"
    )


def is_state(name: str) -> bool:
    return "@" in name


def holds_state(s: Stored) -> bool:
    """Returns whether a stored tensor is an optimizer's state."""
    return any(map(is_state, s.tensors))


def split_key(key: str) -> tuple[str, str] | None:
    """Returns the state and the weight's key that the key of a state in torch_dist names."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    return (MASTER if found[1] in MASTER_KEYS else found[1]), found[2]


def keys_of(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the keys of all states in torch_dist: weight's key -> state -> key."""
    out: dict[str, dict[str, str]] = {}
    for key in keys:
        if (found := split_key(key)) is not None:
            out.setdefault(found[1], {})[found[0]] = key
    return out


def states_of(b: Bound, dtypes: Mapping[str, str], aliases: bool = False) -> list[str]:
    """Returns the states that the weights of a rule have.

    dtypes: of each logical tensor, by template; weights and states. aliases: also the states of a
    copy of a tensor that another rule has.
    """
    first = f"{b.rule.of[0]}@" if b.rule.of and (aliases or not b.rule.alias) else None
    return [n.removeprefix(first) for n in dtypes if n.startswith(first)] if first else []


def state_bound(b: Bound, state: str, prefix: str = "") -> Bound:
    """Returns the rule that stores a state of the weights of another rule.

    prefix: what precedes the weight's key in that of the state. Raises SourceError for a name that
    is not a word.
    """
    if not isinstance(state, str) or not state.isidentifier():
        raise SourceError(
            f"a state of {b.rule.key} in the optimizer is named {safe_pickle.short(state)}, which"
            f" is not a word. {CURE}"
        )
    return b._replace(
        rule=b.rule._replace(
            key=prefix + b.rule.key,
            of=tuple(f"{name}@{state}" for name in b.rule.of),
            dtype=None,
            offset=b.rule.offset if state == MASTER else 0.0,
        )
    )


def state_pieces(pieces: Iterable[Piece], state: str) -> tuple[Piece, ...]:
    """Returns the pieces of weights as pieces of one of their states. The master copy alone has the
    offset of the weights.
    """
    return tuple(
        piece._replace(
            tensor=f"{piece.tensor}@{state}", offset=piece.offset if state == MASTER else 0.0
        )
        for piece in pieces
    )


def prefix_of(state: str, distributed: bool) -> str:
    """Returns what precedes a weight's key in the key of its state in torch_dist."""
    name = MASTER_KEYS[not distributed] if state == MASTER else state
    return f"optimizer.state.{name}."


def groups_of(plain: Any, where: str, data: Ranges | None = None) -> list[list[dict[str, Any]]]:
    """Returns the param_groups of each optimizer in the `optimizer` of a checkpoint's common state.

    data: the places of the storages in the file `where`; without it, no entry may be a tensor.
    Raises SourceError if there are none, or if their steps differ, and UsageError if the steps are
    counted elsewhere.
    """
    out = []
    for one in chained(plain):
        inner = one.get("optimizer", one) if isinstance(one, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise SourceError(
                f"{where}: has the state of an optimizer without its param_groups; give"
                " --no-optimizer to convert the weights alone"
            )
        state = inner.get("state") if isinstance(inner, dict) else None
        state = state if isinstance(state, dict) else {}
        each = [one for one in state.values() if isinstance(one, dict)]
        # up to megatron-core 0.11, it is there and None if groups count the steps
        if state.get("common_step") is not None or any("step" in one for one in each):
            raise UsageError(
                f"{where}: its optimizer counts the steps of each parameter, as torch's AdamW does"
                " where Transformer Engine and Apex are missing, and mckpt keeps the count of a"
                " group only; give --no-optimizer to convert the weights alone"
            )
        out.append([_group(group, where, data) for group in groups])
    _refuse_unequal(out, where)
    return counted([[{k: v for k, v in g.items() if k != "params"} for g in own] for own in out])


def _group(group: dict[str, Any], where: str, data: Ranges | None) -> dict[str, Any]:
    """Returns a param_group with Megatron's names. Its arguments are those of `groups_of`.

    NeMo names two entries otherwise. Megatron finds the group by these names too, but then gives a
    group without wd_mult the whole weight decay, which norms and biases have not.
    """
    kept = {k: v for k, v in group.items() if k not in _LEFT_OUT}
    renamed = {name: kept[f"pre_{name}"] for name in _RENAMED if f"pre_{name}" in kept}
    return {k: _number(v, f"{k} in a group", data, where) for k, v in (renamed | kept).items()}


def _refuse_unequal(groups: Groups, where: str) -> None:
    """Raises SourceError if groups with parameters have made different numbers of steps. Megatron
    asserts that they are equal.
    """
    numbered = {(i, n): group for i, own in enumerate(groups) for n, group in enumerate(own)}
    used = [(at, steps_in([[group]])) for at, group in numbered.items() if group.get("params")]
    if len({step for _, own in used for step in own}) > 1:
        raise SourceError.of(
            f"{where}: groups of its optimizer have made different numbers of steps:",
            [f"group {n} of optimizer {i}: {step}" for (i, n), own in used for step in own],
            CURE,
        )


def counted(
    groups: list[list[dict[str, Any]]], of_others: Groups = ()
) -> list[list[dict[str, Any]]]:
    """Returns param_groups in which each group of Adam has the number of steps.

    Transformer Engine counts no steps of a group that has no parameters on the rank that saved it,
    such as that of experts on a pipeline stage without any: its number is missing, or that of the
    checkpoint from which the run went on. All groups make the same steps, and Muon counts none.

    of_others: the groups of other ranks.
    """
    step = max(steps_in([*groups, *of_others]), default=None)
    adam = [g for own in groups for g in own if "optimizer" in g or not is_muon(groups)]
    for group in adam if step is not None else ():
        group["step"] = step
    return groups


def steps_in(groups: Groups) -> list[float]:
    """Returns the numbers of steps that param_groups have."""
    return [g["step"] for own in groups for g in own if isinstance(g.get("step"), (int, float))]


def sharding_of(plain: Any) -> str | None:
    """Returns how a distributed optimizer stored its state, as an `optimizer` of a common state
    names it; None if it does not.
    """
    names = (
        one.get("param_state_sharding_type") for one in chained(plain) if isinstance(one, dict)
    )
    return next((name for name in names if name is not None), None)


def unkept(plain: Any) -> list[str]:
    """Returns the keys of an `optimizer` of a common state that are neither groups, states nor a
    loss scaler.
    """
    found = {str(k) for one in chained(plain) if isinstance(one, dict) for k in one}
    return sorted(found - {*_PLAIN, SCALER})


def scalers_of(plain: Any, data: Ranges, path: str) -> list[Scaler]:
    """Returns the loss scaler of each optimizer in the `optimizer` of a checkpoint: `grad_scaler`,
    which a training in fp16 has. None of them without it.

    data: the places of the storages in the file `path`.
    Raises UsageError for a scaler that Megatron does not write.
    """
    scalers = [one.get(SCALER) if isinstance(one, dict) else None for one in chained(plain)]
    if not any(isinstance(one, dict) for one in scalers):
        return []
    out: list[Scaler] = []
    for one in scalers:
        out.append({})
        for name, value in (one or {}).items():
            view = safe_pickle.as_tensor(value)
            number = value if view is None else number_in(entry_of(view, data, 0), path)
            if not isinstance(number, (bool, int, float)):
                raise UsageError(
                    f"{path}: the loss scaler of its optimizer has {name}, which is not a number;"
                    " give --no-optimizer to convert the weights alone"
                )
            out[-1][name] = number
    return out


def _number(value: Any, name: str, data: Ranges | None, path: str) -> Any:
    """Returns the number of a tensor with one element, and any other value as it is: with
    --optimizer-cuda-graph, groups have tensors as `step` and `lr`. Raises UsageError for others.
    """
    if (view := safe_pickle.as_tensor(value)) is None:
        return value
    entry = None if data is None else entry_of(view, data, 0)
    number = None if entry is None else number_in(entry, path)
    if entry is None or number is None:
        raise UsageError(
            f"{path}: its optimizer has {name}, which is a tensor; give --no-optimizer to convert"
            " the weights alone"
        )
    return int(number) if "int" in entry.dtype else number


def number_in(entry: Entry, path: str) -> float | None:
    """Reads the number of a tensor with one element; None if it has several."""
    if math.prod(entry.shape) != 1:
        return None
    with opened(path) as fd:
        data = descriptors.pread(fd, itemsize(entry.dtype), entry.at)
    return float(np.frombuffer(data, numpy_dtype(entry.dtype))[0])


def scaler_record(scaler: Scaler, number: int) -> dict[str, Any]:
    """Returns the loss scaler of an optimizer as Megatron's load_state_dict takes it: with a tensor
    for each number that is not whole.

    number: of the optimizer; it makes names of storages.
    """
    return {
        name: safe_pickle.tensor(
            "float32", (1,), f"{SCALER}.{number}.{name}", np.float32(value).tobytes()
        )
        if isinstance(value, float)
        else value
        for name, value in scaler.items()
    }


def chained(plain: Any) -> list[Any]:
    """Returns the values of each optimizer: a model with experts may have several."""
    numbered = isinstance(plain, dict) and plain.keys() and all(type(k) is int for k in plain)
    return list(plain.values()) if numbered else plain if isinstance(plain, list) else [plain]


def regrouped(
    groups: Sequence[Sequence[Mapping[str, Any]]], num_optimizers: int
) -> list[list[dict[str, Any]]]:
    """Returns the param_groups of each of `num_optimizers` optimizers.

    If experts have an optimizer of their own in one of source and target only, each optimizer of
    the target gets the groups of the source's first one, to which the other parameters belong.

    Raises UsageError if the source's optimizers differ in something else.
    """
    if len(groups) > 2 or not all(
        group.get("is_expert_parallel", True) for own in groups[1:] for group in own
    ):
        raise UsageError(
            f"a rank of the source has {len(groups)} optimizers, and mckpt knows chains of at most"
            " two, the second one of which is that of the experts; give --no-optimizer to convert"
            " the weights alone"
        )
    if len(groups) == num_optimizers:
        return [[dict(group) for group in own] for own in groups]
    return [
        [{**group, "is_expert_parallel": bool(number)} for group in groups[0]]
        for number in range(num_optimizers)
    ]


def rescaled(scalers: Sequence[Scaler], num_optimizers: int) -> list[Scaler]:
    """Returns the loss scaler of each of `num_optimizers` optimizers. If the source has another
    number of them, it is that of the first one: the scalers of a rank see the same overflows.
    """
    if not scalers or len(scalers) == num_optimizers:
        return [dict(one) for one in scalers]
    return [dict(scalers[0]) for _ in range(num_optimizers)]


def decays(group: Mapping[str, Any]) -> bool:
    """Returns whether weight decay applies to the parameters of a group."""
    return bool(group.get("wd_mult", group.get("weight_decay")))


def has_moments(group: Mapping[str, Any]) -> bool:
    """Returns whether the parameters of a group have states beside their master copies once the
    optimizer has made a step: those of SGD have none without momentum.
    """
    return bool(group.get("momentum", True))


def is_undecayed(key: str, num_axes: int) -> bool:
    """Returns whether Megatron applies no weight decay to a parameter, which is then in another
    param_group than the others: to a bias, and to a parameter with one axis.
    """
    return num_axes == 1 or key.endswith(".bias")


def group_of(
    key: str, num_axes: int, groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any]
) -> int:
    """Returns the number of the param_group that a parameter belongs to.

    With --apply-wd-to-qk-layernorm, Megatron decays the norms of q and k too. Raises UsageError for
    groups that differ in something else.
    """
    kinds = [decays(group) for group in groups]
    if len(kinds) == 1:
        return 0
    if sorted(kinds) != [False, True]:
        raise UsageError(
            f"the optimizer has {len(kinds)} param_groups, {sum(kinds)} of them with weight decay:"
            " formats other than torch_dist list the parameters of each group, and mckpt knows"
            " them only for one group with weight decay and one without; give --target-format"
            " torch_dist to keep the optimizer, or --no-optimizer to convert the weights alone"
        )
    normed = any(f".{name}_layernorm." in key for name in ("q", "k"))
    kept = bool(args.get("apply_wd_to_qk_layernorm")) and normed
    return kinds.index(kept or not is_undecayed(key, num_axes))


def next_group(
    key: str,
    shape: tuple[int, ...],
    following: Sequence[Any],
    decaying: Sequence[bool],
    proved: bool,
) -> int | None:
    """Returns the number of the param_group that has the states of a parameter; None if there is
    none. Each group has its parameters in the order of their registration.

    following: the shape of the next parameter of each group, None at its end. decaying: whether
    weight decay applies to each group. proved: the states have a master copy, whose comparison with
    the weight will show a wrong group. Without it, raises UsageError if several groups fit.
    """
    undecayed = is_undecayed(key, len(shape))
    fits = [number for number, own in enumerate(following) if own == shape]
    fits.sort(key=lambda number: decaying[number] == undecayed)
    if not proved and len({decaying[number] for number in fits[:2]}) < len(fits[:2]):
        raise UsageError(
            f"groups {fits[0]} and {fits[1]} of the optimizer both have a state of {list(shape)}"
            f" next, and one of them is that of {key}. The format names no parameter, and there are"
            " no master copies, which would show the right one. Let Megatron load the checkpoint"
            " and save it with --ckpt-format torch_dist, or give --no-optimizer to convert the"
            " weights alone"
        )
    return fits[0] if fits else None


def masters_alone(layout: Layout) -> Layout:
    """Returns a layout without the weights that have a master copy, from which they are rounded."""
    rounded = {name for name in layout.shapes if f"{name}@{MASTER}" in layout.shapes}
    left = [s for s in layout.stored if s.pieces and all(p.tensor in rounded for p in s.pieces)]
    return replace(
        layout,
        stored=[s for s in layout.stored if s not in left],
        shapes={name: shape for name, shape in layout.shapes.items() if name not in rounded},
        ignored={**layout.ignored, **{s.key: "its master copy is the weight" for s in left}},
    )


def is_wrapped(distributed: bool, states: Iterable[str]) -> bool:
    """Returns whether Megatron's optimizer holds another one, as all but FP32Optimizer do, which
    has no master copies.

    states: names of states, with or without the weight's name.
    """
    return distributed or any(name.rpartition("@")[2] == MASTER for name in states)


def common_of(
    groups: Sequence[Sequence[Mapping[str, Any]]],
    scalers: Sequence[Scaler],
    distributed: Sequence[bool],
    wrapped: bool,
) -> Any:
    """Returns the `optimizer` of the common state of a torch_dist with these param_groups and loss
    scalers.

    distributed: whether each of the optimizers is a DistributedOptimizer.
    """
    each: list[dict[str, Any]] = []
    for own, is_distributed in zip(groups, distributed, strict=True):
        inner = {"param_groups": own}
        kind = {"param_state_sharding_type": FULLY_RESHARDABLE} if is_distributed else {}
        each.append({"optimizer": inner, **kind} if wrapped else dict(inner))
    for number, scaler in enumerate(scalers):
        each[number][SCALER] = scaler_record(scaler, number)
    return each[0] if len(each) == 1 else dict(enumerate(each))


SINCE = [0, 19]  # the first megatron-core with which Muon was tested
BY_LAYERS = "use_layer_wise_distributed_optimizer"  # an arg
Groups = Sequence[Sequence[Mapping[str, Any]]]


class Link(NamedTuple):
    """The parameters that one optimizer of a chain updates."""

    matrices: bool | None = None  # True: matrices only; False: no matrices; None: both
    experts: bool | None = None  # True: those of experts only; False: all others; None: both

    def updates(self, b: Bound, num_axes: int) -> bool:
        """Returns whether this optimizer updates the parameter of a rule, with so many axes."""
        expert = "expert" in b.rule.indices
        return self.matrices in (None, is_matrix(b, num_axes)) and self.experts in (None, expert)


def is_matrix(b: Bound, num_axes: int) -> bool:
    return num_axes == 2 and b.rule.tp != "vocab"


def is_muon(groups: Groups) -> bool:
    """Returns whether param_groups of several optimizers are those of a training with Muon."""
    return any("optimizer" in group for own in groups for group in own)


def links(groups: Groups) -> list[Link]:
    """Returns the parameters of each optimizer of a chain."""
    apart = [bool(own) and all(g.get("is_expert_parallel") for g in own) for own in groups]
    if not is_muon(groups):
        return [Link(experts=bool(i) if len(groups) > 1 else None) for i in range(len(groups))]
    return [
        Link("optimizer" not in own[0], expert if any(apart) else None)
        for own, expert in zip(groups, apart, strict=True)
    ]


def muon_groups(groups: Groups, names: Names, apart: bool, by_layers: bool) -> list[list[Any]]:
    """Returns the param_groups of each optimizer of a target that is trained with Muon.

    groups: of the source. names: of the target. apart: its experts are on ranks of their own.
    """
    every = [dict(group) for own in groups for group in own]
    found = [group for group in every if not group.get("is_expert_parallel")]
    if apart:
        known = [group for group in every if group.get("is_expert_parallel")]
        vectors = any(_is_vector_of_experts(names, b) for b in names.bound)
        found += known or [
            {**group, "is_expert_parallel": True}
            for group in found
            if "optimizer" not in group or (vectors and not decays(group))
        ]
    out: dict[tuple[bool, bool], list[Any]] = {}
    for group in found:
        expert = not by_layers and bool(group.get("is_expert_parallel"))
        out.setdefault(("optimizer" in group, expert), []).append(group)
    return [out[key] for key in sorted(out)]


def _is_vector_of_experts(names: Names, b: Bound) -> bool:
    is_parameter = names.mapping.registration.is_parameter(b.rule.key)
    expert = is_parameter and "expert" in b.rule.indices
    return expert and len(packed(b.rule, names.scope()).shape) == 1


def refuse_target(fixed_sizes: bool, by_layers: bool, megatron: list[int]) -> None:
    """Raises UsageError for a target that cannot hold the state of Muon."""
    if megatron < SINCE:
        raise UsageError(
            f"the source has the state of Muon, which mckpt writes for megatron-core"
            f" {'.'.join(map(str, SINCE))} and later, and the target is for"
            f" {'.'.join(map(str, megatron))}; give --no-optimizer to convert the weights alone"
        )
    if fixed_sizes and by_layers:
        raise UsageError(
            "the source has the state of Muon, distributed by layers, of which the format torch has"
            " a file for each data-parallel rank (layer_wise_optimizer_*.pt); mckpt reads these and"
            " does not write them, so give --target-format torch_dist to keep the state, or"
            " --no-optimizer to convert the weights alone"
        )
