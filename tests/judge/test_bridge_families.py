"""The dialect bridge: models that only Megatron-Bridge computes.

fixtures/bridge has the shapes and checksums of the tensors that Megatron-Bridge 0.6.2 wrote, and
its description of the model; tests/helpers/bridge_facts.py made it. tests/judge/test_bridge.py lets
Megatron-Bridge itself load what mckpt writes, and compares logits.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import SourceError, UsageError
from mckpt.formats.megatron.run_config import RUN_CONFIG
from tests.helpers import bridge_facts, made_models
from tests.helpers.tiny import TinyModel

CASES = made_models.BRIDGE_MODELS
# model_type -> the starts of names in the model with images and in the text model, and its class
TEXT = {
    "gemma3": ("language_model.", "", "Gemma3ForCausalLM"),
    "gemma4": ("model.language_model.", "model.", "Gemma4ForCausalLM"),
}


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_those_of_megatron_bridge(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    root = tmp_path / "megatron"
    mckpt.plan(tiny_model(case, "float32"), root).run()
    rows = made_models.config(case)["vocab_size"]
    assert bridge_facts.described(root, rows) == bridge_facts.read(case)["tensors"]
    with pytest.raises(UsageError, match="is for Megatron-Bridge alone"):
        mckpt.verify(tiny_model(case, "float32"), root)
    as_bridge_saves(root, case)
    mckpt.plan(root, tmp_path / "hf", format="hf").run()  # without config.json
    assert not mckpt.diff(tiny_model(case, "float32"), tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == made_models.config(case)["architectures"]


@pytest.mark.judge
@pytest.mark.parametrize("case", made_models.BRIDGE_IMAGES)
def test_the_text_model_of_a_model_with_images(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Its checkpoint has the tensors of the text model alone, and the towers come back."""
    source = tiny_model(case, "float32")
    text, config = tmp_path / "text", made_models.config(case)
    tensors = load_file(source / "model.safetensors")
    start, own, architecture = TEXT[config["model_type"]]
    named = {k.replace(start, own, 1): v for k, v in tensors.items() if k.startswith(start)}
    assert len(named) < len(tensors)
    text.mkdir()
    save_file(named, text / "model.safetensors")
    alone = {**config["text_config"], "architectures": [architecture]}
    (text / "config.json").write_text(json.dumps(alone))
    for path, name in ((source, case), (text, "text")):
        mckpt.plan(path, tmp_path / "megatron" / name).run()
    rows = alone["vocab_size"]
    whole, part = (bridge_facts.described(tmp_path / "megatron" / n, rows) for n in (case, "text"))
    assert whole == part
    mckpt.plan(tmp_path / "megatron" / case, tmp_path / "back", format="hf").run()
    assert not mckpt.diff(source, tmp_path / "back")


@pytest.mark.judge
@pytest.mark.parametrize("case", ["gemma4", "gemma4_moe"])
def test_training_may_leave_the_second_copy_of_the_keys_behind(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Megatron-Bridge computes with the first copy alone, so the gradient of the other one is 0."""
    root = tmp_path / "megatron"
    mckpt.plan(tiny_model(case, "float32"), root).run()
    as_bridge_saves(root, case)
    layout, changed = mckpt.Checkpoint.open(root).layout, 0
    for stored in layout.stored:
        for piece in (p for p in stored.pieces if p.copy):
            for file, at in zip(stored.file.tolist(), stored.at.tolist(), strict=True):
                with open(layout.files[file], "r+b") as data:
                    data.seek(at + 4 * piece.start)
                    data.write(b"\x07" * (4 * math.prod(piece.box.shape)))
                changed += 1
    assert changed == 2 * made_models.config(case)["num_global_key_value_heads"]
    mckpt.plan(root, tmp_path / "hf", format="hf").run()
    assert not mckpt.diff(tiny_model(case, "float32"), tmp_path / "hf")


# case: as published or as transformers saves it, a tensor without which it is refused
LOST = {
    "saved, a layer's own": (True, "layers.5.self_attn.k_proj"),
    "saved, the queries": (True, "layers.8.self_attn.q_proj"),
    "published, a layer's own": (False, "layers.2.self_attn.k_norm"),
    "published, one of the unused": (False, "layers.7.self_attn.v_proj"),
}


@pytest.mark.judge
@pytest.mark.parametrize("case", ["gemma4_e2b", "gemma4_e4b"])
def test_layers_without_keys_of_their_own_are_filled_as_megatron_bridge_does(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """transformers saves none for the layers that take those of others."""
    saved, root = tmp_path / "saved", tmp_path / "megatron"
    made_models.without_unread(tiny_model(case, "float32"), saved)
    plan = mckpt.plan(saved, root)
    notes = [note for note in plan.facts["notes"] if "no layer computes with" in note]
    assert [(note.split()[0], note.split()[-1]) for note in notes] == [("6", "0"), ("3", "1")]
    plan.run()
    facts = bridge_facts.read(case)
    assert facts["saved"]
    found = bridge_facts.described(root, made_models.config(case)["vocab_size"])
    assert found == facts["tensors"] | facts["saved"]
    assert not mckpt.diff(saved, root)
    apart = {changed.name for changed in mckpt.diff(tiny_model(case, "float32"), root).changed}
    assert apart == {f"layers.{i}.attn.{n}.weight" for i in (6, 7, 8) for n in ("k", "v", "k_norm")}
    mckpt.plan(root, tmp_path / "hf", format="hf").run()
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == load_file(tiny_model(case, "float32") / "model.safetensors").keys()
    assert all((written[k] == v).all() for k, v in load_file(saved / "model.safetensors").items())


@pytest.mark.judge
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_tensor_of_shared_keys_is_refused(
    lost: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    (as_saved, name), folder = LOST[lost], tmp_path / "hf"
    if as_saved:
        made_models.without_unread(tiny_model("gemma4_e2b", "float32"), folder)
    else:
        shutil.copytree(tiny_model("gemma4_e2b", "float32"), folder)
    held = load_file(folder / "model.safetensors")
    del held[f"model.{name}.weight"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(SourceError, match=f"{name}.weight is missing") as refused:
        mckpt.plan(folder, tmp_path / "megatron")
    assert str(refused.value).count("is missing") == 1


def as_bridge_saves(root: Path, case: str) -> None:
    """Leaves of a save directory what Megatron-Bridge saves, with its own description."""
    iteration = next(root.rglob(".metadata")).parent
    (iteration / "mckpt.json").unlink()
    model = bridge_facts.read(case)["model"]
    (iteration / RUN_CONFIG).write_text(yaml.safe_dump({"model": model}))
    for path in sorted((root / "hf").rglob("*"), reverse=True):
        path.unlink()
    (root / "hf").rmdir()
