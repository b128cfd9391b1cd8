"""Writes docs/published-models.md from fixtures/configs and the options that their tests need.

python -m tests.published_page
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from mckpt import mapping
from tests.helpers import made_models
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
from tests.matrix import Row, family_of, read, strongest, table

TRAINERS = {"bridge": "Megatron-Bridge", "swift": "ms-swift"}
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

GPTModel and HybridModel are about the text model. *whole* says how a model that reads images or
sound is converted with its towers: as Megatron-Bridge (`bridge`) or ms-swift (`swift`) has them in
the checkpoint, or only `beside` it ([multimodal models](multimodal.md)). *trained by* names the
trainers whose checkpoints mckpt writes for the model. *judged by* is the strongest judge of the
family's text model, with the largest difference of a logit ([judges.md](judges.md) explains them),
and then the trainers whose own programs saved and loaded tiny whole models of the family with our
bits, *image* if such a program computed the logits of an image too.
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


def trained_by(family: mapping.MappingFile, needed: list[str]) -> str:
    """Returns the trainers whose checkpoints mckpt writes for the models of a family.

    needed: the cells of the columns GPTModel and HybridModel.
    """
    own = [mapping.load("megatron", family.dialect).trainer] if set(needed) == {"other"} else []
    plain = ["Megatron-LM" if name.startswith("pretrain") else name.split("'")[0] for name in own]
    others = (TRAINERS[trainer] for trainer in sorted(family.towers))
    return ", ".join(dict.fromkeys([*(plain or ["Megatron-LM"]), *others]))


def judged_by(family: mapping.MappingFile, rows: list[Row], scaled: bool) -> str:
    """Returns the judges of a family's text model, and of its tiny whole models.

    scaled: whether the positions of the model are scaled, as those of Ministral 3. They are not in
    Mistral-Small-3.1, of the same family.
    """
    found = [strongest(rows)] if rows else []
    for trainer, cases in made_models.WHOLE.items():
        kinds = {
            kind
            for case, kind in cases.items()
            if made_models.config(case)["architectures"][0] in family.architectures
            and bool(family.read(made_models.config(case)).get("position_scale")) == scaled
        }
        image = ", image" * (made_models.IMAGE in kinds)
        found += [f"whole: {TRAINERS[trainer]}{image}"] if kinds else []
    return "; ".join(found) or "-"


def whole(family: mapping.MappingFile, config: dict[str, Any]) -> str:
    """Returns the values of --towers for a model with towers."""
    if not {"vision_config", "audio_config"} & config.keys():
        return "-"
    return ", ".join(f"`{trainer}`" for trainer in sorted(family.towers)) or "`beside`"


def page() -> str:
    """Returns the text of the page."""
    rows, judged = [], defaultdict[str, list[Row]](list)
    for result in read():
        judged[family_of(result["case"])].append(result)
    for name in NAMES:
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
        dims = family.read(config)
        sizes = [f"{dims[key]:,}" for key in ("num_layers", "hidden_size", "num_experts")]
        needed = [options(name, dialect) for dialect in ("gpt", "hybrid")]
        facts = REPOSITORIES[name]
        repositories = ", ".join(f"`{r}`" for r in (facts["repository"], *facts.get("also", ())))
        more = (
            whole(family, config),
            trained_by(family, needed),
            judged_by(family, judged[family.name], bool(dims.get("position_scale"))),
        )
        shape = facts["parameters"] or "-", *sizes
        rows.append([name, repositories, family.name, *shape, *needed, *more])
    head = ["model", "repository", "family", "parameters", "layers", "width", "experts"]
    head += ["GPTModel", "HybridModel", "whole", "trained by", "judged by"]
    return HEAD + table(head, rows) + END


if __name__ == "__main__":
    PAGE.write_text(page())
