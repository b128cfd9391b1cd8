"""The signals that end a command as Ctrl-C does, and standard streams that are closed or full."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
