"""Decides whether a destination already holds the output of a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.checkpoint.description import changed_files
from mckpt.conversion.plan_data import PlanData, SourceState
from mckpt.errors import StorageError, shown
from mckpt.storage import sparse_copy
from mckpt.storage.files import checksum_of
from mckpt.storage.staging import MANIFEST

MEMORY = 64 << 20  # bytes of the buffers of a comparison
SHOWN = 5  # differences of a plan in an error
# the names that options have for entries of the manifest
OPTIONS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "name": "dialect",
}
# entries that in most cases follow from the others
DERIVED = ("choices", "padded_vocab_size", "mckpt", "left_behind")
# entries that are digests, or follow from the others always
DIGESTS = ("source", "args", "common", "config", "digest", "logical")


class ExistingOutput(NamedTuple):
    """The result of a comparison of a destination with a plan.

    manifest: that of the destination, if it holds the output of the plan, else None.
    why: which of the plan, the files and the source differ; "" if there is no manifest at all.
    """

    manifest: dict[str, Any] | None
    why: str = ""
    state: SourceState | None = None  # of the source, whose content was found in the destination


def existing_output(
    plan: PlanData, look: bool = True, on_note: Callable[[str], None] = lambda text: None
) -> ExistingOutput:
    """Decides whether the destination holds the output of this plan: made by the same plan from the
    same source, with every file there in its size.

    The files of the source count as the same if their size, mtime, ctime and inode are. Checksums
    of the destination are not compared; `mckpt check` does so.

    look: if the state of the source files differs, compare the content, which takes as long as a
    conversion. Without it, they count as changed. on_note: called before such a comparison.
    """
    manifest, here = plan.destination.manifest(), plan.destination.path
    if not manifest:
        return ExistingOutput(None)
    if manifest.get("plan") != plan.digest:
        return ExistingOutput(None, _other_plan(plan, manifest))
    if gone := [*plan.side.missing(), *changed_files(here, manifest)]:
        return ExistingOutput(None, f"The files differ: {gone[0]}")
    if gone := sorted(set(manifest.get("hf", ())) - set(plan.side.files)):
        return ExistingOutput(None, f"The source differs: {plan.source.path} has no {gone[0]} now")
    state = plan.state()
    if manifest.get("read") == str(state):
        return ExistingOutput(manifest, state=state)
    if look:
        on_note(
            f"{plan.source.path}: was moved, touched or changed since {here} was made of it;"
            " comparing the content"
        )
        checksum = _checksum(manifest)
        changed = differing(plan, here, checksum, MEMORY)
        if not changed and plan.state() == state:
            return ExistingOutput(manifest, state=state)
        if changed and _was_changed(changed, manifest["files"].get(os.path.relpath(changed, here))):
            return ExistingOutput(
                None, f"The files differ: {changed}: was changed after it was written"
            )
    return ExistingOutput(None, f"The source differs: {plan.source.path} has other values now")


def complete(plan: PlanData, output: ExistingOutput) -> None:
    """Completes the run that made the destination, if it was killed: updates the tracker and
    removes its staging directory. Then records the state of the source, whose content was the same.
    """
    from mckpt.execute.checksums import KINDS

    destination, manifest, state = plan.destination, output.manifest, output.state
    assert manifest is not None and state is not None
    if destination.iteration_name is not None:
        destination.tracker.settle(destination.iteration_name)
    known = str(manifest.get("read"))
    shared = {known.partition(":")[0], state.shared}
    destination.clean(*(plan.key(kind, one) for kind in KINDS for one in shared))
    if known != str(state):
        _note(destination.path / MANIFEST, known, str(state))


def differing(plan: PlanData, folder: Path, checksum: str, max_memory: int) -> str:
    """Returns the path of a file in `folder` whose bytes are not those that the plan would write
    now, "" if there is none.
    """
    from mckpt.execute import comparing

    return comparing.differing(plan.transfer, folder, checksum, max_memory)


def _checksum(manifest: Mapping[str, Any]) -> str:
    stated = (file["checksum"].partition(":")[0] for file in manifest["files"].values())
    return next(filter(None, stated), "none")


def _was_changed(path: str, stated: Mapping[str, Any] | None) -> bool:
    """Returns whether a file has another checksum than the manifest states."""
    wanted = (stated or {}).get("checksum", "")
    return bool(wanted) and checksum_of(path, wanted.partition(":")[0]) != wanted


def _other_plan(plan: PlanData, manifest: Mapping[str, Any]) -> str:
    """Returns a sentence on the facts in which the plan of a manifest differs from this one."""
    facts = json.loads(shown(json.dumps(plan.facts)))
    apart = [name for name, value in facts.items() if manifest.get(name) != value]
    if apart == ["source"]:
        return f"The source differs: {plan.source.path} has other tensors, sizes or files now"
    chosen = {key: value for key, value in facts.items() if key not in DERIVED}
    values = dict(_values_apart(manifest, chosen)) or dict(_values_apart(manifest, facts))
    if "tp" in values:
        values.pop("etp", None)  # it is tp if the user gives none
    if not values:
        return f"The plan differs: it was made with another {', '.join(apart)}"
    more = f", and {len(values) - SHOWN:,} more differ" * (len(values) > SHOWN)
    first = list(values.items())[:SHOWN]
    has, asked = (
        ", ".join(
            f"no {name}" if pair[at] is None else f"{name} {pair[at]}" for name, pair in first
        )
        for at in (0, 1)
    )
    return f"The plan differs: {plan.destination.path} has {has}; you ask for {asked}{more}"


def _values_apart(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields the entries that differ in two manifests and are short: the name that their option
    has, and both values.
    """
    for key, value in right.items():
        there = left.get(key)
        if there == value or key in DIGESTS:
            continue
        if isinstance(value, dict):
            yield from _values_apart(there if isinstance(there, dict) else {}, value)
        elif all(isinstance(one, (str, int, float, type(None))) for one in (there, value)):
            yield OPTIONS.get(key, key), (there, value)


def _note(path: Path, known: str, state: str) -> None:
    """Writes another state of the source into a manifest.

    The new state has the same length, and overwrites the old one. So a crash leaves a manifest in
    any case, whose state fits this source or no source.
    """
    with suppress(OSError, StorageError):  # such as a destination that is read-only
        if (place := sparse_copy.of(path)) is not None:
            place.put(place.name(path), path.read_bytes().replace(known.encode(), state.encode()))
            return
        with open(path, "r+b") as file:
            data = file.read()
            if len(known) == len(state) and data.count(known.encode()) == 1:
                file.seek(0)
                file.write(data.replace(known.encode(), state.encode()))
