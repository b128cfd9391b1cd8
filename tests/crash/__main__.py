"""Kills commands, lets calls of the C library fail, and cuts the power; prints what survived.

    python -m tests.crash --tries 200 --processes 16

Ends with 1 if anything did not survive. It needs cc for faults and power cuts, and obstore for S3.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.crash import faults, kills, power
from tests.crash.trial import COMMANDS, Place, Trial

KINDS = ("kill", "fault", "power")
# the commands whose every call fails once, and whose every change is cut
WRITERS = ("hf-to-megatron", "megatron-to-hf", "to torch", "reshard with optimizer")
PRELOADED = "CRASH_PRELOADED"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--tries", type=int, default=200, help="kills of each command")
    parser.add_argument("--faults", type=int, default=10**6, help="most faults of each command")
    parser.add_argument("--reruns", type=int, default=power.RERUNS, help="after power cuts")
    parser.add_argument("--only", action="append", choices=COMMANDS, help="may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    kinds, names = asked.kind or KINDS, asked.only or list(COMMANDS)
    if not importlib.util.find_spec("obstore") and (gone := [n for n in names if "S3" in n]):
        print(f"obstore is not installed: not tried: {', '.join(gone)}", flush=True)
        names = [name for name in names if name not in gone]
    if PRELOADED not in os.environ and set(kinds) != {"kill"}:
        if shutil.which("cc"):
            restart()
        print("there is no C compiler (cc): only the kills are tried", flush=True)
        kinds = ["kill"]
    jobs = [(kind, name) for kind in kinds for name in names if kind == "kill" or name in WRITERS]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        others = [fork(Path(folder), jobs, asked, part) for part in range(asked.processes)]
        rows = [join(Path(folder), pid, part) for part, pid in enumerate(others)]
    return show(jobs, rows, time.monotonic() - begun)


def restart() -> None:
    """Starts this program again with shim.c in it."""
    folder = tempfile.mkdtemp(prefix="crash-shim-")
    shim = Path(folder, "shim.so")
    source = Path(__file__).parent / "shim.c"
    line = ["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl", "-lpthread"]
    subprocess.run(line, check=True)
    os.environ |= {"LD_PRELOAD": str(shim), PRELOADED: folder}
    os.execv(sys.executable, [sys.executable, "-m", "tests.crash", *sys.argv[1:]])


def fork(folder: Path, jobs: list[tuple[str, str]], asked: argparse.Namespace, part: int) -> int:
    """Starts a process that does its part of all jobs, in a folder of its own."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    place = None
    try:
        place = Place.made(folder / str(part), any("S3" in name for _, name in jobs))
        rows = []
        for number, (kind, name) in enumerate(jobs):
            if kind == "power" and number % asked.processes != part:
                rows.append((0, []))  # one process replays a whole record
                continue
            found = list(results(Trial(place, name), kind, asked, part))
            rows.append((len(found), [text for text in found if text]))
        (place.folder / "rows").write_text(json.dumps(rows))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        if place and place.server:
            place.server.stop()
        os._exit(code)


def results(trial: Trial, kind: str, asked: argparse.Namespace, part: int) -> Iterator[str | None]:
    if kind == "kill":
        number = len(range(part, asked.tries, asked.processes))
        return kills.tries(trial, number, part)
    if kind == "fault":
        return faults.tries(trial, faults.cases(trial, asked.faults)[part :: asked.processes])
    return power.tries(trial, asked.reruns)


def join(folder: Path, pid: int, part: int) -> list[tuple[int, list[str]]]:
    """Returns the rows of a process, when it has ended."""
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"process {part} failed")
    return [tuple(row) for row in json.loads((folder / str(part) / "rows").read_text())]


def show(
    jobs: list[tuple[str, str]], rows: list[list[tuple[int, list[str]]]], seconds: float
) -> int:
    """Prints the table, and what did not survive; returns the exit code."""
    titles = {"kill": "kill -9", "fault": "failing calls", "power": "power cuts"}
    print("| | command | tries | survived |\n|---|---|---:|---:|")
    lost: list[str] = []
    for number, (kind, name) in enumerate(jobs):
        parts = [part[number] for part in rows]
        tries = sum(count for count, _ in parts)
        bad = list(itertools.chain.from_iterable(texts for _, texts in parts))
        lost += [f"{titles[kind]}, {name}: {text}" for text in bad]
        print(f"| {titles[kind]} | `{name}` | {tries:,} | {tries - len(bad):,} |")
    print(f"\n{seconds:,.0f} s, {len(rows)} processes")
    for text in lost[:40]:
        print(f"\n{text}")
    if len(lost) > 40:
        print(f"\nand {len(lost) - 40:,} more")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
