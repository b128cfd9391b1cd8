"""The edit of the vocabulary: other rows, which are old ones in a new order or have new values."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.editing.edits import KEPT, Edit, Editing
from mckpt.editing.pieces import file_of, is_moment, joined, number_of, only, scattered
from mckpt.editing.tokens import Tokenizer, restated
from mckpt.errors import SourceError, UsageError, counted
from mckpt.formats.hf_config import (
    CONFIG,
    FAST_TOKENIZER,
    GENERATION,
    is_of_tokenizer,
    side_files,
)
from mckpt.formats.scaling import scaled_again
from mckpt.geometry.box import NEW, ZEROS, Box, Layout, Piece, Rows, Stored, row_major
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims
from mckpt.storage.files import read_file, read_json

INITS = ("mean", "normal", "zero", "subword")
VARIANCE = 1e-9  # of new rows, as a part of that of the old ones: that of transformers
RIDGE = 1e-12  # of the mean variance, added to each one, as rounding may make a small one negative
BLOCK = 1024  # rows in memory at once
MEANS = 128  # rows that are means of some old ones, and are computed at once
ADDED = 256  # rows that one of the THREADS adds at once
THREADS = 4  # at most
SHARES = 16  # of the columns of a product of matrices: as many threads at most
ROWS = re.compile(r"(embed|lm_head)\.(weight|bias)(@.*)?")  # the tensors with a row for each token
MOST_ROWS = 1 << 24  # 64 times those of the largest models; 700 MB of memory in a plan
MOST_SHOWN = 8  # ranges of rows in a message
_KEYS = {"size", "init", "seed", "tokenizer", "map"}


@dataclass(frozen=True, eq=False)
class Vocabulary(Edit):
    """Changes the rows of the vocabulary.

    size: the new number. init: of a row that is not an old one: "mean", the mean of the old rows,
        as float64 sums rounded to float32; "normal", around the mean, with VARIANCE of the
        covariance of the old rows, drawn with `seed`; "zero"; "subword", the mean of the rows of
        `pieces`; or the number of the row that it is a copy of. Moments of new rows are zero, and
        their master copies are the new rows in float32.
    kept: the old row of each new one, -1 if it is new; None if each keeps its number. tokenizer:
        the directory of the new tokenizer. old_tokenizer: whether that of the source still fits.
        old_size: the rows before the edit.
    """

    size: int
    init: int | str = "mean"
    seed: int = 0
    kept: np.ndarray | None = None
    pieces: tuple[tuple[int, tuple[int, ...]], ...] = ()
    tokenizer: str = ""
    old_tokenizer: bool = True
    old_size: int = 0
    # the file of the new rows of each weight, which are computed once
    _written: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)
    contract = KEPT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.data == other.data

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Vocabulary:
        init, seed, size = given.get("init", "mean"), given.get("seed", 0), given.get("size")
        if isinstance(init, bool) or (isinstance(init, str) and init not in INITS):
            raise ValueError(f"init is {', '.join(INITS)} or the number of a row")
        if given.keys() - _KEYS or type(seed) is not int or type(size) not in (int, type(None)):
            raise ValueError("wants size, a number of rows, init, seed, tokenizer and map")
        if init == "subword" and "tokenizer" not in given:
            raise ValueError("init subword needs tokenizer, the directory of the new one")
        pairs, directory, most = dict[int, int](), str(given.get("tokenizer", "")), -1
        if directory:
            if not Path(directory, FAST_TOKENIZER).is_file():
                raise ValueError(f"{directory} has no {FAST_TOKENIZER}, which describes its tokens")
            most = Tokenizer(Path(directory)).last
        if "map" in given:
            pairs = _numbers(Path(str(given["map"])))
            most = max([most, *pairs])
        if size is None and most < 0:
            raise KeyError("size")
        size = _bounded(most + 1 if size is None else size)
        if size <= most:
            raise ValueError(f"size {size} has no row for token {most}")
        kept = _old_rows(size, pairs) if "map" in given else None
        return Vocabulary(size, init, seed, kept, tokenizer=directory)

    @classmethod
    def again(cls, data: Any, dims: Dims) -> Vocabulary:
        text, pieces = (msgspec.convert(data[name], str | None) for name in ("kept", "pieces"))
        kept = None if text is None else _from_text(text, _bounded(data["size"]))
        found: Vocabulary = msgspec.convert({**data, "kept": None, "pieces": ()}, cls)
        parted = (one.partition("=") for one in (pieces or "").split(",") if one)
        lists = tuple((int(number), (*map(int, of.split("+")),)) for number, _, of in parted)
        return replace(found, kept=kept, pieces=lists)

    def of_source(self, source: Checkpoint, dims: Dims, before: Sequence[Edit]) -> Vocabulary:
        edited = Editing(tuple(before), source)
        found = [edited.beside(files) for files in _files_beside(source)]
        paths = [path for files in found if isinstance(path := files.get(FAST_TOKENIZER), Path)]
        tokenizers = [Tokenizer(path.parent) for path in paths]
        self._refuse_lost(tokenizers)
        old = next(iter(tokenizers), None)
        count = dims["vocab_size"]
        out = replace(self, old_size=count, _written={})
        if self.tokenizer:
            if old is None:
                if self.kept is None or self.init == "subword":
                    raise UsageError(
                        f"vocab: {source.path} has no {FAST_TOKENIZER}, whose tokens are looked for"
                        f" in {self.tokenizer}; put it there, or give map, without init subword"
                    )
                return out
            new = Tokenizer(Path(self.tokenizer))
            if self.kept is None:
                same = {n: o for n, o in new.same_as(old) if o < count}
                out = replace(out, kept=_old_rows(self.size, same))
            if self.init == "subword":
                tokens = {number: token for token, number in new.ids.items()}
                wanted = [n for n in np.flatnonzero(out.old_of(count) < 0).tolist() if n in tokens]
                split = old.pieces((tokens[n] for n in wanted), new)
                pairs = zip(wanted, split, strict=True)
                pieces = ((n, tuple(p for p in one if p < count)) for n, one in pairs)
                out = replace(out, pieces=tuple(one for one in pieces if one[1]))
        elif self.kept is not None and old is not None:
            fits = all(out.place(n) == n for n in old.ids.values())
            out = replace(out, old_tokenizer=fits)
        for files in found:
            out.beside(files)  # raises an error before anything is read
        return out

    def _refuse_lost(self, tokenizers: Iterable[Tokenizer]) -> None:
        """Raises UsageError if the rows of a tokenizer that stays are left out."""
        if self.kept is not None or self.tokenizer:
            return
        last, path = max(((t.last, t.directory) for t in tokenizers), default=(-1, None))
        if last >= self.size:
            raise UsageError(
                f"vocab: size {self.size}: the tokenizer in {path} has tokens up to {last}; give at"
                f" least {last + 1}, or a source whose tokenizer has fewer"
            )

    @property
    def data(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "init": self.init,
            "seed": self.seed,
            "kept": self._text,
            "pieces": ",".join(f"{n}={'+'.join(map(str, found))}" for n, found in self.pieces),
            "old_tokenizer": self.old_tokenizer,
        }

    @property
    def words(self) -> str:
        new = f"copies of row {self.init}" if isinstance(self.init, int) else self.init
        said = f"the vocabulary has {counted(self.size, 'row')}"
        if self.kept is not None:
            said += f", {np.count_nonzero(self.kept >= 0):,} of them old ones"
        said += f"; new ones are {new}"
        return said + "; the tokenizer is left out, because its tokens have other numbers" * (
            not self.old_tokenizer
        )

    @cached_property
    def _text(self) -> str | None:
        """Returns `kept` as text: ranges of old rows in the order of the new ones, and +N for N
        rows that are new.
        """
        if self.kept is None:
            return None
        step = np.diff(self.kept)
        apart = (step != 1) | (self.kept[1:] == 0)
        apart &= (step != 0) | (self.kept[1:] >= 0)
        starts = np.flatnonzero(np.concatenate([[True], apart]))
        counts = np.diff(starts, append=self.size).tolist()
        found = zip(self.kept[starts].tolist(), counts, strict=True)
        return ",".join(
            f"+{n}" if old < 0 else f"{old}-{old + n - 1}" if n > 1 else f"{old}"
            for old, n in found
        )

    def dims(self, dims: Dims) -> Dims:
        old, high = dims["vocab_size"], -1 if self.kept is None else int(self.kept.max(initial=-1))
        of_init = self.init if isinstance(self.init, int) else 0
        if self.size < 1 or not 0 <= of_init < old or high >= old:
            of_map = "" if self.kept is None else f", row {high} of map"
            raise UsageError(
                f"vocab: size {self.size}, init {self.init}{of_map}: the vocabulary has the rows 0"
                f" to {old - 1}"
            )
        if dims["layer_embed_dim"]:
            raise UsageError("vocab: the model has a second embedding, for its layers")
        return {**dims, "vocab_size": self.size}

    # ------------------------------------------------------------------------- the old and new rows

    def old_of(self, old: int) -> np.ndarray:
        """Returns the old row of each new one, -1 if it is new. old: the number of old rows."""
        if self.kept is not None:
            return self.kept
        rows = np.arange(self.size)
        return np.where(rows < old, rows, -1)

    @cached_property
    def _places(self) -> np.ndarray:
        """Returns the first new row of each old one, -1 if it is left out."""
        old_of = self.old_of(self.old_size)[::-1]
        found = np.full(self.old_size, -1)
        found[old_of[old_of >= 0]] = self.size - 1 - np.flatnonzero(old_of >= 0)
        return found

    def place(self, number: int) -> int | None:
        """Returns the new number of an old row, None if it is left out. The number of no row, such
        as -1, stays.
        """
        if not 0 <= number < self.old_size:
            return number
        place = int(self._places[number])
        return place if place >= 0 else None

    # ----------------------------------------------------------------- the files beside the weights

    def beside(self, files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
        out = dict(files)
        if self.tokenizer or not self.old_tokenizer:
            out = {name: file for name, file in files.items() if not is_of_tokenizer(name)}
        if self.tokenizer:
            root = Path(self.tokenizer)
            kept = [name for name in side_files(root).kept if is_of_tokenizer(name)]
            out |= {name: root / name for name in kept}
            if GENERATION not in out and CONFIG in out and (root / GENERATION).is_file():
                out[GENERATION] = root / GENERATION
        for name in (CONFIG, GENERATION):
            if name in out:
                out[name] = self._restated(name, out[name])
        return out

    def _restated(self, name: str, file: Path | bytes) -> Path | bytes:
        """Returns a config whose numbers of tokens are the new ones; the same if none changes."""
        text = json.loads(file) if isinstance(file, bytes) else read_json(file, 1 << 24)
        stated = Tokenizer(Path(self.tokenizer)).special if self.tokenizer else {}
        new = restated(name, text, self.place, stated)
        return file if new == text else (json.dumps(new, indent=2) + "\n").encode()

    # -------------------------------------------------------------------------------------- tensors

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        old = dims["vocab_size"]
        names = {name: shape for name, shape in layout.shapes.items() if ROWS.fullmatch(name)}
        shapes = {**layout.shapes, **{n: (self.size, *shape[1:]) for n, shape in names.items()}}
        stored, dropped = list[Stored](), dict(layout.dropped)
        old_of = self.old_of(old)
        for s in layout.stored:
            stored += only([s], lambda name: name not in names)
            stored += _moved(s, names, old_of)
        unused = np.ones(old, bool)
        unused[old_of[old_of >= 0]] = False
        lost = np.flatnonzero(unused)
        if len(lost):
            why = f"{counted(len(lost), 'token')} not in the new vocabulary"
            dropped |= {f"{name}, {_said(lost)}": why for name in names}
        ignored = {**layout.ignored, **dropped}
        out = replace(layout, stored=stored, shapes=shapes, dropped=dropped, ignored=ignored)
        new = np.flatnonzero(old_of < 0)
        return self._with_new_rows(layout, out, names, new, old) if len(new) else out

    def _with_new_rows(
        self, before: Layout, layout: Layout, names: Iterable[str], new: np.ndarray, old: int
    ) -> Layout:
        """Returns the layout with the rows of the numbers `new`, which have files of their own."""
        stored, files = [*layout.stored], [*layout.files]
        at = self._rows_of_file(new)
        of_row = np.full(at.max() + 1, -1)
        of_row[at] = new
        for name in sorted(names):
            weight, shape = name.partition("@")[0], before.shapes[name]
            dtype = next(s.dtype for s in before.stored if name in s.tensors)
            if moment := is_moment(name):
                file = ZEROS
            else:
                if weight not in self._written or not self._written[weight].exists():
                    made = self._rows(before, weight, of_row.tolist(), old)
                    self._written[weight] = file_of(part.tobytes() for part in made)
                file = str(self._written[weight])
            strides = row_major(shape)
            like = Piece(name, Box((0,) * len(shape), (1, *shape[1:])), 0, strides)
            where = np.array([[0], [0], [number_of(files, file)], [0]], "i8")
            wide = None if moment or dtype == "float32" else "float32"
            key = f"{NEW}rows of {name}"
            pieces = joined(like, new, at * strides[0])
            size = (len(of_row), *shape[1:])
            stored.append(Stored(key, dtype, size, pieces, *where, shared=True, rounded_from=wide))
        return replace(layout, files=files, stored=stored)

    def _rows_of_file(self, new: np.ndarray) -> np.ndarray:
        """Returns the row of the file of new rows that each of the rows `new` has. Equal rows,
        which are at the start of the file, are as many as follow each other, but at most BLOCK.
        """
        if self.init == "normal":
            return np.arange(len(new))
        own = np.zeros(self.size, bool)
        own[[number for number, _ in self.pieces]] = True
        own = own[new]
        begins = own | (np.diff(new, prepend=-2) != 1) | np.concatenate([[True], own[:-1]])
        number = np.arange(len(new))
        at = (number - np.maximum.accumulate(np.where(begins, number, 0))) % BLOCK
        at[own] = at[~own].max(initial=-1) + 1 + np.arange(np.count_nonzero(own))
        return at

    def _rows(self, layout: Layout, name: str, new: list[int], old: int) -> Iterator[np.ndarray]:
        """Yields the new rows of a weight of a layout in float32, in blocks."""
        tensor = Reader(layout)[name][:old]
        width = math.prod(tensor.shape[1:])
        row = np.zeros(width)
        if isinstance(self.init, int):
            row = _read(tensor, self.init, 1)[0]
        elif self.init != "zero":
            row = _mean(tensor)
        noise: Iterator[np.ndarray] | None = None
        if self.init == "normal" and len(tensor.shape) > 1 and old > width:
            noise = _noise(tensor, row, len(new), [self.seed, zlib.crc32(tensor.name.encode())])
        pieces = dict(self.pieces)
        for at in range(0, len(new), BLOCK):
            block = np.tile(row, (len(new[at : at + BLOCK]), 1))
            if noise is not None:
                block += next(noise)
            own = [i for i, number in enumerate(new[at : at + BLOCK]) if number in pieces]
            lists = [pieces[new[at + i]] for i in own]
            some = (lists[i : i + MEANS] for i in range(0, len(own), MEANS))
            if own:
                block[own] = np.concatenate(list(_in_threads(partial(_means, layout, name), some)))
            yield block.astype("f4")


def _numbers(path: Path) -> dict[int, int]:
    """Returns the new and old numbers of rows in a file of JSON."""
    if not path.is_file():
        raise ValueError(f"{path}: is not a file")
    try:  # json and int would take 0.1 s for 100,000
        pairs = msgspec.json.decode(read_file(path, 1 << 30), type=dict[int, int])
    except msgspec.ValidationError:
        raise ValueError(f'{path}: is an object of new numbers and old ones: {{"0": 5}}') from None
    except msgspec.DecodeError as e:
        raise SourceError(f"{path}: not valid JSON: {e}") from None
    least, most = min([0, *pairs, *pairs.values()]), max([0, *pairs, *pairs.values()])
    if least < 0 or most >= MOST_ROWS:
        raise ValueError(
            f"{path}: row {least or most}: rows have numbers from 0 to {MOST_ROWS - 1}"
        )
    return pairs


def _bounded(size: int) -> int:
    """Returns a number of rows. Raises ValueError if an edit cannot make as many."""
    if size > MOST_ROWS:
        raise ValueError(f"size {size:,}: an edit makes at most {MOST_ROWS:,} rows")
    return size


def _old_rows(size: int, pairs: Mapping[int, int]) -> np.ndarray:
    """Returns the old row of each of `size` new ones, -1 if `pairs` has none for it."""
    found = np.full(size, -1)
    found[np.fromiter(pairs, "i8")] = np.fromiter(pairs.values(), "i8")
    return found


def _from_text(text: str, size: int) -> np.ndarray:
    """Returns the array that has this `Vocabulary._text`. Raises ValueError if none has."""
    parts, left = list[np.ndarray](), size
    for part in text.split(","):
        first, _, last = part.partition("-")
        new = part.startswith("+")
        start, end = (0, int(part)) if new else (int(first), int(last or first) + 1)
        if (left := left - max(end - start, 0)) < 0:
            break
        parts.append(np.full(end, -1) if new else np.arange(start, end))
    if left:
        raise ValueError(f"{text:.40}: has not {size} rows")
    return np.concatenate(parts)


def _moved(s: Stored, names: Container[str], old_of: np.ndarray) -> Iterator[Stored]:
    """Yields the rows of the named tensors in `s` at their new places. old_of: see `old_of`."""
    for name in filter(names.__contains__, s.tensors):
        for pieces in _alike(s.by_name()[name]).values():
            if len(part := scattered(pieces, old_of)):
                yield replace(s, pieces=part, view=True, shared=True)


def _alike(pieces: Sequence[Piece]) -> dict[Piece, Sequence[Piece]]:
    """Returns the pieces that are read, in groups that differ in nothing but their rows."""
    if isinstance(pieces, Rows):
        return {pieces.like: pieces}
    found: dict[Piece, list[Piece]] = {}
    for p in (p for p in pieces if not p.copy):
        key = p._replace(box=Box((0, *p.box.offset[1:]), (0, *p.box.shape[1:])), start=0)
        found.setdefault(key, []).append(p)
    return {**found}


def _said(numbers: np.ndarray) -> str:
    """Returns numbers of rows as ranges in words, the first of them if they are many."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    counts = np.diff(starts, append=len(numbers))[:MOST_SHOWN].tolist()
    found = [
        f"{first} to {first + count - 1}" if count > 1 else f"{first}"
        for first, count in zip(numbers[starts[:MOST_SHOWN]].tolist(), counts, strict=True)
    ]
    more = f" and {len(starts) - MOST_SHOWN:,} more ranges" * (len(starts) > MOST_SHOWN)
    return f"rows {', '.join(found)}{more}"


def _files_beside(source: Checkpoint) -> Iterator[Mapping[str, Path | bytes]]:
    """Yields the files of tokens in each directory that describes the source or its tokens."""
    own = source.files
    roots = dict.fromkeys((own.tokenizer_directory, own.described_by, own.side_directory))
    for root in (root for root in roots if root is not None):
        names = (FAST_TOKENIZER, CONFIG, GENERATION)
        yield {name: path for name in names if (path := root / name).is_file()}


def _read(tensor: LogicalTensor, first: int, count: int) -> np.ndarray:
    """Returns rows in float64."""
    block = tensor[first : first + count].numpy()
    return np.asarray(block.reshape(len(block), -1), "f8")


def _means(layout: Layout, name: str, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the mean of each of some lists of rows of a tensor, in float64."""
    # each row is read once, and rows that follow each other together
    own, at = np.unique([*itertools.chain.from_iterable(rows)], return_inverse=True)
    stored = [part for s in layout.stored for part in _moved(s, {name}, own)]
    shapes = {name: (len(own), *layout.shapes[name][1:])}
    layout = scaled_again(replace(layout, stored=stored, shapes=shapes))
    values = _read(Reader(layout)[name], 0, len(own))[at]
    counts = np.array([*map(len, rows)])
    return np.asarray(np.add.reduceat(values, np.cumsum(counts) - counts) / counts[:, None])


def _mean(tensor: LogicalTensor) -> np.ndarray:
    """Returns the mean of the rows, of sums in float64 of blocks."""

    def added(first: int) -> np.ndarray:
        block = tensor[first : first + ADDED].numpy()
        return np.asarray(block.reshape(len(block), -1).sum(axis=0, dtype="f8"))

    num = tensor.shape[0]
    return np.asarray(sum(_in_threads(added, range(0, num, ADDED))) / num, "f8")


def _in_threads(do: Callable[[Any], np.ndarray], items: Iterable[Any]) -> Iterator[np.ndarray]:
    """Yields the result of each item. Threads share the items."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        yield from pool.map(do, items)


def _noise(
    tensor: LogicalTensor, mean: np.ndarray, count: int, seed: list[int]
) -> Iterator[np.ndarray]:
    """Yields blocks of `count` normal rows with VARIANCE of the covariance of the old rows.

    Few are sums of the centred old rows with normal weights, which have exactly that covariance;
    many are products with its root.
    """
    num, width = tensor.shape[0], len(mean)
    if count <= width:
        total = _product(tensor, mean, count, seed) * math.sqrt(VARIANCE / num)
        yield from (total[at : at + BLOCK] for at in range(0, count, BLOCK))
        return
    total = _product(tensor, mean, width) * (VARIANCE / num)
    total.flat[:: width + 1] += RIDGE * total.trace() / width
    try:
        root = np.linalg.cholesky(total).T
    except np.linalg.LinAlgError:  # all old rows are one, or not finite, and so is their mean
        root = np.zeros((width, width))
    random = np.random.default_rng(seed)
    for at in range(0, count, BLOCK):
        yield random.standard_normal((min(BLOCK, count - at), width)) @ root


def _product(
    tensor: LogicalTensor, mean: np.ndarray, count: int, seed: list[int] | None = None
) -> np.ndarray:
    """Returns `count` sums of the centred old rows with normal weights; without a seed, the lower
    triangle of the product of the transposed centred rows with themselves. In float64.
    """
    from concurrent.futures import ThreadPoolExecutor

    num, width = tensor.shape[0], len(mean)
    out, most = np.zeros((count, width)), SHARES * ADDED
    # rows in memory at once: new memory for each block took half of the time
    centred = np.empty((most, width))
    weights = centred.T if seed is None else np.empty((count, most))

    def read(first: int) -> None:
        block = tensor[first : first + ADDED].numpy()
        at = slice(first % most, first % most + len(block))
        np.subtract(block.reshape(len(block), width), mean, out=centred[at])
        if seed is not None:
            random = np.random.default_rng([*seed, first])
            weights[:, at] = random.standard_normal((count, len(block)))

    def add(columns: slice, rows: int) -> None:
        low = columns.start if seed is None else 0  # the lower triangle is enough for a root
        out[low:, columns] += weights[low:, :rows] @ centred[:rows, columns]

    shares = [slice(n * width // SHARES, (n + 1) * width // SHARES) for n in range(SHARES)]
    with ThreadPoolExecutor(min(SHARES, len(os.sched_getaffinity(0)))) as pool:
        for at in range(0, num, most):
            rows = min(most, num - at)
            list(pool.map(read, range(at, at + rows, ADDED)))
            list(pool.map(add, shares, itertools.repeat(rows)))
    return out
