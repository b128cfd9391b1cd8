"""Makes the plan of a conversion from a source, a destination and a target. The modules that run a
plan are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mckpt import formats
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.conversion.optimizer import prove
from mckpt.conversion.plan_data import Form, PlanData, most_dtype
from mckpt.conversion.refusals import dropped, refuse_options
from mckpt.conversion.target import At, Destination
from mckpt.conversion.to_megatron import dialect_to_write, form_megatron, padded_rows
from mckpt.errors import DestinationError, UsageError
from mckpt.execute.ranks import Ranks
from mckpt.formats.base import Format
from mckpt.formats.hf_config import has_tokenizer, side_files
from mckpt.formats.megatron import megatron_args
from mckpt.geometry.join import join
from mckpt.keywords import RunKeywords, keywords
from mckpt.options import TargetOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mckpt.conversion.args import Decided
    from mckpt.conversion.moving import RunSettings
    from mckpt.conversion.to_megatron import AdaptersBeside


# decides from headers what a source, of a kind of checkpoint that it knows, becomes
FormOf = Callable[[Any, At, TargetOptions], Form]


class Plan(PlanData):
    """A conversion that is proved from headers alone. Nothing is written before `run`."""

    def check(self, check_replicas: bool = False) -> list[str]:
        """Raises the error that `run` would raise before it moves a byte; returns sentences on the
        values that it would drop.

        Reads the padding of the vocabulary, and the tensors that have copies.
        """
        self.destination.check()
        self.side.check_unchanged()
        return dropped(self.source, check_replicas)

    @keywords(RunKeywords)
    def run(
        self,
        *,
        ranks: Ranks | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        **options: Unpack[RunKeywords],
    ) -> dict[str, Any]:
        """Writes the checkpoint and returns the manifest.

        If a run is interrupted, the same call continues it, unless `resume` is False. Several
        processes share the work if each calls this with its own `ranks`; all of them return when
        the checkpoint is published.

        max_memory: bytes of all buffers together, or text such as "64MiB". threads: 0 means one per
        core. engine: "ray" lets the nodes of a Ray cluster copy (docs/scale.md); both numbers are
        then those of each process there. on_note: called with notes for the user that are not
        errors.
        """
        from mckpt.conversion.moving import RunSettings

        return self.run_with(RunSettings.of(options, on_note=on_note), ranks)

    def run_with(self, settings: RunSettings, ranks: Ranks | None = None) -> dict[str, Any]:
        """Does what `run` does, with settings that are checked already."""
        from mckpt.conversion.run import run

        _ = settings.cluster  # if there is none, it is reported before anything is written
        return run(self, settings, ranks or Ranks())


def make_plan(
    source: Checkpoint,
    dst: str | Path,
    target: TargetOptions,
    form_of: FormOf | None = None,
    *,
    overwrite: bool = False,
    update_tracker: bool = False,
    rank0: bool = True,
) -> Plan:
    """Returns the plan that converts `source` to `dst`.

    form_of: decides what the source becomes; None: `form_of_weights`. rank0: this process is rank
    0, which checks whether the destination is occupied.
    """

    def at(name: str | None, format: Format) -> Destination:
        if update_tracker and not format.megatron:
            raise UsageError(
                "--update-tracker: a Hugging Face directory has no tracker; leave it out"
            )
        return Destination(
            Path(dst),
            name,
            format,
            source.files.root,
            overwrite=overwrite,
            update_tracker=update_tracker,
            rank0=rank0,
        )

    form = (form_of or form_of_weights)(source, at, target)
    moved = form.moved.layout
    if form.factors:
        from mckpt.formats.scaling import with_factors

        moved = with_factors(moved, form.factors)
    joined = join(moved, form.layout)
    return Plan(
        source=form.moved,
        destination=form.destination,
        target=form.target,
        joined=joined,
        layout=form.layout,
        names=form.names,
        outputs=form.outputs,
        side=form.side,
        copied=form.copied,
        facts=form.all_facts(joined),
        remarks=form.remarks,
    )


def form_of_weights(
    source: Checkpoint,
    at: At,
    target: TargetOptions,
    *,
    same_format: bool = False,
    adapters: Callable[[Decided], AdaptersBeside] | None = None,
) -> Form:
    """Returns the form of a Megatron checkpoint or of a Hugging Face directory.

    same_format: a Hugging Face source may become a directory of the same tensors. adapters: makes
    those that a Megatron checkpoint has beside its weights.
    """
    source = source.borrowing()
    format = formats.get(target.format)
    plain = not (
        source.is_megatron
        or source.opened.quantised
        or source.opened.notes
        or source.merging
        or target.quantize
    )
    if not (format.megatron or same_format) and plain:
        raise UsageError(
            f"{source.path}: is a Hugging Face directory already, and none of its tensors is"
            " quantised, so there is nothing to convert"
        )
    refuse_options(target, format, source, adapters is not None)
    if format.megatron:
        return form_megatron(source, at, target, adapters)
    from mckpt.conversion.to_hf import form_hf

    return form_hf(source, at, target)


def plan_or_find(
    source: Checkpoint,
    dst: str | Path,
    target: TargetOptions,
    *,
    overwrite: bool = False,
    update_tracker: bool = False,
    rank0: bool = True,
    on_note: Callable[[str], None] = lambda text: None,
    form_of: FormOf | None = None,
) -> tuple[Plan, dict[str, Any] | None]:
    """Returns the plan, as `make_plan` does, and None; or the plan and the manifest in `dst`, if
    `dst` already holds the output of the conversion and `overwrite` is false.

    If something else is in the way, the error of `make_plan` has a sentence on the difference.
    """
    make = partial(make_plan, source, dst, target, form_of, update_tracker=update_tracker)
    try:
        return make(overwrite=overwrite, rank0=rank0), None
    except DestinationError as error:
        if overwrite:
            raise
        refusal = error
    planned = make(rank0=False)
    from mckpt.conversion.done import complete, existing_output

    output = existing_output(planned, on_note=on_note)
    if output.manifest is None:
        raise refusal.with_hint(*filter(None, [output.why])) from None
    complete(planned, output)
    return planned, output.manifest


def default_format(source: Checkpoint, kept: bool) -> str:
    """Returns the format of the target if the user names none.

    kept: whether a Megatron source stays a Megatron checkpoint, because its sizes or its dialect
    change; otherwise it becomes a Hugging Face directory.
    """
    if not source.is_megatron:
        return formats.MEGATRON
    return formats.kept_or_default(source.format) if kept else formats.HUGGING_FACE


def portable_target(source: Checkpoint, target: TargetOptions) -> TargetOptions | None:
    """Returns the target that makes a training checkpoint loadable at any sizes; None if the source
    is so already.

    target: the options of the new checkpoint; its format, sizes and padding are replaced.
    """
    if not source.is_megatron:
        raise UsageError(
            f"{source.path}: is a Hugging Face directory, which has no optimizer state to repair"
        )
    portable, optimizer = formats.get(formats.MEGATRON), source.optimizer
    if source.format == portable.name and (optimizer is None or optimizer.portable):
        if optimizer and (source.args or {}).get("use_precision_aware_optimizer"):
            # Transformer Engine may have kept only the low bits of the master copies, which
            # Megatron does not load from this form
            prove(source.with_optimizer())
        return None
    return target.with_(format=portable.name, parallel=source.parallel, keep_padding=True)


def launch(source: Checkpoint) -> megatron_args.Launch:
    """Returns the flags of Megatron's training program for any checkpoint: from its dims, and from
    its own args where it has them.
    """
    dialect = dialect_to_write(source, TargetOptions())
    own = {k: v for k, v in (source.args or {}).items() if v is not None}
    try:
        rows = source.opened.padded_vocab(dialect)
        given = {
            "dtype": most_dtype(source),
            "padded_vocab_size": rows or padded_rows(source.dims, dialect.given["divisible_by"], 1),
        }
        args = {**dialect.write(source.dims, given), **source.parallel.args(), **own}
    except VocabSizeUnknown:
        args = own
    side = source.files.side_directory
    named = side is not None and has_tokenizer(side_files(side).kept)
    return megatron_args.launch(dialect, args, str(side) if named else None)
