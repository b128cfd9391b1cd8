"""Writes a live model straight from its device into files, where no value changes on the way.

    weights of this rank -------------------\
                                             pieces --> pinned memory --> files
    parts on all ranks --Sync--> tensors ---/

The checkpoint of another format may have the weights as they lie on the ranks. A Hugging Face
directory has whole tensors, and a rank that wrote its rows and columns of these would write a few
KiB at a time, and wait for the others in each file. So each tensor is gathered by the rank that
writes it. Ranks own neighbouring tensors, and all files grow at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from isal import isal_zlib

from mckpt import formats
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.moving import RunSettings
from mckpt.conversion.planning import Plan
from mckpt.errors import MckptError
from mckpt.execute.checksums import UNKNOWN
from mckpt.execute.files import write_at
from mckpt.execute.piecewise import Batches
from mckpt.formats.hf_files import Row, tensors_of
from mckpt.geometry.join import UNSCALED
from mckpt.live.buckets import FILE
from mckpt.live.devices import PIECE, ToHost
from mckpt.live.memory import Memory
from mckpt.live.model import ranks_of
from mckpt.live.syncing import Sync
from mckpt.live.together import rank_and_world, refusal_of
from mckpt.values.dtypes import itemsize
from mckpt.values.element import Cast
from mckpt.values.sizes import LEAST_MEMORY

if TYPE_CHECKING:
    import torch

BUCKET = 256 << 20  # bytes that a `Sync` has on its way
# file, first byte, and the bytes that come there
Piece = tuple[int, int, "torch.Tensor"]


class Pieces:
    """Writes the part of this rank into the files of a plan. This class writes nothing."""

    def __init__(self, memory: Memory, how: RunSettings, covered: np.ndarray) -> None:
        """covered: a mask of the copies of this rank that need not be done."""
        self.memory, self.device, self.threads = memory, memory.device, how.threads
        self.size = max(min(PIECE, how.max_memory // how.threads), LEAST_MEMORY)
        self.held: list[Piece] | None = None  # in the memory of the host
        self.covered = covered

    def make_room(self) -> None:
        """Makes sure that the device has the memory that this needs, before other ranks wait."""

    def ranges(self) -> Iterator[Piece]:
        """Yields ranges of the files, of any sizes, as they are there to be written."""
        yield from ()

    def hold(self) -> None:
        """Copies the tensors of this rank to the host, so that the model may change. All ranks call
        it.
        """
        self.held = held = []
        self._each(lambda file, at, piece: held.append((file, at, piece.clone())), self._pieces())

    def close(self) -> None:
        """Frees the copies."""
        if self.held is not None:
            self.held.clear()

    def write(self, batches: Batches) -> None:
        """Writes the tensors of this rank. All ranks call it, unless the tensors are held."""
        summing, targets = batches.how.checksum == "crc32", batches.targets

        def put(file: int, at: int, piece: torch.Tensor) -> None:
            view = memoryview(piece.numpy().data)
            with targets.opened([file]) as fds:
                write_at(fds[file], view, at, targets.paths[file])
            crc = isal_zlib.crc32(view) if summing else UNKNOWN
            batches.ranges[file].append((file, at, len(view), crc))

        self._each(put, self._pieces() if self.held is None else self.held)

    def _pieces(self) -> Iterator[Piece]:
        for file, at, values in self.ranges():
            for piece in values.split(self.size):
                yield file, at, piece
                at += len(piece)

    def _each(
        self, work: Callable[[int, int, torch.Tensor], None], pieces: Iterable[Piece]
    ) -> None:
        """Calls a function for each piece, which lies in the memory of the host only meanwhile.

        An error is raised when all pieces have come, because the other ranks send theirs on.
        """
        import torch

        host = ToHost(self.size)
        failed: Exception | None = None
        pending: deque[Future[None]] = deque()

        def run(file: int, at: int, values: torch.Tensor, ready: Any) -> None:
            work(file, at, host(values, ready))

        def begin(piece: Piece) -> None:
            on_device = piece[2].is_cuda
            ready = torch.cuda.current_stream().record_event() if on_device else None
            pending.append(pool.submit(run, *piece, ready))
            while len(pending) > 2 * self.threads:
                pending.popleft().result()

        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for piece in pieces:
                    failed = failed or refusal_of(partial(begin, piece))
                    del piece
            except MckptError as error:
                failed = failed or error
            for one in pending:
                failed = failed or refusal_of(one.result)
        if failed is not None:
            raise failed


class Gathered(Pieces):
    """The tensors of a Hugging Face directory that this rank writes."""

    def __init__(
        self, plan: Plan, model: Checkpoint, memory: Memory, how: RunSettings, count: int
    ) -> None:
        """count: copies of this rank. All ranks make it."""
        import torch

        super().__init__(memory, how, np.ones(count, bool))
        copies = _live(plan, model)
        files = np.unique(copies["dst_file"]).tolist()
        rows = [(file, at, row) for file in files for row, at in tensors_of(plan.outputs[file])]
        starts = np.array([(file << FILE) + at for file, at, _ in rows], "i8")
        places = (copies["dst_file"].astype("i8") << FILE) + copies["dst_at"]
        # others are carried from files
        live = np.unique(np.searchsorted(starts, places, "right") - 1).tolist()
        self.places = {rows[i][-1].key: rows[i] for i in live}
        listed = [row for *_, row in self.places.values()]
        owned = _owned(listed, rank_and_world()[1])
        # which also has a row of the largest tensor, such as one expert of all that lie together
        most = max([BUCKET, *(row.nbytes // row.shape[0] for row in listed if row.shape)])
        args = plan.target, most, owned.__getitem__, how.allow_overflow
        self.sync = Sync.of_files(memory, model, *args)
        wanted = {row.key: (getattr(torch, row.dtype), tuple(row.shape)) for row in listed}
        if self.sync.tensors != wanted:
            raise MckptError("the tensors of a Sync are not those of the plan; report this")
        self.room = 4 * most

    def make_room(self) -> None:
        import torch

        torch.empty(self.room, dtype=torch.uint8, device=self.device)

    def ranges(self) -> Iterator[Piece]:
        import torch

        for name, tensor, first, shape in self.sync():
            file, at, row = self.places[name]
            at += first * (row.nbytes // shape[0]) if shape else 0
            yield file, at, tensor.reshape(-1).view(torch.uint8)


class Own(Pieces):
    """The weights of this rank, or some of them, of which the files have ranges as they are."""

    def __init__(self, plan: Plan, copies: np.ndarray, memory: Memory, how: RunSettings) -> None:
        """copies: those of this rank."""
        covered, *self.spans = _spans(copies, plan.joined.casts)
        super().__init__(memory, how, covered)

    def ranges(self) -> Iterator[Piece]:
        self.memory.refresh()
        for file, at, place, nbytes in zip(*(part.tolist() for part in self.spans), strict=True):
            yield file, at, self.memory.view(place, "uint8", (nbytes,), (1,))


def _spans(copies: np.ndarray, casts: Sequence[Cast]) -> tuple[np.ndarray, ...]:
    """Returns a mask of the copies that together write ranges of a weight as they are, and of each
    range the file, the first byte in the file and in the memory of the rank, and the bytes.

    No byte is written twice, so rows of several copies at one distance make a range if they have as
    many bytes:

        q rows, k rows, v rows of a group, again and again --> one weight
    """
    # 0 if the value of an element changes
    size = np.array([itemsize(c.source) if c.same else 0 for c in casts])[copies["cast"]]
    plain = (copies["src_step"] == size) & (copies["dst_step"] == size) & (size > 0)
    plain &= (copies["rows"] == 1) | (copies["src_pitch"] == copies["dst_pitch"])
    plain &= copies["grid"] == UNSCALED
    moved = copies["dst_at"] - copies["src_at"]
    order = np.lexsort((copies["src_at"], moved, copies["dst_file"], ~plain))
    order = order[: int(plain.sum())]
    covered = np.zeros(len(copies), bool)
    if not len(order):
        return covered, *[np.zeros(0, "i8")] * 4
    chosen, run = copies[order], copies["run"][order] * size[order]
    start, nbytes = chosen["src_at"], chosen["rows"] * run
    end = start + (chosen["rows"] - 1) * chosen["src_pitch"] + run
    other = (np.diff(moved[order], prepend=0) != 0) | (np.diff(chosen["dst_file"], prepend=0) != 0)
    # ends of other distances and files lie before all of these
    apart = np.cumsum(other) * (int(end.max()) + 1)
    before = np.roll(np.maximum.accumulate(end + apart), 1)
    before[0] = 0
    starts = other | (start + apart >= before)
    starts[0] = True
    first = np.flatnonzero(starts)
    length = np.maximum.reduceat(end, first) - start[first]
    full = np.add.reduceat(nbytes, first) == length
    covered[order] = full[np.cumsum(starts) - 1]
    one = chosen[first]
    columns = one["dst_file"], one["dst_at"], one["src_at"], length
    return covered, *(column[full] for column in columns)


def pieces_of(
    plan: Plan, model: Checkpoint | None, memory: Memory, how: RunSettings, copies: np.ndarray
) -> Pieces:
    """Returns what writes elements of a plan whose values do not change on the way.

    model: as it is; None if adapters are merged into it on the way, or left out. copies: those of
    this rank that read its memory.
    """
    if plan.target.format != formats.HUGGING_FACE:
        return Own(plan, copies, memory, how)
    if model is None or plan.target.quantize:
        return Pieces(memory, how, np.zeros(len(copies), bool))
    return Gathered(plan, model, memory, how, len(copies))


def _live(plan: Plan, model: Checkpoint) -> np.ndarray:
    """Returns the copies of a plan that read the memory of ranks, and no files."""
    copies: np.ndarray = plan.joined.copies
    return copies[copies["src_file"] < len(ranks_of(model).files)]


def _owned(rows: Sequence[Row], world: int) -> list[list[str]]:
    """Returns the names of the tensors that each rank writes: neighbours of as many bytes."""
    total, before = max(sum(row.nbytes for row in rows), 1), 0
    owned: list[list[str]] = [[] for _ in range(world)]
    for row in rows:
        owned[min(before * world // total, world - 1)].append(row.key)
        before += row.nbytes
    return owned
