"""Several processes do one run: the output is that of one, whoever dies, and nobody
waits for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt import errors
from mckpt.execute import ranks
from mckpt.execute.ranks import Gone, Ranks, Session
from tests import door, tiny

LAUNCHED = [sys.executable, "-m", "mckpt"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_random("qwen3-moe", tmp_path_factory.mktemp("source") / "hf")


def environment(rank: int, size: int, tmp_path: Path, run: str = "") -> dict[str, str]:
    """Of one rank; a tiny model has many units there."""
    custom = tmp_path / "sitecustomize.py"
    if not custom.exists():  # a rank that starts must not find it half-written
        custom.write_text("import mckpt.execute.units as u\nu.UNIT = 64 << 10\nu.SLAB = 16 << 10\n")
    path = os.pathsep.join([str(tmp_path), str(door.ROOT)])
    return os.environ | {
        "MCKPT_RANK": str(rank),
        "MCKPT_NUM_RANKS": str(size),
        "MCKPT_RUN": run,
        "PYTHONPATH": path,
    }


def start(
    arguments: list[Any], rank: int, size: int, tmp_path: Path, run: str = ""
) -> subprocess.Popen[str]:
    command = [*LAUNCHED, *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(rank, size, tmp_path, run),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def wait(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [p.communicate(timeout=100) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]


@pytest.mark.parametrize(("form", "run"), [("torch", "a"), ("torch_dist", "")])
def test_the_output_is_that_of_one_process(
    source: Path, tmp_path: Path, form: str, run: str
) -> None:
    """With a name for the run (srun, --workers) and without one (torchrun), where rank 0 is known
    by its heartbeat.
    """
    arguments = ["hf-to-megatron", source, "PLACE", "--format", form, "--tp", 2]
    door.good(*arguments[:2], tmp_path / "one", *arguments[3:])
    arguments[2] = tmp_path / "three"
    ended = wait([start(arguments, rank, 3, tmp_path, run) for rank in (2, 1, 0)])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [bool(out) for _, out, _ in ended] == [False, False, True]  # rank 0 does the talking
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")
    again = wait(
        [
            start([*arguments[:3], "--overwrite", *arguments[3:]], rank, 2, tmp_path, run)
            for rank in (0, 1)
        ]
    )
    assert [code for code, _, _ in again] == [0, 0], again
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")


def test_workers(source: Path, tmp_path: Path) -> None:
    door.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch", "--tp", 2)
    done = subprocess.run(
        [
            *LAUNCHED,
            "hf-to-megatron",
            source,
            tmp_path / "three",
            "--format",
            "torch",
            "--tp",
            "2",
            "--workers",
            "3",
        ],
        env=os.environ | {"PYTHONPATH": str(door.ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")
    for back in ("reshard", "megatron-to-hf"):
        done = subprocess.run(
            [*LAUNCHED, back, tmp_path / "three", tmp_path / back, "--workers", "2", "--json"],
            env=os.environ | {"PYTHONPATH": str(door.ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["files"]
    assert door.mckpt("diff", source, tmp_path / "megatron-to-hf").code == 0


def test_many_workers_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    """They write into the staging directory until the moment it goes."""
    door.good("hf-to-megatron", source, tmp_path / "one")
    for number in range(4):
        out = tmp_path / str(number)
        command = [*LAUNCHED, "hf-to-megatron", source, out, "--workers", "12"]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(door.ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert door.tree(out) == door.tree(tmp_path / "one")


def patched(patch: str, arguments: list[Any]) -> list[str]:
    """The command of an mckpt in which something was changed first."""
    said = [str(a) for a in arguments]
    return [
        sys.executable,
        "-c",
        f"import sys, mckpt.cli\n{patch}\nsys.argv[1:] = {said}\nmckpt.cli.main()",
    ]


def test_a_dead_rank_is_replaced(source: Path, tmp_path: Path) -> None:
    """Rank 1 of 2 never comes: rank 0 gives it up and does its share."""
    door.good("hf-to-megatron", source, tmp_path / "one")
    command = patched(
        "import mckpt.execute.ranks; mckpt.execute.ranks.DEAD_S = 2.0",
        ["hf-to-megatron", source, tmp_path / "two"],
    )
    done = subprocess.run(
        command, env=environment(0, 2, tmp_path, "x"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert door.tree(tmp_path / "two") == door.tree(tmp_path / "one")


def test_a_killed_rank_is_replaced_and_a_restart_goes_on(source: Path, tmp_path: Path) -> None:
    """Rank 1 dies when it has done one unit, with nobody to tell; and then the same with rank 0,
    after which three go on.
    """
    door.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch")
    arguments = ["hf-to-megatron", source, tmp_path / "two", "--format", "torch", "--threads", "1"]
    dies = (
        "import os, mckpt.execute.journal as j; w = j.Journal.write\ndef write(*a): w(*a);"
        " os._exit(9)\nj.Journal.write = write"
    )
    killed = subprocess.Popen(patched(dies, arguments), env=environment(1, 2, tmp_path, "x"))
    command = patched("import mckpt.execute.ranks; mckpt.execute.ranks.DEAD_S = 2.0", arguments)
    done = subprocess.run(
        command, env=environment(0, 2, tmp_path, "x"), capture_output=True, text=True, timeout=60
    )
    assert (killed.wait(), done.returncode) == (9, 0), done.stderr
    assert "rank 1 has ended or is not heard of" in done.stderr
    assert door.tree(tmp_path / "two") == door.tree(tmp_path / "one")

    arguments[2] = tmp_path / "three"
    killed = subprocess.Popen(patched(dies, arguments), env=environment(0, 2, tmp_path, "y"))
    assert killed.wait(60) == 9
    assert not (tmp_path / "three" / "release").exists()
    assert list((tmp_path / "three").glob(".mckpt-*/done/0*"))
    (kept,) = (tmp_path / "three").glob(".mckpt-*/done/0*")
    moved = (
        "import mckpt.execute.journal as j; w = j.Journal.write\ndef write(s, u, r): print('moved',"
        " u); w(s, u, r)\nj.Journal.write = write"
    )
    starting = [
        subprocess.Popen(
            patched(moved, arguments),
            env=environment(rank, 3, tmp_path, "z"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    ended = wait(starting)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    said = "".join(out for _, out, _ in ended)
    assert "moved" in said
    assert f"moved {int(kept.name)}\n" not in said  # the journal is believed
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")


def test_a_rank_that_fails_ends_all(source: Path, tmp_path: Path) -> None:
    """Both end with the error of the one, and nothing is published."""
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    first = start(arguments, 0, 2, tmp_path, "y")
    fails = (
        "import mckpt.execute.engine as e, mckpt.errors as x\ndef fails(*a): raise"
        " x.StorageError('the disk of rank 1')\ne._Run.move = fails"
    )
    second = subprocess.run(
        patched(fails, arguments),
        env=environment(1, 2, tmp_path, "y"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 7
    ((code, _, said),) = wait([first])
    assert code == 7
    assert "rank 1: the disk of rank 1" in said
    assert not (tmp_path / "out" / "release").exists()


SOON = (
    "import mckpt.execute.ranks; mckpt.execute.ranks.LOOK_S = 0.3; mckpt.execute.ranks.DEAD_S = 3.0"
)


def ranks_end(
    arguments: list[Any], order: tuple[int, ...], tmp_path: Path, run: str, patch: str = SOON
) -> list[tuple[int, str]]:
    """Starts these ranks of 2, each when the one before has ended; their codes and what they said,
    within a minute.
    """
    out = []
    for rank in order:
        done = subprocess.run(
            patched(patch, arguments),
            env=environment(rank, 2, tmp_path, run),
            capture_output=True,
            text=True,
            timeout=60,
        )
        out.append((done.returncode, done.stderr))
    return out


@pytest.mark.parametrize("run", ["x", ""])
def test_what_rank_0_is_refused_for_the_others_find_too(
    source: Path, tmp_path: Path, run: str
) -> None:
    """With its code and its words, whoever comes first, and nothing is left to say so."""
    out = tmp_path / "out"
    arguments = ["hf-to-megatron", source, out]
    door.good(*arguments, "--tp", 2)
    before = door.tree(tmp_path / "out")
    for order in ((0, 1), (1, 0)):
        ended = ranks_end(arguments, order, tmp_path, run)
        assert [code for code, _ in ended] == [6, 6], ended
        assert all("say --overwrite" in said for _, said in ended), ended
    (out / "release" / "notes").write_text("mine")
    ended = ranks_end([*arguments, "--overwrite"], (1,), tmp_path, run)
    assert ended[0][0] == 6
    assert "no part of a checkpoint" in ended[0][1]
    (out / "release" / "notes").unlink()
    assert door.tree(out) == before
    ended = ranks_end([*arguments, "--workers", 2], (0, 1), tmp_path, run)
    assert [code for code, _ in ended] == [2, 2], ended


@pytest.mark.parametrize("run", ["x", ""])
def test_a_place_where_another_works(source: Path, tmp_path: Path, run: str) -> None:
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    stays = (
        "import time, mckpt.execute.engine as e\ndef stays(*a): print(flush=True);"
        " time.sleep(100)\ne._Run.move = stays"
    )
    other = subprocess.Popen(
        patched(stays, arguments), env=environment(0, 1, tmp_path), stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        ended = ranks_end(arguments, (1, 0), tmp_path, run)
        assert [code for code, _ in ended] == [6, 6], ended
        assert all("another mckpt is writing here" in said for _, said in ended), ended
    finally:
        other.kill()
        other.communicate()
    # its name is in the lock still
    ended = wait([start(arguments, rank, 2, tmp_path, run) for rank in (1, 0)])
    assert [code for code, _, _ in ended] == [0, 0], ended


@pytest.mark.parametrize("run", ["x", ""])
def test_an_error_of_rank_0_before_the_others_came(source: Path, tmp_path: Path, run: str) -> None:
    """Nameless, it may be of an earlier run, and is believed when rank 0 has not come for as long
    as one that is dead.
    """
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    full = (
        f"{SOON}\nimport os, types, mckpt.execute.files as e\ne.os ="
        " types.SimpleNamespace(**vars(os))"
    )
    full += "\ne.os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=512)"
    ended = ranks_end(arguments, (0, 1), tmp_path, run, full)
    assert [code for code, _ in ended] == [7, 7], ended
    assert all("512 bytes free" in said for _, said in ended), ended
    if not run:
        ended = [
            (code, said)
            for code, _, said in wait([start(arguments, rank, 2, tmp_path, run) for rank in (1, 0)])
        ]
        assert [code for code, _ in ended] == [0, 0], ended


def test_no_leave_to_write(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root has leave everywhere: what the system says is made up here."""
    planned = mckpt.plan(source, tmp_path / "a" / "out", helps=True)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(errors.StorageError, match=f"no leave to write {tmp_path}$"):
        planned.destination.refuse(planned.destination.staging_directory("x"), "")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("run", ["x", ""])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_miss_each_other_with_overwrite(
    source: Path, tmp_path: Path, run: str, order: tuple[int, int]
) -> None:
    """What is in place is the same plan's, of this run or of an earlier one: neither waits for more
    than one that died.
    """
    arguments = ["hf-to-megatron", source, tmp_path / "out", "--overwrite"]
    door.good(*arguments[:3])
    before, written = (
        door.tree(tmp_path / "out"),
        (tmp_path / "out" / "release" / "mckpt.json").stat().st_mtime_ns,
    )
    ended = ranks_end(arguments, order, tmp_path, run)
    assert [code for code, _ in ended] == [0, 0], ended
    assert door.tree(tmp_path / "out") == before
    assert (tmp_path / "out" / "release" / "mckpt.json").stat().st_mtime_ns > written


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks()),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Ranks(3, 8)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Ranks(3, 8, local=4)),
        # a batch script: not one of the tasks
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Ranks()),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "2",
            },
            Ranks(1, 4, "7.2."),
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "65",
                "SLURM_STEP_TASKS_PER_NODE": "4(x16),1",
            },
            Ranks(1, 65, "..", local=4),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n"},
            Ranks(1, 2, "n"),
        ),
    ],
)
def test_what_launchers_say(environ: dict[str, str], expected: Ranks) -> None:
    assert Ranks.of_environment(environ) == expected


@pytest.mark.parametrize(
    "environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_what_launchers_must_not_say(environ: dict[str, str]) -> None:
    with pytest.raises(errors.UsageError, match="in the environment"):
        Ranks.of_environment(environ)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert [Ranks(0, 8, local=n).cores for n in (1, 4, 100)] == [64, 16, 1]
    # bound by the launcher: these are its own
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert Ranks(0, 8, local=4).cores == 8


@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("size", [1, 3, 8, 512])
def test_shares_are_all(count: int, size: int) -> None:
    shares = [Ranks(0, size).share(count, rank) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_line_of_an_earlier_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a name for its run is told by its line, which does not change."""
    monkeypatch.setattr(ranks, "START_S", 0.3)
    monkeypatch.setattr(ranks, "BEAT_S", 0.05)
    for run in ("old", ""):
        with Session(tmp_path, Ranks(0, 2, run)) as old:
            old.open()
        for other in {"new", run} - {"old"}:
            with pytest.raises(errors.StorageError, match="rank 0 has not begun"):
                Session(tmp_path, Ranks(1, 2, other)).join(lambda late: False)
    with (
        Session(tmp_path, Ranks(0, 3)) as larger,
        pytest.raises(errors.StorageError, match="rank 0 has not begun"),
    ):
        larger.open()
        Session(tmp_path, Ranks(1, 2)).join(lambda late: False)  # its share would be another
    for run in ("new", ""):
        with (
            Session(tmp_path, Ranks(0, 2, run)) as first,
            Session(tmp_path, Ranks(1, 2, run)) as second,
        ):
            first.open()
            second.join(lambda late: False)


def test_when_rank_0_is_done_or_dead_or_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "BEAT_S", 0.05)

    def both() -> tuple[Session, Session]:
        first, second = (Session(tmp_path, Ranks(rank, 2, "r")) for rank in (0, 1))
        first.open()
        second.join(lambda late: False)
        return first, second

    first, second = both()
    monkeypatch.setattr(ranks, "DEAD_S", 0.3)
    first.over.set()
    with pytest.raises(errors.StorageError, match="not been heard of"):
        second.listen()
    first, second = both()
    with pytest.raises(errors.SourceError), first:
        raise errors.SourceError("a file is short")
    with pytest.raises(errors.SourceError, match="rank 0: a file is short"):
        second.listen()
    first, second = both()
    with pytest.raises(ZeroDivisionError), first:
        print(1 / 0)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: Traceback.*ZeroDivisionError"):
        second.listen()
    first, second = both()
    again = Session(tmp_path, Ranks(0, 2, "r"))
    first.over.set()
    again.open()
    with pytest.raises(errors.StorageError, match="rank 0 has begun anew"):
        second.listen()
    with pytest.raises(errors.StorageError, match="rank 0 has begun anew"):
        second.meet(lambda rank: None)
    again.over.set()
    first, second = both()
    shutil.rmtree(tmp_path / "ranks")
    with pytest.raises(Gone):
        second.listen()


def test_a_stopped_process_does_not_take_the_others_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "BEAT_S", 0.05)
    monkeypatch.setattr(ranks, "DEAD_S", 0.5)
    with (
        Session(tmp_path, Ranks(0, 2, "r")) as first,
        Session(tmp_path, Ranks(1, 2, "r")) as second,
    ):
        first.open()
        second.join(lambda late: False)
        first.over.set()
        second.beat()
        now = ranks.time.monotonic
        monkeypatch.setattr(ranks.time, "monotonic", lambda: now() + 3600)
        second.beat()
        assert second.lives(0)


def test_lines_of_another_run_count_for_nothing(tmp_path: Path) -> None:
    """A process of a run that is over, and that nothing tells from this one, says that it has done
    its share.
    """
    with Session(tmp_path, Ranks(0, 2)) as old, Session(tmp_path, Ranks(1, 2)) as straggler:
        old.open()
        straggler.line |= {"id": old.line["id"], "steps": 2}
        with Session(tmp_path, Ranks(0, 2)) as first:
            first.open()
            straggler._write(straggler.line)
            first._look(1)
            assert not first.lines


def test_a_journal_of_other_files_is_not_believed(source: Path, tmp_path: Path) -> None:
    """Of a run whose files were removed while one of its processes lived on: it writes into the
    journal of the next.
    """
    arguments = ["hf-to-megatron", source, tmp_path / "out", "--format", "torch", "--threads", "1"]
    dies = (
        "import os, mckpt.execute.journal as j; w = j.Journal.write\ndef write(*a): w(*a);"
        " os._exit(9)\nj.Journal.write = write"
    )
    environ = environment(0, 1, tmp_path)
    assert subprocess.run(patched(dies, arguments), env=environ, timeout=60).returncode == 9
    (staging,) = (tmp_path / "out").glob(".mckpt-*")
    (unit,) = (staging / "done").glob("0*")
    late = unit.read_bytes()
    shutil.rmtree(staging)
    assert subprocess.run(patched(dies, arguments), env=environ, timeout=60).returncode == 9
    (again,) = (staging / "done").glob("0*")
    again.write_bytes(late)
    for path in (staging / "data").rglob("*.pt"):
        path.write_bytes(bytes(path.stat().st_size))
    assert (
        subprocess.run([*LAUNCHED, *map(str, arguments)], env=environ, timeout=60).returncode == 0
    )
    door.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch")
    assert door.tree(tmp_path / "out") == door.tree(tmp_path / "one")


def test_an_interrupt_ends_all_workers_at_once(source: Path, tmp_path: Path) -> None:
    """And the same command goes on."""
    slow = (
        "import signal, time, mckpt.execute.engine as e; m = e._Run.move\ndef move(*a):"
        " time.sleep(0.2); return m(*a)\ne._Run.move = move"
    )
    # a shell's background job ignores it, and so would its children
    slow += "\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    arguments = ["hf-to-megatron", source, tmp_path / "out", "--workers", "3", "--threads", "1"]
    environ = {k: v for k, v in environment(0, 1, tmp_path).items() if not k.startswith("MCKPT_")}
    for number in (signal.SIGINT, signal.SIGTERM):
        before = len(list((tmp_path / "out").glob(".mckpt-*/done/0*")))
        process = subprocess.Popen(
            patched(slow, arguments),
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
        assert process.returncode == 130, said
        assert "goes on" in said
    left = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "out")], capture_output=True, text=True
    ).stdout
    assert not left, left
    done = subprocess.run(
        [*LAUNCHED, *map(str, arguments)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    door.good("hf-to-megatron", source, tmp_path / "one")
    assert door.tree(tmp_path / "out") == door.tree(tmp_path / "one")
