"""Weights with an adapter: PEFT computes the same logits, and numpy the same values to the last
bit.

PEFT runs the base with the adapter beside it; transformers runs the merged weights. The values of
a merge into bfloat16 are those of the formula, rounded once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mckpt import mapping
from mckpt.adapters.merging import merge
from mckpt.adapters.peft import open_adapter, rules
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import SourceError
from mckpt.mapping.nodes import FOLDER, parse
from tests.helpers import adapters, made_models, tiny
from tests.helpers.adapters import Arrays, embedding, factors, modules, stacked
from tests.helpers.commands import good
from tests.helpers.judging import limit

pytestmark = [
    pytest.mark.judge,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="PEFT is not installed"),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
Made = tuple[Arrays, dict[str, Any]]  # the tensors of an adapter and entries of its config


def q_and_v(base: Path) -> Made:
    """The modules that PEFT adapts by default in a Llama."""
    return factors(modules(base, "q_proj", "v_proj"), shared=False), {}


def patterns(base: Path) -> Made:
    """Ranks and scales that differ by module; the first pattern that matches gives them."""

    def rank(module: str) -> int:
        return 8 if "layers.1." in module else 4 if module.endswith("down_proj") else 16

    made = factors(modules(base, *ATTENTION, *MLP), rank, shared=False)
    return made, {
        "r": 16,
        "rank_pattern": {"layers.1.mlp.down_proj": 8, "down_proj": 4, r"layers\.1\..*": 8},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 4, "k_proj": 32},
        "use_rslora": True,
        "lora_alpha": 2,
    }


def vocabulary(base: Path) -> Made:
    """The embedding and the output layer, of which PEFT stores the base's weights as well."""
    stored = adapters.weights(base)
    made = embedding("model.embed_tokens", stored["model.embed_tokens.weight"].shape)
    made |= factors(modules(base, "lm_head", "up_proj"))
    for name in ("model.embed_tokens", "lm_head"):
        made[f"{adapters.PREFIX}{name}.base_layer.weight"] = stored[f"{name}.weight"]
    return made, {}


def replaced(base: Path) -> Made:
    """Tensors that were trained whole: modules_to_save."""
    stored, made = adapters.weights(base), factors(modules(base, "k_proj"))
    for key in ("lm_head.weight", *(f"model.layers.{i}.input_layernorm.weight" for i in range(4))):
        drawn = adapters.drawn(key, stored[key].shape).astype(stored[key].dtype)
        made[adapters.PREFIX + key] = drawn if drawn.ndim > 1 else drawn + 1
    return made, {"modules_to_save": ["lm_head", "input_layernorm"], "target_modules": ["k_proj"]}


def experts_apart(base: Path) -> Made:
    """Experts as transformers 4 named them, where gate and up have an A of their own."""
    return factors(modules(base, "q_proj", *MLP), shared=False), {}


def experts_stacked(base: Path) -> Made:
    """Experts as transformers 5 has them, of files that have one tensor for each expert."""
    made = factors(modules(base, *ATTENTION))
    for layer in range(4):
        made |= stacked(f"model.layers.{layer}.mlp.experts", 24, (128, 48), (48, 64), rank=2)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return made, {
        "target_parameters": names,
        # PEFT matches the path of the parameter, and the first pattern that matches counts
        "rank_pattern": {r"experts\.(gate_up|down)_proj": 2, "experts": 16},
        "alpha_pattern": {"gate_up_proj": 4, ".*down_proj": 16},
    }


def experts_down(base: Path) -> Made:
    """One of the two parameters: PEFT then has one wrapper, without a base_layer."""
    made: Arrays = {}
    for layer in range(4):
        made |= stacked(f"model.layers.{layer}.mlp.experts", 24, (128, 48), (48, 64))
    made = {key: array for key, array in made.items() if "base_layer" not in key}
    return made, {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}


def latent(base: Path) -> Made:
    """Latent attention, dense layers, experts and shared experts.

    PEFT 0.21 takes target_modules with these names for the experts alone, so that the others are
    target_parameters.
    """
    c = json.loads((base / "config.json").read_text())
    shapes = {
        module: shape
        for module, shape in modules(base, *LATENT, *MLP).items()
        if int(module.split(".")[2]) < c["num_hidden_layers"]  # without multi-token prediction
    }
    apart = [m for m in shapes if m.endswith(MLP) and ".experts." not in m]
    return factors(shapes), {
        "target_parameters": [f"{module}.weight" for module in apart],
        # PEFT matches the path of a parameter, so the first one does not match
        "alpha_pattern": {"layers.0.mlp.up_proj": 1, r"layers.0.mlp.down_proj\.weight": 16},
    }


def linear_attention(base: Path) -> Made:
    """Gated delta nets, and attention with an output gate."""
    return factors(modules(base, *LINEAR, *ATTENTION, *MLP)), {}


def stacked_files(base: Path) -> Made:
    """Experts that are stacked in the base's files too, and a shared expert."""
    made = factors(modules(base, *LINEAR, *ATTENTION, *(f"shared_expert.{name}" for name in MLP)))
    for layer in range(4):
        made |= stacked(f"model.layers.{layer}.mlp.experts", 6, (48, 48), (48, 24))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return made, {"target_parameters": names, "target_modules": [*LINEAR, *ATTENTION, *MLP]}


def dora(base: Path) -> Made:
    """Magnitudes of linears, of the embedding and of the output layer."""
    made, config = vocabulary(base)
    made |= factors(modules(base, *ATTENTION, *MLP), shared=False)
    return adapters.magnitudes(base, made), config | {"use_dora": True, "use_rslora": True}


def dora_of_linear_attention(base: Path) -> Made:
    """Magnitudes of linears that Megatron packs in parts."""
    made, config = linear_attention(base)
    return adapters.magnitudes(base, made), config | {"use_dora": True}


CASES: dict[str, tuple[str, Callable[[Path], Made]]] = {
    "q and v": ("llama", q_and_v),
    "patterns": ("qwen3", patterns),
    "vocabulary": ("llama", vocabulary),
    "replaced": ("qwen3", replaced),
    "experts apart": ("qwen3-moe", experts_apart),
    "experts stacked": ("qwen3-moe", experts_stacked),
    "experts down": ("qwen3-moe", experts_down),
    "latent": ("deepseek-v3", latent),
    "linear attention": ("qwen3_5", linear_attention),
    "stacked files": ("qwen3_5_moe", stacked_files),
    "dora": ("llama", dora),
    "dora of linear attention": ("qwen3_5", dora_of_linear_attention),
}


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_the_model_with_the_adapter(tiny_model, work, case):
    model, make = CASES[case]
    for dtype in ("float32", "bfloat16"):
        base, at = tiny_model(model, dtype), work / case / dtype
        tensors, config = make(base)
        adapter = adapters.write(at / "adapter", tensors, **config)
        good("adapter", "merge", base, adapter, at / "merged")
        wanted = adapters.merged(base, adapter)
        found = adapters.weights(at / "merged")
        exact = case != "patterns" and not config.get("use_dora")
        assert adapters.differences(found, wanted, powers=exact) == []
        stored = adapters.weights(base)
        changed = [key for key in wanted if (wanted[key] != stored[key]).any()]
        if dtype == "bfloat16" and exact:
            assert adapters.exact(wanted, changed) > 0.999, "few values have one right result"
    base, at = tiny_model(model, "float32"), work / case / "float32"
    tokens = made_models.tokens(model)
    logits, plain = tiny.hf_logits(at / "merged", tokens), tiny.hf_logits(base, tokens)
    unmerged = adapters.peft_logits(base, at / "adapter", tokens)
    # the merge rounds each weight once more
    tolerance = 3 * limit(unmerged)
    assert np.abs(logits - unmerged).max() <= tolerance
    assert np.abs(plain - unmerged).max() > 100 * tolerance, "the adapter hardly changes anything"


IN_MEMORY = (
    "mixtral",
    "nemotron_h_moe",
    "gpt_neox",
    "granitemoe",
    "llava",
    "qwen2_vl",
    "internvl_moe",
)
# PEFT has no adapters of the last linear of a Mamba
NOT_ADAPTED = re.compile("vision|visual|projector|mixer.out_proj")


@pytest.mark.parametrize("case", IN_MEMORY)
def test_an_adapter_has_the_names_of_transformers_in_memory(case, tiny_model, tmp_path):
    """PEFT adapts all linears, experts and routers of the text model, and merges them. The files of
    the base have other names.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    base = tiny_model(case, "float32")
    model = tiny.load(base)
    kinds = {name: module for name, module in model.named_modules() if not NOT_ADAPTED.search(name)}
    output = model.get_output_embeddings()
    tied = output.weight is model.get_input_embeddings().weight  # mckpt refuses an adapter of it
    linears = [
        name
        for name, module in kinds.items()
        if isinstance(module, torch.nn.Linear) and not (tied and module is output)
    ]
    others = [
        f"{name}.{end}"
        for name, module in kinds.items()
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d))
        for end, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
    ]
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=linears, target_parameters=others)
    )
    factors = {name: p for name, p in adapted.named_parameters() if ".lora_" in name}
    assert len(factors) == 2 * (len(linears) + len(others))
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_(torch.from_numpy(adapters.drawn(name, tuple(factor.shape))))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "wanted")
    good("adapter", "merge", base, tmp_path / "adapter", tmp_path / "found")
    found, wanted = (load_file(tmp_path / d / "model.safetensors") for d in ("found", "wanted"))
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not wanted[key].equal(found[key])] == []


@pytest.mark.parametrize("layout", ["canonical", "block"])
def test_peft_loads_experts_of_another_rank(layout, tiny_model, tmp_path):
    """Megatron-Bridge divides the rank of experts with normalize_moe_lora. PEFT puts the factors of
    gate and up of all experts into one pair.
    """
    from peft import PeftModel

    base, back = tiny_model("qwen3-moe", "float32"), tmp_path / "back"
    made = factors(
        modules(base, "q_proj", "k_proj", "v_proj", *MLP),
        lambda module: 4 if ".experts." in module else 20,
        shared=layout != "block",
    )
    adapter = adapters.write(
        tmp_path / "adapter",
        made,
        r=20,
        rank_pattern={r"experts\.\d+\.\w+_proj": 4},
        lora_alpha=10,
    )
    good("adapter", "to-megatron", adapter, base, tmp_path / "there", "--layout", layout)
    good("adapter", "to-hf", tmp_path / "there", back)
    good("adapter", "merge", base, back, tmp_path / "found")
    model = PeftModel.from_pretrained(tiny.load(base), str(back)).merge_and_unload()
    model.save_pretrained(tmp_path / "wanted")
    found, wanted = (adapters.weights(tmp_path / name) for name in ("found", "wanted"))
    assert {key for key in found if not np.array_equal(found[key], wanted[key])} == set()


# the names of the targets of an adapter; a directory of PEFT needs others than the base's files
LOADED = [
    ("qwen3-moe", ("experts.gate_up_proj",)),
    ("mixtral", ("experts.gate_up_proj", "experts.down_proj", "gate.weight")),
    ("qwen2_moe", ("experts.gate_up_proj", "experts.down_proj", "gate.weight")),
    ("qwen3_5_moe", ("experts.gate_up_proj", "experts.down_proj", "gate.weight")),
    ("gpt_oss", ("router.weight",)),
    ("granitemoe", ("experts.gate_up_proj", "experts.down_proj", "router.weight")),
    ("hy_v3", ("experts.down_proj", "gate.weight", "shared_experts.up_proj.weight")),
    ("internvl_moe", ("experts.gate_up_proj", "experts.down_proj", "gate.weight")),
    ("nemotron_h_moe", ("experts.up_proj", "experts.down_proj", "mixer.in_proj.weight")),
    ("mamba2", ("mixer.in_proj.weight",)),
    ("qwen3_5", ("linear_attn.in_proj_a.weight",)),
    ("qwen3_next", ("linear_attn.in_proj_qkvz.weight",)),
]


@pytest.mark.parametrize(("case", "targets"), LOADED, ids=str)
def test_peft_loads_all_factors_that_come_back_of_megatron(case, targets, tiny_model, tmp_path):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_model(case, "float32")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=list(targets))
    adapted = get_peft_model(tiny.load(base), config)
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if ".lora_" in name:
                factor.copy_(torch.from_numpy(adapters.drawn(name, tuple(factor.shape))))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "wanted")
    good("adapter", "to-megatron", tmp_path / "adapter", base, tmp_path / "megatron")
    good("adapter", "to-hf", tmp_path / "megatron", tmp_path / "back", "--like", base)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        loaded = PeftModel.from_pretrained(tiny.load(base), str(tmp_path / "back"))
    loaded.merge_and_unload().save_pretrained(tmp_path / "loaded")
    good("adapter", "merge", base, tmp_path / "back", tmp_path / "merged")
    wanted, *found = (adapters.weights(tmp_path / d) for d in ("wanted", "loaded", "merged"))
    for one in found:
        assert [key for key in wanted if not np.array_equal(one[key], wanted[key])] == []


def test_the_names_of_experts_that_peft_loads():
    """The lists of adapters.yaml are those of PEFT and transformers."""
    from peft.utils import transformers_weight_conversion as conversion
    from transformers import CONFIG_MAPPING

    known, patterns = rules()["peft"], conversion._MODEL_TO_CONVERSION_PATTERN
    for name in mapping.names("hf"):
        family = mapping.load("hf", name)
        kind = parse(FOLDER / "hf" / f"{name}.yaml")[0].get("model_type")
        apart = any("experts.{expert}." in rule.key and not rule.mtp for rule in family.rules)
        if apart and kind is not None and kind != "mamba2":  # which has no experts
            kinds = {patterns.get(kind), patterns.get(kind.removesuffix("_text"))}
            converted = bool(kinds & conversion._MOE_TARGET_MODULE_MAPPING.keys())
            assert (name in known["modules"]) == (kind not in CONFIG_MAPPING), name
            if kind in CONFIG_MAPPING:
                assert (name in known["unconverted"]) != converted, name


def unsloth(model: Any) -> None:
    """Gives GPT-OSS the linears that Unsloth has in a model of 4 bits: one for the router, and two
    for each expert, of which the first has alternate outputs of gate and up.
    """
    import torch

    def linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
        made = torch.nn.Linear(*reversed(weight.shape))
        made.weight.data, made.bias.data = weight.clone(), bias.clone()
        return made

    class Experts(torch.nn.Module):
        def __init__(self, stock: Any) -> None:
            super().__init__()
            up = zip(stock.gate_up_proj, stock.gate_up_proj_bias, strict=True)
            down = zip(stock.down_proj, stock.down_proj_bias, strict=True)
            self.gate_up_projs = torch.nn.ModuleList(linear(w.T, b) for w, b in up)
            self.down_projs = torch.nn.ModuleList(linear(w.T, b) for w, b in down)
            self.alpha, self.limit = stock.alpha, stock.limit

        def forward(self, hidden: Any, chosen: Any, scores: Any) -> Any:
            out = torch.zeros_like(hidden)
            for expert, (first, second) in enumerate(
                zip(self.gate_up_projs, self.down_projs, strict=True)
            ):
                gate, up = first(hidden).unflatten(-1, (-1, 2)).unbind(-1)
                gate = gate.clamp(max=self.limit)
                up = up.clamp(-self.limit, self.limit)
                share = (scores * (chosen == expert)).sum(-1, keepdim=True)
                out += share * second((up + 1) * gate * torch.sigmoid(gate * self.alpha))
            return out

    class Router(torch.nn.Module):
        def __init__(self, stock: Any) -> None:
            super().__init__()
            self.linear, self.top_k = linear(stock.weight, stock.bias), stock.top_k

        def forward(self, hidden: Any) -> Any:
            scores = self.linear(hidden)
            best, chosen = scores.topk(self.top_k, dim=-1)
            return scores, best.softmax(1), chosen

    for layer in model.model.layers:
        layer.mlp.experts, layer.mlp.router = Experts(layer.mlp.experts), Router(layer.mlp.router)


def test_an_adapter_has_the_linears_of_unsloth(tiny_model, tmp_path):
    """Unsloth trains the experts of a GPT-OSS of 4 bits as linears; the base has stacked ones."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = tiny_model("gpt_oss", "float32")
    model, tokens = tiny.load(base), made_models.tokens("gpt_oss")
    plain = tiny.logits(model, tokens)
    unsloth(model)
    assert np.abs(tiny.logits(model, tokens) - plain).max() < limit(plain)
    kinds = rf".*\.(({'|'.join(ATTENTION)})|(gate_up|down)_projs\.\d+|router\.linear)"
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=kinds))
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if ".lora_" in name:
                factor.copy_(torch.from_numpy(adapters.drawn(name, tuple(factor.shape))))
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = tiny.logits(adapted.merge_and_unload().eval(), tokens)
    good("adapter", "merge", base, tmp_path / "adapter", tmp_path / "merged")
    found, merged = adapters.weights(tmp_path / "merged"), dict(model.named_parameters())
    for key, array in found.items():
        if (name := key.replace("router.", "router.linear.")) in merged:
            assert np.array_equal(array, merged[name].detach().numpy()), key
            continue
        parent, _, name = key.rpartition(".")
        end = "bias" if name.endswith("_bias") else "weight"
        of = f"{parent}.{name.removesuffix('_bias')}s"
        for expert, one in enumerate(array):
            assert np.array_equal(one.T, merged[f"{of}.{expert}.{end}"].detach().numpy()), key
    logits = tiny.hf_logits(tmp_path / "merged", tokens)
    assert np.abs(logits - wanted).max() < limit(wanted) < np.abs(plain - wanted).max() / 100


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen2_5_vl"])
def test_adapters_of_whole_models_are_those_of_peft(case, tiny_model, tmp_path):
    """`all-linear` adapts the tower too. PEFT loads what comes back of Megatron, and reports no
    missing tensor.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForImageTextToText

    base, adapter = tiny_model(case, "float32"), tmp_path / "adapter"

    def model() -> Any:
        return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    adapted = get_peft_model(model(), config)
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if ".lora_" in name:
                factor.copy_(torch.from_numpy(adapters.drawn(name, tuple(factor.shape))))
    adapted.save_pretrained(adapter)
    factors_of = adapters.weights(adapter)
    assert any(".visual." in key for key in factors_of)
    adapted.merge_and_unload().save_pretrained(tmp_path / "wanted")
    good("adapter", "merge", base, adapter, tmp_path / "merged")
    wanted, found = (adapters.weights(tmp_path / name) for name in ("wanted", "merged"))
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    options = ("--towers", "swift", "--layout", "swift-block")
    good("adapter", "to-megatron", adapter, base, tmp_path / "megatron", *options)
    good("adapter", "to-hf", tmp_path / "megatron", tmp_path / "back")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        loaded = PeftModel.from_pretrained(model(), str(tmp_path / "back"))
    state = get_peft_model_state_dict(loaded)
    assert {key for key in state if ".lora_" in key} == factors_of.keys()
    # the block has the sum of the ranks, and computes the same
    loaded.merge_and_unload().save_pretrained(tmp_path / "again")
    again = adapters.weights(tmp_path / "again")
    assert all(np.array_equal(again[key], wanted[key]) for key in wanted)


def test_every_key_of_a_configuration_is_known():
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    known = rules()["peft"]
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert not fields - {*known["known"], *known["refuse"]}
    types = {"gemma3": "gemma3_text", "gemma4_vl": "gemma4", "llama4_vl": "llama4"}
    defaults = known["defaults"]
    assert defaults == {family: DEFAULTS[types.get(family, family)] for family in defaults}


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["layers.0.self_attn.q_proj", "down_proj"]},
    {"target_modules": ["model.layers.1.mlp.up_proj", "k_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.[02]\.mlp\..*_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": [*ATTENTION, *MLP], "modules_to_save": ["mlp"]},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["up_proj"]},
    {"target_modules": None, "target_parameters": ["mlp.up_proj.weight"]},
    {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    {
        "target_modules": ["k_proj"],
        "target_parameters": ["up_proj.weight", "layers.0.mlp.up_proj.weight"],
        "exclude_modules": ["up_proj"],
        "layers_to_transform": [3],
    },
]
# Experts, of which PEFT wraps each parameter in a `base_layer`
OF_EXPERTS: list[dict[str, Any]] = [
    {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    {"target_modules": ["q_proj"], "target_parameters": ["down_proj", "mlp.experts.down_proj"]},
    {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    {"target_modules": "all-linear"},
]


@pytest.mark.parametrize(
    "model, config",
    [*(("llama", c) for c in TARGETS), *(("qwen3-moe", c) for c in OF_EXPERTS)],
    ids=str,
)
def test_factors_that_peft_would_not_load_are_refused(model, config, tiny_model, tmp_path):
    """PEFT adapts the modules of the base that a configuration targets. An adapter that has other
    factors too is refused, with the configuration and with the one that PEFT saves for it.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tiny_model(model, "float32")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        adapted = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **config))
    loaded = {
        name.removeprefix(adapters.PREFIX): module
        for name, module in adapted.named_modules()
        if hasattr(module, "lora_A")
    }
    adapted.peft_config["default"].save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / adapters.CONFIG).read_text())
    every = modules(base, *ATTENTION, "lm_head", *(MLP if model == "llama" else ()))
    around = [f"{name}.base_layer" for name in modules(base, "q_proj")]
    if model == "qwen3-moe":
        experts = (f"model.layers.{layer}.mlp.experts" for layer in range(4))
        around += [e + ".base_layer" * number for e in experts for number in range(3)]
    every |= dict.fromkeys(around, (8, 8)) | {
        name: (module.lora_B["default"].out_features, module.lora_A["default"].in_features)
        for name, module in loaded.items()
    }
    whole = {
        adapters.PREFIX + key: array
        for key, array in adapters.weights(base).items()
        if any(f".{name}." in key for name in config.get("modules_to_save", ()))
    }
    ranks = {name: module.lora_A["default"].out_features for name, module in loaded.items()}
    some = {name: shape for name, shape in every.items() if name in loaded}
    # PEFT replaces the names of the experts of transformers 4
    for number, stated in enumerate([saved] if model == "qwen3-moe" else [config, saved]):
        at, rank = tmp_path / str(number), lambda name: ranks.get(name, 8)
        stated = {"r": 8} | stated
        one = adapters.write(at / "all", factors(every, rank, shared=False), **stated)
        with pytest.raises(SourceError, match="does not target") as e:
            merge(Checkpoint.open(base), open_adapter(one))
        named = {re.sub(r"\.lora_[AB]\.weight$", "", key) for key in e.value.problems}
        assert {name.removeprefix(adapters.PREFIX) for name in named} == every.keys() - some.keys()
        one = adapters.write(at / "some", factors(some, rank, shared=False) | whole, **stated)
        good("adapter", "merge", base, one, at / "out")
