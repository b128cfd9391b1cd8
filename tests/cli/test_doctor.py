"""`mckpt doctor` prints what is there, names what is missing, and prints no secret."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from mckpt import mapping
from mckpt.cli import doctor
from mckpt.errors import MappingError
from tests.helpers.commands import good, mckpt

REQUIRED = [
    "click>=8.1",
    "not-there>=1; extra == 'ray'",
    "numpy>=999.1; extra == 'hub'",
    "numpy>=1.2; extra == 'stores'",
    "pytest>=999; extra == 'test'",
]


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes `script` the nvidia-smi on PATH."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


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

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    good("doctor")
    said = mckpt("doctor", "--for", "hub")
    assert said.code == 9 and "mckpt is not installed as a package" in said.err


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'NVIDIA H100, 81559 MiB, 550.1'")
    assert "GPU 0: NVIDIA H100, 81559 MiB, driver 550.1" in good("doctor").out
    program(tmp_path, monkeypatch, "echo no driver; exit 9")
    assert "GPUs: unknown: nvidia-smi: no driver" in good("doctor").out
    program(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(doctor, "SMI_LIMIT_S", 0.2)
    assert "timed out" in good("doctor", "--json").json["gpus_note"]


def test_a_clone_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "Megatron-Core: 0.99.1" in good("doctor").out


def test_credentials_are_named_and_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "secret-key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret-word@host:9000/?token=secret")
    for more in ((), ("--json",)):
        said = good("doctor", *more)
        assert "AWS_ACCESS_KEY_ID" in said.out and "http://host:9000" in said.out
        assert "secret" not in said.out


def test_a_mapping_file_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, name: str) -> None:
        if name == "llama":
            raise MappingError("llama.yaml: is wrong")

    monkeypatch.setattr(mapping, "load", load)
    assert "mapping file not readable: llama.yaml: is wrong" in good("doctor").out


def test_a_store_that_is_no_url() -> None:
    said = mckpt("doctor", "--store", "some/folder")
    assert (said.code, said.out) == (2, "") and "some/folder: is not a URL" in said.err
