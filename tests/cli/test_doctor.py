"""`mckpt doctor` prints what is installed. For what is missing it prints how to install it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from mckpt import mapping
from mckpt.errors import MappingError
from tests.helpers.commands import good, mckpt

REQUIRED = [
    "click>=8.1",
    "not-there>=1; extra == 'ray'",
    "numpy>=999.1; extra == 'hub'",
    "numpy>=1.2; extra == 'stores'",
    "megatron-core>=0.16; extra == 'verify'",
    "pytest>=999; extra == 'test'",
]


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    said = mckpt("doctor", "--for", "stores", "--for", "ray")
    assert said.code == 9 and "extra stores: numpy " in said.out
    cure = "ray: not-there is not installed: pip install 'mckpt[ray]'"
    assert cure in said.err and f"extra {cure}" in said.out
    assert "hub: numpy" in mckpt("doctor", "--for", "hub").err
    assert "is older than 999.1: pip install 'mckpt[hub]'" in mckpt("doctor", "--for", "hub").err
    assert "test" not in good("doctor", "--json").json["extras"]
    good("doctor", "--for", "stores")


def test_an_mckpt_that_is_not_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    good("doctor")
    said = mckpt("doctor", "--for", "hub")
    assert said.code == 9 and "mckpt is not installed as a package" in said.err


def test_a_clone_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    assert "extra verify: megatron-core 0.99.1\n" in good("doctor").out


def test_a_mapping_file_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, name: str) -> None:
        if name == "llama":
            raise MappingError("llama.yaml: is wrong")

    monkeypatch.setattr(mapping, "load", load)
    assert "mapping file not readable: llama.yaml: is wrong" in good("doctor").out
