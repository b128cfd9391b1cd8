"""Times conversions of a random-weight model of Llama-3.2-1B's shape (2.5 GB, bf16) beside `cp -r` of the same bytes.

    python benchmarks/convert.py [DIRECTORY] [--rounds 5]

Whole processes, start to exit, page cache warm, `cp` and mckpt in turns in each round; medians. Needs 12 GB below DIRECTORY (/dev/shm).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CONFIG = "llama-3.2-1b"
SHARD_BYTES = 1_000_000_000
MCKPT = [sys.executable, "-m", "mckpt"]


def make(directory: Path) -> None:
    """The model in Hugging Face's form: random bytes with the exponents of weights, in shards of a gigabyte."""
    from tests import tiny

    config = json.loads((ROOT / "fixtures" / "configs" / f"{CONFIG}.json").read_text())
    directory.mkdir(parents=True)
    shapes = tiny.shapes(config)
    rng = np.random.default_rng(0)
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        if size + nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    weight_map = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        header, at = {}, 0
        for name in names:
            nbytes = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + nbytes]}
            at += nbytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for row in np.array_split(np.empty(int(np.prod(shapes[name])), "u1"), 8):
                    low = rng.integers(0, 256, len(row), dtype="u2")
                    f.write((low | (rng.integers(0, 2, len(row), dtype="u2") << 15) | 0x3C00).astype("<u2"))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))


def run(command: list[str], out: Path) -> tuple[float, float]:
    """(wall seconds, peak RSS in MiB) of one process; what it wrote is removed by the caller."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    assert out.exists()
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.directory)
        return
    work = arguments.directory / "mckpt-benchmark"
    shutil.rmtree(work, ignore_errors=True)
    try:
        hf, dist, tp8 = work / "hf", work / "dist", work / "tp8"
        # in a process of its own: a child's peak begins at what its parent held when it was started
        subprocess.run([sys.executable, __file__, "--make", str(hf)], check=True)
        allow = ["--allow-inexact", "rope_factor"]
        rows: dict[str, list[tuple[Path, list[str], Path]]] = {}

        def row(name: str, source: Path, command: list[str], out: Path) -> None:
            for checksum in ("none", "crc32"):
                rows.setdefault(f"{name}, {checksum}", []).append((source, [*MCKPT, *command, "--checksum", checksum], out))

        out = work / "out"
        row("hf -> torch_dist", hf, ["hf-to-megatron", str(hf), str(out), *allow], out)
        row("hf -> torch tp8 pp2", hf, ["hf-to-megatron", str(hf), str(out), "--format", "torch", "--tp", "8", "--pp", "2", *allow], out)
        row("hf -> torch tp1", hf, ["hf-to-megatron", str(hf), str(out), "--format", "torch", *allow], out)
        run([*MCKPT, "hf-to-megatron", str(hf), str(dist), *allow], dist)
        run([*MCKPT, "hf-to-megatron", str(hf), str(tp8), "--format", "torch", "--tp", "8", "--pp", "2", *allow], tp8)
        row("torch_dist -> hf", dist, ["megatron-to-hf", str(dist), str(out)], out)
        row("torch tp8 pp2 -> hf", tp8, ["megatron-to-hf", str(tp8), str(out)], out)
        row("torch tp8 pp2 -> torch tp2 pp4", tp8, ["reshard", str(tp8), str(out), "--target-tp", "2", "--target-pp", "4"], out)
        nbytes = sum(f.stat().st_size for f in hf.iterdir())
        print(
            f"{CONFIG}: {nbytes / 1e9:.2f} GB; Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores, {work.parent}"
        )
        print(f"{'work':44} {'wall s':>8} {'cp -r s':>8} {'ratio':>6} {'peak MiB':>9}")
        for name, ((source, command, target),) in rows.items():
            times, copies, peaks = [], [], []
            for _ in range(arguments.rounds):
                shutil.rmtree(target, ignore_errors=True)
                copies.append(run(["cp", "-r", "--reflink=never", str(source), str(target)], target)[0])
                shutil.rmtree(target)
                seconds, peak = run(command, target)
                times.append(seconds)
                peaks.append(peak)
                shutil.rmtree(target)
            wall, copied = statistics.median(times), statistics.median(copies)
            print(f"{name:44} {wall:8.2f} {copied:8.2f} {wall / copied:6.2f} {max(peaks):9.0f}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
