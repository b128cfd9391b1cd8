"""The judge itself: the real Megatron-Core saves, reshards and runs every family of FAMILIES, and
its logits are those of transformers at every parallel size.

No code of the converter takes part, so that the judge is known to be right before it judges
anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.judged_models import (
    DENSE,
    EXPERTS,
    FAMILIES,
    GROUPS,
    HEADS,
    HIDDEN,
    LATENT,
    LAYERS,
    LLAMA3,
    MOE,
    MOE_FFN,
    TE,
    TOKENS,
    VOCAB,
    transformers_logits,
)
from tests.helpers.judging import explain, judge

pytestmark = [pytest.mark.judge, pytest.mark.newest]


def test_derived_sizes_of_another_run_are_not_used() -> None:
    """megatron-core 0.19 stores the product of tp and gtp_weight_remat_size in the args. The model
    is then built at other sizes.
    """
    from mckpt.trainer import build

    stored = DENSE | {
        "tensor_parallel_num_weight_shards": 2,
        "expert_tensor_parallel_num_weight_shards": 2,
    }
    config = build.transformer_config(build.at_sizes(stored, tp=1))
    assert (
        getattr(config, "gtp_weight_remat_size", 1)
        == getattr(config, "expert_gtp_weight_remat_size", 1)
        == 1
    )


def loads(
    directory: Path, tag: str, sizes: list[dict[str, int]], **others: Any
) -> list[dict[str, Any]]:
    """Returns forward cases on one checkpoint, named TAG-tp2pp2."""
    case = {"kind": "forward", "checkpoint": str(directory), "tokens": TOKENS} | others
    return [
        {"name": f"{tag}-" + "".join(f"{key}{value}" for key, value in size.items())} | case | size
        for size in sizes
    ]


def saves(
    directory: Path, tag: str, args: dict[str, Any], form: str, **others: Any
) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{tag}-save",
            "kind": "save",
            "args": args,
            "format": form,
            "destination": str(directory),
            "tokens": TOKENS,
        }
        | others
    ]


@pytest.fixture(scope="module")
def results(work: Path) -> dict[str, dict[str, Any]]:
    """Results of one launch of 4 ranks: every family is saved at tp2 pp2 in both formats, and
    loaded at other sizes.
    """
    cases: list[dict[str, Any]] = []
    for family, args in FAMILIES.items():
        size = {"tp": 2, "pp": 2} | ({"ep": 2, "etp": 1} if args["num_experts"] else {})
        others = [{}, {"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2, "vpp": 2}]
        if args["num_experts"]:
            others += [{"ep": 4, "etp": 1}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2, "etp": 1}]
        elif family not in ("llama", "llama3"):
            others = others[:2]
        cases += saves(
            work / f"{family}-torch_dist", f"{family}-torch_dist", args, "torch_dist", **size
        )
        cases += loads(work / f"{family}-torch_dist", f"{family}-torch_dist", others)
        cases += saves(work / f"{family}-torch", f"{family}-torch", args, "torch", **size)
        cases += loads(work / f"{family}-torch", f"{family}-torch", [size])
        cases += saves(work / f"{family}-whole", f"{family}-whole", args, "torch")
    # uneven pipelines, and virtual stages in the format `torch`
    cases += loads(
        work / "llama3-torch_dist",
        "llama3-first",
        [{"pp": 2}],
        args={"decoder_first_pipeline_num_layers": 1},
    )
    cases += loads(
        work / "llama3-torch_dist",
        "llama3-layout",
        [{"pp": 2, "vpp": 2}],
        args={"pipeline_model_parallel_layout": "Et|t|tt|L"},
    )
    split = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    cases += loads(work / "llama3-torch_dist", "llama3-account", [{"pp": 3}], args=split)
    cases += saves(work / "llama3-vpp", "llama3-vpp", DENSE | LLAMA3, "torch", pp=2, vpp=2, tp=2)
    cases += loads(work / "llama3-vpp", "llama3-vpp", [{"tp": 2, "pp": 2, "vpp": 2}])
    # another model, so other logits or an error
    cases += loads(
        work / "llama3-torch_dist", "other-rope", [{"tp": 2}], args={"use_rope_scaling": False}
    )
    cases += loads(
        work / "llama3-torch_dist",
        "other-untied",
        [{"tp": 2}],
        args={"untie_embeddings_and_output_weights": True},
    )
    cases += loads(work / "llama3-torch", "other-grid", [{"tp": 4}])
    cases += loads(
        work / "mistral-torch_dist",
        "other-tied",
        [{"tp": 2}],
        args={"untie_embeddings_and_output_weights": False},
    )
    # a checkpoint without args and of another dtype
    cases += saves(
        work / "bare",
        "bare",
        DENSE | {"params_dtype": "torch.bfloat16"},
        "torch_dist",
        with_args=False,
        iteration=None,
        tp=2,
    )
    cases += loads(work / "bare", "bare", [{"pp": 2}], args=DENSE)
    cases += loads(work / "bare", "nothing", [{"pp": 2}])
    return judge(cases, 4, work / "results")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_the_same_at_every_parallel_size(
    results: dict[str, dict[str, Any]], family: str
) -> None:
    same_logits(results, family, results[f"{family}-whole-save"]["logits"])


def same_logits(results: dict[str, dict[str, Any]], family: str, reference: np.ndarray) -> None:
    mine = {name: result for name, result in results.items() if name.startswith(family + "-")}
    assert not [explain(result) for result in mine.values() if not result["ok"]]
    assert reference.shape == (2, 61, VOCAB)
    assert reference.std() > 1
    for name, result in mine.items():
        np.testing.assert_allclose(
            result["logits"], reference, atol=1e-5 * np.abs(reference).max(), rtol=0, err_msg=name
        )
        assert result.get("unread", []) == result.get("forgiven", []) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_transformers(
    results: dict[str, dict[str, Any]], work: Path, family: str
) -> None:
    import torch

    model = torch.load(
        work / f"{family}-whole" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt",
        weights_only=False,
    )["model"]
    expected = transformers_logits(family, model)
    np.testing.assert_allclose(
        results[f"{family}-whole-save"]["logits"], expected, atol=1e-4, rtol=0
    )


def test_the_judge_sees_the_rope_scaling(results: dict[str, dict[str, Any]]) -> None:
    difference = np.abs(
        results["other-rope-tp2"]["logits"] - results["llama3-whole-save"]["logits"]
    ).max()
    assert difference > 0.01, "61 positions do not tell scaled from plain rope"


def test_a_checkpoint_of_another_model_is_refused(results: dict[str, dict[str, Any]]) -> None:
    assert "output_layer.weight" in explain(results["other-untied-tp2"])
    assert "mp_rank_0" in explain(results["other-grid-tp4"])
    assert "num_layers is absent" in explain(results["nothing-pp2"])


def test_keys_that_the_model_does_not_read_are_listed(results: dict[str, dict[str, Any]]) -> None:
    assert results["other-tied-tp2"]["unread"] == ["output_layer.weight"]


def test_a_checkpoint_without_args_and_in_bf16_is_judged(
    results: dict[str, dict[str, Any]],
) -> None:
    saved, loaded = results["bare-save"], results["bare-pp2"]
    assert not explain(saved) + explain(loaded)
    np.testing.assert_allclose(loaded["logits"], saved["logits"], atol=1e-4, rtol=0)
    assert Path(saved["unit"]).name == "release"
    assert 0.001 < np.abs(saved["logits"] - results["llama-whole-save"]["logits"]).max() < 1


@pytest.fixture(scope="module")
def te_results(work: Path, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results of a launch with the layer specs of Transformer Engine on the stand-in of
    tests/helpers/fake_te. It has cases of keys and grids too, and some that fail on purpose.
    """
    cases: list[dict[str, Any]] = []
    for family in ("llama3", "qwen3_moe"):
        args = FAMILIES[family] | TE
        moe = {"ep": 2, "etp": 1} if args["num_experts"] else {}
        for form in ("torch_dist", "torch"):
            others = [
                {},
                {"tp": 4},
                {"tp": 2, "pp": 2, "vpp": 2},
                *([{"ep": 4, "etp": 1}, {"tp": 2, "ep": 2}] if moe else []),
            ]
            cases += saves(
                work / f"te-{family}-{form}", f"{family}-te-{form}", args, form, tp=2, pp=2, **moe
            )
            cases += loads(
                work / f"te-{family}-{form}",
                f"{family}-te-{form}",
                others if form == "torch_dist" else [{"tp": 2, "pp": 2} | moe],
            )
        sequence = {"args": {"sequence_parallel": True}, "training": True}
        cases += loads(
            work / f"te-{family}-torch_dist",
            f"{family}-te-sequence",
            [{"tp": 2, "pp": 2} | moe],
            **sequence,
        )
        for impl in (TE, {}):
            name = f"keys-{family}-{'te' if impl else 'local'}"
            cases.append(
                {
                    "name": name,
                    "kind": "keys",
                    "args": FAMILIES[family] | impl,
                    "tp": 2,
                    "pp": 2,
                    "vpp": 2,
                }
                | moe
            )
    cases += loads(work / "te-llama3-torch_dist", "llama3-local", [{"tp": 2}], impl="local")
    cases += loads(work / "llama3-torch_dist", "from-local", [{}], impl="transformer_engine")
    cases += loads(work / "te-qwen3_moe-torch_dist", "to-local", [{}], impl="local")
    cases += loads(
        work / "te-qwen3_moe-torch",
        "to-local-torch",
        [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}],
        impl="local",
    )
    cases += loads(
        work / "qwen3_moe-torch",
        "from-local-torch",
        [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}],
        args=TE,
    )
    cases += loads(work / "qwen3_moe-torch_dist", "from-local-moe", [{"tp": 2}], args=TE)
    # one layer spec cuts the down projections, the other keeps them whole
    for of, other in (("local", "transformer_engine"), ("transformer_engine", "local")):
        directory = work / f"latent-{of}"
        cases += saves(
            directory,
            f"latent-{of}",
            MOE | LATENT | {"transformer_impl": of},
            "torch",
            tp=2,
            pp=2,
            ep=2,
            etp=1,
        )
        cases += loads(
            directory, f"latent-{of}-other", [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}], impl=other
        )
    cases.append({"name": "grid-wide-tp", "kind": "grid", "tp": 4, "pp": 2, "ep": 2, "etp": 1})
    cases.append({"name": "grid-wide-ep", "kind": "grid", "tp": 2, "ep": 4, "etp": 1})
    cases.append({"name": "grid-cp", "kind": "grid", "tp": 2, "cp": 2, "pp": 2})
    # one rank fails while the other waits for it, then one dies; neither may affect the later cases
    (work / "llama-torch" / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    cases += loads(work / "llama-torch", "fault", [{"tp": 2, "pp": 2}], timeout=8)
    cases += loads(work / "te-llama3-torch_dist", "after-fault", [{"tp": 2, "pp": 2}])
    cases.append({"name": "death", "kind": "death", "tp": 2})
    cases += loads(work / "te-llama3-torch_dist", "after-death", [{"tp": 2, "pp": 2}])
    return judge(cases, 4, work / "te-results", fake_te=True)


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_transformer_engine_specs_give_the_logits_of_the_local_ones(
    results: dict[str, dict[str, Any]], te_results: dict[str, dict[str, Any]], family: str
) -> None:
    same_logits(te_results, family, results[f"{family}-whole-save"]["logits"])


def test_each_layer_spec_reads_checkpoints_of_the_other(
    results: dict[str, dict[str, Any]], te_results: dict[str, dict[str, Any]]
) -> None:
    loaded = {
        name: result
        for name, result in te_results.items()
        if name.startswith(("from-local-", "to-local-"))
    }
    assert len(loaded) == 5
    for name, result in loaded.items():
        assert not explain(result)
        reference = results[
            "llama3-whole-save" if name == "from-local-" else "qwen3_moe-whole-save"
        ]["logits"]
        np.testing.assert_allclose(
            result["logits"], reference, atol=1e-5 * np.abs(reference).max(), rtol=0, err_msg=name
        )
    assert "missing decoder.final_layernorm._extra_state" in te_results["from-local-"]["forgiven"]


@pytest.mark.parametrize("of", ["local", "transformer_engine"])
def test_each_layer_spec_reads_tensors_that_the_other_cuts(
    te_results: dict[str, dict[str, Any]], of: str
) -> None:
    saved, loaded = te_results[f"latent-{of}-save"], te_results[f"latent-{of}-other-tp2pp2ep2etp1"]
    assert not explain(saved) + explain(loaded)
    np.testing.assert_allclose(
        loaded["logits"], saved["logits"], atol=1e-5 * np.abs(saved["logits"]).max(), rtol=0
    )


def test_keys_and_shapes_of_stored_tensors(te_results: dict[str, dict[str, Any]]) -> None:
    for name in ("llama3-te", "llama3-local", "qwen3_moe-te", "qwen3_moe-local"):
        assert not explain(te_results[f"keys-{name}"])
    stored = te_results["keys-qwen3_moe-te"]["torch_dist"]
    assert stored["decoder.layers.self_attention.linear_qkv.weight"] == [
        [LAYERS, (HEADS + 2 * GROUPS) * 10, HIDDEN],
        "float32",
    ]
    assert stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == [
        [LAYERS, EXPERTS, 2 * MOE_FFN, HIDDEN],
        "float32",
    ]
    assert stored["decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_3.11_4.12"] == [
        [],
        "object",
    ]
    files = te_results["keys-qwen3_moe-te"]["torch"]
    assert sorted(files) == [
        "mp_rank_00_000_000",
        "mp_rank_00_001_000",
        "mp_rank_01_000_001",
        "mp_rank_01_001_001",
    ]
    assert files["mp_rank_00_000_000"][1]["decoder.layers.0.mlp.experts.linear_fc1.weight5"] == [
        2 * MOE_FFN,
        HIDDEN,
    ]
    assert "embedding.word_embeddings.weight" in files["mp_rank_00_000_000"][0]
    # the last stage has a copy of the tied weight
    assert "output_layer.weight" in te_results["keys-llama3-local"]["torch"]["mp_rank_01_001"][1]
    assert "output_layer.weight" not in te_results["keys-llama3-local"]["torch_dist"]


def test_files_of_each_grid_of_ranks(te_results: dict[str, dict[str, Any]]) -> None:
    assert sorted(te_results["grid-wide-tp"]["files"]) == [
        "mp_rank_00_000_000",
        "mp_rank_00_001_000",
        "mp_rank_01_000_001",
        "mp_rank_01_001_001",
        "mp_rank_02_000_000",
        "mp_rank_02_001_000",
        "mp_rank_03_000_001",
        "mp_rank_03_001_001",
    ]
    assert sorted(te_results["grid-wide-ep"]["files"]) == [
        "mp_rank_00_000",
        "mp_rank_00_002",
        "mp_rank_01_001",
        "mp_rank_01_003",
    ]
    assert sorted(te_results["grid-cp"]["files"]) == [
        "mp_rank_00_000",
        "mp_rank_00_001",
        "mp_rank_01_000",
        "mp_rank_01_001",
    ]


def test_a_failed_case_harms_no_other(
    results: dict[str, dict[str, Any]], te_results: dict[str, dict[str, Any]]
) -> None:
    assert "mp_rank_01_001" in explain(te_results["fault-tp2pp2"])
    assert not te_results["death"]["ok"]
    for name in ("after-fault-tp2pp2", "after-death-tp2pp2"):
        assert not explain(te_results[name])
        np.testing.assert_allclose(
            te_results[name]["logits"], results["llama3-whole-save"]["logits"], atol=1e-4, rtol=0
        )
