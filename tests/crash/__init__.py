"""Kills, faults and power cuts: `python -m tests.crash` (CONTRIBUTING.md)."""
