"""A small part of `python -m tests.crash`: kill -9, failing calls and power cuts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mckpt.errors import SourceError
from mckpt.storage import descriptors
from mckpt.storage.files import checksum_of
from tests.helpers.commands import run

WORDS = ("--tries", 3, "--faults", 15, "--reruns", 3, "--processes", 1)


@pytest.mark.parametrize("kind", ["kill", "fault", "power"])
def test_a_conversion_survives(kind: str) -> None:
    if kind != "kill" and not shutil.which("cc"):
        pytest.skip("needs a C compiler (cc)")
    line = [sys.executable, "-m", "tests.crash", "--kind", kind, "--only", "megatron-to-hf"]
    done = run([*line, *WORDS]).stdout
    tries, survived = done.splitlines()[2].split("|")[3:5]
    assert tries == survived and int(tries.replace(",", "")) >= 3, done


def test_a_file_that_ends_early_has_no_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest would state the checksum of a part."""
    (tmp_path / "file").write_bytes(b"1234")
    assert checksum_of(tmp_path / "file") == checksum_of(b"1234")
    monkeypatch.setattr(descriptors, "pread", lambda fd, size, at: b"")
    with pytest.raises(SourceError, match="ends after 0 of 4 bytes"):
        checksum_of(tmp_path / "file")
