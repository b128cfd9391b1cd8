"""Many checkpoints of one training run: every one is converted once, however often the command is
killed, and none is read before it is complete.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mckpt as api
from tests.helpers.commands import command_line, good, mckpt, refused
from tests.helpers.commands import hf as tiny_hf

TRACKER = "latest_checkpointed_iteration.txt"
NORM = "model.norm.weight"


def save(folder: Path, source: Path, iteration: int, **how: Any) -> None:
    """Saves an iteration of a training run, whose final norm has the iteration as its values."""
    path = source / "model.safetensors"
    arrays = load_file(path)
    arrays[NORM] = np.full_like(arrays[NORM], iteration)
    save_file(arrays, path, {"format": "pt"})
    api.plan(source, folder, target_iteration=iteration, **how).run()


def saved_in(export: Path) -> int:
    """Returns the iteration whose weights an export has."""
    return int(load_file(export / "model.safetensors")[NORM][0])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with hf, and run with the iterations 5, 10, 15 and 20."""
    root = tmp_path_factory.mktemp("training")
    tiny_hf(root / "hf")
    for iteration in (5, 10, 15, 20):
        save(root / "run", root / "hf", iteration)
    return root


@pytest.mark.parametrize(
    ("which", "wanted"),
    [("latest", [20]), ("all", [5, 10, 15, 20]), ("20,5", [5, 20]), ("5:15:5", [5, 10, 15])],
)
def test_the_iterations_that_are_named_are_converted(
    training: Path, tmp_path: Path, which: str, wanted: list[int]
) -> None:
    line = (
        "megatron-to-hf",
        training / "run",
        tmp_path / "out/iter_{iteration:07d}",
        *("--iterations", which),
    )
    said = good(*line)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"iter_{n:07d}" for n in wanted}
    for n in wanted:
        assert saved_in(tmp_path / f"out/iter_{n:07d}") == n
    assert said.out.splitlines()[-1].endswith(f": {len(wanted)} written")
    again = good(*line, "--json").json
    assert [(row["iteration"], row["state"]) for row in again["iterations"]] == [
        (n, "done already") for n in wanted
    ]


def test_a_save_directory_takes_all_iterations(training: Path, tmp_path: Path) -> None:
    good("reshard", training / "run", tmp_path / "out", "--target-tp", 2, "--iterations", "10,20")
    assert (tmp_path / "out" / TRACKER).read_text().strip() == "20"
    for n in (10, 20):
        good("diff", training / f"run/iter_{n:07d}", tmp_path / f"out/iter_{n:07d}")
    portable = good("repair", training / "run", "--iterations", "all", "--json").json
    assert {row["state"] for row in portable["iterations"]} == {"portable already"}


def test_what_training_still_writes_is_left_out(training: Path, tmp_path: Path) -> None:
    shutil.copytree(training / "run", tmp_path / "run")
    (tmp_path / "run" / TRACKER).write_text("15")
    line = ("megatron-to-hf", tmp_path / "run", tmp_path / "out_{iteration}", "--iterations")
    said = good(*line, "all")
    assert f"{TRACKER} does not name 20 yet; left out" in said.err
    assert "15" in said.out and not (tmp_path / "out_20").exists()
    assert good(*line, "latest", "--json").json["iterations"][0]["iteration"] == 15


def test_one_bad_iteration_does_not_stop_the_others(training: Path, tmp_path: Path) -> None:
    shutil.copytree(training / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/iter_0000020")
    (tmp_path / "run/iter_0000010/.metadata").write_bytes(b"\x80")
    said = mckpt(
        *("megatron-to-hf", tmp_path / "run", tmp_path / "out_{iteration}"),
        *("--iterations", "all", "--json"),
    )
    rows = said.json["iterations"]
    assert [(row["iteration"], row["state"]) for row in rows] == [
        (5, "written"),
        (10, "failed"),
        (15, "written"),
    ]
    assert said.code == said.json["exit_code"] == rows[1]["exit_code"] > 0
    assert ".metadata" in rows[1]["error"] or "mckpt.json" in rows[1]["error"]


def test_old_output_is_removed_and_nothing_else(training: Path, tmp_path: Path) -> None:
    line = ("megatron-to-hf", training / "run", tmp_path / "out/{iteration}", "--iterations")
    good(*line, "5,10")
    (tmp_path / "out/10/notes.txt").write_text("mine")
    (tmp_path / "out/3").mkdir()
    (tmp_path / "out/3/config.json").write_text("{}")
    said = good(*line, "all", "--keep", 2)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["10", "15", "20", "3"]
    assert "notes.txt, which mckpt did not write" in said.err and "has no mckpt.json" in said.err
    (tmp_path / "out/10/notes.txt").unlink()
    # what a run left that was killed while it removed a directory
    (tmp_path / "out/.mckpt-removed-5.over").mkdir()
    assert "interrupted" not in good("inspect", tmp_path / "out/20").out
    good(*line, "20", "--keep", 3)
    assert not list((tmp_path / "out").glob(".mckpt-*"))
    # save directories of their own, with files of the user in the shared hf
    line = ("reshard", training / "run", tmp_path / "each/{iteration}", "--iterations")
    good(*line, "5,10,15")
    (tmp_path / "each/5/hf/modeling_mine.py").write_text("mine")
    (tmp_path / "each/10/linked").symlink_to(tmp_path / "out")
    said = good(*line, "all", "--keep", 1)
    assert sorted(p.name for p in (tmp_path / "each").iterdir()) == ["10", "20", "5"]
    assert "hf/modeling_mine.py, which mckpt did not write" in said.err
    assert "10/linked, which mckpt did not write" in said.err
    (tmp_path / "save").mkdir()
    line = ("reshard", training / "run", tmp_path / "save", "--target-tp", 2, "--iterations")
    good(*line, "all")
    good(*line, "all", "--keep", 1)
    assert sorted(p.name for p in (tmp_path / "save").iterdir()) == [
        "hf",
        "iter_0000020",
        TRACKER,
    ]


def test_a_finished_checkpoint_still_moves_the_tracker(training: Path, tmp_path: Path) -> None:
    line = ("reshard", training / "run", tmp_path / "out", "--target-tp", 2, "--iteration")
    good(*line, 20)
    good(*line, 10)
    assert (tmp_path / "out" / TRACKER).read_text().strip() == "20"
    assert "is done already" in good(*line, 10, "--update-tracker").out
    assert (tmp_path / "out" / TRACKER).read_text().strip() == "10"
    shutil.rmtree(tmp_path / "out/hf")
    refused(6, "already contains", args=(*line, 10))
    good(*line, 10, "--overwrite")
    assert (tmp_path / "out/hf/config.json").exists()


def test_twenty_iterations_survive_three_kills(tmp_path: Path) -> None:
    """Every iteration is right in the end, and none is written twice."""
    tiny_hf(tmp_path / "hf")
    for iteration in range(1, 21):
        save(tmp_path / "run", tmp_path / "hf", iteration)
    line = command_line(
        *("megatron-to-hf", tmp_path / "run", tmp_path / "out/{iteration}"),
        *("--iterations", "all", "--json"),
    )
    chance, identities = random.Random(0), {}
    for _ in range(3):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr
        stop_after, seen = chance.randint(1, 5), 0
        for text in process.stderr:  # kills it in the middle of one of the next iterations
            seen += json.loads(text)["event"] == "iteration"
            if seen >= stop_after + len(identities):
                break
        time.sleep(chance.random() / 20)
        process.kill()
        process.communicate()
        for path in (tmp_path / "out").glob("*/model.safetensors"):
            identities.setdefault(path, os.stat(path).st_ino)
            assert identities[path] == os.stat(path).st_ino
    assert 3 <= len(identities) < 20
    done = subprocess.run(line, stdout=subprocess.PIPE, check=True)
    rows = json.loads(done.stdout)["iterations"]
    assert len(rows) == 20
    assert sum(row["state"] == "done already" for row in rows) == len(identities)
    assert all(os.stat(path).st_ino == inode for path, inode in identities.items())
    assert [saved_in(tmp_path / f"out/{n}") for n in range(1, 21)] == list(range(1, 21))


class Watcher:
    """`mckpt megatron-to-hf --watch` in a process of its own."""

    def __init__(self, folder: Path, out: Path, *options: Any) -> None:
        line = command_line(
            *("megatron-to-hf", folder, out, "--watch", "--interval", "0.2s", "--json", *options)
        )
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self) -> dict[str, Any]:
        """Waits for the end; returns what the command prints."""
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert out, err
        return dict(json.loads(out))


def test_each_new_iteration_is_converted_when_it_appears(tmp_path: Path) -> None:
    """The watcher begins before the run has a directory, is killed and started again."""
    tiny_hf(tmp_path / "hf")
    saves, out = tmp_path / "run", tmp_path / "out/{iteration}"
    first = Watcher(saves, out)

    def train() -> None:
        for iteration in (5, 10, 15):
            save(saves, tmp_path / "hf", iteration)

    training = threading.Thread(target=train)
    training.start()
    end = time.monotonic() + 60
    while not (tmp_path / "out/5/model.safetensors").exists() and time.monotonic() < end:
        time.sleep(0.05)
    first.process.kill()
    first.process.communicate()
    training.join()
    inode = os.stat(tmp_path / "out/5/model.safetensors").st_ino
    second = Watcher(saves, out, "--until", 20, "--keep", 3)
    save(saves, tmp_path / "hf", 20)
    found = second.end()
    rows = {row["iteration"]: row["state"] for row in found["iterations"]}
    assert found["exit_code"] == 0 and rows.keys() >= {10, 15, 20}
    assert [saved_in(tmp_path / f"out/{n}") for n in (10, 15, 20)] == [10, 15, 20]
    five = tmp_path / "out/5/model.safetensors"
    assert not five.exists() or os.stat(five).st_ino == inode


def test_an_iteration_that_is_written_again_is_not_read(training: Path, tmp_path: Path) -> None:
    """A restarted run writes an older iteration again while the tracker names a later one."""
    shutil.copytree(training / "run", tmp_path / "run")
    written = next((tmp_path / "run/iter_0000010").glob("*.distcp"))
    watcher = Watcher(
        tmp_path / "run", tmp_path / "{iteration}", "--iterations", "10,20", "--until", 20
    )
    end = time.monotonic() + 60
    while not (tmp_path / "20/config.json").exists() and time.monotonic() < end:
        os.utime(written)
        time.sleep(0.02)
    for _ in range(30):
        os.utime(written)
        time.sleep(0.02)
    assert not (tmp_path / "10").exists()
    assert [row["state"] for row in watcher.end()["iterations"]] == ["written", "written"]


def test_a_signal_ends_a_watcher_that_waits(training: Path, tmp_path: Path) -> None:
    watcher = Watcher(training / "run", tmp_path / "{iteration}", "--iterations", "20")
    assert watcher.process.stderr
    while json.loads(watcher.process.stderr.readline())["event"] != "iteration":
        pass
    time.sleep(0.3)
    watcher.process.send_signal(signal.SIGTERM)
    assert watcher.end()["iterations"][0]["state"] == "written"
    assert watcher.process.returncode == 0


def test_a_conversion_waits_for_what_it_needs(training: Path, tmp_path: Path) -> None:
    options = ("--wait-for", "20s", "--interval", "0.1s")
    late = tmp_path / "late"
    process = subprocess.Popen(
        command_line("megatron-to-hf", late, tmp_path / "out", *options), stdout=subprocess.DEVNULL
    )
    shutil.copytree(training / "run/iter_0000020", late / "iter_0000020")
    time.sleep(2)
    assert process.poll() is None  # the tracker comes last
    (late / TRACKER).write_text("20")
    shutil.copytree(training / "run/hf", late / "hf")
    assert process.wait(60) == 0 and saved_in(tmp_path / "out") == 20
    shutil.copytree(late / "iter_0000020", late / "iter_0000030")
    line = ("megatron-to-hf", late, tmp_path / "no", "--wait-for", "1s", "--interval", "0.1s")
    refused(
        3,
        f"{TRACKER} names 20 and not yet 30, after 1 s (--wait-for)",
        args=(*line, "--iteration", 30),
    )
