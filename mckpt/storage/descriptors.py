"""File descriptors for reading: of local files, and of files of a stand-in, whose bytes come from a
store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mckpt.storage import stand_in
from mckpt.storage.stand_in import Holes

# bytes; a shorter read downloads and keeps whole blocks, because its neighbours will be read next
LONG = 256 << 10
BLOCK = 1 << 20  # bytes of `blocks`

_remote: dict[int, Holes] = {}  # the descriptors of files that are not here whole


def open_file(path: str | Path) -> int:
    """Opens a file for reading, as os.open does; close it with `close`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if (found := stand_in.holes(path)) is not None:
        _remote[fd] = found
    return fd


def close(fd: int) -> None:
    """Closes a descriptor of `open_file`."""
    _remote.pop(fd, None)
    os.close(fd)


def is_remote(fd: int) -> bool:
    """Returns whether reads from this descriptor may go to a store."""
    return fd in _remote


def any_remote(paths: Iterable[str]) -> bool:
    """Returns whether some of these files are not here whole."""
    return any(stand_in.holes(path) is not None for path in paths)


def pread(fd: int, nbytes: int, at: int) -> bytes:
    """Reads as os.pread does."""
    if (found := _remote.get(fd)) is not None:
        found.need(at, nbytes)
    return os.pread(fd, nbytes, at)


def preadv(fd: int, views: Sequence[memoryview], at: int) -> int:
    """Reads as os.preadv does. A long read goes from the store into memory."""
    found = _remote.get(fd)
    if found is None:
        return os.preadv(fd, views, at)
    wanted = sum(map(len, views))
    if wanted < LONG or len(views) > 1:
        found.need(at, wanted)
        return os.preadv(fd, views, at)
    wanted = min(wanted, found.object.size - at)
    if wanted <= 0:
        return 0
    data = memoryview(found.read(at, wanted))
    views[0][: len(data)] = data
    return len(data)


def blocks(path: str | Path, size: int = BLOCK) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks."""
    fd = open_file(path)
    try:
        at = 0
        while block := pread(fd, size, at):
            yield block
            at += len(block)
    finally:
        close(fd)
