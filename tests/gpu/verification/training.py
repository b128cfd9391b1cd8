"""Convert, train, reshard, go on at other sizes, resume, convert back: the losses must agree.

Every model and dtype has a run `start` that is saved before its end and at it. The others begin
with what it saved: `weights` with the weights of the bf16 run, `resumed` with the optimizer too,
and `back` converts the last checkpoint to Hugging Face.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mckpt import launching
from tests.gpu.verification import sizes
from tests.gpu.verification.cases import Case, Json, Machine
from tests.gpu.verification.model import make_model, num_parameters, shrunk
from tests.gpu.verification.sizes import Sizes
from tests.gpu.verification.steps import LOCAL, cli, verdicts
from tests.helpers import tiny

PER_GPU = 6
DTYPES = ("bfloat16", "float32")
# Number of GPUs -> the sizes with which everything starts, and the others.
BASE: dict[int, Sizes] = {2: {"tp": 2}, 4: {"tp": 2, "pp": 2}}
DENSE: dict[int, list[Sizes]] = {
    2: [{"pp": 2}, {}],
    4: [{"tp": 4}, {"pp": 4}, {}, {"tp": 2, "cp": 2}],
}
MOE: dict[int, list[Sizes]] = {
    2: [{"ep": 2}, {}],
    4: [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2}, {}],
}
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "max_window_layers": 8,
}


def cases(work: Path, machine: Machine, steps: int, more: int, shrink: int) -> list[Case]:
    """Returns the cases. `steps` is the length of the first run, and `more` that of the runs that
    begin with its checkpoint. `shrink` divides the widths of the dense model, to rehearse.
    """
    ranks = 4 if machine.gpus >= 4 else 2
    # Vocabularies are multiples of 128: training moves rows of padding, which the softmax of the
    # trainer includes and Hugging Face does not have.
    dense = shrunk(tiny.config("qwen3") | WIDE, shrink) | {"vocab_size": 1024}
    mixture = tiny.config("mixtral") | {"vocab_size": 256}
    out: list[Case] = []
    for name, config, others in (("dense", dense, DENSE[ranks]), ("moe", mixture, MOE[ranks])):
        small = shrink > 1
        always = {
            "global_batch_size": 8 if small else 32,
            "micro_batch_size": 2 if small else 8,
            "seq_length": min(256, config["max_position_embeddings"]) // (2 if small else 1),
            "seed": 1234,
        }
        long = always | schedule(steps, warmup=5, lr=1e-3)
        short = always | schedule(more, warmup=2, lr=2e-4)
        for dtype in DTYPES:
            folder = work / "training"
            out += cases_of(folder, name, dtype, config, ranks, others, long, short)
    if machine.device == "cpu":  # which has local layers alone, and no context parallelism
        out = [case for case in out if "cp" not in case.job["sizes"] and "impl" not in case.job]
    return sorted(out, key=lambda case: ("start", "back", "train").index(case.kind))


def schedule(steps: int, warmup: int, lr: float) -> Json:
    """Returns a schedule in which the rate falls over twice the steps, so that it is not 0 where a
    run is resumed.
    """
    warmup = min(warmup, steps // 2)
    return {"steps": steps, "decay_steps": 2 * steps, "warmup": warmup, "lr": lr}


def cases_of(
    folder: Path,
    model: str,
    dtype: str,
    config: Json,
    ranks: int,
    others: list[Sizes],
    long: Json,
    short: Json,
) -> Iterator[Case]:
    """Returns the cases of one model in one dtype."""
    base, home, steps = BASE[ranks], folder / f"{model}-{dtype}", long["steps"]
    early = steps - short["steps"]  # the step of the first save
    where, start = f"training/{model}/{dtype}", f"training/{model}/{dtype}/start"

    def saved(home: Path, step: int) -> str:
        return str(home / "save" / f"iter_{step:07d}")

    def case(what: str, kind: str, size: Sizes, train: Json, needs: str | None, **job: Any) -> Case:
        job_of_all = {"sizes": size, "train": train | {"dtype": dtype}}
        return Case(f"{where}/{what}", kind, ranks, job_of_all | job, needs)

    saving = {
        "save": str(home / "save"),
        "save_interval": early,
        "optimizer_format": "fully_reshardable",
    }
    made = {"home": str(home), "model": model, "config": config}
    yield case("start", "start", base, long | saving, None, **made)

    # The strict comparison is in fp32; bf16 covers the sizes that have kernels of their own there.
    exact = dtype == "float32"
    if exact:
        chosen = [size for size in others if "cp" not in size]
    else:
        chosen = [size for size in others if size == others[0] or "cp" in size]
    of_bf16, by_bf16 = folder / f"{model}-bfloat16", f"training/{model}/bfloat16/start"
    weights = short | {"checkpoint": saved(of_bf16, early)}
    itself = f"weights/{sizes.name(base, ranks)}/itself"
    yield case(itself, "train", base, weights, by_bf16)
    yield case(f"{itself}, {LOCAL}", "train", base, weights, by_bf16, impl=LOCAL)
    for size in chosen:
        for form in ("torch_dist", "torch") if exact else ("torch_dist",):
            what = f"weights/{sizes.name(size, ranks)}/{form}"
            yield case(what, "train", size, weights, by_bf16, reshard=form)
    resumed = long | {"checkpoint": saved(home, early), "resume": True}
    for size in [base, *chosen]:
        yield case(f"resumed/{sizes.name(size, ranks)}", "train", size, resumed, start)
    yield case("back", "back", base, long, start, home=str(home), saved=saved(home, steps))


def start(job: Json) -> Json:
    """Makes the model, converts it, and runs the reference for all other runs."""
    home = Path(job["home"])
    hf, megatron = home / "hf", home / "start"
    shutil.rmtree(home, ignore_errors=True)
    if job["model"] == "moe":
        tiny.tiny_random("mixtral", hf, vocab_size=job["config"]["vocab_size"])
    else:
        make_model(job["config"], hf)
    cli("hf-to-megatron", hf, megatron)
    return run(job, str(megatron)) | {"parameters": num_parameters(job["config"])}


def train(job: Json) -> Json:
    """Continues from a saved checkpoint. `reshard` names the format in which mckpt reshards it
    first.
    """
    checkpoint = job["train"]["checkpoint"]
    if "reshard" in job:
        # a size that is not given stays as it was
        target = {"tp": 1, "pp": 1, "ep": 1} | {k: v for k, v in job["sizes"].items() if k != "cp"}
        flags = [word for k, v in target.items() for word in (f"--target-{k}", v)]
        out = Path(job["directory"]) / "resharded"
        cli("reshard", checkpoint, out, "--no-optimizer", "--target-format", job["reshard"], *flags)
        checkpoint = str(out)
    return run(job, checkpoint)


def back(job: Json) -> Json:
    """Converts the last checkpoint to Hugging Face; returns the loss of transformers beside that
    of the trainer's next step, and the verdict on the two.
    """
    saved, out, long = job["saved"], Path(job["home"]) / "out", job["train"]
    shutil.rmtree(out, ignore_errors=True)
    cli("megatron-to-hf", saved, out)
    new = run(job | {"train": long | {"dtype": "float32", "steps": 1}}, saved)
    done = long["steps"]
    following = run(job | {"train": long | {"steps": done + 1, "resume": True}}, saved)
    first, after = hf_losses(out, job, [0, done * long["global_batch_size"]])
    return {
        "trainer_float32": new["losses"][0],
        "trainer_resumed": following["losses"][0],
        "transformers": first,
        "transformers_next": after,
        "verdicts": verdicts(str(out), {"torch_dist": Path(saved)}, {"impl": "auto"} | job),
    }


def run(job: Json, checkpoint: str) -> Json:
    """Runs mckpt.trainer.train once; returns lists with a value for each step."""
    directory = Path(job["directory"])
    losses = directory / "losses.jsonl"
    losses.unlink(missing_ok=True)
    described = job["train"] | job["sizes"]
    described |= {"checkpoint": checkpoint, "losses": str(losses)}
    described |= {"transformer_impl": job.get("impl", "auto")}
    device = launching.device(job["device"], job["ranks"])
    launching.launch("mckpt.trainer.train", described, directory, device, job["ranks"])
    steps = [json.loads(line) for line in losses.read_text().splitlines()]
    return {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "steps": [step["step"] for step in steps],
        "tokens_per_s": max(step["tokens_per_s"] for step in steps),
    }


def hf_losses(directory: Path, job: Json, batches: list[int]) -> Iterator[float]:
    """Yields transformers' fp32 loss of each global batch, given by the number of its first
    sequence in the trainer's made-up text.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mckpt.trainer import data

    options, device = job["train"], job["device"]
    rows, length = options["global_batch_size"], options["seq_length"]
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.to(device).eval()
    source = data.mock(model.config.vocab_size, length, options["seed"])
    for first in batches:
        total = 0.0
        for number in range(first, first + rows):
            row = torch.from_numpy(source(number)).to(device)
            with torch.no_grad():
                logits = model(row[None, :-1], use_cache=False).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        yield total / (rows * length)
