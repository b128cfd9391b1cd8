"""Deltas, applied to the tensors of an earlier call, give the tensors that a whole Sync gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import TinyModel
from tests.judge.test_live import live

pytestmark = [pytest.mark.judge, pytest.mark.newest]

SHARES = [0, 0.001, 0.02, 0.1, 1]
# share -> the most bytes that are sent, of those of a whole Sync, which does not send what all
# ranks have; a change takes 6 bytes, and an element 2
MOST = {"0": 0.035, "0.02": 0.1, "1": 2.0}
# model, sizes, rounds of all shares, keywords of Sync: in a world of 4 all but the first have
# replicas; llama has rows of padding, deepseek-v3 latent attention, experts and fp32 tensors
CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("qwen3", {"tp": 2, "pp": 2, "vpp": 2}, 2, {}),
    ("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, 2, {"bucket_bytes": "1MiB"}),
    ("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1}, 1, {}),  # some segments have the mean of all sizes
    ("llama", {"tp": 4}, 2, {"to": 0}),
    ("deepseek-v3", {"ep": 2}, 2, {}),
    ("qwen3", {"tp": 2}, 2, {"dtype": "fp32", "snapshot": True}),
]


# a hundred changes
LONG = [pytest.param(*CASES[i][:2], 20, CASES[i][3], marks=pytest.mark.slow) for i in (0, 1)]


@pytest.mark.parametrize(("case", "size", "times", "options"), [*CASES, *LONG])
def test_deltas_make_the_tensors_of_a_whole_sync(
    case: str,
    size: dict[str, Any],
    times: int,
    options: dict[str, Any],
    work: Path,
    tiny_model: TinyModel,
) -> None:
    source = tiny_model(case)
    more = {"deltas": SHARES, "times": times, "options": options}
    found = live(source, work, size, like=source, **more)
    assert len(found["wrong"]) == 1 + times * len(SHARES)
    assert not any(found["wrong"].values()), found["wrong"]
    assert not any(found["after"].values()), found["after"]
    assert max(found["seconds"].values()) < 20
    said = {
        "one_version": "  - version: ",
        "unfit": "do not fit the plan; make the Sync again\nThis is the error of rank 1.",
        "early": "a rank has stopped before it had all deltas",
        "another_base": "the deltas build on version ",
        "another": "another call of this Sync has begun before this one has come to its end",
        "old": "these are the deltas of version ",
    }
    for name, text in said.items():
        errors = found["errors"][name]
        assert all(text in error for error in errors if error) and errors[0], errors
        assert len(set(errors)) == 1 + (name == "early"), errors
    errors = found["errors"]["other_values"]
    assert "has another digest than is stated" in errors[1]
    assert all("a rank has stopped before" in errors[rank] for rank in (0, 2, 3))
    for share, most in MOST.items():
        some, full = found["sent"][share]
        assert some <= most * full, f"{share} changed: {some:,} bytes of {full:,}"


def printed(module: str) -> str:
    """Returns what a module prints in a process of its own, because Triton asks once whether it
    interprets.
    """
    pytest.importorskip("triton")
    command, root = [sys.executable, "-m", module], Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_kernels_and_torch_find_what_changed() -> None:
    assert printed("tests.helpers.interpreted").split() == ["alike"] * 21


def test_kernels_compile_for_a_device() -> None:
    # otherwise `compare` takes twice as long
    assert "compare reads 16 bytes at once" in printed("tests.helpers.compiled")
