"""The layers of a HybridModel as local modules, because megatron-core has a spec of them for
Transformer Engine only.

The parameters have Transformer Engine's names and are cut like Transformer Engine's, in `torch`
files too: stock Megatron-LM names and cuts them so whatever its args.transformer_impl.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from mckpt.trainer.local_spec import Attention, LatentAttention, Norm, normalise


class NormedColumn(ColumnParallelLinear):
    """A column-parallel linear that normalises its input first. The parameters of the norm are
    layer_norm_weight and layer_norm_bias.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = Norm(config, input_size)
        self.eps, self.offset = config.layernorm_epsilon, norm.offset
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.normalised(x), *args, **kwargs)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input of the linear itself."""
        return normalise(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.offset)


class Whole(torch.nn.Linear):
    """A linear without a bias that every tensor-parallel rank has as a whole."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, bias: bool, **kwargs: Any
    ) -> None:
        assert not bias
        super().__init__(input_size, output_size, bias=False)
        parameter: Any  # see Norm
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


# --------------------------------------------------------------------------------------- the layers


def attention(config: Any) -> ModuleSpec:
    norm = Norm if config.qk_layernorm else IdentityOp
    return mixer(
        SelfAttention,
        SelfAttentionSubmodules(
            linear_qkv=NormedColumn,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
        attn_mask_type=AttnMaskType.causal,
    )


def latent_attention(config: Any) -> ModuleSpec:
    # The norm of a latent is a part of the linear behind it. Without a latent of the queries
    # megatron-core normalises the input of linear_q_proj, which is normalised already.
    linear = NormedColumn if config.qk_layernorm else ColumnParallelLinear
    return mixer(
        LatentAttention,
        MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            linear_q_down_proj=Whole,
            linear_q_up_proj=linear,
            linear_kv_down_proj=Whole,
            linear_kv_up_proj=linear,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
        input_norm=Norm,
        attn_mask_type=AttnMaskType.causal,
    )


def gated_delta_net(config: Any) -> ModuleSpec:
    return mixer(
        GatedDeltaNet,
        GatedDeltaNetSubmodules(in_proj=NormedColumn, out_norm=Norm, out_proj=RowParallelLinear),
    )


def mixer(module: Any, submodules: Any, input_norm: Any = IdentityOp, **params: Any) -> ModuleSpec:
    """Returns the spec of a layer that has self_attention and no mlp."""
    attention = ModuleSpec(module=module, submodules=submodules, params=params)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def mamba(config: Any) -> ModuleSpec:
    linears = MambaMixerSubmodules(in_proj=NormedColumn, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            mixer=ModuleSpec(module=MambaMixer, submodules=linears),
            mamba_bda=get_bias_dropout_add,
        ),
    )


def mlp(config: Any) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=NormedColumn, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=functools.partial(MLP.as_mlp_submodule, submodules=linears),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def experts(config: Any) -> ModuleSpec:
    # the spec is the same for any number of experts
    sequential = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp=sequential, mlp_bda=get_bias_dropout_add
        ),
    )


def mtp_block(config: Any) -> ModuleSpec:
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=Norm,
        hnorm=Norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,  # made of the pattern
        layer_norm=Norm,
    )
    layers = [ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)]
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers),
    )


# field of HybridStackSubmodules -> the function that makes its spec
PARTS: dict[str, Callable[[Any], ModuleSpec]] = {
    "attention_layer": attention,
    "mla_layer": latent_attention,  # from megatron-core 0.19 on
    "gdn_layer": gated_delta_net,
    "mamba_layer": mamba,
    "mlp_layer": mlp,
    "moe_layer": experts,
    "mtp_block_spec": mtp_block,
}


def stack_spec(config: Any) -> ModuleSpec:
    """Returns the spec of the decoder, in which each kind of layer has local modules."""
    known = HybridStackSubmodules.__dataclass_fields__
    parts = {field: make(config) for field, make in PARTS.items() if field in known}
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**parts))


# ------------------------------------------------------------------- where a spec is not sufficient


@contextmanager
def own_modules() -> Iterator[None]:
    """Replaces modules that megatron-core takes by their name, not from the spec, in the block."""
    named: list[tuple[Any, str, Any]] = [
        (hybrid_block, "TENorm", Norm),
        (multi_latent_attention, "TELinear", Whole),
        # the latent of a mixture of experts
        (moe_layer, "TELinear", Whole),
        (moe_layer, "HAVE_TE", True),
    ]
    kept = [getattr(module, name) for module, name, _ in named]
    for base in GatedDeltaNet.__mro__:
        module = sys.modules[base.__module__]
        # In deterministic_mode only this function of FLA is called. mypy cannot know the names of a
        # module that is found at run time, hence the ignore.
        if getattr(module, "HAVE_FLA", None) is False:
            module.HAVE_FLA, module.l2norm = True, l2norm  # type: ignore[attr-defined]
    try:
        for module, name, own in named:
            setattr(module, name, own)
        yield
    finally:
        for (module, name, _), before in zip(named, kept, strict=True):
            setattr(module, name, before)


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divides by the length of the last dimension, as flash-linear-attention does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).type_as(x)


def name_experts(chunk: torch.nn.Module) -> None:
    """Names the experts in state dicts as grouped experts are: linear_fc1.weight3 instead of
    local_experts.3.linear_fc1.weight. Both names can be loaded.
    """
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            module.register_state_dict_post_hook(_to_grouped)
            module.register_load_state_dict_pre_hook(_to_sequential)


def _to_grouped(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    pattern = re.compile(re.escape(prefix) + r"local_experts\.(\d+)\.(linear_fc[12]\.)(\w+)$")
    for name in list(state):
        if found := pattern.match(name):
            expert, linear, kind = found.groups()
            value = state.pop(name)
            if kind == "_extra_state":  # one for all experts
                state[f"{prefix}{linear}{kind}"] = value
            else:
                state[f"{prefix}{linear}{kind}{expert}"] = value


def _to_sequential(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    pattern = re.compile(re.escape(prefix) + r"(linear_fc[12]\.)(weight|bias)(\d+)$")
    for name in list(state):
        if found := pattern.match(name):
            linear, kind, expert = found.groups()
            state[f"{prefix}local_experts.{expert}.{linear}{kind}"] = state.pop(name)
        elif re.fullmatch(re.escape(prefix) + r"linear_fc[12]\._extra_state", name):
            del state[name]
