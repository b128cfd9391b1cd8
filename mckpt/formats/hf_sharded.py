"""Checkpoints in Hugging Face names whose tensors are in parts, one for each rank of a training by
FSDP (`hf_pieces`). They are only read.

    model/shard-*.safetensors, model/.hf_metadata/    NeMo AutoModel: config.json, tokenizer
    actor/model_world_size_*.pt, actor/huggingface/   verl

The names are matched as those of a directory whose tensors are whole. For that, each tensor has a
place in one imaginary file. Then its place is exchanged for those of its parts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mckpt.containers import torch_spans
from mckpt.containers.entries import Entries, Entry, Span
from mckpt.formats import foreign
from mckpt.formats.base import Format, Names, Problems, Shown, group
from mckpt.formats.hf import HuggingFace
from mckpt.formats.hf_pieces import OPTIMIZER, SAFETENSORS, TORCH, Part, Whole, numbered, read
from mckpt.geometry.box import ZEROS, Box, Layout, Piece, Stored, crop
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile
from mckpt.values import dtypes


def detect(path: Path) -> bool:
    return path.is_dir() and any(numbered(path, form) for form in (SAFETENSORS, TORCH))


class Sharded(HuggingFace):
    """An opened directory of parts. Only headers are read."""

    cure = "Copy the files of all ranks of one save again."

    def __init__(self, path: Path) -> None:
        self.format = FORMAT
        self.root = Path(path)
        self.files, wholes, self.problems = read(self.root)
        names, wrappers = foreign.unwrapped(list(wholes))
        self.wholes = list(wholes.values())
        sizes = (max(1, math.prod(w.shape) * dtypes.itemsize(w.dtype)) for w in self.wholes)
        self.starts = [0, *itertools.accumulate(sizes)]  # in the imaginary file
        self.entries = Entries.of(
            (name, Entry(whole.dtype, whole.shape, whole.parts[0].entry.file, at))
            for name, whole, at in zip(names, self.wholes, self.starts[:-1], strict=True)
        )
        self.notes = [
            f"the parts of each tensor are joined, from {len(self.files):,} files",
            *(f"the names of the tensors are read without {part}" for part in wrappers),
        ]

    def beside(self, mapping: MappingFile) -> list[str]:
        """Returns the names of what the ranks save beside their weights."""
        parts = {"optim": "optimizer", "extra": "extra_state"}
        return [name for start, name in parts.items() if any(self.root.glob(f"{start}_*rank_*.pt"))]

    def show(self, most: int | None) -> Shown:
        """Returns the first `most` tensors, with the number of their parts."""
        rows = zip(self.entries.names, self.wholes, strict=True)
        listed = [(key, w.dtype, w.shape, {"parts": len(w.parts)}) for key, w in rows]
        kinds = Counter((w.dtype, w.shape) for w in self.wholes)
        return super().show(0)._replace(tensors=listed[:most], kinds=kinds)

    def spans(self, problems: list[str]) -> Iterator[Span]:
        """Yields the bytes of every part, and the records of the files of torch.save."""
        ranks = [path for path in self.files if not path.endswith(".safetensors")]
        ranks += [path for _, path in numbered(self.root, OPTIMIZER)]
        yield from torch_spans.spans(map(torch_spans.Item, ranks), problems)
        for key, whole in zip(self.entries.names, self.wholes, strict=True):
            for box, e, _ in whole.parts:
                path = self.files[e.file]
                if path.endswith(".safetensors"):
                    size = math.prod(box.shape) * dtypes.itemsize(e.dtype)
                    yield Span(key, path, e.at, size, e.dtype)

    def layout(self, names: Names) -> Layout:
        """Returns the place of each part, in logical boxes, as `Opened.layout`."""
        whole = super().layout(names)
        problems = Problems(f"the parts of {self.root} cannot be joined:")
        zeros = whole.files.index(ZEROS) if ZEROS in whole.files else -1
        stored: list[Stored] = []
        for s in whole.stored:
            if s.scales is not None:
                problems.append(f"{s.key} is quantised, and mckpt reads the parts of other weights")
            elif len(s) and s.file[0] == zeros:
                stored.append(s)
            else:
                stored += self.parts(s, self.wholes, problems)
        problems.check()
        return replace(whole, stored=stored)

    def rows(self, s: Stored) -> np.ndarray:
        """Returns the numbers of the tensors that are stored in the imaginary file."""
        return np.searchsorted(np.array(self.starts), s.at, "right") - 1

    def parts(
        self, s: Stored, of: Sequence[Whole] | Mapping[int, Whole], problems: Problems
    ) -> Iterator[Stored]:
        """Yields the parts of tensors that are whole in the imaginary file.

        of: the tensors, or a state of each, by number.
        """
        found: dict[tuple[Box, bool], list[tuple[int, int, Entry]]] = {}
        numbers = self.rows(s).tolist()
        places = zip(numbers, s.at.tolist(), s.layer.tolist(), s.expert.tolist(), strict=True)
        for row, at, layer, expert in places:
            whole = self.wholes[row]
            stacked = len(whole.shape) > len(s.shape)  # all experts of a layer in one tensor
            nbytes = max(1, s.numel * dtypes.itemsize(whole.dtype))
            number = (at - self.starts[row]) // nbytes if stacked else None
            for part in of[row].parts:
                if (one := _of_expert(part, number)) is not None and 0 not in one.box.shape:
                    where = found.setdefault((one.box, one.copy), [])
                    where.append((layer, expert, one.entry))
        for (box, copy), entries in found.items():
            pieces = tuple(self._cropped(s, box, problems))
            yield from group(
                *(s.key, box.shape, pieces, entries, problems),
                replica=s.replica or copy,
                carried=s.carried,
            )

    def _cropped(self, s: Stored, box: Box, problems: Problems) -> Iterator[Piece]:
        for piece in s.pieces:
            try:
                if (part := crop(piece, s.shape, box)) is not None:
                    yield part
            except ValueError as e:
                problems.append(f"{s.key}: no part of it has a place of its own: {e}")


def _of_expert(part: Part, number: int | None) -> Part | None:
    """Returns the part of one expert in a part of all; None if that does not have the expert.

    number: of the expert; None: the tensor is that of one.
    """
    if number is None:
        return part
    (first, *offset), (count, *shape) = part.box
    if not first <= number < first + count:
        return None
    entry, strides = part.entry, part.entry.strides
    step = math.prod(shape) if strides is None else strides[0]
    at = entry.at + (number - first) * step * dtypes.itemsize(entry.dtype)
    inner = entry._replace(shape=tuple(shape), at=at, strides=strides and strides[1:])
    return Part(Box(tuple(offset), tuple(shape)), inner, part.copy)


FORMAT = Format(
    "hf_sharded",
    "shard-*-model-*.safetensors or model_world_size_*_rank_*.pt",
    megatron=False,
    detect=detect,
    open=Sharded,
    parts=("shard-*.safetensors", "model_world_size_*.pt", "pytorch_model_fsdp*.bin"),
)
