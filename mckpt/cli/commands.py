"""The `mckpt` command: parses, calls one function of `api`, prints. stdout is the result, stderr
progress and errors.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mckpt import __version__, formats
from mckpt.errors import MckptError, UsageError, counted

Command = Callable[..., Any]


# ------------------------------------------------------------------------------------------ options


def _apply(*options: Command) -> Callable[[Command], Command]:
    def decorate(f: Command) -> Command:
        for option in reversed(options):
            f = option(f)
        return f

    return decorate


_source = click.argument("src", type=click.Path(path_type=Path))
_destination = click.argument("dst", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_knowing = _apply(
    click.option("--family", help="The model's family, where nothing says it."),
    click.option(
        "--mapping",
        "mapping_file",
        type=click.Path(dir_okay=False),
        help="Your own family file (YAML).",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="DIM=VALUE",
        help="A dim that the source does not say.",
    ),
    click.option(
        "--allow-inexact",
        multiple=True,
        metavar="NAME",
        help="Accept what the target cannot compute exactly.",
    ),
)
_megatron_source = _apply(
    click.option(
        "--like",
        type=click.Path(file_okay=False, path_type=Path),
        help="A Hugging Face directory of the same model: its config is used.",
    ),
    click.option(
        "--vocab-size", type=click.IntRange(1), help="True rows of the embedding, without padding."
    ),
    click.option(
        "--iteration",
        type=click.IntRange(0),
        help="Which iteration to read; the tracker's otherwise.",
    ),
    click.option("--check-replicas", is_flag=True, help="Compare tensors that several ranks hold."),
)
_megatron_target = _apply(
    click.option(
        "--transformer-impl",
        type=click.Choice(["transformer_engine", "local"]),
        help="Whose names the keys have.",
    ),
    click.option(
        "--grouped-experts/--sequential-experts",
        default=None,
        help="--moe-grouped-gemm, or one module for each expert.",
    ),
    click.option(
        "--make-vocab-size-divisible-by",
        "divisible_by",
        type=click.IntRange(1),
        default=128,
        show_default=True,
    ),
    click.option(
        "--common-state",
        type=click.Choice(["file", "object"]),
        default="file",
        show_default=True,
        help="torch_dist: common.pt, or the object that megatron-core from 0.19 on writes.",
    ),
    click.option(
        "--megatron-version",
        metavar="VERSION",
        help=(
            "The megatron-core that will load the checkpoint, such as 0.16 or 0.19.2; "
            "the newest that mckpt knows if not given."
        ),
    ),
    click.option(
        "--layer-keys",
        type=click.Choice(["stacked", "per_layer"]),
        help=(
            "torch_dist: one key for all layers, or one for each; "
            "as the model's args imply if not given."
        ),
    ),
    click.option(
        "--update-tracker",
        is_flag=True,
        help="Let the tracker name this checkpoint, even if that is a step back.",
    ),
)
_writing = _apply(
    click.option(
        "--dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        help="Cast every tensor; else each keeps its own dtype.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    _json,
    click.option(
        "--max-memory",
        default="64MiB",
        show_default=True,
        help="Bytes in flight at once, with a unit: 500MB, 64MiB, 2GiB.",
    ),
    click.option(
        "--threads", type=click.IntRange(0), default=0, help="0: as many as help on this machine."
    ),
    click.option(
        "--workers",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Processes on this machine; under torchrun or srun each of theirs is one.",
    ),
    click.option(
        "--checksum",
        type=click.Choice(["crc32", "sha256", "none"]),
        default="crc32",
        show_default=True,
        help="Of each file, in mckpt.json.",
    ),
    click.option(
        "--allow-overflow", is_flag=True, help="Let values too large for fp16 become infinite."
    ),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace the checkpoint that is there, once the new one is complete.",
    ),
    click.option(
        "--resume/--no-resume",
        default=True,
        show_default=True,
        help="Go on where an interrupted run of this command stopped.",
    ),
)


def _sizes(prefix: str, default: int | None, otherwise: str = "") -> Callable[[Command], Command]:
    """Options for the parallel sizes; `otherwise` says in their help which size is taken where
    there is no `default`.
    """

    def size(name: str, text: str) -> Command:
        flags = dict.fromkeys([f"--{prefix}{name}", f"--{name}"])
        shown = True if default is not None else otherwise
        return click.option(
            *flags, name, type=click.IntRange(1), default=default, show_default=shown, help=text
        )

    etp = dict.fromkeys([f"--{prefix}etp", "--etp"])
    return _apply(
        size("tp", "Tensor-parallel size."),
        size("pp", "Pipeline-parallel size."),
        size("vpp", "Virtual stages of each pipeline rank."),
        size("ep", "Expert-parallel size."),
        click.option(
            *etp,
            "etp",
            type=click.IntRange(1),
            help="Tensor-parallel size of experts; as tp if not given.",
        ),
        click.option(
            "--decoder-first-pipeline-num-layers",
            "first_stage_layers",
            type=click.IntRange(1),
            help="Layers of the first stage.",
        ),
        click.option(
            "--decoder-last-pipeline-num-layers",
            "last_stage_layers",
            type=click.IntRange(1),
            help="Layers of the last stage.",
        ),
        click.option(
            "--account-for-embedding-in-pipeline-split",
            "account_for_embedding",
            is_flag=True,
            help="Count the embedding as a layer.",
        ),
        click.option(
            "--account-for-loss-in-pipeline-split",
            "account_for_loss",
            is_flag=True,
            help="Count the loss as a layer.",
        ),
        click.option(
            "--pipeline-model-parallel-layout",
            "layout",
            metavar="LAYOUT",
            help="Such as 'Ettt|(tt|)*6tL'.",
        ),
    )


def _run_sizes(otherwise: str) -> Callable[[Command], Command]:
    """Options for the sizes of a run on Megatron-Core; `otherwise` says in their help which size is
    taken without them.
    """

    def size(name: str, text: str) -> Command:
        return click.option(f"--{name}", type=click.IntRange(1), show_default=otherwise, help=text)

    return _apply(
        size("tp", "Tensor-parallel size of the run."),
        size("pp", "Pipeline-parallel size."),
        size("vpp", "Virtual stages of each pipeline rank."),
        size("ep", "Expert-parallel size."),
        click.option(
            "--etp",
            type=click.IntRange(1),
            help="Tensor-parallel size of experts; as tp if not given.",
        ),
    )


_SIZES = (
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


# ----------------------------------------------------------------------------------------- commands


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="mckpt %(version)s")
def cli() -> None:
    """Move LLM checkpoints between Hugging Face and Megatron, and prove the result."""


@cli.command()
@_source
@_destination
@_sizes("", 1)
@click.option(
    "--format",
    "form",
    type=click.Choice(formats.names(megatron=True)),
    default=formats.MEGATRON,
    show_default=True,
)
@click.option(
    "--iteration",
    "target_iteration",
    type=click.IntRange(1),
    help="Write iter_N instead of release.",
)
@_megatron_target
@_knowing
@_writing
def hf_to_megatron(form: str, **o: Any) -> None:
    """Convert a Hugging Face directory into a checkpoint of a Megatron save directory."""
    from mckpt.geometry.parallel import Parallel

    sizes = {k: o.pop(k) for k in _SIZES}
    source = _open(o)
    if source.is_megatron:
        raise UsageError(
            f"{o['src']}: is a Megatron checkpoint ({source.format}); `mckpt reshard` changes its"
            " sizes or format"
        )
    _run(form, Parallel(**{k: v for k, v in sizes.items() if v is not None}), source=source, **o)


@cli.command()
@_source
@_destination
@click.option(
    "--tokenizer",
    type=click.Path(file_okay=False, path_type=Path),
    help="A directory whose tokenizer and other side files are copied.",
)
@click.option(
    "--max-shard-size", default="2GB", show_default=True, help="Largest safetensors file."
)
@click.option("--keep-padding", is_flag=True, help="Keep the padded rows of the vocabulary.")
@_megatron_source
@_knowing
@_writing
def megatron_to_hf(**o: Any) -> None:
    """Convert a Megatron checkpoint into a Hugging Face directory; config.json is rebuilt from its
    args.
    """
    _run(formats.HUGGING_FACE, None, **o)


@cli.command()
@_source
@_destination
@_sizes("target-", None, "the source's")
@click.option(
    "--target-format",
    "form",
    type=click.Choice(formats.names(megatron=True)),
    help="As the source's if not given.",
)
@click.option(
    "--no-optimizer",
    is_flag=True,
    help="Move the weights alone, and leave optimizer and random states behind.",
)
@_megatron_source
@_megatron_target
@_knowing
@_writing
def reshard(form: str | None, **o: Any) -> None:
    """Change the parallel sizes or the format of a Megatron checkpoint."""
    sizes = {k: o.pop(k) for k in _SIZES}
    source = _open(o)
    if not source.is_megatron:
        raise UsageError(
            f"{o['src']}: is a Hugging Face directory; `mckpt hf-to-megatron` converts it"
        )
    _run(form or source.format, source.parallel.with_(**sizes), source=source, **o)


@cli.command()
@_source
@_destination
@_sizes("", None, "1 from Hugging Face, else the source's")
@click.option(
    "--to",
    "form",
    type=click.Choice(list(formats.FORMATS)),
    help=(
        "Target format; if not given torch_dist from Hugging Face, from Megatron hf, or where sizes"
        " are given the source's."
    ),
)
@click.option("--tokenizer", type=click.Path(file_okay=False, path_type=Path))
@click.option("--max-shard-size", default="2GB", show_default=True)
@click.option("--no-optimizer", is_flag=True)
@_megatron_source
@_megatron_target
@_knowing
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]))
@click.option("--overwrite", is_flag=True, help="Plan to replace the checkpoint that is there.")
@_json
def plan(form: str | None, **o: Any) -> None:
    """Print the whole plan of a conversion, proved from headers alone.

    Nothing is written; a destination that a run would refuse is refused.
    """
    context = click.get_current_context()
    given = [
        p.opts[0]
        for p in context.command.params
        if p.name in _SIZES and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    ]
    sizes = {k: o.pop(k) for k in _SIZES}
    source = _open(o)
    if form is None:
        form = (
            source.format
            if source.is_megatron and given
            else formats.HUGGING_FACE
            if source.is_megatron
            else formats.MEGATRON
        )
    sizes_wanted = formats.FORMATS[form].megatron
    if given and not sizes_wanted:
        raise UsageError(
            f"{', '.join(given)}: a Hugging Face directory has no parallel sizes; leave them out,"
            " or say --to torch_dist or --to torch"
        )
    _run(
        form,
        source.parallel.with_(**sizes) if sizes_wanted else None,
        source=source,
        dry_run=True,
        **o,
    )


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--iteration", type=click.IntRange(0), help="Which iteration; the tracker's otherwise."
)
@click.option(
    "--megatron-args", "flags", is_flag=True, help="Print the flags of pretrain_gpt.py for it."
)
@_knowing
@_json
def inspect(path: Path, iteration: int | None, flags: bool, as_json: bool, **o: Any) -> None:
    """Say what a directory holds: format, model, sizes, tensors."""
    from mckpt.checkpoint import inspection

    source = _open({"src": path, "iteration": iteration, **o})
    if flags:
        from mckpt import api
        from mckpt.formats.megatron import megatron_args

        said = api.launch(source)
        click.echo(megatron_args.as_json(said) if as_json else megatron_args.shell(said), nl=False)
        return
    found = inspection.inspect(source, None if as_json else inspection.SHOWN)
    click.echo(json.dumps(found) if as_json else inspection.text(found))


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--atol", type=float, help="Largest difference allowed; without it every bit counts.")
@click.option(
    "--like",
    type=click.Path(file_okay=False, path_type=Path),
    help="A Hugging Face directory that describes the model.",
)
@click.option(
    "--vocab-size", type=click.IntRange(1), help="True rows of the embedding, without padding."
)
@click.option("--family", help="The model's family, where nothing says it.")
@click.option(
    "--mapping",
    "mapping_file",
    type=click.Path(dir_okay=False),
    help="Your own family file (YAML).",
)
@click.option(
    "--set", "settings", multiple=True, metavar="DIM=VALUE", help="A dim that neither says."
)
@_json
def diff(a: Path, b: Path, atol: float | None, as_json: bool, **o: Any) -> int:
    """Compare two checkpoints of any formats and sizes tensor by tensor.

    Exit 0: the same; 1: different.
    """
    from mckpt import api

    left, right = (_open({**o, "src": p}) for p in (a, b))
    left, right = left.named_as(right), right.named_as(left)
    for note in dict.fromkeys(
        f"{side.path}: {note}" for side in (left, right) for note in side.notes
    ):
        _tell(note, as_json)
    with _progress("comparing", as_json) as progress:
        found = api.diff(left, right, atol=atol, progress=progress)
    if as_json:
        click.echo(json.dumps(found.json()))
    else:
        for name in found.missing:
            click.echo(f"only in {a}: {name}")
        for name in found.extra:
            click.echo(f"only in {b}: {name}")
        for change in found.changed:
            click.echo(str(change))
        for text in found.replicas:
            click.echo(text)
        for text in found.left_out:
            click.echo(f"not compared, because the mapping ignores it: {text}")
        verdict = (
            "different"
            if found
            else "the same" + (" to the last bit" if atol is None else f" within {atol:g}")
        )
        click.echo(
            f"{verdict}: {counted(found.same, 'tensor')} equal, {len(found.changed):,} differ,"
            f" {len(found.missing):,} missing, {len(found.extra):,} extra"
            + (f", {len(found.left_out):,} ignored" if found.left_out else "")
        )
    return 1 if found else 0


_run_options = _apply(
    click.option(
        "--cp",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Context-parallel size; needs Transformer Engine.",
    ),
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
    ),
    click.option(
        "--transformer-impl",
        type=click.Choice(["auto", "transformer_engine", "local"]),
        default="auto",
        show_default=True,
        help="The layers that run; auto: Transformer Engine's where it is installed.",
    ),
)


@cli.command()
@click.argument("hf", type=click.Path(path_type=Path))
@click.argument("megatron", type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(["bytes", "forward", "train"]),
    default="forward",
    show_default=True,
    help="Equal tensors; equal logits; and equal losses of a few steps at two parallel layouts.",
)
@_run_sizes("the checkpoint's for torch files, else 1")
@_run_options
@click.option(
    "--tokens",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Further sequences: JSON lists, one a line, or .npy.",
)
@click.option(
    "--sequences",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Random sequences, from fixed seeds.",
)
@click.option(
    "--length",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Tokens of each, at most what the model allows.",
)
@click.option(
    "--steps", type=click.IntRange(2), default=4, show_default=True, help="Of --level train."
)
@click.option(
    "--iteration", type=click.IntRange(0), help="Which iteration; the tracker's otherwise."
)
@click.option("--family", help="The model's family, where nothing says it.")
@click.option("--mapping", type=click.Path(dir_okay=False), help="Your own family file (YAML).")
@click.option(
    "--set", "settings", multiple=True, metavar="DIM=VALUE", help="A dim that neither says."
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write one HTML file with all that was measured.",
)
@_json
def verify(hf: Path, megatron: Path, report: Path | None, as_json: bool, **o: Any) -> int:
    """Do both hold one model? Runs transformers and Megatron-Core on the same tokens.

    Exit 0: pass; 1: fail, or incomplete.
    """
    from mckpt.verification import levels as verification
    from mckpt.verification import report as page

    if report is not None:
        page.refuse(report)  # now, rather than when all has run
    from mckpt.mapping import parse_setting

    o["settings"] = dict(parse_setting(text) for text in o["settings"])
    start = time.perf_counter()
    with _waiting("transformers and Megatron-Core are running"):
        found = verification.verify(hf, megatron, **o)
    if as_json:
        click.echo(json.dumps(found.json()))
    else:
        for line in found.lines():
            click.echo(line)
        click.echo(
            f"{found.verdict.upper()}: {hf} and {megatron}, {time.perf_counter() - start:.0f} s"
        )
    if report is not None:
        page.write(found, report)
    return found.exit_code


@cli.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--steps", type=click.IntRange(1), required=True, help="In all, those before --resume included."
)
@click.option(
    "--data",
    help=(
        "Megatron .bin/.idx (path without suffix), .jsonl with tokens or text; made-up text if not"
        " given."
    ),
)
@click.option(
    "--tokenizer",
    type=click.Path(file_okay=False),
    help="Directory of the tokenizer, for .jsonl with text.",
)
@click.option(
    "--save", type=click.Path(file_okay=False), help="Save directory, with optimizer state."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(formats.names(megatron=True)),
    default=formats.MEGATRON,
    show_default=True,
)
@click.option(
    "--optimizer-format",
    type=click.Choice(["fully_reshardable", "dp_reshardable"]),
    default="fully_reshardable",
    show_default=True,
)
@click.option(
    "--save-interval", type=click.IntRange(1), help="Steps; without it only the last one is saved."
)
@click.option(
    "--resume", is_flag=True, help="Go on with the checkpoint's optimizer, schedule and iteration."
)
@click.option(
    "--ranks", type=click.IntRange(1), help="Processes; those beyond one model are data-parallel."
)
@_run_sizes("1")
@_run_options
@click.option(
    "--global-batch-size", type=click.IntRange(1), default=8, show_default=True, help="Sequences."
)
@click.option(
    "--micro-batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sequences that one rank computes at once.",
)
@click.option("--seq-length", type=click.IntRange(2), help="Tokens; the checkpoint's if not given.")
@click.option("--lr", type=float, default=1e-4, show_default=True)
@click.option("--min-lr", type=float, default=0.0, show_default=True)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Steps of linear warmup; then a cosine.",
)
@click.option(
    "--decay-steps",
    type=click.IntRange(1),
    help="Over which the learning rate falls; --steps if not given.",
)
@click.option("--weight-decay", type=float, default=0.01, show_default=True)
@click.option(
    "--clip-grad",
    type=float,
    default=1.0,
    show_default=True,
    help="Of the gradient's norm; 0: not clipped.",
)
@click.option("--seed", type=int, default=1234, show_default=True, help="Of the data's order.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@_json
def train(
    checkpoint: Path, form: str, ranks: int | None, device: str, dtype: str, as_json: bool, **o: Any
) -> None:
    """Train a Megatron checkpoint on real Megatron-Core, from its args alone: a loss for
    each step.
    """
    from mckpt import launching

    sizes = {k: o[k] or 1 for k in ("tp", "pp", "ep", "cp")} | {
        "vpp": o["vpp"] or 1,
        "etp": o["etp"] or o["tp"] or 1,
    }
    smallest = launching.world(sizes)
    num_ranks = ranks or smallest
    if num_ranks % smallest:
        raise UsageError(
            f"--ranks {num_ranks} is no multiple of the {smallest} ranks that hold one model at"
            " these sizes"
        )
    launching.require("torch", "megatron", "psutil")
    wanted = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    job = {
        "checkpoint": str(checkpoint.absolute()),
        "format": form,
        "dtype": wanted,
        "json": as_json,
        **{k: v for k, v in o.items() if v is not None},
    }
    launching.run_alone("mckpt.trainer.train", job, launching.device(device, num_ranks), num_ranks)


@cli.group()
def mappings() -> None:
    """List, show or check mapping files."""


@mappings.command("list")
@_json
def list_mappings(as_json: bool) -> None:
    """Families (Hugging Face) and dialects (Megatron) that mckpt knows."""
    from mckpt import mapping

    rows = {
        kind: {n: list(mapping.load(kind, n).architectures) for n in mapping.names(kind)}
        for kind in ("hf", "megatron")
    }
    if as_json:
        click.echo(json.dumps(rows))
        return
    for kind, files in rows.items():
        for name, architectures in files.items():
            click.echo(f"{kind}/{name}  {' '.join(architectures)}".rstrip())


@mappings.command()
@click.argument("name")
def show(name: str) -> None:
    """Every rule and dim of one mapping, those that it inherits included."""
    from mckpt import mapping

    kind = "megatron" if name in mapping.names("megatron") else "hf"
    file = mapping.load(kind, name)
    click.echo(f"# {kind}/{file.name}, digest {file.digest}")
    for dim, spec in file.dims.items():
        click.echo(
            f"{dim:24}"
            f" {', '.join(spec.keys) or (repr(spec.const) if spec.has_const else spec.read and spec.read.text)}"
        )
    for rule in (*file.rules, *file.objects):
        what = rule.pack + "(" + ", ".join(rule.of) + ")" if rule.of else "object"
        click.echo(
            f"{rule.key}  =  {what}  tp {rule.tp}"
            + (f"  when {rule.when.text}" if rule.when else "")
            + "  alias" * rule.alias
        )


@mappings.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A config.json: its model is planned with the file, on both sides.",
)
def check(file: Path, config: Path | None) -> None:
    """Check a mapping file; with --config, that every tensor of that model has a place on the
    Megatron side.
    """
    from mckpt.checkpoint import inspection

    for line in inspection.check_mapping(file, config):
        click.echo(line)


# ------------------------------------------------------------------------------------------ running


def _open(o: dict[str, Any]) -> Any:
    from mckpt import mapping
    from mckpt.checkpoint.checkpoint import Checkpoint, Known

    settings = dict(mapping.parse_setting(text) for text in o.get("settings", ()))
    known = Known(
        like=o.get("like"),
        family=o.get("family"),
        mapping=o.get("mapping_file"),
        vocab_size=o.get("vocab_size"),
        settings=settings,
        iteration=o.get("iteration"),
    )
    return Checkpoint(o["src"], known)


def _run(
    form: str,
    parallel: Any,
    *,
    source: Any = None,
    dry_run: bool = False,
    as_json: bool = False,
    **o: Any,
) -> None:
    """Plan, print or write, and say what was done."""
    from mckpt import api
    from mckpt.conversion.target import MAX_SHARD_SIZE
    from mckpt.execute.ranks import Ranks
    from mckpt.values.sizes import parse_size

    # not `or`: its truth is the number of its tensors
    source = _open(o) if source is None else source
    target = api.Target(
        format=form,
        parallel=parallel or api.Parallel(),
        dtype=o.get("dtype"),
        transformer_impl=o.get("transformer_impl"),
        grouped_experts=o.get("grouped_experts"),
        divisible_by=o.get("divisible_by"),
        layer_keys=o.get("layer_keys"),
        common_as_object=o.get("common_state") == "object",
        iteration=o.get("target_iteration"),
        allow_inexact=o["allow_inexact"],
        no_optimizer=o.get("no_optimizer", False),
        tokenizer=o.get("tokenizer"),
        max_shard_size=(
            parse_size(o["max_shard_size"], "--max-shard-size")
            if o.get("max_shard_size")
            else MAX_SHARD_SIZE
        ),
        keep_padding=o.get("keep_padding", False),
        megatron_version=o.get("megatron_version"),
    )
    ranks = Ranks() if dry_run else Ranks.of_environment()
    if ranks.size > 1 and o["workers"] > 1:
        raise UsageError(
            f"--workers {o['workers']} is for one machine without a launcher; here {ranks.size}"
            " processes were started, start more of those"
        )
    if not dry_run:
        budget = parse_size(o["max_memory"], "--max-memory")
    options = {
        "overwrite": o.get("overwrite", False),
        "update_tracker": o.get("update_tracker", False),
        "helps": dry_run or ranks.rank > 0,
    }
    planned = api.plan(source, o["dst"], target=target, **options)
    if dry_run:
        click.echo(json.dumps(planned.json()) if as_json else planned.summary())
        planned.destination.check()
        return
    import mckpt.conversion.run  # noqa: F401  before workers are forked, or each of them would
    from mckpt import launching

    how = {
        "max_memory": budget,
        "threads": o["threads"],
        "checksum": o["checksum"],
        "allow_overflow": o["allow_overflow"],
        "resume": o["resume"],
        "check_replicas": o.get("check_replicas", False),
    }
    if ranks.rank:  # rank 0 does the talking
        planned.run(**how, ranks=ranks)
        return
    if not as_json:
        click.echo(planned.summary(), err=True)
    if note := planned.destination.tracker_note():
        _tell(note, as_json)
    start = time.perf_counter()
    try:
        with (
            launching.workers(ranks, o["workers"], lambda r: planned.run(**how, ranks=r)) as ranks,
            _progress("writing", as_json) as progress,
        ):
            manifest = planned.run(
                **how,
                ranks=ranks,
                progress=progress,
                tell=functools.partial(_tell, as_json=as_json),
            )
    finally:
        for folder, nbytes in planned.destination.left_over():
            _tell(
                f"left by an interrupted run of another plan: {folder}, {nbytes:,} bytes; remove it"
                " if it is not wanted",
                as_json,
            )
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(manifest))
    else:
        for note in manifest.get("dropped", []):
            click.echo(note, err=True)
        click.echo(
            f"{planned.destination.path}: {planned.nbytes:,} bytes in"
            f" {counted(len(planned.outputs), 'file')}, {seconds:.2f} s"
        )


def _tell(text: str, as_json: bool) -> None:
    """Prints a note on stderr; with --json as an event among the others."""
    click.echo(json.dumps({"event": "note", "message": text}) if as_json else text, err=True)


@contextmanager
def _progress(what: str, as_json: bool = False) -> Iterator[Callable[..., None] | None]:
    """On stderr: a progress line on a terminal, one JSON event a second with --json, nothing
    elsewhere.
    """
    from mckpt.cli import progress

    if as_json:
        yield progress.Events(what, lambda text: click.echo(text, err=True))
    elif sys.stderr.isatty():
        with progress.Line(what) as line:
            yield line
    else:
        yield None


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A spinner and the time on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        bar.add_task(what, total=None)
        yield


def main() -> None:
    """Run `mckpt`; owns the exit codes (README, Exit codes)."""
    # numpy starts a thread for each core when imported, and none is used here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # a plan has 10**6 objects that live as long as it: walking them again and again took a tenth of
    # the time
    gc.set_threshold(10_000_000)
    try:
        code = cli(prog_name="mckpt", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        goes_on = (
            ""
            if {"verify", "train"} & set(sys.argv[1:2])
            else "; the same command goes on where it stopped"
        )
        code = _fail("Interrupted", f"interrupted{goes_on}", 130)
    except click.ClickException as e:
        code = e.exit_code
        if "--json" in sys.argv:
            _fail(
                "UsageError" if isinstance(e, click.UsageError) else type(e).__name__,
                e.format_message(),
                code,
            )
        else:
            e.show()
    except MckptError as e:
        code = _fail(
            type(e).__name__,
            str(e),
            e.exit_code,
            **({"problems": e.problems} if e.problems else {}),
        )
    # click turns a broken pipe into an exit with 1, the code that means a difference
    except (BrokenPipeError, SystemExit) as e:
        code = 7
        if isinstance(e, SystemExit) and not e.code:  # the end of shell completion
            code = 0
        else:
            # the reader has gone, and the interpreter would complain again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as e:
        code = _fail("StorageError", f"{e.filename or 'input/output'}: {e.strerror or e}", 7)
    except Exception as e:  # ours, not the user's: shown whole, with an exit code of its own
        if "--json" in sys.argv:
            code = _fail(
                "InternalError",
                f"internal error: {type(e).__name__}: {e}; please report it",
                70,
                traceback=traceback.format_exc(),
            )
        else:
            traceback.print_exc()
            code = _fail(
                "InternalError", "internal error: please report it with the lines above", 70
            )
    sys.exit(code if isinstance(code, int) else 0)


def _fail(kind: str, message: str, code: int, **more: Any) -> int:
    """Prints an error on stderr, as one JSON object where --json is among the arguments; returns
    its exit code.
    """
    if "--json" in sys.argv:
        click.echo(
            json.dumps({"error": {"class": kind, "message": message, "exit_code": code, **more}}),
            err=True,
        )
    else:
        click.echo(f"mckpt: {message}", err=True)
    return code


def process() -> None:
    """`main` as a process that ends with it: freeing the 10**6 objects of a plan one by one would
    take a tenth of its time.
    """
    try:
        main()
    except SystemExit as e:
        with suppress(OSError):  # the reader has gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(e.code if isinstance(e.code, int) else 0)
