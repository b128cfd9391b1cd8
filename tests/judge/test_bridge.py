"""Megatron-Bridge, the field's own converter, writes the tensors that mckpt writes.

Both convert the same Hugging Face model to torch_dist, in fp32 and for the layers of Transformer
Engine. torch reads both checkpoints, apart from mckpt, and every stored tensor must have the same
key, shape and bits. mckpt then compares the logical tensors. In the other direction,
Megatron-Bridge loads what mckpt writes by its run_config.yaml, and exports it to Hugging Face.

MEGATRON_BRIDGE_PYTHON is the Python of an environment with Megatron-Bridge; CONTRIBUTING.md has the
command that makes one.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError
from mckpt.formats.megatron.run_config import RUN_CONFIG
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import made_models, tiny
from tests.helpers.bridge_facts import tensors
from tests.helpers.judging import chosen_cases, judge, limit, record

FORWARD = "Megatron-Bridge's forward"
WHOLE = {c: kind for c, kind in made_models.WHOLE["bridge"].items() if kind != made_models.SAVED}
PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")
# starts of the names of a text model: in most of them, and in Omni models
TEXT = ("language_model.", "thinker.language_model.")
CASES = (
    *tiny.CASES,
    *made_models.CASES,
    *made_models.BRIDGE_MODELS,
    *made_models.BRIDGE_IMAGES,
)

# Keys of published configs that Megatron-Bridge reads and transformers neither needs nor writes.
ALSO: dict[str, dict[str, Any]] = {
    "bailing_moe_v2": {"model_type": "bailing_moe_v2"},
    "glm_moe_dsa": {"indexer_rope_interleave": True},
    "hy_v3": {"first_k_dense_replace": 1},
}
# The architectures for which Megatron-Bridge 0.6.2 has no class. A case that is neither here nor
# below must be equal.
NO_BRIDGE = {
    "ArceeForCausalLM",
    "AriaForConditionalGeneration",
    "AriaTextForCausalLM",
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
    "BailingMoeForCausalLM",
    "BambaForCausalLM",
    "CwmForCausalLM",
    "DeepseekForCausalLM",
    "DeepseekV32ForCausalLM",
    "Dots1ForCausalLM",
    "Emu3ForCausalLM",
    "Emu3ForConditionalGeneration",
    "Ernie4_5ForCausalLM",
    "ExaoneForCausalLM",
    "FlintForCausalLM",
    "FuyuForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GlmForCausalLM",
    "GotOcr2ForConditionalGeneration",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InternLM2ForCausalLM",
    "InternLM3ForCausalLM",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "Jais2ForCausalLM",
    "Kimi_K25ForConditionalGeneration",  # it has one for modeling_kimi_k25.py beside the weights
    "KimiVLForConditionalGeneration",
    "LLaVAOneVision1_5_ForConditionalGeneration",
    "LaraMiniForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MegatronBertForPreTraining",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MixtralForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "Ovis2_5",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "QWenLMHeadModel",
    "Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
}
Q_NORM = (
    r"No mapping found for megatron_param: \S+linear_q_proj.layer_norm_weight",
    "megatron-core 0.19 has a second norm where q has no latent, and Megatron-Bridge no tensor"
    " for it",
)
SHARED = (
    r"Shape mismatch .*shared_experts",
    "it takes the width of one shared expert, and the model has n_shared_experts 2",
)
PACKAGE = (
    r"object has no attribute '(thinker_config|text_config)'",
    "it reads the config of the package qwen_asr, which is not that of transformers",
)
# case -> a pattern of the log of Megatron-Bridge, which does not convert it, and the reason
FAILS: dict[str, tuple[str, str]] = {
    "deepseek-v3-plain": Q_NORM,
    "deepseek_v2_lite": Q_NORM,
    "glm4_moe": SHARED,
    "joyai": (r"model type `joyai_llm_flash`", "transformers has no config of this name"),
    "mistral3": (
        r"KeyError: 'llama_4_scaling_beta'",
        "it takes every Mistral3ForConditionalGeneration for Ministral 3; run_config.yaml states 0",
    ),
    "moonlight": Q_NORM,
    "qwen3_asr": PACKAGE,
    "qwen3_asr_thinker": PACKAGE,
    "nemotron": (
        r"No mapping found for megatron_param: \S+linear_qkv.bias",
        "it has no tensors for attention_bias",
    ),
    "qwen2_yarn": (
        r"unsupported operand type\(s\) for \*: 'NoneType' and 'int'",
        "it has no default for beta_fast, which the published configs of Qwen2.5 leave out",
    ),
    "sarvam_mla": Q_NORM,
}
EXTRA_MTP = (
    r"mtp\.",
    "it reads mtp_num_hidden_layers, and transformers writes no tensors for those layers, so they"
    " keep random values",
)
# case -> a pattern of the keys that differ, and the reason; all other tensors must be equal
DIFFERS: dict[str, tuple[str, str]] = {
    "glm4_moe_lite": (
        r"decoder\.layers\.2\.",
        "it reads first_k_dense_replace, and the model has mlp_layer_types with a dense layer 2",
    ),
    "hy_v3": (r"decoder\.layers\.2\.", "as glm4_moe_lite"),
    "qwen3_5": EXTRA_MTP,
    "qwen3_5_moe": EXTRA_MTP,
    "qwen3_next": (
        r"decoder\.layers\.2\.",
        "it ignores mlp_only_layers, and the model has a dense layer 2",
    ),
}
# Models that Megatron-Bridge loads from mckpt's run_config.yaml and exports: case -> sizes. mckpt
# reads Megatron-Bridge's checkpoints of them with their run_config.yaml alone.
LOADED = {
    "deepseek-v3": Parallel(tp=2, pp=2, ep=2),
    "exaone4": Parallel(tp=2, pp=2),
    "falcon_h1": Parallel(tp=2),
    "falcon_h1_plain": Parallel(pp=2),
    "gemma": Parallel(tp=2),
    "gemma2": Parallel(tp=2),
    "gemma3": Parallel(tp=2),
    "gemma3_linear": Parallel(tp=4),
    "gemma4": Parallel(tp=2),
    "gemma4_e2b": Parallel(),
    "gemma4_e4b": Parallel(tp=2),
    "gemma4_moe": Parallel(tp=2, pp=2, ep=2),
    "glm4_moe_lite": Parallel(tp=2),
    "gpt_oss": Parallel(pp=2),
    "llama": Parallel(tp=4, pp=2),
    "llama_nemotron": Parallel(tp=2),
    "mimo_v2_flash": Parallel(tp=2, ep=2),
    "minimax_m2": Parallel(tp=2, ep=2),
    "nemotron_h": Parallel(tp=2, pp=2),
    "nemotron_h_latent": Parallel(tp=2, ep=2),
    "olmoe": Parallel(pp=2, ep=2),
    "qwen2-tied": Parallel(tp=2),
    "qwen3-moe": Parallel(tp=2, ep=2),
    "sarvam_moe": Parallel(tp=2, ep=2),
}
# Those of Megatron-Core's models that have a forward here too.
FORWARD_TOO = ("llama_nemotron", "sarvam_moe")
# The same after Megatron-Bridge has written them and mckpt has resharded them.
CARRIED = ("deepseek-v3", "gpt_oss", "llama", "nemotron_h", "nemotron_h_latent", "qwen3-moe")
# Models that Megatron-Bridge computes, and pretrain_gpt.py does not: case -> changed entries of
# rope_scaling, as in Llama 3.2 and Kimi-K2. Gemma 1 is not changed.
BRIDGED: dict[str, dict[str, float]] = {
    "deepseek-v3": {"beta_fast": 1.0},
    "gemma": {},
    "llama-rope-scaled": {"factor": 32.0},
}
# A model with a linear rope that Megatron-Bridge computes as a HybridModel too. It has no names of
# Hugging Face for it.
HYBRID = "llama_linear"
# DeepSeek-V3's files have a second copy of these, which Megatron-Bridge does not export.
COPIES = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight: not exported"


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The cases that this run of pytest chose."""
    cases = chosen_cases(request.session)
    loads = any(
        item.name.startswith("test_megatron_bridge_loads") for item in request.session.items
    )
    return [
        case for case in CASES if case in cases or (loads and case in {*LOADED, *BRIDGED, HYBRID})
    ]


@pytest.fixture(scope="module")
def sources(work: Path, chosen: list[str]) -> Path:
    """The Hugging Face directories of the cases, in fp32."""
    made_models.make([case for case in chosen if case not in tiny.CASES], work / "hf")
    for case in chosen:
        if case in tiny.CASES:
            tiny.tiny_random(case, work / "hf" / case, "float32")
        tiny.write_json(work / "hf" / case / "config.json", config(case))
    if "mimo" in chosen:
        add_multi_token_of_mimo(work / "hf/mimo")
    return work / "hf"


def add_multi_token_of_mimo(model: Path) -> None:
    """Adds the layer of multi-token prediction, which transformers' Qwen2 does not save."""
    held = load_file(model / "model.safetensors")
    hidden, layers = config("mimo")["hidden_size"], config("mimo")["num_hidden_layers"]
    at, last = "model.mtp_layers.0.", f"model.layers.{layers - 1}."
    shapes = {at + k.removeprefix(last): v.shape for k, v in held.items() if k.startswith(last)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
    shapes[f"{at}input_proj.weight"] = (hidden, 2 * hidden)
    drawn = np.random.RandomState(6)
    added = {k: drawn.standard_normal(v).astype(np.float32) for k, v in shapes.items()}
    save_file(held | added, model / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def ran(work: Path, sources: Path, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """Every case converted by Megatron-Bridge, in one process, to work/bridge/CASE."""
    cases = [
        {"name": c, "source": str(sources / c), "destination": str(work / "bridge" / c)}
        for c in chosen
    ]
    return judge(cases, work / "ran", te=True, program="bridge", python=PYTHON)


def test_every_pinned_case_exists() -> None:
    pinned = [*FAILS, *DIFFERS]
    assert len(set(pinned)) == len(pinned) and not {*pinned} - {*CASES}
    assert {architecture(c) for c in (*CASES, *made_models.SINCE)} >= NO_BRIDGE


@pytest.mark.judge
@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
)
@pytest.mark.parametrize("case", CASES)
def test_megatron_bridge_writes_the_same_tensors(
    case: str, work: Path, sources: Path, ran: dict[str, dict[str, Any]]
) -> None:
    result = ran[case]
    has_none = architecture(case) in NO_BRIDGE
    assert has_none == (result.get("supported") is False), f"{architecture(case)}: NO_BRIDGE"
    if has_none:
        return
    error = next(iter(result.get("error", {"": ""}).values()))
    if case in FAILS:
        assert re.search(FAILS[case][0], error), f"FAILS should give another reason:\n{error}"
        return
    assert result["ok"], error
    ours, theirs = work / "mckpt" / case, work / "bridge" / case
    stored = tensors(theirs)
    text = {
        k.removeprefix(start): v for start in TEXT for k, v in stored.items() if k.startswith(start)
    }
    dialect = dialect_for(case, text or stored)
    convert(sources / case, ours, dialect)
    rows = made_models.text(config(case))["vocab_size"]
    differing = apart(tensors(ours), text or stored, rows)
    if case in DIFFERS:
        assert differing and all(re.match(DIFFERS[case][0], key) for key in differing), differing
        return
    assert not differing
    if text and "bridge" in mapping.load("hf", mapping.family_with(architecture(case))).towers:
        convert(sources / case, work / "whole" / case, None, towers="bridge")
        assert not apart(tensors(work / "whole" / case), stored, rows)
        next(theirs.rglob(RUN_CONFIG)).unlink()
        known = SourceOptions(like=sources / case)
        assert not mckpt.diff(sources / case, mckpt.Checkpoint.open(theirs, known))
    elif case in LOADED:
        assert not mckpt.diff(sources / case, theirs)
    elif not text:
        # its run_config.yaml is not judged here, so config.json describes both
        next(theirs.rglob(RUN_CONFIG)).unlink()
        known = SourceOptions(like=sources / case)
        assert not mckpt.diff(ours, mckpt.Checkpoint.open(theirs, known))
    record(
        "Megatron-Bridge",
        case,
        "torch_dist",
        str(Parallel()),
        0,
        1,
        dialect,
        version_of_megatron_core(),
    )


@pytest.mark.judge
@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
)
def test_megatron_bridge_loads_what_mckpt_writes(
    work: Path, sources: Path, ran: dict[str, dict[str, Any]]
) -> None:
    cases = []
    for case, parallel in LOADED.items():
        root = work / "for-bridge" / case
        dialect = dialect_for(case, tensors(work / "bridge" / case))
        convert(sources / case, root, dialect, run_config=True, parallel=parallel)
        entry = {"name": case, "source": str(sources / case), "checkpoint": str(root)}
        cases.append({**entry, "forward": case in (*made_models.BRIDGE_MODELS, *FORWARD_TOO)})
        if case in CARRIED:
            assert ran[case]["ok"]
            root = work / "resharded" / case
            theirs = work / "bridge" / case
            mckpt.plan(theirs, root, format="torch_dist", parallel=parallel).run()
            name = f"{case}-resharded"
            cases.append({"name": name, "source": str(sources / case), "checkpoint": str(root)})
    for case, changed in BRIDGED.items():
        source, root = work / "bridged-hf" / case, work / "bridged" / case
        shutil.copytree(sources / case, source)
        rope = config(case).get("rope_scaling") or {}
        scaled = {"rope_scaling": rope | changed} if changed else {}
        tiny.write_json(source / "config.json", config(case) | scaled)
        mckpt.plan(source, root, run_config=True, parallel=Parallel(tp=2)).run()
        assert not list(root.rglob("megatron_args.sh"))
        entry = {"name": f"{case}-bridged", "source": str(source), "checkpoint": str(root)}
        cases.append({**entry, "forward": True})
    root = work / "for-bridge" / "hybrid"
    convert(sources / HYBRID, root, "hybrid", run_config=True)
    entry = {"name": f"{HYBRID}-hybrid", "source": str(sources / HYBRID), "checkpoint": str(root)}
    cases.append({**entry, "forward": True, "exported": False})
    for case, judged in WHOLE.items():
        root = work / "whole-for-bridge" / case
        convert(sources / case, root, None, towers="bridge")
        entry = {"name": f"{case}-whole", "source": str(sources / case), "checkpoint": str(root)}
        cases.append({**entry, "image": judged == made_models.IMAGE})
    for one in cases:
        one["checkpoint"] = str(next(Path(str(one["checkpoint"])).rglob(RUN_CONFIG)).parent)
    results = judge(cases, work / "loaded", te=True, program="bridge", python=PYTHON)
    for name, result in results.items():
        assert result["ok"], (name, result["error"])
        differ = [text for text in result["differ"] if not re.fullmatch(COPIES, text)]
        hybrid = name == f"{HYBRID}-hybrid"
        assert not differ and (hybrid or result["equal"] >= 30), (name, differ, result["equal"])
        assert result["step"] == 0 and not result["unloaded"], (name, result["unloaded"])
        if "image" in result:
            assert result["difference"] < limit(np.float32(result["largest"])), (name, result)
        elif "difference" in result:
            difference, largest = result["difference"], result["largest"]
            assert difference < limit(np.float32(largest)), (name, difference)
            case = name.removesuffix("-bridged").removesuffix("-hybrid")
            sizes = str(LOADED[case] if case == name else Parallel(tp=1 if hybrid else 2))
            dialect = "hybrid" if hybrid else dialect_for(case, ())
            core = version_of_megatron_core()
            record(FORWARD, case, "torch_dist", sizes, difference, largest, dialect, core)


@pytest.mark.judge
@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with Megatron-Bridge"
)
def test_megatron_bridge_saves_kimi_k25(tmp_path: Path) -> None:
    """Of the class that is published, with a stand-in for its tower. Megatron-Bridge always exports
    experts in int4, and has no run_config.yaml that it could load itself.
    """
    case, ours, theirs = "kimi_k25", tmp_path / "ours", tmp_path / "theirs"
    made_models.make([case], tmp_path / "hf")
    source = tmp_path / "hf" / case
    published = config(case) | {"architectures": ["KimiK25ForConditionalGeneration"]}
    tiny.write_json(source / "config.json", published)
    held = load_file(source / "model.safetensors")
    shapes = {k: held[k].shape for k in held if not k.startswith("language_model.")}
    stand_in = Path(made_models.__file__).with_name("modeling_kimi_k25.py").read_text()
    (source / "modeling_kimi_k25.py").write_text(f"{stand_in}\nSHAPES |= {shapes}\n")
    given = {"name": case, "source": str(source), "destination": str(theirs)}
    found = judge([given], tmp_path / "ran", te=True, program="bridge", python=PYTHON)[case]
    error = next(iter(found.get("error", {"": ""}).values()))
    if "does not recognize this architecture" in error:
        pytest.skip("the transformers of MEGATRON_BRIDGE_PYTHON has no config of Kimi-K2.5")
    assert found["ok"], error
    convert(source, ours, None, towers="bridge")
    assert not apart(tensors(ours), tensors(theirs), config(case)["text_config"]["vocab_size"])
    next(theirs.rglob(RUN_CONFIG)).unlink()
    assert not mckpt.diff(source, mckpt.Checkpoint.open(theirs, SourceOptions(like=source)))


def dialect_of(keys: Iterable[str]) -> str:
    return "hybrid" if "decoder.final_norm.weight" in keys else "gpt"


def dialect_for(case: str, keys: Iterable[str]) -> str:
    if case not in (*made_models.BRIDGE_MODELS, *made_models.BRIDGE_IMAGES):
        return dialect_of(keys)
    return mapping.load("hf", mapping.family_with(architecture(case))).dialect


def config(case: str) -> dict[str, Any]:
    made = case not in tiny.CASES
    found = made_models.config(case) if made else tiny.config(case) | {"torch_dtype": "float32"}
    return found | ALSO.get(case, {})


def architecture(case: str) -> str:
    found: str = config(case)["architectures"][0]
    return found


def convert(source: Path, destination: Path, dialect: str | None, **more: Any) -> None:
    """Converts a model with mckpt, and accepts what Megatron would compute in another way, because
    only tensors are compared.
    """
    wanted: dict[str, Any] = {
        "format": "torch_dist",
        "dialect": dialect,
        "transformer_impl": "transformer_engine",
        **more,
    }
    try:
        plan = mckpt.plan(source, destination, **wanted)
    except MappingError as refused:
        names = re.findall(r"--allow-inexact (\w+)", str(refused))
        plan = mckpt.plan(source, destination, allow_inexact=names, **wanted)
    plan.run()


def apart(ours: dict[str, Any], theirs: dict[str, Any], rows: int) -> dict[str, str]:
    """Returns the keys that differ, and in what. Only mckpt pads the vocabulary: of `rows` rows."""
    import torch

    found = dict.fromkeys(ours.keys() - theirs.keys(), "only mckpt has it")
    found |= dict.fromkeys(theirs.keys() - ours.keys(), "only Megatron-Bridge has it")
    for key in ours.keys() & theirs.keys():
        a, b = ours[key], theirs[key]
        if re.search(r"(^|\.)(embedding\.word_embeddings|output_layer)\.weight$", key):
            a = a[:rows]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found[key] = f"{list(a.shape)} {a.dtype}, {list(b.shape)} {b.dtype}"
        elif not torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (a, b))):
            found[key] = "other bits"
    return found


@functools.cache
def version_of_megatron_core() -> str:
    code = "from importlib.metadata import version; print(version('megatron-core'))"
    return subprocess.check_output([PYTHON, "-c", code], text=True).strip()
