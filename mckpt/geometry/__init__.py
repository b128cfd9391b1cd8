"""Whole numbers only: boxes of tensors, packings, parallel sizes, and the join of two layouts.

Nothing here reads files.
"""
