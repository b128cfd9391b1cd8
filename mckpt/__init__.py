"""mckpt moves LLM checkpoints between Hugging Face and Megatron and proves the result.

plan = mckpt.plan("Qwen3-30B-A3B", "out", parallel=mckpt.Parallel(tp=4, pp=2, ep=8))
print(plan.summary())
plan.run(max_memory="2GiB")
mckpt.open("out")["layers.3.attn.q.weight"][:8].numpy()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mckpt import errors

if TYPE_CHECKING:
    from mckpt.api import Checkpoint, Known, Plan, Target, check, convert, diff, open, plan
    from mckpt.geometry.parallel import Parallel
    from mckpt.verification.levels import verify
    from mckpt.verification.verdict import Verdict

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Known",
    "Parallel",
    "Plan",
    "Target",
    "Verdict",
    "check",
    "convert",
    "diff",
    "errors",
    "open",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Imports a name of the API on first use. `mckpt --help` needs none of them, nor numpy."""
    if name not in __all__:
        raise AttributeError(f"module 'mckpt' has no attribute {name!r}")
    from importlib import import_module

    home = {"Verdict": "verification.verdict", "verify": "verification.levels"}.get(name, "api")
    return getattr(import_module(f"mckpt.{home}"), name)
