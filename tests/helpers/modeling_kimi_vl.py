"""Stands for the Python that is published beside the weights of Kimi-VL: its classes, around a
tower with the two tensors of the tiny model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


class MoonVitPretrainedModel(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.patch_embed = torch.nn.ParameterDict({"pos_emb": torch.ones(3)})
        self.post_init()


class KimiVLMultiModalProjector(torch.nn.ParameterDict):
    def __init__(self, config: Any) -> None:
        super().__init__({"norm": torch.ones(3)})


class KimiVLForConditionalGeneration:
    def _extract_image_features(self: Any, pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        return self.multi_modal_projector["norm"] * self.vision_tower.patch_embed["pos_emb"]
