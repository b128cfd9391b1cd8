"""Reads a checkpoint of any format as logical tensors, whose elements are read when needed."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mckpt.errors import SourceError, UsageError, counted
from mckpt.geometry.box import (
    Box,
    Layout,
    Move,
    Piece,
    Rows,
    Stored,
    by_axes,
    gaps,
    moves,
    overlap,
    row_major,
    whole_box,
)
from mckpt.lazy import numpy as np
from mckpt.storage import descriptors
from mckpt.storage.files import opened
from mckpt.values.adding import Lengths
from mckpt.values.dtypes import NoValue, itemsize, numpy_dtype
from mckpt.values.element import Cast, Element, Place
from mckpt.values.quantisation import Grid, is_bounded

if TYPE_CHECKING:
    import torch

CPU = (1, 0)  # DLPack's number of the kind of device, and of the device
BUILT_IN = 1  # `isbuiltin` of numpy's own dtypes; numpy does not export those of ml_dtypes


class LazyTensor(ABC):
    """The name, shape and dtype of a tensor, and the ways to read its elements: `numpy()`,
    `torch()`, `np.asarray(tensor)` and `torch.from_dlpack(tensor)`. Each call reads them anew.
    """

    name: str
    dtype: str  # such as "bfloat16"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Returns the number of elements along each axis."""

    @abstractmethod
    def _read(self, buffer: np.ndarray | None = None) -> np.ndarray:
        """Returns the bytes of the elements, row by row, as an array of any dtype: the first
        `nbytes` bytes of `buffer`, or new memory.
        """

    @property
    def nbytes(self) -> int:
        """Returns the size of the elements in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a single number, which has no length")
        return self.shape[0]

    def numpy(self, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads and returns the elements; dtypes that numpy lacks are those of ml_dtypes.

        buffer: an array of bytes, whose first `nbytes` bytes receive the elements.
        """
        return self._read(buffer).view(numpy_dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Reads the elements and returns them as a torch tensor."""
        import torch

        raw = torch.from_numpy(self._read().view(np.uint8).reshape(-1))
        return raw.view(getattr(torch, self.dtype)).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the elements for `np.asarray`. Raises ValueError for copy=False, because the
        elements are in a file.
        """
        if copy is False:
            raise ValueError(f"{self.name}: its elements are in a file; leave copy=False out")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, copy: bool | None = None, **_: Any) -> Any:
        """Reads the elements into memory of the CPU and returns a DLPack capsule of them.

        numpy exports no bfloat16 and no 8-bit floats; torch does so if it is installed. Raises
        BufferError if it is not, and for copy=False, because the elements are in a file.
        """
        if copy is False:
            raise BufferError(f"{self.name}: its elements are in a file; leave copy=False out")
        if numpy_dtype(self.dtype).isbuiltin == BUILT_IN:
            return self.numpy().__dlpack__()
        try:
            tensor = self.torch()
        except ImportError:
            raise BufferError(
                f"{self.name} is {self.dtype}, which numpy does not export; install torch, or take"
                " .numpy(), whose dtype is that of ml_dtypes"
            ) from None
        return tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the CPU as DLPack's kind and number of a device."""
        return CPU

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {list(self.shape)}, {self.dtype})"


BLOCK_BYTES = 8 << 20  # of either side that is in memory at once when tensors are scanned
# In bytes. Rows of at least this length are read directly into their place; shorter rows are read
# together through a buffer.
DIRECT = 16 << 10


class LogicalTensor(LazyTensor):
    """One logical tensor, or a box of it. `numpy()` and `torch()` read; slicing does not."""

    def __init__(
        self, reader: Reader, name: str, shape: tuple[int, ...], box: Box | None = None
    ) -> None:
        self._reader, self.name, self._whole = reader, name, shape
        self._box = box or whole_box(shape)
        self._dropped: tuple[int, ...] = ()  # axes that an integer index removed
        self.dtype = reader.dtype(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(self._box.shape) if axis not in self._dropped)

    def __getitem__(self, index: Any) -> LogicalTensor:
        """Returns a box of the tensor, for integers, slices of step 1, and at most one `...`."""
        index = index if isinstance(index, tuple) else (index,)
        axes = [a for a in range(len(self._whole)) if a not in self._dropped]
        if any(i is Ellipsis for i in index):
            at = next(n for n, i in enumerate(index) if i is Ellipsis)
            index = (*index[:at], *(slice(None),) * (len(axes) - len(index) + 1), *index[at + 1 :])
        if len(index) > len(axes):
            raise IndexError(
                f"{self.name} has {len(axes)} axes, and {len(index)} indices were given"
            )
        offset, shape, dropped = list(self._box.offset), list(self._box.shape), list(self._dropped)
        # fewer indices than axes leave the others whole
        for axis, i in zip(axes[: len(index)], index, strict=True):
            if isinstance(i, slice):
                start, stop, step = i.indices(shape[axis])
                if step != 1:
                    raise IndexError(f"{self.name}: slices have step 1 here, not {step}")
                offset[axis], shape[axis] = offset[axis] + start, max(0, stop - start)
            else:
                i = operator.index(i)
                at = i + shape[axis] if i < 0 else i
                if not 0 <= at < shape[axis]:
                    raise IndexError(
                        f"{self.name}: index {i} is outside the {shape[axis]} of axis {axis}"
                    )
                offset[axis], shape[axis] = offset[axis] + at, 1
                dropped.append(axis)
        out = LogicalTensor(self._reader, self.name, self._whole, Box(tuple(offset), tuple(shape)))
        out._dropped = tuple(dropped)
        return out

    @property
    def offset(self) -> float:
        """Returns the number that the stored values have been shifted by."""
        return self._reader.offset(self.name)

    def _read(self, buffer: np.ndarray | None = None) -> np.ndarray:
        return self._reader.read(self.name, self._box, buffer)


class _Held(NamedTuple):
    """Pieces of stored tensors whose values are computed alike; see `Stored.groups`."""

    stored: Stored
    pieces: Sequence[Piece]
    added: int | None  # the number of the piece, if a product is added to it
    row_of: Mapping[tuple[int, int], int]  # layer and expert -> number of the stored tensor


class Reader(Mapping[str, "LogicalTensor"]):
    """A mapping of logical names to `LogicalTensor`.

    It is thread-safe and picklable, because it opens files for each read.
    """

    def __init__(self, layout: Layout, allow_overflow: bool = False) -> None:
        self._layout, self._lengths, self._allow = layout, Lengths(), allow_overflow
        self._stored: dict[str, list[_Held]] = {}
        self._order: dict[str, tuple[str, int, int]] = {}
        rows = []
        for s in layout.stored:
            if s.replica:
                continue
            pairs = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
            row_of = {pair: i for i, pair in enumerate(pairs)}
            for template, pieces, added in s.groups():
                self._stored.setdefault(template, []).append(_Held(s, pieces, added, row_of))
                rows += [(layer, template, expert) for layer, expert in pairs]
        for layer, template, expert in sorted(set(rows)):
            self._order[template.format(layer=layer, expert=expert)] = (template, layer, expert)

    def __getitem__(self, name: str) -> LogicalTensor:
        template, _, _ = self._order[name]
        return LogicalTensor(self, name, self._layout.shapes[template])

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._order

    def template(self, name: str) -> str:
        """Returns the name with {layer} and {expert} in place of its numbers."""
        return self._order[name][0]

    def dtype(self, name: str) -> str:
        """Returns the dtype of the elements, or of the values of block-quantised ones."""
        return self._first(name).stored.dtype

    def offset(self, name: str) -> float:
        """Returns the number that the stored values have been shifted by; see Piece."""
        return self._first(name).pieces[0].offset

    def _first(self, name: str) -> _Held:
        """Returns the first pieces that have elements of a logical tensor."""
        template, layer, expert = self._order[name]
        return next(held for held in self._stored[template] if (layer, expert) in held.row_of)

    def read(self, name: str, box: Box, buffer: np.ndarray | None = None) -> np.ndarray:
        """Returns the bytes of a box, dense, as unsigned integers of the dtype's size.

        buffer: an array whose start receives the bytes. Raises SourceError if the files do not have
        all elements of the box.
        """
        template, layer, expert = self._order[name]
        size = itemsize(self.dtype(name))
        nbytes = math.prod(box.shape) * size
        out = (np.empty(nbytes, "u1") if buffer is None else buffer[:nbytes]).view(f"u{size}")
        into = Piece(template, box, 0, row_major(box.shape))
        covered = 0
        for held in self._stored[template]:
            row = held.row_of.get((layer, expert))
            if row is not None:
                if isinstance(held.pieces, Rows):
                    first, count = box.offset[0], box.shape[0]
                    held = held._replace(pieces=held.pieces.within(first, first + count))
                self._place(held, row, into, out)
                covered += _num_in(held.pieces, box)
        if covered != math.prod(box.shape):
            s = self._first(name).stored
            raise SourceError(
                f"{name}: {s.key} has {covered:,} of the {math.prod(box.shape):,} elements"
                f" {list(box.shape)} from {list(box.offset)} on, and no file has the others"
            )
        return out

    def _place(self, held: _Held, row: int, into: Piece, out: np.ndarray) -> None:
        """Copies the elements that the pieces of one stored tensor have into `out`, which holds the
        box of `into`.
        """
        s, pieces = held.stored, held.pieces
        if not pieces:
            return
        # all pieces of a logical tensor have one offset
        term = "" if held.added is None else s.term
        cast = Cast(s.stored_as, s.dtype, -pieces[0].offset, term)
        element = Element(cast)
        if held.added is not None:
            element = Element.of(cast, s.added[held.added][row])
        elif s.scales:
            element = Element.of(cast, s.scales.grids[row:])
        file, size, wide = int(s.file[row]), itemsize(s.stored_as), out.itemsize
        kinds = [np.dtype(f"u{size}")] * 2 if cast.same else list(map(numpy_dtype, cast[:2]))
        cut = by_axes if cast.term else moves
        if isinstance(pieces, Rows) and not s.scales:
            parts = [(Move(*m), 0) for m in pieces.moves(into).tolist()]
        else:
            parts = s.phased(m for p in pieces for m in cut(p, into))
        spans = list[tuple[int, np.ndarray]]()
        for m, phase in parts:
            at = int(s.at[row]) + m.src_start * size
            direct = m.rows == 1 or m.run * size >= DIRECT
            if cast.same and m.src_step == m.dst_step == 1 and direct:
                for i in range(m.rows):  # without a buffer in between
                    start = m.dst_start + i * m.dst_pitch
                    view = out[start : start + m.run].view("u1")
                    spans.append((at + i * m.src_pitch * size, view))
                continue
            place = Place(at, m.src_pitch * size, m.src_step * size)
            span = (m.rows - 1) * m.src_pitch + (m.run - 1) * m.src_step + 1
            raw = self._bytes(file, at, span * size).view(kinds[0])
            shape = m.rows, m.run
            rows = np.lib.stride_tricks.as_strided(raw, shape, place[1:])
            to = np.lib.stride_tricks.as_strided(
                out[m.dst_start :].view(kinds[1]), shape, (m.dst_pitch * wide, m.dst_step * wide)
            )
            if isinstance(element.term, Grid):
                element = element._replace(term=element.term._replace(phase=phase))
            try:
                element.fill(rows, to, place, self._bytes, self._lengths, self._allow)
            except NoValue as e:
                name = into.tensor.format(layer=s.layer[row], expert=s.expert[row])
                advice = "; --allow-overflow of a conversion or of diff accepts it"
                raise UsageError(
                    f"{name}: {self._layout.files[file]}: {e}{advice if e.becomes else ''}"
                ) from None
        if spans:
            self._fill(file, spans)

    def check_replicas(self, check: Callable[[], None] = lambda: None) -> list[str]:
        """Returns the tensors that are stored several times, on several ranks or under several
        keys, with different values.

        Calls `check` regularly; an exception that it raises ends the search.
        """
        out = []
        for s in self._layout.stored:
            if not s.replica:
                continue
            size = itemsize(s.dtype)
            for row, (layer, expert) in enumerate(
                zip(s.layer.tolist(), s.expert.tolist(), strict=True)
            ):
                for number, p in enumerate(s.pieces):
                    name = p.tensor.format(layer=layer, expert=expert)
                    added = number if number in s.added else None
                    blocks = _blocks(p, max(1, BLOCK_BYTES // size))
                    if self.dtype(name) != s.dtype or not all(
                        self._same(_Held(s, [part], added, {}), row, name, check) for part in blocks
                    ):
                        file = self._layout.files[int(s.file[row])]
                        out.append(
                            f"{name}: its copy in {file} ({s.key}) differs from the one that is"
                            " read"
                        )
        return out

    def _same(self, held: _Held, row: int, name: str, check: Callable[[], None]) -> bool:
        """Returns whether a piece of a stored tensor equals the box that a read returns."""
        check()
        (p,) = held.pieces
        theirs = self.read(name, p.box)
        mine = np.empty_like(theirs)
        self._place(held, row, Piece(p.tensor, p.box, 0, row_major(p.box.shape)), mine)
        return np.array_equal(mine, theirs)

    def unbounded(self) -> list[str]:
        """Returns a sentence for each quantised tensor of which a value is not finite because of
        its scale. Reads the scales, and the elements of those tensors whose scales are large.
        """

        found: dict[str, str] = {}
        for s in self._layout.stored:
            if s.scales is None or s.replica:
                continue
            for row, numbers in enumerate(s.scales.grids.tolist()):
                grid = Grid(*numbers)
                scales = grid.scales(0, -(-s.shape[0] // grid.rows), 0, grid.across, self._bytes)
                if is_bounded(grid, scales):
                    continue
                place = {"layer": s.layer[row], "expert": s.expert[row]}
                for name in {piece.tensor.format(**place) for piece in s.pieces} - found.keys():
                    if text := self._refused(name):
                        found[name] = text
        return list(found.values())

    def _refused(self, name: str) -> str | None:
        """Returns the error of reading a tensor with a value that is not finite, else None."""
        tensor = self[name]
        step = max(1, BLOCK_BYTES * len(tensor) // max(1, tensor.nbytes))
        try:
            for at in range(0, len(tensor), step):
                tensor[at : at + step].numpy()
        except UsageError as error:
            return f"{error}"
        return None

    def padding(self) -> list[str]:
        """Returns a sentence for each stored key whose padding of the vocabulary is not zero. The
        sentence contains the number of rows (or of values, in a flat buffer) that are not zero, and
        the largest value.
        """
        extra: dict[tuple[str, str], tuple[int, float]] = {}
        for s in self._layout.stored:
            if not s.padding or s.view or s.replica:
                continue
            size, width = itemsize(s.stored_as), max(1, s.numel // s.shape[0])
            most = max(1, BLOCK_BYTES // size // width) * width
            free = gaps(s.pieces, s.numel)[0].tolist()
            blocks = [
                (at, min(most, start + length - at))
                for start, length in free
                for at in range(start, start + length, most)
            ]
            for row in range(len(s)):
                for at, length in blocks:
                    start = int(s.at[row]) + at * size
                    raw = self._bytes(int(s.file[row]), start, length * size)
                    filled = raw.reshape(-1, size * width if length % width == 0 else size).any(1)
                    if filled.any():
                        values = np.abs(raw.view(numpy_dtype(s.dtype)).astype("f4"))
                        place = s.key, "row" if len(s.shape) > 1 else "value"
                        count, largest = extra.get(place, (0, 0.0))
                        extra[place] = count + int(filled.sum()), max(largest, float(values.max()))
        return [
            f"{key}: {counted(count, noun)} beyond the vocabulary {'is' if count == 1 else 'are'}"
            f" not zero (largest {largest:.3g}), and {'is' if count == 1 else 'are'} dropped"
            for (key, noun), (count, largest) in extra.items()
        ]

    def _bytes(self, file: int, at: int, nbytes: int, own: memoryview | None = None) -> np.ndarray:
        """Returns bytes of a file, in the caller's memory or in new memory."""
        out = np.empty(nbytes, "u1") if own is None else np.asarray(own)
        self._fill(file, [(at, out)])
        return out

    def _fill(self, file: int, spans: Iterable[tuple[int, np.ndarray]]) -> None:
        """Fills arrays of bytes, each from its byte of a file on."""
        path = self._layout.files[file]
        with opened(path) as fd:
            for at, out in spans:
                got, nbytes = 0, len(out)
                while got < nbytes and (n := descriptors.preadv(fd, [out[got:].data], at + got)):
                    got += n
                if got < nbytes:
                    raise SourceError(
                        f"{path}: ends {nbytes - got:,} bytes short of byte {at + nbytes:,}:"
                        " truncated since its header was read"
                    )


def _num_in(pieces: Sequence[Piece], box: Box) -> int:
    """Returns the number of elements of pieces that are in a box of their tensor."""
    if isinstance(pieces, Rows):
        offset, shape = pieces.boxes()
        low = np.maximum(offset, box.offset)
        high = np.minimum(offset + shape, np.add(box.offset, box.shape))
        return int(np.maximum(high - low, 0).prod(1).sum())
    inner = (overlap(piece.box, box) for piece in pieces)
    return sum(math.prod(one.shape) for one in inner if one is not None)


def _blocks(piece: Piece, most: int) -> Iterator[Piece]:
    """Yields the piece in parts of at most `most` elements. It is cut along its outermost axes, so
    that each part is read in one short span.
    """
    shape, numel = piece.box.shape, math.prod(piece.box.shape)
    if numel <= most:
        yield piece
        return
    axis = max((a for a, n in enumerate(shape) if n > 1), key=lambda a: piece.strides[a])
    step = max(1, most * shape[axis] // numel)
    for at in range(0, shape[axis], step):
        offset, size = list(piece.box.offset), list(shape)
        offset[axis], size[axis] = offset[axis] + at, min(step, shape[axis] - at)
        part = piece._replace(
            box=Box(tuple(offset), tuple(size)), start=piece.start + at * piece.strides[axis]
        )
        yield from _blocks(part, most)
