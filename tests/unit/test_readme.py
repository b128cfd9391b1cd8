"""The README is true: its commands exist, and CI runs its test command. tests/cli/test_docs.py runs
its blocks.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mckpt.cli import cli
from tests import cli_page

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TESTS = re.findall(r"^<!-- tests -->\n```sh\n(.*?)^```", README, re.M | re.S)


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    awk = re.search(r"command=\$\((awk .*?README\.md)\)", script, re.S)
    assert awk
    assert subprocess.check_output(["sh", "-c", awk[1]], cwd=ROOT, text=True) == TESTS[0]
    assert TESTS[0].endswith(" -m pytest tests\n"), "CI runs the tests of all folders"


def test_ci_runs_the_judges_with_the_newest_megatron_core_too() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "-m 'judge and not gpu and not slow'" in script
    starts = re.compile(
        # optimizer_order compares two lists of names, and imports nothing of megatron
        r"^from tests\.helpers\.judging|^ *from mckpt\.trainer(?!\.optimizer_order)|\bverify_all\b"
        r"|mckpt\.verify\((?!.*bytes)|mckpt\(\"verify\",(?!.*bytes)",
        re.M,
    )
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    found = {path: text for path, text in texts.items() if starts.search(text)}
    assert len(found) >= 5
    for path, text in found.items():
        assert "pytest.mark.judge" in text, f"{path} starts megatron-core, and is not marked"


def test_the_readme_is_short_and_names_no_command_that_does_not_exist() -> None:
    assert len(README.encode()) <= 8192
    named = set(re.findall(r"(?:^|`)mckpt ([a-z-]+)", README, re.M))
    assert len(named) > 8
    assert not named - set(cli.commands)


def test_the_reference_of_commands_is_that_of_the_program() -> None:
    page = cli_page.page()
    assert cli_page.PAGE.read_text() == page, "run: python -m tests.cli_page"
    assert page.count("| `--max-memory SIZE` |") == 1


def test_every_exit_code_is_in_its_table() -> None:
    from mckpt import errors

    codes = {
        e.exit_code
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.MckptError)
    }
    assert codes | {0, 1, 129, 130, 143} == {
        int(c) for c in re.findall(r"^\| (\d+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.M)
    }
