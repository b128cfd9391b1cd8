"""Groups of the files of a plan, each of which can be made without the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mckpt.geometry.join import UNSCALED, Joined
from mckpt.storage.files import TargetFile
from mckpt.values.quantisation import WRITTEN, Grid


def groups(
    files: Sequence[TargetFile], joined: Joined, last: int | None, size: int
) -> list[list[int]]:
    """Returns the files in groups of about `size` bytes; `last` is in none of them.

    A weight that is quantised and its scales are written together, so their files are in one group,
    with those of the weights that share its overall scale.
    """
    tied = _ties(joined)
    out: list[list[int]] = []
    nbytes = 0
    for number, file in enumerate(files):
        if number == last:
            continue
        if not out or (nbytes + file.size > size and number not in tied):
            out.append([])
            nbytes = 0
        out[-1].append(number)
        nbytes += file.size
    return out


def _ties(joined: Joined) -> set[int]:
    """Returns the files that must be in the group of the file before them."""
    weights = _quantised(joined)
    first: dict[int, int] = {}  # number of peers -> the least of their files, and the largest
    last: dict[int, int] = {}
    for file, row in zip(weights["dst_file"].tolist(), weights["grid"].tolist(), strict=True):
        grid = Grid(*joined.grids[row].tolist())
        files = {file, *grid.files}
        number = grid.peers if grid.overall else -1 - row
        first[number] = min(first.get(number, file), *files)
        last[number] = max(last.get(number, file), *files)
    return {file for number in first for file in range(first[number] + 1, last[number] + 1)}


def _quantised(joined: Joined) -> np.ndarray:
    """Returns the copies into quantised weights."""
    written = np.array([cast.target in WRITTEN for cast in joined.casts], bool)
    which = (joined.copies["grid"] != UNSCALED) & written[joined.copies["cast"]]
    copies: np.ndarray = joined.copies[which]
    return copies


def part(
    files: Sequence[TargetFile], joined: Joined, group: Sequence[int]
) -> tuple[list[TargetFile], np.ndarray, np.ndarray]:
    """Returns the files of a group, numbered from 0, the copies into them, and the grids."""
    number = np.full(len(files), -1, "i4")
    number[list(group)] = np.arange(len(group), dtype="i4")
    copies = joined.copies[number[joined.copies["dst_file"]] >= 0].copy()
    grids = joined.grids.copy()
    weights = _quantised(joined)
    for grid in set(weights["grid"][number[weights["dst_file"]] >= 0].tolist()):
        for at in map(Grid._fields.index, ("file", "overall_file")):
            grids[grid, at] = number[grids[grid, at]]
    copies["dst_file"] = number[copies["dst_file"]]
    return [files[n] for n in group], copies, grids
