"""Runs a plan: moves the bytes into the staging directory, and publishes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mckpt.conversion import done
from mckpt.conversion.identity import State, key_of
from mckpt.conversion.publishing import publish
from mckpt.errors import DestinationError, SourceError, StorageError, UsageError
from mckpt.execute.checksums import KINDS
from mckpt.execute.engine import Cluster, Overflow, execute
from mckpt.execute.ranks import Gone, Ranks, Session
from mckpt.execute.ray_tasks import RayCluster
from mckpt.geometry.join import Joined
from mckpt.progress import OnProgress
from mckpt.storage.files import TargetFile
from mckpt.storage.staging import MANIFEST, discard, in_place

if TYPE_CHECKING:
    from mckpt.conversion.plan import Plan


OWN_HEAD = (
    "config.json says that the embedding is also the output layer (tied). transformers 5 ignores"
    " that where the output layer of the file differs, and uses both; transformers 4 ignores the"
    " output layer of the file. For the first give --set tied=false; for the second remove that"
    " tensor."
)


@dataclass(frozen=True)
class How:
    """The settings of one run of a plan. `Plan.run` explains them."""

    max_memory: int  # bytes
    threads: int
    checksum: str
    allow_overflow: bool
    resume: bool
    check_replicas: bool
    cluster: Cluster | None
    progress: OnProgress | None
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        if type(self.threads) is not int or self.threads < 0:
            raise UsageError(f"threads is {self.threads!r}, and must be a whole number from 0 on")
        if self.checksum not in KINDS:
            raise UsageError(f"checksum is {self.checksum!r}, and must be {' or '.join(KINDS)}")


def cluster_of(engine: str) -> Cluster | None:
    """Returns the machines that `engine` names, None if this process does the work itself."""
    if engine == "ray":
        return RayCluster()
    if engine != "local":
        raise UsageError(f"engine {engine!r}: is neither local nor ray")
    return None


def run(plan: Plan, how: How, ranks: Ranks) -> dict[str, Any]:
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
        # other ranks would take the output for an old one that --overwrite replaces
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
        (staging / "data" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        publish(destination, staging, plan.side)
        if staging.exists():
            how.tell(f"{staging}: cannot be removed now; the same command removes it")
    return manifest


def check_unchanged(plan: Plan, before: State, look: Callable[[], str] | None = None) -> State:
    """Returns the state of the source files now. Raises SourceError if they are not as they were
    when the run began.

    look: compares what was written with the source, and returns what differs. It decides if the
    state is another one, as after a chmod.
    """
    now = State.of(plan, refresh=True)
    if now == before or (look and not look() and State.of(plan, refresh=True) == now):
        return now
    raise SourceError(
        f"{plan.source.path}: was changed while it was read; run the command again when"
        " nothing writes there"
    )


def manifest_of(
    plan: Plan, state: State, said: Sequence[str], sums: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of mckpt.json after a run.

    state: that of the source files. said: the notes on what was dropped. sums: a checksum
    for each file of the plan.
    """
    files = {
        file.path: {"bytes": file.size, "checksum": checksum}
        for file, checksum in zip(plan.outputs, sums, strict=True)
    }
    return {
        **plan.facts,
        "plan": plan.digest,
        "read": str(state),
        "dropped": said,
        "files": files,
        **plan.side.recorded(),
    }


def _move(plan: Plan, session: Session, how: How) -> list[str]:
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


def move(
    joined: Joined,
    sources: Sequence[str],
    staging: Path,
    outputs: Sequence[TargetFile],
    copies: np.ndarray,
    grids: np.ndarray,
    how: How,
    session: Session | None = None,
    progress: OnProgress | None = None,
) -> list[str]:
    """Makes files of a plan in the directory data of `staging`; returns their checksums.

    copies, grids: those of the plan that write `outputs`, with the numbers of these files.
    """
    try:
        return execute(
            copies,
            joined.casts,
            sources,
            outputs,
            staging / "data",
            max_memory=how.max_memory,
            threads=how.threads,
            checksum=how.checksum,
            allow_overflow=how.allow_overflow,
            grids=grids,
            session=session,
            cluster=how.cluster,
            progress=progress,
        )
    except Overflow as e:
        raise UsageError(f"{joined.name(e.tensor)}: {e.place}") from e


def dropped(plan: Plan, check_replicas: bool) -> list[str]:
    """Returns sentences on the values that the conversion drops. Raises SourceError if copies of
    one tensor differ; those of a Megatron source are compared only if `check_replicas`.
    """
    source = plan.source
    look = check_replicas or not source.is_megatron
    if look and (apart := source.reader.check_replicas()):
        tied = not source.is_megatron and source.dims["tied"]
        raise SourceError.of(
            f"{source.path}: holds different copies of one tensor, and mckpt cannot tell which"
            " one is right:",
            apart,
            OWN_HEAD * tied,
        )
    return source.reader.padding()


def _help(plan: Plan, session: Session, how: How) -> dict[str, Any]:
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
