"""The files of a new `torch` checkpoint; `torch` describes the format."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from mckpt.containers import safe_pickle, torch_file
from mckpt.formats.base import dtype_of, packed, shapes_of
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import state_bound, state_pieces, states_of, torch_writing
from mckpt.formats.megatron.torch_shards import FILE, Shard, axes, instances, places, shards
from mckpt.geometry.box import Layout, Stored
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

STEM = "model_optim_rng"
WEIGHT = ""  # in the place of a state: the weight itself
_Place = tuple[int, str, str]  # virtual stage, key of the weight, state
_Places = dict[_Place, int]  # the first byte in the files of a stage


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of every rank.

    Files of one pipeline stage differ in their data alone, so each stage's container is laid out
    once. The state of a distributed optimizer has files of its own.
    """
    dims, parallel = request.names.dims, request.names.parallel
    scope, bound = request.names.scope(), [b for b in request.names.bound if b.rule.written]
    grid = parallel.files(bool(dims["num_experts"]))
    cut = [
        (b, shard)
        for b in bound
        for shard in shards(b, packed(b.rule, scope, request.padded_vocab_size), parallel, grid)
    ]
    shape_of = {id(b): shard.shape for b, shard in cut}

    number: dict[str, int] = {}  # of the file in each directory
    outputs: list[TargetFile] = []
    at_of: list[_Places] = []  # for each stage
    for p in range(parallel.pp):
        value, storages = _contents(request, [(b, shape_of[id(b)]) for b in bound], p)
        laid = torch_file.lay_out(value, STEM)
        at_of.append({key: laid.data[storage][0] for key, storage in storages.items()})
        for t, e in grid:
            directory = parallel.directory(t, p, e)
            number[directory] = len(outputs)
            outputs.append(TargetFile(f"{directory}/{FILE}", laid.size, laid.fixed))

    stored = [_stored(request, b, shard, number, at_of) for b, shard in cut]
    is_parameter = request.names.mapping.registration.is_parameter
    states = {
        id(b): states_of(b, request.dtypes, aliases=True) for b in bound if is_parameter(b.rule.key)
    }
    if request.groups and request.distributed:
        more, files = torch_writing.lay_out(request, grid, len(outputs))
        stored, outputs = stored + more, outputs + files
    elif request.groups:
        stored += [
            _stored(request, b, shard, number, at_of, state)
            for b, shard in cut
            for state in states.get(id(b), ())
        ]
    named = bound + [state_bound(b, state) for b in bound for state in states.get(id(b), ())]
    return Layout([file.path for file in outputs], stored, shapes_of(named, scope)), outputs


def _contents(
    request: MegatronRequest, bound: list[tuple[Bound, tuple[int, ...]]], p: int
) -> tuple[dict[str, Any], dict[_Place, str]]:
    """Returns the content of the pickle of each file of pipeline stage `p`, and the storage of each
    tensor in it.

    bound: the rules, and the shapes of their shards.
    """
    names = request.names
    dialect, dims, parallel = names.mapping, names.dims, names.parallel
    stage = names.stages()[p]
    models: list[OrderedDict[str, Any]] = [OrderedDict() for _ in range(parallel.vpp)]
    storages: dict[_Place, str] = {}
    tensors = [
        (b, shape, v, layer, key)
        for b, shape in bound
        for v, layer, _, key in instances(b, stage, p, parallel, dims, 0)
    ]
    if dialect.nested:  # programs that read dicts of dicts expect layer after layer
        tensors.sort(key=lambda one: _order(one[0], one[3]))
    if request.groups:  # the order of a model's keys is that of the optimizer's parameters
        registration = dialect.registration
        parameters = {key for *_, key in tensors if registration.is_parameter(key)}
        place = {key: i for i, key in enumerate(registration.sorted(parameters))}
        tensors.sort(key=lambda one: place.get(one[4], len(place)))
    for b, shape, v, _, key in tensors:
        if (v, key, WEIGHT) in storages:  # it holds the experts of a rank
            continue
        storage = storages[v, key, WEIGHT] = str(len(storages))
        whole = (*axes(b, parallel, dims), *shape)
        models[v][key] = safe_pickle.tensor(dtype_of(b.rule, request.dtypes), whole, storage)
    for b in request.names.objects:
        for v, _, _, key in instances(b, stage, p, parallel, dims, 0):
            models[v][key] = None
    states = [_nested(model, dialect.nested) for model in models]
    named = (
        {"model": states[0]}
        if parallel.vpp == 1
        else {f"model{v}": state for v, state in enumerate(states)}
    )
    if not request.groups:
        return {**request.common, **named}, storages
    optimizer, more = torch_writing.contents(request, p)
    return {**request.common, **named, "optimizer": optimizer}, storages | more


def _order(b: Bound, layer: int) -> float:
    """Returns the place of a tensor in the order of the model's modules."""
    outer = -1.0 if b.rule.stage == "first" else math.inf
    return layer if "layer" in b.rule.indices else outer


def _nested(model: OrderedDict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Returns a state dict whose keys with one of these prefixes are in dicts of their own."""
    if not prefixes:
        return model
    out: dict[str, Any] = {}
    for key, value in model.items():
        prefix = next((p for p in prefixes if key.startswith(f"{p}.")), "")
        inner = out
        for name in prefix.split(".") if prefix else ():
            inner = inner.setdefault(name, {})
        inner[key.removeprefix(f"{prefix}.") if prefix else key] = value
    return out


def _stored(
    request: MegatronRequest,
    b: Bound,
    shard: Shard,
    number: dict[str, int],
    at_of: list[_Places],
    state: str = WEIGHT,
) -> Stored:
    """Returns the tensors of one shard of a rule, or those of a state of its weights.

    number: of the file in each directory. at_of: for each pipeline stage, the places in its files.
    """
    named = state_bound(b, state).rule if state else b.rule
    pieces = state_pieces(shard.pieces, state) if state else shard.pieces
    key, dtype = f"{b.rule.key} ({state})" if state else b.rule.key, dtype_of(named, request.dtypes)
    (count,) = axes(b, request.names.parallel, request.names.dims) or (1,)
    nbytes = math.prod(shard.shape) * itemsize(dtype)
    rows = [
        (layer, expert, number[directory], at_of[p][v, name, state] + expert % count * nbytes)
        for p, directory, v, layer, expert, name in places(b, shard, request.names)
    ]
    where = np.array(rows, "i8").reshape(-1, 4).T
    padding = b.rule.tp == "vocab"
    return Stored(
        *(key, dtype, shard.shape, pieces, *where),
        replica=shard.replica,
        padding=padding,
        carried=named.carried,
    )
