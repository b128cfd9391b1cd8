"""`mckpt doctor`: prints what is installed and found on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import click

from mckpt.cli import machine
from mckpt.cli.echo import echo
from mckpt.cli.options import command, json_option
from mckpt.errors import MckptError, MissingExtra, UsageError, counted
from mckpt.storage import addresses, stores

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
    report = machine.report()
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
    out += [
        f"Megatron-Core: {report['megatron_core'] or 'not installed'}",
        f"Transformer Engine: {report['transformer_engine'] or 'not installed'}",
        f"CUDA of torch: {report['cuda'] or 'none'}",
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
