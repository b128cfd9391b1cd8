"""`mckpt verify`: a verdict on whether two checkpoints hold one model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mckpt.cli import shared, terminal
from mckpt.cli.options import (
    OUTPUT_FILE,
    PATH,
    command,
    json_option,
)
from mckpt.cli.terminal import echo, echo_outcome, named
from mckpt.errors import UsageError


@command()
@click.argument("hf", type=PATH)
@click.argument("megatron", type=PATH)
@shared.of_verify("level tokens sequences length steps image adapter alpha")
@click.option(
    "--contract",
    is_flag=True,
    help="MEGATRON is a checkpoint of any format that `mckpt edit` or `mckpt merge` made of HF,"
    " which may be one of Megatron: check that it keeps the contract of its edits or its merge.",
)
@click.option(
    "--with",
    "others",
    multiple=True,
    type=PATH,
    metavar="SRC",
    help="With --contract: another checkpoint of which a graft or a merge made MEGATRON. May be"
    " given several times, in their order.",
)
@shared.run_options("the checkpoint's for torch files, else 1")
@shared.of_source("iteration vocab_size")
@shared.family_options
@click.option(
    "--report", type=OUTPUT_FILE, help="Write everything that was measured to one HTML file."
)
@click.option(
    "--card",
    type=OUTPUT_FILE,
    help="Write the verdict as a small YAML file, to publish with the model.",
)
@json_option
def verify(
    hf: Path,
    megatron: Path,
    contract: bool,
    others: tuple[Path, ...],
    report: Path | None,
    card: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check that two checkpoints hold the same model.

    Runs transformers and Megatron-Core on the same tokens and compares their logits.

    Exit code 0: pass; 1: fail or incomplete.
    """
    from mckpt.options import VerifyOptions
    from mckpt.verification import contract as contracts
    from mckpt.verification import levels
    from mckpt.verification import report as cards
    from mckpt.verification import report as page

    options["settings"] = shared.parse_settings(options)
    if contract and (report or card):
        raise UsageError("--contract: there is no --report and no --card of it; leave them out")
    if others and not contract:
        raise UsageError("--with: names what --contract needs; give --contract as well")
    start = time.perf_counter()
    with terminal.phases(as_json) as print_phase:
        if contract:
            stated = VerifyOptions.of({**options, "tell": print_phase})
            verdict = contracts.verify(hf, megatron, stated, others)
        else:
            verdict = levels.verify(hf, megatron, tell=print_phase, **options)
    if report is not None:
        page.write(verdict, report)
    if card is not None:
        cards.write_card(verdict, hf, megatron, options["iteration"], card)
    if as_json:
        echo_outcome(verdict.verdict, start, verdict.json(), hf=hf, megatron=megatron)
    else:
        for line in verdict.lines():
            echo(line)
        seconds = time.perf_counter() - start
        echo(f"{verdict.verdict.upper()}: {named(hf)} and {named(megatron)}, {seconds:.0f} s")
    return verdict.exit_code
