"""`mckpt check`: reads a whole checkpoint and reports what is wrong with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mckpt.cli import shared, terminal
from mckpt.cli.options import NOT_NEGATIVE, PATH, command, json_option
from mckpt.cli.terminal import echo, echo_outcome
from mckpt.errors import counted


@command()
@click.argument("path", type=PATH)
@shared.of_source("iteration like")
@shared.family_options
@click.option(
    "--threads",
    type=NOT_NEGATIVE,
    default=0,
    help="Number of threads that read; 0 chooses automatically.",
)
@json_option
def check(path: Path, threads: int, as_json: bool, **options: Any) -> int:
    """Read a whole checkpoint and report what is wrong with it.

    The checkpoint may be of mckpt or of another program. The check compares the headers with the
    files, and finds tensors that are missing or have holes, checksums that do not match, copies
    that differ, and values that are NaN or infinite.

    Exit code 0: nothing is wrong; 1: values are not finite, copies differ, or something could not
    be checked; 3: it is damaged.
    """
    from mckpt import api

    source = shared.open_source(path, options)
    start = time.perf_counter()
    with terminal.showing("checking", as_json) as shown:
        report = api.check(source, threads=threads, progress=shown)
    seconds = time.perf_counter() - start
    if as_json:
        echo_outcome(report.verdict, start, report.json(), path=source.opened.root)
        return report.exit_code
    for title, lines in (
        ("damaged", report.damaged),
        ("suspicious", report.suspicious),
        ("not checked", report.unchecked),
    ):
        for line in lines:
            echo(f"{title}: {line}")
    echo(
        f"{source.opened.root}: {report.verdict}; {counted(report.files, 'file')},"
        f" {report.nbytes:,} bytes and {counted(report.checksums, 'checksum')} in {seconds:.2f} s"
    )
    return report.exit_code
