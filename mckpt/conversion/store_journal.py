"""The journal of a run whose destination is an object store: the files that the run will write, the
ranks that are alive, and the files that are in their place.

    DST/.mckpt-<plan>/intent.json    the names that this run writes
    DST/.mckpt-<plan>/beat/<rank>    the line of a rank (execute.ranks); changes while it lives
    DST/.mckpt-<plan>/sent/<n>       file n is in its place: its bytes, checksum and version

The processes of a run know of each other through these objects alone. A killed run leaves its
journal, and the same command sends only the files that it does not name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from mckpt.conversion.target import Destination
from mckpt.errors import DestinationError, SourceError
from mckpt.execute.ranks import RankLines, Seconds, error_of
from mckpt.storage import sparse_copy
from mckpt.storage.staging import INTENT, MANIFEST, STAGING, Intent, intent
from mckpt.storage.stores import Object

BEAT_S = 5.0  # seconds between two changes of a rank's line
POLL_S = 1.0  # seconds; the longest pause between two looks at the others' lines
DEAD_S = 90.0  # seconds without a change after which a rank of this run counts as dead
LIVE_S = 20.0  # seconds without a change after which another run counts as dead
SENT, BEAT = "sent", "beat"

T = TypeVar("T")


class Sent(msgspec.Struct):
    """An entry of the journal."""

    path: str
    bytes: int
    checksum: str
    version: str  # of the object; "" if the store reports none
    run: str  # the id of the run that sent it


class JournalLine(msgspec.Struct):
    """The parts of a rank's line (`ranks.Session`) that other runs read."""

    id: str  # of its run
    error: tuple[str, str] | None = None  # class and message


class Over(DestinationError):
    """Rank 0 has published, or another run has taken this one for dead."""


class StoreJournal(RankLines):
    """The journal of one run, as one of its ranks sees it, in which the ranks have their lines. It
    can be pickled, for a process on another machine that helps this rank.

    files: the path of each file of the plan, by number.
    id: that of the run (`ranks.Session`), "" while it has not begun.
    ready: whether the old checkpoint is removed, so that files may be sent.
    resumes: whether this run, as rank 0, continues the work of an earlier one.
    """

    public = True

    def __init__(
        self, destination: Destination, folder: Path, files: Sequence[Path], rank: int
    ) -> None:
        self.destination, self.folder, self.files, self.rank = destination, folder, files, rank
        copy = sparse_copy.of(destination.root)
        assert copy is not None
        self.place = copy
        self.id = ""
        self.ready = self.resumes = False
        self._others: dict[str, str] = {}  # other run -> the first line of its rank 0 that was read

    # ---- objects

    def name(self, path: Path) -> str:
        """Returns the name of the object of a path."""
        return self.place.name(os.path.normpath(path))

    def object_of(self, number: int) -> Object | None:
        """Returns the object of a file of the plan, None if the last listing has none."""
        return self.place.objects.get(self.name(self.files[number]))

    def put(self, path: Path, data: bytes | Path) -> str:
        """Puts an object and returns its version."""
        return self.place.put(self.name(path), data)

    def put_ours(self, path: Path, data: bytes | Path) -> str:
        """Puts an object and returns its version. Raises Over if this run is over."""
        self.refuse_if_over()
        return self.put(path, data)

    def _get(self, path: Path) -> bytes | None:
        """Returns a small object, None if it is not there."""
        try:
            return bytes(self.place.store.read(self.name(path), 0, 1 << 20))
        except SourceError:
            return None

    # ---- files that are sent

    def sent(self) -> dict[int, Sent]:
        """Returns the files, by number, that are in their place as they were sent."""
        return {n: one for n, one in self._entries().items() if self._is_still(n, one)}

    def add(self, number: int, entry: Sent) -> None:
        """Records that a file is in its place."""
        self.put_ours(self.folder / SENT / str(number), msgspec.json.encode(entry))

    def remove_entries(self) -> None:
        """Removes the entries of files that earlier runs of this command sent."""
        self.place.remove(self.place.below(self.folder / SENT))

    def _is_still(self, number: int, one: Sent) -> bool:
        there = self.object_of(number)
        if there is None or there.size != one.bytes:
            return False
        # answers quote an ETag, and the listings of some stores do not
        same = bool(one.version) and one.version.strip('"') == there.version.strip('"')
        return same or one.run == self.id

    def _entries(self) -> dict[int, Sent]:
        self.place.list()
        start = f"{self.name(self.folder / SENT)}/"
        names = [n for n in self.place.objects if n.startswith(start)]
        self.place.whole(names)
        out = {}
        for name in names:
            with suppress(OSError, ValueError):
                number = int(name[len(start) :])
                entry = _decoded((self.place.root / name).read_bytes(), Sent)
                if entry and number in range(len(self.files)):
                    out[number] = entry
        return out

    # ---- files that are in the way

    def refuse_occupied(self) -> None:
        """Raises DestinationError if files are in the way, such as a file that another program has
        replaced since an interrupted run sent it.
        """
        self.place.list()
        self.destination.refuse_occupied(self.folder)
        if self.destination.overwrite:
            return
        for number, one in self._entries().items():
            if one.version and self.object_of(number) and not self._is_still(number, one):
                raise DestinationError(
                    f"{self.files[number]}: was replaced since a run of this command sent it; give"
                    " --overwrite to replace the checkpoint"
                )

    def remove_old(self) -> None:
        """Removes the checkpoint that --overwrite replaces, unless that is done."""
        if self.ready:
            return
        self.refuse_if_over()
        done = {self.name(self.files[n]) for n in self.sent()}
        own = self.name(self.destination.root / STAGING)
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

    # ---- runs

    def announce(self, source: str, resume: bool) -> None:
        """Records, as rank 0, the files that this run will put in place.

        resume: whether files that an earlier run of this command sent count as sent, if it read the
        same state of the `source`. Raises DestinationError if another run writes this checkpoint.
        """
        destination = self.destination
        files = [*self.files, destination.path / MANIFEST]
        names = [os.path.relpath(file, destination.root) for file in files]
        announced: Intent = {"unit": destination.iteration_name, "source": source, "files": names}
        self._end_dead_runs()
        self.resumes = resume and self._source() == source
        if not self.resumes:
            self.remove_entries()
        earlier = self.folder.name in self._runs()
        self.put(self.folder / INTENT, json.dumps(announced).encode())
        if others := self._runs() - {self.folder.name}:
            if not earlier:
                self.place.remove([self.name(self.folder / INTENT)])
            raise self._refused_for(others.pop())
        self.ready = not destination.overwrite

    def _source(self) -> str:
        """Returns the state of the source that the last run of this command has read."""
        announced = _decoded(self._get(self.folder / INTENT), Intent)
        return announced["source"] if announced else ""

    def remove(self) -> None:
        """Removes the journal of this run, which is published."""
        self.place.list()
        self.place.remove(self.place.below(self.folder))

    def refuse_living(self) -> None:
        """Raises DestinationError if another run of this checkpoint has reported since the first
        call.
        """
        for name in self._runs() - {self.folder.name}:
            line = self._line_of(name)
            if self._others.setdefault(name, line) != line:
                raise self._refused_for(name)

    def _end_dead_runs(self) -> None:
        """Removes the journals of interrupted runs that wrote this checkpoint. Raises
        DestinationError if one of them lives; this takes LIVE_S if one of them was killed.
        """
        first = {name: self._line_of(name) for name in self._runs()}
        lines = [_decoded(line.encode(), JournalLine) for line in first.values()]
        end = time.monotonic() + LIVE_S
        while time.monotonic() < end and any(ln is None or ln.error is None for ln in lines):
            time.sleep(min(1.0, LIVE_S / 4))
            for name, line in first.items():
                if self._line_of(name) != line:
                    raise self._refused_for(name)
        for name in first.keys() - {self.folder.name}:
            self.place.remove(self.place.below(self.destination.root / name))

    def _refused_for(self, name: str) -> DestinationError:
        return DestinationError(f"{self.destination.path}: another mckpt is writing here ({name})")

    def _runs(self) -> set[str]:
        """Returns the names of the staging directories of all runs that write this checkpoint."""
        self.place.list()
        names = set()
        for folder in self.destination.root.glob(f"{STAGING}*"):
            if (there := intent(folder)) and there["unit"] == self.destination.iteration_name:
                names.add(folder.name)
        return names

    # ---- lines of ranks (execute.ranks.Lines)

    @property
    def seconds(self) -> Seconds:
        return Seconds(BEAT_S, DEAD_S, POLL_S)

    def read(self, rank: int) -> str:
        """Returns the line of a rank, "" if there is none."""
        return self._line_of(self.folder.name, rank)

    def write(self, rank: int, line: str) -> None:
        """Replaces the line of a rank."""
        self.put(self.folder / BEAT / str(rank), line.encode())

    def clear(self) -> None:
        """Removes the lines of an earlier run."""
        self.place.remove(self.place.below(self.folder / BEAT))

    def belong_to(self, run: str) -> bool:
        """Returns whether rank 0 has a line, of the run with this id unless it is ""."""
        line = self.last_line()
        return line is not None and run in ("", line.id)

    def last_line(self) -> JournalLine | None:
        """Returns the last line of rank 0, None if there is none."""
        return _decoded(self.read(0).encode(), JournalLine)

    def refuse_if_over(self) -> None:
        """Raises Over if the run is over, and on other ranks the error of rank 0."""
        line = self.last_line()
        if line is None or line.id != self.id:
            raise Over(
                f"{self.folder}: is gone, and no checkpoint of this run is there; another mckpt has"
                " taken this run for dead"
            )
        if self.rank and line.error is not None:
            raise error_of(0, *line.error)

    def forget_line(self) -> None:
        """Removes the line of this rank."""
        self.place.remove([self.name(self.folder / BEAT / str(self.rank))])

    def _line_of(self, run: str, rank: int = 0) -> str:
        """Returns the last line of a rank of a run, "" if there is none."""
        data = self._get(self.destination.root / run / BEAT / str(rank)) or b""
        return data.decode(errors="replace")


def _decoded(data: bytes | None, kind: type[T]) -> T | None:
    """Returns the content of an object of the journal, None if it is not there or damaged."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(data or b"", type=kind)
    return None
