"""Checks one checkpoint of any format: its files, its tensors, its values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mckpt.checking.scanning import scan
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import changed_files
from mckpt.errors import CoverError, MckptError, PickleError, SourceError, StorageError
from mckpt.formats.hf_config import side_files
from mckpt.geometry.box import Layout, tiles
from mckpt.progress import OnProgress
from mckpt.storage.files import stamp_to_copy
from mckpt.storage.staging import MANIFEST

TENSORS = (".safetensors", ".bin", ".distcp", ".pt")  # suffixes of files with tensors
OTHER_FORM = "consolidated"  # prefix of weights in the form of Mistral


@dataclass
class Checked:
    """The result of a check."""

    # findings at which a loader would fail, or silently load wrong values
    damaged: list[str] = field(default_factory=list)
    # findings that a loader accepts, and that are rarely intended: values that are not finite,
    # copies that differ
    suspicious: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, and why
    files: int = 0
    nbytes: int = 0
    checksums: int = 0  # that were compared

    @property
    def exit_code(self) -> int:
        """Returns 3 for damage, 1 for anything else that was found or not checked, else 0."""
        if self.damaged:
            return SourceError.exit_code
        return 1 if self.suspicious or self.unchecked else 0

    def json(self) -> dict[str, Any]:
        facts = {"bytes" if k == "nbytes" else k: value for k, value in vars(self).items()}
        return {**facts, "exit_code": self.exit_code}


def check(source: Checkpoint, threads: int = 0, progress: OnProgress | None = None) -> Checked:
    """Reads a checkpoint whole and returns what is wrong with it.

    threads: 0 means one per core.
    """
    out = Checked()
    stated = _stated(source, out)
    _structure(source, out)
    spans = list(source.opened.spans(out.damaged))
    files = {path: stated.get(path, "") for path in dict.fromkeys(s.path for s in spans)}
    out.damaged += _pointers(source)
    out.suspicious += _orphans(source, {*files, *stated})
    scanned = scan({**files, **stated}, spans, threads, progress)
    out.damaged += scanned.broken
    out.suspicious += map(str, scanned.non_finite)
    out.files, out.nbytes, out.checksums = scanned.files, scanned.nbytes, scanned.checked
    out.damaged = list(dict.fromkeys(out.damaged))
    return out


def _stated(source: Checkpoint, out: Checked) -> dict[str, str]:
    """Returns the files that mckpt.json names and that are there, with their checksums; "" for one
    of another size.
    """
    named = [(source.opened.root, source.files.manifest.get("files"))]
    if recorded := source.files.manifest.get("hf"):
        if source.files.hf_directory is None:
            out.unchecked.append(f"hf: is not there; {MANIFEST} names {len(recorded)} files in it")
        else:
            named.append((source.files.hf_directory, recorded))
    stated: dict[str, str] = {}
    for root, listed in named:
        out.damaged += changed_files(root, {"files": listed})
        for name, facts in (listed or {}).items():
            path = root / name
            if path.is_file():
                same = path.stat().st_size == facts["bytes"]
                stated[str(path)] = facts["checksum"] if same else ""
    return stated


def _pointers(source: Checkpoint) -> list[str]:
    """Returns a sentence for each file beside the weights that a conversion could not copy."""
    root = source.files.side_directory
    if root is None:
        return []
    out = []
    for name in side_files(root).kept:
        try:
            stamp_to_copy(root / name)
        except SourceError as e:
            out.append(str(e))
    return out


def _orphans(source: Checkpoint, named: Collection[str]) -> list[str]:
    """Returns a sentence for each file with tensors that no index or header of the checkpoint
    leads to.

    named: the files that were read, and those that mckpt.json names.
    """
    opened = source.opened
    kinds = {Path(path).suffix for path in named}  # a model may have weights in other forms too
    present = {
        path
        for pattern in opened.format.parts
        for path in map(str, opened.root.glob(pattern))
        if "*" in pattern and pattern.endswith(TENSORS) and Path(path).suffix in kinds
    }
    return [
        f"{path}: belongs to no index, so nothing reads it; remove it if it is left over from"
        " another checkpoint"
        for path in sorted(present - set(named))
        if not Path(path).name.startswith(OTHER_FORM)
    ]


def _structure(source: Checkpoint, out: Checked) -> None:
    """Checks that the files hold every element of each tensor once, and that copies are equal."""
    try:
        out.damaged += holes(source.layout)
        if source.optimizer is not None:
            out.damaged += holes(source.optimizer.layout)
        if not out.damaged:
            out.suspicious += source.reader.check_replicas()
    except (SourceError, CoverError, PickleError, StorageError) as e:
        out.damaged += e.problems or [f"{e}"]
    except MckptError as e:
        out.unchecked.append(
            "whether all tensors of the model are there, with the right shapes, was not checked:"
            f" {e}"
        )


def holes(layout: Layout) -> list[str]:
    """Returns a sentence for each logical tensor of which an element is stored nowhere or twice."""
    stored: dict[tuple[str, int, int], list[int]] = {}
    for number, s in enumerate(layout.stored):
        if s.replica or s.carried:
            continue
        places = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
        for name in dict.fromkeys(p.tensor for p in s.pieces):
            for layer, expert in places:
                stored.setdefault((name, layer, expert), []).append(number)
    faults: dict[tuple[str, tuple[int, ...]], str | None] = {}  # many tensors are cut alike
    out = []
    for (name, layer, expert), numbers in stored.items():
        cut = (name, tuple(numbers))
        if cut not in faults:
            pieces = [p for i in numbers for p in layout.stored[i].pieces if p.tensor == name]
            faults[cut] = tiles([p.box for p in pieces], layout.shapes[name])
        if faults[cut]:
            out.append(f"{name.format(layer=layer, expert=expert)}: {faults[cut]}")
    return out
