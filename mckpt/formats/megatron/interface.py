"""The parts of a format's interface that only Megatron's checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mckpt.formats.base import LayoutRequest, Names, Opened
from mckpt.formats.megatron.common_state import Common
from mckpt.formats.megatron.optimizer import Optimizer


@dataclass(frozen=True)
class MegatronRequest(LayoutRequest):
    """The description of a new checkpoint of Megatron."""

    padded_vocab_size: int  # rows
    common: Mapping[str, Any]  # Megatron's args and other plain values
    common_as_object: bool = False
    # whether the optimizer whose states are written is distributed; `dtypes` names the states
    distributed: bool = True
    # the param_groups of each optimizer of a rank, two if experts have one of their own; none
    # without an optimizer
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    # the loss scaler of each of them, or none
    scalers: Sequence[dict[str, Any]] = ()


class OpenedMegatron(Opened, Protocol):
    """A checkpoint of Megatron whose headers are read and whose names are not yet understood."""

    @property
    def common(self) -> Common:
        """Returns Megatron's args and other plain values."""

    def optimizer(self, names: Names) -> Optimizer | None:
        """Returns the optimizer's state, None if the checkpoint has none.

        Raises SourceError with every state that is missing, left over or of another shape.
        """


def as_megatron(opened: Opened) -> OpenedMegatron | None:
    """Returns the same checkpoint if it is one of Megatron, else None."""
    return cast(OpenedMegatron, opened) if opened.format.megatron else None
