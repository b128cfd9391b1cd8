"""`mckpt doctor`: prints what is installed and found on this machine.

It reads the metadata of packages and imports none of them, because torch alone takes seconds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from mckpt import mapping
from mckpt.cli.options import command, json_option
from mckpt.cli.terminal import echo
from mckpt.errors import MckptError, MissingExtra, UsageError, counted
from mckpt.storage import addresses, stores
from mckpt.version import __version__

# Packages that no extra requires. Transformer Engine has a package for each version of CUDA.
OTHERS = ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13")
# the build of the PyTorch project; that of PyPI brings several gigabytes of CUDA on Linux
CPU_TORCH = (
    "torch without CUDA, for a machine without a GPU: pip install torch --index-url"
    " https://download.pytorch.org/whl/cpu, before an extra that needs torch"
)
SMI_LIMIT_S = 5  # nvidia-smi takes a second, or hangs where a GPU has failed


class Place(NamedTuple):
    """The variables and files that have the credentials and the address of a store."""

    variables: tuple[str, ...]
    files: tuple[str, ...]
    endpoints: tuple[str, ...]


PLACES = {
    "s3": Place(
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_PROFILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_SKIP_SIGNATURE",
        ),
        ("~/.aws/credentials", "~/.aws/config"),
        ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    ),
    "gs": Place(
        ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"),
        ("~/.config/gcloud/application_default_credentials.json",),
        (),
    ),
    "az": Place(
        ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID"),
        (),
        ("AZURE_STORAGE_ENDPOINT",),
    ),
    "hf": Place(("HF_TOKEN",), ("$HF_HOME/token", "~/.cache/huggingface/token"), ("HF_ENDPOINT",)),
}


def machine_report() -> dict[str, Any]:
    """Returns the content of `mckpt doctor`, without using the network."""
    extras = _extras()
    folder = tempfile.gettempdir()
    return {
        "mckpt": __version__,
        "path": str(Path(__file__).parent.parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "requires": extras.pop("", {}),
        "extras": extras,
        "megatron_core": _megatron_core(),
        "transformer_engine": next(filter(None, map(_version, OTHERS)), None),
        "cuda": _cuda(),
        **_gpus(),
        "ray_address": os.environ.get("RAY_ADDRESS"),
        "stores": {scheme: _credentials(place) for scheme, place in PLACES.items()},
        **_mappings(),
        "temporary": folder,
        "temporary_free_bytes": shutil.disk_usage(folder).free,
    }


def _extras() -> dict[str, dict[str, Any]]:
    """Returns the packages of each extra of mckpt that users install: their installed version, None
    without one, and the lowest version that mckpt needs. The key "" has those that mckpt always
    requires. The result is empty if mckpt itself is not installed as a package.
    """
    out: dict[str, dict[str, Any]] = {}
    try:
        required = metadata.requires("mckpt") or []
    except metadata.PackageNotFoundError:
        return out
    for line in required:
        name, lowest = re.findall(r"^([\w.-]+)(?:>=([\w.]+))?", line)[0]
        extra = "".join(re.findall(r"extra == ['\"](\w+)", line))
        if extra not in ("test", "dev"):
            version = _megatron_core() if name == "megatron-core" else _version(name)
            out.setdefault(extra, {})[name] = {"version": version, "lowest": lowest}
    return out


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _megatron_core() -> str | None:
    """Returns the version of Megatron-Core that Python would import: of a package, or of a clone of
    Megatron-LM on PYTHONPATH.
    """
    text = _source("megatron", "core", "package_info.py")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)) or None


def _cuda() -> str | None:
    """Returns the version of CUDA that torch was built for."""
    version = re.search(r"^cuda\b.*= '(.+)'", _source("torch", "version.py"), re.MULTILINE)
    return version and version[1]


def _source(package: str, *file: str) -> str:
    """Returns the text of a file of the package that Python would import; "" if it has none."""
    spec = PathFinder.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    paths = (Path(folder, *file) for folder in folders)
    return next((path.read_text(encoding="utf-8") for path in paths if path.exists()), "")


def _gpus() -> dict[str, Any]:
    """Returns the GPUs that nvidia-smi lists, and why there are none if it lists none."""
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=SMI_LIMIT_S
        )
    except FileNotFoundError:
        return {"gpus": [], "gpus_note": "none found: nvidia-smi is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"gpus": [], "gpus_note": f"unknown: nvidia-smi failed: {error}"}
    if done.returncode:
        problem = (done.stdout + done.stderr).strip().partition("\n")[0]
        return {"gpus": [], "gpus_note": f"unknown: nvidia-smi: {problem}"}
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    if strange := next((row for row in rows if len(row) != 3), None):
        return {"gpus": [], "gpus_note": f"unknown: nvidia-smi: {', '.join(strange)}"}
    gpus = [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows]
    return {"gpus": gpus, "gpus_note": None if gpus else "none found by nvidia-smi"}


def _credentials(place: Place) -> dict[str, str | None]:
    """Returns the name of the first variable or file that may hold credentials, and the address of
    the store if a variable names one. A machine of a cloud may have credentials without either.
    """
    names = [name for name in place.variables if os.environ.get(name)]
    files = (os.path.expanduser(os.path.expandvars(name)) for name in place.files)
    names += filter(os.path.exists, files)
    endpoint = next(filter(None, map(os.environ.get, place.endpoints)), None)
    shown = None
    if endpoint:
        try:
            url = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
            shown = f"{url.scheme}://{url.netloc.rpartition('@')[2]}".removeprefix("://")
        except ValueError:
            shown = "not a URL"
    return {"credentials": next(iter(names), None), "endpoint": shown}


def _mappings() -> dict[str, Any]:
    """Returns the number of mapping files of each kind that load, and the errors of the others."""
    counts, problems = dict.fromkeys(mapping.KINDS, 0), []
    for kind in mapping.KINDS:
        for name in mapping.names(kind):
            try:
                mapping.load(kind, name)
                counts[kind] += 1
            except MckptError as error:
                problems.append(f"{error}")
    return {"mappings": counts, "mapping_problems": problems}


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
@click.option(
    "--store",
    "urls",
    multiple=True,
    metavar="URL",
    help="List the objects below this URL; an error if that fails. May be repeated.",
)
@json_option
def doctor(purposes: tuple[str, ...], urls: tuple[str, ...], as_json: bool) -> None:
    """Print what is installed and found on this machine.

    That is versions, the packages of each extra, GPUs, Ray, credentials of object stores (their
    names, never their values), mapping files, and free space for temporary files. Only --store uses
    the network.
    """
    places = {url: addresses.url_of(url) for url in urls}
    for url, place in places.items():
        if place is None:
            raise UsageError(f"--store {url}: is not a URL such as s3://BUCKET/PATH")
    report = machine_report()
    report["reached"], failures = {}, []
    for url, place in places.items():
        try:
            assert place is not None
            report["reached"][url] = {"objects": len(stores.open_store(place).list())}
        except MckptError as error:
            report["reached"][url] = {"error": f"{error}"}
            failures.append(error)
    if as_json:
        echo(json.dumps(report))
    else:
        echo(*lines(report))
    for extra in dict.fromkeys(PURPOSES[purpose] for purpose in purposes):
        if bad := faults(report["extras"].get(extra)):
            raise MissingExtra(f"extra {extra}: {', '.join(bad)}: pip install 'mckpt[{extra}]'")
    if failures:
        raise failures[0]


def lines(report: Mapping[str, Any]) -> list[str]:
    """Returns the report as lines for people."""
    out = [
        f"mckpt {report['mckpt']} in {report['path']}",
        f"Python {report['python']}, {report['executable']}",
        f"{report['platform']}, {counted(report['cores'], 'core')}",
    ]
    for extra, packages in {"": report["requires"], **report["extras"]}.items():
        there = [f"{name} {one['version']}" for name, one in packages.items() if one["version"]]
        bad = faults(packages)
        cure = f": pip install 'mckpt[{extra}]'" if bad and extra else ""
        title = f"extra {extra}" if extra else "requires"
        out.append(f"{title}: {', '.join(there + bad)}{cure}")
    gpus = [f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in report["gpus"]]
    has_torch = any(one.get("torch", {}).get("version") for one in report["extras"].values())
    out += [
        f"Megatron-Core: {report['megatron_core'] or 'not installed'}",
        f"Transformer Engine: {report['transformer_engine'] or 'not installed'}",
        f"CUDA of torch: {report['cuda'] or 'none'}",
        *([] if gpus or has_torch else [CPU_TORCH]),
        *(f"GPU {number}: {gpu}" for number, gpu in enumerate(gpus)),
        *([] if gpus else [f"GPUs: {report['gpus_note']}"]),
        f"RAY_ADDRESS: {report['ray_address'] or 'not set'}",
    ]
    for scheme, place in report["stores"].items():
        endpoint = f"; endpoint {place['endpoint']}" if place["endpoint"] else ""
        where = place["credentials"]
        credentials = f"in {where}" if where else "not found"
        out.append(f"{scheme}://: credentials {credentials}{endpoint}")
    counts = ", ".join(f"{number} of {kind}" for kind, number in report["mappings"].items())
    out.append(f"mapping files: {counts}")
    out += [f"mapping file not readable: {problem}" for problem in report["mapping_problems"]]
    out.append(
        f"{report['temporary']}: {report['temporary_free_bytes']:,} bytes free for temporary files"
    )
    for url, reached in report["reached"].items():
        objects = counted(reached.get("objects", 0), "object")
        out.append(reached.get("error") or f"{url}: reached, {objects}")
    return out


def faults(packages: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    """Returns what is wrong with the packages of an extra.

    packages: None if mckpt is not installed as a package, so that they are unknown.
    """
    if packages is None:
        return ["mckpt is not installed as a package, so the packages of the extra are not known"]
    out = []
    for name, package in packages.items():
        if package["version"] is None:
            out.append(f"{name} is not installed")
        elif _numbers(package["version"]) < _numbers(package["lowest"]):
            out.append(f"{name} {package['version']} is older than {package['lowest']}")
    return out


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
