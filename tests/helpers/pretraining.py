"""Runs a program of Megatron-LM, each rank in a fork: a program of tests/helpers/session.py. The
only case has `program`: the path of the program, and its arguments.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from mckpt.trainer import forked


def prepare() -> None:
    for needed in (*forked.NEEDED, "mckpt.live", "megatron.training.training"):
        importlib.import_module(needed)


def run(cases: list[dict[str, Any]], out: Path) -> int:
    (case,) = cases
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = case["program"]
    return forked.fork_ranks(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
