"""The archives of NeMo 1 (`.nemo`), tar files, as stores: a member is an object, and a read of it
is a read of the archive at the byte where the member begins.

    ./model_config.yaml               the description of the model
    ./model_weights/.metadata ...     a checkpoint of Megatron-Core
    ./mp_rank_00/model_weights.ckpt   in its place, a torch.save file of each rank
(NeMo, core/connectors/save_restore_connector.py)

A compressed archive is unpacked first, into one tar file in the directory of temporary files.
"""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
from pathlib import Path
from typing import Any

from mckpt.errors import SourceError
from mckpt.storage import descriptors, sparse_copy
from mckpt.storage.files import unreadable
from mckpt.storage.sparse_copy import SparseCopy
from mckpt.storage.stores import Object, ReadOnly

_GZIP = b"\x1f\x8b"
_BLOCK = tarfile.BLOCKSIZE
_COPY = 1 << 22  # bytes that are unpacked at a time
# A larger archive would fill the disk with nothing. Random weights in 16 bits shrink to three
# quarters, and nothing shrinks to less than a thousandth; _ROOM is for archives that are tiny.
_RATIO = 50
_ROOM = 1 << 30  # bytes
# Headers that hold the long name or other fields of the member behind them: bytes of one, which
# tarfile reads whole, and how many may precede a member. NeMo writes none, or one for a long name.
_LONG = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, b"X"),
)
_LONGEST = 1 << 20
_NESTED = 8


class Archive(ReadOnly):
    """The members of a tar file."""

    note = ""  # what a plan states about the archive

    def __init__(self, path: Path, tar: Path | None = None) -> None:
        """Raises SourceError if the archive is damaged, or if a member is not a file with a path
        below the directory that the archive stands for.

        path: of this machine, or of a file in a sparse copy. tar: where another process of this
            machine has unpacked the archive.
        """
        self.path = self.tar = path
        self.refusal = f"{path}: is an archive, which mckpt only reads"
        try:
            if _is_compressed(path):
                self.tar = tar if tar is not None and tar.is_file() else _unpacked(path)
                self.note = (
                    f"{path} is compressed, so its {self.tar.stat().st_size:,} bytes were"
                    f" unpacked below {self.tar.parent.parent}; they are removed at the end"
                )
            self.places, sizes = _members(self.tar, path)
            self.changed = self._time()
        except OSError as e:
            raise unreadable(e.filename or path, e) from e
        version = str(self.changed)
        self.objects = {name: Object(size, version, self.changed) for name, size in sizes.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        copy = sparse_copy.of(self.path)
        place = (copy, copy.name(self.path)) if copy else (None, str(self.path))
        return _unpickled, (*place, self.tar)

    def _time(self) -> int:
        """Returns when the archive was changed, in ns; in a sparse copy the time of the object,
        because each block that is downloaded changes the file, and the store compares versions. The
        time of an unpacked archive is that of the archive, so that a later run knows it again.
        """
        holes = sparse_copy.holes(self.path)
        return holes.object.time if holes else self.path.stat().st_mtime_ns

    def list(self) -> dict[str, Object]:
        return self.objects

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> Any:
        """Returns a buffer of the bytes of a member from `at` on; fewer at its end.

        Raises SourceError if the archive has changed, StorageError if it cannot be read.
        """
        try:
            if self._time() != self.changed:
                raise SourceError(
                    f"{self.path}: was changed while it was read; run the command again when"
                    " nothing writes there"
                )
            nbytes, at = max(0, min(nbytes, self.objects[name].size - at)), self.places[name] + at
            with _OpenFile(self.tar) as file:
                fetched = descriptors.fetch(file.fd, nbytes, at)
                if fetched is not None:
                    return fetched
                file.seek(at)
                return file.read(nbytes)
        except OSError as e:
            raise unreadable(self.path, e) from e


class _OpenFile(io.RawIOBase):
    """A file of this machine or of a sparse copy, open for reading."""

    def __init__(self, path: Path) -> None:
        self.fd, self.at = descriptors.open_file(path), 0
        self.size = os.fstat(self.fd).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = max(0, base + offset)
        return self.at

    def read(self, size: int = -1) -> bytes:
        # a header may state any size, and the memory for it would be allocated first
        left = max(0, self.size - self.at)
        left, parts = min(size, left) if size >= 0 else left, list[bytes]()
        # the operating system may read less than it is asked for
        while left and (part := descriptors.pread(self.fd, left, self.at)):
            parts.append(part)
            self.at += len(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.size:  # it may be beyond the numbers of the operating system
            return 0
        self.at += (nbytes := descriptors.preadv(self.fd, [memoryview(buffer)], self.at))
        return nbytes

    def close(self) -> None:
        if not self.closed:
            descriptors.close(self.fd)
        super().close()


class _TarMember(tarfile.TarInfo):
    """A header of a tar file. tarfile calls `_proc_member` for each, and says in its source that
    subclasses may override it.
    """

    # typeshed leaves `_proc_member` out, so mypy does not know that of the base class
    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        if self.size < 0:
            raise _BadHeader(f"{self.name[:80]!r} has {self.size:,} bytes")
        if self.type not in _LONG:
            return super()._proc_member(tar)  # type: ignore[misc]  # see above
        if self.size > _LONGEST:
            raise _BadHeader(
                f"the header of a long name at byte {self.offset:,} has {self.size:,} bytes, more"
                f" than {_LONGEST:,}"
            )
        # each is followed by the header that it belongs to
        tar.nested += 1
        if tar.nested > _NESTED:
            raise _BadHeader(
                f"more than {_NESTED} headers of long names in a row end at byte {self.offset:,}"
            )
        found = super()._proc_member(tar)  # type: ignore[misc]  # see above
        tar.nested = 0
        return found


class _Tar(tarfile.TarFile):
    """A tar file whose headers are bounded."""

    tarinfo = _TarMember
    nested = 0  # headers of long names that precede the member that is read


class _BadHeader(Exception):
    """A header that no archive of NeMo has."""


def _is_compressed(path: Path) -> bool:
    with _OpenFile(path) as file:
        return file.read(len(_GZIP)) == _GZIP


def _unpickled(copy: SparseCopy | None, path: str, tar: Path) -> Archive:
    """Returns the archive of another process."""
    return Archive(Path(path) if copy is None else copy.root / path, tar)


def _members(tar: Path, shown: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the first byte and the number of bytes of each file in a tar, by name.

    shown: the path for errors.
    """
    places: dict[str, int] = {}
    sizes: dict[str, int] = {}
    cure = "copy it again"
    try:
        with _OpenFile(tar) as file, _Tar.open(fileobj=file, mode="r:") as opened:
            for member in opened:
                if member.size < 0:  # of a header for long names
                    raise _BadHeader(f"{member.name[:80]!r} has {member.size:,} bytes")
                name = posixpath.normpath(member.name)
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise SourceError(
                        f"{shown}: {member.name!r} is a link, a device or a sparse file, and NeMo"
                        " writes plain files only; unpack the archive, and give its directory"
                    )
                if posixpath.isabs(name) or name.split("/")[0] in ("..", "."):
                    raise SourceError(
                        f"{shown}: {member.name!r} lies outside of the archive, so it is not one"
                        " that NeMo wrote"
                    )
                if name in places:
                    raise SourceError(f"{shown}: has {name!r} twice; {cure}")
                places[name], sizes[name] = member.offset_data, member.size
            end = opened.offset
            file.seek(end)
            last = file.read(_BLOCK)
    except (tarfile.TarError, _BadHeader) as e:
        raise SourceError(
            f"{shown}: is not a tar archive, or is truncated or damaged ({e}); {cure}"
        ) from None
    if last != bytes(_BLOCK):
        raise SourceError(
            f"{shown}: has no end of a tar archive at byte {end:,}, so it is truncated; {cure}"
        )
    return places, sizes


def _unpacked(path: Path) -> Path:
    """Returns the tar file of a compressed archive, in a new temporary directory."""
    from gzip import BadGzipFile

    from isal import igzip, isal_zlib

    tar = sparse_copy.temporary() / path.with_suffix(".tar").name
    try:
        with _OpenFile(path) as file, igzip.open(file, "rb") as source, open(tar, "wb") as out:
            room = _ROOM + _RATIO * file.size
            while block := source.read(_COPY):
                if (room := room - len(block)) < 0:
                    raise SourceError(
                        f"{path}: its {file.size:,} bytes are more than {_RATIO} times as many when"
                        " they are unpacked, which weights never are; unpack it yourself if it is"
                        " right, and give the directory"
                    )
                out.write(block)
    except (EOFError, isal_zlib.error, BadGzipFile) as e:  # type: ignore[misc]  # a class at run time
        raise SourceError(
            f"{path}: is truncated or damaged: {e or type(e).__name__}; copy it again"
        ) from None
    return tar
