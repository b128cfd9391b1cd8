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
    code_step,
    scale_step,
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

    bad: a flag of each matrix, which becomes 1 if a value is not finite. step, code_step,
    scale_step: elements from one matrix, its codes or its scales to the next. down, along: blocks
    of a matrix. tiles: programs for a row of blocks. POWERS: the scales are the exponents of powers
    of two.
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
    tl.store(codes + matrix * code_step + at, made, mask=inside)
    block = tile * COUNT + tl.arange(0, COUNT)
    tl.store(scales + matrix * scale_step + band * along + block, scale, mask=block < along)
    tl.store(bad + matrix, 1, mask=is_bad == 1)


@triton.jit
def quantise_e2m1(  # type: ignore[no-untyped-def]
    values,
    whole,
    codes,
    scales,
    bad,
    blocks,
    step,
    code_step,
    scale_step,
    tiles,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Writes the codes and the scales of COUNT blocks of nvfp4 of one of several matrices, whose
    `blocks` blocks follow each other; see `quantise`. whole: the scale of each whole matrix.
    """
    number = tl.program_id(0)
    matrix = (number // tiles).to(tl.int64)
    block = (number % tiles) * COUNT + tl.arange(0, COUNT)
    inside = block < blocks
    at = block.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    flat = tl.load(values + matrix * step + at, mask=inside[:, None], other=0.0).to(tl.float32)
    sizes = tl.abs(flat)
    is_bad = tl.max(tl.max((sizes < float("inf")).to(tl.int32) ^ 1, axis=1), axis=0)
    overall = tl.broadcast_to(tl.load(whole + matrix), (COUNT,))
    most = tl.math.div_rn(tl.max(sizes, axis=1), tl.full((COUNT,), 6.0, tl.float32))
    scale = tl.minimum(overall * most, LARGEST).to(tl.float8e4nv).to(tl.float32)
    scale = tl.where(scale == 0, 0.125, scale)
    divisor = tl.math.div_rn(scale, overall)
    scaled = tl.math.div_rn(flat, tl.broadcast_to(divisor[:, None], (COUNT, WIDTH)))
    sizes = tl.abs(scaled)
    # the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the even one of two
    code = (sizes > 0.25).to(tl.int32) + (sizes >= 0.75).to(tl.int32)
    code += (sizes > 1.25).to(tl.int32) + (sizes >= 1.75).to(tl.int32)
    code += (sizes > 2.5).to(tl.int32) + (sizes >= 3.5).to(tl.int32)
    code += (sizes > 5.0).to(tl.int32) + 8 * (scaled < 0).to(tl.int32)
    places = 1 + 15 * tl.arange(0, 2)  # of the first and the second code of a byte
    pairs = tl.reshape(code, (COUNT, WIDTH // 2, 2)) * places[None, None, :]
    to = block.to(tl.int64)[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    packed = tl.sum(pairs, axis=2).to(tl.uint8)
    tl.store(codes + matrix * code_step + to, packed, mask=inside[:, None])
    tl.store(scales + matrix * scale_step + block, scale.to(tl.float8e4nv), mask=inside)
    tl.store(bad + matrix, 1, mask=is_bad == 1)


COLUMNS = tl.constexpr(6)  # of `live.changes.Blocks.rows`, in the order in which they are read
BITS = tl.constexpr(2)  # of a word that are taken at once, whose loads do not wait for each other


@triton.jit
def compare(  # type: ignore[no-untyped-def]
    table,
    rows,
    copy_of,
    masks,
    counts,
    like,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the elements of a block that differ from what is held, and writes a bit for each
    element of a block that has some.

    table, rows, copy_of: of `live.changes.Blocks`. like: a tensor of the dtype. UNIT, DENSE: as
    for `Blocks.table`. WIDTH: bytes of an element.
    """
    block = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_of + block).to(tl.int64)
    row, places = rows + copy * COLUMNS, table + copy * 4
    now_at = tl.multiple_of(tl.load(places).to(like.dtype), UNIT * WIDTH)
    pitch, step = tl.load(places + 1), tl.load(places + 2)
    held_at = tl.multiple_of(tl.load(places + 3).to(like.dtype), UNIT * WIDTH)
    inside = ((block - tl.load(row)) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    here = inside < tl.multiple_of(tl.load(row + 1).to(tl.int32), UNIT)
    run = tl.load(row + 2).to(tl.int32)
    was = tl.load(held_at + inside, mask=here, other=0)
    if DENSE:
        now = tl.load(now_at + inside, mask=here, other=0)
    else:
        down = inside // run
        at = down.to(tl.int64) * pitch + (inside - down * run).to(tl.int64) * step
        now = tl.load(now_at + at, mask=here, other=0)
    differs = (now != was).to(tl.int32)
    count = tl.sum(differs, 0)
    tl.store(counts + block, count)
    if count > 0:
        bits = tl.reshape(differs, (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        words = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        tl.store(masks + words, tl.sum(bits, 1))


@triton.jit
def mixed(index, bits, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of an element in the digest of its tensor."""
    number = (index + 1) * FIRST + bits.to(tl.int64) * SECOND
    number = (number ^ (number >> 31)) * THIRD
    return number ^ (number >> 29)


@triton.jit
def ones(word):  # type: ignore[no-untyped-def]
    """Returns how many bits of 32 are 1."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["first_block", "start"])
def collect(  # type: ignore[no-untyped-def]
    table,
    rows,
    copy_of,
    masks,
    counts,
    before,
    indices,
    values,
    sums,
    first_block,
    start,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the indices and the bits of the changes of a block behind those of the blocks before,
    and what they add to the digest of its tensor, and holds the new values.

    before: of each block, the changes before it. first_block, start: the first block that is
    written, and the changes before it. sums: zeros, from this block on. The others are as for
    `compare`.
    """
    block = first_block + tl.program_id(0).to(tl.int64)
    count = tl.load(counts + block)
    if count > 0:
        copy = tl.load(copy_of + block).to(tl.int64)
        row, places = rows + copy * COLUMNS, table + copy * 4
        now_at = tl.load(places).to(values.dtype)
        pitch, step = tl.load(places + 1), tl.load(places + 2)
        held_at = tl.load(places + 3).to(values.dtype)
        inside_at = ((block - tl.load(row)) * BLOCK).to(tl.int32)
        numel, run = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
        index = tl.load(row + 3)
        dst_pitch, dst_step = tl.load(row + 4), tl.load(row + 5)
        # each lane has a word of the mask, and takes one bit of it after the other
        lane = tl.arange(0, BLOCK // 32)
        bits = tl.load(masks + block * (BLOCK // 32) + lane).to(tl.uint32, bitcast=True)
        left = ones(bits)
        to = tl.load(before + block) - start + tl.cumsum(left, 0) - left
        total = tl.zeros((BLOCK // 32,), tl.int64)
        for number in range(0, tl.max(left, 0), BITS):
            for one in tl.static_range(BITS):
                here = number + one < left
                inside = inside_at + lane * 32 + ones((bits ^ (bits - 1)) >> 1)
                inside = tl.where(here, inside, 0)
                bits = bits & (bits - 1)
                if run == numel:
                    at = inside.to(tl.int64)
                    found = index + at
                else:
                    down = inside // run
                    along = (inside - down * run).to(tl.int64)
                    at = down.to(tl.int64) * pitch + along * step
                    found = index + down.to(tl.int64) * dst_pitch + along * dst_step
                now = tl.load(now_at + at, mask=here, other=0)
                was = tl.load(held_at + inside, mask=here, other=0)
                new = mixed(found, now, FIRST, SECOND, THIRD)
                total += tl.where(here, new - mixed(found, was, FIRST, SECOND, THIRD), 0)
                tl.store(held_at + inside, now, mask=here)
                place = to + number + one
                tl.store(indices + place, found.to(indices.dtype.element_ty), mask=here)
                tl.store(values + place, now, mask=here)
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def add_all(  # type: ignore[no-untyped-def]
    table,
    rows,
    copy_of,
    like,
    sums,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes what all elements of a block add to the digest of its tensor, as they are held."""
    block = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_of + block).to(tl.int64)
    row = rows + copy * COLUMNS
    inside = ((block - tl.load(row)) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    here = inside < tl.load(row + 1)
    run = tl.load(row + 2).to(tl.int32)
    down = inside // run
    along = (inside - down * run).to(tl.int64)
    index = tl.load(row + 3) + down.to(tl.int64) * tl.load(row + 4) + along * tl.load(row + 5)
    held_at = tl.load(table + copy * 4 + 3).to(like.dtype)
    number = mixed(index, tl.load(held_at + inside, mask=here, other=0), FIRST, SECOND, THIRD)
    tl.store(sums + block, tl.sum(tl.where(here, number, 0), 0))


@triton.jit
def arrange(pieces, indices, values, to_indices, to_values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the indices and the values of a piece to their place. Several programs do a piece.

    pieces: the first index, the first value, the place, and the number of elements of each.
    """
    row = pieces + tl.program_id(0).to(tl.int64) * 4
    index_at, value_at, to, count = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
    )
    for begin in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        here = lane < count
        index = tl.load(indices + index_at + lane, mask=here, other=0)
        tl.store(to_indices + to + lane, index.to(tl.int64), mask=here)
        value = tl.load(values + value_at + lane, mask=here, other=0)
        tl.store(to_values + to + lane, value, mask=here)
