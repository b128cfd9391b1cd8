"""The files of a new `fsdp_dtensor`, `mfsdp_v2` or `torch_dcp` checkpoint, and what their keys are
made of; the modules of these names describe the formats.

Megatron's trainer loads a `torch_dcp` only if it has all that the run itself would save: the
optimizer, its schedule and random states too. Those random states are the ones with which a run
begins. With Megatron-FSDP, the trainer of 0.19 loads weights only as it loads an optimizer. It then
takes what the checkpoint lacks from a first step without gradients, but not the number of steps,
which is therefore in a checkpoint of weights alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle, torch_file
from mckpt.errors import UsageError
from mckpt.formats.base import Names, packed
from mckpt.formats.megatron.chunked import MODEL, single_keys
from mckpt.formats.megatron.interface import Common, MegatronRequest
from mckpt.formats.megatron.optimizer import (
    MASTER,
    group_of,
    is_muon,
    state_bound,
    states_of,
)
from mckpt.formats.megatron.torch_dist_writing import Extra, lay_out_chunks
from mckpt.geometry.box import Layout
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.storage.files import TargetFile

PREFIX = f"{MODEL}module."  # of the keys of weights in fsdp_dtensor
HALVES = ("_w", "_v")  # the suffixes of the keys of the two halves of a weight
# what wraps the model in the names of parameters: FSDP twice, and Float16Module
WRAPPERS = "module.module.module."
STATE, GROUP = "optimizer.state.", "optimizer.param_to_group_meta."
BESIDE = ("content_metadata", "optimizer")  # of a common state, which these formats do not have
TORCH_GROUPS, STEP = "optimizer.param_groups.", "step"
# what torch's AdamW has in a group beside the entries of Megatron; its loader demands all
TORCH_GROUP = {
    **{"amsgrad": False, "maximize": False, "foreach": None, "capturable": False},
    **{"differentiable": False, "fused": None, "decoupled_weight_decay": True},
}
SCHEDULE = "opt_param_scheduler"
SEED = 1234  # the default of --seed
WITHOUT = "give --no-optimizer to convert the weights alone"


def lay_out_fsdp_dtensor(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a `fsdp_dtensor` checkpoint."""
    run = _Run.of(request)
    run.refuse("fsdp_dtensor", "--use-megatron-fsdp", ("pp", "vpp"), run.narrow())
    bound = run.named(PREFIX, WRAPPERS, run.splits)
    objects = list(_flat(request.common))
    for group, members in zip(run.groups, run.members(), strict=True):
        names = [GROUP + WRAPPERS + key for key in members]
        objects += [([f"{name}.{k}" for name in names], v) for k, v in group.items()]
    if not run.groups:
        keys = [f"{GROUP}{WRAPPERS}{key}.step" for key in _keys(run.parameters)]
        objects.append((keys, 0))
    return lay_out_chunks(request, bound, _objects(objects), Bound.keys)


def lay_out_mfsdp_v2(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a `mfsdp_v2` checkpoint."""
    run = _Run.of(request)
    sizes = ("tp", "pp", "vpp", "ep", "expert_tp")
    run.refuse("mfsdp_v2", "--megatron-fsdp-version 2", sizes, run.narrow())
    bound = run.named(MODEL, "", lambda b: False)
    objects, extras = list(_flat(request.common)), list[Extra]()
    for g, (group, members) in enumerate(zip(run.groups, run.members(), strict=True)):
        fields = {**TORCH_GROUP, **group, "params": members}
        objects += [([f"{TORCH_GROUPS}{g}.{name}"], value) for name, value in fields.items()]
        steps = [f"{STATE}{key}.{STEP}" for key in members]
        step = struct.pack("<f", group[STEP])
        number = safe_pickle.tensor("float32", (), "0", step)
        if steps:
            extras.append(Extra(torch_file.lay_out(number, "archive"), steps, ("float32", ())))
    extras += _objects([*objects, run.empty()])
    return lay_out_chunks(request, bound, extras, Bound.keys)


def lay_out_torch_dcp(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a `torch_dcp` checkpoint."""
    run = _Run.of(request)
    problems = []
    if request.names.dims["tied"]:
        problems.append("--use-torch-fsdp2 takes no model whose output layer is the embedding")
    if not request.groups or SCHEDULE not in request.common:
        problems.append(
            "Megatron loads it only with an optimizer and its schedule, which the source does not"
            " have or --no-optimizer leaves out; fsdp_dtensor may have weights alone"
        )
    elif any(MASTER not in states_of(b, request.dtypes) for b in run.parameters):
        problems.append(f"it needs a master copy of each parameter; {WITHOUT}")
    sizes = ("tp", "pp", "vpp", "ep", "expert_tp")
    run.refuse("torch_dcp", "--use-torch-fsdp2", sizes, problems)
    members = run.members()
    number: dict[str, str] = {}  # of each parameter; and of the master copy
    masters: dict[str, str] = {}
    for g, keys in enumerate(members):
        number |= {key: str(len(number) + i) for i, key in enumerate(keys)}
        masters |= {key: f"{g}.{i}" for i, key in enumerate(keys)}
    bound = [renamed(b, MODEL + b.rule.key) for b in run.bound]
    named: dict[int, list[str]] = {}  # by the id of a state's rule: its keys
    for b in run.parameters:
        for state in states_of(b, request.dtypes):
            bound.append(state_bound(b, state))
            named[id(bound[-1])] = [
                f"optimizer.fp32_from_fp16_params.{masters[key]}"
                if state == MASTER
                else f"optimizer.optimizer.state.{number[key]}.{state}"
                for key in _keys([b])
            ]
    objects = list(_flat(request.common))
    for g, (group, keys) in enumerate(zip(run.groups, members, strict=True)):
        fields = {**group, "params": [int(number[key]) for key in keys]}
        at = f"optimizer.optimizer.param_groups.{g}."
        objects += [([at + name], value) for name, value in fields.items()]
    extras = [*_objects([*objects, run.empty()]), *_random(int(run.args.get("seed") or SEED))]
    return lay_out_chunks(request, bound, extras, lambda b: named.get(id(b)) or b.keys())


def renamed(b: Bound, key: str) -> Bound:
    """Returns a rule with another key."""
    return b._replace(rule=b.rule._replace(key=key))


def halves(b: Bound) -> list[Bound]:
    """Returns the rules of the two halves of a weight that packs gate and up."""
    return [
        b._replace(rule=b.rule._replace(key=b.rule.key + half, of=(name,), pack="one"))
        for name, half in zip(b.rule.of, HALVES, strict=True)
    ]


def by_ranks(b: Bound, names: Names) -> str | None:
    """Returns why a tensor that is not split has no whole form: Megatron-FSDP stores the parts that
    tensor parallelism cuts by themselves rank by rank. None if it has one.
    """
    expert = "expert" in b.rule.indices
    ways = names.parallel.expert_tp if expert else names.parallel.tp
    parts = packed(b.rule, names.scope()).parts if b.rule.tp == "column" else ()
    if ways == 1 or len(parts) < 2:
        return None
    return (
        f"{b.keys()[0]}: at {'etp' if expert else 'tp'} {ways}, Megatron-FSDP stores the"
        f" parts {', '.join(b.rule.of)} rank by rank"
    )


class _Run(NamedTuple):
    """The run that is to load a checkpoint."""

    request: MegatronRequest
    args: dict[str, Any]
    bound: list[Bound]  # the rules that are written

    @classmethod
    def of(cls, request: MegatronRequest) -> _Run:
        args = Common(dict(request.common), "the new checkpoint").args or {}
        return cls(request, args, [b for b in request.names.bound if b.rule.written])

    @property
    def groups(self) -> Sequence[Any]:
        """Returns the param_groups of the only optimizer."""
        return self.request.groups[0] if self.request.groups else ()

    @property
    def parameters(self) -> list[Bound]:
        """Returns the rules of the parameters that the optimizer updates."""
        is_parameter = self.request.names.mapping.registration.is_parameter
        rules = [b for b in self.bound if is_parameter(b.rule.key) and not b.rule.alias]
        trained = [b for b in rules if states_of(b, self.request.dtypes)]
        return trained if self.request.groups else rules

    def splits(self, b: Bound) -> bool:
        """Returns whether Megatron-FSDP stores gate and up of this rule by themselves."""
        gated = b.rule.pack == "gated" and ".linear_fc1." in b.rule.key
        return gated and bool(self.args.get("swiglu"))

    def narrow(self) -> list[str]:
        """Returns why the master copies cannot be the weights."""
        dtypes = {d for name, d in self.request.dtypes.items() if name.endswith(f"@{MASTER}")}
        narrow = sorted(dtypes - {"float32"})
        return [f"the weights are not their master copies in {d}; {WITHOUT}" for d in narrow]

    def named(self, start: str, wrappers: str, splits: Callable[[Bound], bool]) -> list[Bound]:
        """Returns the rules of the weights, which are their master copies, and of their states,
        with the keys of a format.

        start: of a weight's key. wrappers: before that of a state. splits: whether gate and up are
        stored by themselves.
        """
        out: list[Bound] = []
        for b in self.bound:
            for half in halves(b) if splits(b) else [b]:
                states = states_of(half, self.request.dtypes)
                weight = state_bound(half, MASTER) if MASTER in states else half
                out.append(renamed(weight, start + half.rule.key))
                for state in states:
                    if state != MASTER:
                        key = f"{STATE}{wrappers}{half.rule.key}.{state}"
                        out.append(renamed(state_bound(half, state), key))
        return out

    def members(self) -> list[list[str]]:
        """Returns the parameters of each param_group, in the order of their registration."""
        out: list[list[str]] = [[] for _ in self.groups]
        scope, group = self.request.names.scope(), dict[str, int]()
        for b in self.parameters if self.groups else ():
            num_axes = len(packed(b.rule, scope).shape)
            for key in _keys([b]):
                group[key] = group_of(key, num_axes, self.groups, self.args)
        for key in self.request.names.mapping.registration.sorted(group):
            out[group[key]].append(key)
        return out

    def empty(self) -> _Values:
        """Returns the keys of Transformer Engine's objects, without a content."""
        return [MODEL + key for key in _keys(self.request.names.objects)], None

    def refuse(self, format: str, flag: str, sizes: Iterable[str], more: list[str]) -> None:
        """Raises UsageError with the reasons why no run with this flag could load the model.

        sizes: those that must be 1. more: reasons that the format has of its own.
        """
        parallel, mapping = self.request.names.parallel, self.request.names.mapping
        own = {name: getattr(parallel, name) for name in sizes}
        out = [*more] + [f"{flag} takes no {name} {n}; give 1" for name, n in own.items() if n > 1]
        if not self.args or mapping.whole:
            out.append("it needs Megatron's args, of a text model; give --format torch_dist")
        elif not (self.args.get("bf16") or self.args.get("fp16")):
            out.append("a run in fp32 names its weights otherwise; give --dtype bf16")
        if any(":lora_" in name for b in self.bound for name in b.rule.of):
            out.append(f"{flag} trains no adapters; give --format torch_dist")
        if any(self.request.names.dims["linear_layers"]):
            out.append(
                "versions of Megatron store a gated delta net in several ways; give torch_dist"
            )
        if is_muon(self.request.groups):
            out.append(f"{flag} takes no Muon; {WITHOUT}")
        if any(self.request.scalers):
            out.append(f"it has no place for the loss scaler of fp16; {WITHOUT}")
        found = (by_ranks(b, self.request.names) for b in self.bound if not self.splits(b))
        out += [f"{text}; give tp and etp 1" for text in found if text]
        if out:
            raise UsageError.of(f"the format {format} cannot hold what would be written:", out)


def _keys(bound: Iterable[Bound]) -> list[str]:
    return [key for b in bound for key, _, _ in single_keys(b)]


_Values = tuple[list[str], Any]  # keys, and the value of all of them


def _flat(common: Any) -> Iterator[_Values]:
    """Yields the objects of a common state; the schedule is one for each entry."""
    for name, value in common.items():
        if name == SCHEDULE:
            yield from (([f"{name}.{key}"], one) for key, one in value.items())
        elif name not in BESIDE:
            yield [name], value


def _objects(values: Iterable[_Values]) -> list[Extra]:
    return [Extra(torch_file.lay_out(value, "archive"), keys) for keys, value in values if keys]


def _random(seed: int) -> Iterator[Extra]:
    """Yields the random states of a rank that begins with a seed, as `_set_random_seed` and
    `model_parallel_cuda_manual_seed` of Megatron-Core set them.
    """
    twister = np.random.RandomState(seed).get_state(legacy=False)  # torch has the same
    words = twister["state"]["key"].astype("<u8")
    cpu = struct.pack("<QiiQ", seed, 1, 1, 0) + words.tobytes() + bytes(40)
    states = {
        "torch_rng_state": cpu,
        "cuda_rng_state": _cuda(seed),
        "rng_tracker_states.data-parallel-rng": _cuda(seed),
        "rng_tracker_states.model-parallel-rng": _cuda(seed + 2718),
        "rng_tracker_states.expert-parallel-rng": _cuda(seed + 1024),
    }
    for name, data in states.items():
        record = safe_pickle.tensor("uint8", (len(data),), "0", data)
        container = torch_file.lay_out(record, "archive")
        yield Extra(container, [f"rng_state.0.{name}"], ("uint8", (len(data),)))
    plain = {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": ("MT19937", words.tolist(), 624, 0, 0.0),
    }
    yield from _objects(([f"rng_state.0.{name}"], value) for name, value in plain.items())


def _cuda(seed: int) -> bytes:
    return struct.pack("<QQ", seed, 0)
