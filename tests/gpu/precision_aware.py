"""Trains with --use-precision-aware-optimizer on the real Megatron-Core and Transformer Engine, and
goes on from what mckpt makes of the checkpoints.

    OUT=FOLDER python tests/gpu/precision_aware.py [--work DIR] [--gpus 2] [--only fp16-fp8]

Megatron then keeps master copies and the moments of Adam in the dtypes that the user names:

    master   fp32  the low 16 bits of each; fp16  half precision with a scale
    moments  fp32, bf16, fp16, fp8

For each combination, and for the plain optimizer, one launch trains SAVED_AT steps, saves the state
in every form in which Megatron stores it, and trains MORE steps on. mckpt repairs and reshards each
of these checkpoints. Then a launch of its own loads each of them, and each result, and trains the
same steps. Before it steps, it saves the state that it loaded under the names of the weights. This
state is compared with the one of the first launch, and the losses are compared too.

With two GPUs, tp 2 becomes pp 2. With one, mckpt reshards to tp 2 and back again.

WORK/results.json has every record, WORK/table.md and stdout have a row for each. FOLDER gets both,
and the saved checkpoints as archives. `--device cpu` runs all of it without a GPU, on a stand-in
for the optimizer of Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

SAVED_AT, MORE = 3, 4  # steps
MASTERS = ("fp32", "fp16")
MOMENTS = ("fp32", "bf16", "fp16", "fp8")
FORMS = {
    "fully_reshardable": ("torch_dist", "fully_reshardable"),
    "dp_reshardable": ("torch_dist", "dp_reshardable"),
    "torch": ("torch", "fully_reshardable"),
}
NAMED = "fully_reshardable"  # the form with the names of the weights
MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
LAYOUTS = {1: ({"tp": 1}, [{"tp": 2}, {"tp": 1}]), 2: ({"tp": 2}, [{"pp": 2}])}
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron asks for it with tensor parallelism
    # shared hosts: no NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # one host, which may have no other network
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
COLUMNS = (
    *("master", "moments", "form", "way", "result"),
    *("weights", "masters", "exp_avg", "exp_avg_sq", "losses"),
)
ARCHIVE_BYTES = 15 << 20  # the largest file that comes back from a machine
ERROR_SHOWN = 600  # characters

Json = dict[str, Any]


def main() -> int:
    options = parser().parse_args()
    work = options.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    runner = Runner(work, options)
    names = [
        ("plain", "plain"),
        *((master, moments) for master in MASTERS for moments in MOMENTS),
    ]
    names = [name for name in names if options.only in "-".join(name)]
    started = time.monotonic()
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: runner.combination(*name), names))
    records = [record for records in found for record in records]
    (work / "results.json").write_text(json.dumps(records, indent=2, default=str) + "\n")
    table = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    for record in records:
        table += "| " + " | ".join(str(record.get(column, "")) for column in COLUMNS) + " |\n"
    (work / "table.md").write_text(table)
    print(table)
    for record in records:
        if "error" in record:
            print(f"{record['master']} {record['moments']} {record['form']} {record['way']}:")
            print(f"    {record['error'][-ERROR_SHOWN:]}")
    print(f"{len(records)} rows in {time.monotonic() - started:.0f} s")
    if os.environ.get("OUT"):
        hand_over(work, Path(os.environ["OUT"]))
    return 0 if records else 1


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    only = "run the combinations whose MASTER-MOMENTS contains this, such as fp16-fp8"
    out.add_argument("--work", type=Path, default=Path("/tmp/precision-aware"))
    out.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    out.add_argument("--gpus", type=int, choices=[1, 2], default=2, help="ranks of each launch")
    out.add_argument("--only", default="", help=only)
    out.add_argument("--limit-s", type=float, default=100, help="seconds for one launch")
    out.add_argument("--total-s", type=float, default=450, help="seconds for all of them")
    at_once = "launches that run side by side; 10, or 1 without GPUs"
    out.add_argument("--at-once", type=int, help=at_once)
    return out


def hand_over(work: Path, out: Path) -> None:
    """Copies the results to `out`, and the saved checkpoints as one archive for each combination
    and form, as far as they are small enough.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "table.md"):
        shutil.copy(work / name, out / name)
    saved = sorted(work.glob("*/saved/*"))
    for master in sorted({path.parent.parent.name.partition("-")[0] for path in saved}):
        for number in (0, 1):
            chosen = [path for path in saved if path.parent.parent.name.startswith(master)]
            half = chosen[number * len(chosen) // 2 : (number + 1) * len(chosen) // 2]
            path = out / f"{master}-{number}.tar.xz"
            with tarfile.open(path, "w:xz", preset=1) as archive:
                for folder in half:
                    archive.add(folder, folder.relative_to(work))
            if path.stat().st_size > ARCHIVE_BYTES:
                print(f"{path.name} has {path.stat().st_size:,} bytes and is left out")
                path.unlink()


class Runner:
    """Runs the launches, a few at once."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work, self.device, self.gpus = work, options.device, options.gpus
        self.first, self.others = LAYOUTS[self.gpus]
        self.limit_s, self.ends = options.limit_s, time.monotonic() + options.total_s
        self.slots = threading.Semaphore(options.at_once or (10 if self.device == "cuda" else 1))
        self.start = work / "start"
        self.lock = threading.Lock()

    def model(self) -> Path:
        """Returns the checkpoint with which all combinations begin."""
        with self.lock:
            if not self.start.exists():
                import mckpt
                from tests.helpers import tiny

                hf = tiny.tiny_random("qwen3", self.work / "hf", "bfloat16", **MODEL)
                mckpt.plan(hf, self.start, format="torch_dist", divisible_by=64).run()
        return self.start

    def combination(self, master: str, moments: str) -> list[Json]:
        """Returns the records of one combination."""
        home = self.work / f"{master}-{moments}"
        home.mkdir()
        records: list[Json] = []

        def record(form: str, way: str) -> Json:
            records.append({"master": master, "moments": moments, "form": form, "way": way})
            return records[-1]

        first = record("", f"train at {said(self.first)}")
        job: Json = {"master": master, "moments": moments, "device": self.device}
        try:
            trained = self.launch(
                home / "train",
                job | {"kind": "train", "checkpoint": str(self.model()), "sizes": self.first},
            )
        except Exception as error:
            first |= {"result": "failed", "error": f"{type(error).__name__}: {error}"}
            return records
        first |= {"result": "ok", "loss": trained["losses"]}
        tasks: list[tuple[Json, Path, dict[str, int]]] = []
        for form in FORMS:
            saved = home / "saved" / form
            tasks.append((record(form, f"megatron-core, {said(self.first)}"), saved, self.first))
            last = self.others[-1]
            if form == NAMED and last != self.first:
                tasks.append((record(form, f"megatron-core, {said(last)}"), saved, last))
            tasks += self.converted(home, form, saved, record)
        with ThreadPoolExecutor(max(1, len(tasks))) as pool:
            list(pool.map(lambda task: self.resume(home, job, trained, *task), tasks))
        return records

    def converted(
        self, home: Path, form: str, saved: Path, record: Any
    ) -> Iterator[tuple[Json, Path, dict[str, int]]]:
        """Repairs and reshards a checkpoint; yields a record, the result and its sizes."""
        ways = [("repair", "", [self.first])]
        ways += [("reshard", kind, self.others) for kind in ("torch_dist", "torch")]
        for command, kind, layouts in ways:
            one = record(form, " ".join(["mckpt", command, *kind.split(), "to", said(layouts[-1])]))
            source = saved
            try:
                for number, layout in enumerate(layouts):
                    target = home / "converted" / "-".join([form, command, kind, str(number)])
                    arguments = [command, str(source), str(target)]
                    if command == "reshard":
                        sizes = {"tp": 1, "pp": 1, "etp": layout.get("tp", 1)} | layout
                        arguments += [
                            x for k, n in sizes.items() for x in (f"--target-{k}", str(n))
                        ]
                        arguments += ["--target-format", kind, "--keep-padding"]
                    self.mckpt(*arguments)
                    source = target if target.exists() else source  # it is portable already
            except Exception as error:
                one |= {"result": "not converted", "error": str(error)}
                continue
            yield one, source, layouts[-1]

    def left(self) -> float:
        """Returns the seconds that a launch may take. Raises TimeoutError if there are none."""
        found = min(self.limit_s, self.ends - time.monotonic())
        if found <= 0:
            raise TimeoutError("the time for all launches is over")
        return found

    def mckpt(self, *arguments: str) -> None:
        with self.slots:
            done = subprocess.run(
                [sys.executable, "-m", "mckpt", *arguments],
                env=os.environ | {"PYTHONPATH": paths()},
                capture_output=True,
                text=True,
                timeout=self.left(),
            )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")

    def resume(
        self, home: Path, job: Json, trained: Json, record: Json, path: Path, sizes: dict[str, int]
    ) -> None:
        """Goes on from a checkpoint, and adds what it finds to the record."""
        name = f"{record['form']}-{record['way']}".replace(" ", "-").replace(",", "")
        directory = home / "resumed" / name
        job = job | {"kind": "resume", "checkpoint": str(path), "sizes": sizes}
        try:
            found = self.launch(directory, job)
            record["losses"] = apart(found["losses"], trained["losses"])
            record["loss"] = found["losses"]
            record |= compare(home / "saved" / NAMED, directory / "loaded")
            record["result"] = "ok"
        except Exception as error:
            record |= {"result": "failed", "error": f"{type(error).__name__}: {error}"}
            record["traceback"] = traceback.format_exc()

    def launch(self, directory: Path, job: Json) -> Json:
        """Runs a job on its ranks; returns what the first one found. Raises RuntimeError with the
        end of the log of the rank that failed first.
        """
        directory.mkdir(parents=True)
        job |= {"directory": str(directory), "ranks": self.gpus}
        (directory / "job.json").write_text(json.dumps(job))
        logs = [directory / f"rank{rank}.log" for rank in range(self.gpus)]
        with self.slots, contextlib.ExitStack() as stack:
            ranks = []
            deadline = time.monotonic() + self.left()
            for rank, log in enumerate(logs):
                stream = stack.enter_context(log.open("w"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.gpus)}
                ranks.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            str(Path(__file__).resolve()),
                            "--as-rank",
                            str(directory),
                        ],
                        env=os.environ | ENVIRONMENT | own | {"PYTHONPATH": paths()},
                        stdout=stream,
                        stderr=stream,
                        start_new_session=True,
                    )
                )
            codes = wait(ranks, deadline)
        if any(code != 0 for code in codes):
            failed = next((i for i, code in enumerate(codes) if code not in (0, None)), 0)
            text = logs[failed].read_text(errors="replace").strip()
            if codes[failed] is None:
                text = f"was ended after too long; {text}"
            raise RuntimeError(text[-3 * ERROR_SHOWN :])
        found: Json = json.loads((directory / "found.json").read_text())
        return found


def wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Returns the exit codes; None for a rank that had to be ended. When one fails, the others get
    5 s.
    """
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.1)
        return [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def paths() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def said(sizes: dict[str, int]) -> str:
    return " ".join(f"{name}{n}" for name, n in sizes.items())


def apart(found: list[float], wanted: list[float]) -> str:
    largest = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    return "equal" if largest == 0 else f"{largest:.1e}"


def compare(first: Path, other: Path) -> Json:
    """Compares weights and states of two checkpoints, by the names of the weights. A difference is
    that of the largest element, relative to the largest element of the tensor.
    """
    from mckpt.checkpoint.checkpoint import Checkpoint

    one, two = (Checkpoint.open(path).with_optimizer() for path in (first, other))
    out: Json = {}
    worst: dict[str, float] = {}
    numbers: dict[str, int] = {}
    for name in one:
        kind = name.partition("@")[2] or "weights"
        a, b = one[name].numpy(), two[name].numpy()
        if kind == "master":
            weights = (one[name.partition("@")[0]].numpy(), two[name.partition("@")[0]].numpy())
            a, b = (master(*pair) for pair in zip(weights, (a, b), strict=True))
        a, b = a.astype("f8"), b.astype("f8")
        numbers[kind] = numbers.get(kind, 0) + 1
        scale = np.abs(a).max() or 1.0
        worst[kind] = max(worst.get(kind, 0.0), float(np.abs(a - b).max() / scale))
    for kind, value in worst.items():
        label = {"master": "masters"}.get(kind, kind)
        out[label] = "equal" if value == 0 else f"{value:.1e}"
    out["compared"] = numbers
    return out


def master(weight: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Returns fp32 master copies. If whole numbers are stored, they are the low bits."""
    whole = np.array_equal(stored, np.trunc(stored)) and np.abs(stored).max() > 1000
    if not whole:
        return stored
    high = weight.view("u2").astype("i8") << 16
    return (high + stored.astype("i8")).astype("u4").view("f4")


# ------------------------------------------------------------------------------------- on a rank


def as_rank(directory: Path) -> None:
    """Runs the job of a directory as one rank."""
    import torch
    import torch.distributed as dist

    from mckpt.trainer import build, cpu, data, load, train

    job = json.loads((directory / "job.json").read_text())
    # a save of torch_dist spawns a manager, which would import torch again; a fork has it
    multiprocessing.context.SpawnContext.Manager = lambda self: (  # type: ignore[method-assign]
        multiprocessing.get_context("fork").Manager()
    )
    cpu.install()
    rank, cuda = int(os.environ["RANK"]), job["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(directory / "store"), job["ranks"])
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job["ranks"])
    if not cuda:
        from tests.helpers import fused_adam

        fused_adam.install()
    precise = chosen(job, torch)
    configure(precise)
    impl = "transformer_engine" if cuda else "local"
    common = load.read_common(job["checkpoint"])
    args = build.at_sizes(common["args"], **job["sizes"], transformer_impl=impl)
    vars(args).update(precise)
    build.initialize(args, 60, gloo_groups=True)
    options = train.TrainOptions(
        steps=SAVED_AT + MORE,
        lr=1e-2,
        warmup=1,
        global_batch_size=4,
        seq_length=32,
        resume=job["kind"] == "resume",
    )
    args = train.run_args(args, options)
    with cpu.as_cuda():
        chunks, optimizer, scheduler = train.set_up(args, options)
        models = [chunk.module for chunk in chunks]
        state = {"optimizer": optimizer, "scheduler": scheduler}
        if options.resume:
            load.load(models, args, job["checkpoint"], **state)
            save_as(models, args, directory / "loaded", NAMED, SAVED_AT, state)
        else:
            load.load(models, args, job["checkpoint"])
            optimizer.reload_model_params()
        source = data.open_source(None, args, args.seq_length, options.seed, None)
        losses = []
        for step in range(SAVED_AT + 1 if options.resume else 1, options.steps + 1):
            found = train.train_step(step, chunks, optimizer, scheduler, args, source)
            losses.append([found["loss"], found["grad_norm"]])
            if step == SAVED_AT:
                for form in FORMS:
                    saved = directory.parent / "saved" / form
                    save_as(models, args, saved, form, step, state)
    if rank == 0:
        after = [x for pair in losses[-MORE:] for x in pair]
        (directory / "found.json").write_text(json.dumps({"losses": after}))
    dist.barrier()
    dist.destroy_process_group()


def save_as(models: Any, args: Any, path: Path, form: str, step: int, state: Any) -> None:
    from mckpt.trainer import save

    kind, sharding = FORMS[form]
    args.iteration, args.consumed_train_samples = step, step * args.global_batch_size
    args.ckpt_format, args.use_dist_ckpt = kind, kind == "torch_dist"
    args.dist_ckpt_optim_fully_reshardable = sharding == NAMED
    save.save(models, args, path, kind, step, optimizer_format=sharding, **state)


def chosen(job: Json, torch: Any) -> Json:
    """Returns the args of a run with this optimizer, as Megatron's parser makes them."""
    if job["master"] == "plain":
        return {}
    kinds = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.uint8,
    }
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": kinds[job["master"]],
        "exp_avg_dtype": kinds[job["moments"]],
        "exp_avg_sq_dtype": kinds[job["moments"]],
    }


def configure(more: Json) -> None:
    """Adds entries to the config of the optimizer that mckpt.trainer makes."""
    from megatron.core import optimizer

    plain = optimizer.OptimizerConfig

    class Config(plain):  # type: ignore[misc, valid-type]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, **(more if given else {}))

    optimizer.OptimizerConfig = Config


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(Path(sys.argv[2]))
    else:
        sys.exit(main())
