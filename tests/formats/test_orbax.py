"""Checkpoints of MaxText in the format of Orbax: what mckpt writes, Orbax restores, and the other
way round.

ORBAX_PYTHON is the Python of an environment with orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.containers import ocdbt
from mckpt.errors import MckptError
from tests.helpers import maxtext, tiny
from tests.helpers.commands import good, refused
from tests.helpers.commands import mckpt as mckpt_said
from tests.helpers.tiny import TinyModel

tensorstore = pytest.importorskip("tensorstore")
judged = pytest.mark.skipif(not maxtext.PYTHON, reason="ORBAX_PYTHON names no Python with Orbax")
EXACT = ("qwen2", "qwen3-tied", "qwen3-moe", "deepseek-v3-plain", "llama-rope-scaled")
INEXACT = {
    "llama": ("q_scale",),
    "mixtral": ("q_scale",),
    "gemma2": ("norm_offset", "embed_scale", "q_scale"),
}
ACCEPT, APART = ("--allow-inexact", "q_scale"), ("--layer-keys", "per_layer")


def expected(source: Path, scan: bool = True) -> maxtext.Arrays:
    """Returns the arrays that MaxText's own conversion makes of a directory."""
    import ml_dtypes
    import torch
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    arrays = {
        key: value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if value.dtype == torch.bfloat16
        else value.numpy()
        for file in source.glob("*.safetensors")
        for key, value in load_file(file).items()
    }
    return maxtext.tree(config, arrays, scan)


def model_of(case: str, tiny_model: TinyModel, folder: Path) -> Path:
    """Returns a model; Gemma 2 with the scale of scores that its models of 2B and 9B have."""
    if case != "gemma2":
        return tiny_model(case)
    shutil.copytree(tiny_model(case), folder / "hf")
    config = json.loads((folder / "hf/config.json").read_text())
    tiny.write_json(
        folder / "hf/config.json", config | {"query_pre_attn_scalar": config["head_dim"]}
    )
    return folder / "hf"


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
    stored = {"driver": "ocdbt", "base": f"file://{items}/"}
    spec = {"driver": "zarr3", "fill_missing_data_reads": False}
    out = {}
    for key in (".".join(part["key"] for part in one["key_metadata"]) for one in tree):
        array = tensorstore.open({**spec, "kvstore": {**stored, "path": f"{key}/"}}).result()
        out[key] = array.read().result()
    return out


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("case", [*EXACT, *INEXACT])
def test_the_arrays_are_those_of_maxtext(
    case: str, scan: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mckpt.formats.megatron.orbax_writing.LARGEST", 1000 if scan else 1 << 20)
    source = model_of(case, tiny_model, tmp_path)
    out = written(source, tmp_path / "out", *accepted(case), *(() if scan else APART))
    found = by_tensorstore(out / "release" / "items")
    same(found, expected(source, scan))
    if maxtext.PYTHON and case in ("qwen3-moe", "llama", "gemma2"):
        same(maxtext.restore(out / "release" / "items", tmp_path), found)
    if case in EXACT:
        good("diff", source, out)
        good("megatron-to-hf", out, tmp_path / "back")
        good("diff", source, tmp_path / "back")


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
    assert ("opt_state" in good(*command).err) == ("state" in how)
    good("diff", source, tmp_path / "hf")
    good("check", step, "--like", source)
    items = step / "items"
    more = ("--like", source, *["--no-optimizer"] * ("state" in how))
    good("reshard", items, tmp_path / "orbax", "--target-format", "orbax", *more)
    good("diff", source, tmp_path / "orbax")


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
    command = ("hf-to-megatron", source, tmp_path / "no", "--format", "orbax")
    refused(4, *accepted("gemma2"), args=command)
    config = json.loads((source / "config.json").read_text())
    tiny.write_json(source / "config.json", config | {"query_pre_attn_scalar": 3})
    refused(4, "and Gemma 2 only", args=(*command, *accepted("gemma2")))


def test_megatron_becomes_maxtext_and_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen3-moe")
    good("hf-to-megatron", source, tmp_path / "tp2", "--tp", 2, "--ep", 2)
    good("reshard", tmp_path / "tp2", tmp_path / "orbax", "--target-format", "orbax")
    same(by_tensorstore(tmp_path / "orbax" / "release" / "items"), expected(source))
    sizes = ("--target-format", "torch_dist", "--target-tp", 2, "--target-ep", 2)
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


def test_damage_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A file that is cut or not there is an error, and so is a changed byte of an index. Chunks
    have no checksum; those that mckpt wrote have one in mckpt.json.
    """
    out, copy = written(tiny_model("qwen3"), tmp_path / "out"), tmp_path / "copy"
    wanted = {name: tensor.numpy().tobytes() for name, tensor in mckpt.open(out).items()}
    items = out / "release" / "items"
    (data,) = (items / "d").iterdir()
    index = data.read_bytes().index(b"\x0c\xdb\x20\xde")
    for file in (items / "_METADATA", items / "manifest.ocdbt", data):
        whole = file.read_bytes()
        first = index if file == data else 0
        flips = range(first, len(whole), max(1, (len(whole) - first) // 12))
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
            assert found == wanted and damaged in flipped and file.name == "_METADATA"
    data.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    said = mckpt_said("check", out)
    assert said.code == 3 and f"{data}: has the checksum crc32:" in said.out


def test_the_index_of_a_database_is_as_tensorstore_reads_it(tmp_path: Path) -> None:
    assert ocdbt.crc32c(b"123456789") == 0xE3069283
    values = {f"a/{n:04}": ocdbt.Value(n % 2, 10 * n, n) for n in range(300)}
    data = [np.random.default_rng(n).bytes(4000) for n in range(2)]
    node, manifest = ocdbt.database(["d/x", "d/y"], values, 1, 4000, bytes(range(16)))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(data[0])
    (tmp_path / "d" / "y").write_bytes(data[1] + node)
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert {key.decode() for key in store.list().result()} == values.keys()
    for key, (file, at, nbytes) in values.items():
        assert store[key] == data[file][at : at + nbytes]
