"""Runs judge.py, stock.py or bridge.py for a test: starts the processes, waits with a limit, reads
the results, and leaves nothing running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mckpt import launching
from mckpt.containers.dcp_metadata import read_metadata

HERE = Path(__file__).resolve().parent


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


def multi_token_difference(case: str, result: dict[str, Any], wanted: np.ndarray) -> float:
    """Records a result of multi-token prediction; returns the largest difference of a logit.

    wanted: the logits of the reference [batch, seq - 1, ...]: the last position has no next token.
    """
    assert result["ok"], explain(result)
    assert result["unread"] == []
    apart, largest = np.abs(result["logits"][:, :-1] - wanted).max(), np.abs(wanted).max()
    record("multi-token prediction", case, "torch", "1 rank", apart, largest, dialect="hybrid")
    return float(apart)


def expect_keys(
    real: dict[str, Any], dist: Path, files: Path, dtypes: bool = False, objects: bool = True
) -> None:
    """Fails unless two checkpoints have the names and shapes of a model of Megatron-Core.

    real: its result of the entry `keys` of stock.py. dist, files: the directories with the files of
    the formats torch_dist and torch. dtypes: also compare the dtypes of torch_dist. objects: the
    checkpoint has no objects beside those of the model, such as _extra_state.
    """
    import torch

    assert real["ok"], explain(real)
    stored = read_metadata(dist / ".metadata")
    ours = {key: [list(shape), dtype] for key, (dtype, shape, _) in stored.tensors.items()}
    tensors = {k: v for k, v in real["torch_dist"].items() if v[1] != "object"}
    of_shape = slice(None, 2 if dtypes else 1)
    assert {k: v[of_shape] for k, v in ours.items()} == {k: v[of_shape] for k, v in tensors.items()}
    theirs = set(real["torch_dist"]) - set(tensors)
    assert theirs and theirs <= set(stored.objects)
    assert not objects or set(stored.objects) - {"common_state/shard_0_1"} == theirs
    assert {path.name for path in files.glob("mp_rank_*")} == set(real["torch"])
    for directory, models in real["torch"].items():
        file = torch.load(files / directory / "model_optim_rng.pt", weights_only=False)
        names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
        assert [name for name in file if name.startswith("model")] == names
        for name, wanted in zip(names, models, strict=True):
            held = {k: None if "_extra" in k else list(v.shape) for k, v in file[name].items()}
            assert held == {k: None if "_extra" in k else shape for k, shape in wanted.items()}


def chosen_cases(session: pytest.Session) -> set[str]:
    """Returns the names that are values of the parameter `case` in the tests of this run of pytest.
    A fixture that runs many cases at once leaves out all others.
    """
    parameters = [getattr(item, "callspec", None) for item in session.items]
    cases = [found.params.get("case") for found in parameters if found]
    return {case for case in cases if isinstance(case, str)}


def judge(
    cases: list[dict[str, Any]],
    world_size: int,
    directory: Path,
    fake_te: bool = False,
    timeout: float = 1200,
    program: str = "judge.py",
    python: str = sys.executable,
) -> dict[str, dict[str, Any]]:
    """Returns the result of every case by its name, with `logits` (an array) where the case gives
    them. A failed case has ok False and an error.

    A case that ends the whole launch (a crash, a hang) is recorded as failed with the end of the
    log, and the cases after it get a launch of their own. `timeout` is the limit of all launches
    together, in seconds. `program` is judge.py, stock.py or bridge.py, which have the same
    interface, and `python` is that of its environment.
    """
    directory.mkdir(parents=True, exist_ok=True)
    cases = [{"name": f"case{index:03d}"} | case for index, case in enumerate(cases)]
    assert len({case["name"] for case in cases}) == len(cases), "two cases have one name"
    deadline = time.monotonic() + timeout
    results: dict[str, dict[str, Any]] = {}
    left = cases
    while left:
        log = launch(
            left, world_size, directory, fake_te, deadline - time.monotonic(), program, python
        )
        while left and (directory / f"{left[0]['name']}.json").exists():
            results[left[0]["name"]] = read_result(directory, left[0]["name"])
            left = left[1:]
        if left:
            results[left[0]["name"]] = {
                "name": left[0]["name"],
                "ok": False,
                "error": {"launch": f"no verdict; the log ends:\n{log[-6000:]}"},
            }
            left = left[1:]
    return results


def launch(
    cases: list[dict[str, Any]],
    world_size: int,
    directory: Path,
    fake_te: bool,
    timeout: float,
    program: str,
    python: str,
) -> str:
    """Runs the program once on `world_size` ranks; returns its log.

    The ranks are not started by torchrun, because torchrun puts every rank into a session of its
    own, where this function could not end it. Here all ranks, and the manager processes that
    megatron-core's saver forks, are one process group, which is always killed at the end.
    """
    (directory / "cases.json").write_text(json.dumps(cases))
    path = [
        *([str(HERE / "fake_te")] if fake_te else []),
        str(HERE.parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        # required by megatron-core where gated delta nets run without FLA's kernels
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launching.free_port()),
        "WORLD_SIZE": str(world_size),
        "JUDGE_PARENT": str(os.getpid()),
    }
    log = directory / "log.txt"
    with log.open("w") as stream:
        group = subprocess.Popen(
            [python, str(HERE / program), str(directory / "cases.json"), str(directory)],
            env=environ,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            group.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the judge did not end in {timeout:.0f}"
                f" s:\n{log.read_text(errors='replace')[-6000:]}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
            group.wait()
    return log.read_text(errors="replace")


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
