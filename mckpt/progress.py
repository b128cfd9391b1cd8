"""The progress that a long operation reports, and the way to cancel it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mckpt.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from threading import Event


@dataclass(frozen=True)
class Progress:
    """The progress of an operation, which calls its `progress` function several times a second."""

    nbytes: int  # bytes that are done, including those of an earlier run that was interrupted
    total_bytes: int
    files: int = 0  # complete files; 0 for an operation that writes none
    total_files: int = 0

    @property
    def complete(self) -> bool:
        return self.nbytes >= self.total_bytes and self.files >= self.total_files


def share(nbytes: int, total: int | None = None) -> str:
    """Returns bytes with their unit, such as "1.20 GB", or "1.20 of 2.00 GB"."""
    units = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
    most = max(1, nbytes if total is None else total)
    scale, unit = next(one for one in units if most >= one[0])
    digits = 2 if scale > 1 else 0
    numbers = [f"{n / scale:.{digits}f}" for n in (nbytes, total) if n is not None]
    return f"{' of '.join(numbers)} {unit}"


OnProgress = Callable[[Progress], None]


def refuse_cancelled(cancel: Event | None) -> None:
    """Raises Cancelled if `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("cancelled; the same call continues where it stopped")


def watched(progress: OnProgress | None, cancel: Event | None) -> OnProgress | None:
    """Returns a `progress` function that also raises Cancelled once `cancel` is set. Raises
    UsageError if they are something else.
    """
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {progress!r}, and must be a function of one mckpt.Progress")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise UsageError(f"cancel is {cancel!r}, and must be a threading.Event")
    if cancel is None:
        return progress

    def watch(now: Progress) -> None:
        refuse_cancelled(cancel)
        if progress is not None:
            progress(now)

    return watch
