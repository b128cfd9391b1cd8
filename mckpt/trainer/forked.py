"""Starts the ranks of a program on CPU, as forks of one process that has imported what they need.

    WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=20000 \\
        python -m mckpt.trainer.forked -m mckpt.trainer.train job.json

Importing torch and megatron-core takes 8 s of one core. torchrun would let every rank do that, and
would import torch itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable

from mckpt.execute.threads import end_with_parent
from mckpt.formats import FORMATS
from mckpt.trainer import points

# modules that build.py, load.py and train.py import in their functions
NEEDED = (
    *(listed.module for listed in FORMATS.values() if listed.megatron),
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
)


def main(name: str, path: str) -> int:
    """Runs the function `main` of a module on every rank, with the job in a file."""
    module = importlib.import_module(name)

    def run() -> None:
        with points.reporting(path) as job:
            module.main(job)

    return fork_ranks(run)


def fork_ranks(run: Callable[[], None]) -> int:
    """Calls a function in as many forks of this process as WORLD_SIZE says.

    Returns 0 when all have ended, or 1 as soon as one has failed. The kernel kills the others when
    this process ends.
    """
    for needed in NEEDED:
        importlib.import_module(needed)
    # A collection searches all that is not frozen: 0.4 s each time, for the imports alone.
    gc.freeze()
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if pid := os.fork():
            ranks[pid] = rank
        else:
            _be_rank(rank, run)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            if code < 0:
                print(f"rank {rank} was killed by signal {-code} (out of memory?)", file=sys.stderr)
            return 1
    return 0


def _be_rank(rank: int, run: Callable[[], None]) -> None:
    """Calls the function in a fork and ends it."""
    end_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 1
    try:
        run()
        code = 0
    except SystemExit:
        pass  # the reason has been reported
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
