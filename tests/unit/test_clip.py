"""A flat range of a buffer holds the elements that numpy says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mckpt.geometry.box import Box, Piece, clip, crop, moves, whole_box
from mckpt.geometry.packing import PACKINGS, buffer, shard

SHAPES = {
    "one": [(6, 5)],
    "concat": [(4, 5), (2, 5)],
    "gated": [(4, 5), (4, 5)],
    "qkv": [(8, 3), (4, 3), (4, 3)],
    "gated_qkv": [(8, 3), (8, 3), (4, 3), (4, 3)],
    "interleaved": [(4, 5), (4, 5)],
    "swapped": [(4, 6)],
    "halved": [(8, 3)],
    "paired": [(8, 3)],
    "heads": [(12, 3), (6, 3)],
}


def elements(pieces, shapes, numel):
    """Returns the number of the logical element at each place, or -1."""
    out = np.full(numel, -1)
    first = np.cumsum([0, *map(math.prod, shapes)])
    for piece in pieces:
        number = int(piece.tensor)
        values = np.arange(math.prod(shapes[number])).reshape(shapes[number]) + first[number]
        box = piece.box
        part = values[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        for index in np.ndindex(*box.shape):
            at = piece.start + sum(i * s for i, s in zip(index, piece.strides, strict=True))
            assert out[at] == -1
            out[at] = part[index]
    return out


@pytest.mark.parametrize("pack", sorted(PACKINGS))
@pytest.mark.parametrize("transposed", [False, True])
@given(data=st.data())
def test_a_clipped_buffer_has_the_elements_of_the_range(pack, transposed, data):
    shapes = SHAPES[pack]
    whole = PACKINGS[pack](shapes, 2)
    ways = 1 if pack == "interleaved" else data.draw(st.sampled_from([1, 2]))
    held = shard(whole, "column", data.draw(st.integers(0, ways - 1)), ways)
    names = [str(i) for i in range(len(shapes))]
    shape, pieces = buffer(whole, held, names, transposed)
    numel = math.prod(shape)
    low = data.draw(st.integers(0, numel - 1))
    high = data.draw(st.integers(low + 1, numel))
    expected = elements(pieces, shapes, numel)[low:high]
    clipped = [part for piece in pieces for part in clip(piece, low, high)]
    assert elements(clipped, shapes, high - low).tolist() == expected.tolist()
    if not transposed:
        assert len(clipped) <= 2 * len(pieces) + 1


def test_a_cut_in_the_middle_of_a_row_gives_two_pieces():
    piece = buffer(PACKINGS["one"]([(2, 4)], 1), [whole_box((2, 4))], ["a"])[1][0]
    assert [(p.box, p.start) for p in clip(piece, 3, 7)] == [
        (((0, 3), (1, 1)), 0),
        (((1, 0), (1, 3)), 1),
    ]
    assert [move.run for part in clip(piece, 3, 7) for move in moves(part, part)] == [1, 3]


@pytest.mark.parametrize("pack", sorted(PACKINGS))
@pytest.mark.parametrize("transposed", [False, True])
@given(data=st.data())
def test_a_region_of_a_buffer_has_the_elements_of_the_region(pack, transposed, data):
    shapes = SHAPES[pack]
    whole = PACKINGS[pack](shapes, 2)
    names = [str(i) for i in range(len(shapes))]
    shape, pieces = buffer(whole, [whole_box(whole.shape)], names, transposed)
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    region = Box(
        low, tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, low, strict=True))
    )
    expected = elements(pieces, shapes, math.prod(shape)).reshape(shape)
    expected = expected[tuple(slice(o, o + n) for o, n in zip(*region, strict=True))]
    cropped = [part for piece in pieces if (part := crop(piece, shape, region))]
    assert elements(cropped, shapes, math.prod(region.shape)).tolist() == expected.ravel().tolist()


def test_a_piece_across_several_axes_of_a_buffer_is_refused():
    piece = Piece("0", Box((0,), (6,)), 0, (1,))
    with pytest.raises(ValueError, match="strides"):
        crop(piece, (2, 3), Box((0, 0), (2, 2)))
