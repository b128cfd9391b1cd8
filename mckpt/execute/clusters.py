"""Cuts the copies of a plan into what threads take at a time.

Geometry only: no file, no thread, no memory budget.

    copies --_normal--> flat or staged --_clustered--> clusters --_slabs--> slabs, grouped in units

A **flat** copy has long runs of neighbouring bytes on both sides and is a byte-range copy. All
others are **staged**: those that share rows of a source or of a target are one **cluster**, read
once into a buffer, placed, and written in the longest runs that they fill:

    8 column shards, each [rows, w]  -- 8 bands -->  buffer [rows, 8w]  -- 1 strip -->  [rows, 8w] in one file

A **slab** is some rows of one cluster; a **unit** is some 256 MiB of slabs. They depend on the
copies alone, so that a run may go on with other threads and another memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mckpt.geometry.join import COPY, UNSCALED
from mckpt.values import casting, quantisation
from mckpt.values.dtypes import itemsize, numpy_dtype

# bytes between two entries of the journal: what each thread may have to do again; smaller ones sync
# files more often
UNIT = 256 << 20
SLAB = 16 << 20  # bytes a thread takes at a time: 5 ms of work, against 0.1 ms to hand it out
SHORT_RUN = 64 << 10  # bytes; flat runs below it are staged, so that a call moves more than one
# bytes worth reading and dropping rather than calling once more: what memcpy moves in the 1.5 us of
# a call
GAP = 8 << 10
# bytes; a transposed source is read in runs of at least this, the page the kernel reads anyway
SECTOR = 4 << 10
# bytes; spans a multiple of it apart share few cache sets: a transpose across them ran at 0.2 GB/s,
# not at 2
CONFLICT = 256
# elements in a row of a long 1-D cast or strided copy, cut so that a buffer can take any number of
# them
FOLD = 8192
SAME = -1  # the cast of a copy that has none

# COPY whose steps may be pitches, and the bytes of an element; 86 bytes. At 10**5 to 10**6 copies,
# arrays are changed in place, by column.
_WORK = np.dtype(
    [(name, "i4") for name in ("tensor", "src_file", "dst_file", "cast", "grid")]
    + [
        (name, "i8")
        for name in (
            "rows",
            "run",
            "src_at",
            "dst_at",
            "src_pitch",
            "dst_pitch",
            "src_step",
            "dst_step",
        )
    ]
    + [(name, "u1") for name in ("src_item", "dst_item")]
)
_SLABS = np.dtype(
    [("cluster", "i4"), ("row", "i8"), ("end", "i8"), ("bytes", "i8"), ("unit", "i4")]
)


class Work(NamedTuple):
    """A plan cut up: `copies` with each cluster's side by side between `bounds`, and the slabs in
    order.
    """

    copies: np.ndarray
    bounds: np.ndarray
    # (cluster, row, end, bytes, unit): rows [row, end) of a cluster, bytes written
    slabs: np.ndarray

    @classmethod
    def of(cls, copies: np.ndarray, casts: Sequence[tuple[str, str]]) -> Work:
        """Cuts planning.COPY records, which may come in any order."""
        w, starts = _clustered(_normal(copies, casts))
        return cls(w, np.append(starts, np.int32(len(w))), _slabs(w, starts))

    def is_flat(self) -> bool:
        """Whether all of it is moved as ranges of bytes, and nothing through staging."""
        return bool(is_ranges(self.copies).all())

    def cluster(self, slab: int) -> np.ndarray:
        """The copies of a slab's cluster."""
        cluster = self.slabs["cluster"][slab]
        return self.copies[self.bounds[cluster] : self.bounds[cluster + 1]]


class Copy(NamedTuple):
    """One record of _WORK: a copy whose numbers are all Python's."""

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
        """Whether neighbours in a row lie further apart in the source than neighbouring rows."""
        return self.rows > 1 and self.src_step > self.src_pitch

    def scratch(self, rows: int) -> int:
        """Bytes that placing `rows` rows takes beside the buffer."""
        cast = casting.scratch(self.run * rows) if self.cast != SAME else 0
        return cast if self.grid == UNSCALED else cast + quantisation.scratch(rows, self.run)

    def half(self, second: bool) -> Copy:
        """The first or second half of every row."""
        cut = self.run // 2
        if not second:
            return self._replace(run=cut)
        return self._replace(
            run=self.run - cut,
            src_at=self.src_at + cut * self.src_step,
            dst_at=self.dst_at + cut * self.dst_step,
        )


def _is_flat(w: np.ndarray) -> np.ndarray:
    """Which copies move runs of neighbouring bytes as they are."""
    return (w["cast"] == SAME) & (w["src_step"] == w["src_item"]) & (w["dst_step"] == w["dst_item"])


def is_ranges(w: np.ndarray) -> np.ndarray:
    """Which copies need no staging: flat, with rows long enough for a call each."""
    return _is_flat(w) & ((w["rows"] == 1) | (w["run"] * w["src_item"] >= SHORT_RUN))


def _normal(copies: np.ndarray, casts: Sequence[tuple[str, str]]) -> np.ndarray:
    """The same copies as _WORK in source order, written the one way: the closer target neighbours
    in a row, rows joined and long ones cut.

    Flat copies count in bytes (item 1), so that neighbours of any dtype join.
    """
    w = np.zeros(len(copies), _WORK)
    for name in COPY.names or ():
        w[name] = copies[name]
    w = _kept(w, (w["rows"] > 0) & (w["run"] > 0))
    pairs = np.array([(itemsize(a), itemsize(b), a == b) for a, b in casts], "u1").reshape(-1, 3)
    w["src_item"], w["dst_item"] = pairs[w["cast"], 0], pairs[w["cast"], 1]
    w["cast"][pairs[w["cast"], 2] == 1] = SAME
    turn = (w["run"] == 1) | ((w["rows"] > 1) & (w["dst_step"] > w["dst_pitch"]))
    for one, other in (("rows", "run"), ("src_pitch", "src_step"), ("dst_pitch", "dst_step")):
        w[one], w[other] = np.where(turn, w[other], w[one]), np.where(turn, w[one], w[other])
    even = (w["src_pitch"] == w["run"] * w["src_step"]) & (
        w["dst_pitch"] == w["run"] * w["dst_step"]
    )
    even &= w["grid"] == UNSCALED  # which is scaled by its rows and columns
    w["run"] = np.where(even, w["run"] * w["rows"], w["run"])
    w["rows"] = np.where(even, 1, w["rows"])
    for side in ("src", "dst"):
        w[f"{side}_step"] = np.where(w["run"] == 1, w[f"{side}_item"], w[f"{side}_step"])
    flat = _is_flat(w)
    w["run"] = np.where(flat, w["run"] * w["src_item"], w["run"])
    for name in ("src_item", "dst_item", "src_step", "dst_step"):
        w[name] = np.where(flat, 1, w[name])
    return _folded(_joined(_in_source_order(_unrolled(w))))


def _kept(w: np.ndarray, which: np.ndarray) -> np.ndarray:
    """`w[which]`, without a copy of all where that is all."""
    return w if which.all() else w[which]


def _ordered(w: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`w` itself, rearranged."""
    if (order[1:] < order[:-1]).any():
        for name in _WORK.names or ():
            w[name] = w[name][order]
    return w


def _in_source_order(w: np.ndarray) -> np.ndarray:
    return _ordered(w, np.lexsort((w["dst_at"], w["dst_file"], w["src_at"], w["src_file"])))


def _unrolled(w: np.ndarray) -> np.ndarray:
    """Rows of a slab or more become copies of their own, so that no thread gets more than about a
    slab.
    """
    times = np.where(
        (w["run"] * w["src_item"] >= SLAB) & (w["src_step"] <= w["src_pitch"]), w["rows"], 1
    )
    if (times == 1).all():
        return w
    row = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    w = np.repeat(w, times)
    alone = np.repeat(times, times) > 1
    w["rows"][alone] = 1
    for side in ("src", "dst"):
        w[f"{side}_at"] += row * w[f"{side}_pitch"]
        w[f"{side}_pitch"] = np.where(
            w["rows"] == 1, w["run"] * w[f"{side}_step"], w[f"{side}_pitch"]
        )
    return w


def _joined(w: np.ndarray) -> np.ndarray:
    """Flat copies that follow each other in source and target become one."""
    if not len(w):
        return w
    row = _is_flat(w) & (w["rows"] == 1)
    a, b = w[:-1], w[1:]
    joins = row[:-1] & row[1:]
    for side in ("src", "dst"):
        joins &= (a[f"{side}_file"] == b[f"{side}_file"]) & (
            a[f"{side}_at"] + a["run"] == b[f"{side}_at"]
        )
    if not joins.any():
        return w
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    run = np.add.reduceat(w["run"], starts)
    w = w[starts]
    w["run"] = run
    return w


def _folded(w: np.ndarray) -> np.ndarray:
    """Long single rows become many rows and a rest: 100 -> 3 rows of 32, 1 row of 4."""
    width = np.where(_is_flat(w), SLAB, FOLD)
    rows = np.where(
        (w["rows"] == 1) & (w["run"] >= 2 * width) & (w["grid"] == UNSCALED), w["run"] // width, 0
    )
    many = w[rows > 0]
    many["rows"], many["run"] = rows[rows > 0], width[rows > 0]
    # and w becomes the rests: there may be 10**6 of them, of which few were long
    w["run"] -= rows * width
    for side in ("src", "dst"):
        w[f"{side}_at"] += rows * width * w[f"{side}_step"]
        many[f"{side}_pitch"] = many["run"] * many[f"{side}_step"]
        np.copyto(w[f"{side}_pitch"], w["run"] * w[f"{side}_step"], where=w["rows"] == 1)
    return _in_source_order(np.concatenate([many, _kept(w, w["run"] > 0)])) if len(many) else w


def _clustered(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The copies with each cluster's side by side, and where each cluster starts; clusters in
    source order.

    Staged copies with equally many rows are one cluster where their rows interleave, in a source or
    in a target: `[a0 b0 a1 b1]`, or the column shards of one matrix.
    """
    first = np.arange(len(w), dtype="i4")
    staged = np.flatnonzero(~is_ranges(w)).astype("i4")
    if len(staged):
        first[staged] = staged[
            _components([_neighbours(w, staged, side) for side in ("src", "dst")], len(staged))
        ]
    order = np.argsort(first, kind="stable")
    first = first[order]
    starts = np.flatnonzero(
        np.concatenate([first[:1] == first[:1], first[1:] != first[:-1]])
    ).astype("i4")
    return _ordered(w, order), starts


def _neighbours(w: np.ndarray, staged: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """An order of the staged copies, and where in it those that interleave with none
    before begin.
    """
    at, file, rows = w[f"{side}_at"][staged], w[f"{side}_file"][staged], w["rows"][staged]
    pitch = np.maximum(w[f"{side}_pitch"][staged], w[f"{side}_step"][staged])
    order = np.lexsort((at, rows, pitch, file)).astype("i4")
    apart = np.ones(len(staged), bool)
    at, pitch = at[order], pitch[order]
    apart[1:] = (at[1:] - at[:-1] >= pitch[1:]) | (pitch[1:] != pitch[:-1])
    for other in (file[order], rows[order]):
        apart[1:] |= other[1:] != other[:-1]
    return order, np.flatnonzero(apart)


def _components(groupings: list[tuple[np.ndarray, np.ndarray]], num: int) -> np.ndarray:
    """For each of `num` elements the first one that it is connected with.

    A grouping is an order, and where its groups start in it.

    All elements take the least of their groups, and pass it on to the one that they pointed at
    before: a few rounds, also for chains.
    """
    least = np.arange(num, dtype="i4")
    while True:
        before = least.copy()
        for order, starts in groupings:
            low = np.minimum.reduceat(least[order], starts)
            least[order] = np.repeat(low, np.diff(starts, append=num))
        np.minimum.at(least, before, least.copy())
        least = least[least]
        if (least == before).all():
            return least


def _slabs(w: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """All work in order: (cluster, row, end row, bytes written, unit)."""
    if not len(w):
        return np.zeros(0, _SLABS)
    width = np.add.reduceat(w["run"] * w["dst_item"], starts)
    most = np.where(
        (w["src_step"] > w["src_pitch"]) & (w["rows"] > 1),
        SECTOR // np.maximum(w["src_pitch"], 1),
        1,
    )
    most = np.maximum(np.maximum.reduceat(most, starts), np.maximum(1, SLAB // width)).astype("i4")
    count = -(-w["rows"][starts] // most)
    out = np.zeros(count.sum(), _SLABS)
    cluster = out["cluster"] = np.repeat(np.arange(len(starts), dtype="i4"), count)
    out["row"] = np.arange(len(out))
    out["row"] -= np.repeat(np.cumsum(count) - count, count)
    del count
    out["row"] *= most[cluster]
    out["end"] = most[cluster]
    out["end"] += out["row"]
    np.minimum(out["end"], w["rows"][starts[cluster]], out=out["end"])
    out["bytes"] = width[cluster]
    out["bytes"] *= out["end"] - out["row"]
    del most, width
    unit = np.cumsum(out["bytes"])
    unit -= out["bytes"]
    unit //= UNIT
    out["unit"] = unit
    return out


class Band(NamedTuple):
    """Source spans of a cluster: `num` of them (None: one per row), `pitch` apart, of `width` +
    (rows - 1) * `grow` bytes each.
    """

    file: int
    at: int
    num: int | None
    pitch: int
    width: int
    grow: int
    advance: int  # bytes from the spans of one row to those of the next

    def spans(self, rows: int) -> tuple[int, int, int, bool]:
        """Their number, their width, how far apart they lie in a buffer, and whether one read takes
        them all.
        """
        num, width = self.num or (rows if self.advance else 1), self.width + (rows - 1) * self.grow
        if num == 1 or (
            self.pitch - width <= GAP and not (self.grow and self.pitch % CONFLICT == 0)
        ):
            return num, width, self.pitch, True
        return num, width, width if width % CONFLICT else width + 64, False

    def bytes(self, rows: int) -> int:
        """What they take in a buffer."""
        num, width, pitch, _ = self.spans(rows)
        return (num - 1) * pitch + width


class Strip(NamedTuple):
    """What one target row gets: `width` bytes in the buffer, written as `num` runs a `step` apart;
    rows a `pitch` apart.
    """

    file: int
    at: int
    pitch: int
    width: int
    num: int
    step: int


class Cluster:
    """Copies of equally many rows moved together: each source byte read once, each target row
    written in its longest runs.
    """

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies
        self.bands: list[Band] = []
        self.strips: list[Strip] = []
        self.band_of, self.strip_of = [0] * len(copies), [0] * len(copies)
        self._find_bands()
        self._find_strips()
        self.transposed = any(c.transposed for c in copies)

    def _find_bands(self) -> None:
        """Source spans that nearly touch are read as one."""
        for i in sorted(
            range(len(self.copies)), key=lambda i: (self.copies[i].src_file, self.copies[i].src_at)
        ):
            c = self.copies[i]
            extent = (c.run - 1) * c.src_step + c.src_item
            if c.transposed:
                band = Band(
                    c.src_file, c.src_at, c.run, c.src_step, c.src_item, c.src_pitch, c.src_pitch
                )
            else:
                band = Band(
                    c.src_file,
                    c.src_at,
                    None,
                    c.src_pitch,
                    extent,
                    0,
                    c.src_pitch if c.rows > 1 else 0,
                )
            if self.bands:
                last = self.bands[-1]
                width = max(last.width, c.src_at - last.at + band.width)
                grown = width + (c.rows - 1) * band.grow
                near = c.src_at <= last.at + last.width + GAP and (
                    grown <= band.pitch or c.rows == 1
                )
                if near and last._replace(at=0, width=0) == band._replace(at=0, width=0):
                    self.bands[-1] = last._replace(width=width)
                    self.band_of[i] = len(self.bands) - 1
                    continue
            self.band_of[i] = len(self.bands)
            self.bands.append(band)

    def _find_strips(self) -> None:
        """Target rows that copies fill together are written as one; one that would clobber bytes of
        others is written in its own runs.
        """
        group: list[int] = []
        end = 0
        for i in sorted(
            range(len(self.copies)), key=lambda i: (self.copies[i].dst_file, self.copies[i].dst_at)
        ):
            c = self.copies[i]
            head = self.copies[group[0]] if group else c
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

    def places(self, rows: int) -> tuple[list[int], list[int], int]:
        """Offsets of the bands and of the strips in a buffer that takes `rows` rows, and
        its bytes.
        """
        at, bands, strips = 0, [], []
        for band in self.bands:
            # keeps elements aligned in memory where they are in the file
            at = _up(at) + band.at % 16
            bands.append(at)
            at += band.bytes(rows)
        for strip in self.strips:
            at = _up(at)
            strips.append(at)
            at += strip.width * rows
        return bands, strips, at + max(c.scratch(rows) for c in self.copies)

    def rows_within(self, limit: int, most: int) -> int:
        """The most rows, up to `most`, that a buffer of `limit` bytes takes; may be 0."""
        return bisect_right(range(1, most + 1), limit, key=lambda rows: self.places(rows)[2])

    def views(
        self, rows: int, memory: memoryview, casts: Sequence[tuple[str, str]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(source, target) of each copy in the buffer, both (rows, run)."""
        bands, strips, _ = self.places(rows)
        out = []
        for c, b, s in zip(self.copies, self.band_of, self.strip_of, strict=True):
            band, strip = self.bands[b], self.strips[s]
            pitch = band.spans(rows)[2]
            src_type, dst_type = (
                (f"u{c.src_item}",) * 2 if c.cast == SAME else map(numpy_dtype, casts[c.cast])
            )
            strides = (c.src_pitch, pitch) if c.transposed else (pitch, c.src_step)
            src = np.ndarray(
                (rows, c.run), src_type, memory, bands[b] + c.src_at - band.at, strides
            )
            step = c.dst_step if strip.num == 1 else c.dst_item
            out.append(
                (
                    src,
                    np.ndarray(
                        (rows, c.run),
                        dst_type,
                        memory,
                        strips[s] + c.dst_at - strip.at,
                        (strip.width, step),
                    ),
                )
            )
        return out

    def halves(self) -> list[Cluster]:
        """The same work as two clusters that need about half the buffer; [] when it cannot be cut.

        Copies part company unless their elements interleave in a target row, where only together
        they fill it; then rows are cut.
        """
        if len(self.copies) > 1 and all(c.dst_step == c.dst_item for c in self.copies):
            order = sorted(self.copies, key=lambda c: (c.src_file, c.src_at))
            return [Cluster(order[: len(order) // 2]), Cluster(order[len(order) // 2 :])]
        if max(c.run for c in self.copies) == 1:
            return []
        return [
            Cluster([c for c in (c.half(second) for c in self.copies) if c.run])
            for second in (False, True)
        ]


def _up(at: int) -> int:
    """The next multiple of 16."""
    return -(-at // 16) * 16
