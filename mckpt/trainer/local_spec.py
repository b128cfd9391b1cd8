"""Modules for the local layer spec where megatron-core's own cannot run or train all models that
Transformer Engine's can.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in fp32. The output has the input's
    dtype.

    It trains under sequence parallelism, like Transformer Engine's norm and unlike torch's, which
    megatron-core uses in the local spec: every rank has the gradient of its own tokens only, and
    finalize_model_grads adds the gradients of parameters marked as sequence_parallel.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        # a zero-centered weight is stored less 1
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        has_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if has_bias else None
        parameter: Any  # gets the mark for finalize_model_grads
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalise(x, self.weight, self.bias, self.eps, self.offset)


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """Returns LayerNorm of `x`, or RMSNorm if there is no bias, with `offset` added to the weight.
    Computes in fp32; the result has the dtype of `x`.
    """
    weight = weight.float() + offset
    if bias is None:
        out = torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps)
    else:
        out = torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias.float(), eps)
    return out.type_as(x)


class Attention(DotProductAttention):
    """Attention whose heads of q and k may be wider than those of v, as in multi-latent attention.
    megatron-core 0.16 passes the widths and refuses them.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentAttention(MLASelfAttention):
    """Multi-latent attention with the modules of the spec.

    megatron-core 0.19 replaces the norms and up projections of the spec, and refuses a model
    without a latent of the queries in the local spec, because it builds the norms of the latents
    only as a part of Transformer Engine's linears. Up to 0.18 the method below does not exist, and
    megatron-core uses the modules of the spec.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = (
            "linear_q_proj",
            "linear_q_up_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        )
        return {name: getattr(submodules, name, None) or IdentityOp for name in names}


def with_own_modules(spec: Any) -> Any:
    """Replaces megatron-core's modules in a local spec by `Norm`, `Attention` and
    `LatentAttention`. Changes the spec, and returns it.
    """
    if spec is WrappedTorchNorm or spec is gpt_layer_specs.LNImpl:
        return Norm
    if spec is DotProductAttention:
        return Attention
    if spec is MLASelfAttention:
        return LatentAttention
    if isinstance(spec, list):
        return [with_own_modules(item) for item in spec]
    # ModuleSpec, and the submodules of each
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            if field.name != "params":
                setattr(spec, field.name, with_own_modules(getattr(spec, field.name)))
    return spec
