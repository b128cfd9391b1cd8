"""Output appears when it is complete, by rename, and nothing else in the destination is touched."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mckpt.conversion.destination import Destination
from mckpt.conversion.side_files import SideFiles
from mckpt.errors import StorageError
from mckpt.storage.staging import OVER, REPLACED, STAGING, mark, sync


def publish(destination: Destination, staging: Path, side: SideFiles) -> None:
    """Staged data becomes the checkpoint. The files of DST/hf are in place before it appears."""
    try:
        data = staging / "data"
        for folder, _, names in os.walk(data):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        with _alone(destination.root):
            destination.refuse_occupied(staging)  # it may have been filled since it was looked at
            side.refuse_other()
            side.publish(staging)
            if destination.unit is None:
                marked = mark({path.name: path for path in data.iterdir()}, staging)
                _place_files(destination, data, staging)
            else:
                marked = mark({destination.unit: data}, staging)
                _place_unit(destination, destination.unit, data, staging)
            os.unlink(marked)
            _remove(staging)
    except OSError as e:
        raise StorageError(
            f"{destination.path}: cannot be put in place: {e.strerror or e} ({e.filename}); the"
            f" complete data is in {staging}"
        ) from e


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """A context in which other runs of mckpt wait before they publish into the same directory."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _place_unit(destination: Destination, unit: str, data: Path, staging: Path) -> None:
    """A checkpoint of a save directory: the directory as a whole, then the tracker."""
    if os.path.lexists(destination.path):
        _put_aside(destination.path, staging)
    os.rename(data, destination.path)
    sync(destination.root)
    if destination.tracker.moves_to(unit):
        destination.tracker.move_to(unit)


def _place_files(destination: Destination, data: Path, staging: Path) -> None:
    """A Hugging Face directory: file by file, the one that makes it a checkpoint last."""
    path, last = destination.path, destination.format.last
    old = [p.name for p in path.iterdir() if not p.name.startswith(STAGING)]
    # the last one first, so that no mixture of old and new can be loaded
    for name in sorted(old, key=lambda n: n != last):
        _put_aside(path / name, staging)
    names = sorted(p.name for p in data.iterdir() if p.name != last)
    for name in names:
        os.rename(data / name, path / name)
    # after a power cut it must not be there without the rest
    sync(path)
    os.rename(data / last, path / last)
    sync(path)


def _put_aside(path: Path, staging: Path) -> None:
    """Move what is replaced into the staging directory, which goes when all is done."""
    aside = staging / REPLACED
    aside.mkdir(exist_ok=True)
    # a killed run may have left some there
    os.rename(path, aside / str(len(list(aside.iterdir()))))


def _remove(staging: Path) -> None:
    """Removes a staging directory.

    Renames it first, because other ranks write into it as long as they find it.
    """
    over = staging.with_name(f"{staging.name}{OVER}")
    shutil.rmtree(over, ignore_errors=True)
    os.replace(staging, over)
    shutil.rmtree(over, ignore_errors=True)
