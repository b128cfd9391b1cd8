"""Runs a plan: moves the bytes into the staging directory, and publishes the complete output by
rename. Nothing else changes in the destination.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mckpt.conversion import done
from mckpt.conversion.moving import RunSettings, check_unchanged, manifest_of, move
from mckpt.conversion.plan_data import PlanData
from mckpt.conversion.refusals import dropped
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import Destination
from mckpt.errors import DestinationError, StorageError
from mckpt.execute.ranks import Gone, Ranks, Session
from mckpt.storage.staging import MANIFEST, REPLACED, STAGING, discard, in_place, mark, sync


def run(plan: PlanData, how: RunSettings, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    before = plan.state()
    key = plan.key(how.checksum, before.shared)
    destination = plan.destination
    session = Session(destination.staging_directory(key), ranks, how.on_note)
    if ranks.rank:
        return _help(plan, session, how)
    plan.side.check_unchanged()
    if ranks.size == 1:  # before any file is created
        notes = dropped(plan.source, how.check_replicas)
    with destination.staging(key, str(before), how.resume, ranks.name) as staging, session:
        # other ranks would take this output for an old one that --overwrite replaces
        ends = how.resume and in_place(staging) and not (destination.overwrite and ranks.size > 1)
        if ends and (output := done.existing_output(plan)).manifest is not None:
            discard(staging)  # the earlier run was killed after its output was in place
            done.complete(plan, output)
            return output.manifest
        session.open()
        if ranks.size > 1:  # within the session, so that the other ranks learn of an error
            notes = dropped(plan.source, how.check_replicas)
        sums = _move(plan, session, how)
        look = partial(done.differing, plan, staging / "data", how.checksum, how.max_memory)
        now = check_unchanged(plan, before, look)
        manifest = manifest_of(plan, now, notes, sums)
        publish(destination, staging, plan.side, manifest)
        if staging.exists():
            how.on_note(f"{staging}: cannot be removed now; the same command removes it")
    return manifest


def _move(plan: PlanData, session: Session, how: RunSettings) -> list[str]:
    """Copies this rank's share of the bytes; returns the checksum of each file."""
    joined = plan.joined
    return move(
        joined,
        plan.source.layout.files,
        session.staging,
        plan.outputs,
        joined.copies,
        joined.grids,
        how,
        session,
        how.progress,
    )


def _help(plan: PlanData, session: Session, how: RunSettings) -> dict[str, Any]:
    """Copies the share of a rank other than 0, then waits until rank 0 has published."""
    destination = plan.destination

    def over(late: bool) -> bool:
        """Returns whether the output of this plan is published and the run is over.

        With --overwrite, the published output may be that of an earlier run. If this rank then
        left at once, rank 0 would wait for it in vain. So it accepts the existing output only
        after the time that rank 0 waits for missing ranks.
        """
        may_be_ours = late or not destination.overwrite
        return may_be_ours and done.existing_output(plan, look=False).manifest is not None

    def refuse() -> None:
        plan.side.check_unchanged()
        try:
            destination.refuse(session.staging, session.ranks.name)
        except DestinationError:
            if not destination.overwrite and done.existing_output(plan).manifest is not None:
                # rank 0 may still compare the content
                raise Gone(f"{destination.path}: is done already") from None
            raise

    try:
        with session:
            session.join(over, refuse)
            _move(plan, session, how)
            session.listen()
    except (StorageError, OSError):  # Gone, or an error that a removed file caused
        if session.staging.exists():
            raise
        manifest = destination.manifest()
        if manifest.get("plan") != plan.digest:
            raise
        return manifest


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
