"""Starts one process and measures it, and compares a figure with its target."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
MCKPT = [sys.executable, "-m", "mckpt"]
missed: list[str] = []  # the targets that were missed, for the end of the output


def environment() -> dict[str, str]:
    """The environment in which mckpt of this folder is imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def run(command: list[str]) -> tuple[float, float]:
    """Returns (wall seconds, peak RSS in MiB) of one process from start to exit."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return time.perf_counter() - begun, usage.ru_maxrss * 1024 / MIB


def anonymous(command: list[str]) -> float:
    """Returns the peak anonymous memory of one process in MiB, sampled every 2 ms."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    worst, ended = 0.0, threading.Event()

    def look() -> None:
        nonlocal worst
        while not ended.wait(0.002):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                return
            found = [int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")]
            worst = max([worst, *found])

    watcher = threading.Thread(target=look)
    watcher.start()
    code = process.wait()
    ended.set()
    watcher.join()
    if code:
        raise SystemExit(f"{' '.join(command)} failed")
    return worst


def judge(what: str, value: float, target: float, unit: str = "") -> str:
    """Returns the target and whether it is met, and remembers it if not."""
    if value <= target:
        return f"at most {target:g}{unit}  met"
    missed.append(f"{what}: {value:.3g}{unit}, target {target:g}{unit}")
    return f"at most {target:g}{unit}  MISSED"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def filesystem(path: Path) -> str:
    return output("stat", "-f", "-c", "%T", str(path))


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
