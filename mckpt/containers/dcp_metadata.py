"""The `.metadata` pickle of torch.distributed.checkpoint: which tensors a torch_dist directory
holds, in which chunks, at which bytes.

    state_dict_metadata   key -> dtype, global shape, [chunk: offsets, sizes]          (BytesStorageMetadata: an object)
    storage_data          (key, chunk offsets or None) -> file, offset, length         (an item of a .distcp, see torch_file)

Shapes, offsets and sizes of chunks are in elements, offsets and lengths of items in bytes. Read and
written without torch. Classes as pickled by torch 2.1 to 2.13 and by Megatron-Core 0.6 to main
(MCoreMetadata and MCoreSavePlan are dataclasses with more fields).
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from array import array
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Union

from mckpt.containers import safe_pickle
from mckpt.containers.safe_pickle import Emitter, Global, Record, emit_int, glob
from mckpt.errors import PickleError, SourceError, StorageError
from mckpt.lazy import distinct
from mckpt.lazy import numpy as np
from mckpt.values import dtypes

MAX_BYTES = 1 << 30  # of a .metadata: 356,352 chunks are 76 MB, with all_local_plans 106 MB
_DCP = "torch.distributed.checkpoint.metadata"
# as protocol 4 writes an attribute's name when it meets it first
_PLANS = b"\x8c\x0fall_local_plans\x94"

Index = tuple[int, ...]
Chunk = tuple[Index, Index]  # offsets, sizes
Tensor = tuple[str, Index, list[Chunk]]  # dtype, global shape, chunks
Item = tuple[str, int, int]  # file, offset, length


class Metadata(NamedTuple):
    """What a torch_dist directory holds.

    Proved: chunks tile their tensors, each chunk and object has an item, all items lie in files of
    the directory.
    """

    tensors: dict[str, Tensor]
    objects: list[str]  # keys
    items: dict[tuple[str, Index | None], Item]  # (key, chunk offsets; None for an object)
    planner_data: dict[str, Any] | None  # torch_dcp: key -> path in the nested state dict
    # Megatron-Core 0.6 to 0.15: key -> what it knows of flattened optimizer tensors
    mcore_data: dict[str, Any] | None


# ------------------------------------------------------------------------------------------ reading

# What there are 10**5 of, as small as they can be: each holds one tuple, which is what is kept. A
# state is emptied when it is read: the memo of the unpickler holds all of them to the end. It is no
# other object's: Python pickles an object's own __dict__.


class _Chunk:
    """ChunkStorageMetadata."""

    __slots__ = ("held",)
    held: Chunk

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.held = state["offsets"], state["sizes"]
        state.clear()


class _Index:
    """MetadataIndex."""

    __slots__ = ("held",)
    held: tuple[str, Index | None]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.held = state["fqn"], state.get("offset")
        state.clear()


class _Info:
    """_StorageInfo; `transformed`: its bytes are not those of a plain item."""

    __slots__ = ("held", "transformed")
    held: Item

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.held = state["relative_path"], state["offset"], state["length"]
        self.transformed = bool(state.get("transform_descriptors"))
        state.clear()


_CLASSES = {
    (_DCP, "ChunkStorageMetadata"): _Chunk,
    (_DCP, "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
}


def read_metadata(source: bytes | Path | str, where: str = "") -> Metadata:
    """The contents of a `.metadata`: its bytes or its path.

    Raises StorageError when it cannot be read, PickleError when it is no pickle of that kind,
    SourceError with all that is wrong in it.
    """
    if not isinstance(source, bytes):
        where = where or str(source)
        try:
            with open(source, "rb") as f:
                source = f.read(MAX_BYTES + 1)
        except OSError as e:
            raise StorageError(f"{where}: cannot be read: {e.strerror or e}") from e
    where = where or ".metadata"
    with safe_pickle.no_gc():
        return _checked(_load(source, where), where)


def _load(data: bytes, where: str) -> dict[str, Any]:
    # Megatron-Core appends every rank's save plan, which tells the same chunks again in as many
    # bytes; the attributes before it are read alone, when they are complete
    cut = data.find(_PLANS)
    if cut > 0:
        try:
            # the frame that the cut is in must still be as long as it says
            return _fields(data[:cut] + b"ub." + data[cut + 3 : cut + (1 << 20)], where)
        except PickleError:
            pass  # that text stood elsewhere
    return _fields(data, where)


def _fields(data: bytes, where: str) -> dict[str, Any]:
    return safe_pickle.fields(safe_pickle.loads(data, where, True, MAX_BYTES, classes=_CLASSES))


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
            problems.append(f"key {safe_pickle.short(key)} is no string")
        elif type(value).__name__ == "Global" and type(value).name == "BytesStorageMetadata":
            objects.append(key)
        else:
            try:
                tensors[key] = _tensor(value)
            except (KeyError, TypeError, IndexError, AttributeError):
                problems.append(
                    f"{key[:200]}: its description is none of a tensor or an object:"
                    f" {safe_pickle.short(value)}"
                )
    items = _items(stored, problems)
    for key, tensor in tensors.items():
        problems += [f"{key[:200]}: {p}" for p in _tiling(*tensor)]
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
    if problems:
        raise SourceError.of(f"{where}: is damaged:", problems)
    planner, mcore = md.get("planner_data"), md.get("mcore_data")
    return Metadata(
        tensors,
        objects,
        items,
        planner if type(planner) is dict else None,
        mcore if type(mcore) is dict else None,
    )


def _tensor(value: Any) -> Tensor:
    """A TensorStorageMetadata. Raises TypeError, KeyError or AttributeError when it is none."""
    state = value.state
    properties = state["properties"].state
    dtype = properties["dtype"] if type(properties) is dict else properties[0]
    if (
        not isinstance(dtype, Global)
        or type(state["size"]) is not tuple
        or type(state["chunks"]) is not list
    ):
        raise TypeError
    chunks: list[Chunk] = [chunk.held for chunk in state["chunks"]]
    if not set(map(type, itertools.chain.from_iterable(chunks))) <= {tuple}:
        raise TypeError
    return dtype.name, state["size"], chunks


def _items(stored: dict[Any, Any], problems: list[str]) -> dict[tuple[str, Index | None], Item]:
    items: dict[tuple[str, Index | None], Item] = {}
    files: set[str] = set()  # that were looked at
    for index, info in stored.items():
        if (
            isinstance(index, _Index)
            and isinstance(info, _Info)
            and hasattr(index, "held")
            and hasattr(info, "held")
        ):
            (key, offsets), (file, at, length), transformed = (
                index.held,
                info.held,
                info.transformed,
            )
        else:
            problems.append(
                f"an entry of storage_data is none: {safe_pickle.short(index)} ->"
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
            if not _is_plain(file):
                problems.append(
                    f"{key[:200]}: file {file[:200]!r} is no plain name inside the directory"
                )
        if transformed:
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


def _is_plain(file: str) -> bool:
    """Whether it names a file inside a directory, and nothing else."""
    return file not in ("", ".", "..") and not set("/\\\0") & set(file) and len(file) < 256


def _tiling(dtype: str, shape: Index, chunks: list[Chunk]) -> list[str]:
    """What is wrong with a tensor whose chunks must cover each of its elements once."""
    if dtype not in dtypes.TABLE:
        return [f"dtype {dtype[:80]} is not one that mckpt knows"]
    rank = len(shape)
    if (
        rank > 64
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
        or math.prod(shape) >= 1 << 60
    ):
        return [f"its shape is none, of rank {rank}"]
    ranks = (set(map(len, map(itemgetter(i), chunks))) for i in range(2))
    if set().union(*ranks) - {rank}:
        offsets, sizes = next(c for c in chunks if (len(c[0]), len(c[1])) != (rank, rank))
        return [f"a chunk of rank {len(offsets)} and {len(sizes)} in a tensor {list(shape)}"]
    boxes = np.empty((2, rank, len(chunks)), "i8")
    for i in range(2):
        flat = list(itertools.chain.from_iterable(map(itemgetter(i), chunks)))
        if set(map(type, flat)) - {int}:
            return ["a chunk whose offsets or sizes are no whole numbers"]
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
    # in two halves: the sum may be beyond 2**63
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
    """The offsets of two of the boxes [low, high) that overlap, or None.

    Boxes are [rank, n], none of them empty.

    A grid is settled by one sort: where all boxes are cells between the same cuts of each axis,
    equal offsets are the only way to overlap. Otherwise the boxes are swept along the first axis on
    which they differ, and each is compared with those still open.
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


# ------------------------------------------------------------------------------------------ writing


class Chunks(NamedTuple):
    """Some chunks of one tensor, all of one size."""

    key: str
    offsets: np.ndarray  # [chunks, rank]
    sizes: Index


class Items(NamedTuple):
    """Where some chunks lie, or some objects: in items of one length."""

    keys: list[str]  # of tensors, or of each object
    tensor: np.ndarray | None  # [items] index into `keys`; None for objects
    offsets: np.ndarray | None  # [items, rank] of chunks; None for objects
    file: np.ndarray  # [items] index into `files` of emit_metadata
    at: np.ndarray  # [items] bytes
    length: int


_Part = Union[bytes, "np.ndarray"]


class Rows(NamedTuple):
    """Bytes of a pickle whose number is known before they are made: `num` rows of `parts` side by
    side.

    A part is bytes, the same in each row, or an array, [1] or [num], of numbers as they are
    written.
    """

    num: int
    parts: list[_Part]

    @property
    def nbytes(self) -> int:
        return self.num * sum(
            [len(part) if isinstance(part, bytes) else part.itemsize for part in self.parts]
        )

    def data(self) -> bytes:
        if self.num < 2:
            return (
                b"".join(
                    [part if isinstance(part, bytes) else part.tobytes() for part in self.parts]
                )
                * self.num
            )
        columns: list[np.ndarray] = []
        same = b""
        for part in self.parts:
            if isinstance(part, bytes):
                same += part
            else:
                columns += [np.frombuffer(same, "u1"), part.reshape(-1, 1).view("u1")]
                same = b""
        columns.append(np.frombuffer(same, "u1"))
        return np.concatenate(
            [np.broadcast_to(column, (self.num, column.shape[-1])) for column in columns], 1
        ).tobytes()


class Words(NamedTuple):
    """Bytes of a pickle that put strings into its memo, with the next numbers, and leave nothing on
    the stack.
    """

    texts: list[str]

    @property
    def nbytes(self) -> int:
        return len("".join(self.texts).encode("utf-8", "surrogatepass")) + 7 * len(self.texts)

    def data(self) -> bytes:
        pack = struct.Struct("<I").pack
        raws = [text.encode("utf-8", "surrogatepass") for text in self.texts]
        return b"".join([b"X%b%b\x940" % (pack(len(raw)), raw) for raw in raws])


def emit_metadata(
    tensors: Mapping[str, tuple[str, Index]],
    objects: list[str],
    chunks: Iterable[Chunks],
    items: Iterable[Items],
    files: list[str],
) -> list[Rows | Words]:
    """The `.metadata` pickle, protocol 4 as torch writes it, piece by piece. tensors: key ->
    (dtype, global shape).

    What `chunks` and `items` name is all in the others.

    Of 10**5 chunks none is walked: what repeats is put into the memo once and popped, and then all
    chunks of a tensor are rows of opcodes that differ in some numbers. A piece is made when it is
    written: a plan asks for its size alone.
    """
    e = Emitter()
    module = {"_StorageInfo": "torch.distributed.checkpoint.filesystem"}
    names = (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
    )
    new = {n: e.constant(glob(module.get(n, _DCP), n)) + b")\x81" for n in (*names, "_StorageInfo")}
    size_class = e.constant(glob("torch", "Size"))
    attributes = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta")
    words = (
        "properties",
        "size",
        "chunks",
        "offsets",
        "sizes",
        "fqn",
        "offset",
        "index",
        "relative_path",
        "length",
    )
    word = {w: e.constant(w) for w in (*attributes, *words)}
    # torch before 2.2 wrote the global torch.strided instead of this call; both load everywhere
    layout: Record = glob("torch.serialization", "_get_layout")("torch.strided")
    encoding: Record = glob(_DCP, "_MEM_FORMAT_ENCODING")(0)
    rest = b"".join((e.constant(layout), b"\x89", e.constant(encoding), b"\x89tb"))
    dtype_of = {
        name: e.constant(safe_pickle.torch_dtype(name))
        for name in dict.fromkeys(dtype for dtype, _ in tensors.values())
    }

    texts = list(dict.fromkeys([*tensors, *objects, *files]))
    number = dict(zip(texts, range(e.num_memo, e.num_memo + len(texts)), strict=True))
    file_number = np.array([number[file] for file in files], "<u4")

    def strings(which: list[str], of: np.ndarray | None = None) -> list[_Part]:
        numbers = np.fromiter(map(number.__getitem__, which), "<u4", len(which))
        return [b"j", numbers if of is None else numbers[of]]

    @functools.cache  # 10**3 tensors and their chunks have a few sizes, and begin at a few offsets
    def size(axes: Index) -> bytes:
        return b"".join((size_class, b"(", *map(emit_int, axes), b"t\x85R"))

    def size_of_each(offsets: np.ndarray) -> list[_Part]:  # torch writes offsets as sizes too
        if len(offsets) == 1:
            return [size(tuple(offsets[0].tolist()))]
        return [size_class, b"(", *(part for axis in offsets.T for part in _ints(axis)), b"t\x85R"]

    of_tensor: dict[str, list[Chunks]] = {}
    for each in chunks:
        of_tensor.setdefault(each.key, []).append(each)
    # PROTO 4, which has MEMOIZE
    out: list[Rows | Words] = [Rows(1, [b"\x80\x04", bytes(e.out[2:])]), Words(texts)]
    out.append(Rows(1, [new["Metadata"], b"}(", word["state_dict_metadata"], b"}("]))
    out.append(Rows(len(objects), [*strings(objects), new["BytesStorageMetadata"]]))
    for key, (dtype, shape) in tensors.items():
        head = [
            *strings([key]),
            new["TensorStorageMetadata"],
            b"}(",
            word["properties"],
            new["TensorProperties"],
            b"(",
        ]
        out.append(
            Rows(
                1, [*head, dtype_of[dtype], rest, word["size"], size(shape), word["chunks"], b"]("]
            )
        )
        for alike in of_tensor.get(key, ()):
            start = [
                new["ChunkStorageMetadata"],
                b"}(",
                word["offsets"],
                *size_of_each(alike.offsets),
            ]
            out.append(Rows(len(alike.offsets), [*start, word["sizes"], size(alike.sizes), b"ub"]))
        out.append(Rows(1, [b"eub"]))
    out.append(Rows(1, [b"u", word["planner_data"], b"N", word["storage_data"], b"}("]))
    index, info = (
        new["MetadataIndex"] + b"}(" + word["fqn"],
        word["index"] + b"Nub" + new["_StorageInfo"] + b"}(" + word["relative_path"],
    )
    for some in items:
        where: list[_Part] = [
            word["offset"],
            *([b"N"] if some.offsets is None else size_of_each(some.offsets)),
        ]
        path: list[_Part] = [
            info,
            b"j",
            file_number[some.file],
            word["offset"],
            *_ints(some.at),
            word["length"],
            *_ints(some.length),
        ]
        out.append(
            Rows(len(some.at), [index, *strings(some.keys, some.tensor), *where, *path, b"ub"])
        )
    out.append(Rows(1, [b"u", word["storage_meta"], b"Nub."]))
    return out


def _ints(values: np.ndarray | int) -> list[_Part]:
    """Opcode and argument of a number, or of many of them, in as many bytes as the
    largest needs.
    """
    if isinstance(values, int) or len(values) == 1:
        return [emit_int(values if isinstance(values, int) else int(values[0]))]
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low >= 0 and high < 1 << 16:
        return [b"K", values.astype("u1")] if high < 1 << 8 else [b"M", values.astype("<u2")]
    return (
        [b"J", values.astype("<i4")]
        if low >= -(1 << 31) and high < 1 << 31
        else [b"\x8a\x08", values.astype("<i8")]
    )
