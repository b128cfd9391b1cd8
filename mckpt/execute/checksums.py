"""The crc32 of any range of a file, combined from ranges that were summed as they were written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from isal import isal_zlib

KINDS = ("none", "crc32", "sha256")  # of checksums of a file
UNKNOWN = -1  # the crc of a range that was not summed while it passed: read it back when needed

Range = tuple[int, int, int, int]  # file, offset, bytes, crc32 or UNKNOWN
RANGE = np.dtype([("file", "i8"), ("at", "i8"), ("bytes", "i8"), ("crc", "i8")])
CrcOf = Callable[[int, int], int]  # (offset, bytes) -> crc32


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorts ranges and joins neighbours.

    Ranges overlap where short rows were written between those of another copy. Their union is one
    range of UNKNOWN crc.
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
    """Returns the crc32 of two adjacent ranges; the second one has `nbytes`."""
    return isal_zlib.crc32_combine(first, second, nbytes) if nbytes else first


@lru_cache(maxsize=1 << 12)
def _zeros(nbytes: int) -> int:
    """Returns the crc32 of `nbytes` zero bytes, in logarithmic time."""
    if nbytes < 2:
        return isal_zlib.crc32(bytes(nbytes))
    half = _zeros(nbytes // 2)
    return _combine(_combine(half, half, nbytes // 2), _zeros(nbytes % 2), nbytes % 2)


class RangeSums:
    """The crc32 of any range of one file, from `ranges` that were summed as they were written.

    Bytes between those ranges are zeros. `read` computes a crc32 from the file itself.
    """

    def __init__(self, ranges: Iterable[Range], read: CrcOf) -> None:
        self.ranges = [
            (at, n, read(at, n) if crc == UNKNOWN else crc) for _, at, n, crc in merged(ranges)
        ]
        self.starts = [r[0] for r in self.ranges]
        self.read = read

    def crc(self, at: int, nbytes: int) -> int:
        """Returns the crc32 of a range; reads the file only if it cuts through a summed range."""
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
