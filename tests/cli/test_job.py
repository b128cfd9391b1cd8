"""Job files, and an environment variable for every option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from mckpt.cli import cli
from mckpt.cli.commands import variables
from tests.helpers import lora
from tests.helpers.commands import good, mckpt, refused


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a job file; the current directory is empty but for it."""
    monkeypatch.chdir(tmp_path)

    def write(*steps: dict[str, Any]) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps({"steps": steps}))  # JSON is YAML
        return path

    return write


def test_the_steps_run_in_order(job: Any, src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", str(src))
    path = job(
        {"command": "hf-to-megatron", "src": "${MODEL}", "dst": "ckpt", "tp": 2, "pp": 2},
        {"command": "check", "path": "ckpt"},
        {"command": "reshard", "src": "ckpt", "dst": "flat", "target_tp": 1, "target-pp": 1},
        {"command": "megatron-to-hf", "src": "flat", "dst": "hf", "resume": False},
        {"command": "diff", "a": "$MODEL", "b": "hf", "set": {"mtp_layers": 0}},
    )
    said = good("run", path)
    assert "the same to the last bit" in said.out
    assert said.err.splitlines()[-1].startswith(f"{path}: 5 steps done in ")
    lines = good("run", path, "--dry-run").out.splitlines()
    assert lines[2] == "mckpt reshard ckpt flat --target-tp 1 --target-pp 1"
    assert lines[4] == f"mckpt diff {src} hf --set mtp_layers=0"


def test_a_step_takes_the_names_of_options_that_megatron_has(job: Any, src: Path) -> None:
    path = job({"command": "plan", "src": str(src), "dst": "a", "tensor_model_parallel_size": 2})
    assert "tp 2" in good("run", path).out


def test_a_step_is_a_command_of_a_group(job: Any, src: Path) -> None:
    stored = lora.factors(lora.tensors(src), ["model.layers.0.mlp.down_proj"])
    lora.save(Path("lora"), stored)
    path = job(
        {"command": "adapter inspect", "path": "lora"},
        {"command": "adapter merge", "base": str(src), "adapter": "lora", "dst": "m"},
    )
    assert "2 steps done" in good("run", path).err
    assert good("run", path, "--dry-run").out == (
        f"mckpt adapter inspect lora\nmckpt adapter merge {src} lora m\n"
    )


def test_a_step_that_fails_ends_the_job(job: Any, src: Path) -> None:
    fine = {"command": "inspect", "path": str(src)}
    path = job(fine, {"command": "inspect", "path": "nowhere"}, fine)
    said = mckpt("run", path)
    assert said.code == 3 and "nowhere: does not exist" in said.err
    assert said.err.splitlines()[-1] == f"{path}: step 2 of 3 (inspect) failed"


def test_a_command_that_ends_with_1_ends_the_job(
    job: Any, src: Path, tmp_path: Path, dist_dir: Path
) -> None:
    good("hf-to-megatron", src, tmp_path / "a", "--dtype", "fp16")
    path = job(
        {"command": "diff", "a": "a", "b": str(dist_dir)}, {"command": "inspect", "path": "a"}
    )
    said = mckpt("run", path)
    assert said.code == 1 and "step 1 of 2 (diff) ended with exit code 1" in said.err


def test_json_of_a_job(job: Any, src: Path) -> None:
    path = job({"command": "inspect", "path": str(src)}, {"command": "inspect", "path": "nowhere"})
    said = mckpt("run", path, "--json")
    assert said.code == 3 and said.json["format"] == "hf"
    events = [json.loads(line) for line in said.err.splitlines()]
    assert [e.get("event") for e in events] == ["step", "step", None]
    assert events[-1]["error"]["exit_code"] == 3 and "step 2 of 2" in events[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: [", ("is not YAML",)),
        ("", ("is not a job", "`steps:`")),
        ("steps: []", ("is not a job",)),
        ("steps: [{src: a}]", ("step 1", "has no command")),
        ("steps: [{command: reshrad}]", ("'reshrad' is not a command", "did you mean reshard?")),
        ("steps: [{command: run, file: x}]", ("'run' is not a command",)),
        ("steps: [{command: adapter}]", ("'adapter' needs one of adapter merge, ",)),
        ("steps: [{command: adapter merg}]", ("did you mean adapter merge?",)),
        ("steps: [{command: inspect all}]", ("'inspect all' is not a command",)),
        ("steps: [{command: adapter merge, base: a}]", ("(adapter merge)", "adapter, dst is miss")),
        ("steps: [{command: inspect}]", ("step 1 (inspect)", "path is missing")),
        (
            "steps: [{command: inspect, path: a}, {command: plan, src: a, dst: b, tpp: 2}]",
            ("step 2 (plan)", "'tpp'", "did you mean"),
        ),
        ("steps: [{command: diff, a: x, b: y, no-optimizer: 1}]", ("true or false, not 1",)),
        ("steps: [{command: diff, a: [x], b: y}]", ("a: must be one value",)),
        ("steps: [{command: inspect, path: '${NOWHERE_SET}'}]", ("NOWHERE_SET is not set",)),
        ("steps: [{command: inspect, path: 'a$'}]", ("write $$",)),
        ("steps: [{command: plan, src: a, dst: b, tp: x}]", ()),
        ("steps: [{command: plan, src: a, dst: b, tp: 2001-02-03}]", ("2001-02-03",)),
        (f"steps: [{{command: inspect, path: a, iteration: {'9' * 6000}}}]", ("6,000 digits",)),
        ("steps: [{command: inspect, path: !!float abc}]", ("is not YAML", "'abc'")),
        ("steps: [{command: inspect, path: null}]", ("path: must be one value, not None",)),
        ('steps: [{command: inspect, path: "a\\0b"}]', ("path: an argument", r"'a\x00b'")),
        ("steps: &a [*a]", ("is not YAML", "aliases")),
        ("steps: " + "[" * 100_000, ("is not YAML",)),
    ],
)
def test_a_wrong_job_file(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    said = mckpt("run", path)
    assert said.code == 2 and all(word in said.err for word in words), said.err
    assert "Traceback" not in said.err


def test_no_value_becomes_an_option(job: Any, src: Path) -> None:
    """A path that begins with - is a path, and so is the value of an option."""
    said = good("run", job({"command": "inspect", "path": "--json"}), "--dry-run")
    assert said.out == "mckpt inspect -- --json\n"
    path = job({"command": "hf-to-megatron", "src": "--overwrite", "dst": "-d", "tp": 2})
    refused(3, "--overwrite: ", "step 1 of 1", args=("run", path))
    path = job({"command": "plan", "src": str(src), "dst": "d", "dialect": "--overwrite"})
    refused(2, "no dialect '--overwrite'", args=("run", path))


def test_a_launcher_runs_conversions_only(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    path = job({"command": "verify", "hf": "a", "megatron": "b"})
    refused(2, "verify runs in one process", args=("run", path))


# -------------------------------------------------------------------------------------- environment


def options(command: click.Command) -> Iterator[click.Option]:
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from options(inner)
    yield from (p for p in command.params if isinstance(p, click.Option))


def test_every_option_has_a_variable() -> None:
    found = [p for p in options(cli) if not p.is_eager]
    assert len(found) > 100
    for option in found:
        assert option.envvar == variables(option) and option.envvar, option.name


def test_a_variable_sets_an_option(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCKPT_TP", "2")
    assert "tp 2" in good("plan", src, tmp_path / "a").out
    assert "tp 4" in good("plan", src, tmp_path / "a", "--tp", 4).out
    monkeypatch.setenv("MCKPT_TARGET_PP", "2")
    good("hf-to-megatron", src, tmp_path / "a")
    assert "tp 2, pp 2" in good("reshard", tmp_path / "a", tmp_path / "b", "--dry-run").out
    # as with --tp on the command line, a plan with a size has a Megatron target
    assert "-> torch_dist" in good("plan", tmp_path / "a", tmp_path / "b").out
    monkeypatch.setenv("MCKPT_JSON", "1")
    assert "format" in good("inspect", src).json
    said = mckpt("inspect", tmp_path / "none")
    assert json.loads(said.err)["error"]["exit_code"] == 3


def test_a_variable_of_no_option_is_refused(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP_2", "PORT", "PORT_53_UDP"]
    links += [f"PORT_80_TCP{more}" for more in ("", "_PROTO", "_PORT", "_ADDR")]
    # Kubernetes sets them for the Services mckpt, mckpt-convert and mckpt-tp
    for service in ("MCKPT", "MCKPT_CONVERT", "MCKPT_TP"):
        for link in links:
            monkeypatch.setenv(f"{service}_{link}", "10.0.0.1")
    for name in ("IMAGE_TAG", "HOME", "CONVERT_URL"):  # of other programs
        monkeypatch.setenv(f"MCKPT_{name}", "x")
    good("inspect", src)
    monkeypatch.setenv("MCKPT_TAGRET_TP", "2")
    refused(2, "MCKPT_TAGRET_TP", "did you mean MCKPT_TARGET_TP?", args=("inspect", src))
    refused(2, "MCKPT_TAGRET_TP", args=("diff", src, src))
    monkeypatch.delenv("MCKPT_TAGRET_TP")
    for wrong, meant in (
        ("TENSOR_MODEL_PARALLEL_SIZE", "TP"),
        ("MAX_MEMROY", "MAX_MEMORY"),
        ("MAXMEMORY", "MAX_MEMORY"),
        ("PT", "TP"),
        ("ETPP", "ETP"),
    ):
        with monkeypatch.context() as set_here:
            set_here.setenv(f"MCKPT_{wrong}", "2")
            refused(2, f"did you mean MCKPT_{meant}?", args=("inspect", src))


def test_a_wrong_value_names_the_variable_or_option(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCKPT_TP", "two")
    said = mckpt("plan", src, "x")
    assert said.code == 2 and "--tp" in said.err and "MCKPT_TP" in said.err
