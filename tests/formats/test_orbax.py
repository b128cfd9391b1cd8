"""Checkpoints of MaxText in the format of Orbax: what mckpt writes, Orbax restores, and the other
way round.

ORBAX_PYTHON is the Python of an environment with orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers.arrays import Arrays
from mckpt.containers.zarr3 import crc32c
from mckpt.errors import MckptError
from mckpt.options import SourceOptions
from tests.helpers import damages, maxtext, tiny
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as mckpt_said
from tests.helpers.tiny import TinyModel

tensorstore = pytest.importorskip("tensorstore")
judged = pytest.mark.skipif(not maxtext.PYTHON, reason="ORBAX_PYTHON names no Python with Orbax")
EXACT = ("qwen2", "qwen3-tied", "qwen3-moe", "deepseek-v3-plain", "llama-rope-scaled")
ROUNDED = ("norm_offset", "embed_scale")
INEXACT = {
    "llama": ("q_scale",),
    "mixtral": ("q_scale",),
    "gemma2": ("norm_offset", "embed_scale", "q_scale"),
    **dict.fromkeys(("gemma3-4", "gemma3-6", "gemma3-8", "gemma3-13"), ROUNDED),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = "('opt_state', '0', 'count')"
ACCEPT, APART = ("--allow-inexact", "q_scale"), ("--layer-keys", "per_layer")


def arrays_of(source: Path) -> maxtext.Arrays:
    """Returns the tensors of a Hugging Face directory."""
    import ml_dtypes
    import torch
    from safetensors.torch import load_file

    return {
        key: value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if value.dtype == torch.bfloat16
        else value.numpy()
        for file in source.glob("*.safetensors")
        for key, value in load_file(file).items()
    }


def expected(source: Path, scan: bool = True) -> maxtext.Arrays:
    """Returns the arrays that MaxText's own conversion makes of a directory."""
    config = json.loads((source / "config.json").read_text())
    return maxtext.tree(config, arrays_of(source), scan)


def model_of(case: str, tiny_model: TinyModel, folder: Path, dtype: str = "bfloat16") -> Path:
    """Returns a model; of Gemma with a scale of scores that published models have, and of Gemma 3
    with the number of layers that the case names.
    """
    family, _, count = case.partition("-")
    if family not in ("gemma2", "gemma3"):
        return tiny_model(case, dtype)
    source, target = tiny_model(family, dtype), folder / case
    config = json.loads((source / "config.json").read_text())
    config["query_pre_attn_scalar"] = config["head_dim"]
    if count == "8":  # as the model of 27B
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    target.mkdir()
    if not count:
        shutil.copy(source / "model.safetensors", target)
    else:
        config["num_hidden_layers"] = int(count)
        tiny.write_weights(target, with_layers(arrays_of(source), int(count)))
    tiny.write_json(target / "config.json", config)
    return target


def with_layers(arrays: maxtext.Arrays, count: int) -> maxtext.Arrays:
    """Returns the tensors of a model with so many layers, of which no two are the same."""
    names = {key.split(".", 3)[3] for key in arrays if key.startswith("model.layers.")}
    had = len({key.split(".")[2] for key in arrays if key.startswith("model.layers.")})
    out = {key: array for key, array in arrays.items() if not key.startswith("model.layers.")}
    for number, name in itertools.product(range(count), sorted(names)):
        array = arrays[f"model.layers.{number % had}.{name}"]
        out[f"model.layers.{number}.{name}"] = np.roll(array, number // had)
    return out


def accepted(case: str) -> list[str]:
    return [part for name in INEXACT.get(case, ()) for part in ("--allow-inexact", name)]


def written(source: Path, to: Path, *options: str) -> Path:
    good("hf-to-megatron", source, to, "--format", "orbax", *options)
    return to


def same(found: maxtext.Arrays, wanted: maxtext.Arrays) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


def by_tensorstore(items: Path) -> maxtext.Arrays:
    """Reads a checkpoint with tensorstore alone."""
    tree = json.loads((items / "_METADATA").read_text())["tree_metadata"].values()
    spec = {"driver": "zarr3", "fill_missing_data_reads": False}
    out = {}
    for key in (".".join(part["key"] for part in one["key_metadata"]) for one in tree):
        array = tensorstore.open({**spec, "kvstore": f"file://{items}/{key}/"}).result()
        out[key] = array.read().result()
    return out


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("case", [*EXACT, *INEXACT])
def test_the_arrays_are_those_of_maxtext(
    case: str, scan: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mckpt.containers.zarr3.LARGEST", 1000 if scan else 1 << 20)
    source = model_of(case, tiny_model, tmp_path)
    out = written(source, tmp_path / "out", *accepted(case), *(() if scan else APART))
    found = by_tensorstore(out / "release" / "items")
    same(found, expected(source, scan))
    if maxtext.PYTHON and case in ("qwen3-moe", "llama", "gemma2", "gemma3-8"):
        same(maxtext.restore(out / "release" / "items", tmp_path), found)
    if case in EXACT:
        good("diff", source, out)
        good("megatron-to-hf", out, tmp_path / "back")
        good("diff", source, tmp_path / "back")
    if case.startswith("gemma3"):
        good("megatron-to-hf", out, tmp_path / "back")
        same(arrays_of(tmp_path / "back"), there_and_back(source))


@judged
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("qwen3", ("ocdbt", "zarr3", "state")),
        ("qwen3-moe", ("ocdbt",)),
        ("deepseek-v3-plain", ("zarr3", "unscanned")),
        ("llama-rope-scaled", ()),
    ],
)
def test_what_orbax_writes_is_read(
    case: str, how: tuple[str, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(case)
    step = maxtext.save(expected(source, "unscanned" not in how), tmp_path / "run", *how)
    command = ("megatron-to-hf", step, tmp_path / "hf", "--like", source)
    refused(2, "--workers 2", args=(*command, "--workers", 2))  # tensorstore survives no fork
    assert ("neither the schedule" in good(*command).err) == ("state" in how)
    good("diff", source, tmp_path / "hf")
    good("check", step, "--like", source)
    items = step / "items"
    more = ("--like", source, *["--no-optimizer"] * ("state" in how))
    good("reshard", items, tmp_path / "orbax", "--target-format", "orbax", *more)
    good("diff", source, tmp_path / "orbax")


@judged
@pytest.mark.parametrize("scan", [True, False])
def test_the_form_of_nnx_is_read(scan: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    """MaxText's linen_nnx_converter.py: `params` once, and each array in a dict `value`."""
    source = tiny_model("qwen3-moe")
    linen = expected(source, scan)
    arrays = {f"{key.removeprefix('params.')}.value": array for key, array in linen.items()}
    step = maxtext.save(arrays, tmp_path / "run", "ocdbt", "zarr3")
    good("megatron-to-hf", step, tmp_path / "hf", "--like", source)
    good("diff", source, tmp_path / "hf")
    good("reshard", step, tmp_path / "linen", "--like", source, "--target-format", "orbax")
    if scan:
        same(by_tensorstore(tmp_path / "linen" / "release" / "items"), linen)
    without = {key.removeprefix("params."): array for key, array in arrays.items()}
    step = maxtext.save(without, tmp_path / "without", "zarr3")
    said = "has no arrays below `params`", "it has decoder.decoder_norm.scale.value"
    refused(3, *said, args=("inspect", step))


@judged
def test_gemma_2_has_rows_that_the_model_does_not_have(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """MaxText pads the vocabulary of Gemma 2."""
    source = model_of("gemma2", tiny_model, tmp_path)
    arrays = expected(source)
    embedding = arrays["params.params.token_embedder.embedding"]
    rows = np.zeros((128, embedding.shape[1]), embedding.dtype)
    arrays["params.params.token_embedder.embedding"] = np.concatenate([embedding, rows])
    step = maxtext.save(arrays, tmp_path / "run", "ocdbt", "zarr3")
    good("megatron-to-hf", step, tmp_path / "back", "--like", source, *ACCEPT)
    # 1 plus the weight of a norm, which may be more than 2, is rounded to 8 bits
    good("diff", source, tmp_path / "back", "--atol", 2**-7)
    back = written(tmp_path / "back", tmp_path / "again", *accepted("gemma2"))
    theirs = by_tensorstore(back / "release/items")
    for key in (key for key in theirs if "norm" in key):  # which are not rounded again
        assert theirs[key].tobytes() == arrays[key].tobytes(), key
    good("reshard", back, tmp_path / "megatron", "--target-format", "torch_dist")
    good("diff", back, tmp_path / "megatron", "--atol", 2**-7)
    command = ("hf-to-megatron", source, tmp_path / "no", "--format", "orbax")
    refused(4, *accepted("gemma2"), args=command)
    config = json.loads((source / "config.json").read_text())
    tiny.write_json(source / "config.json", config | {"query_pre_attn_scalar": 3})
    refused(4, "Gemma 2 and 3 only", args=(*command, *accepted("gemma2")))


def there_and_back(source: Path) -> maxtext.Arrays:
    """Returns the tensors of Gemma 3 that MaxText's to_huggingface makes of those that its
    to_maxtext makes of a directory: the sums and products are rounded each way. Those of the vision
    tower are the same.
    """
    import ml_dtypes

    config, out = json.loads((source / "config.json").read_text()), {}
    width = config.get("text_config", config)["hidden_size"]
    one, root = map(ml_dtypes.bfloat16, (1, width**0.5))
    for key, array in arrays_of(source).items():
        if "embed_tokens" in key:
            array = (array * root) / root
        elif "norm" in key and "vision" not in key and "multi_modal" not in key:
            array = (array + one) - one
        out[key] = array
    return out


@judged
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("gemma3-6", ("ocdbt", "zarr3", "state")),
        ("gemma3-13", ("zarr3",)),
        ("gemma3-8", ("ocdbt", "unscanned")),
    ],
)
def test_gemma_3_of_orbax_is_read(
    case: str, how: tuple[str, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = model_of(case, tiny_model, tmp_path)
    arrays = expected(source, "unscanned" not in how)
    step = maxtext.save(arrays, tmp_path / "run", *how)
    good("megatron-to-hf", step, tmp_path / "back", "--like", source)
    same(arrays_of(tmp_path / "back"), there_and_back(source))
    good("check", step, "--like", source)
    good(
        *("reshard", step, tmp_path / "orbax", "--like", source, "--target-format", "orbax"),
        *["--no-optimizer"] * ("state" in how),
    )
    same(by_tensorstore(tmp_path / "orbax" / "release" / "items"), arrays)


@judged
def test_gemma_3_keeps_its_vision_tower_beside_the_text_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(tiny_model("gemma3_vl"), source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
    tiny.write_json(source / "config.json", config)
    out = written(source, tmp_path / "out", *accepted("gemma3-8"))
    arrays = by_tensorstore(out / "release" / "items")
    same(arrays, expected(source))
    good("megatron-to-hf", out, tmp_path / "back")
    same(arrays_of(tmp_path / "back"), there_and_back(source))
    # MaxText's own files of the models have fewer rows than these
    key = "params.params.token_embedder.embedding"
    fewer = maxtext.save({**arrays, key: arrays[key][:-64]}, tmp_path / "fewer", "ocdbt", "zarr3")
    command = ("megatron-to-hf", fewer, tmp_path / "cut", "--like", source)
    refused(3, "token_embedder.embedding is [192, 40]", args=command)
    good(*command, "--set", "vocab_size=192")
    wanted = there_and_back(source)
    (name,) = (name for name in wanted if "embed_tokens" in name)
    same(arrays_of(tmp_path / "cut"), {**wanted, name: wanted[name][:-64]})
    # and a multimodal checkpoint has the tower
    more = {"params.params.vision_encoder.Gemma3VisionEncoderLayer_0.pos_embedding": arrays[key]}
    tower = maxtext.save({**arrays, **more}, tmp_path / "tower", "ocdbt", "zarr3")
    refused(
        5,
        "pos_embedding",
        "to_huggingface",
        args=("megatron-to-hf", tower, tmp_path / "no", "--like", source),
    )


def test_gemma_3_of_megatron_becomes_maxtext_and_back(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = model_of("gemma3-8", tiny_model, tmp_path)
    good("hf-to-megatron", source, tmp_path / "tp2", "--tp", 2, "--pp", 2)
    command = ("reshard", tmp_path / "tp2", tmp_path / "orbax", "--target-format", "orbax")
    refused(4, *accepted("gemma3-8"), args=command)
    good(*command, *accepted("gemma3-8"))
    same(by_tensorstore(tmp_path / "orbax" / "release" / "items"), expected(source))
    sizes = ("--target-format", "torch_dist", "--target-tp", 2, "--target-pp", 2)
    good("reshard", tmp_path / "orbax", tmp_path / "again", *sizes)
    good("megatron-to-hf", tmp_path / "again", tmp_path / "back", "--like", source)
    same(arrays_of(tmp_path / "back"), there_and_back(source))


@pytest.mark.parametrize(
    "changed",
    [
        {"query_pre_attn_scalar": 24},  # neither the width of a head nor that of the model by head
        {"sliding_window_pattern": 5},
        {"attn_logit_softcapping": 50.0},
    ],
)
def test_models_like_gemma_3_are_refused(
    changed: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = model_of("gemma3-6", tiny_model, tmp_path)
    config = json.loads((source / "config.json").read_text())
    tiny.write_json(source / "config.json", config | changed)
    command = ("hf-to-megatron", source, tmp_path / "no", "--format", "orbax")
    refused(4, "Gemma 2 and 3 only", args=(*command, *accepted("gemma3-6")))


def test_megatron_becomes_maxtext_and_back(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("qwen3-moe")
    good("hf-to-megatron", source, tmp_path / "tp2", "--tp", 2, "--ep", 2)
    good("reshard", tmp_path / "tp2", tmp_path / "orbax", "--target-format", "orbax")
    same(by_tensorstore(tmp_path / "orbax" / "release" / "items"), expected(source))
    sizes = ("--target-format", "torch_dist", "--target-tp", 2, "--target-ep", 2)
    with monkeypatch.context() as patched:  # what mckpt wrote needs no decoding
        patched.setattr(Arrays, "read", None)
        good("reshard", tmp_path / "orbax", tmp_path / "again", *sizes)
    good("diff", tmp_path / "tp2", tmp_path / "again")
    for option in (("--tp", 2), ("--make-vocab-size-divisible-by", 8), ("--dialect", "gpt")):
        arguments = ("hf-to-megatron", source, tmp_path / "no", "--format", "orbax", *option)
        refused(2, option[0].replace("--tp", "sizes"), args=arguments)


def test_the_factor_of_the_queries_is_said_and_rounded_as_maxtext_does(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, out = tiny_model("llama"), tmp_path / "out"
    command = ("hf-to-megatron", source, out, "--format", "orbax")
    refused(4, "q_scale", "--allow-inexact q_scale", args=command)
    assert "86% are the same" in good(*command, *ACCEPT).err
    stored = by_tensorstore(out / "release" / "items")
    key = f"{maxtext.PREFIX}decoder.layers.self_attention.query.kernel"
    width = mckpt.open(source).dims["head_dim"]
    back = stored[key].astype(np.float32) * np.float32(np.sqrt(width))
    found = mckpt.open(out)["layers.2.attn.q.weight"].numpy()
    assert found.tobytes() == back[:, 2].astype(found.dtype).reshape(len(back), -1).T.tobytes()
    plain = mckpt.open(source)["layers.2.attn.q.weight"].numpy()
    steps = np.abs(found.view(np.int16).astype(int) - plain.view(np.int16))
    assert steps.max() == 1 and 0.8 < (steps == 0).mean() < 0.92
    # between two checkpoints of MaxText nothing is rounded again
    good("reshard", out, tmp_path / "apart", "--target-format", "orbax", *APART)
    apart = by_tensorstore(tmp_path / "apart" / "release" / "items")
    assert apart[key.replace("layers", "layers_2")].tobytes() == stored[key][:, 2].tobytes()


def test_rows_and_columns_of_an_edit_keep_the_factors_of_maxtext(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = model_of("gemma2", tiny_model, tmp_path)
    count = mckpt.open(source).dims["vocab_size"]
    tiny.write_json(tmp_path / "ids.json", {str(n): count - 1 - n for n in range(count)})
    step = ("--edit", f"vocab: {{map: {tmp_path / 'ids.json'}}}")
    good("edit", source, tmp_path / "out", *step, "--format", "orbax", *accepted("gemma2"))
    arrays, key = expected(source), f"{maxtext.PREFIX}token_embedder.embedding"
    turned = {**arrays, key: np.ascontiguousarray(arrays[key][::-1])}
    same(by_tensorstore(tmp_path / "out" / "release" / "items"), turned)
    good("megatron-to-hf", tmp_path / "out", tmp_path / "there")
    good("edit", tmp_path / "out", tmp_path / "back", *step, "--format", "hf")
    there, back = arrays_of(tmp_path / "there"), arrays_of(tmp_path / "back")
    name = "model.embed_tokens.weight"
    same(back, {**there, name: np.ascontiguousarray(there[name][::-1])})
    out = written(tiny_model("llama"), tmp_path / "llama", *ACCEPT)
    good("megatron-to-hf", out, tmp_path / "whole")
    narrow = ("--edit", "prune: {hidden: [20-28, 3-9]}", "--format", "hf")
    good("edit", out, tmp_path / "narrow", *narrow)
    whole, kept = arrays_of(tmp_path / "whole"), [*range(20, 29), *range(3, 10)]
    for name, array in arrays_of(tmp_path / "narrow").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            assert array.tobytes() == whole[name][:, kept].tobytes(), name


def test_damage_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A file that is cut or not there is an error, and so is a changed byte of an index. Chunks
    have no checksum; those that mckpt wrote have one in mckpt.json.
    """
    assert crc32c(b"123456789") == 0xE3069283
    out, copy = written(tiny_model("qwen3"), tmp_path / "out"), tmp_path / "copy"
    wanted = {name: tensor.numpy().tobytes() for name, tensor in mckpt.open(out).items()}
    items = out / "release" / "items"
    array = items / f"{maxtext.PREFIX}decoder.layers.mlp.wo.kernel"
    described, data = array / "zarr.json", array / "0.1.0"
    shape = json.loads(described.read_text())["shape"]
    first = {data: 2 * shape[0] * shape[2]}  # where the index begins
    for file in (items / "_METADATA", described, data):
        whole = file.read_bytes()
        start = first.get(file, 0)
        flips = range(start, len(whole), max(1, (len(whole) - start) // 12))
        flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in flips]
        for damaged in (None, b"", whole[: len(whole) // 2], whole[:-1], *flipped):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(out, copy)
            (copy / "release" / "mckpt.json").unlink()
            place = copy / file.relative_to(out)
            place.unlink() if damaged is None else place.write_bytes(damaged)
            try:
                found = {k: tensor.numpy().tobytes() for k, tensor in mckpt.open(copy).items()}
            except MckptError as error:
                assert error.exit_code == 3
                continue
            assert found == wanted and damaged in flipped and file != data
    data.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    said = mckpt_said("check", out)
    assert said.code == 3 and f"{data}: has the checksum crc32:" in said.out


def test_damage_of_each_file_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The arrays of `items` alone have no checksums, which are in mckpt.json."""
    out, hf = written(tiny_model("qwen3"), tmp_path / "run"), tmp_path / "hf"
    commands = (damages.WEIGHTS, ("reshard", "--target-format", "torch_dist"))
    assert damages.of_each_file(out, tmp_path / "out", commands=commands) == set()
    shutil.move(out / "hf", hf)
    how: dict[str, Any] = {"like": hf, "commands": commands, "checksums": False}
    unread = damages.of_each_file(out / "release/items", tmp_path / "again", **how)
    assert unread == {"_CHECKPOINT_METADATA"}


def trained(case: str, tiny_model: TinyModel, folder: Path, *how: str) -> tuple[Path, Path]:
    """Returns a model in fp32, and the checkpoint of a training of it by optax."""
    source, run = model_of(case, tiny_model, folder, "float32"), folder / "run"
    step = maxtext.save(expected(source, "unscanned" not in how), run, "state", "trained", *how)
    (run / "config.yml").write_text("".join(f"{k}: {v:.9f}\n" for k, v in maxtext.ADAM.items()))
    return source, step


@judged
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("qwen3", ("ocdbt", "zarr3")),
        ("qwen3-moe", ("unscanned", "zarr3")),
        ("deepseek-v3-plain", ("ocdbt",)),
        ("llama", ("ocdbt", "zarr3")),
        ("gemma2", ("ocdbt", "zarr3")),
        ("gemma3-8", ("unscanned", "zarr3")),
        ("gemma3-13", ("zarr3",)),
    ],
)
def test_adam_of_optax_goes_on_in_megatron(
    case: str, how: tuple[str, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """torch's AdamW makes the next step of a checkpoint of Megatron, and optax of the one that this
    was made of. The weights are the same then, but for those that MaxText stores times a number: a
    step in them is another one.
    """
    import ml_dtypes
    import torch

    source, step = trained(case, tiny_model, tmp_path, *how)
    version = 0.19 if "gemma" in case else 0.18
    sizes = ("--target-tp", 2, "--target-format", "torch_dist", "--megatron-version", version)
    command = ("reshard", step, tmp_path / "megatron", "--like", source, *sizes)
    said = good(*command, *accepted(case)).err
    assert ("steps of layers.{layer}.attn.q.weight" in said) == (case in ("llama", "gemma2")), said
    assert ("steps of embed.weight" in said) == ("gemma" in case), said
    assert "every element of the source is used" in said
    own = Checkpoint.open(tmp_path / "megatron", SourceOptions(like=str(source)))
    assert own.files.iteration == maxtext.STEPS and own.optimizer is not None
    (group, plain), states = own.optimizer.groups[0], own.with_optimizer()
    assert (group["step"], group["betas"], group["eps"]) == (maxtext.STEPS, (0.9, 0.95), 1e-8)
    assert (group["weight_decay"], plain["weight_decay"], group["lr"]) == (0.1, 0.0, 1e-3)
    after = maxtext.save(maxtext.read(tmp_path / "run/next.npz"), tmp_path / "after", "zarr3")
    wanted = Checkpoint.open(after, SourceOptions(like=str(source)))
    for name in own:
        scale, added = np.float32(1), np.float32("gemma" in case and "norm" in name)
        if case in ("llama", "gemma2") and name.endswith("attn.q.weight"):
            scale /= np.float32(np.sqrt(own.dims["head_dim"]))
        if "gemma" in case and name == "embed.weight":
            root = np.float32(np.sqrt(own.dims["hidden_size"]))
            scale = np.float32(ml_dtypes.bfloat16(root)) if "gemma3" in case else root
        if "score_correction" in name:  # a buffer
            assert f"{name}@master" not in states
            continue
        master = states[f"{name}@master"].numpy()
        assert (own[name].numpy() == master).all()
        weight = torch.nn.Parameter(torch.tensor(master))
        weight.grad = torch.tensor(scale * maxtext.gradient(scale * master + added))
        adam = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        moments = {kind: torch.tensor(states[f"{name}@{kind}"].numpy()) for kind in MOMENTS}
        adam.state[weight] = {"step": torch.tensor(float(maxtext.STEPS)), **moments}
        adam.step()
        kept = np.float32(1 - 1e-3 * 0.1)
        # by Adam, in what MaxText stores
        moved = scale * (wanted[name].numpy() - kept * master) + (1 - kept) * added
        found = weight.detach().numpy()
        least = 3e-7 * max(1, float(scale))
        np.testing.assert_allclose(found, kept * master + moved, rtol=3e-7, atol=least)


@judged
@pytest.mark.parametrize(
    ("case", "how", "order"),
    [
        ("gemma2", ("ocdbt", "zarr3"), (2, 3, 0, 1)),
        ("gemma3-8", ("zarr3",), (0, 1, 2, 3, 4, 5)),
        ("gemma3-8", ("unscanned", "zarr3"), (0, 1, 2, 3, 4, 5)),
    ],
)
def test_adam_of_optax_follows_edits(
    case: str, how: tuple[str, ...], order: tuple[int, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The weights and states are rows of those without an edit, whose factors are judged above."""
    source, step = trained(case, tiny_model, tmp_path, *how)
    options = ("--like", source, *accepted(case))
    good("reshard", step, tmp_path / "whole", *options, "--target-format", "torch_dist")
    whole = Checkpoint.open(tmp_path / "whole").with_optimizer()
    count = whole.dims["vocab_size"]
    tiny.write_json(tmp_path / "ids.json", {str(n): count - 1 - n for n in range(count)})
    edits = [
        f"vocab: {{map: {tmp_path / 'ids.json'}}}",
        f"layers: {{order: {list(order)}}}",
        "prune: {ffn: [5-20, 1-3]}",
    ]
    arguments = [part for edit in edits for part in ("--edit", edit)]
    good("edit", step, tmp_path / "out", *options, *arguments, "--format", "torch_dist")
    found, kept = Checkpoint.open(tmp_path / "out").with_optimizer(), [*range(5, 21), 1, 2, 3]
    layers = {name for name in whole if name.startswith(f"layers.{order[0]}.")}
    assert len(found) == 4 * 2 + len(layers) * len(order)
    for name in found:
        _, layer, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", "")
        wanted = whole[f"layers.{order[int(layer)]}.{rest}" if layer else name].numpy()
        if name.startswith("embed."):
            wanted = wanted[::-1]
        elif rest.startswith(("mlp.gate.", "mlp.up.")):
            wanted = wanted[kept]
        elif rest.startswith("mlp.down."):
            wanted = wanted[:, kept]
        assert (found[name].numpy() == wanted).all(), name


@judged
def test_adam_without_its_settings_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, step = trained("qwen3", tiny_model, tmp_path, "ocdbt", "zarr3")
    config, metadata = tmp_path / "run/config.yml", step / "items/_METADATA"
    command = ("reshard", step, tmp_path / "out", "--like", source, "--target-format", "torch_dist")
    text = config.read_text()
    config.write_text(re.sub("adam_eps_root.*", "adam_eps_root: 0.001", text))
    refused(2, "adam_eps_root must be 0", args=command)
    config.write_text(f"{text}opt_type: nadamw\n")  # whose states have the names of adamw's
    refused(2, "another optimizer than adamw", "opt_type is 'nadamw'", args=command)
    config.write_text(f"{text}opt_type: adamw\n")
    config.unlink()
    refused(2, "config.yml", "--no-optimizer", args=command)
    good("inspect", step)
    good("check", step, "--like", source)
    good("megatron-to-hf", step, tmp_path / "back", "--like", source)
    good(*command, "--no-optimizer")
    assert not mckpt.diff(tmp_path / "out", tmp_path / "back")
    (step / "config.yml").write_text(text)  # of one step
    good("reshard", step / "items", tmp_path / "items", *command[3:])
    described = json.loads(metadata.read_text())
    tree = json.loads(json.dumps(described["tree_metadata"]).replace('"nu"', '"nu_max"'))
    more = {f"{key} more": entry for key, entry in tree.items()} | described["tree_metadata"]
    tiny.write_json(metadata, described | {"tree_metadata": more})  # as optax's amsgrad
    refused(2, "opt_state.0.nu_max.", args=(*command[:2], tmp_path / "max", *command[3:]))
    for lost in ("('opt_state', '0', 'nu', 'params', 'decoder', 'decoder_norm', 'scale')", COUNT):
        tree = {k: entry for k, entry in described["tree_metadata"].items() if k != lost}
        assert len(tree) == len(described["tree_metadata"]) - 1
        tiny.write_json(metadata, described | {"tree_metadata": tree})
        refused(3 if "nu" in lost else 2, args=(*command[:2], tmp_path / "lost", *command[3:]))
    for entry in described["tree_metadata"].values():
        entry["key_metadata"] = [part for part in entry["key_metadata"] if part["key"] != "0"]
    tiny.write_json(metadata, described)
    refused(2, "opt_state of adam_pax", args=(*command[:2], tmp_path / "pax", *command[3:]))
