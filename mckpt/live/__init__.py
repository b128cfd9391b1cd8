"""Running models: fills a live Megatron model from a checkpoint, and gives its Hugging Face tensors
to other programs, and writes it as a checkpoint. `docs/live.md` shows how.

Every function is called by all ranks of the model, and fails on all of them or on none.
"""

from mckpt.live.boxes import engine_boxes, model_boxes
from mckpt.live.deltas import Delta, DeltaBucket, Deltas, apply_delta
from mckpt.live.direct import Boxes
from mckpt.live.flat import FlatBucket, FlatTensor
from mckpt.live.loading import load
from mckpt.live.model import Described, describe
from mckpt.live.receiving import Receiver
from mckpt.live.saving import save, save_hf
from mckpt.live.syncing import Shard, Slice, Sync, hf_tensors

__all__ = [
    "Boxes",
    "Delta",
    "DeltaBucket",
    "Deltas",
    "Described",
    "FlatBucket",
    "FlatTensor",
    "Receiver",
    "Shard",
    "Slice",
    "Sync",
    "apply_delta",
    "describe",
    "engine_boxes",
    "hf_tensors",
    "load",
    "model_boxes",
    "save",
    "save_hf",
]
