"""Adapters with magnitudes (DoRA) are merged right: each row of the sums gets the length that its
magnitude states. The expected values are computed with numpy from the names in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.errors import UsageError
from tests.helpers import lora
from tests.helpers.commands import good, refused
from tests.helpers.tiny import FIXTURES
from tests.unit.test_adapters import ROUNDED_ONCE, made

QWEN3 = FIXTURES / "tiny-qwen3"
EMBEDDING = "model.embed_tokens"


def adapter_of(base: Path, out: Path, modules: list[str], **config: Any) -> dict[str, np.ndarray]:
    """Writes an adapter of these modules, and returns its tensors."""
    weights = lora.tensors(base)
    turned = {key: array.T if ".c_" in key else array for key, array in weights.items()}
    stored = lora.with_magnitudes(lora.factors(turned, modules), modules)
    lora.save(out, stored, use_dora=True, **config)
    return stored


def expect_merged(base: Path, got: Path, stored: Any, modules: list[str]) -> None:
    """Fails unless a merged directory has the formula's values, rounded once."""
    weights, merged = lora.tensors(base), lora.tensors(got)
    assert merged.keys() == weights.keys()
    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        if module not in modules:
            assert np.array_equal(merged[key], weight), key
            continue
        found = merged[key].T if ".c_" in module else merged[key]  # GPT-2 stores [in, out]
        sums = (weight.T if ".c_" in module else weight) + lora.product(stored, module, 2.0)
        want = lora.scaled(stored, module, sums)
        assert lora.apart(found, np.zeros_like(found), want) <= ROUNDED_ONCE, key
        assert (abs(want - sums) > 0.01 * abs(sums)).mean() > 0.9, key


@pytest.mark.parametrize("case", ["qwen3_5", "gpt2", "phi3"])
def test_every_matrix_of_a_family(case: str, tmp_path: Path) -> None:
    base = made(case, tmp_path / "base")
    modules = lora.matrices(lora.tensors(base), ("norm", "embed", "wte", "wpe", "lm_head"))
    stored = adapter_of(base, tmp_path / "adapter", modules)
    good("adapter", "merge", base, tmp_path / "adapter", tmp_path / "merged")
    expect_merged(base, tmp_path / "merged", stored, modules)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_embedding_has_a_magnitude_for_each_column(replaced: bool, tmp_path: Path) -> None:
    """PEFT stores the weight of an adapted embedding too, which may be another one."""
    weights, drawn = lora.tensors(QWEN3), np.random.RandomState(3)
    weight = weights[f"{EMBEDDING}.weight"]
    a, b = (drawn.randn(*shape).astype("f4") for shape in ((4, weight.shape[0]), (32, 4)))
    magnitudes = 1 + drawn.rand(32).astype("f4")
    own = weight[::-1].copy() if replaced else weight
    stored = {
        f"{EMBEDDING}.lora_embedding_A": a,
        f"{EMBEDDING}.lora_embedding_B": b,
        f"{EMBEDDING}.lora_magnitude_vector": magnitudes,
        f"{EMBEDDING}.base_layer.weight": own,
    }
    adapter = lora.save(tmp_path / "adapter", stored, use_dora=True)
    good("hf-to-megatron", QWEN3, tmp_path / "base", "--tp", 2, "--format", "torch")
    sums = own + 2.0 * (b.astype("f8") @ a.astype("f8")).T
    want = sums * (magnitudes / np.sqrt((sums**2).sum(0)))
    for base in (QWEN3, tmp_path / "base"):
        out = tmp_path / "merged"
        good("adapter", "merge", base, adapter, out, "--format", "hf", "--overwrite")
        merged = lora.tensors(out)[f"{EMBEDDING}.weight"]
        assert lora.apart(merged, np.zeros_like(merged), want) <= ROUNDED_ONCE


def test_rows_in_python(tmp_path: Path) -> None:
    up = "model.layers.1.mlp.up_proj"
    stored = adapter_of(QWEN3, tmp_path / "adapter", [up])
    merged = mckpt.open(QWEN3, adapter=tmp_path / "adapter")
    sums = lora.tensors(QWEN3)[f"{up}.weight"] + lora.product(stored, up, 2.0)
    got = np.asarray(merged["layers.1.mlp.up.weight"][3:9, 7:20].numpy())
    want = lora.scaled(stored, up, sums)[3:9, 7:20]
    assert lora.apart(got, np.zeros_like(got), want) <= ROUNDED_ONCE


def test_a_row_of_zeros_has_no_length(tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    weights = lora.tensors(QWEN3)
    weights[f"{up}.weight"][13] = 0
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((QWEN3 / "config.json").read_bytes())
    lora.save_file(weights, base / "model.safetensors")
    stored = adapter_of(QWEN3, tmp_path / "adapter", [up])
    stored[f"{lora.PREFIX}{up}.lora_B.weight"][13] = 0
    adapter = lora.save(tmp_path / "adapter", stored, use_dora=True)
    args = ("adapter", "merge", base, adapter, tmp_path / "merged")
    words = ("layers.0.mlp.up.weight: ", "row 13 of the weight")
    refused(2, *words, args=args)
    assert not list((tmp_path / "merged").glob("*.safetensors"))
    merged = mckpt.open(base, adapter=adapter)
    with pytest.raises(UsageError, match="row 13 of the weight"):
        merged["layers.0.mlp.up.weight"].numpy()
