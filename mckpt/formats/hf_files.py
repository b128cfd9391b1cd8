"""The weight files of a Hugging Face directory: one file, or several with an index, of safetensors
or of pytorch_model*.bin. New ones are safetensors, laid out here.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mckpt.containers import safe_pickle, safetensors, torch_file
from mckpt.containers.entries import Entries, Entry, entry_of
from mckpt.errors import SourceError
from mckpt.formats import foreign
from mckpt.lazy import numpy as np
from mckpt.storage import descriptors
from mckpt.storage.files import LFS_POINTER, TargetFile, opened, pointer, read_file
from mckpt.values import dtypes

INDEX = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
SINGLE = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}


class WeightFiles(NamedTuple):
    """The weight files of a directory."""

    files: list[str]
    entries: Entries  # the tensors in their headers
    problems: list[str]  # contradictions between the files
    wrappers: list[str]  # prefixes that were removed from the names of all tensors


def weight_files(root: Path) -> WeightFiles:
    """Returns the weight files of a directory, and their tensors by the names that the model has
    without wrappers.
    """
    files, entries, problems = _weight_files(root)
    names, wrappers = foreign.unwrapped(entries.names)
    if wrappers:
        entries = Entries(names, entries.kinds, entries.columns)
    return WeightFiles(files, entries, problems, wrappers)


def _weight_files(root: Path) -> tuple[list[str], Entries, list[str]]:
    kind = next(
        (k for k in INDEX if (root / INDEX[k]).exists() or (root / SINGLE[k]).exists()),
        None,
    )
    problems: list[str] = []
    named_by = "expected"
    weight_map: dict[str, str] | None = None
    if kind is None:
        loose = sorted(p.name for p in root.glob("*.safetensors"))
        if len(loose) != 1:
            raise SourceError(
                f"{root}: no {', no '.join((*SINGLE.values(), *INDEX.values()))}"
                + (f"; {len(loose)} loose .safetensors files without an index" if loose else "")
            )
        kind, names = ".safetensors", loose
    elif (root / INDEX[kind]).exists():
        weight_map, names = _weight_map(root / INDEX[kind])
        named_by = f"named by {INDEX[kind]}"
        # transformers would read this file, other programs the index
        if SINGLE[kind] not in names and (root / SINGLE[kind]).exists():
            problems.append(
                f"both {SINGLE[kind]} and {INDEX[kind]} are there, and either may be meant:"
                " move one of them away"
            )
        shards = re.compile(r".*-\d{5}-of-\d{5}" + re.escape(kind))
        extra = sorted(
            p.name
            for p in root.glob(f"*{kind}")
            if p.name not in names and shards.fullmatch(p.name)
        )
        problems.extend(f"{name}: a shard that {INDEX[kind]} does not name" for name in extra)
    else:
        names = [SINGLE[kind]]
    here: list[str] = []
    files: list[str] = []
    for name in names:
        path = os.path.join(root, name)
        if os.path.isfile(path):
            here.append(name)
            files.append(path)
        else:
            problems.append(
                f"{name}: {named_by}, and {'not a file' if os.path.exists(path) else 'not there'}"
            )
    if kind == ".safetensors":
        entries = safetensors.read(files)
    else:
        entries = Entries.of(
            pair for number, file in enumerate(files) for pair in read_bin(file, number)
        )
    held_by = list(map(here.__getitem__, entries.columns.file))
    if (
        weight_map is not None
        and len(weight_map) == len(held_by)
        and list(map(weight_map.get, entries.names)) == held_by
    ):
        # each tensor is in the file that the index names, so none is there twice
        return files, entries, problems
    found: dict[str, str] = {}
    for key, name in zip(entries.names, held_by, strict=True):
        if found.setdefault(key, name) != name:
            problems.append(f"{key} is in {found[key]} and in {name}")
        elif weight_map is not None and weight_map.get(key) != name:
            stated = f"places it in {weight_map[key]}" if key in weight_map else "does not name it"
            problems.append(f"{key} is in {name}, and {INDEX[kind]} {stated}")
    lost = [(key, name) for key, name in (weight_map or {}).items() if key not in found]
    there = set(here)
    problems.extend(
        f"{key}: {INDEX[kind]} places it in {name}, which does not contain it"
        for key, name in lost
        if name in there
    )
    if len(found) < len(entries.names):
        entries = Entries.of((key, entries[key]) for key in found)
    return files, entries, problems


def index_files(path: Path) -> list[str]:
    """Returns the names of the weight files in an index, whether they are there or not."""
    return _weight_map(path)[1]


def _weight_map(path: Path) -> tuple[dict[str, str], list[str]]:
    """Returns tensor name -> file name from an index, and the names of all files."""
    raw = read_file(path)
    try:
        there = [name for name in os.listdir(path.parent) if name.isascii()]
    except OSError:  # a directory may permit opening its files, but not listing them
        there = []
    # If all files are there, all tensors of one file share the string with its name.
    for file in (Literal[tuple(there or [""])], str):
        weight_map: Any = types.GenericAlias(dict, (str, file))
        try:
            index: Any = msgspec.json.decode(
                raw, type=msgspec.defstruct("Index", [("weight_map", weight_map)])
            )
            break
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # a missing file is reported later
    else:
        raise SourceError(
            f"{path}: is not an index of weight files, which is a JSON object with weight_map,"
            " tensor name -> file name"
        )
    found: dict[str, str] = index.weight_map
    files = sorted(set(found.values()))
    for name in files:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise SourceError(f"{path}: names the file {name!r}; only files beside it are read")
    return found, files


def read_bin(path: str, file: int) -> Iterator[tuple[str, Entry]]:
    """Returns the tensors of a pytorch_model*.bin and their keys.

    Nothing in its pickle is imported or called.
    """
    with opened(path) as fd:
        if descriptors.pread(fd, len(LFS_POINTER), 0) == LFS_POINTER:
            raise pointer(path)
        value, data = torch_file.read(fd, path)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds {safe_pickle.short(value)}, not a state dict")
    for key, record in value.items():
        view = safe_pickle.as_tensor(record)
        if view is None or not isinstance(key, str):
            raise SourceError(f"{path}: {key!r} is not a tensor but {safe_pickle.short(record)}")
        yield key, entry_of(view, data, file)


ALIGN = 8  # header length is padded to this, so that data is aligned for mmap


class Row(NamedTuple):
    """A tensor to be written."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


class PlacedFiles(NamedTuple):
    """The files of some tensors, and the place of each."""

    names: list[str]
    file: np.ndarray  # of each tensor
    at: np.ndarray  # the byte at which it starts
    outputs: list[TargetFile]


def place(rows: list[Row], most: int, stem: str) -> PlacedFiles:
    """Returns safetensors files of tensors in this order: STEM.safetensors, or several with a
    number each.

    A file exceeds `most` bytes only if it contains a single tensor.
    """
    sizes = [row.nbytes for row in rows]
    file_of = cut(sizes, most)
    count = file_of[-1] + 1
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    headers: list[dict[str, Any]] = [{"__metadata__": {"format": "pt"}} for _ in names]
    at = np.zeros(len(rows), "i8")
    ends = [0] * count
    for i, row in enumerate(rows):
        f = file_of[i]
        at[i], ends[f] = ends[f], ends[f] + sizes[i]
        headers[f][row.key] = {
            "dtype": dtypes.TABLE[row.dtype].safetensors,
            "shape": list(row.shape),
            "data_offsets": [int(at[i]), ends[f]],
        }
    heads = []
    for header in headers:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGN)
        heads.append(struct.pack("<Q", len(text)) + text)
    at += np.array([len(heads[f]) for f in file_of])
    outputs = [TargetFile.headed(n, h, e) for n, h, e in zip(names, heads, ends, strict=True)]
    return PlacedFiles(names, np.array(file_of, "i4"), at, outputs)


def tensors_of(output: TargetFile) -> Iterator[tuple[Row, int]]:
    """Yields the tensors of a file that `place` made, and the byte at which each starts."""
    ((_, head),) = output.fixed(None)
    for key, entry in json.loads(head[struct.calcsize("<Q") :]).items():
        if key != "__metadata__":
            row = Row(key, dtypes.OF_SAFETENSORS[entry["dtype"]], tuple(entry["shape"]))
            yield row, len(head) + entry["data_offsets"][0]


def cut(sizes: list[int], most: int) -> list[int]:
    """Assigns a file to each tensor, of these bytes and in this order. The files have about the
    same size, so that the threads that write them end together.

    A file exceeds `most` bytes only if it contains a single tensor.
    """
    each = np.array(sizes, "i8")
    total = int(each.sum())
    middle = np.cumsum(each) - each / 2
    least = max(1, -(-total // most))
    for count in range(least, least + least // 8 + 2):  # the fewest, or a few more
        _, even = np.unique(
            np.minimum(middle * count // max(1, total), count - 1), return_inverse=True
        )
        if not ((np.bincount(even, each) > most) & (np.bincount(even) > 1)).any():
            return [int(file) for file in even]
    # tensors about as large as `most`: as many as fit, one file after the other
    files, filled = [0], 0
    for i, size in enumerate(sizes):
        full = i > 0 and filled + size > most
        filled = size if full else filled + size
        files.append(files[-1] + full)
    return files[1:]
