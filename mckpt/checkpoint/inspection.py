"""What `mckpt inspect` and `mckpt mappings check` say."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import DIALECT, Checkpoint
from mckpt.errors import MappingError, counted
from mckpt.formats import hf
from mckpt.formats.megatron import torch_dist
from mckpt.mapping import GIVEN, hub
from mckpt.storage.staging import unfinished
from mckpt.values.dtypes import itemsize

SHOWN = 40  # lines of tensors in the text form; --json has all


def inspect(source: Checkpoint, most: int | None = None) -> dict[str, Any]:
    """Format, model, sizes, iteration and stored tensors, every one or the first `most`, from
    headers alone.
    """
    stored = source.stored
    out: dict[str, Any] = {"path": str(source.path), "format": stored.format}
    # key, dtype, shape, and what else is said
    rows: list[tuple[str, str, tuple[int, ...], dict[str, Any]]]
    # how many of each dtype and shape: few, of up to 10**5 tensors
    kinds: Counter[tuple[str, tuple[int, ...]]] = Counter()
    if isinstance(stored, hf.Checkpoint):
        config = stored.config if (source.path / "config.json").is_file() else {}
        out["model"] = ", ".join(config.get("architectures") or []) or None
        out["files"] = len(stored.files)
        out["problems"] = stored.problems
        shown = (
            (key, stored.entries.entry(row)) for row, key in enumerate(stored.entries.names[:most])
        )
        rows = [(key, e.dtype, e.shape, {}) for key, e in shown]
        for kind, n in Counter(stored.entries.columns.kind).items():
            kinds[stored.entries.kinds[kind][:2]] += n
    else:
        args = stored.common.args or {}
        out["iteration"] = stored.common.fields.get("iteration")
        out["unit"] = str(stored.root)
        out["parallel"] = {
            k: v for k, v in stored.parallel().args().items() if v not in (None, False)
        }
        out["model"] = {
            k: args[k]
            for k in (
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "num_experts",
                "padded_vocab_size",
            )
            if args.get(k)
        } or None
        if isinstance(stored, torch_dist.Checkpoint):
            out["files"] = len(stored.files)
            out["objects"] = len(stored.metadata.objects)
            rows = [
                (k, dtype, size, {"chunks": len(chunks)})
                for k, (dtype, size, chunks) in stored.metadata.tensors.items()
            ]
        else:
            out["files"] = len(stored.directories)
            rows = [(k, e.dtype, e.shape, {}) for k, e in stored.first_rank_tensors().items()]
            out["shown"] = (
                f"tensors of {stored.directories[0]}, one of {len(stored.directories)} ranks"
            )
    out["inexact"] = source.allowed or None
    out["mapping_file"] = source.manifest.get("mapping_file")
    out["unfinished"] = unfinished(source.root)
    if not isinstance(stored, hf.Checkpoint):
        kinds.update((dtype, shape) for _, dtype, shape, _ in rows)
    size = {(dtype, shape): math.prod(shape) * itemsize(dtype) for dtype, shape in kinds}
    out["tensors"] = {
        k: {"shape": list(shape), "dtype": dtype, **more, "bytes": size[dtype, shape]}
        for k, dtype, shape, more in rows[:most]
    }
    out["num_tensors"], out["bytes"] = (
        kinds.total(),
        sum(n * size[kind] for kind, n in kinds.items()),
    )
    return out


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{k}: {_plainly(v)}"
        for k, v in found.items()
        if k not in ("tensors", "problems", "inexact") and v is not None
    ]
    lines += [f"inexact: {why}" for why in (found.get("inexact") or {}).values()]
    lines += [f"problem: {p}" for p in found.get("problems", ())]
    rows = list(found["tensors"].items())[:SHOWN]
    lines += [
        f"  {k}  {t['dtype']} {t['shape']}"
        + (f" in {counted(t['chunks'], 'chunk')}" if "chunks" in t else "")
        for k, t in rows
    ]
    if found["num_tensors"] > len(rows):
        lines.append(f"  and {found['num_tensors'] - len(rows):,} more; --json lists all")
    return "\n".join(lines)


def _plainly(value: Any) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def check_mapping(file: Path, config: Path | None) -> list[str]:
    """Lines that say what a family file holds; MappingError where it is wrong."""
    family = mapping.load("hf", str(file))
    lines = [
        f"{file}: {len(family.rules)} rules, {len(family.dims)} dims, architectures"
        f" {', '.join(family.architectures) or 'none'}"
    ]
    unused = sorted(set(hub().tensors) - {n for r in family.rules for n in r.of})
    lines.append(f"logical tensors it has no rule for: {', '.join(unused) or 'none'}")
    if config is None:
        return lines
    dims = family.read(hf.parse_config(config), source=str(config))
    dialect = mapping.load("megatron", DIALECT)
    here = {n for b in family.bind(family.scope(dims)) for n in b.rule.of}
    chosen = {
        "container": "torch_dist",
        "transformer_impl": "transformer_engine",
        "experts": "grouped",
        "layers": "per_layer",
        "pp": 1,
    }
    there = {n for b in dialect.bind(dialect.scope(dims, **chosen)) for n in b.rule.of}
    problems = mapping.misfits(file.name, here, "Megatron", there, dims)
    problems += list(dialect.inexact(dims, GIVEN).values())
    if problems:
        raise MappingError.of(f"{file} with {config} does not fit Megatron:", problems)
    return [*lines, f"{config}: {len(here)} logical tensors, all of which Megatron has a place for"]
