"""`mckpt diff`: a comparison of two checkpoints, tensor by tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt.cli import progress
from mckpt.cli.echo import echo, echo_outcome, named
from mckpt.cli.options import (
    PATH,
    command,
    family_options,
    json_option,
    like_option,
    open_source,
    vocab_size_option,
)
from mckpt.errors import counted

if TYPE_CHECKING:
    from mckpt.checkpoint.comparison import Difference


@command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@like_option
@vocab_size_option
@family_options
@click.option(
    "--atol",
    type=float,
    metavar="X",
    help="Largest difference allowed. Without it, every bit must be equal.",
)
@click.option(
    "--no-optimizer",
    is_flag=True,
    help="Compare the weights only, not the optimizer state that both have.",
)
@json_option
def diff(
    a: Path, b: Path, atol: float | None, no_optimizer: bool, as_json: bool, **options: Any
) -> int:
    """Compare two checkpoints tensor by tensor.

    Their formats and parallel sizes may differ.

    Exit code 0: they are the same; 1: they differ.
    """
    from mckpt import api

    start = time.perf_counter()
    left, right = open_source(a, options), open_source(b, options)
    left, right = left.named_as(right), right.named_as(left)
    notes = [f"{side.path}: {note}" for side in (left, right) for note in side.model.notes]
    for note in dict.fromkeys(notes):
        progress.tell(note, as_json)
    with progress.showing("comparing", as_json) as shown:
        found = api.diff(left, right, atol=atol, no_optimizer=no_optimizer, progress=shown)
    if as_json:
        echo_outcome("different" if found else "same", start, found.json(), a=a, b=b)
    else:
        for line in _lines(found, a, b, atol):
            echo(line)
    return 1 if found else 0


def _lines(found: Difference, a: Path, b: Path, atol: float | None) -> Iterator[str]:
    """Yields every difference and, last, a summary."""
    for name in found.missing:
        yield f"only in {named(a)}: {name}"
    for name in found.extra:
        yield f"only in {named(b)}: {name}"
    yield from map(str, found.changed)
    yield from found.replicas
    yield from found.rounded
    for text in found.dropped:
        yield f"not compared, because the mapping drops it: {text}"
    if found:
        verdict = "different"
    elif found.rounded:
        verdict = "the same but for this rounding"
    else:
        verdict = "the same to the last bit" if atol is None else f"the same within {atol:g}"
    dropped = f", {len(found.dropped):,} dropped" if found.dropped else ""
    yield (
        f"{verdict}: {counted(found.same, 'tensor')} equal, {len(found.changed):,} differ,"
        f" {len(found.missing):,} missing, {len(found.extra):,} extra{dropped}"
    )
