"""Geometry: literals that can be checked by eye, and laws for any boxes, against plain numpy."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mckpt.geometry.box import (
    Box,
    Move,
    Piece,
    Rows,
    coalesce,
    gaps,
    moves,
    num_free,
    overlap,
    restride,
    row_major,
    tiled,
    tiles,
)
from mckpt.geometry.packing import Packed, Placed, buffer, shard

# ----------------------------------------------------------------------------------------- literals


def test_row_major_strides() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major((5,)) == (1,)
    assert row_major(()) == ()


def test_overlap_of_two_boxes() -> None:
    assert overlap(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))) == Box((2, 3), (2, 1))
    assert overlap(Box((0, 0), (4, 4)), Box((1, 1), (2, 2))) == Box((1, 1), (2, 2))
    assert overlap(Box((0, 0), (4, 4)), Box((4, 0), (1, 4))) is None  # the boxes only touch
    assert overlap(Box((3,), (2,)), Box((0,), (3,))) is None
    assert overlap(Box((), ()), Box((), ())) == Box((), ())  # a scalar


def test_a_k_head_in_a_packed_qkv_is_one_move() -> None:
    """k[8:12] of [16, 64] lies in rows 40..44 of the packed [64, 64], which are one run of
    elements.
    """
    source = Piece("k", Box((0, 0), (16, 64)), 0, (64, 1))
    target = Piece("k", Box((8, 0), (4, 64)), 40 * 64, (64, 1))
    assert moves(source, target) == [Move(1, 4 * 64, 8 * 64, 0, 1, 40 * 64, 0, 1)]


def test_columns_of_a_row_parallel_weight_are_one_move() -> None:
    """Columns 3..6 of [4, 6], which rank 1 of 2 holds as [4, 3]: four rows of three."""
    source = Piece("o", Box((0, 0), (4, 6)), 0, (6, 1))
    target = Piece("o", Box((0, 3), (4, 3)), 0, (3, 1))
    assert moves(source, target) == [Move(4, 3, 3, 6, 1, 0, 3, 1)]


def test_a_transpose_is_one_move() -> None:
    """Stores a row-major [2, 3] as [3, 2]: element (i, j) goes from 3i + j to i + 2j."""
    source = Piece("w", Box((0, 0), (2, 3)), 0, (3, 1))
    target = Piece("w", Box((0, 0), (2, 3)), 0, (1, 2))
    assert moves(source, target) == [Move(2, 3, 0, 3, 1, 0, 1, 2)]


def test_boxes_that_share_nothing_need_no_move() -> None:
    assert moves(Piece("w", Box((0,), (4,)), 0, (1,)), Piece("w", Box((4,), (4,)), 0, (1,))) == []


def test_coalesce_joins_neighbours() -> None:
    def one(run: int, src: int, dst: int) -> Move:
        return Move(1, run, src, 0, 1, dst, 0, 1)

    # the moves are neighbours in source and target
    assert coalesce([one(4, 4, 104), one(4, 0, 100)]) == [one(8, 0, 100)]
    assert coalesce([one(4, 0, 100), one(4, 10, 104), one(4, 20, 108)]) == [
        Move(3, 4, 0, 10, 1, 100, 4, 1)
    ]
    # moves of different widths stay apart
    assert coalesce([one(4, 0, 0), one(3, 10, 4)]) == [one(4, 0, 0), one(3, 10, 4)]
    stepped = [Move(1, 4, 0, 0, 2, 0, 0, 1), Move(1, 4, 8, 0, 2, 4, 0, 1)]
    assert coalesce(stepped) == stepped


def test_tiles_reports_faults() -> None:
    left, right = Box((0, 0), (4, 3)), Box((0, 3), (4, 3))
    assert tiles([left, right], (4, 6)) is None
    assert tiles([left], (4, 6)) == "12 of 24 elements are covered"
    assert (
        tiles([left, right, Box((3, 5), (1, 1))], (4, 6))
        == "boxes overlap: [4, 3] at [0, 3] and [1, 1] at [3, 5]"
    )
    assert (
        tiles([left, Box((0, 3), (4, 4))], (4, 6))
        == "the box [4, 4] at [0, 3] reaches outside [4, 6]"
    )
    assert (
        tiles([left, Box((-1, 3), (4, 3))], (4, 6))
        == "the box [4, 3] at [-1, 3] reaches outside [4, 6]"
    )
    assert tiles([], (4, 6)) == "0 of 24 elements are covered"


@pytest.mark.parametrize("shape", [(60,), (60, 4), (60, 3, 2)])
def test_rows_do_what_their_pieces_do_one_by_one(shape: tuple[int, ...]) -> None:
    """Runs of 1 to 3 rows in any order, from a buffer of 80 rows into two targets, one of which is
    transposed, with a border within a run.
    """
    chance, width = np.random.default_rng(3), math.prod(shape[1:])
    counts = chance.permutation([*[1] * 20, *[2] * 14, *[3] * 4])
    first = np.cumsum(counts) - counts
    start = (chance.permutation(80 - 3)[: len(counts)] + 1) * width
    order = chance.permutation(len(counts))
    like = Piece("w", Box((0,) * len(shape), (1, *shape[1:])), 0, row_major(shape))
    rows = Rows(like, first[order], counts[order], start[order])
    pieces = list(rows)
    assert len(pieces) == len(counts) and all(type(p.start) is int for p in pieces)
    assert [p.box.offset[0] for p in pieces] == first[order].tolist()
    border = 1 + int(first[counts == 3][0])
    targets = [
        Piece("w", Box((0,) * len(shape), (border, *shape[1:])), 5, row_major(shape)),
        Piece(
            "w",
            Box((border, *(0,) * (len(shape) - 1)), (60 - border, *shape[1:])),
            0,
            tuple(60 ** (axis + 1) for axis in range(len(shape))),
        ),
    ]
    for target in targets:
        found = sorted(map(tuple, rows.moves(target).tolist()))
        assert found == sorted(tuple(m) for p in pieces for m in moves(p, target)) != []
    offset, sizes = rows.boxes()
    assert [
        Box(tuple(a), tuple(b)) for a, b in zip(offset.tolist(), sizes.tolist(), strict=True)
    ] == [p.box for p in pieces]
    assert num_free(rows, 80 * width, shared=True) == num_free(pieces, 80 * width, shared=True)
    assert tiles([p.box for p in pieces], shape) is None is tiled(offset, sizes, shape)
    assert "are covered" in str(tiled(offset[1:], sizes[1:], shape))
    twice = np.append(offset, offset[:1], 0), np.append(sizes, sizes[:1], 0)
    assert "boxes overlap" in str(tiled(*twice, shape))
    outside = num_free(rows, int(start.max()), shared=True)[1]
    assert outside == f"a piece reaches outside the {start.max():,} elements of the buffer"


def test_gaps_counts_pieces_that_take_turns_by_their_rows() -> None:
    """The gate and up projections of GPT-OSS take turns, element by element."""
    size = 4096
    turns = [Piece(str(at), Box((0, 0), (size, size)), at, (2, 2 * size)) for at in (0, 1)]
    tracemalloc.start()
    assert gaps(turns, 2 * size * size)[0].tolist() == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size * size, peak  # bytes


def columns(kept: list[int], size: tuple[int, int]) -> list[Piece]:
    """Returns a piece for each kept column of a matrix, side by side in a tensor."""
    shape = (size[0], 1)
    return [Piece("a", Box((0, i), shape), n, (size[1], 1)) for i, n in enumerate(kept)]


def test_free_elements_beside_chosen_columns_are_counted_row_by_row() -> None:
    size = (100_000, 300)
    tracemalloc.start()
    assert num_free(columns([*range(0, 300, 2), 7], size), 30_000_000) == (149 * 100_000, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, peak  # bytes


@given(st.data())
def test_free_elements_are_those_of_the_gaps(data: st.DataObject) -> None:
    """Columns and rows of a matrix, some of them twice or outside, and a piece of another form."""
    size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    edges = st.sampled_from([-1, 0, 1, size[1] - 1, size[1]])
    pieces = columns(data.draw(st.lists(st.integers(0, size[1]) | edges, max_size=6)), size)
    wide = data.draw(st.integers(1, 3))
    pieces += [
        Piece("b", Box((0, 0), (size[0], wide)), n, (size[1], 1))
        for n in data.draw(st.lists(st.integers(0, size[1]), max_size=2))
    ]
    if data.draw(st.booleans()):
        pieces.append(Piece("c", Box((0,), (2,)), data.draw(st.integers(0, 9)), (3,)))
    numel = math.prod(size) + data.draw(st.integers(0, 5))
    holes, wrong = gaps(pieces, numel)
    assert num_free(pieces, numel) == (int(holes[:, 1].sum()), wrong)


def test_empty_boxes_hide_no_overlap() -> None:
    """Two boxes overlap and leave a hole of the same volume, so the sum of the volumes is right."""
    empty = Box((0,), (0,))
    assert (
        tiles([Box((0,), (2,)), Box((1,), (2,)), empty, empty], (4,))
        == "boxes overlap: [2] at [0] and [2] at [1]"
    )


def test_gaps_reports_faults() -> None:
    first, last = Piece("a", Box((0,), (3,)), 0, (1,)), Piece("b", Box((0,), (4,)), 6, (1,))
    free, wrong = gaps([first, last], 12)
    assert wrong is None
    assert free.tolist() == [[3, 3], [10, 2]]
    assert gaps([first, last], 9)[1] == "a piece reaches outside the 9 elements of the buffer"
    assert (
        gaps([first, Piece("b", Box((0,), (4,)), 2, (1,))], 12)[1]
        == "two pieces share element 2 of the buffer"
    )
    odd, even = Piece("a", Box((0,), (4,)), 1, (2,)), Piece("b", Box((0,), (4,)), 0, (2,))
    assert gaps([odd, even], 8)[0].tolist() == []
    assert gaps([odd], 8)[0].tolist() == [[0, 1], [2, 1], [4, 1], [6, 1]]
    assert gaps([odd, odd], 8)[1] == "two pieces share element 1 of the buffer"
    assert gaps([odd, Piece("b", Box((0,), (4,)), 4, (2,))], 11)[0].tolist() == [
        [0, 1],
        [2, 1],
        [9, 1],
    ]
    assert gaps([], 5)[0].tolist() == [[0, 5]]
    # the columns of two transposed matrices take turns in each of 5 rows of 10
    first, last = (Piece(n, Box((0, 0), (3, 5)), at, (2, 10)) for n, at in (("a", 0), ("b", 1)))
    assert gaps([first, last], 50)[0].tolist() == [[10 * row + 6, 4] for row in range(5)]
    transposed = Piece("a", Box((0, 0), (2, 3)), 1, (1, 4))
    assert gaps([transposed], 12)[0].tolist() == [[0, 1], [3, 2], [7, 2], [11, 1]]


def test_gaps_of_a_transposed_matrix_needs_memory_for_its_columns_only() -> None:
    """As the experts of Llama 4: a tensor of 80 million elements is proved from its header."""
    rows, columns = 1 << 12, 1 << 10
    piece = Piece("a", Box((0, 0), (rows, columns)), 0, (1, rows))
    tracemalloc.start()
    try:
        assert gaps([piece], rows * columns)[0].tolist() == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_restride_changes_start_and_strides() -> None:
    # columns 0..3 of rows 1 and 2 of a dense [3, 4]
    piece = Piece("w", Box((0, 0), (2, 3)), 4, (4, 1))
    assert restride(piece, (3, 4), (10, 2)) == piece._replace(start=10, strides=(10, 2))
    across = Piece("w", Box((0,), (6,)), 0, (1,))  # six elements that run over the end of a row
    assert restride(across, (3, 4), (10, 2)) is None


# --------------------------------------------------------------------------------------------- laws


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draws a box that is not empty and lies inside the shape."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(
        offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    )


@st.composite
def held(draw: st.DrawFn, box: Box) -> tuple[Piece, int]:
    """Draws a piece that places the box in a flat buffer of a given number of elements. Its axes
    have any order, and there may be gaps between rows and extra axes.
    """
    order = draw(st.permutations(range(len(box.shape))))
    padded = [box.shape[a] + draw(st.integers(0, 2)) for a in order]
    step = draw(st.integers(1, 3))
    strides = [0] * len(order)
    for axis, stride in zip(order, row_major(padded), strict=True):
        strides[axis] = stride * step
    start = draw(st.integers(0, 5))
    return Piece("w", box, start, tuple(strides)), start + math.prod(padded) * step + draw(
        st.integers(0, 3)
    )


def view(flat: np.ndarray, piece: Piece) -> np.ndarray:
    """Returns the box of the piece as a numpy view of the buffer."""
    return np.lib.stride_tricks.as_strided(
        flat[piece.start :], piece.box.shape, [s * flat.itemsize for s in piece.strides]
    )


def execute(listed: list[Move], source: np.ndarray, target: np.ndarray) -> None:
    """Carries out moves element by element, by the names of their fields."""
    for m in listed:
        for row in range(m.rows):
            for i in range(m.run):
                target[m.dst_start + row * m.dst_pitch + i * m.dst_step] = source[
                    m.src_start + row * m.src_pitch + i * m.src_step
                ]


def elements(listed: list[Move]) -> list[tuple[int, int]]:
    """Returns the sorted pairs (source element, target element) of all moves."""
    return sorted(
        (
            m.src_start + r * m.src_pitch + i * m.src_step,
            m.dst_start + r * m.dst_pitch + i * m.dst_step,
        )
        for m in listed
        for r in range(m.rows)
        for i in range(m.run)
    )


SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(st.data(), SHAPES)
def test_overlap_commutes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert overlap(a, b) == overlap(b, a)
    assert overlap(a, a) == a
    both = overlap(a, b)
    inside = {
        i
        for i in np.ndindex(*shape)
        if all(
            all(o <= x < o + n for o, x, n in zip(c.offset, i, c.shape, strict=True))
            for c in (a, b)
        )
    }
    assert len(inside) == (math.prod(both.shape) if both else 0)
    if both:
        assert overlap(both, a) == overlap(both, b) == both


@settings(max_examples=150)
@given(st.data(), SHAPES)
def test_moves_are_numpy_slices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Any box moves into any other, with gaps, steps and transposes, coalesced or not."""
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    (source, size), (target, room) = data.draw(held(a)), data.draw(held(b))
    flat = np.arange(1, size + 1)
    wanted, found, joined = np.zeros(room, int), np.zeros(room, int), np.zeros(room, int)
    both = overlap(a, b)
    if both:
        cut = [
            tuple(
                slice(o - p, o - p + n)
                for o, p, n in zip(both.offset, c.offset, both.shape, strict=True)
            )
            for c in (a, b)
        ]
        view(wanted, target)[cut[1]] = view(flat, source)[cut[0]]
    listed = moves(source, target)
    execute(listed, flat, found)
    assert (found == wanted).all()
    execute(coalesce(listed), flat, joined)
    assert (joined == wanted).all()
    assert sum(m.rows * m.run for m in listed) == (math.prod(both.shape) if both else 0)


@given(st.data())
def test_coalesce_moves_the_same_elements(data: st.DataObject) -> None:
    """Cuts a copy of rows at random places, on a grid that makes neighbours likely, and shuffles
    the parts. coalesce must move the same elements in at most as many moves.
    """
    width = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 12))
    sources = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    slots = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count, unique=True))
    listed = [
        Move(1, width, s * width, 0, 1, d * width, 0, 1)
        for s, d in zip(sources, slots, strict=True)
    ]
    whole = Move(3, width, 0, 5 * width, 1, 20 * width, 2 * width, 1)
    listed = data.draw(st.permutations([*listed, whole]))
    assert elements(coalesce(listed)) == elements(list(listed))
    assert len(coalesce(listed)) <= len(listed)


def test_coalesce_makes_one_move_of_many() -> None:
    """A q head of every query group is 64 moves of one pitch, which become one move."""
    listed = [Move(1, 128, g * 640, 0, 1, g * 128, 0, 1) for g in range(64)]
    assert len(coalesce(listed)) == 1
    assert elements(coalesce(listed)) == elements(listed)


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_a_restrided_piece_is_the_same_piece_of_a_view(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Where restride returns a piece, element i of the box is the same element of the tensor. It
    returns one for every box along a single axis.
    """
    viewed, size = data.draw(held(Box((0,) * len(shape), shape)))
    flat = np.arange(size)
    tensor = view(flat, viewed)
    if data.draw(st.booleans()):  # a box of the view, with axes in any order
        box = data.draw(boxes(shape))
        order = data.draw(st.permutations(range(len(shape))))
        dense = row_major(shape)
        start = sum(o * s for o, s in zip(box.offset, dense, strict=True))
        piece = Piece(
            "w",
            Box((0,) * len(shape), tuple(box.shape[a] for a in order)),
            start,
            tuple(dense[a] for a in order),
        )
        must = all(n > 1 or s == 1 for n, s in zip(shape, dense, strict=True)) and len(
            set(dense)
        ) == len(dense)
    else:  # the flat tensor has another rank
        run = data.draw(st.integers(1, math.prod(shape)))
        piece, must = Piece("w", Box((0,), (run,)), 0, (1,)), run <= shape[-1] and shape[-1] > 1
    found = restride(piece, shape, viewed.strides)
    if found is None:
        assert not must
        return
    base = viewed.start
    for i in np.ndindex(*piece.box.shape):
        at = piece.start + sum(x * s for x, s in zip(i, piece.strides, strict=True))
        assert (
            flat[base + found.start + sum(x * s for x, s in zip(i, found.strides, strict=True))]
            == tensor.ravel()[at]
        )


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draws boxes that cover the shape exactly once, by repeated cuts."""
    out = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = out.pop(draw(st.integers(0, len(out) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        if box.shape[axis] < 2:
            out.append(box)
            continue
        at = draw(st.integers(1, box.shape[axis] - 1))
        for low, n in ((0, at), (at, box.shape[axis] - at)):
            offset, size = list(box.offset), list(box.shape)
            offset[axis] += low
            size[axis] = n
            out.append(Box(tuple(offset), tuple(size)))
    return draw(st.permutations(out))


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_a_partition_tiles_and_a_faulty_one_does_not(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    parts = data.draw(partitions(shape))
    assert tiles(parts, shape) is None
    one = data.draw(st.sampled_from(parts))
    rest = [p for p in parts if p is not one]
    left = math.prod(shape) - math.prod(one.shape)
    assert tiles(rest, shape) == f"{left:,} of {math.prod(shape):,} elements are covered"
    assert "boxes overlap" in str(tiles([*parts, one], shape))
    if rest:
        other = data.draw(st.sampled_from(rest))
        # the volume may be the same, with a hole and an overlap
        assert tiles([*rest, other], shape) is not None


@given(st.data())
def test_gaps_are_the_elements_that_numpy_does_not_mark(data: st.DataObject) -> None:
    room = data.draw(st.integers(1, 60))
    pieces, taken, clash, outside = [], np.zeros(200, int), False, False
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
        piece, _ = data.draw(held(Box((0,) * len(shape), shape)))
        piece = piece._replace(start=data.draw(st.integers(0, room - 1)))
        flat = [
            piece.start + sum(x * s for x, s in zip(i, piece.strides, strict=True))
            for i in np.ndindex(*shape)
        ]
        outside = outside or max(flat) >= room
        if max(flat) < 200:
            taken[flat] += 1
        pieces.append(piece)
    clash = bool((taken[:room] > 1).any())
    free, wrong = gaps(pieces, room)
    if outside or clash:
        assert wrong is not None
        return
    assert wrong is None
    marked = np.zeros(room, bool)
    for start, length in free.tolist():
        assert length > 0
        marked[start : start + length] = True
    assert (marked == (taken[:room] == 0)).all()


@given(
    st.sampled_from(["column", "row", "replicated"]),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_shards_cover_each_member_once(
    kind: str, size: int, parts: list[int], columns: int
) -> None:
    """The shards of all ranks cover each member exactly once, and each buffer is full."""
    shapes = [(n * size, columns * size) for n in parts]
    placed, at = [], 0
    for m, shape in enumerate(shapes):
        placed.append(Placed(m, Box((0, 0), shape), (at, 0)))
        at += shape[0]
    packed = Packed((at, columns * size), tuple(placed), tuple(s[0] for s in shapes))
    names = [f"m{i}" for i in range(len(parts))]
    found: dict[str, list[Box]] = {}
    for rank in range(1 if kind == "replicated" else size):
        shape, pieces = buffer(packed, shard(packed, kind, rank, size), names)
        assert gaps(pieces, math.prod(shape)) == (pytest.approx(np.empty((0, 2))), None)
        for p in pieces:
            found.setdefault(p.tensor, []).append(p.box)
    for name, shape in zip(names, shapes, strict=True):
        assert tiles(found[name], shape) is None


def test_moves_between_a_tensor_and_a_slice_of_a_stack() -> None:
    """Moves an expert's weight into one slice of a stack [experts, rows, columns], and out of it
    again.
    """
    rng = np.random.default_rng(0)
    stack = rng.integers(0, 1000, (3, 4, 5))
    expert = Piece("e", Box((0, 0), (4, 5)), 2 * 4 * 5, (5, 1))
    alone: np.ndarray[Any, Any] = np.zeros((4, 5), int)
    execute(
        moves(expert, Piece("e", Box((0, 0), (4, 5)), 0, (5, 1))), stack.ravel(), alone.reshape(-1)
    )
    assert (alone == stack[2]).all()


def test_gaps_of_long_runs_are_not_listed_by_element() -> None:
    rows, columns = 2**22, 2**20  # a list of every element would take eight terabytes
    piece = Piece("t", Box((0, 0), (rows, columns)), 0, (columns, 1))
    free, wrong = gaps([piece], (rows + 2) * columns)
    assert wrong is None
    assert free.tolist() == [[rows * columns, 2 * columns]]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)),
        min_size=2,
        max_size=9,
    )
)
def test_tiles_finds_the_first_pair_of_boxes_that_meet(
    boxes: list[tuple[int, int, int, int]],
) -> None:
    made = [Box((a, b), (m, n)) for a, b, m, n in boxes]
    pairs = itertools.combinations(made, 2)
    found = next(((a, b) for a, b in pairs if overlap(a, b)), None)
    said = tiles(made, (9, 9)) or ""
    assert said.startswith("boxes overlap") == (found is not None)
    for box in found or ():
        assert f"{list(box.shape)} at {list(box.offset)}" in said
