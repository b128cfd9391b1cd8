"""Reads a `.metadata`, and proves that its chunks tile their tensors."""

from __future__ import annotations

import itertools
import math
from array import array
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle
from mckpt.containers.safe_pickle import Global, Record
from mckpt.errors import PickleError, SourceError
from mckpt.lazy import distinct
from mckpt.lazy import numpy as np
from mckpt.storage.files import unreadable
from mckpt.values import dtypes

MAX_BYTES = 1 << 30  # of a .metadata: 356,352 chunks are 76 MB, with all_local_plans 106 MB
# the module of most classes in a .metadata
DCP = "torch.distributed.checkpoint.metadata"
# the name of this attribute as protocol 4 writes it for the first time
_PLANS = b"\x8c\x0fall_local_plans\x94"

Index = tuple[int, ...]
Chunk = tuple[Index, Index]  # offsets, sizes
Tensor = tuple[str, Index, list[Chunk]]  # dtype, global shape, chunks
Item = tuple[str, int, int]  # file, offset, length


class Metadata(NamedTuple):
    """The contents of a torch_dist directory.

    It is proven that chunks tile their tensors, that each chunk and object has an item, and that
    all items lie in files of the directory.
    """

    tensors: dict[str, Tensor]
    objects: list[str]  # keys
    items: dict[tuple[str, Index | None], Item]  # (key, chunk offsets; None for an object)
    # Megatron-Core 0.6 to 0.15: the shapes of tensors whose shards are stored as ranges of their
    # elements, by key
    flattened: dict[str, Index]


# There are 10**5 objects of each of these classes, so they are as small as possible: each holds one
# tuple, which is kept. They empty the state that they are given, because the memo of the unpickler
# holds all states to the end. No other object shares the state: Python pickles an object's own
# __dict__.


class _Chunk:
    """A ChunkStorageMetadata."""

    __slots__ = ("value",)
    value: Chunk

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["offsets"], state["sizes"]
        state.clear()


class _Index:
    """A MetadataIndex."""

    __slots__ = ("value",)
    value: tuple[str, Index | None]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["fqn"], state.get("offset")
        state.clear()


class _Info:
    """A _StorageInfo; `transformed` means that its bytes are compressed or otherwise encoded."""

    __slots__ = ("transformed", "value")
    value: Item

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["relative_path"], state["offset"], state["length"]
        self.transformed = bool(state.get("transform_descriptors"))
        state.clear()


_CLASSES = {
    (DCP, "ChunkStorageMetadata"): _Chunk,
    (DCP, "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
}


def read_metadata(source: bytes | Path | str, where: str = "") -> Metadata:
    """Returns the contents of a `.metadata`, given as bytes or as a path.

    Raises StorageError if the file cannot be read, PickleError if it is not a pickle of that kind,
    and SourceError with all problems of its contents.
    """
    if not isinstance(source, bytes):
        where = where or str(source)
        try:
            with open(source, "rb") as f:
                source = f.read(MAX_BYTES + 1)
        except OSError as e:
            raise unreadable(where, e) from e
    where = where or ".metadata"
    with safe_pickle.no_gc():
        return _checked(_load(source, where), where)


def _load(data: bytes, where: str) -> dict[str, Any]:
    # Megatron-Core appends every rank's save plan, which repeats the chunks in as many bytes. If
    # the attributes before it are complete, only they are read.
    cut = data.find(_PLANS)
    if cut > 0:
        try:
            # bytes behind the STOP fill the frame in which the cut is up to its stated length
            return _fields(data[:cut] + b"ub." + data[cut + 3 : cut + (1 << 20)], where)
        except PickleError:
            pass  # those bytes were not the attribute's name
    return _fields(data, where)


def _fields(data: bytes, where: str) -> dict[str, Any]:
    record = safe_pickle.loads(data, where, True, MAX_BYTES, classes=_CLASSES)
    return safe_pickle.fields(record, where)


def _checked(md: dict[str, Any], where: str) -> Metadata:
    problems: list[str] = []
    tensors: dict[str, Tensor] = {}
    objects: list[str] = []
    described, stored = md.get("state_dict_metadata"), md.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise SourceError(
            f"{where}: has no state_dict_metadata or no storage_data: not a .metadata of"
            " torch.distributed.checkpoint"
        )
    for key, value in described.items():
        if type(key) is not str:
            problems.append(f"key {safe_pickle.short(key)} is not a string")
        elif isinstance(value, Record) and type(value).name == "BytesStorageMetadata":
            objects.append(key)
        else:
            try:
                tensors[key] = _tensor(value)
            except (KeyError, TypeError, IndexError, AttributeError):
                problems.append(
                    f"{key[:200]}: its description is that of neither a tensor nor an object:"
                    f" {safe_pickle.short(value)}"
                )
    items = _items(stored, problems)
    for key, tensor in tensors.items():
        if wrong := _tiling(*tensor):
            problems += [f"{key[:200]}: {p}" for p in wrong]
            continue
        offsets = list(map(itemgetter(0), tensor[2]))
        if not all(map(items.__contains__, zip(itertools.repeat(key), offsets))):
            missing = [o for o in offsets if (key, o) not in items]
            problems.append(
                f"{key[:200]}: {len(missing)} of {len(offsets)} chunks have no item, the first at"
                f" {list(missing[0])}"
            )
    problems += [
        f"{key[:200]}: an object without an item" for key in objects if (key, None) not in items
    ]
    mcore = md.get("mcore_data")
    flattened = _flattened(mcore if type(mcore) is dict else {}, tensors, problems)
    if problems:
        raise SourceError.of(f"{where}: is damaged:", problems)
    return Metadata(tensors, objects, items, flattened)


def _flattened(
    mcore: dict[Any, Any], tensors: dict[str, Tensor], problems: list[str]
) -> dict[str, Index]:
    """Returns the shapes of the tensors that are stored as [shards along each axis, elements]."""
    out: dict[str, Index] = {}
    for key, data in mcore.items():
        shape = data.get("nd_reformulated_orig_global_shape") if type(data) is dict else None
        if shape is None or key not in tensors:
            continue
        size = tensors[key][1]
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else ()
        if (
            len(size) != len(shape) + 1
            or not all(type(n) is int for n in shape)
            or any(ways < 1 or n % ways for n, ways in zip(shape, size[:-1], strict=True))
            or math.prod(shape) != math.prod(size)
        ):
            problems.append(
                f"{key[:200]}: is {list(size)}, which no shards of {list(shape)} can be"
            )
            continue
        out[key] = shape
    return out


def _tensor(value: Any) -> Tensor:
    """Reads a TensorStorageMetadata.

    Raises TypeError, KeyError, IndexError or AttributeError for anything else.
    """
    state = value.state
    properties = state["properties"].state
    dtype = properties["dtype"] if type(properties) is dict else properties[0]
    if (
        not isinstance(dtype, Global)
        or type(state["size"]) is not tuple
        or type(state["chunks"]) is not list
    ):
        raise TypeError
    chunks: list[Chunk] = [chunk.value for chunk in state["chunks"]]
    if not set(map(type, itertools.chain.from_iterable(chunks))) <= {tuple}:
        raise TypeError
    return dtype.name, state["size"], chunks


def _items(stored: dict[Any, Any], problems: list[str]) -> dict[tuple[str, Index | None], Item]:
    items: dict[tuple[str, Index | None], Item] = {}
    files: set[str] = set()  # names that were checked
    for index, info in stored.items():
        if (
            isinstance(index, _Index)
            and isinstance(info, _Info)
            and hasattr(index, "value")
            and hasattr(info, "value")
        ):
            (key, offsets), (file, at, length) = index.value, info.value
        else:
            problems.append(
                f"an entry of storage_data has other types: {safe_pickle.short(index)} ->"
                f" {safe_pickle.short(info)}"
            )
            continue
        if (
            type(key) is not str
            or type(file) is not str
            or type(at) is not int
            or type(length) is not int
            or at < 0
            or length < 0
        ):
            problems.append(
                f"an item of {safe_pickle.short(key)}: file {safe_pickle.short(file)}, offset"
                f" {safe_pickle.short(at)}, length {safe_pickle.short(length)}"
            )
            continue
        if file not in files:
            files.add(file)
            if not _is_file_name(file):
                problems.append(
                    f"{key[:200]}: file {file[:200]!r} is not a file name inside the directory"
                )
        if info.transformed:
            problems.append(
                f"{key[:200]}: its item is compressed or otherwise transformed, which mckpt does"
                " not read"
            )
        if offsets is not None and (
            type(offsets) is not tuple or not all(type(n) is int for n in offsets)
        ):
            problems.append(f"{key[:200]}: an item at {safe_pickle.short(offsets)}")
            continue
        if (key, offsets) in items:
            problems.append(f"{key[:200]}: has two items for the chunk at {offsets}"[:300])
        items[key, offsets] = (file, at, length)
    return items


def _is_file_name(file: str) -> bool:
    """Whether a string is the name of a file in a directory: no path, and not empty."""
    return file not in ("", ".", "..") and not set("/\\\0") & set(file) and len(file) < 256


def possible(shape: tuple[Any, ...]) -> bool:
    """Returns whether a tensor can have this shape: offsets in bytes then fit 64 bits."""
    sizes = len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    return sizes and math.prod(shape) < 1 << 60


def _tiling(dtype: str, shape: Index, chunks: list[Chunk]) -> list[str]:
    """Returns the problem, if there is one, of chunks that do not cover each element once."""
    if dtype not in dtypes.TABLE:
        return [f"dtype {dtype[:80]} is not one that mckpt knows"]
    rank = len(shape)
    if not possible(shape):
        return [f"its shape, of rank {rank}, has sizes that no tensor has"]
    ranks = (set(map(len, map(itemgetter(i), chunks))) for i in range(2))
    if set().union(*ranks) - {rank}:
        offsets, sizes = next(c for c in chunks if (len(c[0]), len(c[1])) != (rank, rank))
        return [f"a chunk of rank {len(offsets)} and {len(sizes)} in a tensor {list(shape)}"]
    boxes = np.empty((2, rank, len(chunks)), "i8")
    for i in range(2):
        flat = list(itertools.chain.from_iterable(map(itemgetter(i), chunks)))
        if set(map(type, flat)) - {int}:
            return ["a chunk whose offsets or sizes are not whole numbers"]
        try:
            numbers = array("q", flat)
        except OverflowError:
            return [f"a chunk with offsets or sizes beyond 2**63 in a tensor {list(shape)}"]
        boxes[i] = np.array(numbers).reshape(len(chunks), rank).T
    low, size = boxes
    most = np.array(shape, "i8").reshape(-1, 1)
    outside = ((low < 0) | (size < 0) | (low > most) | (size > most - low)).any(0)
    if outside.any():
        i = int(outside.argmax())
        return [
            f"chunk at {low[:, i].tolist()} of {size[:, i].tolist()} reaches out of the tensor"
            f" {list(shape)}"
        ]
    each = size.prod(0)
    # in two halves, because the sum may exceed 2**63
    volume = (int((each >> 30).sum()) << 30) + int((each & (1 << 30) - 1).sum())
    if volume != math.prod(shape):
        return [
            f"its {len(chunks)} chunks hold {volume} elements, the tensor {list(shape)} has"
            f" {math.prod(shape)}"
        ]
    filled = each > 0
    clash = (
        _overlap(low, low + size)
        if filled.all()
        else _overlap(low[:, filled], (low + size)[:, filled])
    )
    return (
        [f"chunks at {clash[0].tolist()} and {clash[1].tolist()} overlap"]
        if clash is not None
        else []
    )


def _overlap(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the offsets of two of the boxes [low, high) that overlap, or None.

    low, high: [rank, number of boxes]; no box is empty.

    One sort is enough for a grid: if all boxes are cells between the same cuts of each axis, two
    boxes overlap only if their offsets are equal. Otherwise it sweeps the boxes along the axis with
    the most cuts, and compares each box with those that are still open.
    """
    rank, n = low.shape
    if n < 2:
        return None
    cells = np.zeros((rank, n), "i8")
    regular = True
    for d in range(rank):
        cuts = distinct(low[d])
        if len(cuts) > 1:
            cells[d] = np.searchsorted(cuts, low[d])
        ends = np.append(cuts[1:], np.iinfo("i8").max)
        regular = regular and bool((high[d] <= ends[cells[d]]).all())
    order = np.lexsort(cells[::-1])
    cells = cells[:, order]
    same = (cells[:, 1:] == cells[:, :-1]).all(0)
    if same.any():
        i = int(same.argmax())
        return low[:, order[i]], low[:, order[i + 1]]
    if regular:
        return None
    axis = max(range(rank), key=lambda d: len(distinct(low[d])))
    order = np.argsort(low[axis], kind="stable")
    low, high = low[:, order], high[:, order]
    alive = np.zeros(0, "i8")
    for i in range(n):
        alive = alive[high[axis, alive] > low[axis, i]]
        hit = ((low[:, alive] < high[:, i : i + 1]) & (low[:, i : i + 1] < high[:, alive])).all(0)
        if hit.any():
            return low[:, alive[hit.argmax()]], low[:, i]
        alive = np.append(alive, i)
    return None
