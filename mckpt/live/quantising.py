"""Quantises the matrices of a live model where they are: the formulas are those of
`execute.quantising.quantise`. A rank quantises the boxes that it holds before it sends them, if no
block of the matrix lies on two ranks; otherwise each receiver quantises the whole matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mckpt.formats.hf_encodings import Scheme
from mckpt.live.devices import has_kernels
from mckpt.values.quantisation import LARGEST

if TYPE_CHECKING:
    import torch

BAND = 1024  # rows that torch quantises at a time; a multiple of each block
WARPS = 16  # of a program
TILE = 2048  # elements, at least, of a program of the kernel


class Rows(NamedTuple):
    """Elements of a matrix that lie one after the other on a rank: rows of `run` elements. In the
    matrix, element (i, j) is at `at + i * pitch + j * step`.
    """

    copy: int  # the number of the copy that reads them
    rows: int
    run: int
    at: int
    pitch: int
    step: int


class MatrixBox(NamedTuple):
    """A box of a matrix that one rank holds, in whole blocks."""

    rank: int
    start: tuple[int, int]
    shape: tuple[int, int]
    copies: list[int]  # which read its elements in their order


def boxes_of(
    shape: tuple[int, int], block: tuple[int, int], held: Mapping[int, Sequence[Rows]]
) -> list[MatrixBox]:
    """Returns the boxes of a matrix that the ranks hold; nothing if one holds other elements than
    those of a box, or a part of a block.

    held: of each rank, what it sends, in the order of its places.
    """
    found = []
    for rank, listed in held.items():
        box = _box(shape[1], listed)
        if box is None:
            return []
        ends = (start + size for start, size in zip(*box, strict=True))
        for start, end, whole, unit in zip(box[0], ends, shape, block, strict=True):
            if start % unit or (end % unit and end != whole):
                return []
        found.append(MatrixBox(rank, *box, [one.copy for one in listed]))
    return found


def _box(columns: int, listed: Sequence[Rows]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Returns the start and the shape of the box that elements fill, in its order; None if they
    fill none.
    """
    _, rows, run, at, pitch, step = listed[0]
    row, column = divmod(at, columns)
    is_line = (step == 1 or run == 1) and (pitch == columns or rows == 1)
    if len(listed) == 1 and is_line and column + run <= columns:
        return (row, column), (rows, run)
    end = at
    for one in listed:
        is_dense = (one.step == 1 or one.run == 1) and (one.pitch == one.run or one.rows == 1)
        if one.at != end or not is_dense:
            return None
        end += one.rows * one.run
    return None if column or end % columns else ((row, 0), ((end - at) // columns, columns))


@functools.cache
def grid_of(box: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of blocks in a shape, or before a start."""
    rows, columns = (-(-size // unit) for size, unit in zip(box, block, strict=True))
    return rows, columns


def block_of(scheme: Scheme) -> tuple[int, int]:
    """Returns the shape of a block of a form that mckpt writes."""
    height, width = scheme.block
    assert height and width, "a form that mckpt writes has blocks"
    return height, width


def quantised(
    matrices: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes [n, rows, columns] and the scales [n, down, along] of n matrices, whose
    rows are dense, and the flags of `quantise`.
    """
    import torch

    count, *shape = matrices.shape
    grid, device = grid_of(tuple(shape), block_of(scheme)), matrices.device
    codes = torch.empty(count, *shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(count, *grid, dtype=getattr(torch, scheme.dtypes[0]), device=device)
    return codes, scales, quantise(matrices, codes, scales, block_of(scheme))


def quantise(
    matrices: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """Fills the codes [n, rows, columns] and the scales [n, down, along] of n matrices. Each
    matrix, and its codes and scales, is dense. Returns for each a flag that is not 0 if a value is
    not finite.
    """
    import torch

    device = matrices.device
    bad = torch.zeros(len(matrices), dtype=torch.int32, device=device)
    if has_kernels(device, (8, 9)):  # which can round to float8 itself
        _in_one_kernel(matrices, codes, scales, bad, block)
    else:
        for values, code, scale, flag in zip(matrices, codes, scales, bad, strict=True):
            _by_bands(values, code, scale, flag, block)
    return bad


def _in_one_kernel(
    matrices: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bad: torch.Tensor,
    block: tuple[int, int],
) -> None:
    from mckpt.live import kernels

    (count, rows, columns), (_, down, along) = codes.shape, scales.shape
    several = max(TILE // math.prod(block), 1)
    tiles = -(-along // several)
    steps = matrices.stride(0), codes.stride(0), scales.stride(0)
    sizes = rows, columns, *steps, down, along, tiles
    powers = scales.element_size() == 1
    given = matrices, codes, scales, bad, *sizes, float(LARGEST), *block, several, powers
    # with fewer warps the values of a block of 128 x 128 do not fit into registers
    kernels.quantise[(count * down * tiles,)](*given, num_warps=WARPS)


def _by_bands(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bad: torch.Tensor,
    block: tuple[int, int],
) -> None:
    """Quantises one matrix with the functions of torch."""
    import torch

    (rows, columns), along = values.shape, scales.shape[1]
    # CUDA divides by a number of Python as it multiplies by its reciprocal, which rounds twice
    largest = torch.full((), LARGEST, dtype=torch.float32, device=values.device)
    for first in range(0, rows, BAND):
        band = values[first : first + BAND].float()
        count = len(band)
        wide = torch.zeros(-(-count // block[0]) * block[0], along * block[1], device=values.device)
        wide[:count, :columns] = band
        blocks = wide.view(-1, block[0], along, block[1])
        most = blocks.abs().amax((1, 3))
        bad |= ~most.isfinite().all()
        if scales.dtype is torch.uint8:
            powers = (((most.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp_(0)
            scale = powers.to(torch.uint8)
            blocks *= ((254 - powers) << 23).view(torch.float32)[:, None, :, None]
        else:
            scale = most / largest
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)
            blocks /= scale[:, None, :, None]
        wide.clamp_(-LARGEST, LARGEST)
        codes[first : first + count] = wide[:count, :columns].to(torch.float8_e4m3fn)
        scales[first // block[0] : first // block[0] + len(scale)] = scale
