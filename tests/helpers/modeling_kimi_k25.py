"""Stands for the Python that is published beside the weights of Kimi-K2.5: its classes, around
modules with the tensors that SHAPES names. A test adds these to its copy of this file.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

SHAPES: dict[str, tuple[int, ...]] = {}


def fill(module: torch.nn.Module, start: str) -> None:
    """Adds the parameters whose names begin with `start`."""
    for name in (name for name in SHAPES if name.startswith(start)):
        at, (*path, last) = module, name.removeprefix(start).split(".")
        for part in path:
            at.add_module(part, at._modules.get(part) or torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(torch.empty(SHAPES[name])))


class VisionTowerConfig(PreTrainedConfig):
    def __init__(self, config: Any = None, **more: Any) -> None:
        super().__init__()


class ProjectorConfig:
    def __init__(self, config: Any) -> None: ...


class MoonViT3dEncoder(torch.nn.Module): ...


class MoonViT3dPretrainedModel(PreTrainedModel):
    config_class = VisionTowerConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        fill(self, "vision_tower.")


class PatchMergerMLP(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        fill(self, "mm_projector.")
