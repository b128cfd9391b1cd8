"""Every family in every form, from Hugging Face to Megatron and back, bit for bit.

The combinations are chosen such that each case meets every value of every axis. The expected bytes
come from tests.helpers.tiny, not from mckpt.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

INEXACT = ["rope_factor"]  # of llama-rope-scaled
# some layers are dense, so torch_dist needs one key for each layer
MIXED = "qwen3-moe-mixed"
CASES = (*tiny.CASES, MIXED)
MOE = ("mixtral", "qwen3-moe", "qwen3-moe-raw", "deepseek-v3", "deepseek-v3-plain", MIXED)
HEAVY = ("deepseek-v3", "deepseek-v3-plain")  # tests/formats/test_family_chains.py has theirs
LEGS = 5  # forms of each case; each is reached from another one

AXES: dict[str, tuple[Any, ...]] = {
    "format": ("torch", "torch_dist"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "vpp": (1, 2),
    "ep": (1, 2, 4),
    "etp": (None, 1, 2, 4),
    "impl": ("transformer_engine", "local"),
    "grouped": (None, True, False),
    "common_as_object": (False, True),
    "divisible_by": (1, 128),
    "megatron": (None, "0.16"),
}


class Form(NamedTuple):
    """One way to store a checkpoint."""

    format: str
    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int | None
    impl: str
    grouped: bool | None
    common_as_object: bool
    divisible_by: int
    megatron: str | None

    def target(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "parallel": Parallel(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp),
            "transformer_impl": self.impl,
            "grouped_experts": self.grouped,
            "common_as_object": self.common_as_object,
            "divisible_by": self.divisible_by,
            "megatron_version": self.megatron,
            "allow_inexact": INEXACT,
        }

    def __str__(self) -> str:
        return "-".join(f"{k}{v}" for k, v in self._asdict().items() if v not in (1, None, False))


@functools.cache
def config(case: str) -> dict[str, Any]:
    if case != MIXED:
        return tiny.config(case)
    return {**tiny.config("qwen3-moe"), "mlp_only_layers": [0, 2]}


def tensors(case: str, dtype: str) -> dict[str, np.ndarray]:
    """Returns name -> values of every tensor of the case, made by hand."""
    if case != MIXED:
        return tiny.tensors(config(case), dtype)
    out = tiny.tensors(config(case), dtype)
    hidden, ffn = config(case)["hidden_size"], config(case)["intermediate_size"]
    for layer in config(case)["mlp_only_layers"]:
        at = f"model.layers.{layer}.mlp."
        out = {k: v for k, v in out.items() if not k.startswith(at)}
        for name, shape in (
            ("gate", (ffn, hidden)),
            ("up", (ffn, hidden)),
            ("down", (hidden, ffn)),
        ):
            out[f"{at}{name}_proj.weight"] = tiny.values(f"{at}{name}_proj.weight", shape).astype(
                tiny.DTYPES[dtype][1]
            )
    return out


def fits(case: str, layers: int, experts: int, f: Form) -> bool:
    """Returns whether Megatron could build the case in this form; other tests see that mckpt
    refuses.
    """
    return (
        layers % (f.pp * f.vpp) == 0
        and (f.vpp == 1 or f.pp > 1)
        and experts % f.ep == 0
        and (f.format == "torch_dist" or f.tp % (f.etp or f.tp) == 0)
        and not (f.grouped and f.impl == "local")
        and not (f.common_as_object and (f.format == "torch" or f.megatron is not None))
        and not (
            case == "deepseek-v3-plain" and f.impl == "transformer_engine" and f.megatron is None
        )
    )


@functools.cache
def possible(case: str) -> list[Form]:
    """Returns every form that fits the case."""
    without_experts: dict[str, tuple[Any, ...]] = {"ep": (1,), "etp": (None,), "grouped": (None,)}
    axes = AXES if case in MOE else AXES | without_experts
    c = config(case)
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((c[k] for k in keys if k in c), 1)
    every = itertools.starmap(Form, itertools.product(*axes.values()))
    return [f for f in every if fits(case, c["num_hidden_layers"], experts, f)]


@functools.cache
def forms(case: str) -> list[Form]:
    """Returns at least LEGS of the possible forms, with every value of every axis that fits the
    case.
    """
    rng = random.Random(case)
    every = possible(case)
    todo = {(axis, value) for f in every for axis, value in f._asdict().items()}
    out: list[Form] = []
    while todo or len(out) < LEGS:
        best = max(
            rng.sample(every, min(150, len(every))),
            key=lambda f: len(todo & set(f._asdict().items())),
        )
        out.append(best)
        todo -= set(best._asdict().items())
    rng.shuffle(out)
    return out


CHAINS = [
    (case, a, b) for case in CASES for a, b in itertools.pairwise([*forms(case), forms(case)[0]])
]


def chains(heavy: bool) -> pytest.MarkDecorator:
    """Parametrizes a test with the chains of the cases in HEAVY, or with all others."""
    mine = [chain for chain in CHAINS if (chain[0] in HEAVY) == heavy]
    ids = ["--".join(map(str, chain)) for chain in mine]
    return pytest.mark.parametrize(("case", "a", "b"), mine, ids=ids)


def safetensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns name -> (dtype, shape, bytes) of every tensor in the directory's files, read with
    json and slices.
    """
    out: dict[str, tuple[str, list[int], bytes]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, t in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                low, high = t["data_offsets"]
                assert name not in out
                out[name] = (t["dtype"], t["shape"], raw[start + low : start + high])
    return out


def same_tensors(directory: Path, wanted: dict[str, np.ndarray]) -> None:
    found = safetensors(directory)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name] == (tiny.LETTERS[array.dtype], list(array.shape), array.tobytes()), name


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory of each case; half of them in several files."""
    root = tmp_path_factory.mktemp("sources")
    out = {}
    for i, case in enumerate(CASES):
        out[case] = root / case
        out[case].mkdir()
        tiny.write_weights(out[case], tensors(case, "bfloat16"), 100_000 if i % 2 else None)
        tiny.write_json(out[case] / "config.json", {**config(case), "torch_dtype": "bfloat16"})
    return out


def test_the_chains_cover_every_value_of_every_axis() -> None:
    for case in CASES:
        mine = [a for c, a, _ in CHAINS if c == case]
        for axis, values in AXES.items():
            fit = {getattr(f, axis) for f in possible(case)}
            assert {getattr(f, axis) for f in mine} == fit
            assert fit == set(values) or axis == "pp" or case not in MOE, (
                f"{case} can have only {fit} of {axis}"
            )
    assert {(a.format, b.format) for _, a, b in CHAINS} == set(
        itertools.product(AXES["format"], repeat=2)
    )
    assert 60 <= len(CHAINS) <= 110


@chains(heavy=False)
def test_a_model_comes_back_after_a_reshard_bit_for_bit(
    case: str, a: Form, b: Form, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Converts HF -> a -> b -> HF. In chains with an odd number, only the args describe the model
    on the way back.
    """
    odd = CHAINS.index((case, a, b)) % 2
    mckpt.plan(sources[case], tmp_path / "a", **a.target()).run()
    found = mckpt.diff(sources[case], tmp_path / "a")
    assert not found, found.json()
    mckpt.plan(tmp_path / "a", tmp_path / "b", **b.target()).run(check_replicas=True)
    if odd:
        for path in sorted((tmp_path / "b" / "hf").iterdir()):
            path.unlink()
    mckpt.plan(
        tmp_path / "b", tmp_path / "back", format="hf", max_shard_size=150_000 if odd else 10**9
    ).run(check_replicas=True)
    same_tensors(tmp_path / "back", tensors(case, "bfloat16"))
    again, first = mckpt.open(tmp_path / "back"), mckpt.open(sources[case])
    free = {"ffn_size"} if case in MOE and case != MIXED else set()
    assert {k: v for k, v in again.dims.items() if k not in free} == {
        k: v for k, v in first.dims.items() if k not in free
    }
    index(tmp_path / "back")


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


def test_shards_are_cut_at_the_size(sources: dict[str, Path], tmp_path: Path) -> None:
    """No file of several tensors exceeds the limit, and no two neighbours fit into one."""
    mckpt.plan(sources["qwen3-moe"], tmp_path / "a").run()
    mckpt.plan(tmp_path / "a", tmp_path / "hf", format="hf", max_shard_size=60_000).run()
    index(tmp_path / "hf")
    sizes = []
    for path in sorted((tmp_path / "hf").glob("*.safetensors")):
        held = safetensors_of(path)
        assert sum(held) <= 60_000 or len(held) == 1
        sizes.append((held[0], sum(held)))
    assert len(sizes) > 3
    assert all(before[1] + after[0] > 60_000 for before, after in itertools.pairwise(sizes))


def test_shards_have_about_the_same_size(sources: dict[str, Path], tmp_path: Path) -> None:
    """There are no more files than necessary, and none is larger than the limit."""
    mckpt.plan(sources["qwen3-moe"], tmp_path / "a").run()
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


UNEVEN: list[dict[str, Any]] = [
    {"pp": 2, "first_stage_layers": 1},
    {"pp": 3, "last_stage_layers": 2},
    {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    {"pp": 2, "account_for_embedding": True, "account_for_loss": True},
    {"pp": 2, "vpp": 3, "account_for_embedding": True, "account_for_loss": True},
    {"pp": 2, "layout": "Ettt|tL"},
    {"pp": 2, "layout": "E|t*2|t,t|L"},
    {"pp": 4, "layout": "E|tt|tt|L"},
    {"pp": 4, "layout": "Et|t|t|t|(|)*3L"},
]


@pytest.mark.parametrize("said", UNEVEN, ids=[str(Parallel(**s)) for s in UNEVEN])
@pytest.mark.parametrize("case", ["llama-tied", "qwen3-moe"])
def test_uneven_pipelines_convert_and_come_back(
    case: str, said: dict[str, Any], sources: dict[str, Path], tmp_path: Path
) -> None:
    """Converts to `torch`, where layers are numbered within a stage, and back to even stages."""
    uneven = Parallel(tp=2, **said)
    mckpt.plan(sources[case], tmp_path / "a", format="torch", parallel=uneven).run()
    source = mckpt.open(tmp_path / "a")
    assert source.parallel == uneven
    assert not mckpt.diff(sources[case], source)
    for rank, virtual in enumerate(uneven.stages(4)):
        assert isinstance(source.opened, torch_format.Torch)
        models = source.opened._rank(uneven.directory(1, rank, 0)).models
        norms = [sum("layer_norm_weight" in k and "qkv" in k for k in m) for m in models]
        assert norms == [len(layers) for layers in virtual]
    mckpt.plan(tmp_path / "a", tmp_path / "b", format="torch", parallel=Parallel(tp=4, pp=4)).run()
    mckpt.plan(tmp_path / "b", tmp_path / "back", format="hf").run()
    same_tensors(tmp_path / "back", tensors(case, "bfloat16"))


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
def test_padding_is_zero_and_dropped(case: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Pads 131 and 149 rows over 4 ranks to a multiple of 64 x 4, and compares each rank with
    numpy.
    """
    mckpt.plan(
        sources[case], tmp_path / "a", format="torch", parallel=Parallel(tp=4), divisible_by=64
    ).run()
    embed = tensors(case, "bfloat16")["model.embed_tokens.weight"].view("u2")
    padded = np.zeros((256, embed.shape[1]), "u2")
    padded[: len(embed)] = embed
    for rank, part in enumerate(np.split(padded, 4)):
        held = dict(
            raw_torch(tmp_path / "a" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
        )
        assert np.array_equal(held["embedding.word_embeddings.weight"], part)
        assert ("output_layer.weight" in held) == (case == "llama")
    mckpt.plan(tmp_path / "a", tmp_path / "back", format="hf").run()
    same_tensors(tmp_path / "back", tensors(case, "bfloat16"))
    mckpt.plan(tmp_path / "a", tmp_path / "padded", format="hf", keep_padding=True).run()
    assert safetensors(tmp_path / "padded")["model.embed_tokens.weight"][1] == list(padded.shape)
    assert safetensors(tmp_path / "padded")["model.embed_tokens.weight"][2] == padded.tobytes()
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 256


def test_a_tied_embedding_lies_on_the_first_and_the_last_stage(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """In the format `torch`, Megatron computes the logits with the copy on the last stage. mckpt
    reports a copy that differs.
    """
    mckpt.plan(sources["llama-tied"], tmp_path / "a", format="torch", parallel=Parallel(pp=2)).run()
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


def test_one_rank_has_the_layout_computed_by_hand(sources: dict[str, Path], tmp_path: Path) -> None:
    """Checks rank 1 of the second stage of qwen3 at tp 2, pp 2 against numpy alone."""
    mckpt.plan(
        sources["qwen3"],
        tmp_path / "a",
        format="torch",
        parallel=Parallel(tp=2, pp=2),
        transformer_impl="transformer_engine",
    ).run()
    held = dict(raw_torch(tmp_path / "a" / "release" / "mp_rank_01_001" / "model_optim_rng.pt"))
    hf = {k: v.view("u2") for k, v in tensors("qwen3", "bfloat16").items()}
    groups = config("qwen3")["num_key_value_heads"]
    wanted = {"decoder.final_layernorm.weight": hf["model.norm.weight"]}
    head = np.zeros((256, config("qwen3")["hidden_size"]), "u2")
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


def test_torch_dist_has_stacked_or_layer_keys(sources: dict[str, Path], tmp_path: Path) -> None:
    """Only a model of mixed layers needs per-layer keys. A reshard keeps what it finds."""
    for case, key in (
        ("qwen3-moe", "decoder.layers.self_attention.linear_proj.weight"),
        (MIXED, "decoder.layers.3.self_attention.linear_proj.weight"),
    ):
        mckpt.plan(sources[case], tmp_path / case / "a").run()
        mckpt.plan(tmp_path / case / "a", tmp_path / case / "b", parallel=Parallel(tp=2)).run()
        for name in ("a", "b"):
            stored = mckpt.open(tmp_path / case / name).opened
            assert isinstance(stored, torch_dist.TorchDist)
            assert key in stored.metadata.tensors


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_fp32_stays_fp32_unless_a_cast_is_requested(
    tiny_model: TinyModel, case: str, tmp_path: Path
) -> None:
    """fp32 comes back bit for bit, and a cast to bf16 rounds as ml_dtypes does."""
    source = tiny_model(case, "float32")
    mckpt.plan(source, tmp_path / "a", format="torch", parallel=Parallel(tp=2)).run()
    mckpt.plan(tmp_path / "a", tmp_path / "back", format="hf").run()
    same_tensors(tmp_path / "back", tensors(case, "float32"))
    mckpt.plan(tmp_path / "a", tmp_path / "half", format="hf", dtype="bf16").run()
    same_tensors(tmp_path / "half", tensors(case, "bfloat16"))


def test_an_export_has_its_layers_in_order(tiny_model, tmp_path):
    """The copies of the embedding that belong to a layer of multi-token prediction come with it."""
    mckpt.convert(tiny_model("deepseek-v3"), tmp_path / "megatron")
    mckpt.convert(tmp_path / "megatron", tmp_path / "hf", format="hf")
    with open(tmp_path / "hf" / "model.safetensors", "rb") as f:
        names = list(json.loads(f.read(int.from_bytes(f.read(8), "little"))))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) and max(layers) == 4
