"""The destination of a conversion, and the reasons to refuse it.

All output is first written to `DST/.mckpt-<plan>/data`. That directory is inside the destination,
so it is on the same filesystem. An interrupted run leaves it behind. No loader takes it for a
checkpoint, and the same command continues in it.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mckpt import formats
from mckpt.errors import DestinationError, SourceError, StorageError, shown
from mckpt.formats import places
from mckpt.formats.base import Format
from mckpt.formats.megatron import megatron_args
from mckpt.formats.megatron.save_directory import Tracker
from mckpt.storage import manifest, sparse_copy
from mckpt.storage.staging import (
    INTENT,
    LOCK,
    MANIFEST,
    REPLACED,
    SOURCE,
    STAGING,
    discard,
    identity,
    in_place,
    intended,
    lock,
    locked,
    marked,
    staging_directories,
    sweep,
    sync,
)


class Destination:
    """The place of one checkpoint: the directory `iteration_name` in a Megatron save directory, or
    a Hugging Face directory, where that name is None.
    """

    def __init__(
        self,
        root: Path,
        iteration_name: str | None,
        format: Format,
        source: Path,
        *,
        overwrite: bool = False,
        update_tracker: bool = False,
        rank0: bool = True,
    ) -> None:
        """Checks the destination.

        rank0: check now whether the destination is occupied; without it, the caller calls `check`
            later, or rank 0 checks it.
        """
        self.root, self.iteration_name, self.format = places.target(root), iteration_name, format
        self.overwrite = overwrite
        self.path = self.root / iteration_name if iteration_name else self.root
        self.tracker = Tracker(self.root, update_tracker)
        self._staging: Path | None = None  # staging directory of the running plan
        sparse_copy.fill(self.root / "hf")
        self._refuse_near(source)
        self._refuse_blocked()
        self.rank0 = rank0
        if rank0:  # the other ranks may have published before this rank started
            self.refuse_occupied()

    def _refuse_near(self, source: Path) -> None:
        # Path.resolve would raise for a loop of links, which `_refuse_blocked` reports. Two sparse
        # copies may be of one URL.
        here, there = (Path(shown(os.path.realpath(path))) for path in (self.root, source))
        if here == there:
            raise DestinationError(f"{self.root}: is the source itself; write to another directory")
        if here in there.parents or there in here.parents:
            where = "above" if here in there.parents else "inside"
            raise DestinationError(
                f"{self.root}: lies {where} the source {source}; write to a directory apart from it"
            )

    def _refuse_blocked(self) -> None:
        """Raises DestinationError if the directory, or one above it, is a file or a broken link."""
        there = next(path for path in (self.root, *self.root.parents) if os.path.lexists(path))
        if there.is_dir():
            return
        what = "is a file" if there.exists() else "is a link that leads nowhere"
        if there == self.root:
            raise DestinationError(f"{self.root}: {what}; give a directory")
        raise DestinationError(f"{self.root}: {there} {what}; give a path of directories")

    def refuse_occupied(self, staging: Path | None = None) -> None:
        """Raises DestinationError if files are in the way of the plan that uses `staging`.

        While `staging` is None, output of any interrupted run is accepted, because it may be of
        this plan.
        """
        occupied = self._occupants(staging)
        if not occupied:
            return
        if not self.overwrite:
            raise DestinationError(
                f"{self.path}: already contains"
                f" {occupied[0]}{' and other files' * (len(occupied) > 1)}; give --overwrite to"
                " replace the checkpoint in it"
            )
        foreign = self._foreign()
        if foreign:
            raise DestinationError(
                f"{self.path}: holds"
                f" {foreign[0]}{f' and {len(foreign) - 1} more' * (len(foreign) > 1)}, which does"
                " not belong to a checkpoint; --overwrite replaces a directory only if it holds one"
                " checkpoint and nothing else: move it away, or write to another directory"
            )

    def _occupants(self, staging: Path | None) -> list[str]:
        """Returns the names of the files that are in the way.

        Files that a killed run of the same plan had published are not in the way, because the same
        command replaces them.
        """
        if not self.path.is_dir():
            return [self.path.name] if os.path.lexists(self.path) else []
        if sparse_copy.of(self.root) is not None:
            intent = intended(self.root, staging)
            there = [p for p in sorted(self.path.rglob("*")) if p.is_file()]
            names = [p.relative_to(self.root).as_posix() for p in there]
            return [n for n in names if n not in intent and not n.startswith(STAGING)]
        half: dict[str, set[str]] = {}
        # a run whose output is all in place is over: `done` compares that output
        runs = (p for p in staging_directories(self.root) if not in_place(p))
        for folder in runs if staging is None else [staging]:
            for name, identities in marked(folder).items():
                half.setdefault(name, set()).update(identities)
        if self.iteration_name is not None:
            ours = self.iteration_name in half and identity(self.path) in half[self.iteration_name]
            return [] if ours else sorted(p.name for p in self.path.iterdir())
        there = sorted(p for p in self.path.iterdir() if not p.name.startswith(STAGING))
        return [p.name for p in there if p.name not in half or identity(p) not in half[p.name]]

    def _foreign(self) -> list[str]:
        """Returns the files, and links to directories, that no checkpoint of this kind has and that
        the manifest does not name.
        """
        if not self.path.is_dir():
            return [self.path.name]
        written = set(self.manifest().get("files", ()))
        # --overwrite may replace a checkpoint of another format
        parts = [MANIFEST, megatron_args.SHELL, megatron_args.JSON]
        for format in formats.all_of(self.format.megatron):
            parts += format.parts
        out = []
        for folder, inner, names in os.walk(self.path):
            here = Path(folder).relative_to(self.path)
            if self.iteration_name is None and here == Path():
                inner[:] = [d for d in inner if not d.startswith(STAGING)]
            links = [d for d in inner if (Path(folder) / d).is_symlink()]
            for name in (*names, *links):
                path = (here / name).as_posix()
                if path not in written and not any(
                    p.count("/") == path.count("/") and fnmatch.fnmatchcase(path, p) for p in parts
                ):
                    out.append(path)
        return sorted(out)

    def staging_directory(self, plan: str) -> Path:
        """Returns the directory that holds the files of a plan until they are complete."""
        return self.root / f"{STAGING}{plan[:16]}"

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest of the published checkpoint; {} if there is none that is sound."""
        with suppress(SourceError, StorageError):
            return dict(manifest.read(self.path))
        return {}

    def refuse(self, staging: Path, run: str) -> None:
        """Raises the error that `staging` would raise for this run, and changes nothing. A waiting
        rank calls it to learn whether rank 0 is refused.
        """
        self.refuse_occupied(staging)
        with suppress(FileNotFoundError):
            if (staging / LOCK).read_text() != run and locked(staging / LOCK):
                raise DestinationError(f"{staging}: another mckpt is writing here")
        self._refuse_read_only(staging / LOCK)

    def check(self) -> None:
        """Raises the error that a run would raise before it writes. Output of any interrupted run
        is accepted, because this plan may continue it.
        """
        self.refuse_occupied()
        self._refuse_read_only(self.root)

    @staticmethod
    def _refuse_read_only(path: Path) -> None:
        there = next(p for p in (path, *path.parents) if os.path.exists(p))
        if not os.access(there, os.W_OK):
            raise StorageError(f"{path}: cannot be made: no permission to write to {there}")

    @contextmanager
    def staging(self, plan: str, source: str, resume: bool = True, run: str = "") -> Iterator[Path]:
        """Yields the locked staging directory of a plan. If the body raises, its content stays;
        with `resume` it is used again if its bytes are of the same state of the `source`.

        The lock file contains the name of the `run` that holds it.
        """
        made = [p for p in (self.root, *self.root.parents) if not p.exists()]
        folder = self._staging = self.staging_directory(plan)
        self.refuse_occupied(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StorageError(f"{folder}: cannot be made: {e.strerror or e}") from e
        try:
            if not lock(lock_file):
                raise DestinationError(f"{folder}: another mckpt is writing here")
            os.ftruncate(lock_file, 0)
            os.write(lock_file, run.encode())
            os.fsync(lock_file)  # so that ranks on other machines can read it
            if not resume or _text(folder / SOURCE) != source:
                for inner in (p for p in folder.iterdir() if p.is_dir() and p.name != REPLACED):
                    shutil.rmtree(inner)
                sync(folder)  # after a power cut, this state must not vouch for earlier bytes
                (folder / SOURCE).write_text(source)
            for p in made:
                sync(p.parent)
            yield folder
        finally:
            os.close(lock_file)
            # NFS keeps the name of an open file, so the directory can be removed only now
            with suppress(OSError):
                os.rmdir(folder)
            self.clean()

    def clean(self, *plans: str) -> None:
        """Removes the staging directories that killed runs had begun to remove, and those of these
        plans, whose output is in place.
        """
        place = sparse_copy.of(self.root)
        for plan in plans:
            folder = self.staging_directory(plan)
            if place is not None and not (folder / INTENT).exists():
                place.remove(place.below(folder))
            with suppress(OSError):
                lock_file = os.open(folder / LOCK, os.O_RDWR)
                try:
                    if lock(lock_file):
                        discard(folder)
                finally:
                    os.close(lock_file)
        sweep(self.root)

    def tracker_note(self) -> str | None:
        """Returns a note if the tracker will still name another checkpoint, else None."""
        return None if self.iteration_name is None else self.tracker.note(self.iteration_name)

    def left_over(self) -> list[tuple[Path, int]]:
        """Returns the staging directories in this destination that neither this plan nor a running
        mckpt uses, each with its size on disk in bytes. None in a store, which has no locks.
        """
        out: list[tuple[Path, int]] = []
        if sparse_copy.of(self.root) is not None:
            return out
        for folder in staging_directories(self.root):
            with suppress(OSError):
                if folder != self._staging and not locked(folder / LOCK):
                    paths = [
                        Path(inner) / name for inner, _, names in os.walk(folder) for name in names
                    ]
                    out.append((folder, sum(os.lstat(p).st_blocks * 512 for p in paths)))
        return out


def _text(path: Path) -> str:
    """Returns the content of a small file, "" if there is none."""
    with suppress(OSError, ValueError):
        return path.read_text()
    return ""


# makes the destination of a checkpoint of a format; the name is that of its directory in a Megatron
# save directory, None in others
At = Callable[[str | None, Format], Destination]
