"""Arrays that tensorstore finds and decodes, read as the objects of a store. An object has the
elements of one array, in the order of its axes.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mckpt.containers.zarr3 import files_of
from mckpt.errors import MissingExtra, SourceError, UsageError, shown
from mckpt.geometry.box import range_boxes
from mckpt.lazy import numpy as np
from mckpt.storage import sparse_copy
from mckpt.storage.files import stamp
from mckpt.storage.stores import Object, ReadOnly
from mckpt.values.dtypes import TABLE, in_order, itemsize

# bytes of decoded chunks that are kept: the next read may be of the same chunk
CACHE, CHUNKS = 64 << 20, 3
# of glibc's malloc.h: the number of an option, and its value
MALLOC = {"mmap_max": (-4, 0), "trim_threshold": (-1, 256 << 20), "arena_max": (-8, 1)}


class Group(NamedTuple):
    """Arrays below one directory, and how they are stored."""

    names: dict[str, str]  # of their directories, by the names of the objects
    driver: str  # zarr3 or zarr
    ocdbt: bool  # the files are in a database of this kind
    described: str  # the file that is written anew when the arrays are


class Arrays(ReadOnly):
    """The arrays of a group, as a store."""

    def __init__(
        self, root: Path, group: Group, orders: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Raises SourceError for damaged arrays, MissingExtra without tensorstore.

        orders: of the axes of some arrays, before their elements are put into C order.
        """
        self.root, self.group, self.orders = root, group, orders or {}
        self.refusal = f"{root}: an array, which mckpt only reads"
        self.opened = self._open(CACHE)
        for key, array in self.opened.items():
            if (dtype := array.dtype.name) not in TABLE:
                raise SourceError(f"{root}: {group.names[key]} is of {dtype}, which mckpt lacks")
        largest = max(
            math.prod(array.chunk_layout.read_chunk.shape or ()) * itemsize(array.dtype.name)
            for array in self.opened.values()
        )
        if CHUNKS * largest > CACHE:
            self.opened = self._open(CHUNKS * largest)
        at = stamp(root / group.described)
        self.objects = {
            key: Object(array.size * itemsize(array.dtype.name), str(at.bytes), at.mtime)
            for key, array in self.opened.items()
        }

    def _open(self, cache: int) -> dict[str, Any]:
        """Opens the arrays. cache: bytes of decoded chunks."""
        try:
            import tensorstore
        except ImportError:
            raise MissingExtra(
                f"{self.root}: its arrays are read with tensorstore, which is not installed here:"
                " pip install 'mckpt[orbax]'"
            ) from None
        _keep_memory()
        names, driver, ocdbt, _ = self.group
        base = _spec(self.root)
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
        stored = {"driver": "ocdbt", "base": base} if ocdbt else base
        # a chunk that is not there is damage: it must not be read as zeros
        spec = {"driver": driver, "fill_missing_data_reads": False}
        try:
            kvstore = tensorstore.KvStore.open(stored, context=context).result()
            opening = {
                key: tensorstore.open(spec, kvstore=kvstore / f"{name}/", context=context)
                for key, name in names.items()
            }
            return {key: future.result() for key, future in opening.items()}
        except (ValueError, OSError) as e:
            _raise(self.root, e)

    @cached_property
    def plain_files(self) -> dict[str, list[str]]:
        """Returns the files of each array below the root, as `zarr3.Array.files`, by key, if they
        need no decoding. Returns nothing if some do, or if one is damaged.
        """
        if sparse_copy.of(self.root) is not None:
            return {}
        found = dict[str, list[str]]()
        for key, array in self.opened.items():
            files = files_of(self.root / self.group.names[key], array.dtype.name, array.shape)
            found[key] = [f"{self.group.names[key]}/{file}" for file in files]
        return found if all(found.values()) else {}

    def in_order(self, orders: Mapping[str, tuple[int, ...]]) -> Path:
        """Returns a directory with the objects as files, whose axes have other orders."""
        store = object.__new__(Arrays)  # not a copy, which would open the arrays again
        vars(store).update(vars(self), orders=orders)
        made = sparse_copy.load(shown(str(self.root)), store, self.root.name)
        if (there := sparse_copy.of(made)) is not None:
            there.is_remote = sparse_copy.of(self.root) is not None
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrays, (Path(shown(str(self.root))), self.group, self.orders)

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
                parts.append(in_order(part.read(order="C").result().view(f"u{item}"), order))
        except (ValueError, OSError) as e:
            _raise(f"{self.root}/{self.group.names[name]}", e)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole[at - first * item : end - first * item].data


def _spec(path: Path) -> Any:
    """Returns how tensorstore, which reads stores itself, finds a directory. It does not read the
    server and the region of S3 that the user's environment names.
    """
    if sparse_copy.of(path) is None:
        return {"driver": "file", "path": f"{path.resolve()}/"}
    url = f"{shown(str(path))}/"
    if not url.startswith(("s3://", "gs://")):
        raise UsageError(f"{url}: tensorstore reads s3:// and gs:// alone; copy it here first")
    server, region = os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION")
    if not (server and url.startswith("s3://")):
        return url
    bucket, _, below = url.removeprefix("s3://").partition("/")
    place = {"driver": "s3", "bucket": bucket, "path": below, "endpoint": server}
    return {**place, "aws_region": region or "us-east-1"}


def _keep_memory() -> None:
    """Lets the C library keep memory that is freed. tensorstore takes new memory for each chunk,
    and to get its pages from the kernel each time took three quarters of the time of a read.
    """
    with suppress(AttributeError):  # glibc alone has it
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC.values():
            mallopt(option, value)


def _raise(where: object, error: Exception) -> NoReturn:
    """Raises the error of tensorstore as one of the source."""
    text = str(error).split(" [")[0].split("\n")[0][:300]
    raise SourceError(f"{where}: cannot be read: {text}; copy the checkpoint again") from None
