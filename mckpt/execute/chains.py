"""Many short rows that move together, such as those of a vocabulary in a new order: near each other
in one source file, and anywhere in the targets. A plan may have 10**5 of them, so they are arrays.

Geometry only: no file, no thread.

    spans of the source [a . b c]  --gathered-->  in target order [c a b]  -->  strips [c] [a b]
"""

from __future__ import annotations

import numpy as np

from mckpt.execute.checksums import UNKNOWN, Range
from mckpt.execute.clusters import GAP, SAME, SHORT
from mckpt.values import dtypes

# Bytes. Rows that are read back for the checksum of their file are one range with what lies between
# them, if it is less than this.
BETWEEN = 16 << 20


class Chain:
    """The places of the rows of a chain in a buffer.

    records: copies (units.Work) of one row each, of one source file and one cast, in the order of
        the source.
    """

    def __init__(self, records: np.ndarray) -> None:
        at, size = records["src_at"], records["run"] * records["src_item"]
        end = np.maximum.accumulate(at + size)
        first = np.flatnonzero(np.concatenate([[True], at[1:] - end[:-1] > GAP]))
        length = end[np.append(first[1:], len(at)) - 1] - at[first]
        # bytes of the elements that one call of numpy gathers; they are aligned in the buffer
        self.item = int(np.gcd.reduce(np.concatenate([at - at[0], size])))
        room = -(-length // self.item) * self.item
        place = np.cumsum(room) - room
        self.spans = np.stack([at[first], place, length], 1)  # byte of the file, place, bytes

        order = np.lexsort((records["dst_at"], records["dst_file"]))
        count = np.diff(first, append=len(at))
        self.place = (np.repeat(place - at[first], count) + at)[order]
        self.size = size[order]
        self.rows_at = _up(int(room.sum()))
        self.nbytes = self.cast_at = _up(self.rows_at + int(size.sum()))
        if records["cast"][0] != SAME:
            elements = int(records["run"].sum())
            self.nbytes += elements * int(records["dst_item"][0]) + dtypes.scratch(elements)
        # index of the elements, of 8 bytes each
        self.several = int(size.sum()) // self.item <= SHORT * len(at)
        self.nbytes += 8 * (int(size.sum()) // self.item) if self.several else 0

        file, to = (records[name][order] for name in ("dst_file", "dst_at"))
        nbytes = (records["run"] * records["dst_item"])[order]
        apart = (file[1:] != file[:-1]) | (to[1:] != to[:-1] + nbytes[:-1])
        first = np.flatnonzero(np.concatenate([[True], apart]))
        # file, byte of it, bytes: the longest runs in which the rows are written
        self.strips = np.stack([file[first], to[first], np.add.reduceat(nbytes, first)], 1)

    def gathered(self, memory: memoryview) -> np.ndarray:
        """Returns the bytes of all rows in target order, taken from the spans in the buffer."""
        total = int(self.size.sum())
        out = np.frombuffer(memory, "u1", total, self.rows_at)
        if not self.several:
            begin = 0
            for place, size in zip(self.place.tolist(), self.size.tolist(), strict=True):
                out[begin : begin + size] = np.frombuffer(memory, "u1", size, place)
                begin += size
            return out
        each = self.size // self.item
        index = np.arange(total // self.item)
        index += np.repeat(self.place // self.item - np.cumsum(each) + each, each)
        source = np.frombuffer(memory, f"V{self.item}", self.rows_at // self.item)
        # numpy would fill a buffer of its own in the mode "raise"
        np.take(source, index, out=out.view(source.dtype), mode="clip")
        return out

    def unsummed(self, least: int) -> list[Range]:
        """Returns the ranges of the strips of less than `least` bytes, some together."""
        file, at, nbytes = self.strips[self.strips[:, 2] < least].T
        if not len(file):
            return []
        end = at + nbytes
        apart = (file[1:] != file[:-1]) | (at[1:] - end[:-1] > BETWEEN)
        first = np.flatnonzero(np.concatenate([[True], apart]))
        last = np.append(first[1:], len(at)) - 1
        ranges = np.stack([file[first], at[first], end[last] - at[first]], 1)
        return [(*one, UNKNOWN) for one in ranges.tolist()]


def _up(at: int) -> int:
    """Rounds up to a multiple of 16."""
    return -(-at // 16) * 16
