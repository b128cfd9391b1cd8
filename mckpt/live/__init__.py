"""Running models: fills a live Megatron model from a checkpoint. `docs/live.md` shows how.

Every function is called by all ranks of the model, and fails on all of them or on none.
"""

from mckpt.live.loading import load

__all__ = ["load"]
