"""Small files that are read whole, the error of a file that cannot be read, and target files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.errors import SourceError, StorageError
from mckpt.storage import descriptors, sparse_copy

BLOCK = 1 << 20  # bytes of a copied file in memory at once
# the beginning of the file that a clone without git-lfs holds in place of a large file
LFS_POINTER = b"version https://git-lfs"


def unreadable(path: str | Path, error: OSError) -> StorageError:
    """Returns the error to raise when the operating system refuses to read a file."""
    return StorageError(f"{path}: cannot be read: {error.strerror or error}")


def pointer(path: str | Path) -> SourceError:
    """Returns the error of a file that begins with LFS_POINTER."""
    return SourceError(
        f"{path}: is a pointer of git-lfs, not the file itself: run `git lfs pull` there"
    )


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """Yields a descriptor of a file for reading with `storage.descriptors`.

    Raises StorageError if the operating system refuses to open or read the file.
    """
    try:
        fd = descriptors.open_file(path)
        try:
            yield fd
        finally:
            descriptors.close(fd)
    except OSError as e:
        raise unreadable(path, e) from e


def read_file(path: str | Path, limit: int = 1 << 30) -> bytes:
    """Returns the bytes of a small file.

    Raises StorageError if it cannot be read, SourceError if it has more than `limit` bytes or is a
    pointer of git-lfs.
    """
    sparse_copy.whole(path)
    try:
        size = os.stat(path).st_size
        if size > limit:
            raise SourceError(
                f"{path}: {size:,} bytes, and a file of this kind has at most {limit:,}"
            )
        with open(path, "rb") as f:
            data = f.read()
    except OSError as e:
        raise unreadable(path, e) from e
    if data.startswith(LFS_POINTER):
        raise pointer(path)
    return data


def read_json(path: str | Path, limit: int) -> Any:
    """Returns the content of a small JSON file.

    Raises StorageError if it cannot be read, SourceError if it is too large or not JSON, or
    contains half of a surrogate pair, which cannot be printed.
    """
    try:
        content = json.loads(read_file(path, limit))
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not valid JSON: {e}") from None
    return content


def checksum_of(data: Path | str | bytes, kind: str = "crc32") -> str:
    """Returns the checksum of a file, or of bytes, as mckpt.json states it: crc32:0a1b2c3d."""
    blocks = [data] if isinstance(data, bytes) else descriptors.blocks(data)
    if kind == "crc32":
        return f"crc32:{functools.reduce(lambda crc, block: zlib.crc32(block, crc), blocks, 0):08x}"
    digest = hashlib.new(kind)
    for block in blocks:
        digest.update(block)
    return f"{kind}:{digest.hexdigest()}"


class TargetFile(NamedTuple):
    """A file to be written.

    A worker thread calls `fixed` once, after the tensor data of this file is written. It returns
    the other bytes of the file as (offset, bytes) pairs. Its argument is crc_of(offset, nbytes),
    the crc32 of a range of the file's data, or None unless the checksum is crc32. Bytes that
    neither a copy nor `fixed` writes are zeros.
    """

    path: str  # in the staging directory
    size: int  # bytes
    fixed: Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]
    mode: int = 0o666  # permissions, before the umask applies

    @classmethod
    def whole(cls, path: str, data: bytes) -> TargetFile:
        """Describes a small file of which every byte is known."""
        return cls.headed(path, data, 0)

    @classmethod
    def headed(cls, path: str, head: bytes, nbytes: int) -> TargetFile:
        """Describes a file of `head` and, after it, `nbytes` of tensor data."""
        return cls(path, len(head) + nbytes, lambda crc_of: [(0, head)])

    @classmethod
    def beside(cls, path: str, source: Path | bytes) -> TargetFile:
        """Describes a copy of a source file, or a file of this content."""
        return cls.whole(path, source) if isinstance(source, bytes) else cls.copy(path, source)

    @classmethod
    def copy(cls, path: str, source: Path) -> TargetFile:
        """Describes a copy of a source file, made a block at a time when written.

        Raises SourceError if the source cannot be read now. Writing raises StorageError if it
        cannot be read then, SourceError if its size has changed.
        """
        size = stamp_to_copy(source).bytes

        def blocks(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
            at = 0
            try:
                for block in descriptors.blocks(source, BLOCK):
                    if at + len(block) > size:
                        break
                    yield at, block
                    at += len(block)
                now = os.stat(source).st_size
            except OSError as e:
                raise unreadable(source, e) from e
            if at != size or now != size:
                raise SourceError(
                    f"{source}: had {size:,} bytes when the plan was made, and has {now:,} now; run"
                    " the command again"
                )

        return cls(path, size, blocks, mode_of(source))


def mode_of(source: Path) -> int:
    """Returns the permissions of a copy of a file: whoever cannot read the file cannot read the
    copy.
    """
    return os.stat(source).st_mode & 0o666 | 0o600


class Stamp(NamedTuple):
    """Facts about a file that change with its content, and that are known without reading it."""

    bytes: int
    mtime: int  # ns; of an object in a store, Object.time
    # ctime in ns, which changes even where a program puts the mtime back, and inode; of an object
    # in a store, its version and its time
    exact: tuple[int | str, int]

    @property
    def shared(self) -> tuple[int, int]:
        """The part that is the same on all machines that see the file."""
        return self.bytes, self.mtime


def stamp(path: str | Path) -> Stamp:
    """Returns the stamp of a source file. Raises SourceError if it is not there."""
    try:
        return _stamp(path, os.stat(path))
    except FileNotFoundError:
        raise SourceError(f"{path}: is gone; put it back and run the command again") from None
    except OSError as e:
        raise unreadable(path, e) from e


def _stamp(path: str | Path, status: os.stat_result) -> Stamp:
    place = sparse_copy.of(path)
    one = place.objects.get(place.name(path)) if place else None
    exact = (one.version, one.changed) if one else (status.st_ctime_ns, status.st_ino)
    return Stamp(status.st_size, status.st_mtime_ns, exact)


def stamp_to_copy(path: Path) -> Stamp:
    """Returns the stamp of a file that is to be copied whole.

    Raises SourceError if it cannot be read, is not a regular file, or is a pointer of git-lfs.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
            raise SourceError(f"{path}: is not a regular file and cannot be copied; remove it")
        with open(path, "rb") as f:
            status, start = os.fstat(f.fileno()), f.read(len(LFS_POINTER))
    except OSError as e:
        if path.is_symlink() and not path.exists():
            raise SourceError(
                f"{path}: is a link to {os.readlink(path)}, which is not there; restore that file"
                " or remove the link"
            ) from None
        raise SourceError(f"{unreadable(path, e)}; make it readable or remove it") from e
    if start == LFS_POINTER:
        raise pointer(path)
    return _stamp(path, status)
