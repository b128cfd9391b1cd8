"""The order of the test files."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests/test_ranks.py first: it takes longest and mostly waits, so that the other process
    has the cores meanwhile.
    """
    items.sort(key=lambda item: item.path.name != "test_ranks.py")
