"""Stands for the Python that is published beside the weights of InternVL 3: its classes, around a
tower with the one tensor of the tiny model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


class InternVisionModel(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = torch.nn.ParameterDict({"class": torch.ones(3)})
        self.post_init()


class InternVLChatModel:
    def extract_feature(self: Any, pixels: torch.Tensor) -> torch.Tensor:
        return self.mlp1(torch.zeros(1, 1, self.mlp1[0].normalized_shape[0]))
