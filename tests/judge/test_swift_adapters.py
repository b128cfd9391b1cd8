"""Adapters of ms-swift, whose own `megatron export` saves, loads and exports them on two ranks.

mckpt reads what ms-swift saves, and ms-swift loads what mckpt writes. The judge is the directory of
PEFT from which both start, which ms-swift returns bit for bit.

MS_SWIFT_PYTHON is the Python of an environment with ms-swift; CONTRIBUTING.md has the command that
makes one.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import adapters, lora, made_models, tiny
from tests.helpers.commands import good
from tests.helpers.judging import explain, judge

PYTHON = os.environ.get("MS_SWIFT_PYTHON", "")
pytestmark = [
    pytest.mark.judge,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MS_SWIFT_PYTHON names no Python with ms-swift"),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# the model, the modules and the sizes of each case
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, int]]] = {
    "llama": ("llama", (*ATTENTION, *MLP), {"tp": 2}),
    "replicas": ("llama", ("o_proj", "gate_proj", "up_proj"), {}),
    "stages": ("llama", (*ATTENTION, *MLP), {"pp": 2}),
    "experts": ("qwen3-moe", (*ATTENTION, *MLP), {"tp": 2, "ep": 2}),
    "latent": ("deepseek-v3", (*LATENT, *MLP), {"tp": 2}),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture(scope="module")
def ran(work: Path) -> dict[str, dict[str, Any]]:
    """The results of all cases of ms-swift, which run in one launch."""
    cases: list[dict[str, Any]] = []
    for name, (model, ends, sizes) in CASES.items():
        base, peft = work / "bases" / model, work / "peft" / name
        if not base.exists():
            tiny.tiny_random(model, base, "float32")
            for file in TOKENIZER:
                shutil.copy(tiny.FIXTURES / "tiny-qwen3" / file, base / file)
        config = tiny.config(model)
        layers = made_models.text(config)["num_hidden_layers"]
        shapes = adapters.modules(base, *ends)
        kept = {m: s for m, s in shapes.items() if int(m.split(".")[2]) < layers}
        adapters.write(peft, adapters.factors(kept))
        written = (peft, base, work / "written" / name, "--layout", "swift", "--dialect", "gpt")
        given = [word for size, n in sizes.items() for word in (f"--{size}", n)]
        said = good("adapter", "to-megatron", *written, *given, *["--etp", 1] * (model != "llama"))
        told = next(line for line in said.err.splitlines() if line.startswith("ms-swift loads"))
        # to export at pp 2, the ranks would have to send tensors on a GPU
        flat = {size: n for size, n in sizes.items() if size != "pp"}
        loading = shlex.split(told.partition(" with ")[2])
        targets = loading[loading.index("--target_modules") :]
        runs = (
            ("saved", sizes, ["--to_mcore", "true", "--adapters", str(peft), *targets]),
            ("exported", flat, ["--to_hf", "true", "--mcore_adapter", str(work / "saved" / name)]),
            ("loaded", flat, ["--to_hf", "true", *loading]),
        )
        for what, own, options in runs:
            options += ["--model_type", config["model_type"], "--template", "dummy"]
            options += ["--torch_dtype", "float32", "--merge_lora", "false"]
            options += ["--output_dir", str(work / what / name)]
            case = {"name": f"{what} {name}", "source": str(base), "sizes": own}
            cases.append({**case, "options": options})
    return judge(cases, work / "ran", te=True, program="swift_adapters", python=PYTHON, ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_mckpt_reads_what_ms_swift_saves(case: str, ran: Any, work: Path) -> None:
    for what in ("saved", "exported"):
        assert ran[f"{what} {case}"]["ok"], explain(ran[f"{what} {case}"])
    base = work / "bases" / CASES[case][0]
    good("adapter", "to-hf", work / "saved" / case, work / "read" / case, "--like", base)
    assert lora.same(work / "exported" / case, work / "peft" / case)
    assert lora.same(work / "read" / case, work / "exported" / case)


@pytest.mark.parametrize("case", CASES)
def test_ms_swift_loads_what_mckpt_writes(case: str, ran: Any, work: Path) -> None:
    assert ran[f"loaded {case}"]["ok"], explain(ran[f"loaded {case}"])
    assert lora.same(work / "loaded" / case, work / "peft" / case)
