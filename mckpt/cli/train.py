"""`mckpt train`: training steps of a Megatron checkpoint on Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt.cli import shared, terminal
from mckpt.cli.options import PATH, POSITIVE, command, from_table, json_option
from mckpt.errors import UsageError, counted
from mckpt.options import TrainOptions
from mckpt.storage import sparse_copy

if TYPE_CHECKING:
    from mckpt.api import Checkpoint

# The rows of the vocabulary, divided by this number: if fewer are padding, they do not move the
# loss by more than a hundredth.
SMALL_PADDING = 100

of_train = partial(from_table, TrainOptions)


@command()
@click.argument("checkpoint", type=PATH)
@of_train("steps", required=True, default=None)
@of_train("resume data tokenizer global_batch_size micro_batch_size seq_length")
@of_train("seed", type=int)
@of_train("lr min_lr warmup decay_steps weight_decay clip_grad dtype save save_interval")
@of_train("format", type=shared.TRAINED)
@of_train("distributed_optimizer optimizer_format")
@shared.run_options("1")
@shared.run_option(
    "--ranks",
    type=POSITIVE,
    help="Number of processes. Without it, what one model needs: pp times the least common multiple"
    " of tp x cp and ep x etp. A multiple of that trains data-parallel.",
)
@json_option
def train(checkpoint: Path, ranks: int | None, device: str, as_json: bool, **options: Any) -> None:
    """Train a Megatron checkpoint on Megatron-Core.

    Prints the loss of each step on stdout, and on stderr the device, the parallel sizes and where
    the checkpoint is saved. The model is built from the checkpoint's args alone.
    """
    from mckpt import api, launching
    from mckpt.conversion.side_files import carry
    from mckpt.formats.megatron.save_directory import Tracker, iteration_name
    from mckpt.verification import requirements

    sizes = {name: options[name] or 1 for name in ("tp", "pp", "vpp", "ep", "cp")}
    sizes["etp"] = options["etp"] or sizes["tp"]
    smallest = launching.world(sizes)
    num_ranks = ranks or smallest
    if num_ranks % smallest:
        raise UsageError(
            f"--ranks {num_ranks} is not a multiple of {smallest}, the number of ranks that hold"
            " one model at these sizes"
        )
    launching.require("torch", "megatron", "psutil")
    opened = api.open(checkpoint)
    sparse_copy.refuse(opened.path, "mckpt train")
    if opened.is_megatron and (not opened.dims["causal"] or opened.dims["encoder_layers"]):
        kind = "has" if opened.dims["encoder_layers"] else "is"
        raise UsageError(
            f"{checkpoint}: {kind} an encoder, and mckpt train trains decoders only; train it with"
            f" Megatron's {opened.mapping.trainer}"
        )
    if opened.is_megatron:
        requirements.require_core(opened)
        if options["resume"]:
            requirements.refuse_resume(opened, sizes)
    job = {
        "checkpoint": str(checkpoint.absolute()),
        "json": as_json,
        **{name: value for name, value in options.items() if value is not None},
    }
    device = launching.device(device, num_ranks)
    if opened.is_megatron:
        for note in _notes(opened, sizes, num_ranks, num_ranks // smallest, device, options):
            terminal.print_note(note, as_json)
    if options["save"] is None:
        launching.run_alone("mckpt.trainer.train", job, device, num_ranks)
        return
    folder = Path(options["save"])
    carry(opened, folder)
    tracker = Tracker(folder)
    before = _written(tracker.path)
    launching.run_alone("mckpt.trainer.train", job, device, num_ranks)
    if _written(tracker.path) != before:
        terminal.print_note(f"saved {folder / iteration_name(int(tracker.content()))}", as_json)


def _written(path: Path) -> int | None:
    """Returns when a file was written, in nanoseconds; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _notes(
    opened: Checkpoint,
    sizes: Mapping[str, int],
    num_ranks: int,
    copies: int,
    device: str,
    options: Mapping[str, Any],
) -> Iterator[str]:
    """Yields sentences on a run before it starts.

    copies: data-parallel copies of a model of these sizes.
    """
    from mckpt.conversion.plan_data import true_vocab
    from mckpt.geometry.parallel import Parallel

    shown = [str(Parallel().with_(**{n: v for n, v in sizes.items() if n != "cp"}))]
    shown += [f"{name} {n}" for name, n in (("cp", sizes["cp"]), ("dp", copies)) if n > 1]
    where = f"{counted(num_ranks, 'rank')} on {device}"
    yield f"trains {opened.opened.root}: {', '.join(shown)}; {where}"
    fields = opened.files.common.fields if opened.files.common else {}
    done, steps = fields.get("iteration"), options["steps"]
    if options["resume"] and isinstance(done, int) and done >= steps:
        yield (
            f"nothing is left to train: the checkpoint has done {counted(done, 'step')}, and"
            f" --steps {steps} is their number in all"
        )
    elif options["save"] is None:
        yield "nothing is saved; --save DIR saves the result"
    rows, vocab = (opened.args or {}).get("padded_vocab_size"), true_vocab(opened)
    if rows and vocab and (padding := rows - vocab) * SMALL_PADDING > rows:
        yield (
            f"{padding:,} of the {rows:,} rows of the vocabulary are padding, which Megatron's loss"
            " counts too. A reshard to another tp may change their number, and so the loss; `mckpt"
            " reshard --keep-padding` keeps them"
        )
