"""Gives the weights of a model in training to a running vLLM server after every step.

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-8B --weight-transfer-config '{"backend": "nccl"}'

    engine = vllm_engine(model_chunks, "Qwen/Qwen3-8B", "http://10.0.0.5:8000",
                         address="10.0.0.1", port=29600, workers=8)
    for step in range(steps):
        train_step(...)
        engine.send_weights()

All ranks of the trainer call both. Rank 0 receives the Hugging Face tensors and broadcasts them to
the workers of the server: `address` and `port` are of rank 0, and `workers` is the number of the
server's GPUs (tp x pp x dp). vLLM must be installed beside the trainer too. The classes are those
of its documentation, Weight Transfer, for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mckpt import live


class MegatronSource(WeightSource):
    """The weights of a live Megatron model, under their Hugging Face names."""

    def __init__(self, model_chunks: list[Any], like: str) -> None:
        self.sync = live.Sync(model_chunks, like=like, to=0)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, *form) for name, form in self.sync.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.sync()


def vllm_engine(
    model_chunks: list[Any], like: str, url: str, *, address: str, port: int, workers: int
) -> Any:
    """Returns vLLM's engine, whose send_weights() sends the weights of that moment."""
    return WeightTransferTrainerFactory.trainer_init(
        init_info=NCCLTrainerInitInfo(
            master_address=address,
            master_port=port,
            world_size=1 + workers,
            rank=dist.get_rank(),
        ),
        client=HTTPVLLMWeightSyncClient(url),
        source=MegatronSource(model_chunks, like),
    )
