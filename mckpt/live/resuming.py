"""Fills the optimizer of a live model from a training checkpoint: what `loading` does beside the
weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.optimizer import SCHEDULER, prove
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import dtypes_of
from mckpt.formats.megatron.optimizer import MASTER, is_state
from mckpt.live.optimizer import LiveOptimizer
from mckpt.live.together import rank_and_world


class Resumed(AbstractContextManager["Resumed"]):
    """The optimizer of this rank, and the checkpoint with its state.

    If the context ends with an error, an optimizer that had no state has none again: the values of
    what was allocated are unknown.
    """

    def __init__(self, source: Checkpoint, optimizer: Any, scheduler: Any) -> None:
        """source: with its optimizer among its tensors.

        Raises SourceError if the checkpoint has no state, and UsageError for an optimizer that it
        does not fit.
        """
        if optimizer is None:
            raise UsageError("load_optimizer: give the optimizer too, as optimizer=")
        state, common = source.optimizer, source.files.common
        if state is None or common is None:
            raise SourceError(
                f"{source.path}: has no state of an optimizer; leave out load_optimizer, and the"
                " optimizer begins with the weights"
            )
        found = [common.fields[name] for name in SCHEDULER if name in common.fields]
        if scheduler is not None and not found:
            raise SourceError(
                f"{source.path}: has no state of a scheduler ({', '.join(SCHEDULER)}); leave out"
                " scheduler"
            )
        self.source, self.optimizer = source, LiveOptimizer(optimizer)
        self.groups = self.optimizer.matched(state.groups, str(source.path))
        self.scalers, self.scheduler, self.schedule = state.scalers, scheduler, found[:1]
        self.empty: list[Any] = []  # the optimizers that had no state

    def allocate(self) -> None:
        """Allocates the state, if the optimizer has made no step yet."""
        self.empty = self.optimizer.allocate()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            for link in self.empty:
                link.optimizer.state.clear()

    def prove(self) -> None:
        """Compares the checkpoint's master copies with its weights, of which each rank takes a
        share. Raises the errors of a conversion.
        """
        rank, world = rank_and_world()
        prove(self.source, share=slice(rank, None, world))

    def finish(self) -> None:
        """Sets all values but tensors: the count of steps, the settings of the param_groups, the
        loss scalers and the scheduler.
        """
        self.optimizer.set_groups(self.groups, self.scalers)
        if self.scheduler is not None:
            self.scheduler.num_steps = 0  # to which load_state_dict adds the stored number
            self.scheduler.load_state_dict(*self.schedule)


def masters_in_fp32(source: Checkpoint, model: Checkpoint) -> set[str]:
    """Returns the master copies of the source that have no place in the model, because they are of
    parameters in fp32, and those are the same numbers.

    Raises UsageError if the optimizers have other states, or weights other dtypes.
    """
    wanted, held = dtypes_of(source.layout), dtypes_of(model.layout)
    unlike = [
        f"{name}: {dtype} in the checkpoint, {held[name]} in the model"
        for name, dtype in wanted.items()
        if not is_state(name) and held.get(name, dtype) != dtype
    ]
    if unlike:
        raise UsageError.of(
            f"{source.path}: the live model has parameters of other dtypes than the run whose"
            " optimizer it should continue; build the model with those, or leave out"
            " load_optimizer:",
            unlike,
        )
    kinds = [
        {name.partition("@")[2] for name in found if is_state(name)} for found in (wanted, held)
    ]
    if kinds[0] - {MASTER} != kinds[1] - {MASTER}:
        listed = [", ".join(sorted(names)) for names in kinds]
        raise UsageError(
            f"{source.path}: its optimizer has the states {listed[0]}, and the live one"
            f" {listed[1]}; build the optimizer of the run, or leave out load_optimizer"
        )
    unused = {
        name
        for name in wanted.keys() - held.keys()
        if name.endswith(f"@{MASTER}") and wanted[name.partition("@")[0]] == "float32"
    }
    apart = sorted(filter(is_state, (wanted.keys() - unused) ^ held.keys()))
    if apart:
        raise UsageError.of(
            f"{source.path}: the live optimizer does not update the parameters of the run; freeze"
            " the same ones, or leave out load_optimizer:",
            [
                f"{name}: only in the {'checkpoint' if name in wanted else 'model'}"
                for name in apart
            ],
        )
    return unused
