"""Packings: how several logical tensors are laid out in one stored tensor.

Each packing is written once, as a list of boxes and their places, in storage order:

    one      [ a ]
    concat   [ a | b | c ]                   along axis 0; tensor parallelism cuts the whole
    gated    [ gate | up ]                   along axis 0; tensor parallelism cuts each part
    qkv      [ q0 q1 k0 v0 | q2 q3 k1 v1 ]   along axis 0, one group of heads after the other, by
                                             default one query group (Megatron-Core, attention.py)
    gated_qkv  [ q0 g0 q1 g1 k0 v0 | ... ]  as qkv, but a head of q and its gate take turns
    interleaved  [ a0 b0 a1 b1 ]             along axis 0, the rows of all in turn
    swapped  [ a1 | a0 ]                     along axis 1, the halves of one tensor
    halved   [ a0 a2 a4 | a1 a3 a5 ]         along axis 0, the halves of each group of one tensor:
                                             all first ones, then all second ones
    paired   [ a0 a2 a1 a3 | a4 a6 a5 a7 ]   along axis 0, the halves of each group of one tensor:
                                             the rows of both in turn, for a rotary embedding that
                                             turns neighbours
    heads    [ a0 a2 a4 | a1 a3 a5 ]         along axis 0, the heads of a tensor [q | k | v]: q, k
                                             and v of one head after the other; several tensors,
                                             such as those of all layers, follow each other

Before megatron-core, Megatron-LM packed q, k and v in three ways: `gated` (checkpoint_version 0),
`interleaved` (1) and `qkv` (2 and 3; checkpointing.py, fix_query_key_value_ordering).

All numbers are elements. Tensors have no layer and expert axes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mckpt.geometry.box import Box, Piece, overlap, row_major, whole_box

Shape = tuple[int, ...]


class Placed(NamedTuple):
    """A box of one logical tensor and its place in the packed tensor."""

    member: int  # number of the logical tensor
    box: Box
    at: tuple[int, ...]  # offset of the box in the packed tensor
    step: int = 1  # of the box's rows in the packed tensor; if not 1, only rows can be cut


class Packed(NamedTuple):
    """A whole stored tensor."""

    shape: Shape
    placed: tuple[Placed, ...]  # in storage order
    parts: tuple[int, ...]  # rows of each part that tensor parallelism cuts on its own
    offset: float = 0.0  # see Piece


class PackingError(ValueError):
    """The shapes do not fit the packing."""


def _stack(shapes: Sequence[Shape]) -> tuple[Placed, ...]:
    placed, at = [], 0
    for m, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:]:
            raise PackingError(
                f"cannot be stacked along axis 0: {list(shapes[0])} and {list(shape)}"
            )
        placed.append(Placed(m, whole_box(shape), (at, *(0,) * (len(shape) - 1))))
        at += shape[0]
    return tuple(placed)


def one(shapes: Sequence[Shape], groups: int) -> Packed:
    (shape,) = shapes
    return Packed(shape, (Placed(0, whole_box(shape), (0,) * len(shape)),), shape[:1])


def concat(shapes: Sequence[Shape], groups: int) -> Packed:
    rows = sum(s[0] for s in shapes)
    return Packed((rows, *shapes[0][1:]), _stack(shapes), (rows,))


def gated(shapes: Sequence[Shape], groups: int) -> Packed:
    return Packed(
        (sum(s[0] for s in shapes), *shapes[0][1:]), _stack(shapes), tuple(s[0] for s in shapes)
    )


def qkv(shapes: Sequence[Shape], groups: int) -> Packed:
    rest = shapes[0][1:]
    zeros = (0,) * len(rest)
    for number, shape in enumerate(shapes):
        if shape[0] % groups or shape[1:] != rest:
            raise PackingError(
                f"tensor {number} {list(shape)} does not fall into {groups} groups of the same"
                f" width as tensor 0 {list(shapes[0])}"
            )
    placed, at = [], 0
    for g in range(groups):
        for m, shape in enumerate(shapes):
            rows = shape[0] // groups
            placed.append(Placed(m, Box((g * rows, *zeros), (rows, *rest)), (at, *zeros)))
            at += rows
    return Packed((at, *rest), tuple(placed), (at,))


def gated_qkv(shapes: Sequence[Shape], groups: int) -> Packed:
    q, gate, k, v = shapes
    width = k[0] // groups  # rows of a head
    if q != gate or k != v or k[0] % groups or not width or q[0] % k[0]:
        raise PackingError(
            f"q {list(q)}, gate {list(gate)}, k {list(k)} and v {list(v)} do not fall into"
            f" {groups} groups of heads"
        )
    rest, each = q[1:], q[0] // k[0]
    order = [(m, g * each + h) for g in range(groups) for h in range(each) for m in (0, 1)]
    for g in range(groups, 0, -1):  # behind the heads of each group
        order[2 * each * g : 2 * each * g] = [(2, g - 1), (3, g - 1)]
    zeros = (0,) * len(rest)
    placed = tuple(
        Placed(m, Box((head * width, *zeros), (width, *rest)), (at * width, *zeros))
        for at, (m, head) in enumerate(order)
    )
    rows = len(order) * width
    return Packed((rows, *rest), placed, (rows,))


def interleaved(shapes: Sequence[Shape], groups: int) -> Packed:
    if len(set(shapes)) > 1:
        raise PackingError(f"rows cannot take turns: {list(shapes[0])} and {list(shapes[-1])}")
    shape, count = shapes[0], len(shapes)
    zeros = (0,) * (len(shape) - 1)
    placed = [Placed(m, whole_box(shape), (m, *zeros), count) for m in range(count)]
    rows = count * shape[0]
    return Packed((rows, *shape[1:]), tuple(placed), (rows,))


def swapped(shapes: Sequence[Shape], groups: int) -> Packed:
    (shape,) = shapes
    if len(shape) != 2 or shape[1] % 2:
        raise PackingError(f"{list(shape)} has no two halves of columns")
    rows, half = shape[0], shape[1] // 2
    placed = [Placed(0, Box((0, half - at), (rows, half)), (0, at)) for at in (0, half)]
    return Packed(shape, tuple(placed), (rows,))


def halved(shapes: Sequence[Shape], groups: int) -> Packed:
    return _halves(shapes, groups, lambda half, g, rows: (half * groups + g) * rows, 1)


def paired(shapes: Sequence[Shape], groups: int) -> Packed:
    return _halves(shapes, groups, lambda half, g, rows: 2 * g * rows + half, 2)


def _halves(
    shapes: Sequence[Shape], groups: int, row: Callable[[int, int, int], int], step: int
) -> Packed:
    (shape,) = shapes
    if shape[0] % (2 * groups):
        raise PackingError(f"{list(shape)} does not fall into {groups} groups of two halves")
    rows, rest = shape[0] // (2 * groups), shape[1:]
    zeros = (0,) * len(rest)
    placed = [
        Placed(
            0,
            Box(((2 * g + half) * rows, *zeros), (rows, *rest)),
            (row(half, g, rows), *zeros),
            step,
        )
        for half in range(2)
        for g in range(groups)
    ]
    return Packed(shape, tuple(placed), (shape[0],))


def heads(shapes: Sequence[Shape], groups: int) -> Packed:
    rest = shapes[0][1:]
    zeros = (0,) * len(rest)
    placed, at = list[Placed](), 0
    for m, shape in enumerate(shapes):
        if shape[0] % (3 * groups) or shape[1:] != rest:
            raise PackingError(f"{list(shape)} does not fall into q, k and v of {groups} heads")
        rows = shape[0] // (3 * groups)
        for first in range(groups):
            for part in range(3):
                box = Box(((part * groups + first) * rows, *zeros), (rows, *rest))
                placed.append(Placed(m, box, (at, *zeros)))
                at += rows
    return Packed((at, *rest), tuple(placed), (at,))


PACKINGS: dict[str, Callable[[Sequence[Shape], int], Packed]] = {
    "one": one,
    "concat": concat,
    "gated": gated,
    "qkv": qkv,
    "gated_qkv": gated_qkv,
    "interleaved": interleaved,
    "swapped": swapped,
    "halved": halved,
    "paired": paired,
    "heads": heads,
}
TP_KINDS = ("column", "row", "vocab", "replicated")


def padded(packed: Packed, rows: int) -> Packed:
    """Returns the packed tensor with `rows` rows; no box covers the rows that this adds."""
    return packed._replace(shape=(rows, *packed.shape[1:]), parts=(rows,))


def shard(packed: Packed, kind: str, rank: int, size: int) -> list[Box]:
    """Returns the boxes of the packed tensor that one tensor-parallel rank holds.

    They are in the order in which its shard stacks them along axis 0.
    """
    shape = packed.shape
    if kind == "replicated" or size == 1:
        return [whole_box(shape)]
    zeros = (0,) * (len(shape) - 1)
    if kind == "row":
        n = _divide(shape[1], size, "columns")
        return [Box((0, rank * n), (shape[0], n))]
    out, first = [], 0
    for rows in packed.parts:
        n = _divide(rows, size, "rows")
        out.append(Box((first + rank * n, *zeros), (n, *shape[1:])))
        first += rows
    return out


def _divide(n: int, size: int, what: str) -> int:
    if n % size:
        raise PackingError(f"{n} {what} are not divisible by {size}")
    return n // size


def buffer(
    packed: Packed, boxes: Sequence[Box], names: Sequence[str], transposed: bool = False
) -> tuple[Shape, tuple[Piece, ...]]:
    """Returns the shape and the pieces of a buffer that stacks `boxes` of the packed tensor.

    boxes: stacked along axis 0.
    names: logical names of the members. A name that comes again is a further copy.
    transposed: the buffer stores the transpose of the stack.
    """
    if not packed.shape:  # a single number
        return (), (Piece(names[0], whole_box(()), 0, (), packed.offset),)
    shape = (sum(b.shape[0] for b in boxes), *boxes[0].shape[1:])
    strides = row_major(shape[::-1])[::-1] if transposed else row_major(shape)
    pieces, above = [], 0
    for region in boxes:
        for member, box, at, step in packed.placed:
            copy = names[member] in names[:member]
            if step != 1:
                if region.shape[1:] != packed.shape[1:]:
                    raise PackingError("a tensor whose rows take turns cannot be cut in columns")
                # the rows of the box that lie in the region
                skipped = region.offset[0] - at[0]
                low = max(0, -(-skipped // step))
                high = min(box.shape[0], -(-(skipped + region.shape[0]) // step))
                if low < high:
                    start = (low * step - skipped + above) * strides[0]
                    rows = Box((box.offset[0] + low, *box.offset[1:]), (high - low, *box.shape[1:]))
                    stepped = (step * strides[0], *strides[1:])
                    pieces.append(Piece(names[member], rows, start, stepped, copy=copy))
                continue
            hit = overlap(Box(at, box.shape), region)
            if hit is None:
                continue
            inner = tuple(h - a + o for h, a, o in zip(hit.offset, at, box.offset, strict=True))
            place = [h - r for h, r in zip(hit.offset, region.offset, strict=True)]
            place[0] += above
            start = sum(p * s for p, s in zip(place, strides, strict=True))
            part = Box(inner, hit.shape)
            pieces.append(Piece(names[member], part, start, strides, packed.offset, copy))
        above += region.shape[0]
    return (shape[::-1] if transposed else shape), tuple(pieces)
