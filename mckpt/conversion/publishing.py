"""Publishes complete output by rename, and changes nothing else in the destination."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mckpt.conversion.destination import Destination
from mckpt.conversion.side_files import SideFiles
from mckpt.errors import StorageError
from mckpt.storage.staging import MANIFEST, REPLACED, STAGING, discard, in_place, mark, sync


def publish(
    destination: Destination, staging: Path, side: SideFiles, manifest: Mapping[str, Any]
) -> None:
    """Moves the staged data and their manifest to their final place. The files of DST/hf are there
    before the checkpoint appears.
    """
    (staging / "data" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    try:
        data = staging / "data"
        for folder, _, names in os.walk(data):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        with _alone(destination.root):
            destination.refuse_occupied(staging)  # files may have appeared since the first check
            side.refuse_other()
            side.publish(staging)
            if destination.iteration_name is None:
                mark({path.name: path for path in data.iterdir()}, staging)
                _place_files(destination, data, staging)
            else:
                mark({destination.iteration_name: data}, staging)
                _place_iteration(destination, destination.iteration_name, data, staging)
            discard(staging)
    except OSError as e:
        what = f"{e.strerror or e} ({e.filename})"
        raise StorageError(
            f"{destination.path}: is in place, but an error came after that: {what}; run the same"
            " command again"
            if in_place(staging)
            else f"{destination.path}: cannot be published: {what}; the complete data is in"
            f" {staging}"
        ) from e


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Locks the directory, so that other runs of mckpt wait before they publish into it."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _place_iteration(destination: Destination, name: str, data: Path, staging: Path) -> None:
    """Publishes a checkpoint of a save directory: the whole directory by one rename, then the
    tracker.
    """
    if os.path.lexists(destination.path):
        _put_aside(destination.path, staging)
    os.rename(data, destination.path)
    sync(destination.root)
    if destination.tracker.moves_to(name):
        destination.tracker.move_to(name)


def _place_files(destination: Destination, data: Path, staging: Path) -> None:
    """Publishes a Hugging Face directory file by file; the file that makes it a checkpoint comes
    last.
    """
    path, last = destination.path, destination.format.last
    old = [p.name for p in path.iterdir() if not p.name.startswith(STAGING)]
    # `last` is moved away first, so that no mixture of old and new files can be loaded
    for name in sorted(old, key=lambda n: n != last):
        _put_aside(path / name, staging)
    names = sorted(p.name for p in data.iterdir() if p.name != last)
    for name in names:
        os.rename(data / name, path / name)
    # after a power cut, `last` must not be there without the other files
    sync(path)
    os.rename(data / last, path / last)
    sync(path)


def _put_aside(path: Path, staging: Path) -> None:
    """Moves a replaced file into the staging directory, which is removed at the end."""
    aside = staging / REPLACED
    aside.mkdir(exist_ok=True)
    # a killed run may have left files there
    os.rename(path, aside / str(len(list(aside.iterdir()))))
