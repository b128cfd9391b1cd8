"""Models that contain a text model: the text is converted, and every other tensor is carried
through unchanged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt import mapping
from mckpt.containers import safetensors
from mckpt.errors import CoverError, DestinationError, MappingError, MckptError, SourceError
from mckpt.formats import carried
from mckpt.formats.base import packed
from mckpt.mapping import MappingFile
from mckpt.verification.verdict import compare_values
from tests.helpers import commands, made_models
from tests.helpers.commands import good, restate
from tests.helpers.tiny import class_of, write_json

FAMILIES = [
    name for name in mapping.names("hf") if mapping.is_part(mapping.load("hf", name).forms)
]  # each has a config of its own name in fixtures/families
# Transformer Engine's layers of the newest megatron-core do not fit these models
LOCAL = {"kimi_vl"}
FORMS = [(name, form) for name in FAMILIES for form in mapping.load("hf", name).forms]


def layers(name: str) -> str:
    """Returns the option of the layers that Megatron needs for a family, "" for the usual ones."""
    return " transformer_impl=local" if name in LOCAL else ""


def another(name: str) -> str:
    """Returns a format and sizes to which a model with a tower of this family is converted next."""
    dialect = mapping.load("megatron", mapping.load("hf", name).dialect)
    form = "torch tp=1 pp=2" if "local" in dialect.choices["keys"] else "torch_dist"
    return form + layers(name)


# one of each kind and shape that a tower may have, under names that braces could break
TOWER = {
    "blocks.0.attn.qkv.weight": np.random.RandomState(0).randn(6, 4).astype(ml_dtypes.bfloat16),
    "patch_embed.proj.weight": np.random.RandomState(1).randn(3, 2, 2, 5).astype(np.float32),
    "position_ids": np.arange(7, dtype=np.int64),
    "mask": np.array([[True, False, True]]),
    "scale": np.array(0.5, np.float16),
    "nothing": np.zeros((0, 3), np.float32),
    "odd.{layer}.name": np.arange(3, dtype=np.uint8),
}


def tower(family: MappingFile, form: str) -> dict[str, np.ndarray]:
    """Returns tensors under each of the form's patterns."""
    starts = [pattern.removesuffix("*") for pattern in family.forms[form].carried]
    return {start + name: array for start in starts for name, array in TOWER.items()}


def write(path: Path, name: str, form: str | None = None, **changed: Any) -> Path:
    """Writes a model of a family with random bfloat16 weights, and a tower of many dtypes."""
    family = mapping.load("hf", name)
    text = json.dumps(made_models.config(name)).replace("float32", "bfloat16")
    config = json.loads(text) | changed
    scope = family.scope(family.read(config), **({"form": form} if form else {}))
    arrays = tower(family, form or next(iter(family.forms)))
    for b in (b for b in family.bind(scope) if not b.rule.alias):
        shape = packed(b.rule, scope).shape
        held = b.axes(scope) + (shape[::-1] if b.rule.transposed else shape)
        for key in dict.fromkeys(b.keys()):
            # from 0.5 to 2, so that a norm that Megatron stores with an offset is exact
            drawn = np.random.RandomState(len(arrays)).uniform(0.5, 2, held)
            arrays[key] = drawn.astype(b.rule.dtype or ml_dtypes.bfloat16)
    path.mkdir(parents=True)
    save_file(arrays, path / "model.safetensors")
    write_json(path / "config.json", config)
    (path / "preprocessor_config.json").write_text("{}\n")
    return path


def same_files(a: Path, b: Path) -> None:
    """Asserts that two directories have the same tensors, by their names, dtypes and bytes, and the
    same config.json.
    """
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape), name
        assert array.tobytes() == right[name].tobytes(), name
    for name in ("config.json", "preprocessor_config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_the_commands_say_what_is_carried(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen2_5_vl")
    nbytes = sum(array.nbytes for array in TOWER.values())
    plan = good("plan", source, tmp_path / "ckpt", "--json").json
    assert plan["carried"]["tensors"] == len(TOWER) and plan["carried"]["bytes"] == nbytes
    text = good("plan", source, tmp_path / "ckpt").out
    assert f"carried unchanged: {len(TOWER)} tensors, {nbytes} bytes" in text
    assert "Megatron's model is the text model" in text and "mrope_section" in text
    manifest = good("hf-to-megatron", source, tmp_path / "ckpt", "--json").json
    assert manifest["files"]["../hf/carried.safetensors"]["checksum"]
    shell = (tmp_path / "ckpt" / "release" / "megatron_args.sh").read_text()
    assert "# the tensors visual.* are carried" in shell
    inspected = good("inspect", tmp_path / "ckpt", "--json").json["carried"]
    assert inspected == {
        "tensors": len(TOWER),
        "bytes": nbytes,
        "files": ["carried.safetensors"],
    }
    report = good("verify", source, tmp_path / "ckpt", "--level", "bytes").out
    assert "PASS" in report


def test_a_cast_leaves_the_tower_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "mistral3")
    mckpt.plan(source, tmp_path / "ckpt", dtype="float32").run()
    left, right = mckpt.open(source), mckpt.open(tmp_path / "ckpt")
    assert right["layers.0.attn.q.weight"].dtype == "float32"
    assert not compare_values(left, right).reasons(left, right)
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf", dtype="float16").run()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    back, own = (load_file(p / "model.safetensors") for p in (tmp_path / "back", source))
    for name in tower(mapping.load("hf", "mistral3"), "published"):
        assert back[name].dtype == own[name].dtype and back[name].tobytes() == own[name].tobytes()


def test_a_changed_byte_of_the_tower_is_found(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen3_vl")
    mckpt.plan(source, tmp_path / "ckpt").run()
    path = tmp_path / "ckpt" / "hf" / "carried.safetensors"
    entry = safetensors.read([str(path)])["model.visual.blocks.0.attn.qkv.weight"]
    data = bytearray(path.read_bytes())
    data[entry.at + 1] ^= 1
    path.write_bytes(data)
    (changed,) = mckpt.diff(source, tmp_path / "ckpt").changed
    assert changed.name == "carried.model.visual.blocks.0.attn.qkv.weight" and changed.count == 1
    said = commands.mckpt("verify", source, tmp_path / "ckpt", "--level", "bytes")
    assert said.code == 1 and changed.name in said.out and "FAIL" in said.out


def trained(converted: Path, path: Path) -> Path:
    """Returns a checkpoint as Megatron leaves it in another directory: without DST/hf."""
    shutil.copytree(converted, path)
    shutil.rmtree(path / "hf")
    (path / "release" / "mckpt.json").unlink()
    return path


def test_a_tower_that_is_not_beside_a_checkpoint_is_not_compared(tmp_path: Path) -> None:
    """The verdict is neither PASS nor FAIL, and the tower is not compared with itself."""
    source = write(tmp_path / "hf", "qwen2_vl")
    mckpt.plan(source, tmp_path / "ckpt").run()
    alone = trained(tmp_path / "ckpt", tmp_path / "trained")
    said = commands.mckpt("verify", source, alone, "--level", "bytes")
    assert said.code == 1 and "INCOMPLETE" in said.out and "FAIL" not in said.out
    assert "7 tensors of" in said.out and "does not carry them" in said.out


def test_a_missing_tower_is_an_error_with_its_cure(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen2_vl")
    mckpt.plan(source, tmp_path / "ckpt").run()
    alone = trained(tmp_path / "ckpt", tmp_path / "trained")
    config_only = tmp_path / "config_only"
    config_only.mkdir()
    shutil.copy(source / "config.json", config_only)
    with pytest.raises(MappingError, match=r"visual\.\*.*give --like HF_DIR"):
        mckpt.plan(mckpt.open(alone, like=config_only), tmp_path / "out", format="hf")
    # nor is it lost on the way from one Megatron checkpoint to another
    held = tmp_path / "ckpt" / "hf" / "carried.safetensors"
    held.unlink()
    with pytest.raises(SourceError, match=r"carried\.safetensors: is missing; mckpt\.json"):
        mckpt.plan(tmp_path / "ckpt", tmp_path / "out", format="hf")
    restate(held)
    for target in ("hf", "torch"):
        with pytest.raises(SourceError, match=r"records 7 tensors \(.*give --like HF_DIR"):
            mckpt.plan(tmp_path / "ckpt", tmp_path / "out", format=target)


def tower_of_layers(path: Path, name: str, layers: int = 4) -> Path:
    """Writes a model with a tower of several equal layers."""
    source = write(path, name)
    arrays = load_file(source / "model.safetensors")
    start = next(key for key in arrays if "visual" in key).partition("visual.")[0] + "visual."
    for layer in range(layers):
        for part in ("attn.qkv.weight", "attn.proj.weight", "mlp.up.weight", "mlp.down.weight"):
            arrays[f"{start}layers.{layer}.{part}"] = np.full(3, layer, np.float32)
    save_file(arrays, source / "model.safetensors")
    return source


def without(*keys: str) -> Any:
    """Returns a damage that removes the tensors whose keys have one of these parts."""

    def damage(source: Path) -> None:
        arrays = load_file(source / "model.safetensors")
        left = {key: a for key, a in arrays.items() if not any(part in key for part in keys)}
        assert len(left) < len(arrays)
        save_file(left, source / "model.safetensors")

    return damage


def without_key(path: str) -> Any:
    """Returns a damage that removes a key of config.json."""

    def damage(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        *outer, last = path.split(".")
        inner = config
        for step in outer:
            inner = inner[step]
        inner.pop(last)
        write_json(source / "config.json", config)

    return damage


def half_processor(source: Path) -> None:
    write_json(source / "processor_config.json", {"processor_class": "AnyProcessor"})
    (source / "preprocessor_config.json").unlink()


# (model, damage, words of the one error that names the thing and the cure)
DAMAGED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("qwen3_vl", without_key("vision_config"), ("config.json has no vision_config", "copy the")),
    ("ovis2_5", without_key("vit_config"), ("config.json has no vit_config", "visual_tokenizer.*")),
    ("qwen2_audio", without_key("audio_config"), ("config.json has no audio_config", "copy the")),
    (
        "qwen3_omni",
        without_key("thinker_config.audio_config"),
        ("has no thinker_config.audio_config", "thinker.audio_tower.*"),
    ),
    (
        "qwen3_asr",
        without_key("audio_config"),
        ("has no audio_config or thinker_config.audio_config", "copy the"),
    ),
    ("qwen3_vl", without("visual.layers.2."), ("model.visual.layers.2.* is missing", "copy it")),
    (
        "qwen2_vl",
        without("layers.1.mlp.up"),
        ("visual.layers.1.mlp.up.weight is missing; all others of visual.layers.{number}.",),
    ),
    ("qwen3_vl", without("model.visual."), ("model.visual.*: no tensor has such a name", "copy")),
    ("qwen3_omni", without("talker."), ("talker.*: no tensor has such a name", "copy it again")),
    (
        "qwen3_vl",
        half_processor,
        ("preprocessor_config.json: is missing", "processor_config.json", "copy it from the model"),
    ),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGED)
def test_a_damaged_model_around_a_text_model_is_one_error(
    name: str, damage: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    layered = name in ("qwen3_vl", "qwen2_vl")
    source = tower_of_layers(tmp_path / "hf", name) if layered else write(tmp_path / "hf", name)
    good("plan", source, tmp_path / "whole")
    damage(source)
    commands.refused(3, *words, args=("hf-to-megatron", source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_list_of_other_modules_may_have_gaps() -> None:
    """An activation has no parameters, and the first and the last layer may differ."""
    plain = [f"mlp1.{number}.{kind}" for number in (0, 1, 3) for kind in ("weight", "bias")]
    parts = ("a.x.weight", "a.y.weight", "b.x.weight", "b.y.weight")
    layers = [f"t.{layer}.{part}" for layer in range(4) for part in parts]
    assert carried.gaps(plain) == [] and carried.gaps(layers) == []
    assert (
        carried.gaps([key for key in layers if key not in ("t.0.a.x.weight", "t.3.b.y.weight")])
        == []
    )
    lost = [key for key in layers if not key.startswith("t.1.")]
    assert carried.gaps(lost) == ["t.1.* is missing; t.{number}. has 4 tensors"]
    # the first member of the next list is an activation with parameters of its own
    block = [f"b.{number}.{part}" for number in range(2, 5) for part in parts]
    assert carried.gaps([*block, "b.0.alpha", "b.0.beta", "b.1.conv.weight", "b.1.conv.bias"]) == []
    every_second = [f"s.{2 * number}.{part}" for number in range(4) for part in parts]
    assert carried.gaps(every_second) == []


def test_a_tensor_that_no_pattern_names_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "mistral3")
    arrays = load_file(source / "model.safetensors")
    save_file(arrays | {"audio.weight": np.zeros(3, "f4")}, source / "model.safetensors")
    with pytest.raises(CoverError, match=r"audio\.weight \[3\] is in no rule of mistral3\.yaml"):
        mckpt.plan(source, tmp_path / "out")


def test_a_save_directory_keeps_one_tower(tmp_path: Path) -> None:
    """A second checkpoint of the same model shares DST/hf; one with another tower is refused, and
    leaves nothing behind.
    """
    source, dst = write(tmp_path / "hf", "qwen3_vl"), tmp_path / "ckpt"
    mckpt.plan(source, dst).run()
    mckpt.plan(source, dst, target_iteration=5).run()
    mckpt.plan(dst / "iter_0000005", tmp_path / "back", format="hf").run()
    same_files(source, tmp_path / "back")
    arrays = load_file(source / "model.safetensors")
    arrays["model.visual.position_ids"][2] += 1
    save_file(arrays, source / "model.safetensors")
    held = (dst / "hf" / "carried.safetensors").read_bytes()
    with pytest.raises(DestinationError, match=r"carried\.safetensors: is not the source's"):
        mckpt.plan(source, dst, target_iteration=6).run()
    arrays["model.visual.position_ids"] = np.arange(9)
    save_file(arrays, source / "model.safetensors")
    with pytest.raises(DestinationError, match=r"carried\.safetensors: is not the source's"):
        # another size is found before anything is written
        mckpt.plan(source, dst, target_iteration=7)
    assert (dst / "hf" / "carried.safetensors").read_bytes() == held
    assert not (dst / "iter_0000006").exists() and not (dst / "iter_0000007").exists()


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen3_vl_moe")

    def stop(at: mckpt.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mckpt.plan(source, tmp_path / "ckpt").run(progress=stop)
    assert not (tmp_path / "ckpt" / "hf").exists() and not (tmp_path / "ckpt" / "release").exists()
    mckpt.plan(source, tmp_path / "ckpt").run()
    assert not list((tmp_path / "ckpt").glob(".mckpt-*"))
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf").run()
    same_files(source, tmp_path / "back")


def test_the_voices_of_a_model_come_back(tmp_path: Path) -> None:
    """transformers loads no Qwen2.5-Omni without this file, whose name ends as those of weights."""
    source = write(tmp_path / "hf", "qwen2_5_omni")
    (source / "spk_dict.pt").write_bytes(b"any voices")
    (source / "consolidated.pt").write_bytes(b"other weights")
    mckpt.plan(source, tmp_path / "ckpt").run()
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf").run()
    same_files(source, tmp_path / "back")
    assert (tmp_path / "back" / "spk_dict.pt").read_bytes() == b"any voices"
    assert not (tmp_path / "back" / "consolidated.pt").exists()


def test_the_text_model_may_be_at_one_of_several_places(tmp_path: Path) -> None:
    """Qwen3-ASR is published in two forms, and Omni models have it inside of the thinker."""
    family = mapping.load("hf", "qwen3_asr")
    inside, beside = made_models.config("qwen3_asr_thinker"), made_models.config("qwen3_asr")
    assert family.read(inside)["hidden_size"] == family.read(beside)["hidden_size"] == 72
    omni = mapping.load("hf", "qwen3_omni")
    config = made_models.config("qwen3_omni")
    dims = omni.read(config) | {"vocab_size": 300}
    written = omni.restate(config, dims, ["vocab_size"])
    assert written["thinker_config"]["text_config"]["vocab_size"] == 300
    assert written["talker_config"] == config["talker_config"] and "vocab_size" not in written
    assert omni.read(omni.write(dims)) == dims
    source = write(tmp_path / "hf", "qwen3_omni")
    mckpt.plan(source, tmp_path / "ckpt").run()
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf", dtype="float16").run()
    cast = json.loads((tmp_path / "back" / "config.json").read_text())["thinker_config"]
    assert cast["dtype"] == cast["text_config"]["dtype"] == "float16"
    wrong = config | {"thinker_config": config["thinker_config"] | {"text_config": 3}}
    with pytest.raises(MappingError, match=r"thinker_config\.text_config is 3, and must be"):
        omni.read(wrong)


def test_a_large_tower_is_written_to_several_files(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen2_vl")
    tensors = carried.of(mckpt.open(source).layout)
    layout, files = carried.lay_out(tensors, 64)
    assert files[0].path == f"../hf/carried-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2 and {int(s.file[0]) for s in layout.stored} == set(range(len(files)))
    # and read from several
    mckpt.plan(source, tmp_path / "ckpt").run()
    single = tmp_path / "ckpt" / "hf" / "carried.safetensors"
    arrays = load_file(single)
    for number, part in enumerate((list(arrays)[:3], list(arrays)[3:]), 1):
        path = single.with_name(f"carried-{number:05d}-of-00002.safetensors")
        save_file({name: arrays[name] for name in part}, path)
    single.unlink()
    restate(single)
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf").run()
    same_files(source, tmp_path / "back")


def test_the_text_config_is_checked_and_the_rest_is_kept(tmp_path: Path) -> None:
    config = made_models.config("qwen3_vl")
    kept = write(tmp_path / "kept", "qwen3_vl", strange_vision_key={"a": 1})
    assert mckpt.plan(kept, tmp_path / "out").facts["inexact"] == {}
    text = config["text_config"] | {"partial_rotary_factor": 0.25}
    strange = write(tmp_path / "strange", "qwen3_vl", text_config=text)
    with pytest.raises(MappingError, match="--allow-inexact partial_rotary_factor"):
        mckpt.plan(strange, tmp_path / "out")
    flat = write(tmp_path / "flat", "qwen2_vl")
    scaled = made_models.config("qwen2_vl") | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    write_json(flat / "config.json", scaled)
    with pytest.raises(MappingError, match=r"rope_scaling\.type is 'yarn'"):
        mckpt.plan(flat, tmp_path / "out")
    other = config | {"text_config": [1]}
    write_json(kept / "config.json", other)
    with pytest.raises(MappingError, match=r"text_config is \[1\], and must be an object"):
        mckpt.plan(kept, tmp_path / "out")


def test_another_text_model_is_refused(tmp_path: Path) -> None:
    text = made_models.config("mistral3")["text_config"] | {"model_type": "mixtral"}
    source = write(tmp_path / "hf", "mistral3")
    config = made_models.config("mistral3") | {"text_config": text}
    write_json(source / "config.json", config)
    with pytest.raises(MappingError, match=r"model_type is 'mixtral'.*supports only 'mistral'"):
        mckpt.plan(source, tmp_path / "out")


def test_the_vocabulary_and_the_tie_are_read_where_transformers_reads_them(
    tmp_path: Path,
) -> None:
    family = mapping.load("hf", "qwen3_vl")
    config = made_models.config("qwen3_vl")
    text = config["text_config"] | {"tie_word_embeddings": False}
    assert family.read(config | {"text_config": text})["tied"] is True
    written = family.restate(config, family.read(config) | {"vocab_size": 300}, ["vocab_size"])
    assert written["text_config"]["vocab_size"] == 300 and "vocab_size" not in written
    assert family.read(family.write(family.read(config))) == family.read(config)
    flat = mapping.load("hf", "qwen2_vl")
    config = made_models.config("qwen2_vl")
    written = flat.restate(config, flat.read(config) | {"vocab_size": 300}, ["vocab_size"])
    assert written["vocab_size"] == 300 and "text_config" not in written


def test_published_names_without_a_prefix_come_back(tmp_path: Path) -> None:
    """GPT-2 as published: its names do not begin with transformer., and there are two buffers."""
    made_models.make(["gpt2"], tmp_path)
    arrays = load_file(tmp_path / "gpt2" / "model.safetensors")
    short = {key.removeprefix("transformer."): value for key, value in arrays.items()}
    source = tmp_path / "published"
    source.mkdir()
    mask = {"h.0.attn.bias": np.ones((1, 1, 4, 4), "f4")}
    save_file(short | mask, source / "model.safetensors")
    shutil.copy(tmp_path / "gpt2" / "config.json", source)
    mckpt.plan(source, tmp_path / "out", parallel=mckpt.Parallel(tp=2)).run()
    assert not mckpt.diff(tmp_path / "gpt2", tmp_path / "out")
    mckpt.plan(tmp_path / "out", tmp_path / "tp1", format="torch").run()
    mckpt.plan(tmp_path / "tp1", tmp_path / "back", format="hf").run()
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == short.keys()
    assert all((back[key] == short[key]).all() for key in short)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [4, 4]}, "float8_e4m3fn"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ],
)
def test_quantised_towers_are_refused(method: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    source = write(tmp_path / "hf", "qwen3_vl", quantization_config=method)
    arrays = load_file(source / "model.safetensors")
    name = "model.visual.patch_embed.proj.weight"
    arrays[name] = arrays[name].astype(getattr(ml_dtypes, dtype, dtype))
    save_file(arrays, source / "model.safetensors")
    with pytest.raises(MckptError, match=rf"patch_embed\.proj\.weight holds {dtype}"):
        mckpt.plan(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["mistral3", "kimi_k25", "internvl"])
def test_a_model_without_the_key_is_tied_unless_it_has_an_output_layer(
    name: str, tmp_path: Path
) -> None:
    """As transformers computes it, whose classes tie by default."""
    source = write(tmp_path / "hf", name)
    config = json.loads((source / "config.json").read_text())
    assert class_of(config).config_class().tie_word_embeddings is True
    config.pop("tie_word_embeddings", None)
    write_json(source / "config.json", config)
    assert mckpt.open(source).dims["tied"] is False
    file = source / "model.safetensors"
    arrays = {key: a for key, a in load_file(file).items() if not key.endswith("lm_head.weight")}
    save_file(arrays, file)
    ckpt = mckpt.open(source)
    assert ckpt.dims["tied"] is True
    assert any("tied: config.json has no key for it; True is used" in n for n in ckpt.model.notes)
    mckpt.plan(source, tmp_path / "ckpt").run()
    mckpt.plan(tmp_path / "ckpt", tmp_path / "back", format="hf").run()
    assert "lm_head.weight" not in "".join(load_file(tmp_path / "back" / "model.safetensors"))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["tie_word_embeddings"] is True
    write_json(source / "config.json", config | {"tie_word_embeddings": False})
    with pytest.raises(SourceError, match=r"lm_head\.weight is missing"):
        _ = mckpt.open(source).layout
