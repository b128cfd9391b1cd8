"""Makes docs/cli.md, the reference of all commands and options, from the commands themselves:

python -m tests.cli_page
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from mckpt.cli import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Commands and options

`mckpt COMMAND --help` prints the same in the terminal. Each option can also be set by an
environment variable, such as `MCKPT_MAX_MEMORY` for `--max-memory`
([environment variables](environment.md)). `tests/cli_page.py` writes this page.
"""


def page() -> str:
    """Returns the text of docs/cli.md."""
    return HEAD + "".join(_command(command, name) for name, command in _commands(cli, "mckpt"))


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command below a group and the words that call it, sorted by these words."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _command(command: click.Command, path: str) -> str:
    # click keeps the help option that a context makes for a command: it must be that of the program
    with click.Context(command, info_name=path, **cli.context_settings) as ctx:
        usage = " ".join(command.collect_usage_pieces(ctx))
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in command.params:
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record:
                sections.setdefault(getattr(option, "section", ""), []).append(record)
        others = sections.pop("", [])
        tables = [*sections.items(), ("Other options" if sections else "Options", others)]
    # click keeps the line breaks of a paragraph that begins with \b
    text = "\n\n".join(
        f"```text\n{paragraph[2:]}\n```" if paragraph.startswith("\b\n") else _escaped(paragraph)
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n")
    )
    head = f"\n## {path}\n\n`{path} {usage}`\n\n{text}\n"
    return head + "".join(_table(title, records) for title, records in tables if records)


def _table(title: str, records: list[tuple[str, str]]) -> str:
    rows = [(f"`{names}`", _escaped(meaning)) for names, meaning in records]
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return f"\n| {title} | |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in rows)


def _escaped(text: str) -> str:
    """Returns a text with a backslash before each character that Markdown would interpret."""
    return re.sub(r"([*<])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page())
