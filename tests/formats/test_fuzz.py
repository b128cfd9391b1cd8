"""A small part of the fuzzer; `python -m tests.fuzz` is all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.parsers import PARSERS, make_corpus
from tests.fuzz.running import run

INPUTS = 1500  # of all parsers: 20 s of one core


@pytest.fixture(scope="module")
def corpus(work: Path) -> Path:
    (work / "corpus").mkdir()
    make_corpus(work / "corpus")
    return work / "corpus"


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_is_accepted_or_refused(name: str, corpus: Path) -> None:
    parser = PARSERS[name]
    ran = run(parser, 0, range(max(15, INPUTS * parser.share // 1000)), corpus)
    assert not ran.findings, "\n".join(f"{one.name}: {one.what}" for one in ran.findings)
