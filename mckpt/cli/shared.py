"""Options that several commands share, and the tables of `mckpt.options` that are made from them.

An option has the name of the field that it sets, so a table takes its fields from the options by
name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt import formats
from mckpt.cli.options import (
    DIRECTORY,
    OUTPUT_FILE,
    PATH,
    POSITIVE,
    Decorator,
    Options,
    from_table,
    in_section,
    json_option,
    together,
)
from mckpt.errors import UsageError
from mckpt.options import (
    CONVERSION,
    MEGATRON,
    RUN,
    SIZES,
    AdapterOptions,
    AverageOptions,
    PlaceOptions,
    RunOptions,
    SizeOptions,
    SourceOptions,
    TargetOptions,
    VerifyOptions,
    options_of,
)

if TYPE_CHECKING:
    from mckpt.checkpoint.checkpoint import Checkpoint
    from mckpt.conversion.planning import FormOf
    from mckpt.geometry.parallel import Parallel

WRITTEN_FORMATS = click.Choice([name for name, one in formats.FORMATS.items() if one.written])
MEGATRON_FORMATS = click.Choice(formats.names(megatron=True, written=True))
_COMMON = {n for n, one in formats.FORMATS.items() if one.loads_anywhere and not one.dialect}
TRAINED = click.Choice([name for name in MEGATRON_FORMATS.choices if name in _COMMON])
DIVISIBLE_BY = 128  # Megatron's default

conversion_option = in_section(CONVERSION)
megatron_option = in_section(MEGATRON)
run_option = in_section(RUN)
of_source = partial(from_table, SourceOptions)
of_target = partial(from_table, TargetOptions)
of_place = partial(from_table, PlaceOptions)
of_run = partial(from_table, RunOptions)
of_adapter = partial(from_table, AdapterOptions)
of_verify = partial(from_table, VerifyOptions)
of_average = partial(from_table, AverageOptions)

source_argument = click.argument("src", type=PATH)
destination_argument = click.argument("dst", type=PATH)


html_option = click.option(
    "--html",
    type=OUTPUT_FILE,
    help="Also write one HTML file with a list of all tensors, which can be searched.",
)
family_options = of_source("family mapping settings no_mtp")
megatron_source_options = together(of_source("like vocab_size iteration"), of_run("check_replicas"))
hf_target_options = of_target("tokenizer max_shard_size quantize")
alpha_option = of_verify("alpha")
adapters_source_options = together(
    alpha_option, of_source("like vocab_size iteration"), family_options
)
adapter_option = together(
    conversion_option(
        "--adapter",
        type=DIRECTORY,
        help="Directory of an adapter (LoRA) of PEFT, which is written beside the weights as"
        " Megatron-Bridge has it. `mckpt adapter` has more commands for adapters.",
    ),
    conversion_option(
        "--merge",
        is_flag=True,
        help="Add the adapter to the weights, and do not write it.",
    ),
)


def dialect_option(prefix: str = "", otherwise: str = "") -> Decorator:
    """Returns the option for the dialect of the checkpoint that is written."""
    text = options_of(TargetOptions)["dialect"].help
    return of_target("dialect", prefix, help=f"{text} Without it, {otherwise}.")


megatron_target_options = together(
    of_target("transformer_impl grouped_experts"),
    of_target("divisible_by", default=DIVISIBLE_BY),
    of_target("common_as_object megatron_version layer_keys towers run_config"),
    of_place("update_tracker"),
)
conversion_options = together(
    of_target("dtype allow_inexact"),
    conversion_option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    of_run("max_memory threads"),
    conversion_option(
        "--workers",
        type=POSITIVE,
        help="Number of processes on this machine that share the work; RANK and similar variables"
        " are then ignored. Without the option, the processes that torchrun or srun started share"
        " the work, or one process does all of it; a process for each core, up to 8, merges an"
        " adapter.",
    ),
    of_run("engine checksum allow_overflow"),
    of_place("overwrite"),
    of_run("resume"),
    json_option,
)


# ------------------------------------------------------------------------------------------- sizes


def _model_sizes(prefix: str = "", default: int | None = None, otherwise: str = "") -> Decorator:
    shown: dict[str, Any] = {"default": default, "show_default": otherwise or None}
    sizes = from_table(SizeOptions, "tp pp vpp ep", prefix, **shown)
    return together(sizes, from_table(SizeOptions, "etp", prefix))


def layout_options(prefix: str = "", default: int | None = None, otherwise: str = "") -> Decorator:
    """Returns the options for the parallel layout of a checkpoint.

    `otherwise` is what the help shows as the default of a size that has no `default`.
    """
    uneven = from_table(SizeOptions, " ".join(SIZES[5:]))
    return together(_model_sizes(prefix, default, otherwise), uneven)


# of a command whose result has the form of its source: see `target_like`
kept_form_options = together(
    layout_options("target-", otherwise="1 from Hugging Face, else the source's"),
    conversion_option(
        "--format",
        "target_format",
        type=WRITTEN_FORMATS,
        help="Format of the target. Without it, the source's, or torch_dist if sizes are given.",
    ),
    hf_target_options,
    dialect_option("target-", otherwise="the source's; from Hugging Face, gpt"),
)
new_checkpoint_options = together(
    layout_options(default=1),
    megatron_option(
        "--format",
        "target_format",
        type=MEGATRON_FORMATS,
        default=formats.MEGATRON,
        help="Format of the new checkpoint.",
    ),
    of_target("target_iteration", flag="--iteration"),
)


def run_options(otherwise: str) -> Decorator:
    """Returns the options for running a model on Megatron-Core.

    `otherwise` is what the help shows as the default of a size.
    """
    return together(_model_sizes(otherwise=otherwise), of_verify("cp device transformer_impl"))


# ----------------------------------------------------------------------------- options -> tables


def open_source(path: Path, options: Options) -> Checkpoint:
    """Opens a checkpoint; the options describe the model."""
    from mckpt.checkpoint.checkpoint import Checkpoint

    return Checkpoint.open(path, source_options(options))


def source_options(options: Options) -> SourceOptions:
    return SourceOptions.of(options, settings=parse_settings(options))


def with_adapter(
    source: Checkpoint, options: Options, how: str | None
) -> tuple[Checkpoint, FormOf | None]:
    """Returns the source, with the adapter of --adapter added to its weights if --merge is given,
    and what decides the form of the target if the adapter is written beside them.
    """
    adapter, merges = options["adapter"], options["merge"]
    if adapter is None and merges:
        raise UsageError("give --adapter DIR as well, the adapter to merge")
    if how and (adapter is None or merges):
        raise UsageError(f"--layout {how}: no adapter is written; leave it out")
    if adapter is None:
        return source, None
    from mckpt.adapters import forms, merging, peft
    from mckpt.adapters.checkpoint import of_peft
    from mckpt.conversion import planning

    found = peft.open_adapter(adapter, AdapterOptions.of(options))
    if merges:
        return merging.merge(source, found), None
    beside = partial(forms.beside, of_peft(found, source), how)
    return source, partial(planning.form_of_weights, adapters=beside)


def parse_settings(options: Options) -> dict[str, Any]:
    from mckpt.mapping import parse_setting

    return dict(parse_setting(text) for text in options["settings"])


def parallel_sizes(options: Options) -> dict[str, Any]:
    """Returns the fields of `Parallel` that the options set; None if an option is not given."""
    return {name: options[name] for name in SIZES}


def target_like(source: Checkpoint, options: Options, target_format: str | None) -> TargetOptions:
    """Returns the target of a command whose result is of the format of its source, unless sizes or
    a format are given.
    """
    sizes = parallel_sizes(options)
    if target_format is None:
        target_format = formats.HUGGING_FACE
        if source.is_megatron or any(sizes.values()):
            target_format = formats.kept_or_default(source.format)
    to_megatron = formats.FORMATS[target_format].megatron
    if any(sizes.values()) and not to_megatron:
        raise UsageError(
            "a Hugging Face directory has no parallel sizes; leave them out, or give --format"
            f" {formats.MEGATRON}"
        )
    return make_target(
        options, target_format, source.parallel.with_(**sizes) if to_megatron else None
    )


def make_target(options: Options, target_format: str, parallel: Parallel | None) -> TargetOptions:
    """Returns the target that the options describe; a Hugging Face target has no `parallel`."""
    more: dict[str, Any] = {"format": target_format}
    whole = formats.dialect_of(target_format)
    alone = type(parallel)() if parallel is not None else None
    if whole and alone and alone.with_(**parallel_sizes(options)) != alone:
        raise UsageError(
            f"the format {target_format} has whole tensors, and no parallel sizes; leave them out"
        )
    if parallel is not None:
        more["parallel"] = parallel
    # the default, which such a target ignores
    if (parallel is None or whole) and options.get("divisible_by") == DIVISIBLE_BY:
        more["divisible_by"] = None
    return TargetOptions.of(options, **more)
