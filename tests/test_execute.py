"""Execute against plain numpy: bytes, checksums, bounded memory, and what a failure leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mckpt import execute as ex
from mckpt.dtypes import itemsize, numpy_dtype
from mckpt.errors import SourceError, StorageError
from mckpt.execute import Output, Overflow, execute
from mckpt.planning import COPY

SAME = [("bfloat16", "bfloat16")]
RNG = np.random.default_rng(7)


def copy(rows, run, src, dst, *, tensor=0, cast=0):
    """One COPY; src and dst are (file, at, pitch, step)."""
    return (tensor, src[0], dst[0], cast, rows, run, src[1], dst[1], src[2], dst[2], src[3], dst[3])


def copies(*rows):
    return np.array(list(rows), COPY)


def reference(plan, casts, sources, sizes):
    """The target files as bytes, element by element in numpy."""
    out = [np.zeros(size, "u1") for size in sizes]
    for c in plan:
        src_type, dst_type = (numpy_dtype(name) for name in casts[c["cast"]])
        shape = (int(c["rows"]), int(c["run"]))
        src = np.ndarray(shape, src_type, sources[c["src_file"]].data, int(c["src_at"]), (int(c["src_pitch"]), int(c["src_step"])))
        dst = np.ndarray(shape, dst_type, out[c["dst_file"]].data, int(c["dst_at"]), (int(c["dst_pitch"]), int(c["dst_step"])))
        with np.errstate(all="ignore"):
            dst[...] = src if src_type == dst_type else src.astype(dst_type)
    return [o.tobytes() for o in out]


def nothing(crc_of):
    return []


def run(tmp, plan, casts, data, sizes, fixed=nothing, **options):
    """Executes into tmp/staging: (bytes of the targets, checksums)."""
    sources = []
    for i, d in enumerate(data):
        sources.append(str(tmp / f"source{i}"))
        Path(sources[-1]).write_bytes(d.tobytes())
    staging = tmp / "staging"
    outputs = [Output(f"deep/{i % 2}/file{i}", size, fixed) for i, size in enumerate(sizes)]
    sums = execute(plan, casts, sources, outputs, staging, **options)
    assert not (staging / "done").exists()
    return [(staging / o.path).read_bytes() for o in outputs], sums


def check(tmp, plan, casts, data, sizes, **options):
    got, sums = run(tmp, plan, casts, data, sizes, **options)
    want = reference(plan, casts, data, sizes)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert len(g) == len(w)
        wrong = np.flatnonzero(np.frombuffer(g, "u1") != np.frombuffer(w, "u1"))
        assert not len(wrong), f"file {i}: {len(wrong)} bytes differ, first at {wrong[0]}"
    assert sums == [f"crc32:{zlib.crc32(w):08x}" for w in want]


def random_bytes(n):
    return RNG.integers(0, 256, n, dtype="u1")


BUDGETS = [64 << 10, 1 << 20, 64 << 20]


# Column shards, stacks and transposes


def columns(sources, targets, rows, width, item=2):
    """A (rows, width) matrix in `sources` column shards to `targets` column shards."""
    out = []
    s, t = width // sources, width // targets
    n = max(sources, targets)
    w = width // n
    for k in range(n):
        col = k * w
        out.append(
            copy(rows, w, (col // s, 64 + col % s * item, s * item, item), (col // t, 128 + col % t * item, t * item, item), tensor=3)
        )
    return copies(*out), [64 + rows * s * item] * sources, [128 + rows * t * item + 40] * targets


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("sources", "targets"), [(1, 8), (8, 1), (8, 2), (2, 8), (1, 1)])
def test_column_shards(tmp_path, sources, targets, budget):
    plan, src, dst = columns(sources, targets, 700, 1024)
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst, max_memory=budget, threads=2)


@pytest.mark.parametrize("budget", [16 << 10, *BUDGETS])
def test_rows_wider_than_the_budget(tmp_path, budget):
    plan, src, dst = columns(4, 1, 5, 4 * 20000)
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst, max_memory=budget, threads=2)


def test_each_source_byte_is_read_once(tmp_path, monkeypatch):
    plan, src, dst = columns(1, 8, 3000, 4096)
    real, read = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(real(fd, views, at)) or read[-1])
    writes = []
    put = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: writes.append(put(fd, view, at)) or writes[-1])
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst)
    assert sum(read) == 3000 * 4096 * 2
    assert len(read) < 30
    assert len(writes) < 8 * 30


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("writer", ["rows", "columns"])
def test_transpose(tmp_path, budget, writer):
    """`(300, 500)` to `(500, 300)`, said in target rows or in source rows."""
    c = {
        "rows": copy(500, 300, (0, 10, 2, 1000), (0, 6, 600, 2)),
        "columns": copy(300, 500, (0, 10, 1000, 2), (0, 6, 2, 600)),
    }[writer]
    check(tmp_path, copies(c), SAME, [random_bytes(10 + 300000)], [300010], max_memory=budget, threads=2)


@pytest.mark.parametrize("budget", BUDGETS)
def test_interleaved_gate_and_up(tmp_path, budget):
    """`[g0 u0 g1 u1 ...]` of every row to gate and up apart, transposed, and back: pairs of tensors that fill rows only together."""
    rows, f = 64, 900
    apart = [copy(rows, f, (0, 2 * k, 4 * f, 4), (0, k * rows * f * 2, 2 * f, 2), tensor=k) for k in (0, 1)]
    turned = [copy(f, rows, (0, 2 * k, 4, 4 * f), (1, k * rows * f * 2, 2 * rows, 2), tensor=k) for k in (0, 1)]
    together = [copy(rows, f, (1 + k, 0, 2 * f, 2), (2, 2 * k, 4 * f, 4), tensor=k) for k in (0, 1)]
    alone = [copy(rows, f, (1, 0, 2 * f, 2), (3, 0, 4 * f, 4), tensor=2)]
    data = [random_bytes(rows * f * 4), random_bytes(rows * f * 2), random_bytes(rows * f * 2)]
    check(tmp_path, copies(*apart, *turned, *together, *alone), SAME, data, [rows * f * 4] * 4, max_memory=budget, threads=2)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_copies(tmp_path_factory, data):
    """Any affine copies: sources may overlap, targets tile a grid whose order and gaps are drawn."""
    draw = data.draw
    names = ["float32", "bfloat16", "float16", "uint8", "int64"]
    floats = names[:3]
    casts, rows, at, sizes = [], [], [0, 0], [0, 0]
    for tensor in range(draw(st.integers(1, 5))):
        src_type = draw(st.sampled_from(names))
        dst_type = draw(st.sampled_from(floats)) if src_type in floats else src_type
        si, di = itemsize(src_type), itemsize(dst_type)
        casts.append((src_type, dst_type))
        n, m, ways = draw(st.integers(1, 40)), draw(st.integers(1, 60)), draw(st.integers(1, 4))
        file = draw(st.integers(0, 1))
        base = at[file] + draw(st.integers(0, 9))
        mode = draw(st.sampled_from(["beside", "interleaved", "turned"]))
        gap = draw(st.sampled_from([0, 0, di, 5, 9000]))
        for k in range(ways):
            steps = [si * draw(st.integers(1, 3)), 0]
            steps[1] = draw(st.sampled_from([steps[0] * m, steps[0] * m * ways, steps[0] * m + 9000 * si]))
            src_turned = draw(st.booleans())
            if src_turned:
                steps = [draw(st.sampled_from([steps[0] * n, steps[0] * n + 9000])), steps[0]]
            src = (draw(st.integers(0, 1)), draw(st.integers(0, 70)) + k * si, steps[1], steps[0])
            if mode == "beside":
                pitch, step, start = ways * m * di + gap, di, base + k * m * di
            elif mode == "interleaved":
                pitch, step, start = ways * m * di + gap, ways * di, base + k * di
            else:
                pitch, step, start = di, n * di + gap, base + k * (m * (n * di + gap))
            if draw(st.integers(0, 9)):  # else a hole
                rows.append(copy(n, m, src, (file, start, pitch, step), tensor=tensor, cast=tensor))
        at[file] = base + ways * n * m * di + (n + ways * m) * gap
        sizes[file] = at[file] + draw(st.integers(0, 20))
    plan = copies(*rows)
    if len(plan):
        end = (plan["src_at"] + (plan["rows"] - 1) * plan["src_pitch"] + (plan["run"] - 1) * plan["src_step"]).max() + 8
    else:
        end = 1
    tmp = tmp_path_factory.mktemp("any")
    src = [RNG.normal(0, 1, -(-int(end) // 4)).astype("f4").view("u1") for _ in range(2)]
    budget = draw(st.sampled_from([4 << 10, 64 << 10, 64 << 20]))
    check(tmp, plan, casts, src, sizes, max_memory=budget, threads=draw(st.integers(1, 3)), allow_overflow=True)
