"""`mckpt adapter`: adapters (LoRA) of PEFT and Megatron."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mckpt import formats
from mckpt.cli import convert, shared
from mckpt.cli.commands import Commands
from mckpt.cli.options import PATH, command, json_option
from mckpt.cli.terminal import echo
from mckpt.errors import UsageError
from mckpt.formats.hf_config import ADAPTER
from mckpt.options import AdapterOptions

if TYPE_CHECKING:
    pass


@click.group(cls=Commands)
def adapter() -> None:
    """Merge, convert or inspect an adapter (LoRA)."""


@command()
@click.argument("base", type=PATH)
@click.argument("adapter", type=PATH)
@shared.destination_argument
@shared.layout_options("target-", otherwise="1 from Hugging Face, else the base's")
@shared.conversion_option(
    "--format",
    "target_format",
    type=shared.WRITTEN_FORMATS,
    help="Format of the target. Without it, that of the base, or torch_dist if sizes are given.",
)
@shared.hf_target_options
@shared.dialect_option("target-", otherwise="the base's; from Hugging Face, gpt")
@shared.of_target("no_optimizer keep_padding")
@shared.megatron_source_options
@shared.megatron_target_options
@shared.alpha_option
@shared.of_adapter("expert_a expert_b")
@shared.family_options
@shared.conversion_options
def merge(
    base: Path,
    adapter: Path,
    dst: Path,
    target_format: str | None,
    alpha: float | None,
    **options: Any,
) -> None:
    """Write the weights of BASE with an adapter merged into them.

    BASE and DST are of any format, and ADAPTER is a directory of PEFT or a Megatron checkpoint with
    adapters. The products of the adapter are added in float32, and each sum is rounded once to the
    dtype of the weight.
    """
    from mckpt.adapters import forms, merging

    if os.path.realpath(adapter) == os.path.realpath(dst):
        raise UsageError(f"DST is the adapter itself, {adapter}; give another directory")
    plain = shared.open_source(base, options)
    with forms.opened_adapter(adapter, plain, alpha, AdapterOptions.of(options)) as found:
        merged = merging.merge(plain, found)
        target = shared.target_like(merged, options, target_format)
        if outcome := convert.carry_out(merged, dst, target, options):
            outcome.show(options["as_json"])


@command()
@click.argument("path", type=PATH)
@shared.adapters_source_options
@json_option
def inspect(path: Path, as_json: bool, alpha: float | None, **options: Any) -> None:
    """Print the parts of an adapter, or of a checkpoint of them."""
    from mckpt.adapters import peft
    from mckpt.adapters.checkpoint import of_megatron, show
    from mckpt.formats import places

    place = places.local(path)
    if place.is_dir() and not peft.is_peft(place):
        source, names = of_megatron(place, shared.source_options(options), alpha)
        shown = show(source, names)
        if as_json:
            echo(json.dumps(shown))
            return
        beside = "beside the weights of the base" if shown["base"] else "without the base"
        echo(
            f"{path}: {shown['kind']} of {shown['program']}, {beside}; rank {shown['rank']}, alpha"
            f" {shown['alpha']:g}, {', '.join(shown['dtype'])}, {shown['parallel']}"
        )
        for weight, count in shown["weights"].items():
            echo(f"  {count:>5}  {weight}")
        return
    found = peft.open_adapter(path)
    shown = found.show()
    if as_json:
        echo(json.dumps(shown))
        return
    echo(
        f"{path}: LoRA of PEFT, for {shown['base'] or 'a base without a name'};"
        f" {len(shown['modules'])} modules, {shown['parameters']:,} parameters"
    )
    for kind in shown["kinds"]:
        echo(
            f"  {kind['modules']:>5}  {kind['name']}: rank {kind['rank']}"
            + f" in {ADAPTER[0]} and {kind['stored_rank']} in the tensors"
            * (kind["stored_rank"] != kind["rank"])
            + f", scale {kind['scale']:g}, {kind['dtype']}"
        )
    for name in shown["replaced"]:
        echo(f"  replaces {name}")


@command("to-megatron")
@click.argument("adapter", type=PATH)
@click.argument("base", type=PATH)
@shared.destination_argument
@shared.of_adapter("how")
@shared.new_checkpoint_options
@shared.dialect_option(otherwise="that of the base, or of its family, else gpt")
@shared.of_source("like vocab_size")
@shared.of_adapter("expert_a expert_b")
@shared.megatron_target_options
@shared.family_options
@shared.conversion_options
def to_megatron(
    adapter: Path, base: Path, dst: Path, target_format: str, how: str | None, **options: Any
) -> None:
    """Write an adapter of PEFT as a program for Megatron saves it.

    BASE describes the model: a Hugging Face directory, or a Megatron checkpoint. Of its weights
    only the headers are read. DST is a save directory with the adapter alone.
    """
    from mckpt.adapters import forms, peft
    from mckpt.adapters.checkpoint import of_peft
    from mckpt.geometry.parallel import Parallel

    described = shared.open_source(base, options)
    source = of_peft(peft.open_adapter(adapter, AdapterOptions.of(options)), described)
    parallel = Parallel().with_(**shared.parallel_sizes(options))
    target = shared.make_target(options, target_format, parallel)
    form = partial(forms.form_adapters, how=how)
    if outcome := convert.carry_out(source, dst, target, options, form):
        outcome.show(options["as_json"])


@command("to-hf")
@shared.source_argument
@shared.destination_argument
@shared.adapters_source_options
@shared.conversion_options
def to_hf(src: Path, dst: Path, alpha: float | None, **options: Any) -> None:
    """Write adapters of Megatron as a directory of PEFT."""
    from mckpt.adapters import forms
    from mckpt.adapters.checkpoint import of_megatron

    source, _ = of_megatron(src, shared.source_options(options), alpha)
    target = shared.make_target(options, formats.HUGGING_FACE, None)
    if outcome := convert.carry_out(source, dst, target, options, forms.form_peft):
        outcome.show(options["as_json"])


@command()
@shared.source_argument
@shared.destination_argument
@shared.adapters_source_options
@shared.layout_options("target-", otherwise="the source's")
@shared.megatron_option(
    "--target-format",
    type=shared.TRAINED,
    help="Format of the new checkpoint. Without it, the source's.",
)
@shared.of_target("no_optimizer")
@shared.megatron_target_options
@shared.conversion_options
def reshard(
    src: Path, dst: Path, alpha: float | None, target_format: str | None, **options: Any
) -> None:
    """Change the sizes or the format of adapters of Megatron.

    Weights beside the adapters are converted too. The optimizer's state of the adapters is kept in
    torch_dist.
    """
    from mckpt.adapters import forms
    from mckpt.adapters.checkpoint import of_megatron

    source, names = of_megatron(src, shared.source_options(options), alpha)
    parallel = source.parallel.with_(**shared.parallel_sizes(options))
    target_format = target_format or formats.kept_or_default(source.format)
    target = shared.make_target(options, target_format, parallel)
    form = partial(forms.form_adapters, how=names.how)
    if outcome := convert.carry_out(source, dst, target, options, form):
        outcome.show(options["as_json"])


for _command in (merge, inspect, to_megatron, to_hf, reshard):
    adapter.add_command(_command)
