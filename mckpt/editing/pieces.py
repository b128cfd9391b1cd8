"""What edits do with a layout: stored tensors again, under other names, in part, and new values."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mckpt.formats.megatron.optimizer import MASTER
from mckpt.geometry.box import Box, Layout, Piece, Stored
from mckpt.lazy import numpy as np

_files: dict[str, Path] = {}  # of new values, by the digest of their content


def again(s: Stored, rows: Sequence[tuple[int, int]]) -> Iterator[Stored]:
    """Yields stored tensors again: pairs of a row of `s` and its new layer."""
    if not rows:
        return
    at = np.array([row for row, _ in rows])
    added = {number: table[at] for number, table in s.added.items()}
    scales = s.scales and s.scales._replace(grids=s.scales.grids[at])
    layer = np.array([new for _, new in rows])
    arrays = {name: getattr(s, name)[at] for name in ("expert", "file", "at")}
    yield replace(s, layer=layer, **arrays, added=added, scales=scales)


def is_moment(name: str) -> bool:
    """Returns whether a logical tensor is a state of the optimizer that is not a master copy."""
    return "@" in name and not name.endswith(f"@{MASTER}")


def under(layout: Layout, names: Mapping[str, str]) -> Layout:
    """Returns some tensors and their states under other names, read from the same places."""

    def new(name: str) -> str | None:
        weight, at, state = name.partition("@")
        return f"{names[weight]}{at}{state}" if weight in names else None

    stored = []
    for s in layout.stored:
        pieces = tuple(p._replace(tensor=n) for p in s.pieces if (n := new(p.tensor)))
        if pieces and not s.replica:
            stored.append(replace(s, pieces=pieces, view=True))
    shapes = {n: shape for name, shape in layout.shapes.items() if (n := new(name))}
    return replace(layout, stored=stored, shapes=shapes)


def rows(piece: Piece, low: int, high: int) -> Iterator[Piece]:
    """Yields the part of a piece in the rows low to high of its tensor, if there is one."""
    first, count = piece.box.offset[0], piece.box.shape[0]
    start, end = max(first, low), min(first + count, high)
    if start < end:
        box = piece.box
        yield piece._replace(
            box=Box((start, *box.offset[1:]), (end - start, *box.shape[1:])),
            start=piece.start + (start - first) * piece.strides[0],
        )


def file_of(content: bytes) -> Path:
    """Returns the temporary file with this content, which is removed when the process ends."""
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _files:
        directory = tempfile.mkdtemp(prefix="mckpt-new-rows-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        _files[digest] = Path(directory, f"{digest[:16]}.bin")
        _files[digest].write_bytes(content)
    return _files[digest]
