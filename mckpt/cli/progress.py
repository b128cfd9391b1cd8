"""How far a run is, for people and for programs: bytes, rate, time left, memory, files."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

EVENT_S = 1.0  # between two events
# over which the rate is taken: long enough to be steady, short enough to show a stalled disk
WINDOW_S = 10.0


class Meter:
    """Bytes done over time -> bytes per second of the last WINDOW_S, and seconds left."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seen: deque[tuple[float, int]] = deque([(self.started, 0)])

    def read(self, done: int, total: int, files: int = 0, num_files: int = 0) -> dict[str, Any]:
        """An event; `eta_s` is None as long as nothing moves.

        A resumed run begins at what was done before, which is no rate.
        """
        now = time.monotonic()
        if len(self.seen) == 1:
            self.seen[0] = (self.started, done if now - self.started < EVENT_S / 2 else 0)
        self.seen.append((now, done))
        while len(self.seen) > 2 and now - self.seen[0][0] > WINDOW_S:
            self.seen.popleft()
        since, before = self.seen[0]
        seconds = now - since
        rate = (done - before) / seconds if seconds > 0 else 0.0
        said: dict[str, Any] = {
            "bytes": done,
            "total_bytes": total,
            "bytes_per_s": round(rate),
            "seconds": round(now - self.started, 2),
        }
        said |= {
            "eta_s": round((total - done) / rate, 1) if rate > 0 else None,
            "rss_bytes": resident(),
        }
        return said | ({"files": files, "total_files": num_files} if num_files else {})


class Events:
    """One line of JSON a second, and one at the end."""

    def __init__(self, what: str, emit: Callable[[str], None]) -> None:
        self.what, self.emit, self.meter = what, emit, Meter()
        self.last, self.ended = self.meter.started, False

    def __call__(self, done: int, total: int, files: int = 0, num_files: int = 0) -> None:
        now = time.monotonic()
        end = done >= total and files >= num_files
        if self.ended or (now - self.last < EVENT_S and not end):
            return
        self.last, self.ended = now, end
        self.emit(
            json.dumps({"event": self.what, **self.meter.read(done, total, files, num_files)})
        )


class Line:
    """One line on a terminal, drawn by rich."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.bar = Progress(
            what,
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=Console(stderr=True),
        )
        # until the first call says how much there is
        self.task = self.bar.add_task(what, total=None, more="", visible=False)

    def __enter__(self) -> Line:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int, files: int = 0, num_files: int = 0) -> None:
        more = f"{resident() >> 20} MiB memory" + (
            f", {files:,} of {num_files:,} files" if num_files else ""
        )
        self.bar.update(self.task, completed=done, total=total, more=more, visible=True)


def resident() -> int:
    """Bytes of memory that this process holds."""
    import resource

    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the most it ever held
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
