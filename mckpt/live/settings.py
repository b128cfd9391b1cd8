"""Compares the settings of a live model that no tensor shows, such as the base of the rotary
embedding or the epsilon of the norms, with those of a checkpoint.

The config of the model states them, under the names of Megatron's args or others:

    config, model --> args --dialect--> dims  ==  dims of the checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import SourceError
from mckpt.mapping.forms import equal

_PLAIN = (bool, int, float, str, type(None))
# The tensors show the rows of the vocabulary, and the length of sequences changes no value.
_OF_THE_RUN = {
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
}
_POSITIONS = "position_embedding_type"  # mrope of a whole model is rope for text
# arg -> the attribute of a model that has its value
_ATTRIBUTES = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "use_rope_scaling": "rotary_scaling",
}


def refuse_other_settings(
    chunks: Sequence[Any], model: Checkpoint, source: Checkpoint | None = None
) -> None:
    """Raises SourceError with every setting that a live model has with another value than a
    checkpoint. Settings that neither the config nor the attributes of the model state are not
    compared.

    chunks: of the live model in this process. model: the same, as `collected` describes it.
    source: the checkpoint; without it, what describes the model.
    """
    dims, dialect = (source or model).dims, model.mapping
    if (whole := dialect.whole) is not None:  # whose text model has the settings
        dialect = mapping.load(
            "megatron", mapping.text_dialect(dialect), model.model.options.mapping
        )
        chunks = [_inside(chunk, whole.text) for chunk in chunks]
    like = model.model.options.like
    stated = str(source.path if source else like or "the args")
    expected = dialect.write(dims)
    wanted = dialect.read(expected, source=stated)
    problems: list[str] = []
    for chunk in chunks:
        names = dialect.flags.keys() - _OF_THE_RUN - ({_POSITIONS} if whole else set())
        args = {name: value for name, value in args_of(chunk).items() if name in names}
        # other names of what the model states
        aliases = {
            k for dim in dialect.dims.values() if args.keys() & set(dim.keys) for k in dim.keys
        }
        kept = {name: value for name, value in expected.items() if name not in aliases}
        found = dialect.read({**kept, **args}, source="the live model")
        scope = {**found, "config": {**kept, **args}}
        for name, dim in dialect.dims.items():
            # a dim that this model does not have follows another one
            if equal(found[name], wanted[name]) or not (dim.when is None or dim.when(scope)):
                continue
            arg = f" ({', '.join(dim.keys)})" if dim.keys else ""
            problems.append(
                f"{name}{arg}: {found[name]!r} in the live model, {wanted[name]!r} in {stated}"
            )
    if problems:
        raise SourceError.of(
            "the live model computes with other settings than the checkpoint:",
            dict.fromkeys(problems),
            "Build the model with the args of the checkpoint, which `mckpt inspect SRC"
            " --megatron-args` prints. Where a difference is wanted, state it: mckpt.open(SRC,"
            " settings={NAME: VALUE}).",
        )


def _inside(chunk: Any, text: str) -> Any:
    """Returns the text model of a whole one. text: the start of its keys."""
    for name in text.split(".")[:-1]:
        chunk = getattr(chunk, name)
    return chunk


def args_of(chunk: Any) -> dict[str, Any]:
    """Returns the args of Megatron that the config and the attributes of a model state."""
    config = chunk.config
    args = {name: _value(value) for name, value in vars(config).items() if _is_plain(value)}
    args["num_experts"] = args.pop("num_moe_experts", None)
    if (heads := args.get("num_attention_heads")) and (groups := args.get("num_query_groups")):
        args["group_query_attention"] = groups != heads
    if hasattr(chunk, "encoder") and hasattr(chunk, "decoder"):
        # the config of a T5Model is that of its decoder, and Megatron's arg that of its encoder
        encoder, decoder = chunk.encoder.config.num_layers, chunk.decoder.config.num_layers
        args |= {"num_layers": encoder, "encoder_num_layers": encoder}
        args["decoder_num_layers"] = decoder
    args.update(_activation(config))
    for name, attribute in _ATTRIBUTES.items():
        if _is_plain(value := getattr(chunk, attribute, None)) and value is not None:
            args[name] = value
    return args


def _activation(config: Any) -> dict[str, Any]:
    """Returns the args of an activation function; none for one that no arg names."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    function, gated = config.activation_func, bool(config.gated_linear_unit)
    arg = {F.silu: "swiglu", quick_gelu: "quick_geglu", squared_relu: "squared_relu"}.get(function)
    if function is F.gelu and not gated:
        arg = "bias_gelu_fusion" if config.bias_activation_fusion else ""
    elif arg is None or gated != arg.endswith("glu"):
        return {}
    names = "swiglu", "quick_geglu", "squared_relu", "bias_gelu_fusion"
    return {name: name == arg for name in names}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
