"""The README is true: its first command runs, its commands exist, and CI runs its test command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mckpt.cli import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)


def test_the_first_command_converts_the_shipped_model_and_back(tmp_path: Path) -> None:
    commands = BLOCKS[0].replace("\n", " ").split("&& ")
    assert "pip install" in commands[1]
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    said = ""
    for command in (c.strip() for c in commands if c.startswith("mckpt ")):
        program, *arguments = command.split()
        assert program == "mckpt"
        done = subprocess.run(
            [sys.executable, "-m", "mckpt", *arguments], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    assert said.startswith("the same to the last bit")


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    awk = re.search(r"command=\$\((awk .*README\.md)\)", script)
    assert awk
    assert subprocess.check_output(["sh", "-c", awk[1]], cwd=ROOT, text=True) == BLOCKS[1]
    assert "pytest" in BLOCKS[1]


def test_ci_runs_what_megatron_core_judges_with_the_newest_version_too() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "-m 'judge and not gpu and not slow'" in script
    starts = re.compile(r"^from tests\.judging|^ *from mckpt\.trainer|\bverify_all\b|mckpt\.verify\(|mckpt\(\"verify\",", re.M)
    found = {path.name for path in (ROOT / "tests").glob("test_*.py") if starts.search(path.read_text())}
    assert len(found) >= 5
    for name in found:
        assert "pytest.mark.judge" in (ROOT / "tests" / name).read_text(), f"{name} starts megatron-core, and is not marked"


def test_every_command_is_there_and_in_the_readme() -> None:
    named = set(re.findall(r"^mckpt ([a-z-]+)", README, re.M))
    assert named == set(cli.commands)


@pytest.mark.parametrize("command", [(name,) for name in cli.commands] + [("mappings", name) for name in ("list", "show", "check")])
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 4


def test_every_exit_code_is_in_the_readme() -> None:
    from mckpt import errors

    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.MckptError)}
    assert codes | {0, 1, 130} == {int(c) for c in re.findall(r"^\| (\d+) \|", README, re.M)}
