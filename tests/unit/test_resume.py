"""The same call completes an execution that failed or was killed."""

from __future__ import annotations

import errno
import os
import signal
import time
import zlib

import pytest

from mckpt.errors import StorageError
from mckpt.execute import units
from mckpt.execute.engine import execute
from mckpt.execute.transfer import CopySettings
from mckpt.storage.files import TargetFile
from tests.unit.test_execute import (
    RNG,
    SAME,
    check,
    child,
    copies,
    copy,
    nothing,
    random_bytes,
    reference,
    run,
    transfer,
)


def small_units(monkeypatch, nbytes):
    monkeypatch.setattr(units, "UNIT", nbytes)
    monkeypatch.setattr(units, "SLAB", nbytes)


def many(units=8, nbytes=1 << 20):
    """Returns a plan with a flat copy for each unit, of one source to one target: (plan, data,
    sizes).
    """
    plan = copies(
        *(
            copy(1, nbytes // 2, (0, k * nbytes * 2, 0, 2), (0, k * nbytes, 0, 2), tensor=k)
            for k in range(units)
        )
    )
    return plan, [random_bytes(2 * units * nbytes)], [units * nbytes]


def test_a_run_that_found_no_space_is_completed(tmp_path, monkeypatch):
    """The error has its cause, and the same call completes the rest."""
    small_units(monkeypatch, 1 << 20)
    plan, data, sizes = many()
    real, calls = os.pwrite, []

    def full(fd, view, at):
        calls.append(at)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, view, at)

    with monkeypatch.context() as m:
        m.setattr(os, "pwrite", full)
        with pytest.raises(
            StorageError,
            match=r"cannot write \d+ bytes at \d+ of .*file0: No space.*run the same command again",
        ) as caught:
            run(tmp_path, plan, SAME, data, sizes, threads=2)
    assert isinstance(caught.value.__cause__, OSError)
    done = len(list(tmp_path.glob("staging/done/*[0-9]")))
    assert done >= 3
    again = []
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: again.append(at) or real(fd, view, at))
    check(tmp_path, plan, SAME, data, sizes)
    assert len(again) == 8 - done


@pytest.mark.parametrize("damage", ["torn", "other", "gone"])
def test_a_damaged_journal_is_ignored(tmp_path, monkeypatch, damage):
    small_units(monkeypatch, 1 << 20)
    plan, data, sizes = many()

    def interrupted(crc_of):
        raise KeyError("here")

    with pytest.raises(KeyError):
        run(tmp_path, plan, SAME, data, sizes, interrupted)
    units = sorted(tmp_path.glob("staging/done/*[0-9]"))
    assert len(units) == 8
    if damage == "torn":
        units[3].write_bytes(units[3].read_bytes()[:-5])
    elif damage == "other":
        units[3].write_bytes(b"x" * 100)
    else:
        (tmp_path / "staging/deep/0/file0").unlink()
    real, again = os.pwrite, []
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: again.append(at) or real(fd, view, at))
    check(tmp_path, plan, SAME, data, sizes)
    assert len(again) == (8 if damage == "gone" else 1)


def test_units_copied_without_a_checksum_get_one(tmp_path, monkeypatch):
    small_units(monkeypatch, 1 << 20)
    plan, data, sizes = many()

    def interrupted(crc_of):
        raise KeyError("here")

    with pytest.raises(KeyError):
        run(tmp_path, plan, SAME, data, sizes, interrupted, checksum="none")
    check(tmp_path, plan, SAME, data, sizes)


def normal_source(folder, nbytes):
    data = RNG.normal(0, 1, nbytes // 4).astype("f4").view("u1")
    (folder / "source").write_bytes(data.tobytes())
    return data


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_is_completed(tmp_path, how, monkeypatch):
    """The next run does only the units without a journal entry, and the bytes are right.

    SIGINT ends the first run within a second.
    """
    nbytes = 8 << 20
    data = normal_source(tmp_path, nbytes)
    process = child(tmp_path, nbytes, delay=0.02)
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("staging/done/*[0-9]"))) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    start = time.monotonic()
    process.send_signal(how)
    code = process.wait()
    assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[how]
    assert time.monotonic() - start < 3  # one second on an idle machine
    before = {p.name: p.read_bytes() for p in tmp_path.glob("staging/done/*[0-9]")}
    assert 5 <= len(before) < 20

    rows, w = nbytes // 8192, 512
    plan = [copy(rows, w, (0, k * w * 2, 8192, 2), (k, 0, w * 2, 2)) for k in range(8)]
    plan += [
        copy(1, nbytes // 4, (0, 0, 0, 4), (8, 0, 0, 2), tensor=1, cast=1),
        copy(1, nbytes // 2, (0, 0, 0, 2), (9, 0, 0, 2), tensor=2),
    ]
    sizes = [nbytes // 8] * 8 + [nbytes // 2, nbytes]
    casts = [("bfloat16",) * 2, ("float32", "bfloat16")]
    small_units(monkeypatch, 1 << 20)
    real, written = os.pwrite, []
    monkeypatch.setattr(
        os, "pwrite", lambda fd, view, at: written.append(len(view)) or real(fd, view, at)
    )
    outputs = [TargetFile(f"f{i}", size, nothing) for i, size in enumerate(sizes)]
    moved = transfer(copies(*plan), casts, [tmp_path / "source"], outputs)
    sums = execute(moved, tmp_path / "staging", CopySettings())
    assert sum(written) <= sum(sizes) - len(before) * (1 << 19)
    want = reference(copies(*plan), casts, [data], sizes)
    assert [
        (tmp_path / "staging" / o.path).read_bytes() == w
        for o, w in zip(outputs, want, strict=True)
    ] == [True] * 10
    assert sums == [f"crc32:{zlib.crc32(w):08x}" for w in want]
