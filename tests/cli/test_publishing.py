"""A destination is valid only when it is complete.

Files that mckpt did not write stay, and the same command gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import threading
from typing import Any

import pytest

import mckpt as package
from mckpt import errors
from mckpt.conversion import run as run_module
from tests.helpers.commands import (
    TRACKER,
    command_line,
    edit_json,
    good,
    hf,
    mckpt,
    refused,
    run,
    tree,
)

# ---- refusals


def test_a_read_only_destination_is_refused(tmp_path, src):
    (tmp_path / "dst").mkdir(mode=0o555)
    command = command_line("hf-to-megatron", src, tmp_path / "dst")
    if os.geteuid() == 0:  # without these two capabilities, permissions bind root too
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    assert "Permission denied" in run(command, 7).stderr
    assert tree(tmp_path / "dst") == {}


def test_dry_run_writes_nothing(tmp_path, src):
    good("hf-to-megatron", src, tmp_path / "dst", "--dry-run")
    good("plan", src, tmp_path / "dst")
    assert tree(tmp_path) == {}


# ---- files that already exist


def test_an_existing_output_requires_overwrite(tmp_path, src, trained):
    for args, there in (
        (("hf-to-megatron", src, tmp_path / "m"), "release"),
        (("megatron-to-hf", trained, tmp_path / "h"), "config.json"),
    ):
        good(*args)
        before = tree(tmp_path)
        other = (*args, "--dtype", "fp16")
        refused(6, there, "--overwrite", args=other, untouched=tmp_path)
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
def test_overwrite_never_removes_foreign_files(tmp_path, trained, name):
    dst = tmp_path / "dst"
    good("megatron-to-hf", trained, dst)
    (dst / name).parent.mkdir(exist_ok=True)
    (dst / name).write_text("mine")
    refused(
        6,
        name,
        "does not belong to a checkpoint",
        args=("megatron-to-hf", trained, dst, "--overwrite"),
        untouched=tmp_path,
    )


def test_overwrite_never_removes_foreign_files_of_a_unit(tmp_path, src):
    dst = tmp_path / "dst"
    good("hf-to-megatron", src, dst)
    (dst / "release" / "wandb").mkdir()
    (dst / "release" / "wandb" / "run").write_text("mine")
    refused(6, "wandb/run", args=("hf-to-megatron", src, dst, "--overwrite"), untouched=tmp_path)


def test_overwrite_replaces_an_output_with_its_side_files(tmp_path, src, trained):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "odd.bpe").write_bytes(b"\0\1")
    good("megatron-to-hf", trained, tmp_path / "dst", "--tokenizer", tokenizer)
    assert "odd.bpe" in tree(tmp_path / "dst")
    good("megatron-to-hf", trained, tmp_path / "dst", "--overwrite")
    assert "odd.bpe" not in tree(tmp_path / "dst")


def test_overwrite_of_a_link_removes_only_the_link(tmp_path, src):
    good("hf-to-megatron", src, tmp_path / "real")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "release").symlink_to(tmp_path / "real" / "release")
    before = tree(tmp_path / "real")
    good("hf-to-megatron", src, tmp_path / "dst", "--overwrite")
    assert tree(tmp_path / "real") == before and not (tmp_path / "dst" / "release").is_symlink()


# ---- the tracker, and DST/hf


def test_the_tracker_only_moves_forward(tmp_path, src):
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


def test_several_units_without_a_tracker_require_an_iteration(tmp_path, src):
    dst = tmp_path / "dst"
    good("hf-to-megatron", src, dst, "--iteration", 5)
    (dst / TRACKER).unlink()
    good("inspect", dst)  # there is only one unit
    good("hf-to-megatron", src, dst, "--iteration", 6)
    (dst / TRACKER).unlink()
    refused(
        2, "iter_0000005", "iter_0000006", "--iteration", args=("inspect", dst), untouched=tmp_path
    )


def test_side_files_of_another_model_are_refused(tmp_path, src):
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


def test_a_source_without_side_files_is_refused_beside_those_of_another_model(
    tiny_model, tmp_path, src, trained
):
    dst, lone, other = tmp_path / "dst", tmp_path / "lone", tiny_model("qwen3-tied")
    shutil.copytree(trained, lone)
    shutil.rmtree(lone / "hf")
    good("hf-to-megatron", other, dst)
    refused(6, "another model", "tied", args=("reshard", lone, dst), untouched=dst)
    good("hf-to-megatron", src, tmp_path / "same")
    good("reshard", lone, tmp_path / "same")


# ---- files that are copied whole


def test_side_files_are_checked_before_anything_is_written(tmp_path, trained):
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
def test_side_files_that_change_after_the_plan_are_refused(tmp_path, when, monkeypatch):
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
def test_a_copied_file_that_grows_or_shrinks_is_refused(tmp_path, trained, size):
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


# ---- two at once


def test_the_same_command_started_twice_is_refused_once(tmp_path, src, monkeypatch):
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


def test_a_second_plan_of_the_same_unit_is_refused(tmp_path, src):
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
