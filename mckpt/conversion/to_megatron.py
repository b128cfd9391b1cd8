"""Plans a Megatron checkpoint: its vocabulary, names, args and launch line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.containers import safe_pickle
from mckpt.conversion import optimizer
from mckpt.conversion.args import Args, Decided, args_of, bridge_files
from mckpt.conversion.plan_data import (
    Form,
    adopted_config,
    dtypes_of_target,
    factor_notes,
    form_of,
    mapping_to_keep,
    named_by_user,
    quantised_notes,
    text_notes,
)
from mckpt.conversion.refusals import (
    lost_args,
    lost_factors,
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
from mckpt.conversion.target import At, Destination
from mckpt.errors import SourceError, UsageError
from mckpt.formats import carried
from mckpt.formats.base import Names
from mckpt.formats.hf_config import (
    CONFIG,
    QUANTISED,
    has_tokenizer,
    left_out,
    read_config,
    refuse_half_processor,
    side_files,
)
from mckpt.formats.megatron import megatron_args, run_config
from mckpt.formats.megatron.interface import MegatronRequest
from mckpt.formats.megatron.optimizer import Scaler, is_state
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.formats.megatron.save_directory import (
    MAPPING,
    TOKENIZER_DIRECTORY,
    is_iteration_name,
    iteration_name,
    iteration_of,
)
from mckpt.geometry.box import Layout
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile, major_minor
from mckpt.options import TargetOptions
from mckpt.storage.files import TargetFile
from mckpt.storage.manifest import Facts

BESIDE = "beside"  # of the option towers: they are in DST/hf
MAX_ROWS = 1 << 31  # of a padded vocabulary: far more than any model has


class AdaptersBeside(NamedTuple):
    """Adapters that a new checkpoint has beside its weights."""

    decided: Decided  # whose names and dtypes are those of weights and adapters
    # makes of a layout of these names the tensors to read, and the places of each
    placed: Callable[[Layout], tuple[Checkpoint, Layout]]
    run_config: list[TargetFile]
    facts: dict[str, Any]  # the manifest's entry


def form_megatron(
    source: Checkpoint,
    at: At,
    target: TargetOptions,
    adapters: Callable[[Decided], AdaptersBeside] | None = None,
) -> Form:
    """Returns the form of a Megatron checkpoint of any format.

    adapters: makes the adapters that it has beside the weights of `source`.
    """
    destination = at(name_of_iteration(source, target), formats.get(target.format))
    refuse_changed(source)
    decided = decide(source, destination, target)
    args = args_of(decided)
    decided = _with_layer_keys(decided, args)
    beside = adapters(decided) if adapters else None
    decided = beside.decided if beside else decided
    moved, target = decided.moved, decided.target
    param_groups, scalers = _optimizer_entries(decided)
    layout, tensor_files = destination.format.lay_out(
        MegatronRequest(
            decided.names,
            decided.dtypes,
            decided.padded_vocab_size,
            args.common,
            target.common_as_object,
            distributed=not (decided.optimizer and moved.optimizer) or moved.optimizer.distributed,
            groups=param_groups,
            scalers=scalers,
        )
    )
    side_files = side_of(source)
    launch = _launch(decided, args, side_files)
    for_bridge = beside.run_config if beside else bridge_files(decided)
    tokenizer = _tokenizer(source)
    files = [*tensor_files, *_launch_files(decided, launch), *for_bridge]
    files += [TargetFile.beside(name, file) for name, file in tokenizer.items()]
    apart = [] if decided.names.mapping.whole else carried.of(moved.layout)
    if apart and not side_files:
        raise UsageError(
            f"{source.path}: no config.json describes the whole model, and DST/hf needs one beside"
            " the towers; give --like HF_DIR, the model's own directory"
        )
    more, carried_files = carried.lay_out(apart, target.max_shard_size)
    if beside:
        moved, layout = beside.placed(layout)
        decided = structs.replace(decided, moved=moved)
    side = _checked_side(source, SideFiles(destination.root, side_files, carried_files))
    entries = {"optimizer": [param_groups, scalers]} if decided.optimizer else {}
    common = hashlib.sha256(safe_pickle.dumps({**args.common, **entries})).hexdigest()
    flags = launch.flags if decided.has_args else {}
    root = _side_root(source)
    if decided.optimizer and destination.format.masters_alone:
        moved = replace(moved, masters_alone=True)  # the facts have proved that they are equal
    return Form(
        source=source,
        moved=moved,
        destination=destination,
        target=target,
        names=decided.names,
        layout=carried.joined(replace(layout, files=[file.path for file in files]), more),
        outputs=[*files, *carried_files],
        side=side,
        facts={
            **_facts(decided, common, flags, MAPPING in side.files),
            **({"adapter": beside.facts} if beside else {}),
        },
        inexact=decided.inexact,
        notes=[
            *quantised_notes(moved),
            *decided.notes,
            *factor_notes(decided.names, decided.dtypes),
            *text_notes(moved, decided.names.mapping.whole),
            *_dialect_notes(source, decided.names.mapping, decided.megatron, target),
        ],
        factors=decided.names.factors,
        copied=[file for file in tokenizer.values() if isinstance(file, Path)],
        remarks=left_out([] if root is None else [root]),
    )


def name_of_iteration(source: Checkpoint, target: TargetOptions) -> str:
    """Returns the directory name of the new checkpoint: from the iteration that the user asks for,
    else from the source's name, else from the source's iteration, else that of the format.
    """
    if target.target_iteration is not None:
        return iteration_name(target.target_iteration)
    directory, common = source.files.iteration_directory, source.files.common
    first = formats.get(target.format).first_iteration
    if directory is not None and is_iteration_name(directory.name):
        return iteration_name(first) if iteration_of(directory.name) is None else directory.name
    iteration = common.fields.get("iteration") if common else None
    return iteration_name(iteration if isinstance(iteration, int) and iteration > 0 else first)


def decide(source: Checkpoint, destination: Destination, target: TargetOptions) -> Decided:
    """Returns all decisions from which the args of the target follow, or refuses the conversion."""
    dialect = dialect_to_write(source, target)
    if formats.dialect_of(target.format):
        target = target.with_(parallel=Parallel())
    megatron = _version(source, dialect, target, destination)
    target = target.with_(megatron_version=".".join(map(str, megatron)))
    refuse_old_version(target, megatron)
    refuse_choices(target, dialect)
    vocabulary = _vocabulary(source, dialect, target)
    moved = vocabulary.moved
    # Damage is reported first: dims that do not fit the tensors must not be computed with.
    _ = moved.layout
    parallel = _parallel(source, dialect, target, moved.dims)
    described = dialect.whole is None or bool(dialect.whole.provider)
    # without args, run_config.yaml describes the model, if the trainer has such a file
    described = described and not dialect.has_args and run_config.mapping_file(dialect) is not None
    run = target.run_config or described
    target = target.with_(parallel=parallel, run_config=run)
    refuse_sizes(dialect, moved.dims, parallel)
    chosen = {**_choices(moved, destination, target, dialect), **dialect.choices_for(megatron)}
    impl = chosen["transformer_impl"]
    inexact, bridged, unread = _inexact(source, dialect, moved.dims, impl, target)
    names = Names(dialect, moved.dims, chosen, parallel)
    kept = optimizer.keeps(moved, target)
    optimizer.refuse_others(moved, destination.format, target)
    if kept:
        moved = moved.with_optimizer()
        optimizer.refuse_new(moved, destination.format)
        optimizer.refuse_frozen(moved, destination.format)
    dtypes, dtype = dtypes_of_target(moved, target)
    if moved.opened.format.torch_optimizer:  # Megatron's states are fp32
        dtypes |= {name: "float32" for name in dtypes if is_state(name)}
    if dialect.whole:
        dtypes |= {carried.name_of(row.key): row.dtype for row in carried.of(moved.layout)}
    return Decided(
        source,
        moved,
        destination,
        target,
        names,
        dtypes,
        dtype,
        vocabulary.rows,
        vocabulary.divisible_by,
        megatron,
        kept,
        dialect.has_args and not bridged,
        inexact,
        [*vocabulary.notes, *unread, *bridged],
    )


def _with_layer_keys(decided: Decided, args: Args) -> Decided:
    """Returns the decisions with the keys of layers that the args imply, or refuses the names."""
    refuse_stacked_keys(decided.target, decided.destination.format, args.implied_layers)
    names = decided.names
    names = replace(names, choices={**names.choices, "layers": args.layers})
    moved = decided.moved.without_unread(names)
    refuse_misfit(moved, names, "Megatron")
    return structs.replace(decided, names=names, moved=moved)


def _optimizer_entries(decided: Decided) -> tuple[list[list[dict[str, Any]]], list[Scaler]]:
    """Returns the param_groups and the loss scalers of the optimizers of a rank of the target; none
    if the optimizer's state is not kept.
    """
    if not decided.optimizer:
        return [], []
    moved, names, megatron = decided.moved, decided.names, decided.megatron
    format = decided.destination.format
    groups = optimizer.groups(moved, names, format, megatron)
    return groups, optimizer.scalers(moved, names, format, megatron)


def _launch(decided: Decided, args: Args, side_files: Iterable[str]) -> megatron_args.Launch:
    """Returns the flags of Megatron's training program for the target."""
    tokenizer = megatron_args.BESIDE if has_tokenizer(side_files) else None
    return megatron_args.launch(decided.names.mapping, args.written, tokenizer)


def _launch_files(decided: Decided, launch: megatron_args.Launch) -> list[TargetFile]:
    """Returns the files that hold the flags of Megatron's training program; none for a model that
    the program does not compute.
    """
    if not decided.has_args:
        return []
    files = megatron_args.files(
        launch,
        text_notes(decided.moved, decided.names.mapping.whole),
        "" if decided.optimizer else decided.destination.format.flag_of_weights,
    )
    return [TargetFile.whole(name, text.encode()) for name, text in files.items()]


def _checked_side(source: Checkpoint, side: SideFiles) -> SideFiles:
    """Returns the files of DST/hf. Raises DestinationError if those of another model are there."""
    side.refuse_other()
    if not side.files:
        refuse_side_of_other(source, side.path)
    return side


def _facts(decided: Decided, common: str, flags: dict[str, Any], keeps_mapping: bool) -> Facts:
    """Returns the entries of the manifest that a Megatron checkpoint has of its own.

    common: the digest of the common state. flags: those of Megatron's training program.
    keeps_mapping: whether the user's family file is kept in DST/hf.
    """
    source, moved, target = decided.source, decided.moved, decided.target
    family, kept = source.family, decided.optimizer
    look = moved.opened.format.readable and decided.destination.rank0
    state = optimizer.facts(moved, look) if kept else None
    whole, keys = decided.names.mapping.whole, [row.key for row in carried.of(moved.layout)]
    return {
        "parallel": target.parallel.args(),
        "choices": dict(decided.names.choices),
        "padded_vocab_size": decided.padded_vocab_size,
        "unit": decided.destination.iteration_name,
        "common": common,
        "common_as_object": target.common_as_object,
        "args": flags,
        "megatron_version": target.megatron_version,
        "left_behind": optimizer.left_behind(source, kept),
        **({"optimizer": state} if state else {}),
        **({"form": form_of(source, family)} if family and family.forms else {}),
        **({"tower_keys": whole.used(keys)} if whole else {}),
        **named_by_user(source, keeps_mapping),
    }


def dialect_to_write(source: Checkpoint, target: TargetOptions) -> MappingFile:
    """Returns the dialect to write: the one that the user names, else the source's, else its
    family's; with the towers of a multimodal model as the user wants them, else as the source has
    them.
    """
    if (only := formats.dialect_of(target.format)) or formats.dialect_of(source.format):
        if only and target.dialect not in (None, only):
            raise UsageError(
                f"--dialect {target.dialect}: a checkpoint of the format {target.format} has the"
                f" dialect {only}; leave it out"
            )
        named = only or target.dialect
        return mapping.dialect_for(source.family, named, source.model.options.mapping)
    own = source.mapping.whole
    here = own.trainer if own else BESIDE
    trainer = target.towers or here
    named = target.dialect or (source.merging and source.merging.dialect) or None
    writes = source.is_megatron and not source.opened.format.trainer  # in names that are written
    if writes and named is None and trainer == here:
        return source.mapping
    family = source.family
    if named is None and family is not None and trainer in family.towers:
        named = family.towers[trainer].dialect or None
    if named is None and writes:
        named = mapping.text_dialect(source.mapping)
    of = family if source.changes_family or source.is_megatron else source.mapping
    dialect = mapping.dialect_for(of, named, source.model.options.mapping)
    return dialect if trainer == BESIDE else _with_towers(source, dialect, trainer)


def _with_towers(source: Checkpoint, dialect: MappingFile, trainer: str) -> MappingFile:
    """Returns the dialect of the whole model whose text model has this dialect."""
    family, described = source.model.family, source.files.described_by
    if family is None or described is None:
        raise UsageError(
            f"--towers {trainer}: no config.json describes the model of {source.path}; give --like"
            " HF_DIR, the directory of the whole model"
        )
    tensors = carried.shapes_in(source.layout)
    if not tensors:
        raise UsageError(
            f"--towers {trainer}: {source.path} has no towers; leave it out"
            if not mapping.is_part(family.forms)
            else f"--towers {trainer}: the towers of {source.path} are not there; give --like"
            " HF_DIR, the directory of the whole model with its weights"
        )
    if trainer not in family.towers:
        known = ", ".join(family.towers) or "none"
        raise UsageError(
            f"--towers {trainer}: mckpt does not know the names that it gives to the towers of"
            f" {family.architectures[0]}; those that it knows: {known}"
        )
    try:
        tower, config = family.towers[trainer], read_config(described)
        return mapping.whole_dialect(dialect, tower, tensors, config)
    except SourceError as e:
        raise e.with_hint(f"It is {source.path}.") from None


def _other_dialect(
    source: Checkpoint, dialect: MappingFile, megatron: list[int], target: TargetOptions
) -> str | None:
    """Returns the options that write the model in the default dialect, if its family names another
    one, the user names none, and the default one can hold the model for this megatron-core.
    """
    fixed = formats.dialect_of(target.format)
    if source.is_megatron or target.dialect or dialect.whole or not source.mapping.dialect or fixed:
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

    If the dialect changes and the stages do not, each of them keeps its layers. Stages of one size
    stay so after an edit of the layers.
    """
    parallel, mtp = target.parallel, dims["mtp_layers"]
    parallel.check(dims["num_experts"])
    count = dialect.num_numbers(dims)
    own = count
    if source.is_megatron and parallel.is_split_as(source.parallel):
        if "layer_parts" not in source.edited:
            own = source.mapping.num_numbers(dims)
        elif len({*(parallel.stage_sizes or ())}) == 1:
            parallel = replace(parallel, stage_sizes=None)
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
    if formats.dialect_of(target.format):
        parted = None
    divisor = target.divisible_by or parted or dialect.given["divisible_by"]
    if type(divisor) is not int or divisor < 1:
        raise SourceError(
            f"{source.path}: make_vocab_size_divisible_by is {divisor!r} in its args, and must be a"
            " positive number; give --make-vocab-size-divisible-by"
        )
    kept = source.is_megatron and "vocab_size" not in source.edited
    whole = source.with_padding() if kept else None
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
    moved = source.with_vocab_size(min(rows, wanted))
    return _Vocabulary(moved, wanted, divisor, [note])


def _version(
    source: Checkpoint, dialect: MappingFile, target: TargetOptions, destination: Destination
) -> list[int]:
    """Returns the version of the megatron-core that will load the checkpoint: the user's, else the
    newest that the dialect knows.
    """
    if target.megatron_version is None:
        return dialect.version()
    try:
        return dialect.version(target.megatron_version)
    except UsageError as e:
        with suppress(ValueError):  # not a version
            asked = major_minor(str(target.megatron_version))
            if other := _other_dialect(source, dialect, asked, target):
                raise e.with_hint(f"The other choice: {other}") from None
        raise


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
                f"{target.spelled('grouped_experts')}: {source.path} is a dense model, which has no"
                " experts; leave it out"
            )
        grouped = target.grouped_experts
        if grouped and impl == "local":
            raise UsageError(
                "grouped experts need --transformer-impl transformer_engine: the local spec names"
                " no tensors for them"
            )
    elif target.transformer_impl is None and "experts" in own and source.model.dims["num_experts"]:
        # the local spec names no tensors for grouped experts
        grouped = own["experts"] == "grouped" and impl != "local"
    else:
        grouped = impl == "transformer_engine"
    stored = "grouped" if grouped else "sequential"
    layers = target.layer_keys or own.get(
        mapping.LAYERS, dialect.choices.get(mapping.LAYERS, ("",))[0]
    )
    return {
        "keys": "global" if destination.format.global_keys else "local",
        "transformer_impl": impl,
        "experts": stored if stored in experts else experts[0],
        "pp": target.parallel.pp,
        **({mapping.LAYERS: layers} if dialect.whole else {}),
    }


def _inexact(
    source: Checkpoint, dialect: MappingFile, dims: Dims, impl: str, target: TargetOptions
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the features that Megatron computes differently and that the user accepts: name ->
    reason. The trainer of the target decides: with a run_config.yaml it is Megatron-Bridge.

    The second result is a note if Megatron-LM's own trainer does not compute the model, and
    Megatron-Bridge does; else it is empty. The third has notes on the keys of config.json that no
    family mentions and that transformers never reads.

    Raises MappingError with all features that the user does not accept, and for a model that
    Megatron could not load.
    """
    whole = dialect.whole
    by_bridge = target.run_config or (whole is not None and whole.has_run_config)
    file = (run_config.mapping_file(dialect) if by_bridge else None) or dialect
    program = {
        "megatron": dialect.version(target.megatron_version),
        "transformer_impl": impl,
        "pp": target.parallel.pp,
        "tp": target.parallel.tp,
        "format": target.format,
    }
    refuse_unloadable(source, dialect, {**dims, **program})
    refuse_unloadable(source, file, {**dims, **program})
    dims = {**dims, **(source.merging.anew if source.merging else {})}
    stock = dialect.inexact(dims, program) if dialect.has_args else {}
    described, same = source.model.run_config_file, source.mapping.name == dialect.name
    if source.is_megatron and described is not None and same:
        # The trainer of the source computed the model: only what the target's does not is lost.
        own = described.warnings({**described.given, **dims, **program})
        stock = {name: why for name, why in stock.items() if name not in own}
        carried = (source.opened.root / RUN_CONFIG).exists()
        bridge = target.run_config or (carried and formats.get(target.format).global_keys)
        accepted = {name: why for name, why in stock.items() if name in target.allow_inexact}
        inexact = refuse_inexact(accepted if bridge else stock, target, "Megatron")
        return {**source.files.inexact, **inexact}, _bridged(dialect, stock, inexact), []
    if source.is_megatron:
        describing = dialect if dialect.has_args else file
        lost = _lost(source, dialect, describing, dims, program, target)
        return {**source.files.inexact, **lost}, [], []
    family = source.mapping
    config = read_config(source.path)
    values = family.unknown(config)
    if source.opened.quantised:
        values.pop(QUANTISED, None)
    unread, doubts = mapping.unread_keys(family, config, values)
    unknown = {
        key: f"{key} is {values[key]!r} in config.json, and {family.path.name} does"
        f" not mention it: it may matter or not ({why})"
        for key, why in doubts.items()
    }
    accepted = {name: why for name, why in stock.items() if name in target.allow_inexact}
    trainer = "Megatron" if file is dialect else "Megatron-Bridge"
    trainer = dialect.trainer if formats.dialect_of(target.format) else trainer
    lost = accepted | file.inexact(dims, program)
    inexact = refuse_inexact(lost, target, trainer, unknown)
    return inexact, _bridged(dialect, stock, inexact), list(unread.values())


def _bridged(
    dialect: MappingFile, stock: Mapping[str, str], inexact: Mapping[str, str]
) -> list[str]:
    """Returns a note if Megatron-Bridge computes features that the dialect's own trainer does not
    and that the user did not accept.
    """
    bridged = [f"{name} ({why})" for name, why in stock.items() if name not in inexact]
    note = (
        f"for Megatron-Bridge alone, without args and launch line: {dialect.trainer} would compute"
        f" something else: {'; '.join(bridged)}"
    )
    return [note] * bool(bridged)


def _lost(
    source: Checkpoint,
    dialect: MappingFile,
    describing: MappingFile,
    dims: Dims,
    program: dict[str, Any],
    target: TargetOptions,
) -> dict[str, str]:
    """Returns the features that another dialect, or a new run_config.yaml, cannot express, or the
    same dialect of an edited model, and that the user accepts.

    describing: the file that writes the description of the model for the trainer of the target, its
    args or its run_config.yaml.
    """
    same, new = source.mapping.name == dialect.name, target.run_config and source.args is not None
    args = {} if same and not new else {**lost_args(source), **lost_factors(source)}
    if same and not source.edited:
        return refuse_inexact(args, target, RUN_CONFIG)
    before = source.mapping.inexact(source.model.dims if source.edited else dims, program)
    after = describing.inexact(dims, program)
    lost = {name: why for name, why in after.items() if name not in before} | args
    return refuse_inexact(lost, target, f"A checkpoint of the dialect {dialect.name}")


def _tokenizer(source: Checkpoint) -> dict[str, Path | bytes]:
    """Returns the files of the tokenizer that the training saved in a Megatron source, or of a
    model that has no DST/hf for them: name in the target -> path.
    """
    root = source.files.tokenizer_directory
    if root is None and source.undescribed:
        root = source.files.side_directory
    files: dict[str, Path | bytes] = {}
    if root is not None:
        files = {name: root / name for name in side_files(root).kept}
    if root is not None or _side_root(source) is None:  # else DST/hf has the tokenizer
        files = source.files_beside(files)
    return {f"{TOKENIZER_DIRECTORY}/{name}": file for name, file in files.items()}


def _side_root(source: Checkpoint) -> Path | None:
    """Returns the directory whose Hugging Face files go to DST/hf; None if there is none, or if no
    config.json describes an edited model.
    """
    if source.undescribed:
        return None
    root = source.files.side_directory
    if root is None and (
        source.carried or source.mapping.whole
    ):  # its tensors need the config.json that describes them
        root = source.files.described_by
    return root


def side_of(source: Checkpoint) -> dict[str, Path | bytes]:
    """Returns the Hugging Face files for DST/hf: config.json with the user's corrections, and the
    user's family file.
    """
    root = _side_root(source)
    if root is None:
        return {}
    kept_files = side_files(root).kept
    if carried.of(source.layout):
        refuse_half_processor(kept_files, root)
    side: dict[str, Path | bytes] = {name: root / name for name in [CONFIG, *kept_files]}
    config, family = read_config(root), source.family
    if family is not None and source.changes_family:
        config = adopted_config(source, config)
        return {**side, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    wrong = [*source.model.overruled]
    if source.files.options.no_mtp:
        wrong += source.model.corrected(config)
    if family is not None and source.edited:
        config = family.followed(config, source.model.dims, source.dims, source.kept_layers)
        wrong += family.to_restate(config, source.dims, source.edited)
    if family is not None and (wrong or source.edited):
        config = family.restate(config, source.dims, wrong)
        side[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    side = source.files_beside(side)
    if (kept := mapping_to_keep(source)) is not None:
        side[MAPPING] = kept[1]
    return side
