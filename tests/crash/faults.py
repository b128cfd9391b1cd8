"""A call of the C library fails, or does half of its work: each call of a tiny conversion once."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Iterator
from functools import partial

from tests.crash.trial import Trial

FUNCTIONS = (
    "open",
    "read",
    "write",
    "copy",
    "truncate",
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)
COUNT, FAIL, RECORD = 1, 2, 3
SHORT, END_OF_FILE = -1, -2
HOW = {
    "open": (errno.EIO, errno.ENOSPC),
    "read": (errno.EIO, SHORT, END_OF_FILE),
    "write": (errno.ENOSPC, errno.EIO, SHORT),
    "copy": (errno.ENOSPC, errno.EIO, SHORT),
    "truncate": (errno.ENOSPC,),
    "fsync": (errno.EIO,),
    "rename": (errno.EIO,),
    "link": (errno.EIO,),
    "unlink": (errno.EIO,),
    "mkdir": (errno.ENOSPC,),
    "rmdir": (errno.EIO,),
}


def plan(
    trial: Trial, mode: int, function: int = 0, nth: int = 0, how: int = 0, log: int = -1
) -> None:
    """Tells shim.c in this process what to do with the files of a trial."""
    roots = (os.fsencode(trial.place.out), os.fsencode(trial.place.sources))
    ctypes.CDLL(None).crash_plan(mode, *roots, function, ctypes.c_long(nth), how, log)


def counts(trial: Trial) -> list[int]:
    """Returns the calls of each function in an undisturbed run."""
    place = trial.place
    place.clear()
    there = place.folder / "counts"

    def before() -> None:
        plan(trial, COUNT)
        found = (ctypes.c_long * len(FUNCTIONS)).in_dll(ctypes.CDLL(None), "crash_counts")
        real = os._exit

        def leave(code: int) -> None:
            there.write_text(" ".join(map(str, found)))
            real(code)

        os._exit = leave  # type: ignore[assignment]

    assert place.run(trial.words, before).code == 0
    return [int(word) for word in there.read_text().split()]


def cases(trial: Trial, most: int) -> list[tuple[int, int, int]]:
    """Returns (function, call, how) for every call, or a sample of `most`."""
    every = [
        (number, nth, how)
        for number, calls in enumerate(counts(trial))
        for nth in range(1, calls + 1)
        for how in HOW[FUNCTIONS[number]]
    ]
    return sorted(random.Random(trial.name).sample(every, min(most, len(every))))


def tries(trial: Trial, chosen: list[tuple[int, int, int]]) -> Iterator[str | None]:
    """Lets each of the calls fail; yields each time what was wrong, or None."""
    place = trial.place
    for function, nth, how in chosen:
        place.clear()
        ended = place.run(trial.words, partial(plan, trial, FAIL, function, nth, how))
        tree = place.tree(trial.in_store)
        wrong = trial.wrong(tree)
        reads = FUNCTIONS[function] in ("open", "read")
        if ended.code not in ((0, 3, 7) if reads else (0, 7)):
            wrong = wrong or f"exit {ended.code}: {ended.text[-300:]}"
        if ended.code and ("Traceback" in ended.text or ended.text.count("mckpt: ") != 1):
            wrong = wrong or f"not one error: {ended.text[-300:]}"
        if ended.code == 0 and not trial.complete(tree):
            wrong = wrong or "exit 0, and the output is not complete"
        if ended.code and trial.complete(tree) and "cannot be published" in ended.text:
            wrong = wrong or f"the output is complete, and the error is {ended.text[-200:]}"
        wrong = wrong or trial.rerun()
        name = {SHORT: "does half", END_OF_FILE: "reads nothing"}.get(how) or errno.errorcode[how]
        yield wrong and f"{FUNCTIONS[function]} {nth} {name}: {wrong}"
