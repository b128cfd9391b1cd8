"""vLLM's own engine, on the CPU, takes the updates of a live model and generates the right tokens.

VLLM_PYTHON is the Python of an environment with vLLM, which CONTRIBUTING.md describes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.tiny import TinyModel
from tests.judge.test_live import live

VLLM = os.environ.get("VLLM_PYTHON", "")
pytestmark = [pytest.mark.judge, pytest.mark.newest, pytest.mark.slow]
STEPS = ["0-full", "1-delta", "2-delta", "3-full"]


@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllm_generates_the_tokens_of_each_step(work: Path, tiny_model: TinyModel) -> None:
    source, out = tiny_model("qwen3"), work / "updates"
    live(source, work, {"tp": 2, "pp": 2}, like=source, updates=out, steps=STEPS)
    for step in STEPS:
        shutil.copy(source / "config.json", out / step)
    command = [VLLM, "-m", "tests.helpers.vllm_generating", str(out), str(work / "tokens.json")]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((work / "tokens.json").read_text())
    given = [found["drawn"]["vllm"], *(found[step]["vllm"] for step in STEPS)]
    assert len({json.dumps(tokens) for tokens in given}) == 1 + len(STEPS), (
        "an update changes nothing"
    )
    for number, step in enumerate(STEPS):
        assert found[step]["vllm"] == found[step]["right"], step
        assert found[step]["version"] == number + 1
