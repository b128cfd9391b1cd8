"""Kernels of Triton, which comes with torch for CUDA: imported on GPUs only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise(  # type: ignore[no-untyped-def]  # a kernel may name no type but constexpr
    values,
    codes,
    scales,
    bad,
    rows,
    columns,
    step,
    down,
    along,
    tiles,
    LARGEST: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    POWERS: tl.constexpr,
):
    """Writes the codes and the scales of COUNT blocks of one of several matrices.

    bad: a flag of each matrix, which becomes 1 if a value is not finite. step: elements from one
    matrix to the next. down, along: blocks of a matrix. tiles: programs for a row of blocks.
    POWERS: the scales are the exponents of powers of two.
    """
    number = tl.program_id(0)
    tile, band = number % tiles, number // tiles % down
    matrix = (number // (tiles * down)).to(tl.int64)
    row = band * HEIGHT + tl.arange(0, HEIGHT)
    column = tile * COUNT * WIDTH + tl.arange(0, COUNT * WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    flat = tl.load(values + matrix * step + at, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(flat, (HEIGHT, COUNT, WIDTH))
    sizes = tl.abs(blocks)
    most = tl.max(tl.max(sizes, axis=2), axis=0)
    is_bad = tl.max(tl.max(tl.max((sizes < float("inf")).to(tl.int32) ^ 1, axis=2), axis=1), axis=0)
    if POWERS:
        powers = tl.maximum(((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 0)
        factor = ((254 - powers) << 23).to(tl.float32, bitcast=True)
        scaled = blocks * factor[None, :, None]
        scale = powers.to(tl.uint8)
    else:
        scale = tl.math.div_rn(most, tl.full((COUNT,), LARGEST, tl.float32))
        scale = tl.where(scale == 0, 1.0, scale)
        every = tl.broadcast_to(scale[None, :, None], (HEIGHT, COUNT, WIDTH))
        scaled = tl.math.div_rn(blocks, every)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    made = tl.reshape(scaled.to(tl.float8e4nv), (HEIGHT, COUNT * WIDTH))
    tl.store(codes + matrix * rows * columns + at, made, mask=inside)
    block = tile * COUNT + tl.arange(0, COUNT)
    tl.store(scales + (matrix * down + band) * along + block, scale, mask=block < along)
    tl.store(bad + matrix, 1, mask=is_bad == 1)
