"""Prints texts, with URLs in the place of the local directories that stand for them."""

from __future__ import annotations

import click

from mckpt.errors import shown


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text on stdout, or with `err` on stderr."""
    click.echo(shown(text), err=err, nl=nl)
