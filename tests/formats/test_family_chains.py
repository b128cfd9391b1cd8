"""The chains of tests/unit/test_families.py for the models that take the longest time."""

from __future__ import annotations

from pathlib import Path

from tests.unit import test_families
from tests.unit.test_families import Form, chains

sources = test_families.sources


@chains(heavy=True)
def test_a_model_comes_back_after_a_reshard_bit_for_bit(
    case: str, a: Form, b: Form, sources: dict[str, Path], tmp_path: Path
) -> None:
    test_families.test_a_model_comes_back_after_a_reshard_bit_for_bit(case, a, b, sources, tmp_path)
