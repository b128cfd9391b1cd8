"""The two checkpoints of a verdict, and the comparison of their stored values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.formats import carried
from mckpt.geometry.parallel import Parallel

LISTED = 40  # tensors named in one reason


@dataclass
class Pair:
    """A Hugging Face checkpoint and the Megatron checkpoint that is compared with it.

    The runs leave their arrays in the working directory under `name`.
    """

    name: str
    left: Checkpoint
    right: Checkpoint
    path: Path  # of the Megatron checkpoint
    sizes: dict[str, int]  # tp, pp, vpp, ep, etp, cp of the run
    apart: list[dict[str, Any]]  # dims whose config and args differ: dim, arg, hf, megatron
    unread: str | None = None  # why the args could not be read
    notes: list[str] = field(default_factory=list)  # for the reader; they change no verdict
    # dims that --allow-inexact lets differ, so that the verdict is incomplete
    unlike: list[str] = field(default_factory=list)
    # fields of Parallel that say how an uneven pipeline of the run is split
    split: dict[str, Any] = field(default_factory=dict)


def run_sizes(parallel: Parallel, cp: int = 1) -> dict[str, int]:
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "ep")}
    return {**sizes, "etp": parallel.expert_tp, "cp": cp}


def say_sizes(sizes: dict[str, Any], all_of_them: bool = False) -> str:
    """Returns sizes in words, such as "tp 2, pp 2"; those that are 1 only if `all_of_them`."""
    shown = [f"{name} {size}" for name, size in sizes.items() if all_of_them or size != 1]
    return ", ".join(shown) or "one rank"


@dataclass
class Values:
    """The comparison of a pair's stored values.

    `padding` lists padded rows of the vocabulary that a conversion cannot have made.
    """

    difference: comparison.Difference
    padding: list[str] = field(default_factory=list)

    def reasons(self, left: Checkpoint, right: Checkpoint) -> list[str]:
        """Returns the reasons why the two differ; empty if they are equal."""
        found, lost = self.difference, self._not_carried(left, right)
        return [
            *found.replicas,
            *(f"{name}: only in {left.path}" for name in found.missing if name not in lost),
            *(f"{name}: only in {right.path}" for name in found.extra),
            *map(str, found.changed),
            *self.padding,
        ]

    def equal_towers(self, left: Checkpoint) -> int:
        """Returns the number of tensors of towers that are equal on both sides."""
        found = self.difference
        apart = {*found.missing, *(change.name for change in found.changed)}
        rows = carried.of(left.layout)
        return sum(carried.name_of(row.key).format() not in apart for row in rows)

    def _not_carried(self, left: Checkpoint, right: Checkpoint) -> set[str]:
        """Returns the tensors of the left side that are not in Megatron's model, if the right side
        carries none of them.
        """
        known = not right.is_megatron or carried.of(right.layout)
        return (
            set()
            if known
            else {carried.name_of(row.key).format() for row in carried.of(left.layout)}
        )

    def not_compared(self, left: Checkpoint, right: Checkpoint) -> list[str]:
        """Returns the reasons why equal values prove nothing; empty if they prove equality."""
        out = list(self.difference.infinite)
        if lost := self._not_carried(left, right):
            out.append(
                f"{len(lost):,} tensors of {left.path} are not in Megatron's model, and"
                f" {right.path} does not carry them"
            )
        if dropped := self.difference.dropped:
            shown = "; ".join(dropped[:LISTED]) + (" ..." if len(dropped) > LISTED else "")
            out.append(
                f"the mapping drops {len(dropped):,} weights, which were not compared: {shown}"
            )
        return out
