"""Small files that are read whole, and files that are to be written."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mckpt.errors import SourceError, StorageError

BLOCK = 1 << 20  # bytes of a copied file in memory at once


def read_file(path: str | Path, limit: int = 1 << 30) -> bytes:
    """A small file's bytes; StorageError or SourceError (larger than `limit` bytes) names it."""
    try:
        size = os.stat(path).st_size
        if size > limit:
            raise SourceError(
                f"{path}: {size:,} bytes, and a file of this kind has at most {limit:,}"
            )
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}") from e


class Made(Protocol):
    """Bytes whose number is known before they are made."""

    @property
    def nbytes(self) -> int: ...

    def data(self) -> bytes: ...


class TargetFile(NamedTuple):
    """A file to be written: its path in the staging directory, its size in bytes, and what in it is
    not tensor data.

    `fixed` is called once, from a worker thread, after the data of this file is written: with
    crc_of(offset, nbytes) -> crc32 of that range of the file's data (None unless the checksum is
    crc32), it returns (offset, bytes) pairs. What neither a copy nor `fixed` writes is zeros.
    """

    path: str
    size: int
    fixed: Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]

    @classmethod
    def whole(cls, path: str, data: bytes) -> TargetFile:
        """A small file whose every byte is known."""
        return cls.headed(path, data, 0)

    @classmethod
    def headed(cls, path: str, head: bytes, nbytes: int) -> TargetFile:
        """A file of `head` and after it `nbytes` of tensor data."""
        return cls(path, len(head) + nbytes, lambda crc_of: [(0, head)])

    @classmethod
    def pieces(cls, path: str, pieces: Sequence[Made]) -> TargetFile:
        """A file without tensor data, made when it is written, a piece at a time."""
        starts = [0, *itertools.accumulate(piece.nbytes for piece in pieces)]
        return cls(
            path,
            starts[-1],
            lambda crc_of: (
                (at, piece.data()) for at, piece in zip(starts[:-1], pieces, strict=True)
            ),
        )

    @classmethod
    def copy(cls, path: str, source: Path) -> TargetFile:
        """A file copied as it is, a block at a time.

        SourceError, now or then, if it cannot be read or is of another size then.
        """
        size, _ = stamp(source)

        def blocks(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
            at = 0
            try:
                with open(source, "rb") as f:
                    while (block := f.read(BLOCK)) and at + len(block) <= size:
                        yield at, block
                        at += len(block)
                    now = os.fstat(f.fileno()).st_size
            except OSError as e:
                raise StorageError(f"{source}: cannot be read: {e.strerror or e}") from e
            if block or at != size:
                raise SourceError(
                    f"{source}: had {size:,} bytes when the plan was made, and has {now:,} now; run"
                    " the command again"
                )

        return cls(path, size, blocks)


def stamp(path: Path) -> tuple[int, int]:
    """Bytes and mtime, in ns, of a file that is to be copied whole.

    SourceError if it cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
            raise SourceError(f"{path}: is no file that could be copied; remove it")
        with open(path, "rb") as f:
            found = os.fstat(f.fileno())
    except OSError as e:
        if path.is_symlink() and not path.exists():
            raise SourceError(
                f"{path}: is a link to {os.readlink(path)}, which is not there; restore that file"
                " or remove the link"
            ) from None
        raise SourceError(
            f"{path}: cannot be read: {e.strerror or e}; make it readable or remove it"
        ) from e
    return found.st_size, found.st_mtime_ns
