"""Runs judge.py, stock.py, bridge.py and other programs beside this file for tests: starts each
once, gives it cases, waits with a limit and reads the results.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import launching

HERE = Path(__file__).resolve().parent
Case = dict[str, Any]
LOGITS_ATOL = 1e-4  # tolerance of fp32 logits of size 1 to 10; a clean run is 100 times closer


def record(
    judge: str,
    case: str,
    form: str,
    sizes: str,
    difference: float,
    largest: float,
    dialect: str = "gpt",
    megatron_core: str = "",
) -> None:
    """Adds one result to the file that JUDGED names, from which tests/matrix.py makes its tables;
    does nothing without it.

    `difference` is the largest difference of a logit, and `largest` the largest logit.
    `megatron_core` is the judge's version, if it does not use the installed one.
    """
    if path := os.environ.get("JUDGED"):
        row = {
            "judge": judge,
            "case": case,
            "dialect": dialect,
            "format": form,
            "sizes": sizes,
            "difference": difference,
            "largest": largest,
            "megatron_core": megatron_core or version("megatron-core"),
        }
        with open(path, "a") as file:
            file.write(json.dumps(row, default=float) + "\n")


def limit(logits: np.ndarray) -> float:
    """Returns the largest difference that fp32 logits of two programs may have: 2e-5 of the largest
    logit, and 1e-4 for logits below 5. The largest one of a clean run was 8e-6.
    """
    return 2e-5 * max(float(np.abs(logits).max()), 5.0)


def expect_multi_token(
    source: Path, out: Path, tokens: np.ndarray, wanted: np.ndarray, **case: Any
) -> None:
    """Converts a model, and fails unless megatron-core's multi-token prediction has these logits
    [batch, seq - 1, ...]: the last position has no next token.
    """
    mckpt.plan(source, out, format="torch", dialect="hybrid").run()
    result = ask("mtp", checkpoint=out, tokens=tokens, **case)
    assert result["unread"] == []
    apart, largest = np.abs(result["logits"][:, :-1] - wanted).max(), np.abs(wanted).max()
    record("multi-token prediction", source.name, "torch", "1 rank", apart, largest, "hybrid")
    assert apart < LOGITS_ATOL


def chosen_cases(session: pytest.Session) -> set[str]:
    """Returns the names that are values of the parameter `case` in the tests of this run of pytest.
    A fixture that runs many cases at once leaves out all others.
    """
    parameters = [getattr(item, "callspec", None) for item in session.items]
    cases = [found.params.get("case") for found in parameters if found]
    return {case for case in cases if isinstance(case, str)}


class Session:
    """A process that runs the cases of the programs beside this file in forks
    (tests/helpers/session.py).

    It ends with this process, which holds the other end of its stdin.
    """

    def __init__(self, te: bool, python: str) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
        path = [str(HERE / "fake_te")] * te
        path += [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            # required by megatron-core where gated delta nets run without FLA's kernels
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "JUDGE_PARENT": str(os.getpid()),
        }
        self.process = subprocess.Popen(
            [python, str(HERE / "session.py")],
            env=environ,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )

    def launch(self, program: str, cases: list[Case], ranks: int, out: Path, timeout: float) -> str:
        """Runs cases of a program in one fork, whose own forks are the ranks; returns the end of
        its log.

        The ranks, and the manager processes that megatron-core's saver forks, are one process
        group, which is always killed at the end.
        """
        environ = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(launching.free_port()),
            "WORLD_SIZE": str(ranks),
        }
        job = {"program": program, "cases": cases, "out": str(out), "environ": environ}
        pipe, answers = self.process.stdin, self.process.stdout
        assert pipe is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):  # answer() tells why
            pipe.write(json.dumps(job, default=plain).encode() + b"\n")
        group = int(self.answer())
        try:
            ended = select.select([answers], [], [], timeout)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.answer()
        log = (out / "log.txt").read_text(errors="replace")[-6000:]
        if not ended:
            raise TimeoutError(f"the judge did not end in {timeout:.0f} s:\n{log}")
        return log

    def answer(self) -> bytes:
        """Returns the next line that the process writes."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line
        self.log.seek(0)
        raise RuntimeError(f"the session ended:\n{self.log.read()[-6000:].decode()}")


session = functools.lru_cache(maxsize=3)(Session)  # one that leaves the cache ends


def launch(
    program: str,
    cases: list[Case],
    ranks: int,
    out: Path,
    timeout: float,
    te: bool = False,
    python: str = sys.executable,
) -> str:
    """Runs cases of a program in one launch of a session: see `Session.launch` and `judge`."""
    return session(te, python).launch(program, cases, ranks, out, timeout)


def plain(value: Any) -> Any:
    """Returns what JSON has for an array or a path in a case."""
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def judge(
    cases: list[Case],
    directory: Path,
    te: bool = False,
    timeout: float = 1200,
    program: str = "judge",
    python: str = sys.executable,
    ranks: int = 1,
) -> dict[str, dict[str, Any]]:
    """Returns the result of every case by its name, with `logits` (an array) where the case gives
    them. A failed case has ok False and an error.

    A case that ends the whole launch (a crash, a hang) is recorded as failed with the end of the
    log, and the cases after it get a launch of their own. `timeout` is the limit of all launches
    together, in seconds. `te`: with the stand-in of Transformer Engine in fake_te. `program`
    is a module beside this file (session.py), and `python` is that of its environment. `ranks`: for
    a program that does not start those of its cases itself.
    """
    directory.mkdir(parents=True, exist_ok=True)
    cases = [{"name": f"case{index:03d}"} | case for index, case in enumerate(cases)]
    assert len({case["name"] for case in cases}) == len(cases), "two cases have one name"
    deadline = time.monotonic() + timeout
    results: dict[str, dict[str, Any]] = {}
    left = cases
    while left:
        limit_s = deadline - time.monotonic()
        log = launch(program, left, ranks, directory, limit_s, te, python)
        while left and (directory / f"{left[0]['name']}.json").exists():
            results[left[0]["name"]] = read_result(directory, left[0]["name"])
            left = left[1:]
        if left:
            error = {"launch": f"no verdict; the log ends:\n{log}"}
            results[left[0]["name"]] = {"name": left[0]["name"], "ok": False, "error": error}
            left = left[1:]
    return results


def attempt(kind: str, te: bool = False, **case: Any) -> dict[str, Any]:
    """Returns the result of one case, which may have failed.

    kind: of judge.py, or another program beside this file. te: with the stand-in of Transformer
    Engine in fake_te.
    """
    program = kind if (HERE / f"{kind}.py").exists() else "judge"
    with tempfile.TemporaryDirectory() as place:
        found = judge([{"kind": kind} | case], Path(place), te, program=program)
    (result,) = found.values()
    return result


def ask(kind: str, te: bool = False, **case: Any) -> dict[str, Any]:
    """Returns the result of one case, and fails with its error: see `attempt`."""
    result = attempt(kind, te, **case)
    assert result["ok"], explain(result)
    return result


def ask_all(cases: list[Case], te: bool = False) -> list[dict[str, Any]]:
    """Returns the results of cases of judge.py, all of one launch, and fails with the errors."""
    with tempfile.TemporaryDirectory() as place:
        found = [*judge(cases, Path(place), te).values()]
    assert all(result["ok"] for result in found), "\n".join(map(explain, found))
    return found


def failure(kind: str, te: bool = False, **case: Any) -> str:
    """Returns the error of a case, and fails if there was none: see `attempt`."""
    result = attempt(kind, te, **case)
    assert not result["ok"], f"{kind} did not fail: {result}"
    return explain(result)


def read_result(directory: Path, name: str) -> dict[str, Any]:
    result = json.loads((directory / f"{name}.json").read_text())
    if (directory / f"{name}.npy").exists():
        result["logits"] = np.load(directory / f"{name}.npy")
    return result


def explain(result: dict[str, Any]) -> str:
    """Returns why a case failed: the traceback of the rank that failed first. Empty if
    it passed.
    """
    return "" if result["ok"] else f"{result['name']}: " + next(iter(result["error"].values()))
