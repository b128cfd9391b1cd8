"""The `mckpt` command: reads the options, calls one function of `api` and prints the result.

The result goes to stdout, progress and errors go to stderr.
"""

from mckpt.cli.program import cli, main, process

__all__ = ["cli", "main", "process"]
