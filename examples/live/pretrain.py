"""Trains with Megatron-LM from weights that mckpt reads: a Hugging Face directory, a model on the
Hub, or a checkpoint of any format and sizes. No conversion comes before.

    torchrun --nproc-per-node 8 examples/live/pretrain.py pretrain_gpt.py Qwen/Qwen3-8B \\
        "${MEGATRON_ARGS[@]}" --tensor-model-parallel-size 8 ... --save ckpt --load ckpt

The first two arguments are Megatron-LM's program and the source of the weights; the program gets
the others. `mckpt inspect Qwen/Qwen3-8B --megatron-args` prints those of the model. A run that
continues from a checkpoint of its own (--load) does not read the source.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from megatron.training import get_args, training

from mckpt import live


def main() -> None:
    program, source = sys.argv[1:3]
    sys.argv[:] = [program, *sys.argv[3:]]
    set_up = training.setup_model_and_optimizer

    def filled(*args: Any, **keywords: Any) -> Any:
        model, optimizer, scheduler = set_up(*args, **keywords)
        if not get_args().iteration:
            live.load(model, source, optimizer=optimizer)
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = filled  # which pretrain() calls
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
