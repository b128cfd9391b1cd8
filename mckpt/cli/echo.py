"""Prints texts, with URLs in the place of the local directories that stand for them."""

from __future__ import annotations

from pathlib import Path

import click

from mckpt.errors import shown
from mckpt.storage import stores


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text on stdout, or with `err` on stderr."""
    click.echo(shown(text), err=err, nl=nl)


def named(path: Path) -> str:
    """Returns a path as the user gave it: Path makes s3:/ of s3://."""
    return str(stores.parse(path) or path)
