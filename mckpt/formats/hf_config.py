"""The files of a Hugging Face directory beside weights: config.json, tokenizer, templates, code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mckpt.errors import SourceError
from mckpt.storage.files import read_file

CONFIG = "config.json"
QUANTISED = "quantization_config"  # the key of config.json
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def read_config(root: Path) -> dict[str, Any]:
    """Returns the config.json of a directory."""
    if not (root / CONFIG).is_file():
        if not root.exists():
            raise SourceError(f"{root}: no such directory")
        raise SourceError(
            f"{root}: config.json is missing; download it, because it describes the tensors"
        )
    return parse_config(root / CONFIG)


def parse_config(path: Path) -> dict[str, Any]:
    """Returns the config.json at any path."""
    try:
        config = json.loads(read_file(path, 1 << 24))
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: holds {type(config).__name__}, not an object")
    return config


def side_files(root: Path) -> list[str]:
    """Returns every file that is neither weights, nor config.json, nor hidden, relative to the
    directory.
    """
    out = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(d for d in inner if not d.startswith("."))
        for name in sorted(names):
            relative = str((Path(folder) / name).relative_to(root))
            if (
                not name.startswith(".")
                and not name.endswith(WEIGHTS)
                and relative not in (CONFIG, "mckpt.json")
            ):
                out.append(relative)
    return out


def quantised_by(config: Mapping[str, Any]) -> Any:
    """Returns the quantisation that a config.json describes: at the top, or in the config of one
    of the model's parts. None if there is none.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return next((part[QUANTISED] for part in parts if part.get(QUANTISED)), None)


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json without any description of a quantisation."""
    kept = {key: value for key, value in config.items() if key != QUANTISED}
    return {
        key: {k: v for k, v in value.items() if k != QUANTISED}
        if isinstance(value, dict)
        else value
        for key, value in kept.items()
    }
