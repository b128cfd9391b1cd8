"""The Python API: open, plan, convert, check, diff."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mckpt import formats
from mckpt.checking import checking
from mckpt.checkpoint import comparison
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown
from mckpt.checkpoint.known import Known
from mckpt.conversion import pushing
from mckpt.conversion.destination import Destination
from mckpt.conversion.facts import most_dtype
from mckpt.conversion.plan import Plan
from mckpt.conversion.refusals import refuse_options
from mckpt.conversion.target import Progress, Target
from mckpt.conversion.to_hf import plan_hf
from mckpt.conversion.to_megatron import dialect_to_write, padded_rows, plan_megatron
from mckpt.errors import DestinationError, UsageError
from mckpt.formats.hf_config import has_tokenizer, side_files
from mckpt.formats.megatron import megatron_args
from mckpt.formats.megatron.save_directory import is_unit_name, unit_name
from mckpt.geometry.parallel import Parallel
from mckpt.values import dtypes


def open(path: str | Path, **known: Any) -> Checkpoint:
    """Opens a checkpoint of any format.

    Keywords are the fields of Known: like, family, mapping, vocab_size, settings, iteration.
    """
    return Checkpoint(path, Known(**known))


def plan(
    src: str | Path | Checkpoint,
    dst: str | Path,
    *,
    overwrite: bool = False,
    update_tracker: bool = False,
    known: Known | None = None,
    target: Target | None = None,
    helps: bool = False,
    **wanted: Any,
) -> Plan:
    """Returns the plan that converts `src` to `dst`.

    Keywords are the fields of Target (format, parallel, dtype ...), unless `target` is given.

    helps: this process is not rank 0, so it does not check whether the destination is occupied.
    """
    source = (src if isinstance(src, Checkpoint) else Checkpoint(src, known)).borrowing()
    target = target or Target(**wanted)
    format = formats.get(target.format)
    plain = not (source.is_megatron or source.quantised or source.opened.notes or target.quantize)
    if not format.megatron and plain:
        raise UsageError(
            f"{source.path}: is a Hugging Face directory already, and none of its tensors is"
            " quantised, so there is nothing to convert"
        )
    refuse_options(target, format, source)
    destination = Destination(
        Path(dst),
        _unit(source, target) if format.megatron else None,
        format,
        source.root,
        overwrite=overwrite,
        update_tracker=update_tracker,
        helps=helps,
    )
    if target.dtype is not None:
        dtypes.parse(target.dtype)
    return (plan_megatron if format.megatron else plan_hf)(source, destination, target)


def _unit(source: Checkpoint, target: Target) -> str:
    """Returns the directory name of the new checkpoint: from the iteration that the user asks for,
    else from the source's name, else from the source's iteration.
    """
    if target.iteration is not None:
        return unit_name(target.iteration)
    if source.unit is not None and is_unit_name(source.unit.name):
        return source.unit.name
    common = source.opened.common
    iteration = common.fields.get("iteration") if common else None
    return unit_name(iteration if isinstance(iteration, int) and iteration > 0 else None)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    max_memory: int | str = "64MiB",
    threads: int = 0,
    checksum: str = "crc32",
    progress: Progress | None = None,
    **wanted: Any,
) -> dict[str, Any]:
    """Calls `plan(...)` and `run`; returns the manifest."""
    return plan(src, dst, **wanted).run(
        max_memory=max_memory, threads=threads, checksum=checksum, progress=progress
    )


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    atol: float | None = None,
    known: Known | None = None,
    no_optimizer: bool = False,
    progress: Progress | None = None,
) -> comparison.Difference:
    """Compares two checkpoints of any formats tensor by tensor; see `comparison.diff`.

    If both have the state of an optimizer, it is compared too, unless `no_optimizer`.
    """
    if atol is not None and not 0 <= atol < math.inf:
        raise UsageError(f"--atol {atol} must be a finite number, at least 0")
    left, right = (x if isinstance(x, Checkpoint) else Checkpoint(x, known) for x in (a, b))
    left, right = left.named_as(right), right.named_as(left)
    both = left.is_megatron and right.is_megatron and not no_optimizer
    if both and left.optimizer and right.optimizer:
        left, right = left.with_optimizer(), right.with_optimizer()
    found = comparison.diff(left, right, atol, progress)
    found.replicas = comparison.copies_apart((left, right))
    return found


def check(
    source: str | Path | Checkpoint,
    *,
    known: Known | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> checking.Checked:
    """Reads a whole checkpoint and returns what is wrong with it; see `checking.check`."""
    opened = source if isinstance(source, Checkpoint) else Checkpoint(source, known)
    return checking.check(opened, threads, progress)


def launch(source: Checkpoint) -> megatron_args.Launch:
    """Returns the flags of Megatron's training program for any checkpoint: from its dims, and from
    its own args where it has them.
    """
    dialect = dialect_to_write(source, Target())
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
    side = source.side_directory if source.is_megatron else source.path
    named = side is not None and has_tokenizer(side_files(side).kept)
    return megatron_args.launch(dialect, args, str(side) if named else None)


def push(
    directory: str | Path,
    name: str,
    *,
    revision: str | None = None,
    private: bool = False,
    message: str | None = None,
    dry_run: bool = False,
    tell: Callable[[pushing.Pushed], None] = lambda planned: None,
) -> pushing.Pushed:
    """Uploads a Hugging Face directory to the Hub; see `pushing.push`."""
    return pushing.push(Path(directory), name, revision, private, message, dry_run, tell)


__all__ = [
    "Checkpoint",
    "DestinationError",
    "Known",
    "Parallel",
    "Plan",
    "Target",
    "check",
    "convert",
    "diff",
    "open",
    "plan",
    "push",
]
