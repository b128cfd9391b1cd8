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

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mckpt import errors
from mckpt.conversion.done import complete, existing_output
from mckpt.conversion.groups import groups
from mckpt.conversion.moving import RunSettings, check_unchanged, manifest_of
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.refusals import dropped
from mckpt.conversion.sending import Sender
from mckpt.conversion.store_journal import Over, Sent, StoreJournal
from mckpt.errors import DestinationError
from mckpt.execute.engine import Cluster, continues
from mckpt.execute.ranks import LOOK_S, Gone, Ranks, Session
from mckpt.formats.hf_config import CONFIG
from mckpt.progress import Progress
from mckpt.storage import sparse_copy
from mckpt.storage.staging import MANIFEST

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
