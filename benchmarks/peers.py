"""mckpt beside NVIDIA's converters, mbridge and Megatron-Bridge: Hugging Face -> torch_dist and back, each a whole process, in turns.

    python -m benchmarks.peers HF [DIRECTORY] [--peer-python PYTHON] [--rounds 3]

HF is a model directory with a tokenizer (Megatron-Bridge asks for one); DIRECTORY, /dev/shm if none is given, holds two copies of it at a time.
PYTHON has the peers installed; what this process runs in has mckpt. On a machine without a GPU, the peers run on gloo, with tests/fake_te instead
of Transformer Engine, and with the changes that `without_gpu` names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
ALLOW = ["--allow-inexact", "rope_factor"]
PEERS = ("mbridge", "megatron-bridge")
PACKAGES = ("mbridge", "megatron-bridge", "megatron-core", "torch", "transformers", "safetensors", "nvidia-resiliency-ext")


def main() -> None:
    if sys.argv[1:2] == ["convert"]:
        return convert(*sys.argv[2:])
    if sys.argv[1:2] == ["versions"]:
        return print_versions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    print(f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} cores")
    for python in dict.fromkeys((sys.executable, arguments.peer_python)):
        said = subprocess.run([python, __file__, "versions"], capture_output=True, text=True, check=True, env=environment())
        print(f"{'python' if python == sys.executable else 'PEER_PYTHON'}: {said.stdout.strip()}")
    work = arguments.directory / "mckpt-peers"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        compare(arguments.hf, work, arguments.peer_python, peers, arguments.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def compare(hf: Path, work: Path, python: str, peers: list[str], rounds: int) -> None:
    nbytes = sum(f.stat().st_size for f in hf.glob("*.safetensors"))
    names = ["mckpt", *peers]
    rows: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
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
            for direction, command in zip(("hf -> torch_dist", "torch_dist -> hf"), commands(name, python, hf, there, back), strict=True):
                if number == 0:
                    print(f"{name}, {direction}: {' '.join(shown.get(word, word) for word in command)}", flush=True)
                rows.setdefault((direction, name), []).append(run(command))
            if number == 0:
                for what, command in (
                    ("HF -> Megatron -> HF", ["diff", str(hf), str(back)]),
                    ("the Megatron checkpoint", ["diff", str(hf), str(there), "--like", str(hf)]),
                    ("the same, nothing else said", ["diff", str(hf), str(there)]),
                    ("its files", ["inspect", str(there)]),
                ):
                    line = " ".join(shown.get(word, word) for word in command)
                    checks.append(f"- {name}, {what}: `mckpt {line}`: {check(command).replace(str(there), 'MEGATRON')}")
            shutil.rmtree(there)
            shutil.rmtree(back)
        loads.append(os.getloadavg()[0])
    print(
        f"\n{hf.name}, {nbytes / 1e9:.2f} GB, on {filesystem(work)}, {rounds} rounds; load average {loads[0]:.1f} before, up to {max(loads):.1f}"
    )
    print(
        "\n| direction | | wall s (median) | range | CPU s | peak RSS MiB, largest process | all processes |\n|---|---|---|---|---|---|---|"
    )
    for direction, name in sorted(rows, key=lambda row: (row[0], names.index(row[1]))):
        wall, cpu, largest, tree = zip(*rows[direction, name], strict=True)
        print(
            f"| {direction} | {name} | {statistics.median(wall):.2f} | {min(wall):.2f}-{max(wall):.2f} | {statistics.median(cpu):.2f} "
            f"| {max(largest):.0f} | {max(tree):.0f} |"
        )
    print("\n" + "\n".join(checks))


def commands(name: str, python: str, hf: Path, there: Path, back: Path) -> list[list[str]]:
    """What converts `hf` to `there`, and what converts `there` to `back`; both peers need the original's config, and its tokenizer."""
    if name == "mckpt":
        mckpt = [sys.executable, "-m", "mckpt"]
        return [
            [*mckpt, "hf-to-megatron", str(hf), str(there), *ALLOW],
            [*mckpt, "megatron-to-hf", str(there), str(back), "--tokenizer", str(hf)],
        ]
    peer = [python, __file__, "convert", name]
    return [[*peer, "import", str(hf), str(there)], [*peer, "export", str(hf), str(there), str(back)]]


def check(command: list[str]) -> str:
    """Exit status of one mckpt command, and what it says in short."""
    done = subprocess.run([sys.executable, "-m", "mckpt", *command], capture_output=True, text=True, env=environment(), check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    short = [line for line in lines if line.partition(":")[0] in ("format", "files", "num_tensors", "bytes")]
    return f"exit {done.returncode}: {'; '.join(short) or lines[0]}"


def print_versions() -> None:
    """Of this Python and of what it has of the packages that matter here."""
    from importlib.metadata import PackageNotFoundError, version

    import mckpt

    found = [f"Python {platform.python_version()}", f"mckpt {mckpt.__version__}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    print(", ".join(found))


def filesystem(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True).stdout.strip()


# ---------------------------------------------------------------------------------------------------------------- one process


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def run(command: list[str]) -> tuple[float, float, float, float]:
    """(wall seconds, CPU seconds, peak RSS in MiB of the largest process, and of all of its tree at a time, looked at every 50 ms).

    Pages that forked processes share count once for each of them in the last; files that are mapped count wherever RSS is said.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
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
    """Bytes that a process and its descendants have resident now."""
    page, total, pending = os.sysconf("SC_PAGE_SIZE"), 0, [root]
    while pending:
        pid = pending.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            pending += [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
        except OSError:
            continue
    return total


# ---------------------------------------------------------------------------------------------------------------- the peers


def convert(peer: str, direction: str, hf: str, megatron: str, out: str = "") -> None:
    """One conversion by one peer, in this process."""
    import torch

    if not torch.cuda.is_available():
        without_gpu()
    {"mbridge": mbridge, "megatron-bridge": megatron_bridge}[peer](direction, hf, megatron, out)


def without_gpu() -> None:
    """The changes that the peers need on a machine without a GPU."""
    import torch

    sys.path.insert(0, str(ROOT / "tests" / "fake_te"))  # both build Megatron-Core's Transformer Engine layers
    torch.cuda.current_device = lambda: torch.device("cpu")  # both, and Megatron-Core, allocate there
    torch.cuda.synchronize = lambda *_: None  # Megatron-Core before it saves
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # Megatron-Bridge, even where it saves no state
    torch.nn.Module.cuda = lambda self, *_: self
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # no CUDA generators; models are built under it
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils.fused_apply_rotary_pos_emb = NotImplemented  # Megatron-Bridge's Llama asks that it exists; nothing here calls it


def mbridge(direction: str, hf: str, megatron: str, out: str) -> None:
    """mbridge has no checkpoint format of its own: it fills a Megatron-Core model, which Megatron-Core saves and loads."""
    import torch
    from mbridge import AutoBridge
    from megatron.core import dist_checkpointing, parallel_state

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    bridge = AutoBridge.from_pretrained(hf)
    bridge.set_extra_args(perform_initialization=False)  # the weights are overwritten
    models = bridge.get_model()
    model = models[0].module
    with torch.no_grad():
        if direction == "import":
            bridge.load_weights(models, hf)
            os.makedirs(megatron)
            dist_checkpointing.save(model.sharded_state_dict(), megatron)
        else:
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), megatron))
            bridge.safetensor_io = bridge._get_safetensor_io(hf)
            bridge.save_weights(models, out)


def megatron_bridge(direction: str, hf: str, megatron: str, out: str) -> None:
    """Its own two commands, in its own one-process context, which the export opens by itself."""
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
