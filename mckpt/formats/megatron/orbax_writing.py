"""The files of a new Orbax checkpoint; `orbax` describes the format.

Each array is one of zarr 3, in a directory of its own (use_ocdbt is false). A file has one layer.

    items/_METADATA
    items/params.params.decoder.layers.mlp.wo.kernel/zarr.json
                                                     0.7.0      the layer 7
"""

from __future__ import annotations

import json
import math
from typing import Any

from mckpt.containers.zarr3 import DESCRIBED, Array
from mckpt.formats.base import dtype_of, packed, shapes_of, stored_buffer, stored_shape
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.geometry.box import Layout, Stored, whole_box
from mckpt.lazy import numpy as np
from mckpt.mapping import Bound
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize

ITEMS, METADATA = "items", "_METADATA"
WEIGHTS = "params"  # begins the names of the weights: once in MaxText's form for NNX, else twice
SHAPE = "write_shape"
PREFIX = f"{WEIGHTS}.{WEIGHTS}."
CHECKPOINT = "_CHECKPOINT_METADATA"
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
DICT_KEY = 2  # the kind of a key in a tree of dicts


def lay_out(request: MegatronRequest) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of a checkpoint with the weights alone."""
    bound, scope = request.names.bound, request.names.scope()
    paths, outputs = list[str](), list[TargetFile]()
    stored, arrays = list[Stored](), dict[str, Array]()
    for b in bound:
        whole = packed(b.rule, scope, request.padded_vocab_size)
        shape, pieces = stored_buffer(b.rule, whole, whole_box(stored_shape(b.rule, whole)))
        array, keys = _array(request, b), [key for key, _ in b.global_keys()]
        assert not arrays.keys() & set(keys), "two rules write one array"
        arrays |= dict.fromkeys(keys, array)
        files = array.files
        if array.apart:
            files = [files[place] for place in b.places(b.layers).tolist()]
        own = [f"{ITEMS}/{PREFIX}{key}/{name}" for key in keys for name in files]
        layer, expert = b.instances()
        file = len(paths) + np.repeat(np.arange(len(b.layers)), len(b.experts))
        at = expert * math.prod(shape) * itemsize(array.dtype)
        where, padding = (layer, expert, file, at), b.rule.tp == "vocab"
        stored.append(Stored(b.rule.key, array.dtype, shape, pieces, *where, padding=padding))
        paths += own
        outputs += array.targets(own)
    return Layout(paths, stored, shapes_of(bound, scope)), outputs + _json_files(arrays)


def _array(request: MegatronRequest, b: Bound) -> Array:
    """Returns the array of a rule. With layers, they are its second axis, and each has a file. With
    experts, they are the first, and each has chunks.
    """
    scope, axes = request.names.scope(), b.rule.stacked()
    whole = packed(b.rule, scope, request.padded_vocab_size)
    inner = tuple(e(scope) for e in b.rule.shape) or stored_shape(b.rule, whole)
    shape, layers = (*b.axes(scope), *inner), "layer" in axes
    if layers:
        shape = (shape[1], shape[0], *shape[2:])
    return Array(dtype_of(b.rule, request.dtypes), shape, layers, len(axes) * ("expert" in axes))


def _json_files(arrays: dict[str, Array]) -> list[TargetFile]:
    """Returns the descriptions of the arrays, and that of the tree, which is the last one."""
    tree, out = dict[str, Any](), list[TargetFile]()
    for key, array in sorted(arrays.items()):
        name = PREFIX + key
        out.append(TargetFile.whole(f"{ITEMS}/{name}/{DESCRIBED}", array.json))
        parts = name.split(".")
        tree[str(tuple(parts))] = {
            "key_metadata": [{"key": part, "key_type": DICT_KEY} for part in parts],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                SHAPE: array.shape,
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
