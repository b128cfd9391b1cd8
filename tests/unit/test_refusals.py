"""Every row of tests/refusals.py is one error with a stable exit code that names the place, and
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import refused
from tests.refusals import ROWS, Sources


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    sources = Sources(tmp_path_factory.mktemp("sources"))
    yield sources
    for path in sources.made.values():
        assert not list(path.rglob(".mckpt-*")), path


@pytest.mark.parametrize("name", ROWS)
def test_a_refusal(name: str, made: Sources, tmp_path: Path) -> None:
    row = ROWS[name]
    line, words = made.prepare(row, tmp_path)
    given = [word for word in words if word[0] != "!"]
    said = refused(row.code, *given, args=tuple(line), untouched=tmp_path)
    assert not [word for word in words if word[0] == "!" and word[1:] in said], said
