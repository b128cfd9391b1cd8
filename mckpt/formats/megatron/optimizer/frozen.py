"""Finds the parameters that a buffer of distrib_optim.pt lacks because the run did not train them.

A DistributedOptimizer has no state of a parameter whose requires_grad is False, and the file does
not name the others. But each master copy, rounded, is its weight. So the buffer itself shows which
parameters it has: those whose master copies lie one behind the other and fill it.

    registered   a b c d
    buffer       [ d . | b . | a ]      c is frozen: its master copy is not behind that of d
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mckpt.containers.entries import Entry
from mckpt.formats.megatron.optimizer.buckets import PARAMETER_STEP, rounded
from mckpt.lazy import numpy as np
from mckpt.storage.descriptors import pread
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize, numpy_dtype

LOOK = 1024  # elements at the start of a parameter that are compared; `prove` compares all
Chosen = tuple[int, Any] | None  # the last number of a choice, and the numbers before it


def choices(weights: Sequence[Entry], master: Entry, files: Sequence[str]) -> list[list[int]]:
    """Returns the choices of parameters whose master copies fill a buffer, as their numbers in the
    order of registration. It returns at most two, because one of two must be wrong. The right one
    is among them if each master copy, rounded, is its weight; so a single one is right.

    weights: of all parameters, in the order of registration. master: the buffer, in fp32.
    files: the paths of the files.
    """
    # where the last chosen parameter ends -> up to two choices that end there
    ends: dict[int, list[Chosen]] = {0: [None]}
    for number, weight in reversed([*enumerate(weights)]):
        for end, found in [*ends.items()]:
            start = rounded(end, PARAMETER_STEP)
            last = start + math.prod(weight.shape)
            if last <= master.shape[0] and _is_master(weight, master, start, files):
                longer: list[Chosen] = [(number, one) for one in found]
                ends[last] = [*ends.get(last, []), *longer][:2]
    return [_numbers(one) for one in ends.get(master.shape[0], [])]


def _numbers(chosen: Chosen) -> list[int]:
    out = []
    while chosen is not None:
        number, chosen = chosen
        out.append(number)
    return out


def _is_master(weight: Entry, master: Entry, start: int, files: Sequence[str]) -> bool:
    """Returns whether the element `start` of a buffer begins the master copy of a weight."""
    if weight.strides is not None:
        return False
    num, dtype = min(math.prod(weight.shape), LOOK), numpy_dtype(weight.dtype)
    with np.errstate(all="ignore"):
        rounded_copy = _values(master, start, num, files).astype(dtype)
    return rounded_copy.tobytes() == _values(weight, 0, num, files).tobytes()


def _values(entry: Entry, start: int, num: int, files: Sequence[str]) -> np.ndarray:
    size = itemsize(entry.dtype)
    with opened(files[entry.file]) as fd:
        raw = pread(fd, num * size, entry.at + start * size)
    return np.frombuffer(raw, numpy_dtype(entry.dtype))
