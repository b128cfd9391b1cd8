"""The config.json of a model as transformers writes it again describes the same model.

Versions of transformers give keys other names and places. A directory that a user saved has those
of the version that saved it, so its dims must be those of the published file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mckpt import mapping
from mckpt.errors import MappingError
from mckpt.formats.hf_config import QUANTISED, parse_config
from mckpt.mapping.nodes import FOLDER, parse
from tests.helpers import made_models, tiny
from tests.helpers.lazy import torch
from tests.helpers.tiny import FIXTURES

PATHS = {
    str(path.relative_to(FIXTURES).with_suffix("")): path
    for folder in ("configs", "families")
    for path in sorted((FIXTURES / folder).rglob("*.json"))
    # the class of transformers with this name does not read the config of the package qwen_asr
    if "unknown" not in path.parts and path.stem != "qwen3_asr_thinker"
}
# what transformers 5.24 wrote for models of fixtures/configs that 5.23 writes with older keys
NEWER = sorted((FIXTURES / "written").glob("*.json"))
# The published files state no outer tie_word_embeddings, or false. The classes state true, and tie
# a file without an output layer by it.
TIED = {"internvl3.5-8b-hf", "ministral-3-8b-instruct", "mistral-small-3.1-24b", "mt5-small", "mt5"}
# the smallest number of configs that a class reads; the others need code beside their weights
MANY = 180


# (family, key): why its default is not that of the class
OTHER_DEFAULTS = {
    ("bamba", "mamba_d_head"): "the class computes it of the other sizes",
    ("falcon_h1", "mamba_d_head"): "the class computes it of the other sizes",
    ("deepseek_v2", "n_group"): "None is one group",
    ("deepseek_v2", "topk_group"): "None is one group",
    ("gemma4", "num_experts"): "None means that there are no experts",
    ("gemma4", "top_k_experts"): "None means that there are no experts",
    ("gemma4", "moe_intermediate_size"): "None means that there are no experts",
    ("granitemoehybrid", "position_embedding_type"): "None is nope",
    ("nemotron_h", "moe_latent_size"): "None means that experts have no latent size",
    ("mimo_v2_flash", "max_position_embeddings"): "the published config.json has 262144",
    ("qwen3_moe", "sliding_window"): "without use_sliding_window, the class sets None",
    ("qwen2_5_omni_thinker", "sliding_window"): "without use_sliding_window, the class sets None",
    ("ministral3", "rope_parameters.mscale_all_dim"): "the class's are those of a whole object",
    ("ministral3", "rope_parameters.rope_theta"): "the class's are those of a whole object",
}


def test_the_defaults_of_a_family_are_those_of_its_class() -> None:
    """Keys that the class does not have are those of older files."""
    import transformers

    compared, other = 0, {}
    for name in mapping.names("hf"):
        defaults = parse(FOLDER / "hf" / f"{name}.yaml")[0].get("defaults") or {}
        family = mapping.load("hf", name)
        model = getattr(transformers, (*family.architectures, "")[0], None)
        if not model:
            continue
        config = model.config_class()
        config = (config.get_text_config() if family.inside else config).to_dict()
        rope = config.get("rope_parameters") or {}
        places = {"rope_parameters": rope, "rope_scaling": rope}
        for key, value in defaults.items():
            outer, _, inner = key.rpartition(".")
            held = places.get(outer, {}) if outer else rope | config
            if inner in held:
                compared += 1
                if held[inner] != value:
                    other[name, key] = held[inner]
    assert not other.keys() ^ OTHER_DEFAULTS.keys(), other
    assert compared > 400


def problems(published: dict[str, Any], written: dict[str, Any], tied: bool = False) -> str:
    """Returns what the family reads differently from `written`, and the keys of it that it does not
    know; empty text if there is neither.
    """
    family = mapping.load("hf", mapping.family_with(published["architectures"][0]))
    try:
        expected, found = family.read(published), family.read(written)
    except MappingError as e:
        return str(e)
    if tied:
        expected["tied"] = True
    same = written["architectures"] == published["architectures"]
    unknown = family.unknown(written).keys() - {QUANTISED}
    other = {name: (expected[name], found[name]) for name in found if expected[name] != found[name]}
    return f"{other} {sorted(unknown)}" if other or unknown or not same else ""


def written_again(path: Path, folder: Path) -> dict[str, Any] | None:
    """Returns a config as its class of transformers saves it; None without a class."""
    from transformers import CONFIG_MAPPING, AutoConfig

    config = json.loads(path.read_text())
    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    made = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    made.save_pretrained(folder / "again")
    return parse_config(folder / "again" / "config.json")


def test_each_config_has_the_same_dims_when_transformers_writes_it_again(tmp_path: Path) -> None:
    read, wrong = 0, {}
    for number, (name, path) in enumerate(PATHS.items()):
        written = written_again(path, tmp_path / str(number))
        if written is None:
            continue
        read += 1
        found = problems(json.loads(path.read_text()), written, path.stem in TIED)
        if found:
            wrong[name] = found
    assert wrong == {}
    assert read >= MANY


@pytest.mark.parametrize("path", NEWER, ids=lambda path: path.stem)
def test_a_config_of_a_newer_transformers_has_the_published_dims(path: Path) -> None:
    published = json.loads((FIXTURES / "configs" / path.name).read_text())
    assert problems(published, parse_config(path)) == ""


@pytest.mark.parametrize("key", ["model_name", "use_qk_norm"])
def test_a_key_that_the_class_never_reads_is_inert(key: str) -> None:
    """Unsloth writes model_name, and copies of Qwen3 have the key use_qk_norm of Qwen3-Coder."""
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3

    assert key not in Qwen3Config().to_dict()
    assert key not in Path(modeling_qwen3.__file__).read_text()
    config = json.loads((FIXTURES / "configs" / "qwen3-32b.json").read_text())
    assert not mapping.load("hf", "qwen3").unknown(config | {key: "a value"})


# fixtures of fixtures/tiny, and of fixtures/families
UNREAD = [
    "deepseek-v3",
    "llama",
    "mixtral",
    "qwen3-moe",
    "gemma",
    "granite",
    "gpt_neox",
    "qwen3_next",
]


@pytest.mark.parametrize("case", UNREAD)
def test_keys_of_other_classes_change_no_logit(case: str, tmp_path: Path) -> None:
    """The class gets every key that mckpt calls inert for it, of all that other classes read, and
    values that would change their models. It asks its config for no name that the table lacks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

    config = tiny.config(case) if case in tiny.CASES else made_models.config(case)
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    models = parse(FOLDER / "read_keys.yaml")[0]["models"].values()
    keys = {key for model in models for key in model["names"].split()} - config.keys()
    unread, _ = mapping.unread_keys(family, config, keys)
    assert len(unread) > 400
    draws = random.Random(0)
    values = [0.3, 7.5, 1, 3, True, "gelu", {}]
    changed = {key: draws.choice(values) for key in (*sorted(unread), "my_run_id")}
    found, asked, further = [], set[str](), set[str]()
    ask = PretrainedConfig.__getattribute__
    tokens = np.random.RandomState(1).randint(0, config["vocab_size"], (2, 24))
    for number, keys_of_others in enumerate(({}, changed)):
        (tmp_path / str(number)).mkdir()
        tiny.write_json(tmp_path / str(number) / "config.json", config | keys_of_others)
        made = AutoConfig.from_pretrained(tmp_path / str(number), attn_implementation="eager")
        assert all(getattr(made, key) == value for key, value in keys_of_others.items())
        with pytest.MonkeyPatch.context() as patch:
            if not number:  # without the keys, because some checks read all that a config has
                further = made.to_dict().keys() - type(made)().to_dict().keys()
                traced = lambda self, name: asked.add(name) or ask(self, name)  # noqa: E731
                patch.setattr(PretrainedConfig, "__getattribute__", traced)
            torch.manual_seed(2)
            model = AutoModelForCausalLM.from_config(made).eval()
            found.append(tiny.logits(model, tokens))
    assert (found[0] == found[1]).all() and found[0].std() > 0
    notes, _ = mapping.unread_keys(family, config, asked)
    assert notes.keys() <= further, "the table misses a name"


def test_a_layer_of_gemma4_with_another_key_is_refused() -> None:
    """transformers lets per_layer_config replace any key of a layer."""
    config = parse_config(FIXTURES / "written" / "gemma-4-31b-text.json")
    config["per_layer_config"]["05"]["sliding_window"] = 7
    with pytest.raises(MappingError, match="only head_dim and num_key_value_heads are read"):
        mapping.load("hf", "gemma4").read(config)
