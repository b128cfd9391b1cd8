"""Receives boxes of the tensors of a live model, in a process that has no model of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mckpt.live.asking import Asked
from mckpt.live.direct import Boxes
from mckpt.live.meeting import Meeting
from mckpt.live.syncing import Sync
from mckpt.live.together import rank_and_world


class Receiver(Sync):
    """The boxes that this rank receives each time that the trainers call their `Sync`.

        receiver = mckpt.live.Receiver(group, boxes)
        for step in range(steps):
            for name, box, tensor in receiver():
                ...

    Each is called as often as the `Sync` of the trainers, and iterated to the end. `links` and
    `transfers` are those of the whole plan, as are the names in `config`.
    """

    def __init__(self, group: Any, boxes: Boxes | None = None) -> None:
        """Waits for the trainers to make a `Sync` with the same group.

        group: a process group of the trainers and the receivers. boxes: what this rank holds: boxes
        by Hugging Face names, as (start, stop) along each axis. Without it, they are those that
        `to` of the trainers has for this rank.

        Raises one error on all ranks of the group: those of the `Sync`, or UsageError if `to` has
        other boxes.
        """
        self.rank, self.world = rank_and_world(group)
        self.memory, self._group, self._factors, self._kept = None, group, None, None
        self.slices, self.scheme, self.allow_overflow = False, None, True
        device, plan = Meeting(group, boxes, trains=False).receive()
        self._adopt(plan, device)

    def _given_now(self, asked: Asked) -> Iterator[Any]:
        self._refused = None
        yield from self._given()
