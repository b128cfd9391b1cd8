"""Verifies that two checkpoints compute the same: the levels, the judge, and the page with the
verdict.
"""
