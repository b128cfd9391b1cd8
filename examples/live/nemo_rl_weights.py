"""Gives the vLLM workers of NeMo-RL the tensors of mckpt in the place of those of Megatron-Bridge.

`Policy(..., worker_extension_cls_fqn="nemo_rl_weights.MckptPolicyWorker")` makes its workers of
this class. Each group of tensors is sent as one bucket of `Sync`, so that it is not copied into a
buffer before. Written for NeMo-RL of August 2026: colocated vLLM workers, which open handles of
CUDA IPC, and workers of another cluster, which receive broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import torch
from nemo_rl.models.generation.vllm.quantization.fp8_train_utils import get_vllm_qkv_scale_names
from nemo_rl.models.policy.utils import (
    IPCProtocol,
    get_handle_from_tensor,
    get_runtime_env_for_policy_worker,
)
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from mckpt import live

ALIGN = 512  # bytes, of tensors in a buffer of NeMo-RL


class MckptPolicyWorkerImpl(MegatronPolicyWorkerImpl):
    def sync(self) -> live.Sync:
        """Returns the `Sync`, which is made when the weights are first asked for."""
        if not hasattr(self, "mckpt_sync"):
            self.mckpt_sync = live.Sync([self.model], like=self.cfg["model_name"])
        return self.mckpt_sync

    def scales(self, kv_scales: dict[str, float] | None) -> dict[str, torch.Tensor]:
        """Returns the scales of vLLM's KV cache by their names, if it is in fp8."""
        generation = self.cfg.get("generation") or {}
        cache = (generation.get("vllm_cfg") or {}).get("kv_cache_dtype", "auto")
        if generation.get("backend") != "vllm" or not cache.startswith("fp8"):
            return {}
        layers = range(self.model.config.num_layers)
        names = [name for layer in layers for name in get_vllm_qkv_scale_names(layer).values()]
        known, device = kv_scales or {}, next(self.model.parameters()).device
        return {name: torch.tensor([known.get(name, 1.0)], device=device) for name in names}

    def prepare_refit_info(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        self.refit_param_info_mcore = self._calculate_refit_param_info()
        forms = {name: (torch.Size(shape), d) for name, (d, shape) in self.sync().tensors.items()}
        return forms | {n: (scale.shape, scale.dtype) for n, scale in self.scales(None).items()}

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None, conversion_tasks: Any = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors one by one, for the transfers that pack them themselves."""
        yield from self.sync()(extra=self.scales(kv_scales))

    @torch.no_grad()
    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int = 0, kv_scales: dict[str, float] | None = None
    ) -> None:
        self.maybe_init_zmq()
        for bucket in self.sync().buckets(ALIGN, extra=self.scales(kv_scales)):
            if bucket.ready is not None:
                bucket.ready.synchronize()
            names = [tensor.name for tensor in bucket.tensors]
            handle = get_handle_from_tensor(bucket.buffer)
            self.zmq_socket.send_pyobj((handle, names, bucket.buffer.nbytes))
            self.zmq_socket.recv()  # the worker has read the bucket
        self.zmq_socket.send_pyobj(IPCProtocol.COMPLETE)
        self.zmq_socket.recv()


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MckptPolicyWorker(MckptPolicyWorkerImpl):
    pass
