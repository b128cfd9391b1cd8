"""Results that depend on a whole tensor, computed once by all threads that need them; and memory of
each thread for intermediate values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from mckpt.lazy import numpy as np
from mckpt.values.dtypes import numpy_dtype

KEPT = 4096  # results, each a few numbers for each input of a merge


class Shared:
    """Computes results in parts, and keeps them. Several threads can use it.

    A copy in another process starts empty.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}
        self._parts: dict[Hashable, dict[int, Any]] = {}
        self._locks: dict[Hashable, list[threading.Lock]] = {}

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
        locks = self._locks.setdefault(key, [threading.Lock() for _ in range(count)])
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


class Scratch(threading.local):
    """Memory for the intermediate values of one thread. New memory is slow, because the kernel
    clears each page of it.
    """

    arrays: Mapping[str, np.ndarray] = {}

    def of(self, name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
        """Returns an array of this shape, with any content. It is used again by the next call with
        the same name.
        """
        count = math.prod(shape)
        if (found := self.arrays.get(name)) is None or found.dtype != kind or found.size < count:
            found = np.empty(count, numpy_dtype(kind))
            self.arrays = {**self.arrays, name: found}
        return found[:count].reshape(shape)
