"""Starts the processes of the trainer, and ends all of them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mckpt import errors
from mckpt.errors import MckptError, MissingExtra, StorageError, UsageError
from mckpt.execute.threads import GRACE_S

LOG_SHOWN = 3000  # characters of a log in an error
LOOPBACK = "127.0.0.1"

ENVIRONMENT = {
    # hides warnings of torch and megatron-core about things that a user cannot change
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    # makes transformers read the weights one after the other, always in the same order
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    # Without this, Transformer Engine lets cuBLAS compute fp32 products in TF32.
    "NVIDIA_TF32_OVERRIDE": "0",
    # megatron-core requires this with tensor parallelism
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def require(*modules: str, extra: str = "verify") -> None:
    """Raises MissingExtra if one of these modules, which are in `extra`, is not installed."""
    missing = [m for m in modules if importlib.util.find_spec(m.split(".")[0]) is None]
    if missing:
        raise MissingExtra(
            f"running models needs {', '.join(missing)}, not installed here: pip install"
            f" 'mckpt[{extra}]'"
        )


def device(asked: str, num_ranks: int) -> str:
    """Returns `cpu` or `cuda`; `auto` is cuda if there are enough GPUs for all ranks.

    Does not import torch, which takes seconds.
    """
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([gpu for gpu in visible.split(",") if gpu.strip()]))
    if asked == "auto":
        return "cuda" if count >= num_ranks else "cpu"
    if asked == "cuda" and count < num_ranks:
        raise UsageError(
            f"{num_ranks} ranks need {num_ranks} GPUs, and this machine has {count}; give smaller"
            " sizes or --device cpu"
        )
    return asked


def world(sizes: dict[str, int]) -> int:
    """Returns the number of ranks that hold one model at the sizes tp, pp, ep, etp and cp."""
    return sizes["pp"] * math.lcm(sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"])


def run_alone(module: str, job: dict[str, Any], device: str, num_ranks: int) -> None:
    """Calls `launch` in a temporary directory; the ranks print to this process's stdout."""
    import tempfile  # here, because it imports random, which is slow (see free_port)

    with tempfile.TemporaryDirectory(prefix="mckpt-") as directory:
        launch(module, job, Path(directory), device, num_ranks, show=True)


def launch(
    module: str,
    job: dict[str, Any],
    directory: Path,
    device: str,
    num_ranks: int = 1,
    show: bool = False,
) -> None:
    """Runs `python -m MODULE JOB` on every rank, and raises the error of the first rank that fails.

    The ranks print to a log in `directory`; with `show`, stdout is that of this process.
    """
    path = directory / f"{module.rpartition('.')[2]}.job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, *_launcher(device, num_ranks), "-m", module, str(path)]
    environ = _environment(device, num_ranks)
    log = path.with_suffix(".log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=None if show else stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            end(process)
    if code:
        raise failure(directory, module, code, log)


def _launcher(device: str, num_ranks: int) -> list[str]:
    """Returns the arguments of Python that start several ranks: forks on CPU, torchrun on GPUs."""
    if num_ranks == 1:
        return []
    if device == "cpu":
        return ["-m", "mckpt.trainer.forked"]
    place = [f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"]
    return ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *place]


def _environment(device: str, num_ranks: int) -> dict[str, str]:
    """Returns the environment variables of the ranks, which let them import this mckpt."""
    package = str(Path(__file__).parent.parent)
    paths = filter(None, [package, os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    environ |= {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port() if num_ranks > 1 else 0),
        "WORLD_SIZE": str(num_ranks),
    }
    if num_ranks == 1:
        environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    if device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
        # threads of torch: each waits for the others in a loop, so that too many are slow
        num_cores = len(os.sched_getaffinity(0))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_ranks)))
    return environ


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process. Its ranks end with it: torchrun passes the signal on to them, and the kernel
    kills forks.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failure(directory: Path, module: str, code: int, log: Path) -> Exception:
    """Returns the error of the rank that failed first.

    Returns an MckptError with the end of the log if no rank left an error file.
    """
    files = sorted(directory.glob("error.rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    if files:
        first = json.loads(files[0].read_text())
        for path in files:
            path.unlink()
        if first["class"]:
            error: Exception = getattr(errors, first["class"])(*first["message"].split("\n"))
            return error
        return RuntimeError(f"{module} failed:\n{first['message']}")
    killed = f"was killed by signal {-code} (out of memory?)"
    how = killed if code < 0 else f"ended with exit code {code}"
    end_of_log = log.read_text(errors="replace")[-LOG_SHOWN:].splitlines()
    return MckptError(f"{module} {how}; its log ends:", *(f"  {line}" for line in end_of_log))


def free_port() -> int:
    """Returns a port of 127.0.0.1 that no process listens on.

    The port is below 32768. The system gives the ports from 32768 on to any program that asks for
    one, so it could give such a port away before the ranks use it.
    """
    import random  # here: random and socket take 6 ms to import, and no conversion needs them
    import socket

    for port in random.sample(range(10_000, 30_000), 1_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StorageError(
        "no port from 10000 to 29999 is free on 127.0.0.1, where the ranks find each other: are"
        " sockets allowed here?"
    )
