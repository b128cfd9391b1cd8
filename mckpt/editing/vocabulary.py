"""The edit of the vocabulary: more rows with new values, or fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.editing.edits import KEPT, Edit
from mckpt.editing.pieces import file_of, is_moment, rows
from mckpt.errors import UsageError, counted
from mckpt.formats.hf_config import FAST_TOKENIZER
from mckpt.geometry.box import NEW, ZEROS, Box, Layout, Piece, Stored, row_major
from mckpt.lazy import numpy as np
from mckpt.mapping import Dims


@dataclass(frozen=True)
class Vocabulary(Edit):
    """Changes the number of rows of the vocabulary.

    size: the new number. init: "mean", the mean of the old rows, as float64 sums rounded to
        float32; "zero"; or the number of the row that each new row is a copy of. Moments of new
        rows are zero, and their master copies are the new rows in float32.
    """

    size: int
    init: int | str = "mean"
    contract = KEPT

    @staticmethod
    def of(given: dict[str, Any], dims: Dims) -> Vocabulary:
        init = given.get("init", "mean")
        if isinstance(init, bool) or (isinstance(init, str) and init not in ("mean", "zero")):
            raise ValueError("init is mean, zero or the number of a row")
        if given.keys() - {"size", "init"} or not isinstance(given["size"], int):
            raise ValueError("wants size, a number of rows, and init")
        return Vocabulary(given["size"], init)

    def unfit(self, source: Checkpoint) -> str:
        directories = (source.files.tokenizer_directory, source.files.described_by)
        paths = [one / FAST_TOKENIZER for one in directories if one is not None]
        last, path = max(((_last_token(p), p) for p in paths if p.is_file()), default=(-1, None))
        if last < self.size:
            return ""
        return (
            f"vocab: size {self.size}: the tokenizer in {path} has tokens up to {last}; give at"
            f" least {last + 1}, or a source whose tokenizer has fewer"
        )

    @property
    def words(self) -> str:
        new = f"copies of row {self.init}" if isinstance(self.init, int) else self.init
        return f"the vocabulary has {counted(self.size, 'row')}; new ones are {new}"

    def dims(self, dims: Dims) -> Dims:
        if self.size < 1 or (isinstance(self.init, int) and self.init >= dims["vocab_size"]):
            raise UsageError(
                f"vocab: size {self.size}, init {self.init}: the vocabulary has the rows 0 to"
                f" {dims['vocab_size'] - 1}"
            )
        if dims["layer_embed_dim"]:
            raise UsageError("vocab: the model has a second embedding, for its layers")
        return {**dims, "vocab_size": self.size}

    def layout(self, layout: Layout, dims: Dims) -> Layout:
        old, new = dims["vocab_size"], self.size
        names = {
            name: shape
            for name, shape in layout.shapes.items()
            if re.fullmatch(r"(embed|lm_head)\.(weight|bias)(@.*)?", name)
        }
        shapes = {**layout.shapes, **{n: (new, *shape[1:]) for n, shape in names.items()}}
        stored, dropped = list[Stored](), dict(layout.dropped)
        for s in layout.stored:
            kept = [q for p in s.pieces for q in (rows(p, 0, new) if p.tensor in names else [p])]
            changed = any(p.tensor in names for p in s.pieces)
            stored += [replace(s, pieces=tuple(kept), view=s.view or changed)] if kept else []
        if new < old:
            dropped |= {
                f"{name}, rows {new} to {old - 1}": "the vocabulary is smaller" for name in names
            }
        ignored = {**layout.ignored, **dropped}
        out = replace(layout, stored=stored, shapes=shapes, dropped=dropped, ignored=ignored)
        return self._with_new_rows(layout, out, names, old) if new > old else out

    def _with_new_rows(
        self, before: Layout, layout: Layout, names: Iterable[str], old: int
    ) -> Layout:
        """Returns the layout with the rows from `old` on, which are in a file of their own."""
        reader, written, stored = Reader(before), bytearray(), [*layout.stored]
        places: dict[str, int] = {}
        for name in sorted(names):
            weight = name.partition("@")[0]
            if weight not in places:
                places[weight] = len(written)
                row = np.zeros(before.shapes[weight][1:], "f4")
                if self.init != "zero":
                    row = (
                        _mean(reader[weight])
                        if self.init == "mean"
                        else (reader[weight][int(self.init)].numpy().astype("f4"))
                    )
                written += row.tobytes() * (self.size - old)
        path = file_of(bytes(written))
        files = [*layout.files, str(path), *([] if ZEROS in layout.files else [ZEROS])]
        for name in sorted(names):
            shape = before.shapes[name]
            dtype = next(s.dtype for s in before.stored for p in s.pieces if p.tensor == name)
            moment = is_moment(name)
            file = files.index(ZEROS if moment else str(path))
            at = 0 if moment else places[name.partition("@")[0]]
            zeros = (0,) * (len(shape) - 1)
            box = Box((old, *zeros), (self.size - old, *shape[1:]))
            piece = Piece(name, box, 0, row_major(box.shape))
            where = np.array([[0], [0], [file], [at]], "i8")
            wide = None if moment or dtype == "float32" else "float32"
            key = f"{NEW}rows of {name}"
            stored.append(Stored(key, dtype, box.shape, (piece,), *where, rounded_from=wide))
        return replace(layout, files=files, stored=stored)


def _last_token(tokenizer: Path) -> int:
    """Returns the largest number of a token in a tokenizer.json, -1 if it has none."""
    text = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = (text.get("model") or {}).get("vocab") or {}
    used = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    used += [token["id"] for token in text.get("added_tokens") or ()]
    return max(used, default=-1)


def _mean(tensor: LogicalTensor) -> np.ndarray:
    """Returns the mean of the rows, of sums in float64 of blocks of 1,024 rows."""
    total = np.zeros(tensor.shape[1:], "f8")
    for at in range(0, tensor.shape[0], 1024):
        total += tensor[at : at + 1024].numpy().astype("f8").sum(axis=0)
    return np.asarray(total / tensor.shape[0], "f4")
