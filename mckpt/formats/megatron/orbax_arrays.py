"""The arrays of an Orbax checkpoint, each of which is read as an object of a store: its elements,
in the order of its axes. tensorstore finds and decodes the chunks.

    DIR/_METADATA         the names of the arrays, and how they are stored (JSON)
    DIR/manifest.ocdbt    with use_ocdbt: a database of the files NAME/zarr.json, NAME/c/0/1, ...
    DIR/NAME/.zarray      without: a directory for each array
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mckpt.errors import MissingExtra, SourceError, UsageError, shown
from mckpt.geometry.box import range_boxes
from mckpt.lazy import numpy as np
from mckpt.storage import sparse_copy
from mckpt.storage.files import read_json, stamp
from mckpt.storage.stores import Object, ReadOnly
from mckpt.values.dtypes import TABLE, cast, itemsize

METADATA = "_METADATA"
SHAPE = "write_shape"
WEIGHTS = "params"  # begins the names of the weights: once in MaxText's form for NNX, else twice
NNX = ".value"  # and ends them in that form
COUNT = "opt_state.0.count"  # of the steps of Adam, as optax has it
# what begins the names of arrays, and their keys in torch_dist
STARTS = {
    f"{WEIGHTS}.": "",
    "opt_state.0.mu.": "optimizer.state.exp_avg.",
    "opt_state.0.nu.": "optimizer.state.exp_avg_sq.",
    COUNT: COUNT,
}
# bytes of decoded chunks that are kept: the next read may be of the same chunk
CACHE, CHUNKS = 64 << 20, 3
# of glibc's malloc.h: the number of an option, and its value
MALLOC = {"mmap_max": (-4, 0), "trim_threshold": (-1, 256 << 20), "arena_max": (-8, 1)}


class Arrays(ReadOnly):
    """The arrays with the weights and moments of a checkpoint, as a store: an object has the
    elements of an array in C order.
    """

    def __init__(self, root: Path, orders: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Raises SourceError if the checkpoint is damaged, MissingExtra without tensorstore.

        orders: of the axes of some arrays, before their elements are put into C order.
        """
        self.root, self.orders = root, orders or {}
        self.refusal = f"{root}: an array of Orbax, which mckpt only reads"
        found = read_json(root / METADATA, 1 << 30)
        try:
            ocdbt, driver = found["use_ocdbt"], "zarr3" if found["use_zarr3"] else "zarr"
            stated = {
                ".".join(str(part["key"]) for part in entry["key_metadata"]): value.get(SHAPE)
                for entry in found["tree_metadata"].values()
                if not (value := entry["value_metadata"]).get("skip_deserialize")
            }
        except (KeyError, TypeError, AttributeError) as e:
            raise SourceError(
                f"{root / METADATA}: does not describe the arrays of an Orbax checkpoint: {e!r};"
                " copy it again"
            ) from e
        weights = [name for name in stated if name.startswith(f"{WEIGHTS}.")]
        if not weights:
            raise SourceError(
                f"{root}: has no arrays below `{WEIGHTS}`, where MaxText has the weights; it has"
                f" {', '.join(list(stated)[:3]) or 'none'}; give the items of a training of MaxText"
            )
        ending = NNX if all(name.endswith(NNX) for name in weights) else ""
        self.names = {
            key + name.removeprefix(start).removesuffix(ending).removeprefix(f"{WEIGHTS}."): name
            for name in stated
            for start, key in STARTS.items()
            if name.startswith(start)
        }
        self.others = sorted(stated.keys() - self.names.values())
        self.opened = self._open(driver, ocdbt, CACHE)
        largest = max(map(_chunk_bytes, self.opened.values()))
        if CHUNKS * largest > CACHE:
            self.opened = self._open(driver, ocdbt, CHUNKS * largest)
        for key, array in self.opened.items():
            name, dtype = self.names[key], array.dtype.name
            if dtype not in TABLE:
                raise SourceError(f"{root}: {name} is of {dtype}, a dtype that mckpt lacks")
            if stated[name] is not None and tuple(stated[name]) != array.shape:
                raise SourceError(
                    f"{root}: {name} is {list(array.shape)}, and {METADATA} states {stated[name]};"
                    " copy the checkpoint again"
                )
        at = stamp(root / METADATA)
        self.objects = {
            key: Object(array.size * itemsize(array.dtype.name), str(at.bytes), at.mtime)
            for key, array in self.opened.items()
        }

    def _open(self, driver: str, ocdbt: bool, cache: int) -> dict[str, Any]:
        """Opens the arrays with the weights. cache: bytes of decoded chunks."""
        try:
            import tensorstore
        except ImportError:
            raise MissingExtra(
                f"{self.root}: Orbax checkpoints are read with tensorstore, which is not installed"
                " here: pip install 'mckpt[orbax]'"
            ) from None
        _keep_memory()
        place = sparse_copy.of(self.root)
        base: Any = {"driver": "file", "path": f"{self.root.resolve()}/"}
        if place is not None:
            if not place.url.startswith(("s3://", "gs://")):
                raise UsageError(f"{shown(str(self.root))}: copy the checkpoint here first")
            base = _in_store(f"{shown(str(self.root))}/")
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
        stored = {"driver": "ocdbt", "base": base} if ocdbt else base
        # a chunk that is not there is damage: it must not be read as zeros
        spec = {"driver": driver, "fill_missing_data_reads": False}
        try:
            kvstore = tensorstore.KvStore.open(stored, context=context).result()
            opening = {
                key: tensorstore.open(spec, kvstore=kvstore / f"{name}/", context=context)
                for key, name in self.names.items()
            }
            return {key: future.result() for key, future in opening.items()}
        except (ValueError, OSError) as e:
            _raise(self.root, e)

    def in_order(self, orders: Mapping[str, tuple[int, ...]]) -> Path:
        """Returns a directory with the objects as files, whose axes have other orders."""
        store = object.__new__(Arrays)  # not a copy, which would open the arrays again
        vars(store).update(vars(self), orders=orders)
        made = sparse_copy.load(shown(str(self.root)), store, self.root.name)
        if (there := sparse_copy.of(made)) is not None:
            there.is_remote = sparse_copy.of(self.root) is not None
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrays, (Path(shown(str(self.root))), self.orders)

    def list(self) -> dict[str, Object]:
        return self.objects

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> Any:
        """Returns a buffer of the bytes from `at` on; fewer at the end of the array.

        Raises SourceError if a chunk is damaged.
        """
        array = self.opened[name]
        order = self.orders.get(name) or tuple(range(array.ndim))
        item = itemsize(array.dtype.name)
        end = min(at + nbytes, self.objects[name].size)
        first, last = at // item, -(-end // item)
        parts = [np.empty(0, "u1")] * (first == last)
        try:
            for box in range_boxes([array.shape[axis] for axis in order], first, last):
                inside = [slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
                part = array[tuple(inside[order.index(axis)] for axis in range(array.ndim))]
                parts.append(_in_order(part.read(order="C").result().view(f"u{item}"), order))
        except (ValueError, OSError) as e:
            _raise(f"{self.root}/{self.names[name]}", e)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole[at - first * item : end - first * item].data


def _chunk_bytes(array: Any) -> int:
    """Returns the bytes of an array that tensorstore decodes at a time."""
    chunk = array.chunk_layout.read_chunk.shape or ()
    return math.prod(chunk) * array.dtype.numpy_dtype.itemsize


def _in_order(part: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of an array whose axes are put into an order."""
    ordered, first = part.transpose(order), len(order)
    if ordered.flags.c_contiguous:
        return ordered.reshape(-1).view("u1")
    while first and (first == len(order) or order[first - 1] < order[first]):
        first -= 1  # the last axes keep their order
    rows = ordered.reshape(math.prod(ordered.shape[:first]), -1)
    out = np.empty(rows.shape, rows.dtype)
    cast(rows, out)  # tensorstore and numpy would transpose 4 times slower
    return out.reshape(-1).view("u1")


def _keep_memory() -> None:
    """Lets the C library keep memory that is freed. tensorstore takes new memory for each chunk,
    and to get its pages from the kernel each time took three quarters of the time of a read.
    """
    with suppress(AttributeError):  # glibc alone has it
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC.values():
            mallopt(option, value)


def _in_store(url: str) -> Any:
    """Returns tensorstore's description of a URL, with the server and the region of the user's
    environment, which it does not read itself.
    """
    server, region = os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION")
    if not (url.startswith("s3://") and server):
        return url
    bucket, _, path = url.removeprefix("s3://").partition("/")
    place = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": server}
    return {**place, "aws_region": region or "us-east-1"}


def _raise(where: object, error: Exception) -> NoReturn:
    """Raises the error of tensorstore as one of the source."""
    text = str(error).split(" [")[0].split("\n")[0][:300]
    raise SourceError(f"{where}: cannot be read: {text}; copy the checkpoint again") from None
