"""The files beside a checkpoint from which Megatron-Bridge loads it."""

from __future__ import annotations

from typing import Any

from mckpt.conversion.args import Decided, given_of
from mckpt.conversion.facts import true_vocab
from mckpt.errors import MappingError, UsageError
from mckpt.formats.megatron import run_config
from mckpt.formats.megatron.run_config import RUN_CONFIG, TRAIN_STATE
from mckpt.mapping import MappingFile
from mckpt.storage.files import TargetFile, read_file


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
        file = _mapping_file(decided)
        model = run_config.model_section(file, dims, given_of(decided), names.parallel)
    except (MappingError, UsageError) as e:
        if target.run_config:
            raise UsageError(f"--run-config: {e}") from None
        return []
    has_state = decided.optimizer and bool(source.optimizer)
    if has_state:  # the state of the embedding loads with the same number of rows only
        model |= {"vocab_size": rows, "should_pad_vocab": False}
    states = {"save_optim": has_state, "save_rng": False}
    if carried and not decided.changes_dialect:
        content = run_config.restated(own, _changed(decided, file, model), states)
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


def _mapping_file(decided: Decided) -> MappingFile:
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
            f"mckpt cannot describe the dialect {dialect.name} there; give --dialect gpt or hybrid"
        )
    impl = decided.names.choices["transformer_impl"]
    if impl != "transformer_engine":
        raise UsageError(
            f"Megatron-Bridge builds modules of Transformer Engine, and the target is {impl}; give"
            " --transformer-impl transformer_engine"
        )
    return file


def _changed(decided: Decided, file: MappingFile, model: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `model` that a conversion changes in the source's run_config.yaml."""
    source, target = decided.source, decided.target
    out = run_config.sizes(decided.names.parallel)
    out |= {key: model[key] for key in file.keys_with("stages") if key in model}
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
