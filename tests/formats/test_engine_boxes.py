"""The boxes of the ranks of an engine are those of its shards, and cover each tensor."""

from __future__ import annotations

import numpy as np
import pytest

import mckpt
from mckpt import live
from mckpt.errors import UsageError
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


def test_ranks_share_heads_of_k_and_v_if_there_are_fewer_than_tp(tiny_model: TinyModel) -> None:
    """As QKVParallelLinear of vLLM and SGLang does, which also have whole latents and eh_proj."""
    heads, groups, size, hidden = 16, 8, 24, 48
    every = live.engine_boxes(tiny_model("qwen3"), tp=heads)
    for rank, boxes in enumerate(every):
        group = rank // (heads // groups)
        for name, number in {"q": rank, "k": group, "v": group}.items():
            wanted = [((number * size, (number + 1) * size), (0, hidden))]
            assert boxes[f"model.layers.3.self_attn.{name}_proj.weight"] == wanted
        wanted = [((0, hidden), (rank * size, (rank + 1) * size))]
        assert boxes["model.layers.3.self_attn.o_proj.weight"] == wanted
    latents = ("layers.4.eh_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    shapes = {n: one.shape for n, one in mckpt.open(tiny_model("deepseek-v3")).hf_tensors().items()}
    for boxes in live.engine_boxes(tiny_model("deepseek-v3"), tp=8, ep=2):
        whole = [n for n in shapes if n.removesuffix(".weight").endswith(latents)]
        assert len(whole) == 11
        assert all(boxes[n] == [tuple((0, size) for size in shapes[n])] for n in whole)


@pytest.mark.parametrize(
    ("case", "sizes", "said"),
    [
        ("deepseek-v3", {"ep": 3}, "16 experts are not divisible by ep 3"),
        ("mixtral", {"tp": 3}, "8 query groups .* are neither divisible by tp 3 nor a divisor"),
        ("nemotron_h", {"tp": 8}, "mamba_groups 4 is not divisible by tp 8"),
        ("qwen3_5", {"tp": 8}, "linear_key_heads 4 is not divisible by tp 8"),
    ],
)
def test_sizes_that_leave_a_part_to_no_rank_are_refused(
    case: str, sizes: dict[str, int], said: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(UsageError, match=said):
        live.engine_boxes(tiny_model(case), **sizes)


def test_a_fused_tensor_is_cut_in_each_part(tiny_model: TinyModel) -> None:
    source = mckpt.open(tiny_model("phi3"))
    config, boxes = source.hf_config(), live.engine_boxes(source, tp=2)[1]
    size = config["hidden_size"] // config["num_attention_heads"]
    q, kv = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    starts = (0, q), (q, kv), (q + kv, kv)
    wanted = [((at + n // 2, at + n), (0, config["hidden_size"])) for at, n in starts]
    assert boxes["model.layers.0.self_attn.qkv_proj.weight"] == wanted
