"""mckpt moves LLM checkpoints between Hugging Face and Megatron and proves the result.

plan = mckpt.plan("Qwen3-30B-A3B", "out", tp=4, pp=2, ep=8)
print(plan.summary())
plan.run(max_memory="2GiB")
mckpt.open("out")["layers.3.attn.q.weight"][:8].numpy()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mckpt import errors
from mckpt.version import __version__ as __version__

if TYPE_CHECKING:
    from mckpt.api import (
        Checkpoint,
        Options,
        Parallel,
        Plan,
        Source,
        adapter_to_hf,
        adapter_to_megatron,
        apply_delta,
        check,
        convert,
        delta,
        diff,
        edit,
        merge,
        open,
        plan,
        push,
        repair,
        reshard,
        write,
    )
    from mckpt.checking import Checked
    from mckpt.checkpoint.comparison import Difference
    from mckpt.checkpoint.logical import LogicalTensor
    from mckpt.conversion.plan_data import PlannedCopy
    from mckpt.conversion.pushing import Pushed
    from mckpt.conversion.streaming import HfTensors
    from mckpt.progress import OnProgress, Progress
    from mckpt.verification.levels import verify
    from mckpt.verification.verdict import Verdict

__all__ = [
    "Checked",
    "Checkpoint",
    "Difference",
    "HfTensors",
    "LogicalTensor",
    "OnProgress",
    "Options",
    "Parallel",
    "Plan",
    "PlannedCopy",
    "Progress",
    "Pushed",
    "Source",
    "Verdict",
    "adapter_to_hf",
    "adapter_to_megatron",
    "apply_delta",
    "check",
    "convert",
    "delta",
    "diff",
    "edit",
    "errors",
    "merge",
    "open",
    "plan",
    "push",
    "repair",
    "reshard",
    "verify",
    "write",
]


def __getattr__(name: str) -> Any:
    """Imports a name of the API on first use. `mckpt --help` needs none of them, nor numpy."""
    if name not in __all__:
        raise AttributeError(f"module 'mckpt' has no attribute {name!r}")
    from importlib import import_module

    homes = {
        "Checked": "checking",
        "Difference": "checkpoint.comparison",
        "HfTensors": "conversion.streaming",
        "LogicalTensor": "checkpoint.logical",
        "OnProgress": "progress",
        "PlannedCopy": "conversion.plan_data",
        "Progress": "progress",
        "Pushed": "conversion.pushing",
        "Verdict": "verification.verdict",
        "verify": "verification.levels",
    }
    return getattr(import_module(f"mckpt.{homes.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
