"""The rotation that megatron-core calls with --apply-rope-fusion, of [seq, batch, heads, dim] and
not interleaved.
"""

import torch


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=False, fused=True, **_):
    assert tensor_format == "sbhd" and not interleaved
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    first, second = turned.chunk(2, -1)
    angles = freqs[: t.shape[0]].to(t.device)
    return torch.cat(
        (turned * angles.cos() + torch.cat((-second, first), -1) * angles.sin(), rest), -1
    )
