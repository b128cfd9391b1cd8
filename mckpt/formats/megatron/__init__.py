"""Megatron's formats on disk, and what its checkpoints hold beside tensors."""
