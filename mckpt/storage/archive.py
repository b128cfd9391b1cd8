"""The archives of NeMo 1 (`.nemo`), tar files, as stores: a member is an object, and a read of it
is a read of the archive at the byte where the member begins.

    ./model_config.yaml               the description of the model
    ./model_weights/.metadata ...     a checkpoint of Megatron-Core
    ./mp_rank_00/model_weights.ckpt   in its place, a torch.save file of each rank
(NeMo, core/connectors/save_restore_connector.py)

A compressed archive is unpacked first, into one tar file in the directory of temporary files.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mckpt.errors import SourceError, UsageError
from mckpt.storage import sparse_copy
from mckpt.storage.files import unreadable
from mckpt.storage.stores import Object

_GZIP = b"\x1f\x8b"
_BLOCK = tarfile.BLOCKSIZE
_COPY = 1 << 22  # bytes that are unpacked at a time


class Archive:
    """The members of a tar file. They are only read."""

    note = ""  # what a plan states about the archive

    def __init__(self, path: Path) -> None:
        """Raises SourceError if the archive is damaged, or if a member is not a file with a path
        below the directory that the archive stands for.
        """
        self.path = self.tar = path
        try:
            with open(path, "rb") as file:
                if file.read(2) == _GZIP:
                    self.tar = _unpacked(path)
                    self.note = (
                        f"{path} is compressed, so its {self.tar.stat().st_size:,} bytes were"
                        f" unpacked below {self.tar.parent.parent}; they are removed at the end"
                    )
            self.changed = self.tar.stat().st_mtime_ns
            self.places, sizes = _members(self.tar, path)
        except OSError as e:
            raise unreadable(e.filename or path, e) from e
        version = str(self.changed)
        self.objects = {name: Object(size, version, self.changed) for name, size in sizes.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self.path,)

    def list(self) -> dict[str, Object]:
        """Returns the members by name."""
        return self.objects

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> bytes:
        """Returns the bytes of a member from `at` on; fewer at its end.

        Raises SourceError if the archive has changed, StorageError if it cannot be read.
        """
        try:
            fd = os.open(self.tar, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_mtime_ns != self.changed:
                    raise SourceError(
                        f"{self.path}: was changed while it was read; run the command again when"
                        " nothing writes there"
                    )
                nbytes = max(0, min(nbytes, self.objects[name].size - at))
                return os.pread(fd, nbytes, self.places[name] + at)
            finally:
                os.close(fd)
        except OSError as e:
            raise unreadable(self.path, e) from e

    def write(self, name: str, data: bytes | Path) -> str:
        raise UsageError(f"{self.path}: is an archive, which mckpt only reads")

    def remove(self, names: Iterable[str]) -> None:
        raise UsageError(f"{self.path}: is an archive, which mckpt only reads")


def _members(tar: Path, shown: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the first byte and the number of bytes of each file in a tar, by name.

    shown: the path for errors.
    """
    places: dict[str, int] = {}
    sizes: dict[str, int] = {}
    cure = "copy it again"
    try:
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
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
    except tarfile.TarError as e:
        raise SourceError(
            f"{shown}: is not a tar archive, or is truncated or damaged ({e}); {cure}"
        ) from None
    with open(tar, "rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):
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
        with igzip.open(path, "rb") as source, open(tar, "wb") as out:
            while block := source.read(_COPY):
                out.write(block)
    except (EOFError, isal_zlib.error, BadGzipFile) as e:  # type: ignore[misc]  # a class at run time
        raise SourceError(
            f"{path}: is truncated or damaged: {e or type(e).__name__}; copy it again"
        ) from None
    return tar
