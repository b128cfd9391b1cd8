"""Makes models with random weights that are large enough to measure with, and still run."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from tests.helpers import tiny

Config = dict[str, Any]
CHUNK = 1 << 22  # elements that one process draws at once
FILE_BYTES = 2_000_000_000
TO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "w2.weight")


def make_model(config: Config, directory: Path) -> tuple[int, int]:
    """Writes a Hugging Face directory in bf16 on all cores; returns (parameters, bytes).

    The standard deviations are those of transformers' initialisation: 0.02, and 0.02 / sqrt(2
    layers) for weights whose product is added to the residual stream. Norms are 1 + 0.1 N, so that
    two exchanged norms show.
    """
    shutil.rmtree(directory, ignore_errors=True)
    models.write(config, directory, sparse=True, shard_bytes=FILE_BYTES)
    tasks = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                for first in range(0, (end - start) // 2, CHUNK):
                    count = min(CHUNK, (end - start) // 2 - first)
                    at = 8 + size + start + 2 * first
                    tasks.append((path, at, name, first, count, config["num_hidden_layers"]))
    processes = len(os.sched_getaffinity(0)) if len(tasks) > 8 else 1
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pool.starmap(draw, tasks)
    return num_parameters(config), sum(path.stat().st_size for path in directory.iterdir())


def draw(path: Path, at: int, name: str, first: int, count: int, num_layers: int) -> None:
    """Writes one chunk of a tensor. Its values depend on the tensor's name and `first` alone."""
    random = np.random.default_rng([zlib.crc32(name.encode()), first])
    values = random.standard_normal(count, np.float32)
    if name.endswith("norm.weight"):
        values = 1 + np.float32(0.1) * values
    elif name.endswith(TO_RESIDUAL):
        values *= np.float32(0.02 / math.sqrt(2 * num_layers))
    else:
        values *= np.float32(0.02)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(values.astype(tiny.DTYPES["bfloat16"][1]).tobytes())


def num_parameters(config: Config) -> int:
    return sum(map(math.prod, tiny.shapes(config).values()))


def shrunk(config: Config, by: int) -> Config:
    """Returns the config with its widths divided by `by`, for rehearsals."""
    widths = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    return {key: value // by if key in widths else value for key, value in config.items()}
