"""Makes docs/cli.md, the reference of all commands and options, from the commands themselves:

python -m tests.cli_page
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from mckpt.cli import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Commands and options

`mckpt COMMAND --help` prints the same in the terminal. Each option can also be set by an
environment variable, such as `MCKPT_MAX_MEMORY` for `--max-memory`
([environment variables](environment.md)). `tests/cli_page.py` writes this page.

## Common options

Each command lists which of these it has.
"""


COMMON = 3  # commands: an option that so many have, with the same words, is explained once


class Row(NamedTuple):
    """An option of a command, as the help shows it."""

    section: str
    names: str  # with the word for the value, such as "--threads N"
    meaning: str

    @property
    def name(self) -> str:
        """The first name alone."""
        return self.names.split(" ")[0].rstrip(",")


def page() -> str:
    """Returns the text of docs/cli.md."""
    commands = [(name, command, _rows(command, name)) for name, command in _commands(cli, "mckpt")]
    uses = Counter(row for _, _, rows in commands for row in rows)
    common = [row for row in uses if uses[row] >= COMMON]
    texts = [_command(command, name, rows, common) for name, command, rows in commands]
    return HEAD + _tables(common) + "".join(texts)


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command below a group and the words that call it, sorted by these words."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _rows(command: click.Command, path: str) -> list[Row]:
    """Returns the options that the help of a command shows."""
    # click keeps the help option that a context makes for a command: it must be that of the program
    with click.Context(command, info_name=path, **cli.context_settings) as ctx:
        options = [option for option in command.params if isinstance(option, click.Option)]
        records = [(getattr(one, "section", ""), one.get_help_record(ctx)) for one in options]
    return [Row(section, *record) for section, record in records if record]


def _command(command: click.Command, path: str, rows: list[Row], common: list[Row]) -> str:
    with click.Context(command, info_name=path, **cli.context_settings) as ctx:
        usage = " ".join(command.collect_usage_pieces(ctx))
    # click keeps the line breaks of a paragraph that begins with \b
    text = "\n\n".join(
        f"```text\n{paragraph[2:]}\n```" if paragraph.startswith("\b\n") else _escaped(paragraph)
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n")
    )
    shared = ", ".join(f"`{row.name}`" for row in rows if row in common)
    more = f"\nOf the [common options](#common-options): {shared}.\n" if shared else ""
    head = f"\n## {path}\n\n`{path} {usage}`\n\n{text}\n"
    return head + _tables([row for row in rows if row not in common]) + more


def _tables(rows: list[Row]) -> str:
    """Returns a table for each section; options without a section come last."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append((row.names, row.meaning))
    others = sections.pop("", [])
    tables = [*sections.items(), ("Other options" if sections else "Options", others)]
    return "".join(_table(title, records) for title, records in tables if records)


def _table(title: str, records: list[tuple[str, str]]) -> str:
    rows = [(f"`{names}`", _escaped(meaning)) for names, meaning in records]
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return f"\n| {title} | |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in rows)


def _escaped(text: str) -> str:
    """Returns a text with a backslash before each character that Markdown would interpret."""
    return re.sub(r"([*<])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page())
