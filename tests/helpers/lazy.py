"""torch, imported at the first use: the import takes 2 s, and every process that collects the tests
would pay them, also one that runs no test with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # pytest asks each name of a test file for some of these
                raise AttributeError(name)
            import torch

            return getattr(torch, name)

    torch = _Torch()

__all__ = ["torch"]
