"""The files of a new `torch_dist` checkpoint; `torch_dist` describes the format."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.dcp_metadata import Chunks, Items, emit_metadata
from mckpt.errors import UsageError
from mckpt.formats.base import Wanted, dtype_of, packed, shapes_of
from mckpt.geometry.box import Box, Layout, Stored, whole_box
from mckpt.geometry.packing import PackingError, buffer, shard
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


def lay_out(wanted: Wanted) -> tuple[Layout, list[TargetFile]]:
    """The files of one checkpoint: a chunk for each layer and expert, cut by the target's tp where
    it is large.
    """
    dialect, dims, _, parallel = wanted.names
    kinds, padded = wanted.dtypes, wanted.padded_vocab_size
    scope, bound = wanted.names.scope(), wanted.names.bound()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    containers: dict[tuple[str, tuple[int, ...]], torch_file.TorchFile] = {}
    # (rule, region, dtype, shape of a chunk with its leading axes of 1)
    rules: list[tuple[Bound, Box, str, tuple[int, ...]]] = []
    # for each of `rules` the container of one chunk: of 10**5 chunks all but a few are alike
    held: list[torch_file.TorchFile] = []
    columns = [np.empty((4, 0), "i8")]  # of each chunk: order, number of its rule, layer, expert
    for b in bound:
        whole, dtype = packed(b.rule, scope, padded), dtype_of(b.rule, kinds)
        axes = b.axes(scope)
        for key, _ in b.global_keys():
            if (known := tensors.get(key)) is not None and known[0] != dtype:
                raise UsageError(f"{key} would hold {known[0]} and {dtype}; give --dtype")
            tensors[key] = (dtype, (*axes, *whole.shape))
        layers, experts = b.instances()
        outside = 0 if b.rule.stage == "first" else dims["num_layers"] + 1
        for region in _regions(b, whole, dtype, parallel):
            shape = (*(1,) * len(axes), *region.shape)
            if (dtype, shape) not in containers:
                containers[dtype, shape] = torch_file.lay_out(
                    safe_pickle.tensor(dtype, shape, "0"), "archive"
                )
            order = layers + 1 if "layer" in b.rule.indices else outside
            columns.append(np.stack(np.broadcast_arrays(order, len(rules), layers, experts)))
            rules.append((b, region, dtype, shape))
            held.append(containers[dtype, shape])
    every = np.concatenate(columns, 1)
    _, number, layer, expert = every[:, np.argsort(every[0], kind="stable")]

    sizes = np.array([container.size for container in held], "i8")[number]
    file, at, cuts = _in_files(sizes)
    names = [f"__{i}_0.distcp" for i in range(len(cuts) - 1)]

    stored: list[Stored] = []
    chunks: list[Chunks] = []
    items: list[Items] = []
    for i, ((b, region, dtype, shape), container) in enumerate(zip(rules, held, strict=True)):
        rows = np.flatnonzero(number == i)
        key_of = {layer: key for key, layer in b.global_keys()}
        index = {"layer": layer[rows], "expert": expert[rows]}
        offsets = np.empty((len(rows), len(shape)), "i8")
        for axis, offset in enumerate([*(index[i] for i in b.rule.stacked()), *region.offset]):
            offsets[:, axis] = offset
        starts = (
            np.flatnonzero(np.diff(layer[rows], prepend=-1)).tolist()
            if len(key_of) > 1
            else [0][: len(rows)]
        )
        firsts = [*starts, len(rows)]
        first = index["layer"][starts].tolist()
        keys = [key_of.get(layer, next(iter(key_of.values()))) for layer in first]
        chunks += [
            Chunks(key, offsets[begin:end], shape)
            for key, (begin, end) in zip(keys, itertools.pairwise(firsts), strict=True)
        ]
        items.append(
            Items(
                keys,
                np.repeat(np.arange(len(keys)), np.diff(firsts)),
                offsets,
                file[rows],
                at[rows],
                container.size,
            )
        )
        held_as, pieces = buffer(packed(b.rule, scope, padded), [region], b.rule.of)
        stored.append(
            Stored(
                b.rule.key,
                dtype,
                held_as,
                pieces,
                layer[rows].astype("i4"),
                expert[rows].astype("i4"),
                file[rows].astype("i4"),
                at[rows] + container.data["0"][0],
                replica=b.rule.alias,
                padding=b.rule.tp == "vocab",
            )
        )

    objects = [
        (
            torch_file.lay_out([None], "archive"),
            [key for b in dialect.bind(scope, dialect.objects) for key in _object_keys(b, scope)],
        )
    ]
    if wanted.common_as_object:
        objects.append((torch_file.lay_out([wanted.common], "archive"), [COMMON_OBJECT]))
    # of the files, in bytes
    ends = [int(sizes[begin:end].sum()) for begin, end in itertools.pairwise(cuts)]
    for container, named in objects:  # behind all else
        where = ends[-1] + np.arange(len(named)) * container.size
        items.append(
            Items(named, None, None, np.full(len(named), len(names) - 1), where, container.size)
        )
        at, number = np.append(at, where), np.append(number, np.full(len(named), len(held)))
        held.append(container)
        ends[-1] += len(named) * container.size
    cuts[-1] = len(at)

    outputs = [
        TargetFile(name, nbytes, _fixed(at[begin:end], number[begin:end], held))
        for name, nbytes, (begin, end) in zip(names, ends, itertools.pairwise(cuts), strict=True)
    ]
    outputs.append(
        TargetFile.pieces(
            METADATA,
            emit_metadata(
                tensors, [key for _, named in objects for key in named], chunks, items, names
            ),
        )
    )
    if not wanted.common_as_object:
        laid = torch_file.lay_out(wanted.common, "common")
        outputs.append(TargetFile(COMMON, laid.size, laid.fixed))
    marker = {
        k: v
        for k, v in MARKER_LONG.items()
        if not (wanted.common_as_object and k.startswith("common"))
    }
    outputs.append(TargetFile.whole(MARKER, json.dumps(marker).encode()))

    return Layout(names, stored, shapes_of(bound, scope)), outputs


def _in_files(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Items of these bytes, one behind the other in files of about the same size -> file [items],
    byte in it [items], cuts [files + 1].

    File i holds the items from cuts[i] to cuts[i + 1].
    """
    total = int(sizes.sum())
    count = max(1, min(MAX_FILES, math.ceil(total / FILE_BYTES)))
    start = np.append(0, np.cumsum(sizes))
    file = np.minimum(start[:-1] * count // max(1, total), count - 1)
    firsts = np.searchsorted(file, np.arange(count + 1))
    return file, start[:-1] - start[firsts][file], firsts.tolist()


def _regions(b: Bound, whole: Any, dtype: str, parallel: Parallel) -> list[Box]:
    """The chunks of one layer's tensor: the whole of it, or what each rank of the target holds
    where it is large.
    """
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


def _object_keys(b: Bound, scope: Scope) -> list[str]:
    """key/shard_I_N of a rule without tensors, once for each index that its key does not name
    (ShardedObject.unique_key).
    """
    sizes = b.axes(scope) or (1,)
    of = ".".join(map(str, sizes))
    shards = [
        f"/shard_{'.'.join(index)}_{of}"
        for index in itertools.product(*(map(str, range(size)) for size in sizes))
    ]
    return [key + shard for key, _ in b.global_keys() for shard in shards]


def _fixed(
    at: np.ndarray, number: np.ndarray, held: list[torch_file.TorchFile]
) -> Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]:
    """What is no tensor data in a file of items, which begin `at` these bytes; `number` of each is
    the one of `held` that it is like.
    """

    def fixed(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
        for base, container in zip(
            at.tolist(), map(held.__getitem__, number.tolist()), strict=True
        ):
            inner = None if crc_of is None else (lambda at, n, base=base: crc_of(base + at, n))
            for where, data in container.fixed(inner):
                yield base + where, data

    return fixed
