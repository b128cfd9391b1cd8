"""Quantises the matrices of a live model where they are: the formulas are those of
`execute.quantising.quantise`. A rank quantises the boxes that it holds before it sends them, if no
block of the matrix lies on two ranks; otherwise each receiver quantises the whole matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mckpt.formats.hf_encodings import Scheme
from mckpt.live.devices import has_kernels
from mckpt.values.quantisation import E2M1, LARGEST, LARGEST_E2M1

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


def overall_scales(largest: torch.Tensor) -> torch.Tensor:
    """Returns the scales of whole weights of nvfp4, as `execute.quantising.overall_scale`.

    largest: the largest absolute value of each, in float32.
    """
    import torch

    scales = LARGEST * LARGEST_E2M1 * torch.reciprocal(largest)
    return torch.where(scales.isfinite(), scales, torch.ones_like(scales))


def quantised(
    matrices: torch.Tensor, scheme: Scheme, overall: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes and the scales of n matrices, and the flags; see `quantise`."""
    import torch

    count, rows, columns = matrices.shape
    grid, device = grid_of((rows, columns), block_of(scheme)), matrices.device
    kind, stored = getattr(torch, scheme.encoding.dtype), columns // scheme.encoding.per_byte
    codes = torch.empty(count, rows, stored, dtype=kind, device=device)
    scales = torch.empty(count, *grid, dtype=getattr(torch, scheme.dtypes[0]), device=device)
    return codes, scales, quantise(matrices, codes, scales, block_of(scheme), overall)


def quantise(
    matrices: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    overall: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fills the codes [n, rows, columns] and the scales [n, down, along] of n matrices. Each
    matrix, and its codes and scales, is dense. Returns for each a flag that is not 0 if a value is
    not finite.

    overall: of nvfp4, the scale [n, 1] of each whole matrix. Its codes are [n, rows, columns / 2].
    """
    import torch

    device = matrices.device
    bad = torch.zeros(len(matrices), dtype=torch.int32, device=device)
    if has_kernels(device, (8, 9)):  # which can round to float8 itself
        _in_one_kernel(matrices, codes, scales, bad, block, overall)
        return bad
    wholes = [None] * len(bad) if overall is None else overall
    for values, code, scale, flag, whole in zip(matrices, codes, scales, bad, wholes, strict=True):
        _by_bands(values, code, scale, flag, block, whole)
    return bad


def _in_one_kernel(
    matrices: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bad: torch.Tensor,
    block: tuple[int, int],
    overall: torch.Tensor | None,
) -> None:
    from mckpt.live import kernels

    (count, rows, columns), (_, down, along) = matrices.shape, scales.shape
    several = max(TILE // math.prod(block), 1)
    tiles = -(-along // several)
    steps = matrices.stride(0), codes.stride(0), scales.stride(0)
    if overall is not None:
        tiles = -(-down * along // several)
        tensors = matrices, overall, codes, scales, bad
        constants = float(LARGEST), block[1], several
        kernels.quantise_e2m1[(count * tiles,)](*tensors, down * along, *steps, tiles, *constants)
        return
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
    overall: torch.Tensor | None,
) -> None:
    """Quantises one matrix with the functions of torch."""
    import torch

    (rows, columns), along = values.shape, scales.shape[1]
    # CUDA divides by a number of Python as it multiplies by its reciprocal, which rounds twice
    top = LARGEST if overall is None else LARGEST_E2M1
    largest = torch.full((), top, dtype=torch.float32, device=values.device)
    for first in range(0, rows, BAND):
        band = values[first : first + BAND].float()
        count = len(band)
        wide = torch.zeros(-(-count // block[0]) * block[0], along * block[1], device=values.device)
        wide[:count, :columns] = band
        blocks = wide.view(-1, block[0], along, block[1])
        most = blocks.abs().amax((1, 3))
        bad |= ~most.isfinite().all()
        if overall is not None:
            scale = (overall * (most / largest)).clamp_(max=LARGEST).to(scales.dtype)
            scale = torch.where(scale.float() == 0, torch.full_like(scale, 0.125), scale)
            blocks /= (scale.float() / overall)[:, None, :, None]
            codes[first : first + count] = _packed(wide[:count, :columns])
            scales[first // block[0] : first // block[0] + len(scale)] = scale
            continue
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


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Returns the codes of E2M1 of values [m, n], two in a byte: the nearest numbers, the one with
    an even code of two.
    """
    sizes, codes = values.abs(), 8 * (values < 0).byte()
    for code, pair in enumerate(pairwise(E2M1)):
        middle = sum(pair) / 2
        codes += sizes >= middle if code % 2 else sizes > middle
    return codes[:, ::2] | codes[:, 1::2] << 4
