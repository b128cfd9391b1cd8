"""The places of parameters in the optimizer's flat buffers are those of Megatron-Core."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from mckpt import mapping
from mckpt.formats.base import Names
from mckpt.formats.megatron.optimizer.buckets import bucket_step, optimizers, rounded
from mckpt.geometry.parallel import Parallel
from tests.helpers.judged_models import DENSE, LLAMA3, MOE, QWEN3, TE
from tests.helpers.judging import ask_all

pytestmark = pytest.mark.judge

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": DENSE | QWEN3,
    "bias": DENSE | {"add_qkv_bias": True},
    "layernorm": DENSE | {"normalization": "LayerNorm", "add_bias_linear": True},
    "tied": DENSE | LLAMA3,
    "moe": MOE | QWEN3,
}
SIZES: dict[str, list[dict[str, int]]] = {
    "qwen3": [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2, "world": 4}, {"bucket_size": 9000}],
    "bias": [{"tp": 2}],
    "layernorm": [{"tp": 2, "pp": 2}],
    "tied": [{"pp": 2, "tp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}],
    "moe": [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1, "pp": 2}, {"tp": 2}, {"ep": 2, "tp": 2}],
}


def cases(te: bool) -> list[dict[str, Any]]:
    out = []
    for model, grid in SIZES.items():
        for sizes in grid:
            name = "-".join([model, *(f"{k}{v}" for k, v in sizes.items())])
            args = MODELS[model] | (TE if te else {})
            out.append({"name": name, "args": args, **sizes})
    return out


@pytest.mark.parametrize("te", [False, True])
def test_every_parameter_is_where_megatron_core_keeps_it(te: bool) -> None:
    listed = cases(te)
    found = ask_all([{"kind": "buckets", **case} for case in listed], te)
    for case, result in zip(listed, found, strict=True):
        compare(case, result["buffers"])


def compare(case: dict[str, Any], real: list[Any]) -> None:
    dialect = mapping.load("megatron", "gpt")
    dims = dialect.read(case["args"], source="args")
    given = {name: case.get(name) for name in ("tp", "pp", "vpp", "ep", "etp") if case.get(name)}
    parallel = Parallel(**given)
    te = case["args"]["transformer_impl"] == "transformer_engine"
    chosen = {
        "keys": "local",
        "transformer_impl": case["args"]["transformer_impl"],
        "experts": "grouped" if te else "sequential",
        "layers": "stacked",
        **dialect.choices_for([int(part) for part in version("megatron-core").split(".")[:2]]),
    }
    names = Names(dialect, dims, {**chosen, "pp": parallel.pp}, parallel)
    dtypes = {name: "bfloat16" for b in names.bound for name in b.rule.of}
    ours = {}
    for one in optimizers(
        names,
        dtypes,
        case["args"]["padded_vocab_size"],
        expert_chain=parallel.ep > 1,
        bucket_size=case.get("bucket_size"),
    ):
        for buffer in one.buffers:
            ours[one.chain, one.tp, one.pp, one.ep, buffer.chunk] = buffer
    assert {tuple(where) for where, *_ in real} == set(ours)
    for where, rows, numels, num_ranks, shapes in real:
        buffer, step = ours[tuple(where)], bucket_step(num_ranks)
        assert list(buffer.numels) == numels, (case["name"], where)
        mine = []
        for one in buffer.placed:
            start = buffer.start(one.bucket, step)
            mine.append([one.parameter.key, start + one.start, start + one.end, one.bucket])
        assert mine == rows, (case["name"], where)
        assert [list(one.parameter.shape) for one in buffer.placed] == shapes
        assert all(rounded(start, 64) == start for _, start, *_ in rows)


def test_every_key_of_a_dialect_has_a_place() -> None:
    dialects = [mapping.load("megatron", name) for name in mapping.names("megatron")]
    # the order of the own modules of Megatron-Bridge and of ms-swift's Gemma 4 is not known, and
    # their flat buffers are refused; MaxText has none
    unordered = {d.name for d in dialects if "Bridge" in d.trainer}
    unordered |= {"mcore_bridge_gemma4", "maxtext"}
    ordered = [d for d in dialects if d.registration.order and d.name not in unordered]
    assert {dialect.name for dialect in ordered} >= {"gpt", "hybrid", "bert"}
    for dialect in ordered:
        for rule in dialect.rules:
            if "experts.experts" not in rule.key and ".weight." not in rule.key:
                key = rule.key.format(layer=0, expert=0, mtp=0)
                if dialect.registration.is_parameter(key) and ".bias." not in key:
                    dialect.registration.sorted([key])
