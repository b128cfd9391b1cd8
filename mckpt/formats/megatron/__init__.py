"""Megatron's formats on disk, and the parts of its checkpoints that are not tensors."""
