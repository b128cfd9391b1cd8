"""The files of a new `torch_dist` checkpoint; `torch_dist` describes the format. `lay_out_chunks`
lays out any directory of torch.distributed.checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.dcp_metadata import Chunks, Items, emit_metadata, metadata_file
from mckpt.errors import UsageError
from mckpt.formats.base import (
    dtype_of,
    file_order,
    packed,
    shapes_of,
    stored_buffer,
    stored_shape,
)
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import (
    common_of,
    is_matrix,
    is_muon,
    is_wrapped,
    links,
    prefix_of,
    state_bound,
    states_of,
)
from mckpt.geometry.box import Box, Layout, Stored, whole_box
from mckpt.geometry.packing import PackingError, shard
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound, Scope
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

METADATA, COMMON, MARKER = ".metadata", "common.pt", "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"
MARKER_LONG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# bytes: larger chunks are cut by the target's tp, since a loader reads whole chunks
SPLIT_ABOVE = 64 << 20
# bytes of data for each .distcp file: enough files for many writers, few enough to list
FILE_BYTES = 256 << 20
MAX_FILES = 128


class Extra(NamedTuple):
    """An item beside the chunks of the weights, and the keys stored with it."""

    container: torch_file.TorchFile
    keys: list[str]
    tensor: tuple[str, tuple[int, ...]] | None = None  # its dtype and shape; None: an object


# the key of each tensor of a rule, in the order of `Bound.keys`
Named = Callable[[Bound], list[str]]


class _Region(NamedTuple):
    """One region of a rule's tensor: a chunk of it for each layer and expert, all of one shape."""

    bound: Bound
    region: Box
    dtype: str
    shape: tuple[int, ...]  # of a chunk, with the leading axes of 1
    container: torch_file.TorchFile  # of one chunk


class _PlacedChunks(NamedTuple):
    """Chunks and their places, in the order of the files: parallel arrays, one entry a chunk."""

    part: np.ndarray  # the number of its part
    layer: np.ndarray
    expert: np.ndarray
    file: np.ndarray
    at: np.ndarray  # the byte of the file at which its item begins

    def of_part(self, number: int) -> _PlacedChunks:
        rows = np.flatnonzero(self.part == number)
        return _PlacedChunks(*(column[rows] for column in self))


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of one checkpoint: a chunk for each layer and expert; large chunks are cut
    by the target's tp.
    """
    if request.groups:
        wrapped = is_wrapped(request.distributed, request.dtypes)
        chain = links(request.groups)
        distributed = [request.distributed and not link.matrices for link in chain]
        plain = common_of(request.groups, request.scalers, distributed, wrapped)
        request = replace(request, common={**request.common, "optimizer": plain})
    layout, outputs = lay_out_chunks(request, _bound(request), _objects(request))
    return layout, [*outputs, *_small_files(request)]


def lay_out_chunks(
    request: MegatronRequest,
    bound: list[Bound],
    extras: Sequence[Extra],
    named: Named | None = None,
) -> tuple[Layout, list[TargetFile]]:
    """Lays out the .distcp files and the `.metadata` of a directory with the tensors of these rules
    and with `extras`.

    named: the keys, if each tensor of a layer and an expert has one of its own; None: their axes
    are the layers and experts that the rule's key does not name.
    """
    scope, num_layers = request.names.scope(), request.names.dims["num_layers"]
    tensors, parts = _parts(request, bound, named)
    placed, cuts = _place(parts, num_layers)
    files = [f"__{i}_0.distcp" for i in range(len(cuts) - 1)]
    chunks: list[Chunks] = []
    items: list[Items] = []
    stored: list[Stored] = []
    for number, part in enumerate(parts):
        own = placed.of_part(number)
        own_keys = named and _in_order(named(part.bound), part.bound, num_layers)
        more, places = _indexed(part, own, own_keys)
        chunks += more
        items.append(places)
        stored.append(_stored(request, part, own))
    more_items, outputs = _data_files(files, parts, placed, cuts, extras)
    for key, (dtype, shape) in ((key, e.tensor) for e in extras if e.tensor for key in e.keys):
        tensors[key] = dtype, shape
        chunks.append(Chunks(key, np.zeros((1, len(shape)), "i8"), shape))
    names = [key for extra in extras if extra.tensor is None for key in extra.keys]
    index = emit_metadata(tensors, names, chunks, [*items, *more_items], files)
    outputs.append(metadata_file(METADATA, index))
    return Layout(files, stored, shapes_of(bound, scope)), outputs


def _bound(request: MegatronRequest) -> list[Bound]:
    """Returns the rules of all weights, each with those of its optimizer's states behind it."""
    scope, muon = request.names.scope(), is_muon(request.groups)
    out = []
    for b in request.names.bound:
        out.append(b)
        states = states_of(b, request.dtypes)
        whole = muon and bool(states) and is_matrix(b, len(packed(b.rule, scope).shape))
        distributed = request.distributed and not whole
        out += [state_bound(b, state, prefix_of(state, distributed)) for state in states]
    return out


def _parts(
    request: MegatronRequest, bound: list[Bound], named: Named | None
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], list[_Region]]:
    """The dtype and shape of each stored tensor, by key; and the parts that all rules are cut into.

    UsageError if two rules with one key have different dtypes.
    """
    scope, parallel = request.names.scope(), request.names.parallel
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    # of 10**5 chunks all but a few are alike
    containers: dict[tuple[str, tuple[int, ...]], torch_file.TorchFile] = {}
    parts = []
    for b in bound:
        whole = packed(b.rule, scope, request.padded_vocab_size)
        dtype, axes = dtype_of(b.rule, request.dtypes), b.axes(scope)
        for key in named(b) if named else [key for key, _ in b.global_keys()]:
            if (known := tensors.get(key)) is not None and known[0] != dtype:
                raise UsageError(f"{key} would hold {known[0]} and {dtype}; give --dtype")
            tensors[key] = (dtype, (*axes, *stored_shape(b.rule, whole)))
        for region in regions_of(b, whole, dtype, parallel):
            shape = (*(1,) * (len(axes) + bool(b.rule.stack)), *region.shape)
            if (dtype, shape) not in containers:
                containers[dtype, shape] = torch_file.lay_out(
                    safe_pickle.tensor(dtype, shape, "0"), "archive"
                )
            parts.append(_Region(b, region, dtype, shape, containers[dtype, shape]))
    return tensors, parts


def _place(parts: list[_Region], num_layers: int) -> tuple[_PlacedChunks, list[int]]:
    """Places the chunks of all parts, layer by layer; also returns the cuts between files."""
    number, layer, expert = in_file_order([part.bound for part in parts], num_layers)
    sizes = np.array([part.container.size for part in parts], "i8")[number]
    file, at, cuts = in_files(sizes)
    return _PlacedChunks(number, layer, expert, file, at), cuts


def in_file_order(bound: list[Bound], num_layers: int) -> np.ndarray:
    """Returns the tensors of some rules layer by layer: the number of the rule, the layer and the
    expert of each [3, tensors].
    """
    columns = [np.empty((4, 0), "i8")]
    for number, b in enumerate(bound):
        order = file_order(b, num_layers)
        columns.append(np.stack([order, np.full(len(order), number), *b.instances()]))
    every = np.concatenate(columns, 1)
    return every[1:, np.argsort(every[0], kind="stable")]


def _in_order(keys: list[str], b: Bound, num_layers: int) -> list[str]:
    """Returns the keys of a rule's tensors in the order of `in_file_order`."""
    order = np.argsort(file_order(b, num_layers), kind="stable")
    return [keys[number] for number in order.tolist()]


def _indexed(
    part: _Region, own: _PlacedChunks, keys: list[str] | None
) -> tuple[list[Chunks], Items]:
    """Returns the chunks of one part as `.metadata` lists them, by key, and their items.

    keys: one for each chunk; None: those that the rule names.
    """
    b = part.bound
    index = {"layer": b.places(own.layer), "expert": own.expert}
    offsets, inner = np.empty((len(own.part), len(part.shape)), "i8"), part.region.offset
    if b.rule.stack:  # a region is one layer of a tower
        inner = (inner[0] // part.region.shape[0], 0, *inner[1:])
    for axis, offset in enumerate([*(index[i] for i in b.rule.stacked()), *inner]):
        offsets[:, axis] = offset
    key_of = {layer: key for key, layer in b.global_keys()} if keys is None else {}
    if keys is not None:
        starts = list(range(len(own.part)))
    elif len(key_of) > 1:
        starts = np.flatnonzero(np.diff(own.layer, prepend=-1)).tolist()
        keys = [key_of[layer] for layer in own.layer[starts].tolist()]
    else:
        starts, keys = [0][: len(own.part)], list(key_of.values())[: len(own.part)]
    firsts = [*starts, len(own.part)]
    chunks = [
        Chunks(key, offsets[begin:end], part.shape)
        for key, (begin, end) in zip(keys, itertools.pairwise(firsts), strict=True)
    ]
    number = np.repeat(np.arange(len(keys)), np.diff(firsts))
    return chunks, Items(keys, number, offsets, own.file, own.at, part.container.size)


def _stored(request: MegatronRequest, part: _Region, own: _PlacedChunks) -> Stored:
    """Returns the chunks of one part as boxes of logical tensors."""
    rule = part.bound.rule
    whole = packed(rule, request.names.scope(), request.padded_vocab_size)
    shape, pieces = stored_buffer(rule, whole, part.region)
    where = own.layer, own.expert, own.file, own.at + part.container.data["0"][0]
    padding = rule.tp == "vocab"
    return Stored(
        *(rule.key, part.dtype, shape, pieces, *where),
        replica=rule.alias,
        padding=padding,
        carried=rule.carried,
    )


def _objects(request: MegatronRequest) -> list[Extra]:
    """Returns the objects beside the chunks."""
    scope = request.names.scope()
    empty = [key for b in request.names.objects for key in object_keys(b, scope)]
    out = [Extra(torch_file.lay_out([None], "archive"), empty)]
    if request.common_as_object:
        out.append(Extra(torch_file.lay_out([request.common], "archive"), [COMMON_OBJECT]))
    return out


def _data_files(
    names: list[str],
    parts: list[_Region],
    placed: _PlacedChunks,
    cuts: list[int],
    extras: Sequence[Extra],
) -> tuple[list[Items], list[TargetFile]]:
    """Returns the .distcp files of these names, of which the last one also contains the extras,
    and the items of the extras.
    """
    containers = [part.container for part in parts]
    at, number, items = placed.at, placed.part, []
    sizes = np.array([container.size for container in containers], "i8")[number]
    # of the files, in bytes
    ends = [int(sizes[begin:end].sum()) for begin, end in itertools.pairwise(cuts)]
    for container, keys, tensor in extras:
        where = ends[-1] + np.arange(len(keys)) * container.size
        last = np.full(len(keys), len(names) - 1)
        chunks = np.arange(len(keys)) if tensor else None
        begins = np.zeros((len(keys), len(tensor[1])), "i8") if tensor else None
        items.append(Items(keys, chunks, begins, last, where, container.size))
        at, number = np.append(at, where), np.append(number, np.full(len(keys), len(containers)))
        containers.append(container)
        ends[-1] += len(keys) * container.size
    placed_items, starts = [containers[n] for n in number.tolist()], at.tolist()
    return items, [
        TargetFile(
            name, nbytes, torch_file.fixed_of_items(placed_items[begin:end], starts[begin:end])
        )
        for name, nbytes, (begin, end) in zip(
            names, ends, itertools.pairwise([*cuts[:-1], len(at)]), strict=True
        )
    ]


def _small_files(request: MegatronRequest) -> list[TargetFile]:
    """Lays out common.pt, unless the common state is an object, and the marker, the last file."""
    marker = {
        k: v
        for k, v in MARKER_LONG.items()
        if not (request.common_as_object and k.startswith("common"))
    }
    out = [TargetFile.whole(MARKER, json.dumps(marker).encode())]
    if not request.common_as_object:
        laid = torch_file.lay_out(request.common, "common")
        out.insert(0, TargetFile(COMMON, laid.size, laid.fixed))
    return out


def in_files(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Distributes items of these sizes, in bytes and in this order, over files of about the same
    size. Returns file [items], first byte in it [items], and cuts [files + 1].

    File i holds the items from cuts[i] to cuts[i + 1].
    """
    total = int(sizes.sum())
    count = max(1, min(MAX_FILES, math.ceil(total / FILE_BYTES)))
    start = np.append(0, np.cumsum(sizes))
    file = np.minimum(start[:-1] * count // max(1, total), count - 1)
    firsts = np.searchsorted(file, np.arange(count + 1))
    return file, start[:-1] - start[firsts][file], firsts.tolist()


def regions_of(b: Bound, whole: Any, dtype: str, parallel: Parallel) -> list[Box]:
    """Returns the chunks of one layer's tensor: one chunk, or for a large tensor the shard of each
    rank of the target.
    """
    if b.rule.stack:
        rows, zeros = whole.shape[0] // b.rule.stack, (0,) * (len(whole.shape) - 1)
        layers = range(b.rule.stack)
        return [Box((n * rows, *zeros), (rows, *whole.shape[1:])) for n in layers]
    if b.rule.carried:
        return [whole_box(stored_shape(b.rule, whole))]
    ways = parallel.expert_tp if "expert" in b.rule.indices else parallel.tp
    try:
        shards = (
            [box for rank in range(ways) for box in shard(whole, b.rule.tp, rank, ways)]
            if b.rule.tp != "replicated"
            else []
        )
    except PackingError as e:
        raise UsageError(
            f"{b.rule.key} {list(whole.shape)}: {e}"
            f" ({'etp' if 'expert' in b.rule.indices else 'tp'})"
        ) from None
    return (
        shards
        if shards and math.prod(whole.shape) * itemsize(dtype) > SPLIT_ABOVE
        else [whole_box(whole.shape)]
    )


def object_keys(b: Bound, scope: Scope) -> list[str]:
    """key/shard_I_N of a rule without tensors, once for each index that its key does not name
    (ShardedObject.unique_key).
    """
    sizes = b.axes(scope) or (b.rule.stack or 1,)
    of = ".".join(map(str, sizes))
    shards = [
        f"/shard_{'.'.join(index)}_{of}"
        for index in itertools.product(*(map(str, range(size)) for size in sizes))
    ]
    return [key + shard for key, _ in b.global_keys() for shard in shards]
