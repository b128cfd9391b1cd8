"""Stands for the Python that is published beside the weights of Ovis2.5: its classes, around a
tower with the one tensor of the tiny model.
"""

from __future__ import annotations

from typing import Any

import torch

INDICATOR_IDS = [-301, -302, -303, -304]


class VisualTokenizer(torch.nn.Module):
    def __init__(self, vit: Any, visual_vocab_size: int, **_more: Any) -> None:
        super().__init__()
        self.vit, self.size = vit, visual_vocab_size
        self.head = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(3, bias=False))

    def preprocess(self, *_image: Any, **_sizes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.ones(1, 3)

    def forward(self, *_image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, self.size)


class VisualEmbedding(torch.nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens @ self.weight if tokens.is_floating_point() else super().forward(tokens)
