"""The files of a new Orbax checkpoint; `orbax` describes the format.

Each array is zarr 3, in a directory of its own (use_ocdbt is false). A file has one layer of it:
chunks that are not compressed, whose elements follow each other, and the index of the chunks that
zarr's sharding has at the end of a file.

    items/_METADATA
    items/params.params.decoder.layers.mlp.wo.kernel/zarr.json
                                                     0.7.0      the layer 7
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.errors import MckptError
from mckpt.formats.base import dtype_of, packed, shapes_of, stored_buffer, stored_shape
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.orbax_arrays import METADATA, WEIGHTS, Arrays
from mckpt.geometry.box import Layout, Stored, whole_box
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.storage import sparse_copy
from mckpt.storage.files import TargetFile, read_file
from mckpt.values.dtypes import itemsize

ITEMS = "items"
LARGEST = 64 << 20  # bytes of a chunk, if the rows can be cut so
ZARR = "zarr.json"
PREFIX = f"{WEIGHTS}.{WEIGHTS}."
CHECKPOINT = "_CHECKPOINT_METADATA"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
DICT_KEY = 2  # the kind of a key in a tree of dicts
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


class _Form(NamedTuple):
    """The form of all arrays of a rule."""

    dtype: str
    shape: tuple[int, ...]  # with layers, they are its second axis; with experts, these its first
    is_stacked: bool  # it has an axis of layers
    has_experts: bool

    @classmethod
    def of(cls, request: MegatronRequest, b: Bound) -> _Form:
        scope, axes = request.names.scope(), b.rule.stacked()
        whole = packed(b.rule, scope, request.padded_vocab_size)
        inner = tuple(e(scope) for e in b.rule.shape) or stored_shape(b.rule, whole)
        shape, is_stacked = (*b.axes(scope), *inner), "layer" in axes
        if is_stacked:
            shape = (shape[1], shape[0], *shape[2:])
        return cls(dtype_of(b.rule, request.dtypes), shape, is_stacked, "expert" in axes)

    @property
    def file(self) -> tuple[int, ...]:
        """Returns the shape of a file: one layer."""
        return (self.shape[0], 1, *self.shape[2:]) if self.is_stacked else self.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        """Returns the shape of a chunk: one layer or expert, or a part of its rows if these are
        large. A loader reads whole chunks.
        """
        out, rows = list(self.file), 0
        if self.has_experts:
            out[0], rows = 1, 1 + self.is_stacked
        least = -(-math.prod(out) * itemsize(self.dtype) // LARGEST)  # parts
        fit = (n for n in range(least, 16 * least) if out[rows] % n == 0)
        out[rows] //= next(fit, 1)
        return tuple(out)

    def target_files(self, paths: list[str]) -> list[TargetFile]:
        """Returns the files: elements, then the places and sizes of the chunks, and a checksum."""
        nbytes, size = (math.prod(s) * itemsize(self.dtype) for s in (self.file, self.chunk))
        index = np.array([(at, size) for at in range(0, nbytes, size)], "<u8").tobytes()
        end = index + crc32c(index).to_bytes(4, "little")
        return [TargetFile(p, nbytes + len(end), lambda crc_of: [(nbytes, end)]) for p in paths]

    def names(self) -> list[str]:
        """Returns the names of the files, in the order of the layers."""
        zeros = ["0"] * len(self.shape)
        layers = range(self.shape[1] if self.is_stacked else 1)
        return [".".join(["0", str(n), *zeros[2:]] if self.is_stacked else zeros) for n in layers]

    @property
    def zarr_json(self) -> bytes:
        index = [LITTLE, {"name": "crc32c"}]
        chunks = {"chunk_shape": self.chunk, "codecs": [LITTLE], "index_codecs": index}
        described = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.file}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": chunks}],
            "fill_value": 0.0,
        }
        return json.dumps(described).encode()


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a checkpoint with the weights alone."""
    bound, scope = request.names.bound, request.names.scope()
    paths, outputs = list[str](), list[TargetFile]()
    stored, arrays = list[Stored](), dict[str, _Form]()
    for b in bound:
        form, keys = _Form.of(request, b), [key for key, _ in b.global_keys()]
        assert not arrays.keys() & set(keys), "two rules write one array"
        arrays |= dict.fromkeys(keys, form)
        whole = packed(b.rule, scope, request.padded_vocab_size)
        shape, pieces = stored_buffer(b.rule, whole, whole_box(stored_shape(b.rule, whole)))
        layer, expert = b.instances()
        file = len(paths) + np.repeat(np.arange(len(b.layers)), len(b.experts))
        at = expert * math.prod(shape) * itemsize(form.dtype)
        where, padding = (layer, expert, file, at), b.rule.tp == "vocab"
        stored.append(Stored(b.rule.key, form.dtype, shape, pieces, *where, padding=padding))
        own = _paths(b, form, keys)
        paths += own
        outputs += form.target_files(own)
    return Layout(paths, stored, shapes_of(bound, scope)), outputs + _json_files(arrays)


def _paths(b: Bound, form: _Form, keys: list[str]) -> list[str]:
    """Returns the files of a rule's layers. keys: one, or that of each layer."""
    names = form.names()
    if form.is_stacked:
        names = [names[place] for place in b.places(b.layers).tolist()]
    return [f"{ITEMS}/{PREFIX}{key}/{name}" for key in keys for name in names]


def own_files(arrays: Arrays) -> dict[str, list[str]]:
    """Returns the files of each array below the root, in the order of the layers, by key, if all
    were written as above; they need no decoding. Returns nothing if another program wrote some, or
    if one is damaged.
    """
    if sparse_copy.of(arrays.root) is not None:
        return {}
    found = {
        key: _files_of(arrays.root, arrays.names[key], array.dtype.name, array.shape)
        for key, array in arrays.opened.items()
    }
    return found if all(found.values()) else {}


def _files_of(root: Path, name: str, dtype: str, shape: tuple[int, ...]) -> list[str]:
    with suppress(MckptError):
        stated = read_file(root / name / ZARR, 1 << 20)
        for stacked, experts in itertools.product((False, True), repeat=2):
            form = _Form(dtype, shape, stacked, experts)
            if len(shape) > stacked + experts and form.zarr_json == stated:
                paths = [f"{name}/{file}" for file in form.names()]
                files = form.target_files(paths)
                return paths if all(_is_whole(root, file) for file in files) else []
    return []


def _is_whole(root: Path, file: TargetFile) -> bool:
    """Returns whether there is a file with this size and this end."""
    ((at, end),) = file.fixed(None)
    with suppress(OSError), open(root / file.path, "rb") as f:
        return f.seek(at) == at and f.read() == end
    return False


def _json_files(arrays: dict[str, _Form]) -> list[TargetFile]:
    """Returns the descriptions of the arrays, and that of the tree, which is the last one."""
    tree, out = dict[str, Any](), list[TargetFile]()
    for key, form in sorted(arrays.items()):
        name = PREFIX + key
        out.append(TargetFile.whole(f"{ITEMS}/{name}/{ZARR}", form.zarr_json))
        parts = name.split(".")
        tree[str(tuple(parts))] = {
            "key_metadata": [{"key": part, "key_type": DICT_KEY} for part in parts],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": form.shape,
            },
        }
    described = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    files = {
        f"{ITEMS}/{CHECKPOINT}": {"item_handlers": HANDLER},
        CHECKPOINT: {"item_handlers": {ITEMS: HANDLER}},
        f"{ITEMS}/{METADATA}": described,
    }
    return out + [TargetFile.whole(name, json.dumps(v).encode()) for name, v in files.items()]


def crc32c(data: bytes) -> int:
    """Returns the checksum of Castagnoli's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
