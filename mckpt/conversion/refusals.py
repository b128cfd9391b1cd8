"""Why a plan is refused. Each function raises one error, or returns because the plan may go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint, VocabSizeUnknown
from mckpt.checkpoint.description import family_for
from mckpt.conversion.target import Target
from mckpt.errors import DestinationError, MappingError, UsageError
from mckpt.formats.base import WEIGHT_DTYPES, Format, Names
from mckpt.formats.hf_config import CONFIG, read_config
from mckpt.formats.megatron.common_state import COMMON_OBJECT_SINCE
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile


def refuse_options(target: Target, format: Format) -> None:
    """UsageError for an option for which the format has no use."""
    if target.layer_keys is not None and not format.layer_keys:
        raise UsageError(
            f"--layer-keys: the format {format} has no choice of layer keys; leave it out"
        )
    if target.common_as_object and not format.common_object:
        raise UsageError(
            f"--common-state object: the format {format} cannot keep the common state as an object;"
            " leave it out"
        )


def refuse_old_version(target: Target, megatron: list[int]) -> None:
    """UsageError if the megatron-core that shall load the checkpoint could not read it."""
    if target.common_as_object and megatron < COMMON_OBJECT_SINCE:
        since, asked = (".".join(map(str, v)) for v in (COMMON_OBJECT_SINCE, megatron))
        raise UsageError(
            f"--common-state object: megatron-core reads it from {since} on, and"
            f" --megatron-version is {asked}; leave one of them out"
        )


def refuse_choices(target: Target, dialect: MappingFile) -> None:
    """UsageError for a choice that is asked for and that the dialect does not have."""
    impl, layers = target.transformer_impl, target.layer_keys
    grouped = {None: None, True: "grouped", False: "sequential"}[target.grouped_experts]
    for choice, asked, option in (
        ("transformer_impl", impl, f"--transformer-impl {impl}"),
        ("experts", grouped, f"--{grouped}-experts"),
        ("layers", layers, f"--layer-keys {layers}"),
    ):
        known = dialect.choices[choice]
        if asked is not None and asked not in known:
            raise UsageError(
                f"{option}: a checkpoint of the dialect {dialect.name} has {' or '.join(known)}"
                " only; leave the option out"
            )


def refuse_sizes(dialect: MappingFile, dims: Dims, parallel: Parallel) -> None:
    """UsageError if Megatron could not launch the model at these sizes."""
    parallel.check(dims["num_experts"])
    parallel.split(dialect.num_numbers(dims), dims["mtp_layers"])
    heads, groups = dims["num_heads"], dims["num_query_groups"]
    moe = dims["moe_layers"]
    cut = {
        "ffn_size": not all(moe),
        "shared_ffn_size": any(moe),
        "expert_ffn_size": any(moe) and parallel.etp is None,
    }
    widths = {name: dims[name] for name, is_cut in cut.items() if is_cut}
    fit = [
        n
        for n in range(1, heads + 1)
        if not any(whole % n for whole in (heads, *widths.values()))
        and (groups % n == 0 or n % groups == 0)
    ]
    cure = f"choose a tp of {', '.join(map(str, fit))}"
    if heads % parallel.tp:
        raise UsageError(f"{heads} attention heads are not divisible by tp {parallel.tp}; {cure}")
    if groups % parallel.tp and parallel.tp % groups:
        raise UsageError(
            f"{groups} query groups (k and v heads) are neither divisible by tp {parallel.tp} nor a"
            f" divisor of it; {cure}"
        )
    for name, width in widths.items():
        if width % parallel.tp:
            raise UsageError(f"{name} {width} is not divisible by tp {parallel.tp}; {cure}")


def refuse_casts(source: Checkpoint, dtype: str) -> None:
    """UsageError if the source has tensors of a dtype that --dtype cannot cast."""
    held = {s.dtype for s in source.layout.stored}
    strange = sorted(d for d in held if d not in WEIGHT_DTYPES)
    if strange:
        raise UsageError(
            f"--dtype {dtype}: the source holds {', '.join(strange)}, which is not cast"
        )


def refuse_optimizer(source: Checkpoint, target: Target) -> None:
    """UsageError if the source holds more than weights, unless --no-optimizer leaves it behind."""
    if (left := source.left_behind()) and not target.no_optimizer:
        raise UsageError(
            f"{source.path}: holds more than weights: {', '.join(left)}. Weights alone are moved;"
            " give --no-optimizer to leave the rest behind"
        )


def refuse_unloadable(source: Checkpoint, dialect: MappingFile, facts: Mapping[str, Any]) -> None:
    """MappingError if Megatron could not load the model.

    facts: the dims, `megatron` (its version) and `transformer_impl`.
    """
    if refused := dialect.warnings(facts, loads=False):
        raise MappingError.of(
            f"{source.path}: Megatron could not load what would be written:", list(refused.values())
        )


def refuse_inexact(found: Mapping[str, str], target: Target, where: str) -> dict[str, str]:
    """Returns `found` if --allow-inexact names all of it; MappingError lists the rest.

    found: name -> why the target would not compute what the source does.
    """
    refused = {k: v for k, v in found.items() if k not in target.allow_inexact}
    if refused:
        raise MappingError.of(
            f"{where} would not compute what the source does:",
            [v if k == "config" else f"{k}: {v}" for k, v in refused.items()],
            "If you know that it does not matter, give "
            + " ".join(f"--allow-inexact {k}" for k in refused),
        )
    return dict(found)


def refuse_misfit(source: Checkpoint, target: Names, title: str) -> None:
    """MappingError if the source's mapping and the target's do not name the same logical tensors.

    title: what the target is called in the message.
    """
    family = source.mapping.path.name
    wanted = {name for b in target.bound() for name in b.rule.of}
    found = mapping.misfits(family, set(source.layout.shapes), title, wanted, target.dims)
    if found:
        cure = (
            "Add what is missing to the family file; `mckpt mappings check FILE --config"
            " CONFIG.JSON` says what is left."
        )
        raise MappingError.of(
            f"{source.path}: {family} and {title} do not have the same tensors:", found, cure
        )


def refuse_stacked_keys(target: Target, format: Format, implied: str | None) -> None:
    """UsageError if one key for all layers is asked for, and the args make Megatron look for a key
    of each layer.

    implied: `stacked` or `per_layer`, as the args imply.
    """
    if format.global_keys and target.layer_keys == "stacked" and implied == "per_layer":
        raise UsageError(
            "the layers differ, or moe_layer_freq is a list: Megatron asks for per-layer keys then"
        )


def refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """DestinationError if a DST/hf that is there describes another model: it would be read as this
    one's.
    """
    if not (side / CONFIG).is_file():
        return
    config = read_config(side)
    try:
        dims = source.dims
    except VocabSizeUnknown:
        return
    try:
        kept = str(side / MAPPING) if (side / MAPPING).is_file() else source.named.family_name
        family_for(config, kept, str(side / CONFIG)).read(config, dims, str(side / CONFIG))
    except MappingError as e:
        raise DestinationError(
            f"{side}: describes another model; all checkpoints of one save directory share its"
            f" hf. {e}"
        ) from None
