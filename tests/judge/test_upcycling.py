"""Mixtures of experts made by an edit, beside those that Megatron-Core's own upcycling makes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, python, refused
from tests.helpers.judging import ask

pytestmark = pytest.mark.judge

# Gives the state dict of a dense model to megatron-core, and compares what it makes of it with a
# checkpoint. The model that would get the result has NaN in the place of all weights but the rows
# of its router, of which megatron-core takes the first ones.
JUDGE = """
    import json
    import sys

    import torch
    from megatron.core.transformer.moe import upcycling_utils
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    class Of:
        def __init__(self, **fields):
            vars(self).update(fields)

    class Layer(BaseMoELayer):
        def __init__(self, **fields):
            inner = [("experts", fields["experts"])]
            vars(self).update(fields, _modules={}, named_modules=lambda: inner)

        forward = None

    kinds = {"sequential": SequentialMLP, "grouped": TEGroupedMLP}

    def compare(dense, moe, kind, parts, topk, width):
        dense, moe = (torch.load(path, weights_only=False)["model"] for path in (dense, moe))
        weights = {key: value for key, value in moe.items() if isinstance(value, torch.Tensor)}
        router = [key for key in weights if key.endswith("mlp.router.weight")]
        experts = len(weights[router[0]])
        config = Of(
            num_moe_experts=experts, gated_linear_unit=True, moe_router_topk=topk,
            moe_router_pre_softmax=False, moe_ffn_hidden_size=width // parts,
            activation_func=torch.nn.functional.silu,
        )
        layer = Layer(
            num_local_experts=experts, config=config, ep_group=Of(rank=lambda: 0),
            experts=kinds[kind].__new__(kinds[kind]),
        )
        fresh = {key: torch.full_like(value, float("nan")) for key, value in weights.items()}
        for key in router:  # each of the first rows is there `parts` times in a row
            fresh[key][: experts // parts] = weights[key][::parts]
        to = Of(named_modules=lambda: [("mlp", layer)], state_dict=lambda: fresh)
        mlp = Of(config=Of(ffn_hidden_size=width))
        dense = {key: value for key, value in dense.items() if isinstance(value, torch.Tensor)}
        of = Of(named_modules=lambda: [("mlp", mlp)], state_dict=lambda: dense)
        found = upcycling_utils.upcycle_state_dict([to], [of])["model"]
        assert found.keys() == weights.keys(), found.keys() ^ weights.keys()
        for key, value in found.items():
            assert value.dtype == weights[key].dtype, key
            bits = [one.contiguous().view(torch.uint8) for one in (value, weights[key])]
            assert bits[0].equal(bits[1]), key
        print(len(found), "tensors are equal")

    for case in json.loads(sys.argv[1]):
        compare(*case)
"""

# a case, its dtype, the granularity, and how the experts are stored
CASES = (
    ("qwen3", "bfloat16", 2, "sequential"),
    ("qwen3", "float32", 4, "grouped"),
    ("llama", "float16", 1, "grouped"),
)


def test_the_weights_are_those_of_megatrons_own_upcycling(tmp_path: Path) -> None:
    cases = []
    for number, (case, dtype, parts, experts) in enumerate(CASES):
        work = tmp_path / str(number)
        hf = tiny.tiny_random(case, work / "hf", dtype)
        mckpt.convert(hf, work / "dense", format="torch")
        recipe, width, topk = work / "recipe.yaml", mckpt.open(hf).dims["ffn_size"], 2 * parts
        given = f"experts: 3, topk: {topk}, granularity: {parts}, form: megatron"
        recipe.write_text(f"- upcycle: {{{given}}}\n")
        options = ("--recipe", recipe, "--format", "torch", f"--{experts}-experts")
        good("edit", hf, work / "moe", *options)
        files = [str(next((work / n).rglob("model_optim_rng.pt"))) for n in ("dense", "moe")]
        cases.append([*files, experts, parts, topk, width])
    assert python(JUDGE, json.dumps(cases)).count("tensors are equal") == len(CASES)


def test_megatron_computes_the_logits_of_the_dense_model(tmp_path: Path) -> None:
    hf = tiny.tiny_random("qwen3", tmp_path / "hf")
    mckpt.convert(hf, tmp_path / "dense", tp=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("- upcycle: {experts: 4, topk: 4, granularity: 2}\n")
    good("edit", tmp_path / "dense", tmp_path / "moe", "--recipe", recipe, "--tp", 2, "--ep", 2)
    tokens = tiny.tokens("qwen3")
    case: dict[str, Any] = {
        "checkpoint": str(tmp_path / "moe"),
        "tokens": tokens.tolist(),
        "impl": "local",
    }
    logits = ask("forward", **case, tp=2, ep=2)["logits"]
    wanted = tiny.hf_logits(hf, tokens)
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.newest
def test_squared_relus_become_experts_of_megatron_alone(tmp_path: Path) -> None:
    made_models.make(["nemotron"], tmp_path)
    hf = tmp_path / "nemotron"
    config = json.loads((hf / "config.json").read_text())
    config |= {"mlp_bias": False, "attention_bias": False}  # as Nemotron-4
    (hf / "config.json").write_text(json.dumps(config))
    held = load_file(hf / "model.safetensors")
    tiny.write_weights(hf, {n: t for n, t in held.items() if not n.endswith("proj.bias")})
    mckpt.convert(hf, tmp_path / "dense", tp=2, dtype="fp32")
    tokens = made_models.tokens("nemotron")
    wanted = tiny.hf_logits(hf, tokens)
    for form in ("exact", "megatron"):  # both keep the function of squared ReLUs
        moe = tmp_path / form
        text = f"upcycle: {{experts: 4, topk: 4, granularity: 2, form: {form}}}"
        mckpt.edit(tmp_path / "dense", moe, [text], tp=2, ep=2, etp=1)
        assert mckpt.check(moe).verdict == "sound"
        assert not (moe / "hf" / "config.json").exists()
        case: dict[str, Any] = {"checkpoint": str(moe), "tokens": tokens.tolist()}
        case |= {"impl": "transformer_engine", "te": True}
        logits = ask("forward", **case, tp=2, ep=2, etp=1)["logits"]
        assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max(), form
    words = "no class of transformers computes the edited model; give --format torch_dist"
    refused(2, words, args=("edit", hf, tmp_path / "no", "--edit", text))


def test_the_training_of_the_dense_model_goes_on(tmp_path: Path) -> None:
    """The first loss is that of the dense run, whose optimizer's state is loaded with the experts;
    after that the experts learn apart.
    """
    hf = tiny.tiny_random("qwen3", tmp_path / "hf")
    mckpt.convert(hf, tmp_path / "start")
    job: dict[str, Any] = {
        "kind": "train",
        "lr": 1e-2,
        "warmup": 1,
        "global_batch_size": 4,
        "seq_length": 16,
    }
    job |= {"dtype": "float32", "decay_steps": 4, "impl": "local"}
    run: dict[str, Any] = {
        "checkpoint": str(tmp_path / "start"),
        "steps": 2,
        "save": str(tmp_path / "run"),
    }
    ask(**job, **run, tp=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("- upcycle: {experts: 4, topk: 4, granularity: 2}\n")
    options = ("--recipe", recipe, "--tp", 1, "--ep", 2)
    said = good("edit", tmp_path / "run", tmp_path / "moe", *options)
    assert "exp_avg, exp_avg_sq, master are kept" in said.err
    runs: tuple[tuple[str, dict[str, Any]], ...] = (("run", {"tp": 2}), ("moe", {"ep": 2}))
    dense, moe = (
        ask(**job, checkpoint=str(tmp_path / name), resume=True, steps=4, **sizes)["steps"]
        for name, sizes in runs
    )
    losses = [[step["loss"] for step in steps] for steps in (dense, moe)]
    assert len(losses[0]) == len(losses[1]) == 2
    assert abs(losses[0][0] - losses[1][0]) < 1e-5 * losses[0][0], losses
    assert abs(losses[0][1] - losses[1][1]) < 0.2 * losses[0][1], losses
