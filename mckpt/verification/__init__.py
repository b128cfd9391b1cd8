"""Verifies that two checkpoints compute the same: the levels, the verdict, and the page with the
verdict.
"""
