"""The form of the checkpoint that a conversion writes, and the options that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mckpt.formats import MEGATRON
from mckpt.geometry.parallel import Parallel

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
    no_adapter: bool = False  # leave out the adapter beside the weights of a Hugging Face source
    max_shard_size: int = MAX_SHARD_SIZE
    keep_padding: bool = False
    run_config: bool = False  # write run_config.yaml, from which Megatron-Bridge loads
    quantize: str | None = None  # the encoding of the weights of linear layers: fp8
    # The version of the megatron-core that will load the checkpoint, such as "0.16" or "0.19.2".
    # None: the newest version that mckpt knows.
    megatron_version: str | None = None

    @property
    def experts_option(self) -> str:
        """The flag that sets `grouped_experts` to the value that it has."""
        return "--grouped-experts" if self.grouped_experts else "--sequential-experts"
