"""The journal of a run: which units and files are finished, so that the same call can go on after
a kill.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from isal import isal_zlib

from mckpt.execute.checksums import RANGE
from mckpt.execute.files import raise_storage_error
from mckpt.execute.units import Work
from mckpt.storage.files import TargetFile

# units; above this number one listing of the folder is cheaper than a look for each name
LISTED = 1000
# The name of a file in the journal. It identifies the output files that the journal describes:
# processes of an earlier run may still write into theirs.
GENERATION = "generation"


def generation(folder: Path) -> str:
    """Returns the generation of a journal, "" if there is none."""
    try:
        return (folder / GENERATION).read_text(errors="replace")
    except FileNotFoundError:
        return ""


class Journal:
    """A folder with one entry for each finished unit and one for each finished file.

        <unit>       the ranges that the unit wrote
        file<file>   the checksum of the file

    An entry that is damaged or belongs to another plan counts as missing.
    """

    HEAD = struct.Struct("<8sII")  # magic, identity, crc32 of the body
    MAGIC = b"mckptunt"

    @staticmethod
    def create(folder: Path) -> None:
        """Makes the folder; if it is new, it gets a new generation."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / GENERATION).exists():
                (folder / GENERATION).write_text(uuid.uuid4().hex)
        except OSError as error:
            raise_storage_error("lay out", error.filename or folder, error)

    def __init__(self, folder: Path, work: Work, outputs: Sequence[TargetFile]) -> None:
        self.folder = folder
        crc = isal_zlib.crc32(
            repr([generation(folder), *((o.path, o.size) for o in outputs)]).encode()
        )
        for part in (work.copies, work.slabs):
            crc = isal_zlib.crc32(np.ascontiguousarray(part).view("u1"), crc)
        # The identity guards the meaning of unit numbers. The caller tells plans apart, by the name
        # of the staging directory.
        self.identity = crc

    def load(self, units: range) -> dict[int, np.ndarray]:
        """Returns {unit: its ranges} for the finished ones among `units`.

        If there are many units it lists the folder, since most often none of them is finished.
        """
        listed = (
            (int(name) for name in os.listdir(self.folder) if name.isdecimal())
            if len(units) > LISTED
            else units
        )
        found = ((unit, self.unit(unit)) for unit in listed if unit in units)
        return {unit: ranges for unit, ranges in found if ranges is not None}

    def unit(self, unit: int) -> np.ndarray | None:
        """Returns the ranges that a unit wrote, None if it is not finished."""
        body = self._get(f"{unit:08d}")
        return None if body is None or len(body) % RANGE.itemsize else np.frombuffer(body, RANGE)

    def write(self, unit: int, ranges: np.ndarray) -> None:
        """Stores the ranges of a finished unit, whose data must be synced before.

        The entry itself is not synced: if a power cut loses or tears it, the unit is done again.
        """
        self._put(f"{unit:08d}", ranges.tobytes())

    def sum(self, file: int) -> str | None:
        """Returns the checksum of a file, None if it is not finished, "" if none was wanted."""
        body = self._get(f"file{file:08d}")
        return None if body is None else body.decode(errors="replace")

    def write_sum(self, file: int, checksum: str) -> None:
        """Stores the checksum of a finished file."""
        self._put(f"file{file:08d}", checksum.encode())

    def _head(self, body: bytes) -> bytes:
        return self.HEAD.pack(self.MAGIC, self.identity, isal_zlib.crc32(body))

    def _get(self, name: str) -> bytes | None:
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        body = data[self.HEAD.size :]
        return body if data[: self.HEAD.size] == self._head(body) else None

    def _put(self, name: str, body: bytes) -> None:
        path = self.folder / name
        # a random name: in containers, every process may have the same id
        beside = self.folder / f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            beside.write_bytes(self._head(body) + body)
            beside.rename(path)
        except OSError as error:
            raise_storage_error("write", path, error)
