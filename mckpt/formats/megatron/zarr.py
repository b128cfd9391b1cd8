"""Megatron's `zarr` format, the first one of dist_checkpointing, which megatron-core wrote up to
0.15.

KEY/.zarray, KEY/0.1.0    the arrays, one for each key, and their chunks (`zarr_directory`)
    KEY/shard_0_2.pt          the objects
    common.pt                 all values but tensors
    metadata.json             names the format

Keys and shapes are those of `torch_dist`. The state of an optimizer has them too, also where ranks
shared the elements of a weight, for which torch_dist has shapes of its own.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import torch_file
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Format, dtype_of, packed, shapes_of
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import (
    MODEL_SPACE,
    common_of,
    is_wrapped,
    prefix_of,
    state_bound,
    states_of,
)
from mckpt.formats.megatron.torch_dist import TorchDist, backend
from mckpt.formats.megatron.torch_dist_writing import (
    COMMON,
    MARKER,
    MARKER_LONG,
    in_file_order,
    object_keys,
    regions_of,
)
from mckpt.formats.megatron.zarr_directory import (
    ARRAY,
    Array,
    ZarrDirectory,
    chunk_name,
    has_arrays,
)
from mckpt.geometry.box import Box, Layout, Stored, tiles, whole_box
from mckpt.geometry.packing import Packed, buffer
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize


class _Part(NamedTuple):
    """One region of a rule's tensor: a chunk of it for each layer and expert, all of one shape."""

    bound: Bound
    whole: Packed
    region: Box
    dtype: str
    names: list[str]  # the files of the chunks, in the order of the rule's instances
    nbytes: int  # of a chunk


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of one checkpoint: a chunk for each layer and expert; large chunks are cut
    by the target's tp.
    """
    arrays: dict[str, Array] = {}
    parts = [part for b in _bound(request) for part in _parts(request, b, arrays)]
    bound = [part.bound for part in parts]
    number = in_file_order(bound, request.names.dims["num_layers"])[0]
    left = [iter(part.names) for part in parts]
    names = [next(left[n]) for n in number.tolist()]
    outputs = [
        TargetFile.headed(name, b"", parts[n].nbytes)
        for name, n in zip(names, number.tolist(), strict=True)
    ]
    stored = [_stored(part, np.flatnonzero(number == n)) for n, part in enumerate(parts)]
    outputs += [TargetFile.whole(f"{key}/{ARRAY}", array.text()) for key, array in arrays.items()]
    shapes = shapes_of(_bound(request), request.names.scope())
    return Layout(names, stored, shapes), [*outputs, *_objects(request), *_small_files(request)]


def _bound(request: MegatronRequest) -> list[Bound]:
    """Returns the rules of all weights, each with those of its optimizer's states behind it.

    The keys of states are those of megatron-core up to 0.14, which names the master copy as an
    optimizer that is not distributed does. If the experts have an optimizer of their own, keys
    begin with its number.
    """
    out = []
    for b in request.names.bound:
        chained = f"chained_{int('expert' in b.rule.indices)}." if len(request.groups) > 1 else ""
        states = states_of(b, request.dtypes)
        out += [b, *(state_bound(b, s, chained + prefix_of(s, distributed=False)) for s in states)]
    return out


def _parts(request: MegatronRequest, b: Bound, arrays: dict[str, Array]) -> list[_Part]:
    """Returns the parts of one rule, and adds its arrays.

    Raises UsageError if another rule has the same key and another dtype.
    """
    scope = request.names.scope()
    whole = packed(b.rule, scope, request.padded_vocab_size)
    dtype, axes = dtype_of(b.rule, request.dtypes), b.axes(scope)
    regions = _grid(regions_of(b, whole, dtype, request.names.parallel), whole.shape)
    array = Array(dtype, (*axes, *whole.shape), (*(1,) * len(axes), *regions[0].shape))
    keys = [key for key, _ in b.global_keys()]  # one for each layer, or one for all
    for key in keys:
        if (known := arrays.setdefault(key, array)) != array:
            raise UsageError(f"{key} would hold {known.dtype} and {dtype}; give --dtype")
    layers, experts = (column.tolist() for column in b.instances())
    each = [keys[i * len(keys) // len(layers)] for i in range(len(layers))]
    at = b.places(np.array(layers)).tolist()
    index = [{"layer": layer, "expert": e} for layer, e in zip(at, experts, strict=True)]
    nbytes = math.prod(array.chunk) * itemsize(dtype)
    parts = []
    for region in regions:
        inner = tuple(o // n for o, n in zip(region.offset, region.shape, strict=True))
        files = [
            f"{key}/{chunk_name((*(i[name] for name in b.rule.stacked()), *inner))}"
            for key, i in zip(each, index, strict=True)
        ]
        parts.append(_Part(b, whole, region, dtype, files, nbytes))
    return parts


def _grid(regions: list[Box], shape: tuple[int, ...]) -> list[Box]:
    """Returns the regions of a tensor if they are the chunks of an array, which all have one shape
    and lie at multiples of it; else the whole tensor.
    """
    first = regions[0].shape
    regular = all(
        r.shape == first and not any(o % n for o, n in zip(r.offset, first, strict=True))
        for r in regions
    )
    return regions if regular and tiles(regions, shape) is None else [whole_box(shape)]


def _stored(part: _Part, file: np.ndarray) -> Stored:
    """Returns the chunks of one part as boxes of logical tensors."""
    rule = part.bound.rule
    shape, pieces = buffer(part.whole, [part.region], rule.of)
    where = *part.bound.instances(), file, np.zeros(len(file), "i8")
    padding = rule.tp == "vocab"
    return Stored(rule.key, part.dtype, shape, pieces, *where, replica=rule.alias, padding=padding)


def _objects(request: MegatronRequest) -> list[TargetFile]:
    """Returns the files of the objects, which are empty."""
    scope, laid = request.names.scope(), torch_file.lay_out(None, "archive")
    keys = itertools.chain.from_iterable(object_keys(b, scope) for b in request.names.objects)
    return [TargetFile(f"{key}.pt", laid.size, laid.fixed) for key in keys]


def _small_files(request: MegatronRequest) -> list[TargetFile]:
    """Lays out common.pt, and the marker, the last file."""
    laid = torch_file.lay_out(_common(request), "common")
    marker = json.dumps({**MARKER_LONG, "sharded_backend": "zarr"}).encode()
    return [TargetFile(COMMON, laid.size, laid.fixed), TargetFile.whole(MARKER, marker)]


def _common(request: MegatronRequest) -> dict[str, Any]:
    """Returns the common state, which describes the optimizer as old releases do."""
    if not request.groups:
        return dict(request.common)
    wrapped = is_wrapped(request.distributed, request.dtypes)
    distributed = [request.distributed] * len(request.groups)
    plain = common_of(request.groups, request.scalers, distributed, wrapped, MODEL_SPACE)
    form = {"distrib_optim_sharding_type": MODEL_SPACE} if request.distributed else {}
    marks = {
        k: v
        for k, v in request.common.get("content_metadata", {}).items()
        if not k.startswith(("distrib_optim_", "chained_optim_"))
    }
    return {**request.common, "content_metadata": {**marks, **form}, "optimizer": plain}


def detect(path: Path) -> bool:
    if not (path / MARKER).exists():
        return (path / COMMON).exists() and has_arrays(path)
    try:
        return backend(path) == FORMAT.name
    except SourceError:
        return False


def open_directory(path: Path) -> TorchDist:
    """Opens a `zarr` checkpoint. Raises SourceError if its save never finished, or chunks are
    missing.
    """
    backend(path)
    return TorchDist(ZarrDirectory(path), FORMAT)


FORMAT = Format(
    "zarr",
    "*/.zarray with metadata.json",
    megatron=True,
    detect=detect,
    open=open_directory,
    lay_out=lay_out,
    parts=(MARKER, COMMON, f"*/{ARRAY}", "*/[0-9]*", "*/shard_*.pt", "*.sync/*"),
    global_keys=True,
    layer_keys=True,
    optimizer=True,
    last=MARKER,
)
