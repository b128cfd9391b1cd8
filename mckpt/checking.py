"""Checks one checkpoint of any format: its files, its tensors, its values. Every byte is read once,
for checksums and for values that are not finite.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.description import VocabSizeUnknown, changed_files
from mckpt.containers.entries import Span
from mckpt.errors import (
    CoverError,
    MckptError,
    PickleError,
    SourceError,
    StorageError,
    counted,
)
from mckpt.execute.files import OpenFiles, read_at
from mckpt.execute.threads import ThreadPool
from mckpt.formats.hf_config import side_files
from mckpt.geometry.box import Layout, tiles
from mckpt.progress import OnProgress, Progress
from mckpt.storage.files import checksum_of, stamp_to_copy
from mckpt.storage.staging import MANIFEST
from mckpt.values.dtypes import itemsize

SLAB = 8 << 20  # bytes that a thread reads at once
LONGEST = 16  # bytes of an element, at most: an element that begins in a slab may end after it
THREADS = 16  # at most
# Bytes whose values are looked at together: their temporary array stays in the processor's cache.
TILE = 256 << 10

# dtype -> an integer type of its width, a mask of the bits without the sign, and the smallest of
# these that is not finite: an infinity. All larger ones are NaN; float8_e4m3fn has NaN only.
_LEAST = {
    "bfloat16": ("u2", 0x7FFF, 0x7F80),
    "float16": ("u2", 0x7FFF, 0x7C00),
    "float32": ("u4", 0x7FFFFFFF, 0x7F800000),
    "float64": ("u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float8_e4m3fn": ("u1", 0x7F, 0x7F),
    "float8_e5m2": ("u1", 0x7F, 0x7C),
    "float8_e8m0fnu": ("u1", 0xFF, 0xFF),  # without a sign
}
_NO_INFINITY = ("float8_e4m3fn", "float8_e8m0fnu")


class NonFinite(NamedTuple):
    """The values of one tensor that are not finite."""

    span: Span
    nans: int
    infinities: int
    first: int  # offset in the file of the first one

    def __str__(self) -> str:
        size = itemsize(self.span.dtype)
        total = self.span.nbytes // size
        return (
            f"{self.span.name}: {self.nans:,} NaN and {self.infinities:,} infinite of {total:,}"
            f" {self.span.dtype} values, the first at element"
            f" {(self.first - self.span.at) // size:,} (byte {self.first:,} of {self.span.path})"
        )


@dataclass
class Scanned:
    """What was found when all bytes were read."""

    broken: list[str] = field(default_factory=list)  # checksums that do not fit
    non_finite: list[NonFinite] = field(default_factory=list)
    files: int = 0
    nbytes: int = 0
    checked: int = 0  # checksums that were compared


class _CheckedFile:
    """One file: its tensors by place, and where the ranges of its checksums begin and end."""

    def __init__(self, path: str, size: int, stated: str, spans: Sequence[Span]) -> None:
        self.path, self.size, self.stated = path, size, stated
        self.tensors = sorted((s for s in spans if s.dtype in _LEAST), key=lambda s: s.at)
        self.starts = [s.at for s in self.tensors]
        # tensors may overlap, so their ends are not in order
        ends = (s.at + s.nbytes for s in self.tensors)
        self.reach = list(itertools.accumulate(ends, max))
        self.records = [s for s in spans if s.crc is not None and s.at + s.nbytes <= size]
        self.cuts = sorted({at for s in self.records for at in (s.at, s.at + s.nbytes)})
        self.ranges: list[tuple[int, int, int]] = []  # offset, bytes, crc32

    @cached_property
    def summed(self) -> bool:
        """Whether a crc32 of any of its ranges is stated."""
        return bool(self.records) or self.stated.startswith("crc32:")

    def within(self, at: int, end: int) -> list[Span]:
        """Returns the tensors with elements between two bytes."""
        return self.tensors[bisect_right(self.reach, at) : bisect_left(self.starts, end)]

    def pieces(self, at: int, end: int) -> list[tuple[int, int]]:
        """Returns the range between two bytes, cut where a record begins or ends."""
        inner = self.cuts[bisect_right(self.cuts, at) : bisect_left(self.cuts, end)]
        return list(itertools.pairwise([at, *inner, end]))


def scan(
    files: Mapping[str, str],
    spans: Sequence[Span],
    threads: int = 0,
    progress: OnProgress | None = None,
) -> Scanned:
    """Reads every byte of the files.

    files: path -> checksum as mckpt.json states it, "" if it states none.
    spans: the tensors and records of these files.
    threads: 0 means one per core, at most THREADS.
    """
    by_file: dict[str, list[Span]] = {path: [] for path in files}
    for span in spans:
        by_file.setdefault(span.path, []).append(span)
    scanned = [
        _CheckedFile(path, os.path.getsize(path), files.get(path, ""), of_file)
        for path, of_file in by_file.items()
    ]
    slabs = [(number, at) for number, f in enumerate(scanned) for at in range(0, f.size, SLAB)]
    opened = OpenFiles([f.path for f in scanned], os.O_RDONLY)
    out, lock = Scanned(files=len(scanned)), threading.Lock()
    non_finite: dict[int, NonFinite] = {}  # id of a span -> its values
    total = sum(f.size for f in scanned)

    def work(slab: int, memory: memoryview, check: Callable[[], None]) -> None:
        number, at = slabs[slab]
        file = scanned[number]
        end = min(at + SLAB, file.size)
        view = memory[: min(end + LONGEST, file.size) - at]
        check()
        with opened.opened([number]) as fds:
            read_at(fds[number], view, at, file.path)
        sums = [
            (low, high - low, isal_zlib.crc32(view[low - at : high - at]))
            for low, high in (file.pieces(at, end) if file.summed else ())
        ]
        unusual = [s for span in file.within(at, end) if (s := _non_finite(span, view, at, end))]
        with lock:
            file.ranges += sums
            out.nbytes += end - at
            for one in unusual:
                before = non_finite.get(id(one.span))
                non_finite[id(one.span)] = _joined(before, one) if before else one

    num_threads = threads or min(len(os.sched_getaffinity(0)), THREADS)
    try:
        ThreadPool(num_threads, num_threads * (SLAB + LONGEST)).each(
            range(len(slabs)),
            work,
            tick=lambda: progress(Progress(out.nbytes, total)) if progress else None,
        )
    finally:
        opened.close()
    # for a digest each file is read again
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads, "sums") as readers:
        for checked, broken in readers.map(_compare, scanned):
            out.checked += checked
            out.broken += broken
    out.non_finite = sorted(non_finite.values(), key=lambda s: (s.span.path, s.first))
    return out


def _non_finite(span: Span, view: memoryview, at: int, end: int) -> NonFinite | None:
    """Returns the values of a tensor that begin in bytes `at` to `end` of its file and are not
    finite; None if there are none.

    view: the file's bytes from `at` on.
    """
    kind, mask, least = _LEAST[span.dtype]
    size = itemsize(span.dtype)
    first = max(0, -(-(at - span.at) // size))
    last = min(span.nbytes // size, -(-(end - span.at) // size))
    nans = infinities = 0
    where = -1
    for low in range(first, last, TILE // size):
        count = min(TILE // size, last - low)
        bits = np.frombuffer(view, kind, count, span.at + low * size - at) & mask
        if bits.max() < least:
            continue
        if where < 0:
            where = span.at + (low + int(np.argmax(bits >= least))) * size
        beyond = int((bits >= least).sum())
        infinite = 0 if span.dtype in _NO_INFINITY else int((bits == least).sum())
        nans, infinities = nans + beyond - infinite, infinities + infinite
    return None if where < 0 else NonFinite(span, nans, infinities, where)


def _joined(a: NonFinite, b: NonFinite) -> NonFinite:
    return NonFinite(a.span, a.nans + b.nans, a.infinities + b.infinities, min(a.first, b.first))


def _compare(file: _CheckedFile) -> tuple[int, list[str]]:
    """Compares the checksums of a file that was read, and of its records, with those stated.
    Returns the number of checksums, and a sentence for each that does not fit.
    """
    file.ranges.sort()
    broken = [
        f"{record.name}: bytes {record.at:,} to {record.at + record.nbytes:,} of {file.path} have"
        f" the crc32 {own:08x}, and the file states {record.crc:08x}"
        for record in file.records
        if (own := _crc_of(file.ranges, record.at, record.at + record.nbytes)) != record.crc
    ]
    kind, _, stated = file.stated.partition(":")
    if not stated:
        return len(file.records), broken
    whole = _crc_of(file.ranges, 0, file.size) if kind == "crc32" else None
    mine = checksum_of(file.path, kind) if whole is None else f"{kind}:{whole:08x}"
    if mine != file.stated and not broken:  # else the finding on the record is more exact
        broken.append(
            f"{file.path}: has the checksum {mine}, and {MANIFEST} states {file.stated}: it was"
            " changed after it was written, or not copied well"
        )
    return len(file.records) + 1, broken


def _crc_of(ranges: Sequence[tuple[int, int, int]], at: int, end: int) -> int:
    """Returns the crc32 of bytes `at` to `end`, where ranges (offset, bytes, crc32) begin and
    end.
    """
    crc = 0
    for _, nbytes, one in ranges[bisect_left(ranges, (at,)) : bisect_left(ranges, (end,))]:
        crc = isal_zlib.crc32_combine(crc, one, nbytes)
    return crc


TENSORS = (".safetensors", ".bin", ".distcp", ".pt")  # suffixes of files with tensors
OTHER_FORM = "consolidated"  # prefix of weights in the form of Mistral


@dataclass(repr=False)
class Checked:
    """The result of a check."""

    # findings at which a loader would fail, or silently load wrong values
    damaged: list[str] = field(default_factory=list)
    # findings that a loader accepts, and that are rarely intended: values that are not finite,
    # copies that differ
    suspicious: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, and why
    files: int = 0
    nbytes: int = 0
    checksums: int = 0  # that were compared

    @property
    def exit_code(self) -> int:
        """Returns 3 for damage, 1 for anything else that was found or not checked, else 0."""
        if self.damaged:
            return SourceError.exit_code
        return 1 if self.suspicious or self.unchecked else 0

    @property
    def verdict(self) -> str:
        """Returns damaged, suspicious or sound."""
        return {0: "sound", 1: "suspicious"}.get(self.exit_code, "damaged")

    def __repr__(self) -> str:
        found = [*self.damaged, *self.suspicious, *self.unchecked]
        more = f"; {counted(len(found), 'finding')}, first: {found[0]}" if found else ""
        return (
            f"Checked({self.verdict}: {counted(self.files, 'file')}, {self.nbytes:,} bytes{more})"
        )

    def json(self) -> dict[str, Any]:
        facts = {"bytes" if k == "nbytes" else k: value for k, value in vars(self).items()}
        return {**facts, "exit_code": self.exit_code}


def check(source: Checkpoint, threads: int = 0, progress: OnProgress | None = None) -> Checked:
    """Reads a checkpoint whole and returns what is wrong with it.

    threads: 0 means one per core.
    """
    out = Checked()
    try:
        _ = source.dims
    except VocabSizeUnknown:  # all rows are checked, with those of the padding
        source = source.with_padding() or source
    except MckptError:  # `_structure` reports it
        pass
    stated = _stated(source, out)
    _structure(source, out)
    spans = list(source.opened.spans(out.damaged))
    files = {path: stated.get(path, "") for path in dict.fromkeys(s.path for s in spans)}
    out.damaged += _pointers(source)
    out.suspicious += _orphans(source, {*files, *stated})
    scanned = scan({**files, **stated}, spans, threads, progress)
    out.damaged += scanned.broken
    out.suspicious += (str(one) for one in scanned.non_finite if not _is_gap(source, one.span))
    out.files, out.nbytes, out.checksums = scanned.files, scanned.nbytes, scanned.checked
    out.damaged = list(dict.fromkeys(out.damaged))
    return out


def _stated(source: Checkpoint, out: Checked) -> dict[str, str]:
    """Returns the files that mckpt.json names and that are there, with their checksums; "" for one
    of another size.
    """
    named = [(source.opened.root, source.files.manifest.get("files"))]
    if recorded := source.files.manifest.get("hf"):
        if source.files.hf_directory is None:
            out.unchecked.append(f"hf: is not there; {MANIFEST} names {len(recorded)} files in it")
        else:
            named.append((source.files.hf_directory, recorded))
    stated: dict[str, str] = {}
    for root, listed in named:
        out.damaged += changed_files(root, {"files": listed})
        for name, facts in (listed or {}).items():
            path = root / name
            if path.is_file():
                same = path.stat().st_size == facts["bytes"]
                stated[str(path)] = facts["checksum"] if same else ""
    return stated


def _pointers(source: Checkpoint) -> list[str]:
    """Returns a sentence for each file beside the weights that a conversion could not copy."""
    root = source.files.side_directory
    if root is None:
        return []
    out = []
    for name in side_files(root).kept:
        try:
            stamp_to_copy(root / name)
        except SourceError as e:
            out.append(str(e))
    return out


def _orphans(source: Checkpoint, named: Collection[str]) -> list[str]:
    """Returns a sentence for each file with tensors that no index or header of the checkpoint
    leads to.

    named: the files that were read, and those that mckpt.json names.
    """
    opened = source.opened
    kinds = {Path(path).suffix for path in named}  # a model may have weights in other forms too
    present = {
        path
        for pattern in opened.format.parts
        for path in map(str, opened.root.glob(pattern))
        if "*" in pattern and pattern.endswith(TENSORS) and Path(path).suffix in kinds
    }
    return [
        f"{path}: belongs to no index, so nothing reads it; remove it if it is left over from"
        " another checkpoint"
        for path in sorted(present - set(named))
        if not Path(path).name.startswith(OTHER_FORM)
    ]


def _structure(source: Checkpoint, out: Checked) -> None:
    """Checks that the files hold every element of each tensor once, and that copies are equal."""
    try:
        out.damaged += holes(source.layout)
        if source.optimizer is not None:
            out.damaged += holes(source.optimizer.layout)
        if not out.damaged:
            out.suspicious += source.reader.check_replicas()
            out.suspicious += source.reader.unbounded()
    except (SourceError, CoverError, PickleError, StorageError) as e:
        out.damaged += e.problems or [f"{e}"]
    except MckptError as e:
        out.unchecked.append(
            "whether all tensors of the model are there, with the right shapes, was not checked:"
            f" {e}"
        )


def _is_gap(source: Checkpoint, span: Span) -> bool:
    """Returns whether a tensor of the optimizer belongs to no parameter. Megatron stores such ones
    as dp_reshardable between two parameters, from memory that it does not set, and reads none.
    """
    try:
        optimizer = source.with_training().optimizer
    except MckptError:  # `_structure` reports it
        return False
    if optimizer is None or span.name.partition(" at ")[0] not in optimizer.keys:
        return False
    file, end = optimizer.layout.files.index(span.path), span.at + span.nbytes
    return not any(
        ((s.file == file) & (s.at < end) & (s.at + s.numel * itemsize(s.stored_as) > span.at)).any()
        for s in optimizer.layout.stored
    )


def holes(layout: Layout) -> list[str]:
    """Returns a sentence for each logical tensor of which an element is stored nowhere or twice."""
    stored: dict[tuple[str, int, int], list[int]] = {}
    for number, s in enumerate(layout.stored):
        if s.replica or s.carried:
            continue
        places = list(zip(s.layer.tolist(), s.expert.tolist(), strict=True))
        for name in s.tensors:
            for layer, expert in places:
                stored.setdefault((name, layer, expert), []).append(number)
    faults: dict[tuple[str, tuple[int, ...]], str | None] = {}  # many tensors are cut alike
    out = []
    for (name, layer, expert), numbers in stored.items():
        cut = (name, tuple(numbers))
        if cut not in faults:
            pieces = [p for i in numbers for p in layout.stored[i].pieces if p.tensor == name]
            faults[cut] = tiles([p.box for p in pieces if not p.copy], layout.shapes[name])
        if faults[cut]:
            out.append(f"{name.format(layer=layer, expert=expert)}: {faults[cut]}")
    return out
