"""The mapping files that come with mckpt read, write and refuse configs, and report
inexact dims.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mckpt
from mckpt import mapping
from mckpt.checkpoint import description
from mckpt.conversion.to_hf import choose_family
from mckpt.editing.layers import Layers
from mckpt.errors import MappingError, UsageError
from mckpt.formats.hf_config import parse_config
from mckpt.options import SourceOptions
from tests.helpers import made_models, tiny
from tests.helpers.published import INEXACT
from tests.helpers.tiny import FIXTURES

EVERY = [
    path
    for path in sorted((FIXTURES / "configs").rglob("*.json"))
    # without those of models that contain a text model, whose config no args describe
    if "vision_config" not in json.loads(path.read_text())
]
# those of the families in fixtures/tiny, whose keys `bears` knows
KINDS = {"kimi_k2", *(tiny.config(case)["model_type"] for case in tiny.CASES)}
CONFIGS = [path for path in EVERY if json.loads(path.read_text())["model_type"] in KINDS]
IDS = [str(p.relative_to(FIXTURES / "configs")) for p in CONFIGS]
TINY = [FIXTURES / "tiny" / f"{case}.json" for case in tiny.CASES]


def bears(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config that change logits, by the names of transformers 4. A null
    counts as absent. The list is written by hand, apart from mappings/.
    """
    keys = """
        vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        intermediate_size hidden_act rms_norm_eps rope_theta tie_word_embeddings attention_bias
        mlp_bias max_position_embeddings num_local_experts num_experts num_experts_per_tok
        moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers model_type
        architectures q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        n_routed_experts n_shared_experts first_k_dense_replace moe_layer_freq n_group topk_group
        routed_scaling_factor scoring_func topk_method num_nextn_predict_layers
        """
    out = {k: config[k] for k in keys.split() if config.get(k) is not None}
    # the same model
    out["model_type"] = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        out["sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma" and out["hidden_act"] == "gelu":
        out["hidden_act"] = "gelu_pytorch_tanh"  # as transformers computes it
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    out.update({k: rope.pop(k) for k in ("rope_theta",) if k in rope})
    for key in ("mrope_section", "mrope_interleaved"):  # of images
        rope.pop(key, None)
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if not rope.get("mscale_all_dim"):
        rope.pop("mscale", None)  # transformers reads both or neither
    rope["rope_type"] = rope.pop("type", rope.get("rope_type")) or "default"
    out.update({f"rope.{k}": v for k, v in rope.items()})
    if "num_local_experts" in out and config["model_type"] == "qwen3_moe":
        out["num_experts"] = out.pop("num_local_experts")  # transformers 5
    return out


@pytest.mark.parametrize("path", [*CONFIGS, *TINY], ids=[*IDS, *(f"tiny/{p.name}" for p in TINY)])
def test_a_config_comes_back_from_its_dims(path: Path) -> None:
    """The written config equals the one that was read, in every key that changes logits. Any
    further key has the default of transformers.
    """
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims = family.read(config)
    written = {"architectures": list(family.architectures), **family.write(dims)}
    wanted, found = bears(config), bears(written)
    assert {k: found.get(k) for k in wanted} == wanted
    assert family.read(written) == dims
    assert family.inexact(dims) == {}
    # it describes how weights are stored, so no family lists it
    assert set(family.unknown(config)) <= {"quantization_config"}
    assert all(type(v) in (int, float, bool, str, list, type(None)) for v in dims.values())


@pytest.mark.parametrize("path", EVERY, ids=lambda p: str(p.relative_to(FIXTURES / "configs")))
def test_a_family_writes_the_config_that_it_reads(path: Path) -> None:
    """The dims of the written config are those of the published one, and no key is left out."""
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims = family.read(config)
    written = {"architectures": list(family.architectures), **family.write(dims)}
    assert family.read(written) == dims
    assert set(family.unknown(config)) <= {"quantization_config"}


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_megatron_args_give_the_dims_of_the_config(path: Path) -> None:
    """The dims are the same after Megatron's args were written and read, except those that the plan
    calls inexact. The args alone decide on one family.
    """
    config = json.loads(path.read_text())
    name = mapping.family_with(config["architectures"][0])
    family, dialect = mapping.load("hf", name), mapping.load("megatron", "gpt")
    dims = family.read(config)
    # layers of Megatron-Core's own: those of Transformer Engine have a fault in 0.19
    inexact = dialect.inexact(dims, {"transformer_impl": "local"})
    again = dialect.read(dialect.write(dims))
    free = {d for d, spec in family.dims.items() if spec.free}
    apart = {k for k in dims if dims[k] != again[k]} - free
    assert apart <= inexact.keys()
    wanted = set(INEXACT.get((path.stem, "gpt"), ()))
    assert inexact.keys() == wanted, inexact
    if "activation" in inexact:
        return  # the args are those of another gate, which no family has with these norms

    source: Any = SimpleNamespace(
        model=SimpleNamespace(options=SourceOptions()), dims=again, path=path
    )
    chosen, note = choose_family(source)
    if family.canonical:
        assert chosen.name == name, note
    else:  # several families compute the same
        assert name in note.replace(",", "").split(), note
    written = {"architectures": [chosen.architectures[0]], **chosen.write(again)}
    same = {k: v for k, v in bears(written).items() if k not in ("architectures", "model_type")}
    wanted_keys = {
        k: v
        for k, v in bears(config).items()
        if k not in ("architectures", "model_type")
        and (v is not False or k not in ("attention_bias", "mlp_bias"))  # of other families' names
    }
    assert {k: same.get(k) for k in wanted_keys} == wanted_keys


def read(case: str, **changed: Any) -> dict[str, Any]:
    """Returns the dims of a case of fixtures/families with these keys changed, None removes one."""
    config = made_models.config(case) | changed
    config = {key: value for key, value in config.items() if value is not None}
    return mapping.load("hf", mapping.family_with(config["architectures"][0])).read(config)


def test_an_absent_key_means_the_default_of_the_config_class() -> None:
    """The defaults are those of transformers, written by hand."""
    dims = read("qwen2_window", sliding_window=None, layer_types=None, max_window_layers=2)
    assert dims["sliding_window"] == 4096
    assert dims["window_layers"] == [int(i >= 2) for i in range(dims["num_layers"])]
    vision = json.loads((FIXTURES / "configs" / "qwen2-vl-7b.json").read_text())
    vision |= {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": None}
    dims = mapping.load("hf", "qwen2_vl").read({k: v for k, v in vision.items() if v is not None})
    assert not any(dims["window_layers"])


def test_half_of_a_pair_of_keys_is_refused() -> None:
    """transformers reads mscale and mscale_all_dim together or not at all."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    for half in ({"mscale_all_dim": 1.0}, {"mscale": 0.707}):
        with pytest.raises(MappingError, match="transformers reads mscale and mscale_all_dim"):
            read("deepseek_v2", rope_scaling=rope | half, rope_parameters=None)
    read("deepseek_v2", rope_scaling=rope | {"mscale": 1.0}, rope_parameters=None)


def test_alpha_stretches_the_base_of_dynamic_scaling_only() -> None:
    for kind, stretched in (("dynamic", True), ("default", False)):
        rope = {"rope_type": kind, "alpha": 1000.0, "rope_theta": 10000.0}
        dims = read("hunyuan_v1_dense", rope_scaling=None, rope_parameters=rope, rope_theta=None)
        assert (dims["rope_theta"] > 10000.0) is stretched


def llama(**changed: Any) -> dict[str, Any]:
    return {k: v for k, v in {**tiny.config("llama"), **changed}.items() if v != "drop"}


def test_given_dims_fill_gaps_and_must_agree_with_the_config() -> None:
    family = mapping.load("hf", "llama")
    assert family.read(llama(vocab_size="drop"), {"vocab_size": 9})["vocab_size"] == 9
    assert family.read(llama(), {"vocab_size": 131})["vocab_size"] == 131
    with pytest.raises(
        MappingError, match="vocab_size is 131 by vocab_size, but 9 by the given dims"
    ):
        family.read(llama(), {"vocab_size": 9})


def test_inert_keys_need_no_inner_list(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: llama\ninert: [one_key, [another]]\n")
    assert mapping.load("hf", str(tmp_path / "my.yaml")).inert == mapping.load(
        "hf", "llama"
    ).inert | {"one_key", "another"}


def test_yarn_scaling_of_scores_without_yarn_is_inexact() -> None:
    """megatron-core scales them (multi_latent_attention.py), and no family does."""
    dialect, family = mapping.load("megatron", "gpt"), mapping.load("hf", "deepseek_v3")
    args = dialect.write(family.read(tiny.config("deepseek-v3-plain")))
    assert dialect.read(args)["rope_type"] == "default"
    dims = dialect.read({**args, "rotary_scaling_factor": 40, "mscale_all_dim": 1.0})
    assert "rope_type is 'mscale'" in family.inexact(dims)["config"]


def test_an_arg_without_a_dim_is_refused() -> None:
    """The dialect lists the expected value of such args. An unset arg has that value, and any other
    value is another model.
    """
    dialect = mapping.load("megatron", "gpt")
    dims = mapping.load("hf", "llama").read(llama())
    args = dialect.write(dims)
    assert dialect.read({**args, "enable_hyper_connections": None}) == dims
    with pytest.raises(
        MappingError, match=r"enable_hyper_connections is True, and gpt\.yaml supports only False"
    ):
        dialect.read({**args, "enable_hyper_connections": True})
    with pytest.raises(
        MappingError, match=r"(?s)position_embedding_type is 'mrope'.*softmax_scale is 0\.5"
    ):
        dialect.read({**args, "position_embedding_type": "mrope", "softmax_scale": 0.5})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rope_scaling": {**LLAMA3, "factor": 32.0}}, "rope_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "rope_low_freq_factor"),
        ({"rope_theta": 10000.5}, "rope_theta"),
        ({"mlp_bias": True}, "qkv_bias"),
    ],
)
def test_the_report_of_an_inexact_dim_names_it(changed: dict[str, Any], name: str) -> None:
    found = mapping.load("megatron", "gpt").inexact(
        mapping.load("hf", "llama").read(llama(**changed))
    )
    assert name in found
    assert found[name].startswith(f"{name} is ")


def test_a_window_is_refused_for_a_megatron_core_that_mckpt_does_not_know_it_of(
    tmp_path: Path,
) -> None:
    source = tiny.tiny_random("mistral", tmp_path / "hf", sliding_window=16)
    with pytest.raises(
        MappingError, match=r"sliding_window is 16 .*\n.*--allow-inexact sliding_window"
    ):
        mckpt.plan(source, tmp_path / "out", megatron_version="0.15")
    mckpt.plan(source, tmp_path / "out", megatron_version="0.16")


def test_the_windows_of_qwen2_begin_at_a_layer() -> None:
    """Transformers gives a window to the layers from max_window_layers on."""
    family = mapping.load("hf", "qwen2")
    given = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    config = json.loads(Path("fixtures/tiny/qwen2.json").read_text())
    config.pop("layer_types", None)
    layers = config["num_hidden_layers"]
    dims = family.read({**config, **given})
    assert dims["window_layers"] == [0] + [1] * (layers - 1)
    given["layer_types"] = ["sliding_attention"] + ["full_attention"] * (layers - 1)
    assert family.read({**config, **given})["window_layers"] == [1] + [0] * (layers - 1)
    given["use_sliding_window"] = False
    assert family.read({**config, **given})["sliding_window"] is None


def test_unknown_keys_with_a_value_are_listed() -> None:
    """Keys whose value is empty are ignored, and a plan to Megatron refuses all others by name."""
    family = mapping.load("hf", "llama")
    assert family.unknown(
        llama(final_logit_softcapping=30.0, new_flag=False, other=None, empty=[], nothing={})
    ) == {"final_logit_softcapping": 30.0}
    assert family.unknown({**llama(), "a.b_config": {"c": 1}}) == {"a.b_config": {"c": 1}}
    assert family.unknown(llama()) == {}


def test_keys_that_a_file_expects_are_known(tmp_path: Path) -> None:
    """transformers 5 writes rope_interleave: true into the config.json of a DeepSeek-V3."""
    source = tiny.tiny_random("deepseek-v3", tmp_path / "hf", rope_interleave=True)
    assert (
        mapping.load("hf", "deepseek_v3").unknown(json.loads((source / "config.json").read_text()))
        == {}
    )
    mckpt.plan(source, tmp_path / "out")
    other = tiny.tiny_random("deepseek-v3", tmp_path / "other", rope_interleave=False)
    with pytest.raises(
        MappingError, match=r"rope_interleave is False, and deepseek_v3\.yaml supports only True"
    ):
        mckpt.plan(other, tmp_path / "out")


def test_an_unknown_key_is_refused_by_a_plan(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf")
    tiny.write_json(source / "config.json", llama(partial_rotary_factor=0.5))
    with pytest.raises(
        MappingError,
        match=r"does not mention:(?s:.*)factor is 0\.5 in config\.json(?s:.*)under `expect`",
    ):
        mckpt.plan(source, tmp_path / "out")
    mckpt.plan(source, tmp_path / "out", allow_inexact=["partial_rotary_factor"])


def test_a_plan_lists_a_key_that_transformers_never_reads(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf", my_run_id="a7", rope_thetaa=3.0)
    plan = mckpt.plan(source, tmp_path / "out")
    never = "in config.json changes nothing: transformers' LlamaForCausalLM never reads it"
    for note in (f"my_run_id {never}", f"rope_thetaa {never}; nearest: rope_theta"):
        assert note in plan.facts["notes"]
    assert plan.facts["inexact"] == {}


# name -> case, keys of config.json, and "" or the words that refuse my_key
MAY_READ = {
    "a key of the user": ("llama", {}, ""),
    "an older transformers": ("llama", {"transformers_version": "4.30.2"}, ""),
    "no version": ("llama", {"transformers_version": None}, ""),
    "a newer transformers": ("llama", {"transformers_version": "999.0.0"}, "reads, not 999.0.0"),
    "a long number": ("llama", {"transformers_version": "9" * 5000}, "reads, not 999"),
    "no architecture": ("llama", {"architectures": 5}, "a class without a name reads"),
    "no number": ("llama", {"transformers_version": "main"}, "reads, not main"),
    "code beside the weights": ("llama", {"auto_map": {"AutoConfig": "a.B"}}, "`auto_map` names"),
    "a class without source": (
        "sarvam_mla",
        {},
        "not know the keys that SarvamMLA",
    ),
    "a type of another class": ("llama", {"model_type": "mistral"}, "not know the keys that Llama"),
    "no type": ("llama", {"model_type": None}, "does not know the keys that LlamaForCausalLM"),
    "a type that is a list": ("llama", {"model_type": ["llama"]}, "not know the keys that Llama"),
    "a text model": ("mistral3", {}, ""),
    "code in the text model": ("mistral3", {"text_config.auto_map": {}}, "`auto_map` names"),
    "a text model that no family has": ("mistral3", {"text_config.model_type": "opt"}, "not know"),
}


@pytest.mark.parametrize("name", MAY_READ)
def test_a_key_is_inert_only_if_the_class_is_known(name: str) -> None:
    case, changes, words = MAY_READ[name]
    config = tiny.config(case) if case in tiny.CASES else made_models.config(case)
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    for path, value in changes.items():
        *outer, key = path.split(".")
        (config[outer[0]] if outer else config)[key] = value
    made_models.text(config)["my_key"] = 7
    notes, doubts = mapping.unread_keys(family, config, ["my_key"])
    assert (list(notes), list(doubts)) == ([], ["my_key"]) if words else (["my_key"], [])
    assert words in "".join(doubts.values())


# keys that change the logits of the first class, and that the second never reads
HYPERPARAMETERS = [
    ("granite", "attention_multiplier", "llama"),
    ("granite", "residual_multiplier", "llama"),
    ("granite", "embedding_multiplier", "llama"),
    ("granite", "logits_scaling", "llama"),
    ("gemma2", "query_pre_attn_scalar", "llama"),
    ("gemma2", "final_logit_softcapping", "qwen3"),
    ("deepseek_v3", "routed_scaling_factor", "mixtral"),
    ("deepseek_v3", "n_group", "mistral"),
    ("falcon_h1", "lm_head_multiplier", "llama"),
    ("olmoe", "clip_qkv", "mixtral"),
    ("mimo_v2_flash", "attention_value_scale", "qwen3"),
    ("gpt_neox", "use_parallel_residual", "llama"),
    # names that a quarter of the classes or the modules of all have are refused everywhere
    ("llama", "rope_theta", ""),
    ("qwen3", "rope_parameters", ""),
    ("qwen3", "partial_rotary_factor", ""),
    ("mistral", "sliding_window", ""),
    ("llama", "attn_implementation", ""),
    ("llama", "quantization_config", ""),
    ("llama", "tie_word_embeddings", ""),
    ("llama", "per_layer_config", ""),
    # names that are computed
    ("llama", "decoder_start", ""),
    ("llama", "my_token_id", ""),
    # and names of methods, of private attributes, and inside an object
    ("llama", "to_dict", ""),
    ("llama", "_my_key", ""),
    ("llama", "__class__", ""),
    ("llama", "rope_parameters.my_key", ""),
]


@pytest.mark.parametrize(("reads", "key", "other"), HYPERPARAMETERS)
def test_a_key_that_the_class_reads_stays_refused(reads: str, key: str, other: str) -> None:
    for name, is_read in ((reads, True), (other, False)):
        if name:
            family = mapping.load("hf", name)
            config = {"architectures": family.architectures, "model_type": name, key: 7}
            notes, doubts = mapping.unread_keys(family, config, [key])
            assert (key in doubts, key in notes) == (is_read, not is_read), name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("num_layers=3", ("num_layers", 3)),
        ("tied=true", ("tied", True)),
        ("rope_theta=5.0", ("rope_theta", 5.0)),
        ("moe_layers=[0, 1]", ("moe_layers", [0, 1])),
    ],
)
def test_a_setting_is_parsed(text: str, value: Any) -> None:
    assert mapping.parse_setting(text) == value


@pytest.mark.parametrize(
    "text",
    ["num_layers", "layers=3", "num_layers=three", "tied=3", "num_layers=-1", "num_layers=[", "=3"],
)
def test_a_bad_setting_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--set {text!r}")):
        mapping.parse_setting(text)


NEMOTRON, SHORT = "llama-3.3-nemotron-super-49b", ["full_attention"] * 3
# (model, key, value): a list of a damaged config, and words of the error
LISTS: list[tuple[str, str, Any, str]] = [
    ("gpt-oss-20b", "layer_types", SHORT, "layer_types has 3 items, and num_layers is 24"),
    ("qwen3-8b", "layer_types", SHORT, "layer_types has 3 items, and num_layers is 36"),
    ("qwen3-8b", "layer_types", "full", "layer_types is 'full', and must be a list"),
    ("glm-4.7-flash", "mlp_layer_types", [], "mlp_layer_types has 0 items, and num_layers is 47"),
    ("smollm3-3b", "no_rope_layers", [1], "no_rope_layers has 1 item, and num_layers is 36"),
    ("hunyuan-a13b", "moe_topk", [8], "moe_topk has 1 item, and num_layers is 32"),
    ("nemotron-h-8b", "time_step_limit", [], "time_step_limit has 0 items, and it must have 2"),
    ("mamba-codestral-7b", "time_step_limit", 5, "time_step_limit is 5, and must be a list"),
    ("bamba-9b", "time_step_limit", [0.0, "x"], "time_step_limit[1] is 'x', and must be a number"),
    (NEMOTRON, "block_configs", None, "config.json has no block_configs"),
    (NEMOTRON, "block_configs", {}, "block_configs is {}, and must be a list"),
]


@pytest.mark.parametrize(("name", "key", "value", "words"), LISTS)
def test_a_list_of_a_wrong_length_is_one_error(name: str, key: str, value: Any, words: str) -> None:
    config = json.loads((FIXTURES / "configs" / f"{name}.json").read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    with pytest.raises(MappingError, match=re.escape(words)) as raised:
        family.read({**config, key: value})
    assert str(raised.value).count("\n") == 1


# (dialect or form of run_config.yaml, model, list of the args)
ARGS = [
    ("gpt", "glm-4.7-flash", "moe_layer_freq"),
    ("gpt", "qwen3-next-80b-a3b", "linear_attention_freq"),
    ("gpt", "gpt-oss-20b", "window_attn_skip_freq"),
    ("gpt", "gpt-oss-20b", "window_size"),
    ("gpt", "smollm3-3b", "no_rope_freq"),
    ("hybrid", "smollm3-3b", "no_rope_freq"),
    ("gpt", NEMOTRON, "heterogeneous_layers_config_encoded_json"),
    ("bridge", "glm-4.7-flash", "moe_layer_freq"),
    ("bridge_models", "gemma-3-1b", "rotary_base"),
    ("bridge_models", "gemma-3-1b", "interleaved_attn_pattern"),
    ("bridge_models", "mimo-v2-flash", "hybrid_attention_pattern"),
    ("bridge_models", "mimo-v2-flash", "moe_layer_freq"),
]
# values that none of these lists has; * stands for a list of the right length
DAMAGED: tuple[Any, ...] = (
    *("x", "[1]", "[" * 5000, '{"block_configs": 3}', '{"block_configs": [3]}', -1, True, {"a": 1}),
    *([1], [0] * 500, ["*", "1"], ["*", [1]], ["*", None], ["*", float("nan")], ["*", -1.5]),
)


@pytest.mark.parametrize(("file", "name", "key"), ARGS)
def test_a_damaged_list_in_the_args_is_one_error(file: str, name: str, key: str) -> None:
    config = json.loads((FIXTURES / "configs" / f"{name}.json").read_text())
    dims = mapping.load("hf", mapping.family_with(config["architectures"][0])).read(config)
    mapped = mapping.load("megatron" if file in mapping.names("megatron") else "run_config", file)
    args = mapped.write(dims)
    assert mapping.equal(mapped.read(args, dims), {**dims})
    length = len(args[key])
    for value in DAMAGED:
        if isinstance(value, list) and value[0] == "*":
            value = value[1:] * length
        with pytest.raises(MappingError, match=f"args of x(?s:.*)({key}|rope_theta)") as raised:
            mapped.read({**args, key: value}, {}, "args of x")
        # two dims come from the same list of numbers, each with limits of its own
        assert str(raised.value).count("\n") <= 1 + (key == "rotary_base")
        assert "internal error" not in str(raised.value)


def test_a_list_that_megatron_does_not_read_is_not_judged() -> None:
    config = json.loads((FIXTURES / "configs" / "qwen3-8b.json").read_text())
    dims = mapping.load("hf", "qwen3").read(config)
    gpt = mapping.load("megatron", "gpt")
    unread = {"moe_layer_freq": [1, 0], "window_attn_skip_freq": 0, "linear_attention_freq": "x"}
    assert mapping.equal(gpt.read({**gpt.write(dims), **unread}, {}), dims)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        (None, {"ffn": None}, "block_configs[3].ffn is None, and must be an object"),
        (None, {"moe": {}}, "block_configs[3] is ['attention', 'ffn', 'moe'], and must have"),
        ("ffn", {"ffn_mult": None}, "block_configs[3].ffn has ffn_mult None"),
        ("ffn", {"ffn_mult": "1.0"}, "block_configs[3].ffn has ffn_mult '1.0'"),
        ("ffn", {"experts": 8}, "block_configs[3].ffn has experts 8, which mckpt does not know"),
        (
            "attention",
            {"n_heads_in_group": None},
            "block_configs[3].attention has n_heads_in_group",
        ),
        ("attention", {"rope": "none"}, "block_configs[3].attention has rope 'none'"),
    ],
)
def test_a_damaged_layer_of_llama_nemotron_is_one_error(
    part: str | None, change: dict[str, Any], words: str
) -> None:
    config = json.loads((FIXTURES / "configs" / f"{NEMOTRON}.json").read_text())
    layer = config["block_configs"][3]
    (layer if part is None else layer[part]).update(change)
    with pytest.raises(MappingError, match=re.escape(words)) as raised:
        mapping.load("hf", "llama_nemotron").read(config)
    assert str(raised.value).count("\n") == 1


def test_a_largest_time_step_beyond_float32_limits_nothing() -> None:
    config = json.loads((FIXTURES / "configs" / "nemotron-h-8b.json").read_text())
    family = mapping.load("hf", "nemotron_h")
    family.read(config | {"time_step_limit": [0.0, 1e308]})
    with pytest.raises(MappingError, match="no largest time step"):
        family.read(config | {"time_step_limit": [0.0, 0.5]})


def lists_of(node: Any, count: int, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the places of the lists with so many items in a config."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from lists_of(value, count, (*path, key))
        elif isinstance(value, list) and len(value) == count:
            yield (*path, key)


# the layers that have an indexer would not be those of a period: the second one takes the keys of
# the first, and that of multi-token prediction has one
REFUSED = {("glm_moe_dsa", 0), ("glm-5.2", 77)}


WITH_PARTS = sorted(
    path for name in ("configs", "families", "tiny") for path in (FIXTURES / name).rglob("*.json")
)


@pytest.mark.parametrize("path", WITH_PARTS, ids=lambda p: str(p.relative_to(FIXTURES)))
def test_a_config_follows_a_layer_that_is_left_out(path: Path) -> None:
    """Each list with an item for each layer loses that of the layer, and no dim is another than
    that of the edited model.
    """
    config = parse_config(path)
    family = description.family_for(config, None, path.name, [], None)
    before = family.read(config)
    count = before["num_layers"]
    if before["encoder_layers"] or before["layer_embed_dim"]:  # no edit changes these layers
        return
    for dropped in {0, 1, count - 1} if count > 1 else ():
        if (path.stem, dropped) in REFUSED:
            with pytest.raises(UsageError, match="would have indexers in the layers"):
                Layers.of({"drop": dropped}, before).dims(before)
            continue
        after = Layers.of({"drop": dropped}, before).dims(before)
        kept = [number for number in range(count) if number != dropped]
        made = family.followed(config, before, after, kept)
        changed = [name for name in before if not mapping.equal(before[name], after[name])]
        made = family.restate(made, after, family.to_restate(made, after, changed))
        if family.inexact(after):
            continue
        again = family.read(made)
        assert {n: again[n] for n in after if not mapping.equal(again[n], after[n])} == {}
        for place in lists_of(config, count):
            old, new = (reduce(dict.__getitem__, place, one) for one in (config, made))
            if place[-1] == "block_configs":  # has the widths that modeling_decilm.py rounds up to
                assert len(new) == len(kept)
            else:
                assert new == [old[number] for number in kept]
