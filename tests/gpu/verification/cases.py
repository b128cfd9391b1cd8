"""Runs cases side by side on the GPUs, and keeps their results in WORK/results.jsonl."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mckpt.errors import MckptError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
TIMEOUT_S = 450  # of one case
ERROR_SHOWN = 2000  # characters
ENVIRONMENT = {
    # A host that others share may have no NVLink multicast.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # All ranks are on one host, which may have no other network.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "NVIDIA_TF32_OVERRIDE": "0",  # fp32 means fp32
    # Dozens of ranks share the cores.
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One process: the function `kind` of `__main__.KINDS`, called with `job`."""

    key: str
    kind: str
    ranks: int
    job: Json
    needs: str | None = None  # key of the case whose files this one reads


@dataclass(frozen=True)
class Machine:
    """The devices, the time and the selection that a command may use."""

    device: str  # cuda or cpu
    gpus: int  # on a CPU: the ranks that may run at a time
    per_gpu: int  # cases that share one GPU
    deadline: float  # of time.monotonic()
    only: str  # run the cases whose key contains this
    again: bool  # run cases that failed once more


class Running:
    """The process of a case. Its environment carries a mark that all processes of the
    case inherit.
    """

    def __init__(self, case: Case, gpus: list[int], work: Path, device: str) -> None:
        self.case, self.gpus, self.started = case, gpus, time.monotonic()
        self.directory = work / "cases" / re.sub(r"[^\w.]+", "-", case.key)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        job = case.job | {"device": device, "ranks": case.ranks, "directory": str(self.directory)}
        path = self.directory / "case.json"
        path.write_text(json.dumps(job))
        mark = f"{os.getpid()}-{zlib.crc32(case.key.encode())}"
        self.mark = f"VERIFICATION_CASE={mark}\0".encode()
        environ = os.environ | ENVIRONMENT
        environ |= {"VERIFICATION_CASE": mark, "CUDA_VISIBLE_DEVICES": ""}
        path_of_python = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, path_of_python))
        if device == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        command = [sys.executable, "-m", "tests.gpu.verification", "one-case"]
        command += [case.kind, str(path)]
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def ended(self) -> bool:
        return self.process.poll() is not None or self.seconds() > TIMEOUT_S

    def end(self) -> None:
        """Ends all processes of the case. torchrun puts its ranks into sessions of their own, so
        the mark finds them and a process group would not.
        """
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        self.process.wait()

    def found(self) -> Json:
        """Returns {"result": ...} or {"error": ...} of a case that has ended."""
        path = self.directory / "result.json"
        if path.exists():
            result: Json = json.loads(path.read_text())
            return result
        if self.process.returncode == -signal.SIGKILL:
            return {"error": f"did not end in {TIMEOUT_S} s, or was killed"}
        log = (self.directory / "log").read_text(errors="replace")[-ERROR_SHOWN:]
        return {"error": f"exit code {self.process.returncode}, no result; its log ends:\n{log}"}


def run(part: str, cases: list[Case], work: Path, machine: Machine) -> None:
    """Runs the cases that have no result yet, as many at a time as fit, and records each."""
    known = {k: r for k, r in results(work).items() if not (machine.again and "error" in r)}
    waiting = [case for case in chosen(cases, machine) if case.key not in known]
    running: list[Running] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    try:
        while (waiting or running) and time.monotonic() < machine.deadline:
            for one in [one for one in running if one.ended()]:
                seconds = one.seconds()
                one.end()
                running.remove(one)
                found = one.found()
                known[one.case.key] = record(work, part, one.case, seconds, found)
                if "result" in found:
                    shutil.rmtree(one.directory, ignore_errors=True)
            waiting = start(waiting, running, known, work, machine)
            if not running:
                break
            time.sleep(0.2)
    finally:
        for one in running:
            one.end()
    if waiting or running:
        print(f"{len(waiting) + len(running)} cases are left; run the command again")


def start(
    waiting: list[Case],
    running: list[Running],
    known: dict[str, Json],
    work: Path,
    machine: Machine,
) -> list[Case]:
    """Starts the cases for which GPUs are free, on the least loaded ones; returns the others."""
    left = []
    for case in waiting:
        needed = known.get(case.needs) if case.needs else {"result": {}}
        if needed and "result" not in needed:
            print(f"left out: {case.key}, because {case.needs} failed", flush=True)
            continue
        load = Counter(gpu for one in running for gpu in one.gpus)
        gpus = sorted(range(machine.gpus), key=lambda gpu: load[gpu])[: case.ranks]
        if needed and max(load[gpu] for gpu in gpus) < machine.per_gpu:
            running.append(Running(case, sorted(gpus), work, machine.device))
        else:
            left.append(case)
    return left


def chosen(cases: list[Case], machine: Machine) -> list[Case]:
    """Returns the cases that `only` names and those they need, as far as there are GPUs."""
    keys = {case.key for case in cases if machine.only in case.key}
    for case in reversed(cases):  # a case stands behind the one that it needs
        if case.key in keys and case.needs:
            keys.add(case.needs)
    wanted = [case for case in cases if case.key in keys]
    for case in wanted:
        if case.ranks > machine.gpus:
            print(f"left out: {case.key} needs {case.ranks} GPUs", flush=True)
    return [case for case in wanted if case.ranks <= machine.gpus]


def record(work: Path, part: str, case: Case, seconds: float, found: Json) -> Json:
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    line = {"case": case.key, "part": part, "time": when, "seconds": round(seconds, 1)}
    append(work, line | {"ranks": case.ranks} | found)
    print(f"{case.key}: {summary(found)}, {seconds:.0f} s", flush=True)
    return line | found


def results(work: Path) -> dict[str, Json]:
    """Returns key -> the newest line about that case."""
    path = work / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["case"]: line for line in map(json.loads, lines)}


def append(work: Path, line: Json) -> None:
    with (work / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def summary(found: Json) -> str:
    """Returns one line about a result, for the terminal."""
    result = found.get("result")
    if result is None:
        return last_line(found["error"])
    if "verdicts" in result:
        return ", ".join(f"{form} {v['verdict']}" for form, v in result["verdicts"].items())
    if "losses" in result:
        return f"loss {result['losses'][0]:.5f} to {result['losses'][-1]:.5f}"
    return ", ".join(f"{key} {value}" for key, value in result.items())


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "?")[:300]


def one_case(function: Callable[[Json], Json], path: Path) -> None:
    """Calls the function of the case in its own process, and writes result.json beside the job."""
    import traceback

    try:
        said: Json = {"result": function(json.loads(path.read_text()))}
    except MckptError as e:
        said = {"error": str(e)[-ERROR_SHOWN:]}
    except Exception as e:
        said = {"error": "".join(traceback.format_exception(e))[-ERROR_SHOWN:]}
    path.with_name("result.json").write_text(json.dumps(said))
