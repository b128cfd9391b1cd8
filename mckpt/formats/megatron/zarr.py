"""Megatron's `zarr` format, the first one of dist_checkpointing, which megatron-core wrote up to
0.15. It is only read.

    KEY/.zarray, KEY/0.1.0    the arrays, one for each key, and their chunks (`zarr_directory`)
    KEY/shard_0_2.pt          the objects
    common.pt                 all values but tensors
    metadata.json             names the format

Keys and shapes are those of `torch_dist`. The state of an optimizer has them too, also where ranks
shared the elements of a weight, for which torch_dist has shapes of its own.
"""

from __future__ import annotations

from pathlib import Path

from mckpt.errors import SourceError
from mckpt.formats.base import Format
from mckpt.formats.megatron.torch_dist import TorchDist, backend
from mckpt.formats.megatron.torch_dist_writing import COMMON, MARKER
from mckpt.formats.megatron.zarr_directory import ARRAY, ZarrDirectory, has_arrays


def detect(path: Path) -> bool:
    if not (path / MARKER).exists():
        return (path / COMMON).exists() and has_arrays(path)
    try:
        return backend(path) == FORMAT.name
    except SourceError:
        return False


def open_directory(path: Path) -> TorchDist:
    """Opens a `zarr` checkpoint. Raises SourceError if its save never finished, or chunks are
    missing.
    """
    backend(path)
    return TorchDist(ZarrDirectory(path), FORMAT)


FORMAT = Format(
    "zarr",
    "*/.zarray with metadata.json",
    megatron=True,
    detect=detect,
    open=open_directory,
    parts=(MARKER, COMMON, f"*/{ARRAY}", "*/[0-9]*", "*/shard_*.pt", "*.sync/*"),
    global_keys=True,
)
