"""Starts the processes of `--workers`, which are forks of this one, and ends all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mckpt.execute.ranks import Ranks

PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
GRACE_S = 20  # seconds that a process has to end before it is killed


@contextmanager
def workers(num: int, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """Yields this process as rank 0 of `num`, which is more than 1.

    The other ranks are forks of this process, so they have its plan. They run `work`, and all of
    them have ended when the block has.
    """
    import multiprocessing

    run, fork = uuid.uuid4().hex, multiprocessing.get_context("fork")
    # Ranks takes the number of ranks on the whole machine. This process may be limited to some of
    # its cores, so scale the number up to all cores. The minus signs round up.
    local = -(-num * (os.cpu_count() or 1) // len(os.sched_getaffinity(0)))
    others = [
        fork.Process(target=_quietly, args=(work, Ranks(rank, num, run, local)), daemon=True)
        for rank in range(1, num)
    ]
    try:
        for process in others:
            process.start()
        yield Ranks(0, num, run, local, ended=lambda rank: not others[rank - 1].is_alive())
        for process in others:
            process.join(1)
    finally:
        for process in others:
            if process.is_alive():
                process.terminate()
        for process in others:
            if process.is_alive():
                process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _quietly(work: Callable[[Ranks], object], ranks: Ranks) -> None:
    """Runs `work` in a forked process, which prints nothing.

    Ctrl-C reaches rank 0 only, and rank 0 then ends the other ranks. If rank 0 is killed, the
    kernel kills the others.
    """
    os.setsid()
    end_with_parent()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    work(ranks)


def end_with_parent() -> None:
    """Lets the kernel kill this process as soon as the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
