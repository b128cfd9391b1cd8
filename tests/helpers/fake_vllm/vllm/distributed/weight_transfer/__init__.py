"""A stand-in for the trainer's side of vLLM's weight transfer, with gloo in place of NCCL. The
calls are those of vllm/distributed/weight_transfer/nccl_engine.py and clients.py.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group

from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo


class HTTPVLLMWeightSyncClient:
    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url, timeout

    def post(self, path: str, content: dict[str, Any] | None = None) -> None:
        request = urllib.request.Request(
            f"{self.base_url}/{path}",
            json.dumps(content or {}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=self.timeout).close()


class Engine:
    """As NCCLTrainerWeightTransferEngine: rank 0 sends, the other ranks only iterate."""

    def __init__(
        self, init_info: NCCLTrainerInitInfo, client: HTTPVLLMWeightSyncClient, source: WeightSource
    ) -> None:
        self.client, self.source, self.sends = client, source, init_info.rank == 0
        if not self.sends:
            return
        info = {
            "master_address": init_info.master_address,
            "master_port": init_info.master_port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
        }
        place = f"tcp://{init_info.master_address}:{init_info.master_port}"
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.post, "init_weight_transfer_engine", {"init_info": info})
            self.group = init_custom_process_group("gloo", place, init_info.world_size, 0, "vllm")
            joined.result()

    def send_weights(self) -> None:
        meta = self.source.metadata()
        if not self.sends:
            for _ in self.source:
                pass
            return
        update = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self.client.post("start_weight_update")
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self.client.post, "update_weights", {"update_info": update})
            for wanted, (name, tensor) in zip(meta, self.source, strict=True):
                found = name, tensor.dtype, tuple(tensor.shape)
                assert found == (wanted.name, wanted.dtype, wanted.shape), (found, wanted)
                dist.broadcast(tensor, src=0, group=self.group)
            received.result()
        self.client.post("finish_weight_update")


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(
        init_info: NCCLTrainerInitInfo, *, client: HTTPVLLMWeightSyncClient, source: WeightSource
    ) -> Engine:
        return Engine(init_info, client, source)
