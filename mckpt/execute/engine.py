"""Moves the bytes of a plan into a staging directory: bounded memory, many threads, resumable,
checksummed on the way.

What is moved together is decided in `clusters`; here are the files, the threads, the checksums and
the journal: `done/<unit>` holds what a finished unit wrote, so that the same call goes on after a
kill. Knows no names and no formats. numpy's assignments, preadv, pwrite and crc32 all release the
GIL, so threads are enough.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import resource
import shutil
import struct
import threading
import time
import uuid
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from isal import isal_zlib

from mckpt.errors import SourceError, StorageError, UsageError
from mckpt.execute.clusters import SAME, SECTOR, Band, Cluster, Copy, Strip, Work, is_ranges
from mckpt.execute.ranks import Ranks, Session, awaited
from mckpt.geometry.join import UNSCALED
from mckpt.lazy import distinct
from mckpt.storage.files import TargetFile
from mckpt.values.casting import cast, has_infinity, pieces
from mckpt.values.dtypes import numpy_dtype
from mckpt.values.quantisation import VALUES, Grid, dequantise

# bytes of one read of a flat copy: 0.67 s of CPU per GiB with crc32, 128 KiB 0.72, 2 MiB 0.73
PIECE = 1 << 20
# bytes of buffers of one staged step, if it needs no more: 1 to 4 MiB measured alike, 8 MiB costs
# 15% more
TILE = 2 << 20
# elements of a transposed row placed at a time: their cache lines stay in L1 for the next row; 2
# GB/s instead of 0.3
LINES = 512
# bytes; a row written alone has its own crc from here on, shorter ones are read back: 28 bytes of
# state each
ROW_SUM = 32 << 10
# slabs per thread looked at to find one whose files nobody writes: two writers of one inode wait
# for each other
AHEAD = 8
STOP_WAIT = 0.8  # seconds that an interrupted run waits for threads that sit in a system call
# threads of one process: with 12, strided work on 64 cores was 10% slower, with 64 twice as slow
# (docs/scale.md)
KNEE = 8
KNEE_FLAT = 16  # of them where nothing is staged: 1.6 s instead of 1.9 with 8, 2.2 with 32
TICK = 0.1  # seconds between calls of `progress`
# units; a listing costs as much as all of the ranks have written, a name that is looked for a
# request
LISTED = 1000
# in the journal, a name for the files that it speaks of: processes of an earlier run may still
# write into theirs
GENERATION = "generation"
UNKNOWN = -1  # the crc of bytes not summed as they passed; read back when it is asked for

_RANGE = np.dtype([("file", "i8"), ("at", "i8"), ("bytes", "i8"), ("crc", "i8")])

Range = tuple[int, int, int, int]  # file, offset, bytes, crc32 or UNKNOWN
CrcOf = Callable[[int, int], int]


class Overflow(UsageError):
    """A finite value that float16 cannot hold; `tensor` is the number of the copy's tensor, for who
    knows its name.
    """

    def __init__(self, tensor: int, where: str) -> None:
        super().__init__(f"tensor {tensor}: {where}")
        self.tensor, self.where = tensor, where


class _Stopped(Exception):
    """Another thread failed, or the user interrupted: leave everything as it is."""


def execute(
    copies: np.ndarray,
    casts: Sequence[tuple[str, str]],
    sources: Sequence[str],
    outputs: Sequence[TargetFile],
    staging: Path,
    *,
    max_memory: int = 64 << 20,
    threads: int = 0,
    checksum: str = "crc32",
    allow_overflow: bool = False,
    grids: np.ndarray | None = None,
    session: Session | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
) -> list[str]:
    """Writes `outputs` under `staging` from `copies` (planning.COPY) of `sources`; one checksum per
    output, "crc32:0a1b2c3d".

    `max_memory` is bytes of buffers over all threads; `threads` 0 is one per core, at most KNEE, or
    KNEE_FLAT if nothing is staged; `checksum` is none, crc32 or sha256; `grids` is Joined.grids,
    for copies that are scaled. When the same call failed or was killed before, what it finished is
    not done again: the caller names `staging` after the plan. `progress` gets (bytes done, bytes in
    all, files done, files in all) from the calling thread. Files and directories are synced on
    return; nothing is renamed.

    With several ranks in a `session` each process does its share of the units, then of the files'
    ends, and returns when all of that is done, whoever did it; raises Gone if rank 0 was done with
    all before. The journal is in the session's directory (None: in `staging`).

    Raises StorageError (no space, an I/O error), SourceError (a source is shorter than its copies
    say), Overflow.
    """
    assert checksum in ("none", "crc32", "sha256"), checksum
    session = session or Session(staging, Ranks())
    ranks, control = session.ranks, session.staging
    work = Work.of(copies, casts)
    threads = threads or max(
        1, min(ranks.cores, KNEE_FLAT if work.is_flat() else KNEE, max_memory // PIECE)
    )
    session.begin(lambda: _lay_out(outputs, staging, control / "done"))
    journal = _Journal(control / "done", work, outputs)
    run = _Run(
        work,
        casts,
        sources,
        [str(staging / o.path) for o in outputs],
        journal,
        checksum == "crc32",
        allow_overflow,
        grids,
    )
    run.in_kernel = checksum != "crc32" and len(outputs) >= 2 * threads
    crew = _Crew(threads, max(256, max_memory // threads))
    total = int(work.slabs["bytes"].sum())

    moved = False  # all, by all ranks

    def tick() -> None:
        session.beat(run.bytes_done, run.files_done)
        if progress:
            others = session.done() or [0, 0]
            nbytes, files = (
                (total, len(outputs))
                if moved
                else (run.bytes_done + others[0], run.files_empty + run.files_done + others[1])
            )
            progress(min(nbytes, total), total, min(files, len(outputs)), len(outputs))

    def move(rank: int) -> None:
        share = ranks.share(run.num_units, rank)
        run.load(share)
        crew.each(run.todo(share, threads), run.targets, run.move, tick)

    def finish(file: int, memory: memoryview, check: Callable[[], None]) -> None:
        journal.write_sum(
            file, run.finish(file, outputs[file], run.ranges(file), checksum, memory, check)
        )

    def end(rank: int) -> None:
        share = ranks.share(len(outputs), rank)
        run.load_all(share, tick)
        crew.each(
            iter([f for f in share if journal.sum(f) is None]),
            lambda file: frozenset([file]),
            finish,
            tick,
        )

    try:
        move(ranks.rank)
        session.meet(move)
        moved = True
        run.reopen()  # a network filesystem shows what others wrote to who opens a file after that
        end(ranks.rank)
        session.meet(end)
        if ranks.rank:
            return []
        sums = [
            awaited(partial(journal.sum, file), f"the checksum of {outputs[file].path}", tick)
            for file in range(len(outputs))
        ]
    finally:
        run.close()
    _sync_directories(outputs, staging)
    if ranks.size == 1:
        shutil.rmtree(control / "done", ignore_errors=True)
    return sums


# Moving


class _Run:
    """One call of execute: slabs in, ranges of written bytes with their crc out, units journaled
    when all of their slabs are there.
    """

    def __init__(
        self,
        work: Work,
        casts: Sequence[tuple[str, str]],
        sources: Sequence[str],
        targets: Sequence[str],
        journal: _Journal,
        summing: bool,
        allow_overflow: bool,
        grids: np.ndarray | None,
    ) -> None:
        self.work, self.casts, self.journal = work, casts, journal
        self.summing, self.allow_overflow, self.grids = summing, allow_overflow, grids
        self.in_kernel = False
        self.sources = _Files(sources, os.O_RDONLY)
        # not for reading: an NFS client would read whole pages in and write them back, with what
        # another node has written there since
        self.targets_ = _Files(targets, os.O_WRONLY)
        self.lock = threading.Lock()
        self.by_file: list[list[Range]] | None = None
        copies = work.copies
        # bytes of tensors that each file still waits for, as far as is known here
        self.file_left = np.zeros(len(targets), "i8")
        np.add.at(
            self.file_left, copies["dst_file"], copies["rows"] * copies["run"] * copies["dst_item"]
        )
        self.files_empty = int((self.file_left == 0).sum())
        slabs = work.slabs
        self.num_units = int(slabs["unit"][-1]) + 1 if len(slabs) else 0
        self.done: dict[int, np.ndarray] = {}  # unit: its ranges
        self.bytes_done = 0
        self.left: Counter[int] = Counter()
        self.open: dict[int, list[Range]] = {}

    def load(self, units: range) -> None:
        """Learns which of these units an earlier run has done."""
        for unit, ranges in self.journal.load(units).items():
            self.done[unit] = ranges
            first, last = np.searchsorted(self.work.slabs["unit"], [unit, unit + 1]).tolist()
            self.bytes_done += int(self.work.slabs["bytes"][first:last].sum())
            for slab in range(first, last):
                self._count(slab)

    def load_all(self, files: range, tick: Callable[[], None]) -> None:
        """Learns of every unit that writes these files, whoever did it."""
        if len(self.done) == self.num_units:
            return
        for unit in self.units_of(files):
            if unit not in self.done:
                self.done[unit] = awaited(
                    partial(self.journal.unit, unit), f"{self.journal.folder}, unit {unit}", tick
                )
        self.by_file = None

    def units_of(self, files: range) -> list[int]:
        """The units that write any of these files, in order."""
        copies, bounds, slabs = self.work
        within = (copies["dst_file"] >= files.start) & (copies["dst_file"] < files.stop)
        clusters = (
            np.logical_or.reduceat(within, bounds[:-1]) if len(bounds) > 1 else np.zeros(0, bool)
        )
        found: list[int] = distinct(slabs["unit"][clusters[slabs["cluster"]]]).tolist()
        return found

    def todo(self, units: range, lanes: int) -> Iterator[int]:
        """The slabs of those units that are not done, of `lanes` parts by turns: threads are then
        far apart, and seldom in one target file.
        """
        unit = self.work.slabs["unit"]
        first, last = np.searchsorted(unit, [units.start, units.stop])
        slabs = [s for s in range(int(first), int(last)) if int(unit[s]) not in self.done]
        self.left = Counter(unit[slabs].tolist())
        self.open = {u: [] for u in self.left}
        size = -(-len(slabs) // lanes)
        return (slabs[i] for first in range(size) for i in range(first, len(slabs), size))

    def targets(self, slab: int) -> frozenset[int]:
        """The files a slab writes."""
        return frozenset(self.work.cluster(slab)["dst_file"].tolist())

    def move(
        self, slab: int, memory: memoryview, check: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Does one slab; for the one that completes its unit, returns what syncs the unit's files
        and journals it.
        """
        _, row, end, nbytes, unit = self.work.slabs[slab].item()
        records = self.work.cluster(slab)
        copies = [Copy(*c) for c in records.tolist()]
        mover = _Mover(self, memory, check)
        sources = {c.src_file for c in copies} | {
            self.grid(c).file for c in copies if c.grid != UNSCALED
        }
        with (
            self.sources.held(sources) as mover.src,
            self.targets_.held(c.dst_file for c in copies) as mover.dst,
        ):
            if is_ranges(records[:1]).all():
                mover.pump(copies[0], row, end)
            else:
                mover.stage(Cluster(copies), row, end)
        with self.lock:
            self.open[unit] += _merged(mover.written)
            self.left[unit] -= 1
            self.bytes_done += nbytes
            self._count(slab)
            if self.left[unit]:
                return None
        ranges = np.array(_merged(self.open.pop(unit)), _RANGE)

        def keep() -> None:
            for file in distinct(ranges["file"]).tolist():
                self.targets_.sync(file, os.fdatasync)
            self.journal.write(unit, ranges)
            with self.lock:
                self.done[unit] = ranges

        return keep

    def grid(self, c: Copy) -> Grid:
        """What a scaled copy's source is scaled by."""
        assert self.grids is not None, "copies are scaled, and no grids were given"
        return Grid(*self.grids[c.grid].tolist())

    def _count(self, slab: int) -> None:
        """Takes what a slab writes from what its files wait for."""
        _, row, end, _, _ = self.work.slabs[slab].item()
        records = self.work.cluster(slab)
        np.subtract.at(
            self.file_left, records["dst_file"], (end - row) * records["run"] * records["dst_item"]
        )

    @property
    def files_done(self) -> int:
        """Files whose tensors are all there, of those that have any; one that several processes
        write is not among them.
        """
        return int((self.file_left <= 0).sum()) - self.files_empty

    def ranges(self, file: int) -> list[Range]:
        """What was written of one file."""
        with self.lock:
            if self.by_file is None:
                self.by_file = [[] for _ in self.targets_.paths]
                for ranges in self.done.values():
                    for r in ranges.tolist():
                        self.by_file[r[0]].append(r)
            return self.by_file[file]

    def reopen(self) -> None:
        """Closes the targets, which are opened anew when they are next used, for reading too."""
        self.targets_.close()
        self.targets_ = _Files(self.targets_.paths, os.O_RDWR)

    def finish(
        self,
        file: int,
        output: TargetFile,
        ranges: list[Range],
        checksum: str,
        memory: memoryview,
        check: Callable[[], None],
    ) -> str:
        """Writes the fixed bytes of one file, syncs it; its checksum."""
        with self.targets_.held([file]) as fds:
            fd, path = fds[file], self.targets_.paths[file]

            def pieces(at: int, nbytes: int) -> Iterator[memoryview]:
                size = min(PIECE, len(memory))
                for start in range(at, at + nbytes, size):
                    check()
                    view = memory[: min(size, at + nbytes - start)]
                    _read(fd, view, start, path)
                    yield view

            def crc_of_bytes(at: int, nbytes: int) -> int:
                crc = 0
                for view in pieces(at, nbytes):
                    crc = isal_zlib.crc32(view, crc)
                return crc

            sums = _Sums(ranges, crc_of_bytes) if self.summing else None
            fixed: list[Range] = []
            for at, data in output.fixed(sums.crc if sums else None):
                assert at >= 0 and at + len(data) <= output.size, (
                    f"{path}: fixed bytes at {at} end beyond its {output.size} bytes"
                )
                _write(fd, memoryview(data), at, path)
                fixed.append((file, at, len(data), isal_zlib.crc32(data)))
            self.targets_.sync(file, os.fsync)
            if sums:
                return f"crc32:{_Sums([*ranges, *fixed], crc_of_bytes).crc(0, output.size):08x}"
            if checksum == "none":
                return ""
            digest = hashlib.sha256()
            for view in pieces(0, output.size):
                digest.update(view)
            return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        self.sources.close()
        self.targets_.close()


class _Mover:
    """One slab's hands: a buffer, open files, and the ranges written so far."""

    def __init__(self, run: _Run, memory: memoryview, check: Callable[[], None]) -> None:
        self.run, self.memory, self.check = run, memory, check
        self.src: dict[int, int] = {}
        self.dst: dict[int, int] = {}
        self.written: list[Range] = []

    def _read(self, file: int, view: memoryview, at: int) -> None:
        _read(self.src[file], view, at, self.run.sources.paths[file])

    def _write(self, file: int, view: memoryview, at: int) -> None:
        _write(self.dst[file], view, at, self.run.targets_.paths[file])

    def _crc(self, view: memoryview, crc: int = 0) -> int:
        return isal_zlib.crc32(view, crc) if self.run.summing else UNKNOWN

    def pump(self, c: Copy, row: int, end: int) -> None:
        """Rows [row, end) of a flat copy, through a buffer that stays in the cache."""
        length = c.run
        if c.src_pitch == c.dst_pitch == c.run:
            length, rows = c.run * (end - row), range(row, row + 1)
        else:
            rows = range(row, end)
        size = min(PIECE, len(self.memory))
        for r in rows:
            src, dst, crc = (
                c.src_at + r * c.src_pitch,
                c.dst_at + r * c.dst_pitch,
                self._crc(self.memory[:0]),
            )
            moved = (
                0
                if not self.run.in_kernel
                else _copy_in_kernel(self.src[c.src_file], self.dst[c.dst_file], src, dst, length)
            )
            for at in range(moved, length, size):
                self.check()
                view = self.memory[: min(size, length - at)]
                self._read(c.src_file, view, src + at)
                crc = self._crc(view, crc)
                self._write(c.dst_file, view, dst + at)
            self.written.append((c.dst_file, dst, length, crc))

    def stage(self, cluster: Cluster, row: int, end: int) -> None:
        """Rows [row, end) of a cluster, as many at a time as the buffer takes; cut in halves until
        some fit.
        """
        most = len(self.memory)
        least = min(
            end - row,
            max(SECTOR // max(c.src_pitch, 1) if c.transposed else 1 for c in cluster.copies),
        )
        rows = cluster.rows_within(most if cluster.transposed else min(TILE, most), end - row)
        if rows < least:
            rows = min(least, cluster.rows_within(most, end - row))
        if rows < least and (halves := cluster.halves()):
            for half in halves:
                self.stage(half, row, end)
            return
        rows = max(rows, 1)
        if cluster.places(rows)[2] > most:
            raise UsageError(
                f"--max-memory leaves {most} bytes a thread, too few for one element; raise it"
            )
        views = cluster.views(rows, self.memory, self.run.casts)
        bands, strips, _ = cluster.places(rows)
        for r in range(row, end, rows):
            self.check()
            count = min(rows, end - r)
            for band, place in zip(cluster.bands, bands, strict=True):
                self._fill(band, place, r, count, rows)
            for c, (src, dst) in zip(cluster.copies, views, strict=True):
                self._place(c, src[:count], dst[:count], r)
            for strip, place in zip(cluster.strips, strips, strict=True):
                self._flush(strip, self.memory[place : place + count * strip.width], r, count)

    def _fill(self, band: Band, place: int, row: int, rows: int, most: int) -> None:
        """Reads a band's spans for `rows` rows from `row` on into a buffer laid out for `most`."""
        at = band.at + row * band.advance
        num, width, _, _ = band.spans(rows)
        _, _, pitch, whole = band.spans(most)
        if whole:
            self._read(band.file, self.memory[place : place + (num - 1) * pitch + width], at)
            return
        for i in range(num):
            self._read(
                band.file,
                self.memory[place + i * pitch : place + i * pitch + width],
                at + i * band.pitch,
            )

    def _place(self, c: Copy, src: np.ndarray, dst: np.ndarray, row: int) -> None:
        """One copy of one tile, cast as it moves."""
        if c.grid != UNSCALED:
            self._dequantise(c, src, dst, row)
        else:
            width = LINES if c.transposed else c.run
            for j in range(0, c.run, width):
                cast(src[:, j : j + width], dst[:, j : j + width])
        if c.cast == SAME:
            return
        if self.run.allow_overflow or self.run.casts[c.cast][1] != "float16":
            return
        for part in pieces(*dst.shape):
            if not has_infinity(dst[part]):
                continue
            held, at = src[part], c.src_at + part[1].start * c.src_step
            if c.grid != UNSCALED:
                held = np.empty(held.shape, numpy_dtype(VALUES))
                self._dequantise(c._replace(src_at=at), src[part], held, row + part[0].start)
            for i, j in np.argwhere(np.isinf(dst[part]) & np.isfinite(held)).tolist():
                at += (row + part[0].start + i) * c.src_pitch + j * c.src_step
                path, value = self.run.sources.paths[c.src_file], float(held[i, j])
                raise Overflow(
                    c.tensor,
                    f"{path}: {value:g} at byte {at} is beyond float16's 65504; --allow-overflow"
                    " writes inf",
                )

    def _dequantise(self, c: Copy, codes: np.ndarray, out: np.ndarray, row: int) -> None:
        """Rows of a scaled copy from `row` on.

        Scales are read where they are needed, a few hundred bytes: the kernel keeps their pages.
        """

        def read(file: int, at: int, nbytes: int) -> bytearray:
            raw = bytearray(nbytes)
            self._read(file, memoryview(raw), at)
            return raw

        dequantise(
            self.run.grid(c),
            codes,
            out,
            c.src_at + row * c.src_pitch,
            c.src_pitch,
            c.src_step,
            read,
        )

    def _flush(self, strip: Strip, view: memoryview, row: int, rows: int) -> None:
        """Writes a strip's rows: all at once, row by row, or element by element, whatever leaves
        the neighbours alone.
        """
        at = strip.at + row * strip.pitch
        if strip.num == 1 and (rows == 1 or strip.width == strip.pitch):
            self._write(strip.file, view, at)
            self.written.append((strip.file, at, len(view), self._crc(view)))
            return
        run = strip.width // strip.num
        for i in range(rows * strip.num):
            to = at + i // strip.num * strip.pitch + i % strip.num * strip.step
            part = view[i * run : i * run + run]
            self._write(strip.file, part, to)
            if run >= ROW_SUM:
                self.written.append((strip.file, to, run, self._crc(part)))
        if run < ROW_SUM:
            extent = (rows - 1) * strip.pitch + (strip.num - 1) * strip.step + run
            self.written.append((strip.file, at, extent, UNKNOWN))


# Checksums of ranges


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in order, neighbours joined; where one overlaps another, written in between its
    runs, their union is UNKNOWN.
    """
    out: list[Range] = []
    for file, at, nbytes, crc in sorted(ranges):
        if out and out[-1][0] == file and at <= out[-1][1] + out[-1][2]:
            _, start, length, before = out[-1]
            if at < start + length:
                out[-1] = (file, start, max(length, at + nbytes - start), UNKNOWN)
                continue
            if (crc == UNKNOWN) == (before == UNKNOWN):
                joined = UNKNOWN if crc == UNKNOWN else _combine(before, crc, nbytes)
                out[-1] = (file, start, length + nbytes, joined)
                continue
        out.append((file, at, nbytes, crc))
    return out


def _combine(first: int, second: int, nbytes: int) -> int:
    """crc32 of two ranges one after the other; `nbytes` of the second."""
    return isal_zlib.crc32_combine(first, second, nbytes) if nbytes else first


@lru_cache(maxsize=1 << 12)
def _zeros(nbytes: int) -> int:
    """crc32 of that many zero bytes, in log time."""
    if nbytes < 2:
        return isal_zlib.crc32(bytes(nbytes))
    half = _zeros(nbytes // 2)
    return _combine(_combine(half, half, nbytes // 2), _zeros(nbytes % 2), nbytes % 2)


class _Sums:
    """crc32 of any range of one file, from those summed as they were written; the gaps between them
    are zeros.
    """

    def __init__(self, ranges: Iterable[Range], read: CrcOf) -> None:
        self.ranges = [
            (at, n, read(at, n) if crc == UNKNOWN else crc) for _, at, n, crc in _merged(ranges)
        ]
        self.starts = [r[0] for r in self.ranges]
        self.read = read

    def crc(self, at: int, nbytes: int) -> int:
        """Reads the file only if the range cuts through one that was summed whole."""
        end, here, crc = at + nbytes, at, 0
        first = max(0, bisect_right(self.starts, at) - 1)
        for start, length, one in self.ranges[first : bisect_right(self.starts, end - 1)]:
            if start + length <= at:
                continue
            if start < at or start + length > end:
                return self.read(at, nbytes)
            crc = _combine(_combine(crc, _zeros(start - here), start - here), one, length)
            here = start + length
        return _combine(crc, _zeros(end - here), end - here)


# Files, the journal, the threads


_CURES = {
    errno.ENOSPC: "free some space and run the same command again: it goes on",
    errno.EDQUOT: "raise the quota or free some space and run the same command again: it goes on",
    errno.EIO: "the device failed; check it, then run the same command again: it goes on",
    errno.EACCES: "check the permissions",
    errno.EROFS: "the filesystem is read-only",
}


def _refused(what: str, path: str | Path, error: OSError) -> NoReturn:
    cure = _CURES.get(error.errno or 0)
    raise StorageError(
        f"cannot {what} {path}: {error.strerror or error}" + (f"; {cure}" if cure else "")
    ) from error


def _read(fd: int, view: memoryview, at: int, path: str) -> None:
    """Fills `view` from offset `at`; SourceError when the file ends before."""
    got = 0
    while got < len(view):
        try:
            n = os.preadv(fd, [view[got:] if got else view], at + got)
        except OSError as error:
            _refused(f"read {len(view)} bytes at {at} of", path, error)
        if n == 0:
            raise SourceError(
                f"{path} is truncated: wanted {len(view)} bytes at {at}, got {got}; download or"
                " copy it again"
            )
        got += n


def _write(fd: int, view: memoryview, at: int, path: str) -> None:
    put = 0
    while put < len(view):
        try:
            put += os.pwrite(fd, view[put:] if put else view, at + put)
        except OSError as error:
            _refused(f"write {len(view)} bytes at {at} of", path, error)


def _copy_in_kernel(src: int, dst: int, src_at: int, dst_at: int, nbytes: int) -> int:
    """Copies what the kernel can without a buffer, and returns the bytes done; who reads and writes
    the rest meets the error.

    On tmpfs 0.43 s of CPU per GiB, against 0.71 through a buffer; but it holds the target's inode
    all the while, and a write only half of that: two threads that write one file are faster with
    buffers.
    """
    done = 0
    with contextlib.suppress(OSError):
        while done < nbytes and (
            n := os.copy_file_range(src, dst, nbytes - done, src_at + done, dst_at + done)
        ):
            done += n
    return done


class _Files:
    """Open file descriptors by number, shared by the threads; at most a share of what the process
    may have open, plus those in use.
    """

    def __init__(self, paths: Sequence[str], flags: int) -> None:
        self.paths, self.flags = paths, flags
        self.most = max(16, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.lock = threading.Lock()
        self.fds: OrderedDict[int, int] = OrderedDict()
        self.uses: Counter[int] = Counter()

    @contextlib.contextmanager
    def held(self, files: Iterable[int]) -> Iterator[dict[int, int]]:
        """{file: descriptor}, which stay open inside the block."""
        files = set(files)
        with self.lock:
            for file in files:
                if file not in self.fds:
                    try:
                        self.fds[file] = os.open(self.paths[file], self.flags | os.O_CLOEXEC)
                    except OSError as error:
                        _refused("open", self.paths[file], error)
                self.fds.move_to_end(file)
            self.uses.update(files)
            held = {file: self.fds[file] for file in files}
        try:
            yield held
        finally:
            with self.lock:
                self.uses.subtract(files)
                self._evict()

    def _evict(self) -> None:
        for file in list(self.fds)[: max(0, len(self.fds) - self.most)]:
            if not self.uses[file]:
                os.close(self.fds.pop(file))
                self.uses.pop(file, None)

    def sync(self, file: int, how: Callable[[int], None]) -> None:
        """fsync or fdatasync of one file."""
        with self.held([file]) as fds:
            try:
                how(fds[file])
            except OSError as error:
                _refused("sync", self.paths[file], error)

    def close(self) -> None:
        """Closes all but those that a stuck thread still holds: their numbers must not go to other
        files.
        """
        with self.lock:
            self.most = 0
            self._evict()


def _lay_out(outputs: Sequence[TargetFile], staging: Path, journal: Path) -> None:
    """Creates all outputs at full size; the journal goes if one was not there, since it speaks of
    data that is gone.
    """
    try:
        staging.mkdir(parents=True, exist_ok=True)
        paths = [staging / o.path for o in outputs]
        found = [p.stat() if p.exists() else None for p in paths]
        needed = sum(o.size for o in outputs) - sum(
            min(s.st_blocks * 512, o.size) for s, o in zip(found, outputs, strict=True) if s
        )
        stats = os.statvfs(staging)
        free = stats.f_bavail * stats.f_frsize
        if needed > free:
            raise StorageError(
                f"{staging} needs {needed} bytes more, its filesystem has {free} bytes free; free"
                " some or choose another"
            )
        if any(s is None or s.st_size != o.size for s, o in zip(found, outputs, strict=True)):
            shutil.rmtree(journal, ignore_errors=True)
        for folder in {p.parent for p in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        for path, output, old in zip(paths, outputs, found, strict=True):
            if old is None or old.st_size != output.size:
                with open(path, "wb") as file:
                    file.truncate(output.size)
        journal.mkdir(parents=True, exist_ok=True)
        if not (journal / GENERATION).exists():
            (journal / GENERATION).write_text(uuid.uuid4().hex)
    except OSError as error:
        _refused("lay out", error.filename or staging, error)


def _sync_directories(outputs: Sequence[TargetFile], staging: Path) -> None:
    """fsyncs every directory from the outputs up to the staging directory."""
    for folder in {
        staging,
        *(p for o in outputs for p in (staging / o.path).parents if p.is_relative_to(staging)),
    }:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            _refused("sync", folder, error)


class _Journal:
    """`done/<unit>`: the ranges a finished unit wrote.

    One that is damaged or of another plan counts as not there.
    """

    HEAD = struct.Struct("<8sII")  # magic, identity, crc32 of the ranges
    MAGIC = b"mckptunt"

    def __init__(self, folder: Path, work: Work, outputs: Sequence[TargetFile]) -> None:
        self.folder = folder
        crc = isal_zlib.crc32(
            repr([(folder / GENERATION).read_text(), *((o.path, o.size) for o in outputs)]).encode()
        )
        for part in (work.copies, work.slabs):
            crc = isal_zlib.crc32(np.ascontiguousarray(part).view("u1"), crc)
        # tells apart what unit numbers mean; the caller's name for the staging directory tells
        # apart plans
        self.identity = crc

    def load(self, units: range) -> dict[int, np.ndarray]:
        """{unit: its ranges} of those that are done.

        Many are listed, not looked for: most often there are none.
        """
        listed = (
            (int(name) for name in os.listdir(self.folder) if name.isdecimal())
            if len(units) > LISTED
            else units
        )
        found = ((unit, self.unit(unit)) for unit in listed if unit in units)
        return {unit: ranges for unit, ranges in found if ranges is not None}

    def unit(self, unit: int) -> np.ndarray | None:
        """Its ranges, None if it is not done."""
        body = self._get(f"{unit:08d}")
        return None if body is None else np.frombuffer(body, _RANGE)

    def write(self, unit: int, ranges: np.ndarray) -> None:
        """Not synced: after a power cut a lost or torn one means the unit is done again, and its
        data is synced before.
        """
        self._put(f"{unit:08d}", ranges.tobytes())

    def sum(self, file: int) -> str | None:
        """The checksum of a finished file; "" if none was wanted."""
        body = self._get(f"file{file:08d}")
        return None if body is None else body.decode()

    def write_sum(self, file: int, checksum: str) -> None:
        self._put(f"file{file:08d}", checksum.encode())

    def _get(self, name: str) -> bytes | None:
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        body = data[self.HEAD.size :]
        return (
            body
            if data[: self.HEAD.size]
            == self.HEAD.pack(self.MAGIC, self.identity, isal_zlib.crc32(body))
            else None
        )

    def _put(self, name: str, body: bytes) -> None:
        path = self.folder / name
        # in containers, all are process 1
        beside = self.folder / f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            beside.write_bytes(
                self.HEAD.pack(self.MAGIC, self.identity, isal_zlib.crc32(body)) + body
            )
            beside.rename(path)
        except OSError as error:
            _refused("write", path, error)


class _Crew:
    """`threads` workers with `memory` bytes of buffer each, and as many that wait for the disk; the
    first error stops them all.
    """

    def __init__(self, threads: int, memory: int) -> None:
        self.threads, self.memory = threads, memory

    def _buffer(self) -> memoryview:
        try:
            # unlike a bytearray it takes no memory before it is used
            return memoryview(mmap.mmap(-1, self.memory))
        except (OSError, OverflowError, MemoryError):
            raise UsageError(
                f"{self.threads} buffers of {self.memory:,} bytes are more than this machine gives;"
                " say less --max-memory"
            ) from None

    def each(
        self,
        items: Iterator[int],
        targets: Callable[[int], frozenset[int]],
        work: Callable[[int, memoryview, Callable[[], None]], Callable[[], None] | None],
        tick: Callable[[], None],
    ) -> None:
        """work(item, buffer, check) for every item, those first whose `targets` nobody is busy
        with; raises what a worker raised.

        What `work` returns is called by another thread, so that copying goes on while the disk
        writes; after an error too, since what was journaled is not done again.
        """
        changed, stop = threading.Condition(), threading.Event()
        busy: Counter[int] = Counter()
        ahead: deque[tuple[int, frozenset[int]]] = deque()
        later: deque[Callable[[], None]] = deque()
        errors: list[BaseException] = []
        working, ended, interrupted = self.threads, 0, False

        def take() -> tuple[int, frozenset[int]] | None:
            with changed:
                while len(ahead) < AHEAD * self.threads and (item := next(items, None)) is not None:
                    ahead.append((item, targets(item)))
                if not ahead or stop.is_set():
                    return None
                free = (
                    k for k, (_, files) in enumerate(ahead) if not any(busy[file] for file in files)
                )
                at = next(free, 0)
                got = ahead[at]
                del ahead[at]
                busy.update(got[1])
                return got

        def check() -> None:
            if stop.is_set():
                raise _Stopped

        def copies() -> None:
            nonlocal working
            try:
                memory = self._buffer()
                while got := take():
                    after = work(got[0], memory, check)
                    with changed:
                        busy.subtract(got[1])
                        if after:
                            later.append(after)
                            changed.notify_all()
            finally:
                with changed:
                    working -= 1
                    changed.notify_all()

        def waits() -> None:
            while True:
                with changed:
                    changed.wait_for(lambda: later or not working or interrupted)
                    if interrupted or not later:
                        return
                    after = later.popleft()
                after()

        def runs(body: Callable[[], None]) -> None:
            nonlocal ended
            try:
                body()
            except _Stopped:
                pass
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                with changed:
                    ended += 1
                    changed.notify_all()

        bodies = [copies] * self.threads + [waits] * self.threads
        crew = [
            threading.Thread(target=runs, args=(body,), name=f"execute-{i}", daemon=True)
            for i, body in enumerate(bodies)
        ]
        try:
            for thread in crew:
                thread.start()
            while ended < len(crew):
                with changed:
                    changed.wait_for(lambda: ended == len(crew), TICK)
                tick()
        finally:
            stop.set()
            with changed:
                interrupted = ended < len(crew)
                changed.notify_all()
            until = time.monotonic() + STOP_WAIT
            for thread in crew:
                if thread.ident:
                    thread.join(max(0, until - time.monotonic()))
        if errors:
            raise errors[0]
        tick()  # the end is told even where the crew was done before anybody looked
