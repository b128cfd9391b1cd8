"""Commands that are imported when they are needed, the names that other programs have for our
commands and options, and an environment variable for every option, such as MCKPT_MAX_MEMORY for
--max-memory.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from mckpt.errors import UsageError
from mckpt.lazy import pattern

# Commands that mckpt does not have, and those that do it.
_MEANT_COMMANDS = {
    "convert": "hf-to-megatron, megatron-to-hf and reshard convert",
    "import": "hf-to-megatron converts to Megatron",
    "export": "megatron-to-hf converts to Hugging Face",
    "compare": "diff compares tensors, and verify compares logits",
    "validate": "check reads one checkpoint whole, and verify compares two",
    "upload": "push uploads",
    "info": "inspect prints the content of a checkpoint",
    "help": "mckpt --help lists the commands",
}
# Names that Megatron and other converters have for our options. Every command takes them as well,
# and its help shows ours.
SYNONYMS = {
    "tensor-model-parallel-size": "tp",
    "tensor-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "pipeline-parallel-size": "pp",
    "virtual-pipeline-model-parallel-size": "vpp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "expert-model-parallel-size": "ep",
    "expert-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
    "context-parallel-size": "cp",
}


def own_name(name: str) -> str:
    """Returns our name of an option, without the dashes in front, for a name of `SYNONYMS`; also
    behind `target-`. Other names are returned unchanged.
    """
    prefix = "target-" if name.startswith("target-") else ""
    found = SYNONYMS.get(name.removeprefix(prefix).replace("_", "-"))
    return prefix + found if found else name


class Summary(NamedTuple):
    """The module and the help of a command, which are known before the command is imported."""

    place: str  # module.function in mckpt/cli
    text: str  # the first sentence of its help


class Imported(UserDict[str, Any]):
    """The commands of a group by name, of which each is imported when it is looked up: no command
    waits for the imports of the others.
    """

    def __getitem__(self, name: str) -> click.Command:
        found = super().__getitem__(name)
        if isinstance(found, Summary):
            module, _, function = found.place.partition(".")
            found = self.data[name] = getattr(import_module(f"mckpt.cli.{module}"), function)
        command: click.Command = found
        return command

    def summaries(self) -> dict[str, click.Command]:
        """Returns the commands; those that are not imported have their help only."""
        return {
            name: click.Command(name, help=found.text) if isinstance(found, Summary) else found
            for name, found in self.data.items()
        }


class Commands(click.Group):
    """A group of commands, whose error for an unknown one lists those that exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        known = list(self.commands)
        near = get_close_matches(name, [*_MEANT_COMMANDS, *known], 1, 0.7)
        listed = f"the commands are {', '.join(known)}"
        hint = _MEANT_COMMANDS.get(near[0], f"did you mean {near[0]}?") if near else listed
        raise click.UsageError(f"No such command {name!r}: {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        if isinstance(self.commands, Imported):
            click.Group(commands=self.commands.summaries()).format_commands(ctx, formatter)
        else:
            super().format_commands(ctx, formatter)


PREFIX = "MCKPT_"
# Variables that do not set an option: those of a launcher (execute/ranks.py), and those that
# Kubernetes sets in every container for a Service named mckpt, or with a name after mckpt-.
_OTHERS = pattern(
    r"MCKPT_(RANK|NUM_RANKS|LOCAL_RANKS|RUN"
    r"|(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?))"
)
# A variable is most likely misspelled if it and the name of an option are as alike as four letters
# of which one is wrong (difflib.SequenceMatcher.ratio). Of a shorter name, one letter may be wrong.
_NEAR, _SHORT = 0.75, 3


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
    """Raises UsageError for a variable that begins with PREFIX, belongs to no option, and has
    nearly the name of one. Other variables belong to other programs.
    """
    ours = [n for n in environment if n.startswith(PREFIX) and not _OTHERS.fullmatch(n)]
    if not ours:
        return  # without importing the other commands
    known = {name for option in _options(command) for name in variables(option)}
    for name in sorted(set(ours) - known):
        from difflib import get_close_matches

        option = own_name(name.removeprefix(PREFIX).lower().replace("_", "-"))
        short = option.replace("-", "_").upper()
        names = [one.removeprefix(PREFIX) for one in known]
        cutoff = _NEAR
        if 0 < len(short) <= _SHORT:
            names = [one for one in names if abs(len(one) - len(short)) <= 1]
            cutoff = max(0.5, 1 - 1 / len(short))
        if near := get_close_matches(short, names, 1, cutoff):
            raise UsageError(
                f"{name}: no option has this environment variable; did you mean {PREFIX}{near[0]}?"
                " The variable of --max-memory is MCKPT_MAX_MEMORY, and so on for each option."
                " Unset a variable of another program, or rename it"
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
