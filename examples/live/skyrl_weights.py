"""Gives SkyRL's engines the tensors of mckpt in the place of those of Megatron-Bridge.

Import this file in the policy workers. SkyRL's strategies, CUDA IPC and broadcast, take chunks of
tensors from the weight extractor of the worker, which is replaced. A chunk is a flat bucket of one
dtype, without gaps, as SkyRL packs its own. Written for SkyRL of August 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightExtractor
from skyrl.backends.skyrl_train.workers.megatron import megatron_worker

from mckpt import live

DTYPES: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


class MckptWeightExtractor(WeightExtractor):
    def __init__(self, bridge: Any, actor_module: Any, **unused: Any) -> None:
        self.bridge, self.actor_module = bridge, actor_module
        self.syncs: dict[torch.dtype, live.Sync] = {}

    def sync(self, dtype: torch.dtype) -> live.Sync:
        """Returns the `Sync`, which is made when the weights are on the device."""
        if dtype not in self.syncs:
            self.syncs[dtype] = live.Sync(
                self.actor_module,
                like=self.bridge.hf_pretrained.model_name_or_path,
                dtype=DTYPES[dtype],
            )
        return self.syncs[dtype]

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        for bucket in self.sync(dtype).buckets(align=1):
            yield WeightChunk(
                names=[tensor.name for tensor in bucket.tensors],
                dtypes=[str(dtype) for _ in bucket.tensors],
                shapes=[list(tensor.shape) for tensor in bucket.tensors],
                # a router's bias, which stays in fp32, too
                tensors=[tensor.to(dtype) for _, tensor in bucket.named()],
            )

    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list[Any]]:
        tensors = self.sync(dtype).tensors
        return {
            "names": list(tensors),
            "dtype_names": [str(dtype).removeprefix("torch.") for _ in tensors],
            "shapes": [list(shape) for _, shape in tensors.values()],
        }


megatron_worker.MegatronWeightExtractor = MckptWeightExtractor
