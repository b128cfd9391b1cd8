"""Quantised models that other programs make and read on CPU: compressed-tensors, ModelOpt,
transformers and vLLM.

QUANTISERS_PYTHON is the Python of an environment with the first three, VLLM_PYTHON that of one with
vLLM; CONTRIBUTING.md has the commands that make them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from tests.formats.test_quantised_exports import arrays_of
from tests.helpers import made_models, tiny
from tests.helpers.commands import ROOT

QUANTISERS, VLLM = (os.environ.get(f"{name}_PYTHON", "") for name in ("QUANTISERS", "VLLM"))
pytestmark = pytest.mark.slow

# Sizes of whole blocks of 128: vLLM joins q, k and v, and gate and up, by blocks
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_head_dim": 64,
    "partial_rotary_factor": 0.5,
    "mrope_section": [8, 4, 4],
}
FORMS = ("fp8", "mxfp8", "nvfp4")


def wide(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with these sizes in place of its own ones, without a vision tower's."""
    return {
        key: wide(value)
        if isinstance(value, dict) and key != "vision_config"
        else SIZES.get(key, value)
        for key, value in config.items()
    }


def run(python: str, program: str, *args: Any) -> None:
    """Runs a program of tests/helpers in another environment."""
    command = [python, str(ROOT / "tests" / "helpers" / program), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def values_of(source: Path, out: Path) -> dict[str, np.ndarray]:
    """Returns the values that mckpt reads from a quantised model."""
    mckpt.plan(source, out, format="hf").run()
    return arrays_of(out)


# ---- compressed-tensors, ModelOpt and transformers

PRESETS = (
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16"),
    *("MXFP4A16", "MXFP8", "MXFP8A16", "NVFP4", "NVFP4A16"),
)
ALGORITHMS = ("FP8_DEFAULT", "MXFP8_DEFAULT", "NVFP4_DEFAULT", "W4A16_NVFP4")
CASES = {
    **{f"compressed-tensors {how}": ("compressed-tensors", how) for how in PRESETS},
    **{f"modelopt {how}": ("modelopt", how) for how in ALGORITHMS},
    **{f"transformers {form}": ("transformers", form) for form in FORMS},
}


@pytest.fixture(scope="module")
def peers(work: Path) -> dict[str, str]:
    """The errors of all cases, which run in one process."""
    source = tiny.tiny_random("llama", work / "llama", **wide(tiny.config("llama")))
    for form in FORMS:
        mckpt.plan(source, work / form, format="hf", quantize=form).run()
    cases = [
        {"name": name, "program": program, "how": how}
        | {"source": str(work / how if program == "transformers" else source)}
        for name, (program, how) in CASES.items()
    ]
    tiny.write_json(work / "cases.json", cases)
    (work / "peers").mkdir()
    run(QUANTISERS, "quantised_peers.py", work / "cases.json", work / "peers")
    found: dict[str, str] = json.loads((work / "peers" / "errors.json").read_text())
    return found


@pytest.mark.skipif(not QUANTISERS, reason="QUANTISERS_PYTHON names no Python with the quantisers")
@pytest.mark.parametrize("case", CASES)
def test_mckpt_reads_the_values_of_the_other_program(case: str, peers: Any, work: Path) -> None:
    assert case not in peers, peers[case]
    program, how = CASES[case]
    source = work / how if program == "transformers" else work / "peers" / case
    held = values_of(source, work / "values" / case)
    wanted = arrays_of(work / "peers" / f"{case} values")
    # FP8QTensor multiplies in bfloat16, and vLLM in float32, as mckpt does
    bound = 2**-7 if case == "modelopt FP8_DEFAULT" else 0
    original = arrays_of(work / "llama")
    assert held.keys() == wanted.keys() == original.keys()
    for key, array in wanted.items():
        a, b, c = (x.astype("f4") for x in (array, held[key], original[key]))
        assert (np.abs(a - b) <= bound * np.abs(a)).all(), key
        # the distance of 6, the largest code of E2M1, to 5 in nvfp4, and to 8 in mxfp4
        step = 1 / 4 if "MXFP4" in case else 1 / 6 * (1 + 1 / 16)
        assert np.abs(b - c).max() <= step * np.abs(c).max(), key


# ---- vLLM

TINY = ("qwen3", "qwen3-moe", "deepseek-v3")
MADE = ("qwen3_next", "qwen3_5_moe", "deepseek_v32", "glm4v_moe")
METHODS = {"fp8": "Fp8LinearMethod", "mxfp8": "CompressedTensorsW8A8Mxfp8"}


@pytest.fixture(scope="module")
def loaded(work: Path) -> dict[str, dict[str, Any]]:
    """The results of all cases of vLLM, which run in one process."""
    cases = []
    for model in (*TINY, *MADE):
        source = work / "models" / model
        if model in TINY:
            tiny.tiny_random(model, source, **wide(tiny.config(model)))
        else:
            made_models.write(model, source, wide(made_models.config(model)))
        for form in FORMS:
            out, values = (work / folder / form / model for folder in ("exports", "read"))
            mckpt.plan(source, out, format="hf", quantize=form, dtype="bf16").run()
            mckpt.plan(out, values, format="hf").run()
            cases.append({"name": f"{model} {form}", "source": str(out), "values": str(values)})
    tiny.write_json(work / "vllm.json", cases)
    run(VLLM, "vllm_loading.py", work / "vllm.json", work / "results.json")
    found: dict[str, dict[str, Any]] = json.loads((work / "results.json").read_text())
    return found


@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no Python with vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", (*TINY, *MADE))
def test_vllm_loads_the_values_that_mckpt_reads(model: str, form: str, loaded: Any) -> None:
    """vLLM chooses the method of the form, fills all parameters, and takes one scale of the whole
    weight for the parts of each of its matrices.
    """
    result = loaded[f"{model} {form}"]
    assert "error" not in result, result["error"]
    assert result["methods"][METHODS.get(form, "CompressedTensorsW4A4Fp4")] >= 8
    assert result["compared"] >= 8 and not result["unloaded"] and not result["apart"]
    # of nvfp4, vLLM multiplies with the reciprocal of the scale of the whole weight
    bound = 2**-7 if form == "nvfp4" else 0
    assert all(isinstance(x, float) and x <= bound for x in result["different"].values()), result
