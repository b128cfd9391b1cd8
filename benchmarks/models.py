"""Models to measure with: real shapes, made-up weights. Written by all cores at once, or as files that are holes but for their headers."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARD_BYTES = 1_000_000_000
BLOCK = 8 << 20  # elements drawn at a time
Config = dict[str, Any]


def config(name: str) -> Config:
    """A published config.json of fixtures/configs."""
    found: Config = json.loads((ROOT / "fixtures" / "configs" / f"{name}.json").read_text())
    return found


def mixture(num_layers: int, num_dense: int, num_experts: int, **sizes: int) -> Config:
    """A mixture of experts of any geometry, as a family that mckpt knows; the first `num_dense` layers have none."""
    return {**config("qwen3-30b-a3b"), "num_hidden_layers": num_layers, "num_experts": num_experts,
            "mlp_only_layers": list(range(num_dense)), **sizes}  # fmt: skip


# DeepSeek-V3's and Kimi-K2's layers, experts and widths; their attention is another, of about as many tensors
MIXTURE_671B = mixture(61, 3, 256, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128,
                       num_key_value_heads=8, head_dim=128, vocab_size=129280, num_experts_per_tok=8)  # fmt: skip
MIXTURE_1T = {**MIXTURE_671B, "num_experts": 384, "mlp_only_layers": [0], "num_attention_heads": 64, "vocab_size": 163840}


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    from tests import tiny

    return tiny.shapes(c)


def num_bytes(c: Config) -> int:
    """Of all weights in bf16."""
    return 2 * sum(map(math.prod, shapes(c).values()))


def write(c: Config, directory: Path, sparse: bool = False, shard_bytes: int = SHARD_BYTES) -> Path:
    """A Hugging Face directory in bf16, in files of `shard_bytes`. `sparse`: weights are holes, which read as zeros and take no room."""
    directory.mkdir(parents=True)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(c).items():
        nbytes = 2 * math.prod(shape)
        if size + nbytes > shard_bytes and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += nbytes
    weight_map, work = {}, []
    for i, held in enumerate(files, 1):
        path = directory / f"model-{i:05d}-of-{len(files):05d}.safetensors"
        start, end = _header(path, held)
        weight_map.update(dict.fromkeys(held, path.name))
        work += [(path, at, min(end, at + 2 * BLOCK)) for at in range(start, end, 2 * BLOCK)]
    if not sparse:
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.starmap(_fill, work, chunksize=8)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": num_bytes(c)}, "weight_map": weight_map})
    )
    (directory / "config.json").write_text(json.dumps({**c, "torch_dtype": "bfloat16"}))
    return directory


def _header(path: Path, held: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Writes the header of a file that ends as a hole; where its data begins and ends."""
    header, at = {}, 0
    for name, shape in held.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    return 8 + len(text), 8 + len(text) + at


def _fill(path: Path, start: int, end: int) -> None:
    """Random bits with the exponents of weights: values of 0.008 to 0.03."""
    rng = np.random.default_rng([start, len(path.name), int(path.name[6:11])])
    bits = rng.integers(0, 1 << 16, (end - start) // 2, dtype="u2")
    bits &= 0x80FF
    bits |= 0x3C00
    with path.open("r+b") as f:
        f.seek(start)
        f.write(bits.data)
