"""Collects the facts that `mckpt inspect` and `mckpt mappings check` print."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MappingError, MckptError, SourceError, counted
from mckpt.formats import carried, places
from mckpt.formats.base import Names
from mckpt.formats.hf_config import CONFIG, parse_config, read_config
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.mapping.rule import Bound
from mckpt.options import SourceOptions
from mckpt.storage.staging import unfinished
from mckpt.values.dtypes import itemsize

MODEL_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_experts",
    "padded_vocab_size",
)
# labels in the text form for keys of the JSON
LABELS = {
    "unit": "directory",
    "files": "files with weights",
    "objects": "entries that are not tensors",
    "num_logical": "logical tensors",
    "num_states": "logical tensors that are states of the optimizer",
    "num_tensors": "stored tensors",
    "bytes": "bytes of stored tensors",
    "mapping_file": "mapping file",
}
SHOWN = 40  # lines of tensors in the text form; --json has all


def inspect(source: Checkpoint, most: int | None = None) -> dict[str, Any]:
    """Returns format, model, sizes, iteration, the number of logical tensors, and the stored ones,
    all or the first `most`, from headers alone.
    """
    opened = source.opened
    out: dict[str, Any] = {"path": str(source.path), "format": source.format}
    if source.files.common is not None:
        args = source.files.common.args or {}
        out["iteration"] = source.files.common.fields.get("iteration")
        out["unit"] = str(opened.root)
        sizes = opened.parallel().args()
        out["parallel"] = {k: v for k, v in sizes.items() if v not in (None, False)}
        out["model"] = {k: args[k] for k in MODEL_ARGS if args.get(k)} or None
        out["carried"] = carried.shown(source.files.hf_directory)
    shown = opened.show(most)
    out.update(shown.facts)
    out["inexact"] = source.files.inexact or None
    out["mapping_file"] = source.files.manifest.get("mapping_file")
    out["unfinished"] = unfinished(source.files.root)
    # few sizes, of up to 10**5 tensors
    size = {kind: math.prod(kind[1]) * itemsize(kind[0]) for kind in shown.kinds}
    out["tensors"] = {
        key: {"shape": list(shape), "dtype": dtype, **more, "bytes": size[dtype, shape]}
        for key, dtype, shape, more in shown.tensors
    }
    out["num_logical"], out["num_states"] = _num_logical(source)
    out["num_tensors"] = shown.kinds.total()
    out["bytes"] = sum(n * size[kind] for kind, n in shown.kinds.items())
    return out


def _num_logical(source: Checkpoint) -> tuple[int | None, int | None]:
    """Returns the number of logical tensors of a Megatron checkpoint, and of those among them that
    are states of the optimizer. None: there are none, or mckpt cannot name them, because it does
    not know the model or the checkpoint is damaged.
    """
    count, states = None, None
    if not source.is_megatron:  # stores them as they are, and is shown without reading a family
        return count, states
    with suppress(MckptError):
        count = len(source)
        if source.optimizer is not None:
            states = source.optimizer.layout.num_tensors
            count += states
    return count, states


def lines(facts: dict[str, Any]) -> list[str]:
    """Returns the result of `inspect` as lines for people."""
    out = [
        f"{LABELS.get(k, k)}: {f'{v:,}' if k == 'bytes' else _plainly(v)}"
        for k, v in facts.items()
        if k not in ("tensors", "problems", "inexact") and v is not None
    ]
    out += [f"inexact: {why}" for why in (facts.get("inexact") or {}).values()]
    out += [f"problem: {p}" for p in facts.get("problems", ())]
    rows = list(facts["tensors"].items())[:SHOWN]
    out += [
        f"  {k}  {t['dtype']} {t['shape']}"
        + (f" in {counted(t['chunks'], 'chunk')}" if "chunks" in t else "")
        for k, t in rows
    ]
    if facts["num_tensors"] > len(rows):
        out.append(f"  and {facts['num_tensors'] - len(rows):,} more; --json lists all")
    return out


def _plainly(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


def stored_model(directory: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Returns the config.json of a Hugging Face directory, and the shape of every stored tensor.

    Raises SourceError if the directory is not a Hugging Face checkpoint.
    """
    directory = places.local(directory)
    format = formats.detect(directory, megatron=False)
    if format is None:
        raise SourceError(f"{directory}: is not a Hugging Face directory: it has no weights")
    shown = format.open(directory).show(None)
    return read_config(directory), {key: shape for key, _, shape, _ in shown.tensors}


def check_mapping(file: Path, config: Path | None, model: Path | None = None) -> list[str]:
    """Returns lines that describe a family file, and the model of a config.json or of a directory.

    Raises MappingError if they do not fit.
    """
    family = mapping.load("hf", str(file))
    lines = [
        f"{file}: {len(family.rules)} rules, {len(family.dims)} dims, architectures"
        f" {', '.join(family.architectures) or 'none'}"
    ]
    if model is not None:
        model = places.local(model)
        config = model / CONFIG
        source = Checkpoint.open(model, SourceOptions(mapping=str(file)))
        num = source.layout.num_tensors
        lines.append(f"{model}: every stored tensor has a rule, {num} logical tensors in all")
    if config is None:
        return lines
    parsed = parse_config(config)
    unknown = family.unknown(parsed)
    unread, doubts = mapping.unread_keys(family, parsed, unknown)
    lines += unread.values()
    if doubts:
        raise MappingError.of(
            f"{config}: has keys that {file.name} does not mention:",
            [f"{key}: {unknown[key]!r} ({why})" for key, why in doubts.items()],
            "Let a dim read a key that changes the result, or list its value under `expect`; list"
            " a key that changes nothing under `inert`. `mckpt mappings new HF_DIR` shows how other"
            " families read the key.",
        )
    dims = family.read(parsed, source=str(config))
    bound = family.bind(family.scope(dims))
    if twice := _held_twice(bound):
        raise MappingError.of(f"{file} has a tensor under two keys:", twice)
    here = {n for b in bound for n in b.rule.of}
    fit, problems = [], list[str]()
    for dialect in (mapping.load("megatron", d, str(file)) for d in mapping.names("megatron")):
        unlike = dialect.warnings(dims, loads=False).values()
        apart = _misfits(file, here, dialect, dims) or list(unlike)
        if not apart:
            fit.append(dialect.name)
        elif dialect.default:
            problems = apart
    if not fit:
        raise MappingError.of(f"{file} with {config} does not fit Megatron:", problems)
    named = parsed.get("architectures") or []
    if isinstance(named, list) and not set(map(str, named)) <= set(family.architectures):
        lines.append(f"{config}: has architectures {named}, which {file} does not list")
    return [
        *lines,
        f"{config}: {len(here)} logical tensors, each of which has a place in Megatron (dialect"
        f" {', '.join(fit)})",
        "This proves names and shapes. Convert the model, and let `mckpt verify` compare what it"
        " computes."
        if model
        else "Whether the model has these tensors was not checked: give its directory in place of"
        " --config.",
    ]


def _held_twice(bound: list[Bound]) -> list[str]:
    """Returns the logical tensors that two rules hold, neither of which is a copy."""
    seen: dict[tuple[str, int], str] = {}
    problems: dict[str, None] = {}
    for b in bound:
        for name in b.rule.of if not b.rule.alias else ():
            for layer in b.layers.tolist():
                first = seen.setdefault((name, layer), b.rule.key)
                if first != b.rule.key:
                    problems[
                        f"{name}: in {first} and in {b.rule.key}; mark a copy with `alias`"
                    ] = None
    return list(problems)


def _misfits(file: Path, here: set[str], dialect: MappingFile, dims: Dims) -> list[str]:
    """Returns why a dialect cannot hold the logical tensors `here`, or would not compute the same.
    Empty if it can and does.
    """
    chosen = {name: values[0] for name, values in dialect.choices.items()}
    names = Names(dialect, dims, {**chosen, "pp": 1}, Parallel())
    there = {n for b in names.bound for n in b.rule.of}
    problems = mapping.misfits(file.name, here, "Megatron", there, dims, dialect)
    return problems + list(dialect.inexact(dims).values())
