"""Makes the files of a plan on the local disk, a group at a time, and sends them to a store."""

from __future__ import annotations

import filecmp
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mckpt.conversion.groups import part
from mckpt.conversion.moving import RunSettings, ignore, move
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.side_files import other_tensors
from mckpt.conversion.store_journal import Sent, StoreJournal
from mckpt.errors import SourceError
from mckpt.execute.engine import KNEE, Step, Tick
from mckpt.geometry.join import Joined
from mckpt.storage import sparse_copy
from mckpt.storage.files import TargetFile, stamp

FILES = 2  # files that are sent at the same time, each in several parts


@dataclass(frozen=True, eq=False)
class Sender:
    """Makes and sends groups of the files of a plan. It can be pickled, for a process on another
    machine that does a part (engine.Task).

    groups: the numbers of the files of each group.
    carried: the files of carried tensors, which other checkpoints share.
    state: that of the source files when the run began.
    """

    journal: StoreJournal
    outputs: Sequence[TargetFile]
    joined: Joined
    sources: Sequence[Path]
    state: SourceState
    groups: Sequence[Sequence[int]]
    carried: frozenset[int]
    how: RunSettings

    @classmethod
    def of(
        cls,
        plan: PlanData,
        journal: StoreJournal,
        how: RunSettings,
        state: SourceState,
        groups: Sequence[Sequence[int]],
        carried: frozenset[int],
    ) -> Sender:
        sources = [Path(file) for file in plan.source.layout.files]
        # the process that sends makes the files itself, and its caller reports
        how = replace(how, engine="local", progress=None, on_note=ignore)
        return cls(
            journal,
            plan.outputs,
            plan.joined,
            sources,
            state,
            groups,
            carried,
            how,
        )

    # ---- as a task of another machine

    @property
    def threads(self) -> int:
        """The number of cores that a sending process keeps busy."""
        return self.how.threads or KNEE

    def mark(self) -> str:
        """Returns the id of the run that the journal in the store belongs to, "" if none does."""
        line = self.journal.last_line()
        return line.id if line else ""

    @property
    def place(self) -> Path:
        return self.journal.folder

    def do(self, step: Step, items: range, tick: Tick) -> None:
        """Makes and sends these groups, without the files that the journal lists."""
        self._refuse_other_source()
        self.send([self.groups[i] for i in items], self.journal.sent())

    def _refuse_other_source(self) -> None:
        stamps = self.state.stamps[: len(self.sources)]  # those of copied files follow
        for file, known in zip(self.sources, stamps, strict=True):
            if not file.exists() or stamp(file).shared != known.shared:
                raise SourceError(
                    f"{file}: is not the file that the command reads; mount the source at the same"
                    " path on all nodes, or give its URL"
                )

    # ---- in every process

    def send(
        self,
        groups: Sequence[Sequence[int]],
        done: dict[int, Sent],
        report: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Makes and sends the files of these groups that are not in `done`, and adds them to it.
        While one group is sent, the next one is made.

        report: called with the number of each file that is in its place.
        """
        todo = [left for g in groups if (left := [n for n in g if n not in done])]
        lock, stop = threading.Lock(), threading.Event()
        sending: list[Future[None]] = []

        def send(number: int, folder: Path, checksum: str) -> None:
            if stop.is_set():
                return
            file = self.outputs[number]
            made = folder / file.path
            there = self.journal.object_of(number) if number in self.carried else None
            to = self.journal.files[number]
            version = there.version if there else self.journal.put_ours(to, made)
            entry = Sent(file.path, file.size, checksum, version, self.journal.id)
            self.journal.add(number, entry)
            os.unlink(made)
            with lock:
                done[number] = entry
                report(number)

        def wait() -> None:
            for future in sending:
                future.result()

        with sparse_copy.scratch() as folders, ThreadPoolExecutor(FILES) as files:
            try:
                for group in todo:
                    folder, sums = self.make(group, folders)
                    self._compare_carried(group, folder)
                    wait()
                    self.journal.remove_old()
                    sending = [
                        files.submit(send, number, folder, checksum)
                        for number, checksum in zip(group, sums, strict=True)
                    ]
                wait()
            except BaseException:
                stop.set()
                raise

    def _compare_carried(self, group: Sequence[int], folder: Path) -> None:
        """Raises DestinationError if other checkpoints here have other carried tensors."""
        for number in group:
            if number in self.carried and self.journal.object_of(number):
                there = self.journal.files[number]
                sparse_copy.whole(there)
                if not filecmp.cmp(folder / self.outputs[number].path, there, shallow=False):
                    raise other_tensors(there)

    def make(self, group: Sequence[int], folders: Path) -> tuple[Path, list[str]]:
        """Makes the files of a group in a new directory of `folders`; returns the directory and the
        checksums of the files.
        """
        # two levels, so that `..` in the path of a carried file stays inside
        folder = Path(tempfile.mkdtemp(dir=folders)) / "made"
        outputs, copies, grids = part(self.outputs, self.joined, group)
        # the parts that are sent meanwhile take the rest
        how = replace(self.how, max_memory=self.how.max_memory // 2)
        sources = list(map(str, self.sources))
        sums = move(self.joined, sources, folder, outputs, copies, grids, how)
        return folder / "data", sums
