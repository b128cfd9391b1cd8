"""The copies of a plan with the files that they read and write, and how a process does them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from mckpt.execute.files import OpenFiles
from mckpt.geometry.join import UNSCALED, Joined
from mckpt.storage.files import TargetFile
from mckpt.values.quantisation import WRITTEN, Grid


@dataclass(frozen=True)
class CopySettings:
    """The settings with which a process copies.

    max_memory: bytes of the buffers of all threads together.
    threads: 0 means one per core, up to KNEE, or up to KNEE_FLAT if every copy is a plain byte
        range; REQUESTS if a source is in a store (`engine`).
    checksum: none, crc32 or sha256.
    """

    max_memory: int = 64 << 20
    threads: int = 0
    checksum: str = "crc32"
    allow_overflow: bool = False


@dataclass(frozen=True, eq=False)
class Transfer:
    """The copies of a plan, the files that they read, and the files that they write."""

    joined: Joined
    sources: Sequence[Path]
    outputs: Sequence[TargetFile]

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        return sum(output.size for output in self.outputs)

    def readers(self) -> OpenFiles:
        """Returns the sources, opened when they are read."""
        return OpenFiles([str(source) for source in self.sources], os.O_RDONLY)

    def targets(self, folder: Path, flags: int) -> OpenFiles:
        """Returns the outputs below `folder`, opened when they are used."""
        paths = [os.path.normpath(folder / output.path) for output in self.outputs]
        return OpenFiles(paths, flags)

    def without_copies(self) -> Transfer:
        """Returns a transfer that takes little space, for copies that are kept elsewhere."""
        return replace(self, joined=structs.replace(self.joined, copies=self.joined.copies[:0]))

    def groups(self, last: int | None, size: int) -> list[list[int]]:
        """Returns the outputs in groups of about `size` bytes; `last` is in none of them.

        A weight that is quantised and its scales are written together, so their files are in one
        group, with those of the weights that share its overall scale.
        """
        tied = self._ties()
        out: list[list[int]] = []
        nbytes = 0
        for number, file in enumerate(self.outputs):
            if number == last:
                continue
            if not out or (nbytes + file.size > size and number not in tied):
                out.append([])
                nbytes = 0
            out[-1].append(number)
            nbytes += file.size
        return out

    def part(self, group: Sequence[int]) -> Transfer:
        """Returns the transfer that writes a group of the outputs, which are numbered from 0."""
        joined, number = self.joined, np.full(len(self.outputs), -1, "i4")
        number[list(group)] = np.arange(len(group), dtype="i4")
        copies = joined.copies[number[joined.copies["dst_file"]] >= 0].copy()
        grids = joined.grids.copy()
        weights = self._quantised()
        for grid in set(weights["grid"][number[weights["dst_file"]] >= 0].tolist()):
            for at in map(Grid._fields.index, ("file", "overall_file")):
                grids[grid, at] = number[grids[grid, at]]
        copies["dst_file"] = number[copies["dst_file"]]
        joined = structs.replace(joined, copies=copies, grids=grids)
        return Transfer(joined, self.sources, [self.outputs[n] for n in group])

    def _ties(self) -> set[int]:
        """Returns the files that must be in the group of the file before them."""
        weights = self._quantised()
        first: dict[int, int] = {}  # number of peers -> the least of their files, and the largest
        last: dict[int, int] = {}
        for file, row in zip(weights["dst_file"].tolist(), weights["grid"].tolist(), strict=True):
            grid = Grid(*self.joined.grids[row].tolist())
            files = {file, *grid.files}
            number = grid.peers if grid.overall else -1 - row
            first[number] = min(first.get(number, file), *files)
            last[number] = max(last.get(number, file), *files)
        return {file for number in first for file in range(first[number] + 1, last[number] + 1)}

    def _quantised(self) -> np.ndarray:
        """Returns the copies into quantised weights."""
        joined = self.joined
        written = np.array([cast.target in WRITTEN for cast in joined.casts], bool)
        which = (joined.copies["grid"] != UNSCALED) & written[joined.copies["cast"]]
        copies: np.ndarray = joined.copies[which]
        return copies
