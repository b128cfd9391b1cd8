"""Runs a plan whose destination is an object store.

The files of the checkpoint are made on the local disk, some at a time (GROUP), and sent while the
next ones are made. So the local disk needs room for two groups, and memory does not grow.

    DST/.mckpt-<plan>/intent.json    the names that this run writes
    DST/.mckpt-<plan>/beat/<rank>    changes while the rank lives
    DST/.mckpt-<plan>/sent/<n>       file n is in its place: its bytes, checksum and version
    DST/release/...                  the files of the checkpoint
    DST/release/mckpt.json           the manifest, when all other files are there
    DST/release/metadata.json        the file without which no loader accepts the checkpoint, last
    DST/latest_checkpointed_iteration.txt

An upload is visible when it is complete, so no object is ever half-written. A killed run leaves its
journal; the same command sends only what is missing. The journal is removed at the end.

Ranks share the groups, and know of each other through the journal alone.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mckpt import errors
from mckpt.conversion.groups import groups, part
from mckpt.conversion.run import (
    How,
    check_unchanged,
    dropped,
    finished,
    key_of,
    manifest_of,
    move,
    stamps,
)
from mckpt.errors import DestinationError, SourceError, StorageError
from mckpt.execute.ranks import LOOK_S, Ranks, refusal
from mckpt.storage import stand_in
from mckpt.storage.staging import INTENT, MANIFEST, STAGING
from mckpt.storage.stores import Object

if TYPE_CHECKING:
    from mckpt.conversion.plan import Plan

GROUP = 1 << 30  # bytes of files that are made before they are sent
FILES = 2  # files that are sent at the same time, each in several parts
BEAT_S = 5.0  # seconds between two changes of a rank's beat
LIVE_S = 20.0  # seconds without a beat after which another run counts as dead
QUIET_S = 90.0  # seconds without any change after which a rank counts as dead
START_S = 600.0  # seconds that ranks wait for rank 0 to begin
SENT, BEAT = "sent", "beat"


class _Sent(msgspec.Struct):
    """An entry of the journal."""

    path: str
    bytes: int
    checksum: str
    version: str  # of the object; "" if the store tells none
    run: str  # the id of the run that sent it


class _Over(DestinationError):
    """Rank 0 has published, or another run has taken this one for dead."""


def run(plan: Plan, how: How, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    before = stamps(plan)
    job = _Job(plan, how, ranks, key_of(plan, how, before))
    try:
        return job.help() if ranks.rank else _lead(job, before)
    finally:
        stand_in.discard(job.temporary)


def _lead(job: _Job, before: list[int]) -> dict[str, Any]:
    """Runs the plan as rank 0, and returns the manifest."""
    plan = job.plan
    plan.side.check_unchanged()
    said = dropped(plan, job.how)
    job.refuse_occupied()
    with job.announced():
        job.send_side()
        sums = job.send_all()
        check_unchanged(plan, before)
        checksums = [sums[number].checksum for number in range(len(plan.outputs))]
        manifest = manifest_of(plan, before, said, checksums)
        job.publish(manifest)
    return manifest


class _Job:
    """One run of one plan, as one of its ranks."""

    def __init__(self, plan: Plan, how: How, ranks: Ranks, key: str) -> None:
        self.plan, self.how, self.ranks = plan, how, ranks
        destination = self.destination = plan.destination
        found = stand_in.of(destination.root)
        assert found is not None
        self.place = found
        self.folder = destination.staging_directory(key)
        destination.uses(self.folder)
        # files by number; the one without which no loader accepts the checkpoint goes last
        last = [n for n, file in enumerate(plan.outputs) if file.path == destination.format.last]
        self.last = last[0] if last else None
        # carried tensors first, because they may be refused
        carried = {n for n in self._all() if self._is_carried(n)}
        self.groups = sorted(groups(plan, self.last, GROUP), key=carried.isdisjoint)
        self.id = uuid.uuid4().hex
        self.bytes_done = 0
        self.ready = False  # the old checkpoint is removed, so that ranks may send
        self.beat, self.over = 0, threading.Event()
        self.beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self.temporary = stand_in.temporary()

    # ---- objects

    def _name(self, path: Path) -> str:
        return self.place.name(os.path.normpath(path))

    def _file(self, number: int) -> Path:
        return Path(os.path.normpath(self.destination.path / self.plan.outputs[number].path))

    def _is_carried(self, number: int) -> bool:
        """Returns whether it is a file of carried tensors, which other checkpoints share."""
        return self.destination.unit is not None and (
            self._file(number).parent == self.plan.side.path
        )

    def _there(self, number: int) -> Object | None:
        return self.place.objects.get(self._name(self._file(number)))

    def _put(self, path: Path, data: bytes | Path) -> str:
        return self.place.put(self._name(path), data)

    def _put_ours(self, path: Path, data: bytes | Path) -> str:
        """Puts an object and returns its version. Raises _Over if this run is over."""
        self._refuse_if_over()
        return self._put(path, data)

    def _get(self, path: Path) -> bytes | None:
        """Returns a small object, None if it is not there."""
        try:
            return bytes(self.place.store.read(self._name(path), 0, 1 << 20))
        except SourceError:
            return None

    def sent(self) -> dict[int, _Sent]:
        """Returns the files, by number, that are in their place as they were sent."""
        return {n: one for n, one in self._journal().items() if self._is_still(n, one)}

    def _is_still(self, number: int, one: _Sent) -> bool:
        there = self._there(number)
        if there is None or there.size != one.bytes:
            return False
        # answers quote an ETag, and the listings of some stores do not
        same = bool(one.version) and one.version.strip('"') == there.version.strip('"')
        return same or one.run == self.id

    def _journal(self) -> dict[int, _Sent]:
        self.place.list()
        start = f"{self._name(self.folder / SENT)}/"
        names = [n for n in self.place.objects if n.startswith(start)]
        self.place.whole(names)
        out = {}
        for name in names:
            with suppress(OSError, ValueError, msgspec.DecodeError):
                number = int(name[len(start) :])
                if number in self._all():
                    out[number] = msgspec.json.decode(
                        (self.place.root / name).read_bytes(), type=_Sent
                    )
        return out

    def refuse_occupied(self) -> None:
        """Raises DestinationError if files are in the way, such as those that replaced what an
        interrupted run had sent.
        """
        self.place.list()
        self.destination.refuse_occupied(self.folder)
        if self.destination.overwrite:
            return
        for number, one in self._journal().items():
            if one.version and self._there(number) and not self._is_still(number, one):
                raise DestinationError(
                    f"{self._file(number)}: was replaced since a run of this command sent it; give"
                    " --overwrite to replace the checkpoint"
                )

    # ---- rank 0

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Writes down what this run is about to put in place, and that it lives."""
        destination = self.destination
        files = [*(self._file(n) for n in self._all()), destination.path / MANIFEST]
        names = [os.path.relpath(file, destination.root) for file in files]
        intent = {"unit": destination.unit, "files": names}
        self._end_dead_runs()
        if not self.how.resume:
            self.place.remove(self.place.below(self.folder / SENT))
        earlier = self.folder.name in self._runs()
        self._put(self.folder / INTENT, json.dumps(intent).encode())
        if others := self._runs() - {self.folder.name}:
            if not earlier:
                self.place.remove([self._name(self.folder / INTENT)])
            raise self._refused_for(others.pop())
        self.ready = not destination.overwrite
        self._put_beat()
        self.beats.start()
        try:
            yield
        except BaseException as error:
            self._end_beats()
            if not isinstance(error, _Over):
                with suppress(StorageError):
                    self._put_beat(error=[type(error).__name__, str(error)])
            raise

    def _end_dead_runs(self) -> None:
        """Removes the journals of interrupted runs that wrote this checkpoint. Raises
        DestinationError if one of them lives; this takes LIVE_S if one of them was killed.
        """
        first = {name: self._said(name) for name in self._runs()}
        end = time.monotonic() + LIVE_S
        while time.monotonic() < end and any("error" not in (s or {}) for s in first.values()):
            time.sleep(min(1.0, LIVE_S / 4))
            for name, said in first.items():
                if self._said(name) != said:
                    raise self._refused_for(name)
        for name in first.keys() - {self.folder.name}:
            self.place.remove(self.place.below(self.destination.root / name))

    def _refused_for(self, name: str) -> DestinationError:
        return DestinationError(f"{self.destination.path}: another mckpt is writing here ({name})")

    def _beat(self) -> None:
        """Tells other ranks and runs that this rank lives."""
        while not self.over.wait(BEAT_S):
            with suppress(StorageError):
                said = self._said()
                if said is None or said["id"] != self.id:
                    return
                self._put_beat()

    def _put_beat(self, **more: Any) -> None:
        self.beat += 1
        said = {"id": self.id, "beat": self.beat, "ready": self.ready, **more}
        self._put(self.folder / BEAT / str(self.ranks.rank), json.dumps(said).encode())

    def _end_beats(self) -> None:
        self.over.set()
        self.beats.join()

    def _all(self) -> range:
        return range(len(self.plan.outputs))

    def _runs(self) -> set[str]:
        """Returns the names of the staging directories of all runs that write this checkpoint."""
        self.place.list()
        found = set()
        for folder in self.destination.root.glob(f"{STAGING}*"):
            # SourceError: that run has ended since the listing
            with suppress(SourceError, OSError, TypeError, KeyError, ValueError):
                stand_in.whole(folder / INTENT)
                if json.loads((folder / INTENT).read_bytes())["unit"] == self.destination.unit:
                    found.add(folder.name)
        return found

    def clear(self) -> None:
        """Removes the checkpoint that --overwrite replaces, unless that is done."""
        if self.ready:
            return
        self._refuse_if_over()
        done = {self._name(self._file(n)) for n in self.sent()}
        own = self._name(self.destination.root / STAGING)
        old = [
            name
            for name in self.place.below(self.destination.path)
            if name not in done and not name.startswith(own)
        ]
        last = self.destination.format.last
        first = [name for name in old if name.rpartition("/")[2] in (MANIFEST, last)]
        self.place.remove(first)
        self.place.remove([name for name in old if name in self.place.objects])
        self.ready = True

    def send_side(self) -> None:
        """Sends the files of DST/hf that are not there; they are the same for all checkpoints of a
        save directory.
        """
        side = self.plan.side
        side.refuse_other()
        for name, source in side.files.items():
            if not (side.path / name).exists():
                self._put(side.path / name, source)
        side.check_unchanged()

    def send_all(self) -> dict[int, _Sent]:
        """Makes and sends all files but the last, with the other ranks; returns the journal."""
        done = self.sent()
        share = self.ranks.share(len(self.groups))
        self._send([self.groups[i] for i in share], done)
        self.clear()  # its share may be empty
        heard: dict[int, tuple[Object | None, float]] = {}  # rank -> its last beat, and when
        while True:
            done = self.sent() if self.ranks.size > 1 else done
            missing = [i for i, g in enumerate(self.groups) if any(n not in done for n in g)]
            if not missing:
                break
            for rank in self._silent(heard):
                its = self.ranks.share(len(self.groups), rank)
                if late := [self.groups[i] for i in missing if i in its]:
                    self.how.tell(
                        f"rank {rank} has ended or is not heard of any more: rank 0 does its share"
                    )
                    self._send(late, done)
            time.sleep(min(2.0, BEAT_S))
        if self.last is not None:
            with self._made([self.last]) as (folder, sums):
                self.kept = (folder / self.plan.outputs[self.last].path).read_bytes()
                done[self.last] = _Sent("", len(self.kept), sums[0], "", self.id)
        return done

    def _silent(self, heard: dict[int, tuple[Object | None, float]]) -> list[int]:
        """Returns the ranks whose beat, in the last listing, has not changed for QUIET_S."""
        now = time.monotonic()
        for rank in range(1, self.ranks.size):
            said = self.place.objects.get(self._name(self.folder / BEAT / str(rank)))
            if rank not in heard or said != heard[rank][0]:
                heard[rank] = said, now
        return [rank for rank, (_, when) in heard.items() if now - when > QUIET_S]

    def publish(self, manifest: dict[str, Any]) -> None:
        """Puts the manifest, the last file and the tracker, and removes the journal."""
        destination = self.destination
        text = errors.shown(json.dumps(manifest, indent=1)) + "\n"
        self._put_ours(destination.path / MANIFEST, text.encode())
        if self.last is not None:
            self._put_ours(self._file(self.last), self.kept)
        self.place.list()  # another run may have moved the tracker meanwhile
        if destination.unit is not None and destination.tracker.moves_to(destination.unit):
            destination.tracker.move_to(destination.unit)
        self._end_beats()
        self.place.list()
        self.place.remove(self.place.below(self.folder))
        self.place.list()
        self.place.whole([self._name(destination.path / MANIFEST)])

    # ---- all ranks

    def _send(self, groups: Sequence[Sequence[int]], done: dict[int, _Sent]) -> None:
        """Makes and sends the files of these groups that are not in the journal, and adds them."""
        todo = [left for g in groups if (left := [n for n in g if n not in done])]
        self.bytes_done += sum(self.plan.outputs[n].size for g in groups for n in g if n in done)
        lock, stop, sending = threading.Lock(), threading.Event(), Future[None]()
        sending.set_result(None)

        def send(number: int, folder: Path, checksum: str) -> None:
            if stop.is_set():
                return
            file = self.plan.outputs[number]
            made = folder / file.path
            there = self._there(number) if self._is_carried(number) else None
            version = there.version if there else self._put_ours(self._file(number), made)
            entry = _Sent(file.path, file.size, checksum, version, self.id)
            self._put_ours(self.folder / SENT / str(number), msgspec.json.encode(entry))
            os.unlink(made)
            with lock:
                done[number] = entry
                self.bytes_done += file.size
                self._report(len(done))

        with ThreadPoolExecutor(FILES) as files, ThreadPoolExecutor(1) as groups_of:

            def send_group(made: Any, group: Sequence[int], folder: Path, sums: list[str]) -> None:
                try:
                    for future in [
                        files.submit(send, number, folder, checksum)
                        for number, checksum in zip(group, sums, strict=True)
                    ]:
                        future.result()
                finally:
                    made.__exit__(None, None, None)

            try:
                for group in todo:
                    made = self._made(group)
                    folder, sums = made.__enter__()
                    self._compare_carried(group, folder)
                    sending.result()
                    self.clear()
                    sending = groups_of.submit(send_group, made, group, folder, sums)
                sending.result()
            except BaseException:
                stop.set()
                raise

    def _compare_carried(self, group: Sequence[int], folder: Path) -> None:
        """Raises DestinationError if other checkpoints here have other carried tensors."""
        for number in group:
            if self._is_carried(number) and self._there(number):
                there = self._file(number)
                stand_in.whole(there)
                if not filecmp.cmp(folder / self.plan.outputs[number].path, there, shallow=False):
                    raise self.plan.side.other_tensors(there.name)

    def _report(self, files: int) -> None:
        if self.how.progress and not self.ranks.rank:
            total = self.plan.nbytes
            self.how.progress(min(self.bytes_done, total), total, files, len(self.plan.outputs))

    @contextmanager
    def _made(self, group: Sequence[int]) -> Iterator[tuple[Path, list[str]]]:
        """Makes the files of a group in a temporary directory; yields it and their checksums."""
        temporary = Path(tempfile.mkdtemp(dir=self.temporary))
        try:
            outputs, copies, grids = part(self.plan, group)
            # so that `..` in the path of a carried file stays inside
            data = temporary / "made" / "data"
            # the parts that are sent meanwhile take the rest
            how = replace(self.how, max_memory=self.how.max_memory // 2)
            sums = move(self.plan, temporary / "made", outputs, copies, grids, how)
            yield data, sums
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    # ---- other ranks

    def help(self) -> dict[str, Any]:
        """Sends the share of a rank other than 0, then waits until rank 0 has published."""
        if (found := self._await_start()) is not None:
            return found
        self._put_beat()
        self.beats.start()
        try:
            share = self.ranks.share(len(self.groups))
            self._send([self.groups[i] for i in share], self.sent())
            before, quiet = None, time.monotonic()
            while True:
                said = self._refuse_if_over()
                if said != before:
                    before, quiet = said, time.monotonic()
                if time.monotonic() - quiet > QUIET_S:
                    raise StorageError(
                        f"{self.folder}: rank 0 has not been heard of for {QUIET_S:.0f} s; start"
                        " the run again: it goes on"
                    )
                time.sleep(1.0)
        except _Over:
            self._end_beats()
            self.place.remove([self._name(self.folder / BEAT / str(self.ranks.rank))])
            if (manifest := self._published()) is None:
                raise
            return manifest
        finally:
            self._end_beats()

    def _refuse_if_over(self) -> dict[str, Any]:
        """Returns the last beat of rank 0. Raises _Over if the run is over, and on other ranks the
        error of rank 0.
        """
        said = self._said()
        if said is None or said["id"] != self.id:
            raise _Over(
                f"{self.folder}: is gone, and no checkpoint of this run is there; another mckpt has"
                " taken this run for dead"
            )
        if self.ranks.rank:
            self._raise_error_of(said)
        return said

    def _await_start(self) -> dict[str, Any] | None:
        """Waits until rank 0 lives. Returns the manifest if the checkpoint is there already."""
        started, next_look = time.monotonic(), 0.0
        changed, first, last = started, None, None
        refused: errors.MckptError | None = None
        while True:
            said = self._said()
            now = time.monotonic()
            waited = now - started
            if waited >= next_look:
                next_look = waited + LOOK_S
                may_be_ours = not self.destination.overwrite or waited > QUIET_S
                if said is None and may_be_ours and (manifest := self._published()) is not None:
                    return manifest
                before, refused = refused, refusal(self.refuse_occupied)
                if before and refused:
                    raise refused
            if said != last:
                changed, last = now, said
            if said is not None:
                first = first or said
                if said != first or waited > QUIET_S:  # it is not that of an earlier run
                    self._raise_error_of(said)
                if said != first and said["ready"]:
                    self.id, self.ready = said["id"], True
                    return None
            if now - changed > START_S:
                raise StorageError(
                    f"{self.folder}: rank 0 has not begun within {START_S:.0f} s; rank"
                    f" {self.ranks.rank} gives up"
                )
            time.sleep(1.0)

    def _said(self, run: str = "") -> dict[str, Any] | None:
        """Returns the last beat of rank 0 of a run (""; this one), None if there is none."""
        folder = self.destination.root / run if run else self.folder
        data = self._get(folder / BEAT / "0")
        return json.loads(data) if data else None

    def _raise_error_of(self, said: dict[str, Any]) -> None:
        if "error" in said:
            name, text = said["error"]
            kind = getattr(errors, name, StorageError)
            known = isinstance(kind, type) and issubclass(kind, errors.MckptError)
            raise (kind if known else StorageError)(f"rank 0: {text}")

    def _published(self) -> dict[str, Any] | None:
        self.place.list()
        self.place.whole([self._name(self.destination.path / MANIFEST)])
        return finished(self.plan)
