"""The Python API. `docs/python-api.md` shows how to use it.

Keywords that contradict each other or have no effect raise UsageError, as options do on the command
line, and unknown ones TypeError. All other errors are classes of `mckpt.errors` too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from mckpt import checking, formats
from mckpt.checking import Checked
from mckpt.checkpoint import checkpoint
from mckpt.conversion import planning, pushing
from mckpt.conversion.planning import FormOf, Plan
from mckpt.conversion.pushing import Pushed
from mckpt.errors import UsageError
from mckpt.formats import foreign
from mckpt.geometry.parallel import Parallel as Parallel
from mckpt.keywords import MegatronOptions, MoveKeywords, Options, RunKeywords, keywords
from mckpt.options import (
    SIZES,
    AdapterOptions,
    AverageOptions,
    CompareOptions,
    DeltaOptions,
    PlaceOptions,
    PushOptions,
    SourceOptions,
    TargetOptions,
)
from mckpt.progress import OnProgress, watched

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


class _Conversion(Options, RunKeywords, total=False):
    """The options of a conversion and of its run."""


class _Write(Options, MoveKeywords, total=False):
    """The options of a conversion whose source is a stream."""


class _Reshard(MegatronOptions, RunKeywords, total=False):
    """The options of a conversion between Megatron checkpoints and of its run."""


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

    experts = AdapterOptions(expert_a=expert_a, expert_b=expert_b)
    return merging.merge(opened, peft.open_adapter(adapter, experts))


@keywords(Options)
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
    place = PlaceOptions.of(options).values()
    return planning.make_plan(source, dst, _target(source, options), **place)


@keywords(_Conversion)
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


@keywords(_Write)
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
    run = _settings(options)
    file = None if mapping is None else str(mapping)
    described = SourceOptions(None, family, file, vocab_size, settings or {}, no_mtp=no_mtp)
    with streaming.opened(config, tensors, described, dtypes or {}) as (source, stream):
        target, place = _target(source, options), PlaceOptions.of(options).values()
        form = functools.partial(planning.form_of_weights, same_format=True)
        planned = planning.make_plan(source, dst, target, form, **place)
        return streaming.run(planned, stream, run)


@keywords(_Reshard)
def reshard(
    src: Source,
    dst: str | Path,
    **options: Unpack[_Reshard],
) -> dict[str, Any]:
    """Changes the parallel sizes, the format or the dialect of a Megatron checkpoint.

    What is not given stays as it is. Otherwise as `convert`.
    """
    source = _opened(src).with_training()
    if not source.is_megatron:
        raise UsageError(f"{source.path}: is a Hugging Face directory; `convert` converts it")
    given = {name: value for name, value in options.items() if value is not None}
    kept = {"format": formats.kept_or_default(source.format), **given}
    if not formats.get(str(kept["format"])).megatron:
        raise UsageError(f"format {kept['format']!r}: is not one of Megatron; `convert` writes it")
    return _write(source, dst, _target(source, kept), options)


@keywords(_Conversion)
def merge(
    sources: Iterable[Source],
    dst: str | Path,
    *,
    weights: Iterable[float] | None = None,
    schedule: Literal["linear", "minus-sqrt"] | None = None,
    reverse: bool = False,
    normalize: bool = False,
    summed: Literal["weights", "masters", "states"] = "weights",
    method: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    arithmetic: Literal["float32", "mergekit"] = "float32",
    recipe: str | Path | None = None,
    base: int = 0,
    **options: Unpack[_Conversion],
) -> dict[str, Any]:
    """Writes the weighted sum of several checkpoints of one model, of any formats and sizes, or
    another merge of them, and returns the content of mckpt.json.

    weights: the coefficient of each; without it and `schedule` all have the same, with the sum 1.
    schedule, reverse: coefficients that stand for a decay of the learning rate; the oldest
        checkpoint comes first.
    normalize: divides the coefficients by their sum.
    summed: "masters" sums the fp32 master copies of an optimizer in the place of the weights, and
        "states" all of its states with them.
    method, parameters: a method of mergekit in the place of the sum, and its parameters. The first
        checkpoint is the base model, if the method has one; `weights` are those of the others.
    arithmetic: "mergekit" rounds as mergekit does, for the methods linear and task_arithmetic.
    recipe: a file of mergekit with the method, its parameters and the checkpoints, in the place of
        `sources`, which is empty.
    base: the number of the checkpoint whose format, args, config and tokenizer the result has.

    The other keywords are those of `convert`. Each element is computed in float32 by fused
    multiply-adds in the order of the checkpoints, and rounded once. The optimizer's state is left
    out without "states". Raises MappingError for models of other dims, SourceError for other
    tensors, UsageError for tensors that are quantised, and the errors of `convert`.
    """
    from mckpt.editing import averaging, methods, recipes

    given: dict[str, Any] = {"method": method, "parameters": parameters, "recipe": recipe}
    given |= {"weights": weights, "schedule": schedule, "reverse": reverse}
    given |= {"normalize": normalize, "summed": summed, "arithmetic": arithmetic}
    stated = AverageOptions.of(given)
    if recipe is not None:
        found = recipes.read(stated, list(sources))
        source = found.made(list(map(_opened, found.paths)), stated)
        if found.dtype and not options.get("dtype"):
            options["dtype"] = found.dtype
    else:
        source = methods.made(list(map(_opened, sources)), stated, base)
    target = _target(source, {**options, "format": options.get("format") or _kept(source, options)})
    return _write(source, dst, averaging.weights_alone(source, target), options)


@keywords(_Conversion)
def edit(
    src: Source,
    dst: str | Path,
    recipe: str | Path | Iterable[str | Mapping[str, Any]],
    **options: Unpack[_Conversion],
) -> dict[str, Any]:
    """Writes a checkpoint of another shape, and returns the content of mckpt.json.

    recipe: a YAML file with a list of edits (docs/surgery.md), or the edits, each as a text of YAML
        or as a dictionary.

    The other keywords are those of `convert`; the format is that of the source. The state of an
    optimizer follows its weights. Raises UsageError, with the line, for a recipe that cannot be
    done, and the errors of `convert`.
    """
    from mckpt.editing import edits, steps

    plain = _opened(src)
    if isinstance(recipe, (str, Path)):
        found = steps.read(Path(recipe), plain.dims)
    else:
        found = steps.read(None, plain.dims, recipe)
    source = edits.edited(plain, found)
    target = _target(source, {**options, "format": options.get("format") or _kept(source, options)})
    return _write(source, dst, target, options)


@keywords(RunKeywords)
def repair(
    src: Source,
    dst: str | Path,
    **options: Unpack[RunKeywords],
) -> dict[str, Any] | None:
    """Writes a training checkpoint again, as torch_dist that loads at any parallel sizes.

    Returns None, and writes nothing, if `src` is such a checkpoint already. Otherwise as `convert`.
    """
    source = _opened(src)
    target = planning.portable_target(source, TargetOptions())
    return None if target is None else _write(source, dst, target, options)


@keywords(_Conversion)
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
    stated = AdapterOptions(how, expert_a, expert_b)
    source = of_peft(peft.open_adapter(adapter, stated), described)
    target = _target(described, {"format": formats.MEGATRON, **options})
    form = functools.partial(forms.form_adapters, how=how)
    return _write(source, dst, target, options, form)


@keywords(RunKeywords)
def adapter_to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    alpha: float | None = None,
    like: str | Path | None = None,
    iteration: int | None = None,
    overwrite: bool = False,
    **options: Unpack[RunKeywords],
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


def delta(
    old: Source,
    new: Source,
    folder: str | Path,
    *,
    encoding: Literal["xor", "overwrite"] = "xor",
    digest: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128",
    **run: Any,
) -> dict[str, Any]:
    """Writes what changed between two checkpoints of any formats, as the next version in a
    directory of deltas (docs/deltas.md), and returns the content of its mckpt.json.

    run: max_memory, threads, resume, progress and cancel, as for `Plan.run`. Raises SourceError if
    they do not have the same tensors, or if `old` is not what the last version makes.
    """
    from mckpt.conversion import deltas

    how = DeltaOptions(encoding, digest)
    return deltas.make(_opened(old), _opened(new), Path(folder), how, _settings(run))


def apply_delta(
    base: Source,
    folder: str | Path,
    dst: str | Path,
    *,
    until: int | None = None,
    overwrite: bool = False,
    **run: Any,
) -> dict[str, Any]:
    """Writes the Hugging Face directory that a checkpoint becomes by the deltas in a directory, and
    returns the content of mckpt.json.

    until: the last version to apply. run: as for `delta`, and checksum. Raises SourceError for a
    delta that is damaged or does not build on the checkpoint.
    """
    from mckpt.conversion import deltas

    settings = _settings(run)
    return deltas.apply(_opened(base), Path(folder), Path(dst), until, settings, overwrite)


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

    CompareOptions(atol, no_optimizer, allow_overflow)  # refuses wrong values
    left, right = with_factors(a), with_factors(b)
    trained = left.with_training(), right.with_training()
    if not no_optimizer and all(side.is_megatron for side in trained):
        left, right = trained
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
    PushOptions(revision, private, message, dry_run)  # refuses wrong values
    return pushing.push(Path(directory), name, revision, private, message, dry_run, tell)


# ----------------------------------------------------------------------------- keywords -> tables


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
    sizes = {name: given[name] for name in SIZES if name in given}
    parallel = given.get("parallel")
    sized = [*sizes, *(["parallel"] if parallel else [])]
    format = given.get("format")
    if format is None:
        format = planning.default_format(source, kept=bool(sized) or "dialect" in given)
    if sized and not formats.get(format).megatron:
        raise UsageError(
            f"{', '.join(sized)}: a Hugging Face directory has no parallel sizes; leave them out"
        )
    if parallel is not None:
        TargetOptions(parallel=parallel)  # raises the error for another type
    parallel = (parallel or source.parallel).with_(**sizes)
    return TargetOptions.of(given, format=format, parallel=parallel)


def _kept(source: checkpoint.Checkpoint, options: Mapping[str, Any]) -> str:
    """Returns the format of a result that is like its source, unless sizes are given."""
    sized = any(options.get(name) for name in (*SIZES, "parallel"))
    if source.is_megatron or sized:
        return formats.kept_or_default(source.format)
    return formats.HUGGING_FACE


def _write(
    source: checkpoint.Checkpoint,
    dst: str | Path,
    target: TargetOptions,
    options: Mapping[str, Any],
    form_of: FormOf | None = None,
) -> dict[str, Any]:
    """Plans a conversion and runs it, unless its output is there already."""
    run = _settings(options)  # refuses wrong values before the plan is made
    place = PlaceOptions.of(options).values()
    planned, manifest = planning.plan_or_find(source, dst, target, form_of=form_of, **place)
    return manifest or planned.run_with(run)


def _settings(options: Mapping[str, Any]) -> RunSettings:
    """Returns the settings of the run that the keywords describe."""
    from mckpt.conversion.moving import RunSettings

    return RunSettings.of(options)
