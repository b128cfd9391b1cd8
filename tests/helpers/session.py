"""A process that has imported torch and megatron-core, and runs the programs beside this file.

    python tests/helpers/session.py

The import takes 7 s, so tests/helpers/judging.py starts this process once for all programs. Each
program has a process of its own, which is a fork of this one, and runs its cases in further forks.
A program is a module with two functions: `prepare()` imports all else that it needs, and may change
parts of megatron-core; `run(cases, out)` runs cases, writes their results to out/NAME.json and
returns an exit status.

Each line of stdin is a launch: {"program": NAME, "cases": [...], "out": DIR, "environ": {...}}. Its
fork leads a process group of its own and writes to DIR/log.txt. Two lines on stdout answer: the
process group, and the exit status once the fork has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the imports may print
    programs: dict[str, tuple[IO[str], IO[str]]] = {}
    while line := sys.stdin.readline():
        program = json.loads(line)["program"]
        if program not in programs:
            programs[program] = start(program)
        launches, replies = programs[program]
        print(line, end="", file=launches)
        for _ in range(2):
            if not (reply := replies.readline()):
                sys.exit(f"the process of {program} has ended")
            print(reply, end="", file=answers)


def shared(program: str) -> tuple[str, ...]:
    """Returns the modules that a program has in common with others. Those of other environments
    change parts of Python before their imports.
    """
    if program == "rank_files":
        return ("torch",)
    if program == "made_models":
        return ("torch", "transformers")
    if program in ("judge", "pretraining", "stock", "verifying"):
        from mckpt.trainer import forked

        return forked.NEEDED
    return ()


def start(program: str) -> tuple[IO[str], IO[str]]:
    """Starts the process of a program; returns the pipes to it and from it."""
    for name in shared(program):
        importlib.import_module(name)
    gc.freeze()  # a collection searches all that is not frozen: 0.4 s each time, for the imports
    (launches, to), (back, replies) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(to)
        os.close(back)
        serve(program, os.fdopen(launches), os.fdopen(replies, "w", buffering=1))
    os.close(launches)
    os.close(replies)
    return os.fdopen(to, "w", buffering=1), os.fdopen(back)


def serve(name: str, launches: IO[str], replies: IO[str]) -> None:
    """Runs each launch of a program in a fork of this process, and ends it."""
    try:
        program = importlib.import_module(f"tests.helpers.{name}")
        program.prepare()
        gc.freeze()
        while line := launches.readline():
            pid = os.fork()
            if not pid:
                launch(program, json.loads(line))
            print(pid, file=replies)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


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
