"""Compares the kernels of mckpt.live.kernels, in Triton's interpreter, and the functions of torch
with numbers of Python.

It prints `alike` for each case: dtypes and shares of changes, of both ranks of a bucket with rows,
columns, transposed and tiny tensors, packed and where the weights are; and blocks of matrices that
are quantised into a buffer with gaps.
"""

from __future__ import annotations

import os
from copy import copy

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from mckpt.geometry.join import COPY
from mckpt.live import changes, quantising
from mckpt.live.buckets import Bucket, ExportedTensor
from mckpt.values.quantisation import E2M1

# rank, tensor, rows, run, first element in the tensor, pitch, step
COPIES = [
    *[(0, 0, 30, 100, 0, 100, 1), (0, 1, 50, 40, 0, 80, 1), (0, 2, 1, 3, 0, 3, 1)],
    *[(0, 3, 1, 1, 0, 1, 1), (0, 4, 70, 60, 0, 1, 70), (0, 2, 1, 5, 3, 5, 1)],
    *[(1, 0, 34, 100, 3000, 100, 1), (1, 1, 50, 40, 40, 80, 1), (1, 5, 1, 4096, 0, 4096, 1)],
    (1, 6, 3, 2500, 0, 2500, 1),
]
SHAPES = [(64, 100), (50, 80), (8,), (1,), (60, 70), (4096,), (3, 2500)]


GAPS = 0, 3, 0, 0, 8, 0, 2, 0, 0, 7  # elements of a weight between two rows of each copy


class Weights:
    """A memory that has the weights of a rank as one."""

    @staticmethod
    def located(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(places), "i8"), places


def bucket_of(dtype: str) -> Bucket:
    width = getattr(torch, dtype).itemsize
    tensors, byte = [], 0
    for number, shape in enumerate(SHAPES):
        tensors.append(
            ExportedTensor(f"t{number}", dtype, shape, 0, shape, byte, False, (), frozenset())
        )
        byte += int(np.prod(shape)) * width
    copies, at, ends, sources = np.zeros(len(COPIES), COPY), [], [0, 0], [0, 0]
    for number, (rank, tensor, rows, run, first, pitch, step) in enumerate(COPIES):
        one, gap = copies[number], GAPS[number]
        one["rows"], one["run"] = rows, run
        one["dst_at"] = tensors[tensor].at + first * width
        one["dst_pitch"], one["dst_step"] = pitch * width, step * width
        one["src_at"] = sources[rank] * width
        one["src_pitch"], one["src_step"] = (run + gap) * width, width
        at.append(rank * 16384 * width + ends[rank] * width)
        ends[rank] += rows * run
        sources[rank] += rows * (run + gap)
    segments = {rank: (rank * 16384 * width, end * width) for rank, end in enumerate(ends)}
    columns = [np.array([c[i] for c in COPIES]) for i in (1, 0)]
    nbytes = (16384 + ends[1]) * width
    to = frozenset({0, 1})
    return Bucket(
        tensors, to, copies, *columns, np.array(at), np.zeros(len(COPIES)), segments, nbytes
    )


def weight_of(bucket: Bucket, rank: int, segment: torch.Tensor) -> torch.Tensor:
    """Returns what has the elements of a segment where the copies read them, and others between."""
    weight, done, width = torch.full((20000,), 77, dtype=segment.dtype), 0, segment.itemsize
    for c in bucket.copies[bucket.rank == rank]:
        start, pitch = int(c["src_at"]) // width, int(c["src_pitch"]) // width
        for row in range(c["rows"]):
            part = segment[done : done + int(c["run"])]
            weight[start + row * pitch :][: len(part)] = part
            done += len(part)
    return weight


def elements_of(bucket: Bucket, rank: int) -> list[tuple[int, int]]:
    """Returns the tensor and the index of each element of a segment."""
    return [
        (tensor, first + row * pitch + column * step)
        for of, tensor, rows, run, first, pitch, step in COPIES
        if of == rank
        for row in range(rows)
        for column in range(run)
    ]


def mixed(index: int, bits: int) -> int:
    """Returns the number of an element in a digest, by numbers of Python."""
    most = (1 << 64) - 1
    number = ((index + 1) * changes.STEPS[0] + bits * changes.STEPS[1]) & most
    signed = number - (1 << 64) * (number >> 63)
    number = ((number ^ (signed >> 31)) * changes.STEPS[2]) & most
    signed = number - (1 << 64) * (number >> 63)
    return (number ^ (signed >> 29)) & most


def main() -> None:
    for dtype in ("uint8", "bfloat16", "float32"):
        bucket = bucket_of(dtype)
        for rank in (0, 1):
            places = changes.Places(bucket, rank, Weights)  # type: ignore[arg-type]
            elements = elements_of(bucket, rank)
            drawn = torch.Generator().manual_seed(rank)
            size = (places.count,)
            for share in (0, 0.02, 0.6):
                cases = []
                for _ in range(2):  # buckets of a round
                    before = torch.randint(-99, 99, size, generator=drawn).to(places.bits)
                    changed = torch.rand(size, generator=drawn) < share
                    cases.append((before, before + changed.to(places.bits)))
                expect(places, rank, elements, cases[:1], weight_of(bucket, rank, cases[0][1]))
                both = torch.cat([weight_of(bucket, rank, new) for _, new in cases])
                expect(places, rank, elements, cases, both)
                print("alike")
    for block, dtype in (((128, 128), torch.float32), ((1, 32), torch.uint8)):
        expect_codes(block, dtype)
        print("alike")
    expect_halves()
    print("alike")


def expect_halves() -> None:
    """Quantises matrices to nvfp4 by the kernel and by torch. The scales are powers of two, because
    the interpreter rounds to float8 in its own way; the codes are of any values, and of middles.
    """
    shape, drawn, found = (3, 20, 160), torch.Generator().manual_seed(0), []
    matrices = torch.randint(-48, 49, shape, generator=drawn) / 8
    matrices[0] += torch.rand(shape[1:], generator=drawn) / 16
    matrices = matrices.clamp(-6, 6) * torch.tensor([0.25, 1, 64])[:, None, None]
    matrices[..., ::16] = torch.tensor([1.5, 6, -384])[:, None, None]
    matrices[1, 7, 9] = float("nan")
    overall = torch.tensor([[64.0], [4], [0.25]])
    for has in (True, False):
        quantising.has_kernels = lambda *_: has  # type: ignore[assignment]  # noqa: B023
        codes = torch.zeros(6000, dtype=torch.uint8).as_strided((3, 20, 80), (1700, 80, 1), 5)
        scales = torch.zeros(900, dtype=torch.float8_e4m3fn).as_strided((3, 20, 10), (230, 10, 1))
        bad = quantising.quantise(matrices, codes, scales, (1, 16), overall)
        assert bad.tolist() == [0, 1, 0]
        found.append([codes[::2].clone(), scales[::2].float()])
    assert all(map(torch.equal, *found))
    low, high = found[0][0] & 15, found[0][0] >> 4
    sizes = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = torch.stack([sizes[low.long()], sizes[high.long()]], -1).reshape(2, 20, 160)
    values *= found[0][1].repeat_interleave(16, 2) / overall[::2, :, None]
    assert ((values - matrices[::2]).abs() <= torch.tensor([0.25, 64])[:, None, None]).all()


def expect_codes(block: tuple[int, int], dtype: torch.dtype) -> None:
    """Quantises matrices by the kernel and by torch. All values are codes of float8, because the
    interpreter rounds to float8 in its own way, and 448, the largest of them, is in each block.
    """
    shape = 3, 200, 320
    drawn = torch.randint(0, 0x7F, shape, generator=torch.Generator().manual_seed(0))
    matrices = drawn.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    matrices[:, :: block[0], :: block[1]] = 448
    matrices[1, 70, 3] = float("inf")
    grid, found = quantising.grid_of(shape[1:], block), []
    for has in (True, False):
        quantising.has_kernels = lambda *_: has  # type: ignore[assignment]  # noqa: B023
        memory = torch.zeros(200000, dtype=torch.float8_e4m3fn), torch.zeros(8000, dtype=dtype)
        codes = memory[0].as_strided(shape, (shape[1] * shape[2] + 48, shape[2], 1), 16)
        scales = memory[1].as_strided((3, *grid), (grid[0] * grid[1] + 5, grid[1], 1), 3)
        bad = quantising.quantise(matrices, codes, scales, block)
        assert bad.tolist() == [0, 1, 0]
        assert codes[::2].to(torch.bfloat16).equal(matrices[::2])
        scales[1], codes[1] = 0, 0  # whose values have no codes
        found.append([one.view(torch.uint8) for one in memory])
    assert all(map(torch.equal, *found))


def expect(
    places: changes.Places,
    rank: int,
    elements: list[tuple[int, int]],
    cases: list[tuple[torch.Tensor, torch.Tensor]],
    weights: torch.Tensor,
) -> None:
    """Compares what the kernels, and for one bucket the functions of torch, say of buckets with
    numbers of Python. cases: what the segment of each was, and is. weights: of all buckets.
    """
    every = [places]
    if len(cases) > 1:
        every.append(copy(places))
        every[1].inside = places.inside + weights.nbytes // 2
    wanted = [(new != before).nonzero()[:, 0].tolist() for before, new in cases]
    sums, wholes = [0] * len(SHAPES) * len(cases), [0] * len(SHAPES)
    for at, (before, new) in enumerate(cases):
        for number, (tensor, index) in enumerate(elements):
            now, was = int(new[number]), int(before[number])
            sums[at * len(SHAPES) + tensor] += mixed(index, now) - mixed(index, was)
            wholes[tensor] += mixed(index, now) if at == 0 else 0

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    for has in (True, False)[: 3 - len(cases)]:
        changes.has_kernels = lambda *_: has  # type: ignore[assignment]  # noqa: B023
        for packed in (False, True):
            held = [before.clone() for before, _ in cases]
            tally, digests = zeros(len(places.rank_of) * len(cases)), zeros(len(sums))
            new = cases[0][1] if packed else np.array([weights.data_ptr()])
            if has and not (packed and cases[1:]):
                found = changes.ByKernels(changes.Blocks(every, tally.device), new, held, tally)
            elif packed and not has:
                found = changes.ByTorch(places, new, held[0], tally, places.size)
            else:
                continue
            counts = np.split(tally.numpy(), len(cases))
            for at, where in enumerate(wanted):
                parcel = changes.Parcel([places], counts[at])
                assert parcel.counts == ({rank: len(where)} if where else {})
                if not where:
                    continue
                buffer = torch.zeros(parcel.nbytes, dtype=torch.uint8)
                before = sum(map(len, wanted[:at]))
                views = parcel.views(buffer, rank)
                found.write(slice(at, at + 1), before, views, digests)
                assert views[0].tolist() == [elements[number][1] for number in where]
                assert views[1].equal(cases[at][1][where])
                index, bits, lengths = parcel.arranged(buffer)
                by_tensor = sorted(where, key=lambda number: elements[number][0])
                assert index.tolist() == [elements[number][1] for number in by_tensor]
                assert bits.equal(cases[at][1][by_tensor])
                tensors = [elements[number][0] for number in where]
                assert lengths.tolist() == [tensors.count(n) for n in range(len(SHAPES))]
            assert all(one.equal(new) for one, (_, new) in zip(held, cases, strict=True))
            assert [int(d) % (1 << 64) for d in digests] == [n % (1 << 64) for n in sums]
        digests = zeros(len(SHAPES))
        places.add_whole(cases[0][1], digests)
        assert [int(d) % (1 << 64) for d in digests] == [n % (1 << 64) for n in wholes]


if __name__ == "__main__":
    main()
