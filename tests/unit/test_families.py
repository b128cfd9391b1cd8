"""What lies in the files of a conversion, compared with what numpy makes of tests.helpers.tiny.

tests/formats/test_round_trips.py converts every family in every form, and back.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mckpt
from mckpt.containers import safe_pickle, torch_file
from mckpt.formats import hf_files
from mckpt.formats.megatron import torch as torch_format
from mckpt.formats.megatron import torch_dist
from mckpt.geometry.parallel import Parallel
from tests.helpers import tiny
from tests.helpers.tiny import TinyModel
from tests.unit.test_api_tensors import tensors as safetensors

UNEVEN: list[dict[str, Any]] = [
    {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    {"pp": 2, "vpp": 3, "account_for_embedding": True, "account_for_loss": True},
    {"pp": 4, "layout": "Et|t|t|t|(|)*3L"},
]


def index(directory: Path) -> None:
    """Asserts that model.safetensors.index.json is right, and that a single file has none."""
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    path = directory / "model.safetensors.index.json"
    if len(files) == 1:
        assert files == ["model.safetensors"]
        assert not path.exists()
        return
    said = json.loads(path.read_text())
    found = safetensors(directory)
    assert said["metadata"]["total_size"] == sum(len(data) for _, _, data in found.values())
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert sorted(set(said["weight_map"].values())) == files
    assert said["weight_map"].keys() == found.keys()
    for name, file in said["weight_map"].items():
        raw = (directory / file).read_bytes()
        assert name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]), (
            f"{name} is not in {file}"
        )


def test_shards_are_cut_at_the_size(tiny_model: TinyModel, tmp_path: Path) -> None:
    """No file of several tensors exceeds the limit, and no two neighbours fit into one."""
    mckpt.plan(tiny_model("qwen3-moe"), tmp_path / "a").run()
    mckpt.plan(tmp_path / "a", tmp_path / "hf", format="hf", max_shard_size=60_000).run()
    index(tmp_path / "hf")
    sizes = []
    for path in sorted((tmp_path / "hf").glob("*.safetensors")):
        held = safetensors_of(path)
        assert sum(held) <= 60_000 or len(held) == 1
        sizes.append((held[0], sum(held)))
    assert len(sizes) > 3
    assert all(before[1] + after[0] > 60_000 for before, after in itertools.pairwise(sizes))


def test_shards_have_about_the_same_size(tiny_model: TinyModel, tmp_path: Path) -> None:
    """There are no more files than necessary, and none is larger than the limit."""
    mckpt.plan(tiny_model("qwen3-moe"), tmp_path / "a").run()
    mckpt.plan(tmp_path / "a", tmp_path / "hf", format="hf", max_shard_size=700_000).run()
    index(tmp_path / "hf")
    found = [safetensors_of(path) for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    sizes, largest = [sum(held) for held in found], max(size for held in found for size in held)
    assert len(sizes) == -(-sum(sizes) // 700_000) == 4
    assert max(sizes) <= 700_000 and max(sizes) - min(sizes) <= 2 * largest


def safetensors_of(path: Path) -> list[int]:
    """Returns the bytes of each tensor of a file."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return [
        t["data_offsets"][1] - t["data_offsets"][0]
        for name, t in header.items()
        if name != "__metadata__"
    ]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 400))
def test_files_hold_the_tensors_in_order(sizes: list[int], most: int) -> None:
    files = hf_files.cut(sizes, most)
    assert files[0] == 0 and all(
        after - before in (0, 1) for before, after in itertools.pairwise(files)
    )
    for file in range(files[-1] + 1):
        held = [size for size, f in zip(sizes, files, strict=True) if f == file]
        assert sum(held) <= most or len(held) == 1
    assert files[-1] + 1 <= 2 * -(-sum(sizes) // most) + 1 or max(sizes) > most / 2


# ------------------------------------------------------------------------------------------ corners


@pytest.mark.parametrize("said", UNEVEN, ids=[str(Parallel(**s)) for s in UNEVEN])
def test_each_file_has_the_layers_of_its_stage(
    said: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    uneven = Parallel(tp=2, **said)
    mckpt.plan(tiny_model("llama"), tmp_path / "a", format="torch", parallel=uneven).run()
    source = mckpt.open(tmp_path / "a")
    for rank, virtual in enumerate(uneven.stages(4)):
        assert isinstance(source.opened, torch_format.Torch)
        models = source.opened._rank(uneven.directory(1, rank, 0)).models
        norms = [sum("layer_norm_weight" in k and "qkv" in k for k in m) for m in models]
        assert norms == [len(layers) for layers in virtual]


def raw_torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Returns (key, uint16 array) of each bf16 tensor of a model_optim_rng.pt whose tensors are
    dense.
    """
    with path.open("rb") as f:
        value, data = torch_file.read(f.fileno(), str(path))
        for key, record in value["model"].items():
            if (view := safe_pickle.as_tensor(record)) is not None:
                f.seek(data[view.storage][0])
                yield (
                    key,
                    np.frombuffer(f.read(2 * math.prod(view.shape)), "u2").reshape(view.shape),
                )


@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_padding_is_zero_and_dropped(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Pads 131 and 149 rows over 4 ranks to a multiple of 64 x 4, and compares each rank with
    numpy.
    """
    mckpt.plan(
        tiny_model(case), tmp_path / "a", format="torch", parallel=Parallel(tp=4), divisible_by=64
    ).run()
    embed = tiny.tensors(tiny.config(case))["model.embed_tokens.weight"].view("u2")
    padded = np.zeros((256, embed.shape[1]), "u2")
    padded[: len(embed)] = embed
    for rank, part in enumerate(np.split(padded, 4)):
        held = dict(
            raw_torch(tmp_path / "a" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
        )
        assert np.array_equal(held["embedding.word_embeddings.weight"], part)
        assert ("output_layer.weight" in held) == (case == "llama")
    mckpt.plan(tmp_path / "a", tmp_path / "padded", format="hf", keep_padding=True).run()
    assert safetensors(tmp_path / "padded")["model.embed_tokens.weight"][1] == list(padded.shape)
    assert safetensors(tmp_path / "padded")["model.embed_tokens.weight"][2] == padded.tobytes()
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 256


def test_a_tied_embedding_lies_on_the_first_and_the_last_stage(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """In the format `torch`, Megatron computes the logits with the copy on the last stage. mckpt
    reports a copy that differs.
    """
    mckpt.plan(
        tiny_model("llama-tied"), tmp_path / "a", format="torch", parallel=Parallel(pp=2)
    ).run()
    first, last = (
        tmp_path / "a" / "release" / f"mp_rank_00_{i:03d}" / "model_optim_rng.pt" for i in (0, 1)
    )
    assert np.array_equal(
        dict(raw_torch(first))["embedding.word_embeddings.weight"],
        dict(raw_torch(last))["output_layer.weight"],
    )
    assert "embedding.word_embeddings.weight" not in dict(raw_torch(last))
    rank = mckpt.open(tmp_path / "a").opened
    assert isinstance(rank, torch_format.Torch)
    entry = rank._rank("mp_rank_00_001").models[0]["output_layer.weight"]
    assert entry is not None
    with last.open("r+b") as f:
        f.seek(entry.at)
        f.write(b"\x01\x02")
    with pytest.raises(
        mckpt.errors.SourceError,
        match=r"embed\.weight: its copy in .*mp_rank_00_001.*output_layer\.weight.* differs",
    ):
        mckpt.plan(tmp_path / "a", tmp_path / "back", format="hf").run(check_replicas=True)


def test_one_rank_has_the_layout_computed_by_hand(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Checks rank 1 of the second stage of qwen3 at tp 2, pp 2 against numpy alone."""
    mckpt.plan(
        tiny_model("qwen3"),
        tmp_path / "a",
        format="torch",
        parallel=Parallel(tp=2, pp=2),
        transformer_impl="transformer_engine",
    ).run()
    held = dict(raw_torch(tmp_path / "a" / "release" / "mp_rank_01_001" / "model_optim_rng.pt"))
    hf = {k: v.view("u2") for k, v in tiny.tensors(tiny.config("qwen3")).items()}
    groups = tiny.config("qwen3")["num_key_value_heads"]
    wanted = {"decoder.final_layernorm.weight": hf["model.norm.weight"]}
    head = np.zeros((256, tiny.config("qwen3")["hidden_size"]), "u2")
    head[: len(hf["lm_head.weight"])] = hf["lm_head.weight"]
    wanted["output_layer.weight"] = head[128:]
    for local, layer in ((0, 2), (1, 3)):
        at, ours = f"model.layers.{layer}.", f"decoder.layers.{local}."
        q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
        qkv = np.concatenate([x.reshape(groups, -1, x.shape[1]) for x in (q, k, v)], 1).reshape(
            -1, q.shape[1]
        )
        gate, up = (np.split(hf[f"{at}mlp.{x}_proj.weight"], 2)[1] for x in ("gate", "up"))
        wanted[f"{ours}self_attention.linear_qkv.weight"] = np.split(qkv, 2)[1]
        wanted[f"{ours}self_attention.linear_qkv.layer_norm_weight"] = hf[
            f"{at}input_layernorm.weight"
        ]
        wanted[f"{ours}self_attention.q_layernorm.weight"] = hf[f"{at}self_attn.q_norm.weight"]
        wanted[f"{ours}self_attention.k_layernorm.weight"] = hf[f"{at}self_attn.k_norm.weight"]
        wanted[f"{ours}self_attention.linear_proj.weight"] = np.split(
            hf[f"{at}self_attn.o_proj.weight"], 2, 1
        )[1]
        wanted[f"{ours}mlp.linear_fc1.layer_norm_weight"] = hf[
            f"{at}post_attention_layernorm.weight"
        ]
        wanted[f"{ours}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        wanted[f"{ours}mlp.linear_fc2.weight"] = np.split(hf[f"{at}mlp.down_proj.weight"], 2, 1)[1]
    assert held.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(held[name], array), name


def test_torch_dist_has_stacked_or_layer_keys(tmp_path: Path) -> None:
    """Only a model of mixed layers needs per-layer keys. A reshard keeps what it finds."""
    for dense, key in (
        ([], "decoder.layers.self_attention.linear_proj.weight"),
        ([0, 2], "decoder.layers.3.self_attention.linear_proj.weight"),
    ):
        work = tmp_path / str(len(dense))
        source = tiny.tiny_random("qwen3-moe", work / "hf", mlp_only_layers=dense)
        mckpt.plan(source, work / "a").run()
        mckpt.plan(work / "a", work / "b", parallel=Parallel(tp=2)).run()
        for name in ("a", "b"):
            stored = mckpt.open(work / name).opened
            assert isinstance(stored, torch_dist.TorchDist)
            assert key in stored.metadata.tensors


def test_an_export_has_its_layers_in_order(tiny_model, tmp_path):
    """The copies of the embedding that belong to a layer of multi-token prediction come with it."""
    mckpt.convert(tiny_model("deepseek-v3"), tmp_path / "megatron")
    mckpt.convert(tmp_path / "megatron", tmp_path / "hf", format="hf")
    with open(tmp_path / "hf" / "model.safetensors", "rb") as f:
        names = list(json.loads(f.read(int.from_bytes(f.read(8), "little"))))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) and max(layers) == 4
