"""The Python API. `docs/python-api.md` shows how to use it.

Keywords that contradict each other or have no effect raise UsageError, as options do on the command
line, and unknown ones TypeError. All other errors are classes of `mckpt.errors` too.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Union

from mckpt import checking, formats
from mckpt.checking import Checked
from mckpt.checkpoint import checkpoint
from mckpt.checkpoint.description import SourceOptions
from mckpt.conversion import planning, pushing
from mckpt.conversion.planning import FormOf, Plan
from mckpt.conversion.pushing import Pushed
from mckpt.conversion.target import TargetOptions
from mckpt.errors import UsageError
from mckpt.formats import foreign
from mckpt.geometry.parallel import Parallel
from mckpt.progress import OnProgress, watched
from mckpt.values.sizes import parse_size

if TYPE_CHECKING:
    from threading import Event

    from typing_extensions import Unpack

    from mckpt.checkpoint.comparison import Difference
    from mckpt.checkpoint.logical import LogicalTensor
    from mckpt.conversion.moving import RunSettings
    from mckpt.conversion.streaming import HfTensors


CHECKPOINT_NAMES = (
    "args",
    "dims",
    "format",
    "get",
    "hf_config",
    "hf_tensors",
    "is_megatron",
    "items",
    "keys",
    "left_behind",
    "open",
    "parallel",
    "path",
    "values",
)


class Checkpoint(checkpoint.Checkpoint):
    """A checkpoint of any format, as a mapping of its logical tensors, which are neither fused nor
    sharded.

    `ckpt["layers.3.attn.q.weight"][:8].numpy()` reads those rows and nothing else.
    """

    def hf_tensors(self) -> HfTensors:
        """Returns the tensors that the Hugging Face directory of this model has, by name: those
        that `convert` with format="hf" would write, byte for byte. Reads headers only.

        Raises the errors of that conversion, such as MappingError for a model that no family
        computes, and UsageError if several do: `open` then needs `family` or `like`.
        """
        from mckpt.conversion.streaming import HfTensors

        return HfTensors(self)

    def hf_config(self) -> dict[str, Any]:
        """Returns the config.json that the Hugging Face directory of this model has.

        Raises the errors of `hf_tensors`.
        """
        return self.hf_tensors().config

    def __getitem__(self, name: str) -> LogicalTensor:
        try:
            return super().__getitem__(name)
        except KeyError:
            first = next(iter(self), "")
            raise KeyError(
                f"{name} is not a tensor of this checkpoint. Its tensors have names such as"
                f" {first}, and list(checkpoint) has all; hf_tensors() has them by their Hugging"
                " Face names"
            ) from None

    def __dir__(self) -> list[str]:
        """Returns the names that docs/python-api.md describes, without those that mckpt itself
        uses.
        """
        special = (name for name in super().__dir__() if name.startswith("__"))
        return [*special, *CHECKPOINT_NAMES]


Source = Union[str, Path, checkpoint.Checkpoint]  # noqa: UP007
F = TypeVar("F", bound=Callable[..., Any])


class Sizes(TypedDict, total=False):
    """The parallel layout of a Megatron target; `Options` explains its keywords."""

    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    first_stage_layers: int
    last_stage_layers: int
    account_for_embedding: bool
    account_for_loss: bool
    layout: str
    parallel: Parallel


class MegatronOptions(Sizes, total=False):
    """The options of a conversion between Megatron checkpoints; `Options` explains them."""

    format: Literal["torch_dist", "torch", "hf"]
    dtype: Literal["bf16", "fp16", "fp32"]
    dialect: str
    transformer_impl: Literal["transformer_engine", "local"]
    grouped_experts: bool
    divisible_by: int
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

    format: of the new checkpoint: torch_dist or torch of Megatron, or hf.
    dtype: bf16, fp16 or fp32, to which every tensor is cast; without it each keeps its own.
    overwrite: replaces a checkpoint in `dst` when the new one is complete.
    allow_inexact: differences to accept, by the names that errors print.
    keep_padding: keeps all rows of the padded vocabulary.
    no_adapter: leaves out the adapter beside the weights of a Hugging Face source.

    Parallel sizes of a Megatron target. Without them they are those of the source; from Hugging
    Face they are 1:

    tp, pp, vpp, ep: tensor-, pipeline-, virtual pipeline- and expert-parallel size.
    etp: tensor-parallel size of the experts; without it, as tp.
    first_stage_layers, last_stage_layers, account_for_embedding, account_for_loss, layout: uneven
        pipelines, as Megatron's flags describe them.
    parallel: all of these at once, as a mckpt.Parallel, such as that of another checkpoint.

    Of a Megatron target:

    dialect: gpt or hybrid: the model of Megatron-Core whose names are written.
    transformer_impl: transformer_engine or local: the layer spec whose names are written.
    grouped_experts: True stores experts as --moe-grouped-gemm does, False one module for each.
    divisible_by: pads the vocabulary to a multiple of this number times tp.
    layer_keys: stacked has one key for all layers, per_layer one for each.
    common_as_object: stores args and iteration inside the checkpoint, as megatron-core 0.19 does.
    megatron_version: of the megatron-core that will load it, such as "0.19".
    run_config: writes run_config.yaml, from which Megatron-Bridge loads.
    no_optimizer: writes the weights only.
    target_iteration: writes iter_N instead of release.
    update_tracker: makes the tracker file name the new checkpoint in any case.

    Of a Hugging Face directory:

    tokenizer: the directory of the tokenizer and other side files.
    max_shard_size: bytes of the largest safetensors file, or text such as "2GB".
    quantize: fp8, mxfp8 or nvfp4: quantises the weights of linear layers.
    """

    target_iteration: int
    tokenizer: str | Path
    no_adapter: bool
    max_shard_size: int | str
    quantize: Literal["fp8", "mxfp8", "nvfp4"]


class MoveOptions(TypedDict, total=False):
    """The options of moving bytes; `Plan.run` explains them."""

    max_memory: int | str
    threads: int
    checksum: Literal["crc32", "sha256", "none"]
    allow_overflow: bool
    progress: OnProgress | None  # called with how far the run is
    cancel: Event | None  # ends the run once it is set; the same call continues


class RunOptions(MoveOptions, total=False):
    """The options of a run; `Plan.run` explains them."""

    resume: bool
    check_replicas: bool
    engine: Literal["local", "ray"]


class _Conversion(Options, RunOptions, total=False):
    """The options of a conversion and of its run."""


class _Write(Options, MoveOptions, total=False):
    """The options of a conversion whose source is a stream."""


class _Reshard(MegatronOptions, RunOptions, total=False):
    """The options of a conversion between Megatron checkpoints and of its run."""


_SIZES = tuple(name for name in Sizes.__annotations__ if name != "parallel")
_DESTINATION = ("overwrite", "update_tracker")
_TARGET = {field.name: field.default for field in fields(TargetOptions)}
# the keywords with a default of their own; the default of the others depends on the source
_DEFAULTS = {
    **{name: default for name, default in _TARGET.items() if default is not MISSING},
    **{name: p.default for name, p in inspect.signature(Plan.run).parameters.items()},
    **dict.fromkeys(_DESTINATION, False),
    "format": None,
}


def _lists(options: Any) -> Callable[[F], F]:
    """Returns a decorator that lets help() list the keywords of a TypedDict with their defaults,
    and that raises TypeError for any others.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, kind in options.__annotations__.items():
            annotation, default = getattr(kind, "__forward_arg__", kind), _DEFAULTS.get(name)
            if default is None and not annotation.endswith("| None"):
                annotation = f"{annotation} | None"
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(name, keyword, default=default, annotation=annotation)
            )
        signature = own.replace(parameters=parameters)

        @functools.wraps(function)
        def checked(*positional: Any, **keywords: Any) -> Any:
            signature.bind(*positional, **keywords)
            return function(*positional, **keywords)

        # mypy knows neither this attribute of functions nor that `checked` takes what F takes
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def open(
    path: str | Path,
    *,
    iteration: int | None = None,
    like: str | Path | None = None,
    family: str | None = None,
    mapping: str | Path | None = None,
    vocab_size: int | None = None,
    settings: Mapping[str, Any] | None = None,
    adapter: str | Path | None = None,
    expert_a: Literal["input", "output"] | None = None,
    expert_b: Literal["rank_major", "grouped_by_expert"] | None = None,
    no_mtp: bool = False,
) -> Checkpoint:
    """Opens a checkpoint of any format. Reads headers only.

    path: a directory, a name on the Hugging Face Hub such as "org/name@revision", or the URL of a
        directory in an object store.
    iteration: of a Megatron save directory; without it, the one that the tracker file names.
    like: a Hugging Face directory of the same model, whose config.json describes it.
    family: the model's family, if neither config.json nor mckpt.json determines it.
    mapping: a family file (YAML) of your own.
    vocab_size: rows of the embedding without padding.
    settings: dims that replace those of the checkpoint, such as {"tied": False}.
    adapter: the directory of an adapter (LoRA) of PEFT, which is merged into the weights while they
        are read.
    expert_a, expert_b: how the factors of experts in one parameter are read (docs/adapters.md).
    no_mtp: leaves out the layers of multi-token prediction.

    Raises SourceError if the directory is missing, damaged or no checkpoint.
    """
    file = None if mapping is None else str(mapping)
    described = SourceOptions(like, family, file, vocab_size, settings or {}, iteration, no_mtp)
    opened = Checkpoint.open(path, described)
    if adapter is None:
        return opened
    from mckpt.adapters import merging, peft

    return merging.merge(opened, peft.open_adapter(adapter, peft.Experts(expert_a, expert_b)))


@_lists(Options)
def plan(src: Source, dst: str | Path, **options: Unpack[Options]) -> Plan:
    """Returns the plan that converts `src` to `dst`, proved from headers. Writes nothing.

    `help(mckpt.Options)` explains the keywords. Without `format`, a Hugging Face source becomes
    torch_dist. A Megatron source keeps its format if a parallel size or `dialect` is given, and
    becomes a Hugging Face directory otherwise.

    Raises UsageError for keywords that contradict each other or have no effect, SourceError for a
    damaged source, MappingError for a model that mckpt does not know or that the target cannot
    compute, CoverError if the proof fails, and DestinationError if `dst` is occupied.
    """
    source = _opened(src)
    return planning.make_plan(source, dst, _target(source, options), **_place(options))


@_lists(_Conversion)
def convert(
    src: Source,
    dst: str | Path,
    **options: Unpack[_Conversion],
) -> dict[str, Any]:
    """Converts `src` to `dst`, and returns the content of mckpt.json.

    The keywords are those of `plan` and of `Plan.run`. If `dst` holds the same output already, the
    call returns at once. If an earlier call was interrupted, this one continues it.
    `progress` is called with how far the run is. Setting `cancel` ends the run; the same call then
    continues it.

    Raises the errors of `plan` and of `Plan.run`, and Cancelled.
    """
    source = _opened(src)
    return _write(source, dst, _target(source, options), options)


@_lists(_Write)
def write(
    dst: str | Path,
    config: Mapping[str, Any] | str | Path,
    tensors: Iterable[tuple[str, Any]],
    *,
    family: str | None = None,
    mapping: str | Path | None = None,
    vocab_size: int | None = None,
    settings: Mapping[str, Any] | None = None,
    no_mtp: bool = False,
    dtypes: Mapping[str, str] | None = None,
    **options: Unpack[_Write],
) -> dict[str, Any]:
    """Writes a checkpoint of any format from a stream of Hugging Face tensors, and returns the
    content of mckpt.json.

    The plan is made and proved from `config` before the second tensor is taken. Each tensor is
    taken once and moved to its places, so the memory holds `max_memory` bytes and one tensor. If a
    tensor is missing, unknown, repeated or of another shape or dtype, nothing is published.

    config: the content of config.json, or a directory or Hub name whose config.json and tokenizer
        describe the model.
    tensors: pairs of a name and an array, in any order: arrays of numpy, tensors of torch, or those
        of a checkpoint.
    family, mapping, vocab_size, settings, no_mtp: as for `open`.
    dtypes: dtypes of tensors, by name, in which * stands for any text. The others have the dtype of
        the config, or else of the first tensor.

    The other keywords are those of `plan` and of `Plan.run`. The default format is torch_dist.
    Raises the errors of `convert`, and SourceError for the tensors.
    """
    from mckpt.conversion import streaming

    streaming.refuse_url(dst)
    run = _run_settings(options)
    file = None if mapping is None else str(mapping)
    described = SourceOptions(None, family, file, vocab_size, settings or {}, no_mtp=no_mtp)
    with streaming.opened(config, tensors, described, dtypes or {}) as (source, stream):
        target, place = _target(source, options), _place(options)
        form = functools.partial(planning.form_of_weights, same_format=True)
        planned = planning.make_plan(source, dst, target, form, **place)
        return streaming.run(planned, stream, run)


@_lists(_Reshard)
def reshard(
    src: Source,
    dst: str | Path,
    **options: Unpack[_Reshard],
) -> dict[str, Any]:
    """Changes the parallel sizes, the format or the dialect of a Megatron checkpoint.

    What is not given stays as it is. Otherwise as `convert`.
    """
    source = _opened(src)
    if not source.is_megatron:
        raise UsageError(f"{source.path}: is a Hugging Face directory; `convert` converts it")
    given = {name: value for name, value in options.items() if value is not None}
    kept = {"format": formats.kept_or_default(source.format), **given}
    if not formats.get(str(kept["format"])).megatron:
        raise UsageError(f"format {kept['format']!r}: is not one of Megatron; `convert` writes it")
    return _write(source, dst, _target(source, kept), options)


@_lists(RunOptions)
def repair(
    src: Source,
    dst: str | Path,
    **options: Unpack[RunOptions],
) -> dict[str, Any] | None:
    """Writes a training checkpoint again, as torch_dist that loads at any parallel sizes.

    Returns None, and writes nothing, if `src` is such a checkpoint already. Otherwise as `convert`.
    """
    source = _opened(src)
    target = planning.portable_target(source, TargetOptions())
    return None if target is None else _write(source, dst, target, options)


@_lists(_Conversion)
def adapter_to_megatron(
    adapter: str | Path,
    base: Source,
    dst: str | Path,
    *,
    how: Literal["fused", "block", "canonical", "swift", "swift-block"] | None = None,
    expert_a: Literal["input", "output"] | None = None,
    expert_b: Literal["rank_major", "grouped_by_expert"] | None = None,
    **options: Unpack[_Conversion],
) -> dict[str, Any]:
    """Writes an adapter (LoRA) of PEFT as Megatron-Bridge or ms-swift saves its own, and returns
    the content of mckpt.json.

    base: describes the model; of its weights only the headers are read.
    how: how linears that pack several weights are adapted (docs/adapters.md); None: fused, or
        canonical if only that can hold the factors.
    expert_a, expert_b: how the factors of experts in one parameter are read.

    The other keywords are those of `convert`. Raises SourceError for an adapter that does not fit
    the base, UsageError for one that the adapters of Megatron-Bridge or ms-swift cannot express,
    and the errors of `convert`.
    """
    from mckpt.adapters import forms, peft
    from mckpt.adapters.checkpoint import of_peft

    described = _opened(base)
    source = of_peft(peft.open_adapter(adapter, peft.Experts(expert_a, expert_b)), described)
    target = _target(described, {"format": formats.MEGATRON, **options})
    form = functools.partial(forms.form_adapters, how=how)
    return _write(source, dst, target, options, form)


@_lists(RunOptions)
def adapter_to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    alpha: float | None = None,
    like: str | Path | None = None,
    iteration: int | None = None,
    overwrite: bool = False,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Writes the adapters of a Megatron checkpoint as a directory of PEFT, and returns the content
    of mckpt.json.

    alpha: that of the adapters, if neither run_config.yaml nor mckpt.json states it. like,
    iteration: as for `open`. The other keywords are those of `Plan.run`.

    Raises SourceError for a checkpoint without adapters or with incomplete ones, and UsageError if
    their alpha or the names of the model's weights are not known.
    """
    from mckpt.adapters import forms
    from mckpt.adapters.checkpoint import of_megatron

    described = SourceOptions(like=like, iteration=iteration)
    source, _ = of_megatron(src, described, alpha)
    target = TargetOptions(format=formats.HUGGING_FACE)
    given = {**options, "overwrite": overwrite}
    return _write(source, dst, target, given, forms.form_peft)


def diff(
    a: Source,
    b: Source,
    *,
    atol: float | None = None,
    no_optimizer: bool = False,
    allow_overflow: bool = False,
    progress: OnProgress | None = None,
    cancel: Event | None = None,
) -> Difference:
    """Compares two checkpoints of any formats and sizes, tensor by tensor.

    The result is false if they are the same. If both have the state of an optimizer, that is
    compared as well, unless `no_optimizer`. The factors of adapters in Megatron checkpoints are
    among the tensors.

    atol: the largest difference of two values that count as equal; None compares every bit.
    allow_overflow: compares values that large scales of quantised weights make infinite.
    """
    from mckpt.checkpoint import comparison

    if atol is not None and (type(atol) not in (int, float) or not 0 <= atol < math.inf):
        raise UsageError(f"--atol {atol!r} must be a finite number, at least 0")
    for name, value in (("no_optimizer", no_optimizer), ("allow_overflow", allow_overflow)):
        if type(value) is not bool:
            raise UsageError(f"{name} is {value!r}, and must be True or False")
    left, right = with_factors(a), with_factors(b)
    left, right = left.named_as(right), right.named_as(left)
    both = left.is_megatron and right.is_megatron and not no_optimizer
    if both and left.optimizer and right.optimizer:
        left, right = left.with_optimizer(), right.with_optimizer()
    left, right = (replace(side, allow_overflow=allow_overflow) for side in (left, right))
    difference = comparison.diff(left, right, atol, watched(progress, cancel))
    difference.replicas = comparison.copies_apart((left, right), cancel)
    scales = [getattr(side, "scale", math.nan) for side in (left, right)]
    if not any(map(math.isnan, scales)) and scales[0] != scales[1]:
        left_scale, right_scale = (f"{scale:g}" for scale in scales)
        changed = comparison.Changed("adapters", "alpha / rank", left_scale, right_scale)
        difference.changed.append(changed)
    return difference


def check(
    source: Source,
    *,
    threads: int = 0,
    progress: OnProgress | None = None,
    cancel: Event | None = None,
) -> Checked:
    """Reads a whole checkpoint, of any program, and returns what is wrong with it.

    threads: 0 means one per core.
    """
    if type(threads) is not int or threads < 0:
        raise UsageError(f"threads is {threads!r}, and must be a whole number from 0 on")
    return checking.check(with_factors(source), threads, watched(progress, cancel))


def push(
    directory: str | Path,
    name: str,
    *,
    revision: str | None = None,
    private: bool = False,
    message: str | None = None,
    dry_run: bool = False,
    tell: Callable[[Pushed], None] = lambda planned: None,
) -> Pushed:
    """Uploads a Hugging Face directory to the Hugging Face Hub, in one commit, after it has checked
    that the directory is complete.

    name: as "org/name". revision: a branch, in which {iteration} stands for the iteration that the
    export was made of. private: of a repository that is created. dry_run: only returns what would
    be uploaded. tell: called with that before the upload.
    """
    for word, value in (("revision", revision), ("message", message)):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{word} is {value!r}, and must be a text")
    return pushing.push(Path(directory), name, revision, private, message, dry_run, tell)


# -------------------------------------------------------------------------- keywords -> dataclasses


def _opened(source: Source) -> checkpoint.Checkpoint:
    return source if isinstance(source, checkpoint.Checkpoint) else Checkpoint.open(source)


def with_factors(source: Source) -> checkpoint.Checkpoint:
    """Returns a checkpoint; the factors of adapters that it has are among its tensors."""
    found = _opened(source)
    if not foreign.has_adapter(found.opened.keys()):
        return found
    from mckpt.adapters.checkpoint import with_factors

    return with_factors(found)


def _target(source: checkpoint.Checkpoint, options: Mapping[str, Any]) -> TargetOptions:
    """Returns the target that the keywords describe."""
    given = {name: value for name, value in options.items() if value is not None}
    sizes = {name: given[name] for name in _SIZES if name in given}
    parallel = given.get("parallel")
    sized = [*sizes, *(["parallel"] if parallel else [])]
    format = given.get("format")
    if format is None:
        format = planning.default_format(source, kept=bool(sized) or "dialect" in given)
    if sized and not formats.get(format).megatron:
        raise UsageError(
            f"{', '.join(sized)}: a Hugging Face directory has no parallel sizes; leave them out"
        )
    if "divisible_by" in given and not formats.get(format).megatron:  # the option has a default
        raise UsageError("divisible_by: a Hugging Face directory pads no vocabulary; leave it out")
    if parallel is not None and not isinstance(parallel, Parallel):
        raise UsageError(f"parallel is {parallel!r}, and must be a mckpt.Parallel")
    own = {name: given[name] for name in _TARGET if name in given}
    if "max_shard_size" in own:
        own["max_shard_size"] = parse_size(own["max_shard_size"], "--max-shard-size")
    return TargetOptions(
        **{
            **own,
            "format": format,
            "parallel": (parallel or source.parallel).with_(**sizes),
        }
    )


def _place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that concern the destination."""
    given = {name: options.get(name, False) for name in _DESTINATION}
    for name, value in given.items():
        if type(value) is not bool:
            raise UsageError(f"{name} is {value!r}, and must be True or False")
    return given


def _write(
    source: checkpoint.Checkpoint,
    dst: str | Path,
    target: TargetOptions,
    options: Mapping[str, Any],
    form_of: FormOf | None = None,
) -> dict[str, Any]:
    """Plans a conversion and runs it, unless its output is there already."""
    _run_settings(options)  # refuses wrong values before the plan is made
    planned, manifest = planning.plan_or_find(
        source, dst, target, form_of=form_of, **_place(options)
    )
    return manifest or planned.run(**_run_options(options))


def _run_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that concern the run."""
    return {n: options[n] for n in RunOptions.__annotations__ if options.get(n) is not None}


def _run_settings(options: Mapping[str, Any]) -> RunSettings:
    """Returns the settings of the run that the keywords describe."""
    from mckpt.conversion.moving import RunSettings

    run = _run_options(options)
    progress = watched(run.pop("progress", None), run.pop("cancel", None))
    return RunSettings.of(**run, progress=progress)
