"""run_config.yaml of Megatron-Bridge: the dims in it, and the file that mckpt writes.

tests/judge/test_bridge.py lets Megatron-Bridge itself load what mckpt writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import mckpt
from mckpt import mapping
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.formats.megatron import run_config
from mckpt.formats.megatron.run_config import RUN_CONFIG, TRAIN_STATE
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import MappingFile
from tests.helpers import bridge_facts, made_models
from tests.helpers.commands import Pt
from tests.helpers.tiny import TinyModel

ROOT = Path(__file__).resolve().parents[2] / "fixtures"

PLAIN = """
model:
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 8
  num_query_groups: 4
  kv_channels: 16
  vocab_size: 200
  seq_length: 512
  share_embeddings_and_output_weights: false
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _partial_: true}
  add_bias_linear: false
  normalization: RMSNorm
  rotary_base: 10000
  rope_scaling: false
  rope_scaling_factor: 8.0
"""
LATENT = """
  multi_latent_attention: true
  q_lora_rank: 24
  kv_lora_rank: 32
  qk_head_dim: 16
  qk_pos_emb_head_dim: 8
  v_head_dim: 16
  rope_type: yarn
  rotary_scaling_factor: 40
  original_max_position_embeddings: 4096
  beta_fast: 32
  beta_slow: 1
  mscale: 1.0
  mscale_all_dim: 1.0
"""
YARN = """
  position_embedding_type: yarn
  yarn_rotary_scaling_factor: 32.0
  yarn_original_max_position_embeddings: 4096
  yarn_beta_fast: 32.0
  yarn_beta_slow: 1.0
"""


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("  position_embedding_type: rope\n", ("default", 1.0)),
        (LATENT, ("yarn", 40.0)),
        (LATENT.replace("rope_type: yarn", "rope_type: rope"), ("mscale", 40.0)),
        (YARN, ("yarn", 32.0)),
    ],
)
def test_the_rotary_scaling_is_read(more: str, wanted: tuple[str, float], tmp_path: Path) -> None:
    """Megatron-Bridge states it apart from `rope_scaling`, which is that of Llama 3 alone."""
    path = tmp_path / "run_config.yaml"
    path.write_text(PLAIN + more.strip("\n") + "\n")
    dims = dims_of(path, "gpt", {}, {})
    assert (dims["rope_type"], dims["rope_factor"]) == wanted


def test_the_rotary_scaling_of_llama_3_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run_config.yaml"
    path.write_text(PLAIN.replace("rope_scaling: false", "rope_scaling: true"))
    dims = dims_of(path, "gpt", {}, {})
    assert (dims["rope_type"], dims["rope_factor"]) == ("llama3", 8.0)


def test_the_run_config_of_gpt_oss_is_read() -> None:
    """Megatron-Bridge 0.6.2 wrote the file for a small GPT-OSS. It takes the numbers of yarn and
    of the clamp from no config.
    """
    dims = dims_of(ROOT / "run_config" / "gpt-oss.yaml", "gpt", {}, {})
    assert (dims["activation"], dims["gated"], dims["glu_clamp"]) == ("quick_gelu", True, 7.0)
    assert (dims["rope_type"], dims["rope_factor"], dims["rope_mscale"]) == ("yarn", 32.0, 1.0)
    assert (dims["attn_sinks"], dims["sliding_window"]) == (True, 17)
    assert list(dims["window_layers"]) == [1, 0, 1, 0]


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / RUN_CONFIG
    path.write_text(PLAIN.replace("torch.nn.functional.silu", "torch.tanh"))
    with pytest.raises(MappingError, match=r"activation_func._target_ is 'torch.tanh'"):
        dims_of(path, "gpt", {}, {})


@pytest.mark.parametrize("value", ["2001-99-99", "!!float abc", "9" * 6000, "[" * 2000])
def test_values_that_no_yaml_has_are_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / RUN_CONFIG
    path.write_text(PLAIN.replace("num_layers: 4", f"num_layers: {value}"))
    with pytest.raises(SourceError, match="not valid YAML"):
        dims_of(path, "gpt", {}, {})


def test_a_shorter_sequence_than_the_models_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / RUN_CONFIG
    path.write_text(PLAIN)
    assert dims_of(path, "gpt", {"max_positions": 4096}, {})["max_positions"] == 4096
    with pytest.raises(MappingError, match="hidden_size is 64 by hidden_size, but 65"):
        dims_of(path, "gpt", {"hidden_size": 65}, {})


# what differs in the file of the same model with experts, which stand in a latent
WITH_EXPERTS = {
    "hybrid_layer_pattern": "MEM*EME-",
    "num_layers": 8,
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 44,
    "moe_latent_size": 36,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 92,
}


@pytest.mark.parametrize(
    ("case", "more"), [("nemotron_h", {}), ("nemotron_h_latent", WITH_EXPERTS)]
)
def test_the_run_config_of_nemotron_h_is_read(
    case: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Megatron-Bridge 0.6.2 wrote the file for fixtures/families/nemotron_h.json. It has 8 experts,
    although the pattern has none.
    """
    dims = dims_of(edited(more, tmp_path), "hybrid", {}, {})
    config = json.loads((ROOT / "families" / f"{case}.json").read_text())
    assert not apart(mapping.load("hf", "nemotron_h").read(config), dims)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"multi_latent_attention": True}, "has no fields for multi-latent attention"),
        ({"hybrid_layer_pattern": "M-|M-"}, "refuses virtual pipeline stages"),
        ({"mtp_hybrid_override_pattern": "*E"}, "in hybrid_layer_pattern as well"),
        ({"mtp_use_repeated_layer": True}, "mtp_use_repeated_layer is True"),
    ],
)
def test_a_hybrid_run_config_of_an_unknown_model_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MappingError, match=message):
        dims_of(edited(more, tmp_path), "hybrid", {}, {})


def test_a_field_that_no_provider_has_is_listed_and_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """As `final_logit_softcapping`, which is refused by name, of the next Gemma."""
    mckpt.plan(tiny_model("qwen3"), tmp_path / "run", run_config=True).run()
    path = tmp_path / "run" / "release" / RUN_CONFIG
    common = Pt(path.with_name("common.pt"))
    del common.value["args"]
    common.save()
    shutil.rmtree(tmp_path / "run" / "hf")
    path.write_bytes(run_config.restated(path, {"query_cap": 224, "hf_model_id": "a/b"}, {}))
    (path.parent / "mckpt.json").unlink()
    with pytest.raises(
        MappingError, match=r"query_cap is 224.*(?s:.*)--allow-inexact args.query_cap"
    ):
        mckpt.plan(tmp_path / "run", tmp_path / "hf", format="hf")
    mckpt.plan(tmp_path / "run", tmp_path / "tp2", parallel=Parallel(tp=2)).run()
    assert run_config.read_model(tmp_path / "tp2" / "release" / RUN_CONFIG)["query_cap"] == 224


def test_layers_of_multi_token_prediction_are_read_from_the_pattern(tmp_path: Path) -> None:
    more = {"hybrid_layer_pattern": "MEM*EME-/*E/*E", "mtp_hybrid_override_pattern": "*E"}
    path = edited({**WITH_EXPERTS, **more, "mtp_num_layers": 2}, tmp_path)
    assert dims_of(path, "hybrid", {}, {})["mtp_layers"] == 2


def edited(more: dict[str, Any], directory: Path) -> Path:
    """Returns the path of the run_config.yaml of a Nemotron-H with other entries of `model`."""
    path = directory / RUN_CONFIG
    own = ROOT / "run_config" / "nemotron-h.yaml"
    path.write_bytes(run_config.restated(own, more, {}))
    return path


def dims_of(path: Path, dialect: str, known: dict[str, Any], said: dict[str, Any]) -> Any:
    return run_config.run_config_dims(path, file_of(dialect), known, said)


def file_of(dialect: str) -> MappingFile:
    file = run_config.mapping_file(mapping.load("megatron", dialect))
    assert file is not None
    return file


def apart(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the dims that differ."""
    return {n: (wanted[n], found[n]) for n in wanted if not mapping.equal(wanted[n], found[n])}


def published(path: Path) -> dict[str, Any]:
    """Returns the dims of a published config."""
    config = json.loads(path.read_text())
    return mapping.load("hf", mapping.family_with(config["architectures"][0])).read(config)


def exact_models(name: str) -> dict[str, dict[str, Any]]:
    """Returns the dims of the published configs whose models the dialect computes without a
    difference.
    """
    dialect = mapping.load("megatron", name)
    program = {
        "megatron": dialect.version(),
        "transformer_impl": "transformer_engine",
        "pp": 1,
        "format": "torch_dist",
    }
    every = {path.stem: published(path) for path in sorted((ROOT / "configs").glob("*.json"))}
    return {model: dims for model, dims in every.items() if not dialect.inexact(dims, program)}


@pytest.mark.parametrize("dialect", ["gpt", "hybrid"])
def test_a_written_run_config_has_the_dims(dialect: str, tmp_path: Path) -> None:
    """In one test for all models, because choosing them takes as long as reading all families."""
    file, path = file_of(dialect), tmp_path / RUN_CONFIG
    given = {"dtype": "bfloat16", "experts": "grouped"}
    of_bridge = yaml.safe_load((ROOT / "run_config" / "nemotron-h.yaml").read_text())["model"]
    models, wrong = exact_models(dialect), {}
    assert len(models) > 40
    for model, dims in models.items():
        if dialect == "hybrid" and (dims["mla"] or dims["rope_type"] == "yarn"):
            with pytest.raises(MappingError, match=r"multi-latent|embedding_type is 'yarn'"):
                run_config.model_section(file, dims, given, Parallel(tp=2))
            continue
        section = run_config.model_section(file, dims, given, Parallel(tp=2))
        path.write_bytes(run_config.new(section, {"save_optim": False, "save_rng": False}))
        if found := apart(dims, dims_of(path, dialect, {}, {})):
            wrong[model] = found
        if dialect == "hybrid":
            assert not section.keys() - of_bridge.keys(), "HybridModelProvider has no such fields"
    assert not wrong


def test_hf_to_megatron_writes_a_run_config(tiny_model: TinyModel, tmp_path: Path) -> None:
    plan = mckpt.plan(
        tiny_model("qwen3-moe"), tmp_path / "m", parallel=Parallel(tp=2, ep=2), run_config=True
    )
    plan.run()
    unit = tmp_path / "m" / "release"
    found = yaml.safe_load((unit / RUN_CONFIG).read_text())
    model = found["model"]
    assert model["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert model["activation_func"] == {"_target_": "torch.nn.functional.silu", "_call_": False}
    assert model["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    sizes = [f"{n}_parallel_size" for n in ("tensor_model", "pipeline_model", "expert_model")]
    assert [model[name] for name in sizes] == [2, 1, 2]
    assert model["sequence_parallel"] is True
    assert (model["num_moe_experts"], model["vocab_size"], model["should_pad_vocab"]) == (
        *(24, 211),
        True,
    )
    assert "padded_vocab_size" not in model and "norm_epsilon" not in model
    assert not found["checkpoint"]["save_optim"] and not found["checkpoint"]["save_rng"]


def test_reshard_carries_a_run_config_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    mckpt.plan(tiny_model("qwen3"), tmp_path / "a", run_config=True, target_iteration=7).run()
    unit = tmp_path / "a" / "iter_0000007"
    text = (unit / RUN_CONFIG).read_text()
    other = "  timers: !!python/object:megatron.core.timers.Timers {log_level: 2}\n  mine: 3\n"
    text = text.replace("model:\n", "model:\n" + other)
    (unit / RUN_CONFIG).write_text(text + "train:\n  global_batch_size: 64\n")
    (unit / TRAIN_STATE).write_bytes(b"counters")
    mckpt.plan(
        tmp_path / "a", tmp_path / "b", format="torch_dist", parallel=Parallel(tp=2, pp=2)
    ).run()
    written = tmp_path / "b" / "iter_0000007"
    lines, before = ((u / RUN_CONFIG).read_text().splitlines() for u in (written, unit))
    gone = [" ".join(x.split()) for x in before if x not in lines]
    assert {*gone} >= {"tensor_model_parallel_size: 1", "pipeline_model_parallel_size: 1"}
    new = [" ".join(x.split()) for x in lines]
    assert "tensor_model_parallel_size: 2" in new and "pipeline_model_parallel_size: 2" in new
    assert "mine: 3" in new and "global_batch_size: 64" in new
    assert any(x.startswith("timers: !!python/object:megatron.core.timers.Timers") for x in new)
    assert (written / TRAIN_STATE).read_bytes() == b"counters"
    # another iteration has other counters
    mckpt.plan(tmp_path / "a", tmp_path / "c", format="torch_dist", target_iteration=8).run()
    assert (tmp_path / "c" / "iter_0000008" / RUN_CONFIG).exists()
    assert not (tmp_path / "c" / "iter_0000008" / TRAIN_STATE).exists()
    # Megatron-Bridge does not read the format torch
    mckpt.plan(tmp_path / "a", tmp_path / "d", format="torch").run()
    assert not list((tmp_path / "d").rglob(RUN_CONFIG))


def test_reshard_moves_the_stages_of_a_hybrid_pattern(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    uneven = Parallel(pp=2, first_stage_layers=2)
    hybrid: dict[str, Any] = {"format": "torch_dist", "dialect": "hybrid"}
    mckpt.plan(
        tiny_model("qwen3"), tmp_path / "a", parallel=uneven, run_config=True, **hybrid
    ).run()
    mckpt.plan(tmp_path / "a", tmp_path / "b", parallel=Parallel(pp=4), **hybrid).run()
    models = [
        yaml.safe_load((tmp_path / d / "release" / RUN_CONFIG).read_text())["model"] for d in "ab"
    ]
    for model, pattern in zip(models, ("*-|*-*-*-", "*-|*-|*-|*-"), strict=True):
        assert model["hybrid_layer_pattern"] == pattern
        assert model["pipeline_model_parallel_size"] == pattern.count("|") + 1
        assert model["num_layers_in_first_pipeline_stage"] is None
        assert model["_target_"].endswith("hybrid_provider.HybridModelProvider")


def test_another_dialect_gets_the_run_config_of_its_own_provider(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    mckpt.plan(tiny_model("qwen3"), tmp_path / "a", run_config=True, target_iteration=3).run()
    (tmp_path / "a" / "iter_0000003" / TRAIN_STATE).write_bytes(b"counters")
    source, found = tmp_path / "a", []
    for name, dialect in (("b", "hybrid"), ("c", "gpt")):
        mckpt.plan(source, tmp_path / name, dialect=dialect, format="torch_dist").run()
        source = tmp_path / name
        assert (source / "iter_0000003" / TRAIN_STATE).read_bytes() == b"counters"
        found.append((source / "iter_0000003" / RUN_CONFIG).read_text())
    assert "HybridModelProvider" in found[0] and "rope_scaling" not in found[0]
    assert found[1] == (tmp_path / "a" / "iter_0000003" / RUN_CONFIG).read_text()


def test_a_dialect_without_a_run_config_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dialect in ("bert", "t5"):
        assert run_config.mapping_file(mapping.load("megatron", dialect)) is None
    monkeypatch.setattr(run_config, "mapping_file", lambda dialect: None)
    with pytest.raises(UsageError, match="cannot describe the dialect gpt there"):
        mckpt.plan(tiny_model("qwen3"), tmp_path / "m", run_config=True)


@pytest.mark.parametrize("case", made_models.BRIDGE_MODELS)
def test_models_of_megatron_bridge_have_its_run_config(case: str) -> None:
    """fixtures/bridge has the files that Megatron-Bridge saves of models that it alone computes."""
    config = made_models.config(case)
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims, file = family.read(config), file_of(family.dialect)
    theirs = bridge_facts.read(case)["model"]
    # Megatron-Bridge takes sliding_window_size for the number of keys; transformers does not count
    # the key of the query itself
    shorter = {"sliding_window": dims["sliding_window"] - 1} if case == "mimo_v2_flash" else {}
    assert not apart({**dims, **shorter}, file.read(theirs))
    given = {"dtype": "float32", "experts": "grouped"}
    assert not file.inexact(dims, given)
    ours = run_config.model_section(file, {**dims, **shorter}, given, Parallel())
    differ = {key for key, value in ours.items() if value is not None and value != theirs.get(key)}
    of_the_run = {"attention_softmax_in_fp32", "moe_token_dispatcher_type", "pipeline_dtype"}
    routing = {"moe_router_dtype", "moe_router_load_balancing_type", "moe_router_pre_softmax"}
    vocabulary = {"should_pad_vocab", "make_vocab_size_divisible_by"}
    # a null means the k/v heads of the other layers, and Bridge refuses the name that it writes
    of_gemma4 = {"num_global_query_groups", "transformer_layer_spec"} if "gemma4" in case else set()
    assert differ <= {*of_the_run, *routing, *vocabulary, *of_gemma4, "hidden_dropout"}


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        ("gemma2", {"rms_norm_eps": 1e-6}, "norms the outputs of attention and mlp with 1e-5"),
        (
            "gemma3",
            {
                "rope_local_base_freq": None,
                "layer_types": ["full_attention"] * 6 + ["sliding_attention"],
            },
            "window_layers is",
        ),
        ("gemma4", {"rms_norm_eps": 1e-5}, "values with 1e-6"),
        ("gemma4_moe", {"rms_norm_eps": 1e-6}, "the outputs of attentions with 1e-5"),
        (
            "gemma4_moe",
            {"layer_types": ["sliding_attention", *["full_attention"] * 5]},
            "repeats one pattern",
        ),
        ("gemma4_moe", {"num_kv_shared_layers": 2}, "no embeddings of the layers"),
        ("gemma4", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("exaone4", {"sliding_window": 9, "layer_types": None}, "window_layers is [1, 1, 1, 0]"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False"),
        ("mimo_v2_flash", {"swa_v_head_dim": 24}, "swa_head_dim is 24: transformers has"),
        (
            "mimo_v2_flash",
            {"moe_layer_freq": [1, 1, 1, 1], "mlp_layer_types": None},
            "query_groups is [2, 4, 4, 2, 4, 4]",
        ),
    ],
)
def test_a_model_that_megatron_bridge_computes_differently_is_refused(
    case: str, changed: dict[str, Any], message: str
) -> None:
    config = made_models.config(case) | changed
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    file = file_of(family.dialect)
    try:
        lost = file.inexact(family.read(config))
    except MappingError as refused:
        lost = {"config": str(refused)}
    assert message in "".join(lost.values())


@pytest.mark.parametrize("name", ["llama-3.2-1b", "kimi-k2", "gemma-2b"])
def test_megatron_bridge_computes_models_that_pretrain_gpt_does_not(name: str) -> None:
    dims = published(ROOT / "configs" / f"{name}.json")
    assert mapping.load("megatron", "gpt").inexact(dims) and not file_of("gpt").inexact(dims)


def test_a_model_for_megatron_bridge_alone_has_no_args(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("llama-rope-scaled"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"]["factor"] = 32.0
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match="--allow-inexact rope_factor"):
        mckpt.plan(model, tmp_path / "stock")
    plan = mckpt.plan(model, tmp_path / "bridge", run_config=True)
    assert "for Megatron-Bridge alone" in plan.summary() and "rope_factor" in plan.summary()
    plan.run()
    unit = tmp_path / "bridge" / "release"
    assert not list(unit.glob("megatron_args*")) and "args" not in Pt(unit / "common.pt").value
    assert run_config.read_model(unit / RUN_CONFIG)["rope_scaling_factor"] == 32.0
    (unit / "mckpt.json").unlink()
    shutil.rmtree(tmp_path / "bridge" / "hf")
    mckpt.plan(tmp_path / "bridge", tmp_path / "hf", format="hf").run()
    assert json.loads((tmp_path / "hf/config.json").read_text())["rope_scaling"]["factor"] == 32.0
    # the user's word keeps the args, as without run_config.yaml
    mckpt.plan(model, tmp_path / "both", run_config=True, allow_inexact=["rope_factor"]).run()
    assert (tmp_path / "both/release/megatron_args.sh").exists()
