"""Uploads a Hugging Face directory to the Hub, after it has checked that the directory is
complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mckpt.checkpoint import description
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import SourceError, UsageError
from mckpt.formats.hf_config import CONFIG, belongs, read_config, side_files
from mckpt.formats.hf_files import INDEX
from mckpt.storage import addresses, hub
from mckpt.storage.files import stamp_to_copy
from mckpt.storage.staging import MANIFEST, unfinished
from mckpt.version import __version__

# {iteration}, or with a width: {iteration:07d}
_ITERATION = re.compile(r"\{iteration(:0?\d*d)?\}")


class Pushed(NamedTuple):
    """An upload that is complete, or planned."""

    name: addresses.HubName
    commit: hub.Commit | None  # None: it is planned
    files: dict[str, int]  # name in the repository -> bytes
    left_out: list[str]  # files of the directory that are not hidden

    def json(self) -> dict[str, Any]:
        return {
            "repository": self.name.repo,
            "revision": self.name.revision or hub.MAIN,
            "commit": self.commit and self.commit.oid,
            "url": self.commit and self.commit.url,
            "removed": self.commit and self.commit.removed,
            "files": self.files,
            "left_out": self.left_out,
        }


def push(
    directory: Path,
    name: str,
    revision: str | None,
    private: bool,
    message: str | None,
    dry_run: bool,
    tell: Callable[[Pushed], None],
) -> Pushed:
    """Makes the model `name` on the Hub hold the model of a Hugging Face directory, in one commit:
    its weights, and the files that a conversion copies (`hf_config.SIDE_FILES`).

    Weights that the branch has and the directory has not are removed, because a loader might take
    them for a part of the model.

    dry_run: send nothing. tell: called before anything is sent.

    revision: a branch; it may contain {iteration} or {iteration:07d}, the iteration that the
    export was made of.
    private: whether a repository that is created is private. Raises SourceError if the directory is
    not complete, UsageError if it is no Hugging Face directory, and the errors of `hub.upload`.
    """
    if not directory.exists():
        raise SourceError(f"{directory}: does not exist; give the directory of an export")
    if directory.is_dir() and (state := unfinished(directory)):
        raise SourceError(f"{directory}: is not complete. {state}")
    target = addresses.hub_name_of(name if name.startswith("hf:/") else f"hf://{name}")
    if target is None or "/" not in target.repo:
        raise UsageError(f"{name}: must be a name on the Hugging Face Hub, as org/name")
    if target.revision and revision:
        raise UsageError(f"{name} --revision {revision}: names two branches; leave one of them out")
    source = Checkpoint.open(directory)
    if source.is_megatron:
        raise UsageError(
            f"{directory}: is a Megatron checkpoint ({source.format}); `mckpt megatron-to-hf` makes"
            " an export of it, which can be pushed"
        )
    description.refuse_changed(directory, source.files.manifest)
    read_config(directory)
    if problems := source.opened.show(0).facts["problems"]:
        raise SourceError.of(f"{directory}: is not a complete model:", problems)
    branch = target.revision or revision
    if branch is not None and "{" in branch:
        branch = _ITERATION.sub(lambda m: format(_iteration(source), (m[1] or ":")[1:]), branch)
        if "{" in branch:
            raise UsageError(f"--revision {branch}: the only name in braces is {{iteration}}")
    files = {path: stamp_to_copy(directory / path).bytes for path in _files(directory, source)}
    left_out = [path for path in _visible(directory) if path not in files]
    planned = Pushed(addresses.HubName(target.repo, branch), None, files, left_out)
    tell(planned)
    if dry_run:
        return planned
    made = hub.upload(
        planned.name,
        {path: directory / path for path in files},
        stale=_is_weights,
        private=private,
        message=message
        or f"Upload {Path(os.path.realpath(directory)).name} with mckpt {__version__}",
    )
    return planned._replace(commit=made)


def _files(directory: Path, source: Checkpoint) -> list[str]:
    """Returns the files that belong to the model in a directory.

    Raises SourceError if one without which the model is not complete is a link to a file elsewhere
    that is no weights file.
    """
    weights = {Path(span.path).name for span in source.opened.spans([])}
    index = {INDEX[kind] for kind in INDEX if any(name.endswith(kind) for name in weights)}
    described = [name for name in (CONFIG, MANIFEST, *index) if (directory / name).exists()]
    for name in described:
        if not belongs(directory / name, directory):
            raise SourceError(
                f"{directory / name}: is a link that leaves the directory; put a copy in its place"
            )
    return sorted({*weights, *described, *side_files(directory).kept})


def _visible(directory: Path) -> list[str]:
    """Returns the files of a directory that are not hidden, nor in a hidden directory."""
    found = []
    for folder, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        relative = Path(folder).relative_to(directory)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(found)


def _is_weights(path: str) -> bool:
    """Returns whether a loader might read a file at the top of a repository as weights."""
    weights = path.endswith(".safetensors") or (
        path.startswith("pytorch_model") and path.endswith(".bin")
    )
    return "/" not in path and (weights or path in INDEX.values())


def _iteration(source: Checkpoint) -> int:
    """Returns the iteration of the Megatron checkpoint that an export was made of."""
    found = source.files.manifest.get("source", {}).get("iteration")
    if found is None:
        raise UsageError(
            f"{source.path}: its mckpt.json does not name an iteration, which {{iteration}} of"
            " --revision needs; write the number instead"
        )
    return found
