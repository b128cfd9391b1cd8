"""Writes the files of a plan a few copies at a time, as their sources come. An interrupted run
starts again, so nothing is journaled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
            OpenFiles([str(staging / o.path) for o in outputs], os.O_RDWR),
            casts,
            grids,
            summing=checksum == "crc32",
            in_kernel=False,
            allow_overflow=allow_overflow,
        )
        self.ranges: list[list[Range]] = [[] for _ in outputs]  # that were written into each file

    def _pool(self, threads: int) -> ThreadPool:
        return ThreadPool(threads, max(256, self.max_memory // threads))

    def do(self, copies: np.ndarray, tick: Tick) -> None:
        """Does some of the plan's copies: all that one tensor of the sources needs, of each."""
        work = Work.of(copies, self.casts, self.grids)
        written: list[Range] = []

        def move(slab: int, memory: memoryview, check: Callable[[], None]) -> None:
            _, row, end, _, _ = work.slabs[slab].item()
            written.extend(self.mover.move(work.cluster(slab), row, end, memory, check))

        def targets(slab: int) -> frozenset[int]:
            return frozenset(work.cluster(slab)["dst_file"].tolist())

        sources = self.mover.sources.paths
        threads = self.threads or most_threads(work, sources, Ranks().cores, self.max_memory)
        self._pool(threads).each(iter(range(len(work.slabs))), targets, move, tick)
        for range_ in merged(written):
            self.ranges[range_[0]].append(range_)

    def end(self, tick: Tick) -> list[str]:
        """Completes the files, and returns the checksum of each."""
        sums = [""] * len(self.outputs)

        def finish(file: int, memory: memoryview, check: Callable[[], None]) -> None:
            targets, ranges = self.mover.targets, merged(self.ranges[file])
            sums[file] = finished(
                targets, file, self.outputs[file], ranges, self.checksum, memory, check
            )

        pool = self._pool(self.threads or Ranks().cores)
        pool.each(iter(range(len(sums))), lambda file: frozenset([file]), finish, tick)
        sync_directories(self.outputs, self.staging)
        return sums

    def close(self) -> None:
        """Closes all files."""
        self.mover.sources.close()
        self.mover.targets.close()
