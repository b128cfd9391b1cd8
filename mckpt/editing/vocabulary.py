"""The edit of the vocabulary: other rows, which are old ones in a new order or have new values."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.editing.edits import KEPT, Edit
from mckpt.editing.pieces import file_of, is_moment, rows
from mckpt.editing.tokens import Tokenizer, restated
from mckpt.errors import UsageError, counted
from mckpt.formats.hf_config import (
    CONFIG,
    FAST_TOKENIZER,
    GENERATION,
    is_of_tokenizer,
    side_files,
)
from mckpt.geometry.box import NEW, ZEROS, Box, Layout, Piece, Stored, row_major
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims
from mckpt.storage.files import read_json

INITS = ("mean", "normal", "zero", "subword")
VARIANCE = 1e-9  # of new rows, as a part of that of the old ones: that of transformers
RIDGE = 1e-12  # of the mean variance, added to each one, as rounding may make a small one negative
BLOCK = 1024  # rows in memory at once
ADDED = 256  # rows that one of the THREADS adds at once
THREADS = 4  # at most
SHARES = 16  # of the columns of a product of matrices: as many threads at most
ROWS = re.compile(r"(embed|lm_head)\.(weight|bias)(@.*)?")  # the tensors with a row for each token
MOST_SHOWN = 8  # ranges of rows in a message
_KEYS = {"size", "init", "seed", "tokenizer", "map"}


class Run(NamedTuple):
    """Rows of the new vocabulary that are rows of the old one."""

    new: int  # the first
    old: int
    rows: int


@dataclass(frozen=True)
class Vocabulary(Edit):
    """Changes the rows of the vocabulary.

    size: the new number. init: of a row that is not an old one: "mean", the mean of the old rows,
        as float64 sums rounded to float32; "normal", around the mean, with VARIANCE of the
        covariance of the old rows, drawn with `seed`; "zero"; "subword", the mean of the rows of
        `pieces`; or the number of the row that it is a copy of. Moments of new rows are zero, and
        their master copies are the new rows in float32.
    kept: the old rows that are kept; None if each keeps its number. tokenizer: the directory of the
        new tokenizer. old_tokenizer: whether that of the source still fits. old_size: the rows of
        the source.
    """

    size: int
    init: int | str = "mean"
    seed: int = 0
    kept: tuple[Run, ...] | None = None
    pieces: tuple[tuple[int, tuple[int, ...]], ...] = ()
    tokenizer: str = ""
    old_tokenizer: bool = True
    old_size: int = 0
    # the file of the new rows of each weight, which are computed once
    _written: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)
    contract = KEPT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Vocabulary:
        init, seed, size = given.get("init", "mean"), given.get("seed", 0), given.get("size")
        if isinstance(init, bool) or (isinstance(init, str) and init not in INITS):
            raise ValueError(f"init is {', '.join(INITS)} or the number of a row")
        if given.keys() - _KEYS or type(seed) is not int or type(size) not in (int, type(None)):
            raise ValueError("wants size, a number of rows, init, seed, tokenizer and map")
        if init == "subword" and "tokenizer" not in given:
            raise ValueError("init subword needs tokenizer, the directory of the new one")
        kept, directory, most = None, str(given.get("tokenizer", "")), -1
        if directory:
            if not Path(directory, FAST_TOKENIZER).is_file():
                raise ValueError(f"{directory} has no {FAST_TOKENIZER}, which describes its tokens")
            most = Tokenizer(Path(directory)).last
        if "map" in given:
            pairs = _numbers(Path(str(given["map"])))
            kept, most = runs(pairs.items()), max([most, *pairs])
        if size is None and most < 0:
            raise KeyError("size")
        size = most + 1 if size is None else size
        if size <= most:
            raise ValueError(f"size {size} has no row for token {most}")
        return Vocabulary(size, init, seed, kept, tokenizer=directory)

    def unfit(self, source: Checkpoint) -> str:
        if self.kept is not None or self.tokenizer:
            return ""
        last, path = max(((t.last, t.directory) for t in _tokenizers(source)), default=(-1, None))
        if last < self.size:
            return ""
        return (
            f"vocab: size {self.size}: the tokenizer in {path} has tokens up to {last}; give at"
            f" least {last + 1}, or a source whose tokenizer has fewer"
        )

    def of_source(self, source: Checkpoint) -> Vocabulary:
        old = next(iter(_tokenizers(source)), None)
        count = source.dims["vocab_size"]
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
                out = replace(out, kept=runs(same.items()))
            if self.init == "subword":
                tokens = {number: token for token, number in new.ids.items()}
                wanted = [n for n in out.missing(count) if n in tokens]
                split = old.pieces((tokens[n] for n in wanted), new)
                found = zip(wanted, split, strict=True)
                pieces = ((n, tuple(p for p in one if p < count)) for n, one in found)
                out = replace(out, pieces=tuple(one for one in pieces if one[1]))
        elif self.kept is not None and old is not None:
            fits = all(out.place(n) == n for n in old.ids.values())
            out = replace(out, old_tokenizer=fits)
        for root in (source.files.described_by, source.files.side_directory):
            for name in (CONFIG, GENERATION):
                if root is not None and out.kept is not None and (root / name).is_file():
                    out._restated(name, root / name)  # raises an error before anything is read
        return out

    @property
    def data(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "init": self.init,
            "seed": self.seed,
            "kept": self.kept,
            "pieces": self.pieces,
            "old_tokenizer": self.old_tokenizer,
        }

    @property
    def words(self) -> str:
        new = f"copies of row {self.init}" if isinstance(self.init, int) else self.init
        said = f"the vocabulary has {counted(self.size, 'row')}"
        if self.kept is not None:
            said += f", {sum(run.rows for run in self.kept):,} of them old ones"
        said += f"; new ones are {new}"
        return said + "; the tokenizer is left out, because its tokens have other numbers" * (
            not self.old_tokenizer
        )

    @cached_property
    def _used(self) -> tuple[int, int]:
        """Returns the smallest number in `kept`, of either side, and the largest old one."""
        kept = self.kept or ()
        return min(map(min, kept), default=0), max((r.old + r.rows - 1 for r in kept), default=0)

    def dims(self, dims: Dims) -> Dims:
        old, (low, high) = dims["vocab_size"], self._used
        of_init = self.init if isinstance(self.init, int) else 0
        if self.size < 1 or not 0 <= of_init < old or low < 0 or high >= old:
            of_map = f", row {high if high >= old else low} of map" if self.kept else ""
            raise UsageError(
                f"vocab: size {self.size}, init {self.init}{of_map}: the vocabulary has the rows 0"
                f" to {old - 1}"
            )
        if dims["layer_embed_dim"]:
            raise UsageError("vocab: the model has a second embedding, for its layers")
        return {**dims, "vocab_size": self.size}

    # ------------------------------------------------------------------------- the old and new rows

    def runs(self, old: int) -> tuple[Run, ...]:
        """Returns the rows that are kept of `old` ones, in the order of the new ones."""
        return (Run(0, 0, min(old, self.size)),) if self.kept is None else self.kept

    def missing(self, old: int) -> list[int]:
        """Returns the numbers of the new rows that are not old ones."""
        held = np.zeros(self.size, bool)
        for run in self.runs(old):
            held[run.new : run.new + run.rows] = True
        found: list[int] = np.flatnonzero(~held).tolist()
        return found

    @cached_property
    def _places(self) -> dict[int, int]:
        every = reversed(self.kept or ())
        return {run.old + i: run.new + i for run in every for i in range(run.rows)}

    def place(self, number: int) -> int | None:
        """Returns the new number of an old row, None if it is left out. The number of no row, such
        as -1, stays.
        """
        if not 0 <= number < self.old_size:
            return number
        return self._places.get(number) if self.kept is not None else number

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
            if name in out and self.kept is not None:
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
        # a row that several new ones are copies of is read several times, each from its own buffer
        once = _apart(self.runs(old))
        for s in layout.stored:
            mine = [p for p in s.pieces if p.tensor in names]
            if not mine:
                stored.append(s)
                continue
            rest = [p for p in s.pieces if p.tensor not in names]
            for number, chosen in enumerate(once):
                moved = [part for p in mine for part in _moved(p, chosen)]
                if pieces := tuple(moved if number else [*rest, *moved]):
                    stored.append(replace(s, pieces=pieces, view=True))
            if rest and not once:
                stored.append(replace(s, pieces=tuple(rest), view=True))
        unused = np.ones(old, bool)
        for run in self.runs(old):
            unused[run.old : run.old + run.rows] = False
        if lost := np.flatnonzero(unused).tolist():
            why = f"{counted(len(lost), 'token')} not in the new vocabulary"
            dropped |= {f"{name}, {_said(lost)}": why for name in names}
        ignored = {**layout.ignored, **dropped}
        out = replace(layout, stored=stored, shapes=shapes, dropped=dropped, ignored=ignored)
        new = self.missing(old)
        return self._with_new_rows(layout, out, names, new, old) if new else out

    def _with_new_rows(
        self, before: Layout, layout: Layout, names: Iterable[str], new: list[int], old: int
    ) -> Layout:
        """Returns the layout with the rows of the numbers `new`, which have files of their own."""
        reader, stored, files = Reader(before), [*layout.stored], [*layout.files]
        blocks = runs(zip(new, range(len(new)), strict=True))
        for name in sorted(names):
            weight, shape = name.partition("@")[0], before.shapes[name]
            dtype = next(s.dtype for s in before.stored for p in s.pieces if p.tensor == name)
            if moment := is_moment(name):
                file = ZEROS
            else:
                if weight not in self._written or not self._written[weight].exists():
                    made = self._rows(reader[weight], new, old)
                    self._written[weight] = file_of(part.tobytes() for part in made)
                file = str(self._written[weight])
            files += [] if file in files else [file]
            strides = row_major(shape)
            pieces = tuple(
                Piece(
                    name,
                    Box((run.new, *(0,) * (len(shape) - 1)), (run.rows, *shape[1:])),
                    run.old * strides[0],
                    strides,
                )
                for run in blocks
            )
            where = np.array([[0], [0], [files.index(file)], [0]], "i8")
            wide = None if moment or dtype == "float32" else "float32"
            key = f"{NEW}rows of {name}"
            size = (len(new), *shape[1:])
            stored.append(Stored(key, dtype, size, pieces, *where, rounded_from=wide))
        return replace(layout, files=files, stored=stored)

    def _rows(self, tensor: LogicalTensor, new: list[int], old: int) -> Iterator[np.ndarray]:
        """Yields the new rows of a weight in float32, in blocks."""
        width, tensor = math.prod(tensor.shape[1:]), tensor[:old]
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
            for into, number in zip(block, new[at : at + BLOCK], strict=True):
                if found := pieces.get(number):
                    into[:] = np.mean([_read(tensor, n, 1)[0] for n in found], axis=0)
            yield block.astype("f4")


def _numbers(path: Path) -> dict[int, int]:
    """Returns the new and old numbers of rows in a file of JSON."""
    if not path.is_file():
        raise ValueError(f"{path}: is not a file")
    content = read_json(path, 1 << 30)
    if not isinstance(content, dict) or not all(type(n) is int for n in content.values()):
        raise ValueError(f'{path}: is an object of new numbers and old ones: {{"0": 5}}')
    return {int(new): old for new, old in content.items()}


def runs(pairs: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Returns pairs of a new and an old number as runs, in the order of the new ones."""
    found: list[Run] = []
    for new, old in sorted(pairs):
        last = found[-1] if found else Run(-1, -1, 0)
        if (last.new + last.rows, last.old + last.rows) == (new, old):
            found[-1] = last._replace(rows=last.rows + 1)
        else:
            found.append(Run(new, old, 1))
    return tuple(found)


def _apart(listed: Iterable[Run]) -> list[list[Run]]:
    """Returns the runs in lists in which no old row comes twice, in the order of the old ones."""
    out: list[list[Run]] = []
    for run in sorted(listed, key=lambda run: run.old):
        for chosen in out:
            if chosen[-1].old + chosen[-1].rows <= run.old:
                chosen.append(run)
                break
        else:
            out.append([run])
    return out


def _moved(piece: Piece, chosen: list[Run]) -> Iterator[Piece]:
    """Yields the parts of a piece that are in some runs, at their new rows."""
    first, end = piece.box.offset[0], piece.box.offset[0] + piece.box.shape[0]
    at = max(bisect_right(chosen, first, key=lambda run: run.old) - 1, 0)
    for new, old, count in itertools.takewhile(lambda run: run.old < end, chosen[at:]):
        for part in rows(piece, old, old + count):
            offset = (part.box.offset[0] + new - old, *part.box.offset[1:])
            yield part._replace(box=part.box._replace(offset=offset))


def _said(numbers: list[int]) -> str:
    """Returns numbers of rows as ranges in words, the first of them if they are many."""
    found = [
        f"{run.new} to {run.new + run.rows - 1}" if run.rows > 1 else f"{run.new}"
        for run in runs((number, number) for number in numbers)
    ]
    more = f" and {len(found) - MOST_SHOWN:,} more ranges" * (len(found) > MOST_SHOWN)
    return f"rows {', '.join(found[:MOST_SHOWN])}{more}"


def _tokenizers(source: Checkpoint) -> Iterator[Tokenizer]:
    for root in (source.files.tokenizer_directory, source.files.described_by):
        if root is not None and (root / FAST_TOKENIZER).is_file():
            yield Tokenizer(root)


def _read(tensor: LogicalTensor, first: int, count: int) -> np.ndarray:
    """Returns rows in float64."""
    block = tensor[first : first + count].numpy()
    return np.asarray(block.reshape(len(block), -1), "f8")


def _mean(tensor: LogicalTensor) -> np.ndarray:
    """Returns the mean of the rows, of sums in float64 of blocks. Threads share the blocks."""
    from concurrent.futures import ThreadPoolExecutor

    def added(first: int) -> np.ndarray:
        block = tensor[first : first + ADDED].numpy()
        return np.asarray(block.reshape(len(block), -1).sum(axis=0, dtype="f8"))

    num = tensor.shape[0]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        return np.asarray(sum(pool.map(added, range(0, num, ADDED))) / num, "f8")


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
