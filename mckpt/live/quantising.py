"""Quantises the matrices of a live model where they are: the formulas are those of
`execute.quantising.quantise`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mckpt.formats.hf_encodings import Scheme
from mckpt.live.devices import has_kernels
from mckpt.values.quantisation import LARGEST

if TYPE_CHECKING:
    import torch

BAND = 1024  # rows that torch quantises at a time; a multiple of each block
WARPS = 16  # of a program
TILE = 2048  # elements, at least, of a program of the kernel


def quantised(
    matrices: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes [n, rows, columns] and the scales [n, down, along] of n matrices, whose
    rows are dense, and for each a flag that is not 0 if a value is not finite.
    """
    import torch

    count, rows, columns = matrices.shape
    height, width = scheme.block
    assert height and width, "a form that mckpt writes has blocks"
    down, along = -(-rows // height), -(-columns // width)
    device = matrices.device
    codes = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(count, down, along, dtype=getattr(torch, scheme.dtypes[0]), device=device)
    bad = torch.zeros(count, dtype=torch.int32, device=device)
    if has_kernels(device, (8, 9)):  # which can round to float8 itself
        _in_one_kernel(matrices, codes, scales, bad, (height, width))
    else:
        for values, code, scale, flag in zip(matrices, codes, scales, bad, strict=True):
            _by_bands(values, code, scale, flag, (height, width))
    return codes, scales, bad


def _in_one_kernel(
    matrices: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bad: torch.Tensor,
    block: tuple[int, int],
) -> None:
    from mckpt.live.kernels import quantise

    (count, rows, columns), (_, down, along) = codes.shape, scales.shape
    several = max(TILE // math.prod(block), 1)
    tiles = -(-along // several)
    sizes = rows, columns, matrices.stride(0), down, along, tiles
    powers = scales.element_size() == 1
    given = matrices, codes, scales, bad, *sizes, float(LARGEST), *block, several, powers
    # with fewer warps the values of a block of 128 x 128 do not fit into registers
    quantise[(count * down * tiles,)](*given, num_warps=WARPS)


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
