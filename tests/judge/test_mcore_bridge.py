"""The dialects mcore_bridge and mcore_bridge_gdn: ms-swift's own GPTModel loads what mckpt writes,
and computes the logits of transformers; mckpt reads what it saves.

MEGATRON_BRIDGE_PYTHON is the Python of an environment with Megatron-Bridge and mcore-bridge, and
OLD_MCORE_BRIDGE_PYTHON of one with mcore-bridge and megatron-core 0.18; CONTRIBUTING.md has the
commands that make them.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import MappingError, UsageError
from mckpt.options import SourceOptions
from tests.helpers import made_models, tiny
from tests.helpers.bridge_facts import tensors
from tests.helpers.judging import Case, explain, judge, record

PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")
CASES = made_models.SWIFT_MODELS
OLD_PYTHON = os.environ.get("OLD_MCORE_BRIDGE_PYTHON", "")
WHOLE = {c: kind for c, kind in made_models.WHOLE["swift"].items() if kind != made_models.OLD}
LIMIT = 2e-5  # of the largest logit
LIMIT_OF_GEMMA = 5e-5  # with an embedding of each layer it was 1.7e-5
LIMITS = {made_models.TEXT: LIMIT_OF_GEMMA, made_models.IMAGE: LIMIT, made_models.BESIDE: LIMIT}
# tensors of towers that mcore-bridge makes itself, or whose shapes it states
BESIDE = {
    "internvl_chat": {
        **{f"mlp1.0.{kind}": [96] for kind in ("weight", "bias")},
        **{f"mlp1.{part}.weight": [96, 96] for part in (1, 3)},
        **{f"mlp1.{part}.bias": [96] for part in (1, 3)},
    },
    "ovis2_5": {"vte.weight": [30, 88], "visual_tokenizer.vit.patches": [3]},
}

pytestmark = pytest.mark.judge


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with mcore-bridge")
@pytest.mark.parametrize(("case", "dialect"), CASES.items())
def test_ms_swift_computes_the_logits_of_what_mckpt_writes(
    case: str, dialect: str, tmp_path: Path
) -> None:
    made_models.make([case], tmp_path / "hf")
    source, ours, theirs = tmp_path / "hf" / case, tmp_path / "ours", tmp_path / "theirs"
    mckpt.plan(source, ours, dialect=dialect).run()
    given = {"name": case, "source": str(source), "checkpoint": str(ours / "release")}
    given |= {"tokens": made_models.tokens(case).tolist(), "saved": str(theirs)}
    ran = judge(
        [given],
        tmp_path / "ran",
        te=True,
        program="swift_models",
        python=PYTHON,
    )
    found = ran[case]
    assert found["ok"], explain(found)
    assert (found["unloaded"], found["differ"]) == ([], [])
    assert found["equal"] > 20
    assert found["difference"] < LIMIT * found["largest"]
    # it has no args, and reads no padding of the vocabulary
    rows = made_models.config(case)["vocab_size"]
    known = SourceOptions(like=source)
    assert not mckpt.diff(source, mckpt.Checkpoint.open(theirs, known))
    held, stored = tensors(ours), tensors(theirs)
    assert held.keys() == stored.keys()
    assert all(held[k][:rows].equal(stored[k][:rows]) for k in held if "embedding" in k)
    judged = ("mcore-bridge's forward", case, "torch_dist", "1 rank")
    record(*judged, found["difference"], found["largest"], dialect, version("megatron-core"))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no Python with mcore-bridge")
def test_ms_swift_saves_and_loads_whole_models(tmp_path: Path) -> None:
    """Every tensor has the key, shape and bits that it saves, and it loads and exports them."""
    made_models.make(WHOLE, tmp_path / "hf")
    cases = []
    for case in WHOLE:
        source, ours = tmp_path / "hf" / case, tmp_path / "ours" / case
        if WHOLE[case] == made_models.SILENT:
            with pytest.raises(MappingError, match="no place for tensors of the towers"):
                mckpt.plan(source, ours, towers="swift")
            leave_the_thinker(source)
        if WHOLE[case] == made_models.BESIDE:
            dress(source, case)
        mckpt.plan(source, ours, towers="swift").run()
        given = {"name": case, "source": str(source), "checkpoint": str(ours / "release")}
        if WHOLE[case] == made_models.TEXT:
            # it has no place for what no layer reads; ids from 246 on stand for images and sound
            made_models.without_unread(source, bare := tmp_path / "bare" / case)
            tokens = made_models.tokens(case) % 246
            given |= {"source": str(bare), "tokens": tokens.tolist()}
        if WHOLE[case] == made_models.BESIDE:
            given |= {"tokens": made_models.tokens(case).tolist()}
        given |= {"image": True} if WHOLE[case] == made_models.IMAGE else {}
        cases.append({**given, "saved": str(tmp_path / "theirs" / case)})
    ran = judge(cases, tmp_path / "ran", te=True, program="swift_models", python=PYTHON)
    for case in WHOLE:
        expect_equal(
            case, ran[case], *(tmp_path / name / case for name in ("hf", "ours", "theirs"))
        )
        if WHOLE[case] in LIMITS:
            apart = ran[case]["difference"], ran[case]["largest"]
            assert apart[0] < LIMITS[WHOLE[case]] * apart[1], case
            dialect = mckpt.open(tmp_path / "ours" / case).mapping.name
            judged = "mcore-bridge's forward", case, "torch_dist", "1 rank"
            record(*judged, *apart, dialect, version("megatron-core"))
        if WHOLE[case] == made_models.IMAGE:
            assert {"image", "text"} <= ran[case].keys(), case


def expect_equal(case: str, found: Case, source: Path, ours: Path, theirs: Path) -> None:
    """Asserts that mcore-bridge loads and exports what mckpt wrote of a whole model, and saves
    the same keys, shapes and bits.
    """
    assert found["ok"], explain(found)
    assert (found["unloaded"], found["differ"]) == ([], []), case
    assert not mckpt.diff(source, mckpt.Checkpoint.open(theirs, SourceOptions(like=source)))
    rows = made_models.text(made_models.config(case))["vocab_size"]
    held, stored = tensors(ours), tensors(theirs)
    assert held.keys() == stored.keys()
    padded = ("word_embeddings.weight", "output_layer.weight")
    for key, tensor in held.items():
        here = tensor[:rows] if key.endswith(padded) else tensor
        there = stored[key][:rows] if key.endswith(padded) else stored[key]
        assert here.equal(there), key


@pytest.mark.slow
@pytest.mark.parametrize("python", [PYTHON, OLD_PYTHON], ids=["newest", "0.18"])
def test_ms_swift_computes_kimi_vl_with_megatron_core_0_18(python: str, tmp_path: Path) -> None:
    """From 0.19 on, its model has norms that Kimi-VL lacks."""
    if not python:
        pytest.skip("MEGATRON_BRIDGE_PYTHON or OLD_MCORE_BRIDGE_PYTHON names no Python")
    case, ours, theirs = "kimi_vl", tmp_path / "ours", tmp_path / "theirs"
    made_models.make([case], tmp_path / "hf")
    source = tmp_path / "hf" / case
    shutil.copy(Path(made_models.__file__).with_name("modeling_kimi_vl.py"), source)
    mckpt.plan(source, ours, towers="swift", megatron_version="0.18").run()
    given = {"name": case, "source": str(source), "checkpoint": str(ours / "release")}
    given |= {"tokens": made_models.tokens(case).tolist(), "saved": str(theirs)}
    ran = judge([given], tmp_path / "ran", te=True, program="swift_models", python=python)
    if python == PYTHON:
        assert not ran[case]["ok"]
        assert "0.self_attention.linear_q_proj.layer_norm_weight" in explain(ran[case])
        return
    expect_equal(case, ran[case], source, ours, theirs)
    apart = ran[case]["difference"], ran[case]["largest"]
    assert apart[0] < LIMIT * apart[1]
    record("mcore-bridge's forward", case, "torch_dist", "1 rank", *apart, "gpt", "0.18.0")


def test_kimi_vl_is_written_for_megatron_core_0_18(tmp_path: Path) -> None:
    made_models.make(["kimi_vl"], tmp_path)
    source, out = tmp_path / "kimi_vl", tmp_path / "out"
    with pytest.raises(MappingError, match=r"So does mcore-bridge .*0\.18"):
        mckpt.plan(source, out, towers="swift")
    sizes = mckpt.Parallel(tp=2, pp=2)
    mckpt.plan(source, out, towers="swift", megatron_version="0.18", parallel=sizes).run()
    assert not mckpt.diff(source, out) and not [*out.rglob("carried*")]
    mckpt.plan(out, tmp_path / "back", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "back")


@pytest.mark.parametrize(("case", "dialect"), CASES.items())
def test_a_model_of_ms_swift_comes_back_bit_for_bit(
    case: str, dialect: str, tmp_path: Path
) -> None:
    made_models.make([case], tmp_path / "hf")
    source, out = tmp_path / "hf" / case, tmp_path / "out"
    mckpt.plan(source, out, dialect=dialect, parallel=mckpt.Parallel(tp=2, pp=2)).run()
    assert mckpt.open(out).mapping.name == dialect
    assert not [*out.rglob("megatron_args*"), *out.rglob("run_config.yaml")]
    with pytest.raises(UsageError, match="is for ms-swift alone"):
        mckpt.verify(source, out)
    assert mckpt.verify(source, out, level="bytes").verdict == "pass"
    mckpt.plan(out, tmp_path / "back", format="hf").run(check_replicas=True)
    assert not mckpt.diff(source, tmp_path / "back")


def test_glm4_is_written_for_ms_swift_alone(tmp_path: Path) -> None:
    made_models.make(["glm4"], tmp_path / "hf")
    source, out = tmp_path / "hf" / "glm4", tmp_path / "out"
    with pytest.raises(MappingError, match="none after them"):
        mckpt.plan(source, out, dialect="gpt")
    mckpt.plan(source, out).run()
    assert mckpt.open(out).mapping.name == "mcore_bridge"


def test_dense_layers_of_qwen3_next_are_refused(tmp_path: Path) -> None:
    made_models.make(["qwen3_next"], tmp_path / "hf")
    with pytest.raises(MappingError, match="ms-swift has no dense layers between"):
        mckpt.plan(tmp_path / "hf" / "qwen3_next", tmp_path / "out", dialect="mcore_bridge_gdn")


def dress(source: Path, case: str) -> None:
    """Puts beside the weights what is published there: stand-ins for the model's classes, and a
    tokenizer. Adds the tensors of BESIDE.
    """
    shutil.copy(Path(made_models.__file__).with_name(f"modeling_{case}.py"), source)
    for file in tiny.FIXTURES.glob("tiny-qwen3/*token*"):
        shutil.copy(file, source)
    held = load_file(source / "model.safetensors")
    drawn = np.random.default_rng(4)
    for name, shape in BESIDE[case].items():
        held[name] = drawn.standard_normal(shape, np.float32)
    save_file(held, source / "model.safetensors", {"format": "pt"})


def leave_the_thinker(source: Path) -> None:
    """Takes away the parts of an Omni model that speak."""
    held = load_file(source / "model.safetensors")
    kept = {key: value for key, value in held.items() if key.startswith("thinker.")}
    assert len(kept) < len(held)
    save_file(kept, source / "model.safetensors", {"format": "pt"})
