"""kill -9 at random times of a command."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.crash.trial import Trial


def tries(trial: Trial, number: int, seed: int) -> Iterator[str | None]:
    """Kills the command `number` times; yields each time what was wrong, or None.

    A command that has ended before its time is not counted, and killed again at another.
    """
    chosen = random.Random(f"{trial.name} {seed}")
    place = trial.place
    done = missed = 0
    while done < number:
        place.clear()
        after = chosen.uniform(0, 1.1 * trial.seconds)
        ended = place.end(place.start(trial.words), after)
        if ended.code != -9:
            assert ended.code == 0, f"{trial.name}: {ended.text}"
            missed += 1
            assert missed < 50 + 20 * number, f"{trial.name}: ends before it can be killed"
            continue
        done += 1
        tree = place.tree(trial.in_store)
        wrong = trial.wrong(tree) or trial.inspected(tree) or trial.rerun()
        yield wrong and f"killed after {after:.4f} s of {trial.seconds:.4f}: {wrong}"
