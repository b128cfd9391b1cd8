"""Which boxes of a matrix a rank can quantise before it sends them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mckpt.live.quantising import MatrixBox, Rows, boxes_of, grid_of


def pieces(matrix: np.ndarray, rank: int) -> list[Rows]:
    """Returns what a rank sends of a matrix of ranks: of each row, or of all that follow each
    other, the elements that it holds.
    """
    found: list[Rows] = []
    columns = matrix.shape[1]
    for row, held in enumerate(matrix == rank):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], held.astype("i1"), [0]])))
        for start, stop in edges.reshape(-1, 2).tolist():
            at, run = row * columns + start, stop - start
            last = found[-1] if found else None
            if last and last.run == run and last.at + last.rows * columns == at:
                found[-1] = last._replace(rows=last.rows + 1)
            else:
                found.append(Rows(len(found), 1, run, at, columns, 1))
    return found


def box_of(matrix: np.ndarray, rank: int, block: tuple[int, int]) -> MatrixBox | None:
    """Returns the box of whole blocks that the elements of a rank are, by numpy alone."""
    rows, columns = np.nonzero(matrix == rank)
    low, high = (rows.min(), columns.min()), (rows.max() + 1, columns.max() + 1)
    shape = int(high[0] - low[0]), int(high[1] - low[1])
    blocks = np.stack([rows // block[0], columns // block[1]], 1)
    others = np.argwhere(matrix != rank) // np.array(block)
    is_shared = {*map(tuple, blocks.tolist())} & {*map(tuple, others.tolist())}
    if is_shared or shape[0] * shape[1] != len(rows):
        return None
    return MatrixBox(rank, (int(low[0]), int(low[1])), shape, [])


@given(st.data())
def test_boxes_of_whole_blocks_are_quantised_by_their_ranks(data: st.DataObject) -> None:
    number = st.integers(1, 12)
    rows, columns = data.draw(number), data.draw(number)
    block = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    matrix, ranks = np.zeros((rows, columns), int), data.draw(st.integers(1, 3))
    for rank in range(ranks):  # each later rank takes a box of those before
        unit = data.draw(st.sampled_from([(1, 1), block]))
        top, left = (
            data.draw(st.integers(0, (n - 1) // u)) * u
            for n, u in zip(matrix.shape, unit, strict=True)
        )
        matrix[top : top + data.draw(number), left : left + data.draw(number)] = rank
    present = sorted({*matrix.reshape(-1).tolist()})
    held = {rank: pieces(matrix, rank) for rank in present}
    wanted = [box_of(matrix, rank, block) for rank in present]
    found = boxes_of((rows, columns), block, held)
    if None in wanted:
        assert not found
    else:
        assert [box._replace(copies=[]) for box in found] == wanted
        assert [box.copies for box in found] == [[p.copy for p in held[r]] for r in present]
        counts = [np.prod(grid_of(box.shape, block)) for box in found]
        assert sum(counts) == np.prod(grid_of((rows, columns), block))


def test_elements_in_another_order_are_quantised_by_the_receivers() -> None:
    turned = Rows(0, 4, 4, 0, 1, 4)
    assert not boxes_of((4, 4), (2, 2), {0: [turned]})
    halves = [Rows(0, 2, 2, 0, 4, 1), Rows(1, 2, 2, 2, 4, 1)]  # the halves of two rows
    assert not boxes_of((2, 4), (2, 2), {0: halves})
    dense = [Rows(0, 1, 8, 0, 8, 1), Rows(1, 2, 4, 8, 4, 1)]
    assert boxes_of((4, 4), (2, 2), {0: dense}) == [MatrixBox(0, (0, 0), (4, 4), [0, 1])]
