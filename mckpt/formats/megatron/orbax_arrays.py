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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mckpt.errors import MissingExtra, SourceError, UsageError, shown
from mckpt.geometry.box import range_boxes
from mckpt.lazy import numpy as np
from mckpt.storage import sparse_copy
from mckpt.storage.files import read_json, stamp
from mckpt.storage.stores import Object
from mckpt.values.dtypes import TABLE, cast, itemsize

METADATA = "_METADATA"
MANIFEST = "manifest.ocdbt"
WEIGHTS = "params"  # begins the names of the weights: once in MaxText's form for NNX, else twice
NNX = ".value"  # and ends them in that form
# bytes of decoded chunks that are kept: the next read may be of the same chunk
CACHE, CHUNKS = 64 << 20, 3
# of glibc's malloc.h: the number of an option, and its value
MALLOC = {"mmap_max": (-4, 0), "trim_threshold": (-1, 256 << 20), "arena_max": (-8, 1)}


class Array(NamedTuple):
    """An array of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    opened: Any  # by tensorstore

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes that are decoded at a time."""
        chunk = self.opened.chunk_layout.read_chunk.shape or ()
        return math.prod(chunk) * itemsize(self.dtype)


class Arrays:
    """The arrays with the weights of a checkpoint, and the names of all others."""

    def __init__(self, root: Path) -> None:
        """Raises SourceError if the checkpoint is damaged, MissingExtra without tensorstore."""
        self.root = root
        found = read_json(root / METADATA, 1 << 30)
        try:
            ocdbt, driver = found["use_ocdbt"], "zarr3" if found["use_zarr3"] else "zarr"
            names = {
                ".".join(str(part["key"]) for part in entry["key_metadata"]): entry
                for entry in found["tree_metadata"].values()
                if not entry["value_metadata"].get("skip_deserialize")
            }
        except (KeyError, TypeError, AttributeError) as e:
            raise SourceError(
                f"{root / METADATA}: does not describe the arrays of an Orbax checkpoint: {e!r};"
                " copy it again"
            ) from e
        weights = [name for name in names if name.startswith(f"{WEIGHTS}.")]
        if not weights:
            raise SourceError(
                f"{root}: has no arrays below `{WEIGHTS}`, where MaxText has the weights; it has"
                f" {', '.join(list(names)[:3]) or 'none'}; give the items of a training of MaxText"
            )
        self.others = [name for name in names if name not in weights]
        ending = NNX if all(name.endswith(NNX) for name in weights) else ""
        self.files = {
            name.removesuffix(ending).replace(f"{WEIGHTS}.", "", 2): name for name in weights
        }
        if len(self.files) < len(weights):
            raise SourceError(f"{root / METADATA}: has two arrays of one name; copy it again")
        self.arrays = self._open(driver, ocdbt, CACHE)
        largest = max((a.chunk_bytes for a in self.arrays.values()), default=0)
        if CHUNKS * largest > CACHE:
            self.arrays = self._open(driver, ocdbt, CHUNKS * largest)
        for key, array in self.arrays.items():
            stated = names[self.files[key]]["value_metadata"].get("write_shape")
            if stated is not None and tuple(stated) != array.shape:
                raise SourceError(
                    f"{root}: {self.files[key]} is {list(array.shape)}, and {METADATA} states"
                    f" {stated}; copy the checkpoint again"
                )

    def _open(self, driver: str, ocdbt: bool, cache: int) -> dict[str, Array]:
        """Opens the arrays with the weights. cache: bytes of decoded chunks."""
        try:
            import tensorstore
        except ImportError:
            raise MissingExtra(
                f"{self.root}: Orbax checkpoints are read with tensorstore, which is not installed"
                " here: pip install 'mckpt[orbax]'"
            ) from None
        _keep_memory()
        copy = sparse_copy.of(self.root)
        base: Any = {"driver": "file", "path": f"{self.root.resolve()}/"}
        if copy is not None:
            if not copy.url.startswith(("s3://", "gs://")):
                raise UsageError(f"{shown(str(self.root))}: copy the checkpoint here first")
            base = _in_store(f"{shown(str(self.root))}/")
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
        stored = {"driver": "ocdbt", "base": base} if ocdbt else base
        try:
            kvstore = tensorstore.KvStore.open(stored, context=context).result()
            opening = {
                key: tensorstore.open(
                    # a chunk that is not there is damage: it must not be read as zeros
                    {"driver": driver, "fill_missing_data_reads": False},
                    kvstore=kvstore / f"{name}/",
                    context=context,
                    read=True,
                    open=True,
                )
                for key, name in self.files.items()
            }
            opened = {key: future.result() for key, future in opening.items()}
        except (ValueError, OSError) as e:
            _raise(self.root, e)
        out = {key: Array(a.dtype.name, tuple(a.shape), a) for key, a in opened.items()}
        if strange := [f"{k} {a.dtype}" for k, a in out.items() if a.dtype not in TABLE]:
            raise SourceError(f"{self.root}: arrays of a dtype that mckpt lacks: {strange[0]}")
        return out

    def in_order(self, orders: Mapping[str, tuple[int, ...]]) -> Path:
        """Returns a directory with a file for each array, which has its elements in C order, after
        its axes were put into the order of `orders`, if that has one.
        """
        store = ArrayStore(self, dict(orders))
        made = sparse_copy.load(shown(str(self.root)), store, self.root.name)
        if (copy := sparse_copy.of(made)) is not None:
            copy.is_remote = sparse_copy.of(self.root) is not None
        return made


class ArrayStore:
    """The elements of each array as a store. It is only read."""

    def __init__(self, arrays: Arrays, orders: Mapping[str, tuple[int, ...]]) -> None:
        self.of, self.orders = arrays, orders
        at = stamp(arrays.root / METADATA)
        self.objects = {
            key: Object(math.prod(a.shape) * itemsize(a.dtype), str(at.bytes), at.mtime)
            for key, a in arrays.arrays.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (shown(str(self.of.root)), self.orders)

    def list(self) -> dict[str, Object]:
        return self.objects

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> Any:
        """Returns a buffer of the bytes from `at` on; fewer at the end of the array.

        Raises SourceError if a chunk is damaged.
        """
        array = self.of.arrays[name]
        order = self.orders.get(name) or tuple(range(len(array.shape)))
        shape = tuple(array.shape[axis] for axis in order)
        item = itemsize(array.dtype)
        end = min(at + nbytes, self.objects[name].size)
        first, last = at // item, -(-end // item)
        parts = []
        try:
            for box in range_boxes(shape, first, last):
                inside = [slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
                stored = tuple(inside[order.index(axis)] for axis in range(len(order)))
                part = array.opened[stored].read(order="C").result()
                parts.append(_in_order(part.view(f"u{item}"), order))
        except (ValueError, OSError) as e:
            _raise(f"{self.of.root}/{self.of.files[name]}", e)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, "u1")])
        return whole[at - first * item : end - first * item].data

    def write(self, name: str, data: bytes | Path) -> str:
        raise UsageError(f"{self.of.root}: an array of Orbax, which mckpt only reads")

    def remove(self, names: Iterable[str]) -> None:
        raise UsageError(f"{self.of.root}: an array of Orbax, which mckpt only reads")


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


def _again(root: str, orders: Mapping[str, tuple[int, ...]]) -> ArrayStore:
    """Returns the store of another process."""
    return ArrayStore(Arrays(Path(root)), orders)


def _raise(where: object, error: Exception) -> NoReturn:
    """Raises the error of tensorstore as one of the source."""
    text = str(error).split(" [")[0].split("\n")[0][:300]
    raise SourceError(f"{where}: cannot be read: {text}; copy the checkpoint again") from None
