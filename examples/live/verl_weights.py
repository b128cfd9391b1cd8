"""Gives verl's rollouts the tensors of mckpt in the place of those of Megatron-Bridge.

    actor_rollout_ref.model.external_lib=verl_weights

verl imports this file in its workers. All its rollouts and checkpoint engines (vLLM, SGLang,
nccl, ...) take the pairs of a name and a tensor from the engine of the trainer: the method that
makes them is replaced. With adapters that are not merged, verl's own method is called. Written for
verl of August 2026, with `engine` workers and the Megatron backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.utils.megatron_utils import load_megatron_model_to_gpu
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from mckpt import live

of_bridge = MegatronEngine.get_per_tensor_param


def get_per_tensor_param(
    self: Any, base_sync_done: bool = False, **keywords: Any
) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
    """Returns the tensors of this moment, on all ranks, which all take them to the end."""
    if self.peft_cls is not None and not self.model_config.lora.get("merge", False):
        given: Any = of_bridge(self, base_sync_done=base_sync_done, **keywords)
        return given
    load_megatron_model_to_gpu(self.module, load_grad=False)  # verl may have moved it to the host
    if not hasattr(self, "mckpt_sync"):
        self.mckpt_sync = live.Sync(self.module, like=self.model_config.local_path)
    return self.mckpt_sync(), None


MegatronEngine.get_per_tensor_param = get_per_tensor_param
