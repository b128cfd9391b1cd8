"""Deltas of weights between two checkpoints: makes the next version in a directory of them, and
applies one version after the other. The files are those of `containers.delta_file`.

    DIR/weight_v000001/model-00001-of-00002.safetensors, ...
                       model.safetensors.index.json, mckpt.json

mckpt.json, which only mckpt reads, has the digests of all tensors before and after, by which a
checkpoint on which the delta does not build is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from mckpt import formats
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.containers import safetensors
from mckpt.containers.delta_file import DeltaWriter, PackedTensor, Patch, hasher, require
from mckpt.conversion import done
from mckpt.conversion.moving import RunSettings
from mckpt.conversion.plan_data import SourceState
from mckpt.conversion.planning import form_of_weights, make_plan
from mckpt.conversion.refusals import dropped
from mckpt.conversion.run import DirectoryPublisher, publish
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.streaming import HfTensors, refuse_url
from mckpt.conversion.target import Destination
from mckpt.errors import SourceError, UsageError
from mckpt.execute.checksums import merged
from mckpt.execute.engine import Writer
from mckpt.execute.files import lay_out, write_at
from mckpt.execute.journal import Journal
from mckpt.execute.ranks import Ranks
from mckpt.execute.threads import ThreadPool
from mckpt.execute.units import Work
from mckpt.formats.foreign import is_delta, number_of_version
from mckpt.formats.hf_config import CONFIG
from mckpt.formats.hf_files import INDEX, Row, cut, tensors_of, weight_files
from mckpt.mapping.forms import equal
from mckpt.options import DeltaOptions, TargetOptions
from mckpt.progress import Progress
from mckpt.storage import manifest
from mckpt.storage.files import read_json, stamp
from mckpt.storage.staging import discard
from mckpt.version import __version__

INDEX_NAME = INDEX[".safetensors"]
FILE_BYTES = 2_000_000_000  # of new tensors whose changes are in one file
BLOCK = 1 << 20  # bytes of a tensor in memory at once, which a core's cache holds
POSITIONS = 1 << 32  # bytes of a tensor of which an overwrite can name each
MAX_INDEX = 1 << 28  # bytes
_LONGEST = "max_positions"  # of a run, which changes no value
_NOTHING = Work(*(np.zeros(0, "u1") for _ in Work._fields))  # the journal has files alone

Check = Callable[[], None]
Block = tuple[int, np.ndarray, np.ndarray]  # first byte, and the bytes before and after


@dataclass(frozen=True)
class Version:
    """A delta on disk, of which the headers are read."""

    path: Path
    number: int
    base: int
    encoding: str
    digest: str  # the kind of its digests
    tensors: dict[str, PackedTensor]
    old: dict[str, str]  # digests before it: of all tensors, of none if mckpt did not make it
    new: dict[str, str]  # digests after it: of all tensors, or of those that changed

    @classmethod
    def read(cls, path: Path) -> Version:
        """Raises SourceError if the delta is damaged or of a form that mckpt does not know."""
        stated = read_json(path / INDEX_NAME, MAX_INDEX)["metadata"]
        weights, facts = weight_files(path), manifest.read(path).get("delta", {})
        if weights.problems:
            raise SourceError.of(f"{path}: is damaged:", weights.problems)
        tensors = {
            name: PackedTensor(name, weights.files[one.file], one.at, math.prod(one.shape))
            for name, one in weights.entries.items()
        }
        known = {n: s for file in weights.files for n, s in safetensors.metadata(file).items()}
        try:
            sums = {name: known[name] for name in tensors}
            number, base = int(stated["version"]), int(stated["base_version"])
            encoding, digest = stated["delta_encoding"], stated["checksum_format"]
            if encoding not in ("xor", "overwrite") or stated["compression_format"] != "zstd":
                raise ValueError(f"the form {encoding}, {stated['compression_format']}")
        except (KeyError, ValueError) as error:
            raise SourceError(f"{path}: is a delta that mckpt cannot apply: {error}") from None
        same = facts.get("digests", {})
        if wrong := [name for name, one in sums.items() if same.get(name, one) != one]:
            stated = "has other digests than its mckpt.json, as a file of another version has:"
            raise SourceError.of(f"{path}: {stated}", wrong)
        old = {**same, **facts.get("base_digests", {})}
        return cls(path, number, base, encoding, digest, tensors, old, {**same, **sums})

    def shown(self) -> dict[str, Any]:
        """Returns what `mckpt inspect` prints."""
        facts = {"path": str(self.path), "format": "delta", "version": self.number}
        facts |= {"base_version": self.base, "encoding": self.encoding, "digest": self.digest}
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return {**facts, "changed_tensors": len(self.tensors), "bytes": nbytes}


def versions(folder: Path) -> list[Version]:
    """Returns the deltas in a directory, or the one that it is, in their order."""
    folders = sorted(folder.glob("weight_v*"), key=number_of_version)
    return [Version.read(path) for path in (folder, *folders) if is_delta(path)]


def make(
    old: Checkpoint, new: Checkpoint, folder: Path, how: DeltaOptions, run: RunSettings
) -> dict[str, Any]:
    """Writes the next version in a directory of deltas; returns the content of its mckpt.json.

    Raises SourceError if the checkpoints have other tensors or settings, or if `old` is not what
    the last version makes; and the errors of a conversion to Hugging Face, as for copies of one
    tensor that differ.
    """
    refuse_url(folder)
    require(how.digest)
    if is_delta(folder):
        raise UsageError(f"{folder}: is a version itself; give the directory that has it")
    # a version may be a whole checkpoint, on which the next one builds
    base = max(map(number_of_version, folder.glob("weight_v*")), default=0)
    before = next((one for one in versions(folder) if one.number == base), None)
    making = _Making(old, new, how, before)
    number, hf = base + 1, formats.get(formats.HUGGING_FACE)
    for side in (old, new):  # neither may lie there
        destination = Destination(folder, f"weight_v{number:06d}", hf, side.files.root)
    files = [file for side in (old, new) for file in side.borrowing().layout.own_files]
    state = SourceState(list(map(stamp, files)))
    facts = {"version": number, "base_version": base, **how.values()}
    key = hashlib.sha256(repr((__version__, facts, state.shared, making.rows)).encode())
    with destination.staging(key.hexdigest(), str(state), run.resume) as staging:
        try:
            made = making.write(staging, run)
        except SourceError:  # no later run can continue it
            discard(staging)
            raise
        if SourceState(list(map(stamp, files))) != state:
            raise SourceError(f"{old.path} or {new.path}: was changed while it was read")
        stated = {
            "version": f"{number:06d}",
            "base_version": f"{base:06d}",
            "delta_encoding": how.encoding,
            "compression_format": "zstd",
            "checksum_format": how.digest,
        }
        weight_map = {name: file for file, one in made.items() for name in one["changed"]}
        index = json.dumps({"metadata": stated, "weight_map": weight_map}, indent=1) + "\n"
        (staging / "data" / INDEX_NAME).write_text(index)
        digests = {name: pair for one in made.values() for name, pair in one["digests"].items()}
        facts["digests"] = {name: after for name, (_, after) in digests.items()}
        facts["base_digests"] = {name: digests[name][0] for name in weight_map}
        sizes = {p.name: p.stat().st_size for p in sorted((staging / "data").iterdir())}
        listed = {name: {"bytes": size, "checksum": ""} for name, size in sizes.items()}
        content = {"mckpt": __version__, "delta": facts, "files": listed}
        publish(destination, staging, SideFiles(destination.root, {}), content)
    return content


class _Making:
    """The work of one delta."""

    def __init__(
        self, old: Checkpoint, new: Checkpoint, how: DeltaOptions, before: Version | None
    ) -> None:
        """before: the version on which it builds."""
        self.path, self.how, self.before, self.done = old.path, how, before, 0
        self.sides = HfTensors(old), HfTensors(new)
        for side in self.sides:
            dropped(side.source, check_replicas=False)
        left, right = (side.rows for side in self.sides)
        if apart := [name for name in {**left, **right} if left.get(name) != right.get(name)]:
            shown = [f"{n}: {_shown(left.get(n))}, and {_shown(right.get(n))}" for n in apart]
            raise SourceError.of(f"{old.path} and {new.path} have other tensors:", shown)
        was, now = (side.source.dims for side in self.sides)
        apart = [n for n, one in was.items() if not equal(one, now[n])]
        if shown := [f"{n}: {was[n]!r}, and {now[n]!r}" for n in apart if n != _LONGEST]:
            raise SourceError.of(
                f"{old.path} and {new.path} have other settings, and a delta has weights alone:",
                shown,
                "If the weights alone are wanted, give both sides the same config.json.",
            )
        self.rows = list(right.values())
        large = [row.key for row in self.rows if row.nbytes >= POSITIONS]
        if large and how.encoding == "overwrite":
            raise UsageError.of("overwrite: has no positions for 4 GiB; take xor for", large)
        if before and before.digest != how.digest:
            raise UsageError(f"{before.path}: has digests {before.digest}; give --digest that")

    def write(self, staging: Path, run: RunSettings) -> dict[str, dict[str, Any]]:
        """Writes the files; returns the digests of the tensors of each, and which have changed."""
        numbers = cut([row.nbytes for row in self.rows], FILE_BYTES)
        data, count = staging / "data", numbers[-1] + 1
        data.mkdir(exist_ok=True)
        Journal.create(staging / "journal")
        journal = Journal(staging / "journal", _NOTHING, [])
        made: dict[str, dict[str, Any]] = {}

        def file(number: int, memory: memoryview, check: Check) -> None:
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            rows = [r for r, n in zip(self.rows, numbers, strict=True) if n == number]
            if (text := journal.sum(number)) is None:
                out = DeltaWriter(data / name, [row.key for row in rows], self.how.digest)
                with out.file:
                    digests = {row.key: self.add(row, out, memory, check) for row in rows}
                    out.end()
                if not out.entries:
                    (data / name).unlink()
                text = json.dumps({"digests": digests, "changed": list(out.entries)})
                journal.write_sum(number, text)
            made[name] = json.loads(text)

        _each(count, file, run, sum(row.nbytes for row in self.rows), lambda: self.done)
        return dict(sorted(made.items()))

    def add(self, row: Row, out: DeltaWriter, memory: memoryview, check: Check) -> tuple[str, str]:
        """Adds a tensor if it has changed; returns its digests before and after."""
        sums = [hasher(self.how.digest) for _ in self.sides]
        blocks = self.blocks(row, memory, check, sums)
        if self.how.encoding == "overwrite":
            if count := sum(np.count_nonzero(old != new) for _, old, new in blocks):
                again = partial(self.blocks, row, memory, check)
                out.add(row.key, _overwrite(int(count), again), 4 + 5 * int(count))
        elif first := next((one for one in blocks if not np.array_equal(*one[1:])), None):
            out.add(row.key, _xor(first, blocks), row.nbytes)
        before, after = (one.hexdigest() for one in sums)
        if self.before and self.before.new.get(row.key, before) != before:
            raise SourceError(
                f"{self.path}: {row.key}: is not what {self.before.path} makes of it, so a delta"
                " of it cannot follow; give the checkpoint of that version as OLD"
            )
        if row.key in out.entries:
            out.sums[row.key] = after
        return before, after

    def blocks(
        self, row: Row, memory: memoryview, check: Check, sums: Iterable[Any] = ()
    ) -> Iterator[Block]:
        """Yields the blocks of a tensor, and adds each side to one of the digests."""
        step = min(BLOCK, len(memory) // 16 * 8)
        for start in range(0, row.nbytes, step):
            check()
            size = min(step, row.nbytes - start)
            views = memory[:size], memory[step : step + size]
            for side, view in zip(self.sides, views, strict=True):
                side.fill(row.key, start, view)
            # strict=False: a second reading has no sums, which the first one has computed
            for one, view in zip(sums, views, strict=False):
                one.update(view)
            yield start, np.frombuffer(views[0], "u1"), np.frombuffer(views[1], "u1")
            self.done += size if sums else 0


def _shown(row: Row | None) -> str:
    return "missing" if row is None else f"{row.dtype} {list(row.shape)}"


def _xor(first: Block, more: Iterator[Block]) -> Iterator[Any]:
    """Yields the bytes of a tensor of which `first` is the first block that has changed."""
    start, old, new = first
    for at in range(0, start, len(old)):
        yield bytes(min(len(old), start - at))
    yield old ^ new
    for _, old, new in more:
        yield old ^ new


def _overwrite(count: int, blocks: Callable[[], Iterator[Block]]) -> Iterator[bytes]:
    yield np.array([count], "<u4").tobytes()
    for start, old, new in blocks():
        yield (np.flatnonzero(old != new) + start).astype("<u4").tobytes()
    for _, old, new in blocks():
        yield new[old != new].tobytes()


def _each(count: int, work: Any, run: RunSettings, total: int, done: Callable[[], int]) -> None:
    """Calls work(number, memory, check) for each file, in threads, and reports the progress."""

    def tick() -> None:
        if run.progress is not None:
            run.progress(Progress(done(), total))

    threads = run.threads or min(Ranks().cores, count)
    ThreadPool(threads, run.max_memory).each(range(count), work, tick=tick)


def apply(
    base: Checkpoint, folder: Path, dst: Path, until: int | None, run: RunSettings, overwrite: bool
) -> dict[str, Any]:
    """Writes the Hugging Face directory that a checkpoint becomes by the deltas in a directory, up
    to the version `until`; returns the content of its mckpt.json.

    Raises SourceError for a delta that does not build on the checkpoint or on the version before
    it, or that is damaged.
    """
    refuse_url(folder)
    chain = _chain(base, versions(folder), folder, until)
    for one in chain:
        require(one.digest)
    target, form = TargetOptions(formats.HUGGING_FACE), partial(form_of_weights, same_format=True)
    plan = make_plan(base, dst, target, form, overwrite=overwrite, rank0=False)
    digest = hashlib.sha256(repr([sorted(one.new.items()) for one in chain]).encode()).hexdigest()
    files = {Path(tensor.path) for one in chain for tensor in one.tensors.values()}
    plan = replace(
        plan,
        facts={**plan.facts, "delta": {"version": chain[-1].number, "digest": digest}},
        copied=[*plan.copied, *sorted(files)],
    )
    there = None if overwrite else done.existing_output(plan, look=False).manifest
    return there or _Applying(plan, run, Ranks(), chain).lead()


def _chain(
    base: Checkpoint, found: list[Version], folder: Path, until: int | None
) -> list[Version]:
    """Returns the versions that follow that of the checkpoint, if it is known, or all. Raises
    SourceError unless each builds on the one before it, and the last one is `until`.
    """
    at: int | None = base.files.manifest.get("delta", {}).get("version")
    at = at or number_of_version(base.path)  # a version that is a whole checkpoint
    chain = [one for one in found if one.number > (at or 0) and one.number <= (until or one.number)]
    if not chain or until not in (None, chain[-1].number):
        has = ", ".join(str(one.number) for one in found) or "none"
        own = f", which is version {at}" if at else ""
        wanted = f"version {until}" if until else "version"
        raise SourceError(f"{folder}: has no {wanted} for {base.path}{own}; it has {has}")
    numbers = {f: number_of_version(f) for f in sorted(folder.glob("weight_v*"))}
    between = [f for f, number in numbers.items() if (at or 0) < number <= (until or number)]
    if lost := [f.name for f in between if not is_delta(f) and not (f / CONFIG).exists()]:
        raise SourceError.of(f"{folder}: versions have no {INDEX_NAME}; copy them again:", lost)
    at = at or chain[0].base
    digests: dict[str, str] = {}
    for one in chain:
        wrong = [name for name, old in one.old.items() if digests.get(name, old) != old]
        if one.base != at or wrong:
            what = f"{wrong[0]} is another" if wrong else f"that is version {one.base}"
            raise SourceError(f"{one.path}: does not build on version {at}: {what} there")
        digests, at = {**digests, **one.new}, one.number
    return chain


class _Applying(DirectoryPublisher):
    """A Hugging Face directory whose tensors are patched while they are written."""

    def __init__(self, plan: Any, how: RunSettings, ranks: Ranks, chain: list[Version]) -> None:
        super().__init__(plan, how, ranks)
        self.chain, self.tensors, self.done = chain, HfTensors(plan.source), 0
        names = {name for one in chain for name in one.tensors}
        if lacks := sorted(names - set(self.tensors)):
            raise SourceError.of(f"{plan.source.path}: lacks tensors of the deltas:", lacks)

    def put(self) -> list[str]:
        outputs, data, folder = self.plan.outputs, self.folder / "data", self.folder / "journal"
        lay_out(outputs, data, folder)
        Journal.create(folder)
        journal = Journal(folder, _NOTHING, outputs)
        writer = Writer(self.plan.transfer, data, self.how.copying())
        writer.reopen()

        def file(number: int, memory: memoryview, check: Check) -> None:
            if journal.sum(number) is not None:
                return
            ranges = []
            weights = number < len(self.plan.layout.files)
            for row, at in tensors_of(outputs[number]) if weights else ():
                for start, view in self.patched(row, memory, check):
                    with writer.targets.opened([number]) as fds:
                        write_at(fds[number], view, at + start, outputs[number].path)
                    ranges.append((number, at + start, len(view), isal_zlib.crc32(view)))
            journal.write_sum(number, writer.finish(number, merged(ranges), memory, check))

        try:
            _each(len(outputs), file, self.how, self.plan.nbytes, lambda: self.done)
        except SourceError:  # no later run can continue it
            self.discard()
            raise
        finally:
            writer.close()
        return [journal.sum(number) or "" for number in range(len(outputs))]

    def patched(
        self, row: Row, memory: memoryview, check: Check
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields the first byte of each block of a tensor, and the new bytes. Raises SourceError
        behind the last one if a digest is not that of the delta.
        """
        name = row.key
        # the first version that states what the tensor was, unless one before it changes it
        has = (one for one in self.chain if name in one.old or name in one.tensors)
        first = next(has, self.chain[0])
        steps = [
            (Patch(one.tensors[name], one.encoding, row.nbytes), hasher(one.digest), one)
            for one in self.chain
            if name in one.tensors
        ]
        before, memory = hasher(first.digest), memory[:BLOCK]
        for start in range(0, row.nbytes, len(memory)):
            check()
            view = memory[: min(len(memory), row.nbytes - start)]
            self.tensors.fill(name, start, view)
            before.update(view)
            for patch, digest, _ in steps:
                patch.apply(np.frombuffer(view, "u1"), start)
                digest.update(view)
            yield start, view
            self.done += len(view)
        found, path = before.hexdigest(), self.plan.source.path
        if first.old.get(name, found) != found:
            raise SourceError(f"{path}: {name}: is not the tensor on which {first.path} builds")
        for patch, digest, one in steps:
            patch.end()
            if digest.hexdigest() != one.new[name]:
                raise SourceError(
                    f"{path}: {name}: has another digest after {one.path} than is stated there:"
                    f" either that delta is damaged, or this is not version {first.base}"
                )
