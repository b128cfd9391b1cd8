"""The threads of one process: some copy, others wait for the disk; the first error stops all."""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from mckpt.errors import UsageError

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
