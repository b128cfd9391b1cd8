"""Writes the tensors of a live model into the files of a Hugging Face directory: each tensor whole,
by one rank, which gathers its parts from the others.

    parts on all ranks --Sync--> tensors of this rank --pieces--> pinned memory --> its files

A rank that wrote its own rows and columns instead would write a few KiB at a time, and wait for the
others in each file. Ranks own neighbouring tensors, and all files grow at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

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
from mckpt.live.buckets import FILE
from mckpt.live.memory import Memory
from mckpt.live.model import ranks_of
from mckpt.live.syncing import Sync
from mckpt.live.together import rank_and_world, refusal_of
from mckpt.values.sizes import LEAST_MEMORY

if TYPE_CHECKING:
    import torch

PIECE = 16 << 20  # bytes that a thread copies and writes at a time
BUCKET = 256 << 20  # bytes of a call of `Sync`, of which the device holds two
# file, first byte, and the bytes that come there
Piece = tuple[int, int, "torch.Tensor"]


class GatheredFiles:
    """The tensors of this rank in the files of a plan."""

    def __init__(self, plan: Plan, model: Checkpoint, memory: Memory, how: RunSettings) -> None:
        """All ranks make it."""
        import torch

        copies = plan.joined.copies[plan.joined.copies["src_file"] < len(ranks_of(model).files)]
        files = np.unique(copies["dst_file"]).tolist()
        rows = [(file, at, row) for file in files for row, at in tensors_of(plan.outputs[file])]
        starts = np.array([(file << FILE) + at for file, at, _ in rows], "i8")
        places = (copies["dst_file"].astype("i8") << FILE) + copies["dst_at"]
        # others are carried from files
        live = np.unique(np.searchsorted(starts, places, "right") - 1).tolist()
        self.places = {rows[i][-1].key: rows[i] for i in live}
        mine = [row for *_, row in self.places.values()]
        owned = _owned(mine, rank_and_world()[1])
        # which also has a row of the largest tensor, such as one expert of all that lie together
        most = max(BUCKET, *(row.nbytes // max(row.shape[0], 1) for row in mine if row.shape))
        args = plan.target, most, owned.__getitem__, how.allow_overflow
        self.sync = Sync.of_files(memory, model, *args)
        wanted = {row.key: (getattr(torch, row.dtype), tuple(row.shape)) for row in mine}
        assert self.sync.tensors == wanted, "a Sync has the tensors of the plan"
        self.threads, self.device = how.threads, memory.device
        self.piece = max(min(PIECE, how.max_memory // how.threads), LEAST_MEMORY)
        self.held: list[Piece] | None = None  # in the memory of the host

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
        """Yields the pieces of each tensor of this rank as they come."""
        import torch

        for name, tensor, first, shape in self.sync():
            file, at, row = self.places[name]
            at += first * (row.nbytes // shape[0]) if shape else 0
            for piece in tensor.reshape(-1).view(torch.uint8).split(self.piece):
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
                    buffers.pinned = torch.empty(self.piece, dtype=torch.uint8, pin_memory=True)
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


def gathered_files(
    plan: Plan, model: Checkpoint, memory: Memory, how: RunSettings
) -> GatheredFiles | None:
    """Returns what writes the tensors of a plan whole; None if its elements are computed on their
    way: of an adapter that is merged, or of weights that are quantised.
    """
    target, plain = plan.target, not isinstance(model, AdapterCheckpoint)
    if target.format != formats.HUGGING_FACE or target.quantize or not plain:
        return None
    return GatheredFiles(plan, model, memory, how)


def _owned(rows: Sequence[Row], world: int) -> list[list[str]]:
    """Returns the names of the tensors that each rank writes: neighbours of as many bytes."""
    total, before = max(sum(row.nbytes for row in rows), 1), 0
    owned: list[list[str]] = [[] for _ in range(world)]
    for row in rows:
        owned[min(before * world // total, world - 1)].append(row.key)
        before += row.nbytes
    return owned
