"""`verify --adapter` passes weights with a merged adapter, and finds a wrong merge."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.adapters.peft import PeftAdapter
from mckpt.errors import SourceError
from mckpt.verification.verdict import Verdict
from tests.helpers import adapters, tiny
from tests.helpers.commands import good

pytestmark = [
    pytest.mark.judge,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="PEFT is not installed"),
]

MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def made(work: Path) -> Path:
    """A folder with a base, an adapter and the merged weights in Megatron's format."""
    base = tiny.tiny_random("llama", work / "base", num_hidden_layers=2)
    made = adapters.factors(adapters.modules(base, *MODULES), rank=5, shared=False)
    adapters.write(work / "adapter", made, r=5, lora_alpha=9)
    merge(work, work / "merged")
    return work


def merge(made: Path, out: Path) -> None:
    good("hf-to-megatron", made / "base", out, "--adapter", made / "adapter", "--merge")


def verify(made: Path, checkpoint: str, adapter: str = "adapter") -> Verdict:
    return mckpt.verify(
        made / "base", made / checkpoint, adapter=made / adapter, sequences=1, length=48
    )


def test_merged_weights_pass(made: Path) -> None:
    found = verify(made, "merged")
    assert found.verdict == "pass", found.reasons
    measured = found.facts["adapter"]
    assert measured["moved"] > 100 * measured["tolerance"]
    assert measured["rounding"] > 100 * measured["noise"]
    assert measured["apart"] < measured["tolerance"] / 2


def test_a_fault_of_the_merge_is_found(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is wrong on both sides that mckpt computes; transformers with PEFT finds it."""
    scale = PeftAdapter.scale
    monkeypatch.setattr(PeftAdapter, "scale", lambda *args: 1.05 * scale(*args))
    merge(made, made / "wrong")
    found = verify(made, "wrong")
    assert found.verdict == "fail"
    assert len(found.reasons) == 1 and "from those of transformers with PEFT" in found.reasons[0]


def test_a_tensor_that_peft_leaves_out_is_named(made: Path, work: Path) -> None:
    """PEFT adapts the modules that its configuration names, and says nothing of the others."""
    config = shutil.copytree(made / "adapter", work / "partial") / adapters.CONFIG
    config.write_text(config.read_text().replace('"v_proj"', '"o_proj"'))
    words = r"PEFT does not load this adapter whole(.|\n)*v_proj.lora_A.*: no module of the model"
    with pytest.raises(SourceError, match=words):
        verify(made, "merged", "partial")


def test_the_stored_values_are_compared_without_peft(made: Path) -> None:
    args = ("verify", made / "base", made / "merged", "--level", "bytes")
    good(*args, "--adapter", made / "adapter")
    key = "model.layers.1.mlp.down_proj.lora_B.weight"
    tensors = load_file(made / "adapter" / adapters.WEIGHTS)
    tensors[adapters.PREFIX + key] = np.zeros_like(tensors[adapters.PREFIX + key])
    other = adapters.write(made / "other", tensors, r=5, lora_alpha=9)
    found = mckpt.verify(made / "base", made / "merged", level="bytes", adapter=other)
    assert found.verdict == "fail"
    assert [r.partition(":")[0] for r in found.reasons] == ["layers.1.mlp.down.weight"]
