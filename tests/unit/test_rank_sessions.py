"""Which rank a process is, which units it copies, and how it notices that another rank has ended.

These tests run in one process; test_ranks.py has those that start several.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mckpt import errors
from mckpt.execute import ranks
from mckpt.execute.ranks import Gone, RankLines, Ranks, Session
from tests.helpers.commands import good, mckpt, refused

LAUNCHERS = [
    ("", Ranks()),
    ("RANK=3 WORLD_SIZE=8", Ranks(3, 8)),
    ("RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", Ranks(3, 8, local=4)),
    # a batch script is not one of the tasks
    ("SLURM_PROCID=0 SLURM_NTASKS=4", Ranks()),
    (
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_JOB_ID=7 SLURM_STEP_ID=2",
        Ranks(1, 4, "7.2."),
    ),
    (
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=65 SLURM_STEP_TASKS_PER_NODE=4(x16),1",
        Ranks(1, 65, "..", local=4),
    ),
    (
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=n",
        Ranks(1, 2, "n"),
    ),
]


@pytest.mark.parametrize(("environ", "expected"), LAUNCHERS)
def test_the_environment_of_each_launcher_gives_the_ranks(environ: str, expected: Ranks) -> None:
    assert Ranks.of_environment(dict(word.split("=") for word in environ.split())) == expected


@pytest.mark.parametrize(
    "environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_an_environment_without_a_valid_rank_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(errors.UsageError, match="in the environment"):
        Ranks.of_environment(environ)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert [Ranks(0, 8, local=n).cores for n in (1, 4, 100)] == [64, 16, 1]
    # the launcher bound the process to these cores, so it shares them with no rank
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert Ranks(0, 8, local=4).cores == 8


@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("size", [1, 3, 8, 512])
def test_the_shares_of_all_ranks_are_the_whole(count: int, size: int) -> None:
    shares = [Ranks(0, size).share(count, rank) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_line_of_an_earlier_run_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of an earlier run without a name is recognised because it does not change."""
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
        Session(tmp_path, Ranks(1, 2)).join(
            lambda late: False
        )  # for another number of ranks its share would differ
    for run in ("new", ""):
        with (
            Session(tmp_path, Ranks(0, 2, run)) as first,
            Session(tmp_path, Ranks(1, 2, run)) as second,
        ):
            first.open()
            second.join(lambda late: False)


def test_a_rank_notices_that_rank_0_failed_died_or_began_anew(
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
    (tmp_path / "ranks").rename(tmp_path / "gone")  # at once: rank 0 goes on to write into it
    with pytest.raises(Gone):
        second.listen()


def test_an_error_is_not_replaced_by_a_line_that_was_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store the thread that reports reads the line of rank 0 before it writes."""
    monkeypatch.setattr(ranks, "BEAT_S", 0.01)
    reads, read = threading.Event(), threading.Event()

    class Slow(RankLines):
        def belong_to(self, run: str) -> bool:
            if threading.current_thread().name == "ranks":
                reads.set()
                read.wait(10)
            return super().belong_to(run)

    place = Slow(tmp_path / "ranks")
    session = Session(tmp_path, Ranks(0, 2, "r"), lines=place)
    with pytest.raises(errors.SourceError), session:
        session.open()
        reads.wait(10)
        threading.Timer(0.2, read.set).start()
        raise errors.SourceError("a file is short")
    session.end()
    assert "a file is short" in place.read(0)


def test_a_process_that_was_stopped_does_not_treat_others_as_dead(
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


def test_a_late_line_of_a_finished_run_is_ignored(tmp_path: Path) -> None:
    """A process of a finished run reports its share as done. Only its line shows that it belongs to
    that run.
    """
    with Session(tmp_path, Ranks(0, 2)) as old, Session(tmp_path, Ranks(1, 2)) as straggler:
        old.open()
        straggler.line |= {"id": old.line["id"], "steps": 2}
        with Session(tmp_path, Ranks(0, 2)) as first:
            first.open()
            straggler._write(straggler.line)
            first._look(1)
            assert not first.lines


def test_a_shell_with_a_launchers_variables_is_told_how_to_run_alone(
    tmp_path: Path, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of a PyTorchJob has RANK and WORLD_SIZE, also in a shell that someone opens there."""
    assert ranks.NOTE_S <= 1  # said within 2 s of the start
    for name, seconds in (("NOTE_S", 0.1), ("START_S", 0.5), ("DEAD_S", 0.5), ("BEAT_S", 0.05)):
        monkeypatch.setattr(ranks, name, seconds)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    line = ("hf-to-megatron", src, tmp_path / "out")
    said = "rank 3 of 8 (RANK and WORLD_SIZE) waits for rank 0; if no launcher starts them,"
    error = mckpt(*line)
    assert error.code == 7 and error.err.count(said) == 1 and "--workers 1" in error.err
    good(*line, "--workers", 1)
    assert (tmp_path / "out/release").exists()
    refused(2, "--workers N (1 for", args=("reshard", tmp_path / "out", tmp_path / "x", "--watch"))
    # the pod of rank 0
    monkeypatch.setenv("RANK", "0")
    alone = good("hf-to-megatron", src, tmp_path / "other").err
    assert alone.count("rank 0 of 8 (RANK and WORLD_SIZE) waits for rank 1 and 6 more; if no") == 1
