"""The settings of torch's Adam as those that Megatron saves of its own: groups and a schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mckpt.containers.dcp_metadata import Metadata
from mckpt.containers.entries import entry_of
from mckpt.containers.safe_pickle import as_tensor, short
from mckpt.containers.torch_file import Ranges
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Names
from mckpt.formats.megatron.optimizer import MASTER, Optimizer, number_in, prefix_of
from mckpt.formats.megatron.torch_dist import TorchDist
from mckpt.formats.megatron.torch_dist_writing import METADATA

# what Megatron's groups of Adam take over from those of torch
TAKEN = ("lr", "betas", "eps")
STEP = "step"
COPY = "copy the checkpoint again, or give --no-optimizer to convert the weights alone"
NOTE = (
    "of the training, the weights and the state of Adam are read, and neither the schedule"
    " of the learning rate nor the place in the data"
)


class TorchAdam(TorchDist):
    """An opened checkpoint of another trainer, with the Adam of torch."""

    iteration: int | None  # of the training, if the checkpoint has it

    @abstractmethod
    def settings(self) -> tuple[list[dict[str, Any]], set[float]] | None:
        """Returns the settings of each group of weights, and the numbers of steps that its weights
        have made; None without an optimizer.
        """

    @cached_property
    def _adam(self) -> dict[str, Any]:
        return {} if (stated := self.settings()) is None else common_state(self.root, *stated)

    @cached_property
    def _common(self) -> tuple[dict[str, Any], Any, str]:
        """The common state that Megatron would have: the step, the groups and a schedule."""
        fields: dict[str, Any] = {}
        with suppress(UsageError):  # `optimizer` raises it
            fields |= self._adam
        fields |= {} if self.iteration is None else {"iteration": self.iteration}
        return fields, {}, str(self.root / METADATA)

    def optimizer(self, names: Names) -> Optimizer | None:
        return super().optimizer(names) if self._adam else None


def with_masters(metadata: Metadata, trained: Iterable[str]) -> Metadata:
    """Returns an index in which these weights are their own master copies, as torch_dist has them.

    trained: their keys.
    """
    names = {key: (key, f"{prefix_of(MASTER, True)}{key}") for key in trained}
    held, places = metadata.tensors.items(), metadata.items.items()
    return metadata._replace(
        tensors={name: tensor for key, tensor in held for name in names.get(key, (key,))},
        items={(name, at): item for (key, at), item in places for name in names.get(key, (key,))},
    )


def common_state(root: Path, found: list[dict[str, Any]], steps: set[float]) -> dict[str, Any]:
    """Returns the common state of the optimizer that Megatron would have.

    found: the settings of each group of weights. steps: the numbers of steps that weights have
    made. Raises UsageError for another optimizer, and for weights with other settings or steps.
    """
    taken = {tuple(_numbers(one.get(name)) for name in TAKEN) for one in found}
    if len(taken) != 1 or None in next(iter(taken)) or len(steps) != 1:
        raise UsageError(
            f"{root}: its optimizer has {len(taken)} groups of settings and {len(steps)} counts of"
            " steps, and mckpt converts an Adam with one of each; give --no-optimizer to convert"
            " the weights alone"
        )
    settings = {
        **dict(zip(TAKEN, next(iter(taken)), strict=True)),
        "weight_decay": max(_numbers(one.get("weight_decay")) or 0.0 for one in found),
        "max_lr": max(_numbers(one.get("initial_lr")) or one["lr"] for one in found),
    }
    step = int(next(iter(steps)))
    return {
        "iteration": step,
        "optimizer": {"optimizer": {"param_groups": _groups(settings, step)}},
        "opt_param_scheduler": _schedule(settings, step),
    }


def adam_of(
    value: Any, data: Ranges, where: str, cure: str = "copy the checkpoint again"
) -> tuple[list[dict[str, Any]], dict[Any, Any], Iterator[float]]:
    """Returns the groups of settings and the states in the state dict of an optimizer, and the
    steps that these have, of which each is read when it is asked for. Raises SourceError with
    `cure` for another value, and if only some of the states have a step.

    data: the places of the storages.
    """
    found = value if isinstance(value, dict) else {}
    groups, states = found.get("param_groups"), found.get("state", {})
    if (
        not isinstance(groups, list)
        or not isinstance(states, dict)
        or not all(isinstance(one, dict) for one in (*groups, *states.values()))
    ):
        raise SourceError(
            f"{where}: is not the state dict of an optimizer, but has state {short(states)} and"
            f" param_groups {short(groups)}; {cure}"
        )
    known = [one for one in states.values() if one]
    if 0 < (lost := sum(STEP not in one for one in known)) < len(known):
        raise SourceError(f"{where}: {lost:,} of {len(known):,} states have no step; {cure}")
    counted = [one[STEP] for one in (*groups, *known) if STEP in one]
    return groups, states, (step_of(step, data, where) for step in counted)


def step_of(value: Any, data: Ranges, where: str) -> float:
    """Returns the number of a step, which is a number or a tensor. Raises SourceError for others.

    data: the places of the storages.
    """
    view = as_tensor(value)
    number: Any = value if view is None else number_in(entry_of(view, data, 0), where)
    if type(number) not in (int, float) or not math.isfinite(number):
        raise SourceError(f"{where}: a step is not a number, but {short(value)}; {COPY}")
    return float(number)


def _numbers(value: Any) -> Any:
    """Returns a number, or several as a tuple; None for anything else."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    return value if type(value) in (int, float) else None


def _groups(settings: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Returns the param_groups of Megatron's Adam: weight decay is for matrices alone."""
    own = {
        **{"is_expert_parallel": False, "default_config": True, "lr_mult": 1.0},
        **{"is_decoupled_lr": False, "min_lr": 0.0, "bias_correction": True},
        **settings,
        "step": step,
    }
    return [{**own, "wd_mult": 1.0}, {**own, "wd_mult": 0.0, "weight_decay": 0.0}]


def _schedule(settings: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns the state of a constant schedule, which Megatron replaces by its own."""
    decay = settings["weight_decay"]
    return {
        **{"max_lr": settings["max_lr"], "min_lr": 0.0, "lr_warmup_steps": 0, "num_steps": step},
        **{"lr_decay_style": "constant", "lr_decay_steps": step, "wd_incr_steps": step},
        **{"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"},
    }
