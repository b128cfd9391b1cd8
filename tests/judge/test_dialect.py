"""The dialect has a rule for every tensor that Megatron-Core's model has, whatever the dims, so
that a plan cannot miss one.

The families that come with mckpt use only some combinations of norm, biases and activation. A
family of a user's own may use any of them.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

import mckpt
from mckpt import mapping
from mckpt.formats.base import packed
from mckpt.formats.megatron import torch_shards
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims
from tests.helpers.judging import ask
from tests.helpers.tiny import TinyModel

pytestmark = pytest.mark.judge

BIASES = {"mlp_bias": True, "o_bias": True, "qkv_bias": True}
PLAIN = {"gated": False, "activation": "gelu"}
LAYERNORM = {"norm": "layernorm"}
PADDED_ROWS = 256
DENSE, MIXTURE = Parallel(tp=2, pp=2), Parallel(tp=2, pp=2, ep=2, etp=1)
# name -> (case of tests/helpers/tiny.py, dims that replace those of the case)
MODELS: dict[str, tuple[str, Dims, Parallel]] = {
    "layernorm": ("qwen3", LAYERNORM, DENSE),
    "biases": ("qwen3", BIASES, DENSE),
    "not gated": ("llama", PLAIN, DENSE),
    "like GPT-2": ("llama", {**LAYERNORM, **BIASES, **PLAIN, "tied": True}, DENSE),
    "mixture, layernorm": ("qwen3-moe", LAYERNORM, MIXTURE),
    "mixture, biases": ("qwen3-moe", BIASES, MIXTURE),
    "mixture, not gated, biases": ("qwen3-moe", {**LAYERNORM, **BIASES, **PLAIN}, MIXTURE),
    "shared expert, not gated": ("deepseek-v3", PLAIN, MIXTURE),
    "latent attention, layernorm": ("deepseek-v3", LAYERNORM, MIXTURE),
    "latent attention, biases": (
        "deepseek-v3",
        {"mlp_bias": True, "o_bias": True, "shared_ffn_size": 0},
        MIXTURE,
    ),
}
CASES = [(name, impl) for name in MODELS for impl in ("local", "transformer_engine")]


def dims_of(name: str, tiny_model: TinyModel) -> Dims:
    case, changes, _ = MODELS[name]
    return {**mckpt.open(tiny_model(case)).dims, **changes}


def chosen_by(impl: str, dims: Dims) -> dict[str, Any]:
    """Returns the dialect's choices for these layers and the installed megatron-core."""
    dialect = mapping.load("megatron", "gpt")
    by_version = dialect.choices_for(dialect.version(version("megatron-core")))
    return {
        "transformer_impl": impl,
        "experts": "grouped" if impl == "transformer_engine" else "sequential",
        **by_version,
    }


@pytest.mark.parametrize(("name", "impl"), CASES)
def test_every_tensor_of_the_model_has_a_rule(name: str, impl: str, tiny_model: TinyModel) -> None:
    dims, parallel = dims_of(name, tiny_model), MODELS[name][2]
    expect_rules("gpt", dims, chosen_by(impl, dims), parallel)


def expect_rules(
    name: str, dims: Dims, chosen: dict[str, Any], parallel: Parallel, **more: Any
) -> dict[str, Any]:
    """Fails unless a dialect has the names and shapes of the model that megatron-core builds for
    these dims. Returns them.
    """
    given = {"dtype": "float32", "padded_vocab_size": PADDED_ROWS, **chosen}
    args = {**mapping.load("megatron", name).write(dims, given), **parallel.args(), **more}
    sizes = {k: getattr(parallel, k) for k in ("tp", "pp", "ep", "etp") if getattr(parallel, k)}
    found = ask("keys", te=True, args=args | {"params_dtype": "float32"}, **sizes)
    ours = torch_dist_tensors(dims, chosen, parallel, name)
    assert ours == {
        k: shape for k, (shape, dtype) in found["torch_dist"].items() if dtype != "object"
    }
    files = torch_tensors(dims, chosen, parallel, name)
    assert set(files) == set(found["torch"])
    for directory, models in found["torch"].items():
        wanted = [
            {k: shape for k, shape in model.items() if not k.endswith("_extra_state")}
            for model in models
        ]
        assert files[directory] == wanted
    return found


def torch_dist_tensors(
    dims: Dims, chosen: dict[str, Any], parallel: Parallel, name: str
) -> dict[str, list[int]]:
    """Returns key -> shape of every tensor that a torch_dist checkpoint of a dialect contains."""
    dialect = mapping.load("megatron", name)
    layers = dialect.choices_in(dialect.write(dims, chosen)).get("layers", "stacked")
    scope = dialect.scope(dims, keys="global", layers=layers, pp=parallel.pp, **chosen)
    return {
        key: [*b.axes(scope), *packed(b.rule, scope, PADDED_ROWS).shape]
        for b in dialect.bind(scope)
        for key, _ in b.global_keys()
    }


def torch_tensors(
    dims: Dims, chosen: dict[str, Any], parallel: Parallel, name: str
) -> dict[str, list[dict[str, list[int]]]]:
    """Returns the directory of a rank -> key -> shape of every tensor in its file, with one dict
    for each virtual stage.
    """
    dialect = mapping.load("megatron", name)
    scope = dialect.scope(dims, keys="local", layers="stacked", pp=parallel.pp, **chosen)
    grid, stages = (
        parallel.files(bool(dims["num_experts"])),
        parallel.stages(dims["num_layers"], dims["mtp_layers"]),
    )
    out: dict[str, list[dict[str, list[int]]]] = {}
    for b in dialect.bind(scope):
        for held in torch_shards.shards(b, packed(b.rule, scope, PADDED_ROWS), parallel, grid):
            for p in range(parallel.pp):
                for t, e in held.files:
                    models = out.setdefault(
                        parallel.directory(t, p, e), [{} for _ in range(parallel.vpp)]
                    )
                    for v, _, _, key in torch_shards.instances(b, stages[p], p, parallel, dims, e):
                        models[v][key] = list(held.shape)
    return out
