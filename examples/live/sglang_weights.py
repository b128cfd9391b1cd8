"""Gives the weights of a model in training to a running SGLang server after every step.

    server = SglangServer(model_chunks, "Qwen/Qwen3-8B", "http://10.0.0.5:30000",
                          address="10.0.0.1", port=29600, workers=8)
    for step in range(steps):
        train_step(...)
        server.update()

All ranks of the trainer call it. Rank 0 receives the Hugging Face tensors and sends them to the
workers of the server, through a group that it forms with them: `address` and `port` are of rank 0,
and `workers` is the number of the server's GPUs (tp x dp). SGLang must be installed beside the
trainer too, for the function that forms the group.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import torch
import torch.distributed as dist

from mckpt import live

GROUP = "mckpt"
BATCH_BYTES = 512 << 20  # of the tensors of one request


class SglangServer:
    def __init__(
        self,
        model_chunks: list[Any],
        like: str,
        url: str,
        *,
        address: str,
        port: int,
        workers: int,
        backend: str = "nccl",
    ) -> None:
        self.url = url
        self.sync = live.Sync(model_chunks, like=like, to=0)
        if dist.get_rank() == 0:
            from sglang.srt.utils import init_custom_process_group

            joined = self._ask(
                "init_weights_update_group",
                master_address=address,
                master_port=port,
                rank_offset=1,
                world_size=workers + 1,
                group_name=GROUP,
                backend=backend,
            )
            self.group = init_custom_process_group(
                backend=backend,
                init_method=f"tcp://{address}:{port}",
                world_size=workers + 1,
                rank=0,
                group_name=GROUP,
            )
            joined()

    def update(self) -> None:
        """Sends all tensors of this moment."""
        batch: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self.sync():
            if sum(held.nbytes for _, held in batch) + tensor.nbytes > BATCH_BYTES and batch:
                self._send(batch, last=False)
                batch = []
            batch.append((name, tensor))
        if batch:
            self._send(batch, last=True)
        dist.barrier()

    def _send(self, batch: list[tuple[str, torch.Tensor]], last: bool) -> None:
        received = self._ask(
            "update_weights_from_distributed",
            names=[name for name, _ in batch],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in batch],
            shapes=[list(tensor.shape) for _, tensor in batch],
            group_name=GROUP,
            flush_cache=last,
        )
        for _, tensor in batch:
            dist.broadcast(tensor, src=0, group=self.group)
        received()

    def _ask(self, path: str, **content: Any) -> Any:
        """Sends a request, and returns a function that waits for its answer: the server answers
        when it has received what this process sends meanwhile.
        """
        answers: list[Any] = []

        def post() -> None:
            request = urllib.request.Request(
                f"{self.url}/{path}",
                json.dumps(content).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request) as response:
                    answers.append(json.load(response))
            except OSError as error:
                answers.append({"success": False, "message": str(error)})

        thread = threading.Thread(target=post)
        thread.start()

        def wait() -> None:
            thread.join()
            if not answers[0]["success"]:
                raise RuntimeError(f"{self.url}/{path}: {answers[0]['message']}")

        return wait
