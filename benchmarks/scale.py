"""Computes how the work of a very large model is divided among ranks, from headers alone.

    python -m benchmarks.scale [--ranks 8,64,512]

The model is Kimi-K2 (1T parameters) with Adam state: bf16 weights, and fp32 master, first and
second moment of each, 14 bytes a parameter. The plan is that of its weights (tp8 pp16 ep32, as in
`benchmarks/run`). The three fp32 copies are the same boxes at twice the bytes, in their own files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from msgspec import structs

from benchmarks import models
from mckpt import api
from mckpt.execute import units
from mckpt.execute.ranks import Ranks
from mckpt.geometry.join import Cast
from mckpt.geometry.parallel import Parallel

STATES = 3  # fp32 copies of each weight: master, exp_avg, exp_avg_sq
SIZES = Parallel(tp=8, pp=16, ep=32, etp=1, last_stage_layers=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,64,512")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        in_bf16 = {**models.config("kimi-k2"), "quantization_config": None}
        hf = models.write(in_bf16, Path(work) / "hf", sparse=True, shard_bytes=5_000_000_000)
        begun = time.perf_counter()
        allow, out = ["rope_beta_fast"], Path(work) / "out"
        plan = api.plan(hf, out, format="torch_dist", parallel=SIZES, allow_inexact=allow)
        planned = time.perf_counter() - begun
    copies = plan.joined.copies
    casts = *plan.joined.casts, Cast("float32", "float32")
    num_sources, num_targets = len(plan.source.layout.files), len(plan.outputs)
    begun = time.perf_counter()
    states = with_states(copies, num_sources, num_targets)
    work_units = units.Work.of(structs.replace(plan.joined, copies=states, casts=casts))
    divided = time.perf_counter() - begun
    slabs = work_units.slabs
    num_units = int(slabs["unit"][-1]) + 1
    unit_bytes = np.bincount(slabs["unit"], slabs["bytes"], num_units)
    total = unit_bytes.sum()
    print(
        f"{total / 1e12:.2f} TB, {len(copies) * (1 + STATES):,} copies, {num_units:,} units,"
        f" {num_targets * (1 + STATES):,} target files"
    )
    print(
        f"planned in {planned:.2f} s (weights), cut into units in {divided:.2f} s; the index of the"
        f" weights' chunks: {index_bytes(plan):,} bytes"
    )
    print(
        f"{'ranks':>6} {'GB each':>8} {'imbalance':>10} {'units each':>11}"
        f" {'target files a rank':>20} {'ranks a target file':>20} {'requests a GB':>14}"
    )
    pairs = unit_files(work_units)
    for size in map(int, arguments.ranks.split(",")):
        owner = np.empty(num_units, "i8")
        for rank in range(size):
            share = Ranks(rank, size).share(num_units)
            owner[share.start : share.stop] = rank
        held = np.bincount(owner, unit_bytes, size)
        touched = np.unique(np.stack([owner[pairs[:, 0]], pairs[:, 1]]), axis=1)
        files = np.bincount(touched[0], minlength=size)
        writers = np.bincount(touched[1])
        # a flat copy reads and writes 1 MiB at a time
        requests = 2 * total / (1 << 20) / (total / 1e9)
        print(
            f"{size:6} {held.mean() / 1e9:8.1f} {held.max() / held.mean() - 1:10.2%}"
            f" {num_units / size:11.1f} {files.min():9} to {files.max():7}"
            f" {writers[writers > 0].mean():20.2f} {requests:14.0f}"
        )


def with_states(copies: np.ndarray, num_sources: int, num_targets: int) -> np.ndarray:
    """Returns the copies of the weights and of STATES fp32 tensors beside each."""
    out = [copies]
    for state in range(1, 1 + STATES):
        more = copies.copy()
        for name in ("src_at", "dst_at", "src_pitch", "dst_pitch", "src_step", "dst_step"):
            more[name] *= 2
        more["src_file"] += state * num_sources
        more["dst_file"] += state * num_targets
        more["cast"] = copies["cast"].max() + 1
        out.append(more)
    return np.concatenate(out)


def unit_files(work: units.Work) -> np.ndarray:
    """Returns the pairs [n, 2] of a unit and a target file that it writes."""
    out = set()
    for slab in range(len(work.slabs)):
        unit = int(work.slabs["unit"][slab])
        out |= {(unit, file) for file in np.unique(work.cluster(slab)["dst_file"]).tolist()}
    return np.array(sorted(out))


def index_bytes(plan: api.Plan) -> int:
    """Returns the bytes of `.metadata`."""
    return next(o.size for o in plan.outputs if o.path == ".metadata")


if __name__ == "__main__":
    main()
