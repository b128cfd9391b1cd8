"""`mckpt verify` with Transformer Engine on GPUs, of a tiny model for each mechanism of a family:

    python tests/gpu/families.py WORK [CASE ...]

transformers makes the models of fixtures/families, mckpt converts each to `torch_dist`, and
verifies it in fp32 with layers of Transformer Engine at tensor-parallel size 2. It prints a line of
the table in docs/gpu-checks.md for each, and keeps the verdicts in WORK.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.verification.cases import ENVIRONMENT
from tests.helpers import made_models

AT_ONCE = 6
# model, dialect, and the mechanism for which it stands
CASES = (
    ("qwen3_next", "hybrid", "gated delta net, experts"),
    ("qwen3_5", "gpt", "gated delta net"),
    ("qwen3_5_moe", "hybrid", "gated delta net, experts"),
    ("gpt_oss", "gpt", "sinks, experts with biases"),
    ("gpt_oss", "hybrid", "sinks, experts with biases"),
    ("deepseek_v32", "gpt", "indexer"),
    ("glm_moe_dsa", "hybrid", "indexer"),
    ("nemotron_h", "hybrid", "Mamba-2"),
    ("nemotron_h_latent", "hybrid", "Mamba-2, experts in a latent"),
    ("mamba2", "hybrid", "Mamba-2"),
    ("qwen2_5_vl", "gpt", "vision tower"),
    ("qwen3_vl_moe", "gpt", "vision tower, stacked experts"),
    ("gpt2", "gpt", "learned positions"),
    ("mistral_window", "gpt", "window of all layers"),
    ("nemotron", "gpt", "norms that add 1"),
    ("granite_residual_1", "gpt", "multipliers"),
    ("qwen2_moe", "gpt", "gated shared expert"),
    ("llama4", "gpt", "experts with scaled input, layers without rope"),
    ("glm", "gpt", "rope of neighbours"),
    ("deepseek_v2", "gpt", "groups of experts"),
)


def main(work: Path, wanted: list[str]) -> int:
    work.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES if not wanted or case[0] in wanted]
    made_models.make(sorted({case[0] for case in chosen}), work / "hf")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        passed = list(pool.map(lambda case: verify(work, *case), chosen))
    return 0 if all(passed) else 1


def verify(work: Path, case: str, dialect: str, mechanism: str) -> bool:
    """Converts and verifies one model; prints its line and returns whether it passes."""
    began, name = time.monotonic(), f"{case}-{dialect}"
    hf, to, size = work / "hf" / case, work / name, ["--tp", "2", "--etp", "1"]
    made = mckpt("hf-to-megatron", hf, to, "--dialect", dialect, "--overwrite", *size)
    sizes = size if "expert" in json.dumps(made_models.config(case)) else size[:2]
    done = (
        made
        if made.returncode
        else mckpt("verify", hf, to, *sizes, "--transformer-impl", "transformer_engine", "--json")
    )
    (work / f"{name}.json").write_text(done.stdout)
    (work / f"{name}.log").write_text(done.stderr)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
        fp32 = found["logits"]["float32"]
        verdict = ": ".join([found["verdict"], *found["reasons"]])
        said = f"{verdict} | {fp32['max_abs']:.1e} | {fp32['tolerance']:.1e}"
    except (ValueError, KeyError):
        said = f"exit {done.returncode}: {done.stderr.strip()[-300:]} | |".replace("\n", " ")
    took = time.monotonic() - began
    print(f"| {case} | {dialect} | {mechanism} | {said} | {took:.0f} |", flush=True)
    return done.returncode == 0


def mckpt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mckpt", *map(str, words)]
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
