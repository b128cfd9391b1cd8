"""The keywords of a call of a `Sync`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# tensors in the place of weights, by the names of these
Given = Mapping[str, "torch.Tensor"]


class Asked(NamedTuple):
    """The keywords that the caller of a `Sync` gave.

    flat: the alignment of the buckets that come in the place of tensors.
    """

    weights: Given | None = None
    named: Iterable[tuple[str, Any]] | None = None
    extra: Mapping[str, torch.Tensor] | None = None
    flat: int = 0

    def said(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks."""
        import torch

        extra = self.extra
        forms = [(name, str(t.dtype), tuple(t.shape)) for name, t in (extra or {}).items()]
        found = hashlib.sha256(repr(forms).encode())
        for tensor in (extra or {}).values():
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        given = None if extra is None else found.hexdigest()[:16]
        return {"weights": self.weights is not None, "extra": given}


ASKED = Asked()
