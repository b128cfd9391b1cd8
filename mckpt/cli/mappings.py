"""`mckpt mappings`: the mapping files that come with mckpt, and checks of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mckpt.cli.commands import Commands
from mckpt.cli.options import DIRECTORY, FILE, PATH, command, json_option
from mckpt.cli.terminal import document, echo
from mckpt.errors import UsageError


@click.group(cls=Commands)
def mappings() -> None:
    """List, show or check mapping files."""


@command("list")
@json_option
def list_mappings(as_json: bool) -> None:
    """List families (Hugging Face), dialects (Megatron) and others."""
    from mckpt import mapping

    files = {
        kind: {name: mapping.load(kind, name) for name in mapping.names(kind)}
        for kind in mapping.KINDS
    }
    if as_json:
        architectures = {
            k: {n: list(f.architectures) for n, f in v.items()} for k, v in files.items()
        }
        echo(json.dumps(architectures))
        return
    for kind, by_name in files.items():
        for name, file in by_name.items():
            echo("  ".join([f"{kind}/{name}", *file.architectures, file.models]).rstrip())


@command()
@click.argument("name")
def show(name: str) -> None:
    """Print a mapping as one YAML file, with all that it inherits.

    NAME is a family (llama), a dialect (gpt), or logical, the list of all dims and logical tensors.
    """
    from mckpt import mapping
    from mckpt.mapping.nodes import FOLDER

    if name == "logical":
        document((FOLDER / "logical.yaml").read_text(encoding="utf-8"))
        return
    kind, _, end = name.rpartition("/")
    kind = kind or next((kind for kind in mapping.KINDS if name in mapping.names(kind)), "hf")
    if kind not in mapping.KINDS:
        raise UsageError(f"{name}: the kinds of mappings are {', '.join(mapping.KINDS)}")
    file = mapping.load(kind, end)
    echo(f"# {kind}/{file.name}, with all that it inherits; digest {file.digest}")
    document(mapping.merged(kind, end))


@command()
@click.argument("model", type=DIRECTORY)
def new(model: Path) -> None:
    """Draft a family file for a model that no family describes.

    MODEL is its Hugging Face directory; only config.json and the headers of the weights are read.
    The draft is printed. In its lines marked TODO a person must complete what names and shapes do
    not show.
    """
    from mckpt.checkpoint import inspection
    from mckpt.mapping.drafting import draft

    config, tensors = inspection.stored_model(model)
    document(draft(config, tensors, str(model)))


@command()
@click.argument("file", type=PATH)
@click.argument("model", type=DIRECTORY, required=False)
@click.option(
    "--config",
    type=FILE,
    help="A config.json: also check that every tensor of this model has a place in Megatron.",
)
def check(file: Path, model: Path | None, config: Path | None) -> None:
    """Check a mapping file, and a model that uses it.

    With MODEL, a Hugging Face directory, every stored tensor and every key of config.json is
    checked as well; nothing but headers is read.
    """
    from mckpt.checkpoint import inspection

    if model is not None and config is not None:
        raise UsageError("--config: MODEL has a config.json of its own; leave one of them out")
    for line in inspection.check_mapping(file, config, model):
        echo(line)


for _command in (list_mappings, show, new, check):
    mappings.add_command(_command)
