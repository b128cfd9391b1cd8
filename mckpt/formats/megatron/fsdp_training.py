"""The checkpoints that verl saves of a training by FSDP2, with the state of torch's Adam.

    model_world_size_2_rank_0.pt    the rank's part of each weight, by name (`hf_pieces`)
    optim_world_size_2_rank_0.pt    that of each state, by the number of the parameter:
                                    {"state": {0: {step, exp_avg, exp_avg_sq}}, "param_groups"}

The optimizer numbers the parameters in the order in which the model has them, as the files of the
weights do. A weight is its own master copy.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers.torch_file import Ranges
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import FAMILY, Format, Names, Problems
from mckpt.formats.hf import HuggingFace
from mckpt.formats.hf_pieces import OPTIMIZER, TORCH, Whole, numbered, of_state_dicts, state_dict_in
from mckpt.formats.hf_sharded import Sharded
from mckpt.formats.megatron.interface import Common
from mckpt.formats.megatron.optimizer import (
    FULLY_RESHARDABLE,
    MASTER,
    Optimizer,
    groups_of,
    state_pieces,
)
from mckpt.formats.megatron.save_directory import verl_step
from mckpt.formats.megatron.torch_adam import COPY, NOTE, STEP, adam_of, common_state
from mckpt.geometry.box import ZEROS, Layout, Stored


def detect(path: Path) -> bool:
    return path.is_dir() and all(numbered(path, form) for form in (TORCH, OPTIMIZER))


class FsdpTraining(Sharded):
    """An opened checkpoint of verl with its optimizer. Only headers and numbers are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.format = FORMAT
        self.notes.append(NOTE)
        self.ranks = [file for _, file in numbered(path, OPTIMIZER)]
        self.settings: list[dict[str, Any]] = []
        self.steps = set[float]()
        # the rows of the parameters; a tied weight is stored again under its other name
        first = {
            whole.parts[0].entry[2:4]: row
            for row, whole in reversed([*enumerate(self.wholes)])
            if whole.sharded
        }
        self.parameters = sorted(first.values())

    @cached_property
    def common(self) -> Common:
        """Returns the common state that Megatron would have: the step, the groups, a schedule."""
        fields: dict[str, Any] = {}
        with suppress(UsageError, SourceError):  # `optimizer` raises it
            fields |= self._adam
        return Common({**fields, **verl_step(self.root)}, str(self.root))

    @cached_property
    def _adam(self) -> dict[str, Any]:
        _ = self._states
        return common_state(self.root, self.settings, self.steps)

    @cached_property
    def _states(self) -> dict[str, dict[int, Whole]]:
        """The states of the parameters: name -> row of the weight -> state.

        Raises SourceError or UsageError if they do not fit the weights.
        """
        problems: list[str] = []
        theirs = [Path(file).name.removeprefix("model_") for file in self.files]
        if theirs != [Path(file).name.removeprefix("optim_") for file in self.ranks]:
            problems.append("its files are not of the ranks that have weights")
        found = of_state_dicts(self.ranks, self._states_in, problems)
        out: dict[str, dict[int, Whole]] = {}
        for key, state in found.items():
            number, _, name = key.partition(".")
            if not number.isdecimal() or int(number) >= len(self.parameters):
                problems.append(f"{key} is of no parameter")
                continue
            row = self.parameters[int(number)]
            if state.shape != self.wholes[row].shape:
                weight = f"{self.entries.names[row]} {list(self.wholes[row].shape)}"
                problems.append(f"{key} {list(state.shape)} is not a state of {weight}")
            out.setdefault(name, {})[row] = state
        rows = set(self.parameters)
        for name, own in out.items():
            lacking = [self.entries.names[row] for row in sorted(rows - own.keys())]
            problems += [f"{weight} has no {name}, as if it were not trained" for weight in lacking]
        if problems:
            raise SourceError.of(
                f"{self.root}: its optimizer does not fit:", problems, f"{COPY.capitalize()}."
            )
        return out

    def _states_in(self, path: str) -> tuple[dict[Any, Any], Ranges]:
        """Returns the states in a rank's file, by the number of the parameter and their name, and
        the places of their storages. Collects the settings and the steps of the first rank, and the
        first number of steps of each other rank, which shows a file of another step of the run.
        """
        value, data = state_dict_in(path)
        groups, states, steps = adam_of(value, data, path)
        listed = [number for group in groups for number in group.get("params", [])]
        if len(groups) != 1 or listed != [*range(len(self.parameters))]:
            raise UsageError(
                f"{path}: its optimizer has {len(listed)} parameters in {len(groups)} groups, and"
                f" the model has {len(self.parameters)}. mckpt knows their order if they are one"
                " group of FSDP2's parameters, which FSDP 1 joins; give --no-optimizer to convert"
                " the weights alone"
            )
        if path == self.ranks[0]:
            self.settings = groups
        self.steps.update(steps if path == self.ranks[0] else itertools.islice(steps, 1))
        flat = {f"{n}.{k}": v for n, own in states.items() for k, v in own.items() if k != STEP}
        return flat, data

    def optimizer(self, names: Names) -> Optimizer:
        """Returns the optimizer's state of each weight."""
        adam, states = self._adam, dict(self._states)
        states[MASTER] = masters = {row: self.wholes[row] for row in self.parameters}
        whole = HuggingFace.layout(self, names)
        problems = Problems(
            f"the optimizer's state of {self.root} does not match its weights:", COPY
        )
        stored: list[Stored] = []
        shapes, used = dict[str, tuple[int, ...]](), set[int]()
        for s in (s for s in whole.stored if len(s) and whole.files[s.file[0]] != ZEROS):
            rows = set(self.rows(s).tolist()) & masters.keys()
            used |= rows
            if rows and (s.carried or s.replica):
                problems.append(f"{s.key}: its state has no place in Megatron")
                continue
            for state, of in states.items():
                if not rows or not rows <= of.keys():
                    continue
                first = 0 if state == MASTER else len(self.files)
                stored += (
                    replace(t, pieces=state_pieces(t.pieces, state), file=t.file + first)
                    for t in self.parts(s, of, problems)
                )
                shapes |= {f"{p.tensor}@{state}": whole.shapes[p.tensor] for p in s.pieces}
        left = sorted(masters.keys() - used)
        problems += [f"{self.entries.names[row]}: the state of no weight" for row in left]
        problems.check()
        groups = groups_of(adam["optimizer"], str(self.root))
        layout = Layout([*self.files, *self.ranks], stored, shapes)
        return Optimizer(FULLY_RESHARDABLE, layout, groups, frozenset(), [])


FORMAT = Format(
    "fsdp_training",
    "model_world_size_*_rank_*.pt with optim_world_size_*_rank_*.pt",
    megatron=True,
    detect=detect,
    open=FsdpTraining,
    parts=("*_world_size_*_rank_*.pt",),
    trainer=FAMILY,
    torch_optimizer=True,
    global_keys=True,
)
