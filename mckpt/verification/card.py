"""The verdict as a small YAML file, to publish with a model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.source_options import SourceOptions
from mckpt.errors import StorageError
from mckpt.storage import descriptors
from mckpt.storage.files import unreadable
from mckpt.storage.staging import STAGING
from mckpt.verification.verdict import Verdict, finite
from mckpt.version import __version__

BLOCK = 1 << 20  # bytes that one thread reads at once
MOST = 16  # numbers in a list that the card shows
HEAD = """\
# The verdict of `mckpt verify`: whether two checkpoints hold one model. `sha256` of a side is what
#     find -L . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
# prints in the directory of its checkpoint.
"""


def write(
    found: Verdict, hf: str | Path, megatron: str | Path, iteration: int | None, path: Path
) -> None:
    """Writes the card of a verdict on these two checkpoints.

    iteration: of the Megatron checkpoint; None: the one that the tracker names.
    """
    import yaml

    facts = found.facts
    card: dict[str, Any] = {
        "verdict": found.verdict,
        "reasons": found.reasons,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "mckpt": __version__,
        "checkpoints": {
            "hf": _side(Checkpoint.open(hf)),
            "megatron": _side(Checkpoint.open(megatron, SourceOptions(iteration=iteration))),
        },
    }
    for key in ("sizes", "ranks", "device", "dtype", "impl", "versions"):
        if key in facts:
            card[key] = facts[key]
    if values := facts.get("values"):
        card["values"] = {
            name: values[name] for name in ("tensors_equal", "equal_after_cast", "bytes_compared")
        }
    if logits := facts.get("logits"):
        card["logits"] = {dtype: _plain(measured) for dtype, measured in logits.items()}
    for key in ("tokens", "coverage", "training"):
        if key in facts:
            card[key] = _plain(facts[key])
    text = HEAD + yaml.safe_dump(finite(card), sort_keys=False, width=100)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{path}: cannot be written: {e.strerror or e}") from e


def _plain(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are single numbers, words or small tables of them."""
    out: dict[str, Any] = {}
    for key, value in measured.items():
        if isinstance(value, dict):
            out[key] = _plain(value)
        elif isinstance(value, (bool, int, float, str)) or value is None:
            out[key] = value
        elif isinstance(value, list) and len(value) <= MOST:
            out |= {key: value} if all(isinstance(v, (int, float)) for v in value) else {}
    return out


def _side(source: Checkpoint) -> dict[str, Any]:
    """Returns what identifies one checkpoint: its name, format, files and their hash."""
    root = source.opened.root
    out: dict[str, Any] = {"name": source.path.resolve().name, "format": source.format}
    if source.is_megatron:
        out |= {"directory": root.name, "parallel": str(source.parallel)}
    return {**out, **fingerprint(root)}


def fingerprint(root: Path) -> dict[str, Any]:
    """Returns the number of files of a directory, their bytes, and the sha256 of the lines that
    sha256sum prints for them, sorted by name.
    """
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(STAGING)]
        paths += [Path(folder) / name for name in names]
    files = (p for p in paths if p.is_file())
    paths = sorted(files, key=lambda p: os.fsencode(f"./{p.relative_to(root)}"))
    with ThreadPoolExecutor(os.cpu_count() or 1, "hash") as pool:
        sums = list(pool.map(_sha256, paths))
    lines = "".join(f"{s}  ./{p.relative_to(root)}\n" for s, p in zip(sums, paths, strict=True))
    return {
        "files": len(paths),
        "bytes": sum(p.stat().st_size for p in paths),
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        for block in descriptors.blocks(path, BLOCK):
            digest.update(block)
    except OSError as e:
        raise unreadable(path, e) from e
    return digest.hexdigest()
