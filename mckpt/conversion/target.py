"""The form of the checkpoint that a conversion writes, and the options that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mckpt import mapping
from mckpt.errors import UsageError
from mckpt.formats import MEGATRON
from mckpt.formats.base import Format
from mckpt.formats.hf_config import read_config
from mckpt.geometry.parallel import Parallel

if TYPE_CHECKING:
    from mckpt.checkpoint.checkpoint import Checkpoint

# In bytes. Two writers of one inode wait for each other, so a small model too should have several
# files, for several threads.
MAX_SHARD_SIZE = 2 * 10**9
# Called with (bytes done, bytes in all); by code that writes files, also with (files done, files in
# all).
Progress = Callable[..., None]


@dataclass(frozen=True)
class Target:
    """The form of the new checkpoint: its format, and the options of its contents."""

    format: str = MEGATRON
    parallel: Parallel = field(default_factory=Parallel)
    dtype: str | None = None  # None: each tensor keeps its dtype
    transformer_impl: str | None = None
    grouped_experts: bool | None = None
    divisible_by: int | None = None  # None: the dialect's default, which is Megatron's
    dialect: str | None = None  # None: the dialect of the source or of its family, else the default
    # Only for formats with global keys: stacked or per_layer. None: the model's args decide.
    layer_keys: str | None = None
    common_as_object: bool = False
    iteration: int | None = None
    allow_inexact: Sequence[str] = ()
    no_optimizer: bool = False
    tokenizer: str | Path | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    keep_padding: bool = False
    # The version of the megatron-core that will load the checkpoint, such as "0.16" or "0.19.2".
    # None: the newest version that mckpt knows.
    megatron_version: str | None = None


def refuse_options(target: Target, format: Format, source: Checkpoint) -> None:
    """Raises UsageError for an option that has no effect on this conversion."""
    for option, reason in _without_effect(target, format, source):
        raise UsageError(f"{option}: {reason}; leave it out")
    if target.allow_inexact:
        _refuse_unknown_names(target, source)


def _without_effect(
    target: Target, format: Format, source: Checkpoint
) -> Iterator[tuple[str, str]]:
    """Yields the options that are given and have no effect, each with the reason."""
    if target.layer_keys is not None and not format.layer_keys:
        yield "--layer-keys", f"the format {format} has no choice of layer keys"
    if target.common_as_object and not format.common_object:
        yield (
            "--common-state object",
            f"the format {format} cannot keep the common state as an object",
        )
    if target.no_optimizer and not source.is_megatron:
        yield (
            "--no-optimizer",
            f"{source.path} is a Hugging Face directory, which has no optimizer state",
        )
    if format.megatron:
        why = f"it is for a Hugging Face target, and the target has the Megatron format {format}"
        if target.tokenizer is not None:
            yield (
                f"--tokenizer {target.tokenizer}",
                f"{why}, which gets the tokenizer from the source",
            )
        if target.max_shard_size != MAX_SHARD_SIZE:
            yield "--max-shard-size", why
        if target.keep_padding:
            yield "--keep-padding", why
        return
    why = "it is for a Megatron target, and the target is a Hugging Face directory"
    if target.no_optimizer:
        yield "--no-optimizer", f"{why}, which never gets an optimizer state"
    if target.transformer_impl is not None:
        yield f"--transformer-impl {target.transformer_impl}", why
    if target.grouped_experts is not None:
        yield experts_option(target), why
    if target.megatron_version is not None:
        yield f"--megatron-version {target.megatron_version}", why


def experts_option(target: Target) -> str:
    """Returns the flag that sets `grouped_experts` to the value that it has."""
    return "--grouped-experts" if target.grouped_experts else "--sequential-experts"


def _refuse_unknown_names(target: Target, source: Checkpoint) -> None:
    """Raises UsageError if `allow_inexact` has a name that no error of a conversion prints.

    The names are dims, the keys of config.json that the family does not mention, and "config" for a
    config that cannot be written at all.
    """
    listed = sorted(
        {n for d in mapping.names("megatron") for n in mapping.load("megatron", d).warned}
    )
    keys = [] if source.is_megatron else source.mapping.unknown(read_config(source.path))
    known = {*mapping.hub().dims, *listed, *keys, *source.allowed, "config"}
    unknown = [name for name in target.allow_inexact if name not in known]
    if unknown:
        more = f"; the keys {', '.join(keys)} of config.json" if keys else ""
        raise UsageError(
            f"--allow-inexact {', '.join(unknown)}: no feature has this name; the names are"
            f" {', '.join([*listed, 'config'])}{more}; and the other dims of mappings/logical.yaml."
            " Give the name that the error of the conversion prints, or leave it out"
        )
