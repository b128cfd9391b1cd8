"""A run that fails or is killed midway leaves no checkpoint, and the same command completes it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mckpt.conversion import run as run_module
from mckpt.editing import pieces
from mckpt.storage.staging import unfinished
from tests.helpers.commands import TRACKER, command_line, good, mckpt, refused, tree


def loadable(dst: Path) -> bool:
    """Returns whether transformers, Megatron's loaders or mckpt would accept anything there as a
    complete checkpoint.
    """
    units = [dst, *(p for p in dst.glob("*") if not p.name.startswith("."))] if dst.exists() else []
    if any(
        (p / n).exists()
        for p in units
        for n in ("config.json", "metadata.json", ".metadata", TRACKER)
    ):
        return True
    if any(
        p.name.startswith("mp_rank")
        for p in dst.rglob("*")
        if not p.relative_to(dst).parts[0].startswith(".mckpt-")
    ):
        return True
    return mckpt("inspect", dst).code == 0


def test_a_full_disk_leaves_no_checkpoint(tmp_path, src, monkeypatch):
    real, wrote = os.pwrite, []

    def full(fd: int, data: Any, at: int) -> int:
        wrote.append(len(data))
        if len(wrote) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "copy_file_range", lambda *a: 0)
    monkeypatch.setattr(os, "pwrite", full)
    said = mckpt("hf-to-megatron", src, tmp_path / "dst", "--threads", 1)
    assert (
        said.code == 7
        and "No space left" in said.err
        and "run the same command again" in said.err
        and "Traceback" not in said.err
    )
    assert not loadable(tmp_path / "dst")
    monkeypatch.undo()
    good("hf-to-megatron", src, tmp_path / "dst")
    good("hf-to-megatron", src, tmp_path / "whole")
    assert tree(tmp_path / "dst") == tree(tmp_path / "whole")


def run(*args: Any, before: str = "") -> subprocess.Popen[bytes]:
    """Starts mckpt in a process of its own. `before` is Python that runs first. SIGINT is restored,
    because a shell makes its background jobs ignore it.
    """
    start = "import os, signal\nfrom mckpt.conversion import run\n"
    start += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    line = command_line(*args, before=start + before)
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_limit_of_the_file_size_leaves_no_checkpoint(tmp_path, src):
    dst = tmp_path / "dst"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    assert resource.RLIMIT_FSIZE is not None
    process = run("hf-to-megatron", src, dst, before=limit)
    _, err = process.communicate()
    assert process.returncode == 7 and b"Traceback" not in err and b"File too large" in err, err
    assert not loadable(dst)


# where to die: at so many calls of this function. The commit of an hf directory has a rename for
# each name, of a unit three; then its staging directory is renamed, and goes
CALLS = {
    "fsync": (1, 9),
    "rename": (1, 2, 3, 4, 6),
    "replace": (1, 2),
    "rmtree": (1, 2),
}
DEATHS = [(name, count) for name, counts in CALLS.items() for count in counts]


# other code calls these functions too, for other names
ENDS = {"rmtree": ".mckpt-"}


class Killed(BaseException):
    """Stands for the end of the process, so no code may catch it."""


def dying(name: str, count: int, *args: Any) -> bool:
    """Runs mckpt and kills it at call number `count` of a function of os or shutil. Returns False
    if there are fewer such calls.
    """
    calls: list[int] = []
    module = shutil if name == "rmtree" else os
    real = getattr(module, name)

    def one(*a: Any, **k: Any) -> Any:
        counts = name not in ENDS or Path(a[0]).name.startswith(ENDS[name])
        counts = counts and not str(a[0]).endswith(".tmp")  # the journal calls it
        calls.extend([1] * counts)
        if counts and len(calls) == count:
            raise Killed
        return real(*a, **k)

    with mock.patch.object(module, name, one):
        try:
            good(*args)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("kind", ["unit", "hf", "hf over another"])
def test_a_run_killed_at_any_point_is_completed(tmp_path, src, trained, kind, monkeypatch):
    """The unfinished output is not a checkpoint, and the same command completes it."""
    args = ("hf-to-megatron", src) if kind == "unit" else ("megatron-to-hf", trained)
    more = ("--overwrite",) if "over" in kind else ()
    good(*args, tmp_path / "whole")
    died = 0
    for name, count in DEATHS:
        dst = tmp_path / f"{name}{count}"
        if more:
            good(*args, dst, "--max-shard-size", "100KB")
        if not dying(name, count, *args, dst, *more):
            continue
        died += 1
        published = name == "rmtree" or (name, count) == ("replace", 2)
        if published:
            assert unfinished(dst) is None, (name, count)
            monkeypatch.setattr(run_module, "execute", None)  # nothing is copied again
        if not more and not published:
            assert not (dst / "config.json").exists() and not (dst / TRACKER).exists(), (
                name,
                count,
            )
        if more and (dst / "config.json").exists():
            # the old checkpoint or the new one, and no mixture
            assert mckpt("diff", dst, src).code == 0, (name, count)
        good(*args, dst, *([] if published else more))  # the new checkpoint is complete
        monkeypatch.undo()
        assert tree(dst) == tree(tmp_path / "whole"), (name, count)
    assert died >= 5


@pytest.fixture(scope="module")
def another(tmp_path_factory, tiny_model):
    """A save directory of another model."""
    root = tmp_path_factory.mktemp("another") / "ckpt"
    good(
        "hf-to-megatron",
        tiny_model("qwen3-moe"),
        root,
        "--iteration",
        7,
    )
    return root


@pytest.mark.parametrize(
    "name, count",
    [("rename", 1), ("rename", 2), ("rename", 5), ("replace", 2), ("rmtree", 2)],
)
@pytest.mark.parametrize("over", [False, True])
def test_only_the_same_command_replaces_the_files_of_a_killed_run(
    tmp_path, trained, another, name, count, over
):
    """The same command may replace its own unfinished files without --overwrite, but not another
    checkpoint.
    """
    dst = tmp_path / "dst"
    if over:
        good("megatron-to-hf", another, dst)
    assert dying(name, count, "megatron-to-hf", trained, dst, *["--overwrite"] * over)
    standing = [p for p in dst.iterdir() if not p.name.startswith(".mckpt-")]
    if standing:
        refused(
            6,
            "--overwrite",
            args=("megatron-to-hf", another, dst, "--max-shard-size", "100KB"),
            untouched=dst,
        )
    good("megatron-to-hf", another, dst, "--overwrite")
    # although its mark may still exist
    refused(6, "--overwrite", args=("megatron-to-hf", trained, dst), untouched=dst)


def test_a_run_killed_several_times_is_completed(tmp_path, trained):
    good("megatron-to-hf", trained, tmp_path / "whole")
    args = ("megatron-to-hf", trained, tmp_path / "dst")
    for name, count in (
        ("rename", 3),
        ("rename", 1),
        ("rename", 2),
        ("replace", 1),
        ("rename", 2),
        ("replace", 2),
    ):
        assert dying(name, count, *args)
    good(*args)
    assert tree(tmp_path / "dst") == tree(tmp_path / "whole")


def test_files_that_replaced_those_of_a_killed_run_need_overwrite(tmp_path, trained, another):
    dst = tmp_path / "dst"
    assert dying("replace", 2, "megatron-to-hf", trained, dst)
    for path in [p for p in dst.iterdir() if p.is_file()]:
        path.unlink()
    good("megatron-to-hf", another, tmp_path / "fresh")
    shutil.copytree(tmp_path / "fresh", dst, dirs_exist_ok=True)
    refused(6, "--overwrite", args=("megatron-to-hf", trained, dst), untouched=dst)


def test_no_resume_keeps_the_replaced_output_until_the_end(tmp_path, trained, another):
    dst = tmp_path / "dst"
    good("megatron-to-hf", another, dst)
    assert dying("rename", 4, "megatron-to-hf", trained, dst, "--overwrite")
    assert any(p.name == "replaced" for p in dst.glob(".mckpt-*/*"))
    assert dying("fsync", 1, "megatron-to-hf", trained, dst, "--overwrite", "--no-resume")
    assert any(p.name == "replaced" for p in dst.glob(".mckpt-*/*"))


def test_config_json_is_renamed_after_all_other_files_are_on_disk(tmp_path, trained, monkeypatch):
    done: list[str] = []
    rename, sync = os.rename, run_module.sync
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(Path(b).name), rename(a, b)))
    monkeypatch.setattr(
        run_module, "sync", lambda path: (done.append(f"sync {Path(path).name}"), sync(path))
    )
    good("megatron-to-hf", trained, tmp_path / "dst", "--max-shard-size", "100KB")
    at = done.index("config.json")
    assert done[at - 1] == done[at + 1] == "sync dst" and any(
        n.endswith(".safetensors") for n in done[:at]
    )
    assert not any(n.endswith(".safetensors") for n in done[at:])


def test_a_run_killed_at_its_end_is_done_although_its_source_was_touched(tmp_path, src):
    source, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(src, source)
    assert dying("replace", 2, "hf-to-megatron", source, dst)
    os.utime(source / "model.safetensors", ns=(0, 0))
    assert "is done already" in good("hf-to-megatron", source, dst).out
    assert not list(dst.glob(".mckpt-*"))


def test_a_staging_directory_that_cannot_be_removed_is_harmless(tmp_path, src, monkeypatch):
    """NFS keeps the open lock file under another name, so its directory cannot be removed."""
    real = os.rmdir

    def stuck(path: Any, *a: Any, **k: Any) -> None:
        if ".mckpt-" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        real(path, *a, **k)

    monkeypatch.setattr(os, "rmdir", stuck)
    good("hf-to-megatron", src, tmp_path / "dst")
    monkeypatch.undo()
    assert not list(tmp_path.glob("dst/.mckpt-*/publishing"))
    assert "is done already" in good("hf-to-megatron", src, tmp_path / "dst").out
    assert mckpt("diff", src, tmp_path / "dst").code == 0


@pytest.mark.parametrize("kind", ["unit", "hf", "hf over another"])
def test_a_staging_directory_that_cannot_be_renamed_is_removed_by_the_same_command(
    tmp_path, src, trained, monkeypatch, kind
):
    """The output is in place, so the run ends well."""
    dst, more = tmp_path / "dst", ["--overwrite"] * ("over" in kind)
    args = ("hf-to-megatron", src, dst) if kind == "unit" else ("megatron-to-hf", trained, dst)
    if more:
        good(*args, "--max-shard-size", "100KB")
    real = os.replace

    def broken(a: Any, b: Any, **k: Any) -> None:
        if Path(a).name.startswith(".mckpt-"):
            raise OSError(errno.EIO, "Input/output error", str(a))
        real(a, b, **k)

    monkeypatch.setattr(os, "replace", broken)
    said = good(*args, *more)
    (left,) = dst.glob(".mckpt-*")
    assert f"{left}: cannot be removed" in said.err
    assert "interrupted" not in good("inspect", dst).out and unfinished(dst) is None
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "execute", None)
        good(*args, *more)
    assert not list(dst.glob(".mckpt-*"))
    assert "is done already" in good(*args).out


def test_a_tracker_that_cannot_be_written_is_written_by_the_same_command(
    tmp_path, src, monkeypatch
):
    real, dst = os.rename, tmp_path / "dst"

    def broken(a: Any, b: Any) -> None:
        if Path(b).name == TRACKER:
            raise OSError(errno.EIO, "Input/output error", str(a))
        real(a, b)

    monkeypatch.setattr(os, "rename", broken)
    refused(7, "release: is in place, but", "same command", args=("hf-to-megatron", src, dst))
    monkeypatch.undo()
    good("hf-to-megatron", src, dst)
    good("hf-to-megatron", src, tmp_path / "whole")
    assert tree(dst) == tree(tmp_path / "whole")


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_goes_on_only_with_the_bytes_of_the_same_source(tmp_path, src, changed):
    """Size and mtime of the source stay."""
    source, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(src, source)
    assert dying("fsync", 4, "hf-to-megatron", source, dst)
    assert list(dst.glob(".mckpt-*/done/*[0-9]"))
    path = source / "model.safetensors"
    if changed:
        before, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(0, before))
    said = good("hf-to-megatron", source, dst)
    assert ("continues an interrupted run" in said.err) is not changed
    if not changed:
        assert re.search(
            r"^continues an .* has written (\S+) of \1 [MkG]B$", said.err, re.MULTILINE
        )
    assert mckpt("diff", source, dst).code == 0


def test_staging_directories_of_other_plans_are_reported(tmp_path, src):
    dst = tmp_path / "dst"
    assert dying("rename", 1, "hf-to-megatron", src, dst, "--tp", 2)
    (left,) = dst.glob(".mckpt-*")
    (left / "data" / "more").write_bytes(bytes(100_000))
    said = good("hf-to-megatron", src, dst, "--iteration", 3)
    (line,) = [line for line in said.err.splitlines() if str(left) in line]
    assert (
        "another plan" in line
        and int(line.split(" bytes")[0].split()[-1].replace(",", "")) >= 100_000
    )
    assert (left / "data" / "more").exists()
    lock = os.open(left / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a run that is still alive
        assert str(left) not in good("hf-to-megatron", src, dst, "--iteration", 4).err
    finally:
        os.close(lock)
    assert "another plan" not in good("hf-to-megatron", src, dst, "--tp", 2).err


def test_sigkill_leaves_nothing_and_the_same_command_goes_on(tmp_path, src):
    dst = tmp_path / "dst"
    stop = "run.publish = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    process = run("hf-to-megatron", src, dst, before=stop)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert any(dst.iterdir()) and not loadable(dst)
    good("hf-to-megatron", src, dst)
    good("hf-to-megatron", src, tmp_path / "whole")
    assert tree(dst) == tree(tmp_path / "whole")


def test_an_interrupted_run_is_reported_and_is_not_a_checkpoint(tmp_path, src, trained):
    for number, args in enumerate((("hf-to-megatron", src), ("megatron-to-hf", trained))):
        dst = tmp_path / str(number)
        for name, count, share in (
            ("fsync", 1, "nothing is written yet"),
            ("fsync", 3, " bytes are written. "),
            ("rename", 1, "not yet in place"),
        ):
            assert dying(name, count, *args, dst)
            (left,) = dst.glob(".mckpt-*")
            words = (
                "no checkpoint is here yet",
                left.name,
                "interrupted",
                share,
                "The same command continues",
            )
            for command in (("inspect", dst), ("megatron-to-hf", dst, tmp_path / "d")):
                refused(3, *words, args=command, untouched=tmp_path)
        with open(left / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(3, "A run of mckpt is writing here", args=("inspect", dst))
        good(*args, dst)
        assert "mckpt was interrupted" not in good("inspect", dst).out
    assert dying("rename", 1, "hf-to-megatron", src, tmp_path / "0", "--iteration", 4)
    assert "unfinished: A run of mckpt was interrupted here" in good("inspect", tmp_path / "0").out


def test_ctrl_c_leaves_no_checkpoint(tmp_path, src):
    dst = tmp_path / "dst"
    wait = "import time; run.publish = lambda *a, **k: (print('here', flush=True), time.sleep(60))"
    process = run("hf-to-megatron", src, dst, before=wait)
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"interrupted" in err and b"Traceback" not in err, err
    assert not loadable(dst)
    good("hf-to-megatron", src, dst)


def test_no_resume_starts_afresh(tmp_path, src, monkeypatch):
    dst = tmp_path / "dst"
    with monkeypatch.context() as patch:
        patch.setattr(
            run_module,
            "publish",
            lambda *a, **k: (_ for _ in ()).throw(OSError(5, "broken", "x")),
        )
        assert mckpt("hf-to-megatron", src, dst).code == 7
    for path in dst.rglob("__0_0.distcp"):
        path.write_bytes(bytes(path.stat().st_size))  # a bad disk may have damaged it
    good("hf-to-megatron", src, dst, "--no-resume")
    assert mckpt("diff", src, dst).code == 0


EDITS = ("--edit", "layers: {silent_after: 1}", "--edit", "vocab: {size: 300, init: normal}")
CHANGES = {
    "edit to a unit": ("edit", "SRC", "DST", *EDITS, "--tp", 2),
    "edit to hf": ("edit", "SRC", "DST", *EDITS, "--max-shard-size", "100KB"),
    "merge to a unit": ("merge", "SRC", "SRC", "DST", "--weights", "0.25,0.5", "--tp", 2),
    "merge to hf": ("merge", "SRC", "SRC", "DST", "--weights", "0.25,0.5"),
    "method to hf": (
        *("merge", "SRC", "SRC", "SRC", "DST", "--method", "ties"),
        *("--parameters", "density=0.5"),
    ),
}


def change(kind: str, src: Path, dst: Path) -> list[Any]:
    """Returns the arguments of a command that changes a model."""
    return [{"SRC": src, "DST": dst}.get(str(one), one) for one in CHANGES[kind]]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_a_model_that_was_killed_is_completed(tmp_path, src, kind):
    """At any point: nothing half-written is a checkpoint, and the same command completes it."""
    good(*change(kind, src, tmp_path / "whole"))
    whole, died = tree(tmp_path / "whole"), 0
    for name, count in DEATHS:
        dst = tmp_path / f"{name}{count}"
        if not dying(name, count, *change(kind, src, dst)):
            continue
        died += 1
        if (dst / "config.json").exists() or (dst / TRACKER).exists():  # complete, or nothing
            assert mckpt("diff", dst, tmp_path / "whole").code == 0, (name, count)
            assert name in ("rename", "replace", "rmtree"), (name, count)
        good(*change(kind, src, dst))
        assert tree(dst) == whole, (name, count)
    assert died >= 5


@pytest.mark.parametrize("kind", ["edit to a unit", "merge to hf"])
def test_a_process_that_changes_a_model_and_is_killed_leaves_nothing(tmp_path, src, kind):
    dst = tmp_path / "dst"
    stop = "run.publish = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    process = run(*change(kind, src, dst), before=stop)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert any(dst.iterdir()) and not loadable(dst)
    good(*change(kind, src, dst))
    good(*change(kind, src, tmp_path / "whole"))
    assert tree(dst) == tree(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["edit to a unit", "merge to a unit"])
def test_a_change_goes_on_with_what_was_written(tmp_path, src, kind, monkeypatch):
    """New values are in a temporary file, which another process has under another name."""
    dst = tmp_path / "dst"
    assert dying("fsync", 4, *change(kind, src, dst))
    assert list(dst.glob(".mckpt-*/done/*[0-9]"))
    monkeypatch.setattr(pieces, "_folders", [])
    assert "continues an interrupted run" in good(*change(kind, src, dst)).err
    good(*change(kind, src, tmp_path / "whole"))
    assert tree(dst) == tree(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["edit to hf", "merge to a unit"])
def test_a_damaged_source_of_a_change_is_refused(tmp_path, src, kind):
    cut, renamed = tmp_path / "cut", tmp_path / "renamed"
    for path in (cut, renamed):
        shutil.copytree(src, path)
    file = cut / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    file = renamed / "model.safetensors"
    data = file.read_bytes()
    assert data.count(b"model.norm.weight") == 1
    file.write_bytes(data.replace(b"model.norm.weight", b"model.morn.weight"))
    for source, word in ((cut, "model.safetensors"), (renamed, "model.morn.weight")):
        refused(3, word, args=tuple(change(kind, source, tmp_path / "dst")))
        assert not loadable(tmp_path / "dst")
