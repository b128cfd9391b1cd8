"""Plans a Megatron checkpoint: its vocabulary, names, args and launch line."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.containers import safe_pickle
from mckpt.conversion import optimizer
from mckpt.conversion.args import Decided, args_of
from mckpt.conversion.bridge_files import bridge_files
from mckpt.conversion.destination import Destination
from mckpt.conversion.facts import (
    dequantised,
    facts_of,
    form_of,
    kinds_of,
    mapping_to_keep,
    named_by_user,
    shifted,
    text_notes,
)
from mckpt.conversion.plan import Plan
from mckpt.conversion.refusals import (
    lost_args,
    refuse_choices,
    refuse_inexact,
    refuse_misfit,
    refuse_old_version,
    refuse_side_of_other,
    refuse_sizes,
    refuse_stacked_keys,
    refuse_unloadable,
)
from mckpt.conversion.side_files import SideFiles, refuse_changed
from mckpt.conversion.target import TargetOptions
from mckpt.errors import SourceError, UsageError
from mckpt.formats import carried
from mckpt.formats.base import Names
from mckpt.formats.hf_config import (
    CONFIG,
    QUANTISED,
    has_tokenizer,
    left_out,
    read_config,
    side_files,
)
from mckpt.formats.megatron import megatron_args
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.join import join
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile, major_minor
from mckpt.storage.files import TargetFile

MAX_ROWS = 1 << 31  # of a padded vocabulary: far more than any model has


def plan_megatron(source: Checkpoint, destination: Destination, target: TargetOptions) -> Plan:
    """Returns the plan of a Megatron checkpoint of any format."""
    refuse_changed(source)
    dialect = dialect_to_write(source, target)
    megatron = _version(source, dialect, target, destination)
    target = replace(target, megatron_version=".".join(map(str, megatron)))
    refuse_old_version(target, megatron)
    refuse_choices(target, dialect)
    vocabulary = _vocabulary(source, dialect, target)
    moved, padded = vocabulary.moved, vocabulary.rows
    # Damage is reported first: dims that do not fit the tensors must not be computed with.
    _ = moved.layout
    dims = moved.dims
    parallel = _parallel(source, dialect, target, dims)
    target = replace(target, parallel=parallel)
    refuse_sizes(dialect, dims, parallel)
    chosen = {**_choices(moved, destination, target, dialect), **dialect.choices_for(megatron)}
    inexact = _inexact(source, dialect, dims, chosen["transformer_impl"], target)
    kept = optimizer.keeps(moved, target)
    optimizer.refuse_others(moved, destination.format, target)
    if kept:
        moved = moved.with_optimizer()
    kinds, dtype = kinds_of(moved, target)
    names = Names(dialect, dims, chosen, parallel)
    decided = Decided(
        source, moved, destination, target, names, dtype, padded, vocabulary.divisible_by, kept
    )
    args = args_of(decided)
    refuse_stacked_keys(target, destination.format, args.implied_layers)
    names = names._replace(choices={**chosen, "layers": args.layers})
    refuse_misfit(moved, names, "Megatron")
    fixed = destination.format.fixed_sizes
    groups = optimizer.groups(moved, names, fixed, megatron) if kept else []
    scalers = optimizer.scalers(moved, names, megatron) if kept else []
    layout, outputs = destination.format.lay_out(
        MegatronRequest(
            names,
            kinds,
            padded,
            args.common,
            target.common_as_object,
            distributed=not (kept and moved.optimizer) or moved.optimizer.distributed,
            groups=groups,
            scalers=scalers,
        )
    )
    beside = _side_of(source)
    named = megatron_args.BESIDE if has_tokenizer(beside) else None
    line = megatron_args.launch(dialect, args.written, named)
    notes = text_notes(moved)
    launch_files = megatron_args.files(line, notes, kept).items()
    outputs += [TargetFile.whole(name, text.encode()) for name, text in launch_files]
    outputs += bridge_files(decided)
    unchanged = carried.of(moved.layout)
    more, carried_files = carried.lay_out(unchanged, target.max_shard_size)
    layout = carried.joined(replace(layout, files=[file.path for file in outputs]), more)
    outputs += carried_files
    side = SideFiles(destination.root, beside, carried_files)
    side.refuse_other()
    if not side.files:
        refuse_side_of_other(source, side.path)
    joined = join(moved.layout, layout)
    state = optimizer.facts(moved, look=not destination.helps) if kept else None
    facts = facts_of(
        source,
        moved,
        target,
        dialect,
        inexact,
        [
            *dequantised(moved),
            *shifted(joined),
            *vocabulary.notes,
            *notes,
            *_dialect_notes(source, dialect, megatron, target),
        ],
        parallel=parallel.args(),
        choices=dict(names.choices),
        padded_vocab_size=padded,
        unit=destination.iteration_name,
        common=hashlib.sha256(
            safe_pickle.dumps({**args.common, **({"optimizer": [groups, scalers]} if kept else {})})
        ).hexdigest(),
        common_as_object=target.common_as_object,
        args=line.flags,
        megatron_version=target.megatron_version,
        left_behind=optimizer.left_behind(source, kept),
        **({"optimizer": state} if state else {}),
        **_form(source),
        **named_by_user(source, MAPPING in side.files),
    )
    root = _side_root(source)
    remarks = left_out([] if root is None else [root])
    return Plan(
        moved, destination, target, joined, layout, names, outputs, side, [], facts, remarks
    )


def _form(source: Checkpoint) -> dict[str, str | None]:
    """Returns the manifest's entry for a family whose files name tensors in several ways."""
    family = source.model.family
    return {"form": form_of(source, family)} if family is not None and family.forms else {}


def dialect_to_write(source: Checkpoint, target: TargetOptions) -> MappingFile:
    """Returns the dialect to write: the one that the user names, else the source's, else its
    family's.
    """
    if source.is_megatron and target.dialect is None:
        return source.mapping
    return mapping.dialect_for(source.mapping, target.dialect, source.model.options.mapping)


def _other_dialect(
    source: Checkpoint, dialect: MappingFile, megatron: list[int], target: TargetOptions
) -> str | None:
    """Returns the options that write the model in the default dialect, if its family names another
    one, the user names none, and the default one can hold the model for this megatron-core.
    """
    if source.is_megatron or target.dialect or not source.mapping.dialect:
        return None  # without loading every dialect
    default = mapping.dialect_for(None, None, source.model.options.mapping)
    if dialect.name == default.name:
        return None
    if not major_minor(default.megatron[0]) <= megatron <= major_minor(default.megatron[1]):
        return None
    impl = target.transformer_impl or default.choices["transformer_impl"][0]
    program = {"megatron": megatron, "transformer_impl": impl, "format": target.format}
    lost = default.inexact(source.dims, {**program, "pp": target.parallel.pp})
    if not all(name in default.warned and default.warned[name].loads for name in lost):
        return None
    return " ".join([f"--dialect {default.name}", *(f"--allow-inexact {name}" for name in lost)])


def _dialect_notes(
    source: Checkpoint, dialect: MappingFile, megatron: list[int], target: TargetOptions
) -> list[str]:
    """Returns a note on the dialect that the family chose, if there is another choice."""
    other = _other_dialect(source, dialect, megatron, target)
    if other is None:
        return []
    return [
        f"written in the dialect {dialect.name}, the default of {source.mapping.name}, for"
        f" {dialect.trainer}; the other choice: {other}"
    ]


def _parallel(
    source: Checkpoint, dialect: MappingFile, target: TargetOptions, dims: Dims
) -> Parallel:
    """Returns the target's sizes, with the pipeline's stages as the dialect's args state them.

    If the dialect changes and the stages do not, each of them keeps its layers.
    """
    parallel, mtp = target.parallel, dims["mtp_layers"]
    parallel.check(dims["num_experts"])
    count = dialect.num_numbers(dims)
    own = count
    if source.is_megatron and parallel.is_split_as(source.parallel):
        own = source.mapping.num_numbers(dims)
    sizes = parallel.split(own, mtp)
    if any(n * count % own for n in sizes):
        raise UsageError(
            f"the pipeline stages of {source.path} have {sizes} layers, and the dialect"
            f" {dialect.name} cannot cut a layer in two: give another --target-pp, or"
            " --pipeline-model-parallel-layout"
        )
    sizes = [n * count // own for n in sizes]
    if dialect.stage_sizes is not None:
        if parallel.mtp_stage != (parallel.pp - 1, parallel.vpp - 1):
            raise UsageError(
                f"the layout {parallel.layout!r}: the dialect {dialect.name} has the layers of"
                " multi-token prediction (m) in the last stage only"
            )
        return parallel.with_stage_sizes(sizes)
    return parallel if own == count else parallel.with_layout(sizes, mtp)


class _Vocabulary(NamedTuple):
    """The vocabulary of the target."""

    moved: Checkpoint  # the checkpoint to convert, with the padding rows that the target keeps
    rows: int  # of the embedding in the target, padding included
    divisible_by: int  # Megatron pads to a multiple of it times tp
    notes: list[str]


def _vocabulary(source: Checkpoint, dialect: MappingFile, target: TargetOptions) -> _Vocabulary:
    """Returns the vocabulary of the target: the true one, padded as Megatron pads it at its tp
    (vocab_utils.py), so that the target loads with the launch line that its user has.

    Rows of padding that the source has keep their values, because the softmax includes them. Rows
    that the target does not have are dropped; `run` reports those that are not zero. With
    --keep-padding, or if the true vocabulary is not known, the target has the source's rows.
    """
    tp, parted = target.parallel.tp, (source.args or {}).get("make_vocab_size_divisible_by")
    divisor = target.divisible_by or parted or dialect.given["divisible_by"]
    if type(divisor) is not int or divisor < 1:
        raise SourceError(
            f"{source.path}: make_vocab_size_divisible_by is {divisor!r} in its args, and must be a"
            " positive number; give --make-vocab-size-divisible-by"
        )
    whole = source.with_padding() if source.is_megatron else None
    if whole is None:
        return _Vocabulary(source, padded_rows(source.dims, divisor, tp), divisor, [])
    rows = int(whole.dims["vocab_size"])
    try:
        true = int(source.dims["vocab_size"])
    except VocabSizeUnknown:
        true = None
    wanted = rows if true is None or target.keep_padding else padded_rows(source.dims, divisor, tp)
    if rows == wanted:
        if rows % tp:
            raise UsageError(
                f"{source.path}: {rows:,} padded rows of the vocabulary are not divisible by tp"
                f" {tp}; "
                + ("leave out --keep-padding" if target.keep_padding else "give --vocab-size N")
            )
        if true is not None and padded_rows(source.dims, divisor, tp) != rows:
            divisor = rows // tp  # so that Megatron arrives at this number
        return _Vocabulary(whole, rows, divisor, [])
    note = (
        f"the vocabulary of {true:,} tokens has {wanted:,} rows in the target, as Megatron pads it"
        f" at tp {tp}, and {rows:,} in the source; --keep-padding keeps those"
    )
    moved = source.with_dims({**source.dims, "vocab_size": min(rows, wanted)})
    return _Vocabulary(moved, wanted, divisor, [note])


def _version(
    source: Checkpoint, dialect: MappingFile, target: TargetOptions, destination: Destination
) -> list[int]:
    """Returns the version of the megatron-core that will load the checkpoint: the user's, else the
    newest of those that read the format.

    Raises UsageError if the user's version does not read it.
    """
    until = formats.FORMATS[destination.format.name].until
    if target.megatron_version is None:
        return dialect.version(until or None)
    try:
        found = dialect.version(target.megatron_version)
    except UsageError as e:
        with suppress(ValueError):  # not a version
            asked = major_minor(str(target.megatron_version))
            if other := _other_dialect(source, dialect, asked, target):
                raise e.with_hint(f"The other choice: {other}") from None
        raise
    if until and found > major_minor(until):
        raise UsageError(
            f"--megatron-version {target.megatron_version}: megatron-core reads the format"
            f" {destination.format} up to {until}; give --format torch_dist, or --megatron-version"
            f" {until}"
        )
    return found


def padded_rows(dims: Dims, divisible_by: int, tp: int) -> int:
    """Returns the rows of the vocabulary, padded as Megatron pads it for these sizes.

    Raises UsageError for more rows than MAX_ROWS.
    """
    multiple = divisible_by * tp
    rows = -(-int(dims["vocab_size"]) // multiple) * multiple
    if rows > MAX_ROWS:
        raise UsageError(
            f"a vocabulary that is padded to a multiple of {divisible_by:,} times tp {tp} has more"
            f" than {MAX_ROWS:,} rows; choose a smaller --make-vocab-size-divisible-by"
        )
    return rows


def _choices(
    source: Checkpoint, destination: Destination, target: TargetOptions, dialect: MappingFile
) -> dict[str, Any]:
    """Returns the dialect's choices for the target: the user's, else the source's, else Megatron's
    defaults, as far as the dialect has them.
    """
    own = source.names.choices
    impls, experts = dialect.choices["transformer_impl"], dialect.choices["experts"]
    impl = target.transformer_impl or own.get("transformer_impl")
    impl = impl if impl in impls else impls[0]
    if target.grouped_experts is not None:
        if not source.dims["num_experts"]:
            raise UsageError(
                f"{target.experts_option}: {source.path} is a dense model, which has no experts;"
                " leave it out"
            )
        grouped = target.grouped_experts
        if grouped and impl == "local":
            raise UsageError(
                "grouped experts need --transformer-impl transformer_engine: the local spec names"
                " no tensors for them"
            )
    elif target.transformer_impl is None and "experts" in own:
        # the local spec names no tensors for grouped experts
        grouped = own["experts"] == "grouped" and impl != "local"
    else:
        grouped = impl == "transformer_engine"
    stored = "grouped" if grouped else "sequential"
    return {
        "keys": "global" if destination.format.global_keys else "local",
        "transformer_impl": impl,
        "experts": stored if stored in experts else experts[0],
        "pp": target.parallel.pp,
    }


def _inexact(
    source: Checkpoint, dialect: MappingFile, dims: Dims, impl: str, target: TargetOptions
) -> dict[str, str]:
    """Returns the features that Megatron computes differently and that the user accepts: name ->
    reason.

    Raises MappingError with all features that the user does not accept, and for a model that
    Megatron could not load.
    """
    program = {
        "megatron": dialect.version(target.megatron_version),
        "transformer_impl": impl,
        "pp": target.parallel.pp,
        "format": target.format,
    }
    refuse_unloadable(source, dialect, {**dims, **program})
    if source.is_megatron:
        return {**source.files.inexact, **_lost(source, dialect, dims, program, target)}
    config = read_config(source.path)
    family = source.mapping
    unknown = {
        key: f"{key} is {family.lookup(config, key)!r} in config.json, and {family.path.name} does"
        " not mention it: it may matter or not"
        for key in family.unknown(config)
        if key != QUANTISED or not source.opened.quantised
    }
    return refuse_inexact(dialect.inexact(dims, program), target, "Megatron", unknown)


def _lost(
    source: Checkpoint,
    dialect: MappingFile,
    dims: Dims,
    program: dict[str, Any],
    target: TargetOptions,
) -> dict[str, str]:
    """Returns the features that another dialect, or a new run_config.yaml, cannot express and that
    the user accepts.
    """
    if source.mapping.name == dialect.name:
        new = target.run_config and source.args is not None
        return refuse_inexact(lost_args(source) if new else {}, target, RUN_CONFIG)
    before = source.mapping.inexact(dims, program)
    found = dialect.inexact(dims, program)
    lost = {name: why for name, why in found.items() if name not in before} | lost_args(source)
    return refuse_inexact(lost, target, f"A checkpoint of the dialect {dialect.name}")


def _side_root(source: Checkpoint) -> Path | None:
    """Returns the directory whose Hugging Face files go to DST/hf; None if there is none."""
    root = source.files.side_directory
    if root is None and source.carried:  # its tensors need the config.json that describes them
        root = source.files.described_by
    return root


def _side_of(source: Checkpoint) -> dict[str, Path | bytes]:
    """Returns the Hugging Face files for DST/hf: config.json with the user's corrections, and the
    user's family file.
    """
    root = _side_root(source)
    if root is None:
        return {}
    side: dict[str, Path | bytes] = {name: root / name for name in [CONFIG, *side_files(root).kept]}
    if source.model.overruled:
        config = source.mapping.restate(read_config(root), source.dims, source.model.overruled)
        side[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if (kept := mapping_to_keep(source)) is not None:
        side[MAPPING] = kept[1]
    return side
