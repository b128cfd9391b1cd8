"""A checkpoint understood, whatever its format: its dims, its logical tensors, what differs between
two of them.
"""
