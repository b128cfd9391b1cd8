"""Does the copies of a plan a few at a time: into memory in place of files, or into the files of
the plan as their sources come. An interrupted run starts again, so nothing is journaled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from mckpt.execute.checksums import Range, merged
from mckpt.execute.engine import Tick, Writer, most_threads
from mckpt.execute.files import OpenFiles, lay_out, read_spans, sync_directories
from mckpt.execute.mover import Mover, naming
from mckpt.execute.ranks import Ranks
from mckpt.execute.threads import ThreadPool
from mckpt.execute.transfer import CopySettings, Transfer
from mckpt.execute.units import Work
from mckpt.geometry.join import COPY, UNSCALED, Joined
from mckpt.values.dtypes import itemsize
from mckpt.values.element import Cast

MEMORY = 8 << 20  # bytes of the buffer, which is the share of a thread of a conversion
# bytes from row to row; rows that are closer together pass through the buffer, because Python needs
# 0.6 us for each row that is read into its place
APART = 8 << 10


def read(
    joined: Joined,
    sources: Sequence[str] | OpenFiles,
    start: int,
    out: memoryview,
    memory: memoryview | None = None,
) -> None:
    """Does the copies into one target file, but writes the bytes of the file from `start` on into
    `out`. Leaves out the bytes before and behind.

    sources: the files, which stay open if they are
    given as OpenFiles. memory: the buffer to use, of MEMORY bytes.
    Raises the errors of reading, and Overflow.
    """
    end = start + len(out)

    def put(fd: int, view: memoryview, at: int, path: str) -> None:
        first, last = max(at, start), min(at + len(view), end)
        if first < last:
            out[first - start : last - start] = view[first - at : last - at]

    copies, casts = joined.copies.copy(), joined.casts
    copies["dst_file"] = 0
    files = sources if isinstance(sources, OpenFiles) else OpenFiles(sources, os.O_RDONLY)
    try:
        ranges = _are_ranges(copies, casts)
        for copy in copies[ranges].tolist():
            _read_ranges(files, dict(zip(COPY.names or (), copy, strict=True)), casts, start, out)
        if ranges.all():
            return
        work = Work.of(structs.replace(joined, copies=copies[~ranges]))
        mover = Mover(
            files,
            OpenFiles([os.devnull], os.O_WRONLY),
            casts,
            joined.grids,
            summing=False,
            in_kernel=False,
            allow_overflow=False,
            write=put,
        )
        memory = memoryview(mmap.mmap(-1, MEMORY)) if memory is None else memory
        for slab in range(len(work.slabs)):
            mover.move(work, slab, memory, lambda: None)
        mover.targets.close()
    finally:
        if files is not sources:
            files.close()


def _are_ranges(copies: np.ndarray, casts: Sequence[Cast]) -> np.ndarray:
    """Returns a mask of the copies whose rows are ranges of bytes, unchanged, and lie far apart or
    one after the other.
    """
    # bytes of an element, 0 if its value changes
    size = np.array([itemsize(c.source) if c.same else 0 for c in casts])[copies["cast"]]
    near = (copies["src_step"] == size) & (copies["dst_step"] == size) & (size > 0)
    near &= copies["grid"] == UNSCALED
    return near & ((copies["rows"] == 1) | (copies["src_pitch"] >= APART))


def _read_ranges(
    files: OpenFiles, c: dict[str, int], casts: Sequence[Cast], start: int, out: memoryview
) -> None:
    """Reads the rows of a copy into their places, without a buffer in between."""
    run, rows = c["run"] * itemsize(casts[c["cast"]].source), c["rows"]
    if c["src_pitch"] == c["dst_pitch"] == run:
        run, rows = run * rows, 1
    at = c["dst_at"] - start
    # the rows that lie in `out`, of which the first and the last may lie there in part
    first = max(0, -(at + run - 1) // c["dst_pitch"]) if rows > 1 else 0
    spans = []
    for row in range(first, rows):
        low = at + row * c["dst_pitch"]
        if low >= len(out):
            break
        skipped = max(0, -low)
        if skipped < run:
            source = c["src_at"] + row * c["src_pitch"] + skipped
            spans.append((source, out[low + skipped : low + run]))
    with files.opened([c["src_file"]]) as fds:
        read_spans(fds[c["src_file"]], spans, files.paths[c["src_file"]])


def within(copies: np.ndarray, size: int, start: int, end: int) -> np.ndarray:
    """Returns the copies cut along their outer axis to the rows that write bytes of [start, end).

    size: bytes of an element of the target.
    """
    out = copies.copy()
    for c in out:
        count, step, source = "rows", "dst_pitch", "src_pitch"
        inner = (int(c["run"]) - 1) * int(c["dst_step"]) + size
        if c["rows"] == 1 or c["dst_step"] > c["dst_pitch"]:
            count, step, source = "run", "dst_step", "src_step"
            inner = (int(c["rows"]) - 1) * int(c["dst_pitch"]) + size
        at, far = int(c["dst_at"]), max(1, int(c[step]))
        first = max(0, (start - at - inner) // far + 1)
        last = min(int(c[count]), -(-(end - at) // far))
        c["dst_at"] += first * far
        c["src_at"] += first * int(c[source])
        c[count] = max(0, last - first)
    return out


class Batches(Writer):
    """The files of a plan while they are written."""

    def __init__(self, transfer: Transfer, data: Path, how: CopySettings) -> None:
        lay_out(transfer.outputs, data, data / "journal")
        super().__init__(transfer, data, how)
        # that were written into each file
        self.ranges: list[list[Range]] = [[] for _ in transfer.outputs]

    def do(self, copies: np.ndarray, tick: Tick) -> None:
        """Does some of the plan's copies: all that one tensor of the sources needs, of each."""
        work = Work.of(structs.replace(self.transfer.joined, copies=copies))
        written: list[Range] = []

        def move(slab: int, memory: memoryview, check: Callable[[], None]) -> None:
            written.extend(self.mover.move(work, slab, memory, check))

        most = self.how.max_memory
        threads = self.how.threads or most_threads(work, self.transfer, Ranks().cores, most)
        with naming(self.transfer.joined):
            pool = ThreadPool(threads, most)
            pool.each(range(len(work.slabs)), move, targets=work.targets, tick=tick)
        for range_ in merged(written):
            self.ranges[range_[0]].append(range_)

    def sync(self) -> None:
        """Syncs the files that were written."""
        for file, ranges in enumerate(self.ranges):
            if ranges:
                self.targets.sync(file, os.fdatasync)

    def end(self, tick: Tick, files: Iterable[int] | None = None) -> list[str]:
        """Completes the files, or some of them, and returns the checksum of each."""
        sums = [""] * len(self.ranges)
        self.reopen()

        def end_file(file: int, memory: memoryview, check: Callable[[], None]) -> None:
            sums[file] = self.finish(file, merged(self.ranges[file]), memory, check)

        pool = ThreadPool(self.how.threads or Ranks().cores, self.how.max_memory)
        chosen = range(len(sums)) if files is None else files
        pool.each(chosen, end_file, targets=lambda file: frozenset([file]), tick=tick)
        sync_directories(self.transfer.outputs, self.data)
        return sums
