"""Runs a plan: writes its files to a place where no loader finds them, and publishes the complete
output. Nothing else changes in the destination.

`moving.Publisher` has the steps of a run. Here is the publisher of a local directory, which gets
its files by rename; `to_store` has that of an object store.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mckpt.conversion import done
from mckpt.conversion.moving import Publisher, RunSettings, check_unchanged
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import Destination
from mckpt.errors import StorageError
from mckpt.execute.engine import execute
from mckpt.execute.ranks import Ranks
from mckpt.storage import sparse_copy
from mckpt.storage.staging import MANIFEST, REPLACED, STAGING, discard, in_place, mark, sync


def run(plan: PlanData, how: RunSettings, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    kind: type[Publisher] = DirectoryPublisher
    if sparse_copy.of(plan.destination.root) is not None:
        from mckpt.conversion.to_store import StorePublisher

        kind = StorePublisher
    publisher = kind(plan, how, ranks)
    return publisher.help() if ranks.rank else publisher.lead()


class DirectoryPublisher(Publisher):
    """A local directory. The files are written in a staging directory, which all ranks see."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        state, name = str(self.before), self.ranks.name
        staging = self.destination.staging(self.key, state, self.how.resume, name)
        with staging, self.session:
            self.session.open()
            yield

    @property
    def resumes(self) -> bool:
        # other ranks would take this output for an old one that --overwrite replaces
        replaces = self.destination.overwrite and self.ranks.size > 1
        return self.how.resume and in_place(self.folder) and not replaces

    def put(self) -> list[str]:
        how = self.how
        more: Any = {"session": self.session, "cluster": how.cluster, "progress": how.progress}
        return execute(self.plan.transfer, self.folder / "data", how.copying(), **more)

    def unchanged(self) -> SourceState:
        data, how = self.folder / "data", self.how
        look = partial(done.differing, self.plan, data, how.checksum, how.max_memory)
        return check_unchanged(self.plan, self.before, look)

    def publish(self, manifest: dict[str, Any]) -> None:
        publish(self.destination, self.folder, self.plan.side, manifest)
        if self.folder.exists():
            self.how.on_note(f"{self.folder}: cannot be removed now; the same command removes it")

    def discard(self) -> None:
        discard(self.folder)

    ended = StorageError, OSError  # Gone, or an error that a removed file caused

    def refuse_occupied(self) -> None:
        self.destination.refuse(self.folder, self.ranks.name)

    def result(self) -> dict[str, Any] | None:
        manifest = self.destination.manifest()
        gone = not self.folder.exists() and manifest.get("plan") == self.plan.digest
        return manifest if gone else None


class Once(DirectoryPublisher):
    """A local directory whose run no later run can continue, such as that of a stream. If the run
    fails, its staging directory is removed.
    """

    def __init__(
        self, plan: PlanData, how: RunSettings, kind: str, write: Callable[[Path], list[str]]
    ) -> None:
        """kind: what is written, in one word. A run of this kind finds and replaces what a killed
        one left. write: writes the files below a directory, and returns their checksums.
        """
        super().__init__(plan, how, Ranks(), kind)
        self.write = write

    @contextmanager
    def begun(self) -> Iterator[None]:
        with self.destination.staging(self.key, str(self.before), resume=False):
            try:
                yield
            except BaseException:
                # what a killed run replaced is the user's
                if (self.folder / REPLACED).exists():
                    shutil.rmtree(self.folder / "data", ignore_errors=True)
                else:
                    self.discard()
                raise

    @property
    def resumes(self) -> bool:
        return False

    def dropped(self) -> list[str]:
        return []

    def put(self) -> list[str]:
        return self.write(self.folder / "data")

    def unchanged(self) -> SourceState:
        return self.before


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
