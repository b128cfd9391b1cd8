"""A model of Llama-3.1-8B's shape: made, converted and timed, converted back, verified."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path

import mckpt
from tests.gpu.verification import sizes
from tests.gpu.verification.cases import ROOT, Case, Json, Machine
from tests.gpu.verification.model import make_model, shrunk
from tests.gpu.verification.sizes import Sizes
from tests.gpu.verification.steps import LOCAL, TE, cli, verdicts

PER_GPU = 4
VERIFIED: tuple[tuple[Sizes, str], ...] = (({"tp": 4}, TE), ({"tp": 2, "pp": 2}, TE), ({}, LOCAL))


def cases(machine: Machine, space: Path, shrink: int, layers: int | None) -> list[Case]:
    """Checkpoints are in `space`. `shrink` and `layers` make the model smaller, to rehearse."""
    config = shrunk(json.loads((ROOT / "fixtures/configs/llama-3.1-8b.json").read_text()), shrink)
    config |= {"num_hidden_layers": layers} if layers else {}
    files = {"hf": str(space / "hf"), "megatron": str(space / "megatron")}
    out = [
        Case("large/make", "make", 1, files | {"config": config}),
        Case("large/convert", "convert", 1, files, needs="large/make"),
    ]
    for size, wanted in VERIFIED:
        impl = wanted if machine.device == "cuda" else LOCAL
        job = files | {"sizes": size, "impl": impl, "timeout_s": 300}
        key = f"large/{sizes.name(size)}/{impl}"
        out.append(Case(key, "verify", sizes.world(size), job, needs="large/convert"))
    return out


def make(job: Json) -> Json:
    started = time.perf_counter()
    parameters, nbytes = make_model(job["config"], Path(job["hf"]))
    return {"parameters": parameters, "bytes": nbytes, "seconds": time.perf_counter() - started}


def convert(job: Json) -> Json:
    """Converts twice, because the first time the system may have to find memory for its page
    cache; then converts back and compares to the last bit.
    """
    hf, megatron, back = job["hf"], job["megatron"], Path(job["megatron"] + "-back")
    shutil.rmtree(back, ignore_errors=True)
    out: Json = {"first_s": cli("hf-to-megatron", hf, megatron, "--overwrite")}
    out["again_s"] = cli("hf-to-megatron", hf, megatron, "--overwrite")
    out["peak_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    out["bytes"] = sum(path.stat().st_size for path in Path(megatron).rglob("*") if path.is_file())
    out["back_s"] = cli("megatron-to-hf", megatron, back)
    out["diff"] = "different" if mckpt.diff(hf, back) else "the same to the last bit"
    shutil.rmtree(back)
    return out


def verify(job: Json) -> Json:
    return {"verdicts": verdicts(job["hf"], {"torch_dist": Path(job["megatron"])}, job)}
