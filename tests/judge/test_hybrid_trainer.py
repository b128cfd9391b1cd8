"""The trainer builds megatron-core's HybridModel: as the stock one in its names, as a GPTModel of
the same weights in its numbers, and the same at all parallel sizes and in both formats.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# importing it here would cost every run 5 s, those that deselect this file too
if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from mckpt.errors import UsageError
from mckpt.trainer import hybrid
from tests.helpers import tiny
from tests.helpers.judged_models import (
    DENSE,
    MOE,
    MOE_FFN,
    QWEN3,
    TOKENS,
)
from tests.helpers.judging import explain, judge
from tests.helpers.lazy import torch

pytestmark = pytest.mark.judge

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
needs_hybrid = pytest.mark.skipif(
    VERSION < (0, 18), reason=f"megatron-core {version('megatron-core')} has no HybridModel"
)

LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "rope_type": "rope",
    "group_query_attention": False,
    "num_query_groups": None,
}
DEEPSEEK = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_shared_expert_intermediate_size": MOE_FFN,
    "moe_router_load_balancing_type": "none",
    "mtp_loss_scaling_factor": 0.3,
}
DELTA = {
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "moe_shared_expert_intermediate_size": MOE_FFN,
    "moe_shared_expert_gate": True,
}


def of(pattern: str, *parts: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The args of a pattern."""
    args: dict[str, Any] = {}
    for part in parts:
        args |= part
    depths = pattern.count("/")
    numbers = {"num_layers": len(hybrid.layers(pattern)), "mtp_num_layers": depths or None}
    return args | numbers | {"hybrid_layer_pattern": pattern} | others


MODELS = {
    "experts": of("*-*E/*E/*E", MOE, QWEN3, DEEPSEEK),
    "delta": of("G-*E", MOE, QWEN3, DELTA, untie_embeddings_and_output_weights=False),
}
if VERSION >= (0, 19):
    MODELS["latent"] = of("+-+E+E/+E/+E", MOE, DEEPSEEK, LATENT)
    MODELS["direct"] = of("+-+E", MOE, LATENT, q_lora_rank=None)
TRAINED = "latent" if "latent" in MODELS else "experts"
SIZES: dict[str, dict[str, int]] = {
    "tp2pp2": {"tp": 2, "pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "tp2ep2": {"tp": 2, "ep": 2, "etp": 1},
    "all": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1},
}


def cut(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """A model's args with its layers cut into the virtual stages of these sizes."""
    pattern = MODELS[name]["hybrid_layer_pattern"]
    stages = sizes.get("pp", 1) * sizes.get("vpp", 1)
    return MODELS[name] | {"hybrid_layer_pattern": hybrid.cut(pattern, stages)}


@pytest.fixture(scope="module")
def results(work: Path, sources: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """One launch of 4 ranks. Every model is saved on one rank, and at other sizes; each checkpoint
    is loaded at the sizes that it was saved at and, if it is torch_dist, at others.
    """
    cases: list[dict[str, Any]] = []

    def save(name: str, form: str, tag: str = "") -> None:
        sizes = SIZES.get(tag, {})
        case = {"kind": "save", "format": form, "tokens": TOKENS, "args": cut(name, sizes)}
        full = "-".join(filter(None, (name, tag, form)))
        cases.append(case | {"name": f"{full}-saved", "destination": str(work / full)} | sizes)

    def run(name: str, saved: str, tag: str = "") -> None:
        case = {"kind": "forward", "tokens": TOKENS, "checkpoint": str(work / f"{name}-{saved}")}
        cases.append(case | {"name": f"{name}-{saved}-at-{tag}"} | SIZES.get(tag, {}))

    for name in MODELS:
        save(name, "torch_dist")
        run(name, "torch_dist", "tp2pp2")
        if name != "direct":
            save(name, "torch", "all")
            run(name, "all-torch", "all")
        if name == TRAINED:
            run(name, "torch_dist", "tp2ep2")
            save(name, "torch_dist", "pp2vpp2")
            run(name, "pp2vpp2-torch_dist")
    train = TRAIN | {"checkpoint": str(work / f"{TRAINED}-torch_dist")}
    saved = {"save": str(work / "trained"), "steps": 1, "decay_steps": TRAIN["steps"]}
    cases += [
        train | {"name": "train-one"},
        train | {"name": "train-dp2", "world": 2},
        train | {"name": "train-pp2vpp2", "pp": 2, "vpp": 2},
        train | {"name": "train-tp2ep2", "tp": 2, "ep": 2, "etp": 1} | saved,
        train | {"name": "train-resumed", "pp": 2, "resume": True, "checkpoint": saved["save"]},
    ]
    # last, because megatron-core keeps a table of the depths of the first model that it trains
    for name, kind in itertools.product(PAIRS, ("gpt", "hybrid")):
        source, at = sources[PAIRS[name]], {"checkpoint": str(work / f"{name}-{kind}")}
        mckpt.plan(source, at["checkpoint"], dialect=kind).run()
        at |= {"impl": "local"}
        tokens = tiny.tokens(PAIRS[name]).tolist()
        cases.append({"name": f"{name}-{kind}", "kind": "forward", "tokens": tokens} | at)
        cases.append({"name": f"{name}-{kind}-train"} | TRAIN | at)
    return judge(cases, work / "results")


TRAIN = {
    "kind": "train",
    "steps": 2,
    "lr": 1e-2,
    "global_batch_size": 4,
    "seq_length": 32,
    "dtype": "float32",
}


# ------------------------------------------------------------------------ beside a GPTModel


# one model of transformers each, which mckpt writes for a GPTModel and for a HybridModel
PAIRS = {"grouped": "qwen3-moe"} | ({"latent": "deepseek-v3"} if "latent" in MODELS else {})


@needs_hybrid
@pytest.mark.parametrize("name", list(PAIRS))
def test_the_same_numbers_as_a_gpt_model_of_the_same_weights(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    gpt, mine = results[f"{name}-gpt"], results[f"{name}-hybrid"]
    assert not explain(gpt) and not explain(mine)
    assert mine["unread"] == []
    assert np.abs(gpt["logits"]).max() > 1
    np.testing.assert_allclose(mine["logits"], gpt["logits"], atol=1e-5)
    for key in ("loss", "grad_norm"):
        expected = curve(results, f"{name}-gpt-train", key)
        np.testing.assert_allclose(curve(results, f"{name}-hybrid-train", key), expected, rtol=1e-5)


# ------------------------------------------------------------------------ formats and sizes


def curve(results: dict[str, dict[str, Any]], name: str, key: str) -> list[float]:
    assert not explain(results[name])
    return [step[key] for step in results[name]["steps"]]


@needs_hybrid
@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_logits_at_every_size_and_in_both_formats(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    expected = results[f"{name}-torch_dist-saved"]
    assert not explain(expected)
    assert np.abs(expected["logits"]).max() > 1
    others = [other for other in results if re.match(f"{name}-(torch|all|tp|pp)", other)]
    assert len(others) == {"direct": 2, TRAINED: 7}.get(name, 4)
    # the chunks of the gated delta rule are solved in fp32
    atol = 2e-4 if name == "delta" else 2e-5
    for other in others:
        found = results[other]
        assert not explain(found)
        assert found.get("unread", []) == []
        np.testing.assert_allclose(found["logits"], expected["logits"], atol=atol, err_msg=other)


@needs_hybrid
@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_the_same_training_at_every_size(results: dict[str, dict[str, Any]], key: str) -> None:
    expected = curve(results, "train-one", key)
    assert len(expected) == 2
    for tag, steps in (("dp2", [0, 1]), ("pp2vpp2", [0, 1]), ("tp2ep2", [0]), ("resumed", [1])):
        mine = curve(results, f"train-{tag}", key)
        np.testing.assert_allclose(mine, [expected[i] for i in steps], rtol=1e-5, err_msg=tag)


# ------------------------------------------------------------------------ names and args


@needs_hybrid
def test_the_names_and_shapes_of_the_stock_model(work: Path) -> None:
    """The stock model has modules of Transformer Engine, here of the stub in
    tests/helpers/fake_te.
    """
    args = {name: cut(name, SIZES["all"]) | {"deterministic_mode": True} for name in MODELS}
    cases = [
        {"name": f"{name}-{impl}", "kind": "keys", "args": args[name], "impl": impl} | SIZES["all"]
        # The local ones come first: they let megatron-core build `G` without FLA.
        for impl in ("local", "transformer_engine")
        for name in MODELS
    ]
    found = judge(cases, work / "names", te=True)
    for name in MODELS:
        local, stock = (found[f"{name}-{impl}"] for impl in ("local", "transformer_engine"))
        assert not explain(local) and not explain(stock)
        assert weights(local["torch_dist"]) == weights(stock["torch_dist"])
        assert len(weights(stock["torch_dist"])) > 20
        assert list(local["torch"]) == list(stock["torch"])
        for rank, chunks in stock["torch"].items():
            assert list(map(weights, local["torch"][rank])) == list(map(weights, chunks))


def weights(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if "_extra_state" not in name}


def test_a_pattern_is_cut_into_even_parts() -> None:
    from mckpt.trainer import build

    assert hybrid.cut("*-*-|*E*E/*E", 1) == "*-*-*E*E/*E"
    assert hybrid.cut("*-*-*E*E/*E", 4) == "*-|*-|*E|*E/*E"
    assert hybrid.cut("*-|*-*-", 4) == "*|-*|-|*-"
    with pytest.raises(UsageError, match=r"\*- has 2 layers, which cannot be cut into 4"):
        hybrid.cut("*-", 4)
    args = build.at_sizes(of("*-*|-/*-", DENSE, pipeline_model_parallel_size=2), pp=2)
    assert args.hybrid_layer_pattern == "*-*|-/*-"
    assert build.at_sizes(args, pp=4).hybrid_layer_pattern == "*|-|*|-/*-"
    assert build.at_sizes(args).hybrid_layer_pattern == "*-*-/*-"
    given = build.at_sizes(args, pp=4, hybrid_layer_pattern="*-*||-|/*-")
    assert given.hybrid_layer_pattern == "*-*||-|/*-"


def test_the_layer_of_transformers_that_each_layer_is_a_part_of() -> None:
    assert hybrid.places("*-G|E/*E") == [(0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp")]
    assert hybrid.places("**-E") == [(0, "attn"), (1, "attn"), (1, "mlp"), (2, "mlp")]


def test_states_are_recorded_under_the_names_of_the_layers_of_transformers() -> None:
    from mckpt.trainer import points, worker

    class Layer(torch.nn.Module):
        def __init__(self, number: int, part: str) -> None:
            super().__init__()
            self.layer_number = number
            self.self_attention = self.mlp = torch.nn.Identity()
            setattr(self, part, torch.nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.self_attention(x) if self.layer_number % 2 else x + self.mlp(x)

    parts = ("self_attention", "mlp") * 2
    layers = [Layer(number, part) for number, part in enumerate(parts, 1)]
    config = Namespace(sequence_parallel=False, context_parallel_size=1)
    chunk = Namespace(
        config=config,
        hybrid_layer_pattern="*-|*-",
        decoder=Namespace(layers=layers),
        pre_process=False,
        post_process=False,
    )
    recorder = points.Recorder()
    worker.watch([chunk], recorder)
    before = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = [before, *((before := layer(before)) for layer in layers)]
    expected = {}
    for layer, (x, attended, out) in enumerate((states[:3], states[2:])):
        expected[f"layers.{layer}.attn"] = attended - x
        expected[f"layers.{layer}.mlp"] = out - attended
        expected[f"layers.{layer}"] = out
    assert set(recorder.states) == set(expected)
    for name, value in expected.items():
        sketch = points.sketch(value[:, 0]).numpy()
        np.testing.assert_allclose(recorder.states[name], sketch, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("pattern", "others", "sizes", "message"),
    [
        ("*-*-", {"num_layers": 2}, {}, r"num_layers is 2, which does not agree with .*\*-\*-"),
        ("*-/*-", {"mtp_num_layers": None}, {}, "mtp_num_layers is 0, which does not agree"),
        ("*-*E", {}, {}, "num_experts is 0, which does not agree"),
        ("+-", {}, {}, "multi_latent_attention is 0, which does not agree"),
        ("*-", {"multi_latent_attention": True}, {}, "multi_latent_attention is True, which"),
        ("X-", {}, {}, "has the layer X: not built here"),
        ("*-+-", {"multi_latent_attention": True}, {}, r"has both \* and \+"),
        ("*-/*-/--", {}, {}, "the parts behind / must be equal"),
        ("*-|*-", {}, {}, "has 2 parts between |, and pp 1 times vpp 1 is not"),
        ("*-*-", {}, {"pp": 2, "vpp": 2}, r"needs \| where the 4 virtual stages end"),
        ("*-*", {}, {"pp": 2}, r"needs \| where the 2 virtual stages end"),
        ("*-/*-", {"untie_embeddings_and_output_weights": False}, {"pp": 2}, "tied: megatron-core"),
        ("*-", {"use_rope_scaling": True}, {}, "HybridModel has no scaled rotary embedding"),
        ("*-", {"hybrid_override_pattern": "-*"}, {}, r"hybrid_override_pattern is '-\*', and"),
        ("*-", {"spec": ["my.specs", "stack"]}, {}, r"spec is \['my.specs', 'stack'\]: not built"),
        (
            "*-",
            {"hybrid_layer_pattern": None, "is_hybrid_model": True},
            {},
            "is_hybrid_model is True, but the args have no",
        ),
    ],
)
def test_args_that_contradict_the_pattern(
    pattern: str, others: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    from mckpt.trainer import build

    with pytest.raises(UsageError, match=message):
        build.check(build.at_sizes({}, **of(pattern, DENSE) | others | sizes))
