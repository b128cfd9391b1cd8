"""The steps of which edits are made. They read a stored tensor a second time, under another name or
in part, or add new values to a layout.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mckpt.errors import MappingError, UsageError
from mckpt.formats.megatron.optimizer import MASTER
from mckpt.geometry.box import NEW, ZEROS, Box, Layout, Piece, Rows, Stored, row_major
from mckpt.lazy import numpy as np
from mckpt.mapping.nodes import load
from mckpt.storage import sparse_copy
from mckpt.values.quantisation import Grid

ADAM = {MASTER, "exp_avg", "exp_avg_sq"}  # the states that new weights can have
FOLDER = "mckpt-new-rows"  # the directory of new values, in a temporary one
_folders: list[Path] = []  # those directories; the end of a command removes them


def loaded(path: Path) -> Any:
    """Reads a YAML file of the user. Raises UsageError if it cannot be read or is not YAML."""
    try:
        return load(path.read_text(encoding="utf-8"), path.name)
    except (OSError, ValueError, MappingError) as e:
        raise UsageError(f"{path}: {getattr(e, 'strerror', None) or e}") from None


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


def in_files(s: Stored, numbers: np.ndarray) -> Stored:
    """Returns stored tensors among the files of another layout, with their scales.

    numbers: that of each file there.
    """
    scales = s.scales
    if scales is not None:
        grids = scales.grids.copy()
        for name in ("file", "overall_file"):
            column = Grid._fields.index(name)
            grids[:, column] = numbers[grids[:, column]]
        scales = scales._replace(grids=grids)
    return replace(s, file=numbers[s.file], scales=scales)


def is_moment(name: str) -> bool:
    """Returns whether a logical tensor is a state of the optimizer that is not a master copy."""
    return "@" in name and not name.endswith(f"@{MASTER}")


def kinds_of(layout: Layout) -> dict[str, dict[str, str]]:
    """Returns the states that the optimizer has of each logical tensor: kind -> dtype."""
    found: dict[str, dict[str, str]] = {}
    for s in layout.stored:
        for weight, at, kind in (name.partition("@") for name in s.tensors):
            own = found.setdefault(weight, {})
            own |= {kind: s.dtype} if at else {}
    return found


def kinds_of_new(edit: str, layout: Layout) -> dict[str, str]:
    """Returns the states that new weights get, as the norm at the end has them: kind -> dtype.
    Raises UsageError, which names the edit, for an optimizer of which mckpt makes no new state.
    """
    kinds = kinds_of(layout)
    if strange := {kind for own in kinds.values() for kind in own} - ADAM:
        raise UsageError(
            f"{edit}: new weights have no state of the optimizer of SRC"
            f" ({', '.join(sorted(strange))}); give --no-optimizer"
        )
    return kinds["final_norm.weight"]


def only(stored: Iterable[Stored], keep: Callable[[str], bool]) -> Iterator[Stored]:
    """Yields stored tensors with those of their pieces whose logical name is kept."""
    for s in stored:
        if all(map(keep, s.tensors)):
            yield s
            continue
        pieces = tuple(p for p in s.pieces if keep(p.tensor))
        if pieces:
            yield replace(s, pieces=pieces, view=True)


def parted(s: Stored, wanted: Callable[[str, int, int], bool]) -> tuple[list[Stored], list[Stored]]:
    """Returns the parts of stored tensors that hold the wanted weights and their states, and the
    rest.

    wanted: is given the template of a weight, the layer and the expert.
    """
    names = sorted(set(s.tensors))
    rows_of: dict[frozenset[str], list[tuple[int, int]]] = {}
    for row, place in enumerate(zip(s.layer.tolist(), s.expert.tolist(), strict=True)):
        here = frozenset(name for name in names if wanted(name.partition("@")[0], *place))
        rows_of.setdefault(here, []).append((row, place[0]))
    found, rest = list[Stored](), list[Stored]()
    for here, numbers in rows_of.items():
        part = list(again(s, numbers))
        found += only(part, here.__contains__)
        rest += only(part, frozenset(names).difference(here).__contains__)
    return found, rest


def zeroed(s: Stored, piece: Piece, name: str, dtype: str, zeros: int) -> Stored:
    """Returns zeros for the box of a piece, under a logical name. zeros: the number of ZEROS."""
    where = np.array([s.layer, s.expert, [zeros] * len(s), [0] * len(s)], "i8")
    own = Piece(name, piece.box, 0, row_major(piece.box.shape))
    return Stored(f"{NEW}zeros in place of {s.key}", dtype, piece.box.shape, (own,), *where)


def with_new_states(layout: Layout, wanted: Mapping[str, Mapping[str, str]]) -> Layout:
    """Returns the weights of a layout with new states: moments of zero, and master copies that
    equal the weights.

    wanted: the kinds of each weight's states, and their dtypes.
    """
    files, stored = [*layout.files], list(only(layout.stored, lambda name: "@" not in name))
    for s in [*stored]:
        for piece in (p for p in s.pieces if not (p.copy or s.replica)):
            for kind, dtype in wanted.get(piece.tensor, {}).items():
                name = f"{piece.tensor}@{kind}"
                if is_moment(name):
                    stored.append(zeroed(s, piece, name, dtype, number_of(files, ZEROS)))
                    continue
                own = (piece._replace(tensor=name),)
                wide = s.stored_as if s.stored_as != dtype else None
                stored.append(replace(s, dtype=dtype, pieces=own, rounded_from=wide, view=True))
    shapes = {n: layout.shapes[n.partition("@")[0]] for s in stored for n in s.tensors}
    return replace(layout, files=files, stored=stored, shapes=shapes)


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


def rows(piece: Piece, low: int, high: int, axis: int = 0) -> Iterator[Piece]:
    """Yields the part of a piece in the rows low to high of its tensor, or along another axis, if
    there is one.
    """
    first, count = piece.box.offset[axis], piece.box.shape[axis]
    start, end = max(first, low), min(first + count, high)
    if start < end:
        offset, shape = list(piece.box.offset), list(piece.box.shape)
        offset[axis], shape[axis] = start, end - start
        yield piece._replace(
            box=Box(tuple(offset), tuple(shape)),
            start=piece.start + (start - first) * piece.strides[axis],
        )


def scattered(pieces: Sequence[Piece], old_of: np.ndarray) -> Rows:
    """Returns the rows of pieces, which differ in nothing but their rows, at their new places.

    old_of: the old row of each new one, -1 if it has none.
    """
    like, step = pieces[0], pieces[0].strides[0]
    if not isinstance(pieces, Rows):
        table = [(p.box.offset[0], p.box.shape[0], p.start) for p in pieces]
        pieces = Rows(like, *np.array(table, "i8").T)
    within = np.arange(pieces.rows.sum())
    within -= np.repeat(np.cumsum(pieces.rows) - pieces.rows, pieces.rows)
    old = np.repeat(pieces.first, pieces.rows) + within
    place_of = np.full(max(old.max(), old_of.max()) + 2, -1)  # the last: of rows that are new
    place_of[old] = np.repeat(pieces.start, pieces.rows) + within * step
    at = place_of[old_of]
    new = np.flatnonzero(at >= 0)
    return joined(like, new, at[new])


def joined(like: Piece, new: np.ndarray, at: np.ndarray) -> Rows:
    """Returns pieces like `like` with the rows `new` of a tensor, which start at the elements `at`
    of a buffer. Rows that follow each other in both are one piece.
    """
    apart = (np.diff(new) != 1) | (np.diff(at) != like.strides[0])
    starts = np.flatnonzero(np.concatenate([new[:1] == new[:1], apart]))
    return Rows(like, new[starts], np.diff(starts, append=len(new)), at[starts])


def new_values(
    files: list[str], path: str, name: str, layer: int, box: Box, dtype: str, at: int = 0
) -> Stored:
    """Returns a box of a logical tensor that no checkpoint has.

    files: those of the layout, to which a new one is added. path: of a file that has float32 from
        byte `at` on, or ZEROS.
    """
    piece = Piece(name, box, 0, row_major(box.shape))
    where = np.array([[layer], [0], [number_of(files, path)], [at]], "i8")
    wide = None if path == ZEROS or dtype == "float32" else "float32"
    return Stored(f"{NEW}{name}", dtype, box.shape, (piece,), *where, rounded_from=wide)


def number_of(files: list[str], path: str | Path) -> int:
    """Returns the number of a file among those of a layout, to which it is added if it is new."""
    if str(path) not in files:
        files.append(str(path))
    return files.index(str(path))


def is_made(file: str) -> bool:
    """Returns whether a file is one of `file_of`."""
    return Path(file).parent.name == FOLDER


def digest_of(layout: Layout) -> str:
    """Returns a digest of the places of the tensors of a layout."""
    headers = hashlib.sha256()
    for s in layout.stored:
        for array in (s.layer, s.expert, s.file, s.at):
            headers.update(np.ascontiguousarray(array).tobytes())
        headers.update(f"{s.key} {s.stored_as} {s.shape}".encode())
    return headers.hexdigest()


def refuse_changed(path: Path, layout: Layout, digest: str, result: Path) -> None:
    """Raises UsageError for a checkpoint whose layout has another digest than a manifest has."""
    if digest_of(layout) != digest:
        raise UsageError(
            f"{path}: is not a checkpoint of which {result} was made, or has changed since: its"
            " tensors lie in other places"
        )


def file_of(content: bytes | Iterable[bytes]) -> Path:
    """Returns the temporary file with this content, whole or in parts, which is removed when the
    process ends.
    """
    folder = next((one for one in _folders if one.exists()), None)
    if folder is None:
        folder = sparse_copy.temporary() / FOLDER
        folder.mkdir()
        _folders.append(folder)
    sum_ = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        for part in [content] if isinstance(content, bytes) else content:
            sum_.update(part)
            file.write(part)
    return Path(file.name).rename(folder / f"{sum_.hexdigest()[:16]}.bin")
