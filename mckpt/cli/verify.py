"""`mckpt verify`: a verdict on whether two checkpoints hold one model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mckpt.cli import progress
from mckpt.cli.echo import echo, echo_outcome, named
from mckpt.cli.options import (
    FILE,
    PATH,
    POSITIVE,
    WholeNumber,
    command,
    family_options,
    in_section,
    iteration_option,
    json_option,
    parse_settings,
    run_options,
)

comparison_option = in_section("Comparison")


@command()
@click.argument("hf", type=PATH)
@click.argument("megatron", type=PATH)
@comparison_option(
    "--level",
    type=click.Choice(["bytes", "forward", "train"]),
    default="forward",
    show_default=True,
    help="bytes compares tensors. forward also compares logits. train also compares the losses of"
    " a few steps at two parallel layouts.",
)
@comparison_option(
    "--tokens",
    type=FILE,
    help="More sequences of token ids: a text file with one JSON list a line, or .npy.",
)
@comparison_option(
    "--sequences",
    type=POSITIVE,
    default=4,
    show_default=True,
    metavar="N",
    help="Number of random sequences, from fixed seeds.",
)
@comparison_option(
    "--length",
    type=WholeNumber(2),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens in a random sequence; fewer if the model allows fewer.",
)
@comparison_option(
    "--steps",
    type=WholeNumber(2),
    default=4,
    show_default=True,
    metavar="N",
    help="Number of steps at --level train.",
)
@run_options("the checkpoint's for torch files, else 1")
@iteration_option
@family_options
@click.option("--report", type=FILE, help="Write everything that was measured to one HTML file.")
@click.option(
    "--card", type=FILE, help="Write the verdict as a small YAML file, to publish with the model."
)
@json_option
def verify(
    hf: Path,
    megatron: Path,
    report: Path | None,
    card: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check that two checkpoints hold the same model.

    Runs transformers and Megatron-Core on the same tokens and compares their logits.

    Exit code 0: pass; 1: fail or incomplete.
    """
    from mckpt.pages import document
    from mckpt.verification import card as cards
    from mckpt.verification import levels
    from mckpt.verification import report as page

    for file in (report, card):
        if file is not None:
            document.refuse(file)  # before the models run, which takes minutes
    options["settings"] = parse_settings(options)
    start = time.perf_counter()
    with progress.phases(as_json) as tell:
        found = levels.verify(hf, megatron, tell=tell, **options)
    if report is not None:
        page.write(found, report)
    if card is not None:
        cards.write(found, hf, megatron, options["iteration"], card)
    if as_json:
        echo_outcome(found.verdict, start, found.json(), hf=hf, megatron=megatron)
    else:
        for line in found.lines():
            echo(line)
        seconds = time.perf_counter() - start
        echo(f"{found.verdict.upper()}: {named(hf)} and {named(megatron)}, {seconds:.0f} s")
    return found.exit_code
