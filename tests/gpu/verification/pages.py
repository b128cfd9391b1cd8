"""The two pages: docs/gpu-verification.md and, with a row for each run, -tables.md beside it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.verification import curves, grid, sizes
from tests.gpu.verification.cases import Json, last_line
from tests.gpu.verification.steps import LOCAL, TE
from tests.gpu.verification.tables import (
    HEAD,
    bullets,
    float32,
    not_passed,
    number,
    paragraph,
    table,
    verdict_rows,
)

Found = dict[str, Json]  # key of a case -> its line in the results

MODELS = {"dense": "A dense model (Qwen3", "moe": "A mixture of experts (mixtral"}
SIZES = list(dict.fromkeys(sizes.name(size) for size in grid.DENSE + grid.MOE))


def summary(found: Found) -> str:
    parts = [*introduction(found), *of_grid(found), *of_large(found)]
    return "\n\n".join([*parts, *of_training(found), *left_out(found)]) + "\n"


def tables(found: Found) -> str:
    parts = ["# Verification on GPUs: all tables", paragraph(TABLES)]
    return "\n\n".join([*parts, *grid_tables(found), *training_tables(found)]) + "\n"


TABLES = """
This page has a row for each run of `docs/gpu-verification.md`, which explains the columns.
`tests/gpu/verification` writes both from its results, never by hand.
"""

ABOUT = """
This page reports what `mckpt verify` and mckpt's trainer found on real GPUs, with the real
Megatron-Core and Transformer Engine. `tests/gpu/verification` writes it from its results, never by
hand, and also `docs/gpu-verification-tables.md`, which has a row for each run.
"""

AGAIN = """
These commands repeat it on a machine with as many GPUs. Each stops by itself after 560 s, and
continues when it is started again:
"""

COLUMNS = (
    "*max* is the largest difference of a logit in fp32, over the vocabulary and all compared"
    " positions.",
    "*noise* is the difference of transformers from itself on the same tokens, with its sums in"
    " another order.",
    "*tolerance* is ten times that noise, or ten times two units in the last place of the largest"
    " logit if that is more, and at most 1% of the logits' spread.",
    "The *margin* in the next column is the tolerance divided by *max*.",
    "*rms* is the root mean square difference of Megatron-Core in the checkpoint's own dtype from"
    " transformers in fp32; *rms (hf)* is that of transformers in the same dtype. The tolerance of"
    " *rms* is four times *rms (hf)*, at most half of the spread, and the second *margin* is this"
    " tolerance divided by *rms*.",
    "*layers*: TE is Transformer Engine's layer spec, local is Megatron-Core's own.",
    "*format*: a `torch` checkpoint was converted at the sizes at which it ran, a `torch_dist`"
    " checkpoint at tp1.",
    "cp runs in the checkpoint's own dtype alone, because Transformer Engine's context parallelism"
    " does not compute in fp32. Its margin is that of *rms*.",
)


def introduction(found: Found) -> Iterator[str]:
    about = found["about"]
    days = sorted({line["time"][:10] for line in found.values() if "time" in line})
    gpus = about["gpus"]
    machine = "no GPU: a rehearsal on the CPU"
    if gpus:
        machine = f"{len(gpus)} x {gpus[0][0]}, {gpus[0][1]:,} MiB each"
    yield "# Verification on GPUs"
    yield paragraph(ABOUT)
    versions = [[name, str(version)] for name, version in about["versions"].items() if version]
    date = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "?"
    yield table(
        ["", ""], [["date", date], ["machine", f"{machine}; {about['cores']} cores"], *versions]
    )
    yield paragraph(AGAIN)
    commands = ("grid", "large --space /dev/shm/large", "training", "write")
    lines = [f"python -m tests.gpu.verification {command}" for command in commands]
    yield "\n".join(["<!-- not run: needs GPUs -->", "```sh", *lines, "```"])
    yield "## How to read the tables"
    yield paragraph("Both sides run in fp32, and in the checkpoint's own dtype.")
    yield bullets(COLUMNS)
    yield from margins(found)


def margins(found: Found) -> Iterator[str]:
    """Returns the least margin of all fp32 verdicts of the results, if there are any."""
    every = []
    for key, line in found.items():
        for v in line.get("result", {}).get("verdicts", {}).values():
            size = key.split("/")[3] if line["part"] == "grid" else ""
            every += [float(float32(v, size)["below"])] if float32(v, size) else []
    if every:
        yield paragraph(
            f"The results hold {len(every)} verdicts in fp32. The least clean one of them has a"
            f" margin of {number(min(every))}."
        )


# ------------------------------------------------------------------------------------------- grid


def of_part(found: Found, part: str) -> list[Json]:
    return [line for line in found.values() if line.get("part") == part and "result" in line]


def of_grid(found: Found) -> Iterator[str]:
    records = of_part(found, "grid")
    if not records:
        return
    every = [v["verdict"] for line in records for v in line["result"]["verdicts"].values()]
    words = ("pass", "fail", "incomplete")
    counts = ", ".join(f"{n} {word}" for word in words if (n := every.count(word)))
    yield "## Every family, every size"
    yield paragraph(
        f"{len(every)} verdicts on the shapes of `fixtures/tiny` with random weights: {counts}. By"
        " size, over all models and formats:"
    )
    rows = [[size, *of_size(records, size, TE), *of_size(records, size, LOCAL)] for size in SIZES]
    yield table(["sizes", "TE: pass", "least margin", "local: pass", "least margin"], rows)
    if wrong := not_passed(records):
        yield f"What did not pass:\n\n{wrong}"


def of_size(records: list[Json], size: str, impl: str) -> tuple[str, str]:
    """Returns how many passed, and their least margin: in fp32, or of cp in the
    checkpoint's dtype.
    """
    cp = size == sizes.name(sizes.CP)
    if cp and impl == LOCAL:
        return "", ""
    mine = [
        v
        for line in records
        if line["case"].split("/")[3:] == [size, impl]
        for v in line["result"]["verdicts"].values()
    ]
    if not mine:
        return "not run", ""
    below = [list(v["logits"].values())[-1 if cp else 0]["below"] for v in mine if "logits" in v]
    passed = sum(v["verdict"] == "pass" for v in mine)
    return f"{passed} of {len(mine)}", number(min(map(float, below), default=None))


def grid_tables(found: Found) -> Iterator[str]:
    records = of_part(found, "grid")
    if records:
        yield "## Every family, every size"
    for model in sorted({tuple(line["case"].split("/")[1:3]) for line in records}):
        rows = [
            row
            for size in SIZES
            for line in records
            if line["case"].split("/")[1:4] == [*model, size]
            for row in verdict_rows(line, size)
        ]
        passed = sum(row[3] == "pass" for row in rows)
        yield f"### {', '.join(model)}: {passed} of {len(rows)} pass"
        yield table(HEAD, rows)


# ------------------------------------------------------------------------------------------ large


def of_large(found: Found) -> Iterator[str]:
    done = {line["case"]: line["result"] for line in of_part(found, "large")}
    if "large/make" not in done:
        return
    made = done["large/make"]
    yield "## A large model"
    yield paragraph(
        f"Llama-3.1-8B's shape, {made['parameters'] / 1e9:.2f}B parameters in bf16"
        f" ({made['bytes'] / 1e9:.2f} GB). Weights are random, as transformers initialises them,"
        f" and norms are beside 1. The model was written in {made['seconds']:.0f} s."
    )
    if "large/convert" in done:
        c = done["large/convert"]
        runs = {
            "hf -> torch_dist, the first time": c["first_s"],
            "hf -> torch_dist, again": c["again_s"],
            "torch_dist -> hf": c["back_s"],
        }
        head = ["`mckpt`, default memory and threads, whole process", "s", "GB/s written"]
        yield table(head, ([k, f"{s:.1f}", f"{c['bytes'] / 1e9 / s:.2f}"] for k, s in runs.items()))
        yield paragraph(
            f"The peak memory of the process was {c['peak_mib']:.0f} MiB. `mckpt diff` compared"
            f" what came back with the source: {c['diff']}."
        )
    records = [line for line in of_part(found, "large") if "verdicts" in line["result"]]
    if not records:
        return
    yield table(HEAD, (row for r in records for row in verdict_rows(r, r["case"].split("/")[1])))
    rows = []
    for line in records:
        for v in (v for v in line["result"]["verdicts"].values() if "logits" in v):
            exact, low = v["logits"]["float32"], v["logits"].get("bfloat16", {})
            rows.append(
                [
                    line["case"].split("/")[1],
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
    head = ["sizes", "fp32: KL", "same top 1", "bf16: KL", "KL (hf)", "fp32: loss", "loss (hf)"]
    yield table([*head, "positions", "a fault, in tolerances"], rows)
    if wrong := not_passed(records):
        yield f"What did not pass:\n\n{wrong}"


# --------------------------------------------------------------------------------------- training


def runs_of(found: Found, model: str) -> curves.Runs:
    start = f"training/{model}/"
    return {
        line["case"].removeprefix(start): line["result"]
        for line in of_part(found, "training")
        if line["case"].startswith(start)
    }


def title(model: str, runs: curves.Runs) -> str:
    size = max(run.get("parameters", 0) for run in runs.values()) / 1e6
    return f"### {MODELS[model]}, {size:.3g}M parameters)"


TRAINING = f"""
mckpt converts a Hugging Face model to Megatron, and mckpt's trainer trains it with the real DDP,
distributed optimizer and Adam. *weights*: `mckpt reshard --no-optimizer` converts a checkpoint
saved before the last step, to other sizes and to both formats. A new run starts from the result.
Its losses must agree with those of a run from the original checkpoint. *resumed*: the run continues
with its optimizer. Its losses must agree with those of the run that was not interrupted. *apart* is
the largest relative difference of two losses. The tolerance is {curves.FLOAT32_TOLERANCE:g} in
fp32; in bf16 it is {curves.NOISES:g} times the difference of the short run from itself in fp32. Of
a resumed run the first {curves.EARLY} steps are compared, which show whether weights, moments and
schedule were restored whole: in a phase in which gradient norms spike, rounding alone grows tenfold
a step.
"""

BACK = """
mckpt converts the checkpoint of the last step back to Hugging Face. transformers' loss (fp32) on
the sequences of the trainer's next step:
"""


def of_training(found: Found) -> Iterator[str]:
    if not of_part(found, "training"):
        return
    yield "## Training"
    yield paragraph(TRAINING)
    for model in MODELS:
        runs = runs_of(found, model)
        if not runs:
            yield f"Not run: {MODELS[model].split(' (')[0].lower()}."
            continue
        yield title(model, runs)
        head = ["dtype", "steps", "mean loss, first steps", "last steps", "verdict", "tokens/s"]
        yield table(head, curves.falling(runs))
        rows = curves.summary(curves.rows(runs))
        yield table(["run", "dtype", "the same", "largest apart", "tolerance"], rows)
        if back := list(curves.back(runs)):
            yield paragraph(BACK)
            head = ["trained in", "step", "transformers", "trainer", "apart", "tolerance"]
            yield table([*head, "verdict"], back)
            yield from of_verdicts(verdicts_of(runs, model))


def of_verdicts(records: list[Json]) -> Iterator[str]:
    every = [v["verdict"] for record in records for v in record["result"]["verdicts"].values()]
    yield paragraph(
        f"`mckpt verify` compared what came back with what was trained: {every.count('pass')} of"
        f" {len(every)} pass."
    )
    if wrong := not_passed(records):
        yield wrong


def verdicts_of(runs: curves.Runs, model: str) -> list[Json]:
    """Returns the results of `back` as records that have verdicts."""
    return [
        {"case": f"{model}, {dtype}", "dtype": dtype, "seconds": 0, "result": run}
        for dtype in curves.DTYPES
        if (run := runs.get(f"{dtype}/back"))
    ]


def training_tables(found: Found) -> Iterator[str]:
    if of_part(found, "training"):
        yield "## Training"
    for model in MODELS:
        runs = runs_of(found, model)
        if runs:
            yield title(model, runs)
            yield table(curves.HEAD, curves.rows(runs))
            rows = [
                row[:-1]
                for record in verdicts_of(runs, model)
                for row in verdict_rows(record, record["dtype"])
            ]
            if rows:
                yield "`mckpt verify` on what came back and what was trained:"
                yield table(["trained in", *HEAD[1:-1]], rows)


# --------------------------------------------------------------------------------------- left out

NOT_COVERED = (
    "more than one host, and parallel sizes that need more GPUs than the machine above has",
    "published weights: all weights are random, and those of Training were trained for a few steps",
    "the logits of multi-token prediction, which `mckpt verify` does not compare",
    "context parallelism with the local layer spec and in models of fp32: it belongs to"
    " Transformer Engine, whose kernels for it compute in bf16",
)


def left_out(found: Found) -> Iterator[str]:
    why: dict[str, list[str]] = {}
    for key, line in found.items():
        if "not_possible" in line:
            text = f"mckpt refuses: {line['not_possible']}"
            why.setdefault(text, []).append(key.removeprefix("grid/"))
        elif "error" in line:
            why.setdefault(last_line(line["error"]), []).append(key)
    yield "## What was not covered, not possible, or failed to run"
    reasons = (f"{', '.join(where)}: {text}" for text, where in why.items())
    yield bullets([*NOT_COVERED, *reasons])
