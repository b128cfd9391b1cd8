"""The optimizer's state in the files of a new `torch` checkpoint; `torch_reading` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mckpt.containers import safe_pickle, torch_file
from mckpt.formats.base import Names
from mckpt.formats.megatron.interface import Common, MegatronRequest
from mckpt.formats.megatron.optimizer.buckets import (
    Buffer,
    Parameter,
    RankOptimizer,
    StateKind,
    bucket_size,
    gradient_dtype,
    optimizers,
    registered,
)
from mckpt.formats.megatron.optimizer.state import (
    MASTER,
    MASTER_KEYS,
    SCALER,
    group_of,
    is_wrapped,
    links,
    scaler_record,
    states_of,
)
from mckpt.formats.megatron.optimizer.torch_reading import FILE
from mckpt.formats.megatron.torch_shards import directories
from mckpt.geometry.box import Piece, Stored
from mckpt.lazy import numpy as np
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

STEM = "distrib_optim"
FLAT = "float32"  # of the flat buffers, whatever the optimizer keeps in memory


# ---------------------------------------------------- distributed: flat buffers in their own file


def lay_out(
    request: MegatronRequest, grid: list[tuple[int, int]], num_files: int
) -> tuple[list[Stored], list[TargetFile]]:
    """Lays out distrib_optim.pt of every directory.

    grid: the tensor and expert ranks that have a directory in each pipeline stage. num_files: the
    number of files in the layout that come before these.
    """
    names = request.names
    args = Common(dict(request.common), "the new checkpoint").args or {}
    by_directory: dict[str, dict[int, RankOptimizer]] = {
        directory: {} for directory in directories(names.parallel, grid)
    }
    for one in optimizers(
        names,
        request.dtypes,
        request.padded_vocab_size,
        expert_chain=len(request.groups) > 1,
        bucket_size=bucket_size(args),
    ):
        by_directory[_directory(names, one)][one.chain] = one
    states = _states(request)
    # the files of one stage differ in their data alone
    containers: dict[tuple[int, ...], torch_file.TorchFile] = {}
    outputs: list[TargetFile] = []
    kinds: dict[StateKind, list[tuple[int, int, int, int]]] = {}
    seen: set[tuple[tuple[Piece, ...], int, int]] = set()
    for file, (directory, here) in enumerate(by_directory.items(), num_files):
        kind = (*(one.pp for one in here.values()), *here)
        if kind not in containers:
            value = [_value(here.get(i), states, args) for i in range(len(request.groups))]
            containers[kind] = torch_file.lay_out(value if len(value) > 1 else value[0], STEM)
        laid = containers[kind]
        outputs.append(TargetFile(f"{directory}/{FILE}", laid.size, laid.fixed))
        for one in here.values():
            for number, buffer in enumerate(one.buffers):
                for state in states:
                    at = laid.data[_storage(one.chain, number, state)][0]
                    for p, start in _starts(buffer):
                        kind_of = StateKind.of(p, state, p.whole in seen)
                        place = (p.layer, p.expert, file, at + start * itemsize(FLAT))
                        kinds.setdefault(kind_of, []).append(place)
                seen |= {p.whole for p, _ in _starts(buffer)}
    # padding: that of the vocabulary
    stored = [
        Stored(
            *(kind.key, FLAT, kind.shape, kind.pieces),
            *np.array(places, "i8").T,
            replica=kind.replica,
            padding=True,
        )
        for kind, places in kinds.items()
    ]
    return stored, outputs


def _directory(names: Names, one: RankOptimizer) -> str:
    """Returns the directory of the first data-parallel rank of an optimizer, which saves and loads
    its state.

    Ranks of a stage are numbered with their tensor rank first; those of experts have their expert
    rank second.
    """
    parallel = names.parallel
    rank = one.tp if one.ep is None else one.ep * parallel.expert_tp + one.tp
    return parallel.directory(
        rank % parallel.tp, one.pp, (rank // parallel.expert_tp) % parallel.ep
    )


def _states(request: MegatronRequest) -> list[str]:
    """Returns the names of all states, the master copy first, as Megatron has it."""
    found = {name.partition("@")[2] for name in request.dtypes} - {""}
    return sorted(found, key=lambda state: (state != MASTER, state))


def _storage(chain: int, number: int, state: str) -> str:
    return f"{chain}.{number}.{state}"


def _value(one: RankOptimizer | None, states: list[str], args: Mapping[str, Any]) -> Any:
    """Returns the content of a file for one optimizer; None if another rank's file has it."""
    if one is None:
        return None
    out: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(one.buffers):
        numel = sum(buffer.numels)
        tensors = {
            MASTER_KEYS[0] if state == MASTER else state: safe_pickle.tensor(
                FLAT, (numel,), _storage(one.chain, number, state)
            )
            for state in states
        }
        kinds = (buffer.dtype, gradient_dtype(buffer.dtype, args))
        key = tuple(safe_pickle.torch_dtype(kind) for kind in kinds)
        out[number] = {key: {**tensors, "numel_unpadded": numel}}
    return out


def _starts(buffer: Buffer) -> list[tuple[Parameter, int]]:
    """Returns each parameter and its first element of the stored buffer."""
    return [
        (placed.parameter, buffer.start(placed.bucket) + placed.start) for placed in buffer.placed
    ]


# --------------------------------------------- not distributed: tensors beside those of the model


def contents(request: MegatronRequest, p: int) -> tuple[Any, dict[tuple[int, str, str], str]]:
    """Returns the `optimizer` in the files of pipeline stage `p`, and the storage of each tensor in
    it, by virtual stage, key of the weight and state.

    A distributed optimizer has its param_groups there, and its tensors in another file.
    """
    wrapped = is_wrapped(request.distributed, request.dtypes)
    storages: dict[tuple[int, str, str], str] = {}
    out = []
    for chain, groups in enumerate(request.groups):
        inner: dict[str, Any] = {"param_groups": [dict(group) for group in groups]}
        one: dict[str, Any] = {"optimizer": inner} if wrapped else inner
        if not request.distributed:
            members, masters = _grouped(request, chain, p, storages)
            numbers = iter(range(sum(map(len, members))))
            inner["state"] = {}
            for group, states in zip(inner["param_groups"], members, strict=True):
                group["params"] = [next(numbers) for _ in states]
                pairs = zip(group["params"], states, strict=True)
                inner["state"] |= {number: one for number, one in pairs if one}
            if wrapped:
                one["fp32_from_fp16_params"] = masters
        if request.scalers:
            one[SCALER] = scaler_record(request.scalers[chain], chain)
        out.append(one)
    return out[0] if len(out) == 1 else out, storages


def _grouped(
    request: MegatronRequest, chain: int, p: int, storages: dict[tuple[int, str, str], str]
) -> tuple[list[list[dict[str, Any]]], list[list[Any]]]:
    """Returns the states and the master copies of each param_group's parameters, in their order.

    Adds the storage of each to `storages`.
    """
    groups = request.groups[chain]
    args = Common(dict(request.common), "the new checkpoint").args or {}
    members: list[list[dict[str, Any]]] = [[] for _ in groups]
    masters: list[list[Any]] = [[] for _ in groups]
    chunks = registered(
        request.names, request.dtypes, request.padded_vocab_size, chain=0, expert_chain=False, p=p
    )
    link = links(request.groups)[chain]
    for v, slots in enumerate(chunks):
        for slot in slots:
            parameter = slot.of(0, request.names.parallel)
            if not link.updates(slot.kept.bound, len(parameter.shape)):
                continue
            number = group_of(slot.key, len(parameter.shape), groups, args)
            tensors = {}
            for state in states_of(slot.kept.bound, request.dtypes, aliases=True):
                key = storages[v, slot.key, state] = f"optimizer.{len(storages)}"
                dtype = request.dtypes[f"{slot.kept.bound.rule.of[0]}@{state}"]
                tensors[state] = safe_pickle.tensor(dtype, parameter.shape, key)
            if (master := tensors.pop(MASTER, None)) is not None:
                masters[number].append(master)
            members[number].append(tensors)
    return members, masters
