"""Compares the kernels of mckpt.live.kernels, in Triton's interpreter, with the functions of torch.

It prints `alike` for each case: dtypes and shares of changes, of both ranks of a bucket with rows,
columns, transposed and tiny tensors.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from mckpt.geometry.join import COPY
from mckpt.live import changes
from mckpt.live.buckets import Bucket, ExportedTensor

# rank, tensor, rows, run, first element in the tensor, pitch, step
COPIES = [
    *[(0, 0, 30, 100, 0, 100, 1), (0, 1, 50, 40, 0, 80, 1), (0, 2, 1, 3, 0, 3, 1)],
    *[(0, 3, 1, 1, 0, 1, 1), (0, 4, 70, 60, 0, 1, 70), (0, 2, 1, 5, 3, 5, 1)],
    *[(1, 0, 34, 100, 3000, 100, 1), (1, 1, 50, 40, 40, 80, 1), (1, 5, 1, 4096, 0, 4096, 1)],
]
SHAPES = [(64, 100), (50, 80), (8,), (1,), (60, 70), (4096,)]


def bucket_of(dtype: str) -> tuple[Bucket, list[int]]:
    """Returns a bucket, and the elements of each rank's segment."""
    width = getattr(torch, dtype).itemsize
    tensors, byte = [], 0
    for number, shape in enumerate(SHAPES):
        tensors.append(
            ExportedTensor(f"t{number}", dtype, shape, 0, shape, byte, False, (), frozenset())
        )
        byte += int(np.prod(shape)) * width
    copies, at, ends = np.zeros(len(COPIES), COPY), [], [0, 0]
    for number, (rank, tensor, rows, run, first, pitch, step) in enumerate(COPIES):
        copies[number]["rows"], copies[number]["run"] = rows, run
        copies[number]["dst_at"] = tensors[tensor].at + first * width
        copies[number]["dst_pitch"], copies[number]["dst_step"] = pitch * width, step * width
        at.append(rank * 16384 * width + ends[rank] * width)
        ends[rank] += rows * run
    segments = {rank: (rank * 16384 * width, end * width) for rank, end in enumerate(ends)}
    columns = [np.array([c[i] for c in COPIES]) for i in (1, 0)]
    nbytes = (16384 + ends[1]) * width
    to = frozenset({0, 1})
    bucket = Bucket(tensors, to, copies, *columns, np.array(at), np.zeros(9), segments, nbytes)
    return bucket, ends


def main() -> None:
    for dtype in ("uint8", "bfloat16", "float32"):
        bucket, sizes = bucket_of(dtype)
        for rank, size in enumerate(sizes):
            places = changes.Places(bucket, rank, torch.device("cpu"))
            drawn = torch.Generator().manual_seed(rank)
            held = torch.randint(-99, 99, (size,), generator=drawn).to(places.bits)
            for share in (0.02, 0.6):
                new = held + (torch.rand(size, generator=drawn) < share).to(places.bits)
                results = []
                for kernels in (True, False):
                    changes.has_kernels = lambda *_, has=kernels: has  # type: ignore[assignment]
                    found = places.changes(new, held, rank, size)
                    count = int((new != held).sum())
                    where, bits = places.views(torch.zeros(1 << 20, dtype=torch.uint8), count)
                    found.write(where, bits)
                    results.append((found.tally, where, bits, places.indices(where)))
                assert places.counts(results[0][0].numpy()) == {rank: count}
                assert all(a.equal(b) for a, b in zip(*results, strict=True)), (dtype, rank, share)
                print("alike")


if __name__ == "__main__":
    main()
