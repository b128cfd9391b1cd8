"""The form of checkpoint that a conversion makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mckpt.formats import MEGATRON
from mckpt.geometry.parallel import Parallel

# bytes; so that a small model too has files for several threads: two writers of one inode wait for
# each other
MAX_SHARD_SIZE = 2 * 10**9
# (bytes done, bytes in all), and of what writes files (files done, files in all) too
Progress = Callable[..., None]


@dataclass(frozen=True)
class Target:
    """The form wanted. `parallel` and the fields after it are Megatron's."""

    format: str = MEGATRON
    parallel: Parallel = field(default_factory=Parallel)
    dtype: str | None = None  # None: each tensor keeps its own
    transformer_impl: str | None = None
    grouped_experts: bool | None = None
    divisible_by: int | None = None  # None: the dialect's default, which is Megatron's
    dialect: str | None = None  # None: the one of the source or of its family, else the default
    # of formats with global keys: stacked or per_layer; None: what the model's args imply
    layer_keys: str | None = None
    common_as_object: bool = False
    iteration: int | None = None
    allow_inexact: Sequence[str] = ()
    no_optimizer: bool = False
    tokenizer: str | Path | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    keep_padding: bool = False
    # of the megatron-core that will load it, such as "0.16" or "0.19.2"; None: the newest that
    # mckpt knows
    megatron_version: str | None = None
