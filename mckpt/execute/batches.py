"""Writes the files of a plan a few copies at a time, as their sources come. An interrupted run
starts again, so nothing is journaled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mckpt.execute.checksums import Range, merged
from mckpt.execute.engine import Tick, finished, most_threads
from mckpt.execute.files import OpenFiles, lay_out, sync_directories
from mckpt.execute.mover import Mover
from mckpt.execute.ranks import Ranks
from mckpt.execute.threads import ThreadPool
from mckpt.execute.units import Work
from mckpt.geometry.join import Cast
from mckpt.storage.files import TargetFile


class Batches:
    """The files of a plan while they are written. The arguments are those of `engine.execute`."""

    def __init__(
        self,
        casts: Sequence[Cast],
        grids: np.ndarray,
        sources: Sequence[str],
        outputs: Sequence[TargetFile],
        staging: Path,
        *,
        max_memory: int,
        threads: int,
        checksum: str,
        allow_overflow: bool,
    ) -> None:
        lay_out(outputs, staging, staging / "journal")
        self.casts, self.grids, self.outputs, self.staging = casts, grids, outputs, staging
        self.max_memory, self.threads, self.checksum = max_memory, threads, checksum
        self.mover = Mover(
            OpenFiles(sources, os.O_RDONLY),
            # Not for reading: an NFS client would read whole pages in and write them back, over
            # bytes that another node has written there since.
            OpenFiles([str(staging / o.path) for o in outputs], os.O_WRONLY),
            casts,
            grids,
            summing=checksum == "crc32",
            in_kernel=False,
            allow_overflow=allow_overflow,
        )
        self.ranges: list[list[Range]] = [[] for _ in outputs]  # that were written into each file

    def do(self, copies: np.ndarray, tick: Tick) -> None:
        """Does some of the plan's copies: all that one tensor of the sources needs, of each."""
        work = Work.of(copies, self.casts, self.grids)
        written: list[Range] = []

        def move(slab: int, memory: memoryview, check: Callable[[], None]) -> None:
            written.extend(self.mover.move(work, slab, memory, check))

        def targets(slab: int) -> frozenset[int]:
            return frozenset(work.cluster(slab)["dst_file"].tolist())

        sources = self.mover.sources.paths
        threads = self.threads or most_threads(work, sources, Ranks().cores, self.max_memory)
        pool = ThreadPool(threads, self.max_memory)
        pool.each(range(len(work.slabs)), move, targets=targets, tick=tick)
        for range_ in merged(written):
            self.ranges[range_[0]].append(range_)

    def sync(self) -> None:
        """Syncs the files that were written."""
        for file, ranges in enumerate(self.ranges):
            if ranges:
                self.mover.targets.sync(file, os.fdatasync)

    def end(self, tick: Tick, files: Iterable[int] | None = None) -> list[str]:
        """Completes the files, or some of them, and returns the checksum of each."""
        sums = [""] * len(self.outputs)
        self.mover.targets.close()  # opened anew, for reading too
        targets = OpenFiles(self.mover.targets.paths, os.O_RDWR)
        self.mover = replace(self.mover, targets=targets)

        def finish(file: int, memory: memoryview, check: Callable[[], None]) -> None:
            sums[file] = finished(
                targets,
                file,
                self.outputs[file],
                merged(self.ranges[file]),
                self.checksum,
                memory,
                check,
            )

        pool = ThreadPool(self.threads or Ranks().cores, self.max_memory)
        chosen = range(len(sums)) if files is None else files
        pool.each(chosen, finish, targets=lambda file: frozenset([file]), tick=tick)
        sync_directories(self.outputs, self.staging)
        return sums

    def close(self) -> None:
        """Closes all files."""
        self.mover.close()
