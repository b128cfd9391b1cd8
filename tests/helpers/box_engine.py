"""A process of an engine, which has no model of Megatron and receives boxes of a trainer's weights.

    python tests/helpers/box_engine.py PORT RANK WORLD BOXES OUT

It does what tests/helpers/box_cases.py does on the side of the trainer, step after step, and writes
what it received and its errors to OUT.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mckpt import live
from mckpt.errors import MckptError

UPDATES = 3
BACKEND = "cpu:gloo,cuda:nccl"  # as verl and SkyRL start it


def join(port: int, rank: int, world: int, seconds: float, name: Any = "boxes") -> Any:
    """Returns a group of trainers and engines, as slime and SGLang make it."""
    store = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, world))[0]
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        dist.Backend(BACKEND if torch.cuda.is_available() else "cpu:gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=datetime.timedelta(seconds=seconds),
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


@contextmanager
def received_bytes() -> Iterator[list[int]]:
    """Yields a list whose only number is the bytes that this rank has asked others for."""
    total, function = [0], dist.batch_isend_irecv

    def counting(listed: list[Any]) -> Any:
        total[0] += sum(one.tensor.nbytes for one in listed if one.op is dist.irecv)
        return function(listed)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        yield total


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except MckptError as error:
        return str(error)
    return ""


def all_of(sync: live.Sync) -> dict[Any, torch.Tensor]:
    return {(name, box): tensor.clone() for name, box, tensor in sync()}


def main(port: str, rank: str, world: str, boxes: str, out: str) -> None:
    group = join(int(port), int(rank), int(world), 12)
    listed = json.loads(Path(boxes).read_text())
    own: Any = {name: [tuple(map(tuple, box)) for box in of] for name, of in listed[rank].items()}
    other: Any = {**own, "model.norm.weight": [((0, 1),)]} if rank == "2" else None
    errors = {"other boxes": refusal(lambda: live.Receiver(group, other))}
    receiver, found = live.Receiver(group, own), list[Any]()
    for _ in range(UPDATES):
        with received_bytes() as total:
            found.append((all_of(receiver), total[0]))
    into = {key: torch.full_like(tensor, 7) for key, tensor in found[-1][0].items()}
    receiver.fill(into)
    found.append((into, total[0]))
    wrong = {**into, next(iter(into)): torch.zeros(1)} if rank == "3" else into
    errors["another shape"] = refusal(lambda: receiver.fill(wrong))

    def early() -> None:
        for _ in receiver():
            if rank == "2":
                return  # the generator is closed

    errors["early"] = refusal(early)
    errors["changed"] = refusal(lambda: all_of(receiver))
    found.append((all_of(receiver), total[0]))
    links = receiver.links
    torch.save((found, errors, links, receiver.config, "megatron" in sys.modules), out)
    for _ in receiver():
        if rank == "3":
            os._exit(1)  # in the middle of a call


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MckptError as error:
        Path(f"{sys.argv[5]}.lost").write_text(str(error))
