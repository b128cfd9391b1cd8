"""Prints texts. Replaces local copies of URLs by the URLs, and characters that would control a
terminal by escapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mckpt.errors import Unprinted, Unreported, printable, shown

if TYPE_CHECKING:
    from pathlib import Path


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on stdout, or with `err` on stderr. A line break within one is escaped.

    Raises Unprinted if stdout refuses them.
    """
    try:
        click.echo("\n".join(printable(shown(line)) for line in lines), err=err)
    except OSError as error:
        raise Unprinted(f"stdout: cannot be written: {error.strerror or error}") from error


def document(text: str, *, err: bool = False) -> None:
    """Prints a text of several lines, such as a file, of which all line breaks are mckpt's own."""
    echo(*text.removesuffix("\n").split("\n"), err=err)


@contextmanager
def reporting(path: str) -> Iterator[None]:
    """Raises Unreported if stdout refuses what the block prints about the output at `path`."""
    try:
        yield
    except Unprinted as error:
        raise Unreported(f"{path}: is complete and in place; {error}") from error


def named(path: Path) -> str:
    """Returns a path as the user gave it: Path makes s3:/ of s3://."""
    from mckpt.storage import addresses

    return str(addresses.url_of(path) or path)


def echo_outcome(state: str, start: float, facts: Mapping[str, Any], **places: Path) -> None:
    """Prints on stdout, as one JSON object, how a command ended (docs/json.md).

    start: `time.perf_counter()` when it began. places: what it read or wrote, by argument name.
    """
    import json

    where = {name: named(path) for name, path in places.items()}
    seconds = round(time.perf_counter() - start, 3)
    echo(json.dumps({"state": state, **where, "seconds": seconds, **facts}))
