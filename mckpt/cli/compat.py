"""`mckpt compat`: the command lines of other converters, translated by mappings/compat.yaml."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import click

from mckpt.cli.options import command, json_option
from mckpt.cli.terminal import echo
from mckpt.errors import UsageError

_ARGUMENTS = ("SRC", "DST")


class Translation(NamedTuple):
    """A command line of mckpt, with notes on how it differs from the other one."""

    title: str  # of the other program
    words: list[str]  # without `mckpt`
    notes: list[str]


class _Option(NamedTuple):
    """An option of the other program, as mappings/compat.yaml describes it."""

    key: str  # its entry in the file
    names: tuple[str, ...]
    num_values: int  # words that follow it
    section: str  # of the file: options, nothing, refused
    reason: str = ""  # for nothing and refused
    to: Sequence[str] = ()  # SRC, DST or options of mckpt
    values: Mapping[str, str] | None = None  # value -> that of mckpt; None: any value, unchanged
    below: Mapping[str, str] = {}  # SRC, DST or an option -> the folder below the value
    absent: Sequence[str] = ()  # an option of mckpt and its value, if a line lacks this option
    revision_of: Sequence[str] = ()  # the options to whose value @REVISION is added


@command("compat", context_settings={"allow_interspersed_args": False})
@click.option(
    "--run", "--execute", "runs", is_flag=True, help="Run the command; without it, it is printed."
)
@json_option
@click.argument("line", metavar="CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def compat(ctx: click.Context, runs: bool, as_json: bool, line: tuple[str, ...]) -> int:
    """Translate the command line of another converter.

    Prints the command line of mckpt that does the same, or runs it with --run. CMD is the other
    command line, unchanged, such as

    \b
    python tools/checkpoint/convert.py --loader core --saver core ...
    ./scripts/conversion/convert.sh import --hf-model Qwen3 --tp 2 ...
    python tools/convert_torch_dist_to_hf.py --input-dir ckpt/iter_5 ...

    It knows the programs of Megatron-LM, Megatron-Bridge, slime, verl and ms-swift. Options that
    mckpt does not need are listed on stderr with the reason; unknown options are errors.
    """
    program = ctx.find_root().command
    assert isinstance(program, click.Group)
    title, words, notes = translate(line)
    name, *arguments = words
    # refuses a value that no option of mckpt takes, before a line with it is printed
    program.commands[name].make_context(f"mckpt {name}", list(arguments), parent=ctx.parent)
    printed = shlex.join(["mckpt", *words])
    if as_json:
        facts = {"from": title, "command": ["mckpt", *words], "notes": notes}
        echo(json.dumps(facts), err=runs)
    else:
        for note in notes:
            echo(f"# {note}", err=True)
        echo(printed, err=runs)
    if not runs:
        return 0
    if as_json:
        words.append("--json")
    return int(program.main(words, "mckpt", standalone_mode=False) or 0)


def translate(line: tuple[str, ...]) -> Translation:
    """Returns the command line of mckpt that does what `line` does.

    Raises UsageError for a program that is not known, and for options that are unknown or refused;
    the error lists all of them.
    """
    tool, before, rest = _program(line)
    given = dict(_cases_facts(tool, rest))
    case = _case(tool, given)
    if "command" not in case:
        raise UsageError(f"{tool['title']}: cannot be translated: {case['refused']}")
    options = list(_options(tool)) + list(_options(case))
    notes: list[str] = []
    problems: list[str] = []
    ours: dict[str, list[str]] = {}  # SRC, DST and options -> the words that follow
    if before:
        notes.append(f"{shlex.join(before)}: is not needed: mckpt is a program of its own")
    seen = set()
    # in the order of the file, in which a later option decides
    place = {option.key: number for number, option in enumerate(options)}
    parsed = sorted(
        _parsed(options, rest, case),
        key=lambda one: place[one[0].key] if isinstance(one[0], _Option) else -1,
    )
    for option, spelled, values in parsed:
        if isinstance(option, str):
            problems.append(f"{spelled}: {option}")
            continue
        seen.add(option.key)
        spelling = shlex.join([spelled, *values])
        if option.section == "nothing":
            notes.append(f"{spelling}: is not needed: {option.reason}")
        elif option.section == "refused":
            problems.append(f"{spelling}: {option.reason}")
        elif option.values is not None and values[0] not in option.values:
            problems.append(f"{spelling}: the values known are {', '.join(option.values)}")
        elif option.to != ["case"]:
            ours.update((name, value) for name, *value in _become(option, values))
            for name in option.revision_of:
                if name in ours:  # by the order of the file, the model comes before
                    ours[name][0] += f"@{values[0]}"
    for option in options:
        if option.absent and option.key not in seen:
            ours.setdefault(option.absent[0], list(option.absent[1:]))
    wanted = {
        word: option.names[-1]
        for option in options
        for word in (*option.below, *option.to)
        if word in _ARGUMENTS
    }
    problems += [f"{wanted[name]}: is missing" for name in _ARGUMENTS if name not in ours]
    if problems:
        raise UsageError.of(f"{tool['title']}: cannot be translated:", problems)
    words = [case["command"], *(ours.pop(name)[0] for name in _ARGUMENTS)]
    words += [word for flag, value in ours.items() for word in (flag, *value)]
    words += case.get("always", [])
    return Translation(tool["title"], words, notes + case.get("notes", []))


# ------------------------------------------------------------------------------------ command lines


def _program(line: tuple[str, ...]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Returns the tool that a command line starts, the words in front of it and those behind it."""
    tools = read()
    for place, word in enumerate(line):
        parts = PurePath(word).parts
        # in `--target megatron` the word is a value, not a program
        value = place and line[place - 1].startswith("--") and not PurePath(word).suffix
        for tool in tools if not value else ():
            for program in tool["programs"]:
                expected = PurePath(program).parts
                length = min(len(parts), len(expected))
                if length and parts[-length:] == expected[-length:]:
                    return tool, list(line[:place]), list(line[place + 1 :])
    raise UsageError(
        f"{shlex.join(line[:3])} ...: starts no program that is known; known are",
        *(f"  - {program}" for tool in tools for program in tool["programs"]),
    )


def _cases_facts(tool: Mapping[str, Any], words: list[str]) -> Iterator[tuple[str, str]]:
    """Yields what decides between the cases of a tool: the subcommand, and values of options."""
    if words and not words[0].startswith("-"):
        yield "word", words[0]
    deciding = {name for case in tool["cases"] for name in case.get("when", {})} - {"word"}
    first = {name: one.names[0] for one in _options(tool) for name in one.names}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if (name := first.get(name, name)) in deciding:
            yield name, value if equals else "".join(words[place + 1 : place + 2])


def _case(tool: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    for case in tool["cases"]:
        if all(given.get(name, "") in known for name, known in case.get("when", {}).items()):
            return dict(case)
    words = ", ".join(f"{name} {value}".removeprefix("word ") for name, value in given.items())
    known = (
        "; ".join(f"{n}: {', '.join(filter(None, v))}" for n, v in case["when"].items())
        for case in tool["cases"]
        if "command" in case
    )
    raise UsageError(
        f"{tool['title']}: {words or 'no subcommand'}: cannot be translated; known are",
        *(f"  - {one}".replace("word: ", "") for one in known),
    )


def _parsed(
    options: list[_Option], words: list[str], case: Mapping[str, Any]
) -> Iterator[tuple[_Option | str, str, list[str]]]:
    """Yields each option of a command line, its spelling and its values; or what is wrong."""
    by_name = {name: option for option in options for name in option.names}
    words = words[1:] if "word" in case.get("when", {}) else list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        option = by_name.get(name) if name.startswith("-") else None
        if option is None:
            near = difflib.get_close_matches(name, by_name, 1)
            yield "is unknown" + (f"; did you mean {near[0]}?" if near else ""), name, []
            # the value of an unknown option is not reported as another one
            while words and not words[0].startswith("-"):
                words.pop(0)
            continue
        values = [value] if equals else words[: option.num_values]
        del words[: 0 if equals else option.num_values]
        if len(values) != option.num_values:
            yield f"takes {option.num_values} values, not {len(values)}", name, []
        else:
            yield option, name, values


def _become(option: _Option, values: list[str]) -> list[list[str]]:
    """Returns what an option becomes: options of mckpt, each with its value."""
    if option.below:
        return [[name, str(PurePath(values[0], folder))] for name, folder in option.below.items()]
    if option.values is not None:
        values = list(filter(None, [option.values[values[0]]]))
    return [[*name.split(), *values] for name in option.to if name]


# ---------------------------------------------------------------------------------------- the file


def read() -> list[dict[str, Any]]:
    """Returns the tools of mappings/compat.yaml."""
    import yaml

    from mckpt.mapping.nodes import FOLDER

    tools: list[dict[str, Any]] = yaml.safe_load((FOLDER / "compat.yaml").read_text("utf-8"))
    return tools


def _options(section: Mapping[str, Any]) -> Iterator[_Option]:
    """Yields the options of a tool or of one of its cases."""
    for key, becomes in section.get("options", {}).items():
        yield _option(key, "options", becomes)
    for kind in ("nothing", "refused"):
        for reason, keys in section.get(kind, {}).items():
            for key in keys:
                yield _option(key, kind, reason=reason)


def _option(key: str, section: str, becomes: Any = None, reason: str = "") -> _Option:
    *aliases, last = key.split(", ")
    name, *metavars = last.split()
    facts: dict[str, Any] = dict(becomes) if isinstance(becomes, dict) else {"to": becomes or []}
    if isinstance(facts.get("to"), str):
        facts["to"] = [facts["to"]]
    return _Option(key, (*aliases, name), len(metavars), section, reason, **facts)
