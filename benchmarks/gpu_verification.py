"""Runs the verdict of `mckpt verify`, and training, on real GPUs, and writes
docs/gpu-verification.md from what was found.

    python benchmarks/gpu_verification.py grid        every tiny model x parallel sizes x layer spec x format
    python benchmarks/gpu_verification.py large       a model of 8B parameters: converted, timed, verified
    python benchmarks/gpu_verification.py training    convert, train, reshard, go on at other sizes, resume, convert back
    python benchmarks/gpu_verification.py write       the report

Every finished case is one line of WORK/results.jsonl, and a case that is there is not run again: a
command that was stopped, or that had no time left (--limit-s), goes on when it is given again. Each
case is a process of its own, on the GPUs with the least to do; several share a GPU. A case that
fails, or hangs beyond its time, is recorded and stops no other. `--device cpu --shrink N` rehearses
all of it with gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mckpt
from mckpt import launching
from mckpt.errors import MckptError
from mckpt.verification import levels as verification
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
ALLOW = ("rope_factor", "sliding_window")
ENVIRONMENT = {
    # shared hosts: no NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # one host, which may have no other network
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    # dozens of ranks share the cores
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
PORT_TAKEN = re.compile("address already in use|EADDRINUSE", re.IGNORECASE)
ERROR_SHOWN = 2000  # characters

Json = dict[str, Any]
TE, LOCAL = "transformer_engine", "local"


# -------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One process.

    `guess_s` decides whether it is still started before the limit, at `timeout_s` it is ended.
    """

    key: str
    kind: str  # of KINDS, below
    ranks: int
    job: Json
    guess_s: float = 70
    timeout_s: float = 300
    needs: str | None = None  # key of the case whose files it reads


@dataclass(frozen=True)
class Machine:
    device: str
    gpus: int
    per_gpu: int
    jobs: int
    deadline: float  # of time.monotonic()
    only: str
    again: bool


class Running:
    """A case's process, on some GPUs; all that it starts carries its mark, and ends with it."""

    def __init__(self, case: Case, gpus: list[int], work: Path, device: str) -> None:
        self.case, self.gpus, self.started = case, gpus, time.monotonic()
        self.directory = work / "cases" / re.sub(r"[^\w.]+", "-", case.key)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        job = {
            **case.job,
            "kind": case.kind,
            "device": device,
            "ranks": case.ranks,
            "directory": str(self.directory),
        }
        (self.directory / "case.json").write_text(json.dumps(job))
        self.mark = f"MCKPT_CASE={os.getpid()}-{zlib.crc32(case.key.encode())}"
        visible = ",".join(map(str, gpus)) if device == "cuda" else ""
        environ = {
            **os.environ,
            **ENVIRONMENT,
            "CUDA_VISIBLE_DEVICES": visible,
            **dict([self.mark.split("=")]),
        }
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        )
        with (self.directory / "log").open("wb") as log:
            command = [sys.executable, __file__, "one-case", str(self.directory / "case.json")]
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )

    def end(self) -> None:
        """Ends every process of the case: torchrun's ranks are sessions of their own, so the mark
        tells them, not the group.
        """
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{self.mark}\0".encode() in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        self.process.wait()

    def found(self) -> Json:
        """What the finished process left: {"result": ...} or {"error": ...}."""
        path = self.directory / "result.json"
        if path.exists():
            said: Json = json.loads(path.read_text())
            return said
        log = (self.directory / "log").read_text(errors="replace")[-ERROR_SHOWN:]
        return {
            "error": (
                f"the process ended with {self.process.returncode} and said nothing; its log"
                f" ends:\n{log}"
            )
        }


def run_cases(part: str, cases: list[Case], work: Path, machine: Machine) -> None:
    """Runs what is not in the results yet, as many at a time as the machine takes, and adds one
    line for each.
    """
    started = time.monotonic()
    done = {key: r for key, r in results(work).items() if not (machine.again and "error" in r)}
    chosen = {c.key for c in cases if machine.only in c.key}
    chosen |= {c.needs for c in cases if c.key in chosen and c.needs}
    chosen |= {c.needs for c in cases if c.key in chosen and c.needs}  # and what that needs
    for case in (c for c in cases if c.ranks > machine.gpus and c.key in chosen):
        print(f"left out: {case.key} needs {case.ranks} GPUs", flush=True)
    waiting = [
        c for c in cases if c.key in chosen and c.key not in done and c.ranks <= machine.gpus
    ]
    total = len(waiting)
    running: list[Running] = []
    load = [0] * machine.gpus

    def record(case: Case, found: Json, seconds: float) -> None:
        when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        done[case.key] = {
            "case": case.key,
            "part": part,
            "time": when,
            "seconds": round(seconds, 1),
            "ranks": case.ranks,
            **found,
        }
        append(work, done[case.key])
        at = f"[{total - len(waiting) - len(running)}/{total} {time.monotonic() - started:.0f} s]"
        print(f"{at} {case.key}: {brief(found)}, {seconds:.0f} s", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends what runs
    try:
        while waiting or running:
            left_s = machine.deadline - time.monotonic()
            if left_s <= 0:
                print(
                    f"{len(running)} cases stopped at the limit, {len(waiting)} not started; the"
                    " same command goes on",
                    flush=True,
                )
                return
            for one in list(running):
                seconds = time.monotonic() - one.started
                late = seconds > one.case.timeout_s
                if one.process.poll() is None and not late:
                    continue
                one.end()
                running.remove(one)
                for gpu in one.gpus:
                    load[gpu] -= 1
                found = (
                    {"error": f"did not end in {one.case.timeout_s:.0f} s"} if late else one.found()
                )
                record(one.case, found, seconds)
                if "result" in found:
                    shutil.rmtree(one.directory, ignore_errors=True)
            for case in list(waiting):
                before = done.get(case.needs) if case.needs else {"result": {}}
                if before is None or case.guess_s > left_s or len(running) >= machine.jobs:
                    continue
                if "result" not in before:
                    waiting.remove(case)
                    record(case, {"error": f"not run: {case.needs} failed"}, 0)
                    continue
                gpus = sorted(range(machine.gpus), key=lambda g: load[g])[: case.ranks]
                if max(load[g] for g in gpus) < machine.per_gpu:
                    waiting.remove(case)
                    for gpu in gpus:
                        load[gpu] += 1
                    running.append(Running(case, sorted(gpus), work, machine.device))
            if waiting and not running:
                print(
                    f"{len(waiting)} cases not started, for want of time; the same command goes on",
                    flush=True,
                )
                return
            time.sleep(0.2)
    finally:
        for one in running:
            one.end()


def results(work: Path) -> dict[str, Json]:
    """Key -> the last line about it."""
    path = work / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["case"]: line for line in map(json.loads, lines)}


def append(work: Path, record: Json) -> None:
    with (work / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def brief(found: Json) -> str:
    """A record in a line's worth of words."""
    if "result" not in found:
        return last_line(found.get("error") or f"not possible: {found['not_possible']}")
    result = found["result"]
    if "verdicts" in result:
        return ", ".join(f"{form} {v['verdict']}" for form, v in result["verdicts"].items())
    if "losses" in result:
        return f"loss {result['losses'][0]:.5f} to {result['losses'][-1]:.5f}"
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in result.items()
        if isinstance(v, (int, float, str))
    )


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "?")[:300]


# ------------------------------------------------------------------------------ in a case's process


def one_case(path: Path) -> None:
    """Runs the case of a file, and leaves result.json beside it."""
    job = json.loads(path.read_text())
    try:
        said: Json = {"result": KINDS[job["kind"]](job)}
    except Exception as e:
        said = {"error": error_text(e)}
    path.with_name("result.json").write_text(json.dumps(said))


def error_text(e: Exception) -> str:
    return (str(e) if isinstance(e, MckptError) else "".join(traceback.format_exception(e)))[
        -ERROR_SHOWN:
    ]


def twice(action: Callable[[], Any]) -> Any:
    """Once more if the port that was free a moment ago has been taken."""
    try:
        return action()
    except Exception as e:
        if not PORT_TAKEN.search(error_text(e)):
            raise
        return action()


def cli(*arguments: Any) -> float:
    """Seconds of `mckpt ARGUMENTS`, a process of its own."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MckptError(
            f"mckpt {' '.join(map(str, arguments))} ended with {done.returncode}:"
            f" {done.stderr[-ERROR_SHOWN:]}"
        )
    return time.perf_counter() - started


def verdicts(hf: str, checkpoints: dict[str, Path], job: Json) -> Json:
    """Form -> the verdict's facts, or the error; all in one launch, or each in its own if that
    fails.
    """
    options = verification.Options(
        device=job["device"],
        transformer_impl=job["impl"],
        timeout_s=job.get("timeout_s", 120),
        **job["sizes"],
    )

    def verify(forms: list[str]) -> Json:
        found = twice(
            lambda: verification.verify_all(hf, [checkpoints[form] for form in forms], options)
        )
        return {form: facts(v.json()) for form, v in zip(forms, found, strict=True)}

    try:
        return verify(list(checkpoints))
    except Exception as e:
        if len(checkpoints) == 1:
            raise
        out: Json = {}
        for form in checkpoints:
            try:
                out |= verify([form])
            except Exception as alone:
                out[form] = {"verdict": "error", "error": error_text(alone)}
        if all(v["verdict"] == "error" for v in out.values()):
            raise MckptError(error_text(e)) from e
        return out


def facts(said: Json) -> Json:
    """What the report tells of a verdict."""
    kept = (
        "verdict",
        "reasons",
        "where",
        "dtype",
        "impl",
        "ranks",
        "versions",
        "tokens",
        "logits",
        "coverage",
    )
    out = {k: said[k] for k in kept if k in said}
    if said["verdict"] != "pass":
        out["points"] = said.get("points")
    return out


def grid_case(job: Json) -> Json:
    """One model at one size: converted to each format, all of them verified."""
    checkpoints = {}
    for form in job["formats"]:
        checkpoints[form] = Path(job["directory"]) / form
        # torch_dist runs at any sizes
        parallel = parallel_of(job["sizes"]) if form == "torch" else mckpt.Parallel()
        mckpt.plan(
            job["hf"], checkpoints[form], format=form, parallel=parallel, allow_inexact=ALLOW
        ).run()
    return {"verdicts": verdicts(job["hf"], checkpoints, job)}


def make_case(job: Json) -> Json:
    started = time.perf_counter()
    parameters, nbytes = make_model(job["config"], Path(job["hf"]))
    return {"parameters": parameters, "bytes": nbytes, "seconds": time.perf_counter() - started}


def convert_case(job: Json) -> Json:
    """There twice, back, and compared to the last bit; the first time the system may have to find
    the memory for its page cache.
    """
    hf, megatron, back = job["hf"], job["megatron"], Path(job["megatron"] + "-back")
    shutil.rmtree(back, ignore_errors=True)
    said: Json = {"first_s": cli("hf-to-megatron", hf, megatron, "--overwrite")}
    said["again_s"] = cli("hf-to-megatron", hf, megatron, "--overwrite")
    said["peak_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    said["bytes"] = sum(p.stat().st_size for p in Path(megatron).rglob("*") if p.is_file())
    said["back_s"] = cli("megatron-to-hf", megatron, back)
    started = time.perf_counter()
    said["diff"] = "different" if mckpt.diff(hf, back) else "the same to the last bit"
    said["diff_s"] = time.perf_counter() - started
    shutil.rmtree(back)
    return said


def verify_case(job: Json) -> Json:
    return {"verdicts": verdicts(job["hf"], {job["form"]: Path(job["megatron"])}, job)}


def start_case(job: Json) -> Json:
    """Hugging Face -> Megatron by mckpt, and the run that everything else is compared with, saved
    before its end and at it.
    """
    hf, megatron = Path(job["home"]) / "hf", Path(job["home"]) / "start"
    shutil.rmtree(job["home"], ignore_errors=True)
    if job["tiny"]:
        tiny.tiny_random(job["tiny"], hf, vocab_size=job["config"]["vocab_size"])
    else:
        make_model(job["config"], hf)
    cli("hf-to-megatron", hf, megatron)
    return train(job, {"checkpoint": str(megatron)}) | {"parameters": num_parameters(job["config"])}


def train_case(job: Json) -> Json:
    """Goes on from what was saved, resharded by mckpt first where the job says to."""
    checkpoint = job["train"]["checkpoint"]
    if job.get("reshard"):
        # those not said stay as they were
        sizes = {"tp": 1, "pp": 1, "ep": 1} | {k: v for k, v in job["sizes"].items() if k != "cp"}
        flags = [x for k, v in sizes.items() for x in (f"--target-{k}", v)]
        out = Path(job["directory"]) / "resharded"
        cli("reshard", checkpoint, out, "--no-optimizer", "--target-format", job["reshard"], *flags)
        checkpoint = str(out)
    return train(job, {"checkpoint": checkpoint})


def train(job: Json, more: Json) -> Json:
    """One run of mckpt.trainer.train: what each step gave."""
    directory = Path(job["directory"])
    losses = directory / "losses.jsonl"

    def launch() -> None:
        losses.unlink(missing_ok=True)
        described = {
            **job["train"],
            **job["sizes"],
            "losses": str(losses),
            "transformer_impl": job.get("impl", "auto"),
            **more,
        }
        launching.launch(
            "mckpt.trainer.train",
            described,
            directory,
            launching.device(job["device"], job["ranks"]),
            job["ranks"],
        )

    twice(launch)
    steps = [json.loads(line) for line in losses.read_text().splitlines()]
    named = {"losses": "loss", "grad_norms": "grad_norm", "steps": "step"}
    return {name: [step[key] for step in steps] for name, key in named.items()} | {
        "tokens_per_s": max(s["tokens_per_s"] for s in steps)
    }


def back_case(job: Json) -> Json:
    """Megatron -> Hugging Face after training: transformers' loss beside the trainer's next, and
    the verdict on the two.
    """
    saved, out = job["saved"], Path(job["home"]) / "out"
    shutil.rmtree(out, ignore_errors=True)
    cli("megatron-to-hf", saved, out)
    now = train(
        {**job, "train": {**job["train"], "dtype": "float32", "steps": 1}}, {"checkpoint": saved}
    )
    after = job["done"] + 1
    following = train(
        {**job, "train": {**job["train"], "steps": after, "resume": True}}, {"checkpoint": saved}
    )
    rows = job["train"]["global_batch_size"]
    said: Json = {"trainer_float32": now["losses"][0], "trainer_resumed": following["losses"][0]}
    said |= dict(
        zip(
            ("transformers", "transformers_next"),
            hf_losses(out, job, [0, (after - 1) * rows]),
            strict=True,
        )
    )
    return said | {"verdicts": verdicts(str(out), {"torch_dist": Path(saved)}, job)}


def hf_losses(directory: Path, job: Json, batches: list[int]) -> Iterator[float]:
    """transformers' fp32 loss over the global batches that begin at these sequences of the
    trainer's made-up text.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mckpt.trainer import data

    device, rows, length = (
        job["device"],
        job["train"]["global_batch_size"],
        job["train"]["seq_length"],
    )
    model = (
        AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        .to(device)
        .eval()
    )
    source = data.mock(model.config.vocab_size, length, job["train"]["seed"])
    for first in batches:
        total = 0.0
        for number in range(first, first + rows):
            row = torch.from_numpy(source(number)).to(device)
            with torch.no_grad():
                logits = model(row[None, :-1], use_cache=False).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        yield total / (rows * length)


KINDS: dict[str, Callable[[Json], Json]] = {
    "grid": grid_case,
    "make": make_case,
    "convert": convert_case,
    "verify": verify_case,
    "start": start_case,
    "train": train_case,
    "back": back_case,
}


# ------------------------------------------------------------------------------------------- models


CHUNK = 1 << 22  # numbers that one process draws at once
FILE_BYTES = 2_000_000_000


def make_model(config: Json, directory: Path) -> tuple[int, int]:
    """Writes a Hugging Face directory in bf16, weights as transformers initialises them;
    (parameters, bytes).

    Every core draws chunks.

    Standard deviation 0.02, of what is added to the residual stream 0.02 / sqrt(2 layers); norms 1
    + 0.1 N, so that exchanging two shows.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shapes = tiny.shapes(config)
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if files[-1] and size + nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    tasks, weight_map = [], {}
    for index, names in enumerate(files, 1):
        path = directory / f"model-{index:05d}-of-{len(files):05d}.safetensors"
        header: Json = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
            weight_map[name] = path.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        for name in names:
            at, numel = 8 + len(text) + header[name]["data_offsets"][0], math.prod(shapes[name])
            tasks += [
                (path, at + 2 * i, name, i, min(CHUNK, numel - i), config["num_hidden_layers"])
                for i in range(0, numel, CHUNK)
            ]
    processes = len(os.sched_getaffinity(0)) if len(tasks) > 8 else 1
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for _ in pool.imap_unordered(draw, tasks):
            pass
    parameters = num_parameters(config)
    tiny.write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map},
    )
    tiny.write_json(directory / "config.json", {**config, "torch_dtype": "bfloat16"})
    return parameters, sum(p.stat().st_size for p in directory.iterdir())


def num_parameters(config: Json) -> int:
    return sum(map(math.prod, tiny.shapes(config).values()))


def draw(task: tuple[Path, int, str, int, int, int]) -> None:
    """One chunk of one tensor, the same whatever draws it."""
    path, at, name, first, count, num_layers = task
    values = np.random.default_rng([zlib.crc32(name.encode()), first]).standard_normal(
        count, np.float32
    )
    if name.endswith("norm.weight"):
        values = 1 + np.float32(0.1) * values
    else:
        values *= np.float32(
            0.02 / math.sqrt(2 * num_layers)
            if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
            else 0.02
        )
    with path.open("r+b") as file:
        file.seek(at)
        file.write(values.astype(tiny.DTYPES["bfloat16"][1]).tobytes())


def shrunk(config: Json, by: int, layers: int | None = None) -> Json:
    """For rehearsals: the widths divided by `by`."""
    out = {
        k: v // by if k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim") else v
        for k, v in config.items()
    }
    return out | ({"num_hidden_layers": layers} if layers else {})


# -------------------------------------------------------------------------------------------- sizes


Sizes = dict[str, int]


def said(sizes: Sizes, ranks: int = 0) -> str:
    """Such as "tp2 pp2"; with the number of ranks, the data-parallel size too."""
    replicas = {"dp": ranks // world(sizes)} if ranks > world(sizes) else {}
    return " ".join(f"{k}{v}" for k, v in (sizes | replicas).items()) or "tp1"


def world(sizes: Sizes) -> int:
    whole = {"tp": 1, "pp": 1, "ep": 1, "cp": 1} | sizes
    return launching.world({"etp": whole["tp"]} | whole)


def parallel_of(sizes: Sizes) -> mckpt.Parallel:
    given: Json = {k: v for k, v in sizes.items() if k != "cp"}
    return mckpt.Parallel(**given)


CP = {"cp": 2}
DENSE_SIZES = [
    {"tp": 1},
    {"tp": 2},
    {"pp": 2},
    CP,
    {"tp": 4},
    {"tp": 2, "pp": 2},
    {"pp": 2, "vpp": 2},
]
MOE_SIZES = [
    {"ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"ep": 2, "pp": 2},
]
LOCAL_FIRST = [{"tp": 1}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}]
FLOAT32 = ("qwen3", "mixtral")  # these also in fp32

# of `training`, by the number of GPUs: where everything starts, and the others (cp needs
# Transformer Engine, and no fp32)
BASE = {2: {"tp": 2}, 4: {"tp": 2, "pp": 2}}
DENSE_OTHERS: dict[int, list[Sizes]] = {
    2: [{"pp": 2}, {}],
    4: [{"tp": 4}, {"pp": 4}, {}, {"tp": 2, "cp": 2}],
}
MOE_OTHERS: dict[int, list[Sizes]] = {
    2: [{"ep": 2}, {}],
    4: [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2}, {}],
}


# ----------------------------------------------------------------------------------------- commands


@click.group()
def main() -> None:
    """Runs the verdict on real GPUs, and writes docs/gpu-verification.md."""


def common(per_gpu: int) -> Callable[[Any], Any]:
    options = [
        click.option(
            "--work",
            type=click.Path(path_type=Path),
            default=Path("/tmp/gpu-verification"),
            show_default=True,
        ),
        click.option(
            "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True
        ),
        click.option(
            "--gpus",
            type=int,
            help="How many to use; on the CPU, ranks at most. All; 2 on the CPU.",
        ),
        click.option(
            "--per-gpu",
            type=int,
            default=per_gpu,
            show_default=True,
            help="Cases that share a GPU.",
        ),
        click.option("--jobs", type=int, help="Cases at a time; 1 on the CPU."),
        click.option(
            "--limit-s", type=float, default=560, show_default=True, help="All has stopped by then."
        ),
        click.option("--only", default="", help="Only cases whose name has this in it."),
        click.option("--again", is_flag=True, help="Cases that failed are run again."),
    ]
    return lambda command: functools.reduce(
        lambda inner, option: option(inner), reversed(options), command
    )


def set_up(
    work: Path,
    device: str,
    gpus: int | None,
    per_gpu: int,
    jobs: int | None,
    limit_s: float,
    only: str,
    again: bool,
) -> Machine:
    work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    about = results(work).get("about") or describe(work, device)
    gpus = gpus or (len(about["gpus"]) if device == "cuda" else 2)
    return Machine(
        device, gpus, per_gpu, jobs or (64 if device == "cuda" else 1), deadline, only, again
    )


def describe(work: Path, device: str) -> Json:
    """Adds the line `about`: the machine and the versions."""
    code = """if True:
        import json, torch
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
        print(json.dumps([torch.__version__, torch.version.cuda, nccl, [[g.name, g.total_memory // 2**20] for g in gpus]]))"""
    torch, cuda, nccl, gpus = json.loads(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )
    driver = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    versions = {
        "mckpt": mckpt.__version__,
        "Python": sys.version.split()[0],
        "torch": torch,
        "CUDA": cuda,
        "NCCL": nccl,
        "driver": driver,
    }
    for name in ("transformers", "megatron-core", "transformer-engine", "accelerate", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    about = {
        "case": "about",
        "device": device,
        "gpus": gpus if device == "cuda" else [],
        "versions": versions,
    }
    about["cores"] = len(os.sched_getaffinity(0))
    append(work, about)
    return about


@main.command()
@common(per_gpu=12)
def grid(**o: Any) -> None:
    """Every tiny model at every size, by both layer specs and from both formats."""
    work, machine = o["work"].resolve(), set_up(**o)
    models = [
        (name, dtype)
        for dtype in ("bfloat16", "float32")
        for name in tiny.CASES
        if dtype == "bfloat16" or name in FLOAT32
    ]
    cases, known = [], results(work)
    for name, dtype in models:
        hf = work / "models" / f"{name}-{dtype}"
        if not (hf / "config.json").exists():
            tiny.tiny_random(name, hf, dtype)
        experts = {"num_experts", "num_local_experts", "n_routed_experts"} & tiny.config(
            name
        ).keys()
        for sizes in DENSE_SIZES + (MOE_SIZES if experts else []):
            formats, why = possible(hf, sizes)
            where = f"grid/{name}/{dtype}/{said(sizes)}"
            if why and machine.only in where and where not in known:
                append(work, {"case": where, "part": "grid", "not_possible": why})
            for impl in (TE, LOCAL) if machine.device == "cuda" else (LOCAL,):
                if formats and not (sizes == CP and (impl == LOCAL or dtype == "float32")):
                    job = {"hf": str(hf), "sizes": sizes, "impl": impl, "formats": formats}
                    cases.append(
                        Case(
                            f"{where}/{impl}", "grid", world(sizes), job, guess_s=75, timeout_s=240
                        )
                    )
    cases.sort(key=urgency)
    run_cases("grid", cases, work, machine)


def urgency(case: Case) -> int:
    """What there may be no time for comes last."""
    if case.job["impl"] == TE:
        return 2 if "/float32/" in case.key else 0
    return 1 if case.job["sizes"] in LOCAL_FIRST else 3


def possible(hf: Path, sizes: Sizes) -> tuple[list[str], str]:
    """Formats in which mckpt plans the model at these sizes, and why not in the others."""
    formats, why = [], []
    for form in ("torch_dist", "torch"):
        try:
            mckpt.plan(
                hf,
                hf.parent / "nowhere",
                format=form,
                parallel=parallel_of(sizes),
                allow_inexact=ALLOW,
            )
            formats.append(form)
        except MckptError as e:
            why.append(f"{form}: {e}")
    return formats, "; ".join(why)


@main.command()
@common(per_gpu=4)
@click.option("--layers", type=int, help="Fewer, for a rehearsal.")
@click.option("--shrink", type=int, default=1, help="Divides the widths, for a rehearsal.")
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    help="For the checkpoints; /dev/shm if it has room, else WORK.",
)
def large(layers: int | None, shrink: int, space: Path | None, **o: Any) -> None:
    """A model of Llama-3.1-8B's shape."""
    work, machine = o["work"].resolve(), set_up(**o)
    config = shrunk(
        json.loads((ROOT / "fixtures" / "configs" / "llama-3.1-8b.json").read_text()),
        shrink,
        layers,
    )
    nbytes = 2 * num_parameters(config)
    if space is None:
        shm = Path("/dev/shm")
        left = shm / "mckpt-gpu-verification"
        space = (
            left
            if left.exists() or (shm.is_dir() and shutil.disk_usage(shm).free > 4 * nbytes)
            else work / "large"
        )
    files = {"hf": str(space / "hf"), "megatron": str(space / "megatron")}
    cases = [
        Case("large/make", "make", 1, {**files, "config": config}, guess_s=60, timeout_s=300),
        Case("large/convert", "convert", 1, files, guess_s=120, timeout_s=400, needs="large/make"),
    ]
    for sizes, impl in (({"tp": 4}, TE), ({"tp": 2, "pp": 2}, TE), ({"tp": 1}, LOCAL)):
        impl = impl if machine.device == "cuda" else LOCAL
        job = {**files, "form": "torch_dist", "sizes": sizes, "impl": impl, "timeout_s": 300}
        cases.append(
            Case(
                f"large/{said(sizes)}/{impl}",
                "verify",
                world(sizes),
                job,
                guess_s=180,
                timeout_s=450,
                needs="large/convert",
            )
        )
    run_cases("large", cases, work, machine)
    print(f"its checkpoints are kept for the next call, in {space}", flush=True)


@main.command()
@common(per_gpu=6)
@click.option("--steps", type=int, default=60, show_default=True, help="Of the first run.")
@click.option(
    "--more",
    type=int,
    default=10,
    show_default=True,
    help="Steps after a reshard, and of a resumed run.",
)
@click.option(
    "--shrink", type=int, default=1, help="Divides the widths of the dense model, for a rehearsal."
)
def training(steps: int, more: int, shrink: int, **o: Any) -> None:
    """Train, reshard, go on, resume, convert back: the same losses at every size."""
    work, machine = o["work"].resolve(), set_up(**o)
    wide = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "max_window_layers": 8,
    }
    # vocabularies of whole 128s: training moves rows of padding, which the softmax sees and Hugging
    # Face does not have
    ranks = 4 if machine.gpus >= 4 else 2
    base = BASE[ranks]
    cases: list[Case] = []
    for name, config, tiny_name, others in (
        (
            "dense",
            shrunk(tiny.config("qwen3") | wide, shrink) | {"vocab_size": 1024},
            None,
            DENSE_OTHERS[ranks],
        ),
        ("moe", tiny.config("mixtral") | {"vocab_size": 256}, "mixtral", MOE_OTHERS[ranks]),
    ):
        length = min(256, config["max_position_embeddings"]) // (1 if shrink == 1 else 2)
        rows, at_once = (32, 8) if shrink == 1 else (8, 2)
        always = {
            "global_batch_size": rows,
            "micro_batch_size": at_once,
            "seq_length": length,
            "seed": 1234,
        }
        falling = {
            **always,
            "steps": steps,
            "decay_steps": 2 * steps,
            "warmup": min(5, steps // 2),
            "lr": 1e-3,
        }
        short = {
            **always,
            "steps": more,
            "decay_steps": 2 * more,
            "warmup": min(2, more // 2),
            "lr": 2e-4,
        }
        for dtype in ("bfloat16", "float32"):
            home = work / "training" / f"{name}-{dtype}"
            start = f"training/{name}/{dtype}/start"
            saved = str(home / "save" / f"iter_{steps - more:07d}")
            saving = {
                "save": str(home / "save"),
                "save_interval": steps - more,
                "optimizer_format": "fully_reshardable",
            }
            job = {
                "config": config,
                "tiny": tiny_name,
                "home": str(home),
                "sizes": base,
                "train": {**falling, **saving, "dtype": dtype},
            }
            cases.append(Case(start, "start", ranks, job, guess_s=150, timeout_s=400))

            def add(
                what: str,
                sizes: Sizes,
                job: Json,
                needs: str,
                kind: str = "train",
                guess_s: float = 90,
            ) -> None:
                cases.append(
                    Case(
                        what,
                        kind,
                        ranks,
                        {"sizes": sizes, **job},
                        guess_s=guess_s,
                        timeout_s=400,
                        needs=needs,
                    )
                )

            # whose weights the short runs of both dtypes begin with
            bf16 = f"training/{name}/bfloat16/start"
            from_bf16 = {
                **short,
                "dtype": dtype,
                "checkpoint": str(
                    work / "training" / f"{name}-bfloat16" / "save" / Path(saved).name
                ),
            }
            add(
                f"training/{name}/{dtype}/weights/{said(base, ranks)}/itself",
                base,
                {"train": from_bf16},
                bf16,
            )
            if machine.device == "cuda":
                add(
                    f"training/{name}/{dtype}/weights/{said(base, ranks)}/itself, {LOCAL}",
                    base,
                    {"train": from_bf16, "impl": LOCAL},
                    bf16,
                )
            # the strict comparison; in bf16, what has a kernel of its own there
            if dtype == "float32":
                chosen, forms = (
                    [sizes for sizes in others if "cp" not in sizes],
                    ["torch_dist", "torch"],
                )
            else:
                chosen, forms = (
                    [sizes for i, sizes in enumerate(others) if i == 0 or "cp" in sizes],
                    ["torch_dist"],
                )
            chosen = [sizes for sizes in chosen if machine.device == "cuda" or "cp" not in sizes]
            for sizes in chosen:
                for form in forms:
                    add(
                        f"training/{name}/{dtype}/weights/{said(sizes, ranks)}/{form}",
                        sizes,
                        {"train": from_bf16, "reshard": form},
                        bf16,
                    )
            resumed = {**falling, "dtype": dtype, "checkpoint": saved, "resume": True}
            for sizes in [base, *chosen]:
                add(
                    f"training/{name}/{dtype}/resumed/{said(sizes, ranks)}",
                    sizes,
                    {"train": resumed},
                    start,
                )
            last = str(home / "save" / f"iter_{steps:07d}")
            back: Json = {
                "home": str(home),
                "saved": last,
                "done": steps,
                "train": {**falling, "dtype": dtype},
                "impl": "auto",
            }
            add(f"training/{name}/{dtype}/back", base, back, start, "back", guess_s=200)
    cases.sort(key=lambda case: ("start", "back", "train").index(case.kind))  # the longest first
    run_cases("training", cases, work, machine)


@main.command("one-case", hidden=True)
@click.argument("path", type=click.Path(path_type=Path))
def one_case_command(path: Path) -> None:
    one_case(path)


# --------------------------------------------------------------------------------------- the report


@main.command()
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("/tmp/gpu-verification"),
    show_default=True,
)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    default=ROOT / "docs" / "gpu-verification.md",
    show_default="docs/gpu-verification.md",
)
def write(work: Path, to: Path) -> None:
    """The report, from WORK/results.jsonl."""
    found = results(work)
    to.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(
        [
            *introduction(found),
            *grid_report(found),
            *large_report(found),
            *training_report(found),
            *left_out(found),
        ]
    )
    to.write_text(text + "\n")
    print(f"{to}: {len(found)} results")


def introduction(found: dict[str, Json]) -> Iterator[str]:
    about = found["about"]
    days = sorted({r["time"][:10] for r in found.values() if r.get("time")})
    gpus = about["gpus"]
    machine = (
        f"{len(gpus)} x {gpus[0][0]}, {gpus[0][1]:,} MiB each"
        if gpus
        else "no GPU: a rehearsal on the CPU"
    )
    yield "# Verification on GPUs"
    yield (
        "What `mckpt verify` says, and what training says, on real GPUs, with the real"
        " Megatron-Core and Transformer Engine. Written by `benchmarks/gpu_verification.py` from"
        " its results, never by hand."
    )
    yield table(
        ["", ""],
        [
            ["date", " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "?"],
            ["machine", f"{machine}; {about['cores']} cores"],
            *([name, str(version)] for name, version in about["versions"].items() if version),
        ],
    )
    yield (
        "To run it again, on a machine with as many GPUs (each command stops by itself after 560 s,"
        " and goes on when it is given again):"
    )
    commands = (
        f"python benchmarks/gpu_verification.py {part}"
        for part in ("grid", "large", "training", "write")
    )
    yield "\n".join(["<!-- not run: needs GPUs -->", "```sh", *commands, "```"])
    yield (
        "How to read the tables. Both sides run in fp32, and in the checkpoint's own dtype. *max*"
        " is the largest difference of a logit, over the vocabulary and all judged positions;"
        " *noise* is how far transformers is from itself with its sums in another order, on the"
        " same tokens; *margin* is how many times *max* is below the tolerance, which is made of"
        " that noise. *rms* is the root mean square difference in the own dtype from transformers"
        " in fp32, *rms (hf)* that of transformers in that dtype. TE is Transformer Engine's layer"
        " spec, local is Megatron-Core's own. `torch` files were converted at the sizes at which"
        " they ran. cp runs in the own dtype alone, since Transformer Engine's context parallelism"
        " computes nothing in fp32: its margin is that of *rms*."
    )


def verdict_rows(record: Json, label: str) -> Iterator[list[str]]:
    """A row for each format: sizes, layers, format, verdict, and the numbers."""
    for form, v in record["result"]["verdicts"].items():
        if "logits" not in v:
            yield [label, "", form, f"**{v['verdict']}**", *[""] * 7, f"{record['seconds']:.0f}"]
            continue
        # cp runs in the own dtype alone
        exact = v["logits"].get("float32", {}) if label != said(CP) else {}
        low = list(v["logits"].values())[-1] if v["dtype"] != "float32" else {}
        yield [
            label,
            "TE" if v["impl"] == TE else v["impl"],
            form,
            v["verdict"] if v["verdict"] == "pass" else f"**{v['verdict']}**",
            *(number(exact.get(k)) for k in ("max_abs", "noise", "tolerance", "below")),
            *(number(low.get(k)) for k in ("rms", "noise", "below")),
            f"{record['seconds']:.0f}",
        ]


VERDICT_HEAD = [
    "sizes",
    "layers",
    "format",
    "verdict",
    "max",
    "noise",
    "tolerance",
    "margin",
    "rms",
    "rms (hf)",
    "margin",
    "s",
]


def grid_report(found: dict[str, Json]) -> Iterator[str]:
    records = [r for r in found.values() if r.get("part") == "grid" and "result" in r]
    if not records:
        return
    every = [(r, form, v) for r in records for form, v in r["result"]["verdicts"].items()]
    passed = sum(v["verdict"] == "pass" for _, _, v in every)
    yield "## Every family, every size"
    yield (
        f"{len(every)} verdicts on the shapes of `fixtures/tiny` with random weights: {passed} pass"
        + "".join(
            f", {n} {word}"
            for word in ("fail", "incomplete", "error")
            if (n := sum(v["verdict"] == word for _, _, v in every))
        )
        + ". By size, over all models and formats:"
    )
    names = list(dict.fromkeys(said(sizes) for sizes in DENSE_SIZES + MOE_SIZES))
    rows = []
    for size in names:
        row = [size]
        for impl in (TE, LOCAL):
            mine = [v for r, _, v in every if r["case"].split("/")[3:] == [size, impl]]
            shown = -1 if size == said(CP) else 0  # cp runs in the own dtype, which comes last
            margins = [list(v["logits"].values())[shown]["below"] for v in mine if "logits" in v]
            row += (
                [
                    f"{sum(v['verdict'] == 'pass' for v in mine)} of {len(mine)}",
                    number(min(map(float, margins), default=None)),
                ]
                if mine
                else ["" if size == said(CP) and impl == LOCAL else "not run yet", ""]
            )
        rows.append(row)
    yield table(["sizes", "TE: pass", "least margin", "local: pass", "least margin"], rows)
    models = dict.fromkeys(tuple(r["case"].split("/")[1:3]) for r in records)
    for name, dtype in sorted(models):
        mine = [
            r
            for size in names
            for r in records
            if r["case"].startswith(f"grid/{name}/{dtype}/{size}/")
        ]
        rows = [row for r in mine for row in verdict_rows(r, r["case"].split("/")[3])]
        count = sum(row[3] == "pass" for row in rows)
        yield f"<details><summary>{name}, {dtype}: {count} of {len(rows)} pass</summary>"
        yield table(VERDICT_HEAD, rows)
        yield "</details>"
    yield from reasons(every)


def reasons(every: list[tuple[Json, str, Json]]) -> Iterator[str]:
    """Why what did not pass did not, once for each reason."""
    why: dict[str, list[str]] = {}
    for r, form, v in every:
        if v["verdict"] != "pass":
            text = last_line(v["error"]) if "error" in v else "; ".join(v["reasons"])
            why.setdefault(text[:600], []).append(f"{r['case']} ({form}, {v['verdict']})")
    if why:
        yield "What did not pass:"
        yield "\n".join(f"- {', '.join(where)}: {text}" for text, where in why.items())


def large_report(found: dict[str, Json]) -> Iterator[str]:
    done = {
        r["case"].removeprefix("large/"): r
        for r in found.values()
        if r.get("part") == "large" and "result" in r
    }
    if "make" not in done:
        return
    made = done["make"]["result"]
    yield "## A large model"
    yield (
        f"Llama-3.1-8B's shape, {made['parameters'] / 1e9:.2f}B parameters in bf16"
        f" ({made['bytes'] / 1e9:.2f} GB), weights as transformers initialises them, norms beside"
        f" 1; written in {made['seconds']:.0f} s."
    )
    if "convert" in done:
        c = done["convert"]["result"]
        gb = c["bytes"] / 1e9
        runs = {
            "first_s": "hf -> torch_dist, the first time",
            "again_s": "hf -> torch_dist, again",
            "back_s": "torch_dist -> hf",
        }
        rows = [[what, f"{c[key]:.1f}", f"{gb / c[key]:.2f}"] for key, what in runs.items()]
        yield table(
            ["`mckpt`, default memory and threads, whole process", "s", "GB/s written"], rows
        )
        yield (
            f"Peak memory of the process {c['peak_mib']:.0f} MiB. What came back, against what went"
            f" in, by `mckpt diff`: {c['diff']}."
        )
    records = [r for r in done.values() if "verdicts" in r["result"]]
    if records:
        yield table(
            VERDICT_HEAD, [row for r in records for row in verdict_rows(r, r["case"].split("/")[1])]
        )
        rows = []
        for r in records:
            for v in r["result"]["verdicts"].values():
                if "logits" not in v:
                    continue
                exact, low = v["logits"]["float32"], v["logits"].get("bfloat16", {})
                rows.append(
                    [
                        r["case"].split("/")[1],
                        number(exact["kl"]),
                        f"{exact['top1']:.4%}",
                        number(low.get("kl")),
                        number(low.get("kl_transformers")),
                        number(exact["loss"], 7),
                        number(exact["loss_hf"], 7),
                        f"{v['tokens']['judged']} of {v['tokens']['positions']}",
                        number(exact["probe_above"]),
                    ]
                )
        head = [
            "sizes",
            "fp32: KL",
            "same top 1",
            "bf16: KL",
            "KL (hf)",
            "fp32: loss",
            "loss (hf)",
            "positions",
            "a fault, in tolerances",
        ]
        yield table(head, rows)
        yield from reasons(
            [(r, form, v) for r in records for form, v in r["result"]["verdicts"].items()]
        )


FLOAT32_TOLERANCE = 1e-5  # relative, of a loss
NOISES = 2.0  # bf16: each of two runs is that far from fp32
FALLS = 0.2
# steps of a resumed run that tell whether its state came over whole: after them rounding grows
# where training is unstable
EARLY = 5


def training_report(found: dict[str, Json]) -> Iterator[str]:
    runs = {
        r["case"].removeprefix("training/"): r["result"]
        for r in found.values()
        if r.get("part") == "training" and "result" in r
    }
    if not runs:
        return
    yield "## Training"
    yield (
        "Hugging Face -> Megatron by mckpt, then mckpt's trainer: real DDP, distributed optimizer,"
        " Adam. *weights*: `mckpt reshard --no-optimizer` of what was saved before the end, and a"
        " new run from these weights, at other sizes and from both formats, beside the same run"
        " from the checkpoint itself. *resumed*: the run goes on with its optimizer, beside the"
        " run that was not interrupted. *apart* is the largest difference of a loss, relative."
        f" Tolerance: in fp32 {FLOAT32_TOLERANCE:g}; in bf16 {NOISES:g} times what the short run is"
        f" from itself in fp32. Resumed runs are held to it for {EARLY} steps, which tell whether"
        " weights, moments and schedule came over whole: in a phase in which gradient norms spike,"
        " rounding alone grows tenfold a step."
    )
    for model in ("dense", "moe"):
        mine = {
            key.removeprefix(f"{model}/"): r
            for key, r in runs.items()
            if key.startswith(f"{model}/")
        }
        if not mine:
            yield f"Not run yet: the {'dense model' if model == 'dense' else 'mixture of experts'}."
            continue
        size = max((r.get("parameters", 0) for r in mine.values()), default=0) / 1e6
        yield (
            f"### {'A dense model (Qwen3' if model == 'dense' else 'A mixture of experts (mixtral'},"
            f" {size:.3g}M parameters)"
        )
        yield from falling(mine)
        rows = []
        for dtype in ("float32", "bfloat16"):
            for key, r in sorted(mine.items(), reverse=True):
                kind, what, *source = (
                    [*key.removeprefix(f"{dtype}/").split("/", 2), ""]
                    if key.startswith(f"{dtype}/")
                    else ["", ""]
                )
                if kind in ("weights", "resumed"):
                    rows.append([kind, dtype, what, source[0], *beside(mine, dtype, kind, r)])
        yield table(
            [
                "run",
                "dtype",
                "sizes",
                "from",
                "steps",
                "last loss",
                "apart",
                "tolerance",
                "",
                "apart, all steps",
            ],
            rows,
        )
        backs = {
            dtype: mine[f"{dtype}/back"]
            for dtype in ("float32", "bfloat16")
            if f"{dtype}/back" in mine
        }
        if backs:
            yield (
                "Converted back by mckpt after the last step: transformers' loss (fp32) on the"
                " sequences of the trainer's next step."
            )
            yield table(
                ["trained in", "step", "transformers", "trainer", "apart", "tolerance", ""],
                [row for dtype, r in backs.items() for row in back_rows(mine, dtype, r)],
            )
            records = [
                ({"case": f"{model}, {dtype}", "seconds": 0.0, "result": r}, dtype)
                for dtype, r in backs.items()
            ]
            yield "`mckpt verify` on what came back and what was trained:"
            yield table(
                ["trained in", *VERDICT_HEAD[1:-1]],
                [row[:-1] for r, dtype in records for row in verdict_rows(r, dtype)],
            )
            yield from reasons(
                [(r, form, v) for r, _ in records for form, v in r["result"]["verdicts"].items()]
            )


def falling(runs: dict[str, Json]) -> Iterator[str]:
    rows = []
    for dtype in ("float32", "bfloat16"):
        if f"{dtype}/start" in runs:
            r = runs[f"{dtype}/start"]
            few = min(5, len(r["losses"]) // 2)
            first, last = statistics.mean(r["losses"][:few]), statistics.mean(r["losses"][-few:])
            verdict = "falls" if last < first - FALLS else "**does not fall**"
            rows.append(
                [
                    dtype,
                    str(len(r["losses"])),
                    f"{first:.4f}",
                    f"{last:.4f}",
                    verdict,
                    f"{r['tokens_per_s']:,.0f}",
                ]
            )
    yield table(["dtype", "steps", "mean loss, first steps", "last steps", "", "tokens/s"], rows)


def beside(runs: dict[str, Json], dtype: str, kind: str, run: Json) -> list[str]:
    """Steps, last loss, how far the curve is from its reference, the tolerance, and whether that
    holds.
    """
    reference = reference_curve(runs, dtype, kind, len(run["losses"]))
    if reference is None:
        return [str(len(run["losses"])), f"{run['losses'][-1]:.6f}", "?", "?", "no reference", "?"]
    judged = EARLY if kind == "resumed" else len(reference)
    apart, tolerance = (
        relative(run["losses"][:judged], reference[:judged]),
        tolerance_of(runs, dtype, "weights", len(run["losses"])),
    )
    steps = f"{run['steps'][0]:.0f} to {run['steps'][-1]:.0f}"
    whole = relative(run["losses"], reference)
    return [
        steps,
        f"{run['losses'][-1]:.6f}",
        number(apart),
        number(tolerance),
        holds(apart, tolerance),
        number(whole),
    ]


def reference_curve(runs: dict[str, Json], dtype: str, kind: str, steps: int) -> list[float] | None:
    """The losses that a run is held against: of the uninterrupted run, or of the one from the
    checkpoint itself.
    """
    if kind == "resumed":
        return runs[f"{dtype}/start"]["losses"][-steps:] if f"{dtype}/start" in runs else None
    return next(
        (
            r["losses"]
            for key, r in runs.items()
            if key.startswith(f"{dtype}/weights/") and key.endswith("/itself")
        ),
        None,
    )


def tolerance_of(runs: dict[str, Json], dtype: str, kind: str, steps: int) -> float | None:
    if dtype == "float32":
        return FLOAT32_TOLERANCE
    low, exact = (reference_curve(runs, d, kind, steps) for d in ("bfloat16", "float32"))
    return NOISES * relative(low, exact) if low and exact else None


def back_rows(runs: dict[str, Json], dtype: str, r: Json) -> Iterator[list[str]]:
    for step, ours, theirs, computed in (
        ("1 of a new run, in fp32", "trainer_float32", "transformers", "float32"),
        (f"the next, in {dtype}", "trainer_resumed", "transformers_next", dtype),
    ):
        apart, tolerance = (
            abs(r[ours] - r[theirs]) / r[theirs],
            tolerance_of(runs, computed, "weights", 0),
        )
        yield [
            dtype,
            step,
            f"{r[theirs]:.6f}",
            f"{r[ours]:.6f}",
            number(apart),
            number(tolerance),
            holds(apart, tolerance),
        ]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def holds(apart: float, tolerance: float | None) -> str:
    return "?" if tolerance is None else "the same" if apart <= tolerance else "**apart**"


def left_out(found: dict[str, Json]) -> Iterator[str]:
    why: dict[str, list[str]] = {}
    for key, r in found.items():
        if "not_possible" in r:
            why.setdefault("mckpt refuses: " + r["not_possible"], []).append(
                key.removeprefix("grid/")
            )
        elif "error" in r:
            why.setdefault(last_line(r["error"]), []).append(key)
    yield "## What was not possible, or failed to run"
    fixed = (
        "- context parallelism with the local layer spec, and in models of fp32: it is Transformer"
        " Engine's, whose kernels for it compute in bf16"
    )
    yield "\n".join([fixed, *(f"- {', '.join(where)}: {text}" for text, where in why.items())])


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def number(value: Any, digits: int = 3) -> str:
    """Three digits; infinite numbers come as text."""
    return "" if value is None else f"{float(value):.{digits}g}"


if __name__ == "__main__":
    main()
