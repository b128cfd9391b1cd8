"""`python -m mckpt`."""

from mckpt.cli import main

main()
