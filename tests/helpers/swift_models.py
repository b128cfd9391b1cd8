"""mcore-bridge, of ms-swift, as a judge: builds its own GPTModel and loads a checkpoint into it.

tests/helpers/session.py runs it, in the environment of bridge.py with mcore-bridge added, which
CONTRIBUTING.md describes. A case is a dict with these entries; the results stand behind the arrow:

    name        of the case
    source      Hugging Face directory, of which mcore-bridge builds the model
    tokens      [batch, seq], whose logits are compared; without them no logit is
    checkpoint  the directory of torch_dist files, which the model loads strictly
                -> unloaded: parameters that the checkpoint did not fill
                -> difference: largest difference of a logit from transformers; largest: of a logit
                -> equal: number of tensors that mcore-bridge exports with the bits of source;
                   differ: the others
    saved       a directory, in which the model saves what mcore-bridge loaded of source

out_dir/NAME.json: ok, error {"0": traceback}, and the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mckpt.trainer import local_stack
from tests.helpers import bridge, tiny

PACKAGES = ("modelscope", "json_repair", "trl", "accelerate", "datasets")


def prepare() -> None:
    """Imports what the cases need, before they are forked."""
    bridge.without_device(PACKAGES)
    bridge.sizes_of_two_kinds_of_layers()
    kimi_config()


def kimi_config() -> None:
    """Registers the config class that is published beside the weights of Kimi-VL."""
    from transformers import AutoConfig, DeepseekV3Config, PreTrainedConfig

    class KimiVLConfig(PreTrainedConfig):
        model_type = "kimi_vl"

        def __post_init__(self, **more: Any) -> None:
            text, vision = more.pop("text_config", {}), more.pop("vision_config", {})
            self.text_config, self.vision_config = (
                DeepseekV3Config(**text),
                PreTrainedConfig(**vision),
            )
            super().__post_init__(**more)

    AutoConfig.register(KimiVLConfig.model_type, KimiVLConfig)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Makes the process groups of a single rank."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run(cases: list[dict[str, Any]], out: Path) -> int:
    parent = int(os.environ["JUDGE_PARENT"])
    threading.Thread(target=bridge.die_with, args=(parent,), daemon=True).start()
    # before mcore-bridge replaces functions of transformers
    wanted = [
        tiny.hf_logits(Path(c["source"]), np.asarray(c["tokens"])) if "tokens" in c else None
        for c in cases
    ]
    for case, logits in zip(cases, wanted, strict=True):
        try:
            with one_rank():
                result = {"ok": True, **judged(case, logits)}
        except Exception:
            result = {"ok": False, "error": {"0": traceback.format_exc()}}
        (out / f"{case['name']}.json").write_text(json.dumps({"name": case["name"], **result}))
    return 0


def judged(case: dict[str, Any], logits: np.ndarray | None) -> dict[str, Any]:
    """Returns the results of one case; logits are those of transformers."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from mcore_bridge.utils import torch_utils
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from safetensors.torch import load_file
    from transformers import AutoConfig, dynamic_module_utils

    source = Path(case["source"])
    published = AutoConfig.from_pretrained(source)
    text_config = published.get_text_config()
    # as ms-swift has it (swift/utils/hf_config.py, compat_zero3)
    published.hidden_size = text_config.hidden_size
    given = hf_to_mcore_config(published)
    if given.get("experimental_attention_variant") == "gated_delta_net":
        # the layers of the tiny models are at no regular interval, as those of published ones
        kinds = text_config.layer_types
        linear = [int(kind == "linear_attention") for kind in kinds]
        given["linear_attention_freq"] = json.dumps(linear, separators=(",", ":"))
        from mcore_bridge.model.modules import gated_delta_net

        # of FLA, whose kernels need a GPU
        gated_delta_net.l2norm = local_stack.l2norm
        given["deterministic_mode"] = True
    if published.model_type == "gemma4":
        # with megatron_extra_kwargs of ms-swift: without it, the layers lie in stacks, and a stack
        # of layers with other head sizes cannot be saved
        given["hetereogenous_dist_checkpoint"] = True
    config = ModelConfig(params_dtype=torch.float32, use_cpu_initialization=True, **given)
    # Python beside the weights is copied, and locked in a directory of modelscope
    own = str(Path(case["saved"]).parent)
    torch_utils.get_cache_dir = lambda: own
    dynamic_module_utils.HF_MODULES_CACHE = own
    (model,) = get_mcore_model(config)
    config.bridge.load_weights([model], str(source))
    saved = Path(case["saved"])
    saved.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(saved))
    weights = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    weights = {name: t for name, t in weights.items() if t.is_floating_point()}
    for weight in weights.values():
        weight.fill_(float("nan"))
    wanted = {"model": model.sharded_state_dict()}
    state, unread, lacking = dist_checkpointing.load(
        wanted, case["checkpoint"], strict=StrictHandling.RETURN_ALL
    )
    # fake_te has fewer objects than Transformer Engine
    unread = {key for key in unread if not key.endswith("._extra_state")}
    assert not unread and not lacking, (unread, lacking)
    model.load_state_dict(state["model"])
    unloaded = [name for name, weight in weights.items() if weight.isnan().any()]
    held = load_file(source / "model.safetensors")
    exported = dict(config.bridge.export_weights([model]))
    # it exports these two apart
    for name in [name for name in held.keys() - exported.keys() if "gate_up_proj" in name]:
        parts = [exported.pop(name.replace("gate_up", part)) for part in ("gate", "up")]
        exported[name] = torch.cat(parts)
    differ = sorted(exported.keys() ^ held.keys())
    differ += [k for k in exported.keys() & held.keys() if not exported[k].equal(held[k])]
    result = {"unloaded": unloaded, "equal": len(held) - len(differ), "differ": differ}
    if logits is None:
        return result
    tokens = torch.tensor(case["tokens"])
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()  # of later positions
    more = (
        {"mm_token_type_ids": torch.zeros_like(tokens)} if published.model_type == "gemma4" else {}
    )
    with torch.no_grad():
        found = (
            model.eval()(tokens, positions, hidden, **more)[..., : logits.shape[-1]].float().numpy()
        )
    return {
        **result,
        "difference": float(np.abs(found - logits).max()),
        "largest": float(np.abs(logits).max()),
    }
