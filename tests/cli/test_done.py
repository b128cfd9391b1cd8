"""A conversion whose output is there already is done at once; what is not as it was written is an
error.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import mckpt as package
from mckpt.conversion import done
from mckpt.execute import comparing
from tests.helpers.commands import edit_json, good, mckpt, refused, tree
from tests.helpers.commands import hf as tiny_hf

COMMANDS = {
    "hf-to-megatron": ("hf", "--tp", 2),
    "megatron-to-hf": ("ckpt",),
    "reshard": ("ckpt", "--target-tp", 1, "--target-format", "torch"),
    "repair": ("ckpt",),
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with a model as `hf`, and as `ckpt` in the format torch at tp 2."""
    tiny_hf(tmp_path / "hf")
    good("hf-to-megatron", tmp_path / "hf", tmp_path / "ckpt", "--tp", 2, "--format", "torch")
    return tmp_path


def stamps(root: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_done_is_not_done_again(work: Path, command: str) -> None:
    source, *options = COMMANDS[command]
    line = (command, work / source, work / "out", *options)
    good(*line)
    before = stamps(work / "out")
    said = good(*line)
    assert "is done already, " in said.out and stamps(work / "out") == before
    found = good(*line, "--json").json
    assert found["state"] == "done already" and found["files"] and stamps(work / "out") == before
    assert "is done already" not in good(*line, "--overwrite").out
    after = stamps(work / "out")
    assert after.keys() == before.keys() and after != before


def test_other_options_are_another_plan(work: Path) -> None:
    good("megatron-to-hf", work / "ckpt", work / "out")
    refused(
        6,
        "already contains",
        args=("megatron-to-hf", work / "ckpt", work / "out", "--dtype", "fp16"),
        untouched=work,
    )


def change(path: Path) -> None:
    """Changes a weight; size and mtime stay."""
    before = path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, before))


def touch(root: Path) -> None:
    """Sets all mtimes to 0, as archives that are made reproducibly have them."""
    for path in root.rglob("*"):
        os.utime(path, ns=(0, 0))


def weights(root: Path) -> Path:
    return next(p for p in sorted(root.rglob("*")) if p.suffix in (".safetensors", ".pt"))


SOURCES = {
    "touched": lambda root, new: touch(root),
    "moved": lambda root, new: root.rename(new),
    "copied": lambda root, new: (shutil.copytree(root, new), shutil.rmtree(root)),
    "linked": lambda root, new: os.link(weights(root), root.parent / "link"),
}


@pytest.mark.parametrize("kind", ["hf", "ckpt"])
@pytest.mark.parametrize("how", SOURCES)
def test_a_source_with_the_same_content_is_done(
    work: Path, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *options = (
        ("hf-to-megatron", "--tp", 2) if kind == "hf" else ("megatron-to-hf", "--quantize", "nvfp4")
    )
    good(command, work / kind, work / "out", *options)
    before = {name: data for name, data in tree(work / "out").items() if "mckpt.json" not in name}
    SOURCES[how](work / kind, work / "new")
    line = (command, *[p for p in (work / "new", work / kind) if p.exists()][:1], work / "out")
    looked = []
    with monkeypatch.context() as patch:
        real = comparing.differing
        patch.setattr(comparing, "differing", lambda *a, **k: looked.append(1) or real(*a, **k))
        said = good(*line, *options)
        assert "is done already" in said.out
        assert len(looked) == ("comparing the content" in said.err) == (how != "moved")
        assert "is done already" in good(*line, *options).out, "the manifest is refreshed"
        assert len(looked) == (how != "moved")
    after = {name: data for name, data in tree(work / "out").items() if "mckpt.json" not in name}
    assert after == before
    assert mckpt("check", work / "out").code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_source_that_has_changed_is_not_done(work: Path, command: str) -> None:
    """Also if its headers, sizes and times are the same."""
    source, *options = COMMANDS[command]
    touch(work / source)
    line = (command, work / source, work / "out", *options)
    good(*line)
    change(weights(work / source))
    words = "already contains", f"The source differs: {work / source} has other values now"
    refused(6, *words, args=line, untouched=work)
    good(*line, "--overwrite")
    assert "is done already" in good(*line).out


def test_a_source_that_changes_after_the_comparison_is_not_done(work: Path) -> None:
    planned = package.plan(work / "hf", work / "out")
    planned.run()
    touch(work / "hf")
    output = done.existing_output(planned)
    change(weights(work / "hf"))
    done.complete(planned, output)
    assert done.existing_output(planned).manifest is None


def test_what_differs_is_named(work: Path) -> None:
    line = ("megatron-to-hf", work / "ckpt", work / "out")
    good(*line)
    place = f"The plan differs: {work / 'out'} has"
    refused(6, f"{place} no dtype; you ask for dtype fp16", args=(*line, "--dtype", "fp16"))
    sizes = ("reshard", work / "ckpt", work / "sized", "--target-tp")
    good(*sizes, 1)
    text = f"The plan differs: {work}/sized/release has tp 1; you ask for tp 2"
    refused(6, text, args=(*sizes, 2))
    touch(work / "ckpt")
    damaged = work / "out/model.safetensors"
    change(damaged)
    refused(6, f"The files differ: {damaged}: was changed after it was written", args=line)
    damaged.unlink()
    refused(6, f"The files differ: {damaged}: is missing", args=line)
    good("hf-to-megatron", work / "hf", work / "whole")
    words = "The source differs", "has other tensors, sizes or files"
    refused(6, *words, args=("megatron-to-hf", work / "whole", work / "out"))


@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_an_output_that_has_changed_is_not_done(work: Path, damage: str) -> None:
    line = ("megatron-to-hf", work / "ckpt", work / "out")
    good(*line)
    path = work / "out/generation_config.json"
    path = path if path.exists() else work / "out/config.json"
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-1])
    refused(6, "already contains", f"The files differ: {path}", args=line, untouched=work)


def test_a_copied_file_that_the_source_lost_is_a_change(work: Path) -> None:
    extra, line = work / "hf/chat_template.jinja", ("hf-to-megatron", work / "hf", work / "side")
    extra.write_text("x")
    good(*line)
    extra.unlink()
    refused(6, "The source differs", "has no chat_template.jinja now", args=line)


def test_several_processes_find_it_done(work: Path) -> None:
    line = ("megatron-to-hf", work / "ckpt", work / "out", "--workers", 2)
    good(*line)
    before = tree(work / "out")
    assert "is done already" in good(*line).out and tree(work / "out") == before


def remove(name: str) -> Any:
    return lambda root: (root / name).unlink()


DAMAGED = {
    "common.pt": ("dist", remove("release/common.pt"), ("common.pt: is missing",)),
    "a script": ("dist", remove("release/megatron_args.sh"), ("megatron_args.sh: is missing",)),
    "a longer file": (
        "dist",
        lambda root: next((root / "release").glob("*.distcp")).open("ab").write(b"x"),
        (".distcp: has", "bytes, and mckpt.json states"),
    ),
    "the tokenizer": ("export", remove("tokenizer.json"), ("tokenizer.json: is missing",)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_source_that_is_not_as_it_was_written(work: Path, dist_dir: Path, name: str) -> None:
    kind, damage, words = DAMAGED[name]
    good("megatron-to-hf", dist_dir, work / "export")
    shutil.copytree(dist_dir, work / "dist")
    damage(work / kind)
    commands: list[tuple[Any, ...]] = [
        ("inspect", work / kind),
        ("diff", work / kind, work / "ckpt"),
        ("reshard", work / kind, work / "out")
        if kind == "dist"
        else ("hf-to-megatron", work / kind, work / "out"),
    ]
    for args in commands[1:]:
        refused(3, "is not as mckpt wrote it", *words, args=args)
    assert mckpt("check", work / kind).code == 3


def test_a_text_may_be_edited_if_its_name_is_removed(work: Path) -> None:
    good("megatron-to-hf", work / "ckpt", work / "out")
    edit_json(work / "out/config.json", lambda c: c.update(use_cache=False))
    line = ("hf-to-megatron", work / "out", work / "again")
    refused(3, "config.json: has", "remove its name from mckpt.json", args=line)
    good("diff", work / "out", work / "ckpt")
    edit_json(work / "out/mckpt.json", lambda found: found["files"].pop("config.json"))
    good(*line)
