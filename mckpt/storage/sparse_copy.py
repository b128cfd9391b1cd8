"""Sparse copies: local directories that show the objects below a URL.

A sparse copy is a temporary directory with the names and the sizes of the objects. Small files are
downloaded whole; the others are holes. `storage.descriptors` downloads the bytes of a hole when
they are read. So a checkpoint in a store opens like one on a disk.

    TMP/mckpt-x/run/iter_0000007/.metadata      s3://bucket/run/iter_0000007/.metadata, whole
    TMP/mckpt-x/run/iter_0000007/__0_0.distcp   s3://bucket/run/iter_0000007/__0_0.distcp, holes
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mckpt.errors import SourceError, UsageError, show_as

if TYPE_CHECKING:
    from mckpt.storage.stores import Object, Store

T = TypeVar("T")

THREADS = 16  # requests at the same time
SMALL = 64 << 10  # bytes; files up to this size are downloaded whole
# The ends of names of files that are read whole: configs, tokenizers, indices.
WHOLE = (
    *(".json", ".jsonl", ".yaml", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md"),
    *(".metadata", ".zarray", "common.pt"),
)
BLOCK = 64 << 10  # bytes; headers are downloaded and kept in blocks of this size

TEMPORARY = "mckpt-store-"  # begins the names of temporary directories

_all: dict[str, SparseCopy] = {}  # by the path of its root, with a slash at the end
_copies: dict[str, SparseCopy] = {}  # by the root of the same sparse copy in another process
_temporary: dict[Path, int] = {}  # temporary directories of this process, each with its lock
_lock = threading.Lock()  # for `_temporary`


class SparseCopy:
    """The sparse copy of one URL, in the directory `root`."""

    def __init__(self, root: Path, url: str, store: Store, keep: Callable[[str], bool]) -> None:
        self.root, self.url, self.store, self.keep = root, url, store, keep
        self.objects: dict[str, Object] = {}
        self.files: dict[str, Holes] = {}  # files that have holes, by name
        self.lock = threading.Lock()
        self.note = ""  # what a plan states about the place
        self.is_remote = True  # reads wait for a server, and not for a core

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets another process make a sparse copy of its own of the same URL. A pickled store has
        no credentials; that process finds its own.
        """
        return _unpickled, (str(self.root), self.url, self.store, self.objects)

    def name(self, path: str | Path) -> str:
        """Returns the name of the object whose copy a path is."""
        return str(path)[len(str(self.root)) + 1 :]

    def below(self, folder: Path) -> list[str]:
        """Returns the names of the objects in a directory and in those inside."""
        start = "" if folder == self.root else f"{self.name(folder)}/"
        return [name for name in self.objects if name.startswith(start)]

    def list(self) -> None:
        """Makes the directory equal to the store: names, sizes and times."""
        there = {
            name: one
            for name, one in self.store.list().items()
            if self.keep(name) and not name.endswith("/")
        }
        for name in self.objects.keys() - there.keys():
            self.forget(name)
        for name, one in there.items():
            if self.objects.get(name) != one:
                self.forget(name)
                self._make(name, one)
        self.objects = there
        self.whole(n for n, one in there.items() if "/" not in n and _is_whole(n, one))

    def _make(self, name: str, one: Object) -> None:
        path = self.root / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise SourceError(f"{self.url}/{name}: an object of this name cannot be read")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.truncate(one.size)
        except (NotADirectoryError, IsADirectoryError, FileExistsError):
            raise SourceError(
                f"{self.url}/{name}: is an object, and others lie below that name; remove one"
            ) from None
        os.utime(path, ns=(one.time, one.time))
        if one.size:
            self.files[name] = Holes(self, name, one)

    def forget(self, name: str) -> None:
        """Removes a file here, and directories that are empty then."""
        self.objects.pop(name, None)
        self.files.pop(name, None)
        path = self.root / name
        with suppress(OSError):
            os.unlink(path)
        with suppress(OSError):
            while (path := path.parent) != self.root:
                os.rmdir(path)

    def whole(self, names: Iterable[str]) -> None:
        """Downloads files."""
        in_threads(lambda holes: holes.fill(), [self.files[n] for n in names if n in self.files])

    def put(self, name: str, data: bytes | Path) -> str:
        """Uploads an object and returns its version. Its content is not kept here."""
        return self.store.write(name, data)

    def remove(self, names: Collection[str]) -> None:
        self.store.remove(names)
        for name in names:
            self.forget(name)


class Holes:
    """A file of a sparse copy of which some blocks are not here yet."""

    def __init__(self, of: SparseCopy, name: str, one: Object) -> None:
        self.of, self.name, self.object = of, name, one
        self.path = of.root / name
        self.lock = threading.Lock()
        self.here = bytearray(-(-one.size // BLOCK))  # 1: the block is here

    def read(self, at: int, nbytes: int) -> Any:
        """Returns bytes from the store, fewer at the end of the file.

        Raises SourceError if the store sends another number of bytes than its listing promised.
        """
        data = self.of.store.read(self.name, at, nbytes, self.object.version)
        wanted = max(0, min(nbytes, self.object.size - at))
        if len(data) != wanted:
            raise SourceError(
                f"{self.of.url}/{self.name}: the store sent {len(data):,} bytes from byte {at:,} on"
                f" instead of {wanted:,}; if the file was changed while it was read, run the"
                " command again when nothing writes there"
            )
        return data

    def need(self, at: int, nbytes: int) -> None:
        """Downloads the blocks of a range that are not here."""
        last = min(at + nbytes, self.object.size)
        first, end = at // BLOCK, -(-last // BLOCK)
        if first >= end or all(self.here[first:end]):
            return
        with self.lock:
            while first < end:
                if self.here[first]:
                    first += 1
                    continue
                stop = self.here.find(1, first, end)
                stop = end if stop < 0 else stop
                self._fetch(first, stop)
                first = stop

    def _fetch(self, first: int, stop: int) -> None:
        start = first * BLOCK
        data = self.read(start, min(stop * BLOCK, self.object.size) - start)
        with open(self.path, "r+b") as file:
            file.seek(start)
            file.write(data)
        os.utime(self.path, ns=(self.object.time, self.object.time))
        self.here[first:stop] = b"\1" * (stop - first)

    def fill(self) -> None:
        """Downloads the whole file."""
        step = 64 * BLOCK
        for at in range(0, self.object.size, step):
            self.need(at, step)
        self.of.files.pop(self.name, None)


def load(
    url: object,
    store: Store,
    name: str,
    keep: Callable[[str], bool] = lambda name: True,
    note: str = "",
) -> Path:
    """Returns a sparse copy of a URL, a directory called `name`. Small files at its top are whole.

    keep: which objects to show. note: what a plan states about the place.
    """
    made = _create(str(url), store, name, keep)
    made.note = note
    made.list()
    return made.root


def _create(url: str, store: Store, name: str, keep: Callable[[str], bool]) -> SparseCopy:
    root = temporary() / name
    root.mkdir()
    made = _all[f"{root}/"] = SparseCopy(root, url, store, keep)
    show_as(str(root), url)
    return made


def _unpickled(root: str, url: str, store: Store, objects: dict[str, Object]) -> SparseCopy:
    """Returns the sparse copy of another process, which is made once in this one. The store is not
    listed: reading an object that has changed since is an error.
    """
    if (made := _copies.get(root)) is None:
        made = _copies[root] = _create(url, store, Path(root).name, lambda name: True)
        for name, one in objects.items():
            made._make(name, one)
        made.objects = objects
    return made


def of(path: str | Path) -> SparseCopy | None:
    """Returns the sparse copy that a path is in; None for another local path."""
    if not _all:
        return None
    text = f"{path}/"
    return next((one for root, one in _all.items() if text.startswith(root)), None)


def holes(path: str | Path) -> Holes | None:
    """Returns the file that a path names, if parts of it are not here."""
    copy = of(path)
    return copy.files.get(copy.name(path)) if copy else None


def fill(*folders: Path) -> None:
    """Downloads the small files of directories, and both ends of the others, where the headers are.
    Does nothing for directories of this machine.
    """
    todo: list[Callable[[], None]] = []
    for folder in folders:
        if (copy := of(folder)) is not None:
            for name in copy.below(folder):
                if (file := copy.files.get(name)) is None or _is_chunk(name):
                    continue
                if _is_whole(name, file.object):
                    todo.append(file.fill)
                else:
                    # mypy infers no type for a lambda with defaults
                    todo.append(lambda file=file: file.need(0, BLOCK))  # type: ignore[misc]
                    end = file.object.size - 1
                    todo.append(lambda file=file, end=end: file.need(end, 1))  # type: ignore[misc]
    in_threads(lambda call: call(), todo)


def need(ranges: Iterable[tuple[str, int, int]]) -> None:
    """Downloads many short ranges (path, offset, bytes) at the same time; ignores local files."""
    if not _all:
        return
    ranges = list(ranges)
    files = {path: holes(path) for path, _, _ in ranges}
    blocks = {
        (path, block)
        for path, at, nbytes in ranges
        if files[path] is not None
        for block in range(at // BLOCK, -(-(at + nbytes) // BLOCK))
    }
    # `blocks` has only paths whose entry is not None, which mypy cannot see
    in_threads(lambda one: files[one[0]].need(one[1] * BLOCK, 1), sorted(blocks))  # type: ignore[union-attr]


def whole(path: str | Path) -> None:
    """Downloads the whole file that a path names, unless it is here."""
    if (file := holes(path)) is not None:
        file.fill()


def refresh(path: Path) -> None:
    """Lists the store of a path again; does nothing for a path of this machine."""
    if (copy := of(path)) is not None:
        copy.list()


def push(path: Path) -> None:
    """Uploads a file that was written here; does nothing for a path of this machine."""
    if (copy := of(path)) is not None:
        copy.put(copy.name(path), path.read_bytes())


def refuse_empty(path: Path) -> None:
    """Raises SourceError if a path is in the sparse copy of a URL below which the store has no
    objects.
    """
    if (copy := of(path)) is not None and not copy.below(path):
        raise SourceError(
            f"{path}: the store has no objects under this name; give the directory of a"
            " checkpoint, as the store's own tools list it"
        )


def refuse(path: Path, what: str) -> None:
    """Raises UsageError for a path in a sparse copy: some commands need the files themselves."""
    if (copy := of(path)) is not None:
        raise UsageError(
            f"{copy.url}: {what} needs a directory of this machine; copy or unpack it here first,"
            " or convert it to a local directory"
        )


def remove(folder: Path) -> bool:
    """Removes the objects of a directory; returns False for a path of this machine.

    The files that make it a checkpoint go first.
    """
    if (copy := of(folder)) is None:
        return False
    names = copy.below(folder)
    copy.remove([n for n in names if _is_whole(n, copy.objects[n])])
    copy.remove([n for n in names if n in copy.objects])
    return True


def temporary() -> Path:
    """Returns a new directory, which is removed when this process ends."""
    _clean_at_exit()
    return _locked_directory()


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a new directory, which is removed at the end of the block."""
    folder = _locked_directory()
    try:
        yield folder
    finally:
        _remove(folder)


@functools.cache
def _clean_at_exit() -> None:
    atexit.register(clean)


def _locked_directory() -> Path:
    """Returns a new directory that other processes do not take for a left-over. The first call
    removes the directories of killed processes.
    """
    import tempfile

    with _lock:
        if not _temporary:
            for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
                with suppress(OSError):
                    fd = os.open(folder, os.O_RDONLY)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os.close(fd)
        while True:
            folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=TEMPORARY)))
            # another process may take it for a left-over, and remove it, before it is locked
            with suppress(FileNotFoundError):
                fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX)
                _temporary[folder] = fd
                if folder.exists():
                    return folder


def _remove(folder: Path) -> None:
    with _lock:
        fd = _temporary.pop(folder, None)
    if fd is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def clean() -> None:
    """Removes all temporary directories of this process, and so all sparse copies."""
    _all.clear()
    _copies.clear()
    for folder in list(_temporary):
        _remove(folder)


def in_threads(call: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls a function for each item, with THREADS threads; raises the first error."""
    todo = list(items)
    if len(todo) < 2:
        for item in todo:
            call(item)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(THREADS, len(todo))) as pool:
        for _ in pool.map(call, todo):
            pass


def _is_chunk(name: str) -> bool:
    """Returns whether an object is a chunk of a zarr array, such as KEY/0.1.0, without headers."""
    return name.rpartition("/")[2].replace(".", "").isdecimal()


def _is_whole(name: str, one: Object) -> bool:
    return one.size <= SMALL or name.endswith(WHOLE)
