"""`mckpt mappings`: the mapping files that come with mckpt, and checks of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mckpt.cli.options import FILE, PATH, command, json_option


@click.group()
def mappings() -> None:
    """List, show or check mapping files."""


@command("list")
@json_option
def list_mappings(as_json: bool) -> None:
    """List families (Hugging Face), dialects (Megatron) and others."""
    from mckpt import mapping

    files = {
        kind: {name: list(mapping.load(kind, name).architectures) for name in mapping.names(kind)}
        for kind in mapping.KINDS
    }
    if as_json:
        click.echo(json.dumps(files))
        return
    for kind, found in files.items():
        for name, architectures in found.items():
            click.echo(f"{kind}/{name}  {' '.join(architectures)}".rstrip())


@command()
@click.argument("name")
def show(name: str) -> None:
    """Show the rules and dims of a mapping, inherited ones too."""
    from mckpt import mapping

    kind = next((kind for kind in mapping.KINDS if name in mapping.names(kind)), "hf")
    file = mapping.load(kind, name)
    click.echo(f"# {kind}/{file.name}, digest {file.digest}")
    for dim, spec in file.dims.items():
        constant = repr(spec.const) if spec.has_const else spec.read and spec.read.text
        click.echo(f"{dim:24} {', '.join(spec.keys) or constant}")
    for rule in (*file.rules, *file.objects):
        value = f"{rule.pack}({', '.join(rule.of)})" if rule.of else "object"
        condition = f"  when {rule.when.text}" if rule.when else ""
        alias = "  alias" if rule.alias else ""
        click.echo(f"{rule.key}  =  {value}  tp {rule.tp}{condition}{alias}")


@command()
@click.argument("file", type=PATH)
@click.option(
    "--config",
    type=FILE,
    help="A config.json: also check that every tensor of this model has a place in Megatron.",
)
def check(file: Path, config: Path | None) -> None:
    """Check a mapping file, and a model that uses it."""
    from mckpt.checkpoint import inspection

    for line in inspection.check_mapping(file, config):
        click.echo(line)


for _command in (list_mappings, show, check):
    mappings.add_command(_command)
