"""`mckpt edit`: a checkpoint of another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mckpt.cli import convert, shared
from mckpt.cli.options import FILE, command


@command()
@shared.source_argument
@shared.destination_argument
@shared.conversion_option(
    "--recipe", type=FILE, help="A YAML file with a list of edits (docs/surgery.md)."
)
@shared.conversion_option(
    "--edit",
    "more",
    multiple=True,
    metavar="YAML",
    help="One edit, such as 'layers: {drop: 20-23}' or untie, done after those of --recipe. May be"
    " given several times.",
)
@shared.kept_form_options
@shared.of_target("no_optimizer")
@shared.megatron_source_options
@shared.megatron_target_options
@shared.family_options
@shared.of_target("target_iteration")
@shared.conversion_options
def edit(
    src: Path,
    dst: Path,
    recipe: Path | None,
    more: tuple[str, ...],
    target_format: str | None,
    **options: Any,
) -> None:
    """Write a checkpoint of another shape.

    Edits change layers, heads, vocabulary, experts and more (docs/surgery.md); the recipe lists
    them. Each element of the result is made of elements of SRC or is a new value; the plan proves
    it, and lists what is left out. The state of an optimizer follows its weights.
    """
    from mckpt.conversion import planning
    from mckpt.editing import edits, steps

    plain = shared.open_source(src, options)
    source = edits.edited(plain, steps.read(recipe, plain.dims, more))
    target = shared.target_like(source, options, target_format)
    if outcome := convert.carry_out(source, dst, target, options, planning.form_of_weights):
        outcome.show(options["as_json"])
