"""The coefficients with which the iterations of a training run are averaged.

An average of the last iterations stands for the decay of the learning rate at the end of a run. The
schedules and the choice of iterations are those of tools/checkpoint/weighted_merge.py of
Megatron-LM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mckpt.errors import UsageError

# what is left of the learning rate after a part x of the decay
DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "minus-sqrt": lambda x: 1.0 - math.sqrt(x),
}


def coefficients(schedule: str, count: int, reverse: bool = False) -> list[float]:
    """Returns the coefficients of `count` iterations, the oldest first. Their sum is 1."""
    decay = DECAYS[schedule]
    left = [*(decay(i / count) for i in range(1, count)), 0.0]
    found = [a - b for a, b in itertools.pairwise(left)]
    found = [1.0 - sum(found), *found]
    return found[::-1] if reverse else found


def in_window(
    iterations: Sequence[int],
    start: int | None = None,
    end: int | None = None,
    window: float | None = None,
    tokens: int | None = None,
    interval: int | None = None,
) -> list[int]:
    """Returns those of the iterations, in ascending order, that are averaged.

    start, end: the first and the last one that may be. window: the billions of tokens before the
    last one. tokens: those of one iteration. interval: the fewest iterations from one to the next;
    the last one is kept, and from there backward each that is far enough.

    Raises UsageError if none is left.
    """
    chosen = [i for i in iterations if (end is None or i <= end) and (start is None or i >= start)]
    if window is not None and chosen:
        if not tokens:
            raise UsageError(
                "--window: the args do not have seq_length and global_batch_size, so the tokens of"
                " an iteration are not known; give --start in its place"
            )
        low = max(0, chosen[-1] - math.ceil(window * 1e9 / tokens))
        chosen = [i for i in chosen if i >= low]
    if interval is not None:
        kept: list[int] = []
        for i in reversed(chosen):
            if not kept or kept[-1] - i >= interval:
                kept.append(i)
        chosen = kept[::-1]
    if not chosen:
        listed = ", ".join(map(str, iterations))
        raise UsageError(f"no iteration is left to average: the run has {listed or 'none'}")
    return chosen


def tokens_of(args: Mapping[str, Any] | None) -> int | None:
    """Returns the tokens of one iteration of a run with these args; None if they do not say."""
    stated = args or {}
    numbers = [stated.get(name) for name in ("seq_length", "global_batch_size")]
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        return None
    return math.prod(int(n) for n in numbers if n)
