"""Makes docs/judges.md and the table of docs/models.md from what the judges found.

    JUDGED=$PWD/judged.jsonl .ci/run        # all tests, with both versions of megatron-core
    python -m tests.matrix judged.jsonl

Each judge adds its results to the file that JUDGED names, so that file must not exist before. The
second command keeps the worst result of each kind in docs/judged.json, and writes both tables from
it. Other results stay: those of judges and models that did not run. Without a file it only writes
the tables again.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from mckpt import mapping
from tests.helpers import made_models, tiny

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, MODELS = (
    ROOT / name for name in ("docs/judged.json", "docs/judges.md", "docs/models.md")
)
# the table of docs/models.md is between these two lines
BEGIN, CLOSE = "<!-- table: tests/matrix.py writes it -->\n", "\n<!-- end -->\n"
KEYS = ("judge", "case", "dialect", "format", "megatron_core")
Row = dict[str, Any]  # a line that tests.helpers.judging.record writes

# From the strongest to the weakest; HEAD explains what each one proves.
ACCEPTED = "accepted"
JUDGES = (
    "stock trainer",
    "forward",
    "saved by megatron-core",
    "multi-token prediction",
    "Megatron-Bridge's forward",
    "mcore-bridge's forward",
    "Megatron-Bridge",
    "layout",
    ACCEPTED,
)
HEAD = """# What Megatron-Core has judged

A judge is a program that is not part of mckpt. Each judge runs checkpoints of tiny models with
random weights (`fixtures/tiny`), in fp32, on CPU. Its logits are compared with those of
transformers:

- *stock trainer*: Megatron-LM's own argument parser read the launch line that mckpt wrote. Its
  model builder, its loader and its forward pass computed the logits. Its saver wrote the model
  again, and mckpt converted that back to Hugging Face bit for bit.
- *forward*: Megatron-Core built the model from the checkpoint's args, loaded the checkpoint
  strictly, and computed the logits.
- *saved by megatron-core*: Megatron-Core initialised a model, computed the logits and saved it.
  mckpt converted it to Hugging Face, and transformers loaded the result.
- *Megatron-Bridge*: Megatron-Bridge 0.6.2 converted the same model to `torch_dist`. The keys,
  shapes and bits of all tensors equal those of mckpt, except for the padding of the vocabulary,
  which Megatron-Bridge does not write.
- *Megatron-Bridge's forward*: Megatron-Bridge 0.6.2 built the model from the `run_config.yaml` that
  mckpt wrote, filled all parameters with NaN, loaded the checkpoint, which left none of them,
  computed the logits, and exported the weights bit for bit.
- *mcore-bridge's forward*: mcore-bridge 1.6.5, of ms-swift, built its GPTModel of the Hugging Face
  directory, filled all parameters with NaN, loaded the checkpoint strictly, computed the logits,
  and exported the weights bit for bit.
- *multi-token prediction*: the logits of the layers that predict further tokens are compared with
  those of transformers as well.
- *layout*: the keys and shapes equal those of the `sharded_state_dict()` of Megatron-Core's model.
- *accepted*: Megatron-Core computes another result for this model, and `--allow-inexact` accepted
  the features that the table of sizes names. No logits are compared; the weights come back bit for
  bit.

## The largest difference of a logit

Each number is the largest difference of one logit from transformers, over all positions and all
parallel sizes, divided by the largest logit. fp32 resolves 1.2e-07. A field is empty where the
judge cannot run. The wheels of megatron-core contain the stock trainer from 0.17 on. From 0.19 on,
it cannot load latent attention without a latent of the queries (`deepseek-v3-plain`).

The dialect tells which model of Megatron-Core loads the checkpoint: `gpt` GPTModel, `hybrid`
HybridModel (mckpt writes it with `--dialect hybrid`), `bert` BertModel, and `t5` T5Model; `bridge`
and `bridge_gemma4` are a GPTModel with layers of Megatron-Bridge's own, and `parallel_mamba` is its
FalconH1Model; `mcore_bridge`, `mcore_bridge_gdn` and `mcore_bridge_gemma4`
are the GPTModels of ms-swift.
"""
SIZES = """
## The parallel sizes

The names in parentheses are those of the layers: of Transformer Engine, or Megatron-Core's own
(local).
"""
END = """
`tests/matrix.py` wrote this page from the results of the tests. CONTRIBUTING.md has the command.
"""


def worst_of(rows: list[Row]) -> list[Row]:
    """Returns one result for each judge, model, dialect, format and version: the largest difference
    of a logit divided by the largest logit, and all sizes.
    """
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = {k: row[k] for k in KEYS}
        one = found.setdefault(tuple(key.values()), {**key, "ratio": 0.0, "sizes": []})
        one["ratio"] = max(one["ratio"], float(f"{row['difference'] / row['largest']:.1e}"))
        one["sizes"] += [row["sizes"]] if row["sizes"] not in one["sizes"] else []
    return [found[key] for key in sorted(found)]


def page(results: list[Row]) -> str:
    """Returns the text of docs/judges.md."""
    found = {tuple(r[k] for k in KEYS): r for r in results}
    sizes: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for (judge, case, dialect, form, _), result in found.items():
        sizes[judge, dialect, form, case] |= dict.fromkeys(result["sizes"])
    versions = sorted({r["megatron_core"] for r in results}, key=_version)
    ran = {(r["judge"], r["megatron_core"]) for r in results}
    columns = [(judge, v) for judge in JUDGES for v in versions if (judge, v) in ran]
    models = [
        [
            case,
            dialect,
            f"`{form}`",
            *(number(found.get((judge, case, dialect, form, v))) for judge, v in columns),
        ]
        for case, dialect, form in sorted({key[1:4] for key in found})
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


def families(results: list[Row]) -> str:
    """Returns the table of docs/models.md: every architecture, and its strongest judge in each
    dialect.
    """
    judged: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for result in results:
        judged[family_of(result["case"]), result["dialect"]].append(result)
    rows = []
    for name in mapping.names("hf"):
        family = mapping.load("hf", name)
        which = ", ".join(f"`{a}`" for a in family.architectures)
        cells = [strongest(judged[name, d]) for d in ("gpt", "hybrid")]
        # of a model that is neither GPTModel nor HybridModel
        own = judged[name, family.dialect] if cells == ["no", "no"] else []
        special = re.sub(r"`docs/(\S+)\.md`", r"[`docs/\1.md`](\1.md)", family.special)
        rows.append([family.models, which, *cells, special + f"; {strongest(own)}" * bool(own)])
    rows.sort(key=lambda row: row[0].lower())
    return table(["models", "architecture", "GPTModel", "HybridModel", "notes"], rows)


def strongest(results: list[Row]) -> str:
    """Returns the strongest judge of several results, and the largest difference it found."""
    if not results:
        return "no"
    judge = min((r["judge"] for r in results), key=JUDGES.index)
    chosen = [r for r in results if r["judge"] == judge]
    if judge == ACCEPTED:
        return ", ".join(dict.fromkeys(size for r in chosen for size in r["sizes"]))
    worst = max(r["ratio"] for r in chosen)
    return f"{judge}, {worst:.1e}" if worst else judge


def with_families(text: str, results: list[Row]) -> str:
    """Returns the text of docs/models.md with this table in place of its own."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + families(results) + CLOSE + rest.partition(CLOSE)[2]


def read() -> list[Row]:
    """Returns the results in docs/judged.json."""
    found: list[Row] = json.loads(RESULTS.read_text())
    return found


def family_of(case: str) -> str:
    """Returns the name of the family of a tiny model."""
    config = tiny.config(case) if case in tiny.CASES else made_models.config(case)
    return mapping.family_with(config["architectures"][0])


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def number(result: Row | None) -> str:
    if result is None or not result["ratio"]:
        return "" if result is None else "yes"
    return f"{result['ratio']:.1e}"


def table(head: list[str], rows: list[list[str]]) -> str:
    # a pipeline layout contains |
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(results: list[Row]) -> None:
    lines = ",\n".join(json.dumps(result) for result in results)
    RESULTS.write_text(f"[\n{lines}\n]\n")
    PAGE.write_text(page(results))
    MODELS.write_text(with_families(MODELS.read_text(), results))


def joined(new: list[Row], old: list[Row]) -> list[Row]:
    """Returns new results, and the old ones that no new one of the same judge, model, dialect,
    format and minor version of megatron-core replaces.
    """

    def key(row: Row) -> tuple[Any, ...]:
        return (*(row[k] for k in KEYS[:-1]), *_version(row["megatron_core"])[:2])

    again = {key(row) for row in new}
    both = new + [row for row in old if key(row) not in again]
    return sorted(both, key=lambda row: tuple(row[k] for k in KEYS))


if __name__ == "__main__":
    LINES = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    write(joined(worst_of([json.loads(line) for line in LINES]), read()))
