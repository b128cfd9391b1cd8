"""Two steps that cases of several commands take: run an mckpt command, and verify checkpoints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mckpt.errors import MckptError
from mckpt.verification import levels
from tests.gpu.verification.cases import ERROR_SHOWN, Json

TE, LOCAL = "transformer_engine", "local"
ALLOW = ("rope_factor", "sliding_window")
KEPT = ("verdict", "reasons", "where", "dtype", "impl", "ranks", "versions", "tokens", "logits")


def cli(*arguments: Any) -> float:
    """Runs `mckpt ARGUMENTS` in a process of its own; returns its seconds."""
    started = time.perf_counter()
    words = list(map(str, arguments))
    done = subprocess.run([sys.executable, "-m", "mckpt", *words], capture_output=True, text=True)
    if done.returncode:
        error = done.stderr[-ERROR_SHOWN:]
        raise MckptError(f"mckpt {' '.join(words)} ended with {done.returncode}: {error}")
    return time.perf_counter() - started


def verdicts(hf: str, checkpoints: dict[str, Path], job: Json) -> Json:
    """Verifies all checkpoints in one launch; returns format -> the facts that the pages need of
    it.
    """
    options = levels.VerifyOptions(
        device=job["device"],
        transformer_impl=job["impl"],
        timeout_s=job.get("timeout_s", 120),
        **job["sizes"],
    )
    found = levels.verify_all(hf, list(checkpoints.values()), options)
    return {form: facts(v.json()) for form, v in zip(checkpoints, found, strict=True)}


def facts(verdict: Json) -> Json:
    out = {key: verdict[key] for key in KEPT if key in verdict}
    if verdict["verdict"] != "pass":
        out["points"] = verdict.get("points")
    return out
