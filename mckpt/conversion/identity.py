"""The identity of the source of a run, by which a later run recognises the output and the
interrupted work of the same command.

A file that has the same size, mtime, ctime and inode is the same. If one of them differs, the
content decides (`done`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from mckpt.conversion.plan_data import PlanData
from mckpt.storage import sparse_copy
from mckpt.storage.files import Stamp, stamp


@dataclass(frozen=True)
class State:
    """The state of the source files of a plan."""

    stamps: Sequence[Stamp]

    @classmethod
    def of(cls, plan: PlanData, refresh: bool = False) -> State:
        """Returns the state of the files now; with `refresh`, lists the stores that have them."""
        files = [*plan.source.layout.files, *map(str, plan.copied)]
        if refresh:
            for place in {id(one): one for one in map(sparse_copy.of, files) if one}.values():
                place.list()
        return cls([stamp(file) for file in files])

    def __str__(self) -> str:
        """Returns the text for the manifest."""
        return f"{self.shared}:{_digest([one.exact for one in self.stamps])}"

    @property
    def shared(self) -> str:
        """Returns the part that is the same on all machines that see the files."""
        return _digest([one.shared for one in self.stamps])


def key_of(plan: PlanData, checksum: str, shared: str) -> str:
    """Returns a digest of the bytes that a run writes; the same command has the same one, on all
    its ranks.

    shared: that of the source's state (State). A run that continues another one compares the whole
    state too (Destination.staging).
    """
    return _digest(f"{plan.digest} {checksum} {shared}")


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
