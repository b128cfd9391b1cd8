"""Starts processes, and leaves none of them running: of the trainer, under torchrun where there are
several, and of `--workers`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mckpt import errors
from mckpt.errors import MckptError, MissingExtra, StorageError, UsageError
from mckpt.execute.ranks import Ranks

LOG_SHOWN = 3000  # characters of a log in an error
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
GRACE_S = 20  # between asking processes to end and ending them


def require(*modules: str) -> None:
    """MissingExtra if one of these cannot be imported."""
    missing = [m for m in modules if importlib.util.find_spec(m.split(".")[0]) is None]
    if missing:
        raise MissingExtra(
            f"{', '.join(missing)} not installed, which running models needs: pip install"
            " 'mckpt[verify]'"
        )


def device(asked: str, num_ranks: int) -> str:
    """`cpu` or `cuda`; `auto` is cuda where there are GPUs enough.

    Found without torch, which takes seconds to import.
    """
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = (
        len(gpus)
        if visible is None
        else min(len(gpus), len([v for v in visible.split(",") if v.strip()]))
    )
    if asked == "auto":
        return "cuda" if count >= num_ranks else "cpu"
    if asked == "cuda" and count < num_ranks:
        raise UsageError(
            f"{num_ranks} ranks need as many GPUs, and {count} are here; say smaller sizes, or"
            " --device cpu"
        )
    return asked


def world(sizes: dict[str, int]) -> int:
    """Ranks that hold one model once, at sizes tp, pp, ep, etp and cp."""
    return sizes["pp"] * math.lcm(sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"])


def run_alone(module: str, job: dict[str, Any], device: str, num_ranks: int) -> None:
    """`launch` in a directory of its own, what rank 0 prints being the result."""
    import tempfile  # which imports random, see free_port

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
    """Runs `python -m MODULE JOB` on every rank, and raises what the first rank that failed says in
    `directory`.

    What they print goes to a log in `directory`; with `show`, stdout is this process's own.
    """
    path = directory / f"{module.rpartition('.')[2]}.job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", module, str(path)]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        ),
        # those of torch and megatron-core, of which a user can mend none
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        # transformers then reads weights one after the other, in the same order every time
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
        # fp32 means fp32: Transformer Engine asks cuBLAS for TF32 otherwise
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asks for it with tensor parallelism
    }
    if device == "cpu":
        environ |= {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
            "CUDA_VISIBLE_DEVICES": "",
        }
    if num_ranks == 1:
        environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    else:
        torchrun = {
            "--nproc-per-node": num_ranks,
            "--master-addr": "127.0.0.1",
            "--master-port": free_port(),
        }
        command[1:1] = [
            "-m",
            "torch.distributed.run",
            *(str(part) for option in torchrun.items() for part in option),
        ]
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
            with ended_by_signals():
                code = process.wait()
        finally:
            end(process)
    if code:
        raise failure(directory, module, code, log)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP, which would end this process alone, do what Ctrl-C does; in
    the main thread, which alone hears of them.
    """
    before: dict[int, Any] = {}

    def raises(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with suppress(ValueError):  # not the main thread
        for which in (signal.SIGTERM, signal.SIGHUP):
            before[which] = signal.signal(which, raises)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it: torchrun passes the signal on to its ranks, which are sessions of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failure(directory: Path, module: str, code: int, log: Path) -> Exception:
    """The error of the rank that failed first; MckptError with the end of the log where none could
    say.
    """
    said = sorted(directory.glob("error.rank*.json"), key=lambda p: p.stat().st_mtime_ns)
    if said:
        first = json.loads(said[0].read_text())
        for path in said:
            path.unlink()
        if first["class"]:
            error: Exception = getattr(errors, first["class"])(first["message"])
            return error
        return RuntimeError(f"{module} failed:\n{first['message']}")
    how = (
        f"was killed by signal {-code} (out of memory?)"
        if code < 0
        else f"ended with exit code {code}"
    )
    return MckptError(
        f"{module} {how}; its log ends:\n{log.read_text(errors='replace')[-LOG_SHOWN:]}"
    )


@contextmanager
def workers(ranks: Ranks, num: int, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """This process as rank 0 of `num`; the others are forks of it, which know what it has planned,
    do `work`, and end with the block.
    """
    if num == 1:
        yield ranks
        return
    import multiprocessing

    run, fork = uuid.uuid4().hex, multiprocessing.get_context("fork")
    local = -(
        -num * (os.cpu_count() or 1) // len(os.sched_getaffinity(0))
    )  # as many as would share all cores, not only those of this process
    others = [
        fork.Process(target=_quietly, args=(work, Ranks(rank, num, run, local)), daemon=True)
        for rank in range(1, num)
    ]
    try:
        with ended_by_signals():
            for process in others:
                process.start()
            yield Ranks(0, num, run, local, ended=lambda rank: not others[rank - 1].is_alive())
            for process in others:
                process.join(1)
    finally:
        for process in others:
            if process.is_alive():
                process.terminate()
        for process in others:
            if process.is_alive():
                process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _quietly(work: Callable[[Ranks], object], ranks: Ranks) -> None:
    """Rank 0 does the talking, and tells the others of Ctrl-C; where it is killed, they are too."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    work(ranks)


def free_port() -> int:
    """A port that nobody listens on: none of those from 32768 on that systems give to whoever asks
    for any, as somebody may before it is used.
    """
    import random  # and socket: 6 ms, which no conversion needs
    import socket

    for port in random.sample(range(10_000, 30_000), 1_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StorageError(
        "no port from 10000 to 29999 could be had on 127.0.0.1, through which the ranks find each"
        " other: are sockets allowed here?"
    )
