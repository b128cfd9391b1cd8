"""The parts of a run that a local directory and an object store have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.errors import SourceError, UsageError
from mckpt.execute.engine import Cluster, Overflow, execute
from mckpt.execute.ranks import Session
from mckpt.geometry.join import Joined
from mckpt.options import RunOptions
from mckpt.progress import OnProgress, watched
from mckpt.storage.files import TargetFile


def ignore(text: str) -> None:
    """Drops a note for the user. Unlike a lambda, it can be sent to another process."""


class RunSettings(RunOptions, frozen=True, dict=True):
    """The settings of one run of a plan: its options, and what is called meanwhile."""

    progress: OnProgress | None = None
    on_note: Callable[[str], None] = ignore

    @classmethod
    def of(cls, given: Mapping[str, Any], **more: Any) -> RunSettings:
        """Returns the settings; once the event `cancel` of `given` is set, the run ends."""
        progress = watched(given.get("progress"), given.get("cancel"))
        return super().of(given, **{"progress": progress} | more)

    @cached_property
    def cluster(self) -> Cluster | None:
        """Returns the machines of the engine; None if this process does the work itself."""
        if self.engine != "ray":
            return None
        from mckpt.execute.ray_tasks import RayCluster

        return RayCluster()


def move(
    joined: Joined,
    sources: Sequence[str],
    staging: Path,
    outputs: Sequence[TargetFile],
    copies: np.ndarray,
    grids: np.ndarray,
    how: RunSettings,
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


def check_unchanged(
    plan: PlanData, before: SourceState, look: Callable[[], str] | None = None
) -> SourceState:
    """Returns the state of the source files now. Raises SourceError if they have changed since the
    run began.

    look: compares the output with the source, and returns the path of a file that differs. It is
    called if the state has changed, which also happens without a change of the content, as after a
    chmod.
    """
    now = plan.state(refresh=True)
    if now == before or (look and not look() and plan.state(refresh=True) == now):
        return now
    raise SourceError(
        f"{plan.source.path}: was changed while it was read; run the command again when"
        " nothing writes there"
    )


def manifest_of(
    plan: PlanData, state: SourceState, dropped: Sequence[str], sums: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of mckpt.json after a run.

    state: that of the source files. dropped: the notes on what was dropped. sums: the checksum
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
        "dropped": dropped,
        "files": files,
        **plan.side.recorded(),
    }
