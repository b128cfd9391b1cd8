"""`mckpt hf-to-megatron`, `megatron-to-hf`, `reshard`, `repair` and `plan`: all make a plan, and
all but `plan` run it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt import formats
from mckpt.cli import shared, terminal
from mckpt.cli.iterations import Outcome, repeated
from mckpt.cli.options import Options, command, json_option
from mckpt.cli.terminal import document, echo
from mckpt.errors import DestinationError, UsageError, counted
from mckpt.options import PlaceOptions
from mckpt.storage import sparse_copy

if TYPE_CHECKING:
    from mckpt.checkpoint.checkpoint import Checkpoint
    from mckpt.conversion.moving import RunSettings
    from mckpt.conversion.planning import FormOf, Plan
    from mckpt.execute.ranks import Ranks
    from mckpt.options import TargetOptions

# processes of `_processes`, and the bytes of the target from which each is worth its start
MOST_PROCESSES, LEAST_BYTES = 8, 128 << 20


@command()
@shared.source_argument
@shared.destination_argument
@shared.new_checkpoint_options
@shared.dialect_option(otherwise="that of the model's family, else gpt")
@shared.megatron_target_options
@shared.of_target("no_adapter")
@shared.adapter_option
@shared.of_adapter("expert_a expert_b how")
@shared.family_options
@shared.conversion_option(
    "--stream",
    is_flag=True,
    help="Read a model on the Hub without downloading it: only the output needs disk space.",
)
@shared.conversion_options
def hf_to_megatron(
    src: Path, dst: Path, target_format: str, how: str | None, **options: Any
) -> None:
    """Convert a Hugging Face directory to Megatron.

    DST is a Megatron save directory, into which the new checkpoint is written.
    """
    from mckpt.formats import places
    from mckpt.geometry.parallel import Parallel

    stream = options.pop("stream") or options["dry_run"]
    with places.streamed(src) if stream else nullcontext(src) as directory:
        source = shared.open_source(directory, options)
        if source.is_megatron:
            raise UsageError(
                f"{src}: is a Megatron checkpoint ({source.format}); `mckpt reshard` changes its"
                " sizes or format"
            )
        source, form = shared.with_adapter(source, options, how)
        parallel = Parallel().with_(**shared.parallel_sizes(options))
        target = shared.make_target(options, target_format, parallel)
        outcome = carry_out(source, dst, target, options, form)
    if outcome:
        outcome.show(options["as_json"])


@command()
@shared.source_argument
@shared.destination_argument
@shared.hf_target_options
@shared.of_target("keep_padding no_adapter")
@shared.megatron_source_options
@shared.conversion_option(
    "--merge",
    is_flag=True,
    help="Of a Megatron checkpoint with weights and adapters (LoRA): write the weights with the"
    " adapters added to them. Without it, the adapters are written as a directory of PEFT.",
)
@shared.alpha_option
@shared.family_options
@shared.conversion_options
@repeated(to_hf=True)
def megatron_to_hf(
    src: Path, dst: Path, merge: bool, alpha: float | None, **options: Any
) -> Outcome | None:
    """Convert a Megatron checkpoint to Hugging Face.

    config.json is taken from --like, else from SRC/hf, else built from the checkpoint's args.
    """
    from mckpt.formats import foreign

    source = shared.open_source(src, options)
    target = shared.make_target(options, formats.HUGGING_FACE, None)
    if source.is_megatron and foreign.has_adapter(source.opened.keys()):
        return _adapters_to_hf(src, dst, merge, alpha, target, options)
    for option, given in (("--merge", merge), ("--alpha", alpha is not None)):
        if given:
            raise UsageError(f"{option}: {src} has no adapters; leave it out")
    return carry_out(source, dst, target, options)


def _adapters_to_hf(
    src: Path,
    dst: Path,
    merge: bool,
    alpha: float | None,
    target: TargetOptions,
    options: Options,
) -> Outcome | None:
    """Converts a Megatron checkpoint with adapters."""
    from mckpt.adapters import forms, merging
    from mckpt.adapters.checkpoint import of_megatron

    source, _ = of_megatron(src, shared.source_options(options), alpha)
    if not merge:
        return carry_out(source, dst, target, options, forms.form_peft)
    if (base := source.base) is None:
        raise UsageError(
            f"{src}: has adapters alone, without the weights that they belong to: `mckpt adapter"
            f" merge BASE {src} DST` merges them"
        )
    with forms.as_peft(source) as adapter:
        return carry_out(merging.merge(base, adapter), dst, target, options)


@command()
@shared.source_argument
@shared.destination_argument
@shared.layout_options("target-", otherwise="the source's")
@shared.megatron_option(
    "--target-format",
    type=shared.MEGATRON_FORMATS,
    help="Format of the new checkpoint. Without it, the source's, or torch_dist for a format that"
    " mckpt only reads, or that only sharded models load.",
)
@shared.dialect_option("target-", otherwise="the source's")
@shared.of_target("no_optimizer keep_padding")
@shared.megatron_source_options
@shared.megatron_target_options
@shared.family_options
@shared.conversion_options
@repeated(to_hf=False)
def reshard(src: Path, dst: Path, target_format: str | None, **options: Any) -> Outcome | None:
    """Change the sizes or the format of a Megatron checkpoint."""
    source = shared.open_source(src, options).with_training()
    if not source.is_megatron:
        raise UsageError(f"{src}: is a Hugging Face directory; `mckpt hf-to-megatron` converts it")
    parallel = source.parallel.with_(**shared.parallel_sizes(options))
    target_format = target_format or formats.kept_or_default(source.format)
    return carry_out(source, dst, shared.make_target(options, target_format, parallel), options)


@command()
@shared.source_argument
@click.argument("dst", type=click.Path(path_type=Path), required=False)
@shared.megatron_source_options
@shared.family_options
@shared.conversion_options
@repeated(to_hf=False)
def repair(src: Path, dst: Path | None, **options: Any) -> Outcome | None:
    """Make a training checkpoint loadable at any sizes.

    Writes torch_dist at the source's sizes, with the optimizer state of each weight under the
    weight's name. Without DST it writes to SRC-portable. A checkpoint that already loads at any
    sizes is left as it is.
    """
    from mckpt.conversion import planning

    source = shared.open_source(src, options)
    target = planning.portable_target(source, shared.make_target(options, formats.MEGATRON, None))
    if target is None:
        optimizer = source.optimizer
        state = "it has no optimizer state, and"
        if optimizer:
            state = f"its optimizer state ({optimizer.form})"
        text = f"{source.opened.root}: is portable already: {state} loads at any sizes"
        return Outcome("portable already", str(source.opened.root), text)
    if dst is None and sparse_copy.of(src) is not None:
        raise UsageError(f"{src}: give DST too; only a local SRC has a default DST")
    dst = dst or src.parent / f"{src.name}-portable"
    return carry_out(source, dst, target, options)


@command()
@shared.source_argument
@shared.destination_argument
@shared.layout_options("target-", otherwise="1 from Hugging Face, else the source's")
@shared.conversion_option(
    "--to",
    "target_format",
    type=shared.WRITTEN_FORMATS,
    help="Format of the target. Without it: torch_dist for a Hugging Face source; for a Megatron"
    " source its own format if sizes or a dialect are given, else hf.",
)
@shared.hf_target_options
@shared.dialect_option("target-", otherwise="the source's; from Hugging Face, gpt")
@shared.of_target("no_optimizer keep_padding")
@shared.megatron_source_options
@shared.megatron_target_options
@shared.of_target("no_adapter")
@shared.family_options
@shared.of_target("dtype allow_inexact")
@shared.of_place("overwrite")
@shared.html_option
@json_option
def plan(src: Path, dst: Path, target_format: str | None, **options: Any) -> None:
    """Print the plan of a conversion; write nothing.

    The plan is proved from the headers of the files. A destination that the conversion would refuse
    is refused here too.
    """
    from mckpt.conversion import planning
    from mckpt.formats import places

    sizes = shared.parallel_sizes(options)
    flags = {option.name: option.opts[-1] for option in click.get_current_context().command.params}
    given = [flags[name] for name, value in sizes.items() if value]
    with places.streamed(src) as directory:
        source = shared.open_source(directory, options)
        if target_format is None:
            kept = bool(given) or options["dialect"] is not None
            target_format = planning.default_format(source, kept)
        to_megatron = formats.FORMATS[target_format].megatron
        if given and not to_megatron:
            raise UsageError(
                f"{', '.join(given)}: a Hugging Face directory has no parallel sizes; leave them"
                " out, or give --to torch_dist or --to torch"
            )
        parallel = source.parallel.with_(**sizes) if to_megatron else None
        target = shared.make_target(options, target_format, parallel)
        _print_plan(source, dst, target, options)


# ----------------------------------------------------------------------------------- plan and write


def carry_out(
    source: Checkpoint,
    dst: Path,
    target: TargetOptions,
    options: Options,
    form_of: FormOf | None = None,
) -> Outcome | None:
    """Writes the target, or prints the plan if the options contain --dry-run.

    form_of: decides what the source becomes, as for `planning.make_plan`.
    Returns None under a launcher if this is not rank 0, which alone prints the result.
    """
    from mckpt.execute.ranks import Ranks

    ranks = Ranks() if options["workers"] else Ranks.of_environment()
    settings = _settings(options, ranks)
    if options["dry_run"]:
        _print_plan(source, dst, target, options, form_of)
        return Outcome("planned", str(dst))
    return _write(source, dst, target, options, settings, ranks, form_of)


def _settings(options: Options, ranks: Ranks) -> RunSettings:
    """Returns the settings of the run. Raises UsageError for options that exclude each other in a
    process that is one of `ranks`.
    """
    from mckpt.conversion.moving import RunSettings

    workers = options["workers"] or 1
    on_note = functools.partial(terminal.print_note, as_json=options["as_json"])
    settings = RunSettings.of(options, on_note=on_note)
    if options["engine"] == "ray":
        from mckpt.execute import ray_tasks

        ray_tasks.require()
        if workers > 1 or ranks.size > 1:
            other = f"--workers {workers}" if workers > 1 else f"the {ranks.size} processes here"
            raise UsageError(
                f"--engine ray and {other} both share the work; use one of them: with Ray, one"
                " process runs the command"
            )
    return settings


def _print_plan(
    source: Checkpoint,
    dst: Path,
    target: TargetOptions,
    options: Options,
    form_of: FormOf | None = None,
) -> None:
    """Prints the plan; raises afterwards what a run would raise before it moves a byte."""
    from mckpt.conversion import planning

    # rank0=False: print the plan even if `dst` is occupied; the check below raises that error
    planned = planning.make_plan(
        source, dst, target, form_of, rank0=False, **PlaceOptions.of(options).values()
    )
    as_json = options["as_json"]
    print_note = functools.partial(terminal.print_note, as_json=as_json)
    document(json.dumps(planned.json()) if as_json else planned.summary())
    if (html := options.get("html")) is not None:
        from mckpt.pages import document as page
        from mckpt.pages import picture

        page.write(picture.of_plan(planned), html)
    manifest, why = None, ""
    if not options["overwrite"]:
        from mckpt.conversion.done import existing_output

        manifest, why, _ = existing_output(planned, on_note=print_note)
    if manifest is None:
        try:
            for note in planned.check(options.get("check_replicas", False)):
                print_note(note)
        except DestinationError as error:
            raise error.with_hint(*filter(None, [why])) from None


def _write(
    source: Checkpoint,
    dst: Path,
    target: TargetOptions,
    options: Options,
    settings: RunSettings,
    ranks: Ranks,
    form_of: FormOf | None = None,
) -> Outcome | None:
    """Plans and writes the target, unless `dst` holds it already."""
    from mckpt.conversion import planning

    workers, as_json, print_note = options["workers"], options["as_json"], settings.on_note
    planned, manifest = planning.plan_or_find(
        source,
        dst,
        target,
        rank0=ranks.rank == 0,
        on_note=print_note,
        form_of=form_of,
        **PlaceOptions.of(options).values(),
    )
    path, nbytes = str(planned.destination.path), planned.nbytes
    size = f"{nbytes:,} bytes in {counted(len(planned.outputs), 'file')}"
    if manifest is not None:
        text = f"{path}: is done already, {size}; --overwrite writes it again"
        return Outcome("done already", path, text, nbytes, facts=manifest)
    # Orbax's arrays are read through a store, wherever they are
    first = map(Path, planned.source.layout.own_files[:1])
    places = [source.path, planned.destination.root, *first]
    remote = [p for p in places if sparse_copy.of(p) is not None]
    if workers is None and ranks.size == 1 and not remote and options["engine"] == "local":
        workers = _processes(planned, options["threads"])
    if workers and workers > 1 and remote:  # the libraries of stores do not survive a fork
        raise UsageError(
            f"--workers {workers}: {remote[0]} is not a directory of this machine, and such a run"
            " uses threads; leave the option out, or start ranks with torchrun or srun"
        )
    # imported before the workers are forked, so that they need not import it again
    import mckpt.conversion.run  # noqa: F401

    if ranks.rank > 0:
        planned.run_with(settings, ranks)
        return None
    if not as_json and "many" not in options:
        document(planned.summary(), err=True)
    else:
        for remark in planned.remarks:
            print_note(remark)
    if note := planned.destination.tracker_note():
        print_note(note)
    start = time.perf_counter()
    manifest = _run(planned, settings, ranks, workers or 1, as_json)
    seconds = time.perf_counter() - start
    for note in manifest.get("dropped", []) if not as_json else ():
        echo(note, err=True)
    text = f"{path}: {size}, {seconds:.2f} s"
    return Outcome("written", path, text, nbytes, seconds, facts=manifest)


def _processes(planned: Plan, threads: int) -> int:
    """Returns the number of processes for a plan, if no option or launcher gives it.

    Adding the products of an adapter is many short calls of numpy. The threads of one process wait
    for each other between them, and two processes need two thirds of the time of two threads. The
    same is true where copies are short, or transpose matrices.
    """
    from mckpt.execute.units import in_short_pieces

    joined = planned.joined
    short = any(c.term for c in joined.casts) or in_short_pieces(joined.copies)
    if threads or not short:
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, MOST_PROCESSES, planned.nbytes // LEAST_BYTES))


def _run(
    planned: Plan, settings: RunSettings, ranks: Ranks, num_workers: int, as_json: bool
) -> dict[str, Any]:
    """Runs the plan as rank 0, with workers and progress; returns the manifest."""
    others: AbstractContextManager[Ranks] = nullcontext(ranks)
    if num_workers > 1:
        from mckpt.execute.threads import workers

        others = workers(num_workers, lambda rank: planned.run_with(settings, rank))
    try:
        with others as all_ranks, terminal.showing("writing", as_json) as shown:
            return planned.run_with(settings.with_(progress=shown), all_ranks)
    finally:
        for folder, left in planned.destination.left_over():
            settings.on_note(
                f"left by an interrupted run of another plan: {folder}, {left:,} bytes; remove it"
                " if it is not wanted"
            )
