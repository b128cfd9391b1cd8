"""Compares the fp32 master copies of an optimizer with the weights.

After each step Megatron rounds the master copies to the weights. So if they are equal bit for bit,
each state belongs to the weight whose name it has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.errors import CoverError, SourceError, UsageError
from mckpt.formats.base import Names
from mckpt.formats.carried import joined
from mckpt.formats.megatron.interface import OpenedMegatron
from mckpt.formats.megatron.optimizer import LAYER_WISE, MASTER, Optimizer, is_muon, is_state, kinds
from mckpt.formats.megatron.run_config import optimizer_name
from mckpt.geometry.box import Layout
from mckpt.lazy import numpy as np
from mckpt.values.dtypes import bfloat16_bits, itemsize, numpy_dtype

# the choices of dialects on which the order in a flat buffer depends
ORDERS = {
    "transformer_impl": ("transformer_engine", "local"),
    "experts": ("grouped", "sequential"),
    "mtp_inner": ("mtp_model_layer", "transformer_layer"),
}
# bytes of a weight that one thread compares at a time; with its temporary arrays it needs ten times
# as much memory
PROOF_BYTES = 512 << 10
# Master copies in fp16 have one scale for the shard of a weight, with which its largest element is
# 2**15. These are the largest differences from the weight: as a share of the weight, the roundings
# of the weight and of the copy to their dtypes (and 1% for the scale); as a share of the largest
# element, that of fp16's smallest numbers (2**-25 / 2**15, four times of it).
HALF_SHARE = {
    "bfloat16": 1.01 * (2**-8 + 2**-11),
    "float16": 1.01 * (2**-11 + 2**-11),
    "float32": 1.01 * 2**-11,
}
HALF_LEAST = 2.0**-38
# About 1 of 32 copies in fp16 (on an H100) rounds to another number in bf16 than the weight. If
# 1 of 4 does, and as many more as are probable in a small tensor, they are copies of other weights.
HALF_INEXACT, HALF_SPREAD = 0.25, 4.0


def read(opened: OpenedMegatron, names: Names, weights: Layout | None = None) -> Optimizer | None:
    """Returns the optimizer's state of a checkpoint, None if it has none.

    weights: the places of the parameters of `names`, if the checkpoint has other weights too.

    Raises SourceError if a part of the state is missing, and UsageError for the state of an
    optimizer that mckpt does not know.
    """
    stated = _stated(opened, names)
    kinds.refuse_others(stated.values(), opened.root)
    found = _placed(opened, names, weights)
    if found is None:
        return None
    named = (group["optimizer"] for own in found.groups for group in own if "optimizer" in group)
    kinds.refuse_others(named, opened.root)

    def held() -> Layout:
        return opened.layout(names) if weights is None else weights

    kinds.refuse_lost(found, names, stated, held, opened.root, opened.common.fields)
    return found


def _placed(opened: OpenedMegatron, names: Names, weights: Layout | None) -> Optimizer | None:
    """Returns the optimizer's state of a checkpoint, complete or not.

    Flat buffers have the parameters in an order that follows from choices which the keys of
    torch_dist do not show. If those of the args do not fit the weights, others are tried.
    """
    args, misfit = opened.common.args or {}, None
    try:
        first = opened.optimizer(names)
    except SourceError as e:
        if args:
            raise
        first, misfit = None, e
    if first is not None and args.get("optimizer") == "muon" and not is_muon(first.groups):
        raise UsageError(
            f"{opened.root}: has the state of Muon as megatron-core before 0.19 saved it, which"
            " mckpt does not read; give --no-optimizer to convert the weights alone"
        )
    if misfit is None and (first is None or first.portable):
        return first
    weights = opened.layout(names) if weights is None else weights
    half = in_half(args)
    if first is not None and fit(weights, first.layout, half):
        return first
    known = names.mapping.choices
    tried = {name: known.get(name, [None]) for name in ORDERS} if ORDERS.keys() & known else ORDERS
    for chosen in itertools.product(*tried.values()):
        choices = {**names.choices, **dict(zip(tried, chosen, strict=True))}
        with suppress(SourceError, CoverError):
            other = opened.optimizer(replace(names, choices=choices))
            if other is not None and fit(weights, other.layout, half):
                return other
            first = first or other
    if misfit is not None and first is None:
        raise misfit
    return first


def _stated(opened: OpenedMegatron, names: Names) -> dict[str, str]:
    """Returns the places where a checkpoint with the state of an optimizer names that optimizer,
    and the name.
    """
    if not {"optimizer", LAYER_WISE} & {*opened.beside(names.mapping)}:
        return {}
    found = {
        "args": (opened.common.args or {}).get("optimizer"),
        "run_config.yaml": optimizer_name(opened.root),
    }
    return {place: str(name) for place, name in found.items() if name}


def in_half(args: Mapping[str, Any]) -> bool:
    """Returns whether a run kept its master copies in fp16, by Megatron's args."""
    dtype = str(args.get("main_params_dtype")).rpartition(".")[2]
    return bool(args.get("use_precision_aware_optimizer")) and dtype == "float16"


def fit(weights: Layout, states: Layout, half: bool) -> bool:
    """Returns whether the first row of each weight is that of its master copy.

    half: the master copies were kept in fp16.
    """
    reader = Reader(as_stored(joined(weights, states)))
    names = [name for name in reader if not is_state(name) and f"{name}@{MASTER}" in reader]
    return all(apart(reader, name, half, 1) is None for name in names)


def as_stored(layout: Layout) -> Layout:
    """Returns a layout whose values are those in the files. Where these are shifted, a master copy
    and its weight need not round to the same number after the shift.
    """
    stored = [
        replace(s, pieces=tuple(p._replace(offset=0.0) for p in s.pieces))
        if any(pieces[0].offset for pieces in s.by_name().values())
        else s
        for s in layout.stored
    ]
    return replace(layout, stored=stored)


def apart(
    source: Mapping[str, LogicalTensor], name: str, half: bool, most: int | None = None
) -> str | None:
    """Returns how many elements of a weight differ from its rounded master copy; None if none.

    source: the tensors of a layout that is `as_stored`.
    half: the master copies were kept in fp16, so that they may differ by its rounding.
    most: compares that many rows only; None: all.
    """
    weight, master = source[name], source[f"{name}@{MASTER}"]
    share = HALF_SHARE.get(weight.dtype) if half else None
    least = HALF_LEAST * _largest(weight) if share else 0.0
    bits = f"u{itemsize(weight.dtype)}"
    rows = weight.shape[0] if most is None else min(most, weight.shape[0])
    step = max(1, PROOF_BYTES * weight.shape[0] // max(1, weight.nbytes))
    different = inexact = 0
    for at in range(0, rows, step):
        mine = weight[at : min(at + step, rows)].numpy().view(bits)
        theirs = master[at : min(at + step, rows)].numpy()
        # several times as fast as the cast, which holds Python's lock
        fast = weight.dtype == "bfloat16" and theirs.dtype == np.float32
        if fast and np.array_equal(bfloat16_bits(theirs.view("u4")), mine):
            continue
        with np.errstate(all="ignore"):
            other = theirs.astype(numpy_dtype(weight.dtype)).view(bits) != mine
            if share:
                inexact += int(other.sum())
                value = mine.view(numpy_dtype(weight.dtype)).astype("f8")
                other &= ~(np.abs(theirs - value) <= share * np.abs(value) + least)
        different += int(other.sum())
    num = rows * math.prod(weight.shape[1:])
    if weight.dtype == "bfloat16" and inexact > HALF_INEXACT * num + HALF_SPREAD * math.sqrt(num):
        different = max(different, inexact)
    if not different:
        return None
    return f"{name}: {different:,} of {math.prod(weight.shape):,} elements differ"


def _largest(weight: LogicalTensor) -> float:
    """Returns the largest absolute value of a weight, among those that are finite."""
    step = max(1, PROOF_BYTES * weight.shape[0] // max(1, weight.nbytes))
    parts = (weight[at : at + step].numpy() for at in range(0, weight.shape[0], step))
    finite = (np.nan_to_num(np.abs(part.astype("f8")), nan=0.0, posinf=0.0) for part in parts)
    return max((float(part.max()) for part in finite), default=0.0)
