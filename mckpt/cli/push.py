"""`mckpt push`: uploads an export to the Hugging Face Hub."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mckpt.cli.echo import echo, echo_outcome, reporting
from mckpt.cli.options import PATH, command, json_option
from mckpt.errors import counted


@command()
@click.argument("directory", type=PATH)
@click.argument("name")
@click.option(
    "--revision",
    metavar="BRANCH",
    help="Branch to write, which is created if needed; without it, main. {iteration} in it is the"
    " iteration that the export was made of: iter_{iteration}.",
)
@click.option("--private", is_flag=True, help="Make a repository that is created private.")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@json_option
def push(
    directory: Path,
    name: str,
    revision: str | None,
    private: bool,
    message: str | None,
    as_json: bool,
) -> None:
    """Upload a Hugging Face directory to the Hub.

    NAME is org/name. The directory must be complete. All files become one commit, so nobody reads
    a part of them; weights of the branch that the directory does not have are removed. The same
    command continues an interrupted upload. Log in with `hf auth login`, or set HF_TOKEN.
    """
    from mckpt import api

    start = time.perf_counter()
    found = api.push(directory, name, revision=revision, private=private, message=message)
    with reporting(found.commit.url):
        if as_json:
            state = "uploaded" if found.commit.new else "unchanged"
            echo_outcome(state, start, found.json(), path=directory)
            return
        size = sum(found.files.values())
        said = "uploaded to" if found.commit.new else "is already, unchanged, at"
        echo(
            f"{directory}: {counted(len(found.files), 'file')}, {size:,} bytes, {said}"
            f" {found.commit.url} (commit {found.commit.oid})"
        )
        for path in found.commit.removed:
            echo(f"removed from the branch, because it does not belong to this model: {path}")
