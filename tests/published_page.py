"""Writes docs/published-models.md from fixtures/configs and the options that their tests need.

python -m tests.published_page
"""

from __future__ import annotations

import json

from mckpt import mapping
from tests.helpers.published import (
    CONFIGS,
    DIALECTS,
    INEXACT,
    NAMES,
    REPOSITORIES,
    ROOT,
    UNLOADABLE,
    UNTIL,
)
from tests.matrix import table

PAGE = ROOT / "docs" / "published-models.md"
HEAD = """# Published models

A test plans the conversion of each of these models at its full size, from the `config.json` of its
repository on the Hugging Face Hub and the names and shapes of its tensors, and finds a place for
each tensor. The columns GPTModel and HybridModel name the options that the plan needs. *yes* means
none, *no* that this model of Megatron-Core lacks such layers, and *other* that the model has a
dialect of its own. Layers of multi-token prediction are not among these tensors, because
transformers saves none. The elements of the tensors are as many as is published for the model
(parameters), within the rounding or 1 %. Where a row names more repositories, their models have the
same tensors and need the same options.
"""
END = """
`tests/published_page.py` wrote this page.
"""


def options(name: str, dialect: str) -> str:
    """Returns the options that a plan of this model in this dialect needs."""
    if dialect not in DIALECTS.get(name, ("gpt", "hybrid")):
        return "other"
    if (name, dialect) in UNLOADABLE:
        return "no"
    accepted = " ".join(
        "--no-mtp" if one == "mtp_layers" else f"--allow-inexact {one}"
        for one in INEXACT.get((name, dialect), ())
    )
    version = f"--megatron-version {UNTIL[name]}" if name in UNTIL else ""
    needed = " ".join(filter(None, (accepted, version)))
    return f"`{needed}`" if needed else "yes"


def page() -> str:
    """Returns the text of the page."""
    rows = []
    for name in NAMES:
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
        dims = family.read(config)
        sizes = [f"{dims[key]:,}" for key in ("num_layers", "hidden_size", "num_experts")]
        needed = [options(name, dialect) for dialect in ("gpt", "hybrid")]
        facts = REPOSITORIES[name]
        repositories = ", ".join(f"`{r}`" for r in (facts["repository"], *facts.get("also", ())))
        rows.append([name, repositories, family.name, facts["parameters"] or "-", *sizes, *needed])
    head = ["model", "repository", "family", "parameters", "layers", "width", "experts"]
    head += ["GPTModel", "HybridModel"]
    return HEAD + table(head, rows) + END


if __name__ == "__main__":
    PAGE.write_text(page())
