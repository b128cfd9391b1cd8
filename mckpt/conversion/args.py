"""Megatron's args and common state for a checkpoint that is written."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers import safe_pickle
from mckpt.conversion.destination import Destination
from mckpt.conversion.facts import true_vocab
from mckpt.conversion.target import Target
from mckpt.errors import UsageError
from mckpt.formats.megatron.common_state import new_common
from mckpt.formats.megatron.save_directory import iteration_of
from mckpt.mapping import Dims, MappingFile

# args that follow --transformer-impl; see parts/args.yaml
FOLLOWS_IMPL = (
    "no_persist_layer_norm",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "sequence_parallel",
)
PER_LAYER = "non_homogeneous_layers"  # in the common state: where Megatron-Core looks first


class Args(NamedTuple):
    """What a checkpoint says beside its tensors."""

    written: dict[str, Any]  # all args, for the launch line
    common: dict[str, Any]  # the common state, with the args in it
    layers: str  # the dialect's choice: stacked or per_layer


def args_of(
    source: Checkpoint,
    moved: Checkpoint,
    destination: Destination,
    target: Target,
    dialect: MappingFile,
    chosen: dict[str, Any],
    dtype: str,
    padded: int,
) -> Args:
    """The args and common state of the target.

    Those of a Megatron source are kept, but for what the conversion changes.

    moved: the source with its padded vocabulary. dtype: of most of the weights. padded: rows of the
    vocabulary.
    """
    same = source.is_megatron and source.mapping.name == dialect.name
    given = {
        **chosen,
        "stages": _stages(dialect, moved.dims, target),
        "dtype": dtype,
        "padded_vocab_size": padded,
        "divisible_by": target.divisible_by or dialect.given["divisible_by"],
        "format": destination.format.name,
        "tp": target.parallel.tp,
    }
    dims = {**moved.dims, "vocab_size": true_vocab(source)}
    written = {**dialect.write(dims, given), **target.parallel.args()}
    own = (source.args or {}) if same else {}
    # a dense model's args say nothing of its layers: they are alike
    said = dialect.say_choices({**written, **own})
    layers = target.layer_keys or str(said.get("layers", dialect.choices["layers"][0]))
    if target.layer_keys is None and same:
        layers = _implied_layers(source, moved, destination, layers)
    iteration = iteration_of(str(destination.unit)) or 0
    if source.args is None or source.opened.common is None:
        common = new_common(_python(written), iteration)
    else:
        kept = _replaced(source, target, written)
        kept.update({key: written[key] for key in dialect.keys_with("stages") if key in written})
        if not same:
            kept.update(_restated(source.mapping, dialect, written))
        left = source.left_behind()
        fields = source.opened.common.changed(_python(kept))
        common = {k: v for k, v in fields.items() if not (k in dialect.ignore or k in left)}
        common["iteration"] = iteration
        written = {**written, **{k: v for k, v in source.args.items() if v is not None}, **kept}
        if not same and "content_metadata" in common:
            marks = common["content_metadata"]
            common["content_metadata"] = {k: v for k, v in marks.items() if k != PER_LAYER}
    if target.layer_keys is not None and destination.format.global_keys:
        if target.layer_keys == "stacked" and (
            dialect.say_choices({**written, **own}).get("layers") == "per_layer"
        ):
            raise UsageError(
                "the layers differ, or moe_layer_freq is a list: Megatron asks for per-layer keys"
                " then"
            )
        marked = {PER_LAYER: target.layer_keys == "per_layer"}
        common["content_metadata"] = {**common.get("content_metadata", {}), **marked}
    return Args(written, common, layers)


def _implied_layers(
    source: Checkpoint, moved: Checkpoint, destination: Destination, said: str
) -> str:
    """Whether all layers have one key: as in a source of global keys, else as the args say."""
    if source.opened.format.global_keys and destination.format.global_keys:
        return str(moved.names.choices["layers"])
    fields = source.opened.common.fields if source.opened.common else {}
    if (fields.get("content_metadata") or {}).get(PER_LAYER):
        return "per_layer"
    return said


def _stages(dialect: MappingFile, dims: Dims, target: Target) -> list[list[int]]:
    """The numbers of the layers of each pipeline stage, in the order of the stages."""
    sizes = target.parallel.split(dialect.num_numbers(dims), dims["mtp_layers"])
    ends = list(itertools.accumulate(sizes, initial=0))
    return [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]


def _restated(old: MappingFile, new: MappingFile, written: dict[str, Any]) -> dict[str, Any]:
    """The args that describe the model, in another dialect than the source's; None for those that
    the new dialect does not have.
    """
    described = [{key for dim in file.dims.values() for key in dim.keys} for file in (old, new)]
    facts = {key for key in written if key in {*new.flags, *described[1], *described[0]}}
    return {key: written.get(key) for key in facts | (described[0] - described[1])}


def _replaced(source: Checkpoint, target: Target, written: dict[str, Any]) -> dict[str, Any]:
    """The args of a Megatron source that a conversion writes anew."""
    own = source.args or {}
    names = [
        *target.parallel.args(),
        "padded_vocab_size",
        "transformer_impl",
        "moe_grouped_gemm",
    ]
    if target.dtype is not None:
        names += ["params_dtype", "bf16", "fp16"]
    if written["transformer_impl"] != own.get("transformer_impl", written["transformer_impl"]):
        names += FOLLOWS_IMPL
    # which experts need at tp > 1; the source run may have had tp 1
    elif written["sequence_parallel"]:
        names.append("sequence_parallel")
    out = {name: written[name] for name in names}
    if source.left_behind():
        out.update(no_save_optim=True, no_save_rng=True)
    return out


def _python(args: dict[str, Any]) -> dict[str, Any]:
    """Args with dtypes as torch's own objects, the way Megatron keeps them."""
    return {
        k: (
            safe_pickle.torch_dtype(v.removeprefix("torch."))
            if isinstance(v, str) and v.startswith("torch.")
            else v
        )
        for k, v in args.items()
    }
