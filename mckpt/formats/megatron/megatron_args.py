"""Turns Megatron's args into flags of its training program, as a shell array and as JSON.

Megatron's own option --use-checkpoint-args skips many args that change the result, such as the
epsilon of the norms, q/k norms and rope scaling. So both files contain the flags of all args.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mckpt.formats.base import NO_OPTIMIZER
from mckpt.mapping import MappingFile

SHELL, JSON = "megatron_args.sh", "megatron_args.json"
TYPE, MODEL = "--tokenizer-type", "--tokenizer-model"
BESIDE = "../hf"  # the tokenizer of DST/hf, from the directory of both files


class Launch(Struct, frozen=True):
    """The flags of a launch line and their values, in the order of the dialect.

    The value True stands for a flag without a value.
    """

    program: str  # such as pretrain_gpt.py
    model: dict[str, Any]  # facts of the model; changing one makes it a different model
    run: dict[str, Any]  # settings of the run, which the user may change

    @property
    def flags(self) -> dict[str, Any]:
        return {**self.model, **self.run}


def launch(dialect: MappingFile, args: Mapping[str, Any], tokenizer: str | None = None) -> Launch:
    """Returns the launch line of a model with these args.

    The entries `flags` and `run_flags` of the dialect list the args, and the flag of each.
    tokenizer: a directory of Hugging Face, whose tokenizer takes the place of NullTokenizer.
    """
    run: dict[str, Any] = {}
    for flag, value in _values(dialect.run_flags, args).items():
        if tokenizer is not None and (flag, value) == (TYPE, "NullTokenizer"):
            run |= {TYPE: "HuggingFaceTokenizer", MODEL: tokenizer}
        else:
            run[flag] = value
    return Launch(dialect.trainer, _values(dialect.flags, args), run)


def _values(flags: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags and their values.

    flags: for each arg, its flag; None stands for the arg's own name. Such an arg has no flag if it
    is unset or False. A dict from values of the arg to flags selects one of these flags. A dict
    with the key `flag` may have `unless` (an arg that makes this flag superfluous) and `join` (the
    separator of a list's items).
    """
    out: dict[str, Any] = {}
    for name, spec in flags.items():
        value = args.get(name)
        join = None
        if isinstance(spec, dict) and "flag" in spec:
            if args.get(spec.get("unless", "")):
                continue
            spec, join = spec["flag"], spec.get("join")
        if isinstance(spec, dict):
            if chosen := spec.get(value):
                out[chosen] = True
            continue
        flag = spec if isinstance(spec, str) else "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if isinstance(value, (list, tuple)):
            value = join.join(map(str, value)) if join else str(list(value)).replace(" ", "")
        out[flag] = value
    return out


def shell(line: Launch, notes: Sequence[str] = (), flag: str = NO_OPTIMIZER) -> str:
    """Returns a shell script that sets the array MEGATRON_ARGS to the flags.

    The user sources it and then runs `pretrain_gpt.py "${MEGATRON_ARGS[@]}"`. Notes become
    comments. flag: the one to load weights without the state of an optimizer, "" with it.
    """
    without = f"{flag} --no-load-rng".lstrip()

    def lines(flags: Mapping[str, Any]) -> list[str]:
        out = []
        for flag, value in flags.items():
            text = shlex.quote(str(value))
            if (flag, value) == (MODEL, BESIDE):  # of this file, wherever it is sourced from
                text = f'"$(dirname "${{BASH_SOURCE[0]}}")/{BESIDE}"'
            out.append(f"    {flag}" + ("" if value is True else f" {text}"))
        return out

    text = [
        f"# Flags of {line.program} for this checkpoint. Source this file, then:",
        f'#     {line.program} "${{MEGATRON_ARGS[@]}}" --load DIR {without} ...',
        *(f"# {text}" for note in notes for text in textwrap.wrap(note, 90)),
        "MEGATRON_ARGS=(",
        (
            "    # Facts of the model. Do not change them: the weights would not load, or would"
            " compute something else."
        ),
        *lines(line.model),
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
        *lines(line.run),
    ]
    return "\n".join([*text, ")", ""])


def files(line: Launch, notes: Sequence[str] = (), flag: str = NO_OPTIMIZER) -> dict[str, str]:
    """Returns the names and texts of the two files that mckpt writes beside a Megatron
    checkpoint. Its arguments are those of `shell`.
    """
    return {SHELL: shell(line, notes, flag), JSON: as_json(line)}


def as_json(line: Launch) -> str:
    """Returns all flags as one JSON object. The value of a flag without a value is true."""
    return json.dumps(line.flags, indent=2) + "\n"
