"""`mckpt merge`: weighted sums and other merges of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mckpt.cli import convert, shared
from mckpt.cli.options import PATH, command
from mckpt.errors import UsageError
from mckpt.options import AverageOptions


@command()
@click.argument("sources", metavar="SRC...", nargs=-1, type=PATH)
@shared.destination_argument
@shared.of_average("method parameters arithmetic recipe")
@shared.of_average("weights schedule reverse normalize summed start end window min_interval")
@shared.kept_form_options
@shared.of_source("like vocab_size")
@shared.megatron_target_options
@shared.family_options
@shared.of_target("target_iteration")
@shared.conversion_options
def merge(sources: tuple[Path, ...], dst: Path, target_format: str | None, **options: Any) -> None:
    """Merge several checkpoints of one model.

    SRC... are checkpoints of any formats and sizes, or one run, whose iterations are summed. The
    sum is computed in float32 in their order and rounded once. Format, args, config and tokenizer
    are those of the first SRC, of a run those of the last iteration. The state of an optimizer is
    left out.

    With --method, or with --recipe in the place of SRC..., another formula takes the place of the
    sum.
    """
    from mckpt.checkpoint.checkpoint import Checkpoint
    from mckpt.editing import averaging, methods, recipes

    stated = AverageOptions.of(options)
    described = shared.source_options({**options, "iteration": None})
    recipe = recipes.read(stated, sources) if stated.recipe is not None else None
    if recipe:
        found = list[tuple[Path, int | None]]((Path(path), None) for path in recipe.paths)
    elif sources:
        found = averaging.chosen(sources, stated)
    else:
        raise UsageError("give the checkpoints and DST, or --recipe FILE and DST")
    inputs = [Checkpoint.open(path, described.with_(iteration=at)) for path, at in found]
    base = len(inputs) - 1 if found[0][1] is not None else 0
    source = methods.made(inputs, stated, base) if not recipe else recipe.made(inputs, stated)
    if recipe and options["dtype"] is None:
        options["dtype"] = recipe.dtype
    target = shared.target_like(source, options, target_format)
    target = averaging.weights_alone(source, target)
    if outcome := convert.carry_out(source, dst, target, options):
        outcome.show(options["as_json"])
