"""Gives slime's engines the tensors of mckpt in the place of those of its own conversion.

Import this file in the actors of the trainer, before they are made, as in a plugin that the launch
line names. slime's classes then send one handle of CUDA IPC for each bucket, without a copy of it.
The weights are those that slime keeps on the host (its TensorBackuper), by slime's names.

`--hf-checkpoint` is the unquantised directory of the model; for an engine in fp8, give the Sync
`quantize="fp8"`. Written for slime of August 2026, whose SGLang cuts buckets of several dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
from slime.backends.megatron_utils.sglang import FlattenedTensorBucket
from slime.backends.megatron_utils.update_weight import update_weight_from_tensor
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.backends.megatron_utils.update_weight.hf_weight_iterator_base import HfWeightIteratorBase

from mckpt import live


class Chunk(list[tuple[str, torch.Tensor]]):
    """The tensors of a bucket, as slime takes them, and the bucket."""

    def __init__(self, bucket: live.FlatBucket) -> None:
        super().__init__(bucket.named())
        self.bucket = bucket


class Weights(HfWeightIteratorBase):
    """All tensors under their Hugging Face names, on all ranks."""

    def __init__(self, args: Any, model: Any, **keywords: Any) -> None:
        super().__init__(args, model, **keywords)
        self.sync = live.Sync(model, like=args.hf_checkpoint)

    def get_hf_weight_chunks(
        self, megatron_local_weights: Mapping[str, torch.Tensor], *args: Any, **keywords: Any
    ) -> Iterator[Chunk]:
        # the weights may not be on the device, if --offload-train has paused them
        named = named_params_and_buffers(self.args, self.model)
        for bucket in self.sync.buckets(weights=megatron_local_weights, named=named):
            yield Chunk(bucket)


def metadata(tensor: live.FlatTensor) -> FlattenedTensorMetadata:
    """Returns what SGLang reads of a tensor. It counts bytes in a bucket of several dtypes."""
    return FlattenedTensorMetadata(
        name=tensor.name,
        shape=torch.Size(tensor.shape),
        dtype=tensor.dtype,
        start_idx=tensor.offset,
        end_idx=tensor.offset + tensor.nbytes,
        numel=tensor.nbytes,
    )


def flattened(chunk: Chunk) -> dict[str, Any]:
    """Returns what slime makes of a chunk by joining its tensors."""
    bucket = chunk.bucket
    return {
        "flattened_tensor": bucket.buffer,
        "metadata": [metadata(tensor) for tensor in bucket.tensors],
    }


assert FlattenedTensorBucket.supports_multi_dtypes, "this SGLang joins tensors of one dtype only"
HfWeightIteratorBase.create = Weights
update_weight_from_tensor._build_flattened_tensor_data = flattened
