"""A destination is valid only when it is complete.

Files that mckpt did not write stay, and the same command gives the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mckpt as package
from mckpt import errors
from mckpt.conversion import publishing
from mckpt.conversion import run as run_module
from tests.door import TRACKER, command_line, edit_json, good, hf, mckpt, refused, tree


@pytest.fixture(scope="module")
def trained(tmp_path_factory, src):
    """A save directory whose checkpoint is an iteration."""
    root = tmp_path_factory.mktemp("trained") / "ckpt"
    good("hf-to-megatron", src, root, "--iteration", 7, "--format", "torch")
    return root


def loadable(dst: Path) -> bool:
    """Whether transformers, Megatron's loaders or mckpt would take anything there for whole."""
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


# ---- refusals


def test_near_the_source(tmp_path):
    src = hf(tmp_path / "deep" / "src")
    (tmp_path / "link").symlink_to(src)
    (tmp_path / "above").symlink_to(tmp_path / "deep")
    for dst, word in (
        (src, "is the source itself"),
        (src / "x", "inside the source"),
        (tmp_path / "deep", "above the source"),
        (tmp_path / "link", "is the source itself"),
        (tmp_path / "link" / "x", "inside the source"),
        (tmp_path / "above", "above the source"),
        (src / ".." / "src", "is the source itself"),
    ):
        refused(6, word, args=("hf-to-megatron", src, dst), untouched=tmp_path)
    refused(
        6,
        "is the source itself",
        args=("hf-to-megatron", tmp_path / "link", src),
        untouched=tmp_path,
    )


def test_a_save_directory_is_a_source_as_a_whole(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "ckpt")
    refused(
        6,
        "source",
        args=("reshard", tmp_path / "ckpt" / "iter_0000007", tmp_path / "ckpt", "--overwrite"),
        untouched=tmp_path,
    )


def test_destination_that_cannot_be(tmp_path, src):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    refused(6, "is a file", args=("hf-to-megatron", src, tmp_path / "file"), untouched=tmp_path)
    said = mckpt("hf-to-megatron", src, tmp_path / "file" / "below")
    assert said.code == 7 and "cannot be made" in said.err and "Traceback" not in said.err
    said = mckpt("hf-to-megatron", src, tmp_path / "dangling")
    assert said.code == 7 and "Traceback" not in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_destination(tmp_path, src):
    (tmp_path / "dst").mkdir(mode=0o555)
    said = mckpt("hf-to-megatron", src, tmp_path / "dst")
    assert said.code == 7 and "Permission denied" in said.err


def test_dry_run_writes_nothing(tmp_path, src):
    good("hf-to-megatron", src, tmp_path / "dst", "--dry-run")
    good("plan", src, tmp_path / "dst")
    assert tree(tmp_path) == {}


# ---- what is there already


def test_existing_output_needs_overwrite(tmp_path, src, trained):
    for args, there in (
        (("hf-to-megatron", src, tmp_path / "m"), "release"),
        (("megatron-to-hf", trained, tmp_path / "h"), "config.json"),
    ):
        good(*args)
        before = tree(tmp_path)
        refused(6, there, "--overwrite", args=args, untouched=tmp_path)
        good(*args, "--overwrite")
        assert tree(tmp_path) == before


def test_overwrite_replaces_one_unit_and_nothing_else(tmp_path, src):
    dst = tmp_path / "dst"
    good("hf-to-megatron", src, dst, "--iteration", 5)
    good("hf-to-megatron", src, dst, "--iteration", 6)
    (dst / "notes.txt").write_text("mine")
    (dst / "tensorboard").mkdir()
    (dst / "tensorboard" / "events").write_text("mine")
    before = tree(dst)
    good("hf-to-megatron", src, dst, "--iteration", 5, "--tp", 2, "--overwrite")
    after = tree(dst)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert changed and all(k.startswith("iter_0000005/") for k in changed), changed
    good("hf-to-megatron", src, dst, "--iteration", 5, "--overwrite")
    assert tree(dst) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "checkpoint-100/optimizer.pt", ".git/HEAD", "sub/config.json"]
)
def test_overwrite_never_takes_foreign_files(tmp_path, trained, name):
    dst = tmp_path / "dst"
    good("megatron-to-hf", trained, dst)
    (dst / name).parent.mkdir(exist_ok=True)
    (dst / name).write_text("mine")
    refused(
        6,
        name,
        "no part of a checkpoint",
        args=("megatron-to-hf", trained, dst, "--overwrite"),
        untouched=tmp_path,
    )


def test_overwrite_never_takes_foreign_files_of_a_unit(tmp_path, src):
    dst = tmp_path / "dst"
    good("hf-to-megatron", src, dst)
    (dst / "release" / "wandb").mkdir()
    (dst / "release" / "wandb" / "run").write_text("mine")
    refused(6, "wandb/run", args=("hf-to-megatron", src, dst, "--overwrite"), untouched=tmp_path)


def test_overwrite_of_what_mckpt_wrote_with_its_side_files(tmp_path, src, trained):
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "nested").mkdir(parents=True)
    (tokenizer / "nested" / "odd.bpe").write_bytes(b"\0\1")
    good("megatron-to-hf", trained, tmp_path / "dst", "--tokenizer", tokenizer)
    good("megatron-to-hf", trained, tmp_path / "dst", "--overwrite")
    assert "nested/odd.bpe" not in tree(tmp_path / "dst")


def test_a_link_in_place_of_a_unit_loses_the_link_alone(tmp_path, src):
    good("hf-to-megatron", src, tmp_path / "real")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "release").symlink_to(tmp_path / "real" / "release")
    before = tree(tmp_path / "real")
    good("hf-to-megatron", src, tmp_path / "dst", "--overwrite")
    assert tree(tmp_path / "real") == before and not (tmp_path / "dst" / "release").is_symlink()


# ---- the tracker, and DST/hf


def test_tracker_moves_forward_only(tmp_path, src):
    dst = tmp_path / "dst"

    def tracker() -> str:
        return (dst / TRACKER).read_text()

    good("hf-to-megatron", src, dst, "--iteration", 6)
    said = good("hf-to-megatron", src, dst, "--iteration", 5)
    assert tracker() == "6" and "--update-tracker" in said.err and "iter_0000005" in said.err
    said = good("hf-to-megatron", src, dst, "--iteration", 8)
    assert tracker() == "8" and "--update-tracker" not in said.err
    said = good("hf-to-megatron", src, dst)
    assert tracker() == "8" and "release" in said.err
    good("hf-to-megatron", src, dst, "--iteration", 5, "--overwrite", "--update-tracker")
    assert tracker() == "5"
    assert good("inspect", dst, "--json").json["iteration"] == 5
    assert good("inspect", dst, "--iteration", 8, "--json").json["iteration"] == 8
    refused(
        3,
        "iter_0000009",
        "iter_0000005",
        args=("inspect", dst, "--iteration", 9),
        untouched=tmp_path,
    )


def test_units_without_a_tracker(tmp_path, src):
    dst = tmp_path / "dst"
    good("hf-to-megatron", src, dst, "--iteration", 5)
    (dst / TRACKER).unlink()
    good("inspect", dst)  # there is but one
    good("hf-to-megatron", src, dst, "--iteration", 6)
    (dst / TRACKER).unlink()
    refused(
        2, "iter_0000005", "iter_0000006", "--iteration", args=("inspect", dst), untouched=tmp_path
    )


def test_side_files_of_another_model(tmp_path, src):
    dst, other = tmp_path / "dst", hf(tmp_path / "other")
    good("hf-to-megatron", src, dst)
    edit_json(other / "config.json", lambda c: c.update(rope_theta=5))
    before = tree(dst)
    refused(
        6,
        "config.json",
        "another model",
        args=("hf-to-megatron", other, dst, "--iteration", 3),
        untouched=dst,
    )
    edit_json(other / "config.json", lambda c: c.update(rope_theta=80000))
    shutil.copy(src / "config.json", other)
    (other / "tokenizer.json").write_text("{}")
    refused(
        6, "tokenizer.json", args=("hf-to-megatron", other, dst, "--iteration", 3), untouched=dst
    )
    assert tree(dst) == before
    good("hf-to-megatron", src, dst, "--iteration", 3)


def test_side_files_of_another_model_where_the_source_has_none(tiny_model, tmp_path, src, trained):
    dst, lone, other = tmp_path / "dst", tmp_path / "lone", tiny_model("qwen3-tied")
    shutil.copytree(trained, lone)
    shutil.rmtree(lone / "hf")
    good("hf-to-megatron", other, dst)
    refused(6, "another model", "tied", args=("reshard", lone, dst), untouched=dst)
    good("hf-to-megatron", src, tmp_path / "same")
    good("reshard", lone, tmp_path / "same")


# ---- failures midway


def test_full_disk(tmp_path, src, monkeypatch):
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
    """Starts mckpt in a process of its own; `before` is Python that runs first.

    A shell that runs the tests in the background would make all of them ignore SIGINT.
    """
    start = "import os, signal\nfrom mckpt.conversion import run\n"
    start += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    line = command_line(*args, before=start + before)
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_file_size_limit(tmp_path, src):
    dst = tmp_path / "dst"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    assert resource.RLIMIT_FSIZE is not None
    process = run("hf-to-megatron", src, dst, before=limit)
    _, err = process.communicate()
    assert process.returncode == 7 and b"Traceback" not in err and b"File too large" in err, err
    assert not loadable(dst)


# where to die: at so many calls of this function. The commit of an hf directory has a rename for
# each name, of a unit three; then its mark is unlinked, and its staging directory goes
CALLS = {
    "fsync": (1, 9),
    "rename": (1, 2, 3, 4, 6),
    "replace": (1, 2),
    "rmtree": (1, 2),
    "unlink": (1,),
}
DEATHS = [(name, count) for name, counts in CALLS.items() for count in counts]


# these are called in other places too, with other names
ENDS = {"unlink": "publishing", "rmtree": ".mckpt-"}


class Killed(BaseException):
    """The process is taken away; nothing may catch it."""


def dying(name: str, count: int, *args: Any) -> bool:
    """Runs mckpt and kills it at call number `count` of a function of os or shutil.

    Returns False if there are fewer such calls.
    """
    calls: list[int] = []
    module = shutil if name == "rmtree" else os
    real = getattr(module, name)

    def one(*a: Any, **k: Any) -> Any:
        counts = name not in ENDS or Path(a[0]).name.startswith(ENDS[name])
        counts = counts and not str(a[0]).endswith(".tmp")  # the journal's
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
def test_killed_at_any_point(tmp_path, src, trained, kind):
    """The rest is not a checkpoint, and the same command completes it."""
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
        if not more and not published and name != "unlink":
            assert not (dst / "config.json").exists() and not (dst / TRACKER).exists(), (
                name,
                count,
            )
        if more and (dst / "config.json").exists():
            # the old one or the new one, and no mixture
            assert mckpt("diff", dst, src).code == 0, (name, count)
        good(*args, dst, *(more or ["--overwrite"] * published))  # then all is there
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
    [("rename", 1), ("rename", 2), ("rename", 5), ("unlink", 1), ("replace", 2), ("rmtree", 2)],
)
@pytest.mark.parametrize("over", [False, True])
def test_only_the_same_command_replaces_the_files_of_a_killed_run(
    tmp_path, trained, another, name, count, over
):
    """The same command may replace its own half without --overwrite, but not another checkpoint."""
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
    # though its mark may be there still
    refused(6, "--overwrite", args=("megatron-to-hf", trained, dst), untouched=dst)


def test_killed_again_and_again(tmp_path, trained):
    good("megatron-to-hf", trained, tmp_path / "whole")
    args = ("megatron-to-hf", trained, tmp_path / "dst")
    for name, count in (
        ("rename", 3),
        ("rename", 1),
        ("rename", 2),
        ("replace", 1),
        ("unlink", 1),
        ("rename", 1),
    ):
        assert dying(name, count, *args)
    good(*args)
    assert tree(tmp_path / "dst") == tree(tmp_path / "whole")


def test_a_mark_names_files_and_not_names(tmp_path, trained, another):
    dst = tmp_path / "dst"
    assert dying("unlink", 1, "megatron-to-hf", trained, dst)
    for path in [p for p in dst.iterdir() if p.is_file()]:
        path.unlink()
    good("megatron-to-hf", another, tmp_path / "fresh")
    shutil.copytree(tmp_path / "fresh", dst, dirs_exist_ok=True)
    refused(6, "--overwrite", args=("megatron-to-hf", trained, dst), untouched=dst)


def test_no_resume_keeps_what_was_replaced_until_the_end(tmp_path, trained, another):
    dst = tmp_path / "dst"
    good("megatron-to-hf", another, dst)
    assert dying("rename", 4, "megatron-to-hf", trained, dst, "--overwrite")
    assert any(p.name == "replaced" for p in dst.glob(".mckpt-*/*"))
    assert dying("fsync", 1, "megatron-to-hf", trained, dst, "--overwrite", "--no-resume")
    assert any(p.name == "replaced" for p in dst.glob(".mckpt-*/*"))


def test_config_json_comes_after_the_rest_is_on_the_disk(tmp_path, trained, monkeypatch):
    done: list[str] = []
    rename, sync = os.rename, publishing.sync
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(Path(b).name), rename(a, b)))
    monkeypatch.setattr(
        publishing, "sync", lambda path: (done.append(f"sync {Path(path).name}"), sync(path))
    )
    good("megatron-to-hf", trained, tmp_path / "dst", "--max-shard-size", "100KB")
    at = done.index("config.json")
    assert done[at - 1] == done[at + 1] == "sync dst" and any(
        n.endswith(".safetensors") for n in done[:at]
    )
    assert not any(n.endswith(".safetensors") for n in done[at:])


def test_a_staging_directory_that_will_not_go(tmp_path, src, monkeypatch):
    """NFS keeps the open lock file under another name, and so the directory too."""
    real = os.rmdir

    def stuck(path: Any, *a: Any, **k: Any) -> None:
        if ".mckpt-" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        real(path, *a, **k)

    monkeypatch.setattr(os, "rmdir", stuck)
    good("hf-to-megatron", src, tmp_path / "dst")
    monkeypatch.undo()
    assert not list(tmp_path.glob("dst/.mckpt-*/publishing"))
    refused(
        6, "already contains", args=("hf-to-megatron", src, tmp_path / "dst"), untouched=tmp_path
    )
    assert mckpt("diff", src, tmp_path / "dst").code == 0


def test_staging_directories_of_other_plans_are_named(tmp_path, src):
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # one that runs
        assert str(left) not in good("hf-to-megatron", src, dst, "--iteration", 4).err
    finally:
        os.close(lock)
    assert "another plan" not in good("hf-to-megatron", src, dst, "--tp", 2).err


# ---- files that are copied whole


def test_side_files_are_looked_at_before_anything_is_written(tmp_path, trained):
    source = hf(tmp_path / "src")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "blobs" / "1234")
    args = ("hf-to-megatron", source, tmp_path / "dst")
    refused(3, "tokenizer.json", "blobs/1234", "remove the link", args=args, untouched=tmp_path)
    refused(
        3,
        "tokenizer.json",
        "blobs/1234",
        args=("megatron-to-hf", trained, tmp_path / "h", "--tokenizer", source),
        untouched=tmp_path,
    )
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")
    refused(3, "tokenizer.json", "not a regular file", args=args, untouched=tmp_path)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").write_text("{}")
    good(*args)


@pytest.mark.parametrize("when", ["before the run", "in the run"])
def test_side_files_that_change(tmp_path, when, monkeypatch):
    source = hf(tmp_path / "src")
    (source / "tokenizer.json").write_text("{}")
    planned = package.plan(source, tmp_path / "dst")
    if when == "before the run":
        (source / "tokenizer.json").write_text("{ }")
    else:
        real = shutil.copyfile
        monkeypatch.setattr(
            shutil, "copyfile", lambda a, b: (real(a, b), (source / "config.json").write_text("{}"))
        )
    with pytest.raises(errors.SourceError, match="was changed since the plan was made"):
        planned.run()
    assert not (tmp_path / "dst" / "release").exists() and not (tmp_path / "dst" / "hf").exists()
    assert (tmp_path / "dst").exists() == (when == "in the run")


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_a_copied_file_that_grows_or_shrinks(tmp_path, trained, size):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(bytes(2_000_000))
    planned = package.plan(trained, tmp_path / "dst", format="hf", tokenizer=tokenizer)
    (tokenizer / "tokenizer.json").write_bytes(bytes(size))
    with pytest.raises(
        errors.SourceError, match=f"tokenizer.json: had 2,000,000 bytes .* has {size:,} now"
    ):
        planned.run()
    assert not (tmp_path / "dst" / "config.json").exists()


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
                "The same command goes on",
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


def test_ctrl_c(tmp_path, src):
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
        path.write_bytes(bytes(path.stat().st_size))  # what a bad disk may have made of it
    good("hf-to-megatron", src, dst, "--no-resume")
    assert mckpt("diff", src, dst).code == 0


# ---- two at once


def test_the_same_command_twice_at_once(tmp_path, src, monkeypatch):
    planned, again = package.plan(src, tmp_path / "dst"), package.plan(src, tmp_path / "dst")
    inside, go = threading.Event(), threading.Event()
    real = run_module.publish

    def wait(*a: Any, **k: Any) -> None:
        inside.set()
        assert go.wait(20)
        real(*a, **k)

    monkeypatch.setattr(run_module, "publish", wait)
    first = threading.Thread(target=planned.run)
    first.start()
    assert inside.wait(20)
    try:
        with pytest.raises(errors.DestinationError, match="another mckpt is writing here"):
            again.run()
    finally:
        go.set()
        first.join()
    assert mckpt("diff", src, tmp_path / "dst").code == 0


def test_two_plans_of_one_unit(tmp_path, src):
    one, two = (
        package.plan(src, tmp_path / "dst"),
        package.plan(src, tmp_path / "dst", parallel=package.Parallel(tp=2)),
    )
    one.run()
    before = tree(tmp_path / "dst")
    with pytest.raises(errors.DestinationError, match="already contains"):
        two.run()
    after = {k: v for k, v in tree(tmp_path / "dst").items() if not k.startswith(".mckpt-")}
    assert after == before


# ---- the same bytes


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_same_command_same_bytes(tiny_model, tmp_path, form):
    src = tiny_model("qwen3-moe")
    trees = []
    for threads in (1, 4, 1):
        dst = tmp_path / f"{len(trees)}"
        good(
            "hf-to-megatron",
            src,
            dst,
            "--format",
            form,
            "--tp",
            2,
            "--ep",
            2,
            "--threads",
            threads,
            "--max-memory",
            "1MiB",
        )
        good("megatron-to-hf", dst, tmp_path / f"hf{len(trees)}", "--threads", threads)
        trees.append((tree(dst), tree(tmp_path / f"hf{len(trees)}")))
    assert "release/mckpt.json" in trees[0][0] and trees[0] == trees[1] == trees[2]
