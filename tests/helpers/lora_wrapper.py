"""Wraps the linears of a model of Megatron-Core with adapters, as Megatron-Bridge does (its
LoRALinear, LoRALinearSplitQKV and LoRALinearSplitFC1UpGate): the same names of modules and
parameters, the same cuts over the ranks, and the same sharded_state_dict().

It computes nothing. tests/judge/test_live_adapters.py wraps models with the classes of
Megatron-Bridge too.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

# the adapters of one linear in the classes LoRA and CanonicalLoRA
PARTS = {
    "linear_qkv": ("adapter_q", "adapter_k", "adapter_v"),
    "linear_fc1": ("adapter_up", "adapter_gate"),
}
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapter(torch.nn.Module):
    """The two factors of one weight."""

    def __init__(
        self, into: int, out: int, dim: int, alpha: int, name: str, config: Any, expert: bool
    ) -> None:
        super().__init__()
        self.name, self.config, self.alpha, self.dim = name, config, alpha, dim
        row = name.endswith(("linear_proj", "linear_fc2"))
        given: dict[str, Any] = {"config": config, "bias": False, "is_expert": expert}
        given["init_method"] = config.init_method
        if row:
            self.linear_in = RowParallelLinear(
                into, dim, input_is_parallel=True, skip_bias_add=True, **given
            )
        else:
            self.linear_in = ColumnParallelLinear(into, dim, gather_output=True, **given)
        self.linear_out = ColumnParallelLinear(dim, out, gather_output=row, **given)
        self.to(config.params_dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        found = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        key = f"{prefix}linear_out.weight"
        if "linear_fc1" in self.name and self.config.gated_linear_unit:
            out[key] = apply_swiglu_sharded_factory(out[key], sharded_offsets)
        return found | out


class Adapters(torch.nn.ModuleDict):
    """The adapters of a linear that packs several weights."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, adapter in self.items():
            found |= adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


class Wrapped(torch.nn.Module):
    """A linear with its adapters."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        found = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        state = self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return dict(found) | state


def wrap(chunks: list[Any], kind: str, dim: int, alpha: int, target_modules: Any = TARGETS) -> None:
    """Wraps the linears of these names in all chunks.

    kind: "lora", or "canonical" for an adapter of each packed weight.
    """
    for chunk in chunks:
        linears = [
            (path, module)
            for path, module in chunk.named_modules()
            if path.rpartition(".")[2] in target_modules
        ]
        for path, module in linears:
            above, _, name = path.rpartition(".")
            parent = chunk.get_submodule(above)
            adapter = _adapter(path, module, kind, dim, alpha).to(module.weight.device)
            setattr(parent, name, Wrapped(module, adapter))


def _adapter(path: str, module: Any, kind: str, dim: int, alpha: int) -> torch.nn.Module:
    name, config = path.rpartition(".")[2], module.config
    expert = ".experts." in path
    into, out = module.input_size, module.output_size
    given: tuple[Any, ...] = dim, alpha, path, config, expert
    if kind == "lora" or name not in PARTS or expert:
        return Adapter(into, out, *given)
    sizes = [out // 2] * 2
    if name == "linear_qkv":
        groups, width = config.num_query_groups, config.kv_channels
        sizes = [config.num_attention_heads * width, groups * width, groups * width]
    parts = zip(PARTS[name], sizes, strict=True)
    return Adapters({part: Adapter(into, size, *given) for part, size in parts})
