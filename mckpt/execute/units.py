"""Cuts the copies of a plan into the slabs that threads take, grouped in units.

Geometry only: no file, no thread, no memory budget.

    copies --_normal--> flat or staged --_clustered--> clusters --_slabs--> slabs, grouped in units

A **flat** copy moves long runs of bytes that are neighbours on both sides: a plain byte range. All
other copies are **staged**. Staged copies that share rows of a source or of a target form one
**cluster** (`clusters`), and so do many short ranges side by side, such as rows that are kept.

Copies into a weight that is **quantised** form one cluster for each weight, whose rows are those of
the weight; its last records describe the scales (`_quantised`).

A **slab** is some rows of one cluster. A **unit** is about 256 MiB of slabs, and 64 MiB of a merge.
Both depend on the copies alone, so that a run can go on with other threads and another memory
budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mckpt.execute.clusters import MANY, SAME, SECTOR, TURNED
from mckpt.geometry.join import COPY, UNSCALED, Joined
from mckpt.values.dtypes import itemsize
from mckpt.values.element import MIX, SUM, Cast
from mckpt.values.quantisation import ALONE, ENCODINGS, SCALES, WRITTEN, Grid

# bytes between two entries of the journal, which each thread may have to do again after a kill;
# smaller units sync files more often
UNIT = 256 << 20
SMALL_UNIT = 64 << 20  # where many processes share the work, or several times as much is read
SLAB = 16 << 20  # bytes that a thread takes at a time: 5 ms of work, and 0.1 ms to hand it out
# bytes; shorter runs of flat copies are staged, so that one system call moves several of them
SHORT_RUN = 64 << 10
SHORT_COPY = 32 << 10  # elements of a copy, where copies are short on average
NEAR = 1 << 20  # bytes between two short ranges that still move together
CHAIN = 2 << 20  # bytes of short ranges that move together: more leave the caches, and need memory
MOST_RANGES = 8192  # that move together: numpy needs about 1 KiB for each
FEW = 16  # short rows that become ranges of their own
# elements; longer 1-D casts and strided copies are cut into rows of this length, so that a buffer
# can take any number of them
FOLD = 8192

_LENGTHS = ["rows", "run", "src_at", "dst_at", "src_pitch", "dst_pitch", "src_step", "dst_step"]
# A COPY whose steps may be as large as pitches, and the bytes of an element; 86 bytes. There are
# 10**5 to 10**6 copies, so these arrays are changed in place, column by column.
_WORK = np.dtype(
    [(name, "i4") for name in ("tensor", "src_file", "dst_file", "cast", "grid")]
    + [(name, "i8") for name in _LENGTHS]
    + [(name, "u1") for name in ("src_item", "dst_item")]
)
_SLABS = np.dtype(
    [("cluster", "i4"), ("row", "i8"), ("end", "i8"), ("bytes", "i8"), ("unit", "i4")]
)


class Work(NamedTuple):
    """A plan cut into slabs.

    The copies of cluster i are `copies[bounds[i] : bounds[i + 1]]`.
    """

    copies: np.ndarray  # of _WORK
    bounds: np.ndarray
    # in order: (cluster, row, end, bytes, unit), which is rows [row, end) and the bytes written
    slabs: np.ndarray

    @classmethod
    def of(cls, joined: Joined, seeks: bool = False) -> Work:
        """Cuts the copies, which may come in any order.

        seeks: short rows that are neighbours in the target move together, from anywhere in a
            source; else those that are near each other in the source, to anywhere.
        """
        copies, casts = joined.copies, joined.casts
        merges = any(c.term in (SUM, MIX) for c in casts)
        unit = min(UNIT, SMALL_UNIT) if merges or in_short_pieces(copies) else UNIT
        codes = np.array([c.target in WRITTEN for c in casts], bool)
        quantises = (copies["grid"] != UNSCALED) & codes[copies["cast"]]
        if not quantises.any():
            w, starts = _clustered(_normal(copies, casts), seeks)
            slabs = _slabs(w, starts)
            slow = np.logical_or.reduceat(_transposed(w), starts) if len(starts) else starts
            bounds = np.append(starts, np.int32(len(w)))
            return cls(w, bounds, _numbered(slabs, unit, slow))
        w, starts = _clustered(_normal(copies[~quantises], casts), seeks)
        slabs = _slabs(w, starts)
        banded, bands, more = _quantised(copies[quantises], casts, joined.grids)
        more["cluster"] += len(starts)
        bounds = np.concatenate([starts, bands + len(w), [len(w) + len(banded)]]).astype("i4")
        slabs = _numbered(np.concatenate([slabs, more]), unit)
        return cls(np.concatenate([w, banded]), bounds, slabs)

    def is_flat(self) -> bool:
        """Whether all copies move as ranges of bytes, none through staging."""
        return bool(is_ranges(self.copies).all())

    def transposed_bytes(self) -> int:
        """Returns the bytes of memory in which the largest transposed slab can be moved whole, with
        the rows of it that are written at a time; 0 if not much is transposed.
        """
        if not mostly_transposed(self.copies):
            return 0
        crossed = np.logical_or.reduceat(_transposed(self.copies), self.bounds[:-1])
        return TURNED + int(self.slabs["bytes"][crossed[self.slabs["cluster"]]].max())

    def cluster(self, slab: int) -> np.ndarray:
        """Returns the copies of a slab's cluster."""
        return self.records(self.slabs["cluster"][slab])

    def targets(self, slab: int) -> frozenset[int]:
        """Returns the files that a slab writes."""
        return frozenset(self.cluster(slab)["dst_file"].tolist())

    def records(self, cluster: int) -> np.ndarray:
        """Returns the copies of a cluster."""
        return self.copies[self.bounds[cluster] : self.bounds[cluster + 1]]


def _is_flat(w: np.ndarray) -> np.ndarray:
    """Returns a mask of the copies that move runs of neighbouring bytes unchanged."""
    return (w["cast"] == SAME) & (w["src_step"] == w["src_item"]) & (w["dst_step"] == w["dst_item"])


def in_short_pieces(copies: np.ndarray) -> bool:
    """Returns whether copies are moved in short reads, calls of numpy and writes, for which the
    threads of a process wait for Python's lock.
    """
    few = (copies["rows"] * copies["run"]).sum() < len(copies) * SHORT_COPY
    return bool(few) or mostly_transposed(copies)


def mostly_transposed(copies: np.ndarray) -> bool:
    """Returns whether copies that exchange rows and columns have a quarter of the elements."""
    elements = copies["rows"] * copies["run"]
    return 0 < elements.sum() <= 4 * elements[_transposed(copies)].sum()


def _transposed(copies: np.ndarray) -> np.ndarray:
    crossed = (copies["src_step"] > copies["src_pitch"]) != (
        copies["dst_step"] > copies["dst_pitch"]
    )
    return crossed & (copies["rows"] > 1) & (copies["run"] > 1)


def is_ranges(w: np.ndarray) -> np.ndarray:
    """Returns a mask of the copies that need no staging: flat, with rows long enough for one system
    call each.
    """
    return _is_flat(w) & ((w["rows"] == 1) | (w["run"] * w["src_item"] >= SHORT_RUN))


def are_short(w: np.ndarray) -> np.ndarray:
    """Returns a mask of the copies of one short row of neighbouring elements, for chains."""
    dense = (w["src_step"] == w["src_item"]) & (w["dst_step"] == w["dst_item"])
    short = (w["rows"] == 1) & (w["run"] * w["src_item"] < SHORT_RUN)
    return dense & short & (w["grid"] == UNSCALED)


def _normal(copies: np.ndarray, casts: Sequence[Cast]) -> np.ndarray:
    """Returns the same copies as _WORK, in source order and in one normal form.

    A row is the axis along which target elements are closer together. Adjacent rows are joined and
    long ones cut. Flat copies count in bytes (item 1), so that neighbours of any dtypes join.
    """
    w = np.zeros(len(copies), _WORK)
    for name in COPY.names or ():
        w[name] = copies[name]
    w = _kept(w, (w["rows"] > 0) & (w["run"] > 0))
    pairs = np.array(
        [(itemsize(c.source), itemsize(c.target), c.same) for c in casts], "u1"
    ).reshape(-1, 3)
    w["src_item"], w["dst_item"] = pairs[w["cast"], 0], pairs[w["cast"], 1]
    w["cast"][pairs[w["cast"], 2] == 1] = SAME
    turn = (w["run"] == 1) | ((w["rows"] > 1) & (w["dst_step"] > w["dst_pitch"]))
    turn ^= _columns(w, turn)
    for one, other in (("rows", "run"), ("src_pitch", "src_step"), ("dst_pitch", "dst_step")):
        w[one], w[other] = np.where(turn, w[other], w[one]), np.where(turn, w[one], w[other])
    even = (w["src_pitch"] == w["run"] * w["src_step"]) & (
        w["dst_pitch"] == w["run"] * w["dst_step"]
    )
    even &= w["grid"] == UNSCALED  # a scaled copy needs its rows and columns
    w["run"] = np.where(even, w["run"] * w["rows"], w["run"])
    w["rows"] = np.where(even, 1, w["rows"])
    for side in ("src", "dst"):
        w[f"{side}_step"] = np.where(w["run"] == 1, w[f"{side}_item"], w[f"{side}_step"])
    flat = _is_flat(w)
    w["run"] = np.where(flat, w["run"] * w["src_item"], w["run"])
    for name in ("src_item", "dst_item", "src_step", "dst_step"):
        w[name] = np.where(flat, 1, w[name])
    return _folded(_joined(_in_source_order(_unrolled(w))))


def _columns(w: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Returns a mask of the columns of single elements, where one matrix has several of them. They
    move together, also with wider ones, so they get as many rows; a column alone becomes one row.

    turn: the copies whose rows and columns are exchanged.
    """
    down, along = (w["run"] == 1) & (w["rows"] > 1), (w["rows"] == 1) & (w["run"] > 1)
    along &= (w["src_step"] > w["src_item"]) & (w["dst_step"] > w["dst_item"])
    if not (down | along).any():
        return down
    key = np.zeros(len(w), "i8")  # two matrices with one key only get more columns
    for name, other in (("rows", "run"), ("src_pitch", "src_step"), ("dst_pitch", "dst_step")):
        key = key * 1_000_003 + np.where(along, w[other], w[name])
    for name in ("src_file", "dst_file"):
        key = key * 1_000_003 + w[name]
    found, number, count = np.unique(key[down | along], return_inverse=True, return_counts=True)
    several = (count >= MANY) | np.isin(found, key[~turn & (w["rows"] > 1) & (w["run"] > 1)])
    out: np.ndarray = down | along
    out[out] = several[number]
    return out


def _kept(w: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Returns `w[which]`, or `w` itself if that is all of it."""
    return w if which.all() else w[which]


def _ordered(w: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Sorts `w` in place, and returns it."""
    if (order[1:] < order[:-1]).any():
        for name in _WORK.names or ():
            w[name] = w[name][order]
    return w


def _in_source_order(w: np.ndarray) -> np.ndarray:
    file, at = w["src_file"], w["src_at"]
    later = (file[1:] > file[:-1]) | ((file[1:] == file[:-1]) & (at[1:] > at[:-1]))
    if later.all():  # of many copies this costs a tenth of sorting
        return w
    return _ordered(w, np.lexsort((w["dst_at"], w["dst_file"], w["src_at"], w["src_file"])))


def _unrolled(w: np.ndarray) -> np.ndarray:
    """Makes rows of a slab or more copies of their own, so that no thread gets much more than a
    slab; and a few short rows, so that they move with their neighbours (`_chains`).
    """
    long = (w["run"] * w["src_item"] >= SLAB) & (w["src_step"] <= w["src_pitch"])
    few = _is_flat(w) & (w["rows"] < FEW) & (w["run"] < SHORT_RUN) & (w["dst_pitch"] == w["run"])
    times = np.where(long | few, w["rows"], 1)
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
    """Joins flat copies that follow each other in source and target."""
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
    """Cuts long single rows into many rows and a rest: 100 -> 3 rows of 32, 1 row of 4."""
    width = np.where(_is_flat(w), SLAB, FOLD)
    rows = np.where(
        (w["rows"] == 1) & (w["run"] >= 2 * width) & (w["grid"] == UNSCALED), w["run"] // width, 0
    )
    many = w[rows > 0]
    many["rows"], many["run"] = rows[rows > 0], width[rows > 0]
    # `w` becomes the rests in place: there may be 10**6 copies, of which few were long
    w["run"] -= rows * width
    for side in ("src", "dst"):
        w[f"{side}_at"] += rows * width * w[f"{side}_step"]
        many[f"{side}_pitch"] = many["run"] * many[f"{side}_step"]
        np.copyto(w[f"{side}_pitch"], w["run"] * w[f"{side}_step"], where=w["rows"] == 1)
    return _in_source_order(np.concatenate([many, _kept(w, w["run"] > 0)])) if len(many) else w


def _clustered(w: np.ndarray, seeks: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the copies with those of each cluster side by side, and the start of each cluster.

    Clusters are in source order. Staged copies with equally many rows form one cluster if their
    rows interleave in a source or in a target: `[a0 b0 a1 b1]`, or the column shards of one matrix.
    Short rows that are near each other in a source, or with `seeks` in a target, form one as well,
    of at most CHAIN bytes.
    """
    first = np.arange(len(w), dtype="i4")
    in_chains = are_short(w)
    staged = np.flatnonzero(~is_ranges(w) & ~in_chains).astype("i4")
    if len(staged):
        first[staged] = staged[
            _components([_neighbours(w, staged, side) for side in ("src", "dst")], len(staged))
        ]
    short = np.flatnonzero(in_chains).astype("i4")
    side, ordered = "src", short
    if seeks:
        names = ("dst_at", "dst_file", "src_file")
        side, ordered = "dst", short[np.lexsort([w[name][short] for name in names])]
    first[ordered] = short[_chains(w, ordered, side)]
    order = np.argsort(first, kind="stable")
    first = first[order]
    starts = np.flatnonzero(
        np.concatenate([first[:1] == first[:1], first[1:] != first[:-1]])
    ).astype("i4")
    return _ordered(w, order), starts


def _chains(w: np.ndarray, short: np.ndarray, side: str) -> np.ndarray:
    """Returns for each of some short rows, in the order of a side, the number of the first one in
    its chain. Rows may be read several times.
    """
    size = w["run"][short] * w[f"{side}_item"][short]
    gap = w[f"{side}_at"][short[1:]] - (w[f"{side}_at"][short] + size)[:-1]
    linked = gap <= NEAR
    for name in ("src_file", f"{side}_file", "cast", "src_item", "dst_item"):
        linked &= w[name][short[1:]] == w[name][short[:-1]]
    number = np.arange(len(short))
    starts = np.concatenate([number[:1] == 0, ~linked])
    nbytes = np.cumsum(size) - size
    first = np.maximum.accumulate(np.where(starts, number, 0))
    for before, most in ((nbytes - nbytes[first], CHAIN), (number - first, MOST_RANGES)):
        starts[1:] |= np.diff(before // most) != 0
    return np.maximum.accumulate(np.where(starts, number, 0))


def _neighbours(w: np.ndarray, staged: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns an order of the staged copies, and the places in it where a copy interleaves with
    none before it.
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
    """Returns for each of `num` elements the first element that it is connected with.

    A grouping is an order of the elements and the places in it where groups start. In each round,
    every element takes the least number in its groups, and passes it on to the element that it
    pointed at before. A few rounds are enough, even for chains.
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
    """Returns the slabs of all clusters, in order: (cluster, row, end row, bytes written, unit)."""
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
    return out


def _numbered(slabs: np.ndarray, nbytes: int, slow: np.ndarray | None = None) -> np.ndarray:
    """Sets the unit of each slab, of about nbytes, and returns the slabs.

    slow: the clusters that transpose. Processes share the units, so that beside such clusters the
    bytes of others, which take half of the time, count half.
    """
    cost = slabs["bytes"]
    if slow is not None and slow.any():
        cost = np.where(slow[slabs["cluster"]], cost, cost // 2)
    unit = np.cumsum(cost)
    unit -= cost
    unit //= nbytes
    slabs["unit"] = unit
    return slabs


def is_quantised(records: np.ndarray) -> bool:
    """Returns whether a cluster quantises a weight."""
    return bool(are_quantised(records[-1:])[0])


def are_quantised(last: np.ndarray) -> np.ndarray:
    """Returns a mask of the clusters with these last records that quantise a weight."""
    mask: np.ndarray = (last["cast"] == SAME) & (last["grid"] != UNSCALED)
    return mask


def _quantised(
    copies: np.ndarray, casts: Sequence[Cast], grids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the copies of weights that are quantised, the start of each weight's cluster, and its
    slabs, which are whole bands of blocks.

    The last record of a cluster describes the scales: their file and their place in it. The one
    before it describes the scale of the whole weight, if there is one.
    """
    order = np.argsort(copies["grid"], kind="stable")
    copies = copies[order]
    first = np.flatnonzero(np.diff(copies["grid"], prepend=-2))
    of = copies["grid"][first]
    grid = {name: grids[of, i] for i, name in enumerate(Grid._fields)}
    more = 1 + (grid["overall"] != ALONE)
    w = np.zeros(len(copies) + more.sum(), _WORK)
    starts = first + np.cumsum(more) - more
    scales = starts + np.diff(first, append=len(copies)) + more - 1
    overall = scales[more > 1] - 1
    weights = np.ones(len(w), bool)
    weights[scales] = weights[overall] = False
    for name in COPY.names or ():
        w[name][weights] = copies[name]
    items = np.array([(itemsize(c.source), itemsize(c.target)) for c in casts], "u1")
    for i, name in enumerate(("src_item", "dst_item")):
        w[name][weights] = items[copies["cast"], i]
    rows = np.add.reduceat(copies["rows"] * copies["run"], first) // grid["width"]
    sizes = np.array([itemsize(dtype) for dtype in SCALES])[grid["kind"]]
    per_byte = np.array([encoding.per_byte for encoding in ENCODINGS])[grid["code"]]
    for name, value in (
        ("tensor", copies["tensor"][first]),
        ("src_file", copies["src_file"][first]),
        ("dst_file", grid["file"]),
        ("cast", SAME),
        ("grid", of),
        ("rows", -(-rows // grid["rows"])),
        ("run", -(-grid["width"] // grid["columns"])),
        ("dst_at", grid["at"]),
        ("dst_item", sizes),
    ):
        w[name][scales] = value
    w[overall] = w[overall + 1]
    for name, column in (("dst_file", "overall_file"), ("dst_at", "overall_at")):
        w[name][overall] = grid[column][more > 1]
    w["rows"][overall] = w["run"][overall] = 1
    w["dst_item"][overall] = itemsize("float32")
    most = np.maximum(1, SLAB // (grid["width"] * grid["rows"])) * grid["rows"]
    count = -(-rows // most)
    out = np.zeros(count.sum(), _SLABS)
    cluster = out["cluster"] = np.repeat(np.arange(len(of), dtype="i4"), count)
    out["row"] = (np.arange(len(out)) - np.repeat(np.cumsum(count) - count, count)) * most[cluster]
    out["end"] = np.minimum(out["row"] + most[cluster], rows[cluster])
    out["bytes"] = (out["end"] - out["row"]) * (grid["width"] // per_byte)[cluster]
    out["bytes"] += (
        -(-(out["end"] - out["row"]) // grid["rows"][cluster])
        * w["run"][scales][cluster]
        * sizes[cluster]
    )
    return w, starts, out
