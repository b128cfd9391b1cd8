"""The disk formats. Each reads a checkpoint as boxes in stored tensors, and lays out the files of a
new one.
"""

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
    """The module with a format's `FORMAT`. It is imported when the format is used."""

    module: str
    megatron: bool
    written: bool = True  # False: the format is only read
    sharded: bool = False  # only runs that shard the model load it
    until: str = ""  # the last megatron-core that loads it; "": today's does
    # the only dialect of its checkpoints, which have whole tensors and no args; "": Megatron's
    dialect: str = ""

    @property
    def loads_anywhere(self) -> bool:
        """Returns whether mckpt writes it and today's megatron-core loads it into any model."""
        return self.written and not self.sharded


# In the order in which `detect` tries them.
FORMATS: dict[str, Listed] = {
    "hf": Listed("mckpt.formats.hf", megatron=False),
    "hf_sharded": Listed("mckpt.formats.hf_sharded", megatron=False, written=False),
    "torchtitan": Listed("mckpt.formats.megatron.torchtitan", megatron=True, written=False),
    "deepspeed": Listed("mckpt.formats.megatron.deepspeed", megatron=True, written=False),
    "torch_dist": Listed("mckpt.formats.megatron.torch_dist", megatron=True),
    "mfsdp_v2": Listed("mckpt.formats.megatron.mfsdp_v2", megatron=True, sharded=True),
    "torch_dcp": Listed("mckpt.formats.megatron.torch_dcp", megatron=True, sharded=True),
    "fsdp_dtensor": Listed("mckpt.formats.megatron.fsdp_dtensor", megatron=True, sharded=True),
    "zarr": Listed("mckpt.formats.megatron.zarr", megatron=True, written=False, until="0.15"),
    "torch": Listed("mckpt.formats.megatron.torch", megatron=True),
    "orbax": Listed("mckpt.formats.megatron.orbax", megatron=True, dialect="maxtext"),
}
HUGGING_FACE = "hf"  # the default format of Hugging Face targets
MEGATRON = "torch_dist"  # the default format of Megatron targets


def get(name: str) -> Format:
    """Returns the format of that name. Raises UsageError with the known names."""
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    return _load(FORMATS[name].module)


def all_of(megatron: bool) -> Iterator[Format]:
    """Yields the formats of Megatron checkpoints, or those of Hugging Face directories."""
    return (get(name) for name, listed in FORMATS.items() if listed.megatron == megatron)


def names(megatron: bool, written: bool = False) -> list[str]:
    """Returns the names of the formats that `all_of` yields, without importing them.

    written: leaves out those that are only read.
    """
    return [
        name
        for name, listed in FORMATS.items()
        if listed.megatron == megatron and (listed.written or not written)
    ]


def kept_or_default(name: str) -> str:
    """Returns the format in which a Megatron checkpoint of a format is written again, if the user
    names none: the same, if mckpt writes it and any run loads it.
    """
    listed = FORMATS.get(name)
    return name if listed and listed.megatron and listed.loads_anywhere else MEGATRON


def dialect_of(name: str) -> str:
    """Returns the only dialect that checkpoints of a format have; "" if they have Megatron's."""
    return FORMATS[name].dialect if name in FORMATS else ""  # a running model has a format too


def detect(folder: Path, megatron: bool) -> Format | None:
    """Returns the format of the checkpoint in a directory; None if mckpt knows none."""
    return next((format for format in all_of(megatron) if format.detect(folder)), None)


@functools.cache
def _load(module: str) -> Format:
    found: Format = importlib.import_module(module).FORMAT
    return found
