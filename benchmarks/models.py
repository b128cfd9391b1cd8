"""Models to measure with: real shapes and made-up weights.

All cores write the weights, or the weights are holes and only the headers are written.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARD_BYTES = 1_000_000_000
BLOCK = 8 << 20  # elements drawn at a time
Config = dict[str, Any]


class Tensor(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


def config(name: str) -> Config:
    """Reads a published config.json of fixtures/configs."""
    found: Config = json.loads((ROOT / "fixtures" / "configs" / f"{name}.json").read_text())
    return found


def mixture(num_layers: int, num_experts: int, **sizes: int) -> Config:
    """Returns the config of a mixture of experts of any geometry, of a family that mckpt knows."""
    counts = {"num_hidden_layers": num_layers, "num_experts": num_experts}
    return config("qwen3-30b-a3b") | counts | sizes


def tensors(c: Config) -> dict[str, Tensor]:
    """Returns every tensor as published: in bf16, or if the config has fp8 blocks, the matrices of
    the layers in fp8 with a scale for each block.
    """
    from tests.helpers import tiny

    block = (c.get("quantization_config") or {}).get("weight_block_size")
    # DeepSeek-V3's fp8 form keeps these in bf16
    whole = ("embed_tokens.weight", "head.weight", "mlp.gate.weight", "eh_proj.weight")
    out: dict[str, Tensor] = {}
    for name, shape in tiny.shapes(c).items():
        if name.endswith("e_score_correction_bias"):
            out[name] = Tensor("F32", shape, 4)
        elif block is None or len(shape) == 1 or name.endswith(whole):
            out[name] = Tensor("BF16", shape, 2)
        else:
            scales = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
            out[name] = Tensor("F8_E4M3", shape, 1)
            out[f"{name}_scale_inv"] = Tensor("F32", scales, 4)
    return out


def num_bytes(c: Config) -> int:
    """Returns the bytes of all weights."""
    return sum(t.nbytes for t in tensors(c).values())


def write(c: Config, directory: Path, sparse: bool = False, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a Hugging Face directory in files of at most `shard_bytes`.

    With `sparse` weights are holes, which read as zeros and take no room.
    """
    directory.mkdir(parents=True)
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors(c).items():
        if size + tensor.nbytes > shard_bytes and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    weight_map, work = {}, []
    for i, held in enumerate(files, 1):
        path = directory / f"model-{i:05d}-of-{len(files):05d}.safetensors"
        start, end = _header(path, held)
        weight_map.update(dict.fromkeys(held, path.name))
        work += [(path, at, min(end, at + 2 * BLOCK)) for at in range(start, end, 2 * BLOCK)]
    if not sparse:
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.starmap(_fill, work, chunksize=8)
    index = {"metadata": {"total_size": num_bytes(c)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps({**c, "torch_dtype": "bfloat16"}))
    return directory


def write_adapter(c: Config, directory: Path, rank: int = 16) -> Path:
    """Writes an adapter of PEFT of all linear layers of a model, in fp32."""
    from tests.helpers import lora

    weights = {name: t for name, t in tensors(c).items() if len(t.shape) == 2}
    modules = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]
    return lora.save(directory, lora.factors(weights, modules, rank), r=rank)


def _header(path: Path, held: Mapping[str, Tensor]) -> tuple[int, int]:
    """Writes a header in the form and order of the safetensors library, and a hole for the data.
    Returns where the data begin and end.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in sorted(held.items(), key=lambda item: (-item[1].itemsize, item[0])):
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    return 8 + len(text), 8 + len(text) + at


def _fill(path: Path, start: int, end: int) -> None:
    """Writes random bits with the exponents of weights: values of 0.008 to 0.03."""
    rng = np.random.default_rng([start, len(path.name), int(path.name[6:11])])
    bits = rng.integers(0, 1 << 16, (end - start) // 2, dtype="u2")
    bits &= 0x80FF
    bits |= 0x3C00
    with path.open("r+b") as f:
        f.seek(start)
        f.write(bits.data)
