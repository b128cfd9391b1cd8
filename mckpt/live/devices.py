"""Tells whether a device can run the kernels."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@functools.cache
def has_kernels(device: torch.device, capability: tuple[int, int] = (7, 0)) -> bool:
    """Returns whether the kernels of `live.kernels` run on a device: one of CUDA, of at least this
    capability, where Triton is there. Triton compiles for 7.0 and later.
    """
    import torch

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= capability
