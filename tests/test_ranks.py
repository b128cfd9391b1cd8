"""Several processes do one run: the output is that of one, whoever dies, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mckpt import errors, ranks
from mckpt.ranks import Gone, Ranks, Session
from tests import door, tiny

LAUNCHED = [sys.executable, "-m", "mckpt"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_random("qwen3-moe", tmp_path_factory.mktemp("source") / "hf")


def environment(rank: int, size: int, tmp_path: Path, run: str = "") -> dict[str, str]:
    """Of one rank; a tiny model has many units there."""
    custom = tmp_path / "sitecustomize.py"
    if not custom.exists():  # a rank that starts must not find it half-written
        custom.write_text("import mckpt.clusters as c\nc.UNIT = 64 << 10\nc.SLAB = 16 << 10\n")
    path = os.pathsep.join([str(tmp_path), str(door.ROOT)])
    return os.environ | {"MCKPT_RANK": str(rank), "MCKPT_NUM_RANKS": str(size), "MCKPT_RUN": run, "PYTHONPATH": path}


def start(arguments: list[Any], rank: int, size: int, tmp_path: Path, run: str = "") -> subprocess.Popen[str]:
    command = [*LAUNCHED, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(rank, size, tmp_path, run), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )


def wait(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [p.communicate(timeout=100) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]


@pytest.mark.parametrize(("form", "run"), [("torch", "a"), ("torch_dist", "")])
def test_the_output_is_that_of_one_process(source: Path, tmp_path: Path, form: str, run: str) -> None:
    """With a name for the run (srun, --workers) and without one (torchrun), where rank 0 is known by its heartbeat."""
    arguments = ["hf-to-megatron", source, "PLACE", "--format", form, "--tp", 2]
    door.good(*arguments[:2], tmp_path / "one", *arguments[3:])
    arguments[2] = tmp_path / "three"
    ended = wait([start(arguments, rank, 3, tmp_path, run) for rank in (2, 1, 0)])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [bool(out) for _, out, _ in ended] == [False, False, True]  # rank 0 does the talking
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")
    again = wait([start([*arguments[:3], "--overwrite", *arguments[3:]], rank, 2, tmp_path, run) for rank in (0, 1)])
    assert [code for code, _, _ in again] == [0, 0], again
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")


def test_workers(source: Path, tmp_path: Path) -> None:
    door.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch", "--tp", 2)
    done = subprocess.run(
        [*LAUNCHED, "hf-to-megatron", source, tmp_path / "three", "--format", "torch", "--tp", "2", "--workers", "3"],
        env=os.environ | {"PYTHONPATH": str(door.ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")
    for back in ("reshard", "megatron-to-hf"):
        done = subprocess.run(
            [*LAUNCHED, back, tmp_path / "three", tmp_path / back, "--workers", "2", "--json"],
            env=os.environ | {"PYTHONPATH": str(door.ROOT)}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["files"]
    assert door.mckpt("diff", source, tmp_path / "megatron-to-hf").code == 0


def test_many_workers_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    """They write into the staging directory until the moment it goes."""
    door.good("hf-to-megatron", source, tmp_path / "one")
    for number in range(4):
        out = tmp_path / str(number)
        command = [*LAUNCHED, "hf-to-megatron", source, out, "--workers", "12"]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(door.ROOT)}, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert door.tree(out) == door.tree(tmp_path / "one")


def patched(patch: str, arguments: list[Any]) -> list[str]:
    """The command of an mckpt in which something was changed first."""
    said = [str(a) for a in arguments]
    return [sys.executable, "-c", f"import sys, mckpt.cli\n{patch}\nsys.argv[1:] = {said}\nmckpt.cli.main()"]


def test_a_dead_rank_is_replaced(source: Path, tmp_path: Path) -> None:
    """Rank 1 of 2 never comes: rank 0 gives it up and does its share."""
    door.good("hf-to-megatron", source, tmp_path / "one")
    command = patched("import mckpt.ranks; mckpt.ranks.DEAD_S = 2.0", ["hf-to-megatron", source, tmp_path / "two"])
    done = subprocess.run(command, env=environment(0, 2, tmp_path, "x"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert door.tree(tmp_path / "two") == door.tree(tmp_path / "one")


def test_a_killed_rank_is_replaced_and_a_restart_goes_on(source: Path, tmp_path: Path) -> None:
    """Rank 1 dies when it has done one unit, with nobody to tell; and then the same with rank 0, after which three go on."""
    door.good("hf-to-megatron", source, tmp_path / "one", "--format", "torch")
    arguments = ["hf-to-megatron", source, tmp_path / "two", "--format", "torch"]
    dies = "import os, mckpt.execute as e; w = e._Journal.write\ndef write(*a): w(*a); os._exit(9)\ne._Journal.write = write"
    killed = subprocess.Popen(patched(dies, arguments), env=environment(1, 2, tmp_path, "x"))
    command = patched("import mckpt.ranks; mckpt.ranks.DEAD_S = 2.0", arguments)
    done = subprocess.run(command, env=environment(0, 2, tmp_path, "x"), capture_output=True, text=True, timeout=60)
    assert (killed.wait(), done.returncode) == (9, 0), done.stderr
    assert door.tree(tmp_path / "two") == door.tree(tmp_path / "one")

    arguments[2] = tmp_path / "three"
    killed = subprocess.Popen(patched(dies, arguments), env=environment(0, 2, tmp_path, "y"))
    assert killed.wait(60) == 9
    assert not (tmp_path / "three" / "release").exists()
    assert list((tmp_path / "three").glob(".mckpt-*/done/0*"))
    ended = wait([start(arguments, rank, 3, tmp_path, "z") for rank in range(3)])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert door.tree(tmp_path / "three") == door.tree(tmp_path / "one")


def test_a_rank_that_fails_ends_all(source: Path, tmp_path: Path) -> None:
    """Both end with the error of the one, and nothing is published."""
    arguments = ["hf-to-megatron", source, tmp_path / "out"]
    first = start(arguments, 0, 2, tmp_path, "y")
    fails = "import mckpt.execute as e, mckpt.errors as x\ndef fails(*a): raise x.StorageError('the disk of rank 1')\ne._Run.move = fails"
    second = subprocess.run(patched(fails, arguments), env=environment(1, 2, tmp_path, "y"), capture_output=True, text=True, timeout=60)
    assert second.returncode == 7
    ((code, _, said),) = wait([first])
    assert code == 7
    assert "rank 1: the disk of rank 1" in said
    assert not (tmp_path / "out" / "release").exists()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks()),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Ranks(3, 8)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Ranks(3, 8, local=4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Ranks()),  # a batch script: not one of the tasks
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, Ranks(1, 4, "7.2.")),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "65", "SLURM_STEP_TASKS_PER_NODE": "4(x16),1"},
            Ranks(1, 65, "..", local=4),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n"}, Ranks(1, 2, "n")),
    ],
)
def test_what_launchers_say(environ: dict[str, str], expected: Ranks) -> None:
    assert Ranks.of_environment(environ) == expected


@pytest.mark.parametrize("environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_what_launchers_must_not_say(environ: dict[str, str]) -> None:
    with pytest.raises(errors.UsageError, match="in the environment"):
        Ranks.of_environment(environ)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert [Ranks(0, 8, local=n).cores for n in (1, 4, 100)] == [64, 16, 1]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))  # bound by the launcher: these are its own
    assert Ranks(0, 8, local=4).cores == 8


@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("size", [1, 3, 8, 512])
def test_shares_are_all(count: int, size: int) -> None:
    shares = [Ranks(0, size).share(count, rank) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_line_of_an_earlier_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "START_S", 0.3)
    Session(tmp_path, Ranks(0, 2, "old")).open()
    for run in ("new", ""):
        with pytest.raises(errors.StorageError, match="rank 0 has not begun"):
            Session(tmp_path, Ranks(1, 2, run)).join(lambda: False)
    Session(tmp_path, Ranks(0, 2, "new")).open()
    Session(tmp_path, Ranks(1, 2, "new")).join(lambda: False)


def test_when_rank_0_is_done_or_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Session(tmp_path, Ranks(rank, 2, "r")) for rank in (0, 1))
    first.open()
    second.join(lambda: False)
    monkeypatch.setattr(ranks, "DEAD_S", 0.2)
    monkeypatch.setattr(ranks, "BEAT_S", 0.05)
    with pytest.raises(errors.StorageError, match="not been heard of"):
        second.listen()
    first.fail(errors.SourceError("a file is short"))
    with pytest.raises(errors.SourceError, match="rank 0: a file is short"):
        second.next_beat = 0
        second.listen()
    shutil.rmtree(tmp_path / "ranks")
    with pytest.raises(Gone):
        second.listen()
