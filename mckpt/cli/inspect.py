"""`mckpt inspect`: the content of a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt.cli import shared
from mckpt.cli.options import PATH, command, json_option
from mckpt.cli.terminal import document, echo
from mckpt.errors import UsageError

if TYPE_CHECKING:
    from mckpt.checkpoint.checkpoint import Checkpoint


@command()
@click.argument("path", type=PATH)
@shared.of_source("iteration")
@shared.family_options
@click.option(
    "--megatron-args",
    "flags",
    is_flag=True,
    help="Print the flags with which Megatron's training program builds this model.",
)
@shared.html_option
@json_option
def inspect(path: Path, flags: bool, html: Path | None, as_json: bool, **options: Any) -> None:
    """Print what a directory contains.

    That is the format, the model, the parallel sizes and the tensors of the checkpoint.
    """
    from mckpt.formats import foreign, places

    if foreign.has_deltas(path):
        from mckpt.conversion import deltas

        found = [one.shown() for one in deltas.versions(path)]
        text = [", ".join(f"{k} {v}" for k, v in one.items()) for one in found]
        echo(*([json.dumps({"format": "delta", "versions": found})] if as_json else text))
        return
    if flags and html:
        raise UsageError("--megatron-args and --html: give one of them")
    with places.streamed(path) as directory:
        source = shared.open_source(directory, options)
        _inspect(source, flags, as_json)
        if html is not None:
            from mckpt.pages import document, picture

            document.write(picture.of_checkpoint(source), html)


def _inspect(source: Checkpoint, flags: bool, as_json: bool) -> None:
    if flags:
        from mckpt.conversion import planning
        from mckpt.formats.megatron import megatron_args

        launch = planning.launch(source)
        text = megatron_args.as_json(launch) if as_json else megatron_args.shell(launch)
        document(text)
        return
    from mckpt.checkpoint import inspection

    facts = inspection.inspect(source, None if as_json else inspection.SHOWN)
    echo(*([json.dumps(facts)] if as_json else inspection.lines(facts)))
