"""File descriptors for reading local files, and files of a sparse copy, whose bytes are downloaded
from a store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mckpt.errors import SourceError
from mckpt.storage import sparse_copy
from mckpt.storage.sparse_copy import Holes

# bytes; a shorter read downloads and keeps whole blocks, because its neighbours will be read next
LONG = 256 << 10
BLOCK = 1 << 20  # bytes of `blocks`

_remote: dict[int, Holes] = {}  # the descriptors of files that are not completely here


def open_file(path: str | Path) -> int:
    """Opens a file for reading, as os.open does; close it with `close`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if (holes := sparse_copy.holes(path)) is not None:
        _remote[fd] = holes
    return fd


def close(fd: int) -> None:
    """Closes a descriptor of `open_file`."""
    _remote.pop(fd, None)
    os.close(fd)


def is_remote(fd: int) -> bool:
    """Returns whether reads from this descriptor may go to a store."""
    return fd in _remote


def any_remote(paths: Iterable[str | Path]) -> bool:
    """Returns whether some of these files are not completely on this machine."""
    found = (sparse_copy.holes(path) for path in paths)
    return any(holes is not None and holes.of.is_remote for holes in found)


def pread(fd: int, nbytes: int, at: int) -> bytes:
    """Reads as os.pread does."""
    if (holes := _remote.get(fd)) is not None:
        holes.need(at, nbytes)
    return os.pread(fd, nbytes, at)


def fetch(fd: int, nbytes: int, at: int) -> memoryview | None:
    """Returns bytes of a file in a store, without a copy, if the read is a long one; else None. The
    result is shorter at the end of the file.
    """
    holes = _remote.get(fd)
    if holes is None or nbytes < LONG:
        return None
    return memoryview(holes.read(at, nbytes))


def preadv(fd: int, views: Sequence[memoryview], at: int) -> int:
    """Reads as os.preadv does. A long read goes from the store into memory."""
    if (holes := _remote.get(fd)) is not None:
        wanted = min(sum(map(len, views)), max(0, holes.object.size - at))
        if len(views) == 1 and (data := fetch(fd, wanted, at)) is not None:
            views[0][: len(data)] = data
            return len(data)
        holes.need(at, wanted)
    return os.preadv(fd, views, at)


def blocks(path: str | Path, size: int = BLOCK) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks; raises SourceError if it ends before its size."""
    fd = open_file(path)
    try:
        at = 0
        while block := pread(fd, size, at):
            yield block
            at += len(block)
        if at < (whole := os.fstat(fd).st_size):
            raise SourceError(
                f"{path}: ends after {at:,} of {whole:,} bytes; run the command again"
            )
    finally:
        close(fd)
