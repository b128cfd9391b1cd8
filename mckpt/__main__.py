"""`python -m mckpt`."""

from mckpt.cli import process

process()
