"""A small part of `python -m tests.crash`: kill -9, failing calls and power cuts."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.crash.power import Disk
from tests.door import run

WORDS = ("--tries", 3, "--faults", 15, "--reruns", 3, "--processes", 1)


@pytest.mark.parametrize("kind", ["kill", "fault", "power"])
def test_a_conversion_survives(kind: str) -> None:
    if kind != "kill" and not shutil.which("cc"):
        pytest.skip("needs a C compiler (cc)")
    line = [sys.executable, "-m", "tests.crash", "--kind", kind, "--only", "megatron-to-hf"]
    done = run([*line, *WORDS]).stdout
    tries, survived = done.splitlines()[2].split("|")[3:5]
    assert tries == survived and int(tries.replace(",", "")) >= 3, done


def test_a_power_cut_loses_what_was_not_synced() -> None:
    """The replay itself: a file that was written, synced, renamed, and made durable by its
    directory's sync.
    """
    disk = Disk(Path("/d/out"))

    def lost(function: str, path: str, to: str = "", data: bytes = b"") -> set[bytes | None]:
        disk.replay(function, f"/d/{path}", f"/d/{to}", 0, len(data), data)
        return {tree.get("b") for _, tree in disk.states(random.Random(0))}

    assert lost("open", "out/a") == {None}
    lost("write", "out/a", data=b"12")
    assert lost("rename", "out/a", "out/b") == {None, b"", b"12"}
    assert lost("fsync", "out/b") == {None, b"12"}
    assert lost("fsync", "out") == {b"12"}
    assert lost("write", "out/b", data=b"34") == {b"12", b"34"}
