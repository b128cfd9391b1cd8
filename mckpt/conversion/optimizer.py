"""The optimizer's state in a conversion: which parts are kept or left behind, and the proof that
each state belongs to the weight whose name it has.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any, NamedTuple

from mckpt.checkpoint import masters
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.logical import Reader
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import Format, Names
from mckpt.formats.megatron.optimizer import (
    FULLY_RESHARDABLE,
    LAYER_WISE,
    LOW_BITS,
    MASTER,
    Scaler,
    has_moments,
    is_state,
    regrouped,
    rescaled,
    state,
    unkept,
)
from mckpt.options import TargetOptions

# keys of the common state that are kept with an optimizer
SCHEDULER = ("opt_param_scheduler", "lr_scheduler")
KEPT = ("optimizer", "distrib_optim.pt", LAYER_WISE, *SCHEDULER)
# random states belong to the ranks of the saved sizes
RANDOM = (
    *("rng_state", "rerun_state_machine", "rerun_state_machine_state"),
    *("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state"),
    "rng_tracker_states",
    *("dataloader", "train_state"),  # of torchtitan: where each rank stands in its data
    "extra_state",  # of verl, with the schedule of the learning rate
)

# Measured on 16 cores, 17.3 GB: 5.7 s with 4 threads, 6.2 s with 8, 6.5 s with 16, which wait for
# Python's lock. Each holds about 5 MiB.
THREADS = 4  # of the comparison of master copies


class Proof(NamedTuple):
    """The comparison of the master copies with the weights."""

    proved: int  # weights that equal their rounded master copy, bit for bit
    unproved: int  # weights that have states, and no master copy
    half: bool  # the master copies are in fp16, and equal the weights within its precision
    without: list[str]  # parameters that have no state at all


def keeps(source: Checkpoint, target: TargetOptions) -> bool:
    """Returns whether a conversion from Megatron to Megatron keeps the optimizer's state."""
    return source.is_megatron and not target.no_optimizer and source.optimizer is not None


def left_behind(source: Checkpoint, kept: bool) -> list[str]:
    """Returns the names of the states that a conversion leaves behind. kept: whether it takes the
    optimizer along.
    """
    if not kept:
        return source.left_behind()
    fields = source.files.common.fields if source.files.common else {}
    more = [f"optimizer.{name}" for name in unkept(fields.get("optimizer"))]
    return [name for name in source.left_behind() if name not in KEPT] + more


def refuse_others(source: Checkpoint, format: Format, target: TargetOptions) -> None:
    """Raises UsageError if the source holds states beside its weights, other than an optimizer that
    can be kept, unless the user gives --no-optimizer. Random states are always left behind.
    """
    if target.no_optimizer or not source.is_megatron:
        return
    if keeps(source, target) and not format.optimizer:
        raise UsageError(
            f"{source.path}: has the state of an optimizer, which mckpt does not write in the"
            f" format {format}; give --target-format torch_dist to keep it, or --no-optimizer to"
            " convert the weights alone"
        )
    if source.optimizer is not None and source.optimizer.lacking:
        raise UsageError(source.optimizer.lacking)
    known = (*RANDOM, *SCHEDULER, *(KEPT if keeps(source, target) else ()))
    left = [name for name in source.left_behind() if name not in known]
    if left:
        raise UsageError(
            f"{source.path}: holds more than weights, and mckpt cannot convert {', '.join(left)};"
            " give --no-optimizer to convert the weights and to leave the rest behind"
        )


def common_state(source: Checkpoint, format: Format) -> dict[str, Any]:
    """Returns the fields of the common state that belong to the optimizer of the target, without
    its param_groups.
    """
    optimizer, common = source.optimizer, source.files.common
    assert optimizer is not None and common is not None
    fields = {k: v for k, v in common.fields.items() if k in SCHEDULER}
    marks = dict(common.fields.get("content_metadata") or {})
    marks = {k: v for k, v in marks.items() if not k.startswith("distrib_optim_")}
    if optimizer.distributed and not format.fixed_sizes:
        marks["distrib_optim_sharding_type"] = FULLY_RESHARDABLE
        marks["distrib_optim_fully_reshardable_mem_efficient"] = False
    marks["chained_optim_avoid_prefix"] = True
    return {**fields, "content_metadata": marks}


def groups(
    source: Checkpoint, names: Names, format: Format, megatron: list[int]
) -> list[list[dict[str, Any]]]:
    """Returns the param_groups of each optimizer of a rank of the target.

    names, format: of the target. megatron: the version of megatron-core that it
    is written for.
    """
    assert source.optimizer is not None
    count, groups = _count(names, format, megatron), source.optimizer.groups
    if not state.is_muon(groups):
        return regrouped(groups, count)
    by_layers = bool((source.args or {}).get(state.BY_LAYERS))
    state.refuse_target(format.fixed_sizes, by_layers, megatron)
    return state.muon_groups(groups, names, count > 1, by_layers)


def scalers(source: Checkpoint, names: Names, format: Format, megatron: list[int]) -> list[Scaler]:
    """Returns the loss scaler of each optimizer of a rank of the target; [] if the source has no
    loss scaler.
    """
    assert source.optimizer is not None
    return rescaled(source.optimizer.scalers, _count(names, format, megatron))


def _count(names: Names, format: Format, megatron: list[int]) -> int:
    if format.one_optimizer:
        return 1
    registration = names.mapping.registration
    return registration.num_optimizers(names.parallel, names.dims["num_experts"], megatron)


def prove(source: Checkpoint, look: bool = True, share: slice = slice(None)) -> Proof:
    """Compares each master copy, rounded to the weight's dtype, with the weight. Those that the run
    kept in fp16 may differ by its rounding.

    source: a checkpoint with its optimizer. look: False only counts, without reading.
    share: the weights that are compared, if several processes share the work.

    Raises SourceError with all weights that differ: their states belong to other weights, or
    weights and optimizer are not of the same step.
    """
    stated, without = _stated(source)
    weights = [name for name in source if not is_state(name)]
    with_master = [name for name in weights if f"{name}@{MASTER}" in source]
    half = masters.in_half(source.args or {})
    if look:
        from concurrent.futures import ThreadPoolExecutor

        compare = partial(masters.apart, Reader(masters.as_stored(source.layout)), half=half)
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            apart = [text for text in pool.map(compare, with_master[share]) if text]
        args = source.args or {}
        if apart and args.get("use_precision_aware_optimizer") and args.get("bf16") and not half:
            raise UsageError.of(f"{source.path}: {LOW_BITS}:", apart)
        if apart:
            raise SourceError.of(
                f"{source.path}: the optimizer's master copies of {len(apart):,} of"
                f" {len(with_master):,} weights, rounded, are not the weights:",
                apart,
                "Weights and optimizer are not of one step, or the optimizer's state is not"
                " where Megatron puts it. Give --no-optimizer to convert the weights alone",
            )
    return Proof(len(with_master), len(stated) - len(with_master), half, without)


def _stated(source: Checkpoint) -> tuple[set[str], list[str]]:
    """Returns the weights that have states, and the parameters that have none: frozen ones.

    source: a checkpoint with its optimizer.
    """
    is_parameter = source.mapping.registration.is_parameter
    rules = [b.rule for b in source.names.bound if not is_parameter(b.rule.key)]
    buffers = {name for rule in rules for name in rule.of}
    stated = {name.partition("@")[0] for name in source if is_state(name)}
    without = [
        name
        for name in source
        if not (is_state(name) or name in stated or source.reader.template(name) in buffers)
    ]
    return stated, without


def refuse_frozen(source: Checkpoint, format: Format) -> None:
    """Raises UsageError if the source has parameters without states and the format has no place for
    the states of the others.

    source: a checkpoint with its optimizer. format: of the target.
    """
    stated, without = _stated(source)
    template = source.reader.template
    if not format.fixed_sizes:  # its tensors have the states of all layers, or of none
        trained = {template(name) for name in stated}
        without = [name for name in without if template(name) in trained]
    if not without:
        return
    why, cure = "of which it stores the states for all layers or for none", "Give"
    if format.fixed_sizes:
        why = "whose files have the states in an order, without names"
        cure = "Give --target-format torch_dist to keep the state, or"
    raise UsageError.of(
        f"{source.path}: weights that the run did not train have no state of the optimizer, which"
        f" mckpt does not write in the format {format}, {why}:",
        without,
        f"{cure} --no-optimizer to convert the weights alone",
    )


def refuse_new(source: Checkpoint, format: Format) -> None:
    """Raises UsageError for an optimizer that has made no step, unless Megatron loads it from the
    target: it has no moments, which Megatron requires of torch_dist and of a distributed optimizer.

    source: a checkpoint with its optimizer. format: of the target.
    """
    assert source.optimizer is not None
    groups = itertools.chain(*source.optimizer.groups)
    if source.optimizer.states != [MASTER] or not any(map(has_moments, groups)):
        return
    if source.optimizer.distributed or not format.fixed_sizes:
        cure = "" if source.optimizer.distributed else "--target-format torch to keep it, or "
        raise UsageError(
            f"{source.path}: its optimizer has made no step, so it has master copies and no"
            f" moments, and Megatron does not load such a state from {format}; give {cure}"
            "--no-optimizer: Megatron then makes the same master copies from the weights"
        )


def facts(source: Checkpoint, look: bool) -> dict[str, Any]:
    """Returns the manifest's entry on the optimizer that is kept, after `prove`."""
    optimizer, args = source.optimizer, source.args or {}
    assert optimizer is not None
    proof = prove(source, look)
    # with --loss-scale the scale is constant, and no loss scaler is saved
    unscaled = bool(args.get("fp16")) and not optimizer.scalers and not args.get("loss_scale")
    return {
        "stored_as": optimizer.form,
        "states": optimizer.states,
        # the scaler of a constant scale has no numbers
        **({"loss_scalers": optimizer.scalers} if any(optimizer.scalers) else {}),
        **({"no_loss_scaler": True} if unscaled else {}),
        **proof._asdict(),
    }
