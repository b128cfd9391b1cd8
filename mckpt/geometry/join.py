"""Joins two layouts over logical boxes into copies of bytes, and proves that each byte is written
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from mckpt.errors import CoverError
from mckpt.geometry.box import (
    Layout,
    Move,
    Piece,
    Rows,
    Stored,
    boxes_of,
    by_axes,
    by_rows,
    coalesce,
    moves,
    num_free,
    tiled,
)
from mckpt.values import adding
from mckpt.values.dtypes import itemsize
from mckpt.values.element import Cast
from mckpt.values.quantisation import WRITTEN, Grid

# One copy: `rows` rows of `run` elements. A pitch is the distance of rows, a step that of
# neighbouring elements in a row. It is 2-D and affine on both sides, so it describes shards of
# columns, interleaving and transposes. 74 bytes.
COPY = np.dtype(
    [
        ("tensor", "i4"),  # number of the logical tensor; `Joined.name` has its name
        ("src_file", "i4"),
        ("dst_file", "i4"),
        ("cast", "u2"),  # index into Joined.casts
        ("grid", "i4"),  # index into Joined.grids, or UNSCALED
        ("rows", "i8"),
        ("run", "i8"),  # elements
        ("src_at", "i8"),  # bytes, as are all further fields
        # in a weight to be quantised, as if each element had a byte: Joined.first_bytes
        ("dst_at", "i8"),
        ("src_pitch", "i8"),
        ("dst_pitch", "i8"),
        ("src_step", "i4"),
        ("dst_step", "i4"),
    ]
)
UNSCALED = -1
PHASE = Grid._fields.index("phase")


class Joined(Struct, frozen=True, eq=False):
    """The copies that fill one layout from another."""

    copies: np.ndarray  # of COPY, in the order of reading
    casts: tuple[Cast, ...]
    # a quantisation.Grid in each row, or ROWS rows for each product of an adapter
    grids: np.ndarray
    names: tuple[str, ...]  # logical templates
    layers: int
    experts: int

    def first_bytes(self) -> np.ndarray:
        """Returns the byte of its target file that holds each copy's first element. It is `dst_at`,
        except in quantised weights with several elements in a byte.
        """
        at = self.copies["dst_at"].copy()
        per_byte = [WRITTEN[c.target].per_byte if c.target in WRITTEN else 1 for c in self.casts]
        packed = np.flatnonzero(np.array([*per_byte, 1])[self.copies["cast"]] > 1)
        for row in packed.tolist():
            grid = Grid(*self.grids[self.copies["grid"][row]].tolist())
            at[row] = grid.byte(int(at[row]))
        return at

    def name(self, tensor: int) -> str:
        """Returns the name of the logical tensor with the number `tensor`."""
        template, instance = divmod(tensor, self.layers * self.experts)
        return self.names[template].format(
            layer=instance // self.experts, expert=instance % self.experts
        )


def join(source: Layout, target: Layout) -> Joined:
    """Returns the copies that fill `target` from `source`, each byte once.

    Raises CoverError with all problems: elements of the target that no piece or several pieces
    fill, elements of the source that no rule names, logical tensors that only one side has.
    """
    every = [s for s in (*source.stored, *target.stored) if len(s)]
    layers = 1 + max((int(s.layer.max()) for s in every), default=0)
    experts = 1 + max((int(s.expert.max()) for s in every), default=0)
    problems = [f"source: {p}" for p in _prove(source, layers, experts)]
    problems += [f"target: {p}" for p in _prove(target, layers, experts)]
    stored, placed = (_present(layout, layers, experts) for layout in (source, target))
    problems += _compare(stored, placed, experts)
    # the rows of the vocabulary may be more in a target that has padding
    problems += [
        f"{name} is {list(shape)} in the source, and {list(target.shapes[name])} in the target"
        for name, shape in source.shapes.items()
        if "{layer}" in name and target.shapes.get(name, shape) != shape
    ]
    if problems:
        raise CoverError.of(
            "the plan would not use each source element and write each target element once:",
            problems,
        )

    names = tuple(sorted(source.shapes))
    number = {name: i * layers * experts for i, name in enumerate(names)}
    casts: dict[Cast, int] = {}
    grids, num_grids = [np.empty((0, len(Grid._fields)), "i8")], 0

    def first_of(rows: np.ndarray) -> int:
        """Adds rows to the grids, and returns the number of the first one."""
        nonlocal num_grids
        grids.append(rows)
        num_grids += len(rows)
        return num_grids - len(rows)

    # the last two: the first row of `grids`, and the rows of each stored tensor
    holders: dict[str, list[tuple[Stored, Sequence[Piece], np.ndarray, int | None, int]]] = {}
    for s in source.stored:
        if not s.replica and len(s):
            first = None
            if s.scales:
                each = np.tile(s.scales.grids, (s.scales.per_byte, 1))
                each[:, PHASE] = np.repeat(np.arange(s.scales.per_byte), len(s.scales.grids))
                first = first_of(each)
            row_of = np.full(_places(s, layers, experts), -1, "i4")
            row_of[_ids(s, experts)] = np.arange(len(s), dtype="i4")
            for name, pieces, added in s.groups():
                start, each_has = first, 1
                if added is not None:
                    start = first_of(s.added[added].reshape(-1, adding.WIDTH))
                    each_has = s.added[added].shape[1]
                holders.setdefault(name, []).append((s, pieces, row_of, start, each_has))
    parts: list[np.ndarray] = []
    for t in target.stored:
        ids = _ids(t, experts)
        quantised = first_of(t.scales.grids) if t.scales else None
        for name, wanted in t.by_name().items():
            for s, pieces, row_of, first, each_has in holders.get(name, ()):
                term = s.term if s.added and first is not None else ""
                assert quantised is None or first is None, (
                    f"{t.key} is quantised in the source and in the target"
                )
                table = _moves(s, pieces, wanted, term, t.shape[-1] if t.scales else 0)
                rows = row_of[ids] if len(table) else ids
                here = np.flatnonzero(rows >= 0)
                rows = rows[here]
                offset = wanted[0].offset - pieces[0].offset
                way = Cast(s.stored_as, t.stored_as, offset, term)
                cast = casts.setdefault(way, len(casts))
                src, dst = itemsize(s.stored_as), itemsize(t.stored_as)
                if not (len(table) and len(here)):
                    continue
                *fields, phase = table.T[:, :, None]
                m = Move(*fields)
                part = np.empty((len(table), len(here)), COPY)
                part["tensor"], part["cast"] = number[name] + ids[here], cast
                part["rows"], part["run"] = m.rows, m.run
                part["grid"] = UNSCALED
                if term:
                    part["grid"] = first + each_has * rows
                elif first is not None:
                    part["grid"] = first + phase * len(s) + rows
                elif quantised is not None:
                    part["grid"] = quantised + here
                part["src_file"], part["dst_file"] = s.file[rows], t.file[here]
                part["src_at"] = s.at[rows] + m.src_start * src
                part["dst_at"] = t.at[here] + m.dst_start * dst
                part["src_pitch"], part["src_step"] = m.src_pitch * src, m.src_step * src
                part["dst_pitch"], part["dst_step"] = m.dst_pitch * dst, m.dst_step * dst
                parts.append(part.reshape(-1).view("u1"))
    # as bytes, because numpy would compare the fields of each two parts
    copies = np.concatenate([np.empty(0, "u1"), *parts]).view(COPY)
    parts.clear()  # they take as much memory
    order = np.lexsort((copies["src_at"], copies["src_file"]))
    return Joined(copies[order], tuple(casts), np.concatenate(grids), names, layers, experts)


def _moves(
    s: Stored, pieces: Sequence[Piece], wanted: Sequence[Piece], term: str, width: int
) -> np.ndarray:
    """Returns the moves from some pieces of a source into some of a target. Each is a row of the
    fields of Move, and the phase of its elements.

    term: of values that are computed. width: of the rows of a target that is quantised, else 0.
    """
    if isinstance(pieces, Rows) and not (term or width or s.scales):
        table = np.concatenate([pieces.moves(w) for w in wanted])
        return np.pad(table, ((0, 0), (0, 1)))
    pairs = ((p, w) for p in pieces for w in wanted)
    found = [m for p, w in pairs for m in (by_axes if term else moves)(p, w)]
    found = found if term else coalesce(found)
    parts = s.phased(found)
    if width:
        parts = [(_back(part), 0) for m in found for part in by_rows(_back(m), width)]
    return np.array([(*m, phase) for m, phase in parts], "i8").reshape(-1, len(Move._fields) + 1)


def proved(layout: Layout) -> None:
    """Raises CoverError unless the pieces that are read have each element of each tensor once."""
    every = [s for s in layout.stored if len(s)]
    layers = 1 + max((int(s.layer.max()) for s in every), default=0)
    experts = 1 + max((int(s.expert.max()) for s in every), default=0)
    if problems := _prove(layout, layers, experts):
        raise CoverError.of("a source does not have each of its elements once:", problems)


def _ids(s: Stored, experts: int) -> np.ndarray:
    return s.layer.astype("i8") * experts + s.expert


def _back(m: Move) -> Move:
    """Returns the move from the target to the source."""
    return Move(
        m.rows, m.run, m.dst_start, m.dst_pitch, m.dst_step, m.src_start, m.src_pitch, m.src_step
    )


def _places(s: Stored, layers: int, experts: int) -> int:
    """Returns how many layers and experts a tensor can have. A carried one has neither; there are
    hundreds of them, and each gets arrays of this length.
    """
    return 1 if s.carried else layers * experts


def _columns(bits: np.ndarray) -> np.ndarray:
    """Numbers the columns of an array of zeros and ones; equal columns get equal numbers.

    Sorting these numbers takes a tenth of the time of sorting columns.
    """
    out = np.zeros(bits.shape[1], "i8")
    for i, row in enumerate(bits, 1):
        out = 2 * out + row
        if i % 32 == 0:  # before the numbers overflow
            out = np.unique(out, return_inverse=True)[1]
    return out


def _prove(layout: Layout, layers: int, experts: int) -> list[str]:
    """Returns the problems of one layout: buffers that their pieces do not fill once, and logical
    tensors that the pieces do not cover once.

    All layers and experts that the same stored tensors hold have one geometry, which is checked
    once.
    """
    problems = []
    holders: dict[str, list[tuple[Stored, Sequence[Piece]]]] = {}
    for s in layout.stored:
        free, wrong = num_free(s.pieces, s.numel, s.shared)
        if wrong:
            problems.append(f"{s.key} {list(s.shape)}: {wrong}")
        elif free and not (s.padding or s.view):
            problems.append(
                f"{s.key} {list(s.shape)}: {free:,} of {s.numel:,} elements hold nothing that the"
                " mapping names"
            )
        for name, pieces in s.by_name().items() if not s.replica else ():
            holders.setdefault(name, []).append((s, pieces))
    for name, owners in holders.items():
        counts = np.stack(
            [
                np.bincount(_ids(s, experts), minlength=_places(s, layers, experts))
                for s, _ in owners
            ]
        )
        if (counts > 1).any():
            row, at = (int(x) for x in np.argwhere(counts > 1)[0])
            problems.append(
                f"{owners[row][0].key} is stored {counts[row, at]} times for layer {at // experts},"
                f" expert {at % experts}"
            )
            continue
        _, first = np.unique(_columns(counts), return_index=True)
        for at in first.tolist():
            way = counts[:, at]
            if way.any():
                held = (pieces for (_, pieces), has in zip(owners, way, strict=True) if has)
                shape = layout.shapes[name]
                boxes = [boxes_of(pieces, len(shape)) for pieces in held]
                low, sizes = map(np.concatenate, zip(*boxes, strict=True))
                if wrong := tiled(low, sizes, shape):
                    problems.append(
                        f"{name.format(layer=at // experts, expert=at % experts)}"
                        f" {list(shape)}: {wrong}"
                    )
    return problems


def _present(layout: Layout, layers: int, experts: int) -> dict[str, np.ndarray]:
    """Returns, for each logical template, a mask of the (layer, expert) that the layout holds."""
    out: dict[str, np.ndarray] = {}
    for s in layout.stored:
        for name in s.tensors if not s.replica else ():
            places = out.setdefault(name, np.zeros(_places(s, layers, experts), bool))
            places[_ids(s, experts)] = True
    return out


def _compare(
    source: dict[str, np.ndarray], target: dict[str, np.ndarray], experts: int
) -> list[str]:
    problems = []
    for name in sorted(source.keys() | target.keys()):
        nothing = np.zeros(1, bool)
        a, b = np.broadcast_arrays(source.get(name, nothing), target.get(name, nothing))
        for at in np.flatnonzero(a != b).tolist():
            full = name.format(layer=at // experts, expert=at % experts)
            problems.append(
                f"{full}: the target has no place for it"
                if a[at]
                else f"{full}: the source does not have it"
            )
    return problems
