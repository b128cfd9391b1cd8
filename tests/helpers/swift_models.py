"""mcore-bridge, of ms-swift, as a judge: builds its own GPTModel and loads a checkpoint into it.

tests/helpers/session.py runs it, in the environment of bridge.py with mcore-bridge added, which
CONTRIBUTING.md describes. A case is a dict with these entries; the results stand behind the arrow:

    name        of the case
    source      Hugging Face directory, of which mcore-bridge builds the model
    tokens      [batch, seq], whose logits are compared
    image       true: the logits of text with an image of noise are compared
                -> image, text: the difference at these places
                Without tokens and image, no logit is compared.
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
import inspect
import json
import os
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
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
    published_configs()


def published_configs() -> None:
    """Registers the classes of configs that are published beside the weights of models."""
    from transformers import (
        AutoConfig,
        AutoModel,
        DeepseekV3Config,
        PreTrainedConfig,
        PreTrainedModel,
        Qwen3Config,
    )

    def register(kind: str, parts: dict[str, Any]) -> None:
        class Config(PreTrainedConfig):
            model_type = kind

            def __post_init__(self, **more: Any) -> None:
                for part, part_class in parts.items():
                    setattr(self, part, part_class(**more.pop(part, {})))
                super().__post_init__(**more)

        AutoConfig.register(kind, Config)

    class Siglip(PreTrainedConfig):
        model_type = "siglip2_navit"

    class Tower(PreTrainedModel):
        config_class = Siglip

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.patches = torch.nn.Parameter(torch.ones(3))
            self.post_init()

    register("kimi_vl", {"text_config": DeepseekV3Config, "vision_config": PreTrainedConfig})
    register("internvl_chat", {"llm_config": Qwen3Config, "vision_config": PreTrainedConfig})
    register("ovis2_5", {"llm_config": Qwen3Config, "vit_config": Siglip})
    AutoModel.register(Siglip, Tower)


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
    wanted = [Wanted.of(case) for case in cases]
    for case, logits in zip(cases, wanted, strict=True):
        try:
            with one_rank():
                result = {"ok": True, **judged(case, logits)}
        except Exception:
            result = {"ok": False, "error": {"0": traceback.format_exc()}}
        (out / f"{case['name']}.json").write_text(json.dumps({"name": case["name"], **result}))
    return 0


@dataclass
class Wanted:
    """The logits [batch, seq, vocab] that transformers computes for tokens [batch, seq]."""

    tokens: torch.Tensor
    logits: torch.Tensor
    positions: torch.Tensor  # [batch, seq], or [3, batch, seq]: time, row and column
    image: torch.Tensor  # places of an image in tokens
    more: dict[str, torch.Tensor]  # the image

    @classmethod
    def of(cls, case: dict[str, Any]) -> Wanted | None:
        source = Path(case["source"])
        if "tokens" in case:
            tokens = torch.tensor(case["tokens"])
            logits = torch.from_numpy(tiny.hf_logits(source, np.asarray(case["tokens"])))
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            return cls(tokens, logits, positions, torch.zeros_like(tokens).bool(), {})
        if not case.get("image"):
            return None
        reference = bridge.reference_of(source)
        tokens, more, image = bridge.noise(reference.config)
        entered: dict[str, Any] = {}
        decoder = reference.get_decoder()
        decoder.register_forward_pre_hook(
            lambda _module, _args, given: entered.update(given), with_kwargs=True
        )
        given = more | {"mm_token_type_ids": image.int()}
        names = inspect.signature(reference.forward).parameters
        with torch.no_grad():
            logits = reference(tokens, **{k: v for k, v in given.items() if k in names}).logits
        positions = entered.get("position_ids")
        if positions is None or positions.dim() == 2:
            positions = torch.arange(tokens.shape[1])[None]
        else:
            positions = positions[-3:]  # there may be a row for text before them
        return cls(tokens, logits, positions, image, more)


def judged(case: dict[str, Any], wanted: Wanted | None) -> dict[str, Any]:
    """Returns the results of one case."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from mcore_bridge.utils import torch_utils
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from safetensors.torch import load_file
    from transformers import AutoConfig, dynamic_module_utils

    source = Path(case["source"])
    published = AutoConfig.from_pretrained(source)
    text_config = getattr(published, "llm_config", published.get_text_config())
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
    asked = {"model": model.sharded_state_dict()}
    state, unread, lacking = dist_checkpointing.load(
        asked, case["checkpoint"], strict=StrictHandling.RETURN_ALL
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
    if wanted is None:
        return result
    length = wanted.tokens.shape[1]
    hidden = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()  # of later positions
    more = dict(wanted.more)
    if published.model_type == "gemma4":
        more["mm_token_type_ids"] = torch.zeros_like(wanted.tokens)
    with torch.no_grad():
        found = model.eval()(wanted.tokens, wanted.positions, hidden, **more)
    apart = (found[..., : wanted.logits.shape[-1]].float() - wanted.logits).abs().amax(-1)
    kinds = {"image": wanted.image, "text": ~wanted.image} if wanted.image.any() else {}
    return {
        **result,
        "difference": apart.max().item(),
        "largest": wanted.logits.abs().max().item(),
        **{kind: apart[places].max().item() for kind, places in kinds.items()},
    }
