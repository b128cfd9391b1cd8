"""Damages a converted model of 8B parameters and shows that `mckpt verify` fails and names the damage; run by hand on a GPU.

    python tests/gpu/damage.py WORK [--layers 32] [--device cuda]

Makes Llama-3.1-8B's shape with random weights in WORK/hf, converts it to torch_dist, and verifies the clean conversion twice: with its
stored values compared while the models run, and without. Then it verifies it again beside copies with one fault each: the lowest bit of
one weight, the highest bit of its exponent, k and v exchanged in one layer, a wrong rope base in the args. Copies share all files with
the clean one but those that differ, so that WORK needs about 36 GB. Prints a table, and writes WORK/damage.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import mckpt
from benchmarks.gpu_verification import make_model
from mckpt import comparison, verification
from mckpt.checkpoint import Checkpoint, Known
from mckpt.verdict import Values, Verdict

LAYER = 17  # of 32; of a smaller model the middle one
DOWN, ATTENTION = "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight"
EXPONENT, LOWEST = 1 << 14, 1  # bits of a bfloat16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=1, help="divide every width by this, to rehearse on a CPU")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    work, layer = options.work, LAYER * options.layers // 32
    shutil.rmtree(work, ignore_errors=True)
    config = json.loads((ROOT / "fixtures/configs/llama-3.1-8b.json").read_text()) | {"num_hidden_layers": options.layers}
    for width in ("hidden_size", "intermediate_size", "vocab_size"):
        config[width] //= options.shrink
    parameters, nbytes = make_model(config, work / "hf")
    print(f"{parameters / 1e9:.2f}B parameters, {nbytes / 1e9:.1f} GB", flush=True)
    started = time.perf_counter()
    mckpt.plan(work / "hf", work / "clean").run(checksum="none")
    print(f"converted in {time.perf_counter() - started:.1f} s", flush=True)

    rows: list[dict[str, Any]] = []

    def judge(names: list[str], what: str) -> list[Verdict]:
        started = time.perf_counter()
        found = verification.verify_all(work / "hf", [work / name for name in names], verification.Options(device=options.device))
        seconds = time.perf_counter() - started
        for name, one in zip(names, found, strict=True):
            logits = one.facts.get("logits", {}).get("float32", {})
            rows.append({"checkpoint": name, "how": what, "verdict": one.verdict, "seconds": round(seconds, 1), "margin": logits.get("below"),
                         "max_abs": logits.get("max_abs"), "reasons": one.reasons[:2]})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        return found

    judge(["clean"], "alone")
    compare, verification._values = verification._values, lambda *a: Values(comparison.Difference())
    judge(["clean"], "alone, values not compared")
    verification._values = compare
    started = time.perf_counter()
    verification._values(Checkpoint(work / "hf"), Checkpoint(work / "clean"))
    rows.append({"checkpoint": "clean", "how": "values alone", "seconds": round(time.perf_counter() - started, 1)})
    print(json.dumps(rows[-1]), flush=True)

    faults: dict[str, Callable[[Path], None]] = {
        "lowest-bit": lambda path: change(path, DOWN, layer, lambda rows: flip(rows, LOWEST)),
        "exponent-bit": lambda path: change(path, DOWN, layer, lambda rows: flip(rows, EXPONENT)),
        "k-and-v": lambda path: change(path, ATTENTION, layer, lambda rows: exchange(rows, config)),
        "rope-base": change_rope_base,
    }
    for name, damage in faults.items():
        share(work / "clean", work / name)
        damage(work / name)
    found = judge(["clean", *faults], "together")
    (work / "damage.json").write_text(json.dumps(rows, indent=1))
    right = [one.verdict for one in found] == ["pass", *["fail"] * len(faults)]
    print("as it should be" if right else "WRONG")
    return 0 if right else 1


def share(clean: Path, to: Path) -> None:
    """A copy of a save directory whose files are links to those of the clean one."""
    for path in sorted(clean.rglob("*")):
        there = to / path.relative_to(clean)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path.absolute(), there)


def own(path: Path) -> Path:
    """The file as one of its own in place of a link."""
    target = path.resolve()
    if path.is_symlink():
        path.unlink()
        shutil.copyfile(target, path)
    return path


def change(directory: Path, key: str, layer: int, damage: Callable[[np.ndarray], None]) -> None:
    """Changes the bits, as uint16 [rows, columns], of one layer's stored tensor in place."""
    ckpt = Checkpoint(directory, Known(like=directory.parent / "hf"))
    stored = next(s for s in ckpt.layout.stored if s.key.endswith(key) and layer in s.layer.tolist())
    at = stored.layer.tolist().index(layer)
    path = own(Path(ckpt.layout.files[int(stored.file[at])]))
    rows = np.memmap(path, "u2", "r+", int(stored.at[at]), stored.shape)
    damage(rows)
    rows.flush()


def flip(rows: np.ndarray, bit: int) -> None:
    rows[123, 456] ^= bit


def exchange(rows: np.ndarray, config: dict[str, Any]) -> None:
    """k and v of every query group."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    parts = rows.reshape(groups, heads // groups + 2, -1, rows.shape[1])
    parts[:, [-2, -1]] = parts[:, [-1, -2]]


def change_rope_base(directory: Path) -> None:
    import torch

    path = own(next(directory.glob("*/common.pt")))
    state = torch.load(path, weights_only=False)
    state["args"].rotary_base = 10000
    torch.save(state, path)


if __name__ == "__main__":
    sys.exit(main())
