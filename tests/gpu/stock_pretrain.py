"""Trains checkpoints that mckpt wrote with pretrain_gpt.py or pretrain_hybrid.py of Megatron-LM, on
GPUs with the real Transformer Engine, and converts them back.

    python tests/gpu/stock_pretrain.py --megatron-lm DIR [--dialect hybrid] [--work DIR]
        [--gpus 2] [--only qwen3] [--limit-s 300]

For each family, format and size mckpt writes a Megatron checkpoint in bf16. torchrun starts the
program of the dialect with the megatron_args.sh of that checkpoint and the flags in RUN, for two
iterations at a learning rate of 0, with the distributed optimizer, on made-up data, and a save.
mckpt converts the saved checkpoint to Hugging Face, and every tensor must equal the source's, bit
for bit. The log must not report that the loader tried again without strictness (`load_return`).

DIR is a checkout of Megatron-LM, or any folder that contains these programs. If DIR has no
megatron/training, or with --wheel, that of the installed wheel is used. Scripts and packages are
copied, and DIR is not written to.

WORK/results.json has a record for each case, and keeps those of earlier runs with another --only.
WORK/CASE/log.txt has the output of the trainer. stdout gets a table with a row for each case. A
case that fails, or takes longer than --limit-s, does not end the others. The exit status is 0 if
every case passed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = {"gpt": "pretrain_gpt.py", "hybrid": "pretrain_hybrid.py"}
VOCAB = 4200  # not a multiple of 128, so that the vocabulary is padded
SIZES: dict[str, Any] = {  # multiples of 16 and 32, for Transformer Engine's kernels
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"head_dim": 32},
    "qwen2": SIZES | {"max_window_layers": 2},
    "qwen3": SIZES | {"head_dim": 64},
    "mixtral": SIZES | {"head_dim": 32, "num_local_experts": 8},
    "deepseek-v3": (
        SIZES
        | {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 6,
            "n_group": 4,
            "topk_group": 3,
        }
    ),
}
MOE = ("mixtral", "deepseek-v3")
FORMATS = ("torch_dist", "torch")
# Flags of the run. They change no weight: no step, no decay, and no update of the bias of a router.
# Apex is not needed.
RUN = """
    --micro-batch-size 1 --global-batch-size 2 --seq-length 128 --train-iters 2
    --lr 0 --min-lr 0 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0
    --moe-router-bias-update-rate 0 --use-distributed-optimizer --no-gradient-accumulation-fusion
    --tokenizer-type NullTokenizer --mock-data --split 99,1,0
    --eval-iters 1 --eval-interval 1000 --log-interval 1
    --save-interval 2 --no-load-optim --no-load-rng --no-save-optim --no-save-rng
    --distributed-timeout-minutes 3
"""
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron asks for it with tensor parallelism
    # shared hosts: no NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # one host, which may have no other network
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "2",
}
COLUMNS = (
    "family",
    "dialect",
    "format",
    "sizes",
    "convert",
    "train",
    "loss",
    "back",
    "seconds",
    "result",
)
ERROR_SHOWN = 1500  # characters of a log in a record
LOSS = re.compile(r"lm loss: ([-+.\w]+)")

Json = dict[str, Any]


def main() -> int:
    options = parser().parse_args()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    gpus = num_gpus() if options.gpus is None else options.gpus
    if gpus < 1:
        raise SystemExit("no GPU is here; --gpus N starts N ranks all the same")
    dialect = options.dialect
    source = options.megatron_lm.absolute()
    program = copy_program(source, SCRIPTS[dialect], work / "megatron-lm", options.wheel)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    results = work / "results.json"
    before: list[Json] = json.loads(results.read_text()) if results.exists() else []
    records: list[Json] = []
    for family, form, size in cases(dialect, gpus):
        name = "-".join([family, dialect, form, said(size)])
        if options.only not in name:
            continue
        directory = work / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        case = Case(family, dialect, form, size, directory)
        record = run_case(case, program, options.limit_s, shlex.split(options.extra))
        records.append({"name": name} | record)
        done = {record["name"] for record in records}
        kept = [other for other in before if other["name"] not in done]
        results.write_text(json.dumps([*kept, *records], indent=2) + "\n")
        print("| " + " | ".join(str(record[column]) for column in COLUMNS) + " |", flush=True)
    failed = [record["name"] for record in records if record["result"] != "pass"]
    print(
        f"\n{len(records) - len(failed)} of {len(records)} pass"
        + "".join(f"\n- {name}: {work / name / 'log.txt'}" for name in failed)
    )
    return 1 if failed or not records else 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    work, files = Path("stock-pretrain"), "folder for checkpoints, logs and results.json"
    only = "run the cases whose name contains this, such as qwen3-torch_dist"
    wheel = "use megatron of the installed wheel, and only the scripts of the folder"
    out.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    out.add_argument("--dialect", choices=list(SCRIPTS), default="gpt")
    out.add_argument("--work", type=Path, default=work, help=files)
    out.add_argument("--gpus", type=int, help="ranks that may be started; all GPUs by default")
    out.add_argument("--only", default="", help=only)
    out.add_argument("--limit-s", type=float, default=300, help="seconds for a case's trainer")
    out.add_argument("--wheel", action="store_true", help=wheel)
    out.add_argument("--extra", default="", help="further flags for the trainer, as one text")
    return out


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


class Case(NamedTuple):
    family: str
    dialect: str
    form: str
    size: dict[str, Any]  # fields of mckpt.Parallel
    directory: Path


def cases(dialect: str, gpus: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (family, format, parallel sizes): for one GPU, and on two also tensor and expert
    parallelism. For the hybrid dialect also two pipeline stages, the first of which ends with an
    attention.
    """
    out: list[tuple[str, str, dict[str, Any]]] = []
    for family, config in FAMILIES.items():
        sizes: list[dict[str, Any]] = [{}]
        if gpus > 1:
            sizes += [{"tp": 2}, {"ep": 2, "etp": 1}] if family in MOE else [{"tp": 2}]
            if dialect == "hybrid":
                layers = 2 * config["num_hidden_layers"]
                mtp = "m" * (family == "deepseek-v3")
                sizes.append({"pp": 2, "layout": f"Ettt|{'t' * (layers - 3)}{mtp}L"})
        out += [(family, form, size) for form in FORMATS for size in sizes]
    return out


def said(size: dict[str, Any]) -> str:
    return "".join(f"{name}{n}" for name, n in size.items() if name != "layout") or "tp1"


def copy_program(source: Path, name: str, target: Path, wheel: bool) -> Path:
    """Copies the program of that name and the scripts beside it; returns the path of the copy.

    A whole Megatron-LM gets the compiled helpers of the data sets from the installed wheel, so that
    no compiler is needed.
    """
    script = source / name
    if not script.is_file():
        found = sorted(source.rglob(name), key=lambda path: len(path.parts))
        if not found:
            raise SystemExit(f"{source}: holds no {name}")
        script = found[0]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in script.parent.glob("*.py"):
        shutil.copy(path, target)
    if (script.parent / "megatron" / "training").is_dir() and not wheel:
        shutil.copytree(
            script.parent / "megatron",
            target / "megatron",
            ignore=shutil.ignore_patterns("__pycache__", ".git"),
        )
        for place in sys.path:
            for helpers in Path(place or ".").glob("megatron/core/datasets/helpers_cpp*.so"):
                shutil.copy(helpers, target / "megatron" / "core" / "datasets")
    return target / script.name


def run_case(case: Case, program: Path, limit_s: float, extra: list[str]) -> Json:
    """Converts, trains and converts back; returns the record, in which `error` is what failed."""
    size, directory = case.size, case.directory
    record: Json = dict.fromkeys(COLUMNS, "") | {
        "family": case.family,
        "dialect": case.dialect,
        "format": case.form,
        "sizes": said(size),
        "result": "FAIL",
    }
    started = time.monotonic()
    step = "convert"
    try:
        source = convert(case)
        record["convert"] = "ok"
        step = "train"
        tp, etp = size.get("tp", 1), size.get("etp", size.get("tp", 1))
        ranks = math.lcm(tp, etp * size.get("ep", 1)) * size.get("pp", 1)
        log = train(program, directory, ranks, limit_s, extra)
        record["loss"] = " ".join(LOSS.findall(log))
        problems = problems_of(log, record["loss"].split())
        if problems:
            raise ValueError("; ".join(problems))
        record["train"] = "ok"
        step = "back"
        record["tensors"] = back(source, directory)
        record["back"] = "bit for bit"
        record["result"] = "pass"
    except Exception as error:
        record[step] = "failed"
        record["error"] = f"{type(error).__name__}: {error}"
        record["traceback"] = traceback.format_exc()
        with (directory / "log.txt").open("a") as stream:
            stream.write(record["traceback"])
    record["seconds"] = round(time.monotonic() - started)
    return record


def convert(case: Case) -> dict[str, Any]:
    """Writes the Hugging Face source and the Megatron checkpoint; returns the source's tensors."""
    import mckpt
    from tests.helpers import tiny

    directory, family = case.directory, case.family
    source = tiny.tiny_random(family, directory / "hf", "bfloat16", **FAMILIES[family])
    wanted = {"format": case.form, "dialect": case.dialect}
    parallel = mckpt.Parallel(**case.size)
    mckpt.plan(source, directory / "megatron", parallel=parallel, **wanted).run()
    return tiny.tensors(json.loads((source / "config.json").read_text()), "bfloat16")


def train(program: Path, directory: Path, ranks: int, limit_s: float, extra: list[str]) -> str:
    """Runs the program under torchrun, with a launch line for bash as users write it; returns
    the log. Raises TimeoutError, or RuntimeError if the trainer fails.
    """
    from mckpt import launching

    run = [*RUN.split(), *extra, "--load", str(directory / "megatron")]
    run += ["--save", str(directory / "trained"), "--data-cache-path", str(directory / "cache")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(launching.free_port())]
    torchrun += [str(Path(__file__).resolve()), "--as-rank", str(program)]
    script = f". {shlex.quote(str(directory / 'megatron/release/megatron_args.sh'))}\n"
    script += f'exec {shlex.join(torchrun)} "${{MEGATRON_ARGS[@]}}" {shlex.join(run)}\n'
    (directory / "command.sh").write_text(script)
    path = os.pathsep.join(
        filter(None, [str(program.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    log = directory / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["bash", str(directory / "command.sh")],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
            stdout=stream,
            stderr=stream,
            cwd=directory,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    text = log.read_text(errors="replace")
    if code is None:
        raise TimeoutError(
            f"the trainer did not end in {limit_s:.0f} s; its log ends: {text[-ERROR_SHOWN:]}"
        )
    if code:
        raise RuntimeError(f"the trainer ended with exit code {code}: {reason(text)}")
    return text


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which passes SIGTERM on to its ranks. They are sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(log: str) -> str:
    """Returns the message of the first error that a rank raised, or else the end of the log."""
    found = re.search(
        r"^(?:\[rank\d+\]: ?)?([A-Z]\w*(?:Error|Exception|Exit)\b|\S+\.py: error: )",
        log,
        re.MULTILINE,
    )
    return (log[found.start(1) :] if found else log[-ERROR_SHOWN:])[:ERROR_SHOWN]


def problems_of(log: str, losses: list[str]) -> list[str]:
    """Returns the problems in the log of a run with exit code 0."""
    out = []
    if "load_return" in log:
        line = next(line for line in log.splitlines() if "load_return" in line)
        out.append(f"the loader tried again with strict=False: {line[:300]}")
    if "successfully loaded checkpoint" not in log:
        out.append("the log does not say that a checkpoint was loaded")
    train_losses = [float(value) for value in losses]
    if len(train_losses) < 2 or not all(map(math.isfinite, train_losses)):
        out.append(f"the log must have two finite losses, and has {losses}")
    return out


def back(source: dict[str, Any], directory: Path) -> int:
    """Converts the trained checkpoint to Hugging Face and compares it with the source; returns the
    number of tensors. Raises ValueError if one differs.
    """
    import ml_dtypes  # noqa: F401  safetensors gives bfloat16 as this

    import mckpt

    mckpt.plan(directory / "trained", directory / "back", format="hf").run(check_replicas=True)
    found = stored(directory / "back")
    apart = sorted(source.keys() ^ found.keys())
    if apart:
        raise ValueError(f"tensors of one side only: {apart[:5]}, {len(apart)} in all")
    different = [
        name for name, array in source.items() if (array.shape, array.tobytes()) != found[name]
    ]
    if different:
        raise ValueError(f"{len(different)} of {len(source)} tensors differ: {different[:5]}")
    return len(source)


def stored(directory: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Reads a directory of safetensors without mckpt: name -> (shape, bytes) of every tensor."""
    out = {}
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                out[name] = tuple(entry["shape"]), raw[start + first : start + last]
    return out


def as_rank(script: str, flags: list[str]) -> None:
    """Runs the program unchanged, as one rank.

    The helpers of the data sets are not compiled again if they are there. A wheel has them compiled
    and has no makefile, without which the trainer would stop.
    """
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    from megatron.core.datasets import utils

    with contextlib.suppress(ImportError):
        from megatron.core.datasets import helpers_cpp  # noqa: F401

        utils.compile_helpers = lambda: None
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2], sys.argv[3:])
    else:
        sys.path.insert(0, str(ROOT))
        sys.exit(main())
