"""Counts the modules that a small conversion enters, and its calls from lower to higher layers.

    python -m benchmarks.calls [--climbs] [--modules]

It converts fixtures/tiny-qwen3 to torch_dist in this process, with one thread. A module is entered
if one of its functions runs; importing it does not count. The layers are the rows of the table in
docs/architecture.md, from the top down, and the modules without a row are below them. A climb is a
function of a lower layer that calls one of a higher layer, mostly through a callback; each pair of
functions counts once. Code of other packages between the two does not count.

Run it with the paths of another checkout to compare two commits:

    PYTHONPATH=OTHER python benchmarks/calls.py
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mckpt

PACKAGE = Path(mckpt.__file__).parent
ROOT = PACKAGE.parent


def layers() -> dict[str, int]:
    """Returns the number of each layer by its package; a higher layer has a larger number."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `mckpt/(\w+)[/.]", page, re.MULTILINE)
    return {name: number for number, name in enumerate(reversed(rows), 1)}


class Trace:
    """The functions that ran, as modules and names, and the climbs between them."""

    def __init__(self) -> None:
        self.layers = layers()
        self.modules: set[str] = set()
        self.climbs: Counter[tuple[str, str]] = Counter()
        self._names: dict[CodeType, str] = {}

    def _name(self, code: CodeType) -> str:
        """Returns a function as module:name; "" if it is not of mckpt, or the body of a module."""
        if code not in self._names:
            path, name = Path(code.co_filename), getattr(code, "co_qualname", code.co_name)
            ours = path.is_relative_to(PACKAGE) and code.co_name != "<module>"
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if ours else ""
            self._names[code] = f"{module}:{name}" if ours else ""
        return self._names[code]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not (name := self._name(frame.f_code)):
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name == "<module>":
            return  # a class or a constant of a module that is being imported
        while caller is not None and not (called_by := self._name(caller.f_code)):
            if caller.f_code.co_name == "<module>" and "mckpt" in caller.f_code.co_filename:
                return
            caller = caller.f_back
        self.modules.add(name.partition(":")[0])
        if caller is not None and self._layer(called_by) < self._layer(name):
            self.climbs[called_by, name] += 1

    def _layer(self, name: str) -> int:
        return self.layers.get(re.split(r"[.:]", name)[0], 0)


def main(arguments: list[str]) -> None:
    from mckpt.cli import main as command

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            "mckpt",
            "hf-to-megatron",
            str(ROOT / "fixtures" / "tiny-qwen3"),
            f"{folder}/out",
        ]
        sys.argv += ["--format", "torch_dist", "--threads", "1"]
        trace = Trace()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            threading.setprofile(trace)
            sys.setprofile(trace)
            try:
                command()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
        assert list(Path(folder).glob("out/*/mckpt.json")), "the conversion failed"
    if "--modules" in arguments:
        print(*sorted(trace.modules), sep="\n")
    if "--climbs" in arguments:
        print(*(f"{num:,} {a} -> {b}" for (a, b), num in sorted(trace.climbs.items())), sep="\n")
    print(f"{len(trace.modules)} modules entered, {len(trace.climbs)} climbs")


if __name__ == "__main__":
    main(sys.argv[1:])
