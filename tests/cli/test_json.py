"""docs/json.md describes every object that a command prints with --json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from mckpt.conversion.pushing import Pushed
from mckpt.storage import addresses, hub
from tests.helpers.commands import ROOT, good, mckpt

TYPES = {
    "text": (str,),
    "number": (int, float),
    "list": (list,),
    "object": (dict,),
    "null": (type(None),),
}
Table = dict[str, list[str]]  # key -> its types, and "absent" if the key may be missing


def documented(title: str) -> Table:
    """Returns the keys of the table below a heading of the page."""
    text = (ROOT / "docs" / "json.md").read_text()
    found = re.search(rf"^##+ {title}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|", found[1], re.MULTILINE)
    return {key: kinds.split(" or ") for key, kinds in rows}


def compare(title: str, said: dict[str, Any], *, more: bool = False) -> None:
    """Compares an object with the table of its heading. `more`: it has keys that are not there."""
    table = documented(title)
    assert more or said.keys() <= table.keys(), (title, said.keys() - table.keys())
    for key, kinds in table.items():
        if key not in said:
            assert "absent" in kinds, (title, key)
            continue
        allowed = tuple(t for kind in kinds if kind != "absent" for t in TYPES[kind])
        assert isinstance(said[key], allowed), (title, key, said[key])


def outcome(*args: Any, code: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs a command with --json; returns the object on stdout and those on stderr."""
    said = mckpt(*args, "--json")
    assert said.code == code, said.err
    out = json.loads(said.out) if said.out else {}
    return out, [json.loads(line) for line in said.err.splitlines()]


def test_conversions(src: Path, torch_dir: Path, tmp_path: Path) -> None:
    for state in ("written", "done already"):
        out, events = outcome("hf-to-megatron", src, tmp_path / "m", "--iteration", 7)
        assert out["state"] == state and out["path"] == str(tmp_path / "m" / "iter_0000007")
        compare("A conversion", out, more=True)
        compare("writing, checking, comparing", events[-1]) if events else None
    out, _ = outcome("megatron-to-hf", torch_dir, tmp_path / "h")
    compare("A conversion", out, more=True)
    assert out["state"] == "written" and all(f["bytes"] for f in out["files"].values())
    out, _ = outcome("repair", tmp_path / "m", tmp_path / "r")
    compare("A conversion", out)
    assert out["state"] == "portable already"
    out, _ = outcome("plan", src, tmp_path / "p")
    compare("A plan", out)
    many = ("megatron-to-hf", tmp_path / "m", str(tmp_path / "h{iteration}"), "--iterations", "all")
    out, events = outcome(*many)
    compare("Many iterations", out)
    compare("iteration", events[-1])
    assert [events[-1]] == [{"event": "iteration", **row} for row in out["iterations"]]


def test_readers(src: Path, torch_dir: Path, dist_dir: Path, tmp_path: Path) -> None:
    for path in (src, torch_dir, dist_dir):
        compare("Inspect", outcome("inspect", path)[0])
        out, events = outcome("check", path)
        compare("Check", out)
        compare("writing, checking, comparing", events[-1])
        assert out["state"] == "sound"
    out, events = outcome("diff", src, torch_dir)
    compare("Diff", out)
    compare("writing, checking, comparing", events[-1])
    out, events = outcome("verify", src, torch_dir, "--level", "bytes")
    compare("Verify", out)
    compare("phase", events[0])
    assert (out["state"], out["hf"], out["megatron"]) == ("pass", str(src), str(torch_dir))


def test_the_others(src: Path, tmp_path: Path, monkeypatch: Any) -> None:
    compare("Doctor", outcome("doctor")[0])
    commit = hub.Commit("0123", "https://hub/c", True, [])
    for made, state in ((commit, "uploaded"), (None, "planned")):
        pushed = Pushed(addresses.HubName("org/name", None), made, {"config.json": 7}, ["id_rsa"])
        monkeypatch.setattr("mckpt.api.push", lambda *args, pushed=pushed, **how: pushed)
        out, _ = outcome("push", src, "org/name")
        compare("Push", out)
        assert out["state"] == state and out["path"] == str(src)
    job = tmp_path / "job.yaml"
    for other, state in ((src, "done"), (tmp_path / "other", "failed")):
        if other != src:
            good("hf-to-megatron", src, other, "--dtype", "fp32")
        steps = [{"command": "diff", "a": str(src), "b": str(other)}]
        job.write_text(yaml.safe_dump({"steps": steps}))
        _, events = outcome("run", job, code=int(state == "failed"))
        compare("step", events[0])
        compare("job", events[-1])
        assert events[-1]["state"] == state and events[-1]["path"] == str(job)
    _, events = outcome("inspect", tmp_path / "none", code=3)
    compare("Errors", events[-1]["error"])
    _, events = outcome("inspect", src, "--tp", 2, code=2)
    compare("Errors", events[-1]["error"])
