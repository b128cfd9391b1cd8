"""Casts of the execution give the values of torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest

from mckpt.errors import UsageError
from mckpt.execute.mover import Overflow
from mckpt.values import dtypes
from mckpt.values.dtypes import itemsize, numpy_dtype
from tests.unit.test_execute import RNG, copies, copy, run


@pytest.mark.parametrize("run_of", [10000, 100000], ids=["pieces of rows", "rows in pieces"])
@pytest.mark.parametrize("src", ["float32", "bfloat16"])
def test_an_overflow_error_names_the_place(tmp_path, src, run_of):
    """Infinities of the source do not count as overflow, and a signalling NaN warns of nothing."""
    data, size, wrong = (
        np.ones(3 * run_of, numpy_dtype(src)),
        itemsize(src),
        2 * run_of + run_of * 4 // 5,
    )
    data[[12, run_of + 1, wrong - 1, wrong]] = np.inf, -np.inf, np.inf, -70000
    data.view(f"u{size}")[wrong - 2] = 0x7F81 << 8 * (size - 2)
    plan = copies(copy(3, run_of, (0, 0, run_of * size, size), (0, 0, run_of * 2, 2), tensor=5))
    place = (
        rf"tensor 5: .*source0: {float(data[wrong]):g} at byte {wrong * size} .*--allow-overflow"
    )
    with pytest.raises(UsageError, match=place) as caught:
        run(tmp_path, plan, [(src, "float16")], [data.view("u1")], [6 * run_of])
    overflow = caught.value.__cause__
    assert isinstance(overflow, Overflow) and overflow.tensor == 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_offset_of_1_goes_there_and_back_exactly_from_a_half_to_256(dtype):
    kind = numpy_dtype(dtype)
    first, last = (np.array(x, kind).view(f"u{kind.itemsize}").item() for x in (0.5, 256))
    codes = np.arange(first, last + 1, 1 if kind.itemsize == 2 else 997)
    values = codes.astype(f"u{kind.itemsize}").view(kind).reshape(1, -1)
    less, back = np.empty_like(values), np.empty_like(values)
    dtypes.shift(values, less, -1)
    assert np.array_equal(less.astype("f8"), values.astype("f8") - 1)
    dtypes.shift(less, back, 1)
    assert np.array_equal(back, values)
    # below 0.5 a value has more digits than the numbers near -1
    values = np.array([[0.1]], kind)
    dtypes.shift(values, less[:, :1], -1)
    dtypes.shift(less[:, :1], back[:, :1], 1)
    assert back[0, 0] != values[0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(8, 8), (9, 600), (1031, 515), (67, 64), (7, 300), (300, 7)])
def test_a_transpose_moves_each_element_and_no_other(dtype, shape):
    """Source and target are parts of larger buffers, at odd bytes; the bytes between stay."""
    (m, n), kind = shape, numpy_dtype(dtype)
    size = kind.itemsize
    data, pitch = RNG.bytes(3 + (m + 5) * n * size), (m + 5) * size
    src = np.ndarray((m, n), kind, data, 3, (size, pitch))
    for step in (size, 3 * size):  # of the target's rows
        width = n * step + size
        before = RNG.bytes(1 + m * width)
        memory = bytearray(before)
        dtypes.cast(src, np.ndarray((m, n), kind, memory, 1, (width, step)))
        wanted = bytearray(before)
        for i in range(m):
            for j in range(n):
                at, to = 3 + j * pitch + i * size, 1 + i * width + j * step
                wanted[to : to + size] = data[at : at + size]
        assert memory == wanted


@pytest.mark.parametrize("src", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("dst", ["bfloat16", "float16", "float32"])
def test_an_execution_adds_the_offset_before_it_rounds(tmp_path, src, dst):
    values = RNG.standard_normal(70_001).astype("f4").astype(numpy_dtype(src))
    plan = copies(copy(1, len(values), (0, 0, 0, itemsize(src)), (0, 0, 0, itemsize(dst))))
    size = itemsize(dst) * len(values)
    (got,), _ = run(tmp_path, plan, [(src, dst, -1.0)], [values.view("u1")], [size])
    wide = "f8" if src == "float64" else "f4"
    want = (values.astype(wide) - np.ones((), wide)).astype(numpy_dtype(dst))
    assert got == want.tobytes()


@pytest.mark.parametrize("kinds", [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_a_transpose_casts_as_numpy_does(kinds):
    source, target = map(numpy_dtype, kinds)
    stored = RNG.standard_normal((1200, 303)).astype("f4").astype(source)  # more than a piece
    out = np.zeros((303, 1200), target)
    dtypes.cast(stored.T, out)
    assert out.tobytes() == stored.astype(target).T.tobytes()


def test_pieces_cover_each_element_once():
    for shape in [
        (1, 1),
        (7, 10),
        (3, dtypes.PIECE),
        (2, dtypes.PIECE + 1),
        (dtypes.PIECE + 1, 1),
        (dtypes.PIECE // 3, 4),
    ]:
        times = np.zeros(shape, "i8")
        for part in dtypes.pieces(*shape):
            assert times[part].size <= dtypes.PIECE
            times[part] += 1
        assert (times == 1).all()
