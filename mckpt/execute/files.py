"""The files of a run: laid out at full size, opened by number, read and written at offsets,
synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from isal import isal_zlib

from mckpt.errors import SourceError, StorageError
from mckpt.storage import descriptors
from mckpt.storage.files import TargetFile

SKIP = 32 << 10  # bytes between two spans that are read and dropped instead of starting a read
IOV_MAX = 1024  # parts of one read

_CURES = {
    errno.ENOSPC: "free some space and run the same command again: it continues",
    errno.EDQUOT: "raise the quota or free some space and run the same command again: it continues",
    errno.EIO: "the device failed; check it, then run the same command again: it continues",
    errno.EACCES: "check the permissions",
    errno.EROFS: "the filesystem is read-only",
}


def raise_storage_error(what: str, path: str | Path, error: OSError) -> NoReturn:
    """Raises the StorageError of a call that the operating system refused, with its cure."""
    cure = _CURES.get(error.errno or 0)
    raise StorageError(
        f"cannot {what} {path}: {error.strerror or error}" + (f"; {cure}" if cure else "")
    ) from error


def read_at(fd: int, view: memoryview, at: int, path: str) -> None:
    """Fills `view` with the bytes from offset `at` on.

    Raises SourceError if the file ends before, StorageError if the read fails.
    """
    _read(fd, [view] if view else [], at, path)


def read_spans(fd: int, spans: Iterable[tuple[int, memoryview]], path: str) -> None:
    """Fills each view with the bytes from its offset on; the offsets ascend. One call of the system
    reads many spans, and drops the bytes between them where they are few.

    Raises as `read_at`.
    """
    dropped = memoryview(bytearray(SKIP))
    views: list[memoryview] = []
    start = end = 0
    for at, view in spans:
        if views and not (0 <= at - end <= SKIP and len(views) + 2 <= IOV_MAX):
            _read(fd, views, start, path)
            views = []
        if not views:
            start = at
        elif at > end:
            views.append(dropped[: at - end])
        views.append(view)
        end = at + len(view)
    _read(fd, views, start, path)


def _read(fd: int, views: list[memoryview], at: int, path: str) -> None:
    """Fills views, of which none is empty, with the bytes from offset `at` on."""
    wanted, got, first = sum(map(len, views)), 0, 0
    while got < wanted:
        try:
            n = descriptors.preadv(fd, views[first:] if first else views, at + got)
        except OSError as error:
            raise_storage_error(f"read {wanted} bytes at {at} of", path, error)
        if n == 0:
            raise SourceError(
                f"{path} is truncated: wanted {wanted} bytes at {at}, got {got}; download or copy"
                " it again"
            )
        got += n
        while n and n >= len(views[first]):
            n -= len(views[first])
            first += 1
        if n:  # a short read ended inside this view
            views = [*views[:first], views[first][n:], *views[first + 1 :]]


def read_pieces(
    fd: int, at: int, nbytes: int, path: str, memory: memoryview, check: Callable[[], None]
) -> Iterator[memoryview]:
    """Yields the bytes of a range, as many at a time as `memory` takes; calls `check` in between.

    Raises as `read_at`.
    """
    for start in range(at, at + nbytes, len(memory)):
        check()
        view = memory[: min(len(memory), at + nbytes - start)]
        read_at(fd, view, start, path)
        yield view


def crc_of_range(
    fd: int, at: int, nbytes: int, path: str, memory: memoryview, check: Callable[[], None]
) -> int:
    """Returns the crc32 of a range, which is read as `read_pieces` does."""
    crc = 0
    for view in read_pieces(fd, at, nbytes, path, memory, check):
        crc = isal_zlib.crc32(view, crc)
    return crc


def read_or_fetch(fd: int, view: memoryview, at: int, path: str) -> memoryview:
    """Returns the bytes with which `read_at` would fill `view`: in `view`, or for a file in a store
    in the memory where its library has put them.
    """
    data = descriptors.fetch(fd, len(view), at)
    if data is not None and len(data) == len(view):
        return data
    read_at(fd, view, at, path)
    return view


def write_at(fd: int, view: memoryview, at: int, path: str) -> None:
    """Writes all of `view` at offset `at`; raises StorageError if that fails."""
    put = 0
    while put < len(view):
        try:
            put += os.pwrite(fd, view[put:] if put else view, at + put)
        except OSError as error:
            raise_storage_error(f"write {len(view)} bytes at {at} of", path, error)


def copy_in_kernel(src: int, dst: int, src_at: int, dst_at: int, nbytes: int) -> int:
    """Copies without a buffer as many bytes as the kernel can, and returns their number.

    It ignores errors: the caller then reads and writes the rest, and gets the error there.

    On tmpfs this takes 0.43 s of CPU per GiB, a buffer 0.71 s. But the kernel locks the target's
    inode for the whole copy, and a write locks it for half of that time only: two threads that
    write one file are faster with buffers.
    """
    done = 0
    with contextlib.suppress(OSError):
        while done < nbytes and (
            n := os.copy_file_range(src, dst, nbytes - done, src_at + done, dst_at + done)
        ):
            done += n
    return done


class OpenFiles:
    """Open file descriptors by file number, shared by all threads.

    Keeps open at most a quarter of the descriptors that the process may have, up to 1024, plus
    those in use.
    """

    def __init__(self, paths: Sequence[str], flags: int) -> None:
        self.paths, self.flags = paths, flags
        self.most = max(16, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.lock = threading.Lock()
        self.fds: OrderedDict[int, int] = OrderedDict()
        self.uses: Counter[int] = Counter()
        self.expected: dict[int, tuple[int, int]] = {}  # the range that `expect` has asked for

    @contextlib.contextmanager
    def opened(self, files: Iterable[int]) -> Iterator[dict[int, int]]:
        """Yields {file: descriptor}; the descriptors stay open inside the block."""
        files = set(files)
        with self.lock:
            for file in files:
                if file not in self.fds:
                    try:
                        self.fds[file] = self._open(self.paths[file])
                    except OSError as error:
                        raise_storage_error("open", self.paths[file], error)
                self.fds.move_to_end(file)
            self.uses.update(files)
            fds = {file: self.fds[file] for file in files}
        try:
            yield fds
        finally:
            with self.lock:
                self.uses.subtract(files)
                self._evict()

    def expect(self, file: int, fd: int, at: int, end: int) -> None:
        """Has the kernel read a range of a file in one go, because small parts of all of it are
        read in any order.
        """
        first, last = self.expected.get(file, (end, at))
        if at < first or end > last:
            self.expected[file] = min(at, first), max(end, last)
            os.posix_fadvise(fd, at, end - at, os.POSIX_FADV_WILLNEED)

    def _open(self, path: str) -> int:
        if self.flags == os.O_RDONLY:
            return descriptors.open_file(path)
        return os.open(path, self.flags | os.O_CLOEXEC)

    def _evict(self) -> None:
        for file in list(self.fds)[: max(0, len(self.fds) - self.most)]:
            if not self.uses[file]:
                descriptors.close(self.fds.pop(file))
                self.uses.pop(file, None)

    def sync(self, file: int, how: Callable[[int], None]) -> None:
        """Syncs one file; `how` is os.fsync or os.fdatasync."""
        with self.opened([file]) as fds:
            try:
                how(fds[file])
            except OSError as error:
                raise_storage_error("sync", self.paths[file], error)

    def close(self) -> None:
        """Closes all descriptors but those in use.

        A thread that is stuck in a system call keeps its own: the kernel must not give their
        numbers to other files.
        """
        with self.lock:
            self.most = 0
            self._evict()


def lay_out(outputs: Sequence[TargetFile], staging: Path, journal: Path) -> None:
    """Creates all outputs at full size.

    If one was missing or had another size, it removes the journal, which describes data that is
    gone. Raises StorageError if the filesystem has too little space.
    """
    try:
        staging.mkdir(parents=True, exist_ok=True)
        paths = [staging / o.path for o in outputs]
        before = [p.stat() if p.exists() else None for p in paths]
        needed = sum(o.size for o in outputs) - sum(
            min(s.st_blocks * 512, o.size) for s, o in zip(before, outputs, strict=True) if s
        )
        stats = os.statvfs(staging)
        free = stats.f_bavail * stats.f_frsize
        if needed > free:
            raise StorageError(
                f"{staging} needs {needed} bytes more, its filesystem has {free} bytes free; free"
                " some or choose another"
            )
        if any(s is None or s.st_size != o.size for s, o in zip(before, outputs, strict=True)):
            shutil.rmtree(journal, ignore_errors=True)
        for folder in {p.parent for p in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        for path, output, old in zip(paths, outputs, before, strict=True):
            if old is None or old.st_size != output.size:
                path.touch(output.mode)
                os.truncate(path, output.size)
    except OSError as error:
        raise_storage_error("lay out", error.filename or staging, error)


def sync_directories(outputs: Sequence[TargetFile], staging: Path) -> None:
    """Syncs every directory from the outputs up to the staging directory."""
    for folder in {
        staging,
        *(p for o in outputs for p in (staging / o.path).parents if p.is_relative_to(staging)),
    }:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise_storage_error("sync", folder, error)
