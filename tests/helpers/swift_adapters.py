"""ms-swift as a judge of adapters: runs its `megatron export` on one or more ranks: a program of
tests/helpers/session.py.

It runs in the environment of bridge.py with ms-swift and mcore-bridge added, which CONTRIBUTING.md
describes. A case is a dict with these entries:

    name     of the case
    source   Hugging Face directory of the base, with a tokenizer
    options  of `megatron export`; the model, its template and the sizes are added
    sizes    {"tp": 2, "pp": 1, "ep": 1}; its ranks must be all ranks of the run

out_dir/NAME.json: ok, error {"0": traceback of the first rank}.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mckpt.trainer import forked
from tests.helpers import bridge

# imported by ms-swift, and not used by an export
PACKAGES = (
    *("addict", "aiohttp", "attrdict", "binpacking", "charset_normalizer", "cpm_kernels", "dacite"),
    *("evalscope", "fastapi", "gradio", "jieba", "json_repair", "modelscope", "modelscope_hub"),
    *("nltk", "openai", "oss2", "qwen_vl_utils", "rouge", "simplejson", "tiktoken", "trl"),
    *("uvicorn", "zstandard"),
)


def prepare() -> None:
    """Imports ms-swift, before the ranks are forked."""
    bridge.without_device(PACKAGES)
    import swift.megatron.pipelines.export.export  # noqa: F401


def run(cases: list[dict[str, Any]], out: Path) -> int:
    return forked.fork_ranks(lambda: run_rank(cases, out))


def run_rank(cases: list[dict[str, Any]], out: Path) -> None:
    """Runs all cases on one rank."""
    from mcore_bridge.bridge import gpt_bridge
    from megatron.core import parallel_state
    from swift.megatron.pipelines.export.export import megatron_export_main

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    dist.init_process_group("gloo")
    for case in cases:
        sizes = {"tp": 1, "pp": 1, "ep": 1, **case["sizes"]}
        result: dict[str, Any] = {"name": case["name"], "ok": True}
        options = ["--model", case["source"], "--exist_ok", "true", *case["options"]]
        for size, name in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            options += [f"--{name}_model_parallel_size", str(sizes[size])]
        try:
            megatron_export_main(options)
        except Exception:
            result |= {"ok": False, "error": {str(dist.get_rank()): traceback.format_exc()}}
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            worst = next((found for found in results if not found["ok"]), result)
            (out / f"{case['name']}.json").write_text(json.dumps(worst))
        parallel_state.destroy_model_parallel()
        gpt_bridge.EP_PP_GROUP = None  # groups of the sizes of this case
        gc.collect()
