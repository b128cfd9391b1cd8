"""Adapters of Megatron-Bridge, whose own code saves, loads and exports them, on two ranks.

mckpt reads what Megatron-Bridge saves, and Megatron-Bridge loads what mckpt writes. The judge is
the weights with the adapter, by the formulas of PEFT, and the logits of transformers with PEFT.
Megatron-Bridge cuts packed matrices by its own code when it exports.

MEGATRON_BRIDGE_PYTHON is the Python of an environment with Megatron-Bridge; CONTRIBUTING.md has the
command that makes one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.adapters.checkpoint import of_megatron
from mckpt.options import SourceOptions
from tests.helpers import adapters, made_models
from tests.helpers.adapters import factors, modules
from tests.helpers.commands import good
from tests.helpers.judging import explain, judge, limit
from tests.helpers.tiny import TinyModel

PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")
RUN: dict[str, Any] = {"te": True, "program": "bridge_adapters", "python": PYTHON, "ranks": 2}
pytestmark = [
    pytest.mark.judge,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
    ),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
TOWER = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")
LATENT_IN_MEGATRON = [f"linear_{x}_proj" for x in ("q_down", "q_up", "kv_down", "kv_up")]
REST = ["linear_proj", "linear_fc1", "linear_fc2"]

# At tp 2, Megatron-Bridge 0.6.2 adds the product of the shared experts' linear_fc2 once for each
# rank, so the latent cases run at tp 1. Its files of canonical adapters of linear_fc1 and of gated
# delta nets have the order of the weights' rows at tp 1 only.
MAMBA = {"target_modules": ["in_proj", "linear_qkv", "linear_fc1"]}
# What Megatron-Bridge saves: the model, the sizes, the class and its arguments beside dim and alpha
SAVED: dict[str, tuple[str, dict[str, int], str, dict[str, Any]]] = {
    "llama": ("llama", {"tp": 2}, "lora", {}),
    "stages": ("llama", {"pp": 2}, "lora", {"target_modules": ["linear_qkv", "linear_fc2"]}),
    "canonical": ("llama", {}, "canonical", {}),
    "one adapter for all experts": ("qwen3-moe", {"ep": 2}, "lora", {}),
    "experts": ("qwen3-moe", {"tp": 2, "ep": 2}, "lora", {"share_expert_adapters": False}),
    "shared outer": ("qwen3-moe", {"ep": 2}, "lora", {"experts_shared_outer_loras": True}),
    "latent": (
        "deepseek-v3",
        {"ep": 2},
        "lora",
        {"share_expert_adapters": False, "target_modules": [*LATENT_IN_MEGATRON, *REST]},
    ),
    "linear attention": (
        "qwen3_5",
        {},
        "lora",
        {"target_modules": ["linear_qkv", "in_proj", "out_proj", *REST]},
    ),
    "mamba": ("nemotron_h", {"tp": 2}, "lora", MAMBA),
    "some layers": (
        "deepseek-v3",
        {"ep": 2},
        "lora",
        {"target_modules": ["*.shared_experts.linear_fc1", "*.layers.2.*.linear_proj"]},
    ),
    "dora": ("llama", {}, "dora", {}),
    "dora of whole rows": (
        "llama",
        {"tp": 2},
        "dora",
        {"target_modules": ["linear_qkv", "linear_fc1"]},
    ),
    # whole multimodal models, of which linear_qkv and others are in the towers too
    "whole": ("qwen3_vl", {"tp": 2}, "lora", {}),
    "whole of transformers": (
        "qwen2_5_vl",
        {"tp": 2},
        "lora",
        {"target_modules": ["linear_qkv", "linear_fc2", "qkv", "merger.mlp.*", "*.1.mlp.up_proj"]},
    ),
}
# What mckpt writes: the model, the modules, the layout, and the sizes at which it is loaded
WRITTEN: dict[str, tuple[str, tuple[str, ...], str, dict[str, int]]] = {
    "llama": ("llama", (*ATTENTION, *MLP), "fused", {"tp": 2}),
    "stages": ("qwen3", ("o_proj", "down_proj"), "fused", {"pp": 2}),
    "canonical": ("llama", ("q_proj", "v_proj", "up_proj"), "canonical", {}),
    "experts": ("qwen3-moe", (*ATTENTION, *MLP), "fused", {"tp": 2, "ep": 2}),
    "latent": ("deepseek-v3", (*LATENT, *MLP), "fused", {"ep": 2}),
    "linear attention": ("qwen3_5", (*LINEAR, *ATTENTION, *MLP), "fused", {}),
    "parts of linear attention": ("qwen3_5", ("in_proj_qkv", "in_proj_a"), "block", {}),
    "mamba": ("nemotron_h", ("in_proj", "down_proj"), "fused", {"tp": 2}),
    "some layers": ("qwen3", ("1.mlp.down_proj", "2.self_attn.o_proj"), "fused", {"pp": 2}),
    "some modules": (
        "deepseek-v3",
        ("shared_experts.down_proj", "2.self_attn.o_proj"),
        "fused",
        {"ep": 2},
    ),
    "dora": ("llama", (*ATTENTION, *MLP), "fused", {}),
    "beside the weights": ("llama", (*ATTENTION, *MLP), "fused", {"tp": 2}),
    "beside experts": ("qwen3-moe", (*ATTENTION, *MLP), "fused", {"tp": 2, "ep": 2}),
    "dora of whole rows": ("llama", (*ATTENTION[:3], *MLP[:2]), "fused", {"tp": 2}),
    "blocks": ("qwen3-moe", (*ATTENTION, *MLP), "block", {"ep": 2}),
    "blocks of two ranks": ("qwen3-moe", (*ATTENTION, *MLP), "block", {"ep": 2}),
    "whole": ("qwen3_vl", (*ATTENTION, *MLP, *TOWER), "fused", {"tp": 2}),
    "whole of transformers": ("qwen2_5_vl", ("o_proj", "qkv", "mlp.2"), "fused", {"tp": 2}),
    "text of whole": ("qwen3_vl", ("q_proj", "k_proj", "v_proj", "down_proj"), "fused", {"tp": 2}),
    "files of experts": ("qwen3-moe", (*ATTENTION, *MLP), "canonical", {}),
    "files of two ranks": ("qwen3-moe", (*ATTENTION, *MLP), "canonical", {"ep": 2}),
}
# Whose states Megatron saves and loads: the model, the form of the state, the class and its
# arguments, and the sizes before and after
TRAINED: dict[str, tuple[str, str, str, dict[str, Any], dict[str, int], dict[str, int]]] = {
    "tensors": ("llama", "fully_reshardable", "lora", {}, {"tp": 2}, {"pp": 2}),
    "stages": ("llama", "fully_reshardable", "lora", {}, {"pp": 2}, {"tp": 2}),
    "buffers": ("llama", "dp_reshardable", "lora", {}, {"tp": 2}, {"pp": 2}),
    "buffers of stages": ("llama", "dp_reshardable", "canonical", {}, {"pp": 2}, {"tp": 2}),
    "buffers of dora": ("llama", "dp_reshardable", "dora", {}, {}, {"pp": 2}),
    "buffers of experts": (
        "qwen3-moe",
        "dp_reshardable",
        "lora",
        {"share_expert_adapters": False},
        {"tp": 2, "ep": 2},
        {"pp": 2},
    ),
    "buffers of shared adapters": ("qwen3-moe", "dp_reshardable", "lora", {}, {"ep": 2}, {"tp": 2}),
    "mamba": ("nemotron_h", "fully_reshardable", "lora", MAMBA, {"tp": 2}, {"pp": 2}),
    "buffers of mamba": ("nemotron_h", "dp_reshardable", "lora", MAMBA, {"tp": 2}, {"pp": 2}),
    "files": ("llama", "torch", "lora", {}, {"tp": 2}, {"pp": 2}),
    "files of stages": ("llama", "torch", "lora", {}, {"pp": 2}, {"tp": 2}),
}
ALPHA = dict.fromkeys(("files", "files of stages"), ("--alpha", 8))  # which state none
# Megatron-Bridge 0.6.2 does not export these of a model whose experts transformers stacks, and no
# adapters of towers
WHOLE = ("whole", "whole of transformers", "text of whole")
NO_EXPORT = ("shared outer", *WHOLE)
# with normalize_moe_lora; PEFT computes no experts of another rank, but its formulas do
TWO_RANKS = ("blocks of two ranks",)
# Of the format torch, without a run_config.yaml. Megatron-Bridge 0.6.2 exports the experts of the
# first rank only, if each has matrices of its own.
FILES = ("files of experts", "files of two ranks")
DORA = ("dora", "dora of whole rows")
# Megatron-Bridge 0.6.2 leaves out the magnitudes, and keeps the rows of a Mamba's in_proj in the
# order of the ranks
EXPORT_IS_WRONG = (*DORA, "mamba")


@pytest.fixture(scope="module")
def ran(work: Path, tiny_model: TinyModel) -> dict[str, dict[str, Any]]:
    """The results of all cases of Megatron-Bridge, which run in one launch."""
    cases: list[dict[str, Any]] = []
    for name, (model, sizes, kind, options) in SAVED.items():
        cases.append(
            {
                "name": f"saved {name}",
                "source": str(tiny_model(model, "float32")),
                "sizes": sizes,
                "kind": kind,
                "options": {"dim": 4, "alpha": 8, **options},
                "save": str(work / "saved" / name),
                "empty": name in WHOLE,
                **({} if name in NO_EXPORT else {"export": str(work / "exported" / name)}),
                **tokens(model, sizes),
            }
        )
    for name, (model, _, layout, sizes) in WRITTEN.items():
        base, adapter, out = (
            tiny_model(model, "float32"),
            work / "peft" / name,
            work / "written" / name,
        )
        write(base, adapter, name)
        dialect = "hybrid" if name == "mamba" else "gpt"
        how, whole = ("--layout", layout, "--dialect", dialect), name.startswith("beside")
        how = ("--layout", layout, "--towers", "bridge") if name in WHOLE else how
        if whole:
            good("hf-to-megatron", base, out, "--adapter", adapter, *how)
        else:
            # the magnitudes of whole rows have the order of the ranks
            tp = sizes["tp"] if name == "dora of whole rows" else 1
            more = ("--format", "torch", "--sequential-experts", "--ep", sizes.get("ep", 1))
            more = more if name in FILES else ("--tp", tp)
            good("adapter", "to-megatron", adapter, base, out, *how, *more)
        cases.append(
            {
                "name": f"written {name}",
                "source": str(base),
                "sizes": sizes,
                "load": str(out),
                "whole": whole,
                "empty": name in WHOLE,
                "save" if name in NO_EXPORT else "export": str(work / "loaded" / name),
                **({"kind": layout, "options": {"dim": 4, "alpha": 8}} if name in FILES else {}),
                **tokens(model, sizes),
            }
        )
    return judge(cases, work / "ran", **RUN)


def tokens(model: str, sizes: dict[str, int]) -> dict[str, Any]:
    if sizes.get("pp", 1) > 1 or model.endswith("_vl"):
        return {}
    rows = made_models.tokens(model)
    return {"tokens": rows[:, :64].tolist()}


def write(base: Path, directory: Path, name: str) -> None:
    """Writes the adapter of PEFT of a case of WRITTEN."""
    model, ends, layout, _ = WRITTEN[name]
    layers = made_models.text(config(model))["num_hidden_layers"]
    shapes = {m: s for m, s in modules(base, *ends).items() if number(m) < layers}
    if name in TWO_RANKS:
        topk = config(model)["num_experts_per_tok"]
        two = factors(shapes, lambda one: 4 if ".experts." in one else 4 * topk)
        of_experts = {r"experts\.\d+\.\w+_proj": 4}
        adapters.write(directory, two, r=4 * topk, rank_pattern=of_experts, lora_alpha=8)
        return
    made = factors(shapes, shared=layout == "fused")
    if name in DORA:
        adapters.write(directory, adapters.magnitudes(base, made), use_dora=True)
    else:
        adapters.write(directory, made)


def number(module: str) -> int:
    """Returns the number of a module's layer; 0 for one of a tower."""
    found = re.search(r"\blayers\.(\d+)\.", module)
    return int(found[1]) if found else 0


def config(model: str) -> dict[str, Any]:
    return made_models.config(model)


def same(base: Path, ours: Path, theirs: Path) -> None:
    """Fails unless two adapters of PEFT make the same weights."""
    found, wanted = adapters.merged(base, ours), adapters.merged(base, theirs)
    assert found.keys() == wanted.keys()
    apart = {key: float(np.abs(found[key] - wanted[key]).max()) for key in wanted}
    assert max(apart.values()) < 1e-12, {key: value for key, value in apart.items() if value}
    stored = adapters.weights(base)
    assert any((wanted[key] != stored[key]).any() for key in wanted)


@pytest.mark.parametrize("case", SAVED)
def test_mckpt_reads_what_megatron_bridge_saves(case, ran, tiny_model, work) -> None:
    result = ran[f"saved {case}"]
    assert result["ok"], explain(result)
    base = tiny_model(SAVED[case][0], "float32")
    good("adapter", "to-hf", work / "saved" / case, work / "read" / case, "--like", base)
    if case not in (*EXPORT_IS_WRONG, *NO_EXPORT):
        same(base, work / "read" / case, work / "exported" / case)
    expect_logits(result, base, work / "read" / case)


@pytest.mark.parametrize("case", WRITTEN)
def test_megatron_bridge_loads_what_mckpt_writes(case, ran, tiny_model, work) -> None:
    result = ran[f"written {case}"]
    assert result["ok"], explain(result)
    base = tiny_model(WRITTEN[case][0], "float32")
    if case in NO_EXPORT:
        good("adapter", "to-hf", work / "loaded" / case, work / "again" / case, "--like", base)
        same(base, work / "again" / case, work / "peft" / case)
    elif case not in (*EXPORT_IS_WRONG, "files of two ranks"):
        same(base, work / "loaded" / case, work / "peft" / case)
    good("adapter", "to-hf", work / "written" / case, work / "back" / case, "--like", base)
    same(base, work / "back" / case, work / "peft" / case)
    if case not in TWO_RANKS:
        expect_logits(result, base, work / "back" / case)


def test_a_live_whole_model_gets_and_gives_its_towers(tiny_model, work) -> None:
    """The models of Megatron-Bridge, whose towers are its own modules or those of transformers."""
    cases = [
        {
            "name": f"{model} {number}",
            "source": str(tiny_model(model, "float32")),
            "sizes": sizes,
            "empty": True,
            "kind": "lora",
            "options": {"dim": 4, "alpha": 8, "target_modules": [*REST, "linear_qkv", "qkv"]},
            "live": str(work / f"live {model} {number}"),
        }
        for model in ("qwen3_vl", "qwen2_5_vl")
        for number, sizes in enumerate(({"tp": 2}, {"pp": 2}, {}))
    ]
    results = judge(cases, work / "live", **RUN)
    for case in cases:
        result = results[case["name"]]
        assert result["ok"], explain(result)
        assert (result["empty"], result["apart"]) == ([], []), case["name"]
        assert not mckpt.diff(case["source"], case["live"]), case["name"]
        merged, only = f"{case['live']}-merged", Path(f"{case['live']}-only")
        assert {".visual." in key for key in adapters.weights(only)} == {False, True}
        assert not mckpt.diff(mckpt.open(case["source"], adapter=only), merged), case["name"]


def test_megatron_core_loads_the_states_that_mckpt_writes(tiny_model, work) -> None:
    """Two ranks train, mckpt reshards, and ranks of other sizes load the state and save it."""
    cases: tuple[list[dict[str, Any]], ...] = [], []
    for name, (model, form, kind, options, *sizes) in TRAINED.items():
        for part, own in enumerate(sizes):
            place = work / f"trained {name} {part}"
            case = {"name": place.name, "sizes": own, "save": str(place), "export": f"{place}-peft"}
            given = {"load": str(work / f"resharded {name}"), "trained": "fully_reshardable"}
            new = {"kind": kind, "options": {"dim": 4, "alpha": 8, **options}, "trained": form}
            cases[part].append(
                {"source": str(tiny_model(model, "float32")), **case, **(given if part else new)}
            )
    results = judge(cases[0], work / "training", **RUN)
    assert all(result["ok"] for result in results.values()), results
    for name, (model, _, _, _, _, after) in TRAINED.items():
        src, dst = work / f"trained {name} 0", work / f"resharded {name}"
        sizes = [f"--{size}={after.get(size, 1)}" for size in ("tp", "pp", "ep", "etp")]
        more = (
            "--like",
            tiny_model(model, "float32"),
            "--target-format",
            "torch_dist",
            *ALPHA.get(name, ()),
        )
        good("adapter", "reshard", src, dst, *sizes, *more)
    results = judge(cases[1], work / "trained on", **RUN)
    assert all(result["ok"] for result in results.values()), results
    for name, (model, *_) in TRAINED.items():
        like = SourceOptions(like=tiny_model(model, "float32"))
        one, other = (
            of_megatron(work / f"trained {name} {part}", like, otherwise=8)[0] for part in range(2)
        )
        assert other.optimizer is not None and one.optimizer is not None
        groups, after = one.optimizer.groups, other.optimizer.groups
        if len(groups) > len(after):  # Megatron has an optimizer of some experts only at ep > 1
            groups = [group for group in groups if not group[0]["is_expert_parallel"]]
        assert groups == after
        one, other = one.with_optimizer(), other.with_optimizer()
        assert one.keys() == other.keys() and any("@exp_avg_sq" in name for name in one)
        # Megatron-Bridge loads the mean of the copies that it saves of an adapter of all experts
        rounded = 1e-6 if name == "buffers of shared adapters" else 0
        for factor in one:
            found, wanted = other[factor].numpy(), one[factor].numpy()
            assert np.allclose(found, wanted, rtol=rounded, atol=0), (name, factor)


def expect_logits(result: dict[str, Any], base: Path, adapter: Path) -> None:
    """Fails unless Megatron-Core with the adapter computes the logits of transformers with PEFT."""
    if "logits" not in result:
        return
    model = base.name
    rows = made_models.tokens(model)[:, :64]
    found = result["logits"]
    wanted = adapters.peft_logits(base, adapter, rows)
    assert np.abs(found[..., : wanted.shape[-1]] - wanted).max() <= 3 * limit(wanted)
