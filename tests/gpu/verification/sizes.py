"""Parallel sizes as short names such as "tp2 pp2"."""

from __future__ import annotations

from typing import Any

import mckpt
from mckpt import launching

Sizes = dict[str, int]

# Transformer Engine alone has context parallelism, and its kernels for it compute in bf16 only.
CP: Sizes = {"cp": 2}


def name(sizes: Sizes, ranks: int = 0) -> str:
    """Returns such as "tp2 pp2"; with the number of ranks the data-parallel size is added."""
    replicas = {"dp": ranks // world(sizes)} if ranks > world(sizes) else {}
    return " ".join(f"{k}{v}" for k, v in (sizes | replicas).items()) or "tp1"


def world(sizes: Sizes) -> int:
    """Returns the number of ranks that hold the model once."""
    whole = {"tp": 1, "pp": 1, "ep": 1, "cp": 1} | sizes
    return launching.world({"etp": whole["tp"]} | whole)


def parallel(sizes: Sizes) -> mckpt.Parallel:
    """Returns the sizes that decide how a checkpoint is stored: all but cp."""
    stored: dict[str, Any] = {k: v for k, v in sizes.items() if k != "cp"}
    return mckpt.Parallel(**stored)
