"""The two names that one tensor has in layers of Transformer Engine and in local ones."""

from __future__ import annotations

import re
from collections.abc import Collection

# One tensor has two names: one in a Transformer Engine layer, where the norm is part of the linear
# behind it and experts are grouped, and one in a local layer. The last pair are the names up to
# megatron-core 0.16 and from 0.17 on. `torch` files contain all of these; in the keys of
# `torch_dist` megatron-core renames some itself, and the norm before a MoE is left. Each side is a
# regular expression and the replacement that gives the other name.
TWO_NAMES = (
    (
        (r"self_attention\.linear_qkv\.layer_norm_(\w+)$", r"input_layernorm.\1"),
        (r"input_layernorm\.(weight|bias)$", r"self_attention.linear_qkv.layer_norm_\1"),
    ),
    (
        (r"mlp\.linear_fc1\.layer_norm_(\w+)$", r"pre_mlp_layernorm.\1"),
        (r"pre_mlp_layernorm\.(weight|bias)$", r"mlp.linear_fc1.layer_norm_\1"),
    ),
    (
        (r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2"),
        (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r"experts.\2.\3\1"),
    ),
    (
        (r"linear_(q|kv)_up_proj\.layer_norm_(\w+)$", r"\1_layernorm.\2"),
        (
            r"self_attention\.(q|kv)_layernorm\.(weight|bias)$",
            r"self_attention.linear_\1_up_proj.layer_norm_\2",
        ),
    ),
    (
        (r"^(mtp\.layers\.\d+)\.transformer_layer\.", r"\1.mtp_model_layer."),
        (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    ),
)


def other_name(name: str, there: Collection[str]) -> str:
    """Returns the name of the tensor `name` in `there`, by one or several of TWO_NAMES; if none of
    them is there, `name` itself.
    """
    names = [name]
    for sides in TWO_NAMES:
        others = [
            re.sub(pattern, replacement, one) for one in names for pattern, replacement in sides
        ]
        names += [other for other in others if other not in names]
    return next((one for one in names if one in there), name)
