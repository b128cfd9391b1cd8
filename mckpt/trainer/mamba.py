"""Mamba-2 layers of megatron-core in plain torch, for machines without a GPU or without mamba_ssm.

megatron-core computes them with the kernels of mamba_ssm alone, and reorders axes with einops.
`install()` replaces the missing functions by those below. The scan takes one position after
the other, as the definition of Mamba-2 does (arXiv 2405.21060, section 2), so it is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional as F


def install() -> None:
    """Replaces the functions of mamba_ssm and einops that cannot run here. May be called again."""
    # mypy takes these names for constants, and a replacement for an error
    mixer: Any = mamba_mixer
    parallel: Any = mamba_context_parallel
    if not mixer.HAVE_EINOPS:
        mixer.HAVE_EINOPS = parallel.HAVE_EINOPS = True
        mixer.rearrange = rearrange
    if not mixer.HAVE_MAMBA_SSM or not torch.cuda.is_available():
        mixer.HAVE_MAMBA_SSM, mixer.MAMBA_HAS_STATE_DTYPE = True, False
        mixer.mamba_split_conv1d_scan_combined = convolve_and_scan
        mixer.ExtendedRMSNorm = GroupNorm


def rearrange(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """Reorders the axes of a tensor as einops does. A `1` is an axis of that size, which goes."""
    before, after = (side.split() for side in pattern.split("->"))
    x = x.squeeze(before.index("1")) if "1" in before else x
    before = [axis for axis in before if axis != "1"]
    return x.permute([before.index(axis) for axis in after])


def convolve_and_scan(
    zxbcdt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    *,
    D: torch.Tensor,  # the name in mamba_ssm
    headdim: int,
    ngroups: int,
    **options: Any,
) -> torch.Tensor:
    """Returns the gated output of a Mamba-2, [batch, length, heads * headdim].

    zxbcdt: [batch, length, z x B C dt], where z and x are [heads, headdim] and B and C are
    [ngroups, state]. conv_weight: [x B C, kernel]. dt_bias, decay (negative) and D: [heads].
    """
    heads = len(decay)
    width = heads * headdim
    z, xbc, dt = zxbcdt.split([width, len(conv_weight), heads], dim=-1)
    padded = F.pad(xbc.transpose(1, 2), (conv_weight.shape[1] - 1, 0))
    convolved = F.conv1d(padded, conv_weight[:, None], conv_bias, groups=len(conv_weight))
    state = (len(conv_weight) - width) // 2
    x, b, c = F.silu(convolved).transpose(1, 2).float().split([width, state, state], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2)
        for each in (b, c)
    )
    dt = F.softplus(dt.float() + dt_bias.float())
    out = []
    memory = x.new_zeros(len(x), heads, headdim, b.shape[-1])
    for at in range(x.shape[1]):
        step = dt[:, at, :, None, None]
        taken = x[:, at, :, :, None] * b[:, at, :, None, :]
        memory = torch.exp(step * decay.float()[:, None, None]) * memory + step * taken
        out.append((memory * c[:, at, :, None, :]).sum(-1) + D.float()[:, None] * x[:, at])
    y: torch.Tensor = torch.stack(out, dim=1).flatten(2) * F.silu(z.float())
    return y.type_as(zxbcdt)


class GroupNorm(torch.nn.Module):
    """RMSNorm of each group of the gated output, computed in fp32 (mamba_ssm's RMSNormGated
    without a gate). The tensor-parallel ranks hold whole groups.
    """

    tp_group: Any  # set by MambaMixer

    def __init__(
        self, width: int, *, eps: float, group_size: int, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).type_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
