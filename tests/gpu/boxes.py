"""Boxes of weights by NCCL between a trainer on one GPU and an engine on another:

    python tests/gpu/boxes.py WORK

The engine is a process outside of the trainer's world: both join one group of cpu:gloo,cuda:nccl.
It receives the shard of rank 1 of tp 2 and compares it with the files of the model, multiplied as
the trainer has changed its weights. Then it stops in the middle of a call. The trainer must learn
of it, and the next call must be right. It prints a line for each step, and ends with 1 if one
failed. Without GPUs both use gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mckpt import live  # noqa: E402
from tests.helpers import tiny  # noqa: E402
from tests.helpers.box_engine import all_of, join, refusal  # noqa: E402

FACTORS = 1, 2, -0.5  # exact in bf16
TIMEOUT = 60
CUDA = torch.cuda.is_available()


def main(work: Path) -> int:
    tiny.tiny_random("qwen3-moe", work / "hf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, str(work)]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": path}
    roles = [
        subprocess.Popen([*command, role, str(port)], env=environ) for role in ("trainer", "engine")
    ]
    return max(abs(role.wait(TIMEOUT * 3)) for role in roles)


def trainer(work: Path, port: int) -> None:
    from benchmarks.live import built

    alone = {"init_method": f"file://{work}/alone", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if CUDA else "gloo", **alone)
    sizes: Any = SimpleNamespace(hf=work / "hf", peer=False, tp=1, pp=1, ep=1)
    _, chunks = built(sizes)
    live.load(chunks, work / "hf")
    group, before = join(port, 0, 2, TIMEOUT), 1.0
    sync = live.Sync(chunks, like=work / "hf", group=group, bucket_bytes="96KiB")
    for factor in FACTORS:
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            weight.data *= factor / before
        before = factor
        assert not all_of(sync)
    began, error = time.monotonic(), refusal(lambda: all_of(sync))
    print(f"an early stop is told in {time.monotonic() - began:.2f} s: {error}", flush=True)
    assert "stopped before it had all tensors" in error
    assert not all_of(sync)


def engine(work: Path, port: int) -> None:
    from safetensors.torch import load_file

    group = join(port, 1, 2, TIMEOUT)
    boxes = live.engine_boxes(work / "hf", tp=2)[1]
    receiver, wanted = live.Receiver(group, boxes), load_file(work / "hf" / "model.safetensors")

    def compare(factor: float) -> None:
        found, wrong = all_of(receiver), []
        for (name, box), tensor in found.items():
            assert tensor.is_cuda == CUDA
            part = wanted[name][tuple(slice(*bounds) for bounds in box)] * factor
            wrong += [] if part.equal(tensor.cpu()) else [name]
        assert not wrong, wrong
        assert len(found) == sum(map(len, boxes.values()))
        print(f"{len(found)} boxes times {factor} pass", flush=True)

    for factor in FACTORS:
        compare(factor)
    for _ in receiver():
        break
    compare(FACTORS[-1])


if __name__ == "__main__":
    if sys.argv[2:]:
        name = sys.argv[2]
        if CUDA:
            torch.cuda.set_device(("trainer", "engine").index(name))
        {"trainer": trainer, "engine": engine}[name](Path(sys.argv[1]), int(sys.argv[3]))
    else:
        sys.exit(main(Path(sys.argv[1])))
