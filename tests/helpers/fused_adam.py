"""A stand-in for Transformer Engine's FusedAdam, for machines without a GPU: it keeps its state in
the dtypes that --use-precision-aware-optimizer asks for, as Transformer Engine 2.11 does.

    fp32 master copy of a bf16 weight    int16: the low half of its bits. The high half is that of
                                         the weight, less 1 if the low half, as a signed number, is
                                         negative
    fp16                                 the value / scale, with one scale for the shard of a
                                         parameter, so that the largest is half of fp16's range
    fp8                                  the same with the whole range of e4m3
    bf16                                 rounded

The scales are not in the checkpoint: Megatron saves the product, in fp32, and int16 as it is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from mckpt.trainer import train

FP8 = torch.float8_e4m3fn
RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, FP8: 448.0}


class FusedAdam(train.Adam):
    def __init__(
        self,
        params: Any,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        stored = {torch.uint8: FP8}  # Megatron's name of fp8
        self.dtypes = {
            "exp_avg": stored.get(exp_avg_dtype, exp_avg_dtype),
            "exp_avg_sq": stored.get(exp_avg_sq_dtype, exp_avg_sq_dtype),
            "master_param": master_weight_dtype,
        }
        self.master_weights, self.decoupled = master_weights, use_decoupled_grad
        self.remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self.scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def is_low(self, parameter: torch.Tensor, name: str) -> bool:
        """Returns whether a state is the low half of a master copy."""
        bf16 = parameter.dtype == torch.bfloat16
        return self.remainders and name == "master_param" and bf16

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        value = self.state[parameter][name]
        if self.is_low(parameter, name):
            return value
        scale = self.scales.get((parameter, name))
        return value.float() if scale is None else value.float() * scale

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        low = self.is_low(parameter, name)
        assert value.dtype == (torch.int16 if low else torch.float32)
        dtype = torch.int16 if low else self.dtypes[name]
        if dtype in RANGES:
            scale = value.abs().max() / RANGES[dtype]
            self.scales[parameter, name] = scale
            value = value * torch.where(scale > 0, scale.reciprocal(), 0.0)
        self.state[parameter][name] = value.to(dtype).clone()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        named = dict(zip(numbers, parameters, strict=True))
        for number, state in state_dict["state"].items():
            parameter = named[number]
            self.state[parameter] = {}
            for name, value in state.items():
                low = self.is_low(parameter, name)
                self.set_scaled_state(parameter, name, value if low else value.float())

    def initialize_state(self, parameter: torch.Tensor, remainders: bool = False) -> None:
        self.set_scaled_state(parameter, "exp_avg", torch.zeros(parameter.shape))
        self.set_scaled_state(parameter, "exp_avg_sq", torch.zeros(parameter.shape))
        if self.is_low(parameter, "master_param"):
            zeros = torch.zeros(parameter.shape, dtype=torch.int16)
            self.set_scaled_state(parameter, "master_param", zeros)
        elif self.master_weights:
            self.set_scaled_state(parameter, "master_param", parameter.detach().float())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = (
                    getattr(parameter, "decoupled_grad", None) if self.decoupled else parameter.grad
                )
                if parameter not in self.state:
                    self.initialize_state(parameter)
                if gradient is not None:
                    self.update(parameter, gradient, group)

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Any) -> None:
        state = {k: self.get_unscaled_state(parameter, k) for k in self.state[parameter]}
        low = self.is_low(parameter, "master_param")
        master = state.pop("master_param", parameter.detach())
        if low:
            master = whole(parameter.detach(), master)
        copy = master.float().clone()
        copy.grad = gradient.float()
        train.adam_step(copy, state, group)
        for name, value in state.items():
            self.set_scaled_state(parameter, name, value)
        if low:
            bits = copy.view(torch.int32)
            rest = bits.to(torch.int16)
            self.state[parameter]["master_param"] = rest
            high = ((bits - rest.to(torch.int32)) >> 16).to(torch.int16)
            parameter.data.copy_(high.view(torch.bfloat16))
            return
        parameter.data.copy_(copy)
        if self.master_weights:
            self.set_scaled_state(parameter, "master_param", copy)


def whole(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns fp32 master copies: their high bits are those of a bf16 weight."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def install() -> None:
    """Gives megatron-core this optimizer as that of Transformer Engine."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("", ".pytorch", ".pytorch.optimizers"):
        module = ModuleType(f"transformer_engine{name}")
        module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
        sys.modules.setdefault(module.__name__, module)
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    for place in (optimizer, optimizer_config):
        place.is_te_min_version = lambda *version: True
