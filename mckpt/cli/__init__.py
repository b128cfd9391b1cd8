"""The `mckpt` command."""

from mckpt.cli.commands import cli, main, process

__all__ = ["cli", "main", "process"]
