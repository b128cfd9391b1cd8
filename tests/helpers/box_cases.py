"""The cases of tests/judge/test_live_boxes.py on the ranks of the trainer: `boxes` of a live case.

boxes: {name: [sizes of an engine or of another model of Megatron, the ranks that receive, keywords
    of Sync]}; a model is {"model": its sizes}, and each rank gets what it holds of it
engines: a port: two processes of tests/helpers/box_engine.py join the trainers in a group
    -> wrong: {name: what differs on any rank}, bytes: {name: [received, of boxes, of a whole Sync]}
    -> errors, seconds: of each fault with engines
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mckpt import live
from mckpt.trainer import build, load
from tests.helpers.box_engine import UPDATES, all_of, join, received_bytes, refusal
from tests.helpers.live_cases import box_problems, change, on_any_rank, on_the_host

ENGINE = Path(__file__).parent / "box_engine.py"


@torch.no_grad()
def run(case: dict[str, Any], args: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    like, other = case["like"], dict[str, Any]()
    for name, (sizes, *_) in case["boxes"].items():
        if "model" in sizes:  # it needs groups of its own
            parallel_state.destroy_model_parallel()
            its = build.at_sizes(load.read_args(case["checkpoint"]), **sizes["model"])
            build.initialize(its)
            other[name] = [None] * dist.get_world_size()
            held = live.model_boxes(build.build(its, its.params_dtype), like=like)
            dist.all_gather_object(other[name], held)
            parallel_state.destroy_model_parallel()
            build.initialize(args)
    chunks = build.build(args, args.params_dtype)
    load.load(chunks, args, case["checkpoint"])
    if "engines" in case:
        return with_engines(chunks, like, case["engines"])
    wrong, nbytes = dict[str, list[str]](), dict[str, list[int]]()
    for name, (sizes, ranks, options) in case["boxes"].items():
        every = other.get(name) or live.engine_boxes(like, **sizes)
        boxes = dict(zip(ranks, every, strict=True))
        whole = live.Sync(chunks, like=like, **options)
        sync = live.Sync(chunks, like=like, to=boxes, **options)
        own = boxes.get(dist.get_rank(), {})
        for number in range(2):
            change(chunks, 0.1, number)
            with received_bytes() as received:
                found = all_of(sync)
            wrong[f"{name} {number}"] = on_any_rank(box_problems(found, own, on_the_host(whole())))
        counts = torch.tensor([received[0], size_of(found), size_of(dict(whole()))])
        expected = sum(n for (_, to), n in sync.links.items() if to == dist.get_rank())
        copied = sum(t.nbytes for t in sync.transfers if t.sender == t.receiver == dist.get_rank())
        assert counts.tolist()[:2] == [expected, expected + copied]
        dist.all_reduce(counts)
        nbytes[name] = counts.tolist()
    described = live.describe(chunks, like=like)
    assert live.engine_boxes(described, tp=2, pp=2) == live.engine_boxes(like, tp=2, pp=2)
    return {"wrong": wrong, "bytes": nbytes}


def size_of(tensors: dict[Any, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def with_engines(chunks: list[Any], like: str, port: int) -> dict[str, Any]:
    """Sends boxes to two processes beside the two trainers, with faults between the calls."""
    rank, world = dist.get_rank(), 4
    boxes = dict(enumerate(live.engine_boxes(like, tp=2), 2))
    engines = []
    folder = Path(tempfile.mkdtemp())
    (folder / "boxes.json").write_text(json.dumps(boxes))
    for one in (2, 3) if rank == 0 else ():
        command = [sys.executable, str(ENGINE), str(port), str(one), str(world)]
        command += [str(folder / "boxes.json"), str(folder / str(one))]
        engines.append(subprocess.Popen(command, env=os.environ))
    group, errors, seconds = join(port, rank, world, 12), dict[str, str](), dict[str, float]()

    def note(name: str, work: Any) -> None:
        started = time.monotonic()
        errors[name] = refusal(work)
        seconds[name] = time.monotonic() - started

    options = {"like": like, "group": group, "bucket_bytes": "96KiB"}
    whole, right = live.Sync(chunks, like=like), list[Any]()
    note("other boxes", lambda: live.Sync(chunks, to=boxes, **options))
    sync = live.Sync(chunks, **options)  # the engines state their boxes
    for number in range(UPDATES):
        change(chunks, 0.1, number)
        assert not all_of(sync)
        right.append(on_the_host(whole()))
    note("fill", lambda: all_of(sync))
    note("another shape", lambda: all_of(sync))
    note("early", lambda: all_of(sync))
    weight = next(chunks[0].parameters())
    kept = weight.data
    if rank == 1:
        weight.data = kept.float()
    note("changed", lambda: all_of(sync))
    weight.data = kept
    assert not all_of(sync)
    right += [right[-1], right[-1]]
    note("lost", lambda: all_of(sync))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (errors, seconds))
    if rank:
        return {}
    said, wrong, nbytes = [errors for errors, _ in every], dict[str, list[str]](), []
    for engine, one in zip(engines, (2, 3), strict=True):
        engine.wait(60)
        found, its, links, config, megatron = torch.load(folder / str(one), weights_only=False)
        assert not megatron and config == sync.config
        assert sum(links.values()) == sum(n for (_, to), n in sync.links.items() if to == one)
        said.append(its)
        for number, ((tensors, received), whole_one) in enumerate(zip(found, right, strict=True)):
            wrong[f"{one} {number}"] = box_problems(tensors, boxes[one], whole_one)
            nbytes.append([received, size_of(tensors)])
    lost = folder / "2.lost"
    said[2]["lost"] = lost.read_text() if lost.exists() else ""
    return {
        "wrong": wrong,
        "bytes": nbytes,
        "errors": {name: [errors.get(name) for errors in said] for name in said[0]},
        "seconds": max(max(seconds.values()) for _, seconds in every),
    }
