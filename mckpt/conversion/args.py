"""Megatron's args and common state for a checkpoint that is written, and the files beside it from
which Megatron-Bridge loads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers import safe_pickle
from mckpt.conversion import optimizer
from mckpt.conversion.plan_data import true_vocab
from mckpt.conversion.target import Destination
from mckpt.errors import MappingError, UsageError
from mckpt.formats.base import Names
from mckpt.formats.hf_config import read_config
from mckpt.formats.megatron import run_config
from mckpt.formats.megatron.interface import CHECKPOINT_VERSION, VERSION, Common, new_common
from mckpt.formats.megatron.run_config import RUN_CONFIG, TRAIN_STATE
from mckpt.formats.megatron.save_directory import iteration_of
from mckpt.mapping import MappingFile
from mckpt.options import TargetOptions
from mckpt.storage.files import TargetFile, read_file

# args that follow --transformer-impl; see parts/args.yaml
FOLLOWS_IMPL = (
    "no_persist_layer_norm",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "sequence_parallel",
)
# settings of a run that a dense model has otherwise; its token dispatcher may be unfit for ep
OF_EXPERTS = ("moe_token_dispatcher_type", "moe_grouped_gemm")
PER_LAYER = "non_homogeneous_layers"  # in the common state: where Megatron-Core looks first


class Decided(Struct, frozen=True):
    """A new Megatron checkpoint: all decisions from which its args follow."""

    source: Checkpoint
    moved: Checkpoint  # the source with its padded vocabulary
    destination: Destination
    target: TargetOptions
    names: Names  # of the target; the choice of `layers` follows from the args
    dtypes: dict[str, str]  # of each logical tensor
    dtype: str  # of most of the weights
    padded_vocab_size: int  # rows
    divisible_by: int  # Megatron pads the vocabulary to a multiple of it times tp
    megatron: list[int]  # the version of the megatron-core that will load the checkpoint
    optimizer: bool  # whether the optimizer's state is kept
    has_args: bool  # False: only Megatron-Bridge computes the model, and it reads no args
    inexact: dict[str, str]  # features that the user accepts to lose: name -> reason
    notes: list[str]  # on the vocabulary

    @property
    def changes_dialect(self) -> bool:
        """True if the source is a Megatron checkpoint of another dialect."""
        return self.source.is_megatron and self.source.mapping.name != self.names.mapping.name


class Args(NamedTuple):
    """The args, the common state and the layer keys of a new Megatron checkpoint."""

    written: dict[str, Any]  # all args, for the launch line
    common: dict[str, Any]  # the common state, with the args in it
    layers: str  # the dialect's choice: stacked or per_layer
    # the layer keys that Megatron expects by the args; None if the args do not determine them
    implied_layers: str | None


def args_of(decided: Decided) -> Args:
    """Returns the args and the common state of the target.

    A Megatron source keeps its args, except those that the conversion changes.
    """
    source, target, dialect = decided.source, decided.target, decided.names.mapping
    written = _new_args(decided)
    # the args of a dense model do not describe its layers, which are alike
    own = {} if decided.changes_dialect else source.args or {}
    replaced = _replaced(decided, written)
    choices = dialect.choices_in({**written, **own, **replaced})
    if source.args is None or source.files.common is None:
        kept = _with_torch_dtypes(written) if decided.has_args else None
        common = new_common(kept, _iteration(decided))
        if decided.optimizer:
            common |= optimizer.common_state(decided.moved, decided.destination.format)
    else:
        kept = replaced
        kept.update({key: written[key] for key in dialect.keys_with("stages") if key in written})
        kept.update({key: written.get(key) for key in sorted(dialect.outdated & own.keys())})
        if decided.changes_dialect:
            kept.update(_args_restated(source.mapping, dialect, written))
            kept.update(_neutral_args(source, dialect))
            # old args lack some that today's Megatron requires
            kept.update({key: value for key, value in written.items() if key not in source.args})
        common = _kept_common(decided, source.files.common, kept)
        written = {**written, **{k: v for k, v in source.args.items() if v is not None}, **kept}
    if target.layer_keys is not None and decided.destination.format.global_keys:
        marked = {PER_LAYER: target.layer_keys == "per_layer"}
        common["content_metadata"] = {**(common.get("content_metadata") or {}), **marked}
    layers = target.layer_keys or _implied_layers(decided, dialect.choices_in(own), choices)
    return Args(written, common, layers, choices.get("layers"))


def _new_args(decided: Decided) -> dict[str, Any]:
    """Returns the args that the dialect writes from the dims, and the parallel sizes."""
    dims = {**decided.names.dims, "vocab_size": true_vocab(decided.source)}
    written = decided.names.mapping.write(dims, given_of(decided))
    if decided.optimizer and "no_save_optim" in written:
        written["no_save_optim"] = False  # else Megatron does not load it
    return {**written, **decided.target.parallel.args()}


def given_of(decided: Decided) -> dict[str, Any]:
    """Returns the values of a dialect's `given` names, which its expressions use beside dims."""
    parallel, stages = decided.names.parallel, decided.names.stages()
    return {
        **decided.names.choices,
        "stages": [stages[p][v] for v in range(parallel.vpp) for p in range(parallel.pp)],
        "dtype": decided.dtype,
        "padded_vocab_size": decided.padded_vocab_size,
        "divisible_by": decided.divisible_by,
        "format": decided.destination.format.name,
        "tp": decided.target.parallel.tp,
    }


def _kept_common(decided: Decided, common: Common, replaced: dict[str, Any]) -> dict[str, Any]:
    """Returns the common state of a Megatron source with some args replaced, and without the
    entries of the optimizer and of other states.
    """
    ignored, left = decided.names.mapping.ignore, decided.source.left_behind()
    fields = common.changed(_with_torch_dtypes(replaced))
    out = {k: v for k, v in fields.items() if not (k in ignored or k in left)}
    out["iteration"], out[VERSION] = _iteration(decided), CHECKPOINT_VERSION
    if decided.optimizer:
        out |= optimizer.common_state(decided.moved, decided.destination.format)
    if decided.changes_dialect and "content_metadata" in out:
        marks = out["content_metadata"] or {}
        out["content_metadata"] = {k: v for k, v in marks.items() if k != PER_LAYER}
    return out


def _iteration(decided: Decided) -> int:
    """Returns the iteration of the directory that is written; 0 for a release."""
    return iteration_of(str(decided.destination.iteration_name)) or 0


def _implied_layers(decided: Decided, before: dict[str, Any], choices: dict[str, Any]) -> str:
    """Returns stacked or per_layer: as the source has its global keys, else as the args imply. If
    an edit makes the args imply others, these are returned.

    before, choices: those that the args of the source and those of the target state.
    """
    source = decided.source
    if not decided.changes_dialect:
        if source.opened.format.global_keys and decided.destination.format.global_keys:
            has = str(decided.moved.names.choices["layers"])
            if has != before.get("layers") or has == choices.get("layers"):
                return has
        fields = source.files.common.fields if source.files.common else {}
        if (fields.get("content_metadata") or {}).get(PER_LAYER):
            return "per_layer"
    return str(choices.get("layers", decided.names.mapping.choices["layers"][0]))


def _args_restated(old: MappingFile, new: MappingFile, written: dict[str, Any]) -> dict[str, Any]:
    """Returns the args that describe the model in another dialect than the source's; None for those
    that the new dialect does not have.
    """
    described = [{key for dim in file.dims.values() for key in dim.keys} for file in (old, new)]
    facts = {key for key in written if key in {*new.flags, *described[1], *described[0]}}
    # sorted, so that each run writes the same bytes
    return {key: written.get(key) for key in sorted(facts | (described[0] - described[1]))}


def _neutral_args(source: Checkpoint, new: MappingFile) -> dict[str, Any]:
    """Returns a value that another dialect accepts for each arg whose value it refuses, if the arg
    does not change the model in the source's dialect.
    """
    return {
        key: values[0] if values else None
        for key, values in new.expect.items()
        if key not in source.mapping.expect and (source.args or {}).get(key) not in (None, *values)
    }


def _replaced(decided: Decided, written: dict[str, Any]) -> dict[str, Any]:
    """Returns the args of a Megatron source that a conversion replaces, and their new values."""
    source, target = decided.source, decided.target
    own = source.args or {}
    names = [
        *target.parallel.args(),
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "ckpt_format",
        "transformer_impl",
        "moe_grouped_gemm",
    ]
    if target.dtype is not None:
        names += ["params_dtype", "bf16", "fp16"]
    if written["transformer_impl"] != own.get("transformer_impl", written["transformer_impl"]):
        names += FOLLOWS_IMPL
    # Experts require sequence parallelism at tp > 1; the source may have run with tp 1.
    elif written["sequence_parallel"]:
        names.append("sequence_parallel")
    if source.files.options.no_mtp:
        names += decided.names.mapping.dims["mtp_layers"].keys
    if "num_experts" in source.edited:  # the args of a dense model may lack those of a router
        names += [*OF_EXPERTS, *(key for key in written if key not in own)]
    for name in source.edited:
        spec = decided.names.mapping.dims.get(name)
        names += spec.keys if spec else ()
    if source.edited and not decided.changes_dialect:
        names += decided.names.mapping.following(source.model.dims, source.dims)
    out = {name: written.get(name) for name in names if name in written or name in own}
    if source.left_behind():
        out.update(no_save_optim=not decided.optimizer, no_save_rng=True)
    return out


def _with_torch_dtypes(args: dict[str, Any]) -> dict[str, Any]:
    """Returns args with dtypes as torch's own objects, as Megatron stores them."""
    return {
        k: (
            safe_pickle.torch_dtype(v.removeprefix("torch."))
            if isinstance(v, str) and v.startswith("torch.")
            else v
        )
        for k, v in args.items()
    }


def bridge_files(decided: Decided) -> list[TargetFile]:
    """Returns run_config.yaml if the user asks for it or the source has one, and the source's
    train_state.pt; nothing for a target that Megatron-Bridge cannot read.
    """
    source, target, names = decided.source, decided.target, decided.names
    own = source.opened.root / RUN_CONFIG
    carried = source.is_megatron and own.exists()
    if not (target.run_config or carried):
        return []
    rows, true = decided.padded_vocab_size, true_vocab(source)
    dims = {**names.dims, "vocab_size": rows if true is None else true}
    try:
        file = _bridge_mapping_file(decided)
        model = run_config.model_section(file, dims, given_of(decided), names.parallel)
    except (MappingError, UsageError) as e:
        if target.run_config:
            option = "--run-config" if names.mapping.has_args else f"--dialect {names.mapping.name}"
            raise UsageError(f"{option}: {e}") from None
        return []
    if whole := names.mapping.whole:  # its provider chooses the layers
        model.pop("transformer_layer_spec", None)
        described = source.files.described_by
        model |= whole.provided(read_config(described)) if described else {}
    has_state = decided.optimizer and bool(source.optimizer)
    if has_state:  # the state of the embedding loads with the same number of rows only
        model |= {"vocab_size": rows, "should_pad_vocab": False}
    states = {"save_optim": has_state, "save_rng": False}
    if carried and not decided.changes_dialect:
        content = run_config.restated(own, _changed_run_config(decided, file, model), states)
    else:  # the provider of another dialect has other fields
        content = run_config.new(model, states)
    out = [TargetFile.whole(RUN_CONFIG, content)]
    state = own.with_name(TRAIN_STATE)
    if (
        carried
        and state.exists()
        and source.files.iteration_directory is not None
        and source.files.iteration_directory.name == decided.destination.iteration_name
    ):
        out.append(TargetFile.whole(TRAIN_STATE, read_file(state, 1 << 20)))
    return out


def _bridge_mapping_file(decided: Decided) -> MappingFile:
    """Returns the mapping file of the target's run_config.yaml.

    Raises UsageError if Megatron-Bridge cannot load the target with one.
    """
    dialect, format = decided.names.mapping, decided.destination.format
    if not format.global_keys:
        raise UsageError(
            f"Megatron-Bridge does not read the format {format}; give --format torch_dist"
        )
    file = run_config.mapping_file(dialect)
    if file is None:
        raise UsageError(
            f"mckpt cannot describe the dialect {dialect.name} there, as it can gpt and hybrid;"
            " leave out --run-config"
        )
    if dialect.whole and not dialect.whole.provider:
        raise UsageError(
            f"mckpt does not know how {dialect.whole.trainer} describes this model; leave out"
            " --run-config"
        )
    impl = decided.names.choices["transformer_impl"]
    if impl != "transformer_engine":
        raise UsageError(
            f"Megatron-Bridge builds modules of Transformer Engine, and the target is {impl}; give"
            " --transformer-impl transformer_engine"
        )
    return file


def _changed_run_config(
    decided: Decided, file: MappingFile, model: dict[str, Any]
) -> dict[str, Any]:
    """Returns the entries of `model` that a conversion changes in the source's run_config.yaml, and
    null for those that the model no longer has.
    """
    source, target = decided.source, decided.target
    stated = run_config.read_model(source.opened.root / RUN_CONFIG)
    out = run_config.sizes(decided.names.parallel)
    out |= {key: model[key] for key in file.keys_with("stages") if key in model}
    out |= {key: model.get(key) for key in sorted(file.outdated & stated.keys())}
    edited = {*source.edited, *(["mtp_layers"] * source.files.options.no_mtp)}
    changed = [key for name in edited & file.dims.keys() for key in file.dims[name].keys]
    if source.edited:
        changed += file.following(source.model.dims, source.dims)
    if "num_experts" in source.edited:
        changed += [*OF_EXPERTS, "transformer_layer_spec"]
    out |= {key: model.get(key) for key in changed if key in model or key in stated}
    if target.dtype is not None:
        out |= {k: model[k] for k in ("params_dtype", "pipeline_dtype", "bf16", "fp16")}
    if target.grouped_experts is not None:
        out["moe_grouped_gemm"] = model["moe_grouped_gemm"]
    # without tensor parallelism it is refused; experts require it with
    if target.parallel.tp == 1 or model["sequence_parallel"]:
        out["sequence_parallel"] = model["sequence_parallel"]
    if source.opened.padded_vocab(source.mapping) != decided.padded_vocab_size:
        keys = ("vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by")
        out |= {k: model[k] for k in keys}
    return out
