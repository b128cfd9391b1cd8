"""`mckpt doctor`: prints what is installed and found on this machine.

It reads the metadata of packages and imports none of them, because torch alone takes seconds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

from mckpt import mapping
from mckpt.cli.options import command, json_option
from mckpt.cli.terminal import echo
from mckpt.errors import MckptError, MissingExtra, counted
from mckpt.version import __version__

# the build of the PyTorch project; that of PyPI brings several gigabytes of CUDA on Linux
CPU_TORCH = (
    "torch without CUDA, for a machine without a GPU: pip install torch --index-url"
    " https://download.pytorch.org/whl/cpu, before an extra that needs torch"
)
# What a user may want to do -> the extra that it needs.
PURPOSES = {"verify": "verify", "train": "verify", "hub": "hub", "stores": "stores", "ray": "ray"}


@command()
@click.option(
    "--for",
    "purposes",
    multiple=True,
    type=click.Choice(list(PURPOSES)),
    help="Exit with 9 if a package that this needs is missing or too old. May be repeated.",
)
@json_option
def doctor(purposes: tuple[str, ...], as_json: bool) -> None:
    """Print what is installed and found on this machine.

    That is versions, the packages of each extra, mapping files, and free space for temporary files.
    """
    folder, extras = tempfile.gettempdir(), _extras()
    counts, problems = dict.fromkeys(mapping.KINDS, 0), []
    for kind in mapping.KINDS:
        for name in mapping.names(kind):
            try:
                mapping.load(kind, name)
                counts[kind] += 1
            except MckptError as error:
                problems.append(f"{error}")
    report = {
        "mckpt": __version__,
        "path": str(Path(__file__).parent.parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "requires": extras.pop("", {}),
        "extras": extras,
        "mappings": counts,
        "mapping_problems": problems,
        "temporary": folder,
        "temporary_free_bytes": shutil.disk_usage(folder).free,
    }
    echo(*([json.dumps(report)] if as_json else _lines(report)))
    for extra in dict.fromkeys(PURPOSES[purpose] for purpose in purposes):
        packages = extras.get(extra, {"mckpt": {"fault": "mckpt is not installed as a package"}})
        if bad := ", ".join(one["fault"] for one in packages.values() if one["fault"]):
            raise MissingExtra(f"extra {extra}: {bad}: pip install 'mckpt[{extra}]'")


def _extras() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the packages of each extra of mckpt that users install: the installed version or
    None, the lowest version that mckpt needs, and the fault or None. The key "" has those that
    mckpt always requires. The result is empty if mckpt itself is not installed as a package.
    """
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for line in metadata.requires("mckpt") or [] if _version("mckpt") else []:
        name, lowest = re.findall(r"^([\w.-]+)(?:>=([\w.]+))?", line)[0]
        extra = "".join(re.findall(r"extra == ['\"](\w+)", line))
        version = _version(name)
        if version is None:
            fault = f"{name} is not installed"
        elif _numbers(version) < _numbers(lowest):
            fault = f"{name} {version} is older than {lowest}"
        else:
            fault = None
        if extra not in ("test", "dev"):
            package = {"version": version, "lowest": lowest, "fault": fault}
            out.setdefault(extra, {})[name] = package
    return out


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _version(name: str) -> str | None:
    """Returns the version of a package. That of Megatron-Core is the one that Python would import:
    the installed one, or a clone of Megatron-LM on PYTHONPATH.
    """
    if name == "megatron-core":
        spec = PathFinder.find_spec("megatron")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder, "core", "package_info.py")).exists():
                numbers = r"^(?:MAJOR|MINOR|PATCH) = (\d+)"
                return ".".join(re.findall(numbers, path.read_text(encoding="utf-8"), re.MULTILINE))
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _lines(report: Mapping[str, Any]) -> list[str]:
    out = [
        f"mckpt {report['mckpt']} in {report['path']}",
        f"Python {report['python']}, {report['executable']}",
        f"{report['platform']}, {counted(report['cores'], 'core')}",
    ]
    for extra, packages in {"": report["requires"], **report["extras"]}.items():
        line = ", ".join(
            one["fault"] or f"{name} {one['version']}" for name, one in packages.items()
        )
        bad = extra and any(one["fault"] for one in packages.values())
        cure = f": pip install 'mckpt[{extra}]'" if bad else ""
        out.append(f"{f'extra {extra}' if extra else 'requires'}: {line}{cure}")
    counts = ", ".join(f"{number} of {kind}" for kind, number in report["mappings"].items())
    free = f"{report['temporary_free_bytes']:,} bytes free for temporary files"
    return [
        *out,
        *([CPU_TORCH] if _version("torch") is None else []),
        f"mapping files: {counts}",
        *(f"mapping file not readable: {problem}" for problem in report["mapping_problems"]),
        f"{report['temporary']}: {free}",
    ]
