"""Models as transformers 5 has them in memory, where the experts of a layer are one tensor: what
save_original_format=False and a dump of state_dict() store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt import mapping
from tests.helpers import tiny
from tests.helpers.tiny import TinyModel

pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),  # of what torch and transformers import
]

CASES = (
    *("mixtral", "qwen3-moe"),
    *("deepseek_v2", "glm4v_moe", "granitemoehybrid", "hunyuan_v1_moe", "hy_v3", "internvl_moe"),
    *("kimi_k25", "nemotron_h_latent", "qwen2_moe", "qwen3_next", "flint", "aria_text"),
)
# whose tensors other than those of the text model have other names in memory too
RENAMED = ("internvl_moe", "kimi_k25")


@pytest.mark.parametrize("case", CASES)
def test_experts_in_one_tensor_are_read(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers writes the file, and reads it without a missing tensor; mckpt finds the values
    of the published file in it.
    """
    source, stacked = tiny_model(case, "float32"), tmp_path / "stacked"
    kind = tiny.class_of(json.loads((source / "config.json").read_text()))
    kind.from_pretrained(source).save_pretrained(stacked, save_original_format=False)
    _, info = kind.from_pretrained(stacked, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    # transformers writes the defaults of its class beside the keys of the model
    shutil.copy(source / "config.json", stacked / "config.json")
    assert any(
        key.endswith("experts.down_proj") for key in load_file(stacked / "model.safetensors")
    )
    found = mckpt.diff(source, stacked)
    apart = [name for name in (*found.missing, *found.extra) if not name.startswith("carried.")]
    assert not found.changed and not apart
    assert bool(found) == (case in RENAMED)


def test_a_model_with_experts_in_one_tensor_is_converted(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """It comes back under the names of the published files."""
    source, stacked = tiny_model("qwen2_moe", "float32"), tmp_path / "stacked"
    kind = tiny.class_of(json.loads((source / "config.json").read_text()))
    kind.from_pretrained(source).save_pretrained(stacked, save_original_format=False)
    shutil.copy(source / "config.json", stacked / "config.json")
    mckpt.convert(stacked, tmp_path / "ckpt", tp=2, ep=2)
    mckpt.convert(tmp_path / "ckpt", tmp_path / "back", format="hf")
    wanted, found = (load_file(d / "model.safetensors") for d in (source, tmp_path / "back"))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_every_family_with_experts_reads_them_in_one_tensor() -> None:
    keys = [f"model.layers.0.mlp.experts.{end}" for end in ("gate_up_proj", "down_proj")]
    families = [mapping.load("hf", name) for name in mapping.names("hf")]
    apart = [f for f in families if any("{expert}" in rule.key for rule in f.rules)]
    assert len(apart) > 12
    for family in apart:
        read = mapping.with_stacked_experts(family, keys)
        left = [rule.key for rule in read.rules if "{expert}" in rule.key and not rule.mtp]
        both = any(rule.key.endswith("experts.down_proj") for rule in family.rules)
        assert not left or both, (family.name, left)  # Qwen3.5 is published in both ways
