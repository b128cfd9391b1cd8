"""Compares files with those that a run would write, without writing any."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from mckpt.execute.engine import most_threads
from mckpt.execute.files import crc_of_range, read_at
from mckpt.execute.mover import PIECE, Mover, Overflow
from mckpt.execute.ranks import Ranks
from mckpt.execute.threads import ThreadPool
from mckpt.execute.transfer import Transfer
from mckpt.execute.units import Work


class _Differs(Exception):
    """A file has other bytes; its argument is the path."""


def _compare(fd: int, view: memoryview, at: int, path: str) -> None:
    """Raises _Differs if the bytes from offset `at` on are others than those of `view`."""
    wanted = np.frombuffer(view, "u1")
    for start in range(0, len(wanted), PIECE):
        part = wanted[start : start + PIECE]
        read = bytearray(len(part))
        read_at(fd, memoryview(read), at + start, path)
        if not np.array_equal(part, np.frombuffer(read, "u1")):
            raise _Differs(path)


def differing(transfer: Transfer, folder: Path, checksum: str, max_memory: int) -> str:
    """Returns the path of an output in a folder that has other bytes than `engine.execute` would
    write, "" if there is none. Bytes that it leaves zero are not looked at.

    checksum: the kind that the run computed; a file may contain crc32s of its parts.
    Raises the errors of reading.
    """
    joined, outputs = transfer.joined, transfer.outputs
    work = Work.of(joined)
    targets = transfer.targets(folder, os.O_RDONLY)
    mover = Mover(
        transfer.readers(),
        targets,
        joined.casts,
        joined.grids,
        summing=False,
        in_kernel=False,
        allow_overflow=True,  # an infinite value differs from the finite one that was written
        write=_compare,
    )
    # the bytes to compare with take the other half of the memory
    threads = most_threads(work, transfer, Ranks().cores, max_memory // 2)
    pool = ThreadPool(threads, max_memory // 2)

    def move(slab: int, memory: memoryview, check: Callable[[], None]) -> None:
        mover.move(work, slab, memory, check)  # without its result, which `each` would call

    def fixed(file: int, memory: memoryview, check: Callable[[], None]) -> None:
        with targets.opened([file]) as fds:
            fd, path = fds[file], targets.paths[file]
            crc_of = partial(crc_of_range, fd, path=path, memory=memory[:PIECE], check=check)
            for at, data in outputs[file].fixed(crc_of if checksum == "crc32" else None):
                _compare(fd, memoryview(data), at, path)

    try:
        pool.each(range(len(work.slabs)), move)
        pool.each(range(len(outputs)), fixed)
    except (_Differs, Overflow) as difference:  # no block of fp8 holds a value that is not finite
        return str(difference)
    finally:
        mover.close()
    return ""
