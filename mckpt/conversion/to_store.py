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

Ranks share the groups, and communicate through the journal alone. With a cluster, tasks on its
nodes make and send the groups.
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
from mckpt.conversion.done import judge, settle
from mckpt.conversion.groups import groups
from mckpt.conversion.moving import RunSettings, check_unchanged, manifest_of
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.conversion.refusals import dropped
from mckpt.conversion.sending import Sender, temporary
from mckpt.conversion.store_journal import Over, Sent, StoreJournal, raise_error_of
from mckpt.errors import StorageError
from mckpt.execute.engine import continues
from mckpt.execute.ranks import LOOK_S, SAY_S, Ranks, refusal
from mckpt.formats.hf_config import CONFIG
from mckpt.progress import Progress
from mckpt.storage.staging import MANIFEST
from mckpt.storage.stores import Object

GROUP = 1 << 30  # bytes of files that are made before they are sent
QUIET_S = 90.0  # seconds without any change after which a rank counts as dead
START_S = 600.0  # seconds that ranks wait for rank 0 to begin


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

    # ---- rank 0

    def lead(self) -> dict[str, Any]:
        """Runs the plan as rank 0, and returns the manifest."""
        plan, journal = self.plan, self.journal
        plan.side.check_unchanged()
        said = dropped(plan.source, self.how.check_replicas)
        journal.refuse_occupied()
        with journal.announced(str(self.before), self.how.resume):
            ends = journal.resumes and not plan.destination.overwrite
            if ends and (verdict := judge(plan)).manifest is not None:
                settle(plan, verdict)  # it was killed after its output was in place
                journal.remove()
                return verdict.manifest
            self._send_side()
            sums = self._send_all()
            check_unchanged(plan, self.before)
            checksums = [sums[number].checksum for number in range(len(plan.outputs))]
            manifest = manifest_of(plan, self.before, said, checksums)
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
        """Makes and sends all files but the last, with the other ranks or the cluster; returns what
        is sent.
        """
        done = self.journal.sent()
        for number in done:
            self._report(number)
        if done:
            self.how.tell(continues(self.bytes_done, self.plan.nbytes))
        share = self.ranks.share(len(self.groups))
        if self.how.cluster:
            done = self._send_by_cluster(done)
        else:
            self._send(share, done)
        self.journal.clear()  # its share may be empty
        heard: dict[int, tuple[Object | None, float]] = {}  # rank -> its last beat, and when
        started, told = time.monotonic(), False
        while True:
            done = self.journal.sent() if self.ranks.size > 1 else done
            missing = [i for i, g in enumerate(self.groups) if any(n not in done for n in g)]
            if not missing:
                break
            absent = [r for r in range(1, self.ranks.size) if self.journal.beat_of(r) is None]
            if absent and not told and time.monotonic() - started > SAY_S:
                told = True
                self.how.tell(self.ranks.waits_for(f"rank {absent[0]}"))
            for rank in self._silent(heard):
                its = self.ranks.share(len(self.groups), rank)
                if late := [i for i in missing if i in its]:
                    self.how.tell(
                        f"rank {rank} has ended or is not heard of any more: rank 0 does its share"
                    )
                    self._send(late, done)
            time.sleep(1.0)
        if self.last is not None:
            with temporary() as folders, self.sender.made([self.last], folders) as (folder, sums):
                self.kept = (folder / self.plan.outputs[self.last].path).read_bytes()
                done[self.last] = Sent("", len(self.kept), sums[0], "", self.journal.id)
        return done

    def _send(self, which: Iterable[int], done: dict[int, Sent]) -> None:
        report = (lambda number: None) if self.ranks.rank else self._report
        self.sender.send([self.groups[i] for i in which], done, report)

    def _send_by_cluster(self, done: dict[int, Sent]) -> dict[int, Sent]:
        """Lets the nodes of the cluster make and send the groups; returns what is sent."""
        cluster = self.how.cluster
        assert cluster is not None

        def missing() -> list[int]:
            return [i for i, g in enumerate(self.groups) if any(n not in done for n in g)]

        if not self.journal.ready:  # if the first group is refused, the old checkpoint stays
            self._send(missing()[:1], done)
            self.journal.clear()
        todo = missing()
        sender = replace(self.sender, groups=[self.groups[i] for i in todo])
        for items in cluster.do(sender, "send", len(todo), lambda: None):
            for number in (n for i in items for n in sender.groups[i] if n not in done):
                self._report(number)
        done = self.journal.sent()
        self._send(missing(), done)  # such as a file that was replaced meanwhile
        return done

    def _report(self, number: int) -> None:
        """Reports that a file is in its place."""
        self.bytes_done += self.plan.outputs[number].size
        self.files_done += 1
        if self.how.progress:
            total, files = self.plan.nbytes, len(self.plan.outputs)
            done = min(self.bytes_done, total), total, min(self.files_done, files), files
            self.how.progress(Progress(*done))

    def _silent(self, heard: dict[int, tuple[Object | None, float]]) -> list[int]:
        """Returns the ranks whose beat, in the last listing, has not changed for QUIET_S."""
        now = time.monotonic()
        for rank in range(1, self.ranks.size):
            said = self.journal.beat_of(rank)
            if rank not in heard or said != heard[rank][0]:
                heard[rank] = said, now
        return [rank for rank, (_, when) in heard.items() if now - when > QUIET_S]

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
        journal.remove()
        self._published()

    # ---- other ranks

    def help(self) -> dict[str, Any]:
        """Sends the share of a rank other than 0, then waits until rank 0 has published."""
        if (found := self._await_start()) is not None:
            return found
        journal = self.journal
        journal.live()
        try:
            self._send(self.ranks.share(len(self.groups)), journal.sent())
            before, quiet = None, time.monotonic()
            while True:
                said = journal.refuse_if_over()
                if said != before:
                    before, quiet = said, time.monotonic()
                if time.monotonic() - quiet > QUIET_S:
                    raise StorageError(
                        f"{journal.folder}: rank 0 has not been heard of for {QUIET_S:.0f} s; start"
                        " the run again: it continues"
                    )
                time.sleep(1.0)
        except Over:
            journal.end_beats()
            journal.forget_beat()
            self._published()
            manifest = self.destination.manifest()
            shared = str(manifest.get("read")).partition(":")[0]
            if (manifest.get("plan"), shared) != (self.plan.digest, self.before.shared):
                raise
            return manifest
        finally:
            journal.end_beats()

    def _await_start(self) -> dict[str, Any] | None:
        """Waits until rank 0 lives. Returns the manifest if the checkpoint is there already.

        Rank 0 reports no error that it finds before it lives, so this rank looks for the same ones.
        """
        journal = self.journal
        started, next_look = time.monotonic(), 0.0
        changed, first, last, told = started, None, None, False
        refused: errors.MckptError | None = None
        while True:
            said = journal.said()
            now = time.monotonic()
            waited = now - started
            if waited > SAY_S and not told:
                told = True
                self.how.tell(self.ranks.waits_for("rank 0"))
            if waited >= next_look:
                next_look = waited + LOOK_S
                may_be_ours = not self.destination.overwrite or waited > QUIET_S
                if said is None and may_be_ours and (manifest := self._published()) is not None:
                    return manifest
                before, refused = refused, refusal(journal.refuse_occupied)
                if before and refused:
                    # rank 0 may still compare the content
                    found = None if self.destination.overwrite else judge(self.plan).manifest
                    if found is None:
                        raise refused
                    return found
                if said is None:
                    journal.refuse_living()
            if said != last:
                changed, last = now, said
            if said is not None:
                first = first or said
                if said != first or waited > QUIET_S:  # it is not that of an earlier run
                    raise_error_of(said)
                if said != first and said.ready:
                    journal.id, journal.ready = said.id, True
                    return None
            if now - changed > START_S:
                raise StorageError(
                    f"{journal.folder}: rank 0 has not begun within {START_S:.0f} s; rank"
                    f" {self.ranks.rank} gives up"
                )
            time.sleep(1.0)

    def _published(self) -> dict[str, Any] | None:
        place = self.journal.place
        place.list()
        place.whole([self.journal.name(self.destination.path / MANIFEST)])
        return judge(self.plan, look=False).manifest
