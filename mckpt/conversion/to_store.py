"""Runs a plan whose destination is an object store.

The files of the checkpoint are made on the local disk, some at a time (GROUP), and sent while the
next ones are made. So the local disk needs room for two groups, and memory does not grow.

    DST/.mckpt-<plan>/intent.json    the names that this run writes
    DST/.mckpt-<plan>/beat.json      with many ranks: changes while rank 0 lives
    DST/.mckpt-<plan>/sent/<n>       file n is in its place: its bytes and its checksum
    DST/release/...                  the files of the checkpoint
    DST/release/mckpt.json           the manifest, when all other files are there
    DST/release/metadata.json        the file without which no loader accepts the checkpoint, last
    DST/latest_checkpointed_iteration.txt

An upload is visible when it is complete, so no object is ever half-written. A killed run leaves its
journal; the same command sends only what is missing. The journal is removed at the end.

Ranks share the groups, and know of each other through the journal alone.
"""

from __future__ import annotations

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
import numpy as np

from mckpt import errors
from mckpt.conversion.run import How, dropped, key_of, move, stamps, state_of
from mckpt.errors import DestinationError, SourceError, StorageError
from mckpt.execute.ranks import LOOK_S, Ranks, refusal
from mckpt.geometry.join import UNSCALED
from mckpt.storage import stand_in
from mckpt.storage.files import TargetFile
from mckpt.storage.staging import INTENT, MANIFEST, STAGING
from mckpt.values.quantisation import CODES, Grid

if TYPE_CHECKING:
    from mckpt.conversion.plan import Plan

GROUP = 1 << 30  # bytes of files that are made before they are sent
FILES = 2  # files that are sent at the same time, each in several parts
BEAT_S = 5.0  # seconds between two changes of rank 0's beat
QUIET_S = 90.0  # seconds without any change after which a rank counts as dead
START_S = 600.0  # seconds that ranks wait for rank 0 to begin
SENT, BEAT = "sent", "beat.json"


class _Sent(msgspec.Struct):
    """An entry of the journal."""

    path: str
    bytes: int
    checksum: str


def run(plan: Plan, how: How, ranks: Ranks) -> dict[str, Any]:
    """Runs the plan as one of `ranks`, and returns the manifest."""
    before = stamps(plan)
    job = _Job(plan, how, ranks, key_of(plan, how, before))
    if ranks.rank:
        return job.help()
    plan.side.check_unchanged()
    said = dropped(plan, how)
    plan.destination.refuse_occupied(job.folder)
    if not how.resume:
        job.forget()
    if plan.destination.overwrite:
        job.clear()
    with job.announced():
        job.send_side()
        sums = job.send_all()
        stand_in.refresh(plan.source.path)
        if stamps(plan) != before:
            raise SourceError(
                f"{plan.source.path}: was changed while it was read; run the command again when"
                " nothing writes there"
            )
        files = {
            file.path: {"bytes": file.size, "checksum": sums[number].checksum}
            for number, file in enumerate(plan.outputs)
        }
        manifest = {
            **plan.facts,
            "plan": plan.digest,
            "read": state_of(before),
            "dropped": said,
            "files": files,
        }
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
        self.groups = _groups(plan, self.last)
        self.id = uuid.uuid4().hex
        self.bytes_done = 0
        self.beat, self.over = 0, threading.Event()
        self.beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self.temporary = stand_in.temporary()

    # ---- objects

    def _name(self, path: Path) -> str:
        return self.place.name(os.path.normpath(path))

    def _file(self, number: int) -> Path:
        return self.destination.path / self.plan.outputs[number].path

    def _put(self, path: Path, data: bytes | Path) -> None:
        self.place.put(self._name(path), data)

    def _get(self, path: Path) -> bytes | None:
        """Returns a small object, None if it is not there."""
        try:
            return bytes(self.place.store.read(self._name(path), 0, 1 << 20))
        except SourceError:
            return None

    def sent(self) -> dict[int, _Sent]:
        """Returns the journal: the files, by number, that are in their place."""
        self.place.list()
        start = f"{self._name(self.folder / SENT)}/"
        names = [n for n in self.place.objects if n.startswith(start)]
        self.place.whole(names)
        out = {}
        for name in names:
            with suppress(OSError, ValueError, msgspec.DecodeError):
                number = int(name[len(start) :])
                one = msgspec.json.decode((self.place.root / name).read_bytes(), type=_Sent)
                there = self.place.objects.get(self._name(self._file(number)))
                if there is not None and there.size == one.bytes:
                    out[number] = one
        return out

    # ---- rank 0

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Writes down what this run is about to put in place, and that it lives."""
        destination = self.destination
        files = [*(self._file(n) for n in self._all()), destination.path / MANIFEST]
        names = [os.path.relpath(file, destination.root) for file in files]
        intent = {"unit": destination.unit, "files": names}
        known = self._runs()
        self._put(self.folder / INTENT, json.dumps(intent).encode())
        if others := self._runs() - known - {self.folder.name}:
            self.place.remove([self._name(self.folder / INTENT)])
            raise DestinationError(
                f"{destination.path}: another mckpt is writing here ({others.pop()})"
            )
        self.beats.start()
        try:
            yield
        except BaseException as error:
            self._end_beats()
            if self.ranks.size > 1:
                with suppress(StorageError):
                    self._put_beat(error=[type(error).__name__, str(error)])
            raise

    def _beat(self) -> None:
        """Tells the other ranks that this one lives."""
        while self.ranks.size > 1:
            with suppress(StorageError):
                self._put_beat()
            if self.over.wait(BEAT_S):
                return

    def _put_beat(self, **more: Any) -> None:
        self.beat += 1
        said = {"id": self.id, "beat": self.beat, **more}
        self._put(self.folder / BEAT, json.dumps(said).encode())

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

    def forget(self) -> None:
        """Removes the journal of an earlier run."""
        self.place.remove(self.place.below(self.folder / SENT))

    def clear(self) -> None:
        """Removes the checkpoint that --overwrite replaces."""
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
        quiet, known = time.monotonic(), -1
        while True:
            done = self.sent() if self.ranks.size > 1 else done
            missing = [g for g in self.groups if any(n not in done for n in g)]
            if not missing:
                break
            if len(done) != known:
                quiet, known = time.monotonic(), len(done)
            if time.monotonic() - quiet > QUIET_S:
                self.how.tell("a rank has ended or is not heard of any more: rank 0 does its share")
                self._send(missing, done)
                quiet = time.monotonic()
            time.sleep(1.0)
        if self.last is not None:
            with self._made([self.last]) as (folder, sums):
                self.kept = (folder / self.plan.outputs[self.last].path).read_bytes()
                done[self.last] = _Sent("", len(self.kept), sums[0])
        return done

    def publish(self, manifest: dict[str, Any]) -> None:
        """Puts the manifest, the last file and the tracker, and removes the journal."""
        destination = self.destination
        text = errors.shown(json.dumps(manifest, indent=1)) + "\n"
        self._put(destination.path / MANIFEST, text.encode())
        if self.last is not None:
            self._put(self._file(self.last), self.kept)
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
            entry = _Sent(file.path, file.size, checksum)
            self._put(self._file(number), made)
            self._put(self.folder / SENT / str(number), msgspec.json.encode(entry))
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
                    sending.result()
                    sending = groups_of.submit(send_group, made, group, folder, sums)
                sending.result()
            except BaseException:
                stop.set()
                raise

    def _report(self, files: int) -> None:
        if self.how.progress and not self.ranks.rank:
            total = self.plan.nbytes
            self.how.progress(min(self.bytes_done, total), total, files, len(self.plan.outputs))

    @contextmanager
    def _made(self, group: Sequence[int]) -> Iterator[tuple[Path, list[str]]]:
        """Makes the files of a group in a temporary directory; yields it and their checksums."""
        temporary = Path(tempfile.mkdtemp(dir=self.temporary))
        try:
            outputs, copies, grids = _part(self.plan, group)
            # so that `..` in the path of a carried file stays inside
            data = temporary / "made" / "data"
            # the parts that are sent meanwhile take the rest
            how = replace(self.how, max_memory=self.how.max_memory * 2 // 3)
            sums = move(self.plan, temporary / "made", outputs, copies, grids, how)
            yield data, sums
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    # ---- other ranks

    def help(self) -> dict[str, Any]:
        """Sends the share of a rank other than 0, then waits until rank 0 has published."""
        if (found := self._await_start()) is not None:
            return found
        share = self.ranks.share(len(self.groups))
        self._send([self.groups[i] for i in share], self.sent())
        before, quiet = None, time.monotonic()
        while (said := self._said()) is not None:
            self._raise_error_of(said)
            if said != before:
                before, quiet = said, time.monotonic()
            if time.monotonic() - quiet > QUIET_S:
                raise StorageError(
                    f"{self.folder}: rank 0 has not been heard of for {QUIET_S:.0f} s; start the"
                    " run again: it goes on"
                )
            time.sleep(1.0)
        if (manifest := self._published()) is None:
            raise DestinationError(
                f"{self.folder}: is gone, and no checkpoint of this run is there"
            )
        return manifest

    def _await_start(self) -> dict[str, Any] | None:
        """Waits until rank 0 lives. Returns the manifest if the checkpoint is there already."""
        started, first, next_look = time.monotonic(), None, LOOK_S
        refused: errors.MckptError | None = None
        while True:
            said = self._said()
            waited = time.monotonic() - started
            if waited > next_look:
                before, refused, next_look = refused, refusal(self._refuse), waited + LOOK_S
                if before and refused:
                    raise refused
            if said is not None:
                first = first or said
                if said != first:
                    self._raise_error_of(said)
                    return None
                if waited > QUIET_S:  # by now it is not that of an earlier run
                    self._raise_error_of(said)
            elif (manifest := self._published()) is not None and (
                not self.destination.overwrite or waited > QUIET_S
            ):
                return manifest
            if waited > START_S:
                raise StorageError(
                    f"{self.folder}: rank 0 has not begun within {START_S:.0f} s; rank"
                    f" {self.ranks.rank} gives up"
                )
            time.sleep(1.0)

    def _refuse(self) -> None:
        """Raises the error with which rank 0 is refused before it has said anything."""
        self.place.list()
        self.destination.refuse_occupied(self.folder)

    def _said(self) -> dict[str, Any] | None:
        """Returns the last beat of rank 0, None if there is none."""
        data = self._get(self.folder / BEAT)
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
        manifest = self.destination.manifest()
        return manifest if manifest.get("plan") == self.plan.digest else None


def _groups(plan: Plan, last: int | None) -> list[list[int]]:
    """Returns the files in groups of about GROUP bytes; `last` is in none of them.

    A weight that is quantised and its scales are written together, so their files are in one group.
    """
    tied = _ties(plan)
    out: list[list[int]] = []
    held = 0
    for number, file in enumerate(plan.outputs):
        if number == last:
            continue
        if not out or (held + file.size > GROUP and number not in tied):
            out.append([])
            held = 0
        out[-1].append(number)
        held += file.size
    return out


def _ties(plan: Plan) -> set[int]:
    """Returns the files that must be in the group of the file before them."""
    weights, scales = _quantised(plan)
    tied: set[int] = set()
    for a, b in zip(weights["dst_file"].tolist(), scales, strict=True):
        tied.update(range(min(a, b) + 1, max(a, b) + 1))
    return tied


def _quantised(plan: Plan) -> tuple[np.ndarray, list[int]]:
    """Returns the copies into quantised weights, and the file of the scales of each."""
    joined = plan.joined
    codes = np.array([cast.target == CODES for cast in joined.casts], bool)
    which = (joined.copies["grid"] != UNSCALED) & codes[joined.copies["cast"]]
    copies = joined.copies[which]
    file = Grid._fields.index("file")
    return copies, joined.grids[copies["grid"], file].tolist() if len(copies) else []


def _part(plan: Plan, group: Sequence[int]) -> tuple[list[TargetFile], np.ndarray, np.ndarray]:
    """Returns the files of a group, numbered from 0, the copies into them, and the grids."""
    joined = plan.joined
    number = np.full(len(plan.outputs), -1, "i4")
    number[list(group)] = np.arange(len(group), dtype="i4")
    copies = joined.copies[number[joined.copies["dst_file"]] >= 0].copy()
    grids = joined.grids.copy()
    weights, _ = _quantised(plan)
    for grid in set(weights["grid"][number[weights["dst_file"]] >= 0].tolist()):
        at = Grid._fields.index("file")
        grids[grid, at] = number[grids[grid, at]]
    copies["dst_file"] = number[copies["dst_file"]]
    return [plan.outputs[n] for n in group], copies, grids
