"""The weight files of a Hugging Face directory: one file, or several with an index, of safetensors
or of pytorch_model*.bin.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mckpt.containers import safe_pickle, safetensors, torch_file
from mckpt.containers.entries import Entries, Entry, entry_of
from mckpt.errors import SourceError
from mckpt.formats import foreign
from mckpt.storage import descriptors
from mckpt.storage.files import LFS_POINTER, opened, pointer, read_file

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
