"""Does copies into memory in place of files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from mckpt.execute.files import OpenFiles
from mckpt.execute.mover import Mover
from mckpt.execute.units import Work
from mckpt.geometry.join import Cast

MEMORY = 8 << 20  # bytes of the buffer, which is the share of a thread of a conversion


def read(
    copies: np.ndarray,
    casts: Sequence[Cast],
    grids: np.ndarray,
    sources: Sequence[str],
    start: int,
    out: memoryview,
) -> None:
    """Does the copies into one target file, but writes into `out` what they write from byte `start`
    of the file on. Leaves out what they write before and behind.

    copies, casts, grids: as for `engine.execute`.
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
    files, nowhere = OpenFiles(sources, os.O_RDONLY), OpenFiles([os.devnull], os.O_WRONLY)
    mover = Mover(
        files,
        nowhere,
        casts,
        grids,
        summing=False,
        in_kernel=False,
        allow_overflow=False,
        write=put,
    )
    try:
        memory = memoryview(mmap.mmap(-1, MEMORY))
        for slab in range(len(work.slabs)):
            _, row, last, _, _ = work.slabs[slab].item()
            mover.move(work.cluster(slab), row, last, memory, lambda: None)
    finally:
        files.close()
        nowhere.close()
