"""`mckpt push`: uploads an export to the Hugging Face Hub."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mckpt.cli.options import PATH, command, from_table, json_option
from mckpt.cli.terminal import echo, echo_outcome, reporting
from mckpt.errors import counted
from mckpt.options import PushOptions


@command()
@click.argument("directory", type=PATH)
@click.argument("name")
@from_table(PushOptions, "revision private message dry_run")
@json_option
def push(
    directory: Path,
    name: str,
    revision: str | None,
    private: bool,
    message: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a Hugging Face directory to the Hub.

    NAME is org/name. The directory must be complete. Its weights, and the files that a conversion
    copies (docs/side-files.md), are uploaded as one commit, so that readers never see an incomplete
    model. The commit also removes weights that the branch has and the directory does not have. The
    same command continues an interrupted upload. Log in with `hf auth login`, or set HF_TOKEN.
    """
    from mckpt import api
    from mckpt.conversion.pushing import Pushed

    def print_files(planned: Pushed) -> None:
        if as_json:
            return
        for path, nbytes in planned.files.items():
            echo(f"{nbytes:>18,} bytes  {path}", err=True)
        for path in planned.left_out:
            echo(f"left out: {path}", err=True)

    start = time.perf_counter()
    pushed = api.push(
        directory,
        name,
        revision=revision,
        private=private,
        message=message,
        dry_run=dry_run,
        tell=print_files,
    )
    size = sum(pushed.files.values())
    files = f"{directory}: {counted(len(pushed.files), 'file')}, {size:,} bytes,"
    if pushed.commit is None:
        if as_json:
            echo_outcome("planned", start, pushed.json(), path=directory)
        else:
            echo(f"{files} would be uploaded to {pushed.name}")
        return
    with reporting(pushed.commit.url):
        if as_json:
            state = "uploaded" if pushed.commit.new else "unchanged"
            echo_outcome(state, start, pushed.json(), path=directory)
            return
        verb = "uploaded to" if pushed.commit.new else "is already, unchanged, at"
        echo(f"{files} {verb} {pushed.commit.url} (commit {pushed.commit.oid})")
        for path in pushed.commit.removed:
            echo(f"removed from the branch, because it does not belong to this model: {path}")
