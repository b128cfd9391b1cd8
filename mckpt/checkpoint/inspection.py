"""Collects the facts that `mckpt inspect` and `mckpt mappings check` print."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MappingError, counted
from mckpt.formats.base import Names
from mckpt.formats.hf_config import parse_config
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import hub
from mckpt.storage.staging import unfinished
from mckpt.values.dtypes import itemsize

MODEL_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_experts",
    "padded_vocab_size",
)
SHOWN = 40  # lines of tensors in the text form; --json has all


def inspect(source: Checkpoint, most: int | None = None) -> dict[str, Any]:
    """Returns format, model, sizes, iteration and stored tensors, all or the first `most`, from
    headers alone.
    """
    opened = source.opened
    out: dict[str, Any] = {"path": str(source.path), "format": source.format}
    if opened.common is not None:
        args = opened.common.args or {}
        out["iteration"] = opened.common.fields.get("iteration")
        out["unit"] = str(opened.root)
        sizes = opened.parallel().args()
        out["parallel"] = {k: v for k, v in sizes.items() if v not in (None, False)}
        out["model"] = {k: args[k] for k in MODEL_ARGS if args.get(k)} or None
    shown = opened.show(most)
    out.update(shown.facts)
    out["inexact"] = source.allowed or None
    out["mapping_file"] = source.manifest.get("mapping_file")
    out["unfinished"] = unfinished(source.root)
    # few sizes, of up to 10**5 tensors
    size = {kind: math.prod(kind[1]) * itemsize(kind[0]) for kind in shown.kinds}
    out["tensors"] = {
        key: {"shape": list(shape), "dtype": dtype, **more, "bytes": size[dtype, shape]}
        for key, dtype, shape, more in shown.tensors
    }
    out["num_tensors"] = shown.kinds.total()
    out["bytes"] = sum(n * size[kind] for kind, n in shown.kinds.items())
    return out


def text(found: dict[str, Any]) -> str:
    """Returns the result of `inspect` as text for people."""
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
    """Returns lines on the content of a family file; raises MappingError if the file is wrong."""
    family = mapping.load("hf", str(file))
    dialect = mapping.dialect_for(family)
    lines = [
        f"{file}: {len(family.rules)} rules, {len(family.dims)} dims, architectures"
        f" {', '.join(family.architectures) or 'none'}"
    ]
    unused = sorted(set(hub().tensors) - {n for r in family.rules for n in r.of})
    lines.append(f"logical tensors of other kinds of models, not used here: {len(unused)}")
    if config is None:
        return lines
    parsed = parse_config(config)
    dims = family.read(parsed, source=str(config))
    here = {n for b in family.bind(family.scope(dims)) for n in b.rule.of}
    chosen = {name: values[0] for name, values in dialect.choices.items()}
    names = Names(dialect, dims, {**chosen, "pp": 1}, Parallel())
    there = {n for b in names.bound() for n in b.rule.of}
    problems = mapping.misfits(file.name, here, "Megatron", there, dims)
    problems += list(dialect.inexact(dims).values())
    if problems:
        raise MappingError.of(f"{file} with {config} does not fit Megatron:", problems)
    named = parsed.get("architectures") or []
    if isinstance(named, list) and not set(map(str, named)) <= set(family.architectures):
        lines.append(f"{config}: has architectures {named}, which {file} does not list")
    return [*lines, f"{config}: {len(here)} logical tensors, all of which Megatron has a place for"]
