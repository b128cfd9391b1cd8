"""What the results were found on: GPUs, cores, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import mckpt
from tests.gpu.verification.cases import Json, append, results

# In a process of its own, because torch keeps GPU memory once it has looked at a GPU.
LOOK = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
gpus = [[gpu.name, gpu.total_memory // 2**20] for gpu in gpus]
print(json.dumps([torch.__version__, torch.version.cuda, nccl, gpus]))
"""
PACKAGES = ("transformers", "megatron-core", "transformer-engine", "accelerate", "numpy")


def about(work: Path, device: str) -> Json:
    """Returns the line `about` of the results, which the first command adds."""
    return results(work).get("about") or describe(work, device)


def describe(work: Path, device: str) -> Json:
    torch, cuda, nccl, gpus = json.loads(output(sys.executable, "-c", LOOK))
    driver = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions = {
        "mckpt": mckpt.__version__,
        "Python": sys.version.split()[0],
        "torch": torch,
        "CUDA": cuda,
        "NCCL": nccl,
        "driver": driver and driver.split()[0],
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    line = {
        "case": "about",
        "device": device,
        "gpus": gpus if device == "cuda" else [],
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
    }
    append(work, line)
    return line


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
