"""Additions to click: sections of the help, types of options, and hints in errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mckpt.cli.commands import SYNONYMS, name_variables, own_name
from mckpt.options import Option, options_of

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Options = Mapping[str, Any]  # the values of a command's options, by parameter name

PATH = click.Path(path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


class WholeNumber(click.ParamType):
    """A whole number of at least `least`."""

    name = "n"  # the help shows a value as N

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if number < self.least:
            self.fail(f"{value!r} is not a whole number of at least {self.least}", param, ctx)
        return number


class _OutputFile(click.Path):
    """A file that the command writes at its end. Raises UsageError at once if it cannot."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from mckpt.pages import document

        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]  # path_type makes it one
        document.refuse(path)
        return path


OUTPUT_FILE = _OutputFile(dir_okay=False, path_type=Path)
POSITIVE = WholeNumber(1)
NOT_NEGATIVE = WholeNumber(0)

# Options that no command has, and what a user who gives one may want.
_MEANT = {
    "num-layers-per-virtual-pipeline-stage": "--vpp N is the number of virtual stages of each"
    " pipeline rank: the layers of the model, divided by pp and by the layers of one virtual stage",
    "bf16": "--dtype bf16 casts",
    "fp16": "--dtype fp16 casts",
    "torch-dtype": "--dtype bf16, fp16 or fp32 casts",
    "force": "--overwrite replaces an existing checkpoint",
    "ckpt-format": "--format (reshard: --target-format) chooses the format",
    "hf-model": "--like DIR names the model that describes a checkpoint; what is read and written"
    " are arguments without a name",
    **dict.fromkeys(
        (
            "load",
            "save",
            "load-dir",
            "save-dir",
            "input-path",
            "output-path",
            "hf-path",
            "src",
            "dst",
        ),
        "what is read and written are arguments without a name",
    ),
}


# --------------------------------------------------------------------------------- sections of help


class _ClickOption(click.Option):
    """An option that the help lists under the title `section`."""

    def __init__(self, *args: Any, section: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


class _Command(click.Command):
    """A command whose help lists the options by section; those without one come last. An unknown
    option that is known elsewhere is an error with a hint.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        name_variables(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = [word.partition("=")[0] for word in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            given = next((f for f in flags if own_name(f.lstrip("-")) == name), error.option_name)
            text = f"No such option '{given}': {self._hint(name, ctx)}"
            raise click.NoSuchOption(given, text, ctx=ctx) from None

    def _hint(self, name: str, ctx: click.Context) -> str:
        """Returns what a user may want who gave the unknown option `name`."""
        called, program = ctx.command_path, ctx.find_root().command
        ours = {flag.lstrip("-") for p in self.params for flag in p.opts}
        short = name.removeprefix("target-").removeprefix("source-")
        for other in (short, f"target-{short}"):
            if other in ours and not name.startswith("source-"):
                return f"{called} calls it --{other}"
        if short in SYNONYMS.values():
            return f"{called} reads a checkpoint at the sizes that it has"
        if meant := _MEANT.get(name.replace("_", "-")):
            return meant
        others = program.commands.items() if isinstance(program, click.Group) else ()
        having = [other for other, one in others for p in one.params if f"--{name}" in p.opts]
        if having:
            return f"{called} has none; these commands have it: {', '.join(having)}"
        from difflib import get_close_matches

        near = get_close_matches(name, ours, 1, 0.7)
        return f"did you mean --{near[0]}?" if near else f"{called} --help lists all"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record:
                sections.setdefault(getattr(option, "section", ""), []).append(record)
        others = sections.pop("", [])
        sections["Other options" if sections else "Options"] = others
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


command = functools.partial(click.command, cls=_Command)


def in_section(title: str) -> Callable[..., Decorator]:
    """Returns `click.option` for options that the help lists under `title`."""
    return functools.partial(click.option, cls=_ClickOption, section=title)


def from_table(
    table: type, names: str, prefix: str = "", flag: str = "", **changes: Any
) -> Decorator:
    """Returns options for these fields of a table, in this order.

    prefix: in front of the first of two names of each, as in --target-tp and --tp. flag: the name
    instead of that of the table. changes: to the arguments of `click.option`.
    """
    options = (options_of(table)[name] for name in names.split())
    return together(*(_from_table(option, prefix, flag, changes) for option in options))


def _from_table(option: Option, prefix: str, flag: str, changes: Mapping[str, Any]) -> Decorator:
    kind, *others = option.kinds
    given: dict[str, Any] = {"help": option.help, "metavar": option.word, "default": option.default}
    if kind is bool and option.choices:
        words = option.choices
        given |= {"type": click.Choice(words), "default": words[option.default]}
        given["callback"] = lambda ctx, param, word: words.index(word) == 1
    elif kind is bool:
        given["is_flag"] = True
    elif option.choices:
        given["type"] = click.Choice(option.choices)
    elif option.path:
        files, own = option.path == "file", Path if Path in others else None
        given["type"] = click.Path(file_okay=files, dir_okay=not files, path_type=own)
    elif kind is float or (kind is int and option.read is None):
        given["type"] = WholeNumber(option.least) if kind is int else float
    elif kind not in (int, str):
        given |= {"multiple": True, "default": None}
    flag = flag or "/".join(option.flags)
    names = dict.fromkeys([f"--{prefix}{flag[2:]}", flag])
    return in_section(option.section)(*names, option.name, **{**given, **changes})


def together(*options: Decorator) -> Decorator:
    """Returns one decorator that adds all `options`, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
