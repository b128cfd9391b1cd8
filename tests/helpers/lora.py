"""Adapters (LoRA) of PEFT with random factors, and what numpy makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a Hugging Face directory."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def save(directory: Path, stored: Mapping[str, np.ndarray], **config: Any) -> Path:
    """Writes the directory of an adapter. `config` has the keys of adapter_config.json that differ
    from those of a plain LoRA of rank 4.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(stored), directory / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], **config}
    (directory / "adapter_config.json").write_text(json.dumps(whole, indent=2) + "\n")
    return directory


def matrices(weights: Mapping[str, np.ndarray], but: Iterable[str] = ("norm",)) -> list[str]:
    """Returns the modules of all matrices whose names contain none of `but`."""
    return [
        key.removesuffix(".weight")
        for key, weight in weights.items()
        if key.endswith(".weight") and weight.ndim == 2 and not any(word in key for word in but)
    ]


def factors(
    weights: Mapping[str, np.ndarray], modules: Iterable[str], rank: int = 4, seed: int = 0
) -> dict[str, np.ndarray]:
    """Returns random factors for these modules, by their names in a file of PEFT."""
    drawn = np.random.RandomState(seed)
    found = {}
    for module in modules:
        out, into = weights[f"{module}.weight"].shape
        found[f"{PREFIX}{module}.lora_A.weight"] = drawn.randn(rank, into).astype("f4")
        found[f"{PREFIX}{module}.lora_B.weight"] = drawn.randn(out, rank).astype("f4") / 8
    return found


def product(stored: Mapping[str, np.ndarray], module: str, scale: float) -> np.ndarray:
    """Returns the product that an adapter adds to a weight, in float64."""
    a, b = (stored[f"{PREFIX}{module}.lora_{x}.weight"].astype("f8") for x in "AB")
    return np.asarray(scale * (b @ a))


def with_magnitudes(stored: dict[str, np.ndarray], modules: Iterable[str]) -> dict[str, np.ndarray]:
    """Adds random magnitudes (DoRA) to the factors of modules, and returns all of them."""
    drawn = np.random.RandomState(9)
    for module in modules:
        rows = stored[f"{PREFIX}{module}.lora_B.weight"].shape[0]
        stored[f"{PREFIX}{module}.lora_magnitude_vector"] = 1 + drawn.rand(rows).astype("f4")
    return stored


def scaled(stored: Mapping[str, np.ndarray], module: str, sums: np.ndarray) -> np.ndarray:
    """Returns sums [out, in] whose rows have the lengths of a module's magnitudes, in float64."""
    magnitudes = stored[f"{PREFIX}{module}.lora_magnitude_vector"].astype("f8")
    return np.asarray(sums * (magnitudes / np.sqrt((sums**2).sum(1)))[:, None])


def apart(got: np.ndarray, weight: np.ndarray, added: np.ndarray) -> float:
    """Returns the largest difference of a merged weight from the exact sum, less the error of sums
    in float32, in units of the last place of the weight's dtype. One rounding makes it 0.5.
    """
    exact = weight.astype("f8") + added
    digits = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[got.dtype.name]
    place = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - digits + 1)
    least = 2.0**-20 * (np.abs(weight.astype("f8")) + np.abs(added).max())
    return float(np.max((np.abs(got.astype("f8") - exact) - least) / place))


def bytes_of(directory: Path) -> bytes:
    """Returns the weights file of an adapter."""
    return (directory / "adapter_model.safetensors").read_bytes()


def same(one: Path, other: Path) -> bool:
    """Returns whether two adapters have the same factors."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def remove(directory: Path) -> None:
    """Removes a directory."""
    shutil.rmtree(directory)
