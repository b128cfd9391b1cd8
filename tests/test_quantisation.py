"""fp8 weights with a scale for each block have the values of plain float arithmetic."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mckpt as package
from mckpt.checkpoint.logical import Reader
from mckpt.errors import SourceError
from mckpt.execute.engine import execute
from mckpt.geometry.box import Box, Layout, Move, Piece, Scales, Stored, by_rows
from mckpt.geometry.join import join
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize, numpy_dtype
from mckpt.values.quantisation import Grid, dequantise
from tests import tiny
from tests.door import edit_json, good, mckpt, refused, shard, write_shard

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
RNG = np.random.default_rng(3)


def worth(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns bfloat16 [rows, width] of codes and scales, each scale found by its index."""
    rows, columns = (np.arange(n) // b for n, b in zip(codes.shape, block, strict=True))
    with np.errstate(all="ignore"):
        wide = (
            codes.view(E4M3).astype(np.float32)
            * scales.astype(np.float32)[rows[:, None], columns[None, :]]
        )
        return wide.astype(BF16)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Asserts equality bit for bit, except that any NaN equals any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = np.isnan(a.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
    np.testing.assert_array_equal(
        np.where(nan, 0, a.view(f"u{a.itemsize}")), np.where(nan, 0, b.view(f"u{b.itemsize}"))
    )


def grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def weight(shape: tuple[int, int], block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, every one of them where there are elements for it, and scales that
    all differ.
    """
    codes = RNG.permutation(np.arange(shape[0] * shape[1]) % 256).astype("u1").reshape(shape)
    return codes, RNG.permutation(
        np.geomspace(1e-6, 1e3, np.prod(grid_shape(shape, block)))
    ).astype("f4").reshape(grid_shape(shape, block))


# ---- the arithmetic

SCALES = {
    "ordinary": [2.0**-9 / 3, 1.0, 0.007, 3.1],
    "huge": [2.0**100 * 1.7, 2.0**119 * 1.3, 2.0**127, 3.4e38],
    "beside huge": [2.0**9 / 7, 2.0**126, 2.0**8 * 1.001, 1e-3],
    "tiny": [1e-40, 2.0**-126, 1e-30, 2.0**-149],
    "no numbers": [np.inf, np.nan, 0.0, -1.5],
}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", SCALES)
def test_every_code(case, kind):
    """All 256, subnormals and nan among them, each under each scale."""
    with np.errstate(over="ignore"):
        scales = np.array([SCALES[case]], "f4").astype(numpy_dtype(kind))
    codes = np.tile(np.arange(256, dtype="u1"), (3, 4))
    out = np.empty(codes.shape, BF16)
    held = scales.tobytes()
    grid = Grid(100, 1024, 128, 256, 0, 7, ["float32", "bfloat16", "float16"].index(kind))
    dequantise(
        grid, codes, out, 100, 1024, 1, lambda file, at, nbytes: held[at - 7 : at - 7 + nbytes]
    )
    same(out, worth(codes, scales, (128, 256)))


def test_torch_says_the_same():
    torch = pytest.importorskip("torch")
    codes, scales = weight((200, 72), (16, 32))
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    spread = (
        torch.from_numpy(scales).repeat_interleave(16, 0)[:200].repeat_interleave(32, 1)[:, :72]
    )
    theirs = (wide * spread).bfloat16().view(torch.int16).numpy().view(BF16)
    same(theirs, worth(codes, scales, (16, 32)))


# ---- geometry


@settings(max_examples=300)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(0, 30),
    st.integers(0, 40),
    st.integers(1, 30),
)
def test_moves_by_rows(width, rows, run, start, pitch, step):
    """The same elements, each once; and in each move one axis goes along a row and the
    other down.
    """
    whole = Move(rows, run, start, pitch, step, 5, 1000, 2)

    def elements(m):
        i, j = np.indices((m.rows, m.run)).reshape(2, -1)
        return np.stack(
            [
                m.src_start + i * m.src_pitch + j * m.src_step,
                m.dst_start + i * m.dst_pitch + j * m.dst_step,
            ],
            1,
        ).tolist()

    parts = by_rows(whole, width)
    assert sorted(e for m in parts for e in elements(m)) == sorted(elements(whole))
    for m in parts:
        i, j = np.indices((m.rows, m.run))
        r, c = np.divmod(m.src_start + i * m.src_pitch + j * m.src_step, width)
        straight = [(a == a[:, :1]).all() and (b == b[:1]).all() for a, b in ((r, c), (c, r))]
        assert any(straight), m


def test_whole_rows_stay_together():
    assert by_rows(Move(1, 3000, 0, 0, 1, 7, 0, 1), 100) == [Move(30, 100, 0, 100, 1, 7, 100, 1)]
    assert by_rows(Move(1, 8, 2, 0, 1, 0, 0, 1), 3) == [
        Move(1, 1, 2, 1, 1, 0, 1, 1),
        Move(2, 3, 3, 3, 1, 1, 3, 1),
        Move(1, 1, 9, 1, 1, 7, 1, 1),
    ]
    column = Move(1, 30, 5, 0, 100, 0, 0, 1)
    assert by_rows(column, 100) == [column]


# ---- reading and moving

SHAPE = (200, 72)
FORMS = {  # pieces of `a` and `b`, [rows, columns] each, in a stored tensor of SHAPE
    "one above the other": {"a": ((120, 72), 0, (72, 1)), "b": ((80, 72), 120 * 72, (72, 1))},
    "rows in turn": {"a": ((100, 72), 0, (144, 1)), "b": ((100, 72), 72, (144, 1))},
    "columns in turn": {"a": ((200, 36), 0, (72, 2)), "b": ((200, 36), 1, (72, 2))},
    "side by side": {"a": ((200, 40), 0, (72, 1)), "b": ((200, 32), 40, (72, 1))},
    "transposed": {"a": ((72, 150), 0, (1, 72)), "b": ((72, 50), 150 * 72, (1, 72))},
}


class Made:
    """A file with a stored tensor of two pieces, and one with its scales."""

    def __init__(
        self, folder: Path, form: str, block: tuple[int, int], shape: tuple[int, int] = SHAPE
    ) -> None:
        codes, scales = weight(shape, block)
        (folder / "weight").write_bytes(b"12345" + codes.tobytes())
        (folder / "scales").write_bytes(b"123" + scales.tobytes())
        pieces = tuple(
            Piece(name, Box((0, 0), box), start, strides)
            for name, (box, start, strides) in FORMS[form].items()
        )
        zero = np.zeros(1, "i4")
        grids = np.array([Grid(5, shape[1], *block, 1, 3, 0)], "i8")
        stored = Stored(
            "key",
            "bfloat16",
            shape,
            pieces,
            zero,
            zero,
            zero,
            np.array([5]),
            scales=Scales("float8_e4m3fn", grids),
        )
        self.layout = Layout(
            [str(folder / "weight"), str(folder / "scales")],
            [stored],
            {p.tensor: p.box.shape for p in pieces},
        )
        flat = worth(codes, scales, block).ravel()
        self.values = {
            p.tensor: flat[
                p.start
                + np.add.outer(
                    *(np.arange(n) * s for n, s in zip(p.box.shape, p.strides, strict=True))
                )
            ]
            for p in pieces
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {form: Made(tmp_path_factory.mktemp("made"), form, (16, 32)) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_box_is_read(made, form, data):
    reader = Reader(made[form].layout)
    name = data.draw(st.sampled_from("ab"))
    ends = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in made[form].values[name].shape
    ]
    box = tuple(slice(*e) for e in ends)
    same(reader[name][box].numpy(), made[form].values[name][box])


def target(shapes: dict[str, tuple[int, int]], how: str, dtype: str) -> tuple[Layout, list[int]]:
    """Both tensors in files of their own: whole, in 4 shards of rows or of columns, transposed, or
    rows of both in turn in one.
    """
    stored, ends = [], []

    def add(shape: tuple[int, int], *pieces: Piece) -> None:
        zero = np.zeros(1, "i4")
        stored.append(
            Stored("key", dtype, shape, pieces, zero, zero, np.array([len(ends)]), np.array([11]))
        )
        ends.append(11 + shape[0] * shape[1] * itemsize(dtype))

    for name, (rows, columns) in shapes.items():
        if how == "transposed":
            add((columns, rows), Piece(name, Box((0, 0), (rows, columns)), 0, (1, rows)))
            continue
        down, across = {"whole": (1, 1), "rows": (4, 1), "columns": (1, 4)}[how]
        cuts = [
            np.linspace(0, n, k + 1).astype(int).tolist()
            for n, k in ((rows, down), (columns, across))
        ]
        for r, s in itertools.pairwise(cuts[0]):
            for c, d in itertools.pairwise(cuts[1]):
                add((s - r, d - c), Piece(name, Box((r, c), (s - r, d - c)), 0, (d - c, 1)))
    return Layout([str(i) for i in range(len(ends))], stored, dict(shapes)), ends


@pytest.mark.parametrize("budget", [2 << 10, 64 << 10, 8 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("how", ["whole", "rows", "columns", "transposed"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_tensors_move_to_every_layout(made, tmp_path, form, how, dtype, budget):
    source = made[form]
    layout, ends = target(source.layout.shapes, how, dtype)
    joined = join(source.layout, layout)
    outputs = [TargetFile(str(i), end, lambda crc_of: []) for i, end in enumerate(ends)]
    execute(
        joined.copies,
        joined.casts,
        source.layout.files,
        outputs,
        tmp_path,
        grids=joined.grids,
        max_memory=budget,
        threads=2,
        allow_overflow=True,
    )
    written = Reader(
        Layout([str(tmp_path / f) for f in layout.files], layout.stored, layout.shapes)
    )
    for name, values in source.values.items():
        with np.errstate(all="ignore"):
            same(written[name].numpy(), values.astype(numpy_dtype(dtype)))


@pytest.mark.parametrize(
    "shape", [(1, 300), (300, 1), (1, 1), (1, 300_000), (2, 20_000), (20_000, 3)]
)
def test_thin_ones(tmp_path, monkeypatch, shape):
    monkeypatch.setitem(FORMS, "thin", {"a": (shape, 0, (shape[1], 1))})
    source = Made(tmp_path, "thin", (128, 128), shape)
    same(Reader(source.layout)["a"].numpy(), source.values["a"])
    for how, budget in itertools.product(("whole", "transposed"), (8 << 10, 8 << 20)):
        layout, ends = target(source.layout.shapes, how, "bfloat16")
        joined, out = join(source.layout, layout), tmp_path / f"{how}{budget}"
        outputs = [TargetFile(str(i), end, lambda crc_of: []) for i, end in enumerate(ends)]
        execute(
            joined.copies,
            joined.casts,
            source.layout.files,
            outputs,
            out,
            grids=joined.grids,
            max_memory=budget,
            threads=1,
        )
        same(
            Reader(Layout([str(out / "0")], layout.stored, layout.shapes))["a"].numpy(),
            source.values["a"],
        )


def test_scales_that_were_cut_short(tmp_path):
    source = Made(tmp_path, "side by side", (16, 32))
    raw = (tmp_path / "scales").read_bytes()
    (tmp_path / "scales").write_bytes(raw[:-1])
    layout, ends = target(source.layout.shapes, "whole", "bfloat16")
    joined = join(source.layout, layout)
    outputs = [TargetFile(str(i), end, lambda crc_of: []) for i, end in enumerate(ends)]
    with pytest.raises(SourceError, match="scales is truncated"):
        execute(
            joined.copies,
            joined.casts,
            source.layout.files,
            outputs,
            tmp_path / "out",
            grids=joined.grids,
        )
    with pytest.raises(SourceError, match="scales: ends 1 byte"):
        Reader(source.layout)["b"].numpy()


def test_replicas_are_compared_by_value(tmp_path):
    """A replica in 8 bits equals one in 16 bits that has the same values."""
    source = Made(tmp_path, "one above the other", (16, 32))
    zero = np.zeros(1, "i4")
    pieces = (Piece("a", Box((0, 0), (120, 72)), 0, (72, 1)),)
    plain = Stored(
        "other", "bfloat16", (120, 72), pieces, zero, zero, zero + 2, np.array([0]), replica=True
    )
    files = [*source.layout.files, str(tmp_path / "plain")]
    source.values["a"].tofile(files[2])
    reader = Reader(Layout(files, [*source.layout.stored, plain], source.layout.shapes))
    assert reader.check_replicas() == []
    np.memmap(files[2], "u2", "r+")[-1] ^= 1
    assert len(reader.check_replicas()) == 1


# ---- checkpoints


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "deepseek-v3"])
def checkpoint(request, tmp_path_factory):
    """A quantised checkpoint of several files, and one of the bfloat16 values that it
    stands for.
    """
    root = tmp_path_factory.mktemp(request.param)
    values = tiny.tiny_quantised(request.param, root / "fp8", (16, 32), max_shard_size=50_000)
    tiny.tiny_random(request.param, root / "plain")
    tiny.write_weights(root / "plain", values)
    where = json.loads((root / "fp8" / "model.safetensors.index.json").read_text())["weight_map"]
    # scales in another file than their weight
    assert any(where[k] != where[k.removesuffix("_scale_inv")] for k in where)
    return root


TARGETS: dict[str, tuple[Any, ...]] = {
    "torch tp1": ("--format", "torch"),
    "torch tp2": ("--format", "torch", "--tp", 2, "--transformer-impl", "local"),
    "torch_dist": (),
    "torch_dist tp2 pp2": ("--tp", 2, "--pp", 2),
}


@pytest.mark.parametrize("case", TARGETS)
def test_what_is_written(checkpoint, tmp_path, case):
    """The output is byte for byte that of the same values in bfloat16.

    Back in Hugging Face, the checkpoint is not quantised any more.
    """
    fp8, plain, a, b = checkpoint / "fp8", checkpoint / "plain", tmp_path / "a", tmp_path / "b"
    said = good("hf-to-megatron", fp8, a, *TARGETS[case], "--dry-run").out
    assert "cast float8_e4m3fn -> bfloat16" in said and "dequantised" in said and "16 x 32" in said
    for source, to in ((fp8, a), (plain, b)):
        good("hf-to-megatron", source, to, *TARGETS[case], "--max-memory", "1MiB")
    left, right = (
        {str(p.relative_to(r)): p.read_bytes() for p in r.rglob("*") if p.is_file()} for r in (a, b)
    )
    apart = {name for name in left if left[name] != right.get(name)}
    assert apart == {"release/mckpt.json", "hf/config.json"} and left.keys() == right.keys()
    assert (
        mckpt("diff", fp8, a).code
        == mckpt("diff", fp8, plain).code
        == mckpt("diff", plain, fp8).code
        == 0
    )
    good("megatron-to-hf", a, tmp_path / "back")
    assert mckpt("diff", tmp_path / "back", plain).code == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((plain / "config.json").read_text())
    good("megatron-to-hf", b, tmp_path / "like", "--like", fp8)
    assert "quantization_config" not in json.loads((tmp_path / "like" / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_another_dtype(checkpoint, tmp_path, dtype):
    """The values are dequantised to bfloat16 first, and then cast."""
    good("hf-to-megatron", checkpoint / "fp8", tmp_path / "a", "--dtype", dtype)
    good("hf-to-megatron", checkpoint / "plain", tmp_path / "b", "--dtype", dtype)
    assert mckpt("diff", tmp_path / "a", tmp_path / "b").code == 0


def test_blocks_larger_than_any_weight(tmp_path):
    """Each weight has one scale, and a huge block in config.json costs no memory."""
    values = tiny.tiny_quantised("qwen3", tmp_path / "fp8", (10**4, 10**4))
    edit_json(
        tmp_path / "fp8" / "config.json",
        lambda c: c["quantization_config"].update(weight_block_size=[10**30, 10**30]),
    )
    tiny.write_weights(tiny.tiny_random("qwen3", tmp_path / "plain"), values)
    good("hf-to-megatron", tmp_path / "fp8", tmp_path / "a")
    assert mckpt("diff", tmp_path / "a", tmp_path / "plain").code == 0


def test_a_slice_of_a_tensor(checkpoint):
    name = "layers.1.attn.o.weight"
    fp8, plain = package.open(checkpoint / "fp8"), package.open(checkpoint / "plain")
    assert fp8[name].dtype == "bfloat16"
    same(fp8[name][17:50, 3:40].numpy(), plain[name][17:50, 3:40].numpy())
    assert fp8[name][17].torch().equal(plain[name][17].torch())


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_scales_of_16_bits(tmp_path, kind):
    """Published Qwen3 checkpoints have such scales."""
    values = tiny.tiny_quantised("qwen3", tmp_path / "fp8", scale_dtype=kind)
    tiny.write_weights(tiny.tiny_random("qwen3", tmp_path / "plain"), values)
    good("hf-to-megatron", tmp_path / "fp8", tmp_path / "a")
    assert mckpt("diff", tmp_path / "a", tmp_path / "plain").code == 0


# ---- what is refused

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A quantised checkpoint in one file."""
    root = tmp_path_factory.mktemp("one")
    tiny.tiny_quantised("qwen3", root, (16, 32))
    return root


def rewritten(change: Any) -> Any:
    """Damage that changes the arrays of a file, as (dtype, shape, bytes)."""

    def damage(src: Path) -> None:
        header, data = shard(src / "model.safetensors")
        found = {
            k: [t["dtype"], t["shape"], data[slice(*t["data_offsets"])]]
            for k, t in header.items()
            if k != "__metadata__"
        }
        change(found)
        new, at = {}, 0
        for key, (dtype, shape, raw) in found.items():
            new[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
            at += len(raw)
        write_shard(src / "model.safetensors", new, b"".join(t[2] for t in found.values()))

    return damage


def put(key: str, dtype: str, shape: list[int], nbytes: int) -> Any:
    return rewritten(lambda t: t.__setitem__(key, [dtype, shape, bytes(nbytes)]))


def says(**changes: Any) -> Any:
    def change(c: dict[str, Any]) -> None:
        c["quantization_config"] = {
            k: v for k, v in {**c["quantization_config"], **changes}.items() if v is not None
        }

    return lambda src: edit_json(src / "config.json", change)


REFUSED: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "no scales": (
        rewritten(lambda t: t.pop(f"{Q}_scale_inv")),
        3,
        (f"{Q}_scale_inv", "missing", "[24, 2]", "[384, 48]"),
    ),
    "scales of another shape": (
        put(f"{Q}_scale_inv", "F32", [2, 24], 192),
        3,
        (f"{Q}_scale_inv", "[2, 24]", "[24, 2]", "model.safetensors"),
    ),
    "scales of one number": (
        put(f"{Q}_scale_inv", "F32", [], 4),
        3,
        (f"{Q}_scale_inv", "[]", "[24, 2]"),
    ),
    "scales of integers": (
        put(f"{Q}_scale_inv", "I8", [24, 2], 48),
        3,
        (f"{Q}_scale_inv", "int8", "float32"),
    ),
    "scales of no weight": (
        put("model.layers.9.x.weight_scale_inv", "F32", [1], 4),
        3,
        ("layers.9.x.weight_scale_inv", "is not there"),
    ),
    "scales of a plain weight": (
        put(Q, "BF16", [384, 48], 384 * 48 * 2),
        3,
        (f"{Q}_scale_inv", f"{Q} holds bfloat16"),
    ),
    "other 8 bits": (
        put(UP, "F8_E5M2", [64, 48], 64 * 48),
        3,
        (f"{UP}_scale_inv", "float8_e5m2", "layers.{layer}.mlp.up_proj"),
    ),
    "integers": (put(UP, "I8", [64, 48], 64 * 48), 3, (f"{UP}_scale_inv", "int8")),
    "a norm in 8 bits": (
        put("model.norm.weight", "F8_E4M3", [48], 48),
        3,
        ("model.norm.weight [48]", "no matrix"),
    ),
    "a weight in no rule": (
        put("model.layers.0.x.weight", "F8_E4M3", [2, 2], 4),
        5,
        ("model.layers.0.x.weight [2, 2] is in no rule",),
    ),
    "no block size": (
        says(weight_block_size=None),
        3,
        ("quantization_config", "weight_block_size", Q, "dequantise"),
    ),
    "a block size of nothing": (says(weight_block_size=[0, 128]), 3, ("[0, 128]", Q)),
    "a block size of one number": (says(weight_block_size=128), 3, ("weight_block_size", Q)),
    "another block size": (
        says(weight_block_size=[128, 128]),
        3,
        (f"{Q}_scale_inv", "[24, 2]", "[3, 1]", "128 x 128"),
    ),
    "another method": (says(quant_method="gptq"), 3, ("gptq", "quant_method fp8")),
    "another format": (says(fmt="e5m2"), 3, ("e5m2", "fmt e4m3")),
    "no config": (
        lambda src: edit_json(src / "config.json", lambda c: c.pop("quantization_config")),
        3,
        (Q, "no weight_block_size"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(one, tmp_path, case):
    damage, code, words = REFUSED[case]
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(one, src)
    damage(src)
    refused(code, *words, args=("hf-to-megatron", src, dst), untouched=tmp_path)


def test_an_unknown_quantisation_method_with_plain_weights_is_refused(tmp_path):
    """The weights are readable, but the config names a method that mckpt does not know."""
    src = tiny.tiny_random("qwen3", tmp_path / "src", quantization_config={"quant_method": "gptq"})
    refused(
        4,
        "quantization_config",
        "gptq",
        args=("hf-to-megatron", src, tmp_path / "dst"),
        untouched=tmp_path,
    )


def test_a_value_beyond_float16_is_named(one, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(one, src)
    rewritten(lambda t: t[f"{UP}_scale_inv"].__setitem__(2, np.full(8, 1e4, "f4").tobytes()))(src)
    args = ("hf-to-megatron", src, tmp_path / "dst", "--dtype", "fp16")
    said = refused(2, "layers.2.mlp.up.weight", "65504", "--allow-overflow", args=args)
    path, value, at = re.search(r"(\S+): (\S+) at byte (\d+)", said).groups()
    code = np.frombuffer(Path(path).read_bytes()[int(at) :][:1], E4M3).astype("f4")
    assert (
        abs(float(value)) > 65504
        and value == f"{float((code * np.float32(1e4)).astype(BF16)[0]):g}"
    )
    good(*args, "--allow-overflow")


def test_a_copy_that_is_not_quantised(checkpoint, tmp_path):
    """Hugging Face to Hugging Face gives the bfloat16 values and a config without quantisation."""
    package.plan(checkpoint / "fp8", tmp_path / "copy", format="hf").run()
    assert not package.diff(checkpoint / "plain", tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == json.loads(
        (checkpoint / "plain" / "config.json").read_text()
    )
    refused(
        2,
        "none of its tensors is quantised",
        args=("megatron-to-hf", tmp_path / "copy", tmp_path / "again"),
    )


@pytest.mark.judge
@pytest.mark.slow
def test_megatron_core_computes_what_transformers_does_with_the_values(tmp_path):
    tiny.tiny_quantised("deepseek-v3", tmp_path / "hf", (16, 16))
    good("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron", "--tp", 2)
    said = good("verify", tmp_path / "hf", tmp_path / "megatron").out
    assert "PASS" in said and "dequantised by mckpt" in said
