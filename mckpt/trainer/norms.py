"""The norms of the local layer spec: like Transformer Engine's, and unlike torch's, they train under sequence parallelism.

megatron-core gives the local spec torch.nn.RMSNorm and LayerNorm, and refuses them where the sequence is cut over the TP ranks: every rank
then has the gradient of its own tokens only, and finalize_model_grads adds up those of the parameters that say so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in fp32 whatever the input's dtype, which the output has again."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.hidden_size = eps, hidden_size
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0  # the weight is then stored less 1
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # for finalize_model_grads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.offset
        if self.bias is None:
            return torch.nn.functional.rms_norm(x.float(), (self.hidden_size,), weight, self.eps).type_as(x)
        return torch.nn.functional.layer_norm(x.float(), (self.hidden_size,), weight, self.bias.float(), self.eps).type_as(x)


def with_own_norms(spec: Any) -> Any:
    """The local spec with `Norm` in place of every norm that megatron-core chose; changed in place."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if spec is WrappedTorchNorm or spec is gpt_layer_specs.LNImpl:
        return Norm
    if isinstance(spec, list):
        return [with_own_norms(item) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):  # ModuleSpec, and the submodules of each
        for field in dataclasses.fields(spec):
            if field.name != "params":
                setattr(spec, field.name, with_own_norms(getattr(spec, field.name)))
    return spec
