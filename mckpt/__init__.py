"""mckpt moves LLM checkpoints between Hugging Face and Megatron and proves the result.

plan = mckpt.plan("Qwen3-30B-A3B", "out", parallel=mckpt.Parallel(tp=4, pp=2, ep=8))
print(plan.summary())
plan.run(max_memory="2GiB")
mckpt.open("out")["layers.3.attn.q.weight"][:8].numpy()
"""

from mckpt import errors
from mckpt.api import Checkpoint, Known, Plan, Target, convert, diff, open, plan
from mckpt.parallel import Parallel

__all__ = ["Checkpoint", "Known", "Parallel", "Plan", "Target", "convert", "diff", "errors", "open", "plan"]
