"""Execution against plain numpy: bytes, checksums, bounded memory, and failures."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import textwrap
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mckpt import errors
from mckpt.errors import SourceError, StorageError
from mckpt.execute import clusters, files, piecewise, ray_tasks, units
from mckpt.execute.chains import Chain
from mckpt.execute.clusters import Cluster, Copy
from mckpt.execute.engine import execute, most_threads
from mckpt.execute.transfer import CopySettings, Transfer
from mckpt.geometry.join import COPY, Joined
from mckpt.progress import Progress
from mckpt.storage.files import TargetFile
from mckpt.values.dtypes import itemsize, numpy_dtype
from mckpt.values.element import Cast

SAME = [("bfloat16", "bfloat16")]
RNG = np.random.default_rng(7)
NO_GRIDS = np.zeros((0, 9), "i8")


def copy(rows, run, src, dst, *, tensor=0, cast=0):
    """Returns one COPY. `src` and `dst` are (file, at, pitch, step)."""
    return (
        tensor,
        src[0],
        dst[0],
        cast,
        -1,
        rows,
        run,
        src[1],
        dst[1],
        src[2],
        dst[2],
        src[3],
        dst[3],
    )


def copies(*rows):
    return np.array(list(rows), COPY)


def reference(plan, casts, sources, sizes):
    """Returns the target files as bytes, copied element by element in numpy."""
    out = [np.zeros(size, "u1") for size in sizes]
    for c in plan:
        src_type, dst_type = (numpy_dtype(name) for name in casts[c["cast"]])
        shape = (int(c["rows"]), int(c["run"]))
        src = np.ndarray(
            shape,
            src_type,
            sources[c["src_file"]].data,
            int(c["src_at"]),
            (int(c["src_pitch"]), int(c["src_step"])),
        )
        dst = np.ndarray(
            shape,
            dst_type,
            out[c["dst_file"]].data,
            int(c["dst_at"]),
            (int(c["dst_pitch"]), int(c["dst_step"])),
        )
        with np.errstate(all="ignore"):
            dst[...] = src if src_type == dst_type else src.astype(dst_type)
    return [o.tobytes() for o in out]


def nothing(crc_of):
    return []


def transfer(plan, casts, sources=(), outputs=()):
    """Returns the copies of a plan whose tensors have their number as a name."""
    names = tuple(f"tensor {number}" for number in range(10))
    joined = Joined(plan, tuple(Cast(*cast) for cast in casts), NO_GRIDS, names, 1, 1)
    return Transfer(joined, [Path(source) for source in sources], outputs)


def run(tmp, plan, casts, data, sizes, fixed=nothing, progress=None, cluster=None, **options):
    """Executes into tmp/staging; returns (bytes of the targets, checksums)."""
    sources = []
    for i, d in enumerate(data):
        sources.append(str(tmp / f"source{i}"))
        Path(sources[-1]).write_bytes(d.tobytes())
    staging = tmp / "staging"
    outputs = [TargetFile(f"deep/{i % 2}/file{i}", size, fixed) for i, size in enumerate(sizes)]
    moved, how = transfer(plan, casts, sources, outputs), CopySettings(**options)
    sums = execute(moved, staging, how, cluster=cluster, progress=progress)
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
    """Plans the copy of a (rows, width) matrix from `sources` column shards to `targets` column
    shards.
    """
    out = []
    s, t = width // sources, width // targets
    n = max(sources, targets)
    w = width // n
    for k in range(n):
        col = k * w
        out.append(
            copy(
                rows,
                w,
                (col // s, 64 + col % s * item, s * item, item),
                (col // t, 128 + col % t * item, t * item, item),
                tensor=3,
            )
        )
    return copies(*out), [64 + rows * s * item] * sources, [128 + rows * t * item + 40] * targets


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("sources", "targets"), [(1, 8), (8, 1), (8, 2), (2, 8), (1, 1)])
def test_column_shards_are_cut_and_joined(tmp_path, sources, targets, budget):
    plan, src, dst = columns(sources, targets, 700, 1024)
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst, max_memory=budget, threads=2)


@pytest.mark.parametrize("budget", [16 << 10, *BUDGETS])
def test_rows_wider_than_the_budget_are_copied(tmp_path, budget):
    plan, src, dst = columns(4, 1, 5, 4 * 20000)
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst, max_memory=budget, threads=2)


def test_each_source_byte_is_read_once(tmp_path, monkeypatch):
    plan, src, dst = columns(1, 8, 3000, 4096)
    real, read = os.preadv, []
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: read.append(real(fd, views, at)) or read[-1]
    )
    writes = []
    put = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, view, at: writes.append(put(fd, view, at)) or writes[-1]
    )
    check(tmp_path, plan, SAME, [random_bytes(n) for n in src], dst)
    assert sum(read) == 3000 * 4096 * 2
    assert len(read) < 30
    assert len(writes) < 8 * 30


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("writer", ["rows", "columns"])
@pytest.mark.parametrize("tile", [1, 40, 500])
def test_a_transpose_is_copied(tmp_path, monkeypatch, budget, writer, tile):
    """Transposes (300, 500) to (500, 300), with moves that follow the target rows or the source
    rows. tile: rows that are written at a time.
    """
    monkeypatch.setattr(clusters, "TURNED", tile * 600)
    monkeypatch.setattr(clusters, "LEAST", 1)
    c = {
        "rows": copy(500, 300, (0, 10, 2, 1000), (0, 6, 600, 2)),
        "columns": copy(300, 500, (0, 10, 1000, 2), (0, 6, 2, 600)),
    }[writer]
    check(
        tmp_path,
        copies(c),
        SAME,
        [random_bytes(10 + 300000)],
        [300010],
        max_memory=budget,
        threads=2,
    )


def test_transposed_matrices_get_as_many_threads_as_have_memory_for_a_slab():
    """Two matrices of 32,000,000 bytes, in slabs of 16 MiB, and a column shard, which is flat. A
    thread needs memory for a slab, and for the 2 MiB that it writes at a time.
    """
    crossed = [
        copy(4000, 4000, (0, 0, 2, 8000), (0, 0, 8000, 2)),
        copy(4000, 4000, (1, 0, 8000, 2), (1, 0, 2, 8000)),
    ]
    plain = copy(4000, 4000, (2, 0, 16000, 2), (2, 0, 8000, 2))
    for plan, memory, threads in (
        ([*crossed, plain], 64_000_000, 3),
        (crossed, 32_000_000, 1),
        (crossed, 100_000_000, 5),
        (crossed, 2_000_000_000, 8),
        ([plain], 64_000_000, 8),
    ):
        moved = transfer(copies(*plan), SAME)
        work = units.Work.of(moved.joined)
        assert most_threads(work, moved, 16, memory) == threads, (plan, memory)


def test_processes_that_transpose_get_half_of_the_bytes_of_others():
    """In the order of the units, of which each process does as many: 1.6 GB that are transposed,
    and 1.6 GB that are not.
    """
    crossed = [copy(4000, 4000, (n, 0, 2, 8000), (n, 0, 8000, 2)) for n in range(50)]
    plain = [copy(1, 16_000_000, (n, 0, 0, 2), (n, 0, 0, 2)) for n in range(50, 100)]
    work = units.Work.of(transfer(copies(*crossed, *plain), SAME).joined)
    files = [int(work.cluster(slab)["src_file"][0]) for slab in range(len(work.slabs))]
    turned = int(work.slabs["unit"][files.index(50)])
    assert abs(int(work.slabs["unit"][-1]) - 1.5 * turned) <= 1


@pytest.mark.parametrize("budget", [32 << 10, *BUDGETS])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "at", "width", "count"),
    [("bfloat16", 6, 1, 100), ("uint8", 3, 4, 100), ("float32", 8, 1, 12)],
)
def test_chosen_rows_and_columns_are_copied(tmp_path, dtype, at, width, count, axis, budget):
    """Copies some rows or columns of two matrices (302, 1002), `width` neighbours at a time. One
    target has those of the first matrix in order, one those of the second in any order. The last
    two have some of both: in turns, or one matrix behind the other. Behind each row of the second
    matrix lie 20,000 bytes.
    """
    size, item = (302, 1002), itemsize(dtype)
    pitches = [size[1] * item, size[1] * item + 20_000]
    sources = [random_bytes(at + size[0] * pitch) for pitch in pitches]
    matrices = [
        d[at:].reshape(size[0], pitch)[:, : size[1] * item].reshape(*size, item)
        for d, pitch in zip(sources, pitches, strict=True)
    ]
    chosen = np.sort(RNG.permutation(size[axis] // width)[: count // width])
    turns = np.arange(len(chosen)) % 2
    rows, expected = [], []
    for target, (order, of) in enumerate(
        [
            (chosen, 0 * turns),
            (RNG.permutation(chosen), 1 + 0 * turns),
            (chosen, turns),
            (chosen, np.sort(turns)),
        ]
    ):
        shape = [len(order) * width if a == axis else n for a, n in enumerate(size)]
        out = np.zeros((*shape, item), "u1")
        for new, (old, source) in enumerate(zip(order.tolist(), of.tolist(), strict=True)):
            here = slice(new * width, (new + 1) * width), slice(old * width, (old + 1) * width)
            if axis == 0:
                out[here[0]] = matrices[source][here[1]]
            else:
                out[:, here[0]] = matrices[source][:, here[1]]
            steps = (pitches[source], item), (shape[1] * item, item)
            src, dst = (
                at + n * width * way[axis] for n, way in zip((old, new), steps, strict=True)
            )
            part = [width if a == axis else n for a, n in enumerate(size)]
            rows.append(copy(*part, (source, src, *steps[0]), (target, dst, *steps[1])))
        expected.append(out)
    options = {"max_memory": budget, "threads": 1}
    sizes = [at + out.nbytes for out in expected]
    found, _ = run(tmp_path, copies(*rows), [(dtype, dtype)], sources, sizes, **options)
    for got, out in zip(found, expected, strict=True):
        assert got[at:] == out.tobytes()


@pytest.mark.parametrize("budget", [32 << 10, *BUDGETS])
@pytest.mark.parametrize("cast", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("width", [1, 7, 1000])
def test_rows_go_to_any_places_of_several_files(tmp_path, cast, width, budget):
    """1,500 rows of 2,000 in any order, some of them twice, and others that follow each other in
    both; the two targets get them in turns.
    """
    src, dst = (itemsize(name) * width for name in cast)
    chosen = np.append(RNG.permutation(2000)[:1000], RNG.integers(0, 2000, 400))
    chosen = np.append(chosen, np.arange(900, 1000)).tolist()
    places = RNG.permutation(len(chosen) // 2 + 20)[: len(chosen) // 2].tolist()
    rows = [
        copy(
            1,
            width,
            (0, 6 + old * src, src, src // width),
            (n % 2, 4 + at * dst, dst, dst // width),
        )
        for n, old in enumerate(chosen)
        for at in [places[n // 2]]
    ]
    data = RNG.standard_normal((2000, width), "f4").astype(numpy_dtype(cast[0]))
    data = np.concatenate([np.zeros(6, "u1"), data.reshape(-1).view("u1")])
    sizes = [4 + (len(places) + 20) * dst] * 2
    check(tmp_path, copies(*rows), [cast], [data], sizes, max_memory=budget, threads=2)


def test_a_value_that_is_too_large_in_one_of_many_rows_is_named_with_its_byte(tmp_path):
    values = np.ones((100, 30), "f4")
    values[41, 5] = 1e6
    values[40, 4] = 2e6  # of a row that is left out
    rows = [
        copy(1, 30, (0, n * 120, 120, 4), (0, (99 - n) * 60, 60, 2)) for n in range(100) if n != 40
    ]
    with pytest.raises(
        errors.UsageError, match=rf"tensor 0: \S+source0: 1e\+06 at byte {41 * 120 + 20} is"
    ):
        run(tmp_path, copies(*rows), [("float32", "float16")], [values.view("u1")], [6000])


def test_very_many_ranges_are_several_clusters():
    """20,000 ranges of 4 bytes, of which each needs about 1 KiB while they move."""
    plan = copies(*(copy(1, 2, (0, n * 6, 4, 2), (0, n * 4, 4, 2)) for n in range(20_000)))
    work = units.Work.of(transfer(plan, SAME).joined)
    assert np.diff(work.bounds).tolist() == [8192, 8192, 3616]


def test_gathered_columns_fit_into_the_stated_memory():
    """Twelve columns far apart, of rows of 2,000 bytes: the gap behind the last row counts too."""
    plan = copies(*(copy(50, 1, (0, n * 14, 2000, 2), (0, n * 2, 24, 2)) for n in range(12)))
    work = units.Work.of(transfer(plan, SAME).joined)
    cluster = Cluster([Copy(*c) for c in work.cluster(0).tolist()])
    for rows in range(1, 51):
        gathers, single = cluster.gathers(rows, memoryview(bytearray(cluster.places(rows)[2])))
        assert (len(gathers), single) == (1, []), rows


@pytest.mark.parametrize("budget", BUDGETS)
def test_interleaved_gate_and_up_are_split_and_joined(tmp_path, budget):
    """Splits `[g0 u0 g1 u1 ...]` of every row into gate and up, transposed, and joins them again.
    Neither of the two tensors fills a row alone.
    """
    rows, f = 64, 900
    apart = [
        copy(rows, f, (0, 2 * k, 4 * f, 4), (0, k * rows * f * 2, 2 * f, 2), tensor=k)
        for k in (0, 1)
    ]
    turned = [
        copy(f, rows, (0, 2 * k, 4, 4 * f), (1, k * rows * f * 2, 2 * rows, 2), tensor=k)
        for k in (0, 1)
    ]
    together = [copy(rows, f, (1 + k, 0, 2 * f, 2), (2, 2 * k, 4 * f, 4), tensor=k) for k in (0, 1)]
    alone = [copy(rows, f, (1, 0, 2 * f, 2), (3, 0, 4 * f, 4), tensor=2)]
    data = [random_bytes(rows * f * 4), random_bytes(rows * f * 2), random_bytes(rows * f * 2)]
    check(
        tmp_path,
        copies(*apart, *turned, *together, *alone),
        SAME,
        data,
        [rows * f * 4] * 4,
        max_memory=budget,
        threads=2,
    )


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_affine_copies_match_numpy(tmp_path_factory, data):
    """Any affine copies: sources may overlap, and targets tile a grid whose order and gaps are
    random.
    """
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
            steps[1] = draw(
                st.sampled_from([steps[0] * m, steps[0] * m * ways, steps[0] * m + 9000 * si])
            )
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
            if draw(st.integers(0, 9)):  # otherwise the element stays a hole
                rows.append(copy(n, m, src, (file, start, pitch, step), tensor=tensor, cast=tensor))
        at[file] = base + ways * n * m * di + (n + ways * m) * gap
        sizes[file] = at[file] + draw(st.integers(0, 20))
    plan = copies(*rows)
    if len(plan):
        end = (
            plan["src_at"]
            + (plan["rows"] - 1) * plan["src_pitch"]
            + (plan["run"] - 1) * plan["src_step"]
        ).max() + 8
    else:
        end = 1
    tmp = tmp_path_factory.mktemp("any")
    src = [RNG.normal(0, 1, -(-int(end) // 4)).astype("f4").view("u1") for _ in range(2)]
    budget = draw(st.sampled_from([4 << 10, 64 << 10, 64 << 20]))
    check(
        tmp,
        plan,
        casts,
        src,
        sizes,
        max_memory=budget,
        threads=draw(st.integers(1, 3)),
        allow_overflow=True,
    )


@pytest.mark.parametrize("seeks", [True, False])
def test_rows_in_another_order_are_few_writes_or_few_reads(tmp_path, seeks):
    """From local files the target's long ranges are written at once, with many short reads. What
    takes long to ask for is read in long ranges, with many short writes.
    """
    num, width = 2048, 4096
    order = RNG.permutation(num).tolist()
    plan = copies(
        *(
            copy(1, width // 2, (0, old * width, width, 2), (0, new * width, width, 2))
            for new, old in enumerate(order)
        )
    )
    work = units.Work.of(transfer(plan, SAME).joined, seeks)
    chains = [Chain(work.records(i)) for i in range(len(work.bounds) - 1)]
    reads, writes = (sum(len(c[i]) for c in ((c.spans, c.strips) for c in chains)) for i in (0, 1))
    few, many = (writes, reads) if seeks else (reads, writes)
    assert few == len(chains) == num * width // units.CHAIN and many > num // 3
    data = random_bytes(num * width)
    (got,), _ = run(tmp_path, plan, SAME, [data], [num * width])
    assert got == data.reshape(num, width)[order].tobytes()


# Holes, fixed bytes and their checksums


@pytest.mark.parametrize("checksum", ["none", "crc32", "sha256"])
def test_fixed_bytes_are_in_the_file_and_its_checksum(tmp_path, checksum):
    """The file is `[head | data | hole | data | tail]`, and the tail is made from the crc of the
    bytes before it.
    """
    data = random_bytes(300000)
    plan = copies(
        copy(1, 50000, (0, 0, 0, 2), (0, 64, 0, 2)),
        copy(1, 50000, (0, 100000, 0, 2), (0, 200064, 0, 2)),
    )
    asked = []

    def fixed(crc_of):
        asked.append(crc_of and [crc_of(64, 300000), crc_of(64, 150000), crc_of(70, 10)])
        return [(0, b"head"), (300064, b"tail")]

    (got,), sums = run(tmp_path, plan, SAME, [data], [300100], fixed, checksum=checksum)
    body = data[:100000].tobytes() + bytes(100000) + data[100000:200000].tobytes()
    assert got == b"head" + bytes(60) + body + b"tail" + bytes(32)
    want = {
        "none": "",
        "crc32": f"crc32:{zlib.crc32(got):08x}",
        "sha256": f"sha256:{hashlib.sha256(got).hexdigest()}",
    }
    assert sums == [want[checksum]]
    crcs = [zlib.crc32(body), zlib.crc32(body[:150000]), zlib.crc32(body[6:16])]
    assert asked == [crcs if checksum == "crc32" else None]


def test_many_copies_are_cut_fast():
    """50,000 copies take 0.2 s and 8 MB, in chains of any length; a large model has 500,000."""
    num = 50_000
    plan = np.zeros(num, COPY)
    i = np.arange(num)
    plan["rows"], plan["run"], plan["src_step"], plan["dst_step"] = 1024, 512, 2, 2
    plan["src_pitch"], plan["src_at"] = 1024, i << 20
    plan["dst_file"], plan["dst_at"], plan["dst_pitch"] = (
        i // 4000,
        (i // 4 % 1000 << 22) + i % 4 * 1024,
        4096,
    )
    tracemalloc.start()
    began = time.process_time()
    work = units.Work.of(transfer(plan, SAME).joined)
    took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(work.bounds) - 1 == num // 4 and int(work.slabs["bytes"].sum()) == num << 20
    assert peak < 220 * num and took < 2
    chain = np.random.default_rng(0).permutation(num).astype("i4")
    pairs = np.arange(0, num, 2), np.concatenate([[0], np.arange(1, num, 2)])
    began = time.process_time()
    assert not units._components([(chain, starts) for starts in pairs], num).any()
    assert time.process_time() - began < 2


def test_a_plan_without_copies_writes_zeros(tmp_path):
    got, sums = run(tmp_path, copies(), [], [], [5, 0])
    assert got == [bytes(5), b""]
    assert sums == [f"crc32:{zlib.crc32(bytes(5)):08x}", "crc32:00000000"]


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    plan, src, dst = columns(1, 2, 100, 64)
    run(
        tmp_path,
        plan,
        SAME,
        [random_bytes(n) for n in src],
        dst,
        progress=lambda at: seen.append((at.nbytes, at.total_bytes, at.files, at.total_files)),
    )
    assert seen[-1] == (100 * 64 * 2, 100 * 64 * 2, len(dst), len(dst))
    assert all(a[0] <= b[0] and a[2] <= b[2] for a, b in itertools.pairwise(seen))


# Failure


def test_a_truncated_source_is_an_error_with_the_place(tmp_path):
    with pytest.raises(
        SourceError, match=r"source0 is truncated: wanted 1000 bytes at 500, got 400"
    ):
        run(
            tmp_path,
            copies(copy(1, 500, (0, 500, 0, 2), (0, 0, 0, 2))),
            SAME,
            [random_bytes(900)],
            [1000],
        )


def test_a_missing_source_is_an_error_with_its_name(tmp_path):
    outputs = [TargetFile("a", 10, nothing)]
    with pytest.raises(StorageError, match=r"cannot open .*absent"):
        plan = copies(copy(1, 5, (0, 0, 0, 2), (0, 0, 0, 2)))
        missing = transfer(plan, SAME, [tmp_path / "absent"], outputs)
        execute(missing, tmp_path / "staging", CopySettings())


def test_an_output_larger_than_the_free_space_is_refused(tmp_path):
    with pytest.raises(
        StorageError, match=r"needs \d+ bytes more, its filesystem has \d+ bytes free"
    ):
        large = transfer(copies(), SAME, outputs=[TargetFile("a", 1 << 60, nothing)])
        execute(large, tmp_path / "staging", CopySettings())
    assert list((tmp_path / "staging").iterdir()) == []


def test_more_files_than_descriptors_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(files.resource, "getrlimit", lambda what: (64, 64))
    plan = copies(*(copy(1, 50, (k, 0, 0, 2), (k, 0, 0, 2)) for k in range(60)))
    check(tmp_path, plan, SAME, [random_bytes(100) for _ in range(60)], [100] * 60, threads=3)


CHILD = textwrap.dedent("""
    import os, re, signal, sys, time
    # a shell that runs the tests in the background ignores SIGINT for all of them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from pathlib import Path
    import numpy as np
    from mckpt.execute import engine as ex, units
    from mckpt.execute.transfer import CopySettings, Transfer
    from mckpt.geometry.join import COPY, Joined
    from mckpt.storage.files import TargetFile
    from mckpt.values.element import Cast

    folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    delay, budget = float(sys.argv[3]), int(sys.argv[4])
    rows, w = nbytes // 8192, 512
    plan = [(0, 0, k, 0, -1, rows, w, k * w * 2, 0, 8192, w * 2, 2, 2) for k in range(8)]
    plan += [
        (1, 0, 8, 1, -1, 1, nbytes // 4, 0, 0, 0, 0, 4, 2),
        (2, 0, 9, 0, -1, 1, nbytes // 2, 0, 0, 0, 0, 2, 2),
    ]
    sizes = [nbytes // 8] * 8 + [nbytes // 2, nbytes]
    if delay:
        units.UNIT = units.SLAB = 1 << 20
        real = os.pwrite
        os.pwrite = lambda fd, view, at: (time.sleep(delay), real(fd, view, at))[1]
    outputs = [TargetFile(f"f{i}", size, lambda crc_of: []) for i, size in enumerate(sizes)]
    casts = Cast("bfloat16", "bfloat16"), Cast("float32", "bfloat16")
    joined = Joined(np.array(plan, COPY), casts, np.zeros((0, 9), "i8"), ("a", "b", "c"), 1, 1)
    import ml_dtypes, threading

    def peak():
        # bytes; not ru_maxrss, which a child inherits from the process that forked it
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) << 10

    idle = peak()
    print("ready", flush=True)
    try:
        moved = Transfer(joined, [folder / "source"], outputs)
        ex.execute(moved, folder / "staging", CopySettings(budget, 2))
    except KeyboardInterrupt:
        sys.exit(130)
    print(peak() - idle)
    """)


def child(folder, nbytes, delay=0.0, budget=64 << 20):
    command = [sys.executable, "-c", CHILD, str(folder), str(nbytes), str(delay), str(budget)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_memory_does_not_grow_with_the_data(tmp_path):
    """For 32 MiB and for 256 MiB of source, the peak RSS above an idle process is at most the
    budget and a tenth.
    """
    for nbytes in (32 << 20, 256 << 20):
        folder = tmp_path / str(nbytes)
        folder.mkdir()
        with open(folder / "source", "wb") as file:
            file.truncate(nbytes)
        process = child(folder, nbytes, budget=16 << 20)
        assert 1 << 20 < int(process.communicate()[0]) < (16 << 20) * 1.1, nbytes


# A cluster does the steps


class Nodes:
    """A cluster without Ray: each range is done in this process, by what Ray runs on a node."""

    cores = 2

    def __init__(self, mark=None, version=None):
        self.mark, self.version, self.done = mark, version, []

    def do(self, job, step, count, tick):
        mark = self.mark or (job.journal / "generation").read_text()
        version = self.version or ray_tasks.__version__
        for item in reversed(range(count)):
            items = range(item, item + 1)
            if failed := ray_tasks._do(job, step, items, version, mark):
                raise ray_tasks._error(*failed)
            self.done.append((step, item))
            yield items
            tick()


def test_a_cluster_writes_what_one_process_writes(tmp_path, monkeypatch):
    """The ranges come in another order, and the progress ends at all bytes and files."""
    monkeypatch.setattr(units, "UNIT", 16 << 10)
    monkeypatch.setattr(units, "SLAB", 4 << 10)
    plan, sources, targets = columns(2, 4, 128, 512)
    nodes, seen = Nodes(), []
    check(
        tmp_path,
        plan,
        SAME,
        [random_bytes(n) for n in sources],
        targets,
        cluster=nodes,
        progress=seen.append,
    )
    assert [item for step, item in nodes.done if step == "copy"] == list(range(8))[::-1]
    assert [item for step, item in nodes.done if step == "end"] == [3, 2, 1, 0]
    assert seen[-1] == Progress(128 * 1024, 128 * 1024, 4, 4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"mark": "other"}, "is not there, or is another one"),
        ({"version": "0.0"}, "the command is that of 0.0"),
    ],
)
def test_a_node_that_cannot_take_part_says_why(tmp_path, monkeypatch, how, words):
    monkeypatch.setattr(ray_tasks, "DEAD_S", 0.0)
    plan, sources, targets = columns(1, 1, 8, 8)
    data = [random_bytes(n) for n in sources]
    with pytest.raises(errors.UsageError, match=rf"{words}[^\n]*\non the Ray node "):
        run(tmp_path, plan, SAME, data, targets, cluster=Nodes(**how))


@pytest.mark.parametrize("most", [None, 300], ids=["whole reads", "short reads"])
def test_spans_are_read_with_few_calls(tmp_path, monkeypatch, most):
    """Also where the system returns fewer bytes than it was asked for."""
    data = np.random.RandomState(3).bytes(2_000_000)
    (tmp_path / "file").write_bytes(data)
    fd, calls = os.open(tmp_path / "file", os.O_RDONLY), []

    def preadv(fd: int, views: list[memoryview], at: int) -> int:
        calls.append(at)
        return os.preadv(fd, [views[0][:most]] if most else views, at)

    monkeypatch.setattr(files.descriptors, "preadv", preadv)
    # neighbours, a short gap, and one that is too long to read
    starts = [*range(0, 1_000_000, 1000), 1_000_300, 1_100_000]
    spans = [(at, memoryview(bytearray(700))) for at in starts]
    files.read_spans(fd, [*spans, (1_100_700, memoryview(bytearray(5)))], "file")
    assert all(view == data[at : at + 700] for at, view in spans)
    assert most or len(calls) == 3
    with pytest.raises(SourceError, match="truncated: wanted 20 bytes at 1999990, got 10"):
        files.read_spans(fd, [(1_999_990, memoryview(bytearray(20)))], "file")
    os.close(fd)


@pytest.mark.parametrize("wide", [1000, 40_000])  # bytes from row to row: near and far apart
@pytest.mark.parametrize("kind", [*SAME, ("bfloat16", "float32")])
def test_columns_are_read_into_memory(tmp_path: Path, wide: int, kind: tuple[str, str]) -> None:
    """Windows begin and end within rows; bytes around the elements stay as they are."""
    source, (rows, left, run, gap) = tmp_path / "source", (21, 90, 150, 6)
    data = RNG.integers(0, 1 << 14, (rows, wide // 2), "u2")
    source.write_bytes(data.tobytes())
    width = itemsize(kind[1])
    pitch = run * width + gap
    copies = np.array([copy(rows, run, (0, left * 2, wide, 2), (0, 64, pitch, width))], COPY)
    values = data[:, left : left + run].view(numpy_dtype(kind[0])).astype(numpy_dtype(kind[1]))
    whole = np.full(64 + rows * pitch, 7, "u1")
    for row in range(rows):
        at = 64 + row * pitch
        whole[at : at + run * width] = values[row].view("u1")
    for start, end in ((0, len(whole)), (0, 50), (64, 64 + pitch), (777, 2222), (1234, len(whole))):
        out = np.full(end - start, 7, "u1")
        joined = transfer(copies, [kind]).joined
        piecewise.read(joined, [str(source)], start, memoryview(out))
        assert np.array_equal(out, whole[start:end]), (start, end)
