"""Weights with an adapter: a checkpoint whose tensors are those of a base plus the products of an
adapter. They are computed when they are read; see values/adding.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mckpt.adapters.fitting import FactorProduct, Fit, Place, fit
from mckpt.adapters.peft import PeftAdapter
from mckpt.checkpoint.checkpoint import Addition, Checkpoint
from mckpt.errors import SourceError, UsageError, counted
from mckpt.formats import carried
from mckpt.formats.base import Names
from mckpt.geometry.box import Box, Layout, Piece, Stored, overlap, row_major
from mckpt.geometry.parallel import Parallel
from mckpt.lazy import numpy as np
from mckpt.mapping.schema import CARRIED
from mckpt.storage.manifest import Facts
from mckpt.values.adding import (
    COLUMN_WISE,
    FACTORS,
    ROW_WISE,
    WIDTH,
    Factor,
    Product,
    Segment,
)
from mckpt.values.dtypes import itemsize

Source = TypeVar("Source", bound=Checkpoint)


@dataclass(frozen=True)
class Merging(Addition):
    """An adapter that is merged into the weights of a checkpoint while they are read."""

    adapter: PeftAdapter
    fitted: Fit

    @property
    def path(self) -> Path:
        return self.adapter.path

    def made_of(self, file: str) -> Sequence[str]:
        made_of = self.adapter.made_of
        return made_of if made_of and file in self.adapter.files else (file,)

    def layout(self, base: Layout) -> Layout:
        """Returns the layout of the base with the products that are added to its pieces."""
        return merged(base, self.fitted, self.adapter)

    @property
    def facts(self) -> Facts:
        """Returns the manifest's entry on the adapter."""
        text = json.dumps(self.adapter.config, sort_keys=True)
        about = {
            "config": hashlib.sha256(text.encode()).hexdigest(),
            "modules": len(self.fitted.adapted),
            "replaced": len(self.fitted.whole),
            **({"dora": True} if self.fitted.has_magnitudes else {}),
            **({"notes": list(self.fitted.notes)} if self.fitted.notes else {}),
        }
        return {"adapter": about}

    @property
    def notes(self) -> list[str]:
        """Returns sentences on the values."""
        modules, whole = len(self.fitted.adapted), len(self.fitted.whole)
        magnitudes = ", each row gets the length of its magnitude (DoRA)"
        replaced = f"; {counted(whole, 'tensor')} of it replace the base's"
        return [
            f"an adapter of {counted(modules, 'module')} is merged: its products are added in"
            f" float32{magnitudes * self.fitted.has_magnitudes}, and each sum is rounded once"
            f"{replaced * bool(whole)}",
            *self.fitted.notes,
        ]


def merge(base: Source, adapter: PeftAdapter, *, look: bool = True) -> Source:
    """Returns the weights of a base with an adapter.

    look: read the adapter, to refuse values that are not finite.

    Raises SourceError with every tensor of the adapter that does not fit the base, and UsageError
    for a base whose adapted weights are quantised.
    """
    names = base.names
    if base.is_megatron:
        family = base.model.family
        if family is None:
            raise UsageError(
                f"{base.path}: no config.json describes the base, so the names of the adapter's"
                " tensors are not known; give --like HF_DIR"
            )
        names = Names(family, base.dims, {}, Parallel())
    fitted = fit(adapter, names, carried.shapes_in(base.layout), look=look)
    out = replace(base, merging=Merging(adapter, fitted))
    _ = out.layout
    return out


def merged(layout: Layout, fitted: Fit, adapter: PeftAdapter) -> Layout:
    """Returns the layout of a base in which the products of an adapter are added.

    Each stored tensor is cut into those that the adapter changes and the others.
    """
    first = len(layout.files)
    replacing = list(_replacing(layout, fitted, adapter, first))
    if fitted.has_magnitudes:
        fitted = _with_segments(layout.stored, replacing, fitted)
    stored: list[Stored] = []
    seen: set[Place] = set()
    for s in layout.stored:
        templates = set(s.tensors)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, at in enumerate(zip(s.layer.tolist(), s.expert.tolist(), strict=True)):
            places = [(name, *at) for name in sorted(templates)]
            changed = tuple(
                "whole"
                if place in fitted.whole
                else tuple(part.box for part in fitted.parts.get(place, ()))
                for place in places
            )
            seen.update(places)
            groups.setdefault(changed, []).append(row)
        for changed, rows in groups.items():
            some = _rows(s, rows)
            if any(changed):
                stored += _changed(some, fitted, adapter, first)
            else:
                stored.append(some)
    if lost := sorted({*fitted.parts, *fitted.whole} - seen):
        names = [name.format(layer=layer, expert=expert) for name, layer, expert in lost]
        raise SourceError.of(f"{adapter.path}: changes tensors that the base does not have:", names)
    for s in replacing:
        place = (s.pieces[0].tensor, int(s.layer[0]), int(s.expert[0]))
        added = place in fitted.parts
        stored += _changed(s, fitted._replace(whole={}), adapter, first) if added else [s]
    return replace(layout, files=[*layout.files, *adapter.files], stored=stored)


def _rows(s: Stored, rows: list[int]) -> Stored:
    """Returns some of the stored tensors of one geometry."""
    if len(rows) == len(s):
        return s
    at = np.array(rows)
    return replace(s, layer=s.layer[at], expert=s.expert[at], file=s.file[at], at=s.at[at])


def _changed(s: Stored, fitted: Fit, adapter: PeftAdapter, first: int) -> list[Stored]:
    """Returns stored tensors with the products that an adapter adds to them, all in the same way.

    first: the number of the adapter's first file.
    """
    if s.scales or s.rounded_from:
        raise UsageError(
            f"{s.key}: the adapter changes this weight, which is stored"
            f" {'quantised' if s.scales else f'in {s.rounded_from} as the master copy'}; convert"
            " the base to a directory of plain weights first, and merge the adapter into that"
        )
    instances = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
    pieces: list[Piece] = []
    added: dict[int, np.ndarray] = {}
    for piece in s.pieces:
        place = (piece.tensor, *instances[0])
        boxes = [fitted.whole[place][0]] if place in fitted.whole else []
        parts = () if boxes else fitted.parts.get(place, ())
        parts_of = [fitted.parts.get((piece.tensor, *at), ()) for at in instances]
        for number, part in enumerate(parts):
            if (inner := _within(piece, part.box)) is None:
                continue
            words = [
                _product(s, row, inner, own[number], first).words()
                for row, own in enumerate(parts_of)
            ]
            longest = max(map(len, words))
            words = [one + [0] * (longest - len(one)) for one in words]
            added[len(pieces)] = np.array(words, "i8").reshape(len(s), -1, WIDTH)
            pieces.append(inner)
        pieces += _beyond(piece, [*boxes, *(part.box for part in parts)])
    if not pieces:
        return []
    return [replace(s, pieces=tuple(pieces), added=added, view=s.view or not added)]


def _within(piece: Piece, box: Box) -> Piece | None:
    """Returns the part of a piece that lies in a box of its tensor, None if there is none."""
    inner = overlap(piece.box, box)
    if inner is None:
        return None
    skipped = (a - b for a, b in zip(inner.offset, piece.box.offset, strict=True))
    start = piece.start + sum(n * step for n, step in zip(skipped, piece.strides, strict=True))
    return piece._replace(box=inner, start=start)


def _beyond(piece: Piece, boxes: Sequence[Box]) -> list[Piece]:
    """Returns the rows of a piece behind all boxes, which together start at row 0: those of a
    vocabulary's padding.
    """
    end = max((box.offset[0] + box.shape[0] for box in boxes), default=0)
    (top, *left), (height, *width) = piece.box
    first = max(end, top)
    found = _within(piece, Box((first, *left), (max(0, top + height - first), *width)))
    return [] if found is None else [found]


def _product(s: Stored, row: int, piece: Piece, part: FactorProduct, first: int) -> Product:
    """Returns the product that is added to a piece of one stored tensor."""
    skipped = [a - b for a, b in zip(piece.box.offset, part.box.offset, strict=True)]
    left, right = (f._replace(file=f.file + first) for f in (part.left, part.right))
    at = int(s.at[row]) + piece.start * itemsize(s.stored_as)
    down, along = piece.strides
    if turned := down < along:  # the buffer has the columns one after the other
        (down, along), (left, right) = (along, down), (right.turned, left.turned)
        skipped.reverse()
    row_of, column_of = skipped
    product = Product(at, down, along, row_of, column_of, part.rank, part.scale, left, right)
    if part.magnitudes is None:
        return product
    magnitudes = part.magnitudes._replace(file=part.magnitudes.file + first)
    axis = ROW_WISE + COLUMN_WISE - part.axis if turned else part.axis
    return product._replace(axis=axis, magnitudes=magnitudes, segments=part.segments)


def _with_segments(base: Iterable[Stored], replacing: Iterable[Stored], fitted: Fit) -> Fit:
    """Returns the same adapter, in which each product with magnitudes knows where the whole weight
    is stored.

    replacing: tensors of the adapter that replace those of the base.
    """
    segments: dict[tuple[Place, int], list[Segment]] = {}
    kept = (one for one in _placed(base) if one[0] not in fitted.whole)
    for place, s, row, piece in itertools.chain(kept, _placed(replacing)):
        for number, part in enumerate(fitted.parts.get(place, ())):
            if (inner := _within(piece, part.box)) is not None:
                found = segments.setdefault((place, number), [])
                found.append(_segment(s, row, inner, part))
    return fitted._replace(
        parts={
            place: [
                part._replace(segments=tuple(segments.get((place, number), ())))
                for number, part in enumerate(several)
            ]
            for place, several in fitted.parts.items()
        }
    )


def _placed(stored: Iterable[Stored]) -> Iterator[tuple[Place, Stored, int, Piece]]:
    """Yields each piece of stored tensors with its place and the number of its stored tensor."""
    for s in stored:
        instances = zip(s.layer.tolist(), s.expert.tolist(), strict=True)
        for row, (layer, expert) in enumerate(instances if not s.replica else ()):
            for piece in s.pieces:
                yield (piece.tensor, layer, expert), s, row, piece


def _segment(s: Stored, row: int, piece: Piece, part: FactorProduct) -> Segment:
    """Returns a piece of one stored tensor as a segment of a product's box."""
    skipped = [a - b for a, b in zip(piece.box.offset, part.box.offset, strict=True)]
    at, shape = int(s.at[row]) + piece.start * itemsize(s.stored_as), piece.box.shape
    down, along = piece.strides
    stored = Factor(int(s.file[row]), at, down, along, FACTORS.index(s.stored_as))
    if part.axis == ROW_WISE:
        return Segment(stored, *skipped, *shape)
    return Segment(stored.turned, *reversed(skipped), *reversed(shape))


def _replacing(layout: Layout, fitted: Fit, adapter: PeftAdapter, first: int) -> Iterable[Stored]:
    """Returns the tensors of an adapter that replace those of its base, in the base's dtype."""
    dtypes = {n: s.dtype for s in layout.stored if not s.replica for n in s.tensors}
    for (name, layer, expert), (box, row) in fitted.whole.items():
        entry = adapter.entries.entry(row)
        piece = Piece(name, box, 0, row_major(entry.shape))
        where = np.array([[layer], [expert], [entry.file + first], [entry.at]], "i8")
        wide = entry.dtype if entry.dtype != dtypes[name] else None
        yield Stored(
            adapter.key(row),
            dtypes[name],
            entry.shape,
            (piece,),
            *where,
            rounded_from=wide,
            carried=name.startswith(CARRIED),
        )
