"""The disk formats: which stored tensor holds which box, and the files of a new checkpoint."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mckpt.errors import UsageError

if TYPE_CHECKING:
    from mckpt.formats.base import Format


class Listed(NamedTuple):
    """Where a format's `FORMAT` is. A module is imported when its format is used."""

    module: str
    megatron: bool


# In the order in which a directory is asked which of them it is.
FORMATS: dict[str, Listed] = {
    "hf": Listed("mckpt.formats.hf", megatron=False),
    "torch_dist": Listed("mckpt.formats.megatron.torch_dist", megatron=True),
    "torch": Listed("mckpt.formats.megatron.torch", megatron=True),
}
HUGGING_FACE = "hf"  # what is written where a Hugging Face directory is asked for
MEGATRON = "torch_dist"  # the same of a Megatron checkpoint


def get(name: str) -> Format:
    """The format of that name. UsageError names those that are known."""
    if name not in FORMATS:
        raise UsageError(f"no format {name!r}; known: {', '.join(FORMATS)}")
    return _load(FORMATS[name].module)


def all_of(megatron: bool) -> Iterator[Format]:
    """The formats of Megatron checkpoints, or those of Hugging Face directories."""
    return (get(name) for name, listed in FORMATS.items() if listed.megatron == megatron)


def names(megatron: bool) -> list[str]:
    """The same by name, without an import."""
    return [name for name, listed in FORMATS.items() if listed.megatron == megatron]


def detect(folder: Path, megatron: bool) -> Format | None:
    """The format of the checkpoint in a directory; None if there is none that mckpt knows."""
    return next((format for format in all_of(megatron) if format.detect(folder)), None)


@functools.cache
def _load(module: str) -> Format:
    found: Format = importlib.import_module(module).FORMAT
    return found
