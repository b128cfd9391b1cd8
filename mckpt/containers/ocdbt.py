"""The index of an OCDBT database, in which tensorstore keeps many small files in a few large ones.

    manifest.ocdbt    the configuration, and the place of the root node
    d/NAME            values, in any order, and nodes

A node lists keys in order, each with the file and the bytes of its value. One node has all keys
here: 45,000, as DeepSeek-V3 has them, take 3 MB. Only what refers to values is written; the
values themselves have no checksum (https://google.github.io/tensorstore/kvstore/ocdbt).

All numbers are varints, but for the lengths and times of 8 bytes and the checksums of 4, which are
little-endian; lists are stored column by column.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MANIFEST = "manifest.ocdbt"
_NODE_MAGIC, _MANIFEST_MAGIC = b"\x0c\xdb\x20\xde", b"\x0c\xdb\x3a\x2a"
_INDIRECT = 1  # the kind of a value that lies in a file
_NODE_BYTES = 1 << 23  # the default of tensorstore, for those who write more
_ARITY = 4  # log2, also the default


class Value(NamedTuple):
    """The place of a value."""

    file: int
    at: int
    nbytes: int


def database(
    files: list[str], values: Mapping[str, Value], node_file: int, at: int, uuid: bytes
) -> tuple[bytes, bytes]:
    """Returns a node with these values, and the manifest of a database with this node.

    files: the paths of the data files, below the database. node_file, at: where the node will be.
    uuid: 16 bytes that name the database.
    """
    keys = sorted(key.encode() for key in values)
    places = [values[key.decode()] for key in keys]
    shared = [_shared(a, b) for a, b in itertools.pairwise(keys)]
    ends = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
    body = b"\0" + _files(files) + _varints([len(keys), *shared, *map(len, ends)])
    body += b"".join(ends) + _varints(v.nbytes for v in places)
    body += _varints([_INDIRECT] * len(places))
    body += _varints(v.file for v in places) + _varints(v.at for v in places)
    node = _framed(_NODE_MAGIC, body)
    # one version: its generation, the height and the place of its root, the sums of its values, and
    # a time, which is the same in each run
    body = uuid + _varints([0, 0, _NODE_BYTES, _ARITY, 0]) + _files([files[node_file]])
    body += _varints([1, 1, 0, 0, at, len(node)])
    body += _varints([len(keys), len(node), sum(v.nbytes for v in places)])
    body += (1).to_bytes(8, "little") + b"\0"
    return node, _framed(_MANIFEST_MAGIC, body)


def _shared(a: bytes, b: bytes) -> int:
    """Returns how many bytes two keys have in common at their start."""
    pairs = enumerate(zip(a, b, strict=False))  # strict=False: one key may be longer
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def _files(names: list[str]) -> bytes:
    """Returns a table of files, whose paths have no part in common."""
    lengths = [len(name.encode()) for name in names]
    counts = [len(names), *[0] * (len(names) - 1), *lengths, *[0] * len(names)]
    return _varints(counts) + "".join(names).encode()


def _varints(numbers: Iterable[int]) -> bytes:
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _framed(magic: bytes, body: bytes) -> bytes:
    """Returns a body that is not compressed, of version 0, with its length and checksum."""
    size = len(magic) + 8 + 2 + len(body) + 4
    data = magic + size.to_bytes(8, "little") + b"\0\0" + body
    return data + crc32c(data).to_bytes(4, "little")


@functools.cache
def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


def crc32c(data: bytes) -> int:
    """Returns the checksum of Castagnoli's polynomial."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF
