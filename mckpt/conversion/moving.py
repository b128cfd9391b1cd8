"""The steps of a run, which are the same for a local directory and an object store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from mckpt.conversion import done
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.refusals import dropped
from mckpt.errors import DestinationError, SourceError
from mckpt.execute.engine import Machines
from mckpt.execute.ranks import Gone, Ranks, Session
from mckpt.execute.transfer import CopySettings
from mckpt.options import RunOptions
from mckpt.progress import OnProgress, watched


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

    def copying(self) -> CopySettings:
        """Returns those of how a process copies."""
        return CopySettings(self.max_memory, self.threads, self.checksum, self.allow_overflow)

    @cached_property
    def cluster(self) -> Machines | None:
        """Returns the machines of the engine; None if this process does the work itself."""
        if self.engine != "ray":
            return None
        from mckpt.execute.ray_tasks import RayCluster

        return RayCluster()


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
    plan: PlanData, state: SourceState, notes: Sequence[str], sums: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of mckpt.json after a run.

    state: that of the source files. notes: those on what was dropped. sums: the checksum
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
        "dropped": notes,
        "files": files,
        **plan.side.recorded(),
    }


class Publisher(ABC):
    """Brings the files of a plan to their destination, as one of the ranks of a run. A subclass
    knows the kind of the destination.

    before: the state of the source files when the run began.
    folder: the staging directory, or the directory of the journal in a store. Its name is the same
        for all runs of a command that read this state; with `kind`, for all runs of that kind.
    existing: for ranks other than 0, the manifest of the output that was there at the start.
    """

    def __init__(self, plan: PlanData, how: RunSettings, ranks: Ranks, kind: str = "") -> None:
        self.plan, self.how, self.ranks = plan, how, ranks
        self.destination, self.before = plan.destination, plan.state()
        self.key = plan.key(how.checksum, kind or self.before.shared)
        self.folder = self.destination.staging_directory(self.key)
        self.session = Session(self.folder, ranks, how.on_note)
        self.existing: dict[str, Any] | None = None

    # ---- rank 0

    def lead(self) -> dict[str, Any]:
        """Runs the plan as rank 0, and returns the manifest."""
        plan, alone = self.plan, self.ranks.size == 1
        plan.side.check_unchanged()
        if alone:  # before any file is created
            notes = self.dropped()
        with self.begun():
            if self.resumes and (output := done.existing_output(plan)).manifest is not None:
                self.discard()  # the earlier run was killed after its output was in place
                done.complete(plan, output)
                return output.manifest
            if not alone:  # within the session, so that the other ranks learn of an error
                notes = self.dropped()
            return self.finish(notes, self.put())

    def dropped(self) -> list[str]:
        """Returns notes on the values that the run drops; raises the error of those that it may
        not drop.
        """
        return dropped(self.plan.source, self.how.check_replicas)

    def finish(self, notes: Sequence[str], sums: Sequence[str]) -> dict[str, Any]:
        """Publishes the files, which have these checksums; returns the manifest."""
        manifest = manifest_of(self.plan, self.unchanged(), notes, sums)
        self.publish(manifest)
        return manifest

    @abstractmethod
    def begun(self) -> AbstractContextManager[None]:
        """Makes the place of the run and opens its session. Raises DestinationError if files or
        another run are in the way.
        """

    @property
    @abstractmethod
    def resumes(self) -> bool:
        """True if an earlier run of this command may have been killed after it had published."""

    @abstractmethod
    def put(self) -> list[str]:
        """Writes this rank's share of the files; on rank 0 returns the checksums of all files."""

    @abstractmethod
    def unchanged(self) -> SourceState:
        """Returns the state of the source; raises SourceError if it is not that of the run."""

    @abstractmethod
    def publish(self, manifest: dict[str, Any]) -> None:
        """Makes the output a checkpoint, and removes the place of the run."""

    @abstractmethod
    def discard(self) -> None:
        """Removes the place of the run."""

    # ---- other ranks

    # errors that mean that rank 0 may have published
    ended: tuple[type[BaseException], ...]

    def help(self) -> dict[str, Any]:
        """Writes the share of a rank other than 0, waits until rank 0 has published, and returns
        the manifest.
        """
        try:
            with self.session:
                self.session.join(self.published, self.refuse)
                self.put()
                self.session.listen()
        except self.ended:
            if (manifest := self.result()) is None:
                raise
            return manifest

    def published(self, late: bool) -> bool:
        """Returns whether the output of this plan is published and the run is over.

        With --overwrite, the published output may be that of an earlier run. If this rank then
        left at once, rank 0 would wait for it in vain. So it accepts the existing output only
        after the time that rank 0 waits for missing ranks.
        """
        return (late or not self.destination.overwrite) and self.output() is not None

    def output(self) -> dict[str, Any] | None:
        """Returns the manifest of the output of this plan, None if it is not there."""
        return done.existing_output(self.plan, look=False).manifest

    def refuse(self) -> None:
        """Raises the error that rank 0 finds before it has a place in which to report it."""
        self.plan.side.check_unchanged()
        try:
            self.refuse_occupied()
        except DestinationError:
            if self.existing is None and not self.destination.overwrite:
                self.existing = done.existing_output(self.plan).manifest
            if self.existing is not None:  # rank 0 may still compare the content
                raise Gone(f"{self.destination.path}: is done already") from None
            raise

    @abstractmethod
    def refuse_occupied(self) -> None:
        """Raises DestinationError if files or another run are in the way."""

    @abstractmethod
    def result(self) -> dict[str, Any] | None:
        """Returns the manifest that rank 0 has published, None if it has not."""
