"""Standard streams and signals: prints texts, with URLs in place of their local copies and escapes
in place of characters that would control a terminal; shows the progress of a command on stderr;
ends a command as Ctrl-C does.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from mckpt.errors import Unprinted, Unreported, printable, shown

if TYPE_CHECKING:
    from pathlib import Path

    from mckpt.progress import OnProgress, Progress


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on stdout, or with `err` on stderr. A line break within one is escaped.

    Raises Unprinted if stdout refuses them.
    """
    try:
        click.echo("\n".join(printable(shown(line)) for line in lines), err=err)
    except OSError as error:
        raise Unprinted(f"stdout: cannot be written: {error.strerror or error}") from error


def document(text: str, *, err: bool = False) -> None:
    """Prints a text of several lines, such as a file, of which all line breaks are mckpt's own."""
    echo(*text.removesuffix("\n").split("\n"), err=err)


@contextmanager
def reporting(path: str) -> Iterator[None]:
    """Raises Unreported if stdout refuses what the block prints about the output at `path`."""
    try:
        yield
    except Unprinted as error:
        raise Unreported(f"{path}: is complete and in place; {error}") from error


def named(path: Path) -> str:
    """Returns a path as the user gave it: Path makes s3:/ of s3://."""
    from mckpt.storage import addresses

    return str(addresses.url_of(path) or path)


def echo_outcome(state: str, start: float, facts: Mapping[str, Any], **places: Path) -> None:
    """Prints on stdout, as one JSON object, how a command ended (docs/json.md).

    start: `time.perf_counter()` when it began. places: what it read or wrote, by argument name.
    """
    import json

    where = {name: named(path) for name, path in places.items()}
    seconds = round(time.perf_counter() - start, 3)
    echo(json.dumps({"state": state, **where, "seconds": seconds, **facts}))


EVENT_S = 1.0  # seconds between two events
LINE_S = 30.0  # seconds between two lines of progress, where stderr is not a terminal
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
def showing(what: str, as_json: bool) -> Iterator[OnProgress]:
    """Yields a callback that shows progress on stderr: with `as_json` as one JSON event a second,
    on a terminal as a line that it redraws, otherwise as one line every LINE_S seconds.
    """
    if as_json:
        yield Events(what, lambda text: echo(text, err=True))
    elif sys.stderr.isatty():
        with StatusLine(what) as line:
            yield line
    else:
        yield PlainLines(what, lambda text: echo(text, err=True))


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

    if as_json:
        yield print_phase
        return
    if not sys.stderr.isatty():
        with _repeating(print_phase) as print_first:
            yield print_first
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=None)
        yield print_phase


@contextmanager
def _repeating(print_phase: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yields `print_phase`, and calls it again every LINE_S seconds while a phase lasts."""
    ended, now = threading.Event(), [""]

    def print_first(text: str) -> None:
        now[0] = text
        print_phase(text)

    def repeat() -> None:
        while not ended.wait(LINE_S):
            print_phase(f"still: {now[0]}")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield print_first
    finally:
        ended.set()
        thread.join()


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


class PlainLines:
    """Emits one line of text every LINE_S seconds, so that a short run emits none."""

    def __init__(self, what: str, emit: Callable[[str], None]) -> None:
        self.what, self.emit, self.meter = what, emit, Meter()
        self.last = self.printed = self.meter.started

    def __call__(self, at: Progress) -> None:
        now = time.monotonic()
        if now - self.last < EVENT_S:
            return
        self.last = now
        event = self.meter.read(at)  # every second, because the rate is that of the last seconds
        if now - self.printed < LINE_S or at.complete:
            return
        self.printed = now
        self.emit(f"{self.what}: {in_words(at, event)}")


def in_words(at: Progress, event: Mapping[str, Any]) -> str:
    """Returns the bytes that are done, their share, the rate, the time left and the files."""
    from mckpt.progress import share

    text = f"{share(at.nbytes, at.total_bytes)} ({100 * at.nbytes // max(1, at.total_bytes)} %)"
    if event["eta_s"] is not None:
        rate = share(event["bytes_per_s"])
        text += f", {rate}/s, {_duration(round(event['eta_s']))} left"
    if at.total_files:
        text += f", {at.files:,} of {at.total_files:,} files"
    return text


def _duration(seconds: int) -> str:
    """Returns seconds in the two units that suit them."""
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


class StatusLine:
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

    def __enter__(self) -> StatusLine:
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


# Ctrl-C; Kubernetes, Slurm and systemd; a terminal that was closed
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_caught: list[int] = []


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def raising() -> Iterator[None]:
    """Makes the signals of ENDING raise Interrupted while the block runs.

    By default SIGTERM and SIGHUP end this process alone, and its children go on running. A signal
    that is ignored stays ignored: nohup ignores SIGHUP, and a shell SIGINT in the background. Only
    the main thread can set signal handlers; in another thread this function does nothing.
    """
    before: dict[int, Any] = {}

    def stop(number: int, frame: object) -> None:
        _caught.append(number)
        raise Interrupted(number)

    _caught.clear()
    with suppress(ValueError):  # not the main thread
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def caught() -> bool:
    """Returns whether a signal has come. Python drops an exception that a signal handler raises
    while an object is freed, so an endless loop calls this too.
    """
    return bool(_caught)


def raise_caught() -> None:
    """Raises Interrupted if a signal has come, even if the command ended normally because of it."""
    if _caught:
        raise Interrupted(_caught[-1])


def open_streams() -> None:
    """Opens /dev/null for each standard stream that is closed; otherwise the next file would get
    the number of the stream. Also makes stderr ignore errors, so that a conversion continues if
    progress and notes cannot be printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)  # Python itself may have opened the file of its script there
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    raw = os.fdopen(2, "wb", closefd=False)
    sys.stderr = _Forgiving(raw, sys.stderr.encoding, "backslashreplace", write_through=True)


class _Forgiving(io.TextIOWrapper):
    """A text stream whose errors are ignored."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
