"""Measures how a conversion speeds up with threads and with processes on one machine, beside `cp`.

    python -m benchmarks.scaling [DIRECTORY] [--models llama-3.1-8b,llama-3.3-70b]
        [--counts 1,2,4,8] [--out FILE.jsonl]

All times are of whole processes from start to exit, with a warm page cache. The machine's copy
bandwidth is that of the fastest number of `cp`s, one for each file, in the same run. DIRECTORY,
/dev/shm by default, must have room for the model and one output of its size.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import ROOT, environment, filesystem

ALLOW = ["--allow-inexact", "rope_factor"]
LAYOUTS = {
    "torch_dist": [],
    "torch tp8 pp2": ["--format", "torch", "--tp", "8", "--pp", "2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--models", default="llama-3.1-8b,llama-3.3-70b")
    parser.add_argument(
        "--counts", help="of threads, processes and cps; by default powers of two up to the cores"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds over all measurements; their median counts",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="start no measurement after as many seconds",
    )
    parser.add_argument("--out", type=Path, help="one JSON line for each measurement")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "mckpt", quiet=1)  # as pip does
    started = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    counts = [1 << i for i in range(cores.bit_length())]
    if arguments.counts:
        counts = [int(count) for count in arguments.counts.split(",")]
    print(
        f"Python {platform.python_version()}, Linux {platform.release()}, {cores} cores,"
        f" {arguments.directory}: {filesystem(arguments.directory)}"
    )
    work = arguments.directory / "mckpt-scaling"
    shutil.rmtree(work, ignore_errors=True)
    try:
        for model in arguments.models.split(","):
            subprocess.run(
                [sys.executable, "-c", MAKE, model, str(work / "hf")], check=True, cwd=ROOT
            )
            nbytes = sum(f.stat().st_size for f in (work / "hf").iterdir())
            rows = commands(work / "hf", work / "out", counts, arguments.layouts.split(","))
            seconds: dict[tuple[str, int], list[float]] = {}
            for number, (what, n, command) in itertools.product(range(arguments.rounds), rows):
                if time.monotonic() - started > arguments.limit_s:
                    print("the rest is left out: no time")
                    break
                seconds.setdefault((what, n), []).append(measure(command, work / "out"))
                if arguments.out:
                    said = {"model": model, "bytes": nbytes, "cores": cores, "round": number}
                    said |= {"what": what, "n": n, "s": seconds[what, n][-1]}
                    with arguments.out.open("a") as f:
                        f.write(json.dumps(said) + "\n")
            report(f"{model}: {nbytes / 1e9:.1f} GB", nbytes, seconds)
            shutil.rmtree(work / "hf")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def report(title: str, nbytes: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    """Prints a line for each measurement, beside the bandwidth of the fastest number of `cp`s."""
    rates = {key: nbytes / 1e9 / statistics.median(found) for key, found in seconds.items()}
    copies = (rate for (what, _), rate in rates.items() if what.startswith("cp"))
    best = max(copies, default=float("nan"))
    print(f"\n{title}\n{'what':44} {'n':>4} {'s':>7} {'range':>15} {'GB/s':>7} {'of cp':>6}")
    for (what, n), found in seconds.items():
        rate = rates[what, n]
        print(
            f"{what:44} {n:4} {statistics.median(found):7.2f} {min(found):7.2f}-{max(found):7.2f}"
            f" {rate:7.2f} {rate / best:6.2f}"
        )


MAKE = """
import sys; from pathlib import Path; from benchmarks import models
if __name__ == "__main__": models.write(models.config(sys.argv[1]), Path(sys.argv[2]))
"""


def commands(
    hf: Path, out: Path, counts: list[int], layouts: list[str]
) -> list[tuple[str, int, list[str]]]:
    """Returns (what, number of threads or processes, command). The `cp`s are first, because the
    others are compared with them.
    """
    rows = [("cp -r", 1, ["cp", "-r", "--reflink=never", str(hf), str(out)])]
    script = (
        'mkdir "$2" && find "$1" -type f -printf "%s %p\\n" | sort -rn | cut -d" " -f2- | xargs -P'
        ' "$3" -n 1 cp --reflink=never -t "$2"'
    )
    rows += [
        ("cp, one for each file", n, ["sh", "-c", script, "sh", str(hf), str(out), str(n)])
        for n in counts
        if n > 1
    ]
    for layout in layouts:
        base = [sys.executable, "-m", "mckpt", "hf-to-megatron", str(hf), str(out)]
        base += [*LAYOUTS[layout], *ALLOW]
        quick, several = [*base, "--checksum", "none"], [n for n in counts if n > 1]
        for n in counts:
            threads = ["--threads", str(n), "--max-memory", f"{max(64, 2 * n)}MiB"]
            rows.append((f"{layout}, threads of one process", n, [*quick, *threads]))
        for n in several:
            one = ["--threads", "1", "--workers", str(n)]
            rows.append((f"{layout}, processes of one thread", n, [*quick, *one]))
        for n in (n for n in several if n < max(counts)):
            shared = [*quick, "--workers", str(n)]
            rows.append((f"{layout}, processes sharing all cores", n, shared))
        for n in (n for n in (1, 2, 4, 8) if n <= max(counts)):
            rows.append((f"{layout}, as it comes (crc32)", n, [*base, "--workers", str(n)]))
    return rows


def measure(command: list[str], out: Path) -> float:
    """Returns the seconds of one process from start to exit, and removes its output."""
    begun = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()
    )
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    files = "\0".join(str(f) for f in out.rglob("*") if f.is_file())
    # Several processes remove the files, because tmpfs frees memory slowly.
    remove = ["xargs", "-0", "-P", "16", "-n", "1", "rm"]
    subprocess.run(remove, input=files.encode(), check=True)
    shutil.rmtree(out)
    return seconds


if __name__ == "__main__":
    main()
