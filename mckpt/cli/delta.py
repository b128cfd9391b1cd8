"""`mckpt delta` and `mckpt apply`: what changed between two checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mckpt.cli import shared, terminal
from mckpt.cli.options import PATH, POSITIVE, Options, command, from_table, json_option, together
from mckpt.cli.terminal import echo, echo_outcome, reporting
from mckpt.errors import counted
from mckpt.options import DeltaOptions

described = together(shared.of_source("like vocab_size"), shared.family_options)


@command()
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@from_table(DeltaOptions, "encoding digest")
@described
@shared.of_run("max_memory threads resume")
@json_option
def delta(old: Path, new: Path, folder: Path, as_json: bool, **options: Any) -> None:
    """Write what changed between two checkpoints.

    OLD and NEW may have any formats and sizes. The delta is the next version in DIR,
    DIR/weight_vNNNNNN, in the form from which the engines of slime and miles load; OLD must be what
    the version before it makes.
    """
    from mckpt import api

    start = time.perf_counter()
    left, right = (shared.open_source(one, options) for one in (old, new))
    with terminal.showing("comparing", as_json) as shown:
        made = api.delta(left, right, folder, progress=shown, **_given(options, DeltaOptions))
    facts = made["delta"]
    size = sum(file["bytes"] for file in made["files"].values())
    path = folder / f"weight_v{facts['version']:06d}"
    num = len(facts["base_digests"])
    short = {"version": facts["version"], "changed_tensors": num, "bytes": size}
    with reporting(str(path)):
        if as_json:
            echo_outcome("written", start, short, old=old, new=new, path=path)
            return
        echo(
            f"{path}: {num:,} of {counted(len(facts['digests']), 'tensor')} changed, {size:,} bytes"
        )


@command()
@click.argument("base", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.argument("out", type=PATH)
@click.option("--until", type=POSITIVE, help="Last version to apply. Without it, the last in DIR.")
@described
@shared.of_run("max_memory threads checksum resume")
@shared.of_place("overwrite")
@json_option
def apply(
    base: Path, folder: Path, out: Path, until: int | None, as_json: bool, **options: Any
) -> None:
    """Apply deltas to a checkpoint.

    BASE may have any format; OUT is the Hugging Face directory that it becomes by the versions in
    DIR, one after the other. A BASE on which they do not build is refused, and so is a delta that
    does not give the digests that it states.
    """
    from mckpt import api

    start = time.perf_counter()
    source, more = shared.open_source(base, options), _given(options)
    more |= {"checksum": options["checksum"], "overwrite": options["overwrite"]}
    with terminal.showing("applying", as_json) as shown:
        made = api.apply_delta(source, folder, out, until=until, progress=shown, **more)
    number = made["delta"]["version"]
    with reporting(str(out)):
        if as_json:
            places = {"base": base, "dir": folder, "path": out}
            echo_outcome("written", start, {"version": number}, **places)
        else:
            echo(f"{out}: is {base} at version {number}")


def _given(options: Options, *tables: Any) -> dict[str, Any]:
    """Returns the options of a run, and those of tables, as keywords."""
    names = [name for table in tables for name in table.__struct_fields__]
    return {name: options[name] for name in (*names, "max_memory", "threads", "resume")}
