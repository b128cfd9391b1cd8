"""Times commands that have no `cp` beside them, on a core that has its full speed meanwhile."""

from __future__ import annotations

import os
import statistics
import threading
import time
from typing import NamedTuple

from benchmarks.processes import judge, run

PATIENCE = 3  # seconds that a run waits for a core of full speed, because bursts are often shorter
paces: list[float] = []  # of each core each time that one was chosen: the median of five


class Row(NamedTuple):
    """A command of one thread, and the most that it may take."""

    name: str
    command: list[str]
    seconds: float | None = None
    mib: float | None = None


class Sample(NamedTuple):
    """One run of a row."""

    pace: float  # mean of its core before the run, after it, and each 0.1 s of it
    seconds: float
    mib: float  # peak RSS


def pace() -> float:
    """Returns the CPU seconds of 50,000 additions now. On a shared machine this doubles and halves
    from one second to the next.
    """
    begun = time.thread_time()
    for i in range(50_000):
        i + 1
    return time.thread_time() - begun


def full_speed() -> float:
    """Returns the best pace of a core since this program began."""
    return min(paces)


def at_full_speed(seconds: float) -> bool:
    """Returns whether a pace is within 20% of the best."""
    return seconds < 1.2 * full_speed()


def sample(command: list[str], cores: set[int]) -> Sample:
    """Runs a command on the fastest of a few cores, after waiting up to PATIENCE for a fast one.
    This process stays on that core.
    """
    now: dict[int, float] = {}
    until = time.monotonic() + PATIENCE
    while not now or (not at_full_speed(min(now.values())) and time.monotonic() < until):
        for core in sorted(cores)[:4]:
            os.sched_setaffinity(0, {core})
            now[core] = statistics.median(pace() for _ in range(5))
            paces.append(now[core])
    os.sched_setaffinity(0, {min(now, key=now.__getitem__)})
    beside, ended = [pace()], threading.Event()

    def look() -> None:  # its thread is on the same core
        while not ended.wait(0.1):
            beside.append(pace())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        seconds, peak = run(command)
    finally:
        ended.set()
        watcher.join()
    beside.append(pace())
    return Sample(statistics.mean(beside), seconds, peak)


def report(rows: list[Row], rounds: int) -> None:
    """Runs the rows in turns and prints a line for each.

    It ends when each row has `rounds` samples at full speed, or six times as many samples of any
    speed. Rows without a target get `rounds` turns. The printed seconds are the median of the
    samples at full speed, and beside it the median of all samples. If fewer than `rounds` samples
    had full speed, the printed seconds are the median of all samples, and the line ends with
    "median of all samples".
    """
    cores = os.sched_getaffinity(0)
    found: list[list[Sample]] = [[] for _ in rows]
    fast: list[list[Sample]] = found
    most = 6 * rounds if any(row.seconds for row in rows) else rounds
    try:
        while len(found[0]) < most and (not found[0] or min(map(len, fast)) < rounds):
            for row, samples in zip(rows, found, strict=True):
                samples.append(sample(row.command, cores))
            fast = [[s for s in samples if at_full_speed(s.pace)] for samples in found]
    finally:
        os.sched_setaffinity(0, cores)
    for row, samples, counted in zip(rows, found, fast, strict=True):
        every, peak = statistics.median(s.seconds for s in samples), max(s.mib for s in samples)
        enough = len(counted) >= rounds
        seconds = statistics.median(s.seconds for s in counted) if enough else every
        beside = f", all {every:5.2f} s" if enough else ", median of all samples"
        judged = []
        if row.seconds:
            judged.append(judge(row.name, seconds, row.seconds, " s"))
        if row.mib:
            judged.append(judge(row.name, peak, row.mib, " MiB"))
        line = f"{row.name:72} {seconds:6.2f} s {peak:6.0f} MiB "
        line += f" {len(counted):2} of {len(samples):2} at full speed{beside}  {', '.join(judged)}"
        print(line.rstrip(), flush=True)
