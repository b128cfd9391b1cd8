"""The boxes of the ranks of an engine are those of its shards, and cover each tensor."""

from __future__ import annotations

import numpy as np
import pytest

import mckpt
from mckpt import live
from tests.helpers.tiny import TinyModel

# fused q, k and v, a transpose, experts in one tensor, a hybrid, gated delta nets, latent attention
CASES = ("phi3", "gpt2", "qwen3-moe-raw", "nemotron_h", "qwen3_next", "deepseek-v3-plain")


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "pp": 2, "ep": 2}])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_of_an_engine_hold_each_element(
    case: str, sizes: dict[str, int], tiny_model: TinyModel
) -> None:
    source = mckpt.open(tiny_model(case))
    sizes = {name: n for name, n in sizes.items() if name != "ep" or source.dims["num_experts"]}
    every = live.engine_boxes(source, **sizes)
    counts = {name: np.zeros(one.shape, int) for name, one in source.hf_tensors().items()}
    for held in every:
        for name, boxes in held.items():
            for box in boxes:
                counts[name][tuple(slice(a, b) for a, b in box)] += 1
    assert all((count >= 1).all() for count in counts.values())
    largest = max(
        (n for n in counts if ".layers." in n or ".h." in n), key=lambda n: counts[n].size
    )
    assert (counts[largest] == 1).all(), largest  # a weight that tp cuts


def test_a_fused_tensor_is_cut_in_each_part(tiny_model: TinyModel) -> None:
    source = mckpt.open(tiny_model("phi3"))
    config, boxes = source.hf_config(), live.engine_boxes(source, tp=2)[1]
    size = config["hidden_size"] // config["num_attention_heads"]
    q, kv = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    starts = (0, q), (q, kv), (q + kv, kv)
    wanted = [((at + n // 2, at + n), (0, config["hidden_size"])) for at, n in starts]
    assert boxes["model.layers.0.self_attn.qkv_proj.weight"] == wanted
