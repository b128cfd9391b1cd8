"""Forbids torch to the tests of this folder: an import of it is an error that gives the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

NO_TORCH = str(Path(__file__).parent / "no_torch")
PATH = os.pathsep.join(filter(None, [NO_TORCH, os.environ.get("PYTHONPATH")]))


@contextmanager
def without_torch() -> Iterator[None]:
    """Puts a module that raises in the place of torch, in this process and in those that it starts.
    Tests of other folders, which the same process may run before and after, get their torch back.
    """
    real = sys.modules.pop("torch", None)
    sys.path.insert(0, NO_TORCH)
    try:
        with mock.patch.dict(os.environ, {"PYTHONPATH": PATH}):
            yield
    finally:
        sys.path.remove(NO_TORCH)
        if real:
            sys.modules["torch"] = real


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with without_torch():
        return (yield)


@pytest.fixture(scope="package", autouse=True)
def torch_is_forbidden() -> Iterator[None]:
    with without_torch():
        yield


@pytest.fixture(scope="package", autouse=True)
def nothing_is_synced() -> Iterator[None]:
    """Keeps the tests from waiting for the disk. tests/crash and tests/cli/test_interrupted.py
    prove that files are synced before they are published.
    """
    with mock.patch.multiple(os, fsync=lambda fd: None, fdatasync=lambda fd: None):
        yield
