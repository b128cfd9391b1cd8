"""How conversion speeds up with threads and with processes on one machine, beside `cp` and as many
`cp`s at once.

    python -m benchmarks.scaling [DIRECTORY] [--models llama-3.1-8b,llama-3.3-70b] [--counts
    1,2,4,8] [--out FILE.jsonl]

Every figure is a whole process from start to exit, page cache warm. The machine's copy bandwidth is
that of the fastest number of `cp`s, one for each file, in the same run. DIRECTORY, /dev/shm if none
is given, holds the model and one output of its size.
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

ROOT = Path(__file__).resolve().parent.parent
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
        "--counts", help="of threads, processes and cps; powers of two up to the cores"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="one after the other over all that is measured; their median counts",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="starts no measurement after as many seconds",
    )
    parser.add_argument("--out", type=Path, help="one JSON line for each measurement")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "mckpt", quiet=1)  # as pip does when it installs
    started = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    counts = (
        [int(c) for c in arguments.counts.split(",")]
        if arguments.counts
        else [1 << i for i in range(cores.bit_length())]
    )
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
                    said = {
                        "model": model,
                        "bytes": nbytes,
                        "cores": cores,
                        "round": number,
                        "what": what,
                        "n": n,
                        "s": seconds[what, n][-1],
                    }
                    with arguments.out.open("a") as f:
                        f.write(json.dumps(said) + "\n")
            report(f"{model}: {nbytes / 1e9:.1f} GB", nbytes, seconds)
            shutil.rmtree(work / "hf")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def report(title: str, nbytes: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    """A line for each thing measured; the machine's copy bandwidth is that of the fastest number of
    `cp`s.
    """
    rates = {key: nbytes / 1e9 / statistics.median(found) for key, found in seconds.items()}
    best = max(
        (rate for (what, _), rate in rates.items() if what.startswith("cp")), default=float("nan")
    )
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
    """(what, how many threads or processes, command); the `cp`s first, which the others are
    compared with.
    """
    rows = [("cp -r", 1, ["cp", "-r", "--reflink=never", str(hf), str(out)])]
    several = (
        'mkdir "$2" && find "$1" -type f -printf "%s %p\\n" | sort -rn | cut -d" " -f2- | xargs -P'
        ' "$3" -n 1 cp --reflink=never -t "$2"'
    )
    rows += [
        ("cp, one for each file", n, ["sh", "-c", several, "sh", str(hf), str(out), str(n)])
        for n in counts
        if n > 1
    ]
    for layout in layouts:
        base = [
            sys.executable,
            "-m",
            "mckpt",
            "hf-to-megatron",
            str(hf),
            str(out),
            *LAYOUTS[layout],
            *ALLOW,
        ]
        quick = [*base, "--checksum", "none"]
        rows += [
            (
                f"{layout}, threads of one process",
                n,
                [*quick, "--threads", str(n), "--max-memory", f"{max(64, 2 * n)}MiB"],
            )
            for n in counts
        ]
        rows += [
            (
                f"{layout}, processes of one thread",
                n,
                [*quick, "--threads", "1", "--workers", str(n)],
            )
            for n in counts
            if n > 1
        ]
        rows += [
            (f"{layout}, processes sharing all cores", n, [*quick, "--workers", str(n)])
            for n in counts
            if 1 < n < max(counts)
        ]
        rows += [
            (f"{layout}, as it comes (crc32)", n, [*base, "--workers", str(n)])
            for n in (1, 2, 4, 8)
            if n <= max(counts)
        ]
    return rows


def measure(command: list[str], out: Path) -> float:
    """Seconds of one process from start to exit; removes what it wrote."""
    begun = time.perf_counter()
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path()},
    )
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    files = [str(f) for f in out.rglob("*") if f.is_file()]
    # tmpfs frees slowly
    subprocess.run(
        ["xargs", "-0", "-P", "16", "-n", "1", "rm"], input="\0".join(files).encode(), check=True
    )
    shutil.rmtree(out)
    return seconds


def search_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def filesystem(path: Path) -> str:
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
