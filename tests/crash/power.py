"""Power cuts: the disk states that a recorded run may leave, cut after each change.

What a filesystem may lose: bytes of a file that was not synced since, and a name (a new file, a
rename, a removal) whose directory was not synced since. Lost names may be any of those that were
not synced, in any order.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash import faults
from tests.crash.trial import STAGING, Tree, Trial

HEAD = struct.Struct("<5q")
SUBSETS = 8  # random sets of lost names for each cut
RERUNS = 40  # states of which the command is run again


@dataclass(eq=False)
class File:
    """A file: its bytes, and those of the last sync."""

    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    """A directory; only `names` of the present state are kept."""

    names: dict[str, File | Folder] = field(default_factory=dict)


@dataclass
class Change:
    """Names that a call changed: of each the directory, the name, and what is there afterwards."""

    parts: list[tuple[Folder, str, File | Folder | None]]
    synced: bool = False


def events(log: bytes) -> Iterator[tuple[str, str, str, int, int, bytes]]:
    """Yields (function, path, other path, offset, size, data) of a log of shim.c."""
    at = 0
    while at < len(log):
        function, offset, size, first, second = HEAD.unpack_from(log, at)
        at += HEAD.size
        path, to = log[at : at + first], log[at + first : at + first + second]
        at += first + second
        name, data = faults.FUNCTIONS[function], b""
        if name == "write":
            data, at = log[at : at + size], at + size
        yield name, os.fsdecode(path), os.fsdecode(to), offset, size, data


class Disk:
    """The state of a directory while a record is replayed."""

    def __init__(self, root: Path) -> None:
        # its own name is durable: without it, there is nothing to load
        self.base, self.root = str(root.parent), Folder()
        self.top = Folder({root.name: self.root})
        self.changes: list[Change] = []

    def find(self, path: str) -> tuple[Folder, str]:
        """Returns the directory and the name of a path."""
        folder, parts = self.top, path[len(self.base) :].strip("/").split("/")
        for part in parts[:-1]:
            inner = folder.names[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, parts[-1]

    def change(self, *parts: tuple[Folder, str, File | Folder | None]) -> None:
        for folder, name, node in parts:
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node
        self.changes.append(Change(list(parts)))

    def replay(self, function: str, path: str, to: str, at: int, size: int, data: bytes) -> None:
        """Does one recorded call."""
        folder, name = self.find(path)
        node = folder.names.get(name)
        if function == "open":
            if node is None:
                self.change((folder, name, File()))
            elif size and isinstance(node, File):
                node.data = b""
        elif function == "mkdir" and node is not self.root:
            self.change((folder, name, Folder()))
        elif function in ("unlink", "rmdir"):
            self.change((folder, name, None))
        elif function in ("rename", "link"):
            there, other = self.find(to)
            gone = [(folder, name, None)] if function == "rename" else []
            self.change(*gone, (there, other, node))
        elif function == "fsync" and isinstance(node, Folder):
            for change in self.changes:
                change.synced |= any(part[0] is node for part in change.parts)
        elif isinstance(node, File):
            if function == "fsync":
                node.synced = node.data
            elif function == "truncate":
                node.data = node.data[:size].ljust(size, b"\0")
            elif function == "write":
                held = bytearray(node.data.ljust(at + size, b"\0"))
                held[at : at + size] = data
                node.data = bytes(held)

    def states(self, chosen: random.Random) -> Iterator[tuple[str, Tree]]:
        """Yields what the disk may hold after a power cut now."""
        loose = [change for change in self.changes if not change.synced]
        every = {id(change) for change in loose}
        kept = [("all names are kept", every), ("no name is kept", set[int]())]
        for change in loose:
            said = "/".join(name for _, name, _ in change.parts)
            kept.append((f"only {said} is kept", {id(change)}))
            kept.append((f"only {said} is lost", every - {id(change)}))
        for _ in range(SUBSETS if len(loose) > 2 else 0):
            kept.append(("some names", {one for one in every if chosen.random() < 0.5}))
        for said, names in kept:
            yield f"{said}, unsynced bytes are lost", self._tree(names, lost=True)
        yield "all names are kept, and all bytes", self._tree(every, lost=False)

    def _tree(self, kept: set[int], lost: bool) -> Tree:
        names: dict[int, dict[str, File | Folder]] = {}
        for change in self.changes:
            if change.synced or id(change) in kept:
                for folder, name, node in change.parts:
                    inside = names.setdefault(id(folder), {})
                    if node is None:
                        inside.pop(name, None)
                    else:
                        inside[name] = node
        out: Tree = {}

        def walk(folder: Folder, start: str, depth: int) -> None:
            for name, node in names.get(id(folder), {}).items():
                if isinstance(node, File):
                    out[start + name] = node.synced if lost else node.data
                elif depth < 20:  # a rename of which a half is lost could make a circle
                    walk(node, f"{start}{name}/", depth + 1)

        walk(self.root, "", 0)
        return out


def tries(trial: Trial, reruns: int = RERUNS) -> Iterator[str | None]:
    """Cuts the power after each recorded change of the command; yields for each state of the disk
    what is wrong with it, or None.

    Of a sample of the states, the command is run again.
    """
    place, chosen = trial.place, random.Random(trial.name)
    place.clear()
    path = place.folder / "record"
    with open(path, "wb") as log:
        number = log.fileno()
        ended = place.run(trial.words, lambda: faults.plan(trial, faults.RECORD, log=number))
    assert ended.code == 0, ended.text
    disk = Disk(place.out)
    seen: dict[int, Tree] = {}
    for step, event in enumerate(events(path.read_bytes()), 1):
        disk.replay(*event)
        function, name = event[0], event[1].removeprefix(f"{place.out}/")
        for said, tree in disk.states(chosen):
            wrong = trial.wrong(tree)
            yield wrong and f"cut after change {step} ({function} {name}): {said}: {wrong}"
            seen.setdefault(hash(frozenset(tree.items())), tree)
    assert disk._tree({id(c) for c in disk.changes}, lost=False) == place.tree(False)
    # A run knows what it has put in place by its inode, which cannot be made again.
    fit = [tree for tree in seen.values() if all(STAGING in name for name in tree)]
    for tree in chosen.sample(sorted(fit, key=sorted), min(reruns, len(fit))):
        place.clear()
        for name, data in tree.items():
            (place.out / name).parent.mkdir(parents=True, exist_ok=True)
            (place.out / name).write_bytes(data)
        wrong = trial.rerun()
        yield wrong and f"the state {sorted(tree)}: {wrong}"
