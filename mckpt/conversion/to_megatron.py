"""Plans a Megatron checkpoint: its vocabulary, names, args and launch line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint, VocabSizeUnknown
from mckpt.checkpoint.description import family_for
from mckpt.containers import safe_pickle
from mckpt.conversion.args import args_of
from mckpt.conversion.destination import Destination
from mckpt.conversion.facts import (
    dequantised,
    facts_of,
    kinds_of,
    mapping_to_keep,
    naming,
    refuse_inexact,
    refuse_misfit,
)
from mckpt.conversion.plan import Plan
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import Target, experts_option
from mckpt.errors import DestinationError, MappingError, UsageError
from mckpt.formats.base import Names, Wanted
from mckpt.formats.hf_config import CONFIG, QUANTISED, read_config, side_files
from mckpt.formats.megatron import megatron_args
from mckpt.formats.megatron.common_state import COMMON_OBJECT_SINCE
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.join import join
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.storage.files import TargetFile


def plan_megatron(source: Checkpoint, destination: Destination, target: Target) -> Plan:
    """Returns the plan of a Megatron checkpoint of any format."""
    dialect = dialect_to_write(source, target)
    megatron = dialect.version(target.megatron_version)
    _refuse_old_version(target, megatron)
    # `moved` is the source; from Megatron to Megatron, with the vocabulary's padding rows
    moved, padded = _vocabulary(source, dialect, target)
    # Damage is reported first: dims that do not fit the tensors must not be computed with.
    _ = moved.layout
    dims, parallel = moved.dims, target.parallel
    check_sizes(dims, parallel)
    chosen = {**_choices(moved, destination, target), **dialect.choices_for(megatron)}
    inexact = _inexact(source, dialect, dims, chosen["transformer_impl"], target)
    if (left := source.left_behind()) and not target.no_optimizer:
        raise UsageError(
            f"{source.path}: holds more than weights: {', '.join(left)}. mckpt converts weights"
            " only; give --no-optimizer to leave the rest behind"
        )
    kinds, dtype = kinds_of(moved, target)
    args = args_of(source, moved, destination, target, dialect, chosen, dtype, padded)
    names = Names(dialect, dims, {**chosen, "layers": args.layers}, parallel)
    refuse_misfit(moved, names, "Megatron")
    layout, outputs = destination.format.lay_out(
        Wanted(names, kinds, target.max_shard_size, padded, args.common, target.common_as_object)
    )
    line = megatron_args.launch(dialect, args.written)
    launch_files = megatron_args.files(line).items()
    outputs += [TargetFile.whole(name, text.encode()) for name, text in launch_files]
    side = SideFiles(destination.root, _side_of(source))
    side.refuse_other()
    if not side.files and (side.path / CONFIG).is_file():
        _refuse_side_of_other(source, side.path)
    facts = facts_of(
        source,
        moved,
        target,
        dialect,
        inexact,
        dequantised(moved),
        parallel=parallel.args(),
        choices=dict(names.choices),
        padded_vocab_size=padded,
        unit=destination.unit,
        common=hashlib.sha256(safe_pickle.dumps(args.common)).hexdigest(),
        common_as_object=target.common_as_object,
        args=line.flags,
        megatron_version=".".join(map(str, megatron)),
        **naming(source, MAPPING in side.files),
    )
    joined = join(moved.layout, layout)
    return Plan(moved, destination, target, joined, layout, outputs, side, [], facts)


def _refuse_old_version(target: Target, megatron: list[int]) -> None:
    """Raises UsageError if the chosen megatron-core could not read the checkpoint."""
    if target.common_as_object and megatron < COMMON_OBJECT_SINCE:
        since, asked = (".".join(map(str, v)) for v in (COMMON_OBJECT_SINCE, megatron))
        raise UsageError(
            f"--common-state object: megatron-core reads it from {since} on, and"
            f" --megatron-version is {asked}; leave one of them out"
        )


def dialect_to_write(source: Checkpoint, target: Target) -> MappingFile:
    """Returns the dialect to write: the one that the user names, else the source's, else its
    family's.
    """
    if source.is_megatron and target.dialect is None:
        return source.mapping
    return mapping.dialect_for(source.mapping, target.dialect)


def _vocabulary(source: Checkpoint, dialect: MappingFile, target: Target) -> tuple[Checkpoint, int]:
    """Returns the checkpoint to convert, and the rows of its padded vocabulary in the target.

    A Megatron checkpoint keeps its padding rows and their values if the target's tp divides them,
    because the softmax includes those rows. Otherwise, and from Hugging Face, the true vocabulary
    is padded anew, as Megatron does (vocab_utils.py).
    """
    if source.is_megatron:
        whole = source.padded()
        if whole is not None and whole.dims["vocab_size"] % target.parallel.tp == 0:
            return whole, whole.dims["vocab_size"]
        try:
            _ = source.dims
        except VocabSizeUnknown:
            rows = whole.dims["vocab_size"] if whole else 0
            raise UsageError(
                f"{source.path}: {rows} padded rows of the vocabulary are not divisible by tp"
                f" {target.parallel.tp}; give --vocab-size N"
            ) from None
    return source, padded_rows(source.dims, dialect, target)


def padded_rows(dims: Dims, dialect: MappingFile, target: Target) -> int:
    """Returns the rows of the vocabulary, padded as Megatron pads it for these sizes."""
    multiple = (target.divisible_by or dialect.given["divisible_by"]) * target.parallel.tp
    return -(-int(dims["vocab_size"]) // multiple) * multiple


def check_sizes(dims: Dims, parallel: Parallel) -> None:
    """Raises UsageError if Megatron could not run the model at these sizes."""
    parallel.check(dims["num_experts"])
    parallel.stages(dims["num_layers"], dims["mtp_layers"])
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


def _choices(source: Checkpoint, destination: Destination, target: Target) -> dict[str, Any]:
    """Returns the dialect's choices for the target: the user's, else the source's, else Megatron's
    defaults.
    """
    own = source.names.choices
    impl = target.transformer_impl or own.get("transformer_impl") or "transformer_engine"
    if target.grouped_experts is not None:
        if not source.dims["num_experts"]:
            raise UsageError(
                f"{experts_option(target)}: {source.path} is a dense model, which has no experts;"
                " leave it out"
            )
        grouped = target.grouped_experts
        if grouped and impl == "local":
            raise UsageError(
                "grouped experts need --transformer-impl transformer_engine: the local spec names"
                " no tensors for them"
            )
    elif target.transformer_impl is None and own:
        grouped = own["experts"] == "grouped"
    else:
        grouped = impl == "transformer_engine"
    return {
        "keys": "global" if destination.format.global_keys else "local",
        "transformer_impl": impl,
        "experts": "grouped" if grouped else "sequential",
        "pp": target.parallel.pp,
    }


def _inexact(
    source: Checkpoint, dialect: MappingFile, dims: Dims, impl: str, target: Target
) -> dict[str, str]:
    """Returns the features that Megatron computes differently and that the user accepts: name ->
    reason.

    Raises MappingError with all features that the user does not accept, and for a model that
    Megatron could not load.
    """
    program = {
        "megatron": dialect.version(target.megatron_version),
        "transformer_impl": impl,
    }
    if refused := dialect.warnings({**dims, **program}, loads=False):
        raise MappingError.of(
            f"{source.path}: Megatron could not load what would be written:", list(refused.values())
        )
    if source.is_megatron:
        return source.allowed
    config = read_config(source.path)
    unknown = {
        key: (
            f"config.json has {mapping.lookup(config, key)!r}, and"
            f" {source.mapping.path.name} does not mention this key: it may matter or not"
        )
        for key in source.mapping.unknown(config)
        if key != QUANTISED or not source.quantised
    }
    return refuse_inexact({**dialect.inexact(dims, program), **unknown}, target, "Megatron")


def _refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """Raises DestinationError if an existing DST/hf describes another model. This checkpoint would
    be read with that model's config.
    """
    config = read_config(side)
    try:
        dims = source.dims
    except VocabSizeUnknown:
        return
    try:
        kept = str(side / MAPPING) if (side / MAPPING).is_file() else source.naming.family_name
        family_for(config, kept, str(side / CONFIG)).read(
            config, dims, str(side / CONFIG), known_from=str(source.path)
        )
    except MappingError as e:
        raise DestinationError(
            f"{side}: describes another model; all checkpoints of one save directory share its"
            f" hf. {e}"
        ) from None


def _side_of(source: Checkpoint) -> dict[str, Path | bytes]:
    """Returns the Hugging Face files for DST/hf: config.json with the user's corrections, and the
    user's family file.
    """
    root = source.side_directory if source.is_megatron else source.path
    if root is None:
        return {}
    side: dict[str, Path | bytes] = {name: root / name for name in [CONFIG, *side_files(root)]}
    if source.overruled:
        config = source.mapping.restate(read_config(root), source.dims, source.overruled)
        side[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if (kept := mapping_to_keep(source)) is not None:
        side[MAPPING] = kept[1]
    return side
