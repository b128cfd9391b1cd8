"""Adapters (LoRA) are merged right, whatever the family, the format of the base and that of the
target. The expected values are computed with numpy from the names in the files.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

import mckpt
from mckpt import mapping
from mckpt.adapters.checkpoint import of_megatron
from mckpt.adapters.peft import PeftAdapter
from mckpt.cli.convert import LEAST_BYTES, _processes
from mckpt.errors import SourceError
from mckpt.formats.base import Names, packed
from mckpt.geometry.join import COPY
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import lora
from tests.helpers.commands import good, refused
from tests.helpers.tiny import FIXTURES, TinyModel

QWEN3 = FIXTURES / "tiny-qwen3"
ROUNDED_ONCE = 0.5  # units in the last place
FAMILIES = (
    *("qwen3_5", "deepseek_v2", "gpt2", "phi3", "qwen2_moe", "glm4_moe", "gpt_neox"),
    "llama_nemotron",
)


def made(
    case: str, out: Path, dtype: Any = ml_dtypes.bfloat16, changed: dict[str, int] | None = None
) -> Path:
    """Writes a Hugging Face directory of random values for a config of fixtures/families.

    changed: the values of keys that the config has.
    """
    config = json.loads((FIXTURES / "families" / f"{case}.json").read_text())
    config |= {key: value for key, value in (changed or {}).items() if key in config}
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    names = Names(family, family.read(config), {}, Parallel())
    drawn = np.random.RandomState(1)
    tensors = {}
    for b in names.bound:
        whole = packed(b.rule, names.scope()).shape
        shape = (*b.axes(names.scope()), *(whole[::-1] if b.rule.transposed else whole))
        for key in b.keys() if b.rule.written and not b.rule.alias else ():
            tensors[key] = (drawn.randn(*shape) / 8).astype(dtype)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


def expect_merged(base: Path, got: Path, stored: Any, scales: dict[str, float]) -> None:
    """Fails unless a merged directory has the sums of the base and an adapter, rounded once."""
    weights, merged = lora.tensors(base), lora.tensors(got)
    assert merged.keys() == weights.keys()
    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        if module in scales:
            added = lora.product(stored, module, scales[module])
            added = added.T if ".c_" in module else added  # GPT-2 stores [in, out]
            assert lora.apart(merged[key], weight, added) <= ROUNDED_ONCE, key
            assert (merged[key] != weight).mean() > 0.5, key
        else:
            assert np.array_equal(merged[key], weight), key


@pytest.mark.parametrize("case", FAMILIES)
def test_every_matrix_of_a_family(case: str, tmp_path: Path) -> None:
    base = made(case, tmp_path / "base")
    weights = lora.tensors(base)
    modules = lora.matrices(weights, ("norm", "embed", "wte", "wpe", "lm_head"))
    shapes = {
        f"{m}.weight": weights[f"{m}.weight"].T if case == "gpt2" else weights[f"{m}.weight"]
        for m in modules
    }
    stored = lora.factors(shapes, modules)
    adapter = lora.save(tmp_path / "adapter", stored)
    good("adapter", "merge", base, adapter, tmp_path / "merged")
    expect_merged(base, tmp_path / "merged", stored, dict.fromkeys(modules, 2.0))


def test_patterns_of_ranks_and_alphas(tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    modules = [m for m in lora.matrices(weights) if "layers.1." in m]
    up = "model.layers.1.mlp.up_proj"
    stored = lora.factors(weights, [m for m in modules if m != up])
    stored |= lora.factors(weights, [up], rank=3)
    config = {
        "rank_pattern": {r"layers\.1\.mlp\.up_proj": 3, "up_proj": 7},  # the first one counts
        "alpha_pattern": {"o_proj": 10},
        "use_rslora": True,
    }
    adapter = lora.save(tmp_path / "adapter", stored, **config)
    good("adapter", "merge", QWEN3, adapter, tmp_path / "merged")
    scales = {
        m: (10 if m.endswith("o_proj") else 8) / (3 if m == up else 4) ** 0.5 for m in modules
    }
    expect_merged(QWEN3, tmp_path / "merged", stored, scales)


@pytest.mark.parametrize("prefix", ["", "base_model.model.base_model.model."])
def test_other_prefixes_and_names_of_adapters(prefix: str, tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    modules = lora.matrices(weights)[:3]
    stored = lora.factors(weights, modules)
    named = {
        f"{prefix}{key.removeprefix(lora.PREFIX)}".replace(".weight", ".default.weight"): value
        for key, value in stored.items()
    }
    adapter = lora.save(tmp_path / "adapter", named)
    good("adapter", "merge", QWEN3, adapter, tmp_path / "merged")
    expect_merged(QWEN3, tmp_path / "merged", stored, dict.fromkeys(modules, 2.0))


def test_an_embedding_and_tensors_that_replace_those_of_the_base(tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    embedding = weights["model.embed_tokens.weight"]
    drawn = np.random.RandomState(3)
    head, norm = drawn.randn(*weights["lm_head.weight"].shape), drawn.randn(32)
    a, b = drawn.randn(4, embedding.shape[0]), drawn.randn(embedding.shape[1], 4)
    stored = {
        "model.embed_tokens.lora_embedding_A": a.astype("f4"),
        "model.embed_tokens.lora_embedding_B": b.astype("f4"),
        "model.embed_tokens.base_layer.weight": embedding,
        "lm_head.weight": head.astype("f4"),
        "model.layers.2.input_layernorm.modules_to_save.default.weight": norm.astype(
            ml_dtypes.bfloat16
        ),
        "model.layers.2.input_layernorm.original_module.weight": norm.astype("f4"),
    }
    adapter = lora.save(tmp_path / "adapter", stored)
    for base in (QWEN3, tmp_path / "base"):
        if base != QWEN3:
            good("hf-to-megatron", QWEN3, base, "--tp", 2)
        good(
            "adapter", "merge", base, adapter, tmp_path / "merged", "--format", "hf", "--overwrite"
        )
        merged = lora.tensors(tmp_path / "merged")
        added = 2.0 * (b.astype("f4").astype("f8") @ a.astype("f4").astype("f8")).T
        key = "model.embed_tokens.weight"
        assert lora.apart(merged[key], embedding, added) <= ROUNDED_ONCE
        assert np.array_equal(merged["lm_head.weight"], head.astype("f4").astype(embedding.dtype))
        there = merged["model.layers.2.input_layernorm.weight"]
        assert np.array_equal(there, norm.astype(ml_dtypes.bfloat16))
        changed = [key for key in weights if not np.array_equal(weights[key], merged[key])]
        assert len(changed) == 3
    good("adapter", "merge", tmp_path / "base", adapter, tmp_path / "tp4", "--target-tp", 4)
    good("diff", tmp_path / "merged", tmp_path / "tp4")


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("case", ["qwen3_5_moe", "gpt_oss", "qwen3-moe"])
def test_parameters_of_all_experts(
    case: str, outer: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """PEFT reads A as [experts, r, in] and B as [out, r, experts] (ParamWrapper).

    outer: Megatron-Bridge has [experts, r, in] and [experts, out, r] under the parameter's name,
    and one A of all experts for gate and up, and one B for down.
    """
    base = tiny_model(case, "bfloat16") if "-" in case else made(case, tmp_path / "base")
    weights = lora.tensors(base)
    places = sorted({k[: k.index(".experts.")] for k in weights if ".experts." in k})
    drawn, rank = np.random.RandomState(4), 3
    stored, want = {}, dict(weights)
    for place in places:
        for name, inside in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            key = f"{place}.experts.{name}"
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
            if key in weights:
                shape = weights[key].shape
                out, into = shape[2:0:-1] if case == "gpt_oss" else shape[1:]
            else:
                shapes = [weights[f"{place}.experts.0.{part}.weight"].shape for part in parts]
                out, into = sum(s[0] for s in shapes), shapes[0][1]
                shape = (len([k for k in weights if f"{place}.experts." in k]) // 3,)
            a = drawn.randn(shape[0], rank, into).astype("f4")
            b = drawn.randn(shape[0], out, rank).astype("f4") / 8
            if outer:
                a, b = (a[:1], b) if name == "gate_up_proj" else (a, b[:1])
                stored |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            else:
                module = f"{place}.experts{inside}"
                stored[f"{module}.lora_A.weight"] = a.reshape(-1, into)
                stored[f"{module}.lora_B.weight"] = np.moveaxis(b, 0, 2).reshape(out, -1)
            added = 2.0 * b.astype("f8") @ a.astype("f8")
            if key in weights:
                want[key] = added.transpose(0, 2, 1) if case == "gpt_oss" else added
                continue
            for expert, of in enumerate(added):
                for part, rows in zip(parts, np.split(of, len(parts)), strict=True):
                    want[f"{place}.experts.{expert}.{part}.weight"] = rows
    adapter = lora.save(tmp_path / "adapter", stored, r=rank, lora_alpha=6)
    merge = "adapter", "merge", base, adapter, tmp_path / "merged"
    if outer and case == "gpt_oss":
        refused(3, "the rows of gate and up alternate", args=merge)
        return
    good(*merge)
    merged, changed = lora.tensors(tmp_path / "merged"), 0
    for key, weight in weights.items():
        if want[key] is weight:
            assert np.array_equal(merged[key], weight), key
        else:
            assert lora.apart(merged[key], weight, want[key]) <= ROUNDED_ONCE, key
            changed += 1
    assert changed


# The side of square experts that A multiplies. Measured by merge_and_unload() of each release of
# PEFT with transformers 5.23, for the parameter alone.
SIDES = {
    ("qwen3_5_moe", "gate_up_proj"): "out out in in in in",
    ("gpt_oss", "down_proj"): "in out in in in in",
    ("llama4", "down_proj"): "in in out out out out",
}
RELEASES = ("0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.21.0", "0.21.2")


def in_memory(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns a parameter of all experts, as transformers has it, by its module."""
    end = f".experts.{name}"
    found = {key.removesuffix(f".{name}"): w for key, w in weights.items() if key.endswith(end)}
    for module in {key[: key.index(".0.gate_proj")] for key in weights if ".0.gate_proj" in key}:
        every = range(sum(f"{module}.{n}.gate_proj.weight" in weights for n in range(100)))
        parts = [
            np.stack([weights[f"{module}.{n}.{part}.weight"] for n in every])
            for part in ("gate_proj", "up_proj")
        ]
        found[module] = np.concatenate(parts, 1)
    return found


def square(case: str, name: str, out: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Returns a base with square experts, and random factors of them."""
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 24}
    base = made(case, out / "base", changed=sizes)
    drawn, stored = np.random.RandomState(4), {}
    for module, weight in in_memory(lora.tensors(base), name).items():
        count, rows, columns = weight.shape
        assert rows == columns
        stored[f"{lora.PREFIX}{module}.lora_A.weight"] = drawn.randn(count * 2, rows).astype("f4")
        stored[f"{lora.PREFIX}{module}.lora_B.weight"] = drawn.randn(rows, count * 2).astype("f4")
    assert stored
    return base, stored


def expect_experts(
    base: Path, got: Path, stored: Any, name: str, side: str, grouped: bool = False
) -> None:
    """Fails unless merged experts have the products by the formula of PEFT."""
    weights, merged = (in_memory(lora.tensors(place), name) for place in (base, got))
    for module, weight in weights.items():
        count, size = weight.shape[:2]
        a, b = (stored[f"{lora.PREFIX}{module}.lora_{x}.weight"].astype("f8") for x in "AB")
        b = b.reshape(size, count, 2).transpose(0, 2, 1) if grouped else b.reshape(size, 2, count)
        added = 2.0 * np.einsum("xre,ery->exy", b, a.reshape(count, 2, size))
        if (side == "in") == (name == "down_proj"):  # of these models, which are [in, out]
            added = added.transpose(0, 2, 1)
        assert lora.apart(merged[module], weight, added) <= ROUNDED_ONCE, module


@pytest.mark.parametrize(("case", "name"), SIDES)
def test_square_experts_are_read_as_the_release_wrote_them(
    case: str, name: str, tmp_path: Path
) -> None:
    base, stored = square(case, name, tmp_path)
    config = {"r": 2, "lora_alpha": 4, "target_parameters": [f"experts.{name}"]}
    sides = dict(zip(RELEASES, SIDES[case, name].split(), strict=True))
    for version, side in sides.items():
        adapter = lora.save(tmp_path / version, stored, peft_version=version, **config)
        text = good("adapter", "merge", base, adapter, tmp_path / f"{version}-merged")
        assert f"A multiplies the {side}put, by peft_version {version}" in text.err
        expect_experts(base, tmp_path / f"{version}-merged", stored, name, side)
    adapter = lora.save(tmp_path / "unknown", stored, peft_version="0.19.2.dev0", **config)
    merge = ("adapter", "merge", base, adapter)
    refused(3, "--expert-a", "are square", args=(*merge, tmp_path / "out"))
    for side in ("in", "out"):
        good(*merge, tmp_path / side, "--expert-a", f"{side}put")
        expect_experts(base, tmp_path / side, stored, name, side)


# of which the files have one tensor for all experts
@pytest.mark.parametrize(("case", "name"), [one for one in SIDES if one[0] != "qwen3_5_moe"])
def test_square_experts_are_written_as_the_release_reads_them(
    case: str, name: str, tmp_path: Path
) -> None:
    """`adapter to-hf` states the newest release, and writes the side of A that it multiplies."""
    base, stored = square(case, name, tmp_path)
    config = {"r": 2, "lora_alpha": 4, "target_parameters": [f"experts.{name}"]}
    adapter = lora.save(tmp_path / "a", stored, peft_version=RELEASES[-1], **config)
    good("adapter", "to-megatron", adapter, base, tmp_path / "megatron")
    good("adapter", "to-hf", tmp_path / "megatron", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert written["peft_version"] == RELEASES[-1]
    back = lora.tensors(tmp_path / "back")
    assert back.keys() == stored.keys()
    assert all((back[key] == stored[key]).all() for key in stored)


def test_the_columns_of_experts_that_unsloth_trained(tmp_path: Path) -> None:
    base, stored = square("qwen3_5_moe", "gate_up_proj", tmp_path)
    config = {"r": 2, "lora_alpha": 4, "peft_version": "0.21.0"}
    unsloth = {"auto_mapping": {"unsloth_fixed": True}}
    adapter = lora.save(tmp_path / "unmarked", stored, **config, **unsloth)
    merge = ("adapter", "merge", base, adapter)
    assert "--expert-b grouped_by_expert" in good(*merge, tmp_path / "peft").err
    expect_experts(base, tmp_path / "peft", stored, "gate_up_proj", "in")
    good(*merge, tmp_path / "old", "--expert-b", "grouped_by_expert")
    for order, grouped in (("rank_major", False), ("grouped_by_expert", True)):
        adapter = lora.save(tmp_path / order, stored, lora_B_layout=order, **config, **unsloth)
        text = good("adapter", "merge", base, adapter, tmp_path / f"{order}-merged")
        assert "--expert-b" not in text.err
        expect_experts(base, tmp_path / f"{order}-merged", stored, "gate_up_proj", "in", grouped)
    good("diff", tmp_path / "old", tmp_path / "grouped_by_expert-merged")
    adapter = lora.save(tmp_path / "other", stored, lora_B_layout="other", **config)
    refused(3, "lora_B_layout is 'other'", args=(*merge[:3], adapter, tmp_path / "out"))


def test_factors_that_are_not_finite(tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    up, q = "model.layers.0.mlp.up_proj", "model.layers.2.self_attn.q_proj"
    stored = lora.factors(weights, [up, q, "model.layers.1.mlp.down_proj"])
    stored[f"{lora.PREFIX}{up}.lora_B.weight"][70, 3] = np.nan
    stored[f"{lora.PREFIX}{q}.lora_A.weight"][1, 30] = -np.inf
    stored = {key: array.astype(ml_dtypes.bfloat16) for key, array in stored.items()}
    stored[f"{lora.PREFIX}{q}.lora_B.weight"] = np.full((192, 4), 1e39, "f8")
    adapter = lora.save(tmp_path / "adapter", stored)
    words = (
        f"{up}.lora_B.weight [72, 4]: [70, 3] is nan",
        f"{q}.lora_A.weight [4, 32]: [1, 30] is -inf",
        f"{q}.lora_B.weight [192, 4]: [0, 0] is inf",
    )
    out = tmp_path / "out"
    for args in (
        ("adapter", "merge", QWEN3, adapter, out),
        ("adapter", "to-megatron", adapter, QWEN3, out),
    ):
        assert refused(3, *words, args=args, untouched=out).count("  - ") == 3
    with pytest.raises(SourceError, match="is nan"):
        mckpt.open(QWEN3, adapter=adapter)


def test_factors_in_megatron_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = lora.tensors(QWEN3)
    down = "model.layers.1.mlp.down_proj"
    stored = lora.factors(weights, [m for m in lora.matrices(weights) if m.endswith("down_proj")])
    stored[f"{lora.PREFIX}{down}.lora_A.weight"][3, 60] = np.nan
    adapter, megatron, out = (tmp_path / name for name in ("adapter", "megatron", "out"))
    lora.save(adapter, stored)
    with monkeypatch.context() as patch:
        patch.setattr(PeftAdapter, "check_finite", lambda self: None)
        good("adapter", "to-megatron", adapter, QWEN3, megatron)
    for args in (
        ("adapter", "to-hf", megatron, out),
        ("adapter", "reshard", megatron, out, "--target-tp", 2),
        ("adapter", "merge", QWEN3, megatron, out),
    ):
        words = "layers.1.mlp.down.weight:lora_A.4 [4, 72]: [3, 60] is nan"
        refused(3, words, args=args, untouched=out)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({"target_modules": ["q_proj"]}, "k_proj"),
        ({"target_modules": ["v_proj"]}, "_proj"),  # all factors are outside
        ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [2]}, "_proj"),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]}, "k_proj"),
        ({"target_modules": r".*\.q_proj"}, "k_proj"),
        ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]}, "layers.1."),
        ({"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["k_proj"]}, "k_proj"),
    ],
)
def test_factors_outside_of_the_configuration_are_refused(
    config: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    """PEFT does not load them (tests/judge/test_adapter_merge.py asks it)."""
    modules = [f"model.layers.{n}.self_attn.{x}_proj" for n in (0, 1) for x in "qk"]
    made = lora.factors(lora.tensors(QWEN3), modules)
    args = ("adapter", "merge", QWEN3, lora.save(tmp_path / "a", made, **config), tmp_path / "out")
    said = refused(3, "does not target", "PEFT does not load them", args=args)
    assert all((lost in line) for line in said.splitlines() if line.startswith("  - "))
    assert lora.save(tmp_path / "a", made, target_modules=["q_proj", "k_proj"])
    good(*args)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head': lm_head"),
        ({"modules_to_save": ["norm", "head"]}, "modules_to_save has 'head': lm_head"),
        ({"bias": "all"}, "bias is 'all': model.layers.0.self_attn."),
        ({"bias": "lora_only"}, "bias is 'lora_only': model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_whole_tensors_that_were_lost_are_refused(
    config: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    """PEFT up to 0.18 saves no bias of a module with factors, if bias is lora_only."""
    base = made("qwen2_moe", tmp_path / "base")
    weights = lora.tensors(base)
    stored = lora.factors(weights, ["model.layers.0.self_attn.q_proj"])
    stored["model.norm.weight"] = weights["model.norm.weight"]
    adapter = lora.save(tmp_path / "lost", stored, **config)
    args = ("adapter", "merge", base, adapter, tmp_path / "out")
    refused(3, lost, "The program that wrote it lost them", args=args)
    stored["lm_head.weight"] = weights["lm_head.weight"]
    bias = "model.layers.0.self_attn.q_proj.bias"
    stored[bias] = weights[bias]
    lora.save(adapter, stored, **config)
    good(*args)


def test_each_bias_that_lora_only_trained_must_be_there(tmp_path: Path) -> None:
    base = made("qwen2_moe", tmp_path / "base")
    weights = lora.tensors(base)
    modules = [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    stored = lora.factors(weights, modules)
    stored[f"{modules[0]}.bias"] = weights[f"{modules[0]}.bias"]
    adapter = lora.save(tmp_path / "lost", stored, bias="lora_only")
    args = ("adapter", "merge", base, adapter, tmp_path / "out")
    refused(3, f"bias is 'lora_only': {modules[1]}.bias", args=args)


@pytest.mark.parametrize(
    ("alphas", "said"),
    [
        # q_proj was first in the training, and PEFT writes sorted keys
        ({"layers.0.*": 16, "q_proj": 8}, "layers.0.self_attn.q_proj (alpha 16 and 8)"),
        ({"q_proj": 8, "layers.0.*": 16}, None),  # PEFT did not write this
        ({"layers.0.*": 16, "layers.1.*": 8}, None),
        ({"layers.0.*": 16, "q_proj": 16}, None),
    ],
)
def test_patterns_whose_order_peft_changed_are_in_the_plan(
    alphas: dict[str, int], said: str | None, tmp_path: Path
) -> None:
    modules = [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    stored = lora.factors(lora.tensors(QWEN3), modules)
    adapter = lora.save(tmp_path / "a", stored, exclude_modules=None, alpha_pattern=alphas)
    err = good("adapter", "merge", QWEN3, adapter, tmp_path / "out").err
    assert ("several patterns of alpha_pattern" in err) == (said is not None)
    assert (said or "") in err


def test_targets_without_factors_are_in_the_plan(tmp_path: Path) -> None:
    """PEFT warns of such keys when it loads the adapter."""
    modules = [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    stored = lora.factors(lora.tensors(QWEN3), modules)
    last = len([key for key in lora.tensors(QWEN3) if key.endswith("q_proj.weight")]) - 1
    for layers, said in ((None, True), ([0, 1], False), ([0, 1, last], True)):
        config = {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": layers}
        adapter = lora.save(tmp_path / "a", stored, **config)
        err = good("adapter", "merge", QWEN3, adapter, tmp_path / "out", "--overwrite").err
        count = last - 1 if layers is None else 1
        assert (f"also targets {count} module" in err) == said, err


def test_patterns_that_peft_before_0_14_matched_in_another_way(tmp_path: Path) -> None:
    """There one key gave both values: the first of both patterns that matches."""
    modules = [f"model.layers.{n}.self_attn.{x}_proj" for n in (0, 1) for x in "qk"]
    stored = lora.factors(lora.tensors(QWEN3), modules)
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"0.self_attn.q_proj": 16}}, "4, and"),
        ({"alpha_pattern": {"k_proj|q_proj": 16}}, "4, and"),  # matched q_proj at the start only
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 16}}, "4, and"),
        ({"alpha_pattern": {"q_proj": 16}, "rank_pattern": {"k_proj": 4}}, None),
        ({"rank_pattern": {"q_proj": 4, "layers.0.*": 4}, "r": 4}, None),
    ]
    for config, words in cases:
        adapter = lora.save(tmp_path / "a", stored, **config)
        args = ("adapter", "merge", QWEN3, adapter, tmp_path / "out", "--overwrite")
        assert ("before 0.14" in good(*args).err) == (words is not None), config
        assert (words or "") in good(*args).err
        lora.save(tmp_path / "a", stored, exclude_modules=None, **config)
        assert "before 0.14" not in good(*args).err


def test_a_directory_without_a_configuration_says_so(tmp_path: Path) -> None:
    modules = ["model.layers.0.self_attn.q_proj"]
    adapter = lora.save(tmp_path / "a", lora.factors(lora.tensors(QWEN3), modules))
    (adapter / "adapter_config.json").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    for given, words in ((adapter, "which states the rank"), (empty, "nor adapter_config.json")):
        args = "adapter", "merge", QWEN3, given, tmp_path / "out"
        refused(3, words, args=args)


def test_an_adapter_beside_the_weights(tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    modules = lora.matrices(weights)
    stored = lora.factors(weights, modules)
    base = tmp_path / "base"
    base.mkdir()
    for file in QWEN3.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    lora.save(base, stored)
    refused(2, "mckpt adapter merge", args=("hf-to-megatron", base, tmp_path / "megatron"))
    good("adapter", "merge", base, base, tmp_path / "merged")
    expect_merged(QWEN3, tmp_path / "merged", stored, dict.fromkeys(modules, 2.0))
    assert not (tmp_path / "merged/adapter_config.json").exists()
    good("hf-to-megatron", base, tmp_path / "tp2", "--adapter", base, "--merge", "--tp", 2)
    good("diff", tmp_path / "merged", tmp_path / "tp2")


def test_a_merged_checkpoint_in_python(tmp_path: Path) -> None:
    weights = lora.tensors(QWEN3)
    up = "model.layers.1.mlp.up_proj"
    stored = lora.factors(weights, [up])
    merged = mckpt.open(QWEN3, adapter=lora.save(tmp_path / "adapter", stored))
    got = np.asarray(merged["layers.1.mlp.up.weight"][3:9].numpy())
    want = lora.product(stored, up, 2.0)[3:9]
    assert lora.apart(got, weights[f"{up}.weight"][3:9], want) <= ROUNDED_ONCE
    plain = mckpt.open(QWEN3)["layers.0.mlp.up.weight"].numpy()
    assert np.array_equal(merged["layers.0.mlp.up.weight"].numpy(), plain)
    mckpt.convert(merged, tmp_path / "hf", format="hf")
    assert not mckpt.diff(merged, tmp_path / "hf")


@pytest.mark.parametrize("layout", ["fused", "canonical"])
def test_a_pattern_names_the_modules_that_have_an_adapter(layout: str, tmp_path: Path) -> None:
    """The name of a linear alone would wrap those of the experts too."""
    base = made("qwen2_moe", tmp_path / "base")
    weights = lora.tensors(base)
    ends = ("shared_expert.down_proj", "shared_expert.up_proj", "shared_expert.gate_proj", "o_proj")
    modules = [module for module in lora.matrices(weights) if module.endswith(ends)]
    shared = lora.factors(weights, modules)
    for key in shared:
        if key.endswith("gate_proj.lora_A.weight"):
            shared[key] = shared[key.replace("gate_proj", "up_proj")]
    lora.save(tmp_path / "a", shared)
    good("adapter", "to-megatron", tmp_path / "a", base, tmp_path / "b", "--layout", layout)
    written = next((tmp_path / "b").rglob("run_config.yaml")).read_text()
    before = "*decoder.layers.*.mlp.shared_experts.linear_fc"
    fc1 = [f"{before}1_gate", f"{before}1_up"] if layout == "canonical" else [f"{before}1"]
    assert yaml.safe_load(written)["peft"]["target_modules"] == [*fc1, f"{before}2", "linear_proj"]
    experts = [one for one in lora.matrices(weights) if one.endswith(".down_proj")]
    lora.save(tmp_path / "c", lora.factors(weights, [m for m in experts if ".experts." in m]))
    good("adapter", "to-megatron", tmp_path / "c", base, tmp_path / "d", "--layout", layout)
    written = next((tmp_path / "d").rglob("run_config.yaml")).read_text()
    targets = ["*decoder.layers.*.mlp.experts.linear_fc2"]
    assert yaml.safe_load(written)["peft"]["target_modules"] == targets


def test_wrong_names_and_ranks_are_named(tmp_path: Path) -> None:
    key, module = "base_model.model.x.{layer}", "model.layers.{}.mlp.down_proj"
    factors = {f"{key}.lora_A.weight": np.ones((4, 8), "f4")}
    factors[f"{key}.lora_B.weight"] = np.ones((8, 4), "f4")
    lora.save(tmp_path / "a", factors)
    merge = ("adapter", "merge", QWEN3, tmp_path / "a", tmp_path / "b")
    refused(3, "x.{layer}.lora_A.weight [4, 8]: the base has no weight", args=merge)
    weights = lora.tensors(QWEN3)
    four = lora.factors(weights, [module.format(layer) for layer in range(4)])
    lora.save(tmp_path / "a", four, r=3, rank_pattern={"layers.1.mlp.down_proj": 4})
    three = [f"{module.format(layer)}: rank 4, stated 3" for layer in (0, 2, 3)]
    refused(3, "3 modules whose factors have another rank", *three, args=merge)
    said = good("adapter", "inspect", tmp_path / "a")
    assert "3  model.layers.{}.mlp.down_proj: rank 3 in adapter_config.json and 4 in" in said.out
    assert "1  model.layers.{}.mlp.down_proj: rank 4, scale" in said.out


def test_a_pickled_adapter_is_the_same(tmp_path: Path) -> None:
    block = ("--layout", "block")
    good("adapter", "to-megatron", FIXTURES / "tiny-qwen3-lora", QWEN3, tmp_path / "a", *block)
    source, _ = of_megatron(tmp_path / "a", SourceOptions())
    again = pickle.loads(pickle.dumps(source))
    assert again.scale == source.scale != 1 and list(again) == list(source)
    assert all(np.array_equal(again[name].numpy(), source[name].numpy()) for name in source)


def test_large_merges_and_transposes_start_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    adapted, plain = SimpleNamespace(term="product"), SimpleNamespace(term="")
    copies = np.zeros(2, COPY)
    copies["rows"] = copies["run"] = 1000
    copies["src_pitch"] = copies["dst_pitch"] = 2000
    copies["src_step"] = copies["dst_step"] = 2

    def processes(nbytes: int, *casts: SimpleNamespace, threads: int = 0) -> int:
        joined = SimpleNamespace(casts=casts, copies=copies)
        plan: Any = SimpleNamespace(nbytes=nbytes, joined=joined)
        return _processes(plan, threads)

    assert processes(1 << 20, plain, adapted) == 1
    assert processes(3 * LEAST_BYTES, plain, adapted) == 3
    assert processes(90 * LEAST_BYTES, plain, adapted) == 4
    assert processes(90 * LEAST_BYTES, plain) == 1
    assert processes(90 * LEAST_BYTES, adapted, threads=2) == 1
    copies["src_pitch"][0], copies["src_step"][0] = 2, 2000
    assert processes(90 * LEAST_BYTES, plain) == 4  # half of it is transposed
