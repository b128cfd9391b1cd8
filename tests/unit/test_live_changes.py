"""The kernels that find changes on a device, run by Triton's interpreter, beside torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_find_what_torch_finds() -> None:
    pytest.importorskip("triton")
    # by itself, because Triton asks once whether it interprets
    command = [sys.executable, "-m", "tests.helpers.interpreted"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["alike"] * 12
