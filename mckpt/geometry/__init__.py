"""Whole numbers only: boxes of tensors, how they are packed, parallel sizes, and the join of two
layouts.

Reads no files.
"""
