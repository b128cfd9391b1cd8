"""`mckpt diff`: a comparison of two checkpoints, tensor by tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt.cli import shared, terminal
from mckpt.cli.options import PATH, command, from_table, json_option
from mckpt.cli.terminal import echo, echo_outcome, named
from mckpt.errors import counted
from mckpt.options import CompareOptions

if TYPE_CHECKING:
    from mckpt.checkpoint.comparison import Difference


@command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@shared.of_source("like vocab_size")
@shared.family_options
@from_table(CompareOptions, "atol no_optimizer")
@shared.of_run("allow_overflow")
@json_option
def diff(
    a: Path,
    b: Path,
    atol: float | None,
    no_optimizer: bool,
    allow_overflow: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare two checkpoints tensor by tensor.

    Their formats and parallel sizes may differ.

    Exit code 0: they are the same; 1: they differ.
    """
    from mckpt import api

    start = time.perf_counter()
    left, right = (api.with_factors(shared.open_source(one, options)) for one in (a, b))
    left, right = left.named_as(right), right.named_as(left)
    notes = [f"{side.path}: {note}" for side in (left, right) for note in side.model.notes]
    for note in dict.fromkeys(notes):
        terminal.print_note(note, as_json)
    with terminal.showing("comparing", as_json) as shown:
        accepted: dict[str, Any] = {"atol": atol, "allow_overflow": allow_overflow}
        difference = api.diff(left, right, no_optimizer=no_optimizer, progress=shown, **accepted)
    if as_json:
        echo_outcome("different" if difference else "same", start, difference.json(), a=a, b=b)
    else:
        for line in _lines(difference, a, b, atol):
            echo(line)
    return 1 if difference else 0


def _lines(result: Difference, a: Path, b: Path, atol: float | None) -> Iterator[str]:
    for name in result.missing:
        yield f"only in {named(a)}: {name}"
    for name in result.extra:
        yield f"only in {named(b)}: {name}"
    yield from map(str, result.changed)
    yield from result.replicas
    yield from result.rounded
    for text in result.dropped:
        yield f"not compared, because the mapping drops it: {text}"
    if result:
        verdict = "different"
    elif result.rounded:
        verdict = "the same but for this rounding"
    else:
        verdict = "the same to the last bit" if atol is None else f"the same within {atol:g}"
    dropped = f", {len(result.dropped):,} dropped" if result.dropped else ""
    yield (
        f"{verdict}: {counted(result.same, 'logical tensor')} equal,"
        f" {len(result.changed):,} differ, {len(result.missing):,} missing,"
        f" {len(result.extra):,} extra{dropped}"
    )
