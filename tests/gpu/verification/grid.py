"""Every tiny model at every parallel size, by both layer specs and from both formats."""

from __future__ import annotations

from pathlib import Path

import mckpt
from mckpt.errors import MckptError
from tests.gpu.verification import sizes
from tests.gpu.verification.cases import Case, Json, Machine, append, results
from tests.gpu.verification.sizes import CP, Sizes
from tests.gpu.verification.steps import ALLOW, LOCAL, TE, verdicts
from tests.helpers import tiny

PER_GPU = 12
DENSE: list[Sizes] = [
    {"tp": 1},
    {"tp": 2},
    {"pp": 2},
    CP,
    {"tp": 4},
    {"tp": 2, "pp": 2},
    {"pp": 2, "vpp": 2},
]
MOE: list[Sizes] = [
    {"ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"ep": 2, "pp": 2},
]
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}  # keys of a mixture's config
FLOAT32 = ("qwen3", "mixtral")  # the models that are also stored in fp32


def cases(work: Path, machine: Machine) -> list[Case]:
    """Makes the models that are not there yet; returns the cases, the most wanted ones first.

    A size that mckpt refuses for a model gets a line `not_possible` in the results.
    """
    out, known = [], results(work)
    models = [(name, "bfloat16") for name in tiny.CASES] + [(name, "float32") for name in FLOAT32]
    for name, dtype in models:
        hf = work / "models" / f"{name}-{dtype}"
        if not (hf / "config.json").exists():
            tiny.tiny_random(name, hf, dtype)
        for size in DENSE + (MOE if EXPERTS & tiny.config(name).keys() else []):
            formats, why = possible(hf, size)
            where = f"grid/{name}/{dtype}/{sizes.name(size)}"
            if why and machine.only in where and where not in known:
                append(work, {"case": where, "part": "grid", "not_possible": why})
            for impl in (TE, LOCAL) if machine.device == "cuda" else (LOCAL,):
                if formats and not (size == CP and (impl == LOCAL or dtype == "float32")):
                    job = {"hf": str(hf), "sizes": size, "impl": impl, "formats": formats}
                    out.append(Case(f"{where}/{impl}", "grid", sizes.world(size), job))
    return sorted(out, key=lambda case: (case.job["impl"] == LOCAL, "/float32/" in case.key))


def possible(hf: Path, size: Sizes) -> tuple[list[str], str]:
    """Returns the formats in which mckpt plans the model at these sizes, and why not in others."""
    formats, why = [], []
    for form in ("torch_dist", "torch"):
        try:
            plan(hf, hf.parent / "nowhere", form, size)
            formats.append(form)
        except MckptError as e:
            why.append(f"{form}: {e}")
    return formats, "; ".join(why)


def plan(hf: str | Path, to: Path, form: str, size: Sizes) -> mckpt.Plan:
    parallel = sizes.parallel(size)
    return mckpt.plan(hf, to, format=form, parallel=parallel, allow_inexact=ALLOW)


def verify(job: Json) -> Json:
    """Converts one model to each format, and verifies all of them at one size."""
    checkpoints = {form: Path(job["directory"]) / form for form in job["formats"]}
    for form, path in checkpoints.items():
        # torch_dist runs at any sizes, whatever those it was written for
        plan(job["hf"], path, form, job["sizes"] if form == "torch" else {}).run()
    return {"verdicts": verdicts(job["hf"], checkpoints, job)}
