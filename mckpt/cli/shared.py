"""Options that several commands share, and the dataclasses that are made from them.

An option has the name of the field that it sets, so `SourceOptions` and `TargetOptions` take their
fields from the options by name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt import formats
from mckpt.cli.options import (
    DIRECTORY,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    PATH,
    POSITIVE,
    Decorator,
    Options,
    in_section,
    json_option,
    together,
)
from mckpt.errors import UsageError

if TYPE_CHECKING:
    from mckpt.adapters.peft import Experts
    from mckpt.checkpoint.checkpoint import Checkpoint
    from mckpt.checkpoint.description import SourceOptions
    from mckpt.conversion.planning import FormOf
    from mckpt.conversion.target import TargetOptions
    from mckpt.geometry.parallel import Parallel

WRITTEN_FORMATS = click.Choice([name for name, one in formats.FORMATS.items() if one.written])
MEGATRON_FORMATS = click.Choice(formats.names(megatron=True, written=True))
DTYPES = click.Choice(["bf16", "fp16", "fp32"])

# The fields of `Parallel` that options set.
SIZES = (
    "tp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "first_stage_layers",
    "last_stage_layers",
    "account_for_embedding",
    "account_for_loss",
    "layout",
)

size_option = in_section("Parallel sizes")
model_option = in_section("Describing the model")
reading_option = in_section("Reading a Megatron checkpoint")
hf_option = in_section("Writing a Hugging Face directory")
megatron_option = in_section("Writing a Megatron checkpoint")
conversion_option = in_section("Conversion")
run_option = in_section("Run on Megatron-Core")

source_argument = click.argument("src", type=PATH)
destination_argument = click.argument("dst", type=PATH)


html_option = click.option(
    "--html",
    type=OUTPUT_FILE,
    help="Also write one HTML file with a list of all tensors, which can be searched.",
)

like_option = model_option(
    "--like",
    type=DIRECTORY,
    help="Hugging Face directory of the same model; its config.json describes the model.",
)
vocab_size_option = model_option(
    "--vocab-size", type=POSITIVE, help="Rows of the embedding without padding."
)
iteration_option = reading_option(
    "--iteration",
    type=NOT_NEGATIVE,
    help="Iteration to read. Without it, the one that the tracker file names.",
)
family_options = together(
    model_option(
        "--family",
        metavar="NAME",
        help="Family of the model (see `mckpt mappings list`), if neither config.json nor"
        " mckpt.json determines it.",
    ),
    # a str, as in `SourceOptions`
    model_option(
        "--mapping", type=click.Path(dir_okay=False), help="A family file (YAML) of your own."
    ),
    model_option(
        "--set",
        "settings",
        multiple=True,
        metavar="DIM=VALUE",
        help="Correct one hyperparameter, such as mtp_layers=0 (names: mappings/logical.yaml). For"
        " a Hugging Face source the tensors must agree with it; for a Megatron source it replaces"
        " the arg. May be repeated.",
    ),
    model_option(
        "--no-mtp",
        is_flag=True,
        help="Leave out the layers of multi-token prediction.",
    ),
)
keep_padding_option = conversion_option(
    "--keep-padding",
    is_flag=True,
    help="Keep all rows of the padded vocabulary. Without it, a Megatron target has the rows that"
    " Megatron computes for its tp, and a Hugging Face target has none.",
)
megatron_source_options = together(
    like_option,
    vocab_size_option,
    iteration_option,
    reading_option(
        "--check-replicas",
        is_flag=True,
        help="Check that the copies of a tensor that several ranks store are equal.",
    ),
)

hf_target_options = together(
    hf_option(
        "--tokenizer",
        type=DIRECTORY,
        help="Directory from which the tokenizer and other side files are copied.",
    ),
    hf_option(
        "--max-shard-size",
        default="2GB",
        metavar="SIZE",
        help="Size of the largest safetensors file.",
    ),
    hf_option(
        "--quantize",
        type=click.Choice(["fp8", "mxfp8", "nvfp4"]),
        help="Quantise the weights of linear layers: fp8 is float8_e4m3fn with one scale for each"
        " block of 128 x 128, mxfp8 with a power of two for each 1 x 32; nvfp4 is numbers of 4 bits"
        " with a scale for each 1 x 16, and one for each tensor (docs/hugging-face.md).",
    ),
)
no_adapter_option = conversion_option(
    "--no-adapter",
    is_flag=True,
    help="Convert the weights alone where a Hugging Face directory has an adapter (LoRA) too.",
)

alpha_option = reading_option(
    "--alpha",
    type=float,
    help="The alpha of the adapters of a Megatron checkpoint, if neither run_config.yaml nor"
    " mckpt.json states it.",
)
experts_option = together(
    reading_option(
        "--expert-a",
        type=click.Choice(["input", "output"]),
        help="Of an adapter of PEFT with square matrices of experts in one parameter: the side that"
        " the factor A multiplies. Without it, peft_version or other shapes decide.",
    ),
    reading_option(
        "--expert-b",
        type=click.Choice(["rank_major", "grouped_by_expert"]),
        help="Of an adapter of PEFT with experts in one parameter: the order of the columns of the"
        " factor B. grouped_by_expert is that of Unsloth before September 2026. Without it,"
        " lora_B_layout of adapter_config.json decides, else rank_major.",
    ),
)
adapters_source_options = together(
    alpha_option, like_option, vocab_size_option, iteration_option, family_options
)
merge_option = conversion_option(
    "--merge",
    is_flag=True,
    help="Of a Megatron checkpoint with weights and adapters (LoRA): write the weights with the"
    " adapters added to them. Without it, the adapters are written as a directory of PEFT.",
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
adapter_layout_option = conversion_option(
    "--layout",
    "how",
    type=click.Choice(["fused", "block", "canonical", "swift", "swift-block"]),
    help="How linears that pack several weights (q, k and v; gate and up) are adapted. fused: by"
    " one adapter, whose factor A all of them share. canonical: each by its own adapter"
    " (CanonicalLoRA). block: by one adapter with the sum of their ranks, which computes the same."
    " Without it, fused, or canonical if the weights have different factors A."
    " swift, swift-block: as fused and block, in the form of ms-swift instead of Megatron-Bridge,"
    " without the weights.",
)

no_optimizer_option = megatron_option(
    "--no-optimizer",
    is_flag=True,
    help="Write the weights only; leave out optimizer and random states.",
)


def dialect_option(prefix: str = "", otherwise: str = "") -> Decorator:
    """Returns the option for the dialect of the checkpoint that is written."""
    return megatron_option(
        *dict.fromkeys([f"--{prefix}dialect", "--dialect"]),
        "dialect",
        metavar="NAME",
        help="Names of the tensors: gpt for Megatron's GPTModel, hybrid for its HybridModel, which"
        f" megatron-core has from 0.18 on. Without it, {otherwise}.",
    )


megatron_target_options = together(
    megatron_option(
        "--transformer-impl",
        type=click.Choice(["transformer_engine", "local"]),
        help="Layer spec whose parameter names are written: Transformer Engine's, or the local one"
        " of Megatron-Core. Without it, the source's; from Hugging Face, transformer_engine.",
    ),
    megatron_option(
        "--grouped-experts/--sequential-experts",
        default=None,
        help="Mixtures of experts only: store experts as --moe-grouped-gemm does, or one module for"
        " each. Without it, as in the source; for a Hugging Face source or with --transformer-impl,"
        " grouped for transformer_engine and sequential for local.",
    ),
    megatron_option(
        "--make-vocab-size-divisible-by",
        "divisible_by",
        type=POSITIVE,
        default=128,
        help="Pad the vocabulary to a multiple of N times tp.",
    ),
    megatron_option(
        "--common-state",
        type=click.Choice(["file", "object"]),
        default="file",
        help="torch_dist only: where to store args and iteration. file writes common.pt, which"
        " every version reads; object stores them inside the checkpoint, as megatron-core"
        " 0.19 does.",
    ),
    megatron_option(
        "--megatron-version",
        metavar="VERSION",
        help="The megatron-core that will load the checkpoint, such as 0.16 or 0.19.2. Without"
        " it, the newest version that mckpt knows and that loads the format.",
    ),
    megatron_option(
        "--layer-keys",
        type=click.Choice(["stacked", "per_layer"]),
        help="torch_dist only: one key for all layers, or one for each layer. Without it,"
        " the model's args decide.",
    ),
    megatron_option(
        "--run-config",
        is_flag=True,
        help="torch_dist only: write run_config.yaml too, from which Megatron-Bridge loads the"
        " checkpoint. Its trainer then decides which models are exact. reshard keeps this file of"
        " its source without the option too.",
    ),
    megatron_option(
        "--update-tracker",
        is_flag=True,
        help="Make the tracker file name this checkpoint even if it now names a later iteration.",
    ),
)

dtype_option = conversion_option(
    "--dtype", type=DTYPES, help="Cast every tensor. Without it, each tensor keeps its dtype."
)
inexact_option = conversion_option(
    "--allow-inexact",
    multiple=True,
    metavar="NAME",
    help="Convert a model with a feature that the target cannot represent exactly. The error about"
    " the feature prints its NAME. May be repeated.",
)
overflow_option = conversion_option(
    "--allow-overflow",
    is_flag=True,
    help="Let values that are too large for fp16, or that large scales of quantised weights"
    " make infinite, become infinite.",
)
overwrite_option = conversion_option(
    "--overwrite",
    is_flag=True,
    help="Replace an existing checkpoint once the new one is complete. In an object store the old"
    " one is removed earlier, before the first file of the new one is sent.",
)
stream_option = conversion_option(
    "--stream",
    is_flag=True,
    help="Read a model on the Hub without downloading it: only the output needs disk space.",
)
conversion_options = together(
    dtype_option,
    inexact_option,
    conversion_option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    conversion_option(
        "--max-memory",
        default="64MiB",
        metavar="SIZE",
        help="Size of all buffers together, such as 500MB, 64MiB or 2Gi; at least 512KiB for each"
        " thread.",
    ),
    conversion_option(
        "--threads",
        type=NOT_NEGATIVE,
        default=0,
        help="Number of copy threads; 0 chooses automatically.",
    ),
    conversion_option(
        "--workers",
        type=POSITIVE,
        help="Number of processes on this machine that share the work; RANK and similar variables"
        " are then ignored. Without the option, the processes that torchrun or srun started share"
        " the work, or one process does all of it; a process for each core, up to 8, merges an"
        " adapter.",
    ),
    conversion_option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        help="local: this process and its workers copy. ray: the nodes of the Ray cluster that"
        " RAY_ADDRESS names copy; if it is not set, a cluster on this machine.",
    ),
    conversion_option(
        "--checksum",
        type=click.Choice(["crc32", "sha256", "none"]),
        default="crc32",
        help="Checksum of each file, stored in mckpt.json.",
    ),
    overflow_option,
    overwrite_option,
    conversion_option(
        "--resume/--no-resume",
        default=True,
        help="Continue an interrupted run of the same command.",
    ),
    json_option,
)


# ------------------------------------------------------------------------------------------- sizes


def _size(
    name: str, text: str, prefix: str = "", default: int | None = None, otherwise: str = ""
) -> Decorator:
    """Returns an option for one size, also under its short name if it has a `prefix`."""
    return size_option(
        *dict.fromkeys([f"--{prefix}{name}", f"--{name}"]),
        name,
        type=POSITIVE,
        default=default,
        show_default=otherwise or None,
        help=text,
    )


def _model_sizes(prefix: str = "", default: int | None = None, otherwise: str = "") -> Decorator:
    same = (prefix, default, otherwise)
    return together(
        _size("tp", "Tensor-parallel size.", *same),
        _size("pp", "Pipeline-parallel size.", *same),
        _size("vpp", "Virtual stages of each pipeline rank.", *same),
        _size("ep", "Expert-parallel size.", *same),
        _size("etp", "Tensor-parallel size of the experts. Without it, tp.", prefix),
    )


def layout_options(prefix: str = "", default: int | None = None, otherwise: str = "") -> Decorator:
    """Returns the options for the parallel layout of a checkpoint.

    `otherwise` is what the help shows as the default of a size that has no `default`.
    """
    return together(
        _model_sizes(prefix, default, otherwise),
        size_option(
            "--decoder-first-pipeline-num-layers",
            "first_stage_layers",
            type=POSITIVE,
            help="Number of layers of the first stage.",
        ),
        size_option(
            "--decoder-last-pipeline-num-layers",
            "last_stage_layers",
            type=POSITIVE,
            help="Number of layers of the last stage.",
        ),
        size_option(
            "--account-for-embedding-in-pipeline-split",
            "account_for_embedding",
            is_flag=True,
            help="Count the embedding as a layer.",
        ),
        size_option(
            "--account-for-loss-in-pipeline-split",
            "account_for_loss",
            is_flag=True,
            help="Count the loss as a layer.",
        ),
        size_option(
            "--pipeline-model-parallel-layout",
            "layout",
            metavar="LAYOUT",
            help="The layers of every stage, such as 'Ettt|(tt|)*6tL'.",
        ),
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
    megatron_option(
        "--iteration", "target_iteration", type=POSITIVE, help="Write iter_N instead of release."
    ),
)


def run_options(otherwise: str) -> Decorator:
    """Returns the options for running a model on Megatron-Core.

    `otherwise` is what the help shows as the default of a size.
    """
    return together(
        _model_sizes(otherwise=otherwise),
        _size("cp", "Context-parallel size; needs Transformer Engine.", default=1),
        run_option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            help="Device that runs the model; auto takes cuda if there are enough GPUs.",
        ),
        run_option(
            "--transformer-impl",
            type=click.Choice(["auto", "transformer_engine", "local"]),
            default="auto",
            help="Implementation of the layers; auto takes transformer_engine if it is installed.",
        ),
    )


# --------------------------------------------------------------------------- options -> dataclasses


def open_source(path: Path, options: Options) -> Checkpoint:
    """Opens a checkpoint; the options describe the model."""
    from mckpt.checkpoint.checkpoint import Checkpoint

    return Checkpoint.open(path, source_options(options))


def source_options(options: Options) -> SourceOptions:
    """Returns the description of a source that the options give."""
    from mckpt.checkpoint.description import SourceOptions

    settings = parse_settings(options)
    return SourceOptions(**_fields(SourceOptions, options) | {"settings": settings})


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

    found = peft.open_adapter(adapter, experts_of(options))
    if merges:
        return merging.merge(source, found), None
    beside = partial(forms.beside, of_peft(found, source), how)
    return source, partial(planning.form_of_weights, adapters=beside)


def experts_of(options: Options) -> Experts:
    """Returns how the user wants the factors of experts to be read."""
    from mckpt.adapters.peft import Experts

    return Experts(options["expert_a"], options["expert_b"])


def parse_settings(options: Options) -> dict[str, Any]:
    """Returns the value of each dim that --set names."""
    from mckpt.mapping import parse_setting

    return dict(parse_setting(text) for text in options["settings"])


def parallel_sizes(options: Options) -> dict[str, Any]:
    """Returns the fields of `Parallel` that the options set; None if an option is not given."""
    return {name: options[name] for name in SIZES}


def make_target(options: Options, target_format: str, parallel: Parallel | None) -> TargetOptions:
    """Returns the target that the options describe; a Hugging Face target has no `parallel`."""
    from mckpt.conversion.target import TargetOptions
    from mckpt.values.sizes import parse_size

    given = _fields(TargetOptions, options) | {
        "format": target_format,
        "common_as_object": options.get("common_state") == "object",
    }
    if parallel is not None:
        given["parallel"] = parallel
    if "max_shard_size" in given:
        given["max_shard_size"] = parse_size(given["max_shard_size"], "--max-shard-size")
    return TargetOptions(**given)


def _fields(kind: type[Any], options: Options) -> dict[str, Any]:
    """Returns the options that are fields of the dataclass `kind`, without those not given."""
    from dataclasses import fields

    names = (field.name for field in fields(kind))
    return {name: options[name] for name in names if options.get(name) is not None}
