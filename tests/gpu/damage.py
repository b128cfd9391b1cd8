"""Damages a converted model of 8 billion parameters: `mckpt verify` must fail and name the damage.

    python tests/gpu/damage.py WORK make             makes the model and converts it to torch_dist
    python tests/gpu/damage.py WORK clean            must pass; timed with and without values
    python tests/gpu/damage.py WORK lowest-bit ...   must fail, and the damage must be named

The model has Llama-3.1-8B's shape and random weights. The faults are `lowest-bit` (of one weight),
`exponent-bit` (the highest one of the same weight), `k-and-v` (exchanged in one layer) and
`rope-base` (a wrong one in the args). A damaged copy shares all unchanged files with the clean one,
so WORK needs about 36 GB. `clean` takes four minutes on one H100, and two faults take three. Runs
on several GPUs can go on side by side. Each verdict is printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import mckpt
from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions
from mckpt.verification import levels as verification
from mckpt.verification.verdict import Values
from tests.gpu.verification.model import make_model, shrunk

ROOT = Path(__file__).resolve().parent.parent.parent
DOWN, ATTENTION = "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight"
EXPONENT, LOWEST = 1 << 14, 1  # bits of a bfloat16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("parts", nargs="+", choices=["make", "clean", *FAULTS])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide the widths by this, to rehearse on a CPU"
    )
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    work, faults = options.work, [part for part in options.parts if part in FAULTS]
    if "make" in options.parts:
        make(work, options.layers, options.shrink)
    right = True
    if "clean" in options.parts:
        right &= judge(work, ["clean"], "with values", options.device) == ["pass"]
        compare = verification.compare_values
        verification.compare_values = lambda *_: Values(comparison.Difference())
        right &= judge(work, ["clean"], "without values", options.device) == ["pass"]
        verification.compare_values = compare
        started = time.perf_counter()
        verification.compare_values(Checkpoint.open(work / "hf"), Checkpoint.open(work / "clean"))
        say(checkpoint="clean", how="values alone", seconds=round(time.perf_counter() - started, 1))
    for name in faults:
        share(work / "clean", work / name)
        FAULTS[name](work / name)
    if faults:
        right &= judge(work, faults, "side by side", options.device) == ["fail"] * len(faults)
    print("as it should be" if right else "WRONG")
    return 0 if right else 1


def make(work: Path, layers: int, shrink: int) -> None:
    """Writes the source and its clean conversion."""
    shutil.rmtree(work, ignore_errors=True)
    config = json.loads((ROOT / "fixtures/configs/llama-3.1-8b.json").read_text())
    config = shrunk(config, shrink) | {"num_hidden_layers": layers}
    parameters, nbytes = make_model(config, work / "hf")
    started = time.perf_counter()
    mckpt.plan(work / "hf", work / "clean").run(checksum="none")
    say(parameters=parameters, bytes=nbytes, converted_in=round(time.perf_counter() - started, 1))


def judge(work: Path, names: list[str], how: str, device: str) -> list[str]:
    """Returns the verdicts on checkpoints of WORK. The Hugging Face side runs once for all."""
    started = time.perf_counter()
    checkpoints = [work / name for name in names]
    options = verification.VerifyOptions(device=device)
    found = verification.verify_all(work / "hf", checkpoints, options)
    seconds = round(time.perf_counter() - started, 1)
    for name, one in zip(names, found, strict=True):
        logits = one.facts.get("logits", {}).get("float32", {})
        say(
            checkpoint=name,
            how=how,
            verdict=one.verdict,
            seconds=seconds,
            margin=logits.get("below"),
            max_abs=logits.get("max_abs"),
            reasons=one.reasons[:2],
        )
    return [one.verdict for one in found]


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def share(clean: Path, to: Path) -> None:
    """Copies a save directory as links to the files of the clean one."""
    for path in sorted(clean.rglob("*")):
        there = to / path.relative_to(clean)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path.absolute(), there)


def own(path: Path) -> Path:
    """Replaces a link by a copy of its file; returns the path."""
    target = path.resolve()
    if path.is_symlink():
        path.unlink()
        shutil.copyfile(target, path)
    return path


def change(directory: Path, key: str, damage: Callable[[np.ndarray, dict[str, Any]], None]) -> None:
    """Calls `damage` with the dims and the bits, uint16 [rows, columns], of a middle layer's stored
    tensor, and keeps what it changes in place.
    """
    ckpt = Checkpoint.open(directory, SourceOptions(like=directory.parent / "hf"))
    layer = ckpt.dims["num_layers"] // 2
    stored = next(
        s for s in ckpt.layout.stored if s.key.endswith(key) and layer in s.layer.tolist()
    )
    at = stored.layer.tolist().index(layer)
    path = own(Path(ckpt.layout.files[int(stored.file[at])]))
    rows = np.memmap(path, "u2", "r+", int(stored.at[at]), stored.shape)
    damage(rows, ckpt.dims)
    rows.flush()


def flip(bit: int) -> Callable[[np.ndarray, dict[str, Any]], None]:
    def damage(rows: np.ndarray, dims: dict[str, Any]) -> None:
        rows[123, 456] ^= bit

    return damage


def exchange(rows: np.ndarray, dims: dict[str, Any]) -> None:
    """Exchanges k and v in every query group: [q0 q1 k v | q2 q3 k v]."""
    heads, groups = dims["num_heads"], dims["num_query_groups"]
    parts = rows.reshape(groups, heads // groups + 2, -1, rows.shape[1])
    parts[:, [-2, -1]] = parts[:, [-1, -2]]


def change_rope_base(directory: Path) -> None:
    import torch

    path = own(next(directory.glob("*/common.pt")))
    state = torch.load(path, weights_only=False)
    state["args"].rotary_base = 10000
    torch.save(state, path)


FAULTS: dict[str, Callable[[Path], None]] = {
    "lowest-bit": functools.partial(change, key=DOWN, damage=flip(LOWEST)),
    "exponent-bit": functools.partial(change, key=DOWN, damage=flip(EXPONENT)),
    "k-and-v": functools.partial(change, key=ATTENTION, damage=exchange),
    "rope-base": change_rope_base,
}


if __name__ == "__main__":
    sys.exit(main())
