"""Moves the bytes of a plan into a staging directory: bounded memory, many threads, resumable,
with checksums computed on the way.

    transfer   the copies of a plan with their files, and how a process does them
    units      cuts the copies of the plan into slabs, which threads take, and units of slabs
    clusters   lays out in a buffer the copies that move together
    chains     or many short rows, as arrays
    mover      copies one slab
    quantising quantises the rows of one slab
    measuring  finds the largest values of weights that share a scale
    threads    hands out the slabs
    files      opens, reads, writes and syncs the files
    checksums  combines the crc32 of the ranges that were written into that of a whole file
    journal    remembers the finished units, so that the same call continues after a kill
    piecewise  does the copies a few at a time, as their sources come, or into memory
    ranks      shares the units between processes
    ray_tasks  or between the nodes of a Ray cluster
    comparing  compares files with those that a run would write

It knows no tensor names and no formats. numpy's assignments, preadv, pwrite and crc32 all release
the GIL, so threads are enough.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from isal import isal_zlib

from mckpt.execute.checksums import KINDS, RANGE, Range, RangeSums, merged
from mckpt.execute.clusters import Copy
from mckpt.execute.files import (
    OpenFiles,
    crc_of_range,
    lay_out,
    read_pieces,
    sync_directories,
    write_at,
)
from mckpt.execute.journal import Journal, generation
from mckpt.execute.mover import PIECE, Mover, naming
from mckpt.execute.ranks import Ranks, Session, wait_for
from mckpt.execute.threads import ThreadPool
from mckpt.execute.transfer import CopySettings, Transfer
from mckpt.execute.units import Work, is_quantised
from mckpt.lazy import distinct
from mckpt.progress import OnProgress, Progress, share
from mckpt.storage import sparse_copy
from mckpt.storage.descriptors import any_remote
from mckpt.values.dtypes import itemsize
from mckpt.values.quantisation import WRITTEN

# most threads of one process: with 12, strided work on 64 cores was 10% slower, with 64 twice as
# slow (docs/scale.md)
KNEE = 8
KNEE_FLAT = 16  # the same if nothing is staged: 1.6 s; with 8 threads 1.9 s, with 32 2.2 s
# threads that read near each other in a store, whose chunks are read whole and kept for a while:
# with 16 threads far apart, each chunk of 2.5 GB was read three times
TOGETHER = 4
REQUESTS = 16  # requests to an object store at the same time, each of max_memory / 16 bytes

Step = Literal["copy", "end", "send"]
Tick = Callable[[], None]


class Task(Protocol):
    """Work of which any process can do a part, if it can be pickled for that process."""

    @property
    def threads(self) -> int:
        """The threads of each process."""

    @property
    def place(self) -> Path:
        """The directory or URL in which the processes find each other's work."""

    def mark(self) -> str:
        """Returns an identifier of the work at `place`. A process that finds another identifier
        there sees another directory of the same name.
        """

    def do(self, step: Step, items: range, tick: Tick) -> None:
        """Does a part of one step."""


@dataclass(frozen=True)
class Job:
    """A call of `execute` as data, from which any process that sees the files can do a part.

    transfer: without its copies, which `work` has. journal: the folder of the journal. how: of each
    process.
    """

    work: Work
    transfer: Transfer
    staging: Path
    journal: Path
    how: CopySettings

    @property
    def threads(self) -> int:
        return self.how.threads

    @property
    def place(self) -> Path:
        return self.staging.parent

    def mark(self) -> str:
        """Returns the generation of the journal."""
        return generation(self.journal)

    def do(self, step: Step, items: range, tick: Tick) -> None:
        """Does a part of one step: copies these units, or ends these files."""
        with closing(_JobState(self)) as run:
            run.copy(items, tick) if step == "copy" else run.end(items, tick)


def most_threads(work: Work, transfer: Transfer, cores: int, max_memory: int) -> int:
    """Returns the number of threads that are useful to a process that has so many cores.

    A transposed matrix that does not fit into a thread's part of the memory is read and written in
    very many short pieces. Threads wait for Python's lock at each, so that 16 threads took 16 times
    as long as one.
    """
    knee = KNEE_FLAT if work.is_flat() else KNEE
    if any_remote(transfer.sources):  # threads wait for the store, not for a core
        cores = knee = REQUESTS
    elif whole := work.transposed_bytes():
        knee = min(knee, max_memory // whole)
    return max(1, min(cores, knee, max_memory // PIECE))


class Machines(Protocol):
    """Machines that do the steps of a task in place of this process."""

    @property
    def cores(self) -> int:
        """The number of cores that each process gets there."""

    def do(self, job: Task, step: Step, count: int, tick: Tick) -> Iterator[range]:
        """Does a step for `count` units, files or groups. Yields the ranges as they are done, and
        calls `tick` meanwhile.
        """


def execute(
    transfer: Transfer,
    staging: Path,
    how: CopySettings,
    *,
    session: Session | None = None,
    cluster: Machines | None = None,
    progress: OnProgress | None = None,
) -> list[str]:
    """Writes the outputs of `transfer` under `staging`; returns one checksum per output, such as
    "crc32:0a1b2c3d".

    session: with several ranks, each process does its share of the units, then of the files' ends,
        and returns when all ranks are done. The journal is in the session's directory; without a
        session it is in `staging`.
    cluster: does the work in place of this process, which must be the only rank.
    progress: the calling thread calls it.

    If the same call failed or was killed before, the units that it finished are not done again: the
    caller names `staging` after the plan. Files and directories are synced on return; nothing is
    renamed.

    Raises StorageError (no space, an I/O error), SourceError (a source is shorter than its copies
    require), UsageError (a value that its new dtype cannot hold), and Gone if rank 0 has published
    before this rank was done.
    """
    assert how.checksum in KINDS, how.checksum
    session = session or Session(staging, Ranks())
    ranks, done, outputs = session.ranks, session.staging / "done", transfer.outputs
    assert cluster is None or ranks.size == 1
    work = Work.of(transfer.joined, seeks=not any(map(sparse_copy.holes, transfer.sources)))
    cores = cluster.cores if cluster else ranks.cores
    threads = how.threads or most_threads(work, transfer, cores, how.max_memory)
    job = Job(work, transfer.without_copies(), staging, done, replace(how, threads=threads))

    def prepare() -> None:
        lay_out(outputs, staging, done)
        Journal.create(done)

    earlier = ranks.rank == 0 and done.exists()
    session.begin(prepare)
    run = _JobState(job)
    total = int(job.work.slabs["bytes"].sum())
    if earlier and (there := run.bytes_there()):
        session.on_note(continues(there, total))

    moved = False  # whether all ranks have moved all bytes

    def tick() -> None:
        session.beat(run.bytes_done, run.files_done)
        if progress:
            others = session.done() or [0, 0]
            nbytes = run.bytes_done + others[0]
            files = run.files_empty + run.files_done + others[1]
            if moved:
                nbytes, files = total, len(outputs)
            progress(Progress(min(nbytes, total), total, min(files, len(outputs)), len(outputs)))

    def copy(rank: int) -> None:
        run.copy(ranks.share(run.num_units, rank), tick)

    def end(rank: int) -> None:
        run.end(ranks.share(len(outputs), rank), tick)

    with naming(transfer.joined), closing(run):
        if cluster:
            for units in cluster.do(job, "copy", run.num_units, tick):
                run.load(units)
            moved = True
            for _ in cluster.do(job, "end", len(outputs), tick):
                pass
        else:
            copy(ranks.rank)
            session.meet(copy)
            moved = True
            # a network filesystem shows the writes of other nodes only in files opened after them
            run.reopen()
            end(ranks.rank)
            session.meet(end)
        if ranks.rank:
            return []
        sums = [
            wait_for(partial(run.journal.sum, file), f"the checksum of {outputs[file].path}", tick)
            for file in range(len(outputs))
        ]
    sync_directories(outputs, staging)
    if ranks.size == 1:
        shutil.rmtree(done, ignore_errors=True)
    return sums


def continues(there: int, total: int) -> str:
    """Returns the note of a run that continues the work of an earlier one; both in bytes."""
    return f"continues an interrupted run, which has written {share(there, total)}"


class Writer:
    """The outputs of a transfer while a process writes them below the directory `data`.

    in_kernel: let the kernel copy ranges of bytes.
    """

    def __init__(
        self, transfer: Transfer, data: Path, how: CopySettings, in_kernel: bool = False
    ) -> None:
        self.transfer, self.data, self.how = transfer, data, how
        self.mover = Mover(
            transfer.readers(),
            # Not for reading: an NFS client would read whole pages in and write them back, over
            # bytes that another node has written there since.
            transfer.targets(data, os.O_WRONLY),
            transfer.joined.casts,
            transfer.joined.grids,
            summing=how.checksum == "crc32",
            in_kernel=in_kernel,
            allow_overflow=how.allow_overflow,
        )
        self.targets = self.mover.targets

    def reopen(self) -> None:
        """Closes the outputs; the next use opens them anew, for reading too."""
        self.targets.close()
        self.targets = OpenFiles(self.targets.paths, os.O_RDWR)

    def finish(
        self, file: int, ranges: Sequence[Range], memory: memoryview, check: Callable[[], None]
    ) -> str:
        """Writes the fixed bytes of one file, syncs it, and returns its checksum.

        ranges: the ranges of it that copies wrote.
        """
        output, checksum = self.transfer.outputs[file], self.how.checksum
        with self.targets.opened([file]) as fds:
            fd, path = fds[file], self.targets.paths[file]
            memory = memory[:PIECE]
            crc_of = partial(crc_of_range, fd, path=path, memory=memory, check=check)
            sums = RangeSums(ranges, crc_of) if checksum == "crc32" else None
            fixed: list[Range] = []
            for at, data in output.fixed(sums.crc if sums else None):
                assert at >= 0 and at + len(data) <= output.size, (
                    f"{path}: fixed bytes at {at} end beyond its {output.size} bytes"
                )
                write_at(fd, memoryview(data), at, path)
                fixed.append((file, at, len(data), isal_zlib.crc32(data)))
            self.targets.sync(file, os.fsync)
            if sums:
                return f"crc32:{RangeSums([*ranges, *fixed], crc_of).crc(0, output.size):08x}"
            if checksum == "none":
                return ""
            digest = hashlib.sha256()
            for view in read_pieces(fd, 0, output.size, path, memory, check):
                digest.update(view)
            return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        """Closes all files."""
        self.mover.sources.close()
        self.targets.close()


class _JobState(Writer):
    """The state of a job in one process: which slabs and units are done, and what they wrote."""

    def __init__(self, job: Job) -> None:
        outputs, threads = job.transfer.outputs, job.how.threads
        few = job.how.checksum == "crc32" or len(outputs) < 2 * threads
        super().__init__(job.transfer, job.staging, job.how, in_kernel=not few)
        self.work = job.work
        self.journal = Journal(job.journal, job.work, outputs)
        self.pool = ThreadPool(threads, job.how.max_memory)
        self.lock = threading.Lock()
        self.by_file: list[list[Range]] | None = None
        copies = self.work.copies
        # bytes of tensors that each file still waits for, as far as this process knows
        self.file_left = np.zeros(len(self.targets.paths), "i8")
        nbytes = copies["rows"] * copies["run"] * copies["dst_item"]
        packed = [
            WRITTEN[c.target].per_byte if c.target in WRITTEN else 1
            for c in job.transfer.joined.casts
        ]
        np.add.at(
            self.file_left, copies["dst_file"], nbytes // np.array([*packed, 1])[copies["cast"]]
        )
        self.files_empty = int((self.file_left == 0).sum())
        slabs = self.work.slabs
        self.num_units = int(slabs["unit"][-1]) + 1 if len(slabs) else 0
        self.done: dict[int, np.ndarray] = {}  # unit -> the ranges that it wrote
        self.bytes_done = 0
        self.left: Counter[int] = Counter()  # unit -> slabs that are not done
        self.open: dict[int, list[Range]] = {}  # unit that is not done -> the ranges written so far

    def copy(self, units: range, tick: Tick) -> None:
        """Copies the units that are not done yet."""
        self.load(units)
        in_store = any(sparse_copy.of(path) for path in self.transfer.sources)
        slabs = self.todo(units, -(-self.how.threads // (TOGETHER if in_store else 1)))
        self.pool.each(slabs, self.move, targets=self.work.targets, tick=tick)

    def end(self, files: range, tick: Tick) -> None:
        """Ends the files that are not ended yet, once all their units are done."""
        self.load_all(files, tick)
        unended = [file for file in files if self.journal.sum(file) is None]
        self.pool.each(unended, self.end_file, targets=lambda file: frozenset([file]), tick=tick)

    def load(self, units: range) -> None:
        """Reads from the journal which of these units an earlier run has done."""
        for unit, ranges in self.journal.load(units).items():
            self.done[unit] = ranges
            first, last = np.searchsorted(self.work.slabs["unit"], [unit, unit + 1]).tolist()
            self.bytes_done += int(self.work.slabs["bytes"][first:last].sum())
            for slab in range(first, last):
                self._count(slab)

    def bytes_there(self) -> int:
        """Returns the bytes that earlier runs have written."""
        slabs = self.work.slabs
        units = list(self.journal.load(range(self.num_units)))
        return int(slabs["bytes"][np.isin(slabs["unit"], units)].sum())

    def load_all(self, files: range, tick: Callable[[], None]) -> None:
        """Waits for every unit that writes these files, whichever rank does it."""
        if len(self.done) == self.num_units:
            return
        for unit in self.units_of(files):
            if unit not in self.done:
                self.done[unit] = wait_for(
                    partial(self.journal.unit, unit), f"{self.journal.folder}, unit {unit}", tick
                )
        self.by_file = None

    def units_of(self, files: range) -> list[int]:
        """Returns the units that write any of these files, in order."""
        copies, bounds, slabs = self.work
        within = (copies["dst_file"] >= files.start) & (copies["dst_file"] < files.stop)
        clusters = (
            np.logical_or.reduceat(within, bounds[:-1]) if len(bounds) > 1 else np.zeros(0, bool)
        )
        found: list[int] = distinct(slabs["unit"][clusters[slabs["cluster"]]]).tolist()
        return found

    def todo(self, units: range, lanes: int) -> Iterator[int]:
        """Returns the slabs of those units that are not done.

        It cuts them into `lanes` parts and takes one slab of each part in turn, so that threads
        work far apart and seldom in one target file.
        """
        unit = self.work.slabs["unit"]
        first, last = np.searchsorted(unit, [units.start, units.stop])
        slabs = [s for s in range(int(first), int(last)) if int(unit[s]) not in self.done]
        self.left = Counter(unit[slabs].tolist())
        self.open = {u: [] for u in self.left}
        size = -(-len(slabs) // lanes)
        return (slabs[i] for first in range(size) for i in range(first, len(slabs), size))

    def move(
        self, slab: int, memory: memoryview, check: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Copies one slab.

        If it was the last one of its unit, returns a function that syncs the unit's files and
        writes its journal entry.
        """
        _, _, _, nbytes, unit = self.work.slabs[slab].item()
        written = self.mover.move(self.work, slab, memory, check)
        with self.lock:
            self.open[unit] += written
            self.left[unit] -= 1
            self.bytes_done += nbytes
            self._count(slab)
            if self.left[unit]:
                return None
        ranges = np.array(merged(self.open.pop(unit)), RANGE)

        def keep() -> None:
            for file in distinct(ranges["file"]).tolist():
                self.targets.sync(file, os.fdatasync)
            self.journal.write(unit, ranges)
            with self.lock:
                self.done[unit] = ranges

        return keep

    def _count(self, slab: int) -> None:
        """Subtracts the bytes of a slab from those that its files wait for."""
        _, row, end, _, _ = self.work.slabs[slab].item()
        records = self.work.cluster(slab)
        if is_quantised(records):
            of, grid = self.work.slabs[slab], self.mover.grid(Copy(*records[-1].tolist()))
            weight = (int(of["end"]) - int(of["row"])) * grid.width // grid.encoding.per_byte
            self.file_left[int(records["dst_file"][0])] -= weight
            if grid.overall and not of["row"]:
                self.file_left[grid.overall_file] -= itemsize("float32")
            self.file_left[int(records["dst_file"][-1])] -= int(of["bytes"]) - weight
            return
        np.subtract.at(
            self.file_left, records["dst_file"], (end - row) * records["run"] * records["dst_item"]
        )

    @property
    def files_done(self) -> int:
        """The number of files that have tensors and hold all of them.

        It does not count files that several processes write.
        """
        return int((self.file_left <= 0).sum()) - self.files_empty

    def ranges(self, file: int) -> list[Range]:
        """Returns the ranges of one file that were written."""
        with self.lock:
            if self.by_file is None:
                self.by_file = [[] for _ in self.targets.paths]
                for ranges in self.done.values():
                    for r in ranges.tolist():
                        self.by_file[r[0]].append(r)
            return self.by_file[file]

    def end_file(self, file: int, memory: memoryview, check: Callable[[], None]) -> None:
        """Ends one file, and journals its checksum."""
        self.journal.write_sum(file, self.finish(file, self.ranges(file), memory, check))
