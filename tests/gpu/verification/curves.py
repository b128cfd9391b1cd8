"""Compares the loss curves of `training` with each other; returns rows of tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from tests.gpu.verification.cases import Json
from tests.gpu.verification.tables import number

Runs = dict[str, Json]  # of one model: "DTYPE/KIND/SIZES/FROM" -> the result

DTYPES = ("float32", "bfloat16")
FLOAT32_TOLERANCE = 1e-5  # relative difference of a loss
NOISES = 2.0  # in bf16: each of the two runs may be this far from fp32
FALLS = 0.2
# Steps of a resumed run that are compared. They show whether its state was restored whole; after
# them rounding grows where training is unstable.
EARLY = 5


class Run(NamedTuple):
    """A row about one run that continues from a checkpoint."""

    kind: str  # weights or resumed
    dtype: str
    sizes: str
    source: str  # its start: a format, or the checkpoint itself
    steps: str
    last_loss: str
    apart: str
    tolerance: str
    verdict: str
    apart_in_all: str


HEAD = ["run", "dtype", "sizes", "from", "steps", "last loss", "apart", "tolerance", "verdict"]
HEAD += ["apart, all steps"]


def falling(runs: Runs) -> Iterator[list[str]]:
    """Returns rows of dtype, steps, mean loss of the first and the last steps, verdict,
    tokens/s.
    """
    for dtype in DTYPES:
        if f"{dtype}/start" in runs:
            run = runs[f"{dtype}/start"]
            losses = run["losses"]
            few = min(5, len(losses) // 2)
            first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
            verdict = "falls" if last < first - FALLS else "**does not fall**"
            tokens = f"{run['tokens_per_s']:,.0f}"
            yield [dtype, str(len(losses)), f"{first:.4f}", f"{last:.4f}", verdict, tokens]


def rows(runs: Runs) -> list[Run]:
    """Returns every run that continues, beside the one that it must agree with."""
    out = []
    for dtype in DTYPES:
        for key, run in sorted(runs.items(), reverse=True):
            of, kind, sizes, source = (*key.split("/", 3), "", "", "")[:4]
            if of == dtype and kind in ("weights", "resumed"):
                out.append(row(runs, kind, dtype, sizes, source, run))
    return out


def row(runs: Runs, kind: str, dtype: str, sizes: str, source: str, run: Json) -> Run:
    losses = run["losses"]
    about = (kind, dtype, sizes, source, f"{run['steps'][0]:.0f} to {run['steps'][-1]:.0f}")
    reference = (
        uninterrupted(runs, dtype, len(losses)) if kind == "resumed" else itself(runs, dtype)
    )
    if reference is None:
        return Run(*about, f"{losses[-1]:.6f}", "?", "?", "no reference", "?")
    compared = EARLY if kind == "resumed" else len(losses)
    apart, limit = relative(losses[:compared], reference[:compared]), tolerance(runs, dtype)
    whole = number(relative(losses, reference))
    verdict = holds(apart, limit)
    return Run(*about, f"{losses[-1]:.6f}", number(apart), number(limit), verdict, whole)


def uninterrupted(runs: Runs, dtype: str, steps: int) -> list[float] | None:
    """Returns the last losses of the first run, with which a resumed run must agree."""
    return runs[f"{dtype}/start"]["losses"][-steps:] if f"{dtype}/start" in runs else None


def itself(runs: Runs, dtype: str) -> list[float] | None:
    """Returns the losses of the short run from the saved checkpoint itself, without a reshard."""
    for key, run in runs.items():
        if key.startswith(f"{dtype}/weights/") and key.endswith("/itself"):
            losses: list[float] = run["losses"]
            return losses
    return None


def tolerance(runs: Runs, dtype: str) -> float | None:
    if dtype == "float32":
        return FLOAT32_TOLERANCE
    low, exact = itself(runs, "bfloat16"), itself(runs, "float32")
    return NOISES * relative(low, exact) if low and exact else None


def back(runs: Runs) -> Iterator[list[str]]:
    """Returns rows of dtype, step, loss of transformers, loss of the trainer, difference,
    tolerance, verdict.
    """
    for dtype in DTYPES:
        if f"{dtype}/back" in runs:
            run = runs[f"{dtype}/back"]
            for step, ours, theirs, computed in (
                ("1 of a new run, in fp32", "trainer_float32", "transformers", "float32"),
                (f"the next, in {dtype}", "trainer_resumed", "transformers_next", dtype),
            ):
                apart, limit = abs(run[ours] - run[theirs]) / run[theirs], tolerance(runs, computed)
                losses = f"{run[theirs]:.6f}", f"{run[ours]:.6f}"
                yield [dtype, step, *losses, number(apart), number(limit), holds(apart, limit)]


def summary(rows: list[Run]) -> Iterator[list[str]]:
    """Returns rows of run, dtype, how many are the same, largest difference, tolerance."""
    for kind, dtype in dict.fromkeys((row.kind, row.dtype) for row in rows):
        mine = [row for row in rows if (row.kind, row.dtype) == (kind, dtype)]
        same = sum(row.verdict == "the same" for row in mine)
        largest = max((row.apart for row in mine if row.apart != "?"), key=float, default="?")
        yield [kind, dtype, f"{same} of {len(mine)}", largest, mine[0].tolerance]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def holds(apart: float, limit: float | None) -> str:
    return "?" if limit is None else "the same" if apart <= limit else "**apart**"
