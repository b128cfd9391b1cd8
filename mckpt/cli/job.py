"""`mckpt run`: the commands of a job file, one after the other."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from mckpt.cli import terminal
from mckpt.cli.commands import own_name
from mckpt.cli.options import FILE, command, json_option
from mckpt.cli.terminal import echo
from mckpt.errors import MckptError, Unreported, UsageError, counted

# commands in which the processes of a launcher share the work
SHARED = (
    *("hf-to-megatron", "megatron-to-hf", "reshard", "repair"),
    *("edit", "merge", "adapter merge", "adapter to-megatron", "adapter to-hf", "adapter reshard"),
)
EXAMPLE = (
    "a job is `steps:` with a list, and each step has `command:`, the arguments and the options of"
    " that command; `mckpt run --help` shows one"
)


class Step(NamedTuple):
    """One command of a job file."""

    command: str  # that of a group has the group in front: "adapter merge"
    arguments: list[str]

    def __str__(self) -> str:
        return shlex.join(["mckpt", *self.words])

    @property
    def words(self) -> list[str]:
        """Returns the words of a command line behind `mckpt`."""
        return [*self.command.split(), *self.arguments]


@command("run")
@click.argument("file", type=FILE)
@click.option("--dry-run", is_flag=True, help="Print the command lines; run none of them.")
@json_option
@click.pass_context
def run_job(ctx: click.Context, file: Path, dry_run: bool, as_json: bool) -> int:
    """Run the commands of a job file, one after the other.

    \b
    steps:
      - command: reshard
        src: ${RUN}/checkpoints
        dst: ckpt-tp8
        target-tp: 8
      - command: verify
        hf: model
        megatron: ckpt-tp8
        level: bytes

    Arguments and options have the names that the help of their command shows, without dashes in
    front. A command of a group is named with it: adapter merge. ${NAME} stands for the environment
    variable NAME. The first step that fails ends the job, with its exit code.
    """
    program = ctx.find_root().command
    assert isinstance(program, click.Group)
    steps = read(file, program, as_json)
    if dry_run:
        for step in steps:
            echo(str(step))
        return 0
    _refuse_ranks(steps, file)
    start = time.perf_counter()

    def end(code: int, text: str) -> int:
        facts = {"state": "failed" if code else "done", "path": str(file), "exit_code": code}
        seconds = round(time.perf_counter() - start, 3)
        _tell(as_json, text, event="job", seconds=seconds, **facts)
        return code

    unreported: Unreported | None = None
    for number, step in enumerate(steps, 1):
        where = f"step {number} of {len(steps)}"
        _tell(as_json, f"{where}: {step}", event="step", step=number)
        try:
            code = program.main(step.words, "mckpt", standalone_mode=False)
        except Unreported as error:  # the output that the next step needs is there
            unreported, code = error, 0
        except MckptError as error:
            raise error.with_hint(f"{file}: {where} ({step.command}) failed") from None
        terminal.raise_caught()  # --watch ends well by a signal, and the job does not
        if code:
            return end(code, f"{file}: {where} ({step.command}) ended with exit code {code}")
    text = f"{file}: {counted(len(steps), 'step')} done in {time.perf_counter() - start:.2f} s"
    end(unreported.exit_code if unreported else 0, text)
    if unreported:
        raise unreported
    return 0


def _tell(as_json: bool, text: str, **facts: Any) -> None:
    echo(json.dumps({**facts, "message": text}) if as_json else text, err=True)


def _refuse_ranks(steps: list[Step], file: Path) -> None:
    """Raises UsageError under a launcher if a step is one that a single process runs."""
    from mckpt.execute.ranks import Ranks

    alone = [step.command for step in steps if step.command not in SHARED]
    if alone and (size := Ranks.of_environment().size) > 1:
        raise UsageError(
            f"{file}: {alone[0]} runs in one process, and a launcher started"
            f" {size}; put it into a job of its own, or start"
            " mckpt without the launcher's variables: env -u RANK -u WORLD_SIZE mckpt run ..."
        )


# ------------------------------------------------------------------------------------------ reading


def read(file: Path, program: click.Group, as_json: bool = False) -> list[Step]:
    """Returns the steps of a job file.

    as_json: adds --json to every step whose command has it.

    Raises UsageError for a file that is not a job, and names the step and the key.
    """
    from mckpt.mapping.nodes import load
    from mckpt.storage.files import read_file

    try:
        content = load(read_file(file, 1 << 20).decode())
    except ValueError as e:
        raise UsageError(f"{file}: is not YAML: {e}") from None
    listed = content.get("steps") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"{file}: is not a job: {EXAMPLE}")
    steps = []
    for number, fields in enumerate(listed, 1):
        where = f"{file}: step {number}"
        if not isinstance(fields, dict) or not isinstance(fields.get("command"), str):
            raise UsageError(f"{where}: has no command: {EXAMPLE}")
        name = fields["command"]
        target = _command(program, name, where)
        rest = {str(key): value for key, value in fields.items() if key != "command"}
        if as_json:
            rest.setdefault("json", True)
        steps.append(_step(target, name, rest, where))
    return steps


def _command(program: click.Group, name: str, where: str) -> click.Command:
    """Returns the command of a step; that of a group is named "adapter merge"."""
    known = [one for one in program.commands if one not in ("run", "mappings")]
    group, _, inner = name.partition(" ")
    found = program.commands[group] if group in known else None
    if isinstance(found, click.Group):
        if inner in found.commands:
            return found.commands[inner]
        known = [f"{group} {one}" for one in found.commands]
        if not inner:
            raise UsageError(f"{where}: {name!r} needs one of {', '.join(known)}")
    elif found and name == group:
        return found
    raise UsageError(f"{where}: {name!r} is not a command{_meant(name, known)}")


def _step(target: click.Command, name: str, fields: Mapping[str, Any], where: str) -> Step:
    where = f"{where} ({name})"
    arguments = {p.name: p for p in target.params if isinstance(p, click.Argument)}
    options = {
        flag.lstrip("-"): (p, flag)
        for p in target.params
        if isinstance(p, click.Option)
        for flag in (*p.opts, *p.secondary_opts)
    }
    given, flags = {}, []
    for key, value in fields.items():
        spelled = own_name(key.replace("_", "-"))
        if key in arguments:
            given[key] = _text(value, f"{where}: {key}")
        elif spelled in options:
            flags += _flags(*options[spelled], value, f"{where}: {key}")
        elif key != "json":
            raise UsageError(
                f"{where}: {key!r} is not an argument or option of mckpt {name}"
                f"{_meant(spelled, [*arguments, *options])}"
            )
    missing = [str(n) for n, p in arguments.items() if p.required and n not in given]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} is missing")
    words = [given[n] for n in arguments if n in given]
    if any(word.startswith("-") for word in words):  # a path, not an option
        return Step(name, [*flags, "--", *words])
    return Step(name, [*words, *flags])


def _flags(option: click.Option, flag: str, value: Any, where: str) -> list[str]:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: must be true or false, not {value!r}")
        other = option.secondary_opts if flag in option.opts else option.opts
        return [flag] if value else other[:1]
    if option.multiple:
        if isinstance(value, dict):
            value = [f"{k}={_text(v, where)}" for k, v in value.items()]
        values = value if isinstance(value, list) else [value]
        return [word for one in values for word in (flag, _text(one, where))]
    return [flag, _text(value, where)]


def _text(value: Any, where: str) -> str:
    """Returns a value as a word of a command line, with ${NAME} replaced."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise UsageError(f"{where}: must be one value, not {value!r}")
    try:
        text = string.Template(str(value)).substitute(os.environ)
    except KeyError as e:
        raise UsageError(f"{where}: the environment variable {e.args[0]} is not set") from None
    except ValueError:
        raise UsageError(f"{where}: write $$ for a $ that does not begin a variable") from None
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise UsageError(f"{where}: an argument of a command cannot contain all characters of {text!r}")


def _meant(name: str, known: list[Any]) -> str:
    near = difflib.get_close_matches(name, [str(k) for k in known], 1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(map(str, known))}"
