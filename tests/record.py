"""Records what mckpt does, so that a change of its code can prove that it changes nothing.

    python -m tests.record make FILE.json [WORD ...]     only the runs whose names contain a WORD
    python -m tests.record compare A.json B.json         exit 1, and a line for each difference

A record contains, for each run of a command, its exit code and, where it succeeded, the SHA-256 of
every file that it wrote; the whole of `plan --json`; and the text of each refusal. Everything runs
in a process for each core of this machine: all families of fixtures/ in both directions, formats,
sizes, optimizer state, adapters, an S3 server on loopback, a model on gloo, the rows of
tests/refusals.py, damaged configs and wrong options. Of mckpt.json, the digests of mapping files
and the state of the source are left out.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from safetensors.numpy import save_file

from mckpt import api, errors, mapping
from mckpt.cli import cli
from mckpt.formats.base import Names, packed
from mckpt.geometry.parallel import Parallel
from tests.helpers import lora, tiny
from tests.helpers.commands import ROOT, mckpt
from tests.helpers.tiny import FIXTURES
from tests.refusals import ROWS, Sources

Runs = dict[str, dict[str, Any]]
PROCESSES = len(os.sched_getaffinity(0))
VARYING = ("digest", "logical", "plan", "read")  # entries of JSON files that differ in each run
MAX_RETRIES = 4  # of a conversion, with what its refusals ask for
CONFIGS = {
    f"{path.parent.name}/{path.stem}": path
    for path in sorted((*FIXTURES.glob("families/**/*.json"), *FIXTURES.glob("tiny/*.json")))
    if path.parent.name != "unknown"
}
# the models that are converted at several sizes, and what a conversion may be told
SIZED = ("tiny/qwen3", "tiny/deepseek-v3", "tiny/mixtral", "tiny/llama-tied", "families/glm4_moe")
TARGETS: dict[str, tuple[Any, ...]] = {
    "torch tp2 pp2": ("--format", "torch", "--tp", 2, "--pp", 2),
    "torch tp2 pp2 vpp2": ("--format", "torch", "--tp", 2, "--pp", 2, "--vpp", 2),
    "torch tp2 ep2 etp1": ("--format", "torch", "--tp", 2, "--ep", 2, "--etp", 1),
    "torch local": ("--format", "torch", "--transformer-impl", "local", "--iteration", 7),
    "dist tp2": ("--tp", 2, "--megatron-version", "0.16"),
    "dist layers": ("--layer-keys", "per_layer", "--run-config"),
    "dist sequential": ("--sequential-experts", "--common-state", "object"),
    "dist fp32": ("--dtype", "fp32", "--checksum", "sha256", "--make-vocab-size-divisible-by", 1),
    "dist hybrid": ("--dialect", "hybrid"),
}
EXPORTS: dict[str, tuple[Any, ...]] = {
    "shards": ("--max-shard-size", "100KB"),
    "padding": ("--keep-padding",),
    "fp8": ("--quantize", "fp8"),
    "nvfp4": ("--quantize", "nvfp4", "--dtype", "bf16"),
    "no mtp": ("--no-mtp",),
}
APART = ("norm", "embed", "head", "mlp.gate.", "eh_proj", "layers.4.")  # without adapters
OLD = sorted(
    str(path.relative_to(FIXTURES)).removesuffix(".tar.xz")
    for folder in ("optimizer", "fsdp", "muon", "zarr")
    for path in FIXTURES.glob(f"{folder}/*.tar.xz")
)


class Book:
    """The runs of one item, and the directory of their files."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, Runs()

    def told(self, text: str) -> str:
        """Returns a text without the names of temporary directories, and without times."""
        text = text.replace(str(self.root), "<tmp>").replace(str(ROOT), "<repo>")
        return re.sub(r"<tmp>/(\.mckpt-|s3-)\S*", "<tmp>/<staging>", text)

    def run(self, name: str, *args: Any, out: Path | None = None) -> bool:
        """Runs mckpt and notes its exit code and the files below `out`, or its errors. Returns
        whether it succeeded.
        """
        said = mckpt(*args)
        held: dict[str, Any] = {"code": said.code}
        if said.code or out is None:
            held |= {"err": self.told(said.err), "out": self.told(said.out)}
        if not said.code and out is not None:
            held["files"] = digests(out, self.told)
        self.runs[name] = held
        return not said.code

    def plan(self, name: str, *args: Any) -> None:
        said = mckpt("plan", *args, "--json")
        held = plain(json.loads(self.told(said.out))) if not said.code else self.told(said.out)
        self.runs[f"{name}: plan"] = {"code": said.code, "plan": held, "err": self.told(said.err)}

    def convert(self, name: str, command: str, src: Path, out: Path, *given: Any) -> bool:
        """Converts, again with each --allow-inexact that a refusal names, and notes every run."""
        for attempt in range(MAX_RETRIES):
            if self.run(name + " again" * attempt, command, src, out, *given, out=out):
                asked = [str(a) for a in given]
                self.plan(name, src, f"{out}-plan", *(a for a in renamed_options(command, asked)))
                return True
            found = re.findall(
                r"--allow-inexact ([\w.]+)", self.runs[name + " again" * attempt]["err"]
            )
            more = [word for word in dict.fromkeys(found) if word not in given]
            if not more:
                return False
            given = (*given, *(x for word in more for x in ("--allow-inexact", word)))
        return False


def renamed_options(command: str, given: list[str]) -> list[str]:
    """Returns the options of a conversion as `plan` has them."""
    kind = {"hf-to-megatron": "torch_dist", "megatron-to-hf": "hf"}.get(command)
    given = ["--to" if a in ("--format", "--target-format") else a for a in given]
    return [*given, *(("--to", kind) if kind and "--to" not in given else ())]


def plain(held: Any) -> Any:
    """Returns a part of mckpt.json or of a plan without the digests of mapping files and times."""
    if isinstance(held, dict):
        return {k: plain(v) for k, v in held.items() if k not in VARYING}
    return [plain(v) for v in held] if isinstance(held, list) else held


def digest(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def digests(path: Path, told: Callable[[str], str] = str) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory."""
    found = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        found[str(file.relative_to(path))] = (
            digest(plain(json.loads(told(data.decode()))))
            if file.name in ("mckpt.json", "adapter_config.json")
            else hashlib.sha256(data).hexdigest()
        )
    return found


# ------------------------------------------------------------------------------------------ sources


def model(name: str, out: Path) -> Path:
    """Writes a Hugging Face directory of random values for a config of CONFIGS. Its tensors are in
    the order of their names.
    """
    if name.startswith("tiny/"):
        return tiny.tiny_random(name.removeprefix("tiny/"), out)
    config = json.loads(CONFIGS[name].read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    names = Names(family, family.read(config), {}, Parallel())
    tensors = {}
    for b in names.bound:
        whole = packed(b.rule, names.scope()).shape
        shape = (*b.axes(names.scope()), *(whole[::-1] if b.rule.transposed else whole))
        for key in b.keys() if b.rule.written and not b.rule.alias else ():
            drawn = np.random.RandomState(zlib.crc32(key.encode()))
            tensors[key] = drawn.standard_normal(shape).astype(tiny.DTYPES["bfloat16"][1])
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for _ in range(MAX_RETRIES):  # towers of images, of which mckpt knows the names only
        save_file(dict(sorted(tensors.items())), out / "model.safetensors")
        said = mckpt("plan", out, out.parent / "unused").err
        lost = re.findall(r"  - (\S+)\*: no tensor has such a name", said)
        if not lost:
            break
        tensors |= {f"{start}weight": np.ones((3, 2), np.float32) for start in lost}
    return out


# -------------------------------------------------------------------------------------------- items


def family(book: Book, name: str) -> None:
    src = model(name, book.root / "hf")
    book.runs["source"] = {"files": digests(src)}
    tail: tuple[Any, ...] = ("--format", "torch", "--tp", 2)
    for form, given in {"dist": (), "torch": tail}.items():
        if book.convert(form, "hf-to-megatron", src, book.root / form, *given):
            book.convert(f"{form} to hf", "megatron-to-hf", book.root / form, book.root / "back")
            shutil.rmtree(book.root / "back", ignore_errors=True)
            shutil.rmtree(book.root / form / "hf")
            for manifest in book.root.joinpath(form).rglob("mckpt.json"):
                manifest.unlink()
            book.convert(
                f"{form} from args", "megatron-to-hf", book.root / form, book.root / "args"
            )
            shutil.rmtree(book.root / "args", ignore_errors=True)


def config(book: Book, name: str) -> None:
    """Changes each key of a config.json, in turn."""
    src = model(name, book.root / "hf")
    whole = json.loads((src / "config.json").read_text())
    for path, value in leaves(whole):
        changed = copy.deepcopy(whole)
        at = changed
        for key in path[:-1]:
            at = at[key]
        new = other(value)
        at.pop(path[-1]) if new is None else at.update({path[-1]: new})
        (src / "config.json").write_text(json.dumps(changed))
        said = mckpt("plan", src, book.root / "out", "--json")
        run = {"code": said.code, "out": book.told(said.out)}
        if not said.code:
            run["out"] = digest(plain(json.loads(run["out"])))
        with contextlib.suppress(errors.MckptError):
            run["dims"] = digest(dict(api.open(src).dims))
        book.runs[".".join(path)] = run


def leaves(
    held: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in sorted(held.items()):
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def other(value: Any) -> Any:
    """Returns another value of the same kind, or None: the key is left out."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2
    return "unheard-of" if isinstance(value, str) else None


def sizes(book: Book, name: str) -> None:
    src = model(name, book.root / "hf")
    for form, given in TARGETS.items():
        book.convert(form, "hf-to-megatron", src, book.root / form, *given)
    whole = book.root / "torch tp2 pp2"
    for form, given in (TARGETS | {"same": (), "dist": ("--format", "torch_dist")}).items():
        options = tuple({"--format": "--target-format"}.get(a, a) for a in given)
        book.convert(f"reshard {form}", "reshard", whole, book.root / f"to {form}", *options)
    for form, given in EXPORTS.items():
        book.convert(form, "megatron-to-hf", whole, book.root / form, *given)


def old(book: Book, name: str) -> None:
    """Reads, repairs and reshards checkpoints of other Megatrons, with their optimizers."""
    src = FIXTURES / name
    if not src.exists():
        src = tiny.unpack(name, book.root / "src")
    below = re.findall(r"(/\S+?)(?= or |, |$)", mckpt("inspect", src).err.partition("; give")[2])
    for path in map(Path, below or [src]):
        at, out = path.name, book.root / "out" / path.name
        book.run(f"{at} inspect", "inspect", path, "--json")
        book.run(f"{at} repair", "repair", path, out / "repaired", out=out / "repaired")
        for kind in ("torch_dist", "torch"):
            for more in ((), ("--no-optimizer",)):
                given = ("--target-format", kind, "--target-tp", 1, "--target-pp", 1, *more)
                new = out / f"{kind}{len(more)}"
                book.convert(f"{at} {kind} {more}", "reshard", path, new, *given)
        book.convert(f"{at} to hf", "megatron-to-hf", path, out / "hf")


def adapter(book: Book, name: str) -> None:
    base = model(name, book.root / "base")
    weights = lora.tensors(base)
    held = lora.factors(weights, lora.matrices(weights, APART))
    for key, factor in held.items():  # one A for q, k and v, as the layout fused requires
        if "lora_A" in key:
            drawn = np.random.RandomState(
                zlib.crc32(key.rpartition(".lora_A")[0].rpartition(".")[0].encode())
            )
            held[key] = drawn.standard_normal(factor.shape).astype(np.float32)
    made = lora.save(book.root / "adapter", held)
    for kind in ("hf", "torch", "torch_dist"):
        out = book.root / f"merged-{kind}"
        book.run(f"merge {kind}", "adapter", "merge", base, made, out, "--format", kind, out=out)
    for layout in ("fused", "block", "canonical", "swift", "swift-block"):
        for form in ("torch", "torch_dist"):
            out = book.root / f"{layout}-{form}"
            args = ("adapter", "to-megatron", made, base, out, "--layout", layout, "--format", form)
            if book.run(f"{layout} {form}", *args, "--tp", 2, out=out):
                back, more = book.root / f"{out.name}-back", ("--alpha", 8, "--like", base)
                book.run(f"{layout} {form} back", "adapter", "to-hf", out, back, *more, out=back)
                less, more = book.root / f"{out.name}-tp1", ("--target-tp", 1, *more)
                book.run(f"{layout} {form} 1", "adapter", "reshard", out, less, *more, out=less)
    for more in ((), ("--merge",)):
        out = book.root / f"beside{len(more)}"
        book.run(f"beside {more}", "hf-to-megatron", base, out, "--adapter", made, *more, out=out)
        back = book.root / f"beside{len(more)}-hf"
        book.run(f"beside {more} back", "megatron-to-hf", out, back, out=back)


def store(book: Book, name: str) -> None:
    from tests.helpers.s3_server import Server

    server = Server(book.root / "s3")
    try:
        server.put("bucket", FIXTURES / "tiny-qwen3", "hf/")
        with mock.patch.dict(os.environ, server.environment()):
            for form, given in TARGETS.items():
                if "ep" in form or "sequential" in form:
                    continue
                place = form.replace(" ", "-")
                book.run(form, "hf-to-megatron", "s3://bucket/hf", f"s3://bucket/{place}", *given)
                book.run(
                    f"{form} hf",
                    "megatron-to-hf",
                    f"s3://bucket/{place}",
                    f"s3://bucket/{place}-hf",
                )
                for end in ("", "-hf"):
                    got = server.fetch("bucket", f"{place}{end}/", book.root / f"{place}{end}")
                    book.runs[f"{form} files{end}"] = {"files": digests(got, book.told)}
    finally:
        server.stop()
    for held in book.runs.values():
        held.pop("out", None)  # it has times


def live(book: Book, name: str) -> None:
    """Saves a model that two ranks of gloo hold. It needs torch and megatron-core."""
    from tests.helpers.judging import judge

    src = model(name, book.root / "hf")
    dist = book.root / "dist"
    book.run("dist", "hf-to-megatron", src, dist, "--transformer-impl", "local", out=dist)
    saves = {"hf": {"format": "hf"}, "dist": {}, "torch": {"format": "torch", "tp": 2, "pp": 2}}
    case = {
        **{"name": "live", "kind": "live", "checkpoint": str(dist), "like": str(src), "tp": 2},
        **{"loads": [[str(src), {}]], "exports": [[str(src), {}]]},
        "saves": [[str(book.root / f"saved-{kind}"), given] for kind, given in saves.items()],
    }
    result = judge([case], book.root / "judge")["live"]
    book.runs["live"] = {key: result.get(key) for key in ("ok", "differs", "exported")}
    for kind in saves:
        book.runs[f"save {kind}"] = {"files": digests(book.root / f"saved-{kind}", book.told)}


def refused(book: Book, name: str) -> None:
    """Runs the rows of a name in tests/refusals.py, and notes their errors."""
    sources = Sources(book.root)
    for number, (case, row) in enumerate(ROWS.items()):
        if case.startswith(f"{name}: "):
            place = book.root / f"row{number:04d}"
            place.mkdir()
            book.run(case, *sources.prepare(row, place)[0])


def options(book: Book, name: str) -> None:
    """Gives every option of a command a wrong value, and every flag, on plain sources."""
    hf = model("tiny/qwen3", book.root / "hf")
    megatron, dst = book.root / "megatron", book.root / "dst"
    assert not mckpt("hf-to-megatron", hf, megatron, "--format", "torch", "--tp", 2).code
    command: Any = cli
    for word in name.split():
        command = command.commands[word]
    places = {"hf-to-megatron": (hf, dst), "adapter merge": (hf, megatron, dst)}
    given = places.get(name, (megatron, dst))
    if name in ("verify", "diff", "check", "inspect"):
        given = (hf, megatron)[: 2 if name in ("verify", "diff") else 1]
    for option in (p for p in command.params if isinstance(p, click.Option)):
        flag = max(option.opts, key=len)
        if flag in ("--watch", "--wait-for", "--help", "--interval", "--engine", "--workers"):
            continue
        words = ([],) if option.is_flag else (["-1"], ["0"], ["7"], ["word"], ["a=b"], [""])
        for value in words:
            shown = " ".join([flag, *value])
            said = mckpt(
                *name.split(),
                *given,
                flag,
                *value,
                *(("--dry-run",) if "dry_run" in {p.name for p in command.params} else ()),
            )
            told = book.told(said.err + said.out) if said.code else ""
            book.runs[shown] = {"code": said.code, "err": told}
            shutil.rmtree(dst, ignore_errors=True)


ITEMS: dict[str, tuple[Callable[[Book, str], None], list[str]]] = {
    "live": (live, ["tiny/qwen3"]),
    "store": (store, ["s3"]),
    "sizes": (sizes, list(SIZED)),
    "adapter": (adapter, ["tiny/qwen3", "tiny/qwen3-moe", "tiny/deepseek-v3"]),
    "old": (old, [*OLD, "old/bert", "old/llama", "old/reshaped"]),
    "refused": (refused, sorted({case.partition(": ")[0] for case in ROWS})),
    "options": (options, ["hf-to-megatron", "megatron-to-hf", "reshard", "plan", "repair", "diff",
        "check", "inspect", "adapter merge", "adapter to-megatron", "adapter to-hf"]),
    "family": (family, list(CONFIGS)),
    "config": (config, list(CONFIGS)),
}  # fmt: skip


def item(which: tuple[str, str]) -> tuple[str, Runs]:
    kind, name = which
    with tempfile.TemporaryDirectory(prefix="record-") as root:
        book = Book(Path(root))
        os.chdir(root)  # some wrong values are names of new files
        try:
            ITEMS[kind][0](book, name)
        except Exception as e:  # a fault of mckpt, or a fixture that cannot be made
            book.runs["fault"] = {"err": book.told(f"{type(e).__name__}: {e}")}
        os.chdir(ROOT)
        return f"{kind} {name}", book.runs


def make(out: Path, words: list[str]) -> None:
    every = [(kind, name) for kind, (_, names) in ITEMS.items() for name in names]
    every = [i for i in every if not words or any(word in " ".join(i) for word in words)]
    found: dict[str, Runs] = {}
    with multiprocessing.get_context("spawn").Pool(PROCESSES, start, maxtasksperchild=60) as pool:
        for name, runs in pool.imap_unordered(item, every):
            found[name] = runs
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    runs = [run for item in found.values() for run in item.values()]
    files, refused = (
        sum(len(r.get("files", ())) for r in runs),
        sum(r.get("code", 0) != 0 for r in runs),
    )
    plans = sum("plan" in run for run in runs)
    print(f"{out}: {len(runs)} runs, {files} files, {plans} plans, {refused} refusals")


def start() -> None:
    errors.show_options(True)
    no_wait = mock.patch.multiple(os, fsync=lambda fd: None, fdatasync=lambda fd: None)
    no_wait.start()


def compare(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yields a line for each difference of two records."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from compare(a.get(key), b.get(key), f"{path} > {key}" if path else key)
    elif a != b:
        yield f"{path}:\n  - {str(a)[:600]}\n  + {str(b)[:600]}"


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), sys.argv[3:])
    else:
        found = list(compare(*(json.loads(Path(p).read_text()) for p in sys.argv[2:4])))
        print("\n".join(found), f"\n{len(found)} differences")
        sys.exit(bool(found))
