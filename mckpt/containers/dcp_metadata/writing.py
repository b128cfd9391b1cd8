"""Writes a `.metadata`, piece by piece, as torch would pickle it."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Union

from mckpt.containers import safe_pickle
from mckpt.containers.dcp_metadata.reading import DCP, Index
from mckpt.containers.safe_pickle import Emitter, Record, emit_int, glob
from mckpt.lazy import numpy as np
from mckpt.storage.files import TargetFile


class Chunks(NamedTuple):
    """Chunks of one tensor that have the same sizes."""

    key: str
    offsets: np.ndarray  # [chunks, rank]
    sizes: Index


class Items(NamedTuple):
    """The places of some chunks, or of some objects, in items of one length."""

    keys: list[str]  # tensors; or objects, one for each item
    tensor: np.ndarray | None  # [items] index into `keys`; None for objects
    offsets: np.ndarray | None  # [items, rank] offsets of the chunks; None for objects
    file: np.ndarray  # [items] index into `files` of emit_metadata
    at: np.ndarray  # [items] offset in the file, bytes
    length: int  # bytes of each item


_Part = Union[bytes, "np.ndarray"]


class Rows(NamedTuple):
    """Bytes of a pickle that are made when they are written: `num` rows of `parts` side by side.

    A part is bytes, the same in each row, or an array, [1] or [num], of numbers in their stored
    form.
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
    """Bytes of a pickle that put strings into its memo, and leave nothing on the stack."""

    texts: list[str]

    @property
    def nbytes(self) -> int:
        return len("".join(self.texts).encode("utf-8", "surrogatepass")) + 7 * len(self.texts)

    def data(self) -> bytes:
        pack = struct.Struct("<I").pack
        raws = [text.encode("utf-8", "surrogatepass") for text in self.texts]
        return b"".join([b"X%b%b\x940" % (pack(len(raw)), raw) for raw in raws])


def metadata_file(path: str, pieces: list[Rows | Words]) -> TargetFile:
    """Describes a `.metadata` whose pieces are made one after the other when it is written."""
    starts = [0, *itertools.accumulate(piece.nbytes for piece in pieces)]
    return TargetFile(
        path,
        starts[-1],
        lambda crc_of: ((at, piece.data()) for at, piece in zip(starts[:-1], pieces, strict=True)),
    )


def emit_metadata(
    tensors: Mapping[str, tuple[str, Index]],
    objects: list[str],
    chunks: Iterable[Chunks],
    items: Iterable[Items],
    files: list[str],
) -> list[Rows | Words]:
    """Returns the pieces of a `.metadata`, pickle protocol 4 as torch writes it.

    tensors: key -> (dtype, global shape).
    objects: keys.
    chunks, items: all chunks of the tensors, and the places of all chunks and objects in `files`.

    It loops over no chunk, of which there may be 10**5. Values that repeat are put into the memo
    once and popped. Then all chunks of a tensor are rows of opcodes that differ in some numbers.
    A piece is made when it is written; a plan needs only its size.
    """
    e = Emitter()
    module = {"_StorageInfo": "torch.distributed.checkpoint.filesystem"}
    names = (
        "Metadata TensorStorageMetadata TensorProperties BytesStorageMetadata"
        " ChunkStorageMetadata MetadataIndex _StorageInfo"
    )
    new = {n: e.constant(glob(module.get(n, DCP), n)) + b")\x81" for n in names.split()}
    size_class = e.constant(glob("torch", "Size"))
    words = (
        "state_dict_metadata planner_data storage_data storage_meta"
        " properties size chunks offsets sizes fqn offset index relative_path length"
    )
    word = {w: e.constant(w) for w in words.split()}
    # torch before 2.2 wrote the global torch.strided instead of this call; both load everywhere
    layout: Record = glob("torch.serialization", "_get_layout")("torch.strided")
    encoding: Record = glob(DCP, "_MEM_FORMAT_ENCODING")(0)
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

    @functools.cache  # 10**3 tensors and their chunks have few different sizes and offsets
    def size(axes: Index) -> bytes:
        return b"".join((size_class, b"(", *map(emit_int, axes), b"t\x85R"))

    def size_of_each(offsets: np.ndarray) -> list[_Part]:  # torch writes offsets as sizes too
        if len(offsets) == 1:
            return [size(tuple(offsets[0].tolist()))]
        return [size_class, b"(", *(part for axis in offsets.T for part in _ints(axis)), b"t\x85R"]

    of_tensor: dict[str, list[Chunks]] = {}
    for each in chunks:
        of_tensor.setdefault(each.key, []).append(each)
    # protocol 4 has MEMOIZE, which `Words` uses
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
    """Returns the opcode and argument that push one number, or each of many numbers in as many
    bytes as the largest needs.
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
