"""Does copies into memory in place of files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from mckpt.execute.clusters import Copy
from mckpt.execute.files import OpenFiles, read_spans
from mckpt.execute.mover import Mover
from mckpt.execute.units import Work, is_ranges
from mckpt.geometry.join import Cast

MEMORY = 8 << 20  # bytes of the buffer, which is the share of a thread of a conversion


def read(
    copies: np.ndarray,
    casts: Sequence[Cast],
    grids: np.ndarray,
    sources: Sequence[str],
    start: int,
    out: memoryview,
    memory: memoryview | None = None,
) -> None:
    """Does the copies into one target file, but writes the bytes of the file from `start` on into
    `out`. Leaves out the bytes before and behind.

    copies, casts, grids: as for `engine.execute`. memory: the buffer to use, of MEMORY bytes.
    Raises the errors of reading, and Overflow.
    """
    end = start + len(out)

    def put(fd: int, view: memoryview, at: int, path: str) -> None:
        first, last = max(at, start), min(at + len(view), end)
        if first < last:
            out[first - start : last - start] = view[first - at : last - at]

    copies = copies.copy()
    copies["dst_file"] = 0
    work = Work.of(copies, casts, grids)
    mover = Mover(
        OpenFiles(sources, os.O_RDONLY),
        OpenFiles([os.devnull], os.O_WRONLY),
        casts,
        grids,
        summing=False,
        in_kernel=False,
        allow_overflow=False,
        write=put,
    )
    try:
        memory = memoryview(mmap.mmap(-1, MEMORY)) if memory is None else memory
        for slab in range(len(work.slabs)):
            if is_ranges(work.cluster(slab)[:1]).all():
                _read_ranges(mover, work, slab, start, out)
            else:
                mover.move(work, slab, memory, lambda: None)
    finally:
        mover.close()


def _read_ranges(mover: Mover, work: Work, slab: int, start: int, out: memoryview) -> None:
    """Reads the rows of a flat copy into their places, without a buffer in between."""
    c, (_, row, last, _, _) = Copy(*work.cluster(slab)[0].tolist()), work.slabs[slab].item()
    spans = []
    for r in range(row, last):
        at = c.dst_at + r * c.dst_pitch - start
        skipped, end = max(0, -at), min(at + c.run, len(out))
        if at + skipped < end:
            spans.append((c.src_at + r * c.src_pitch + skipped, out[at + skipped : end]))
    with mover.sources.opened([c.src_file]) as fds:
        read_spans(fds[c.src_file], spans, mover.sources.paths[c.src_file])


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
