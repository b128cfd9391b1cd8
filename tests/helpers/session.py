"""A process that has imported one of the programs beside this file, and runs its cases in forks.

    python tests/helpers/session.py judge

The import of torch and megatron-core takes 8 s, so tests/helpers/judging.py starts this process
once for each program. The program is a module with two functions: `prepare()` imports all that it
needs, and `run(cases, out)` runs cases, writes their results to out/NAME.json and returns an exit
status.

Each line of stdin is a launch: {"cases": [...], "out": DIR, "environ": {...}}. Its fork leads a
process group of its own and writes to DIR/log.txt. Two lines on stdout answer: the process group,
and the exit status once the fork has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the imports may print
    program = importlib.import_module(f"tests.helpers.{sys.argv[1]}")
    program.prepare()
    gc.freeze()  # a collection searches all that is not frozen: 0.4 s each time, for the imports
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            launch(program, json.loads(line))
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def launch(program: Any, job: dict[str, Any]) -> None:
    """Runs the cases of one launch in this fork, and ends it."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(Path(job["out"]) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= job["environ"]
    status = 1
    try:
        status = program.run(job["cases"], Path(job["out"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
