"""Runs the processes of `mckpt verify` as forks of one that has imported what they need: a program
of tests/helpers/session.py, and the function that starts it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from mckpt import launching
from tests.helpers import judging

TRAINER = ("mckpt.trainer.reference", "mckpt.trainer.worker", "transformers.models.auto")


def prepare() -> None:
    from mckpt.trainer import forked

    for name in (*forked.NEEDED, *TRAINER):
        importlib.import_module(name)


def run(cases: list[dict[str, Any]], out: Path) -> int:
    from mckpt.trainer import build, forked

    (case,) = cases
    if case["sequence_parallel"]:
        build.build = partial(with_sequence_parallelism, build.build)
    os.environ |= launching.ENVIRONMENT
    return forked.main(case["module"], case["job"])


def with_sequence_parallelism(build: Any, *args: Any) -> Any:
    """Builds a model as for training, which must have sequence parallelism then."""
    chunks = build(*args, training=True)
    assert all(chunk.config.sequence_parallel for chunk in chunks)
    return chunks


def use_session(patch: pytest.MonkeyPatch, sequence_parallel: bool = False) -> None:
    """Makes `verify` run all its processes on CPU in forks of one session. `train`, whose processes
    print for the user, starts them as always.

    sequence_parallel: Megatron-Core runs with it, which the model and its sizes must allow.
    """

    start = launching.launch
    signature = inspect.signature(start)

    @wraps(start)  # whose signature a session inside of this one asks for
    def launch(*args: Any, **more: Any) -> None:
        own = signature.bind(*args, **more)
        own.apply_defaults()
        module, job, directory, device, num_ranks, show = own.args
        if show:
            start(*args, **more)
            return
        assert device == "cpu"
        path = directory / f"{module.rpartition('.')[2]}.job.json"
        path.write_text(json.dumps(job))
        cases = [{"module": module, "job": str(path), "sequence_parallel": sequence_parallel}]
        judging.launch("verifying", cases, num_ranks, directory, 300)
        if list(directory.glob("error.rank*.json")):
            raise launching.failure(directory, module, 1, directory / "log.txt")

    patch.setattr(launching, "launch", launch)
