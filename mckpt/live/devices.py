"""Tells whether a device can run the kernels, and copies from it to the host."""

from __future__ import annotations

import functools
import importlib.util
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PIECE = 16 << 20  # bytes that a thread copies to the host at a time


class ToHost(threading.local):
    """Copies from a device to the host, through pinned memory of each thread."""

    pinned: torch.Tensor | None = None

    def __init__(self, nbytes: int = PIECE) -> None:
        """nbytes: the most that is copied at a time."""
        self.nbytes = nbytes

    def __call__(self, values: torch.Tensor, ready: Any = None) -> torch.Tensor:
        """Returns bytes on the host, those of a device until the next call of this thread.

        ready: an event, behind which the device has the values.
        """
        import torch

        if not values.is_cuda:
            return values
        if self.pinned is None:
            self.stream = torch.cuda.Stream(values.device)
            self.pinned = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned = self.pinned[: len(values)]
        with torch.cuda.stream(self.stream):
            if ready is not None:
                ready.wait()
            pinned.copy_(values, non_blocking=True)
        self.stream.synchronize()
        return pinned


@functools.cache
def has_kernels(device: torch.device, capability: tuple[int, int] = (7, 0)) -> bool:
    """Returns whether the kernels of `live.kernels` run on a device: one of CUDA, of at least this
    capability, where Triton is there. Triton compiles for 7.0 and later.
    """
    import torch

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= capability
