"""Measures weights that share a scale. The scale depends on the largest value of all of them, of
which threads quantise slabs. So every slab is read twice, and first by the thread that is the first
to need it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np

from mckpt.execute.units import Work, are_quantised
from mckpt.values.quantisation import Grid

PEERS = Grid._fields.index("peers")


class Measured:
    """The largest absolute values of the slabs of one Work, which all threads of a run share."""

    def __init__(self) -> None:
        self.peers: list[int] = []  # the number of peers of each slab
        self.slabs: dict[int, list[int]] = {}  # number of peers -> the slabs of their weights
        self.locks: dict[int, Lock] = {}  # of these slabs
        self.found: dict[int, float] = {}  # slab -> its largest value
        self.lock = Lock()

    def largest(
        self, work: Work, grids: np.ndarray, slab: int, measure: Callable[[int], float]
    ) -> float:
        """Returns the largest value of all weights that share a scale with the one of `slab`.

        measure: reads a slab, and returns its largest value.
        """
        with self.lock:
            if not self.slabs:
                self._list(work, grids)
        slabs = self.slabs[self.peers[slab]]
        at = slabs.index(slab)
        for wait in (False, True):  # first all slabs that no other thread measures
            for one in slabs[at:] + slabs[:at]:
                if one not in self.found and self.locks[one].acquire(wait):
                    try:
                        if one not in self.found:
                            self.found[one] = measure(one)
                    finally:
                        self.locks[one].release()
        return max(self.found[one] for one in slabs)

    def _list(self, work: Work, grids: np.ndarray) -> None:
        """Lists the slabs of all weights that are quantised."""
        last = work.copies[work.bounds[1:] - 1]  # of each cluster
        cluster = work.slabs["cluster"]
        self.peers = grids[last["grid"], PEERS][cluster].tolist()
        for slab in np.flatnonzero(are_quantised(last)[cluster]).tolist():
            self.slabs.setdefault(self.peers[slab], []).append(slab)
            self.locks[slab] = Lock()
