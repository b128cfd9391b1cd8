"""Copies that move together through one buffer: each source byte is read into it once, and each
target row is written from it in the longest runs.

Geometry only: no file, no thread.

    8 column shards, each [rows, w] -- 8 bands --> buffer [rows, 8w] -- 1 strip --> one [rows, 8w]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mckpt.geometry.join import UNSCALED
from mckpt.values import dtypes, quantisation
from mckpt.values.dtypes import numpy_dtype
from mckpt.values.element import Cast

# Up to so many bytes between two spans are read and dropped instead of starting another read:
# memcpy moves as many in the 1.5 us of a system call.
GAP = 8 << 10
# bytes; a transposed source is read in runs of at least this, the page that the kernel reads anyway
SECTOR = 4 << 10
# bytes of transposed rows that are placed and written at a time, which the cache holds: 1 MiB took
# 10% more CPU time, 8 MiB take more memory
TURNED = 2 << 20
LEAST = 32  # such rows, unless there are fewer: their words fill the cache lines of the source
# one call of numpy gathers the copies of at least MANY columns or rows, of SHORT items on average
MANY, SHORT = 8, 64
SAME = -1  # the cast of a copy whose dtype stays


class Copy(NamedTuple):
    """One record of Work.copies as Python numbers."""

    tensor: int
    src_file: int
    dst_file: int
    cast: int
    grid: int
    rows: int
    run: int
    src_at: int
    dst_at: int
    src_pitch: int
    dst_pitch: int
    src_step: int
    dst_step: int
    src_item: int
    dst_item: int

    @property
    def transposed(self) -> bool:
        """Whether neighbours in a row are further apart in the source than neighbouring rows."""
        return self.rows > 1 and self.src_step > self.src_pitch

    def scratch(self, rows: int) -> int:
        """Returns the bytes of scratch memory that placing `rows` rows needs."""
        cast = dtypes.scratch(self.run * rows) if self.cast != SAME else 0
        return cast if self.grid == UNSCALED else cast + quantisation.scratch(rows, self.run)

    def half(self, second: bool) -> Copy:
        """Returns the copy of the first or second half of every row."""
        cut = self.run // 2
        if not second:
            return self._replace(run=cut)
        return self._replace(
            run=self.run - cut,
            src_at=self.src_at + cut * self.src_step,
            dst_at=self.dst_at + cut * self.dst_step,
        )


class Band(NamedTuple):
    """Source spans that a cluster reads."""

    file: int
    at: int
    num: int | None  # None: one per row
    pitch: int  # bytes from one span to the next
    width: int  # bytes of a span for one row
    grow: int  # bytes that each further row adds to a span
    advance: int  # bytes from the spans of one row to those of the next

    def spans(self, rows: int) -> tuple[int, int, int, bool]:
        """Returns the number of spans, the width of one, their pitch in a buffer, and whether one
        read takes them all.
        """
        num, width = self.num or (rows if self.advance else 1), self.width + (rows - 1) * self.grow
        # spans of transposed rows are long, and only they stay in the buffer
        whole = num == 1 or self.pitch - width <= (0 if self.grow else GAP)
        return num, width, self.pitch if whole else width, whole

    def bytes(self, rows: int) -> int:
        """Returns the bytes that the spans take in a buffer."""
        num, width, pitch, _ = self.spans(rows)
        return num * pitch if num > 1 else width  # with the gap behind the last, see `gathers`


class Strip(NamedTuple):
    """Target rows that a cluster writes."""

    file: int
    at: int
    pitch: int  # bytes from one row to the next
    width: int  # bytes of a row in the buffer
    num: int  # runs as which a row is written
    step: int  # bytes from one run to the next


class Gather(NamedTuple):
    """target[i, j] = source[i, columns[j]]."""

    source: np.ndarray  # [rows, columns]
    columns: np.ndarray
    target: np.ndarray  # [rows, len(columns)]


class Cluster:
    """Copies of equally many rows that move together.

    Each source byte is read once, and each target row is written in its longest runs.
    """

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies
        self.bands: list[Band] = []
        self.strips: list[Strip] = []
        self.band_of, self.strip_of = [0] * len(copies), [0] * len(copies)
        self._find_bands()
        self._find_strips()
        self.transposed = any(c.transposed for c in copies)
        self.cast = [c for c in copies if c.cast != SAME or c.grid != UNSCALED]

    def _find_bands(self) -> None:
        """Finds the source spans; those that nearly touch become one."""
        copies = self.copies
        for i in sorted(range(len(copies)), key=lambda i: (copies[i].src_file, copies[i].src_at)):
            c = copies[i]
            extent = (c.run - 1) * c.src_step + c.src_item
            pitch, start = c.src_pitch if c.rows > 1 else 0, (c.src_file, c.src_at)
            if c.transposed:
                band = Band(*start, c.run, c.src_step, c.src_item, pitch, pitch)
            else:
                band = Band(*start, None, pitch, extent, 0, pitch if c.rows > 1 else 0)
            if self.bands:
                last = self.bands[-1]
                width = max(last.width, c.src_at - last.at + band.width)
                grown = width + (c.rows - 1) * band.grow
                near = c.src_at <= last.at + last.width + GAP and (
                    grown <= band.pitch or c.rows == 1
                )
                # thousands of columns come here, so this makes as few tuples as it can
                if near and (last[0], *last[2:4], *last[5:]) == (band[0], *band[2:4], *band[5:]):
                    self.bands[-1] = Band(*last[:4], width, *last[5:])
                    self.band_of[i] = len(self.bands) - 1
                    continue
            self.band_of[i] = len(self.bands)
            self.bands.append(band)

    def _find_strips(self) -> None:
        """Finds the target rows; those that several copies fill without a gap become one."""
        group: list[int] = []
        end = 0
        copies = self.copies
        for i in sorted(range(len(copies)), key=lambda i: (copies[i].dst_file, copies[i].dst_at)):
            c = copies[i]
            head = copies[group[0]] if group else c
            extent = (c.run - 1) * c.dst_step + c.dst_item
            joins = (c.dst_file == head.dst_file and c.dst_at <= end) and (
                c.rows == 1
                or (
                    c.dst_pitch == head.dst_pitch
                    and max(end, c.dst_at + extent) - head.dst_at <= c.dst_pitch
                )
            )
            if group and not joins:
                self._close_strips(group, end)
                group, end = [], 0
            group.append(i)
            end = max(end, c.dst_at + extent)
        self._close_strips(group, end)

    def _close_strips(self, group: list[int], end: int) -> None:
        """Adds one strip for a group of copies that overlap or touch; or, if they leave bytes to
        other clusters, one for each copy, written in its own runs.
        """
        head = self.copies[group[0]]
        if sum(self.copies[i].run * self.copies[i].dst_item for i in group) == end - head.dst_at:
            for i in group:
                self.strip_of[i] = len(self.strips)
            self.strips.append(
                Strip(head.dst_file, head.dst_at, head.dst_pitch, end - head.dst_at, 1, 0)
            )
            return
        for i in group:
            c = self.copies[i]
            self.strip_of[i] = len(self.strips)
            count = 1 if c.dst_step == c.dst_item else c.run
            self.strips.append(
                Strip(c.dst_file, c.dst_at, c.dst_pitch, c.run * c.dst_item, count, c.dst_step)
            )

    def tile(self, rows: int) -> int:
        """Returns how many of `rows` rows in a buffer are placed and written at a time: all, or few
        transposed ones.
        """
        width = sum(strip.width for strip in self.strips)
        return min(rows, max(LEAST, TURNED // width)) if self.transposed else rows

    def places(self, rows: int) -> tuple[list[int], list[int], int]:
        """Returns the offsets of the bands of `rows` rows and of the strips of a tile in a buffer,
        and the bytes of that buffer with its scratch memory.
        """
        at, bands, strips = 0, list[int](), list[int]()
        for band in self.bands:
            # elements that are aligned in the file are aligned in memory
            at = _up(at) + band.at % 16
            bands.append(at)
            at += band.bytes(rows)
        tile = self.tile(rows)
        for strip in self.strips:
            at = _up(at)
            strips.append(at)
            at += strip.width * tile
        return bands, strips, at + max((c.scratch(tile) for c in self.cast), default=0)

    def rows_within(self, limit: int, most: int) -> int:
        """Returns the most rows, up to `most`, that a buffer of `limit` bytes takes; may be 0."""
        return bisect_right(range(1, most + 1), limit, key=lambda rows: self.places(rows)[2])

    def gathers(self, rows: int, memory: memoryview) -> tuple[list[Gather], list[int]]:
        """Returns the copies that are many and short, such as columns that are kept, as a few
        gathers in the buffer, and the numbers of all other copies.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for i, c in enumerate(self.copies):
            dense = (c.src_step, c.dst_step) == (c.src_item, c.dst_item)
            plain = c.cast == SAME and c.grid == UNSCALED and dense and not c.transposed
            place = (self.band_of[i], self.strip_of[i]) if plain else (-1, i)
            groups.setdefault(place, []).append(i)
        bands, strips, _ = self.places(rows)
        found, others = list[Gather](), list[int]()
        for (b, s), group in groups.items():
            made = None
            if len(group) >= MANY:
                made = self._gather(group, rows, memory, bands, (bands[b], strips[s]))
            if made:
                found.append(made)
            else:
                others += group
        return found, others

    def _gather(
        self,
        group: list[int],
        rows: int,
        memory: memoryview,
        bands: list[int],
        first: tuple[int, int],
    ) -> Gather | None:
        """Returns a gather that does the work of some copies; None if they are not short, or do not
        lie side by side in the target.

        first: the places of their band and of their strip in the buffer.
        """
        copies, band_of = [self.copies[i] for i in group], [self.band_of[i] for i in group]
        strip = self.strips[self.strip_of[group[0]]]
        from_band = [bands[b] - self.bands[b].at - first[0] for b in band_of]
        at = np.array([c.src_at for c in copies]) + from_band
        to = np.array([c.dst_at - strip.at for c in copies])
        size = np.array([c.run * c.src_item for c in copies])
        order = np.argsort(to)
        at, to, size = at[order], to[order], size[order]
        end = int((at + size).max())
        pitch = self.bands[band_of[0]].spans(rows)[2] if rows > 1 else end
        item = int(np.gcd.reduce([*at, *to, *size, *[pitch] * (rows > 1)]))
        total = int(size.sum()) // item
        if (to[1:] != to[:-1] + size[:-1]).any() or total > SHORT * len(group):
            return None
        each = size // item
        index = np.arange(total) + np.repeat(at // item - np.cumsum(each) + each, each)
        source = np.ndarray((rows, pitch // item), f"V{item}", memory, first[0])
        place, strides = first[1] + int(to[0]), (strip.width, item)
        shape = self.tile(rows), total
        return Gather(source, index, np.ndarray(shape, f"V{item}", memory, place, strides))

    def views(
        self, rows: int, memory: memoryview, casts: Sequence[Cast], numbers: Sequence[int]
    ) -> list[tuple[Copy, np.ndarray, np.ndarray]]:
        """Returns copies of these numbers, each with its source in the buffer, [rows, run], and its
        target there, [tile, run].
        """
        bands, strips, _ = self.places(rows)
        tile = self.tile(rows)
        out = []
        for i in numbers:
            c, b, s = self.copies[i], self.band_of[i], self.strip_of[i]
            band, strip = self.bands[b], self.strips[s]
            pitch, shape = band.spans(rows)[2], (rows, c.run)
            src_type, dst_type = (
                (f"u{c.src_item}",) * 2 if c.cast == SAME else map(numpy_dtype, casts[c.cast][:2])
            )
            strides = (c.src_pitch, pitch) if c.transposed else (pitch, c.src_step)
            src = np.ndarray(shape, src_type, memory, bands[b] + c.src_at - band.at, strides)
            strides = strip.width, c.dst_step if strip.num == 1 else c.dst_item
            at = strips[s] + c.dst_at - strip.at
            dst = np.ndarray((tile, c.run), dst_type, memory, at, strides)
            out.append((c, src, dst))
        return out

    def halves(self) -> list[Cluster]:
        """Returns the same work as two clusters that need about half the buffer; [] if it cannot be
        cut.

        Each half gets some of the copies. If their elements interleave in a target row, which they
        fill only together, each half gets half of every row.
        """
        apart = all(c.dst_step == c.dst_item or c.run == 1 for c in self.copies)
        if len(self.copies) > 1 and apart:
            order = sorted(self.copies, key=lambda c: (c.src_file, c.src_at))
            return [Cluster(order[: len(order) // 2]), Cluster(order[len(order) // 2 :])]
        if max(c.run for c in self.copies) == 1:
            return []
        return [
            Cluster([c for c in (c.half(second) for c in self.copies) if c.run])
            for second in (False, True)
        ]


def _up(at: int) -> int:
    """Rounds up to a multiple of 16."""
    return -(-at // 16) * 16
