"""Adapters (LoRA) of whole multimodal models, of the text model and of the towers.

Megatron-Bridge's own adapters are compared in tests/judge/test_bridge_adapters.py, and merges of
PEFT in tests/judge/test_adapter_merge.py. Here numpy says what the weights and the factors should
be.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.formats.test_whole_models import by_head, config
from tests.helpers import adapters, tiny
from tests.helpers.bridge_facts import tensors
from tests.helpers.commands import good, refused
from tests.helpers.lora import same
from tests.helpers.tiny import TinyModel

TEXT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOWERS = {
    "qwen3_vl": ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2"),
    "qwen2_5_vl": ("attn.qkv", "attn.proj", "merger.mlp.0", "merger.mlp.2"),
    "gemma3_vl": ("fc1", "fc2", "out_proj"),
}
BLOCK = {
    **dict.fromkeys(("qwen3_vl", "qwen2_5_vl"), ("blocks.1.attn.qkv", "blocks.1.attn.proj")),
    "gemma3_vl": ("encoder.layers.1.mlp.fc1",),
}
STAGES = {"gemma3_vl": 1}  # it has 7 layers
# the names that transformers 5 has in memory, where the files have others
IN_MEMORY = {
    "qwen2_5_vl": {"visual.": "model.visual.", "model.layers.": "model.language_model.layers."},
    "gemma3_vl": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
    },
}


def write(case: str, base: Path, at: Path, *ends: str, **more: Any) -> tuple[Path, Path]:
    """Writes one adapter under the names of the base's files, and under those of transformers 5."""
    made = adapters.factors(adapters.modules(base, *(ends or (*TEXT, *TOWERS[case]))))
    made |= {adapters.PREFIX + key: array for key, array in more.pop("whole", {}).items()}
    names = {adapters.PREFIX + old: new for old, new in IN_MEMORY.get(case, {}).items()}
    renamed = {
        next((adapters.PREFIX + n + k[len(o) :] for o, n in names.items() if k.startswith(o)), k): a
        for k, a in made.items()
    }
    return adapters.write(at / "files", made, **more), adapters.write(at / "peft", renamed, **more)


@pytest.mark.parametrize("case", TOWERS)
def test_an_adapter_is_merged_into_every_form_of_a_base(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    base = tiny_model(case)
    files, peft = write(case, base, tmp_path)
    wanted = adapters.merged(base, files)
    changed = {key for key, array in adapters.weights(base).items() if (array != wanted[key]).any()}
    assert any("vis" in key for key in changed) and any("q_proj" in key for key in changed)
    good("adapter", "merge", base, files, tmp_path / "0")
    good("adapter", "merge", base, peft, tmp_path / "1")
    made = [tmp_path / "0", tmp_path / "1"]
    bases: dict[str, tuple[Any, ...]] = {
        "beside": ("--tp", 2),
        "bridge": ("--tp", 2, "--pp", STAGES.get(case, 2)),
        **({"swift": ("--format", "torch")} if case != "gemma3_vl" else {}),
    }
    for towers, more in bases.items():
        at, made = tmp_path / towers, [*made, tmp_path / f"{towers} hf", tmp_path / f"{towers} 2"]
        good("hf-to-megatron", base, at, "--towers", towers, *more)
        good("adapter", "merge", at, peft, made[-2], "--format", "hf")
        options = ("--towers", towers, *more, "--adapter", peft, "--merge")
        good("hf-to-megatron", base, tmp_path / f"{towers} 1", *options)
        good("megatron-to-hf", tmp_path / f"{towers} 1", made[-1])
    for one in made:
        assert not adapters.differences(adapters.weights(one), wanted), one


@pytest.mark.parametrize(
    ("case", "towers", "layout"),
    [
        ("qwen3_vl", "bridge", "fused"),
        ("qwen3_vl", "swift", "swift"),
        ("qwen2_5_vl", "bridge", "block"),
        ("qwen2_5_vl", "swift", "swift"),
        ("gemma3_vl", "bridge", "fused"),
    ],
)
@pytest.mark.parametrize("part", ["all", "text", "tower", "block"])
def test_an_adapter_comes_back(
    case: str, towers: str, layout: str, part: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The adapter changes the text model, the tower, one of its blocks, or all of them. Another
    program may have written the checkpoint.
    """
    base = tiny_model(case)
    ends = {"text": ("self_attn.o_proj",), "tower": TOWERS[case], "block": BLOCK[case]}
    _, peft = write(case, base, tmp_path, *ends.get(part, ()))
    at, other = tmp_path / "a", tmp_path / "b"
    options = ("--towers", towers, "--layout", layout)
    good("adapter", "to-megatron", peft, base, at, *options, "--tp", 2)
    sizes = ("--target-tp", 1, "--target-pp", STAGES.get(case, 2))
    good("adapter", "reshard", at, other, *sizes)
    for path in (at, other):
        good("adapter", "to-hf", path, tmp_path / f"{path.name} peft")
        good("adapter", "merge", base, path, tmp_path / f"{path.name} hf")
    for manifest in at.rglob("mckpt.json"):
        manifest.unlink()
    shutil.rmtree(at / "hf")
    good("adapter", "to-hf", at, tmp_path / "c peft", "--like", base)
    good("adapter", "merge", base, peft, tmp_path / "hf")
    wanted = adapters.weights(tmp_path / "hf")
    for path in (at, other):
        found = adapters.weights(tmp_path / f"{path.name} hf")
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    stacked = part == "block" and (case, towers) == ("qwen3_vl", "bridge")
    for name in () if stacked else ("a peft", "b peft", "c peft"):  # the other blocks have zeros
        if layout == "block":
            found = adapters.weights(tmp_path / name)
            assert found.keys() == adapters.weights(peft).keys()
        else:
            assert same(tmp_path / name, peft)


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen2_5_vl"])
def test_weights_with_an_adapter_beside_them(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    base = tiny_model(case)
    _, peft = write(case, base, tmp_path)
    good("adapter", "merge", base, peft, tmp_path / "hf")
    at, other = tmp_path / "a", tmp_path / "b"
    good("hf-to-megatron", base, at, "--towers", "bridge", "--adapter", peft, "--tp", 2)
    good("adapter", "reshard", at, other, "--target-tp", 1, "--target-pp", 2)
    wanted = adapters.weights(tmp_path / "hf")
    for path in (at, other):
        good("check", path)
        good("megatron-to-hf", path, tmp_path / f"{path.name} hf", "--merge")
        good("megatron-to-hf", path, tmp_path / f"{path.name} peft")
        found = adapters.weights(tmp_path / f"{path.name} hf")
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
        assert same(tmp_path / f"{path.name} peft", peft)


def test_an_adapter_of_a_tower_whose_files_have_a_part_more(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The published files of Gemma 3 have `vision_model` in their names, and transformers 5 has
    not.
    """
    base, changed = tiny_model("gemma3_vl"), tmp_path / "base"
    _, peft = write("gemma3_vl", base, tmp_path, *TOWERS["gemma3_vl"])
    shutil.copytree(base, changed)
    more = "vision_tower.vision_model."
    published = {
        key.replace("vision_tower.", more): array for key, array in adapters.weights(base).items()
    }
    tiny.write_safetensors(changed / "model.safetensors", published)
    options = ("--towers", "bridge", "--layout", "fused")
    good("adapter", "to-megatron", peft, changed, tmp_path / "a", *options)
    good("adapter", "to-hf", tmp_path / "a", tmp_path / "back")
    assert same(tmp_path / "back", peft)
    good("adapter", "merge", base, peft, tmp_path / "0")
    good("adapter", "merge", changed, peft, tmp_path / "1")
    wanted = adapters.weights(tmp_path / "0")
    for key, array in adapters.weights(tmp_path / "1").items():
        assert np.array_equal(array, wanted[key.replace(more, "vision_tower.")]), key


def test_the_factors_are_those_of_numpy(tiny_model: TinyModel, tmp_path: Path) -> None:
    base = tiny_model("qwen3_vl", "float32")
    _, peft = write("qwen3_vl", base, tmp_path)
    stored = {
        key.removeprefix(adapters.PREFIX).removesuffix(".weight"): array
        for key, array in adapters.weights(peft).items()
    }
    tower = config(base)["vision_config"]
    good("adapter", "to-megatron", peft, base, tmp_path / "a", "--towers", "bridge", "--tp", 2)
    found = {name: tensor.numpy() for name, tensor in tensors(tmp_path / "a").items()}
    blocks = [f"model.visual.blocks.{n}." for n in range(tower["depth"])]
    vision, into, out = "vision_model.", ".adapter.linear_in.weight", ".adapter.linear_out.weight"
    qkv = f"{vision}decoder.layers.self_attention.linear_qkv"
    packed = [by_head(stored[f"{b}attn.qkv.lora_B"], tower["num_heads"]) for b in blocks]
    wanted = {
        qkv + into: np.stack([stored[f"{b}attn.qkv.lora_A"] for b in blocks]),
        qkv + out: np.stack(packed),
        f"{vision}decoder.layers.mlp.linear_fc2{out}": np.stack(
            [stored[f"{b}mlp.linear_fc2.lora_B"] for b in blocks]
        ),
        f"{vision}merger.linear_fc1{into}": stored["model.visual.merger.linear_fc1.lora_A"],
    }
    layers = [f"model.language_model.layers.{n}." for n in range(4)]
    wanted["language_model.decoder.layers.self_attention.linear_proj" + into] = np.stack(
        [stored[f"{layer}self_attn.o_proj.lora_A"] for layer in layers]
    )
    for key, array in wanted.items():
        assert np.array_equal(found[key], array), key
    assert all(key.startswith(("language_model.", vision)) for key in found)
    # modules of transformers have factors of their own, which each rank holds whole
    base = tiny_model("qwen2_5_vl", "float32")
    _, peft = write("qwen2_5_vl", base, tmp_path / "2")
    good("adapter", "to-megatron", peft, base, tmp_path / "b", "--towers", "bridge", "--tp", 2)
    made = {name: tensor.numpy() for name, tensor in tensors(tmp_path / "b").items()}
    for key, array in adapters.weights(peft).items():
        if ".visual." in key:
            ends = {"lora_A": "linear_in", "lora_B": "linear_out"}
            name = key.removeprefix(f"{adapters.PREFIX}model.")
            for old, new in ends.items():
                name = name.replace(old, new)
            assert np.array_equal(made[name], array), name


def test_the_targets_name_the_modules_that_are_adapted(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The tower of Megatron-Bridge has linears with the names of the text model's."""
    base = tiny_model("qwen3_vl")
    for part, ends in ("text", TEXT), ("tower", ("attn.qkv",)):
        _, peft = write("qwen3_vl", base, tmp_path / part, *ends)
        good("adapter", "to-megatron", peft, base, tmp_path / part / "a", "--towers", "bridge")
        (path,) = (tmp_path / part / "a").rglob("run_config.yaml")
        targets = yaml.safe_load(path.read_text())["peft"]["target_modules"]
        if part == "text":
            assert all(one.startswith("*language_model.decoder.layers.*.") for one in targets)
        else:
            start, end = "*vision_model.decoder.layers.", ".self_attention.linear_qkv"
            depth = config(base)["vision_config"]["depth"]
            assert targets == [f"{start}{n}{end}" for n in range(depth)]


def test_whole_tensors_of_a_tower_are_replaced(tiny_model: TinyModel, tmp_path: Path) -> None:
    """modules_to_save: [merger] trains a part of the tower whole."""
    base = tiny_model("qwen2_5_vl")
    stored = adapters.weights(base)
    whole = {
        key: adapters.drawn(key, array.shape).astype(array.dtype)
        for key, array in stored.items()
        if key.startswith("visual.merger.")
    }
    more = {"modules_to_save": ["merger"], "whole": whole}
    files, peft = write("qwen2_5_vl", base, tmp_path, *TEXT, "attn.qkv", **more)
    wanted = adapters.merged(base, files)
    good("hf-to-megatron", base, tmp_path / "b", "--towers", "bridge")
    for number, one in enumerate((base, tmp_path / "b")):
        good("adapter", "merge", one, peft, tmp_path / f"{number}", "--format", "hf")
        found = adapters.weights(tmp_path / f"{number}")
        assert not adapters.differences(found, wanted)
        assert all(np.array_equal(found[key], array) for key, array in whole.items())


def test_what_a_form_has_no_place_for_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    base = tiny_model("qwen3_vl")
    _, peft = write("qwen3_vl", base, tmp_path)
    convert = ("adapter", "to-megatron", peft, base, tmp_path / "a")
    for options, words in (
        ((), "blocks.0.attn.qkv.weight"),
        ((), "Give --towers, if the trainer builds the whole model"),
        (("--towers", "bridge", "--layout", "canonical"), "CanonicalLoRA"),
        (("--towers", "bridge", "--format", "torch"), "give the format torch_dist"),
    ):
        refused(2, words, args=(*convert, *options))
    made = adapters.magnitudes(base, adapters.weights(peft))
    dora = adapters.write(tmp_path / "dora", made, use_dora=True)
    options = ("--towers", "bridge", "--layout", "fused")
    refused(2, "DoRA", args=("adapter", "to-megatron", dora, base, tmp_path / "a", *options))
    good("adapter", "merge", base, dora, tmp_path / "merged")
    wanted = adapters.merged(base, dora)
    found = adapters.weights(tmp_path / "merged")
    assert not adapters.differences(found, wanted, powers=False)
    name = f"{adapters.PREFIX}model.visual.blocks.9.attn.qkv"
    other = adapters.write(tmp_path / "other", adapters.factors({name[17:]: (72, 24)}))
    refused(3, "blocks.9.attn.qkv", args=("adapter", "merge", base, other, tmp_path / "b"))
