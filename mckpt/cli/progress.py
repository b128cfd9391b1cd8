"""Progress and notes on stderr while a command runs: bytes, rate, time left, memory, files."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mckpt.cli.echo import echo
from mckpt.progress import OnProgress, Progress

EVENT_S = 1.0  # seconds between two events
# Seconds over which the rate is measured: enough for a steady rate, few enough to show a disk that
# stalls.
WINDOW_S = 10.0
# Widths of a terminal, in characters, at which the line of progress has room for the numbers and a
# bar of some characters, and for the numbers and the memory and files beside them.
BAR_WIDTH, MORE_WIDTH = 100, 85


def print_note(text: str, as_json: bool) -> None:
    """Prints a note on stderr, as a JSON event if `as_json`."""
    echo(json.dumps({"event": "note", "message": text}) if as_json else text, err=True)


@contextmanager
def showing(what: str, as_json: bool) -> Iterator[OnProgress | None]:
    """Yields a callback that shows progress on stderr: with `as_json` as one JSON event a second,
    on a terminal as a line that it redraws. Otherwise yields None.
    """
    if as_json:
        yield Events(what, lambda text: echo(text, err=True))
    elif sys.stderr.isatty():
        with Line(what) as line:
            yield line
    else:
        yield None


@contextmanager
def phases(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Yields a callback that prints each phase of a command on stderr when it starts, with the
    seconds that have passed. A terminal also shows a spinner and the time.
    """
    start = time.monotonic()

    def print_phase(text: str) -> None:
        seconds = time.monotonic() - start
        event = {"event": "phase", "message": text, "seconds": round(seconds, 2)}
        echo(json.dumps(event) if as_json else f"{seconds:5.1f} s  {text}", err=True)

    if as_json or not sys.stderr.isatty():
        yield print_phase
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=None)
        yield print_phase


class Meter:
    """Measures the rate of the last WINDOW_S seconds, and from it the time left."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seen: deque[tuple[float, int]] = deque([(self.started, 0)])

    def read(self, at: Progress) -> dict[str, Any]:
        """Returns an event; its `eta_s` is None while nothing moves.

        A resumed run starts with bytes that an earlier run wrote; they do not count for the rate.
        """
        now, done, total = time.monotonic(), at.nbytes, at.total_bytes
        if len(self.seen) == 1:
            self.seen[0] = (self.started, done if now - self.started < EVENT_S / 2 else 0)
        self.seen.append((now, done))
        while len(self.seen) > 2 and now - self.seen[0][0] > WINDOW_S:
            self.seen.popleft()
        since, before = self.seen[0]
        seconds = now - since
        rate = (done - before) / seconds if seconds > 0 else 0.0
        event = {
            "bytes": done,
            "total_bytes": total,
            "bytes_per_s": round(rate),
            "seconds": round(now - self.started, 2),
            "eta_s": round((total - done) / rate, 1) if rate > 0 else None,
            "rss_bytes": resident(),
        }
        files = {"files": at.files, "total_files": at.total_files}
        return event | (files if at.total_files else {})


class Events:
    """Emits one line of JSON a second, and one at the end."""

    def __init__(self, what: str, emit: Callable[[str], None]) -> None:
        self.what, self.emit, self.meter = what, emit, Meter()
        self.last, self.ended = self.meter.started, False

    def __call__(self, at: Progress) -> None:
        now = time.monotonic()
        if self.ended or (now - self.last < EVENT_S and not at.complete):
            return
        self.last, self.ended = now, at.complete
        event = self.meter.read(at)
        self.emit(json.dumps({"event": self.what, **event}))


class Line:
    """Draws one line on a terminal, with rich. On a narrow terminal the line has no bar, and on a
    narrower one also no memory and files.
    """

    def __init__(self, what: str) -> None:
        from rich import progress
        from rich.console import Console

        numbers = (
            what,
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        more = progress.TextColumn("{task.fields[more]}")
        # the columns that need this width of the terminal, in characters
        self.columns = {
            BAR_WIDTH: (what, progress.BarColumn(None), *numbers[1:], more),
            MORE_WIDTH: (*numbers, more),
            0: numbers,
        }
        self.bar = progress.Progress(console=Console(stderr=True))
        # invisible until the first call tells the total
        self.task = self.bar.add_task(what, total=None, more="", visible=False)

    def __enter__(self) -> Line:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def __call__(self, at: Progress) -> None:
        more = f"{resident() >> 20} MiB memory"
        if at.total_files:
            more += f", {at.files:,} of {at.total_files:,} files"
        width = self.bar.console.width
        self.bar.columns = next(some for least, some in self.columns.items() if width >= least)
        self.bar.update(
            self.task, completed=at.nbytes, total=at.total_bytes, more=more, visible=True
        )


def resident() -> int:
    """Returns the bytes of memory that this process holds."""
    import resource

    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the largest size so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
