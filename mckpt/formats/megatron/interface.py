"""The parts of a format's interface that only Megatron's checkpoints have, among them the common
state: args, iteration and other values but the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from mckpt.containers import safe_pickle
from mckpt.errors import PickleError, SourceError, UsageError
from mckpt.formats.base import LayoutRequest, Names, Opened
from mckpt.formats.megatron.optimizer import Optimizer
from mckpt.geometry.parallel import Parallel

# the first megatron-core that reads a common state kept as an object of the checkpoint
COMMON_OBJECT_SINCE = [0, 19]
CHECKPOINT_VERSION = 3.0  # of what is written
# the forms of a checkpoint that Megatron-Core writes and loads by default
MARKS = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
VERSION = "checkpoint_version"  # of Megatron-LM's files; those of 2019 do not have it


class Common:
    """The args, the iteration and the version of a checkpoint, and values that mckpt does not
    interpret.
    """

    def __init__(self, fields: dict[str, Any], where: str, as_object: bool = False) -> None:
        """as_object: it is an object of the checkpoint, not a file."""
        self.fields, self.where, self.as_object = fields, where, as_object
        if not isinstance(marks := fields.get("content_metadata") or {}, dict):
            kind = type(marks).__name__
            raise SourceError(f"{where}: content_metadata is a {kind}, and must be a dict")
        record = fields.get("args")
        try:
            self.args: dict[str, Any] | None = (
                None
                if record is None
                else safe_pickle.plain(safe_pickle.fields(record, f"{where}: args"))
            )
        except PickleError as e:
            raise SourceError(*e.args) from None

    @property
    def stated(self) -> dict[str, Any]:
        """Returns the args and the checkpoint's version, from which a dialect reads the dims."""
        version = self.fields.get(VERSION)
        return {**(self.args or {}), **({} if version is None else {VERSION: version})}

    def parallel(self) -> Parallel:
        try:
            return Parallel.of_args(self.args or {})
        except (UsageError, TypeError) as e:
            raise SourceError(f"{self.where}: parallel sizes in its args are wrong: {e}") from None

    def changed(self, args: dict[str, Any]) -> dict[str, Any]:
        """Returns the same fields with some args replaced. Everything else stays as it was read,
        unknown classes included.
        """
        record = self.fields.get("args")
        merged = {**(safe_pickle.fields(record, self.where) if record is not None else {}), **args}
        return {**self.fields, "args": safe_pickle.namespace(**merged)}


def has_tensors(value: Any) -> bool:
    """Returns whether a value from a pickle contains a tensor; such a value cannot be written
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


def new_common(args: dict[str, Any] | None, iteration: int) -> dict[str, Any]:
    """Returns the common state of a checkpoint that holds weights only.

    args: None for a checkpoint without args.
    """
    return {
        **({} if args is None else {"args": safe_pickle.namespace(**args)}),
        VERSION: CHECKPOINT_VERSION,  # below 3.0 Megatron-LM reorders q, k and v
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(MARKS),
    }


class MegatronRequest(LayoutRequest, frozen=True):
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
