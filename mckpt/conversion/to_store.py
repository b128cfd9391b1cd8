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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mckpt import errors
from mckpt.conversion.done import complete, existing_output
from mckpt.conversion.moving import RunSettings, check_unchanged, ignore, manifest_of, move
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.refusals import dropped
from mckpt.conversion.side_files import other_tensors
from mckpt.conversion.store_journal import Over, Sent, StoreJournal
from mckpt.errors import DestinationError, SourceError
from mckpt.execute.engine import KNEE, Cluster, Step, Tick, continues
from mckpt.execute.ranks import LOOK_S, Gone, Ranks, Session
from mckpt.formats.hf_config import CONFIG
from mckpt.geometry.join import UNSCALED, Joined
from mckpt.progress import Progress
from mckpt.storage import sparse_copy
from mckpt.storage.files import TargetFile, stamp
from mckpt.storage.staging import MANIFEST
from mckpt.values.quantisation import WRITTEN, Grid


def groups(
    files: Sequence[TargetFile], joined: Joined, last: int | None, size: int
) -> list[list[int]]:
    """Returns the files in groups of about `size` bytes; `last` is in none of them.

    A weight that is quantised and its scales are written together, so their files are in one group,
    with those of the weights that share its overall scale.
    """
    tied = _ties(joined)
    out: list[list[int]] = []
    nbytes = 0
    for number, file in enumerate(files):
        if number == last:
            continue
        if not out or (nbytes + file.size > size and number not in tied):
            out.append([])
            nbytes = 0
        out[-1].append(number)
        nbytes += file.size
    return out


def _ties(joined: Joined) -> set[int]:
    """Returns the files that must be in the group of the file before them."""
    weights = _quantised(joined)
    first: dict[int, int] = {}  # number of peers -> the least of their files, and the largest
    last: dict[int, int] = {}
    for file, row in zip(weights["dst_file"].tolist(), weights["grid"].tolist(), strict=True):
        grid = Grid(*joined.grids[row].tolist())
        files = {file, *grid.files}
        number = grid.peers if grid.overall else -1 - row
        first[number] = min(first.get(number, file), *files)
        last[number] = max(last.get(number, file), *files)
    return {file for number in first for file in range(first[number] + 1, last[number] + 1)}


def _quantised(joined: Joined) -> np.ndarray:
    """Returns the copies into quantised weights."""
    written = np.array([cast.target in WRITTEN for cast in joined.casts], bool)
    which = (joined.copies["grid"] != UNSCALED) & written[joined.copies["cast"]]
    copies: np.ndarray = joined.copies[which]
    return copies


def part(
    files: Sequence[TargetFile], joined: Joined, group: Sequence[int]
) -> tuple[list[TargetFile], np.ndarray, np.ndarray]:
    """Returns the files of a group, numbered from 0, the copies into them, and the grids."""
    number = np.full(len(files), -1, "i4")
    number[list(group)] = np.arange(len(group), dtype="i4")
    copies = joined.copies[number[joined.copies["dst_file"]] >= 0].copy()
    grids = joined.grids.copy()
    weights = _quantised(joined)
    for grid in set(weights["grid"][number[weights["dst_file"]] >= 0].tolist()):
        for at in map(Grid._fields.index, ("file", "overall_file")):
            grids[grid, at] = number[grids[grid, at]]
    copies["dst_file"] = number[copies["dst_file"]]
    return [files[n] for n in group], copies, grids


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
        how = how.with_(engine="local", progress=None, on_note=ignore)
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
        how = self.how.with_(max_memory=self.how.max_memory // 2)
        sources = list(map(str, self.sources))
        sums = move(self.joined, sources, folder, outputs, copies, grids, how)
        return folder / "data", sums


GROUP = 1 << 30  # bytes of files that are made before they are sent


def run(plan: PlanData, how: RunSettings, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    job = _Job(plan, how, ranks, plan.state())
    return job.help() if ranks.rank else job.lead()


class _Job:
    """One run of one plan, as one of its ranks."""

    def __init__(self, plan: PlanData, how: RunSettings, ranks: Ranks, before: SourceState) -> None:
        self.plan, self.how, self.ranks, self.before = plan, how, ranks, before
        destination = self.destination = plan.destination
        folder = destination.staging_directory(plan.key(how.checksum, before.shared))
        files = [Path(os.path.normpath(destination.path / file.path)) for file in plan.outputs]
        self.journal = StoreJournal(destination, folder, files, ranks.rank)
        self.session = Session(folder, ranks, how.on_note, self.journal)
        # files by number; the one without which no loader accepts the checkpoint goes last
        last = [n for n, file in enumerate(plan.outputs) if file.path == destination.format.last]
        self.last = last[0] if last else None
        carried = frozenset(
            n
            for n, file in enumerate(files)
            if destination.iteration_name is not None and file.parent == plan.side.path
        )
        # carried tensors first, because they may be refused
        self.groups = sorted(
            groups(plan.outputs, plan.joined, self.last, GROUP), key=carried.isdisjoint
        )
        self.sender = Sender.of(plan, self.journal, how, before, self.groups, carried)
        self.bytes_done = self.files_done = 0
        # for ranks other than 0: the manifest of the output that was in place at the start
        self.existing: dict[str, Any] | None = None
        self.next_look = 0.0

    # ---- rank 0

    def lead(self) -> dict[str, Any]:
        """Runs the plan as rank 0, and returns the manifest."""
        plan, journal = self.plan, self.journal
        plan.side.check_unchanged()
        notes = dropped(plan.source, self.how.check_replicas)
        journal.refuse_occupied()
        journal.announce(str(self.before), self.how.resume)
        with self.session:
            self.session.open()
            journal.id = self.session.line["id"]
            ends = journal.resumes and not plan.destination.overwrite
            if ends and (output := existing_output(plan)).manifest is not None:
                complete(plan, output)  # it was killed after its output was in place
                self._remove_journal()
                return output.manifest
            self._send_side()
            sums = self._send_all()
            check_unchanged(plan, self.before)
            checksums = [sums[number].checksum for number in range(len(plan.outputs))]
            manifest = manifest_of(plan, self.before, notes, checksums)
            self._publish(manifest)
        return manifest

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
            self._send(self.ranks.share(len(self.groups)), done)
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
        return [i for i, g in enumerate(self.groups) if any(n not in done for n in g)]

    def _send(self, which: Iterable[int], done: dict[int, Sent]) -> None:
        """Makes and sends the files of these groups that are not in `done`, and adds them to it."""
        report = (lambda number: None) if self.ranks.rank else self._report
        self.sender.send([self.groups[i] for i in which], done, report)

    def _send_share_of(self, rank: int) -> None:
        """Sends the share of a rank that died."""
        self._send(self.ranks.share(len(self.groups), rank), self.journal.sent())

    def _send_by_cluster(self, cluster: Cluster, done: dict[int, Sent]) -> None:
        """Lets the nodes of the cluster make and send the groups that are not in `done`."""
        todo = self._missing(done)
        sender = replace(self.sender, groups=[self.groups[i] for i in todo])
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

    def _publish(self, manifest: dict[str, Any]) -> None:
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
        self._remove_journal()
        self._published()

    def _remove_journal(self) -> None:
        self.session.end()
        self.journal.remove()

    # ---- other ranks

    def help(self) -> dict[str, Any]:
        """Sends the share of a rank other than 0, then waits until rank 0 has published."""
        session, journal = self.session, self.journal
        try:
            with session:
                session.join(self._is_published, self._refuse)
                journal.id = session.line["id"]
                session.begin(lambda: None)
                journal.ready = True
                self._send(self.ranks.share(len(self.groups)), journal.sent())
                session.meet(lambda rank: None)
                session.listen()
        except (Gone, Over):
            journal.forget_line()
            if self.existing is not None:
                return self.existing
            self._published()
            manifest = self.destination.manifest()
            shared = str(manifest.get("read")).partition(":")[0]
            if (manifest.get("plan"), shared) != (self.plan.digest, self.before.shared):
                raise
            return manifest

    def _is_published(self, late: bool) -> bool:
        """Returns whether the output of this plan is there. With --overwrite it may be that of an
        earlier run, until rank 0 has been silent for long (`late`).
        """
        if time.monotonic() < self.next_look:  # a listing may be long
            return False
        self.next_look = time.monotonic() + LOOK_S
        return (late or not self.destination.overwrite) and self._published() is not None

    def _refuse(self) -> None:
        """Raises the error that rank 0 finds before it has a journal in which to report it."""
        try:
            self.journal.refuse_occupied()
        except DestinationError:
            if self.existing is None and not self.destination.overwrite:
                self.existing = existing_output(self.plan).manifest
            if self.existing is not None:  # rank 0 may still compare the content
                raise Gone(f"{self.destination.path}: is done already") from None
            raise
        self.journal.refuse_living()

    def _published(self) -> dict[str, Any] | None:
        place = self.journal.place
        place.list()
        place.whole([self.journal.name(self.destination.path / MANIFEST)])
        return existing_output(self.plan, look=False).manifest
