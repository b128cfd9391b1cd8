"""Sizes and settings that do not fit, no checkpoint at all, and a source that cannot be read.

Each gives one error that names the place, a stable exit code, and writes nothing.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

import mckpt
from mckpt.errors import UsageError
from tests.helpers.commands import TRACKER, refused

ONE = "model.safetensors"


SIZES = {
    "tp of ffn": ("qwen3", ("--tp", 3), ("3",)),
    "tp of heads": (
        "qwen3",
        ("--tp", 32),
        ("16 attention heads", "tp 32", "choose a tp of 1, 2, 4, 8, 16"),
    ),
    "tp of qkv rows": ("mistral", ("--tp", 7, "--format", "torch"), ("7",)),
    "pp": ("qwen3", ("--pp", 3), ("4 layers", "pp 3")),
    "pp above the layers": ("qwen3", ("--pp", 8), ("4 layers", "pp 8")),
    "vpp": ("qwen3", ("--pp", 2, "--vpp", 3), ("vpp 3",)),
    "vpp alone": ("qwen3", ("--vpp", 2), ("pp > 1",)),
    "ep on a dense model": ("qwen3", ("--ep", 2), ("ep 2", "this model has no experts")),
    "ep": ("qwen3-moe", ("--ep", 5), ("24 experts", "ep 5")),
    "etp and torch": (
        "qwen3-moe",
        ("--tp", 4, "--etp", 8, "--format", "torch"),
        ("etp 8", "tp 4", "torch_dist"),
    ),
    "layout": (
        "qwen3",
        ("--pp", 2, "--pipeline-model-parallel-layout", "Ett|ttt|L"),
        ("Ett|ttt|L",),
    ),
    "zero": ("qwen3", ("--tp", 0), ("--tp",)),
    "a word": ("qwen3", ("--tp", "two"), ("--tp",)),
    "memory of a word": ("qwen3", ("--max-memory", "lots"), ("'lots'",)),
    "unknown setting": ("qwen3", ("--set", "foo=1"), ("foo=1", "mckpt mappings show logical")),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit_are_refused(tiny_model, tmp_path, case):
    model, options, words = SIZES[case]
    src = tiny_model(model)
    refused(2, *words, args=("hf-to-megatron", src, tmp_path / "dst", *options), untouched=tmp_path)


def test_a_setting_or_family_that_the_config_denies_is_refused(made, tmp_path):
    for code, option, value, words in (
        (4, "--set", "num_layers=7", ("num_layers", "4", "7")),
        (4, "--family", "nope", ("'nope'", "qwen3")),
        (
            5,
            "--family",
            "llama",
            ("--family llama was given", "which is family qwen3: leave out --family llama."),
        ),
        (4, "--mapping", "/nope.yaml", ("/nope.yaml",)),
    ):
        args = ("hf-to-megatron", made["one"], tmp_path / "d", option, value)
        refused(code, *words, args=args, untouched=tmp_path)


@pytest.mark.parametrize("what", ["a weight", "the mtime", "nothing", "a file is gone"])
def test_a_source_that_changes_while_it_is_read_is_refused(made, tmp_path, monkeypatch, what):
    """Also if its size and its mtime stay. If only its times change, its content is compared."""
    import mckpt as package
    from mckpt.conversion import run as execute

    src = tmp_path / "src"
    shutil.copytree(made["one"], src)
    planned = package.plan(src, tmp_path / "dst")
    real = execute.execute

    def slow(*args: Any, **named: Any) -> Any:
        done = real(*args, **named)
        before, data = (src / ONE).stat().st_mtime_ns, bytearray((src / ONE).read_bytes())
        data[-1] ^= what == "a weight"
        (src / ONE).write_bytes(data)
        os.utime(src / ONE, ns=(0, before + (what == "the mtime")))
        if "gone" in what:
            (src / ONE).unlink()
        return done

    monkeypatch.setattr(execute, "execute", slow)
    if what in ("the mtime", "nothing"):
        planned.run()
        monkeypatch.setattr(execute, "execute", None)  # nothing is copied again
        assert package.convert(src, tmp_path / "dst")["files"]
        return
    match = "is gone" if "gone" in what else "changed while it was read"
    with pytest.raises(package.errors.SourceError, match=match):
        planned.run()
    assert not (tmp_path / "dst" / TRACKER).exists()
    monkeypatch.undo()
    if what == "a weight":  # the staged bytes are of two states
        package.plan(src, tmp_path / "dst").run()
        assert not package.diff(src, tmp_path / "dst")


def test_a_source_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for src, word in (
        ("empty", "no checkpoint"),
        ("file", "is a file"),
        ("nope", "does not exist"),
    ):
        refused(3, word, args=("inspect", tmp_path / src), untouched=tmp_path)
        refused(
            3, word, args=("hf-to-megatron", tmp_path / src, tmp_path / "d"), untouched=tmp_path
        )


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("loop", "is a link that leads nowhere"),
        ("loop/out", "loop is a link that leads nowhere"),
        ("gone/out", "gone is a link that leads nowhere"),
        ("file", "is a file"),
        ("file/out", "file is a file"),
    ],
)
def test_a_path_on_which_nothing_can_be_written_is_refused(src, tmp_path, where, why):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"x")
    for command in ("hf-to-megatron", "plan"):
        refused(6, why, args=(command, src, tmp_path / where), untouched=tmp_path)
    refused(3, args=("inspect", tmp_path / where))


@pytest.mark.parametrize("option", ["like", "source", "destination"])
def test_a_path_with_a_nul_is_refused(src, tmp_path, option):
    where = {"source": src, "destination": tmp_path / "out", option: "a\0b"}
    with pytest.raises(UsageError, match="a path cannot have a NUL character"):
        opened = mckpt.open(where["source"], like=where.get("like"))
        mckpt.plan(opened, where["destination"])


def test_the_checkpoints_below_a_directory_are_named(src, torch_dir, tmp_path):
    (tmp_path / "demo/logs").mkdir(parents=True)
    os.symlink(torch_dir, tmp_path / "demo/megatron")
    args = ("megatron-to-hf", tmp_path / "demo", tmp_path / "out")
    place = tmp_path / "demo"
    text = f"{place}: is not a checkpoint, but has 1 checkpoint below it; give {place}/megatron"
    refused(3, text, args=args, untouched=tmp_path)
    os.symlink(src, tmp_path / "demo/hf")
    refused(3, f"2 checkpoints below it; give {place}/hf or {place}/megatron", args=args)


def test_a_vocabulary_of_too_many_rows_is_refused(made, tmp_path):
    args = ("hf-to-megatron", made["one"], tmp_path / "d", "--make-vocab-size-divisible-by", 10**26)
    refused(2, "more than 2,147,483,648 rows", "choose a smaller", args=args, untouched=tmp_path)


def test_an_unreadable_file_is_refused(made, tmp_path, monkeypatch):
    from mckpt.storage import descriptors

    def refuse(*args: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied", args[0])

    monkeypatch.setattr(descriptors, "open_file", refuse)
    refused(
        7,
        ONE,
        "Permission denied",
        args=("hf-to-megatron", made["one"], tmp_path / "d"),
        untouched=tmp_path,
    )
