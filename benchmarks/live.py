"""Measures mckpt.live on a running model, beside Megatron-Bridge if that is installed.

    python -m benchmarks.live make 8b HF [--layers N]
    torchrun --nproc-per-node 2 -m benchmarks.live run HF --tp 2
    torchrun --nproc-per-node 2 -m benchmarks.live run HF --ep 2 --peer
    torchrun --nproc-per-node 2 -m benchmarks.live run HF --tp 2 --delta device
    torchrun --nproc-per-node 2 -m benchmarks.live run HF --pp 2 --direct 2

`make` writes a Hugging Face directory of a published shape with made-up weights. `run` builds its
model over all ranks, with NCCL and a GPU for each rank or with gloo on the CPU, and fills it and
gathers its Hugging Face tensors in turn, `--rounds` times. With `--peer`, Megatron-Bridge builds
the model, and fills and gathers the same one in the same run: AutoBridge.load_hf_weights and
export_hf_weights. Both must set the same bits and yield the same tensors. `--quantize` gathers the
codes of quantised weights too, and `--save` writes the model as a Hugging Face directory and as
`torch_dist` in DIR. `--delta` gathers what changed where some shares of the elements have.
`--direct N` sends each rank the boxes that it would hold as a rank of an engine at tp N, beside the
sync of whole tensors, and prints the bytes that each link has in both.

Rank 0 prints JSON: seconds of each round; the most memory of the device that a round needed beside
the model, in bytes; the bytes of all tensors; the seconds of the parts of each load on rank 0
(`mckpt.live.load`), and those in which a sync starts all of its work; and, with NCCL, the
speeds of this machine that bound both, in bytes per second: of an all-gather of pieces of the
bucket's size (received bytes), of reading the files into pinned memory, and of copies from there to
the device, the last two on all ranks at once, for each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import models, peers

PIECE = 8 << 20  # bytes of one read and of one copy to the device
# published config.json -> entries that are replaced
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("llama-3.1-8b", {}),
    "1b": ("llama-3.2-1b", {}),
    "moe": ("qwen3-30b-a3b", {"num_hidden_layers": 12}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("shape", choices=SHAPES)
    make.add_argument("hf", type=Path)
    make.add_argument("--layers", type=int)
    run = commands.add_parser("run")
    run.add_argument("hf", type=Path)
    for name in ("tp", "pp", "ep"):
        run.add_argument(f"--{name}", type=int, default=1)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--bucket-bytes")
    run.add_argument("--threads", type=int, default=0)
    run.add_argument("--max-memory", default="512MiB")
    run.add_argument("--peer", action="store_true")
    run.add_argument("--quantize", choices=("fp8", "mxfp8", "nvfp4"))
    run.add_argument("--save", type=Path, metavar="DIR")
    run.add_argument("--delta", choices=("host", "device"))
    run.add_argument("--direct", type=int, metavar="ENGINE_TP")
    given = parser.parse_args()
    if given.command == "make":
        name, changed = SHAPES[given.shape]
        layers = {"num_hidden_layers": given.layers} if given.layers else {}
        models.write(models.config(name) | changed | layers, given.hf)
    else:
        measure(given)


def measure(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    if given.peer:
        sys.meta_path.append(peers.StandIns())
        if not torch.cuda.is_available():
            peers.without_gpu()
    from mckpt import live

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=10))
    bridge, chunks = built(given)
    weights = [p for chunk in chunks for p in chunk.parameters()]
    started = time.perf_counter()
    sync = live.Sync(chunks, like=given.hf, bucket_bytes=given.bucket_bytes)
    planned = time.perf_counter() - started
    coded = None
    if given.quantize:
        coded = live.Sync(
            chunks, like=given.hf, bucket_bytes=given.bucket_bytes, quantize=given.quantize
        )

    def gather(tensors: Iterator[Any]) -> int:
        nbytes = 0
        for _, tensor in tensors:
            nbytes += tensor.nbytes
            del tensor  # the memory of its bucket, as an engine that has copied it
        return nbytes

    def started_sync() -> tuple[int, float]:
        begun = time.perf_counter()
        return gather(sync()), time.perf_counter() - begun

    direct = None
    if given.direct:
        engine = live.engine_boxes(given.hf, tp=given.direct)
        boxes = {rank: engine[rank % given.direct] for rank in range(dist.get_world_size())}
        direct = live.Sync(chunks, like=given.hf, bucket_bytes=given.bucket_bytes, to=boxes)

    def received() -> int:
        return sum(tensor.nbytes for _, _, tensor in direct()) if direct else 0

    how = {"threads": given.threads, "max_memory": given.max_memory}
    steps: dict[str, Callable[[], Any]] = {
        "load": lambda: live.load(chunks, given.hf, **how),
        "sync": started_sync,
    }
    if coded is not None:
        steps[f"sync {given.quantize}"] = lambda: gather(coded())
    if direct is not None:
        steps["sync direct"] = received
    for form in ("hf", "torch_dist") if given.save else ():
        steps[f"save {form}"] = partial(saved, chunks, given, form)
    if bridge is not None:
        steps["peer load"] = lambda: bridge.load_hf_weights(chunks, str(given.hf))
        steps["peer sync"] = lambda: gather(bridge.export_hf_weights(chunks, show_progress=False))
    found: dict[str, Any] = {"plan_s": planned, "world": dist.get_world_size()}
    for _ in range(given.rounds):
        bits: dict[str, Any] = {}
        for name, step in steps.items():
            if name.endswith("load"):
                with torch.no_grad():
                    for weight in weights:
                        weight.fill_(float("nan"))
            seconds, peak, result = timed(step)
            entry = found.setdefault(name, {"s": [], "peak_bytes": []})
            entry["s"].append(round(seconds, 4))
            entry["peak_bytes"].append(peak)
            if name == "sync":
                entry["bytes"], started = result
                entry.setdefault("started_s", []).append(round(started, 4))
            elif name == "load":
                parts = {part: round(s, 4) for part, s in result.items()}
                entry.setdefault("parts_s", []).append(parts)
            elif name.startswith(("peer sync", "sync ")):
                entry["bytes"] = result
            if name.endswith("load"):
                bits[name] = sum(digest(weight) for weight in weights)
        assert len(set(bits.values())) == 1, f"the loads set different bits: {bits}"
    for name, one in (("sync", sync), ("sync direct", direct)):
        if direct is not None and one is not None:
            found[name]["link_bytes"] = {f"{a} to {b}": n for (a, b), n in one.links.items()}
    if given.delta:
        found["delta"] = changes(chunks, weights, given)
    if cuda:
        found["all_gather_bytes_per_s"] = bandwidth(1 << 30)
        for threads in (1, 4, 8, 16):
            found[f"read_bytes_per_s_{threads}_threads"] = reading(given.hf, threads)
        found["to_device_bytes_per_s"] = to_device()
        found["device"] = torch.cuda.get_device_name()
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def saved(chunks: list[Any], given: argparse.Namespace, form: str) -> None:
    """Writes the model as a checkpoint, in the place of the one before."""
    from mckpt import live

    live.save(chunks, given.save / form, format=form, like=given.hf, overwrite=True)


def changes(chunks: list[Any], weights: list[Any], given: argparse.Namespace) -> dict[str, Any]:
    """Returns the bytes, the seconds and the memory of a sync of what changed, by the share of the
    elements that did: "whole" is that of the first call.
    """
    import torch

    from mckpt import live

    sync = live.Sync(chunks, like=given.hf, bucket_bytes=given.bucket_bytes, delta=given.delta)

    def gather() -> int:
        deltas = sync()
        for delta in deltas:
            del delta  # the memory of its bucket
        return int(deltas.nbytes)

    found: dict[str, Any] = {}
    for number, share in enumerate(["whole", *("0", "0.001", "0.02", "0.1", "1") * given.rounds]):
        for weight in weights if share != "whole" else ():
            bits = weight.detach().view(-1).view(torch.int16)
            torch.manual_seed(number * 1_000_003 + len(bits))  # the same for all replicas
            for part in bits.split(1 << 24):
                part ^= (torch.rand(len(part), device=part.device) < float(share)).short()
        seconds, peak, nbytes = timed(gather)
        entry = found.setdefault(share, {"s": [], "peak_bytes": [], "bytes": nbytes})
        entry["s"].append(round(seconds, 4))
        entry["peak_bytes"].append(peak)
    return found


def timed(step: Callable[[], Any]) -> tuple[float, int, Any]:
    """Returns the seconds of the slowest rank, the memory that the device needed, and the result of
    a step.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    dist.barrier()
    started = time.perf_counter()
    result = step()
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated() - before if cuda else 0, result


def digest(weight: Any) -> int:
    """Returns a number that depends on all bits of a weight."""
    import torch

    codes = (
        weight.detach().reshape(-1).view(torch.int16 if weight.element_size() == 2 else torch.int32)
    )
    return int(codes.to(torch.int64).sum()) + int(codes[::7].to(torch.int64).sum())


def bandwidth(nbytes: int) -> float:
    """Returns the bytes per second that a rank receives in an all-gather."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    piece = torch.empty(nbytes // world, dtype=torch.uint8, device="cuda")
    whole = torch.empty(len(piece) * world, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        dist.all_gather_into_tensor(whole, piece)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        dist.all_gather_into_tensor(whole, piece)
    torch.cuda.synchronize()
    return 10 * len(piece) * (world - 1) / (time.perf_counter() - started)


def reading(hf: Path, threads: int) -> float:
    """Returns the bytes per second at which threads of this rank read the files of a directory into
    pinned memory, while those of all other ranks do.
    """
    import torch
    import torch.distributed as dist

    paths = sorted(hf.glob("*.safetensors"))
    ranges = [(p, at) for p in paths for at in range(0, p.stat().st_size, PIECE)]
    mine = ranges[dist.get_rank() :: dist.get_world_size()]
    buffers = torch.empty(threads, PIECE, dtype=torch.uint8, pin_memory=True)

    def read(number: int) -> int:
        view, total = buffers[number].numpy().data, 0
        for path, at in mine[number::threads]:
            with open(path, "rb", buffering=0) as file:
                total += os.preadv(file.fileno(), [view], at)
        return total

    with ThreadPoolExecutor(threads) as pool:
        dist.barrier()
        started = time.perf_counter()
        total = sum(pool.map(read, range(threads)))
        return total / (time.perf_counter() - started)


def to_device() -> float:
    """Returns the bytes per second of copies from pinned memory, on all ranks at once."""
    import torch
    import torch.distributed as dist

    pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    held = torch.empty(PIECE, dtype=torch.uint8, device="cuda")
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(200):
        held.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return 200 * PIECE / (time.perf_counter() - started)


def built(given: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Returns the bridge of Megatron-Bridge, None without --peer, and the chunks of the model."""
    import torch

    if given.peer:
        from megatron.bridge import AutoBridge

        bridge = AutoBridge.from_hf_pretrained(str(given.hf))
        provider = bridge.to_megatron_provider(load_weights=False)
        provider.tensor_model_parallel_size = given.tp
        provider.pipeline_model_parallel_size = given.pp
        provider.expert_model_parallel_size = given.ep
        provider.expert_tensor_parallel_size = 1
        provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
        provider.bf16 = True
        provider.gradient_accumulation_fusion = False  # of Apex, and only for training
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        return bridge, provider.provide_distributed_model(wrap_with_ddp=False)
    import mckpt
    from mckpt import mapping
    from mckpt.trainer import build

    source = mckpt.open(given.hf)
    dialect = mapping.dialect_for(source.mapping)
    sizes = {"dtype": "bfloat16", "transformer_impl": "local", "experts": "sequential"}
    rows = -(-source.dims["vocab_size"] // (128 * given.tp)) * 128 * given.tp
    args = {**dialect.write(source.dims, {**sizes, "padded_vocab_size": rows})}
    etp = 1 if source.dims["num_experts"] else None
    namespace = build.at_sizes(args, tp=given.tp, pp=given.pp, ep=given.ep, etp=etp)
    build.initialize(namespace)
    return None, build.build(namespace, torch.bfloat16)


if __name__ == "__main__":
    main()
