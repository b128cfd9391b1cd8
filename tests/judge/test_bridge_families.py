"""The dialect bridge: models that only Megatron-Bridge computes.

fixtures/bridge has the shapes and checksums of the tensors that Megatron-Bridge 0.6.2 wrote, and
its description of the model; tests/helpers/bridge_facts.py made it. tests/judge/test_bridge.py lets
Megatron-Bridge itself load what mckpt writes, and compares logits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import mckpt
from mckpt.errors import UsageError
from mckpt.formats.megatron.run_config import RUN_CONFIG
from tests.helpers import bridge_facts, made_models

CASES = made_models.BRIDGE_MODELS


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face directories of the cases."""
    directory = tmp_path_factory.mktemp("bridge") / "hf"
    made_models.make(CASES, directory)
    return directory


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_those_of_megatron_bridge(case: str, sources: Path, tmp_path: Path) -> None:
    root = tmp_path / "megatron"
    mckpt.plan(sources / case, root).run()
    rows = made_models.config(case)["vocab_size"]
    assert bridge_facts.described(root, rows) == bridge_facts.read(case)["tensors"]
    with pytest.raises(UsageError, match="is for Megatron-Bridge alone"):
        mckpt.verify(sources / case, root)
    as_bridge_saves(root, case)
    mckpt.plan(root, tmp_path / "hf", format="hf").run()  # without config.json
    assert not mckpt.diff(sources / case, tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == made_models.config(case)["architectures"]


def as_bridge_saves(root: Path, case: str) -> None:
    """Leaves of a save directory what Megatron-Bridge saves, with its own description."""
    iteration = next(root.rglob(".metadata")).parent
    (iteration / "mckpt.json").unlink()
    model = bridge_facts.read(case)["model"]
    (iteration / RUN_CONFIG).write_text(yaml.safe_dump({"model": model}))
    for path in sorted((root / "hf").rglob("*"), reverse=True):
        path.unlink()
    (root / "hf").rmdir()
