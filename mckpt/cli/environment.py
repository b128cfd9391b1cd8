"""Environment variables: every option has one, such as MCKPT_MAX_MEMORY for --max-memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import click
from click.core import ParameterSource

from mckpt.cli.commands import own_name
from mckpt.errors import UsageError

PREFIX = "MCKPT_"
# Variables that are no option: those of a launcher (execute/ranks.py), and those that Kubernetes
# sets in every container if a Service has the name mckpt.
_OTHERS = re.compile(
    r"MCKPT_(RANK|NUM_RANKS|LOCAL_RANKS|RUN|SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_.+)?)"
)


def variables(option: click.Parameter) -> list[str]:
    """Returns the variables of an option, one for each of its long names."""
    long = [name for name in option.opts if name.startswith("--")]
    named = [PREFIX + name[2:].replace("-", "_").upper() for name in long]
    return [name for name in named if not _OTHERS.fullmatch(name)]


def name_variables(command: click.Command) -> None:
    """Gives every option of a command its variables."""
    for option in _options(command):
        option.envvar = variables(option)


def refuse_unknown(command: click.Command, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError for a variable that begins with PREFIX and belongs to no option."""
    ours = [n for n in environment if n.startswith(PREFIX) and not _OTHERS.fullmatch(n)]
    if not ours:
        return  # without importing the other commands
    known = {name for option in _options(command) for name in variables(option)}
    for name in sorted(set(ours) - known):
        from difflib import get_close_matches

        option = own_name(name.removeprefix(PREFIX).lower().replace("_", "-"))
        near = get_close_matches(PREFIX + option.replace("-", "_").upper(), known, 1)
        raise UsageError(
            f"{name}: no option has this environment variable"
            + (f"; did you mean {near[0]}?" if near else ".")
            + " The variable of --max-memory is MCKPT_MAX_MEMORY, and so on for each option"
        )


def set_by(option: click.Parameter | None, context: click.Context | None) -> str | None:
    """Returns the variable that set an option of the command that runs, None if none did."""
    if option is None or context is None or option.name is None:
        return None
    if context.get_parameter_source(option.name) is not ParameterSource.ENVIRONMENT:
        return None
    return next(name for name in variables(option) if name in os.environ)


def _options(command: click.Command) -> Iterator[click.Option]:
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _options(inner)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_eager:
            yield parameter
