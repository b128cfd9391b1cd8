"""The judge itself: the real Megatron-Core saves and loads its own checkpoints, without code of the
converter, at the sizes, layer specs and formats that the judges of conversions do not use.
tests/judge/test_megatron.py compares its logits with those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.judged_models import DENSE, HEADS, LLAMA3, MOE, QWEN3, TE, TOKENS
from tests.helpers.judging import explain, judge

pytestmark = [pytest.mark.judge, pytest.mark.newest]

LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "group_query_attention": False,
    "num_query_groups": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
LLAMA, EXPERTS, LATENTS = DENSE | LLAMA3, MOE | QWEN3, MOE | LATENT
BOTH = {"tp": 2, "pp": 2}
ALL = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
LOCAL, ENGINE = {"impl": "local"}, {"impl": "transformer_engine"}
SEQUENCE = {"args": {"sequence_parallel": True}, "training": True}
# what is saved: name -> args of the model, format, sizes and other entries of a case
SAVED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dense": (LLAMA, "torch_dist", {}),
    "dense-cut": (LLAMA, "torch_dist", BOTH),
    "dense-torch": (LLAMA, "torch", BOTH),
    "dense-stages": (LLAMA, "torch", BOTH | {"vpp": 2}),
    "dense-engine": (LLAMA | TE, "torch_dist", BOTH),
    "dense-engine-torch": (LLAMA | TE, "torch", BOTH),
    "experts": (EXPERTS, "torch_dist", {}),
    "experts-torch": (EXPERTS, "torch", ALL),
    "experts-engine": (EXPERTS | TE, "torch_dist", ALL),
    "experts-engine-torch": (EXPERTS | TE, "torch", ALL),
    # one layer spec cuts the down projections, the other keeps them whole
    "latent": (LATENTS, "torch", ALL),
    "mla": (LATENTS | {"transformer_impl": "transformer_engine"}, "torch", ALL),
}
# what is loaded, with the logits of the first word of its name: the saved one, and the case
SAME: list[tuple[str, dict[str, Any]]] = [
    ("dense-cut", {"pp": 4}),
    ("dense-cut", BOTH | {"vpp": 2}),
    ("dense-cut", {"pp": 2, "args": {"decoder_first_pipeline_num_layers": 1}}),
    ("dense-cut", {"pp": 2, "vpp": 2, "args": {"pipeline_model_parallel_layout": "Et|t|tt|L"}}),
    (
        "dense-cut",
        {
            "pp": 3,
            "args": {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        },
    ),
    ("dense-torch", BOTH),
    ("dense-stages", BOTH | {"vpp": 2}),
    ("dense-engine", {"tp": 4}),
    ("dense-engine", BOTH | SEQUENCE),
    ("dense-engine", {"tp": 2} | LOCAL),
    ("dense-engine-torch", BOTH),
    ("dense", ENGINE),
    ("experts", {"tp": 4, "ep": 2, "etp": 1}),
    ("experts", {"tp": 2, "args": TE}),
    ("experts-torch", ALL | {"args": TE}),
    ("experts-engine", {"ep": 4, "etp": 1}),
    ("experts-engine", {"tp": 2, "ep": 2}),
    ("experts-engine", LOCAL),
    ("experts-engine", ALL | SEQUENCE),
    ("experts-engine-torch", ALL),
    ("experts-engine-torch", ALL | LOCAL),
    ("latent", ALL | ENGINE),
    ("mla", ALL | LOCAL),
]
# those with the layer spec of the other implementation, whose layers have other _extra_state
CROSSED = {
    f"{saved}-{i}"
    for i, (saved, case) in enumerate(SAME)
    if "impl" in case or case.get("args") == TE
}
# another model, so other logits or an error
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("dense-cut", {"args": {"use_rope_scaling": False}}),
    "untied": ("dense-cut", {"tp": 2, "args": {"untie_embeddings_and_output_weights": True}}),
    "grid": ("dense-torch", {"tp": 4}),
    "tied": ("experts", {"tp": 2, "args": {"untie_embeddings_and_output_weights": False}}),
    "bare": ("bare", {"pp": 2, "args": DENSE}),
    "nothing": ("bare", {"pp": 2}),
}


def test_derived_sizes_of_another_run_are_not_used() -> None:
    """megatron-core 0.19 stores the product of tp and gtp_weight_remat_size in the args. The model
    is then built at other sizes.
    """
    from mckpt.trainer import build

    names = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
    config = build.transformer_config(build.at_sizes(DENSE | dict.fromkeys(names, 2), tp=1))
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        assert getattr(config, name, 1) == 1


@pytest.fixture(scope="module")
def results(work: Path) -> dict[str, dict[str, Any]]:
    """Results of one launch of 4 ranks, with the stand-in of tests/helpers/fake_te."""

    def save(name: str, args: Any, form: str, **others: Any) -> dict[str, Any]:
        place = {"destination": str(work / name), "tokens": TOKENS, "args": args, "format": form}
        return {"name": name, "kind": "save"} | place | others

    def load(name: str, saved: str, case: dict[str, Any]) -> dict[str, Any]:
        place = {"checkpoint": str(work / saved), "tokens": TOKENS}
        return {"name": name, "kind": "forward"} | place | case

    half = DENSE | {"params_dtype": "torch.bfloat16"}
    cases = [save(name, args, form, **more) for name, (args, form, more) in SAVED.items()]
    cases += [
        save("bare", half, "torch_dist", with_args=False, iteration=None, tp=2),
        save("plain", DENSE, "torch"),
    ]
    cases += [load(f"{saved}-{i}", saved, case) for i, (saved, case) in enumerate(SAME)]
    cases += [load(f"other-{name}", *one) for name, one in OTHER.items()]
    return judge(cases, work / "results", te=True)


@pytest.mark.parametrize("family", ["dense", "experts", "latent", "mla"])
def test_the_logits_are_the_same_at_every_size_and_layer_spec(
    results: dict[str, dict[str, Any]], family: str
) -> None:
    mine = {name: one for name, one in results.items() if name.partition("-")[0] == family}
    assert len(mine) == {"dense": 18, "experts": 13}.get(family, 2)
    reference = results[family]
    assert reference["ok"] and reference["logits"].std() > 1
    atol = 1e-5 * np.abs(reference["logits"]).max()
    for name, one in mine.items():
        assert not explain(one)
        np.testing.assert_allclose(
            one["logits"], reference["logits"], rtol=0, atol=atol, err_msg=name
        )
        assert one.get("unread", []) == []
        assert name in CROSSED or not one.get("forgiven")
    if family == "dense":
        forgiven = results["dense-11"]["forgiven"]
        assert "missing decoder.final_layernorm._extra_state" in forgiven


def test_checkpoints_of_other_models_are_noticed(results: dict[str, dict[str, Any]]) -> None:
    rope = results["other-rope"]["logits"] - results["dense"]["logits"]
    assert np.abs(rope).max() > 0.01, "the tokens do not tell scaled from plain rope"
    assert "output_layer.weight" in explain(results["other-untied"])
    assert "mp_rank_0" in explain(results["other-grid"])
    assert "num_layers is absent" in explain(results["other-nothing"])
    assert results["other-tied"]["unread"] == ["output_layer.weight"]


def test_a_checkpoint_without_args_and_in_bf16_is_judged(
    results: dict[str, dict[str, Any]],
) -> None:
    saved, loaded = results["bare"], results["other-bare"]
    assert not explain(saved) + explain(loaded)
    np.testing.assert_allclose(loaded["logits"], saved["logits"], atol=1e-4, rtol=0)
    assert Path(saved["unit"]).name == "release"
    assert 0.001 < np.abs(saved["logits"] - results["plain"]["logits"]).max() < 1
