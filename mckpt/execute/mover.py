"""Copies rows of one cluster from source files to target files, through one thread's buffer.

A flat copy passes through the buffer in pieces. A staged cluster fills the buffer with its source
spans, places and casts its elements there, and writes whole target rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from isal import isal_zlib

from mckpt.errors import UsageError
from mckpt.execute.chains import Chain
from mckpt.execute.checksums import UNKNOWN, Range, merged
from mckpt.execute.clusters import SAME, SECTOR, Band, Cluster, Copy, Strip
from mckpt.execute.files import (
    OpenFiles,
    copy_in_kernel,
    read_at,
    read_or_fetch,
    read_spans,
    write_at,
)
from mckpt.execute.measuring import Measured
from mckpt.execute.quantising import (
    Cell,
    NotFinite,
    band_rows,
    block_bytes,
    cells,
    fill,
    largest,
    overall_scale,
    quantise,
)
from mckpt.execute.units import Work, are_short, is_quantised, is_ranges
from mckpt.geometry.join import UNSCALED, Joined
from mckpt.storage.descriptors import is_remote
from mckpt.values.adding import Lengths
from mckpt.values.dtypes import NoValue, cast, numpy_dtype
from mckpt.values.element import PRODUCT, Cast, Element, Place
from mckpt.values.quantisation import ALONE, E4M3, Grid

# bytes of one read of a flat copy: 0.67 s of CPU per GiB with crc32, 128 KiB 0.72, 2 MiB 0.73
PIECE = 1 << 20
# bytes of the buffers of one staged step, unless one row needs more: 1 to 4 MiB measured alike,
# 8 MiB costs 15% more
TILE = 2 << 20
# bytes; a row of at least this size that is written alone gets a crc of its own, which takes 28
# bytes of state; shorter rows are read back
ROW_SUM = 32 << 10


class Overflow(UsageError):
    """A value that the target's dtype cannot hold.

    `tensor` is the number of the copy's tensor, for a caller that knows its name.
    """

    def __init__(self, tensor: int, place: str) -> None:
        super().__init__(f"tensor {tensor}: {place}")
        self.tensor, self.place = tensor, place


@contextmanager
def naming(joined: Joined) -> Iterator[None]:
    """Adds the name of the tensor to an Overflow, and raises it as a UsageError."""
    try:
        yield
    except Overflow as e:
        raise UsageError(f"{joined.name(e.tensor)}: {e.place}") from e


@dataclass(frozen=True, eq=False)
class Mover:
    """Copies clusters; all threads of a run share it."""

    sources: OpenFiles
    targets: OpenFiles
    casts: Sequence[Cast]
    grids: np.ndarray | None  # Joined.grids, for copies that are scaled
    summing: bool  # compute a crc32 of the bytes that pass
    in_kernel: bool  # let the kernel copy ranges of bytes
    allow_overflow: bool
    write: Callable[[int, memoryview, int, str], None] = write_at
    measured: Measured = field(default_factory=Measured)
    lengths: Lengths = field(default_factory=Lengths)

    def move(
        self, work: Work, number: int, memory: memoryview, check: Callable[[], None]
    ) -> list[Range]:
        """Copies the slab of this number, and returns the ranges that it wrote."""
        _, row, end, _, _ = work.slabs[number].item()
        records = work.cluster(number)
        slab = _SlabCopy(self, memory, check)
        chained = len(records) > 1 and bool(are_short(records[:1])[0])
        copies = [] if chained else [Copy(*c) for c in records.tolist()]
        quantised, overall = is_quantised(records), None
        if quantised and self.grid(copies[-1]).overall != ALONE:
            overall = self._overall(work, number, memory, check)
        sources = set(records["src_file"].tolist())
        for c in copies if not quantised else ():
            if c.grid != UNSCALED and (term := self.element(c).term):
                sources |= term.files
        with (
            self.sources.opened(sources) as slab.src,
            self.targets.opened(records["dst_file"].tolist()) as slab.dst,
            np.errstate(all="ignore"),  # NaN and infinity are values like others
        ):
            if quantised:
                slab.quantise(_of_weight(copies), copies[-1], row, end, overall)
            elif len(records) == 1 and is_ranges(records).all():
                slab.copy_range(Copy(*records[0].item()), row, end)
            elif chained:
                slab.chain(records)
            else:
                slab.stage(Cluster(copies), row, end)
        return merged(slab.written)

    def _overall(
        self, work: Work, number: int, memory: memoryview, check: Callable[[], None]
    ) -> np.ndarray:
        """Returns the scale of the whole weight of a slab. It depends on the largest value of all
        weights that share the scale, so they are read twice.
        """

        def measure(slab: int) -> float:
            _, row, end, _, _ = work.slabs[slab].item()
            copies = [Copy(*c) for c in work.cluster(slab).tolist()]
            reader = _SlabCopy(self, memory, check)
            with self.sources.opened({c.src_file for c in copies}) as reader.src:
                return reader.largest(_of_weight(copies), self.grid(copies[-1]), row, end)

        assert self.grids is not None
        return overall_scale(self.measured.largest(work, self.grids, number, measure))

    def close(self) -> None:
        """Closes all files."""
        self.sources.close()
        self.targets.close()

    def element(self, c: Copy) -> Element:
        """Returns how a copy whose bytes change computes its elements."""
        if c.grid == UNSCALED:
            return Element(self.casts[c.cast])
        assert self.grids is not None, "copies have scales or products, and no table was given"
        return Element.of(self.casts[c.cast], self.grids[c.grid :])

    def grid(self, c: Copy) -> Grid:
        """Returns the scales of a weight that is written quantised."""
        assert self.grids is not None, "copies are scaled, and no grids were given"
        return Grid(*self.grids[c.grid].tolist())


def _of_weight(copies: list[Copy]) -> list[Copy]:
    """Returns the copies into a quantised weight, without the records of its scales."""
    return [c for c in copies if c.cast != SAME]


class _SlabCopy:
    """The copy of one slab: its buffer, its open files, and the ranges written so far."""

    def __init__(self, mover: Mover, memory: memoryview, check: Callable[[], None]) -> None:
        self.mover, self.memory, self.check = mover, memory, check
        self.src: dict[int, int] = {}
        self.dst: dict[int, int] = {}
        self.written: list[Range] = []
        self.raw = memoryview(b"")

    def _read(self, file: int, view: memoryview, at: int) -> None:
        read_at(self.src[file], view, at, self.mover.sources.paths[file])

    def _bytes(self, file: int, at: int, nbytes: int, own: memoryview | None = None) -> memoryview:
        """Returns bytes of a source, in the caller's memory or in some that the next call uses
        again.
        """
        if own is None and len(self.raw) < nbytes:
            self.raw = memoryview(bytearray(nbytes))
        view = self.raw[:nbytes] if own is None else own
        self._read(file, view, at)
        return view

    def _write(self, file: int, view: memoryview, at: int) -> None:
        self.mover.write(self.dst[file], view, at, self.mover.targets.paths[file])

    def _crc(self, view: memoryview, crc: int = 0) -> int:
        return isal_zlib.crc32(view, crc) if self.mover.summing else UNKNOWN

    def copy_range(self, c: Copy, row: int, end: int) -> None:
        """Copies rows [row, end) of a flat copy, through a buffer that stays in the cache."""
        length = c.run
        if c.src_pitch == c.dst_pitch == c.run:
            length, rows = c.run * (end - row), range(row, row + 1)
        else:
            rows = range(row, end)
        # a request to a store takes long, so there should be few
        piece = len(self.memory) if is_remote(self.src[c.src_file]) else PIECE
        size = min(piece, len(self.memory))
        for r in rows:
            src, dst = c.src_at + r * c.src_pitch, c.dst_at + r * c.dst_pitch
            crc, moved = self._crc(self.memory[:0]), 0
            if self.mover.in_kernel and not is_remote(self.src[c.src_file]):
                fds = self.src[c.src_file], self.dst[c.dst_file]
                moved = copy_in_kernel(*fds, src, dst, length)
            for at in range(moved, length, size):
                self.check()
                view = self.memory[: min(size, length - at)]
                fd, path = self.src[c.src_file], self.mover.sources.paths[c.src_file]
                view = read_or_fetch(fd, view, src + at, path)
                crc = self._crc(view, crc)
                self._write(c.dst_file, view, dst + at)
            self.written.append((c.dst_file, dst, length, crc))

    def quantise(
        self, copies: list[Copy], scales: Copy, row: int, end: int, overall: np.ndarray | None
    ) -> None:
        """Quantises rows [row, end) of a weight; `row` is the first row of a block.

        scales: the record that describes the weight's scales (units.Work). overall: the scale of
        the whole weight; the slab of its first rows writes it.
        """
        grid, most = self.mover.grid(scales), len(self.memory)
        file, per_byte = copies[0].dst_file, grid.encoding.per_byte
        if overall is not None and row == 0:
            self._put(grid.overall_file, grid.overall_at, memoryview(overall.tobytes()))
        step = band_rows(grid, most)
        for first in range(row, end, step):
            rows = min(step, end - first)
            # bytes; all codes of a band are written at once if they leave half of the buffer, and
            # room for a block
            width = grid.width // per_byte
            room = min(most // 2, most - block_bytes(grid, rows) - 16)
            codes = rows * width if rows * width <= room else 0
            whole = np.ndarray((rows if codes else 0, width), "u1", self.memory)
            at, band_scales = grid.byte(grid.weight_at + first * grid.width), []
            for cell in cells(grid, first, rows, most - -(-codes // 16) * 16):
                self.check()
                values = self._values(copies, grid, cell, -(-codes // 16) * 16)
                with self._finite(copies[0], grid, cell):
                    found, more = quantise(grid, values, overall)
                band_scales.append(more)
                left, right = cell.column // per_byte, (cell.column + cell.columns) // per_byte
                if codes:
                    whole[:, left:right] = found
                for i in range(0 if codes else rows):
                    self._write(file, memoryview(found[i]), at + i * width + left)
            if codes:
                self._put(file, at, self.memory[:codes])
            else:
                self.written.append((file, at, rows * width, UNKNOWN))
            to = grid.at + first // grid.rows * scales.run * scales.dst_item
            joined = np.concatenate(band_scales, axis=1)
            self._put(grid.file, to, memoryview(joined.view("u1").tobytes()))

    def largest(self, copies: list[Copy], grid: Grid, row: int, end: int) -> float:
        """Returns the largest absolute value of rows [row, end) of a weight."""
        found, step = 0.0, band_rows(grid, len(self.memory))
        for first in range(row, end, step):
            for cell in cells(grid, first, min(step, end - first), len(self.memory)):
                self.check()
                values = self._values(copies, grid, cell, 0)
                with self._finite(copies[0], grid, cell):
                    found = max(found, largest(values))
        return found

    def _values(self, copies: list[Copy], grid: Grid, cell: Cell, skipped: int) -> np.ndarray:
        """Returns the elements of a cell in float32, in the buffer behind `skipped` bytes."""
        memory = self.memory[skipped:]
        values = np.ndarray((cell.rows, cell.columns), "f4", memory)
        fill(copies, self.mover.casts, grid, cell, values, self._read, memory[values.nbytes :])
        return values

    @contextmanager
    def _finite(self, of: Copy, grid: Grid, cell: Cell) -> Iterator[None]:
        """Raises Overflow in the place of NotFinite. of: a copy of the weight."""
        name = "fp8" if grid.encoding == E4M3 else grid.encoding.name
        try:
            yield
        except NotFinite:
            raise Overflow(
                of.tensor,
                f"{self.mover.sources.paths[of.src_file]}: rows {cell.row} to"
                f" {cell.row + cell.rows - 1} have a value that is infinite or not a number, which"
                f" no block of {name} can hold; leave --quantize out",
            ) from None

    def _put(self, file: int, at: int, view: memoryview) -> None:
        """Writes bytes, and notes that they are written."""
        self._write(file, view, at)
        self.written.append((file, at, len(view), self._crc(view)))

    def chain(self, records: np.ndarray) -> None:
        """Copies short rows of one source file and one cast, in the order of their sources, as many
        at a time as the buffer takes.
        """
        if len(records) == 1:
            self.stage(Cluster([Copy(*records[0].item())]), 0, 1)
            return
        chain = Chain(records)
        if chain.nbytes > min(len(self.memory), 3 * TILE):
            half = len(records) // 2
            self.chain(records[:half])
            self.chain(records[half:])
            return
        self.check()
        c = Copy(*records[0].item())
        (first, _, _), (last, _, nbytes) = chain.spans[[0, -1]].tolist()
        if not is_remote(self.src[c.src_file]):
            self.mover.sources.expect(c.src_file, self.src[c.src_file], first, last + nbytes)
        for at, place, nbytes in chain.spans.tolist():
            self._read(c.src_file, self.memory[place : place + nbytes], at)
        rows = chain.gathered(self.memory)
        if c.cast != SAME:
            source, target = map(numpy_dtype, self.mover.casts[c.cast][:2])
            src = rows.view(source)[None]
            dst = np.ndarray(src.shape, target, self.memory, chain.cast_at)
            try:
                self._place(c, src, dst, 0)
            except Overflow:  # one row at a time, so that the error has the place of the value
                for record in records:
                    self.stage(Cluster([Copy(*record.item())]), 0, 1)
                return
            rows = dst[0].view("u1")
        view, begin = memoryview(rows.data), 0
        for file, at, nbytes in chain.strips.tolist():
            part = view[begin : begin + nbytes]
            self._write(file, part, at)
            begin += nbytes
            if nbytes >= ROW_SUM:
                self.written.append((file, at, nbytes, self._crc(part)))
        self.written += chain.unsummed(ROW_SUM)

    def stage(self, cluster: Cluster, row: int, end: int) -> None:
        """Copies rows [row, end) of a cluster. It reads as many at a time as the buffer takes, and
        places and writes them in tiles (`Cluster.tile`).

        If too few rows fit, it cuts the cluster in halves. Raises UsageError if one element is too
        large.
        """
        most = len(self.memory)
        least = min(
            end - row,
            max(SECTOR // max(c.src_pitch, 1) if c.transposed else 1 for c in cluster.copies),
        )
        terms = {self.mover.casts[c.cast].term for c in cluster.copies if c.cast != SAME} - {""}
        # the factors of a product are read for each step; other terms take scratch memory of it
        large = cluster.transposed or PRODUCT in terms
        tile = 2 * TILE if terms else TILE
        rows = cluster.rows_within(most if large else min(tile, most), end - row)
        if rows < least:
            rows = min(least, cluster.rows_within(most, end - row))
        if rows < least and (halves := cluster.halves()):
            for half in halves:
                self.stage(half, row, end)
            return
        rows = max(rows, 1)
        if cluster.places(rows)[2] > most:
            raise UsageError(
                f"--max-memory leaves {most} bytes a thread, too few for one element; raise it"
            )
        gathers, single = cluster.gathers(rows, self.memory)
        views = cluster.views(rows, self.memory, self.mover.casts, single)
        bands, strips, _ = cluster.places(rows)
        tile = cluster.tile(rows)
        for first in range(row, end, rows):
            self.check()
            last = min(first + rows, end)
            for band, place in zip(cluster.bands, bands, strict=True):
                self._fill(band, place, first, last - first, rows)
            for r in range(first, last, tile):
                count = min(tile, last - r)
                here = slice(r - first, r - first + count)
                for c, src, dst in views:
                    self._place(c, src[here], dst[:count], r)
                for g in gathers:
                    found, to = g.source[here], g.target[:count]
                    # numpy fills a buffer of its own in the mode "raise", or with gaps in `out`
                    if to.flags.c_contiguous:
                        np.take(found, g.columns, axis=1, out=to, mode="clip")
                        continue
                    for source, target in zip(found, to, strict=True):
                        np.take(source, g.columns, out=target, mode="clip")
                for strip, place in zip(cluster.strips, strips, strict=True):
                    self._flush(strip, self.memory[place : place + count * strip.width], r, count)

    def _fill(self, band: Band, place: int, row: int, rows: int, most: int) -> None:
        """Reads a band's spans for `rows` rows from `row` on into a buffer laid out for `most`."""
        at = band.at + row * band.advance
        num, width, _, _ = band.spans(rows)
        _, _, pitch, whole = band.spans(most)
        if whole:
            self._read(band.file, self.memory[place : place + (num - 1) * pitch + width], at)
            return
        fd, path = self.src[band.file], self.mover.sources.paths[band.file]
        places = range(place, place + num * pitch, pitch)
        spans = [(at + i * band.pitch, self.memory[p : p + width]) for i, p in enumerate(places)]
        if band.grow and not is_remote(fd):  # thousands, of which one call reads many
            read_spans(fd, spans, path)
            return
        for start, view in spans:
            read_at(fd, view, start, path)

    def _place(self, c: Copy, src: np.ndarray, dst: np.ndarray, row: int) -> None:
        """Places the values of one copy in the buffer; `row` is their first row.

        Raises Overflow for a value that cannot be written.
        """
        if c.cast == SAME:
            cast(src, dst)
            return
        mover, element = self.mover, self.mover.element(c)
        place = Place(c.src_at + row * c.src_pitch, c.src_pitch, c.src_step)
        try:
            element.fill(src, dst, place, self._bytes, mover.lengths, mover.allow_overflow)
            if not mover.allow_overflow:
                element.refuse_infinite(src, dst, place, self._bytes, mover.lengths)
        except NoValue as e:
            advice = f"; --allow-overflow writes {e.becomes}" if e.becomes else ""
            raise Overflow(c.tensor, f"{mover.sources.paths[c.src_file]}: {e}{advice}") from None

    def _flush(self, strip: Strip, view: memoryview, row: int, rows: int) -> None:
        """Writes a strip's rows in the longest runs that leave the neighbouring bytes alone: all
        rows at once, row by row, or element by element.
        """
        at = strip.at + row * strip.pitch
        if strip.num == 1 and (rows == 1 or strip.width == strip.pitch):
            self._write(strip.file, view, at)
            self.written.append((strip.file, at, len(view), self._crc(view)))
            return
        run = strip.width // strip.num
        for i in range(rows * strip.num):
            to = at + i // strip.num * strip.pitch + i % strip.num * strip.step
            part = view[i * run : i * run + run]
            self._write(strip.file, part, to)
            if run >= ROW_SUM:
                self.written.append((strip.file, to, run, self._crc(part)))
        if run < ROW_SUM:
            extent = (rows - 1) * strip.pitch + (strip.num - 1) * strip.step + run
            self.written.append((strip.file, at, extent, UNKNOWN))
