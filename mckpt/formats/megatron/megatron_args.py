"""Megatron's args as the flags of its training program, as a shell array and as JSON.

Megatron's own --use-checkpoint-args leaves out much of what changes the result (norm epsilon, q/k
norms, rope scaling), so every output carries all of it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mckpt.mapping import MappingFile

SHELL, JSON = "megatron_args.sh", "megatron_args.json"


@dataclass(frozen=True)
class Launch:
    """A launch line as flag -> value, in the order of the dialect.

    The value True stands for a flag without a value.
    """

    program: str  # such as pretrain_gpt.py
    model: dict[str, Any]  # facts of the model: with others it is a different model
    run: dict[str, Any]  # settings of the run: defaults that the user may change

    @property
    def flags(self) -> dict[str, Any]:
        return {**self.model, **self.run}


def launch(dialect: MappingFile, args: Mapping[str, Any]) -> Launch:
    """The launch line of a model with these args.

    `flags` and `run_flags` of the dialect name the args and how each is said.
    """
    return Launch(dialect.trainer, _said(dialect.flags, args), _said(dialect.run_flags, args))


def _said(flags: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, spec in flags.items():
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


def shell(said: Launch) -> str:
    """Returns a file to be sourced before `pretrain_gpt.py "${MEGATRON_ARGS[@]}"`."""

    def lines(flags: Mapping[str, Any]) -> list[str]:
        return [
            f"    {flag}" + ("" if value is True else f" {shlex.quote(str(value))}")
            for flag, value in flags.items()
        ]

    text = [
        f"# Flags of {said.program} for this checkpoint. Source this file, then:",
        f'#     {said.program} "${{MEGATRON_ARGS[@]}}"'
        " --load DIR --no-load-optim --no-load-rng ...",
        "MEGATRON_ARGS=(",
        (
            "    # Facts of the model. Do not change them: the weights would not load, or would"
            " compute something else."
        ),
        *lines(said.model),
        (
            "    # Settings of the run. You may change them: edit them here, or give a flag again"
            " after the array, because the last one wins"
        ),
        (
            "    # (for example --seq-length 8192). A flag without a value is switched off by"
            " deleting its line."
        ),
        (
            "    # The files of a checkpoint in the format torch fit these parallel sizes and this"
            " --transformer-impl only."
        ),
        *lines(said.run),
    ]
    return "\n".join([*text, ")", ""])


def files(said: Launch) -> dict[str, str]:
    """File name -> text of the two files that lie beside a Megatron checkpoint."""
    return {SHELL: shell(said), JSON: as_json(said)}


def as_json(said: Launch) -> str:
    """All flags as one object {flag: value}, true for a flag without a value."""
    return json.dumps(said.flags, indent=2) + "\n"
