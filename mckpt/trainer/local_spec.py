"""What the local layer spec needs beside megatron-core's own modules, so that it runs and trains
what Transformer Engine does.
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
    """RMSNorm or LayerNorm over the last dimension, computed in fp32 whatever the input's dtype,
    which the output has again.

    Like Transformer Engine's, and unlike torch's, which megatron-core gives the local spec, it
    trains under sequence parallelism: every rank then has the gradient of its own tokens only, and
    finalize_model_grads adds up those of the parameters that say so.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.hidden_size = eps, hidden_size
        # the weight is then stored less 1
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.bias = (
            torch.nn.Parameter(torch.zeros(hidden_size))
            if config.normalization == "LayerNorm"
            else None
        )
        parameter: Any  # with a mark that finalize_model_grads looks for
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.offset
        if self.bias is None:
            return torch.nn.functional.rms_norm(
                x.float(), (self.hidden_size,), weight, self.eps
            ).type_as(x)
        return torch.nn.functional.layer_norm(
            x.float(), (self.hidden_size,), weight, self.bias.float(), self.eps
        ).type_as(x)


class Attention(DotProductAttention):
    """Attention whose heads of q and k may be wider than those of v, as multi-latent attention's
    are; megatron-core 0.16 names the widths and refuses them.
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
    """Multi-latent attention of the modules that the spec names.

    megatron-core 0.19 chooses norms and up projections anew, and refuses a model without a latent
    of the queries in the local spec: it builds the norms of the latents as a part of Transformer
    Engine's linears only. Up to 0.18 the method does not exist, and the spec is obeyed.
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
    """Puts `Norm`, `Attention` and `LatentAttention` into a local spec, in place of
    megatron-core's.

    Changes the spec, and returns it.
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
