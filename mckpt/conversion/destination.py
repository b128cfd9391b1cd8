"""Where a checkpoint goes, and whether it can go there.

Everything is written in `DST/.mckpt-<plan>/data`, inside the destination: the same filesystem by
construction. A run that dies leaves that directory, which no loader takes for a checkpoint, and the
same command goes on in it.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mckpt import formats
from mckpt.errors import DestinationError, StorageError
from mckpt.formats.base import Format
from mckpt.formats.megatron import megatron_args
from mckpt.formats.megatron.save_directory import Tracker
from mckpt.storage.staging import (
    LOCK,
    MANIFEST,
    OVER,
    REPLACED,
    STAGING,
    identity,
    lock,
    locked,
    marked,
    sync,
)


class Destination:
    """Where one checkpoint goes: a unit of a Megatron save directory, or (unit None) a Hugging Face
    directory.
    """

    def __init__(
        self,
        root: Path,
        unit: str | None,
        format: Format,
        source: Path,
        *,
        overwrite: bool = False,
        update_tracker: bool = False,
        helps: bool = False,
    ) -> None:
        """helps: do not look yet whether something is in the way; the caller calls `check` later,
        or rank 0 looks.
        """
        self.root, self.unit, self.format = Path(os.path.abspath(root)), unit, format
        self.overwrite = overwrite
        self.path = self.root / unit if unit else self.root
        self.tracker = Tracker(self.root, update_tracker)
        self._staging: Path | None = None  # of the plan that runs
        self._refuse_near(source)
        if self.root.exists() and not self.root.is_dir():
            raise DestinationError(f"{self.root}: is a file; a directory is wanted")
        if not helps:  # it may be the work of the others, who were done before this one began
            self.refuse_occupied()

    def _refuse_near(self, source: Path) -> None:
        here, there = self.root.resolve(), source.resolve()
        if here == there:
            raise DestinationError(f"{self.root}: is the source itself; write to another directory")
        if here in there.parents or there in here.parents:
            where = "above" if here in there.parents else "inside"
            raise DestinationError(
                f"{self.root}: lies {where} the source {source}; write to a directory apart from it"
            )

    def refuse_occupied(self, staging: Path | None = None) -> None:
        """DestinationError if something is in the way of the plan of `staging`.

        Before that is known, any interrupted run might be it.
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
                f" {foreign[0]}{f' and {len(foreign) - 1} more' * (len(foreign) > 1)}, which is no"
                " part of a checkpoint; --overwrite replaces a directory that holds one checkpoint"
                " and nothing else: move it away, or write to another directory"
            )

    def _occupants(self, staging: Path | None) -> list[str]:
        """What is in the way.

        What a killed run of the same plan had put in place is not: the same command replaces it.
        """
        if not self.path.is_dir():
            return [self.path.name] if os.path.lexists(self.path) else []
        half: dict[str, set[str]] = {}
        for folder in self.root.glob(f"{STAGING}*") if staging is None else [staging]:
            for name, identities in marked(folder).items():
                half.setdefault(name, set()).update(identities)
        if self.unit is not None:
            ours = self.unit in half and identity(self.path) in half[self.unit]
            return [] if ours else sorted(p.name for p in self.path.iterdir())
        there = sorted(p for p in self.path.iterdir() if not p.name.startswith(STAGING))
        return [p.name for p in there if p.name not in half or identity(p) not in half[p.name]]

    def _foreign(self) -> list[str]:
        """Files, and links to directories, that no checkpoint of this kind has and that its
        manifest does not name.
        """
        if not self.path.is_dir():
            return [self.path.name]
        written: set[str] = set()
        with suppress(OSError, ValueError, TypeError, KeyError):
            written.update(json.loads((self.path / MANIFEST).read_bytes())["files"])
        # of any format: another one may be replaced
        parts = [MANIFEST, megatron_args.SHELL, megatron_args.JSON]
        for format in formats.all_of(self.format.megatron):
            parts += format.parts
        out = []
        for folder, inner, names in os.walk(self.path):
            here = Path(folder).relative_to(self.path)
            if self.unit is None and here == Path():
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
        """Where the files of a plan are until they are complete."""
        return self.root / f"{STAGING}{plan[:16]}"

    def manifest(self) -> dict[str, Any]:
        """That of the checkpoint in place; {} if there is none."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.path / MANIFEST).read_bytes())
            return found
        return {}

    def refuse(self, staging: Path, run: str) -> None:
        """Raises what `staging` would raise for this run, and changes nothing: for a rank that
        waits for the one that calls it.
        """
        self.refuse_occupied(staging)
        with suppress(FileNotFoundError):
            if (staging / LOCK).read_text() != run and locked(staging / LOCK):
                raise DestinationError(f"{staging}: another mckpt is writing here")
        self._refuse_read_only(staging / LOCK)

    def check(self) -> None:
        """Raises what a run would raise before it writes; a run that was interrupted here may be
        the one that would go on.
        """
        self.refuse_occupied()
        self._refuse_read_only(self.root)

    @staticmethod
    def _refuse_read_only(path: Path) -> None:
        there = next(p for p in (path, *path.parents) if os.path.exists(p))
        if not os.access(there, os.W_OK):
            raise StorageError(f"{path}: cannot be made: no permission to write to {there}")

    @contextmanager
    def staging(self, plan: str, resume: bool = True, run: str = "") -> Iterator[Path]:
        """The staging directory of a plan, locked; what it holds stays there if the body raises,
        and is used again with `resume`.

        While it is locked, its lock says which `run` holds it.
        """
        made = [p for p in (self.root, *self.root.parents) if not p.exists()]
        folder = self._staging = self.staging_directory(plan)
        self.refuse_occupied(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StorageError(f"{folder}: cannot be made: {e.strerror or e}") from e
        try:
            if not lock(held):
                raise DestinationError(f"{folder}: another mckpt is writing here")
            os.ftruncate(held, 0)
            os.write(held, run.encode())
            os.fsync(held)  # where another machine's rank reads it
            if not resume:
                for inner in (p for p in folder.iterdir() if p.is_dir() and p.name != REPLACED):
                    shutil.rmtree(inner)
            for p in made:
                sync(p.parent)
            yield folder
        finally:
            os.close(held)
            # NFS keeps the name of an open file: only now can its directory go
            with suppress(OSError):
                os.rmdir(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}{OVER}"), ignore_errors=True)

    def tracker_note(self) -> str | None:
        """What to say if the tracker will go on naming another checkpoint; None if not."""
        return None if self.unit is None else self.tracker.note(self.unit)

    def left_over(self) -> list[tuple[Path, int]]:
        """Staging directories here that neither this plan nor any running mckpt has, and what each
        takes on the disk, in bytes.
        """
        out = []
        for folder in sorted(self.root.glob(f"{STAGING}*")):
            with suppress(OSError):
                if folder != self._staging and folder.is_dir() and not locked(folder / LOCK):
                    paths = [
                        Path(inner) / name for inner, _, names in os.walk(folder) for name in names
                    ]
                    out.append((folder, sum(os.lstat(p).st_blocks * 512 for p in paths)))
        return out
