"""vLLM as an engine on the CPU: it takes the updates of a trainer, and generates tokens after each.

    VLLM_PYTHON -m tests.helpers.vllm_generating UPDATES results.json

UPDATES has a directory for each step: a Hugging Face directory with the right tensors, and
`update.pt`: either `tensors`, or `deltas` with `version` and `base_version`. The engine begins with
drawn weights. results.json: for each step the tokens of vLLM, and those of transformers with the
tensors of the directory.

The engine is that of vLLM: its scheduler, its paged cache, its model class and loaders. Its wheel
has kernels for CUDA only, so the few operators that its CPU backend calls are written here in
Python, and the layers take their forms in Python (custom_ops "none").
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.model_executor.models import registry

from mckpt import live

PROMPTS = [[5, 17, 99], [*range(1, 60, 2)]]  # the second one is spread over two blocks
COUNT = 16  # tokens
SIZES: dict[str, Any] = {"block_size": 32, "max_model_len": 64, "max_num_seqs": 4}


def store(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any, **__: Any
) -> None:
    """Writes keys and values [tokens, heads, size] into caches [blocks, heads, slots, size]."""
    size = key_cache.shape[2]
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // size, :, slot % size] = key[n]
            value_cache[slot // size, :, slot % size] = value[n]


def attend(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    block_table: Any,
    **_: Any,
) -> None:
    """Fills output [tokens, heads, size]: each request attends to what its blocks have."""
    bounds = query_start_loc.tolist()
    for n, length in enumerate(seq_lens.tolist()):
        part = slice(*bounds[n : n + 2])
        blocks = block_table[n].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length]
            for cache in (key_cache, value_cache)
        )
        asked = query[part].transpose(0, 1)[None]
        mask = torch.ones(asked.shape[2], length, dtype=torch.bool).tril(length - asked.shape[2])
        found = torch.nn.functional.scaled_dot_product_attention(
            asked, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        output[part] = found[0].transpose(0, 1)


def slots(starts: Any, positions: Any, table: Any, mapping: Any, size: int) -> None:
    """Fills the slot of each token: that of its position in the blocks of its request."""
    request = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    at = positions[: len(request)]
    mapping[: len(request)] = table[request, at // size].long() * size + at % size


def in_python() -> None:
    """Puts functions in the place of operators of a build for CPUs."""
    compiled: Any = torch.ops._C
    compiled.init_cpu_memory_env = lambda nodes: None
    compiled.compute_slot_mapping_kernel_impl = slots
    compiled.greedy_argmax = lambda logits: logits.argmax(dim=-1)
    for name in ("cpu_attn_get_scheduler_metadata", "cpu_attn_reshape_and_cache"):
        assert hasattr(ops, name), name
    ops.cpu_attn_get_scheduler_metadata = lambda **_: torch.empty(0)
    ops.cpu_attn_reshape_and_cache = store
    ops.cpu_attention_with_kv_cache = attend
    registry._run_in_subprocess = lambda inspect: inspect()


class Deltas(SimpleNamespace):
    """Deltas that came from the trainer, as `live.apply_delta` takes them."""

    def __iter__(self) -> Any:
        return iter([live.Delta(*delta) for delta in self.deltas])


def taken(model: Any, held: dict[str, torch.Tensor], update: dict[str, Any], version: int) -> int:
    """Loads an update into vLLM's model, and returns the version.

    held: the tensors of the engine under their Hugging Face names, to which deltas are applied.
    """
    if "tensors" in update:
        held |= update["tensors"]
        model.load_weights(iter(held.items()))
        return int(update["version"])
    deltas = Deltas(**update)
    version = live.apply_delta(held, deltas, version)
    model.load_weights((delta[0], held[delta[0]]) for delta in deltas.deltas)
    return version


def right_tokens(step: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)
    given = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = [model.generate(torch.tensor([prompt]), **given)[0].tolist() for prompt in PROMPTS]
    return [tokens[len(prompt) :] for tokens, prompt in zip(found, PROMPTS, strict=True)]


def main() -> None:
    in_python()
    steps = sorted(Path(sys.argv[1]).iterdir())
    engine = LLM(
        str(steps[0]),
        load_format="dummy",
        dtype="float32",  # in which two programs have the same largest logit
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        compilation_config={"custom_ops": ["none"]},
        **SIZES,
    )
    greedy = SamplingParams(max_tokens=COUNT, temperature=0, detokenize=False, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    held: dict[str, torch.Tensor] = {}
    results: dict[str, Any] = {}

    def tokens() -> list[list[int]]:
        return [list(found.outputs[0].token_ids) for found in engine.generate(prompts, greedy)]

    results["drawn"], version = {"vllm": tokens()}, 0
    for step in steps:
        update = torch.load(step / "update.pt")
        worker: Any = engine.llm_engine.model_executor.driver_worker
        version = taken(worker.worker.model_runner.model, held, update, version)
        results[step.name] = {"vllm": tokens(), "right": right_tokens(step), "version": version}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
