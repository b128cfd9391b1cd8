"""Megatron's save directories: the tracker, iterations, and what every checkpoint in one has beside
its tensors.

    DIR/latest_checkpointed_iteration.txt     "123" or "release"
    DIR/iter_0000123/, DIR/release/           one checkpoint each: a unit
(Megatron-LM, megatron/training/checkpointing.py: get_checkpoint_name, read_metadata)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle
from mckpt.errors import PickleError, SourceError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.storage.files import read_file

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MAPPING = "mckpt-mapping.yaml"  # the user's own family file, kept beside config.json


class Unit(NamedTuple):
    """One checkpoint of a save directory."""

    path: Path
    root: Path  # the save directory
    name: str  # release or iter_XXXXXXX


def unit_name(iteration: int | None) -> str:
    """The directory of an iteration; None is a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The inverse of `unit_name`."""
    return None if name == RELEASE else int(name.removeprefix("iter_"))


def is_unit_name(name: str) -> bool:
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def find(path: Path, iteration: int | None = None) -> Unit | None:
    """The checkpoint that `path` means: itself, or of a save directory the one its tracker (or
    `iteration`) names.

    None: no save directory.
    """
    path = path.resolve()
    tracker = path / TRACKER
    units = (
        sorted(p.name for p in path.iterdir() if p.is_dir() and is_unit_name(p.name))
        if path.is_dir()
        else []
    )
    if not tracker.exists() and not units:
        if iteration is not None and path.name != unit_name(iteration):
            raise UsageError(
                f"{path}: is no save directory with iterations, so --iteration {iteration} has no"
                " meaning there"
            )
        return Unit(path, path.parent, path.name)
    if iteration is not None:
        name = unit_name(iteration)
    elif tracker.exists():
        text = read_file(tracker, 4096).decode("utf-8", "replace").strip()
        if text != RELEASE and not text.isdecimal():
            raise SourceError(
                f"{tracker}: says {text[:40]!r}, and should say an iteration or {RELEASE}"
            )
        name = RELEASE if text == RELEASE else unit_name(int(text))
    elif len(units) == 1:
        name = units[0]
    else:
        raise UsageError(
            f"{path}: {len(units)} checkpoints and no {TRACKER}; say --iteration N or the path of"
            f" one of {', '.join(units)}"
        )
    if name not in units:
        raise SourceError(
            f"{path}: has no {name}"
            + (f", which {TRACKER} names" if iteration is None else "")
            + f"; it has {', '.join(units) or 'none'}"
        )
    return Unit(path / name, path, name)


def tracked(root: Path) -> int | None:
    """The iteration that the tracker names; None where there is no tracker or it says release."""
    path = root / TRACKER
    text = read_file(path, 4096).decode("utf-8", "replace").strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


class Common:
    """What a Megatron checkpoint has beside tensors: args, iteration, version, and keys that mckpt
    does not interpret.
    """

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields, self.where = fields, where
        record = fields.get("args")
        try:
            self.args: dict[str, Any] | None = (
                None if record is None else safe_pickle.plain(safe_pickle.fields(record))
            )
        except PickleError as e:
            raise SourceError(f"{where}: its args are no Namespace: {e}") from None

    def parallel(self) -> Parallel:
        """The sizes that its args say."""
        try:
            return Parallel.of_args(self.args or {})
        except (UsageError, TypeError) as e:
            raise SourceError(f"{self.where}: its args say no parallel sizes: {e}") from None

    def changed(self, args: dict[str, Any]) -> dict[str, Any]:
        """The same fields with some args replaced, all else as it was read, unknown classes
        included.
        """
        record = self.fields.get("args")
        merged = {**(safe_pickle.fields(record) if record is not None else {}), **args}
        return {**self.fields, "args": safe_pickle.namespace(**merged)}


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor anywhere in what a pickle held; such a value cannot be written
    again without its data.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        v = left.pop()
        if isinstance(v, safe_pickle.Storage):
            return True
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v, safe_pickle.Record):
            left += [v.args, v.state, v.items, v.entries]
        elif isinstance(v, dict):
            left += [*v.keys(), *v.values()]
        elif isinstance(v, (list, tuple, set, frozenset)):
            left += v
    return False


def new_common(args: dict[str, Any], iteration: int) -> dict[str, Any]:
    """The common state of a checkpoint that holds weights alone."""
    return {
        "args": safe_pickle.namespace(**args),
        "checkpoint_version": 3.0,  # below 3.0 Megatron-LM reorders q, k and v
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
