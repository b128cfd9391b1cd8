"""The tiny checkpoints are those that transformers saves, and every change moves their logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny import (
    CASES,
    Config,
    TinyModel,
    config,
    decoder_only,
    load,
    logits,
    tensors,
    tiny_random,
    tokens,
    values,
)

PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Gives torch one thread, because models this small run faster with one, most of all beside
    other tests.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def few(case: str) -> np.ndarray:
    """Returns the first 64 tokens of each row, which are enough for everything but rope scaling."""
    return tokens(case)[:, :64]


def in_memory(c: Config) -> Any:
    """Returns a transformers model of a config.json's content that was never on disk, with
    transformers' own values.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**c)
    return AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def fill(model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Copies tensors, by their names on disk, into a model.

    In memory transformers 5 stacks the experts, [experts, gate|up, hidden] and [experts, hidden,
    ffn], and calls Mixtral's block mlp.
    """
    import torch

    state = model.state_dict()
    with torch.no_grad():
        for name, array in arrays.items():
            if found := re.fullmatch(
                r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name
            ):
                at, expert, part = found[1], int(found[2]), PARTS.get(found[3], found[3])
                stack = state[
                    f"{at}.mlp.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
                ][expert]
                target = stack if part == "down_proj" else stack.chunk(2)[part == "up_proj"]
            else:
                target = state[name.replace(".block_sparse_moe.", ".mlp.")]
            assert target.shape == array.shape, name
            target.copy_(torch.from_numpy(array.astype(np.float32)))


def decoder(c: Config) -> dict[str, np.ndarray]:
    """Returns the tensors without those of multi-token prediction, which transformers
    does not use.
    """
    arrays = tensors(c)
    return {name: arrays[name] for name in decoder_only(c, arrays)}


def computed(case: str, ids: np.ndarray, **settings: Any) -> np.ndarray:
    """Returns the logits of the case from a model that was never on disk. `settings` replace
    entries of config.json.
    """
    model = in_memory({**config(case), **settings})
    fill(model, decoder(config(case)))
    return logits(model, ids)


@cache
def reference(case: str) -> np.ndarray:
    """Returns the case's logits of few()."""
    return computed(case, few(case))


def change(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the root mean square of the difference, in standard deviations of `a`."""
    return float(np.sqrt(np.mean((a - b) ** 2)) / a.std())


@pytest.mark.parametrize("case", CASES)
def test_tiny_random_writes_the_bytes_that_transformers_saves(case: str, tmp_path: Path) -> None:
    # transformers would not save the layers of multi-token prediction
    none = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config(case) else {}
    written = tiny_random(case, tmp_path / "written", **none)
    load(written, "bfloat16").save_pretrained(tmp_path / "saved")
    file = "model.safetensors"
    assert (tmp_path / "saved" / file).read_bytes() == (written / file).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_moves_the_logits(case: str) -> None:
    """New values for all tensors of one kind in the last layer must move the logits. Exchanging two
    kinds must do so too.
    """
    c = config(case)
    arrays = decoder(c)
    last = f".{c['num_hidden_layers'] - 1}."
    kinds: dict[str, list[str]] = {}
    for name in arrays:
        if ".layers." not in name or last in name.split(".experts.")[0]:
            kinds.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    edits: dict[str, dict[str, np.ndarray]] = {}
    for kind, names in kinds.items():
        edits[kind] = {
            name: values(name, arrays[name].shape, seed=1).astype(arrays[name].dtype)
            for name in names
        }
    for one, two in [
        ("k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_norm", "k_norm"),
        ("input_", "post_attention_"),
    ]:
        pairs = [(n, n.replace(one, two)) for names in kinds.values() for n in names if one in n]
        if pairs:
            edits[f"{one} and {two}"] = {
                a: arrays[b] for pair in pairs for a, b in (pair, pair[::-1])
            }
    model = in_memory(c)
    fill(model, arrays)
    for edit, new in edits.items():
        fill(model, new)
        moved = change(reference(case), logits(model, few(case)))
        fill(model, {name: arrays[name] for name in new})
        assert moved > 0.02, (
            f"{case}: {edit} changes the logits by {moved:.4f} standard deviations only"
        )


@pytest.mark.parametrize("case", CASES)
def test_every_hyperparameter_moves_the_logits(case: str) -> None:
    c = config(case)
    edits: list[dict[str, Any]] = [{"rope_theta": 10000.0}, {"rope_theta": 1000000.0}]
    # transformers has only one epsilon for this family, too small to move the logits
    if c["model_type"] == "deepseek_v3":
        edits += [{"routed_scaling_factor": 2.0}, {"n_group": 8, "topk_group": 3}]
    else:
        edits += [{"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5}]
    if "num_experts_per_tok" in c:
        edits += [{"num_experts_per_tok": c["num_experts_per_tok"] + 1}]
    if "norm_topk_prob" in c:
        edits += [{"norm_topk_prob": not c["norm_topk_prob"]}]
    for edit in edits:
        if all(c[key] == value for key, value in edit.items()):
            continue
        moved = change(reference(case), computed(case, few(case), **edit))
        assert moved > 0.01, (
            f"{case}: {edit} changes the logits by {moved:.4f} standard deviations only"
        )


def test_rope_scaling_moves_the_logits() -> None:
    case = "llama-rope-scaled"
    scaling = config(case)["rope_scaling"]
    # megatron-core has these values as constants
    assert (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    ) == (1, 4, 8192)
    found = computed(case, tokens(case))
    assert change(found, computed(case, tokens(case), rope_scaling=None)) > 0.08
    assert (
        change(found, computed(case, tokens(case), rope_scaling={**scaling, "factor": 8.0})) > 0.03
    ), "8 is megatron-core's default"


@pytest.mark.parametrize(
    "case", ["deepseek-v3", "deepseek-v3-plain", "mixtral", "qwen3-moe", "qwen3-moe-raw"]
)
def test_every_expert_gets_a_token(tiny_model: TinyModel, case: str) -> None:
    model = load(tiny_model(case))
    chosen: list[np.ndarray] = []

    def router(module: Any, args: Any, out: Any) -> None:
        chosen.append(out[-1].numpy())

    dense = config(case).get("first_k_dense_replace", 0)
    for layer in model.model.layers[dense:]:
        layer.mlp.gate.register_forward_hook(router)
    logits(model, few(case))  # any longer input then reaches them too
    experts = next(
        config(case)[key]
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if key in config(case)
    )
    assert len(chosen) == config(case)["num_hidden_layers"] - dense
    for layer, indices in enumerate(chosen):
        assert set(indices.ravel().tolist()) == set(range(experts)), f"layer {layer}"


@pytest.mark.parametrize("case", CASES)
def test_all_sizes_of_a_case_differ(case: str) -> None:
    """If two sizes were equal, a test could not find that one replaced the other."""
    c = config(case)
    layers = "num_hidden_layers num_attention_heads num_key_value_heads hidden_size"
    sizes = {key: c[key] for key in f"{layers} intermediate_size vocab_size".split()}
    experts = "num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
    sizes |= {key: c[key] for key in experts.split() if key in c}
    if c["model_type"] == "deepseek_v3":
        del sizes["num_key_value_heads"]
        latent = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
        sizes |= {key: c[key] for key in f"n_routed_experts {latent}".split()}
        assert len(set(sizes.values())) == len(sizes), sizes
        return
    sizes["head_dim"] = head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    sizes["k rows"] = c["num_key_value_heads"] * head_dim
    if c["model_type"] != "qwen2":  # it has no head_dim: hidden/heads, so q_proj is square
        assert head_dim != c["hidden_size"] / c["num_attention_heads"]
        sizes["q rows"] = c["num_attention_heads"] * head_dim
    assert len(set(sizes.values())) == len(sizes), sizes
    assert c["vocab_size"] % 2 == 1
    divided = "intermediate_size num_experts num_local_experts moe_intermediate_size"
    for key in f"num_attention_heads {divided}".split():
        assert c.get(key, 0) % 4 == 0, key
