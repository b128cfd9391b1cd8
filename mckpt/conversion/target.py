"""The form of the checkpoint that a conversion writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from mckpt import formats
from mckpt.errors import UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.values import dtypes

# In bytes. Two writers of one inode wait for each other, so a small model too should have several
# files, for several threads.
MAX_SHARD_SIZE = 2 * 10**9

# the values that a field may have beside None
_CHOICES = {
    "transformer_impl": ("transformer_engine", "local"),
    "layer_keys": ("stacked", "per_layer"),
    "quantize": ("fp8", "mxfp8", "nvfp4"),
}


@dataclass(frozen=True)
class TargetOptions:
    """The form of the new checkpoint: its format, and the options of its contents.

    Raises UsageError for a value that a field cannot have. Which fields a conversion takes depends
    on its source and format: `refusals.refuse_options` decides.
    """

    format: str = formats.MEGATRON
    parallel: Parallel = field(default_factory=Parallel)
    dtype: str | None = None  # None: each tensor keeps its dtype
    transformer_impl: str | None = None
    grouped_experts: bool | None = None
    divisible_by: int | None = None  # None: the dialect's default, which is Megatron's
    dialect: str | None = None  # None: the dialect of the source or of its family, else the default
    # Only for formats with global keys: stacked or per_layer. None: the model's args decide.
    layer_keys: str | None = None
    common_as_object: bool = False
    target_iteration: int | None = None
    allow_inexact: Iterable[str] = ()
    no_optimizer: bool = False
    tokenizer: str | Path | None = None
    no_adapter: bool = False  # leave out the adapter beside the weights of a Hugging Face source
    max_shard_size: int = MAX_SHARD_SIZE  # bytes
    keep_padding: bool = False
    run_config: bool = False  # write run_config.yaml, from which Megatron-Bridge loads
    quantize: str | None = None  # the form of the weights of linear layers: fp8, mxfp8 or nvfp4
    # The version of the megatron-core that will load the checkpoint, such as "0.16" or "0.19.2".
    # None: the newest version that mckpt knows.
    megatron_version: str | None = None

    def __post_init__(self) -> None:
        formats.get(self.format)
        floats = ("bfloat16", "float16", "float32")
        if self.dtype is not None and dtypes.parse(self.dtype) not in floats:
            raise UsageError(f"dtype is {self.dtype!r}, and must be bf16, fp16 or fp32")
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise UsageError(f"{name} is {value!r}, and must be {' or '.join(known)}")
        for name in ("divisible_by", "target_iteration", "max_shard_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}, and must be a whole number from 1 on")
        for field_ in fields(self):
            if field_.type == "bool" and type(getattr(self, field_.name)) is not bool:
                raise UsageError(
                    f"{field_.name} is {getattr(self, field_.name)!r}, and must be True or False"
                )
        if not isinstance(self.megatron_version, str | None):
            raise UsageError(
                f"megatron_version is {self.megatron_version!r}, and must be a text such as '0.19'"
            )
        if not isinstance(self.tokenizer, str | Path | None):
            raise UsageError(f"tokenizer is {self.tokenizer!r}, and must be a directory")
        listed = self.allow_inexact
        if isinstance(listed, str):
            raise UsageError(f"allow_inexact is the text {listed!r}, and must be a list of names")
        names = tuple(listed) if isinstance(listed, Iterable) else (listed,)
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"allow_inexact is {listed!r}, and must be a list of names")
        object.__setattr__(self, "allow_inexact", names)

    @property
    def experts_option(self) -> str:
        """Returns the flag that sets `grouped_experts` to its present value."""
        return "--grouped-experts" if self.grouped_experts else "--sequential-experts"
