"""Megatron's args as what a user runs: the flags of pretrain_gpt.py, as a shell array and as JSON.

Megatron's own --use-checkpoint-args leaves out much of what changes the result (norm epsilon, q/k norms, rope scaling), so every output
carries all of it.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from mckpt.mapping import MappingFile

SHELL, JSON = "megatron_args.sh", "megatron_args.json"


def flags(dialect: MappingFile, args: dict[str, Any]) -> dict[str, Any]:
    """Flag -> value (True: a flag without one), in the dialect's order. `flags` of the dialect names the args and how each is said."""
    out: dict[str, Any] = {}
    for name, spec in dialect.flags.items():
        value = args.get(name)
        join = None
        if isinstance(spec, dict) and "flag" in spec:
            if args.get(spec.get("unless", "")):
                continue
            spec, join = spec["flag"], spec.get("join")
        if isinstance(spec, dict):
            if said := spec.get(value):
                out[said] = True
            continue
        flag = spec if isinstance(spec, str) else "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if isinstance(value, (list, tuple)):
            value = join.join(map(str, value)) if join else str(list(value)).replace(" ", "")
        out[flag] = value
    return out


def shell(said: dict[str, Any], title: str) -> str:
    """A file to be sourced: `pretrain_gpt.py "${MEGATRON_ARGS[@]}"`."""
    lines = [f"# {title}", '# source this file, then: pretrain_gpt.py "${MEGATRON_ARGS[@]}" --load DIR --no-load-optim --no-load-rng ...']
    lines += [
        "# (later flags win: give your own --tokenizer-type, --seq-length, parallel sizes of a torch_dist checkpoint)",
        "MEGATRON_ARGS=(",
    ]
    lines += [f"    {flag}" + ("" if value is True else f" {shlex.quote(str(value))}") for flag, value in said.items()]
    return "\n".join([*lines, ")", ""])


def files(said: dict[str, Any]) -> dict[str, str]:
    """File name -> text of what lies beside a Megatron checkpoint."""
    return {SHELL: shell(said, "flags of pretrain_gpt.py for this checkpoint"), JSON: as_json(said)}


def as_json(said: dict[str, Any]) -> str:
    """{flag: value}, true for a flag without a value."""
    return json.dumps(said, indent=2) + "\n"
