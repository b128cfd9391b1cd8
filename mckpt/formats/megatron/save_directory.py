"""Megatron's save directories: the tracker, and one directory for each iteration.

    DIR/latest_checkpointed_iteration.txt     "123" or "release"
    DIR/iter_0000123/, DIR/release/           one checkpoint each
(Megatron-LM, megatron/training/checkpointing.py: get_checkpoint_name, read_metadata)

verl has the same tracker, and other directories (verl/utils/megatron_utils.py):

    DIR/global_step_123/actor/model/dist_ckpt/      the weights, in torch_dist
    DIR/global_step_123/actor/model/huggingface/    config.json and tokenizer; up to verl 0.8, both
                                                    are in actor
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from mckpt.errors import SourceError, UsageError
from mckpt.storage import sparse_copy
from mckpt.storage.files import read_file
from mckpt.storage.staging import sync

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
WEIGHTS, CONTEXT = "weights", "context"  # the directories in a checkpoint of NeMo 2.0
# the directory in one of NeMo 1, and the file that describes it
NEMO_WEIGHTS, NEMO_CONFIG = "model_weights", "model_config.yaml"
VERL_WEIGHTS, VERL_HF = "dist_ckpt", "huggingface"
VERL_STEP = "global_step_"
# where verl puts them in a directory of a step, of a role, or in `model`
_VERL = ("model", "", "actor/model", "actor")
# in the directory of an iteration, by Megatron-LM since August 2026 and by Megatron-Bridge
TOKENIZER_DIRECTORY = "tokenizer"
MAPPING = "mckpt-mapping.yaml"  # the user's own family file, kept beside config.json


class IterationDirectory(NamedTuple):
    """The directory of one checkpoint, which may lie in a save directory."""

    path: Path
    root: Path  # the save directory
    name: str  # release or iter_XXXXXXX


def iteration_name(iteration: int | None) -> str:
    """Returns the name of an iteration's directory; None is a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Returns the iteration of a directory's name, as the inverse of `iteration_name`."""
    return None if name == RELEASE else int(name.removeprefix("iter_"))


def is_iteration_name(name: str) -> bool:
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def iterations_of(path: Path) -> list[int]:
    """Returns the iterations that have a directory in a save directory, in ascending order."""
    names = [p.name for p in path.iterdir() if p.is_dir()] if path.is_dir() else []
    return sorted(int(n.removeprefix("iter_")) for n in names if re.fullmatch(r"iter_\d{7,}", n))


def is_save_directory(path: Path) -> bool:
    """Returns whether a directory has checkpoints of Megatron; verl writes a tracker too."""
    return path.is_dir() and any(is_iteration_name(p.name) and p.is_dir() for p in path.iterdir())


def find(path: Path, iteration: int | None = None) -> IterationDirectory:
    """Returns the checkpoint that `path` names: the directory itself, the directory of the weights
    in one of NeMo or verl, or in a save directory the iteration that the tracker file or
    `iteration` names.
    """
    path = Path(os.path.realpath(path))
    tracker = path / TRACKER
    names = (
        sorted(p.name for p in path.iterdir() if p.is_dir() and is_iteration_name(p.name))
        if path.is_dir()
        else []
    )
    if not names and (weights := verl_weights(path, iteration)) is not None:
        return IterationDirectory(weights, weights.parent, weights.name)
    if not tracker.exists() and not names:
        if iteration is not None and path.name != iteration_name(iteration):
            raise UsageError(
                f"{path}: has no directories of iterations, so leave --iteration {iteration} out"
            )
        nemo = ((WEIGHTS, CONTEXT), (NEMO_WEIGHTS, NEMO_CONFIG))
        inside = (
            path / w for w, beside in nemo if (path / w).is_dir() and (path / beside).exists()
        )
        inner = next(inside, path)
        return IterationDirectory(inner, inner.parent, inner.name)
    if iteration is not None:
        name = iteration_name(iteration)
    elif tracker.exists():
        text = read_file(tracker, 4096).decode("utf-8", "replace").strip()
        if text != RELEASE and not text.isdecimal():
            raise SourceError(
                f"{tracker}: contains {text[:40]!r}, and must name an iteration or {RELEASE}"
            )
        name = RELEASE if text == RELEASE else iteration_name(int(text))
    elif len(names) == 1:
        name = names[0]
    else:
        raise UsageError(
            f"{path}: {len(names)} checkpoints and no {TRACKER}; give --iteration N or the path of"
            f" one of {', '.join(names)}"
        )
    if name not in names:
        raise SourceError(
            f"{path}: has no {name}"
            + (f", which {TRACKER} names" if iteration is None else "")
            + f"; it has {', '.join(names) or 'none'}"
        )
    return IterationDirectory(path / name, path, name)


def verl_weights(path: Path, iteration: int | None = None) -> Path | None:
    """Returns the directory of the weights that verl saved in torch_dist; None if there is none.

    path: a save directory of verl, or the directory of a step, of a role, or of its model.
    iteration: the step, only in a save directory; without it, the one that the tracker names.
    """
    return _verl_directory(path, iteration, VERL_WEIGHTS, ".metadata")


def verl_hf(path: Path, iteration: int | None = None) -> Path | None:
    """Returns the Hugging Face directory that verl saved, as `verl_weights` does."""
    return _verl_directory(path, iteration, VERL_HF, "config.json")


def _verl_directory(path: Path, iteration: int | None, name: str, file: str) -> Path | None:
    """Returns the directory of verl with this name and file. verl makes directories that it leaves
    empty.
    """
    number = iteration
    if number is None and (path / TRACKER).is_file():
        text = read_file(path / TRACKER, 4096).decode("utf-8", "replace").strip()
        number = int(text) if text.isdecimal() else None
    step = path / f"{VERL_STEP}{number}"
    if iteration is not None and not step.is_dir():
        return None
    found = ((step if step.is_dir() else path) / part / name for part in _VERL)
    return next((directory for directory in found if (directory / file).is_file()), None)


def verl_step(path: Path) -> dict[str, int]:
    """Returns the entry `iteration` for a directory below that of a step; {} for another."""
    steps = [p.removeprefix(VERL_STEP) for p in path.parts if p.startswith(VERL_STEP)]
    return {"iteration": int(steps[-1])} if steps and steps[-1].isdecimal() else {}


class Tracker:
    """The file that names the newest checkpoint of a save directory."""

    def __init__(self, root: Path, update: bool = False) -> None:
        """update: let it name any checkpoint that is put there, not only a later iteration."""
        self.root, self.path, self.update = root, root / TRACKER, update

    def content(self) -> str:
        """Returns the tracker file's iteration, or `release`; "" if the file is absent."""
        if not self.path.exists():
            return ""
        return read_file(self.path, 4096).decode("utf-8", "replace").strip()

    def moves_to(self, name: str) -> bool:
        """Returns whether it will name this checkpoint once the checkpoint is in place."""
        if not is_iteration_name(name):  # a delta of weights
            return False
        if self.update or not self.path.exists():
            return True
        now, iteration = self.content(), iteration_of(name)
        return now.isdecimal() and iteration is not None and iteration > int(now)

    def move_to(self, name: str) -> None:
        """Lets it name this checkpoint."""
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f"{TRACKER}.mckpt"
        beside.write_text(_as_tracked(name))
        sync(beside)
        os.rename(beside, self.path)
        sync(self.root)
        sparse_copy.push(self.path)

    def settle(self, name: str) -> None:
        """Does for a checkpoint that is in place already what a run does at its end: lets the
        tracker name it, unless it names a later one.
        """
        if self.moves_to(name) and self.content() != _as_tracked(name):
            self.move_to(name)

    def note(self, name: str) -> str | None:
        """Returns a sentence if the tracker will still name another checkpoint after a run; None if
        it will name this one.
        """
        if self.moves_to(name) or (now := self.content()) == _as_tracked(name):
            return None
        return (
            f"{self.path} names {now[:40]!r} and will still name that checkpoint, not {name}; give"
            " --update-tracker to change it"
        )


def _as_tracked(name: str) -> str:
    return name if name == RELEASE else str(iteration_of(name))
