"""Runs a plan: moves the bytes into the staging directory, and publishes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from mckpt.conversion import done
from mckpt.conversion.identity import State, key_of
from mckpt.conversion.moving import RunSettings, check_unchanged, dropped, manifest_of, move
from mckpt.conversion.plan_data import PlanData
from mckpt.conversion.publishing import publish
from mckpt.errors import DestinationError, StorageError
from mckpt.execute.ranks import Gone, Ranks, Session
from mckpt.storage.staging import discard, in_place


def run(plan: PlanData, how: RunSettings, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    before = State.of(plan)
    key = key_of(plan, how.checksum, before.shared)
    destination = plan.destination
    session = Session(destination.staging_directory(key), ranks, how.tell)
    if ranks.rank:
        return _help(plan, session, how)
    plan.side.check_unchanged()
    if ranks.size == 1:  # before any file is created
        said = dropped(plan, how.check_replicas)
    with destination.staging(key, str(before), how.resume, ranks.name) as staging, session:
        # other ranks would take this output for an old one that --overwrite replaces
        ends = how.resume and in_place(staging) and not (destination.overwrite and ranks.size > 1)
        if ends and (verdict := done.judge(plan)).manifest is not None:
            discard(staging)  # the earlier run was killed after its output was in place
            done.settle(plan, verdict)
            return verdict.manifest
        session.open()
        if ranks.size > 1:  # within the session, so that the other ranks learn of an error
            said = dropped(plan, how.check_replicas)
        sums = _move(plan, session, how)
        look = partial(done.differing, plan, staging / "data", how.checksum, how.max_memory)
        now = check_unchanged(plan, before, look)
        manifest = manifest_of(plan, now, said, sums)
        publish(destination, staging, plan.side, manifest)
        if staging.exists():
            how.tell(f"{staging}: cannot be removed now; the same command removes it")
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
        return may_be_ours and done.judge(plan, look=False).manifest is not None

    def refuse() -> None:
        plan.side.check_unchanged()
        try:
            destination.refuse(session.staging, session.ranks.name)
        except DestinationError:
            if not destination.overwrite and done.judge(plan).manifest is not None:
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
