"""Edits between two runs: new checkpoints whose tensors are formulas of those of others."""
