"""The installed megatron-core places layers as mckpt does, and mckpt knows all of its args."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from mckpt import mapping
from mckpt.mapping import MappingFile
from mckpt.mapping.inert import is_inert, known_args
from tests.helpers import placement
from tests.helpers.commands import run

pytestmark = pytest.mark.judge


def test_the_installed_megatron_core_gives_the_same_placement() -> None:
    """The installed megatron-core gives the answers of the rows. It accepts some sizes that
    validate_args has already refused.
    """
    rows = placement.rows()
    asked = [row for i, row in enumerate(rows) if i % 5 == 0 or "layout" in row[2]]
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.placement"]
    done = run(command, input=json.dumps([row[:3] for row in asked]))
    answers = json.loads(done.stdout.splitlines()[-1])
    apart = [
        (row, found)
        for row, found in zip(asked, answers, strict=True)
        if row[3] not in ("lost", None) and found != row[3]
    ]
    assert not apart


def test_every_arg_of_the_installed_megatron_is_known() -> None:
    """A new version's fields are carried by a dialect, refused by it away from one value
    (`expect`), or listed in mappings/inert_args.yaml with the reason why they change nothing.
    """
    found = importlib.util.find_spec("megatron.core")
    assert found and found.origin
    core = Path(found.origin).parent
    fields = fields_of(
        core / "model_parallel_config.py", core / "transformer/transformer_config.py"
    )
    assert len(fields) > 200
    for name in mapping.names("run_config"):
        assert unlisted(mapping.load("run_config", name), fields) == []
    trainer = core.parent / "training"  # megatron-core has it from 0.19 on
    text = (trainer / "arguments.py").read_text() if trainer.exists() else ""
    flags = re.findall(r"add_argument\(\s*['\"]--([\w-]+)", text)
    args = fields_of(*trainer.glob("config/*_config.py"))
    args |= {flag.replace("-", "_") for flag in flags if "no-" not in flag}  # these set another arg
    for name in ("gpt", "hybrid", "t5", "bert"):
        assert unlisted(mapping.load("megatron", name), args) == []


def fields_of(*paths: Path) -> set[str]:
    """Returns the fields of the dataclasses in some files of Python."""
    return {
        line.target.id
        for path in paths
        for made in ast.walk(ast.parse(path.read_text()))
        if isinstance(made, ast.ClassDef)
        for line in made.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def unlisted(file: MappingFile, names: set[str]) -> list[str]:
    return sorted(n for n in names - known_args(file) if not is_inert(n))
