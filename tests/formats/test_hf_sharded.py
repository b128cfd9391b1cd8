"""Checkpoints in the parts of the ranks: DTensors of torch.save, as verl has them, and the files of
torch's HuggingFaceStorageWriter, as NeMo AutoModel has them. torch itself writes the samples.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from tests.helpers import damages, made_models, tiny
from tests.helpers.commands import Pt, good, refused, save_hostile
from tests.helpers.commands import mckpt as run
from tests.helpers.fsdp_samples import SMALL, SMALL_MOE

# sizes that 4 ranks do not divide, and some that are less than 4
CASES = {"qwen3": SMALL, "qwen3-moe": SMALL_MOE, "qwen3-moe, stacked": SMALL_MOE}
FORMS = ("verl", "hsdp", "columns", "model")
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the function that returns a directory with a model in all forms, and the model itself
    in `hf`.
    """
    return functools.cache(lambda case: sample(case, tmp_path_factory.mktemp("saved")))


def sample(case: str, folder: Path) -> Path:
    name = case.partition(",")[0]
    config = tiny.config(name) | CASES[case]
    (folder / "hf").mkdir()
    tiny.write_json(folder / "hf/config.json", config)
    (folder / "hf/tokenizer.json").write_text("{}")
    arrays = tiny.tensors(config)
    if "stacked" in case:
        arrays = stacked(arrays)
    tiny.write_weights(folder / "hf", arrays)
    return made_models.save_by_ranks(folder)


@pytest.fixture(params=CASES)
def saved(request: pytest.FixtureRequest, samples: Callable[[str], Path]) -> Path:
    return samples(request.param)


@pytest.fixture
def dense(samples: Callable[[str], Path]) -> Path:
    return samples("qwen3")


def stacked(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors with all experts of a layer in one, as transformers 5 has them."""
    of: dict[str, dict[str, dict[int, Any]]] = {}
    out = {}
    for key, value in arrays.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", key):
            of.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = value
        else:
            out[key] = value
    for start, found in of.items():
        all_of = {name: np.stack([own[i] for i in range(len(own))]) for name, own in found.items()}
        out[f"{start}.gate_up_proj"] = np.concatenate([all_of["gate"], all_of["up"]], 1)
        out[f"{start}.down_proj"] = all_of["down"]
    return out


@pytest.mark.parametrize("form", FORMS)
def test_the_joined_parts_are_the_model(form: str, saved: Path, tmp_path: Path) -> None:
    source, hf = saved / form, saved / "hf"
    assert good("diff", source, hf).out.startswith("the same to the last bit")
    said = good("inspect", source).out
    assert "format: hf_sharded" in said and "Qwen3" in said
    assert "sound" in good("check", source).out
    good("megatron-to-hf", source, tmp_path / "hf")
    assert not mckpt.diff(tmp_path / "hf", hf)
    assert (tmp_path / "hf/tokenizer.json").read_text() == "{}"
    said = good("plan", source, tmp_path / "run", "--target-tp", 2).out
    assert "every element of the target is written exactly once" in said
    assert "every element of the source is used" in said
    mckpt.convert(source, tmp_path / "run", tp=2, ep=2 if "moe" in said else 1)
    assert not mckpt.diff(tmp_path / "run", hf)


def test_states_of_weights_in_bf16_are_written_in_fp32(dense: Path, tmp_path: Path) -> None:
    source = dense / "verl"
    assert "left behind: optimizer" in good("plan", source, tmp_path / "run").out
    good("reshard", source, tmp_path / "weights", "--no-optimizer")
    good("reshard", source, tmp_path / "run")
    own, model = Checkpoint.open(tmp_path / "run").with_optimizer(), Checkpoint.open(source)
    for name in model:
        weight = model[name].numpy().astype("f4")
        assert (own[f"{name}@master"].numpy() == weight).all()
        moment = own[f"{name}@exp_avg"].numpy()
        assert moment.dtype == np.float32
        np.testing.assert_allclose(moment, 0.3 * weight, rtol=2**-7)
    hsdp = good("diff", source, dense / "hsdp").out  # the same training on another mesh
    assert f"the same to the last bit: {4 * len(model)} logical tensors equal" in hsdp
    other = shutil.copytree(source, tmp_path / "other")
    for rank in range(4):
        file = Pt(other / f"optim_world_size_4_rank_{rank}.pt")
        own_state = file.value["state"][7]["exp_avg"].args[3][1]["_local_tensor"].args[0]
        file.data[own_state.key] = bytes(len(file.data[own_state.key]))
        file.save()
    said = run("diff", source, other)
    assert said.code == 1 and "@exp_avg: " in said.out and " 1 differ" in said.out


# ------------------------------------------------------------------------------------------ damage

RANK = "model_world_size_4_rank_{}.pt".format
SHARD = "shard-0000{}-model-00001-of-00002.safetensors".format


def restated(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Returns a damage of the offsets that the header of the second rank's file states."""

    def damage(folder: Path) -> None:
        path = folder / SHARD(2)
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        change(info)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def at(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda info: [one.update(saved_offsets=value) for one in info.values()]


def placed(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Returns a damage of what the DTensor of the norm states in the file of rank 1."""

    def damage(folder: Path) -> None:
        file = Pt(folder / RANK(1))
        change(file.value[NORM])
        file.save()

    return damage


def spec(record: Any) -> Any:
    return record.args[3][1]["_spec"].state


def lost(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-99])


def moved(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / to)


def copied(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def wrong_size(folder: Path) -> None:
    (folder / "fsdp_config.json").write_text('{"world_size": 8}')


DAMAGES: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "no file of a rank": ("verl", lost(RANK(2)), ("the files of rank 2 of 4 ranks are not there",)),
    "no file of the last rank": ("verl", lost(RANK(3)), ("rank 3 of 4 ranks",)),
    "a rank of another number": ("verl", moved(RANK(3), RANK(9)), ("rank 3 of 4 ranks",)),
    "another size in a name": (
        "verl",
        moved(RANK(1), "model_world_size_8_rank_1.pt"),
        ("files are of several runs", "model_world_size_8_rank_1.pt"),
    ),
    "another size in fsdp_config.json": ("verl", wrong_size, ("fsdp_config.json", "[4, 8]")),
    "a file of another rank": (
        "verl",
        copied(RANK(0), RANK(1)),
        ("4 ranks are not a mesh of [4]",),
    ),
    "a cut file": ("hsdp", cut(RANK(1)), (RANK(1),)),
    "a hostile pickle": (
        "verl",
        lambda folder: save_hostile(folder / RANK(1), folder / "mark"),
        (RANK(1),),
    ),
    "no state dict": (
        "verl",
        lambda folder: (folder / RANK(1)).write_bytes(b"PK"),
        (RANK(1),),
    ),
    "a mesh of one rank": (
        "verl",
        placed(lambda record: spec(record)["mesh"].state.update(_coordinate_on_dim=None)),
        (RANK(1), "is not a tensor that mckpt reads"),
    ),
    "no axis of this number": (
        "verl",
        placed(lambda record: spec(record)["placements"][0].state.update(dim=4)),
        (RANK(1), "a DTensor placed as Shard 4"),
    ),
    "a file of safetensors less": (
        "model",
        lost(SHARD(2)),
        (f"{SHARD(2)}: not there", "covered", "Copy the files"),
    ),
    "the last file of safetensors less": ("model", lost(SHARD(4)), ("should be",)),
    "a cut file of safetensors": ("model", cut(SHARD(2)), (SHARD(2), "truncated")),
    "no offsets": ("model", restated(at(None)), (SHARD(2), "DCP_SHARDING_INFO", "copy")),
    "negative offsets": ("model", restated(at([-1, 0])), (SHARD(2), "offset of this part")),
    "offsets of another part": (
        "model",
        restated(lambda info: [one["saved_offsets"].__setitem__(0, 1) for one in info.values()]),
        ("overlap",),
    ),
    "no description of the parts": (
        "model",
        lambda folder: tiny.write_safetensors(folder / SHARD(2), {NORM: np.zeros(4, "f4")}),
        (SHARD(2), "has no DCP_SHARDING_INFO"),
    ),
    "files of two programs": (
        "model",
        lambda folder: (folder / RANK(0)).write_bytes(b""),
        (RANK(0),),
    ),
    "no config.json": (
        "verl",
        lambda folder: shutil.rmtree(folder / "huggingface"),
        ("config.json",),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_an_error_that_names_its_place(name: str, dense: Path, tmp_path: Path) -> None:
    form, damage, words = DAMAGES[name]
    source = tmp_path / "src"
    shutil.copytree(dense / form, source)
    damage(source)
    code = 8 if "hostile" in name else 3
    refused(code, *words, args=("megatron-to-hf", source, tmp_path / "out"))
    assert not (tmp_path / "out").exists() and not (source / "mark").exists()


@pytest.mark.parametrize("form", ["verl", "model"])
def test_damage_of_each_file_is_found(form: str, dense: Path, tmp_path: Path) -> None:
    """The elements of safetensors have no checksums."""
    source = shutil.copytree(dense / form, tmp_path / form)
    for path in source.glob("optim*"):
        path.unlink()
    unread = damages.of_each_file(source, tmp_path / "out", checksums=form == "verl")
    assert [name.rpartition("/")[2] for name in unread] == ["tokenizer.json"]  # which is copied


def test_check_finds_a_flipped_byte(dense: Path, tmp_path: Path) -> None:
    shutil.copytree(dense / "verl", tmp_path / "src")
    path = tmp_path / "src" / RANK(1)
    raw, file = bytearray(path.read_bytes()), Pt(path)
    data = file.data[file.value[NORM].args[3][1]["_local_tensor"].args[0].key]
    raw[raw.index(data)] ^= 1
    path.write_bytes(raw)
    said = run("check", tmp_path / "src")
    assert said.code == 3 and RANK(1) in said.out and "checksum" in said.out
