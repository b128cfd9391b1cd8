"""Several processes share one run. The output is that of one process, and none of them waits for
ever.

The tests of test_rank_sessions.py need only one process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt import errors
from tests.helpers import commands
from tests.helpers.tiny import TinyModel

AT_ONCE = 6  # number of scenarios that run at a time; their processes wait nearly all of it
# Each of these is Python that a process runs first, to change one part of mckpt
SOON = "import mckpt.execute.ranks as r; r.LOOK_S, r.DEAD_S = 0.3, 3.0"
DEAD_SOON = "import mckpt.execute.ranks as r; r.DEAD_S = 2.0"
DIES = """
import os, mckpt.execute.journal as j
write = j.Journal.write
def dies(*a): write(*a); os._exit(9)
j.Journal.write = dies
"""
TELLS = """
import mckpt.execute.journal as j
write = j.Journal.write
def tells(journal, unit, rows): print("moved", unit); write(journal, unit, rows)
j.Journal.write = tells
"""
FAILS = """
import mckpt.execute.engine as e, mckpt.errors as x
def fails(*a): raise x.StorageError("the disk of rank 1")
e._JobState.move = fails
"""
STAYS = """
import time, mckpt.execute.engine as e
def stays(*a): print(flush=True); time.sleep(100)
e._JobState.move = stays
"""
FULL = """
import os, types, mckpt.execute.files as e
e.os = types.SimpleNamespace(**vars(os))
e.os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=512)
"""
# a background job of a shell ignores SIGINT, and its children would do so too
SLOW = """
import signal, time, mckpt.execute.engine as e
move = e._JobState.move
def slow(*a): time.sleep(0.2); return move(*a)
e._JobState.move = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
"""


@pytest.fixture(scope="module")
def source(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3-moe")


def environment(rank: int, size: int, tmp_path: Path, run: str = "") -> dict[str, str]:
    """Returns the environment of one rank, in which a tiny model has many units."""
    custom = tmp_path / "sitecustomize.py"
    if not custom.exists():  # a rank that starts must not find it half-written
        custom.write_text("import mckpt.execute.units as u\nu.UNIT = 64 << 10\nu.SLAB = 16 << 10\n")
    path = os.pathsep.join([str(tmp_path), str(commands.ROOT)])
    return os.environ | {
        "MCKPT_RANK": str(rank),
        "MCKPT_NUM_RANKS": str(size),
        "MCKPT_RUN": run,
        "PYTHONPATH": path,
    }


def start(
    arguments: list[Any], rank: int, size: int, tmp_path: Path, run: str = "", before: str = ""
) -> subprocess.Popen[str]:
    line, environ = (
        commands.command_line(*arguments, before=before),
        environment(rank, size, tmp_path, run),
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environ, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path)


def wait(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [p.communicate(timeout=100) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]


@pytest.mark.parametrize(("form", "run"), [("torch", "a"), ("torch_dist", "")])
def test_several_ranks_write_the_output_of_one_process(
    source: Path, tmp_path: Path, form: str, run: str
) -> None:
    """Runs have a name under srun and --workers, and none under torchrun. Without a name, the other
    ranks recognise rank 0 by its heartbeat.
    """
    arguments = ["hf-to-megatron", source, "PLACE", "--format", form, "--tp", 2]
    commands.good(*arguments[:2], tmp_path / "one", *arguments[3:])
    arguments[2] = tmp_path / "three"
    ended = wait([start(arguments, rank, 3, tmp_path, run) for rank in (2, 1, 0)])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [bool(out) for _, out, _ in ended] == [False, False, True]  # only rank 0 prints
    assert commands.tree(tmp_path / "three") == commands.tree(tmp_path / "one")
    again = wait(
        [
            start([*arguments[:3], "--overwrite", *arguments[3:]], rank, 2, tmp_path, run)
            for rank in (0, 1)
        ]
    )
    assert [code for code, _, _ in again] == [0, 0], again
    assert commands.tree(tmp_path / "three") == commands.tree(tmp_path / "one")


def test_workers_write_the_output_of_one_process(source: Path, tmp_path: Path) -> None:
    commands.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch", "--tp", 2)
    options = ("--format", "torch", "--tp", 2, "--workers", 3)
    commands.run(commands.command_line("hf-to-megatron", source, tmp_path / "three", *options))
    assert commands.tree(tmp_path / "three") == commands.tree(tmp_path / "one")
    for back in ("reshard", "megatron-to-hf"):
        options = (tmp_path / "three", tmp_path / back, "--workers", 2, "--json")
        done = commands.run(commands.command_line(back, *options))
        assert json.loads(done.stdout)["files"]
    assert commands.mckpt("diff", source, tmp_path / "megatron-to-hf").code == 0


def test_many_workers_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    """Workers write into the staging directory until it is removed."""
    commands.good("hf-to-megatron", source, tmp_path / "one")
    for number in range(4):
        out = tmp_path / str(number)
        line = commands.command_line("hf-to-megatron", source, out, "--workers", 12)
        commands.run(line, timeout=30)
        assert commands.tree(out) == commands.tree(tmp_path / "one")


def ranks_end(
    arguments: list[Any], order: tuple[int, ...], tmp_path: Path, run: str, before: str = SOON
) -> list[tuple[int, str]]:
    """Starts these ranks of 2, each when the one before has ended, with a limit of a minute;
    returns their exit codes and their output on stderr.
    """
    line, ended = commands.command_line(*arguments, before=before), []
    for rank in order:
        environ = environment(rank, 2, tmp_path, run)
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
        ended.append((done.returncode, done.stderr))
    return ended


# ---- ranks that wait for others. Each scenario takes seconds in which nothing computes, so all of
# them run in threads, at the same time as the other tests of this file. They must run mckpt in
# processes only, because those tests replace parts of mckpt in this one.


def rank_1_of_2_never_comes(made: Path, source: Path, tmp_path: Path) -> None:
    """Rank 0 stops waiting and copies the share of rank 1."""
    arguments = ["hf-to-megatron", source, tmp_path / "two"]
    ((code, said),) = ranks_end(arguments, (0,), tmp_path, "x", DEAD_SOON)
    assert code == 0, said
    assert commands.tree(tmp_path / "two") == commands.tree(made / "torch_dist")


def rank_1_dies_and_is_replaced(made: Path, source: Path, tmp_path: Path) -> None:
    """Rank 1 dies after one unit and reports nothing to rank 0."""
    arguments = ["hf-to-megatron", source, tmp_path / "two", "--format", "torch", "--threads", 1]
    killed = start(arguments, 1, 2, tmp_path, "x", DIES)
    ((code, said),) = ranks_end(arguments, (0,), tmp_path, "x", DEAD_SOON)
    assert ([killed for killed, _, _ in wait([killed])], code) == ([9], 0), said
    assert "rank 1 has ended or is not heard of" in said
    assert commands.tree(tmp_path / "two") == commands.tree(made / "torch")


def all_ranks_end_with_the_error_of_rank_0(
    made: Path, source: Path, tmp_path: Path, run: str
) -> None:
    """All ranks end with the exit code and the error of rank 0, in any order, and leave nothing
    behind.
    """
    out = tmp_path / "out"
    arguments = ["hf-to-megatron", source, out]
    shutil.copytree(made / "tp2", out)
    before = commands.tree(tmp_path / "out")
    for order in ((0, 1), (1, 0)):
        ended = ranks_end(arguments, order, tmp_path, run)
        assert [code for code, _ in ended] == [6, 6], ended
        assert all("give --overwrite" in said for _, said in ended), ended
    (out / "release" / "notes").write_text("mine")
    ended = ranks_end([*arguments, "--overwrite"], (1,), tmp_path, run)
    assert ended[0][0] == 6
    assert "does not belong to a checkpoint" in ended[0][1]
    (out / "release" / "notes").unlink()
    assert commands.tree(out) == before
    ended = ranks_end([*arguments, "--tp", 5], (0, 1), tmp_path, run)
    assert [code for code, _ in ended] == [2, 2], ended


def a_destination_where_another_run_works_is_refused(
    made: Path, source: Path, tmp_path: Path, run: str
) -> None:
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    other = start(arguments, 0, 1, tmp_path, before=STAYS)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        ended = ranks_end(arguments, (1, 0), tmp_path, run)
        assert [code for code, _ in ended] == [6, 6], ended
        assert all("another mckpt is writing here" in said for _, said in ended), ended
    finally:
        other.kill()
        other.communicate()
    # the lock still contains its name
    both = wait([start(arguments, rank, 2, tmp_path, run) for rank in (1, 0)])
    assert [code for code, _, _ in both] == [0, 0], both


def a_late_rank_finds_the_error_of_rank_0(
    made: Path, source: Path, tmp_path: Path, run: str
) -> None:
    """Rank 1 finds the error of rank 0, which has ended.

    In a run without a name the error may be of an earlier run. Rank 1 accepts it after it has
    waited for rank 0 as long as for a dead rank.
    """
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    ended = ranks_end(arguments, (0, 1), tmp_path, run, f"{SOON}\n{FULL}")
    assert [code for code, _ in ended] == [7, 7], ended
    assert all("512 bytes free" in said for _, said in ended), ended
    if not run:
        both = wait([start(arguments, rank, 2, tmp_path, run) for rank in (1, 0)])
        assert [code for code, _, _ in both] == [0, 0], both


def ranks_that_miss_each_other_end_with_overwrite(
    made: Path, source: Path, tmp_path: Path, run: str, order: tuple[int, int]
) -> None:
    """The destination already holds the files of the same plan, of this run or an earlier one. No
    rank waits longer than for one that died.
    """
    out = tmp_path / "out"
    shutil.copytree(made / "torch_dist", out)
    before, manifest = commands.tree(out), out / "release" / "mckpt.json"
    written = manifest.stat().st_mtime_ns
    ended = ranks_end(["hf-to-megatron", source, out, "--overwrite"], order, tmp_path, run)
    assert [code for code, _ in ended] == [0, 0], ended
    assert commands.tree(out) == before
    assert manifest.stat().st_mtime_ns > written


def work_that_is_done_already_ends_all_ranks_alike(
    made: Path, source: Path, tmp_path: Path, run: str
) -> None:
    """A rank other than 0 judges the destination as rank 0 does, though it meets no other rank."""
    out, model = tmp_path / "out", tmp_path / "model"
    shutil.copytree(source, model)
    arguments = ["hf-to-megatron", model, out]
    commands.run(commands.command_line(*arguments), env=environment(0, 1, tmp_path))
    before = commands.tree(out)
    ended = ranks_end(arguments, (1, 0), tmp_path, run)
    assert [code for code, _ in ended] == [0, 0], ended
    path = next(model.glob("*.safetensors"))
    os.utime(path)
    ended = ranks_end(arguments, (1, 0), tmp_path, run)
    assert [code for code, _ in ended] == [0, 0], ended
    data, before = bytearray(path.read_bytes()), commands.tree(out)
    data[-1] ^= 1
    path.write_bytes(data)
    ended = ranks_end(arguments, (1, 0), tmp_path, run)
    assert [code for code, _ in ended] == [6, 6], ended
    assert commands.tree(out) == before


# The longest come first. "x" is a run with a name, as under srun; "" has none, as under torchrun.
SCENARIOS: list[tuple[Any, ...]] = [
    (ranks_that_miss_each_other_end_with_overwrite, "x", (0, 1)),
    (ranks_that_miss_each_other_end_with_overwrite, "x", (1, 0)),
    (ranks_that_miss_each_other_end_with_overwrite, "", (0, 1)),
    (ranks_that_miss_each_other_end_with_overwrite, "", (1, 0)),
    (a_late_rank_finds_the_error_of_rank_0, ""),
    (a_destination_where_another_run_works_is_refused, "x"),
    (a_destination_where_another_run_works_is_refused, ""),
    (all_ranks_end_with_the_error_of_rank_0, "x"),
    (all_ranks_end_with_the_error_of_rank_0, ""),
    (work_that_is_done_already_ends_all_ranks_alike, "x"),
    (work_that_is_done_already_ends_all_ranks_alike, ""),
    (rank_1_dies_and_is_replaced,),
    (rank_1_of_2_never_comes,),
    (a_late_rank_finds_the_error_of_rank_0, "x"),
]
NAMES = ["-".join([scenario.__name__, *map(str, case)]) for scenario, *case in SCENARIOS]


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of `source` that one process converted."""
    root = tmp_path_factory.mktemp("made")
    mckpt.plan(source, root / "torch_dist").run()
    mckpt.plan(source, root / "torch", format="torch").run()
    mckpt.plan(source, root / "tp2", parallel=mckpt.Parallel(tp=2)).run()
    return root


@pytest.fixture(scope="module", autouse=True)
def begun(
    made: Path,
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[dict[str, Future[None]]]:
    """Starts the scenarios that were selected when the first test of this file begins."""
    selected = {item.name for item in request.session.items}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            name: pool.submit(scenario, made, source, tmp_path_factory.mktemp("ranks"), *case)
            for name, (scenario, *case) in zip(NAMES, SCENARIOS, strict=True)
            if f"test_ranks_that_wait[{name}]" in selected
        }


# ---- ranks that work together


def test_a_run_whose_rank_0_was_killed_continues_at_another_start(
    source: Path, tmp_path: Path
) -> None:
    """Rank 0 dies after one unit. The three ranks that start next rely on its journal."""
    commands.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch")
    out = tmp_path / "three"
    arguments = ["hf-to-megatron", source, out, "--format", "torch", "--threads", 1]
    assert wait([start(arguments, 0, 2, tmp_path, "y", DIES)])[0][0] == 9
    assert not (out / "release").exists()
    (kept,) = out.glob(".mckpt-*/done/0*")
    ended = wait([start(arguments, rank, 3, tmp_path, "z", TELLS) for rank in range(3)])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    said = "".join(out for _, out, _ in ended)
    assert "moved" in said and f"moved {int(kept.name)}\n" not in said
    assert commands.tree(out) == commands.tree(tmp_path / "one")


def test_a_rank_that_fails_ends_all_ranks(source: Path, tmp_path: Path) -> None:
    """Both ranks end with the error of rank 1, and nothing is published."""
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    both = [start(arguments, 0, 2, tmp_path, "y"), start(arguments, 1, 2, tmp_path, "y", FAILS)]
    (code, _, said), (other, _, _) = wait(both)
    assert (code, other) == (7, 7)
    assert "rank 1: the disk of rank 1" in said
    assert not (tmp_path / "out" / "release").exists()


def test_a_destination_without_permission_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the test replaces os.access."""
    planned = mckpt.plan(source, tmp_path / "a" / "out")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(errors.StorageError, match=f"no permission to write to {tmp_path}$"):
        planned.destination.refuse(planned.destination.staging_directory("x"), "")
    assert not (tmp_path / "a").exists()


def test_a_journal_of_removed_files_is_ignored(source: Path, tmp_path: Path) -> None:
    """The files of a run were removed, and one of its processes wrote into the journal
    afterwards.
    """
    arguments = ["hf-to-megatron", source, tmp_path / "out", "--format", "torch", "--threads", "1"]
    assert wait([start(arguments, 0, 1, tmp_path, before=DIES)])[0][0] == 9
    (staging,) = (tmp_path / "out").glob(".mckpt-*")
    (unit,) = (staging / "done").glob("0*")
    late = unit.read_bytes()
    shutil.rmtree(staging)
    assert wait([start(arguments, 0, 1, tmp_path, before=DIES)])[0][0] == 9
    (again,) = (staging / "done").glob("0*")
    again.write_bytes(late)
    for path in (staging / "data").rglob("*.pt"):
        path.write_bytes(bytes(path.stat().st_size))
    commands.run(commands.command_line(*arguments), env=environment(0, 1, tmp_path))
    commands.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch")
    assert commands.tree(tmp_path / "out") == commands.tree(tmp_path / "one")


# ---- at the end: the scenarios, and a test that measures time, when they have ended


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_wait(begun: dict[str, Future[None]], name: str) -> None:
    begun[name].result()


def test_an_interrupt_ends_all_workers_at_once(source: Path, tmp_path: Path) -> None:
    """The same command then completes the output."""
    arguments = ["hf-to-megatron", source, tmp_path / "out", "--workers", "3", "--threads", "1"]
    environ = {k: v for k, v in environment(0, 1, tmp_path).items() if not k.startswith("MCKPT_")}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = len(list((tmp_path / "out").glob(".mckpt-*/done/0*")))
        process = subprocess.Popen(
            commands.command_line(*arguments, before=SLOW),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(600):
            if len(list((tmp_path / "out").glob(".mckpt-*/done/0*"))) > before:
                break
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert time.monotonic() - begun < 2, said  # 1 s on an idle machine
        assert process.returncode == 128 + number, said
        assert "continues" in said
    left = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "out")], capture_output=True, text=True
    ).stdout
    assert not left, left
    commands.run(commands.command_line(*arguments), env=environ)
    commands.good("hf-to-megatron", source, tmp_path / "one")
    assert commands.tree(tmp_path / "out") == commands.tree(tmp_path / "one")
