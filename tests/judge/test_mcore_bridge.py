"""The dialects mcore_bridge and mcore_bridge_gdn: ms-swift's own GPTModel loads what mckpt writes,
and computes the logits of transformers; mckpt reads what it saves.

MEGATRON_BRIDGE_PYTHON is the Python of an environment with Megatron-Bridge and mcore-bridge;
CONTRIBUTING.md has the commands that make one.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import MappingError, UsageError
from mckpt.options import SourceOptions
from tests.helpers import made_models
from tests.helpers.bridge_facts import tensors
from tests.helpers.judging import explain, judge, record

PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")
CASES = made_models.SWIFT_MODELS
WHOLE = made_models.WHOLE["swift"]
LIMIT = 2e-5  # of the largest logit
LIMIT_OF_GEMMA = 5e-5  # with an embedding of each layer it was 1.7e-5

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
        mckpt.plan(source, ours, towers="swift").run()
        given = {"name": case, "source": str(source), "checkpoint": str(ours / "release")}
        if WHOLE[case] == made_models.TEXT:
            # it has no place for what no layer reads; ids from 246 on stand for images and sound
            made_models.without_unread(source, bare := tmp_path / "bare" / case)
            tokens = made_models.tokens(case) % 246
            given |= {"source": str(bare), "tokens": tokens.tolist()}
        cases.append({**given, "saved": str(tmp_path / "theirs" / case)})
    ran = judge(cases, tmp_path / "ran", te=True, program="swift_models", python=PYTHON)
    for case in WHOLE:
        found, source, theirs = ran[case], tmp_path / "hf" / case, tmp_path / "theirs" / case
        assert found["ok"], explain(found)
        assert (found["unloaded"], found["differ"]) == ([], []), case
        if WHOLE[case] == made_models.TEXT:
            assert found["difference"] < LIMIT_OF_GEMMA * found["largest"], case
            sizes = "mcore-bridge's forward", case, "torch_dist", "1 rank"
            apart = found["difference"], found["largest"]
            record(*sizes, *apart, "mcore_bridge_gemma4", version("megatron-core"))
        assert not mckpt.diff(source, mckpt.Checkpoint.open(theirs, SourceOptions(like=source)))
        rows = made_models.text(made_models.config(case))["vocab_size"]
        held, stored = tensors(tmp_path / "ours" / case), tensors(theirs)
        assert held.keys() == stored.keys()
        padded = ("word_embeddings.weight", "output_layer.weight")
        for key, tensor in held.items():
            here = tensor[:rows] if key.endswith(padded) else tensor
            there = stored[key][:rows] if key.endswith(padded) else stored[key]
            assert here.equal(there), key


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


def leave_the_thinker(source: Path) -> None:
    """Takes away the parts of an Omni model that speak."""
    held = load_file(source / "model.safetensors")
    kept = {key: value for key, value in held.items() if key.startswith("thinker.")}
    assert len(kept) < len(held)
    save_file(kept, source / "model.safetensors", {"format": "pt"})
