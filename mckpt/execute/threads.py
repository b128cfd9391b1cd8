"""The threads of one process: some copy, others wait for the disk, and the first error stops all.
Also the processes of `--workers`, which are forks of this one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mckpt.errors import UsageError
from mckpt.execute.ranks import Ranks

# Items per thread among which a thread looks for one whose target files no other thread writes: two
# writers of one inode wait for each other.
AHEAD = 8
STOP_WAIT = 0.8  # seconds that an interrupted run waits for threads that sit in a system call
TICK = 0.1  # seconds between two calls of `tick`


class _Stopped(Exception):
    """Another thread failed or the user interrupted: leave everything as it is."""


class ThreadPool:
    """Threads that copy, with buffers of `max_memory` bytes together, and as many that wait for the
    disk.
    """

    def __init__(self, threads: int, max_memory: int) -> None:
        self.threads, self.memory = threads, max(256, max_memory // threads)

    def _buffer(self) -> memoryview:
        try:
            # unlike a bytearray it takes no memory before it is used
            return memoryview(mmap.mmap(-1, self.memory))
        except (OSError, OverflowError, MemoryError):
            raise UsageError(
                f"{self.threads} buffers of {self.memory:,} bytes are more than this machine gives;"
                " lower --max-memory"
            ) from None

    def each(
        self,
        items: Iterable[int],
        work: Callable[[int, memoryview, Callable[[], None]], Callable[[], None] | None],
        *,
        targets: Callable[[int], frozenset[int]] = lambda item: frozenset(),
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls work(item, buffer, check) for every item; raises the first error of a worker.

        A thread prefers items whose `targets` no other thread is busy with. `work` calls `check`
        now and then, which raises when all must stop.

        Another thread calls the function that `work` returns, so that copying goes on while the
        disk writes. It does so after an error too: an item that is journaled is not done again.

        The calling thread calls `tick` every TICK seconds and at the end.
        """
        changed, stop = threading.Condition(), threading.Event()
        busy: Counter[int] = Counter()
        ahead: deque[tuple[int, frozenset[int]]] = deque()
        later: deque[Callable[[], None]] = deque()
        errors: list[BaseException] = []
        working, ended, interrupted = self.threads, 0, False
        left = iter(items)

        def take() -> tuple[int, frozenset[int]] | None:
            with changed:
                while len(ahead) < AHEAD * self.threads and (item := next(left, None)) is not None:
                    ahead.append((item, targets(item)))
                if not ahead or stop.is_set():
                    return None
                free = (
                    k for k, (_, files) in enumerate(ahead) if not any(busy[file] for file in files)
                )
                at = next(free, 0)
                got = ahead[at]
                del ahead[at]
                busy.update(got[1])
                return got

        def check() -> None:
            if stop.is_set():
                raise _Stopped

        def copies() -> None:
            nonlocal working
            try:
                memory = self._buffer()
                while got := take():
                    after = work(got[0], memory, check)
                    with changed:
                        busy.subtract(got[1])
                        if after:
                            later.append(after)
                            changed.notify_all()
            finally:
                with changed:
                    working -= 1
                    changed.notify_all()

        def waits() -> None:
            while True:
                with changed:
                    changed.wait_for(lambda: later or not working or interrupted)
                    if interrupted or not later:
                        return
                    after = later.popleft()
                after()

        def runs(body: Callable[[], None]) -> None:
            nonlocal ended
            try:
                body()
            except _Stopped:
                pass
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                with changed:
                    ended += 1
                    changed.notify_all()

        bodies = [copies] * self.threads + [waits] * self.threads
        threads = [
            threading.Thread(target=runs, args=(body,), name=f"execute-{i}", daemon=True)
            for i, body in enumerate(bodies)
        ]
        try:
            for thread in threads:
                thread.start()
            while ended < len(threads):
                with changed:
                    changed.wait_for(lambda: ended == len(threads), TICK)
                tick()
        finally:
            stop.set()
            with changed:
                interrupted = ended < len(threads)
                changed.notify_all()
            until = time.monotonic() + STOP_WAIT
            for thread in threads:
                if thread.ident:
                    thread.join(max(0, until - time.monotonic()))
        if errors:
            raise errors[0]
        tick()  # reports the end even if all were done before the first look


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
