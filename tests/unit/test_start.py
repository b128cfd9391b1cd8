"""Bounds on what a command imports and reads before it does its work, which is most of the time of
a short command. If a test fails, import the new module where it is used; raise a bound only if
every run of the command needs what it now imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from mckpt import cli
from mckpt.cli.program import COMMANDS
from mckpt.mapping.nodes import FOLDER
from mckpt.storage import sparse_copy

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3"
# prints, for one command line, the modules that it has imported and the files that it has opened
PROGRAM = """
import json, os, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
from mckpt.cli import main
out, sys.stdout = sys.stdout, open(os.devnull, "w")
sys.argv = ["mckpt", *sys.argv[1:]]
try:
    main()
except SystemExit as error:
    assert not error.code, error.code
files = [os.fspath(path) for path in opened if isinstance(path, (str, os.PathLike))]
json.dump([list(sys.modules), files], out)
"""


class Start(NamedTuple):
    """What a command imported and read."""

    ours: set[str]  # modules of mckpt
    standard: set[str]  # modules of the standard library
    packages: set[str]  # other packages
    mappings: list[str]  # files of mappings/, each as often as it was read


def start(*arguments: object) -> Start:
    """Runs a command in a process of its own. Modules that every process imports do not count."""
    modules, files = json.loads(
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            cwd=ROOT,
            env=dict(os.environ, PYTHONDONTWRITEBYTECODE=""),  # keeps parsed mapping files
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    before = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True
    ).stdout.split()
    new = set(modules) - set(before)
    tops = {name.partition(".")[0] for name in new}
    return Start(
        {name for name in new if name.partition(".")[0] == "mckpt"},
        {name for name in new if name.partition(".")[0] in sys.stdlib_module_names},
        # compiled modules bring those of Cython
        {name for name in tops - sys.stdlib_module_names if "cython" not in name} - {"mckpt"},
        [
            str(Path(file).relative_to(FOLDER).with_suffix(""))
            for file in files
            if file.endswith(".yaml") and Path(file).is_relative_to(FOLDER)
        ],
    )


def check(found: Start, ours: int, standard: int, packages: set[str]) -> None:
    assert len(found.ours) <= ours, sorted(found.ours)
    assert len(found.standard) <= standard, sorted(found.standard)
    assert found.packages <= packages


def test_help_imports_no_command_and_reads_no_mapping() -> None:
    found = start("--help")
    check(found, 8, 72, {"click"})
    assert not found.mappings


def test_inspect_imports_no_numpy_and_reads_no_mapping() -> None:
    found = start("inspect", MODEL)
    check(found, 82, 95, {"click", "msgspec", "typing_extensions"})
    assert not found.mappings


def test_plan_reads_the_mappings_of_one_family_and_one_dialect(tmp_path: Path) -> None:
    start("plan", MODEL, tmp_path / "out")  # keeps the mapping files as they are parsed
    found = start("plan", MODEL, tmp_path / "out")
    check(found, 105, 103, {"click", "msgspec", "typing_extensions", "numpy"})
    parts = ["common", "attention", "mlp", "args"]
    read = {"logical", "heads", "inert_keys", "lists", "hf/qwen3", "megatron/gpt"}
    pieces = ["plain", "decoder", "attention", "gated_mlp", "scaled_rope", "yarn", "rope", "mtp"]
    pieces += ["attention_bias", "qkv_bias", "qk_norm", "qwen_window", "layer_windows"]
    read |= {f"hf/parts/{name}" for name in pieces}
    # of these three only the text, to learn that none is the default dialect
    assert set(found.mappings) == read | {f"megatron/parts/{name}" for name in parts} | {
        "megatron/bert",
        "megatron/bridge",
        "megatron/bridge_gemma4",
    }
    assert len(found.mappings) <= 28


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each_help(name: str) -> None:
    assert cli.cli.commands[name].name == name
    assert cli.cli.commands[name].get_short_help_str(200) == COMMANDS[name].text


def test_main_removes_the_sparse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program does so only if their module is imported, which it knows by its name."""
    called = []
    monkeypatch.setattr(sparse_copy, "clean", lambda: called.append(True))
    monkeypatch.setattr(sys, "argv", ["mckpt", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert called
