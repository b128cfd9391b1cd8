"""Each edit of each kind of model: it is refused by name, or transformers loads all of the result
(tests/judge/test_edit_matrix.py has its elements).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.errors import UsageError
from tests.helpers import made_models, tiny
from tests.helpers.tiny import TinyModel

# dense, tied, experts, latent attention and multi-token prediction, a hybrid, gated delta nets
CASES = ("llama", "qwen3-tied", "qwen3-moe", "deepseek-v3", "nemotron_h", "qwen3_next")
# name -> the recipe, and whether the logits stay the same
EDITS = {
    "drop": ("- layers: {drop: 1}", False),
    "order": ("- layers: {order: [0, 2, 1, 2, 3]}", False),
    "silent": ("- layers: {silent_after: [1, 3]}", True),
    "untie": ("- untie", True),
    "repeat": ("- kv_heads: {times: 2}", True),
    "rows": ("- vocab: {size: 700, init: normal}", False),
    "mtp": ("- mtp: {add: 1}", True),
}
# (edit, case) -> the words of the refusal
REFUSED = {
    **{("untie", case): "has an output layer of its own" for case in CASES if "tied" not in case},
    ("repeat", "deepseek-v3"): "an attention without such heads in each layer",
    ("repeat", "qwen3_next"): "an attention without such heads in each layer",
    ("mtp", "nemotron_h"): "the last layer of the model is `attn`",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_kind_of_model(
    edit: str, case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, (text, exact) = tiny_model(case, "float32"), EDITS[edit]
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(text)
    if (edit, case) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[edit, case]):
            mckpt.edit(source, out, recipe)
        assert not out.exists()
        return
    mckpt.edit(source, out, recipe)
    tokens = made_models.tokens(case)
    logits = tiny.hf_logits(out, tokens)
    assert np.isfinite(logits).all()
    if exact:
        wanted = tiny.hf_logits(source, tokens)
        apart = np.abs(logits[..., : wanted.shape[-1]] - wanted).max()
        assert apart < 2e-5 * np.abs(wanted).max()
