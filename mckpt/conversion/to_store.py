"""Runs a plan whose destination is an object store.

The files of the checkpoint are made on the local disk, some at a time (GROUP), and sent while the
next ones are made. So the local disk needs room for two groups, and memory does not grow.

    DST/.mckpt-<plan>/...            the journal (`store_journal`)
    DST/release/...                  the files of the checkpoint
    DST/release/mckpt.json           the manifest, when all other files are there
    DST/release/metadata.json        the file without which no loader accepts the checkpoint, last
    DST/latest_checkpointed_iteration.txt

An upload is visible when it is complete, so no object is ever half-written. A killed run leaves its
journal; the same command sends only what is missing. The journal is removed at the end.

Ranks share the groups, and communicate through the journal alone (`execute.ranks`). With a cluster,
tasks on its nodes make and send the groups.
"""

from __future__ import annotations

import filecmp
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mckpt import errors
from mckpt.conversion.moving import Publisher, RunSettings, check_unchanged
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.side_files import other_tensors
from mckpt.conversion.store_journal import Over, Sent, StoreJournal
from mckpt.errors import SourceError
from mckpt.execute.engine import KNEE, Machines, Step, Tick, continues, execute
from mckpt.execute.ranks import LOOK_S, Gone, Ranks, Session
from mckpt.execute.transfer import CopySettings, Transfer
from mckpt.formats.hf_config import CONFIG
from mckpt.progress import Progress
from mckpt.storage import sparse_copy
from mckpt.storage.files import stamp
from mckpt.storage.staging import MANIFEST

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
    transfer: Transfer
    state: SourceState
    groups: Sequence[Sequence[int]]
    carried: frozenset[int]
    how: CopySettings

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
        sources = self.transfer.sources
        stamps = self.state.stamps[: len(sources)]  # those of copied files follow
        for file, known in zip(sources, stamps, strict=True):
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
            file = self.transfer.outputs[number]
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
                made, there = self.transfer.outputs[number].path, self.journal.files[number]
                sparse_copy.whole(there)
                if not filecmp.cmp(folder / made, there, shallow=False):
                    raise other_tensors(there)

    def make(self, group: Sequence[int], folders: Path) -> tuple[Path, list[str]]:
        """Makes the files of a group in a new directory of `folders`; returns the directory and the
        checksums of the files.
        """
        # two levels, so that `..` in the path of a carried file stays inside
        folder = Path(tempfile.mkdtemp(dir=folders)) / "made"
        # the parts that are sent meanwhile take the rest
        how = replace(self.how, max_memory=self.how.max_memory // 2)
        sums = execute(self.transfer.part(group), folder / "data", how)
        return folder / "data", sums


GROUP = 1 << 30  # bytes of files that are made before they are sent


class StorePublisher(Publisher):
    """An object store. The files are sent in groups while the next ones are made."""

    def __init__(self, plan: PlanData, how: RunSettings, ranks: Ranks) -> None:
        super().__init__(plan, how, ranks)
        destination, transfer = self.destination, plan.transfer
        files = [Path(os.path.normpath(destination.path / file.path)) for file in plan.outputs]
        self.journal = StoreJournal(destination, self.folder, files, ranks.rank)
        self.session = Session(self.folder, ranks, how.on_note, self.journal)
        # files by number; the one without which no loader accepts the checkpoint goes last
        last = [n for n, file in enumerate(plan.outputs) if file.path == destination.format.last]
        self.last = last[0] if last else None
        carried = frozenset(
            n
            for n, file in enumerate(files)
            if destination.iteration_name is not None and file.parent == plan.side.path
        )
        # carried tensors first, because they may be refused
        groups = sorted(transfer.groups(self.last, GROUP), key=carried.isdisjoint)
        self.sender = Sender(self.journal, transfer, self.before, groups, carried, how.copying())
        self.bytes_done = self.files_done = 0
        self.next_look = 0.0

    # ---- rank 0

    @contextmanager
    def begun(self) -> Iterator[None]:
        self.journal.refuse_occupied()
        self.journal.announce(str(self.before), self.how.resume)
        with self.session:
            self.session.open()
            self.journal.id = self.session.line["id"]
            yield

    @property
    def resumes(self) -> bool:
        return self.journal.resumes and not self.destination.overwrite

    def put(self) -> list[str]:
        if self.ranks.rank:
            self._send_share()
            return []
        self._send_side()
        sums = self._send_all()
        return [sums[number].checksum for number in range(len(self.plan.outputs))]

    def unchanged(self) -> SourceState:
        return check_unchanged(self.plan, self.before)

    def _send_side(self) -> None:
        """Sends the files of DST/hf that are not there; they are the same for all checkpoints of a
        save directory. The config comes last: its presence shows that all are there.
        """
        side = self.plan.side
        side.refuse_other()
        for name, source in sorted(side.files.items(), key=lambda item: item[0] == CONFIG):
            if not (side.path / name).exists():
                self.journal.put(side.path / name, source)
        side.check_unchanged()

    def _send_all(self) -> dict[int, Sent]:
        """Makes and sends all files but the last, with the other ranks or the cluster; returns the
        entry of each file.
        """
        done = self.journal.sent()
        for number in done:
            self._report(number)
        if done:
            self.how.on_note(continues(self.bytes_done, self.plan.nbytes))
        if not self.journal.ready:  # if the first group is refused, the old checkpoint stays
            self._send(self._missing(done)[:1], done)
            self.journal.remove_old()
        self.session.begin(lambda: None)
        if self.how.cluster:
            self._send_by_cluster(self.how.cluster, done)
        else:
            self._send(self.ranks.share(len(self.sender.groups)), done)
            self.session.meet(self._send_share_of)
        if self.how.cluster or self.ranks.size > 1:
            done = self.journal.sent()
            self._send(self._missing(done), done)  # such as a file that was replaced meanwhile
        if self.last is not None:
            with sparse_copy.scratch() as folders:
                folder, sums = self.sender.make([self.last], folders)
                self.kept = (folder / self.plan.outputs[self.last].path).read_bytes()
                done[self.last] = Sent("", len(self.kept), sums[0], "", self.journal.id)
        return done

    def _missing(self, done: dict[int, Sent]) -> list[int]:
        """Returns the groups of which a file is not sent."""
        return [i for i, g in enumerate(self.sender.groups) if any(n not in done for n in g)]

    def _send(self, which: Iterable[int], done: dict[int, Sent]) -> None:
        """Makes and sends the files of these groups that are not in `done`, and adds them to it."""
        report = (lambda number: None) if self.ranks.rank else self._report
        self.sender.send([self.sender.groups[i] for i in which], done, report)

    def _send_share_of(self, rank: int) -> None:
        """Sends the share of a rank that died."""
        self._send(self.ranks.share(len(self.sender.groups), rank), self.journal.sent())

    def _send_by_cluster(self, cluster: Machines, done: dict[int, Sent]) -> None:
        """Lets the nodes of the cluster make and send the groups that are not in `done`."""
        todo = self._missing(done)
        sender = replace(self.sender, groups=[self.sender.groups[i] for i in todo])
        for items in cluster.do(sender, "send", len(todo), lambda: None):
            for number in (n for i in items for n in sender.groups[i] if n not in done):
                self._report(number)

    def _report(self, number: int) -> None:
        """Reports that a file is in its place."""
        self.bytes_done += self.plan.outputs[number].size
        self.files_done += 1
        if self.how.progress:
            total, files = self.plan.nbytes, len(self.plan.outputs)
            done = min(self.bytes_done, total), total, min(self.files_done, files), files
            self.how.progress(Progress(*done))

    def publish(self, manifest: dict[str, Any]) -> None:
        """Puts the manifest, the last file and the tracker, and removes the journal."""
        destination, journal = self.destination, self.journal
        text = errors.shown(json.dumps(manifest, indent=1)) + "\n"
        journal.put_ours(destination.path / MANIFEST, text.encode())
        if self.last is not None:
            journal.put_ours(journal.files[self.last], self.kept)
        journal.place.list()  # another run may have moved the tracker meanwhile
        if destination.iteration_name is not None and destination.tracker.moves_to(
            destination.iteration_name
        ):
            destination.tracker.move_to(destination.iteration_name)
        self.discard()
        self.output()

    def discard(self) -> None:
        self.session.end()
        self.journal.remove()

    # ---- other ranks

    ended = Gone, Over

    def refuse(self) -> None:
        super().refuse()
        self.journal.refuse_living()

    def refuse_occupied(self) -> None:
        self.journal.refuse_occupied()

    def _send_share(self) -> None:
        self.journal.id = self.session.line["id"]
        self.session.begin(lambda: None)
        self.journal.ready = True
        self._send(self.ranks.share(len(self.sender.groups)), self.journal.sent())
        self.session.meet(lambda rank: None)

    def published(self, late: bool) -> bool:
        if time.monotonic() < self.next_look:  # a listing may be long
            return False
        self.next_look = time.monotonic() + LOOK_S
        return super().published(late)

    def result(self) -> dict[str, Any] | None:
        self.journal.forget_line()
        if self.existing is not None:
            return self.existing
        self.output()
        manifest = self.destination.manifest()
        shared = str(manifest.get("read")).partition(":")[0]
        ours = (manifest.get("plan"), shared) == (self.plan.digest, self.before.shared)
        return manifest if ours else None

    def output(self) -> dict[str, Any] | None:
        place = self.journal.place
        place.list()
        place.whole([self.journal.name(self.destination.path / MANIFEST)])
        return super().output()
