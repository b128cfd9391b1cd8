"""Trains a Hugging Face model for some steps with DeepSpeed, on two ranks of a CPU, by ZeRO 1, 2
and 3.

DS_ACCELERATOR=cpu DEEPSPEED_PYTHON -m tests.helpers.deepspeed_steps HF_DIR OUT

OUT/zeroN/global_step{3,4}              what DeepSpeed saves
OUT/zeroN/global_step{3,4}_universal    the same by ds_to_universal.py
OUT/zeroN/global_step3.safetensors      the tensors of zero_to_fp32.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import zero_to_fp32
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

RANKS, STEPS = 2, 3


def train(hf: str, out: Path, stage: int, rank: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hf), dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(number: int) -> None:
        torch.manual_seed(10 * number + rank)
        tokens = torch.randint(0, model.config.vocab_size, (1, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    for number in range(STEPS + 1):
        torch.manual_seed(10 * number + rank)
        tokens = torch.randint(0, model.config.vocab_size, (1, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        if number + 1 >= STEPS:
            engine.save_checkpoint(str(out))


def judge(out: Path) -> None:
    """Lets DeepSpeed read its own checkpoints."""
    for step in sorted(out.glob("global_step*")):
        tensors = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(out), step.name)
        save_file({key: t.clone() for key, t in tensors.items()}, out / f"{step.name}.safetensors")
        sys.argv[1:] = ["--input_folder", str(step), "--output_folder", f"{step}_universal"]
        sys.argv += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
        ds_to_universal.main(ds_to_universal.parse_arguments())


def main(hf: str, out: str, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (1, 2, 3):
        train(hf, Path(out) / f"zero{stage}", stage, rank)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29573"}
        out = Path(sys.argv[2])
        run = [sys.executable, "-m", "tests.helpers.deepspeed_steps", *sys.argv[1:]]
        ranks = [subprocess.Popen([*run, str(rank)]) for rank in range(RANKS)]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), codes
        for stage in (1, 2, 3):
            judge(out / f"zero{stage}")
