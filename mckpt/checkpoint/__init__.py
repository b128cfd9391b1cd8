"""Checkpoints of any format: their dims, their logical tensors, and the differences between two."""
