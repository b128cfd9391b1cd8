"""Compares mckpt with Megatron-Bridge: Hugging Face -> torch_dist and back. Each conversion is a
process of its own, and the two converters take turns.

    python -m benchmarks.peers HF [DIRECTORY] --peer-python PEER/bin/python [--rounds 3]

HF is a model directory with a tokenizer, which Megatron-Bridge requires. DIRECTORY, /dev/shm by
default, holds two copies of the model at a time. This process runs in an environment of mckpt. The
peer has one of its own, of Python 3.12:

    python3.12 -m venv PEER
    PEER/bin/pip install torch==2.13.0 megatron-core==0.19.2 transformers==5.12.1 accelerate \
        omegaconf hydra-core einops peft regex datasets sentencepiece tiktoken six pillow \
        torchvision tensorboard psutil PyYAML
    PEER/bin/pip install --no-deps megatron-bridge==0.6.2

`--no-deps` leaves out packages that Megatron-Bridge requires and only training uses; `StandIns`
replaces them. On a machine without a GPU it runs with gloo, with tests/helpers/fake_te instead of
Transformer Engine, and with the changes in `without_gpu`.

mbridge is not compared: its newest release, 0.15.1, does not build a model with megatron-core 0.19
(`ModelType` lost `encoder_and_decoder`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import MCKPT, MIB, ROOT, environment, filesystem, output

ALLOW = ["--allow-inexact", "rope_factor"]
PEER = "megatron-bridge"
PACKAGES = ("mckpt", "megatron-bridge", "megatron-core", "torch", "transformers", "safetensors")


def main() -> None:
    if sys.argv[1:2] == ["convert"]:
        return convert(*sys.argv[2:])
    if sys.argv[1:2] == ["versions"]:
        return print_versions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hf", type=Path)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"Linux {platform.release().partition('-')[0]}, {len(os.sched_getaffinity(0))} cores")
    for python in dict.fromkeys((sys.executable, arguments.peer_python)):
        said = output(python, __file__, "versions")
        print(f"{'python' if python == sys.executable else 'PEER_PYTHON'}: {said}")
    work = arguments.directory / "mckpt-peers"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        compare(arguments.hf, work, arguments.peer_python, arguments.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def compare(hf: Path, work: Path, python: str, rounds: int) -> None:
    nbytes = sum(f.stat().st_size for f in hf.glob("*.safetensors"))
    names = ["mckpt", PEER]
    rows: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    there, back = work / "megatron", work / "hf"
    shown = {
        python: "PEER_PYTHON",
        sys.executable: "python",
        __file__: "benchmarks/peers.py",
        str(hf): "HF",
        str(there): "MEGATRON",
        str(back): "OUT",
    }
    checks: list[str] = []
    loads = [os.getloadavg()[0]]
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for direction, command in zip(
                ("hf -> torch_dist", "torch_dist -> hf"),
                commands(name, python, hf, there, back),
                strict=True,
            ):
                if number == 0:
                    words = (shown.get(word, word) for word in command)
                    print(f"{name}, {direction}: {' '.join(words)}", flush=True)
                rows.setdefault((direction, name), []).append(run(command))
                written = back if direction == "torch_dist -> hf" else there
                sizes[direction, name] = bytes_in(written)
            if number == 0:
                for what, command in (
                    ("HF -> Megatron -> HF", ["diff", str(hf), str(back)]),
                    ("the Megatron checkpoint", ["diff", str(hf), str(there), "--like", str(hf)]),
                    ("the same, nothing else said", ["diff", str(hf), str(there)]),
                    ("its files", ["inspect", str(there)]),
                ):
                    line = " ".join(shown.get(word, word) for word in command)
                    found = check(command).replace(str(there), "MEGATRON")
                    checks.append(f"- {name}, {what}: `mckpt {line}`: {found}")
            shutil.rmtree(there)
            shutil.rmtree(back)
        loads.append(os.getloadavg()[0])
    print(
        f"\n{hf.name}, {nbytes / 1e9:.2f} GB, on {filesystem(work)}, {rounds} rounds; load average"
        f" {loads[0]:.1f} before, up to {max(loads):.1f}"
    )
    print(
        "\n| direction | | wall s, median | all | CPU s | peak RSS MiB, largest process | all"
        " processes | bytes written |\n|---|---|---|---|---|---|---|---|"
    )
    for direction, name in sorted(rows, key=lambda row: (row[0], names.index(row[1]))):
        wall, cpu, largest, tree = zip(*rows[direction, name], strict=True)
        print(
            f"| {direction} | {name} | {statistics.median(wall):.2f} |"
            f" {', '.join(f'{s:.2f}' for s in wall)} | {statistics.median(cpu):.2f} |"
            f" {max(largest):.0f} | {max(tree):.0f} | {sizes[direction, name]:,} |"
        )
    print("\n" + "\n".join(checks))


def commands(name: str, python: str, hf: Path, there: Path, back: Path) -> list[list[str]]:
    """Returns the commands that convert `hf` to `there` and `there` to `back`. The peer needs the
    original's config and tokenizer for both.
    """
    if name == "mckpt":
        return [
            [*MCKPT, "hf-to-megatron", str(hf), str(there), *ALLOW],
            [*MCKPT, "megatron-to-hf", str(there), str(back), "--tokenizer", str(hf)],
        ]
    peer = [python, __file__, "convert"]
    return [
        [*peer, "import", str(hf), str(there)],
        [*peer, "export", str(hf), str(there), str(back)],
    ]


def check(command: list[str]) -> str:
    """Returns the exit status of one mckpt command and its output in short."""
    done = subprocess.run([*MCKPT, *command], capture_output=True, text=True, env=environment())
    lines = (done.stdout + done.stderr).strip().splitlines()
    kept = ("format", "files", "num_tensors", "bytes")
    short = [line for line in lines if line.partition(":")[0] in kept]
    return f"exit {done.returncode}: {'; '.join(short) or lines[0]}"


def print_versions() -> None:
    """Prints the versions of this Python and of the packages in PACKAGES that it has."""
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    print(", ".join(found))


def bytes_in(directory: Path) -> int:
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


# -------------------------------------------------------------------------------------- one process


def run(command: list[str]) -> tuple[float, float, float, float]:
    """Runs a command. Returns its wall seconds, CPU seconds, and peak RSS in MiB: of its largest
    process, and of all its processes together, sampled every 50 ms.

    RSS includes mapped files. In the last figure, pages that forked processes share count once for
    each of them.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    worst, ended = 0, threading.Event()

    def look() -> None:
        nonlocal worst
        while not ended.wait(0.05):
            worst = max(worst, rss_of_tree(process.pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{said.decode()}")
    largest = usage.ru_maxrss * 1024
    return seconds, usage.ru_utime + usage.ru_stime, largest / MIB, max(largest, worst) / MIB


def rss_of_tree(root: int) -> int:
    """Returns the resident bytes of a process and its descendants now."""
    page, total, pending = os.sysconf("SC_PAGE_SIZE"), 0, [root]
    while pending:
        process = Path(f"/proc/{pending.pop()}")
        try:
            total += int((process / "statm").read_text().split()[1]) * page
            for task in (process / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total


# ----------------------------------------------------------------------------------------- the peer


def convert(direction: str, hf: str, megatron: str, out: str = "") -> None:
    """Does one conversion with Megatron-Bridge in this process."""
    import torch

    sys.meta_path.append(StandIns())
    if not torch.cuda.is_available():
        without_gpu()
    megatron_bridge(direction, hf, megatron, out)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module in place of a missing package that Megatron-Bridge imports and no
    conversion uses.

    Attributes that begin with a capital letter are classes, because Megatron-Bridge derives from
    some of them. Others are mocks.
    """

    packages = ("modelopt", "wandb", "mlflow", "comet_ml", "nvidia_resiliency_ext", "nemo_run")

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        stands_in = name.partition(".")[0] in self.packages or name.startswith("megatron.energon")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stands_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class StandIn(types.ModuleType):
    __version__ = "0.44.0"  # Megatron-Bridge compares that of modelopt

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__init__": lambda *_, **__: None})
        return mock.MagicMock(name=name)


def without_gpu() -> None:
    """Makes the changes that Megatron-Bridge needs on a machine without a GPU."""
    import torch

    # Megatron-Bridge builds Megatron-Core's Transformer Engine layers
    sys.path.insert(0, str(ROOT / "tests" / "helpers" / "fake_te"))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # both allocate there
    cuda.set_device = lambda *_: None  # a lambda for each name: torch._dynamo refuses one twice
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: mock.MagicMock()
    cuda.Stream = cuda.Event = mock.MagicMock
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="none", major=9, minor=0, total_memory=1 << 36
    )
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()  # called even if no state is saved
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]

    class OnCpu(torch.overrides.TorchFunctionMode):
        """Allocates tensors for device="cuda" on the CPU."""

        def __torch_function__(
            self, function: Any, kinds: Any, args: Any = (), named: Any = None
        ) -> Any:
            named = dict(named or {})
            if str(named.get("device")).startswith("cuda"):
                named["device"] = "cpu"
            return function(*args, **named)

    OnCpu().__enter__()  # to the end of this process
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    # There are no CUDA generators to fork, and models are built in this context.
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    # Megatron-Bridge turns it on, and only training calls it.
    layers._grad_accum_fusion_available = True
    from megatron.core.models.common.embeddings import rope_utils

    # Megatron-Bridge's Llama requires that it exists, and nothing here calls it.
    rope_utils.fused_apply_rotary_pos_emb = NotImplemented
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # A mixture of experts requires that these exist.
    for module in (transformer_engine, moe_utils, token_dispatcher):
        for name in dir(module):
            if name.startswith("fused_") and getattr(module, name) is None:
                setattr(module, name, NotImplemented)


def megatron_bridge(direction: str, hf: str, megatron: str, out: str) -> None:
    """Calls import_ckpt in Megatron-Bridge's context of one process, or export_ckpt, which opens
    that context by itself.
    """
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    if direction == "import":
        with temporary_distributed_context("nccl" if torch.cuda.is_available() else "gloo"):
            AutoBridge.import_ckpt(hf, megatron, torch_dtype=torch.bfloat16)
    else:
        AutoBridge.from_hf_pretrained(hf).export_ckpt(megatron, out, show_progress=False)


if __name__ == "__main__":
    main()
