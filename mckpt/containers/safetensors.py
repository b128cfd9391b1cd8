"""Reads the headers of safetensors files: which tensors they hold, and at which bytes.

A file is 8 bytes of header length, a JSON header (dtype, shape, data_offsets), then the data
without holes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from mckpt.containers.entries import Columns, Entries, Kind
from mckpt.errors import SourceError
from mckpt.storage import descriptors
from mckpt.storage.files import LFS_POINTER, opened, pointer
from mckpt.values import dtypes

# the entry with which most headers begin; it does not describe a tensor
_METADATA = re.compile(rb'\{\s*"__metadata__"\s*:\s*\{[^{}]*\}\s*,')
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
TOO_LARGE = 1 << 62  # bytes; more than any file has
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=TOO_LARGE)]
if TYPE_CHECKING:
    _Code = str
else:  # a Literal is decoded as one string object for each dtype, which is hashed once
    _Code = Literal[tuple(dtypes.OF_SAFETENSORS)]


class Tensor(msgspec.Struct, gc=False):
    """The description of a tensor in a header.

    msgspec decodes JSON into this type three times as fast as json decodes it into a dict.
    """

    dtype: _Code
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Offset, _Offset]


_DECODER = msgspec.json.Decoder(dict[str, Tensor])


def read(paths: list[str]) -> Entries:
    """Returns the tensors of these files, file by file, in the order of their data.

    Raises StorageError if a file cannot be read, SourceError if a header is damaged or does not
    describe each byte of its file once.

    It uses no numpy, whose import takes 60 to 150 ms: as long as reading the headers of some 10**5
    tensors.
    """
    names: list[str] = []
    kind, file, at = array("i"), array("i"), array("q")
    # (dtype, shape) -> index into `kinds`
    number: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(itertools.count().__next__)
    kinds: list[Kind] = []
    sizes: list[int] = []  # bytes of a tensor of each kind
    kind_of, offsets_of = operator.attrgetter("dtype", "shape"), operator.attrgetter("data_offsets")
    for i, path in enumerate(paths):
        header, start, size = _read_header(path)
        keys, numbers = list(header), list(map(number.__getitem__, map(kind_of, header.values())))
        for code, shape in itertools.islice(number, len(kinds), None):
            kinds.append(Kind(dtypes.OF_SAFETENSORS[code], shape))
            # no offsets match a size of TOO_LARGE
            sizes.append(min(TOO_LARGE, math.prod(shape) * dtypes.itemsize(kinds[-1].dtype)))
        ends = [0, *itertools.accumulate(map(sizes.__getitem__, numbers))]
        if not all(map(operator.eq, map(offsets_of, header.values()), itertools.pairwise(ends))):
            offsets = list(map(offsets_of, header.values()))
            order = sorted(range(len(keys)), key=offsets.__getitem__)
            keys, numbers, offsets = (
                [keys[k] for k in order],
                [numbers[k] for k in order],
                [offsets[k] for k in order],
            )
            _without_holes(path, keys, [kinds[n] for n in numbers], offsets)
            ends = [0, *(end for _, end in offsets)]
        if size != start + ends[-1]:
            wrong = "is truncated" if size < start + ends[-1] else "has bytes behind its tensors"
            raise SourceError(
                f"{path}: the file has {size:,} bytes, but its header describes"
                f" {start + ends[-1]:,}: it {wrong}; download or copy it again"
            )
        names += keys
        kind.fromlist(numbers)
        file += array("i", [i]) * len(keys)
        at.fromlist([start + end for end in ends[:-1]])
    return Entries(names, kinds, Columns(kind, file, at))


def _without_holes(
    path: str, keys: list[str], kinds: list[Kind], offsets: list[tuple[int, int]]
) -> None:
    """Proves that the data of a file consist of its tensors, without holes or overlaps.

    The arguments are in the order of the data. Raises SourceError for the first tensor that does
    not fit.
    """
    before = 0
    for key, (dtype, shape, _), (begin, end) in zip(keys, kinds, offsets, strict=True):
        nbytes = math.prod(shape) * dtypes.itemsize(dtype)
        if end - begin != nbytes:
            many = f"{nbytes:,}" if nbytes < TOO_LARGE else "2**62 or more"
            what = f"{dtypes.TABLE[dtype].safetensors} {list(shape)} takes {many} bytes"
            raise SourceError(f"{path}: {key}: {what}, and data_offsets give {end - begin:,}")
        if begin != before:
            starts = (
                f"starts at byte {begin:,} of the data, and the tensor before it ends at {before:,}"
            )
            raise SourceError(f"{path}: {key} {starts}: a hole or an overlap")
        before = end


def metadata(path: str) -> dict[str, Any]:
    """Returns the texts that a program put into the header of a file; nothing if it put none, or
    if the header is not JSON, which `read` reports.
    """
    try:
        found = json.loads(_raw_header(path)[0])["__metadata__"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_header(path: str) -> tuple[dict[str, Tensor], int, int]:
    """Returns the tensors of a header by key, the offset of their data, and the file's size."""
    raw, size = _raw_header(path)
    return _header(path, raw), 8 + len(raw), size


def _raw_header(path: str) -> tuple[bytearray, int]:
    """Returns the JSON of a header, and the file's size."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        first = descriptors.pread(fd, 8, 0)
        if len(first) < 8:
            raise SourceError(
                f"{path}: has {size} bytes, but a safetensors file has at least 8; download or copy"
                " it again"
            )
        if first == LFS_POINTER[:8]:
            raise pointer(path)
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise SourceError(
                f"{path}: claims a header of {length:,} bytes, and the file has {size:,}:"
                " truncated, or not a safetensors file"
            )
        raw = bytearray(length)
        # the file may have become shorter
        del raw[descriptors.preadv(fd, [memoryview(raw)], 8) :]
    return raw, size


def _header(path: str, raw: bytearray) -> dict[str, Tensor]:
    """Returns the tensors of a header by key.

    Raises SourceError for a key that occurs twice or a description that is damaged.
    """
    begin = 0
    # The metadata is cut off in place: copying the rest would take as long as reading it.
    if metadata := _METADATA.match(raw):
        begin = metadata.end() - 1
        raw[begin : begin + 1] = b"{"
    try:
        header = _DECODER.decode(memoryview(raw)[begin:])
        if raw.count(b'"data_offsets"', begin) == len(header):  # else a key may occur twice
            return header
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the slower way below finds the reason
    if metadata:  # the pattern may have ended it too early
        raw[begin : begin + 1] = b","

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [k for k, _ in pairs]
            raise SourceError(
                f"{path}: the header names {next(k for k in names if names.count(k) > 1)!r} twice"
            )
        return out

    try:
        found = json.loads(raw, object_pairs_hook=unique)
        json.dumps(found, ensure_ascii=False).encode()  # which half of a surrogate pair fails
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: the header is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise SourceError(f"{path}: the header is not a JSON object")
    found.pop("__metadata__", None)
    for key, t in found.items():
        code = t.get("dtype") if isinstance(t, dict) else None
        try:
            found[key] = msgspec.convert(t, Tensor)
        except msgspec.ValidationError:
            wrong = (
                f"unknown dtype {code!r}; known: {', '.join(dtypes.OF_SAFETENSORS)}"
                if isinstance(code, str) and code not in dtypes.OF_SAFETENSORS
                else "its dtype, shape and data_offsets must be a name and sizes below 2**62:"
                f" {str(t)[:200]}"
            )
            raise SourceError(f"{path}: {key}: {wrong}") from None
    return found
