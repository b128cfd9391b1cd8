"""What safetensors files hold, by their headers alone.

A file is 8 bytes of header length, a JSON header (dtype, shape, data_offsets), then the data without holes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import os
import re
import types
from collections import defaultdict
from typing import Annotated, Any, Literal

from mckpt import dtypes
from mckpt.errors import SourceError, StorageError
from mckpt.formats.entry import Entries, Kind
from mckpt.lazy import numpy as np

_METADATA = re.compile(rb'\{\s*"__metadata__"\s*:\s*\{[^{}]*\}\s*,')  # what most headers begin with, and is no tensor
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
LFS_POINTER = b"version https://git-lfs"  # what a clone without git-lfs holds in place of each large file
TOO_LARGE = 1 << 62  # bytes: no file has as many


def read(paths: list[str]) -> Entries:
    """The tensors of these files, file by file in the order of the data. SourceError says which bytes are wrong."""
    names: list[str] = []
    number: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(itertools.count().__next__)  # of each (dtype, shape)
    kinds, offsets = [np.empty(0, "i4")], [np.empty(0, "i8")]
    files = []  # where the data of each begin, its bytes, its tensors
    kind_of, offsets_of = operator.attrgetter("dtype", "shape"), operator.attrgetter("data_offsets")
    for path in paths:
        header, start, size = _read_header(path)
        names += header
        kinds.append(np.fromiter(map(number.__getitem__, map(kind_of, header.values())), "i4", len(header)))
        offsets.append(np.fromiter(itertools.chain.from_iterable(map(offsets_of, header.values())), "i8", 2 * len(header)))
        files.append((start, size, len(header)))
    starts, _, counts = np.array(files, "i8").reshape(-1, 3).T
    file = np.repeat(np.arange(len(paths)), counts)
    kind, (begin, end) = np.concatenate(kinds), np.concatenate(offsets).reshape(-1, 2).T
    if ((begin[1:] != end[:-1]) & (file[1:] == file[:-1])).any():
        order = np.lexsort((end, begin, file))
        names = [names[i] for i in order.tolist()]
        kind, begin, end = kind[order], begin[order], end[order]
    known = []
    for i, (code, shape) in enumerate(number):
        if code not in dtypes.OF_SAFETENSORS:
            row = int((kind == i).argmax())
            raise SourceError(f"{paths[file[row]]}: {names[row]}: unknown dtype {code!r}; known: {', '.join(dtypes.OF_SAFETENSORS)}")
        known.append(Kind(dtypes.OF_SAFETENSORS[code], shape))
    entries = Entries(names, known, kind, file, begin + starts[file])
    _without_holes(entries, paths, files, begin, end)
    return entries


def _without_holes(entries: Entries, paths: list[str], files: list[tuple[int, int, int]], begin: np.ndarray, end: np.ndarray) -> None:
    """Proves that the data of each file are its tensors, one behind the other. SourceError names the first that does not fit.

    `files`: where the data begin, bytes of the file, and tensors; `begin`, `end` [tensors]: bytes from there on.
    """

    def where(row: int) -> str:
        return f"{paths[entries.file[row]]}: {entries.names[row]}"

    nbytes = [math.prod(kind.shape) * dtypes.itemsize(kind.dtype) for kind in entries.kinds]
    wrong = end - begin != np.array([min(n, TOO_LARGE) for n in nbytes], "i8")[entries.kind]
    if wrong.any():
        row = int(wrong.argmax())
        kind = entries.kinds[entries.kind[row]]
        what = f"{dtypes.TABLE[kind.dtype].safetensors} {list(kind.shape)} takes {nbytes[entries.kind[row]]:,} bytes"
        raise SourceError(f"{where(row)}: {what}, and data_offsets give {end[row] - begin[row]:,}")
    before = np.roll(end, 1)
    before[np.flatnonzero(np.diff(entries.file, prepend=-1))] = 0  # the first of each file
    if (begin != before).any():
        row = int((begin != before).argmax())
        starts = f"starts at byte {begin[row]:,} of the data, and the tensor before it ends at {before[row]:,}"
        raise SourceError(f"{where(row)} {starts}: a hole or an overlap")
    last = -1
    for path, (start, size, count) in zip(paths, files, strict=True):
        last += count
        wanted = start + (int(end[last]) if count else 0)
        if size != wanted:
            what = "truncated; download or copy it again" if size < wanted else "padded"
            raise SourceError(f"{path}: {size:,} bytes, and its header describes {wanted:,}: {what}")


def pointer(path: str) -> SourceError:
    """What to say of a file that begins with LFS_POINTER."""
    return SourceError(f"{path}: is a pointer of git-lfs, not the file itself: run `git lfs pull` there")


def _read_header(path: str) -> tuple[dict[str, Any], int, int]:
    """What a safetensors file says of its tensors, the byte where their data begin, and the bytes of the file."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            first = f.read(8)
            if len(first) < 8:
                raise SourceError(f"{path}: has {size} bytes, and a safetensors file at least 8: download or copy it again")
            if first == LFS_POINTER[:8]:
                raise pointer(path)
            length = int.from_bytes(first, "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise SourceError(
                    f"{path}: says that its header has {length:,} bytes, and the file has {size:,}: truncated, or no safetensors file"
                )
            raw = f.read(length)
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}") from e
    return _header(path, raw), 8 + length, size


@functools.cache
def _tensor(dtype: Any) -> Any:
    """What a header says of one tensor, as a type for msgspec, which decodes JSON into it three times as fast as json into a dict."""
    import msgspec

    size: Any = Annotated[int, msgspec.Meta(ge=0)]
    at: Any = Annotated[int, msgspec.Meta(ge=0, lt=TOO_LARGE)]
    return msgspec.defstruct("Tensor", [("dtype", dtype), ("shape", tuple[size, ...]), ("data_offsets", tuple[at, at])], gc=False)


@functools.cache
def _decoder() -> Any:
    import msgspec

    every: Any = types.GenericAlias(dict, (str, _tensor(Literal[tuple(dtypes.OF_SAFETENSORS)])))  # one string for each, hashed once
    return msgspec.json.Decoder(every)


def _header(path: str, raw: bytes) -> dict[str, Any]:
    """The tensors of a header by key, each a `_tensor`; SourceError names the one that is none."""
    import msgspec

    metadata = _METADATA.match(raw)
    try:
        header: dict[str, Any] = _decoder().decode(b"{" + raw[metadata.end() :] if metadata else raw)
        if raw.count(b'"data_offsets"') == len(header):  # else a name may stand twice
            return header
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # what is wrong is found, and said, below

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [k for k, _ in pairs]
            raise SourceError(f"{path}: the header names {next(k for k in names if names.count(k) > 1)!r} twice")
        return out

    try:
        found = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: the header is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise SourceError(f"{path}: the header is no JSON object")
    found.pop("__metadata__", None)
    for key, t in found.items():
        try:
            found[key] = msgspec.convert(t, _tensor(str))
        except msgspec.ValidationError:
            raise SourceError(
                f"{path}: {key}: its dtype, shape and data_offsets are no name and sizes below 2**62: {str(t)[:200]}"
            ) from None
    return found
