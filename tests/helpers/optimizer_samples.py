"""Checkpoints with optimizer state, saved by the installed megatron-core in one launch.

    python -m tests.helpers.optimizer_samples DIRECTORY [NAME ...]

Each has two training steps behind it, so that no state is zero, and all are in bf16 unless their
name ends in fp32. The name of a sample is FORMAT-MODEL-SIZES.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mckpt
from tests.helpers import tiny
from tests.helpers.judging import explain, judge

STEPS = 2
# The ways of the trainer to keep the optimizer state.
FORMS: dict[str, dict[str, Any]] = {
    "fully_reshardable": {"optimizer_format": "fully_reshardable"},
    "dp_reshardable": {"optimizer_format": "dp_reshardable"},
    "float16": {"distributed_optimizer": False},
    "torch": {"format": "torch"},
    "torch_float16": {"format": "torch", "distributed_optimizer": False},
}
# The parallel sizes of each model; `world` makes the rest of the ranks data-parallel.
MODELS: dict[str, dict[str, dict[str, int]]] = {
    "qwen3": {
        "tp2pp2": {"tp": 2, "pp": 2},
        "pp2dp2": {"pp": 2, "world": 4},
        "pp2vpp2dp2": {"pp": 2, "vpp": 2, "world": 4},
    },
    "qwen3-moe": {
        "ep2": {"ep": 2},
        "tp2pp2ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        "tp2ep2dp2": {"tp": 2, "ep": 2, "etp": 1, "world": 4},
    },
    "llama-tied": {"pp2dp2": {"pp": 2, "world": 4}},
    "deepseek-v3": {"tp2pp2ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1}},
}


def cases(sources: Path, directory: Path) -> list[dict[str, Any]]:
    """Returns the cases of the judge that write every sample below `directory`.

    sources: has a torch_dist checkpoint of each model.
    """
    out = []
    for model, grid in MODELS.items():
        for sizes, given in grid.items():
            for form, options in FORMS.items():
                out.append(
                    case(f"{form}-{model}-{sizes}", sources / model, directory, given, options)
                )
    fp32 = {"dtype": "float32"}
    for form, options in FORMS.items():
        name = f"{form}-qwen3-tp2pp2-fp32"
        out.append(case(name, sources / "qwen3", directory, {"tp": 2, "pp": 2}, options | fp32))
    return out


def case(
    name: str, checkpoint: Path, directory: Path, sizes: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "train",
        "checkpoint": str(checkpoint),
        "steps": STEPS,
        "lr": 1e-2,
        "warmup": 1,
        "global_batch_size": 4,
        "seq_length": 16,
        "save": str(directory / name),
        **sizes,
        **options,
    }


def write_sources(directory: Path) -> None:
    """Writes a torch_dist checkpoint of each model."""
    for model in MODELS:
        if not (directory / model).exists():
            hf = tiny.tiny_random(model, directory / f"{model}-hf", "bfloat16")
            mckpt.plan(hf, directory / model, format="torch_dist").run()


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    write_sources(directory / "sources")
    wanted = sys.argv[2:]
    every = [
        one
        for one in cases(directory / "sources", directory)
        if not wanted or any(name in one["name"] for name in wanted)
    ]
    results = judge(every, directory / "results")
    for name, result in results.items():
        print(name, result.get("seconds"), explain(result)[-600:])


if __name__ == "__main__":
    main()
