"""`mckpt hf-to-megatron`, `megatron-to-hf`, `reshard`, `repair` and `plan`: all make a plan, and
all but `plan` run it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mckpt import formats
from mckpt.cli import progress
from mckpt.cli.echo import document, echo
from mckpt.cli.iterations import Outcome, repeated
from mckpt.cli.options import (
    MEGATRON_FORMATS,
    SIZES,
    Options,
    command,
    conversion_option,
    conversion_options,
    destination_argument,
    dialect_option,
    dtype_option,
    family_options,
    html_option,
    inexact_option,
    json_option,
    keep_padding_option,
    layout_options,
    make_target,
    max_shard_size_option,
    megatron_option,
    megatron_source_options,
    megatron_target_options,
    no_adapter_option,
    no_optimizer_option,
    open_source,
    overwrite_option,
    parallel_sizes,
    quantize_option,
    side_files_option,
    source_argument,
    stream_option,
    target_iteration_option,
)
from mckpt.errors import DestinationError, UsageError, counted
from mckpt.storage import sparse_copy

if TYPE_CHECKING:
    from mckpt.checkpoint.checkpoint import Checkpoint
    from mckpt.conversion.plan import Plan
    from mckpt.conversion.target import TargetOptions
    from mckpt.execute.ranks import Ranks


@command()
@source_argument
@destination_argument
@layout_options(default=1)
@megatron_option(
    "--format",
    "target_format",
    type=MEGATRON_FORMATS,
    default=formats.MEGATRON,
    show_default=True,
    help="Format of the new checkpoint.",
)
@target_iteration_option
@dialect_option(otherwise="that of the model's family, else gpt")
@megatron_target_options
@no_adapter_option
@family_options
@stream_option
@conversion_options
def hf_to_megatron(src: Path, dst: Path, target_format: str, **options: Any) -> None:
    """Convert a Hugging Face directory to Megatron.

    DST is a Megatron save directory, into which the new checkpoint is written.
    """
    from mckpt.formats import places
    from mckpt.geometry.parallel import Parallel

    stream = options.pop("stream") or options["dry_run"]
    with places.streamed(src) if stream else nullcontext(src) as directory:
        source = open_source(directory, options)
        if source.is_megatron:
            raise UsageError(
                f"{src}: is a Megatron checkpoint ({source.format}); `mckpt reshard` changes its"
                " sizes or format"
            )
        parallel = Parallel().with_(**parallel_sizes(options))
        outcome = _convert(source, dst, make_target(options, target_format, parallel), options)
    if outcome:
        outcome.show(options["as_json"])


@command()
@source_argument
@destination_argument
@side_files_option
@max_shard_size_option
@quantize_option
@keep_padding_option
@no_adapter_option
@megatron_source_options
@family_options
@conversion_options
@repeated(to_hf=True)
def megatron_to_hf(src: Path, dst: Path, **options: Any) -> Outcome | None:
    """Convert a Megatron checkpoint to Hugging Face.

    config.json is taken from --like, else from SRC/hf, else built from the checkpoint's args.
    """
    source = open_source(src, options)
    return _convert(source, dst, make_target(options, formats.HUGGING_FACE, None), options)


@command()
@source_argument
@destination_argument
@layout_options("target-", otherwise="the source's")
@megatron_option(
    "--target-format",
    type=MEGATRON_FORMATS,
    help="Format of the new checkpoint. Without it, the source's, or torch_dist for a format that"
    " mckpt only reads, and for zarr.",
)
@dialect_option("target-", otherwise="the source's")
@no_optimizer_option
@keep_padding_option
@megatron_source_options
@megatron_target_options
@family_options
@conversion_options
@repeated(to_hf=False)
def reshard(src: Path, dst: Path, target_format: str | None, **options: Any) -> Outcome | None:
    """Change the sizes or the format of a Megatron checkpoint."""
    source = open_source(src, options)
    if not source.is_megatron:
        raise UsageError(f"{src}: is a Hugging Face directory; `mckpt hf-to-megatron` converts it")
    parallel = source.parallel.with_(**parallel_sizes(options))
    target_format = target_format or formats.kept_or_default(source.format)
    return _convert(source, dst, make_target(options, target_format, parallel), options)


@command()
@source_argument
@click.argument("dst", type=click.Path(path_type=Path), required=False)
@megatron_source_options
@family_options
@conversion_options
@repeated(to_hf=False)
def repair(src: Path, dst: Path | None, **options: Any) -> Outcome | None:
    """Make a training checkpoint loadable at any sizes.

    Writes torch_dist at the source's sizes, with the optimizer state of each weight under the
    weight's name. Without DST it writes to SRC-portable. A checkpoint that already loads at any
    sizes is left as it is.
    """
    from mckpt.conversion import planning

    source = open_source(src, options)
    target = planning.portable_target(source, make_target(options, formats.MEGATRON, None))
    if target is None:
        found = source.optimizer
        state = f"its optimizer state ({found.form})" if found else "it has no optimizer state, and"
        text = f"{source.opened.root}: is portable already: {state} loads at any sizes"
        return Outcome("portable already", str(source.opened.root), text)
    if dst is None and sparse_copy.of(src) is not None:
        raise UsageError(f"{src}: give DST too; only beside a local directory there is a default")
    dst = dst or src.parent / f"{src.name}-portable"
    return _convert(source, dst, target, options)


@command()
@source_argument
@destination_argument
@layout_options("target-", otherwise="1 from Hugging Face, else the source's")
@conversion_option(
    "--to",
    "target_format",
    type=click.Choice([name for name, one in formats.FORMATS.items() if one.written]),
    help="Format of the target. Without it: torch_dist for a Hugging Face source; for a Megatron"
    " source its own format if sizes or a dialect are given, else hf.",
)
@side_files_option
@max_shard_size_option
@quantize_option
@dialect_option("target-", otherwise="the source's; from Hugging Face, gpt")
@no_optimizer_option
@keep_padding_option
@megatron_source_options
@megatron_target_options
@no_adapter_option
@family_options
@dtype_option
@inexact_option
@overwrite_option
@html_option
@json_option
def plan(src: Path, dst: Path, target_format: str | None, **options: Any) -> None:
    """Print the plan of a conversion; write nothing.

    The plan is proved from the headers of the files. A destination that the conversion would refuse
    is refused here too.
    """
    from mckpt.formats import places

    with places.streamed(src) as directory:
        _plan_only(open_source(directory, options), dst, target_format, options)


def _plan_only(source: Checkpoint, dst: Path, target_format: str | None, options: Options) -> None:
    """Chooses the format of the target if the user gives none, and prints the plan."""
    given = _given_sizes()
    if target_format is None:
        from mckpt.conversion import planning

        kept = bool(given) or options["dialect"] is not None
        target_format = planning.default_format(source, kept)
    to_megatron = formats.FORMATS[target_format].megatron
    if given and not to_megatron:
        raise UsageError(
            f"{', '.join(given)}: a Hugging Face directory has no parallel sizes; leave them out,"
            " or give --to torch_dist or --to torch"
        )
    sizes = parallel_sizes(options)
    parallel = source.parallel.with_(**sizes) if to_megatron else None
    _print_plan(source, dst, make_target(options, target_format, parallel), options)


def _given_sizes() -> list[str]:
    """Returns the flags of the parallel sizes that the user gave to the current command, as options
    or as environment variables.
    """
    context = click.get_current_context()
    return [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in SIZES
        and context.get_parameter_source(parameter.name)
        in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    ]


# ----------------------------------------------------------------------------------- plan and write


def _convert(
    source: Checkpoint, dst: Path, target: TargetOptions, options: Options
) -> Outcome | None:
    """Writes the target, or prints the plan if the options contain --dry-run.

    Returns None under a launcher if this is not rank 0.
    """
    from mckpt.execute.ranks import Ranks

    ranks = Ranks() if options["workers"] else Ranks.of_environment()
    settings = _settings(options, ranks)
    if not options["dry_run"]:
        return _write(source, dst, target, options, settings, ranks)
    _print_plan(source, dst, target, options)
    return Outcome("planned", str(dst))


def _settings(options: Options, ranks: Ranks) -> dict[str, Any]:
    """Returns the arguments of `Plan.run`. Raises UsageError for options that exclude each other
    in a process that is one of `ranks`.
    """
    from mckpt.values.sizes import parse_size

    workers = options["workers"] or 1
    if options["engine"] == "ray":
        from mckpt.execute import ray_tasks

        ray_tasks.require()
        if workers > 1 or ranks.size > 1:
            other = f"--workers {workers}" if workers > 1 else f"the {ranks.size} processes here"
            raise UsageError(
                f"--engine ray and {other} both share the work; use one of them: with Ray, one"
                " process runs the command"
            )
    names = ("threads", "checksum", "allow_overflow", "resume", "engine")
    return {
        "max_memory": parse_size(options["max_memory"], "--max-memory"),
        "check_replicas": options.get("check_replicas", False),
        **{name: options[name] for name in names},
    }


def _print_plan(source: Checkpoint, dst: Path, target: TargetOptions, options: Options) -> None:
    """Prints the plan; raises afterwards what a run would raise before it moves a byte."""
    planned, as_json = _plan(source, dst, target, options, helps=True), options["as_json"]
    document(json.dumps(planned.json()) if as_json else planned.summary())
    if (html := options.get("html")) is not None:
        from mckpt.pages import document as page
        from mckpt.pages import picture

        page.write(picture.of_plan(planned), html)
    manifest, why = None, ""
    if not options["overwrite"]:
        manifest, why, _ = planned.judge(_teller(as_json))
    if manifest is None:
        try:
            for note in planned.check(options.get("check_replicas", False)):
                progress.tell(note, as_json)
        except DestinationError as error:
            raise error.with_hint(*filter(None, [why])) from None


def _plan(
    source: Checkpoint, dst: Path, target: TargetOptions, options: Options, helps: bool
) -> Plan:
    """Returns the plan; with `helps` it is made even if `dst` is occupied."""
    from mckpt.conversion import planning

    return planning.make_plan(
        source,
        dst,
        target,
        overwrite=options["overwrite"],
        update_tracker=options.get("update_tracker", False),
        helps=helps,
    )


def _write(
    source: Checkpoint,
    dst: Path,
    target: TargetOptions,
    options: Options,
    settings: dict[str, Any],
    ranks: Ranks,
) -> Outcome | None:
    """Plans and writes the target. Under a launcher only rank 0 prints, and the others get None.

    settings: the arguments of `Plan.run`.
    """
    workers, as_json = options["workers"] or 1, options["as_json"]
    try:
        planned = _plan(source, dst, target, options, helps=ranks.rank > 0)
        remote = [
            p for p in (source.path, planned.destination.root) if sparse_copy.of(p) is not None
        ]
        if workers > 1 and remote:  # the libraries of stores do not survive a fork
            raise UsageError(
                f"--workers {workers}: {remote[0]} is not on this machine, and such a run uses"
                " threads; leave the option out, or start ranks with torchrun or srun"
            )
    except DestinationError as error:
        if options["overwrite"]:
            raise
        return _done(source, dst, target, options, error)
    # imported before the workers are forked, so that they need not import it again
    import mckpt.conversion.run  # noqa: F401

    if ranks.rank > 0:
        tell = functools.partial(progress.tell, as_json=as_json)
        planned.run(**settings, ranks=ranks, tell=tell)
        return None
    if not as_json and "many" not in options:
        document(planned.summary(), err=True)
    else:
        for remark in planned.remarks:
            progress.tell(remark, as_json)
    if note := planned.destination.tracker_note():
        progress.tell(note, as_json)
    start = time.perf_counter()
    manifest = _run(planned, settings, ranks, workers, as_json)
    seconds = time.perf_counter() - start
    for note in manifest.get("dropped", []) if not as_json else ():
        echo(note, err=True)
    text = (
        f"{planned.destination.path}: {planned.nbytes:,} bytes in"
        f" {counted(len(planned.outputs), 'file')}, {seconds:.2f} s"
    )
    path = str(planned.destination.path)
    return Outcome("written", path, text, planned.nbytes, seconds, facts=manifest)


def _done(
    source: Checkpoint,
    dst: Path,
    target: TargetOptions,
    options: Options,
    refusal: DestinationError,
) -> Outcome:
    """Returns the outcome if `dst` holds already what the conversion would write; else raises
    `refusal`, with what differs.
    """
    from mckpt.conversion import planning

    planned, manifest = planning.done_already(
        source,
        dst,
        target,
        refusal,
        update_tracker=options.get("update_tracker", False),
        tell=_teller(options["as_json"]),
    )
    text = (
        f"{planned.destination.path}: is done already, {planned.nbytes:,} bytes in"
        f" {counted(len(planned.outputs), 'file')}; --overwrite writes it again"
    )
    path = str(planned.destination.path)
    return Outcome("done already", path, text, planned.nbytes, facts=manifest)


def _teller(as_json: bool) -> Callable[[str], None]:
    """Returns a function that prints a note on stderr."""
    return functools.partial(progress.tell, as_json=as_json)


def _run(
    planned: Plan, settings: dict[str, Any], ranks: Any, num_workers: int, as_json: bool
) -> dict[str, Any]:
    """Runs the plan as rank 0, with workers and progress; returns the manifest."""
    from mckpt.execute.workers import workers

    others = workers(ranks, num_workers, lambda rank: planned.run(**settings, ranks=rank))
    try:
        with others as all_ranks, progress.showing("writing", as_json) as shown:
            return planned.run(
                **settings,
                ranks=all_ranks,
                progress=shown,
                tell=_teller(as_json),
            )
    finally:
        for folder, nbytes in planned.destination.left_over():
            progress.tell(
                f"left by an interrupted run of another plan: {folder}, {nbytes:,} bytes; remove it"
                " if it is not wanted",
                as_json,
            )
