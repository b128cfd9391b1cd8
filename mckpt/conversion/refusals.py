"""The reasons to refuse a plan. Each function raises one error, or returns if there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mckpt import formats, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown, family_for
from mckpt.checkpoint.logical import Reader
from mckpt.errors import DestinationError, MappingError, SourceError, UsageError
from mckpt.formats import carried
from mckpt.formats.base import WEIGHT_DTYPES, Format, Names
from mckpt.formats.hf_config import ADAPTER, CONFIG, read_config
from mckpt.formats.megatron.interface import COMMON_OBJECT_SINCE
from mckpt.formats.megatron.optimizer import holds_state, is_state
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.options import HUGGING_FACE, MEGATRON, TargetOptions
from mckpt.values import dtypes

# options that have an effect only where Megatron reads the target
OF_MEGATRON = (
    *("transformer_impl", "grouped_experts", "divisible_by", "towers", "common_as_object"),
    *("run_config", "megatron_version"),
)
_OWN_HEAD = (
    "config.json says that the embedding is also the output layer (tied). transformers 5 ignores"
    " that where the output layer of the file differs, and uses both; transformers 4 ignores the"
    " output layer of the file. For the first give --set tied=false; for the second remove that"
    " tensor."
)


def refuse_options(
    target: TargetOptions, format: Format, source: Checkpoint, adapted: bool = False
) -> None:
    """Raises UsageError for a format that is only read, and for an option that has no effect on
    this conversion.

    adapted: the target gets an adapter beside its weights.
    """
    if not formats.FORMATS[format.name].written:
        raise UsageError(
            f"the format {format} is read only: give another one, such as {formats.MEGATRON}"
        )
    for option, reason in _without_effect(target, format, source):
        raise UsageError(f"{option}: {reason}; leave it out")
    if target.allow_inexact:
        _refuse_unknown_names(target, source)
    known = target.no_adapter or source.merging or adapted
    if (adapter := _adapter(source)) and not known:
        raise UsageError(
            f"{source.path}: has an adapter ({', '.join(adapter)}), which transformers applies to"
            " the weights: give --no-adapter to convert the weights alone, or merge the adapter"
            f" into them with `mckpt adapter merge {source.path} {source.path} DST`"
        )
    if source.merging and target.quantize:
        raise UsageError(
            f"--quantize {target.quantize}: cannot be given while an adapter is merged; merge it"
            " first, and convert the result with the option"
        )


def _adapter(source: Checkpoint) -> list[str]:
    """Returns the names of the files of an adapter beside the weights of a Hugging Face source."""
    return [n for n in ADAPTER if not source.is_megatron and (source.path / n).exists()]


def _without_effect(
    target: TargetOptions, format: Format, source: Checkpoint
) -> Iterator[tuple[str, str]]:
    """Yields the options that are given and have no effect, each with the reason."""
    if target.layer_keys is not None and not format.layer_keys:
        yield "--layer-keys", f"the format {format} has no choice of layer keys"
    if target.common_as_object and not format.common_object:
        yield (
            "--common-state object",
            f"the format {format} cannot keep the common state as an object",
        )
    if target.no_adapter and not _adapter(source):
        yield "--no-adapter", f"{source.path} has no adapter"
    if source.files.options.no_mtp and not source.model.has_mtp:
        yield "--no-mtp", f"{source.path} has no layers of multi-token prediction"
    if target.no_optimizer and not source.is_megatron:
        yield (
            "--no-optimizer",
            f"{source.path} is a Hugging Face directory, which has no optimizer state",
        )
    if target.keep_padding and format.megatron and not source.is_megatron:
        yield "--keep-padding", f"{source.path} is a Hugging Face directory, which has none"
    why = "it is for a Megatron target, and the target is a Hugging Face directory"
    if format.megatron:
        why = f"it is for a Hugging Face target, and the target has the Megatron format {format}"
    for option in target.given(HUGGING_FACE if format.megatron else MEGATRON):
        yield option, why
    given = (n for n in OF_MEGATRON if getattr(target, n) != getattr(TargetOptions(), n))
    for name in given if formats.dialect_of(format.name) else ():
        yield target.spelled(name), f"the format {format} is not for Megatron"


def _refuse_unknown_names(target: TargetOptions, source: Checkpoint) -> None:
    """Raises UsageError if `allow_inexact` has a name that no error of a conversion prints.

    The names are dims, the keys of config.json that the family does not mention, unknown args, and
    "config" for a config that cannot be written at all.
    """
    keys = {} if source.is_megatron else source.mapping.unknown(read_config(source.path))
    args = map(_arg, source.model.unknown_args)
    known = {*mapping.schema().dims, *keys, *source.files.inexact, "config", *args}
    unknown = [name for name in target.allow_inexact if name not in known]
    if not unknown:
        return  # without loading every dialect, which takes longer than the rest of a plan
    dialects = [
        mapping.load("megatron", d, source.model.options.mapping) for d in mapping.names("megatron")
    ]
    listed = sorted({name for dialect in dialects for name in dialect.warned})
    unknown = [name for name in unknown if name not in listed]
    if unknown:
        more = f"; the keys {', '.join(keys)} of config.json" if keys else ""
        raise UsageError(
            f"--allow-inexact {', '.join(unknown)}: no feature has this name; the names are"
            f" {', '.join([*listed, 'config'])}{more}; and the other dims of mappings/logical.yaml."
            " Give the name that the error of the conversion prints, or leave it out"
        )


def refuse_old_version(target: TargetOptions, megatron: list[int]) -> None:
    """Raises UsageError if the chosen megatron-core could not read the checkpoint."""
    if target.common_as_object and megatron < COMMON_OBJECT_SINCE:
        since, asked = (".".join(map(str, v)) for v in (COMMON_OBJECT_SINCE, megatron))
        raise UsageError(
            f"--common-state object: megatron-core reads it from {since} on, and"
            f" --megatron-version is {asked}; leave one of them out"
        )


def refuse_choices(target: TargetOptions, dialect: MappingFile) -> None:
    """Raises UsageError for a choice that is asked for and that the dialect does not have."""
    grouped = {None: None, True: "grouped", False: "sequential"}[target.grouped_experts]
    if formats.get(target.format).global_keys and "global" not in dialect.choices["keys"]:
        raise UsageError(
            f"--format {target.format}: a checkpoint of the dialect {dialect.name} has the keys of"
            " each rank only; give --format torch, or another --dialect"
        )
    if not formats.get(target.format).global_keys and "local" not in dialect.choices["keys"]:
        raise UsageError(
            f"--format {target.format}: a checkpoint of the dialect {dialect.name} has the keys of"
            " the whole model only; give --format torch_dist"
        )
    for choice, asked, option in (
        ("transformer_impl", target.transformer_impl, "transformer_impl"),
        ("experts", grouped, "grouped_experts"),
        ("layers", target.layer_keys, "layer_keys"),
    ):
        known = dialect.choices[choice]
        if asked is not None and asked not in known:
            raise UsageError(
                f"{target.spelled(option)}: a checkpoint of the dialect {dialect.name} has"
                f" {' or '.join(known)} only; leave the option out"
            )


def refuse_sizes(dialect: MappingFile, dims: Dims, parallel: Parallel) -> None:
    """Raises UsageError if Megatron could not launch the model at these sizes."""
    parallel.check(dims["num_experts"])
    parallel.split(dialect.num_numbers(dims), dims["mtp_layers"])
    heads, groups = dims["num_heads"], dims["num_query_groups"]
    moe = dims["moe_layers"]
    cut = {
        "ffn_size": any("mlp" in parts for parts in dims["layer_parts"]),
        "shared_ffn_size": any(moe),
        "expert_ffn_size": any(moe) and parallel.etp is None,
        "mamba_groups": dims["mamba_groups"] > 0,
        "linear_key_heads": any(dims["linear_layers"]),
    }
    widths = [(name, dims[name]) for name, is_cut in cut.items() if is_cut]
    widths += [("ffn_size", size) for size in sorted(set(dims["ffn_sizes"]))] * cut["ffn_size"]
    fit = [
        n
        for n in range(1, heads + 1)
        if not any(whole % n for whole in (heads, *(width for _, width in widths)))
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
    for name, width in dict.fromkeys(widths):
        if width % parallel.tp:
            raise UsageError(f"{name} {width} is not divisible by tp {parallel.tp}; {cure}")
    if any(moe) and dims["mlp_bias"] and parallel.expert_tp > 1:
        raise UsageError(
            f"the experts have biases, which megatron-core builds at etp 1 only, and etp is"
            f" {parallel.expert_tp}; give --etp 1"
        )


def refuse_casts(source: Checkpoint, dtype: str) -> None:
    """Raises UsageError if the source has tensors of a dtype that --dtype cannot cast."""
    dtypes_held = {s.dtype for s in source.layout.stored if not (s.carried or holds_state(s))}
    strange = sorted(d for d in dtypes_held if d not in WEIGHT_DTYPES)
    if strange:
        raise UsageError(
            f"--dtype {dtype}: the source holds {', '.join(strange)}, which is not cast"
        )
    rounded = {(s.rounded_from, s.dtype) for s in source.layout.stored if s.rounded_from}
    if other := sorted(pair for pair in rounded if pair[1] != dtypes.parse(dtype)):
        wide, own = other[0]
        raise UsageError(
            f"--dtype {dtype}: the weights of {source.path} are {own}, and are stored in {wide} as"
            " the optimizer's master copies; leave --dtype out, and cast the result if you need to"
        )


def refuse_unloadable(source: Checkpoint, dialect: MappingFile, facts: Mapping[str, Any]) -> None:
    """Raises MappingError if Megatron could not load the model.

    facts: the dims, `megatron` (its version) and `transformer_impl`.
    """
    if refused := dialect.warnings(facts, loads=False):
        raise MappingError.of(
            f"{source.path}: Megatron could not load what would be written:", list(refused.values())
        )


def refuse_inexact(
    lost: Mapping[str, str], target: TargetOptions, where: str, unknown: Mapping[str, str] = {}
) -> dict[str, str]:
    """Returns `lost` and `unknown` if --allow-inexact names both; MappingError lists the rest.

    lost: name -> why the target would not compute what the source does.
    unknown: key of config.json that the family does not mention -> a sentence with its value.
    """
    inexact, unread = (
        {name: why for name, why in entries.items() if name not in target.allow_inexact}
        for entries in (lost, unknown)
    )
    if not (inexact or unread):
        return {**lost, **unknown}
    title, cure = f"{where} would not compute what the source does:", ""
    if unread:
        also = f"{title[:-1]}, and " if inexact else ""
        title = f"{also}config.json has keys that the family file does not mention:"
        cure = (
            "In a family file, let a dim read a key that changes the result, give the value that"
            " changes nothing under `expect`, or list the key under `inert` if no value does"
            " (docs/new-model.md). "
        )
    listed = [why if name == "config" else f"{name}: {why}" for name, why in inexact.items()]
    raise MappingError.of(
        title,
        [*listed, *unread.values()],
        f"{cure}If you know that it does not matter, give "
        + " ".join(f"--allow-inexact {name}" for name in (*inexact, *unread)),
    )


def lost_args(source: Checkpoint) -> dict[str, str]:
    """Returns the reasons not to leave out the args that mckpt does not know: name -> reason."""
    known = source.mapping.values
    return {
        _arg(name): f"{name} is {value!r:.160}, and mckpt"
        + (
            " does not know this value"
            if name in known
            else " knows no arg of Megatron with this name"
        )
        + ": the model may compute with it, and the target will not"
        for name, value in source.model.unknown_args.items()
        if not mapping.is_neutral(value)
    }


def lost_factors(source: Checkpoint) -> dict[str, str]:
    """Returns the values of a source that are the weights times a number, and rounded: name ->
    reason. Those that --allow-inexact accepted when mckpt wrote it are left out.
    """
    given, accepted = source.mapping.given, source.files.inexact
    found = source.mapping.warnings({**given, **source.dims})
    return {name: why for name, why in found.items() if name in given and name not in accepted}


def _arg(name: str) -> str:
    """Returns the name of an arg for --allow-inexact, which also takes names of dims."""
    return f"args.{name}"


def refuse_misfit(source: Checkpoint, target: Names, title: str) -> None:
    """Raises MappingError if source and target do not have the same logical tensors.

    title: the name of the target in the message.
    """
    family = source.mapping.path.name
    wanted = {name for b in target.bound for name in b.rule.of if not b.rule.carried}
    names = source.layout.shapes.keys() - carried.names(source.layout)
    names = {name for name in names if not is_state(name)}
    misfits = mapping.misfits(family, names, title, wanted, target.dims, target.mapping)
    if misfits:
        cure = (
            "Add what is missing to the family file; `mckpt mappings check FILE --config"
            " CONFIG.JSON` says what is left."
        )
        raise MappingError.of(
            f"{source.path}: {family} and {title} do not have the same tensors:", misfits, cure
        )


def refuse_stacked_keys(target: TargetOptions, format: Format, implied: str | None) -> None:
    """Raises UsageError if the user asks for one key for all layers, and the args make Megatron
    look for a key of each layer.

    implied: `stacked` or `per_layer`, as the args imply.
    """
    if format.global_keys and target.layer_keys == "stacked" and implied == "per_layer":
        raise UsageError(
            "the layers differ, or moe_layer_freq is a list: Megatron asks for per-layer keys then"
        )


def refuse_side_of_other(source: Checkpoint, side: Path) -> None:
    """Raises DestinationError if an existing DST/hf describes another model. This checkpoint would
    be read with that model's config.
    """
    if not (side / CONFIG).is_file():
        return
    config = read_config(side)
    try:
        dims = source.dims
    except VocabSizeUnknown:
        return
    try:
        kept = (
            str(side / MAPPING) if (side / MAPPING).is_file() else source.model.options.family_name
        )
        family_for(config, kept, str(side / CONFIG)).read(
            config, dims, str(side / CONFIG), known_from=str(source.path)
        )
    except MappingError as e:
        raise DestinationError(
            f"{side}: describes another model; all checkpoints of one save directory share its"
            f" hf. {e}"
        ) from None


def refuse_uncarried(source: Checkpoint, family: MappingFile) -> None:
    """Raises MappingError if the family's model has tensors beside those of Megatron's model and
    the source does not have them, or the other way round.
    """
    unchanged = carried.of(source.layout)
    parts = " or ".join(", ".join(form.carried) for form in family.forms.values())
    where = source.files.described_by or source.path
    if mapping.is_part(family.forms) and not unchanged:
        raise MappingError(
            f"{where}: describes a {family.architectures[0]}, whose tensors {parts} are not in"
            f" Megatron's model, and {carried.FILES} is not there: give --like HF_DIR, the model's"
            " original directory with its weights, or the directory hf that mckpt wrote beside the"
            " checkpoint"
        )
    if unchanged and family.form_of(row.key for row in unchanged) is None:
        raise MappingError(
            f"{where}: has {len(unchanged):,} tensors that are carried unchanged, such as"
            f" {unchanged[0].key}, and {family.path.name} has no place for them; give"
            " the family of the whole model"
        )


def dropped(source: Checkpoint, check_replicas: bool) -> list[str]:
    """Returns sentences on the values that the conversion drops. Raises SourceError if copies of
    one tensor differ; those of a Megatron source are compared only if `check_replicas`.
    """
    if source.merging and (summands := source.merging.summands):
        return [text for one in summands for text in dropped(one, check_replicas)]
    look = check_replicas or not source.is_megatron
    # as the files have them: an edit may cut a tensor into a piece for each row
    plain = source if source.merging is None else replace(source, merging=None)
    if look and (apart := _compared(plain, source.dims).check_replicas()):
        tied = not source.is_megatron and source.dims["tied"]
        raise SourceError.of(
            f"{source.path}: holds different copies of one tensor, and mckpt cannot tell which"
            " one is right:",
            apart,
            _OWN_HEAD * tied,
        )
    return source.reader.padding()


def _compared(source: Checkpoint, after: Dims) -> Reader:
    """Returns the tensors whose copies are compared: not those that layers of multi-token
    prediction have, if an edit drops these. after: the dims of the edited model.
    """
    if not source.dims["mtp_layers"] or after["mtp_layers"]:
        return source.reader
    copies = {bound.rule.key for bound in source.names.bound if bound.rule.mtp}
    stored = [s for s in source.layout.stored if not (s.replica and s.key in copies)]
    return Reader(replace(source.layout, stored=stored))
