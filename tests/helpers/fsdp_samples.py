"""Checkpoints of models that Megatron's trainer shards over the data-parallel ranks, and of the
same models without sharding, all after the same two training steps in bf16.

    PYTHONPATH=. python -m tests.helpers.fsdp_samples DIRECTORY

It writes the checkpoints of fixtures/fsdp, which are of two ranks and a model of a few thousand
parameters. Megatron-FSDP needs einops.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import mckpt
from tests.helpers import tiny
from tests.helpers.judging import ask
from tests.judge.test_stock import launch_line

STEPS = 2
FLAGS = [
    *("--no-gradient-accumulation-fusion", "--clip-grad", "0.0", "--lr-decay-style", "constant"),
    *("--bf16", "--auto-detect-ckpt-format"),
]
DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
FORMS = {
    "torch_dcp": ["--use-torch-fsdp2", "--ckpt-format", "torch_dcp"],
    "fsdp_dtensor": [
        *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--use-distributed-optimizer"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ],
    # without sharding: the checkpoints that torch_dcp and fsdp_dtensor must equal
    "plain": ["--ckpt-format", "torch_dist"],
    "distributed": ["--ckpt-format", "torch_dist", *DISTRIBUTED],
}
EQUAL = {"torch_dcp": "plain", "fsdp_dtensor": "distributed"}


class Sample(NamedTuple):
    """A model of tests/helpers/tiny.py at the sizes of a run."""

    model: str
    sizes: dict[str, int]
    form: str

    @property
    def name(self) -> str:
        sizes = "".join(f"{k}{v}" for k, v in self.sizes.items())
        return "-".join(filter(None, (self.model, sizes, self.form)))


SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 10,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 14,
}
SMALL_MOE = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}


def source(sample: Sample, directory: Path, changes: dict[str, Any]) -> Path:
    """Writes the torch_dist checkpoint with which a sample begins, if it is not there."""
    path = directory / f"start-{sample.model}"
    if not path.exists():
        hf = directory / f"hf-{sample.model}"
        hf.mkdir(parents=True)
        config = tiny.config(sample.model) | changes
        tiny.write_json(hf / "config.json", config)
        tiny.write_weights(hf, tiny.tensors(config))
        ranks = mckpt.Parallel(**sample.sizes)
        mckpt.plan(hf, path, format="torch_dist", parallel=ranks, divisible_by=4).run()
    return path


def case(sample: Sample, checkpoint: Path, directory: Path) -> dict[str, Any]:
    """Returns the case of tests/helpers/stock.py that loads the checkpoint, trains and saves the
    sample.
    """
    shards = {"shards": sample.form} if sample.form in EQUAL else {}
    return {
        "kind": "stock",
        "te": True,
        "name": sample.name,
        "world": 2 * sample.sizes.get("tp", 1),
        "flags": [*launch_line(checkpoint), *FLAGS, *FORMS[sample.form]],
        "checkpoint": str(checkpoint),
        "save": str(directory / sample.name),
        "steps": STEPS,
        **shards,
    }


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    samples = [
        Sample("qwen3", {}, "torch_dcp"),
        Sample("qwen3", {}, "plain"),
        Sample("qwen3-moe", {"ep": 2}, "fsdp_dtensor"),
        Sample("qwen3-moe", {"ep": 2}, "distributed"),
    ]
    changes = {"qwen3": SMALL, "qwen3-moe": SMALL_MOE}
    for s in samples:
        ask(**case(s, source(s, directory, changes[s.model]), directory))


if __name__ == "__main__":
    main()
