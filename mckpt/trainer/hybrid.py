"""The layer pattern of a hybrid checkpoint, and the HybridModel of megatron-core that it describes.

    *-*-|*E*E/*E    two stages of four layers, and one depth of multi-token prediction

Every symbol is a layer of its own. `*` is attention, `+` multi-latent attention, `D` the same with
an indexer, `G` a gated delta net, `M` a Mamba-2, `-` a dense MLP and `E` a mixture of experts. `|`
ends a virtual stage: part v * pp + p belongs to virtual stage v of pipeline rank p. `/` begins a
depth of multi-token prediction.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

from mckpt.errors import UsageError

BUILT = "*+DGM-E"
MIXERS = "*+DGM"  # layers that mix the positions of a sequence


def pattern(args: Namespace) -> str | None:
    """Returns the layer pattern of a hybrid model, None of any other."""
    return getattr(args, "hybrid_layer_pattern", None)


def upgrade(args: Namespace) -> None:
    """Moves the patterns of a Megatron before 0.17 to hybrid_layer_pattern, as Megatron does when
    it loads (megatron/training/arguments.py, validate_args).

    Raises UsageError if they contradict it.
    """
    old, mtp = (
        getattr(args, name, None)
        for name in ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
    )
    if not (old or mtp):
        return
    new = pattern(args) or old or ""
    if old and layers(old) != layers(new):
        raise UsageError(
            f"hybrid_override_pattern is {old!r}, and hybrid_layer_pattern, its newer name, is"
            f" {new!r}"
        )
    if mtp and "/" not in new:
        new += f"/{mtp}" * (getattr(args, "mtp_num_layers", None) or 0)
    args.hybrid_layer_pattern = new or None
    args.hybrid_override_pattern = args.mtp_hybrid_override_pattern = None


def layers(pattern: str) -> str:
    """Returns the symbols of the decoder's layers, without the cuts."""
    return pattern.partition("/")[0].replace("|", "")


def cut(pattern: str, num_stages: int) -> str:
    """Returns the pattern with its layers cut as evenly as possible into virtual stages."""
    decoder, slash, mtp = pattern.partition("/")
    decoder = decoder.replace("|", "")
    if len(decoder) < num_stages:
        raise UsageError(
            f"hybrid_layer_pattern {pattern} has {len(decoder)} layers, which cannot be cut into"
            f" {num_stages} virtual stages (pp times vpp)"
        )
    bounds = [stage * len(decoder) // num_stages for stage in range(num_stages + 1)]
    return "|".join(decoder[a:b] for a, b in itertools.pairwise(bounds)) + slash + mtp


def problems(args: Namespace) -> list[str]:
    """Returns the problems of the pattern, and of args that must agree with it."""
    whole = args.hybrid_layer_pattern
    decoder, *depths = whole.split("/")
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    symbols, parts = layers(whole), decoder.split("|")
    arg = f"hybrid_layer_pattern {whole}"
    found = [
        f"{arg} has the layer {symbol}: not built here"
        for symbol in sorted({*symbols, *"".join(depths)} - {*BUILT})
    ]
    if "*" in whole and "+" in whole:
        found.append(f"{arg} has both * and +, which megatron-core does not build")
    if len(set(depths)) > 1:
        found.append(f"{arg}: the parts behind / must be equal")
    ends = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
    uneven = any(getattr(args, name, None) for name in ends)
    if len(parts) > 1 and len(parts) != pp * vpp:
        found.append(f"{arg} has {len(parts)} parts between |, and pp {pp} times vpp {vpp} is not")
    elif len(parts) == 1 and (vpp > 1 or (len(symbols) % pp and not uneven)):
        found.append(f"{arg} needs | where the {pp * vpp} virtual stages end")
    by_pattern = {
        "num_layers": len(symbols),
        "mtp_num_layers": len(depths),
        "num_experts": "E" in whole,
        "multi_latent_attention": "+" in whole or "D" in whole,
    }
    for name, expected in by_pattern.items():
        given = getattr(args, name, None) or 0
        if type(expected)(given) != expected:
            found.append(f"{name} is {given}, which does not agree with {arg}")
    if depths and pp > 1 and not getattr(args, "untie_embeddings_and_output_weights", True):
        found.append(
            f"{arg} has multi-token prediction, and embeddings are tied: megatron-core cannot save"
            f" or load such a HybridModel at pp {pp}"
        )
    if getattr(args, "use_rope_scaling", False):
        found.append("use_rope_scaling is True: HybridModel has no scaled rotary embedding")
    return found


def config(args: Namespace) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that differ for a hybrid model."""
    fields: dict[str, Any] = {"is_hybrid_model": True}
    if "D" in args.hybrid_layer_pattern:
        fields["experimental_attention_variant"] = "dsa"
    if "G" in args.hybrid_layer_pattern and args.transformer_impl != "transformer_engine":
        fields["deterministic_mode"] = True  # torch's gated delta rule instead of FLA's kernels
    return fields


def build(args: Namespace, uses_te: bool, **options: Any) -> Any:
    """Builds one chunk; `options` are those that HybridModel has in common with GPTModel."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    options["hybrid_layer_pattern"] = args.hybrid_layer_pattern
    if "M" in args.hybrid_layer_pattern:
        from mckpt.trainer import mamba

        mamba.install()
    if uses_te:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return HybridModel(hybrid_stack_spec=hybrid_stack_spec, **options)
    # imported late, because it imports megatron-core, which `initialize` has to patch first
    from mckpt.trainer import local_stack

    with local_stack.own_modules():
        spec = local_stack.stack_spec(options["config"])
        chunk = HybridModel(hybrid_stack_spec=spec, **options)
    local_stack.name_experts(chunk)
    return chunk


def places(pattern: str) -> list[tuple[int, str]]:
    """Returns for each layer of the decoder the layer of transformers that it belongs to, and the
    part of it: attn or mlp.

    A layer of transformers is one that mixes positions and, where one follows, an MLP.
    """
    found: list[tuple[int, str]] = []
    for symbol in layers(pattern):
        part = "attn" if symbol in MIXERS else "mlp"
        number, before = found[-1] if found else (-1, "mlp")
        found.append((number + (part == "attn" or before == "mlp"), part))
    return found
