"""The keywords of the Python API, for type checkers and help(): the options of the tables in
`options`, with which a test compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from mckpt.geometry.parallel import Parallel
from mckpt.options import TABLES, Option, PlaceOptions, SizeOptions, TargetOptions, explained

if TYPE_CHECKING:
    from threading import Event

    from mckpt.progress import OnProgress

F = TypeVar("F", bound=Callable[..., Any])


class ModelSizes(TypedDict, total=False):
    """The parallel sizes of a Megatron model."""

    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int


class Sizes(ModelSizes, total=False):
    """The parallel layout of a Megatron target; `Options` explains its keywords."""

    first_stage_layers: int
    last_stage_layers: int
    account_for_embedding: bool
    account_for_loss: bool
    layout: str
    parallel: Parallel


class MegatronOptions(Sizes, total=False):
    """The options of a conversion between Megatron checkpoints; `Options` explains them."""

    format: Literal["torch_dist", "mfsdp_v2", "torch_dcp", "fsdp_dtensor", "torch", "hf"]
    dtype: Literal["bf16", "fp16", "fp32"]
    dialect: str
    transformer_impl: Literal["transformer_engine", "local"]
    grouped_experts: bool
    divisible_by: int
    towers: Literal["beside", "bridge", "swift"]
    layer_keys: Literal["stacked", "per_layer"]
    common_as_object: bool
    megatron_version: str
    run_config: bool
    no_optimizer: bool
    keep_padding: bool
    allow_inexact: Iterable[str]
    overwrite: bool
    update_tracker: bool


class Options(MegatronOptions, total=False):
    """The keywords of a conversion. A function may take some of them only, and its signature lists
    those.
    """

    target_iteration: int
    tokenizer: str | Path
    no_adapter: bool
    max_shard_size: int | str
    quantize: Literal["fp8", "mxfp8", "nvfp4"]


class MoveKeywords(TypedDict, total=False):
    """The options of moving bytes; `Plan.run` explains them."""

    max_memory: int | str
    threads: int
    checksum: Literal["crc32", "sha256", "none"]
    allow_overflow: bool
    progress: OnProgress | None  # called with how far the run is
    cancel: Event | None  # ends the run once it is set; the same call continues


class RunKeywords(MoveKeywords, total=False):
    """The options of a run; `Plan.run` explains them."""

    resume: bool
    check_replicas: bool
    engine: Literal["local", "ray"]


class VerifyKeywords(ModelSizes, total=False):
    """The keywords of `verify`."""

    level: Literal["bytes", "forward", "train"]
    cp: int
    device: Literal["auto", "cpu", "cuda"]
    transformer_impl: Literal["auto", "transformer_engine", "local"]
    sequences: int
    length: int
    tokens: str | Path
    adapter: str | Path
    image: bool
    alpha: float
    iteration: int
    vocab_size: int
    family: str
    mapping: str
    settings: Mapping[str, Any]
    no_mtp: bool
    steps: int
    timeout_s: float
    keep: str | Path
    tell: Callable[[str], None]


Options.__doc__ = f"{Options.__doc__}\n{explained(SizeOptions, TargetOptions, PlaceOptions)}"


def keywords(typed: Any, *tables: Any) -> Callable[[F], F]:
    """Returns a decorator that lets help() list the keywords of a TypedDict with their defaults,
    and that raises TypeError for any others.

    tables: have the defaults; those of a conversion if none is given.
    """
    known: dict[str, Any] = {}
    for table in tables or TABLES:
        known |= zip(table.__struct_fields__, table.__struct_defaults__, strict=True)
    known |= dict.fromkeys(("format", "parallel", "settings"))  # the source decides

    def decorate(function: F) -> F:
        own = signature(function)
        parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, kind in typed.__annotations__.items():
            annotation, default = getattr(kind, "__forward_arg__", kind), known.get(name)
            default = default.default if isinstance(default, Option) else default
            if default is None and not annotation.endswith("| None"):
                annotation = f"{annotation} | None"
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        listed = own.replace(parameters=parameters)

        @functools.wraps(function)
        def checked(*positional: Any, **keywords: Any) -> Any:
            listed.bind(*positional, **keywords)
            return function(*positional, **keywords)

        # mypy knows neither this attribute of functions nor that `checked` takes what F takes
        checked.__signature__ = listed  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate
