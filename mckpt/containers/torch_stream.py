"""Reads the files of torch.save before torch 1.6, which are a stream of pickles, not a zip.

    | magic | protocol | machine | value | storage keys | numel, bytes | numel, bytes | ...

The first five are pickles. The storages follow in the order of the keys, each behind its number of
elements (torch/serialization.py, _legacy_save). Sizes and offsets are in bytes.
"""

from __future__ import annotations

from typing import Any

from mckpt.containers.safe_pickle import MAX_BYTES, Storage, as_pickle, loads
from mckpt.errors import PickleError, SourceError
from mckpt.storage import descriptors

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PROTOCOL = 1001  # of every file of this format
_FIRST = 1 << 20  # bytes that are read to find the end of a pickle; then twice as many, and so on

Ranges = dict[str, tuple[int, int]]  # storage key -> (offset, bytes)


def read(fd: int, where: str, base: int, length: int) -> tuple[Any, Ranges]:
    """Reads a stream; returns its value and {storage key: (offset in the file, bytes)}.

    where: names the file in errors. base, length: the range of the stream in the file.

    Reads no tensor data. Raises SourceError if the stream is damaged, PickleError if a pickle is
    hostile or damaged.
    """
    at, end = base + len(MAGIC), base + length
    storages: list[Storage] = []
    parts = []
    for _ in range(4):
        data = _pickle(fd, where, at, min(end - at, MAX_BYTES))
        parts.append(loads(data, where, storages=storages))
        at += len(data)
    protocol, machine, value, keys = parts
    if protocol != _PROTOCOL or not isinstance(machine, dict) or not isinstance(keys, list):
        raise SourceError(f"{where}: not a file of torch.save, although it begins like one")
    if machine.get("little_endian") is not True:
        raise SourceError(
            f"{where}: written on a big-endian machine; re-save it on a little-endian one"
        )
    named = {storage.key: storage for storage in storages}
    if len(set(map(str, keys))) != len(named) or not all(key in named for key in keys):
        raise SourceError(
            f"{where}: it holds {len(keys)} storages, and its pickle names {len(named)}"
        )
    ranges: Ranges = {}
    for key in keys:
        storage = named[key]
        found = int.from_bytes(descriptors.pread(fd, 8, at), "little")
        if at + 8 + storage.nbytes > end or found != storage.pid[4]:
            raise SourceError(
                f"{where}: storage {key[:80]!r} should have {storage.pid[4]} elements in"
                f" {storage.nbytes} bytes at {at + 8} of {end}: the file is damaged or cut short"
            )
        ranges[key] = (at + 8, storage.nbytes)
        at += 8 + storage.nbytes
    return value, ranges


def _pickle(fd: int, where: str, at: int, room: int) -> bytes:
    """Returns the bytes of the pickle that begins at `at`, whose length nothing states."""
    size = min(_FIRST, room)
    while True:
        data = descriptors.pread(fd, size, at)
        try:
            return as_pickle(data, where)
        except PickleError:
            if size >= room or len(data) < size:
                raise
            size = min(2 * size, room)
