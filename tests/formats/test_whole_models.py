"""Whole multimodal models: their towers are in the Megatron checkpoint.

Megatron-Bridge's and ms-swift's own checkpoints are compared in tests/judge/test_bridge.py. Here
torch reads what mckpt writes, and numpy says what the tensors of a tower should be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt import mapping
from mckpt.errors import SourceError, UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.mapping.towers import NUMBER, TowerTensor
from mckpt.options import SourceOptions
from mckpt.verification import levels
from tests.helpers import made_models
from tests.helpers.bridge_facts import tensors
from tests.helpers.commands import mckpt as command
from tests.helpers.tiny import TinyModel

# each with every kind of entry that a tower has: packed heads, a transposed projection, starts of
# names, single numbers, and a text model in another dialect than that of its family
CASES = ("qwen3_vl", "gemma3_vl", "qwen2_5_vl", "qwen3_5_vl", "gemma4_audio")


def by_head(stored: np.ndarray, heads: int) -> np.ndarray:
    """Returns [q | k | v] as Megatron has it: q, k and v of one head after the other."""
    parts = stored.reshape(3, heads, -1, *stored.shape[1:])
    return parts.swapaxes(0, 1).reshape(stored.shape)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_comes_back(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """In both trainers' names, at other sizes, as the text model with its towers beside it, and as
    a Hugging Face directory, every tensor is equal.
    """
    source = tiny_model(case)
    mckpt.plan(source, tmp_path / "a", towers="bridge", parallel=Parallel(tp=2)).run()
    made, count = [tmp_path / "a"], len(mckpt.open(source))
    infinite = case == "gemma4_audio"  # a new tower of sound has infinite bounds
    family = mapping.load("hf", mapping.family_with(config(source)["architectures"][0]))
    # that of ms-swift lacks what no layer reads
    trainers = ["bridge"] if case == "gemma4_audio" else family.towers
    for number, trainer in enumerate([*trainers, "beside"]):
        made.append(tmp_path / str(number))
        mckpt.plan(made[-2], made[-1], format="torch_dist", towers=trainer).run()
    made.append(tmp_path / "hf")
    mckpt.plan(tmp_path / "a", made[-1], format="hf").run()
    for one in made:
        found = mckpt.diff(source, one)
        assert not found and found.same == count, one
        assert infinite or command("check", one).code == 0, one
    assert not list((tmp_path / "a").rglob("carried*"))
    for name in ("model.safetensors.index.json", "config.json"):
        assert (source / name).exists() == (made[-1] / name).exists()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3_5_vl", {"towers": "bridge"}),
        ("kimi_vl", {"towers": "swift", "megatron_version": "0.18"}),
    ],
)
def test_the_text_model_is_copied_for_any_megatron_core(
    case: str, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """`verify` runs this copy. Some text models need a new megatron-core, and others an old one."""
    source = tiny_model(case, "float32")
    mckpt.plan(source, tmp_path / "whole", **options).run()
    levels.reshard(mckpt.open(tmp_path / "whole"), tmp_path / "text", Parallel(), text_only=True)
    assert mckpt.open(tmp_path / "text").mapping.whole is None
    assert not mckpt.diff(source, tmp_path / "text")


def test_the_tensors_of_a_tower_are_those_of_numpy(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen3_vl", "float32")
    stored, heads = load_file(source / "model.safetensors"), config(source)["vision_config"]
    mckpt.plan(source, tmp_path / "a", towers="bridge").run()
    found = {name: tensor.numpy() for name, tensor in tensors(tmp_path / "a").items()}
    layers = "vision_model.decoder.layers."
    for end in ("weight", "bias"):
        blocks = [f"model.visual.blocks.{n}." for n in range(heads["depth"])]
        packed = [by_head(stored[f"{b}attn.qkv.{end}"], heads["num_heads"]) for b in blocks]
        wanted = {
            f"{layers}self_attention.linear_qkv.{end}": packed,
            f"{layers}self_attention.linear_proj.{end}": [
                stored[f"{b}attn.proj.{end}"] for b in blocks
            ],
            f"{layers}mlp.linear_fc1.layer_norm_{end}": [stored[f"{b}norm2.{end}"] for b in blocks],
        }
        for key, parts in wanted.items():
            assert np.array_equal(found[key], np.stack(parts)), key
    assert np.array_equal(
        found["vision_model.pos_embed.weight"], stored["model.visual.pos_embed.weight"]
    )
    # in a torch checkpoint of ms-swift every rank has the tower under transformers' names
    mckpt.plan(
        source, tmp_path / "s", towers="swift", format="torch", parallel=Parallel(tp=2)
    ).run()
    for rank in range(2):
        model = read(tmp_path / "s" / "release" / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
        for key, array in stored.items():
            if key.startswith("model.visual."):
                assert np.array_equal(model[key.replace("model.", "visual.", 1)].numpy(), array)


def test_a_projection_is_stored_transposed(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("gemma3_vl", "float32")
    stored = load_file(source / "model.safetensors")
    mckpt.plan(source, tmp_path / "a", towers="bridge").run()
    (key,) = (key for key in stored if key.endswith("mm_input_projection_weight"))
    found = tensors(tmp_path / "a")["multi_modal_projector.proj.weight"].numpy()
    assert np.array_equal(found, stored[key].T)


def test_a_tower_that_misses_a_tensor_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The directory of --like, or the manifest, shows what is missing."""
    source, changed = tiny_model("qwen2_5_vl"), tmp_path / "changed"
    changed.mkdir()
    stored = load_file(source / "model.safetensors")
    lost = stored.pop("visual.merger.ln_q.weight")
    save_file(stored, changed / "model.safetensors")
    (changed / "config.json").write_bytes((source / "config.json").read_bytes())
    mckpt.plan(changed, tmp_path / "a", towers="bridge").run()
    with pytest.raises(SourceError, match=r"lack tensors.*\n.*visual\.merger\.ln_q\.weight"):
        len(mckpt.Checkpoint.open(tmp_path / "a", SourceOptions(like=source)))
    manifest = next((tmp_path / "a").rglob("mckpt.json"))
    recorded = json.loads(manifest.read_text())
    recorded["carried"]["digest"] = "0" * 16
    manifest.write_text(json.dumps(recorded))
    with pytest.raises(SourceError, match="records"):
        len(mckpt.open(tmp_path / "a"))
    assert lost.size


def test_layers_that_lack_a_tensor_are_not_stacked(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Also if it is one of the last layer, which may differ in other models."""
    source, changed = tiny_model("qwen3_vl"), tmp_path / "changed"
    changed.mkdir()
    stored = load_file(source / "model.safetensors")
    last = config(source)["vision_config"]["depth"] - 1
    del stored[f"model.visual.blocks.{last}.attn.qkv.bias"]
    save_file(stored, changed / "model.safetensors")
    (changed / "config.json").write_bytes((source / "config.json").read_bytes())
    lost = rf"miss.*\n.*blocks\.{last}\.attn\.qkv\.bias\nCopy.*\nIt is {changed}\."
    with pytest.raises(SourceError, match=lost):
        mckpt.plan(changed, tmp_path / "a", towers="bridge")


# case -> the keys of ms-swift for the towers; its program needs Python that is published beside
# the weights, so these are the names in its source (mcore_bridge/model/mm_gpts)
OF_SWIFT = {
    "internvl_chat": {"visual.vision_model.embeddings.class", "visual.mlp1.0.weight"},
    "ovis2_5": {"visual.visual_tokenizer.head.1.weight", "visual.vte.weight"},
}


@pytest.mark.parametrize("case", OF_SWIFT)
def test_the_names_of_ms_swift(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    source, out = tiny_model(case), tmp_path / "out"
    mckpt.plan(source, out, towers="swift", parallel=Parallel(tp=2)).run()
    assert {k for k in tensors(out) if not k.startswith("language_model.")} == OF_SWIFT[case]
    mckpt.plan(out, tmp_path / "hf", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "hf")


@pytest.mark.parametrize(
    ("case", "sizes"),
    [("gemma4_dense_vl", {"tp": 2}), ("gemma4_moe_vl", {"tp": 2, "ep": 2}), ("gemma4_e2b_vl", {})],
)
def test_ms_swift_s_gemma_4_lacks_only_what_no_layer_reads(
    case: str, sizes: dict[str, int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, out, back = tiny_model(case), tmp_path / "out", tmp_path / "back"
    mckpt.plan(source, out, towers="swift", parallel=Parallel(pp=3, **sizes)).run()
    mckpt.plan(out, back, format="hf").run()
    made_models.without_unread(source, bare := tmp_path / "bare")
    stored, whole = (load_file(d / "model.safetensors") for d in (back, source))
    shared = config(source)["text_config"]["num_kv_shared_layers"]
    assert stored.keys() == load_file(bare / "model.safetensors").keys()
    assert len(whole) - len(stored) == 3 * shared
    assert not mckpt.diff(source, out) and not mckpt.diff(out, source)
    assert not mckpt.diff(bare, out) and not mckpt.diff(bare, back)
    assert len(mckpt.diff(source, back).changed) == 3 * shared  # zeros and ones for them
    assert mckpt.verify(source, out, level="bytes").verdict == "pass"


def test_the_linears_of_ms_swift_s_qwen3_5_are_those_of_numpy(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """As mcore-bridge joins them (bridge/gpt_bridge.py): by key head, and by query group."""
    source, out = tiny_model("qwen3_5_vl"), tmp_path / "out"
    mckpt.plan(source, out, towers="swift", parallel=Parallel(tp=2, pp=2)).run()
    stored, found = load_file(source / "model.safetensors"), tensors(out)
    c = config(source)["text_config"]
    nets, groups = c["linear_num_key_heads"], c["num_key_value_heads"]
    keys = nets * c["linear_key_head_dim"]

    def joined(parts: list[np.ndarray], heads: int) -> np.ndarray:
        cut = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(cut, axis=1).reshape(-1, *parts[0].shape[1:])

    for layer, kind in enumerate(c["layer_types"]):
        here, there = (
            f"model.language_model.layers.{layer}.",
            f"language_model.decoder.layers.{layer}.",
        )
        if kind == "linear_attention":
            net, made = f"{here}linear_attn.", f"{there}self_attention."
            qkv = np.split(stored[f"{net}in_proj_qkv.weight"], [keys, 2 * keys])
            others = [stored[f"{net}in_proj_{name}.weight"] for name in "zba"]
            conv = np.split(stored[f"{net}conv1d.weight"], [keys, 2 * keys])
            wanted = {
                "in_proj.weight": joined([*qkv, *others], nets),
                "conv1d.weight": joined(conv, nets),
                "out_norm.weight": stored[f"{net}norm.weight"],
            }
        else:
            attention, made = f"{here}self_attn.", f"{there}self_attention."
            parts = [stored[f"{attention}{name}_proj.weight"] for name in "qkv"]
            wanted = {"linear_qkv.weight": joined(parts, groups)}
        for name, tensor in wanted.items():
            values = found[made + name].float().numpy()
            assert np.array_equal(values, tensor.astype("f4")), made + name
    mckpt.plan(out, tmp_path / "hf", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "hf")


@pytest.mark.parametrize(
    ("case", "towers", "words"),
    [
        ("qwen3", "bridge", "has no towers"),
        ("gemma3_vl", "swift", "those that it knows: bridge"),
    ],
)
def test_towers_that_cannot_be_written_are_refused(
    case: str, towers: Any, words: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        mckpt.plan(tiny_model(case), tmp_path / "a", towers=towers)


def test_towers_beside_need_the_model_s_config(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen3_vl")
    mckpt.plan(source, tmp_path / "a", towers="bridge").run()
    for path in (tmp_path / "a" / "hf").iterdir():
        path.unlink()
    (tmp_path / "a" / "hf").rmdir()
    next((tmp_path / "a").rglob("mckpt.json")).unlink()
    with pytest.raises(UsageError, match="give --like"):
        mckpt.plan(tmp_path / "a", tmp_path / "b", format="torch_dist", towers="beside")
    known = mckpt.Checkpoint.open(tmp_path / "a", SourceOptions(like=source))
    assert not mckpt.diff(source, known)


def test_an_entry_names_the_layers_of_both_sides() -> None:
    entry = TowerTensor(f"v.blocks.{NUMBER}.qkv", f"vision.layers.{NUMBER}.linear_qkv")
    assert entry.key_of("v.blocks.11.qkv") == ("vision.layers.11.linear_qkv", 11)
    assert entry.stored_key("vision.layers.3.linear_qkv") == ("v.blocks.3.qkv", 3)
    assert entry.key_of("v.blocks.x.qkv") is None and entry.key_of("v.blocks.1.q") is None


def config(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def read(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)["model"]
