"""Results that depend on a whole tensor, computed once by all threads that need them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

KEPT = 4096  # results, each a few numbers for each input of a merge


class Shared:
    """Computes results in parts, and keeps them. Several threads can use it.

    A copy in another process starts empty.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}
        self._parts: dict[Hashable, dict[int, Any]] = {}
        self._locks: dict[Hashable, list[Lock]] = {}

    def __reduce__(self) -> tuple[type[Shared], tuple[()]]:
        return Shared, ()

    def of(
        self,
        key: Hashable,
        count: int,
        part: Callable[[int], Any],
        finish: Callable[[list[Any]], Any],
    ) -> Any:
        """Returns finish([part(0), ..., part(count - 1)]), or what it returned before.

        A thread takes the parts that no other one is computing, and waits for those at the end.
        """
        if key in self._results:
            return self._results[key]
        locks = self._locks.setdefault(key, [Lock() for _ in range(count)])
        parts = self._parts.setdefault(key, {})
        for wait in (False, True):
            for number, lock in enumerate(locks):
                if number not in parts and lock.acquire(blocking=wait):
                    try:
                        if number not in parts:
                            parts[number] = part(number)
                    finally:
                        lock.release()
        result = self._results.setdefault(key, finish([parts[n] for n in range(count)]))
        self._parts.pop(key, None)
        self._locks.pop(key, None)
        while len(self._results) > KEPT:
            self._results.pop(next(iter(self._results), None), None)
        return result
