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

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal import isal_zlib

from mckpt import formats
from mckpt.adapters.checkpoint import AdapterCheckpoint
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.moving import RunSettings
from mckpt.conversion.planning import Plan
from mckpt.execute.checksums import UNKNOWN
from mckpt.execute.files import write_at
from mckpt.execute.piecewise import Batches
from mckpt.formats.hf_files import Row, tensors_of
from mckpt.geometry.join import UNSCALED
from mckpt.live.buckets import FILE
from mckpt.live.memory import Memory
from mckpt.live.model import ranks_of
from mckpt.live.syncing import Sync
from mckpt.live.together import rank_and_world, refusal_of
from mckpt.values.dtypes import itemsize
from mckpt.values.element import Cast
from mckpt.values.sizes import LEAST_MEMORY

if TYPE_CHECKING:
    import torch

PIECE = 16 << 20  # bytes that a thread copies and writes at a time
BUCKET = 256 << 20  # bytes of a call of `Sync`, of which the device holds two
# file, first byte, and the bytes that come there
Piece = tuple[int, int, "torch.Tensor"]


class Pieces:
    """What this rank writes into the files of a plan."""

    def __init__(self, memory: Memory, how: RunSettings) -> None:
        self.memory, self.device, self.threads = memory, memory.device, how.threads
        self.size = max(min(PIECE, how.max_memory // how.threads), LEAST_MEMORY)
        self.held: list[Piece] | None = None  # in the memory of the host

    def ranges(self) -> Iterator[Piece]:
        """Yields ranges of the files, of any sizes, as they are there to be written."""
        raise NotImplementedError  # in the two classes below

    def hold(self) -> None:
        """Copies the tensors of this rank to the host, so that the model may change. All ranks call
        it.
        """
        held: list[Piece] = []
        self._each(lambda file, at, piece: held.append((file, at, piece.clone())), self._pieces())
        self.held = held

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

        buffers = threading.local()

        def run(piece: Piece, ready: Any) -> None:
            file, at, values = piece
            if ready is not None:
                if not hasattr(buffers, "stream"):
                    buffers.stream = torch.cuda.Stream(self.device)
                    buffers.pinned = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
                pinned = buffers.pinned[: len(values)]
                with torch.cuda.stream(buffers.stream):
                    ready.wait()
                    pinned.copy_(values, non_blocking=True)
                buffers.stream.synchronize()
                values = pinned
            work(file, at, values)

        failed: Exception | None = None
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(self.threads) as pool:
            for piece in pieces:
                if failed is not None:
                    continue
                on_device = piece[2].is_cuda
                ready = torch.cuda.current_stream().record_event() if on_device else None
                pending.append(pool.submit(run, piece, ready))
                del piece
                while len(pending) > 2 * self.threads and failed is None:
                    failed = refusal_of(pending.popleft().result)
            for one in pending:
                failed = failed or refusal_of(one.result)
        if failed is not None:
            raise failed


class Gathered(Pieces):
    """The tensors of a Hugging Face directory that this rank writes."""

    def __init__(self, plan: Plan, model: Checkpoint, memory: Memory, how: RunSettings) -> None:
        """All ranks make it."""
        import torch

        super().__init__(memory, how)
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
        most = max(BUCKET, *(row.nbytes // max(row.shape[0], 1) for row in listed if row.shape))
        args = plan.target, most, owned.__getitem__, how.allow_overflow
        self.sync = Sync.of_files(memory, model, *args)
        wanted = {row.key: (getattr(torch, row.dtype), tuple(row.shape)) for row in listed}
        assert self.sync.tensors == wanted, "a Sync has the tensors of the plan"

    def ranges(self) -> Iterator[Piece]:
        import torch

        for name, tensor, first, shape in self.sync():
            file, at, row = self.places[name]
            at += first * (row.nbytes // shape[0]) if shape else 0
            yield file, at, tensor.reshape(-1).view(torch.uint8)


class Own(Pieces):
    """The weights of this rank, of which the files have ranges as they are."""

    def __init__(self, spans: Spans, memory: Memory, how: RunSettings) -> None:
        super().__init__(memory, how)
        self.spans = spans

    def ranges(self) -> Iterator[Piece]:
        self.memory.refresh()
        for file, at, place, nbytes in zip(
            *(part.tolist() for part in self.spans[1:]), strict=True
        ):
            yield file, at, self.memory.view(place, "uint8", (nbytes,), (1,))


class Spans(NamedTuple):
    """Ranges of the memory of ranks, which become ranges of files as they are."""

    source: np.ndarray  # the number of the file that stands for the memory of a rank
    file: np.ndarray
    at: np.ndarray  # first byte in the file
    place: np.ndarray  # first byte in the memory
    nbytes: np.ndarray


def _spans(copies: np.ndarray, casts: Sequence[Cast]) -> Spans | None:
    """Returns the ranges that copies write; None if they are more than ranges. No byte is written
    twice, so rows of several copies at one distance make a range if they have as many bytes:

        q rows, k rows, v rows of a group, again and again --> one weight
    """
    # 0 if the value of an element changes
    size = np.array([itemsize(c.source) if c.same else 0 for c in casts])[copies["cast"]]
    run, rows, moved = copies["run"] * size, copies["rows"], copies["dst_at"] - copies["src_at"]
    plain = (copies["src_step"] == size) & (copies["dst_step"] == size) & (size > 0)
    plain &= (rows == 1) | (copies["src_pitch"] == copies["dst_pitch"])
    if not (plain & (copies["grid"] == UNSCALED)).all():
        return None
    order = np.lexsort((copies["src_at"], moved, copies["dst_file"], copies["src_file"]))
    keys = np.stack([moved, copies["dst_file"], copies["src_file"]])[:, order]
    start, nbytes = copies["src_at"][order], (rows * run)[order]
    end = start + ((rows - 1) * copies["src_pitch"] + run)[order]
    other = (np.diff(keys, axis=1, prepend=-1) != 0).any(axis=0)
    other[:1] = True
    # ends of other keys lie behind all of these
    apart = np.cumsum(other) * (int(end.max(initial=0)) + 1)
    before = np.maximum.accumulate(end + apart)
    first = np.flatnonzero(other | (start + apart >= np.roll(before, 1)))
    length = np.maximum.reduceat(end, first) - start[first]
    if (np.add.reduceat(nbytes, first) != length).any():
        return None
    chosen = copies[order][first]
    return Spans(chosen["src_file"], chosen["dst_file"], chosen["dst_at"], start[first], length)


def pieces_of(plan: Plan, model: Checkpoint, memory: Memory, how: RunSettings) -> Pieces | None:
    """Returns what writes the elements of a plan that the ranks hold; None if their values change
    on the way, or if they come as rows into files that are no Hugging Face directory.
    """
    if plan.target.format == formats.HUGGING_FACE:
        if plan.target.quantize or isinstance(model, AdapterCheckpoint):
            return None
        return Gathered(plan, model, memory, how)
    copies = _live(plan, model)
    spans = _spans(copies, plan.joined.casts) if len(copies) else None
    if spans is None:
        return None
    ranks, (rank, _) = ranks_of(model), rank_and_world()
    held = np.array([ranks.rank_of(file) == rank for file in range(len(ranks.files))])
    return Own(Spans(*(part[held[spans.source]] for part in spans)), memory, how)


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
