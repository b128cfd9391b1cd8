"""One command under test: where its output goes, how it is run in a fork, and what may be there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mckpt import cli
from mckpt.conversion import store_journal
from mckpt.storage import stores
from tests.helpers.commands import ROOT, TRACKER, good
from tests.helpers.s3_server import Server
from tests.helpers.tiny import unpack

MODEL, ADAPTER = ROOT / "fixtures/tiny-qwen3", ROOT / "fixtures/tiny-qwen3-lora"
STAGING, MANIFEST = ".mckpt-", "mckpt.json"
BUCKET = "b"
PATIENCE_S = 120.0  # after which a run counts as hung

# Without DST in it, a command is one of the two. DST and the others are names of `Place`.
COMMANDS = {
    "hf-to-megatron": "hf-to-megatron HF DST --tp 2",
    "megatron-to-hf": "megatron-to-hf MEGATRON DST --max-shard-size 60KB",
    "reshard with optimizer": "reshard OPTIMIZER DST --target-tp 1",
    "repair": "repair BUCKETS DST",
    "to torch": "hf-to-megatron HF DST --format torch --tp 2",
    "--workers 2": "hf-to-megatron HF DST --workers 2",
    "--quantize fp8": "megatron-to-hf MEGATRON DST --quantize fp8",
    "adapter merge": "adapter merge HF ADAPTER DST --tp 2 --format torch_dist",
    "merge": "merge HF MEGATRON DST --weights 0.25,0.5 --tp 2",
    "merge ties": "merge HF MEGATRON HF DST --method ties --parameters density=0.5",
    "edit": "edit HF DST --recipe EDITS --tp 2",
    "graft": "edit OPTIMIZER DST --recipe GRAFT --target-tp 1",
    "passthrough": "merge --recipe LAYERS DST",
    "to S3": "hf-to-megatron HF s3://b/out --tp 2",
    "from S3": "megatron-to-hf s3://b/megatron DST",
    "--watch": "megatron-to-hf RUN DST/{iteration} --watch --until 20 --interval 0.05s",
    "a job file": "run JOB",
}
FILES = {
    "JOB": """steps:
  - {command: hf-to-megatron, src: HF, dst: DST/megatron, tp: 2}
  - {command: megatron-to-hf, src: MEGATRON, dst: DST/hf}
""",
    "EDITS": "[layers: {silent_after: 1}, vocab: {size: 300, init: normal}, kv_heads: {mean: 2}]",
    "GRAFT": "- graft: {from: OPTIMIZER, take: layers.0}",
    "LAYERS": """merge_method: passthrough
slices:
  - sources: [{model: HF, layer_range: [0, 3]}]
  - sources: [{model: MEGATRON, layer_range: [1, 4]}]
""",
}
Tree = dict[str, bytes]  # of the files below a directory, by relative name


class Ended(NamedTuple):
    """How a run ended; `code` is negative if a signal ended it."""

    code: int
    text: str  # stdout and stderr
    seconds: float


@dataclass
class Place:
    """The folder of one process of the program: sources, and the output of one run at a time."""

    folder: Path
    server: Server | None = None
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, with_store: bool) -> Place:
        """Makes the sources."""
        made = cls(folder)
        sources = made.sources
        sources.mkdir(parents=True)
        shutil.copytree(MODEL, sources / "hf")
        good("hf-to-megatron", sources / "hf", sources / "megatron", "--tp", 2)
        adapter = ("adapter", "to-megatron", ADAPTER, sources / "hf", sources / "adapter")
        good(*adapter, "--layout", "block")
        for number in (10, 20):
            good("hf-to-megatron", sources / "hf", sources / "run", "--iteration", number)
        forms = {
            "optimizer": "fully_sharded_model_space",
            "buckets": "dp_zero_gather_scatter",
        }
        for name, form in forms.items():
            unpack(f"optimizer/{form}", sources / name)
        for path in sources.iterdir():
            made.names[path.name.upper()] = str(path)
        made.names |= {"DST": str(made.out)}
        for name, text in FILES.items():
            path = sources / f"{name}.yaml"
            path.write_text(made.filled(text))
            made.names[name] = str(path)
        if with_store:
            made.server = Server(folder / "store")
            for name in ("hf", "megatron"):
                made.server.put(BUCKET, sources / name, f"{name}/")
        return made

    @property
    def sources(self) -> Path:
        return self.folder / "sources"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def filled(self, text: str) -> str:
        """Returns a text with the paths in the place of their names."""
        for name in sorted(self.names, key=len, reverse=True):
            text = text.replace(name, self.names[name])
        return text

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.server:
            for name, path in self.server.keys(BUCKET).items():
                if name.startswith("out/"):
                    path.unlink(missing_ok=True)

    def tree(self, in_store: bool) -> Tree:
        """Returns all files of the output, staging directories too."""
        if in_store:
            assert self.server is not None
            found = self.server.keys(BUCKET).items()
            return {n[4:]: p.read_bytes() for n, p in found if n.startswith("out/")}
        files = (p for p in self.out.rglob("*") if p.is_file())
        return {p.relative_to(self.out).as_posix(): p.read_bytes() for p in files}

    def start(self, words: list[str], before: Callable[[], None] = lambda: None) -> int:
        """Runs mckpt in a fork of this process, which has imported it; returns the fork's number.

        before: called in the fork.
        """
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code = 99
        try:
            os.setsid()
            said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            if self.server:
                os.environ |= self.server.environment()
                stores.WAITS, store_journal.LIVE_S = (0, 0), 1.0  # type: ignore[assignment]
            sys.argv = ["mckpt", *words]
            before()
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def end(self, pid: int, kill_after: float = PATIENCE_S) -> Ended:
        """Waits for a fork, which is killed after so many seconds."""
        begun = time.monotonic()
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            passed = time.monotonic() - begun
            if found:
                text = (self.folder / "said").read_text(errors="replace")
                return Ended(os.waitstatus_to_exitcode(status), text, passed)
            if passed >= kill_after:
                os.kill(pid, signal.SIGKILL)
                kill_after = PATIENCE_S
            time.sleep(min(0.002, max(0.0, kill_after - passed)))

    def run(self, words: list[str], before: Callable[[], None] = lambda: None) -> Ended:
        return self.end(self.start(words, before))


class Trial:
    """A command, the output of its undisturbed run, and how long that takes."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self.words = place.filled(COMMANDS[name]).split()
        self.in_store = name == "to S3"
        place.clear()
        ended = place.run(self.words)
        assert ended.code == 0, f"{name}: {ended.text}"
        self.whole = place.tree(self.in_store)
        assert self.units() and not self.left(self.whole), sorted(self.whole)
        place.clear()
        self.seconds = place.run(self.words).seconds
        assert place.tree(self.in_store) == self.whole, f"{name}: two runs differ"
        place.clear()

    def units(self) -> Iterator[str]:
        """Returns the directories of the output that are checkpoints."""
        return (str(PurePosixPath(n).parent) for n in self.whole if n.endswith(MANIFEST))

    @staticmethod
    def left(tree: Tree) -> list[str]:
        """Returns the files in staging directories."""
        return [name for name in tree if STAGING in name]

    def wrong(self, tree: Tree) -> str | None:
        """Returns what a loader would accept in this output and that is not whole."""
        seen = {name: data for name, data in tree.items() if STAGING not in name}
        for unit in self.units():
            start = "" if unit == "." else f"{unit}/"
            below = [name for name in self.whole if name.startswith(start)]
            save = PurePosixPath(unit).parent
            tracker = str(save / TRACKER)
            if f"{start}config.json" in self.whole:  # transformers
                there = f"{start}config.json" in seen
            else:
                below += [n for n in self.whole if PurePosixPath(n).is_relative_to(save / "hf")]
                # Megatron takes a directory that the tracker names, or any that is there
                marks = ["metadata.json"] if self.in_store else [n[len(start) :] for n in below]
                there = tracker in seen or any(start + name in seen for name in marks)
            if not there:
                continue
            for name in below:
                if seen.get(name) != self.whole[name]:
                    what = "is missing" if name not in seen else "has other bytes"
                    return f"{unit} can be loaded, and {name} {what}"
            if tracker in seen and seen[tracker] != self.whole[tracker]:
                return f"{tracker}: {seen[tracker]!r}"
        return None

    def complete(self, tree: Tree) -> bool:
        return {n: d for n, d in tree.items() if STAGING not in n} == self.whole

    def inspected(self, tree: Tree) -> str | None:
        """Returns in what `mckpt inspect` lies about this output, which is on the disk."""
        for unit in self.units():
            root = "s3://b/out" if self.in_store else str(self.place.out)
            megatron = str(PurePosixPath(unit, "config.json")) not in self.whole
            where = PurePosixPath(unit).parent if megatron else PurePosixPath(unit)
            ended = self.place.run(["inspect", f"{root}/{where}" if str(where) != "." else root])
            begins = "" if unit == "." else f"{unit}/"
            last = "metadata.json" if megatron else "config.json"
            there = f"{begins}{last}" in tree
            if megatron and not self.in_store:
                there = any(n.startswith(begins) and STAGING not in n for n in tree)
            if ended.code not in (0, 3) or "Traceback" in ended.text:
                return f"inspect {unit} ended with {ended.code}: {ended.text[-300:]}"
            unfinished = "unfinished: A run of mckpt was interrupted here" in ended.text
            if (ended.code == 0) != there and not unfinished:
                return f"inspect {unit} ended with {ended.code}: {ended.text[-300:]}"
            if self.complete(tree) and not self.left(tree) and "mckpt was" in ended.text:
                return f"inspect {unit} says: {ended.text[-300:]}"
        return None

    def rerun(self) -> str | None:
        """Runs the command again; returns what is wrong with that."""
        ended = self.place.run(self.words)
        tree = self.place.tree(self.in_store)
        if ended.code != 0:
            return f"the same command ends with {ended.code}: {ended.text[-400:]}"
        if left := self.left(tree):
            return f"the same command leaves {left[0]}"
        if not self.complete(tree):
            names = [n for n in {*tree, *self.whole} if tree.get(n) != self.whole.get(n)]
            return f"the same command ends with other bytes in {sorted(names)[:3]}"
        empty = list(self.place.out.rglob(f"{STAGING}*")) if not self.in_store else []
        if empty:
            return f"the same command leaves {empty[0]}"
        return self.inspected(tree)
