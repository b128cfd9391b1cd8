"""Groups of the files of a plan, each of which can be made without the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mckpt.geometry.join import UNSCALED, Joined
from mckpt.storage.files import TargetFile
from mckpt.values.quantisation import CODES, Grid


def groups(
    files: Sequence[TargetFile], joined: Joined, last: int | None, size: int
) -> list[list[int]]:
    """Returns the files in groups of about `size` bytes; `last` is in none of them.

    A weight that is quantised and its scales are written together, so their files are in one group.
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
    weights, scales = _quantised(joined)
    tied: set[int] = set()
    for a, b in zip(weights["dst_file"].tolist(), scales, strict=True):
        tied.update(range(min(a, b) + 1, max(a, b) + 1))
    return tied


def _quantised(joined: Joined) -> tuple[np.ndarray, list[int]]:
    """Returns the copies into quantised weights, and the file of the scales of each."""
    codes = np.array([cast.target == CODES for cast in joined.casts], bool)
    which = (joined.copies["grid"] != UNSCALED) & codes[joined.copies["cast"]]
    copies = joined.copies[which]
    file = Grid._fields.index("file")
    return copies, joined.grids[copies["grid"], file].tolist() if len(copies) else []


def part(
    files: Sequence[TargetFile], joined: Joined, group: Sequence[int]
) -> tuple[list[TargetFile], np.ndarray, np.ndarray]:
    """Returns the files of a group, numbered from 0, the copies into them, and the grids."""
    number = np.full(len(files), -1, "i4")
    number[list(group)] = np.arange(len(group), dtype="i4")
    copies = joined.copies[number[joined.copies["dst_file"]] >= 0].copy()
    grids = joined.grids.copy()
    weights, _ = _quantised(joined)
    for grid in set(weights["grid"][number[weights["dst_file"]] >= 0].tolist()):
        at = Grid._fields.index("file")
        grids[grid, at] = number[grids[grid, at]]
    copies["dst_file"] = number[copies["dst_file"]]
    return [files[n] for n in group], copies, grids
