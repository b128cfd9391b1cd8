"""Tensors that are carried unchanged: the parts of a model, such as its vision tower, that
Megatron's model does not have.

Beside a Megatron checkpoint they are in DST/hf/carried*.safetensors, under their own keys, or they
are in it, as the towers of a whole model. In a layout each of them is a tensor of its own,
`carried.KEY`, so plans prove that each of its elements is copied once, and comparisons compare it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mckpt.containers import safetensors
from mckpt.containers.entries import Entries
from mckpt.errors import SourceError
from mckpt.formats.base import Problems, stored_of
from mckpt.formats.hf_files import INDEX, SINGLE, PlacedFiles, Row, place, weight_files
from mckpt.geometry.box import Layout, Piece, Stored, row_major, whole_box
from mckpt.lazy import numpy as np
from mckpt.mapping import MappingFile, is_part
from mckpt.mapping.schema import CARRIED
from mckpt.storage.files import TargetFile
from mckpt.storage.staging import MANIFEST

STEM = "carried"  # starts the names of the files
FILES = f"{STEM}*.safetensors"
ADAPTER = "adapter_model.safetensors"  # of PEFT
PARTS = "shard-*-model-*-of-*.safetensors"  # of the ranks of a training (`hf_sharded`)
BESIDE = "../hf/"  # DST/hf, from the directory of a checkpoint in DST
# dtypes that the elements of quantised weights have, in any form
ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "int32")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a member of a list of modules


def is_weights(path: Path) -> bool:
    """Returns whether a .safetensors file can be the weights of a whole model."""
    return path.name != ADAPTER and not any(map(path.match, (FILES, PARTS)))


def keys(folder: Path) -> list[str]:
    """Returns the keys of the carried tensors in a DST/hf."""
    return safetensors.read([str(path) for path in sorted(folder.glob(FILES))]).names


def key_of(name: str) -> str:
    """Returns the key in Hugging Face files of a carried tensor with this logical name."""
    return name.removeprefix(CARRIED).replace("{{", "{").replace("}}", "}")


def name_of(key: str) -> str:
    """Returns the logical name, a template in which doubled braces stand for themselves."""
    return CARRIED + key.replace("{", "{{").replace("}", "}}")


def names(layout: Layout) -> set[str]:
    """Returns the logical names of the carried tensors of a layout, as templates."""
    return {name for s in layout.stored if s.carried for name in s.tensors}


def of(layout: Layout) -> list[Row]:
    """Returns the carried tensors of a layout by their keys in Hugging Face files, in the order of
    their bytes.
    """
    found = [s for s in layout.stored if s.carried and len(s)]
    found.sort(key=lambda s: (int(s.file[0]), int(s.at[0])))
    dtypes = {name: s.dtype for s in reversed(found) for name in s.tensors}
    names = dict.fromkeys(p.tensor for s in found for p in s.pieces)
    return [Row(key_of(name), dtypes[name], layout.shapes[name]) for name in names]


def shapes_in(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the carried tensors of a layout by their keys in Hugging Face files."""
    return {row.key: row.shape for row in of(layout)}


def shapes(stored: Iterable[Stored]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the carried tensors among those of Hugging Face files, by logical
    name.
    """
    return {p.tensor: p.box.shape for s in stored if s.carried for p in s.pieces}


def gaps(keys: Iterable[str]) -> list[str]:
    """Returns a sentence for each part of a tower that misses tensors: a member inside of a list of
    equal modules, such as `visual.blocks.{number}.`, or a tensor that all members of the list but
    one have. The first and the last one may differ from the others.

    Modules without parameters leave gaps too. So lists whose members have fewer than four tensors
    are not judged, and lists in which a third of the members is not there.
    """
    lists: dict[str, dict[int, set[str]]] = {}
    for key in keys:
        for found in _NUMBER.finditer(key):
            members = lists.setdefault(key[: found.start()], {})
            members.setdefault(int(found[0]), set()).add(key[found.end() :])
    out = []
    for start, members in sorted(lists.items()):
        kinds = Counter(frozenset(names) for names in members.values())
        usual, times = kinds.most_common(1)[0]
        if len(usual) < 4 or times < 2 or times < len(members) - 1:
            continue
        lacking = sorted(set(range(min(members), max(members))) - members.keys())
        if len(lacking) * 2 < len(members):
            text = f"is missing; {start}{{number}}. has {len(usual)} tensors"
            out += [f"{start}{number}.* {text}" for number in lacking]
        for number, names in sorted(members.items()):
            if names < usual and min(members) < number < max(members):
                lost = ", ".join(f"{start}{number}{name}" for name in sorted(usual - names))
                out.append(f"{lost} is missing; all others of {start}{{number}}. have it")
    return out


def stored(entries: Entries, keys: Iterable[str], problems: Problems) -> list[Stored]:
    """Returns the tensors with these keys as carried ones, of any dtype."""
    out = []
    for row in entries.rows(keys).tolist():
        key, entry = entries.names[row], entries.entry(row)
        piece = Piece(name_of(key), whole_box(entry.shape), 0, row_major(entry.shape))
        kind, where = entries.kinds[entries.columns.kind[row]], [[0], [0], [entry.file], [entry.at]]
        out += stored_of(key, (piece,), kind, np.array(where, "i8"), problems, carried=True)
    return out


def refuse_quantised(tensors: Iterable[Stored], problems: Problems) -> None:
    """Adds a problem for each carried tensor that can only be the elements of a quantised weight:
    config.json is written without their description, because the other tensors are dequantised.
    """
    for s in tensors:
        if s.carried and s.dtype in ELEMENTS:
            problems.append(
                f"{s.key} holds {s.dtype}, and tensors that are carried unchanged cannot be"
                " quantised: dequantise the model first"
            )


def placed(tensors: Sequence[Row], places: PlacedFiles) -> list[Stored]:
    """Returns carried tensors where new files have them; they are the first of these files."""
    out = []
    for n, (key, dtype, shape) in enumerate(tensors):
        piece = Piece(name_of(key), whole_box(shape), 0, row_major(shape))
        none = np.zeros(1, "i4")
        file, at = places.file[n : n + 1], places.at[n : n + 1]
        out.append(Stored(key, dtype, shape, (piece,), none, none, file, at, carried=True))
    return out


def lay_out(tensors: Sequence[Row], most: int) -> tuple[Layout, list[TargetFile]]:
    """Lays out the files of carried tensors beside a Megatron checkpoint.

    most: bytes of a file.
    """
    if not tensors:
        return Layout([], [], {}), []
    places = place(list(tensors), most, STEM)
    outputs = [file._replace(path=BESIDE + file.path) for file in places.outputs]
    found = placed(tensors, places)
    return Layout([file.path for file in outputs], found, shapes(found)), outputs


def joined(layout: Layout, other: Layout) -> Layout:
    """Returns a layout with the tensors and files of another one after its own."""
    files = list(dict.fromkeys([*layout.files, *other.files]))
    number = np.array([files.index(file) for file in other.files], "i4")
    moved = [replace(s, file=number[s.file]) for s in other.stored]
    return Layout(
        files,
        [*layout.stored, *moved],
        {**layout.shapes, **other.shapes},
        layout.ignored,
        layout.dropped,
    )


def beside(folder: Path, family: MappingFile) -> Layout | None:
    """Returns the carried tensors in a directory that describes a model: those of DST/hf, or those
    among the weights of a Hugging Face checkpoint. None if the directory has no weights.

    Raises SourceError if they are damaged or incomplete.
    """
    if files := [str(path) for path in sorted(folder.glob(FILES))]:
        entries, wrong = safetensors.read(files), list[str]()
        keys = list(entries.names)
    elif any((folder / name).exists() for name in (*INDEX.values(), *SINGLE.values())):
        files, entries, wrong, _ = weight_files(folder)
        forms = family.forms.values()
        form = min(forms, key=lambda form: len(form.unmatched(entries.names)))
        keys = [key for key in entries.names if form.carries(key)]
    else:
        return None
    problems = Problems(f"the tensors that {folder} has for {family.path.name} are incomplete:")
    for text in wrong:
        problems.missing(text)
    found = stored(entries, keys, problems)
    if not problems and family.form_of(keys) is None:
        listed = " or ".join(", ".join(form.carried) for form in family.forms.values())
        problems.missing(f"{family.path.name} requires tensors {listed}")
    problems.check()
    return Layout(files, found, shapes(found))


def shown(folder: Path | None) -> dict[str, Any] | None:
    """Returns the files of carried tensors in DST/hf, their number and their bytes, as `inspect`
    prints them; None if there are none.
    """
    files = [] if folder is None else sorted(folder.glob(FILES))
    if not files:
        return None
    entries = safetensors.read([str(path) for path in files])
    listed = (entries.entry(row) for row in range(len(entries.names)))
    return {
        "tensors": len(entries.names),
        "bytes": sum(Row("", entry.dtype, entry.shape).nbytes for entry in listed),
        "files": [path.name for path in files],
    }


def facts(tensors: Sequence[Row]) -> dict[str, Any]:
    """Returns the manifest's entry on carried tensors: their number, their bytes, and a digest of
    their keys, dtypes and shapes.
    """
    listed = sorted(tensors)
    digest = hashlib.sha256(repr([tuple(row) for row in listed]).encode()).hexdigest()[:16]
    return {"tensors": len(listed), "bytes": sum(row.nbytes for row in listed), "digest": digest}


def of_checkpoint(
    like: Path | None, own: Path | None, family: MappingFile | None, recorded: object
) -> Layout | None:
    """Returns the carried tensors of a Megatron checkpoint: those in `own`, its DST/hf, else those
    in `like`. None if there are none.

    family: of the config.json that describes the checkpoint. recorded: the entry of its manifest.
    Raises SourceError if the tensors of that entry are in neither.
    """
    if family is not None and is_part(family.forms):
        kept = None if own is None else beside(own, family)
        if kept and (not isinstance(recorded, dict) or facts(of(kept)) == recorded):
            return kept
        if like is not None and (given := beside(like, family)) is not None:
            return given
    if isinstance(recorded, dict):
        raise SourceError(
            f"{own or 'hf'}: {MANIFEST} records {recorded.get('tensors')} tensors"
            f" ({recorded.get('bytes')} bytes) in {FILES}, which are not there. Copy the directory"
            " hf of the save directory again, or give --like HF_DIR, the model's own directory"
        )
    return None
