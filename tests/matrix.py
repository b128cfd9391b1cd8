"""Makes docs/judges.md, the table of what Megatron-Core has judged, from the results of test runs.

    JUDGED=$PWD/judged.jsonl .ci/run        # all tests, with both versions of megatron-core
    python -m tests.matrix judged.jsonl > docs/judges.md

Each judge adds its results to the file that JUDGED names, so that file must not exist before.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # a line that tests.judging.record writes

# From the strongest to the weakest; HEAD explains what each one proves.
JUDGES = ("stock trainer", "forward", "saved by megatron-core")
HEAD = """# What Megatron-Core has judged

A judge is a program that is not part of mckpt. Each of them gets checkpoints of tiny models with
random weights (`fixtures/tiny`), in fp32, on CPU, and its logits are compared with those of
transformers:

- *stock trainer*: Megatron-LM's own argument parser read the launch line that mckpt wrote. Its
  model builder, its loader and its forward pass computed the logits. Its saver wrote the model
  again, and mckpt converted that back to Hugging Face bit for bit.
- *forward*: Megatron-Core built the model from the checkpoint's args, loaded the checkpoint
  strictly, and computed the logits.
- *saved by megatron-core*: Megatron-Core initialised a model, computed the logits and saved it.
  mckpt converted it to Hugging Face, and transformers loaded the result.

## The largest difference of a logit

Each number is the largest difference of one logit from transformers, over all positions and all
parallel sizes, divided by the largest logit. fp32 resolves 1.2e-07. A field is empty where the
judge cannot run. The wheels of megatron-core have the stock trainer from 0.17 on. From 0.19 on it
cannot load latent attention without a latent of the queries (`deepseek-v3-plain`).

The dialect is the model of Megatron-Core that the checkpoint is for: `gpt` for GPTModel, `hybrid`
for HybridModel, which mckpt writes with `--dialect hybrid`.
"""
SIZES = """
## The parallel sizes

The names in parentheses are those of the layers: of Transformer Engine, or Megatron-Core's own
(local).
"""
END = """
`tests/matrix.py` wrote this page from the results of the tests. CONTRIBUTING.md has the command.
"""


def page(rows: list[Row]) -> str:
    """Returns the text of docs/judges.md."""
    worst: dict[tuple[str, ...], float] = defaultdict(float)
    sizes: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for row in rows:
        case, dialect, form, judge = (row[k] for k in ("case", "dialect", "format", "judge"))
        key = case, dialect, form, judge, row["megatron_core"]
        worst[key] = max(worst[key], row["difference"] / row["largest"])
        sizes[judge, dialect, form, case][row["sizes"]] = None
    versions = sorted({key[4] for key in worst}, key=lambda v: [int(n) for n in v.split(".")])
    ran = {key[3:] for key in worst}
    columns = [(judge, v) for judge in JUDGES for v in versions if (judge, v) in ran]
    models = [
        [
            case,
            dialect,
            f"`{form}`",
            *(number(worst.get((case, dialect, form, *column))) for column in columns),
        ]
        for case, dialect, form in sorted({key[:3] for key in worst})
    ]
    # models of one kind are judged at the same sizes
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in sorted(sizes, key=lambda key: (JUDGES.index(key[0]), *key[1:])):
        judge, dialect, form, case = key
        alike[judge, dialect, f"`{form}`", "; ".join(sizes[key])].append(case)
    heads = [f"{judge}, {version}" for judge, version in columns]
    return (
        HEAD
        + table(["model", "dialect", "format", *heads], models)
        + SIZES
        + table(
            ["judge", "dialect", "format", "sizes", "models"],
            [[*key, ", ".join(cases)] for key, cases in alike.items()],
        )
        + END
    )


def number(apart: float | None) -> str:
    return "" if apart is None else f"{apart:.1e}"


def table(head: list[str], rows: list[list[str]]) -> str:
    # a pipeline layout contains |
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    LINES = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    sys.stdout.write(page([json.loads(line) for line in LINES]))
