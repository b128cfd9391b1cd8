"""The command line: help, usage errors, inspect, plan, mappings and diff. The commands that convert
are in test_cli_convert.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from mckpt import cli
from tests.helpers import tiny
from tests.helpers.commands import (
    PT,
    Pt,
    command_line,
    edit_json,
    good,
    hf,
    mckpt,
    run,
    tree,
)

# ---- help and usage


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = [prefix]
    for name, command in group.commands.items():
        out += (
            commands(command, (*prefix, name))
            if isinstance(command, click.Group)
            else [(*prefix, name)]
        )
    return out


@pytest.mark.parametrize("command", commands(cli.cli), ids=" ".join)
def test_every_command_has_help(command):
    said = good(*command, "--help")
    assert said.out.startswith("Usage: mckpt") and len(said.out.splitlines()) > 4
    assert good(*command, "-h").out == said.out


@pytest.mark.parametrize("command", commands(cli.cli), ids=" ".join)
def test_help_explains_every_option_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = good(*command, "--help").out
    assert max(map(len, said.splitlines())) <= 80
    assert "..." not in said.partition("Commands:")[2]  # click truncates long summaries
    found: Any = cli.cli
    for name in command:
        found = found.commands[name]
    options = [p for p in found.params if isinstance(p, click.Option)]
    assert [o.name for o in options if not o.help] == []


def test_a_shell_completes_commands_and_options():
    words = {"mckpt hf": "hf-to-megatron", "mckpt plan --allow": "--allow-inexact"}
    for line, wanted in words.items():
        environ = os.environ | {
            "_MCKPT_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
        done = run(command_line(), env=environ)
        assert (done.stdout, done.stderr) == (f"plain,{wanted}\n", "")


def test_a_group_without_a_command_shows_its_help():
    assert good("--version").out.startswith("mckpt ")
    for group in ((), ("mappings",)):
        said = mckpt(*group)
        assert said.code == 2 and said.err.splitlines()[0].endswith("COMMAND [ARGS]...")


def test_names_of_other_programs_are_taken_for_our_options_and_stay_out_of_the_help(src, tmp_path):
    sizes = "--tensor-model-parallel-size 2 --pipeline_model_parallel_size=2"
    assert "tp 2, pp 2)" in good("plan", src, tmp_path / "a", *sizes.split()).out
    good("hf-to-megatron", src, tmp_path / "a", *sizes.split())
    for size in ("--target-tensor-model-parallel-size", "--tensor-parallel-size", "--target-tp"):
        for command in (("reshard", "--dry-run"), ("plan",)):
            said = good(*command, tmp_path / "a", tmp_path / "b", size, 4)
            assert "(gpt, tp 4, pp 2)" in said.out, (command, size)
    for command in ("hf-to-megatron", "reshard", "verify", "train"):
        assert "-parallel-size" not in good(command, "--help").out


def test_a_closed_pipe_does_not_end_with_the_exit_code_of_a_difference(src):
    """`mckpt inspect | head` must not exit with 1, the exit code of a difference."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        command_line("inspect", src, "--json"),
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert process.returncode == 7 and b"Traceback" not in process.stderr, process.stderr


def test_new_values_leave_no_temporary_files(src, tmp_path):
    (tmp_path / "temporary").mkdir()
    for edit, code in (("vocab: {size: 320, init: normal}", 0), ("layers: {drop: 99}", 2)):
        line = command_line("edit", src, tmp_path / "out", "--edit", "vocab: {size: 640}")
        process = subprocess.run(
            [*line, "--edit", edit],
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
            check=False,
        )
        assert process.returncode == code, process.stderr
        assert not list((tmp_path / "temporary").iterdir())


def test_an_internal_error_is_reported_as_one(monkeypatch, src):
    monkeypatch.setattr("mckpt.checkpoint.inspection.inspect", lambda source, most: 1 // 0)
    said = mckpt("inspect", src)
    assert said.code == 70 and "ZeroDivisionError" in said.err and "internal error" in said.err


# ---- inspect, plan, mappings


def test_inspect_reports_format_files_and_tensors(src, torch_dir, dist_dir):
    for path, form, files in ((src, "hf", 1), (torch_dir, "torch", 4), (dist_dir, "torch_dist", 1)):
        found = good("inspect", path, "--json").json
        assert (found["format"], found["files"]) == (form, files)
        assert found["bytes"] == sum(t["bytes"] for t in found["tensors"].values()) and found[
            "num_tensors"
        ] == len(found["tensors"])
        text = good("inspect", path).out
        assert f"format: {form}" in text and next(iter(found["tensors"])) in text
    assert good("inspect", torch_dir, "--json").json["parallel"]["tensor_model_parallel_size"] == 2
    assert good("inspect", torch_dir / "release", "--json").json["format"] == "torch"


def test_inspect_lists_problems_of_the_files(tmp_path):
    src = hf(tmp_path / "src", max_shard_size=120_000)
    sorted(src.glob("model-*"))[1].unlink()
    assert any("model-00002" in p for p in good("inspect", src, "--json").json["problems"])
    assert "problem: model-00002" in good("inspect", src).out


def test_inspect_prints_the_launch_line(src, torch_dir, dist_dir, tmp_path):
    flags = good("inspect", torch_dir, "--megatron-args", "--json").json
    assert (
        flags["--num-layers"],
        flags["--hidden-size"],
        flags["--tensor-model-parallel-size"],
    ) == (4, 48, 2)
    text = good("inspect", torch_dir, "--megatron-args").out
    beside = '"$(dirname "${BASH_SOURCE[0]}")/../hf"'
    written = (torch_dir / "release" / "megatron_args.sh").read_text()
    assert f"--tokenizer-type HuggingFaceTokenizer\n    --tokenizer-model {beside}\n" in written
    assert text == written.replace(beside, str(torch_dir / "hf"))
    process = run(["bash", "-c", text + 'printf "%s\\n" "${MEGATRON_ARGS[@]}"'])
    assert "--num-layers\n4\n" in process.stdout
    same = ("--num-layers", "--ffn-hidden-size", "--rotary-base", "--norm-epsilon")
    assert [good("inspect", src, "--megatron-args", "--json").json[f] for f in same] == [
        flags[f] for f in same
    ]
    shutil.copytree(torch_dir, tmp_path / "noargs")
    for path in (tmp_path / "noargs" / "release").glob(f"mp_rank_*/{PT}"):
        pt = Pt(path)
        pt.value.pop("args")
        pt.save()
    assert (
        good("inspect", tmp_path / "noargs", "--megatron-args", "--json").json["--num-layers"] == 4
    )


def test_plan_reports_sizes_and_writes_nothing(src, torch_dir, tmp_path):
    plan = good("plan", src, tmp_path / "d", "--tp", 2, "--pp", 2, "--to", "torch", "--json").json
    assert plan["target"]["format"] == "torch" and plan["source"]["tensors"] == 47
    assert plan["target"]["bytes"] == sum(f["bytes"] for f in plan["target"]["files"])
    assert (
        sum((torch_dir / "release" / f["path"]).stat().st_size for f in plan["target"]["files"])
        == plan["target"]["bytes"]
    )
    assert good("plan", src, tmp_path / "d", "--dtype", "fp32", "--json").json["casts"] == {
        "bfloat16 -> float32": 277200
    }
    assert "47 logical tensors" in good("plan", torch_dir, tmp_path / "d").out
    assert tree(tmp_path) == {}


def test_reshard_accepts_short_names_of_sizes(torch_dir, tmp_path):
    short = good("reshard", torch_dir, tmp_path / "a", "--tp", 4, "--pp", 1, "--json").json
    long = good(
        "reshard", torch_dir, tmp_path / "b", "--target-tp", 4, "--target-pp", 1, "--json"
    ).json
    assert short["plan"] == long["plan"] and short["parallel"]["tensor_model_parallel_size"] == 4
    assert "--target-tp, --tp" in good("reshard", "--help").out


def test_plan_of_a_megatron_source_with_sizes_is_a_reshard(torch_dir, dist_dir, tmp_path):
    plan = good("plan", torch_dir, tmp_path / "d", "--tp", 4, "--json").json
    assert (plan["target"]["format"], plan["target"]["parallel"]) == ("torch", "tp 4, pp 2")
    assert (
        plan["plan"] == good("reshard", torch_dir, tmp_path / "d", "--tp", 4, "--json").json["plan"]
    )
    assert (
        good(
            "plan", dist_dir, tmp_path / "e", "--account-for-loss-in-pipeline-split", "--json"
        ).json["target"]["format"]
        == "torch_dist"
    )
    assert good("plan", torch_dir, tmp_path / "g", "--json").json["target"]["format"] == "hf"


def test_plan_ends_as_the_run_would_where_the_destination_is_refused(src, torch_dir, tmp_path):
    dst = tmp_path / "d"
    good("hf-to-megatron", src, dst, "--layer-keys", "per_layer")
    assert good("plan", src, dst, "--layer-keys", "per_layer")  # is done already
    before = tree(tmp_path)
    for args in (
        ("plan", src, dst),
        ("plan", torch_dir, dst, "--to", "torch_dist"),
        ("hf-to-megatron", src, dst, "--dry-run"),
    ):
        said = mckpt(*args)
        assert said.code == 6 and "47 logical tensors" in said.out and "--overwrite" in said.err, (
            args
        )
        assert good(*args, "--overwrite").out == said.out
    said = mckpt("plan", src, dst, "--json")
    assert (
        said.code == 6
        and said.json["source"]["tensors"] == 47
        and json.loads(said.err)["error"]["exit_code"] == 6
    )
    (dst / "release" / "notes.txt").write_text("mine")
    assert (
        mckpt("plan", src, dst, "--overwrite").code
        == mckpt("hf-to-megatron", src, dst, "--overwrite").code
        == 6
    )
    (dst / "release" / "notes.txt").unlink()
    assert tree(tmp_path) == before


def test_every_error_is_json_with_the_json_option(src, tmp_path, monkeypatch):
    cases = (
        (("inspect", tmp_path / "gone", "--json"), "SourceError", 3, "does not exist"),
        (("inspect", src, "--frobnicate", "--json"), "UsageError", 2, "--frobnicate"),
        (("diff", "--json"), "UsageError", 2, "Missing argument"),
        (("hf-to-megatron", src, tmp_path / "d", "--tp", 7, "--json"), "UsageError", 2, "tp 7"),
        (("hf-to-megatron", src, src, "--json"), "DestinationError", 6, "is the source itself"),
    )
    for args, kind, code, word in cases:
        said = mckpt(*args)
        found = json.loads(said.err)["error"]
        assert (found["class"], found["exit_code"], said.code, said.out) == (
            kind,
            code,
            code,
            "",
        ), args
        assert word in found["message"], found
    shutil.copytree(src, tmp_path / "cut")
    tiny.write_weights(tmp_path / "cut", {"model.norm.weight": np.zeros(48, "f4")})
    found = json.loads(mckpt("hf-to-megatron", tmp_path / "cut", tmp_path / "d", "--json").err)[
        "error"
    ]
    # the message lists 20
    assert len(found["problems"]) == 46 and "model.embed_tokens.weight" in found["problems"][0]
    for error, code, kind in (
        (KeyboardInterrupt(), 130, "Interrupted"),
        (OSError(5, "broken", "x"), 7, "StorageError"),
        (ValueError("odd"), 70, "InternalError"),
    ):

        def fail(source: Any, most: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr("mckpt.checkpoint.inspection.inspect", fail)
        said = mckpt("inspect", src, "--json")
        found = json.loads(said.err)["error"]
        assert (said.code, found["class"], found["exit_code"]) == (code, kind, code)
    assert "ValueError: odd" in found["message"] and "Traceback" in found["traceback"]


def test_notes_are_json_events_with_the_json_option(src, tmp_path):
    good("hf-to-megatron", src, tmp_path / "d", "--iteration", 5)
    said = good("hf-to-megatron", src, tmp_path / "d", "--iteration", 3, "--json").err
    assert "--update-tracker" in next(
        e["message"] for e in map(json.loads, said.splitlines()) if e["event"] == "note"
    )


def test_a_size_may_have_a_unit(src, tmp_path):
    for i, size in enumerate(("64MiB", "2GiB", "500MB", str(1 << 20), "512kib", "2G", "2Gi")):
        good("hf-to-megatron", src, tmp_path / str(i), "--max-memory", size)


def test_help_shows_the_default_sizes():
    for command, default in (
        ("hf-to-megatron", "1"),
        ("reshard", "(the source's)"),
        ("plan", "(1 from Hugging Face, else the source's)"),
        ("verify", "(the checkpoint's for torch files, else 1)"),
        ("train", "(1)"),
    ):
        said = " ".join(good(command, "--help").out.split())
        assert said.count(f"[default: {default}]") >= 4, command  # tp, pp, vpp, ep


def test_inspect_uses_plain_words(torch_dir, dist_dir, src):
    for path in (torch_dir, dist_dir, src):
        assert "{'" not in good("inspect", path).out
    assert (
        "parallel: tensor_model_parallel_size 2, pipeline_model_parallel_size 2"
        in good("inspect", torch_dir).out
    )
    text = good("inspect", dist_dir).out
    assert (
        re.search(r"^bytes of stored tensors: \d+,\d{3}$", text, re.MULTILINE)
        and "num_tensors" not in text
    )
    assert "in 1 chunk\n" in text and "in 4 chunks\n" in text and "1 chunks" not in text


def test_mappings_lists_shows_and_checks_files(src, tmp_path):
    families = good("mappings", "list", "--json").json
    assert families["hf"]["qwen3"] == ["Qwen3ForCausalLM"] and "gpt" in families["megatron"]
    assert "hf/qwen3  Qwen3ForCausalLM" in good("mappings", "list").out
    for name in (*families["hf"], *families["megatron"]):
        assert f"/{name}, with all that it inherits" in good("mappings", "show", name).out
    assert "self_attn.{q,k,v}_proj.weight" in good("mappings", "show", "qwen3").out
    mine = tmp_path / "mine.yaml"
    mine.write_text("architectures: [MineForCausalLM]\nextends: qwen3\n")
    said = good("mappings", "check", mine, "--config", src / "config.json")
    assert "MineForCausalLM" in said.out and "each of which has a place in Megatron" in said.out


def test_a_custom_mapping_or_family_converts_an_unknown_architecture(src, tmp_path):
    strange = hf(tmp_path / "strange")
    edit_json(strange / "config.json", lambda c: c.update(architectures=["MineForCausalLM"]))
    (tmp_path / "mine.yaml").write_text("architectures: [MineForCausalLM]\nextends: qwen3\n")
    good("hf-to-megatron", strange, tmp_path / "mapped", "--mapping", tmp_path / "mine.yaml")
    good("hf-to-megatron", strange, tmp_path / "named", "--family", "qwen3")
    assert (
        tree(tmp_path / "mapped" / "release").keys() == tree(tmp_path / "named" / "release").keys()
    )
    assert mckpt("diff", src, tmp_path / "named", "--like", src).code == 0


# ---- diff


def changed(src: Path, to: Path, change: Any) -> Path:
    shutil.copytree(src, to)
    found = tiny.tensors(tiny.config("qwen3"))
    change(found)
    tiny.write_weights(to, found)
    return to


def test_diff_exits_with_1_if_checkpoints_differ(src, torch_dir, dist_dir, tmp_path):
    assert good("diff", src, torch_dir).out.startswith(
        "the same to the last bit: 47 logical tensors"
    )
    assert good("diff", torch_dir, dist_dir, "--json").json["state"] == "same"
    name = "model.layers.2.mlp.up_proj.weight"
    other = changed(src, tmp_path / "other", lambda a: a[name].__setitem__((5, 7), 3))
    said = mckpt("diff", torch_dir, other)
    assert (
        said.code == 1
        and "layers.2.mlp.up.weight: 1 element differs, first at [5, 7]" in said.out
        and "different:" in said.out
    )
    said = mckpt("diff", src, other, "--json")
    assert (
        said.code == 1
        and said.json["state"] == "different"
        and said.json["changed"][0]["first"] == [5, 7]
    )


def test_diff_compares_bits_without_atol(src, tmp_path):
    name = "model.norm.weight"

    def payload(bits: int) -> Any:
        return lambda a: a[name].view("u2").__setitem__(3, bits)

    one, two = (
        changed(src, tmp_path / "1", payload(0x7FC0)),
        changed(src, tmp_path / "2", payload(0x7FC1)),
    )
    said = mckpt("diff", one, two)
    assert said.code == 1 and "nan 0x7fc0 against nan 0x7fc1" in said.out
    assert mckpt("diff", one, two, "--atol", 0).code == 0
    # the distance of a NaN from a number is undefined
    assert mckpt("diff", src, one, "--atol", 1000).code == 1

    zero, minus = (
        changed(src, tmp_path / "3", payload(0)),
        changed(src, tmp_path / "4", payload(0x8000)),
    )
    assert (
        mckpt("diff", zero, minus).code == 1 and mckpt("diff", zero, minus, "--atol", 0).code == 0
    )

    near = changed(src, tmp_path / "5", lambda a: a[name].__setitem__(3, float(a[name][3]) + 0.25))
    assert (
        mckpt("diff", src, near, "--atol", 0.5).code == 0
        and mckpt("diff", src, near, "--atol", 0.125).code == 1
    )


def test_diff_reports_another_model_or_dtype(tiny_model, src):
    deeper = tiny_model("qwen3-tied")
    said = mckpt("diff", src, deeper)
    assert said.code == 1 and "only in" in said.out
    wide = tiny_model("qwen3", "float32")
    said = mckpt("diff", src, wide)
    assert said.code == 1 and "dtype bfloat16 against float32" in said.out
    assert mckpt("diff", src, wide, "--atol", 0.01).code == 0
