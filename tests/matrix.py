"""Makes docs/judges.md, the table of what Megatron-Core has judged, from the results of test runs.

JUDGED=$PWD/judged.jsonl python -m pytest -m judge tests/test_megatron.py tests/test_stock.py      once with each megatron-core
python tests/matrix.py judged.jsonl > docs/judges.md
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

# From the strongest to the weakest; what each one proves stands in HEAD.
JUDGES = ("stock trainer", "forward", "saved by megatron-core")
HEAD = """# What Megatron-Core has judged

Each checkpoint is a tiny model with random weights of transformers' own class, in fp32, on CPU. The number is the largest difference of a
logit from transformers' logits over all positions, divided by the largest logit, and the worst of all sizes. The judges:

- *stock trainer*: Megatron-LM's own argument parser took the launch line that mckpt wrote; its model builder, loader and forward pass gave
  the logits; its saver wrote the model, and mckpt brought it back to Hugging Face bit for bit.
- *forward*: Megatron-Core's model, built from the checkpoint's args, loaded the checkpoint strictly and computed the logits.
- *saved by megatron-core*: transformers loaded what mckpt exported from a checkpoint that Megatron-Core had initialised and saved.

This page is written by `tests/matrix.py` from the results of the tests.
"""


def main() -> None:
    rows = [
        json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()
    ]
    versions = sorted(
        {row["megatron_core"] for row in rows}, key=lambda v: [int(n) for n in v.split(".")]
    )
    held: dict[tuple[str, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        held[row["case"], row["format"], row["judge"], row["megatron_core"]].append(row)
    print(HEAD)
    print(
        "| model | format | judge | "
        + " | ".join(f"megatron-core {v}" for v in versions)
        + " | sizes |"
    )
    print("|---" * (4 + len(versions)) + "|")
    for case, form in sorted({(row["case"], row["format"]) for row in rows}):
        for judge in JUDGES:
            found = {
                v: held[case, form, judge, v] for v in versions if (case, form, judge, v) in held
            }
            if not found:
                continue
            worst = [
                f"{max(r['difference'] / r['largest'] for r in found[v]):.1e}" if v in found else ""
                for v in versions
            ]
            sizes = dict.fromkeys(row["sizes"] for v in versions for row in found.get(v, ()))
            print(f"| {case} | `{form}` | {judge} | {' | '.join(worst)} | {'; '.join(sizes)} |")


if __name__ == "__main__":
    main()
