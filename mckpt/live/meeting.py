"""Trainers and receivers of one process group tell each other what they hold, and agree on a plan.

trainers    boxes of all ranks <---+ +--- error, or the plan of each receiver --->
receivers   own boxes, or none ----+ +--->
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mckpt.errors import MckptError, UsageError
from mckpt.live.buckets import Buckets
from mckpt.live.direct import Boxes
from mckpt.live.together import call, gathered, rank_and_world, refusal_of

if TYPE_CHECKING:
    import torch


class Meeting:
    """Lets the ranks of a group tell each other what they hold. All ranks make one at once."""

    def __init__(self, group: Any, to: Any, trains: bool) -> None:
        """group: None for that of the trainers alone. to: on a trainer as for `Sync`, and on a
        receiver its own boxes; None if it does not know them.
        """
        self.group, self.given = group, to
        self.rank, self.world = rank_and_world(group)
        own = trains, None if trains else to
        self.stated: list[tuple[bool, Boxes | None]] = gathered(lambda: own, group) if group else []
        self.boxes = bool(group) or isinstance(to, Mapping)  # whether ranks receive boxes
        # the ranks that only receive, and the first one that has the plan
        self.others = [rank for rank, (trains, _) in enumerate(self.stated) if not trains]
        self.first = next((rank for rank, (trains, _) in enumerate(self.stated) if trains), 0)

    def receivers(self, options: Mapping[str, Any]) -> dict[int, Boxes]:
        """Returns the boxes of all receivers. Raises UsageError if two ranks state others, or a
        receiver has none; and for options that whole tensors have only.
        """
        wrong = [name for name in ("quantize", "slices", "delta") if options[name]]
        if wrong or options["adapter"] == "only":
            named = ", ".join(wrong or ["adapter='only'"])
            raise UsageError(f"{named}: cannot be given with boxes, which are parts of tensors")
        if not (self.given is None or isinstance(self.given, Mapping)):
            raise UsageError("to: with `group`, give the boxes of each rank that receives some")
        stated = {r: _plain(boxes) for r, (_, boxes) in enumerate(self.stated) if boxes is not None}
        found = {rank: _plain(boxes) for rank, boxes in (self.given or stated).items()}
        problems = [
            f"rank {rank}: is not in the group, which has {self.world} ranks"
            for rank in found
            if rank not in range(self.world)
        ]
        for rank, (trains, _) in enumerate(self.stated):
            if not trains and rank not in found:
                problems.append(f"rank {rank}: receives, and neither it nor `to` has its boxes")
            elif rank in stated and stated[rank] != found[rank]:
                own, other = stated[rank], found[rank]
                names = [n for n in {**own, **other} if own.get(n) != other.get(n)]
                problems.append(
                    f"rank {rank}: states {own.get(names[0])} of {names[0]}, and `to` has"
                    f" {other.get(names[0])}; {len(names)} tensors differ"
                )
        if problems:
            raise UsageError.of("the ranks do not agree on what the receivers hold:", problems)
        return found

    def make(
        self, work: Callable[[], tuple[torch.device, Callable[[int], Buckets] | None]]
    ) -> None:
        """Makes a plan, on the trainers, and sends each other rank of the group its part.

        work: makes the plan; returns the device, and for boxes the part of each rank. Its error is
        raised on all ranks of the group.
        """
        import torch
        import torch.distributed as dist

        if self.group is None:
            device, part = work()
            if part is not None and self.world > 1:  # NCCL requires it before messages of some
                call(dist.all_reduce, torch.zeros(1, device=device))
            return
        kept: list[Any] = []
        failed = refusal_of(lambda: kept.append(work()))
        self._agree(failed, kept[0][0].type if kept else "")
        device, part = kept[0]
        for rank in self.others:
            self._send(device, part(rank) if self.rank == self.first else None)

    def receive(self) -> tuple[torch.device, Buckets]:
        """Returns the device on which tensors come, and the part of the plan of this receiver."""
        import torch

        kind = self._agree(None, "")
        device = torch.device("cpu")
        if kind == "cuda":
            device = torch.device(kind, torch.cuda.current_device())
        found = {rank: self._send(device, None) for rank in self.others}
        plan: Buckets = found[self.rank]
        return device, plan

    def _agree(self, failed: MckptError | None, kind: str) -> str:
        """Returns the kind of device that the trainers have."""

        def stated() -> str:
            if failed is not None:
                raise failed
            return kind

        return max(gathered(stated, self.group))

    def _send(self, device: torch.device, plan: Buckets | None) -> Any:
        """Sends a part of the plan to all ranks of the group, and returns it."""
        import torch.distributed as dist

        source, holder = dist.get_global_rank(self.group, self.first), [plan]
        call(dist.broadcast_object_list, holder, source, self.group, device)
        return holder[0]


def _plain(boxes: Boxes) -> Boxes:
    """Returns boxes as tuples, which can be compared. Tensors that share a list do so after it."""
    found = {
        id(listed): [tuple((int(a), int(b)) for a, b in box) for box in listed]
        for listed in {id(listed): listed for listed in boxes.values()}.values()
    }
    return {name: found[id(listed)] for name, listed in boxes.items()}
