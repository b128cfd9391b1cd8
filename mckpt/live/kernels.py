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


@triton.jit(do_not_specialize=["size"])
def compare(new, held, slots, counts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the elements of a block that differ, and writes their places in the block into the
    first of its slots.
    """
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    now = tl.load(new + at, mask=at < size, other=0)
    before = tl.load(held + at, mask=at < size, other=0)
    differs = (now != before).to(tl.int32)
    slot = block * BLOCK + tl.cumsum(differs, 0) - 1
    tl.store(slots + slot, lane.to(tl.int16), mask=differs == 1)
    tl.store(counts + block, tl.sum(differs, 0))


@triton.jit
def mixed(index, bits, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of an element in the digest of its tensor."""
    number = (index + 1) * FIRST + bits.to(tl.int64) * SECOND
    number = (number ^ (number >> 31)) * THIRD
    return number ^ (number >> 29)


@triton.jit(do_not_specialize=["first"])
def add_to_tally(  # type: ignore[no-untyped-def]
    new,
    held,
    slots,
    counts,
    first,
    blocks,
    rows,
    width,
    tally,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Adds the changes of a block to the number of each group, and to the digest of each tensor.

    first: the place of the segment. blocks: the first and the last copy of each block. rows: of
    each copy `width` columns: start, index, run, pitch, step, elements, group and tensor.
    """
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + block)
    copy = tl.load(blocks + 2 * block)
    last = tl.load(blocks + 2 * block + 1)
    while copy <= last:
        row = rows + copy * width
        start = tl.load(row) - first
        index = tl.load(row + 1)
        run = tl.load(row + 2).to(tl.int32)
        pitch = tl.load(row + 3)
        step = tl.load(row + 4)
        end = start + tl.load(row + 5)
        num = tl.zeros((LANES,), tl.int64)
        total = tl.zeros((LANES,), tl.int64)
        for begin in range(0, count, LANES):
            lane = begin + tl.arange(0, LANES)
            slot = tl.load(slots + block * BLOCK + lane, mask=lane < count, other=0)
            at = block * BLOCK + slot.to(tl.int64)
            here = (lane < count) & (at >= start) & (at < end)
            inside = (at - start).to(tl.int32)
            place = (
                index + (inside // run).to(tl.int64) * pitch + (inside % run).to(tl.int64) * step
            )
            now = mixed(place, tl.load(new + at, mask=here, other=0), FIRST, SECOND, THIRD)
            before = mixed(place, tl.load(held + at, mask=here, other=0), FIRST, SECOND, THIRD)
            num += here.to(tl.int64)
            total += tl.where(here, now - before, 0)
        if count > 0:
            tl.atomic_add(tally + tl.load(row + 6), tl.sum(num, 0))
            tl.atomic_add(tally + tl.load(row + 7), tl.sum(total, 0))
        copy += 1


@triton.jit(do_not_specialize=["first"])
def collect(  # type: ignore[no-untyped-def]
    new, slots, counts, ends, first, places, values, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """Writes the places and the bits of the changes of a block behind those of the blocks before.

    ends: of each block, the changes up to its end.
    """
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + block)
    to = tl.load(ends + block) - count
    for begin in range(0, count, LANES):
        lane = begin + tl.arange(0, LANES)
        slot = tl.load(slots + block * BLOCK + lane, mask=lane < count, other=0)
        at = block * BLOCK + slot.to(tl.int64)
        tl.store(places + to + lane, (first + at).to(tl.int32), mask=lane < count)
        tl.store(values + to + lane, tl.load(new + at, mask=lane < count), mask=lane < count)


@triton.jit(do_not_specialize=["count", "copies", "steps"])
def find_indices(  # type: ignore[no-untyped-def]
    places, starts, rows, width, found, count, copies, steps, BLOCK: tl.constexpr
):
    """Writes the index in its tensor of the element at each place. rows: as for `add_to_tally`, of
    `copies` copies with these starts, of which `steps` halvings find one.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + lane, mask=lane < count, other=0).to(tl.int64)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + copies
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(starts + middle) <= place
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    row = rows + low * width
    run = tl.load(row + 2).to(tl.int32)
    inside = (place - tl.load(starts + low)).to(tl.int32)
    whole = (inside // run).to(tl.int64) * tl.load(row + 3)
    part = (inside % run).to(tl.int64) * tl.load(row + 4)
    tl.store(found + lane, tl.load(row + 1) + whole + part, mask=lane < count)
