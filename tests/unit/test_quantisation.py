"""fp8 weights with a scale for each block have the values of plain float arithmetic."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mckpt.checkpoint.logical import Reader
from mckpt.errors import SourceError
from mckpt.execute.engine import execute
from mckpt.execute.transfer import CopySettings, Transfer
from mckpt.geometry.box import Box, Layout, Move, Piece, Scales, Stored, by_rows
from mckpt.geometry.join import join
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import NoValue, itemsize, numpy_dtype
from mckpt.values.quantisation import Grid, dequantise

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
RNG = np.random.default_rng(3)


def worth(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the bfloat16 values [rows, width] of codes and scales, each scale found
    by its index.
    """
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
    """Returns random codes and scales. All codes occur if there are enough elements, and all scales
    differ.
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
def test_every_code_has_the_value_of_float_arithmetic(case, kind):
    """All 256 codes, subnormals and NaN among them, are dequantised under each scale."""
    with np.errstate(over="ignore"):
        scales = np.array([SCALES[case]], "f4").astype(numpy_dtype(kind))
    codes = np.tile(np.arange(256, dtype="u1"), (3, 4))
    out = np.empty(codes.shape, BF16)
    held = scales.tobytes()
    grid = Grid(100, 1024, 128, 256, 0, 7, ["float32", "bfloat16", "float16"].index(kind))
    wanted = worth(codes, scales, (128, 256))

    def read(file: int, at: int, nbytes: int) -> bytes:
        return held[at - 7 : at - 7 + nbytes]

    dequantise(grid, codes, out, 100, 1024, 1, read, allow_overflow=True)
    same(out, wanted)
    if (np.isfinite(codes.view(E4M3)) & ~np.isfinite(wanted)).any():
        with pytest.raises(NoValue, match="times its scale"):
            dequantise(grid, codes, out, 100, 1024, 1, read)
    else:
        dequantise(grid, codes, out, 100, 1024, 1, read)
        same(out, wanted)


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
def test_by_rows_moves_the_same_elements_in_straight_parts(width, rows, run, start, pitch, step):
    """The parts move the same elements, each once. In each part, one axis goes along a row and the
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


def test_by_rows_keeps_whole_rows_together():
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
    """Returns a layout of both tensors in files of their own, and the files' sizes: whole, in 4
    shards of rows or of columns, or transposed.
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


def moved(source: Made, folder: Path, how: str, dtype: str, **options: Any) -> Reader:
    """Copies both tensors to the layout `how` below `folder`; returns a reader of the copies."""
    layout, ends = target(source.layout.shapes, how, dtype)
    joined = join(source.layout, layout)
    outputs = [TargetFile(str(i), end, lambda crc_of: []) for i, end in enumerate(ends)]
    moves = Transfer(joined, list(map(Path, source.layout.files)), outputs)
    execute(moves, folder, CopySettings(**options))
    return Reader(Layout([str(folder / f) for f in layout.files], layout.stored, layout.shapes))


@pytest.mark.parametrize("budget", [2 << 10, 64 << 10, 8 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("how", ["whole", "rows", "columns", "transposed"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_tensors_move_to_every_layout(made, tmp_path, form, how, dtype, budget):
    options = {"max_memory": budget, "threads": 2, "allow_overflow": True}
    written = moved(made[form], tmp_path, how, dtype, **options)
    for name, values in made[form].values.items():
        with np.errstate(all="ignore"):
            same(written[name].numpy(), values.astype(numpy_dtype(dtype)))


@pytest.mark.parametrize(
    "shape", [(1, 300), (300, 1), (1, 1), (1, 300_000), (2, 20_000), (20_000, 3)]
)
def test_quantised_tensors_of_one_long_axis_move(tmp_path, monkeypatch, shape):
    monkeypatch.setitem(FORMS, "thin", {"a": (shape, 0, (shape[1], 1))})
    source = Made(tmp_path, "thin", (128, 128), shape)
    same(Reader(source.layout)["a"].numpy(), source.values["a"])
    for how, budget in itertools.product(("whole", "transposed"), (8 << 10, 8 << 20)):
        folder = tmp_path / f"{how}{budget}"
        written = moved(source, folder, how, "bfloat16", max_memory=budget, threads=1)
        same(written["a"].numpy(), source.values["a"])


def test_a_truncated_file_of_scales_is_refused(tmp_path):
    source = Made(tmp_path, "side by side", (16, 32))
    raw = (tmp_path / "scales").read_bytes()
    (tmp_path / "scales").write_bytes(raw[:-1])
    with pytest.raises(SourceError, match="scales is truncated"):
        moved(source, tmp_path / "out", "whole", "bfloat16")
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
