"""`mckpt train`: training steps of a Megatron checkpoint on Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt import formats
from mckpt.cli import shared, terminal
from mckpt.cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    WholeNumber,
    command,
    in_section,
    json_option,
)
from mckpt.errors import UsageError, counted
from mckpt.storage import sparse_copy

if TYPE_CHECKING:
    from mckpt.api import Checkpoint

# The rows of the vocabulary, divided by this number: if fewer are padding, they do not move the
# loss by more than a hundredth.
SMALL_PADDING = 100

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}

data_option = in_section("Steps and data")
optimizer_option = in_section("Optimizer")
saving_option = in_section("Saving")


@command()
@click.argument("checkpoint", type=PATH)
@data_option(
    "--steps",
    type=POSITIVE,
    required=True,
    help="Total number of steps. With --resume it includes the steps of the earlier run.",
)
@data_option(
    "--resume",
    is_flag=True,
    help="Continue with the optimizer, schedule and iteration of the checkpoint.",
)
@data_option(
    "--data",
    metavar="PATH",
    help="Megatron .bin/.idx (the path without suffix), or .jsonl with tokens or text. Without it,"
    " text that mckpt generates.",
)
@data_option(
    "--tokenizer",
    type=click.Path(file_okay=False),
    help="Directory of the tokenizer, for .jsonl with text.",
)
@data_option("--global-batch-size", type=POSITIVE, default=8, help="Sequences in a step.")
@data_option(
    "--micro-batch-size",
    type=POSITIVE,
    default=1,
    help="Sequences that one rank computes at once.",
)
@data_option(
    "--seq-length",
    type=WholeNumber(2),
    help="Tokens in a sequence. Without it, the checkpoint's.",
)
@data_option("--seed", type=int, default=1234, metavar="N", help="Seed of the data order.")
@optimizer_option("--lr", type=float, default=1e-4, metavar="X", help="Largest learning rate.")
@optimizer_option(
    "--min-lr", type=float, default=0.0, metavar="X", help="Learning rate at the end of the decay."
)
@optimizer_option(
    "--warmup",
    type=NOT_NEGATIVE,
    default=0,
    help="Steps of linear warmup, after which the rate follows a cosine.",
)
@optimizer_option(
    "--decay-steps",
    type=POSITIVE,
    help="Steps over which the learning rate falls. Without it, --steps.",
)
@optimizer_option(
    "--weight-decay", type=float, default=0.01, metavar="X", help="Weight decay of AdamW."
)
@optimizer_option(
    "--clip-grad",
    type=float,
    default=1.0,
    metavar="X",
    help="Largest norm of the gradient; 0 does not clip.",
)
@optimizer_option(
    "--dtype",
    type=click.Choice(list(DTYPE_NAMES)),
    default="bf16",
    help="Dtype of the computation.",
)
@saving_option(
    "--save",
    type=click.Path(file_okay=False),
    help="Save directory for weights and optimizer state. Without it, nothing is saved.",
)
@saving_option(
    "--save-interval",
    type=POSITIVE,
    help="Save every N steps. Without it, after the last step only.",
)
@saving_option(
    "--format",
    type=click.Choice(formats.names(megatron=True, written=True)),
    default=formats.MEGATRON,
    help="Format of the saved checkpoints.",
)
@optimizer_option(
    "--distributed-optimizer/--no-distributed-optimizer",
    default=True,
    help="Shard the optimizer state over the data-parallel ranks.",
)
@saving_option(
    "--optimizer-format",
    type=click.Choice(["fully_reshardable", "dp_reshardable"]),
    default="fully_reshardable",
    help="Layout in which torch_dist stores the state of a distributed optimizer.",
)
@shared.run_options("1")
@shared.run_option(
    "--ranks",
    type=POSITIVE,
    help="Number of processes. Without it, what one model needs: pp times the least common multiple"
    " of tp x cp and ep x etp. A multiple of that trains data-parallel.",
)
@json_option
def train(
    checkpoint: Path, ranks: int | None, device: str, dtype: str, as_json: bool, **options: Any
) -> None:
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
        "dtype": DTYPE_NAMES[dtype],
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
