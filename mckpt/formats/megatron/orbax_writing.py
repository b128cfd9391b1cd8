"""The files of a new Orbax checkpoint; `orbax` describes the format.

The arrays are zarr 3 in an OCDBT database, as MaxText saves them by default. A chunk is a layer or
an expert of it, or some rows of either, and is not compressed: the copies go into the files of the
database. The elements of a layer follow each other there, whatever its chunks are.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mckpt.containers import ocdbt
from mckpt.formats.base import dtype_of, file_order, packed, shapes_of, stored_buffer, stored_shape
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.orbax_arrays import METADATA, WEIGHTS
from mckpt.formats.megatron.torch_dist_writing import in_files
from mckpt.geometry.box import Layout, Stored, whole_box
from mckpt.lazy import numpy as np
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

ITEMS = "items"
LARGEST = 64 << 20  # bytes of a chunk, if the rows can be cut so
PREFIX = f"{WEIGHTS}.{WEIGHTS}."
CHECKPOINT = "_CHECKPOINT_METADATA"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
DICT_KEY = 2  # the kind of a key in a tree of dicts

Layer = tuple[int, int]  # the number of an array, and of the layer in it
Place = tuple[int, int]  # the number of a file, and the first byte in it


class _Array(NamedTuple):
    """One array of the checkpoint. The elements of a layer follow each other in a file."""

    rule: int  # number of the rule
    key: str
    dtype: str
    shape: tuple[int, ...]  # with layers, they are its second axis; with experts, these its first
    layers: list[int]  # one or those of its second axis
    is_stacked: bool  # it has an axis of layers
    num_experts: int  # 0 without an axis of experts

    @property
    def chunk(self) -> tuple[int, ...]:
        """Returns the shape of its chunks: one layer, one expert, and of these a part of the rows
        if they are large. A loader reads whole chunks.
        """
        out, rows = list(self.shape), self.rows
        if self.num_experts:
            out[0] = 1
        if self.is_stacked:
            out[1] = 1
        nbytes = math.prod(out) * itemsize(self.dtype)
        least = -(-nbytes // LARGEST)  # parts
        fit = (n for n in range(least, 16 * least) if out[rows] % n == 0)
        out[rows] //= next(fit, 1)
        return tuple(out)

    @property
    def rows(self) -> int:
        """Returns the first axis that counts neither layers nor experts."""
        return (1 + self.is_stacked) * bool(self.num_experts)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a layer."""
        return math.prod(self.shape) * itemsize(self.dtype) // len(self.layers)

    def chunks(self, layer: int) -> Iterator[tuple[int, ...]]:
        """Yields the indices of the chunks of a layer, of which the number in the array is given,
        in the order of its elements.
        """
        parts = range(self.shape[self.rows] // self.chunk[self.rows])
        for expert, part in itertools.product(range(max(1, self.num_experts)), parts):
            index = [0] * len(self.shape)
            if self.num_experts:
                index[0] = expert
            if self.is_stacked:
                index[1] = layer
            index[self.rows] = part
            yield tuple(index)


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a checkpoint with the weights alone."""
    names, scope = request.names, request.names.scope()
    arrays = [one for number in range(len(names.bound)) for one in _arrays(request, number)]
    keys = [one.key for one in arrays]
    assert len(set(keys)) == len(keys), "two rules write one array"
    order = _in_order(request, arrays)
    sizes = np.array([arrays[number].nbytes for number, _ in order], "i8")
    file, at, cuts = in_files(sizes)
    place = dict(zip(order, zip(file.tolist(), at.tolist(), strict=True), strict=True))
    data = [f"d/{number:032x}" for number in range(len(cuts) - 1)]
    ends = [int(sizes[begin:end].sum()) for begin, end in itertools.pairwise(cuts)]
    tail, manifest = _index(arrays, place, data, ends[-1])
    paths = [f"{ITEMS}/{name}" for name in data]
    outputs = [TargetFile.headed(path, b"", n) for path, n in zip(paths, ends, strict=True)]
    size = ends[-1] + len(tail)
    outputs[-1] = TargetFile(paths[-1], size, lambda crc_of: [(ends[-1], tail)])
    stored = [_stored(request, number, arrays, place) for number in range(len(names.bound))]
    outputs += _json_files(arrays, manifest)
    return Layout(paths, stored, shapes_of(names.bound, scope)), outputs


def _index(
    arrays: list[_Array], place: Mapping[Layer, Place], files: list[str], end: int
) -> tuple[bytes, bytes]:
    """Returns the bytes behind the chunks of the last file, which are the descriptions of the
    arrays and the index of all values, and the manifest.

    end: of the chunks in the last file, in bytes.
    """
    values, texts, last = dict[str, ocdbt.Value](), list[bytes](), len(files) - 1
    for number, one in enumerate(arrays):
        name, nbytes = PREFIX + one.key, math.prod(one.chunk) * itemsize(one.dtype)
        for layer in range(len(one.layers)):
            file, at = place[number, layer]
            for n, index in enumerate(one.chunks(layer)):
                key = "/".join([name, "c", *map(str, index)])
                values[key] = ocdbt.Value(file, at + n * nbytes, nbytes)
        texts.append(_zarr_json(one))
        values[f"{name}/zarr.json"] = ocdbt.Value(last, end, len(texts[-1]))
        end += len(texts[-1])
    node, manifest = ocdbt.database(files, values, last, end, b"mckpt".ljust(16, b"\0"))
    return b"".join([*texts, node]), manifest


def _arrays(request: MegatronRequest, number: int) -> list[_Array]:
    """Returns the arrays of a rule, of which a rule with other layers may share some."""
    b, scope = request.names.bound[number], request.names.scope()
    whole, dtype = (
        packed(b.rule, scope, request.padded_vocab_size),
        dtype_of(b.rule, request.dtypes),
    )
    inner = tuple(e(scope) for e in b.rule.shape) or stored_shape(b.rule, whole)
    axes, is_stacked = b.axes(scope), "layer" in b.rule.stacked()
    shape = (*axes, *inner)
    if is_stacked:
        shape = (shape[1], shape[0], *shape[2:])
    layers = list(b.stack or range(axes[0])) if is_stacked else [0]
    return [
        _Array(
            *(number, key, dtype, shape, layers if is_stacked else [layer], is_stacked),
            num_experts=len(b.experts) if "expert" in b.rule.stacked() else 0,
        )
        for key, layer in b.global_keys()
    ]


def _in_order(request: MegatronRequest, arrays: list[_Array]) -> list[tuple[int, int]]:
    """Returns the numbers of the array and of the layer in it, for all, layer by layer."""
    count, ranked = request.names.dims["num_layers"], []
    for number, one in enumerate(arrays):
        b = request.names.bound[one.rule]
        in_layer, alone = "layer" in b.rule.indices, int(file_order(b, count)[0])
        ranked += [
            (layer + 1 if in_layer else alone, number, index)
            for index, layer in enumerate(one.layers)
        ]
    return [(number, index) for _, number, index in sorted(ranked)]


def _stored(
    request: MegatronRequest, number: int, arrays: list[_Array], place: Mapping[Layer, Place]
) -> Stored:
    """Returns the arrays of a rule as boxes of logical tensors."""
    b = request.names.bound[number]
    whole = packed(b.rule, request.names.scope(), request.padded_vocab_size)
    shape, pieces = stored_buffer(b.rule, whole, whole_box(stored_shape(b.rule, whole)))
    dtype = dtype_of(b.rule, request.dtypes)
    rows = [
        (layer, *place[n, index])
        for n, one in enumerate(arrays)
        for index, layer in enumerate(one.layers if one.rule == number else ())
    ]
    where = np.repeat(np.array(rows, "i8").T, len(b.experts), axis=1)
    expert = np.tile(b.experts, len(rows))
    at = where[2] + expert * math.prod(shape) * itemsize(dtype)
    padding = b.rule.tp == "vocab"
    return Stored(b.rule.key, dtype, shape, pieces, where[0], expert, where[1], at, padding=padding)


def _zarr_json(one: _Array) -> bytes:
    """Returns the description of an array."""
    chunk = {"name": "regular", "configuration": {"chunk_shape": one.chunk}}
    codec = {"name": "bytes", "configuration": {"endian": "little"}}
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": one.shape,
            "data_type": one.dtype,
            "chunk_grid": chunk,
            "chunk_key_encoding": {"name": "default"},
            "codecs": [codec],
            "fill_value": 0.0,
        }
    ).encode()


def _json_files(arrays: list[_Array], manifest: bytes) -> list[TargetFile]:
    """Returns the small files; the last one is the one that describes the tree."""
    tree, written = dict[str, Any](), list[Any]()
    for one in sorted(arrays, key=lambda one: one.key):
        parts = (PREFIX + one.key).split(".")
        tree[str(tuple(parts))] = {
            "key_metadata": [{"key": part, "key_type": DICT_KEY} for part in parts],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": one.shape,
            },
        }
        sizes = {"write_shape": one.shape, "chunk_shape": one.chunk, "ext_metadata": None}
        written.append({"array_metadata": {"param_name": PREFIX + one.key, **sizes}})
    described = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    files = {
        f"{ITEMS}/array_metadatas/process_0": {"array_metadatas": written},
        f"{ITEMS}/{CHECKPOINT}": {"item_handlers": HANDLER},
        CHECKPOINT: {"item_handlers": {ITEMS: HANDLER}},
        f"{ITEMS}/{METADATA}": described,
    }
    out = [TargetFile.whole(name, json.dumps(value).encode()) for name, value in files.items()]
    return [TargetFile.whole(f"{ITEMS}/{ocdbt.MANIFEST}", manifest), *out]
