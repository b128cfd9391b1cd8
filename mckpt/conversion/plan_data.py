"""The data of a plan: all copies and files of a conversion, proved from headers. Also the identity
of its source, by which a later run recognises the output and the interrupted work of the same
command: a file that has the same size, mtime, ctime and inode is the same. If one of them differs,
the content decides (`done`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.destination import Destination
from mckpt.conversion.side_files import SideFiles
from mckpt.conversion.target import TargetOptions
from mckpt.errors import counted, printable, shown
from mckpt.formats.base import Names
from mckpt.geometry.box import Layout, gaps
from mckpt.geometry.join import COPY, UNSCALED, Joined
from mckpt.storage import sparse_copy
from mckpt.storage.files import Stamp, TargetFile, stamp
from mckpt.values import dtypes


class PlannedCopy(NamedTuple):
    """One copy of a plan: a grid of `shape` elements that are cast on their way from one file into
    another. Element [i, j] lies i * strides[0] + j * strides[1] elements behind the offset.
    """

    tensor: str  # the logical tensor that the elements belong to
    source: str  # path of the file
    source_offset: int  # bytes
    source_strides: tuple[int, int]  # elements
    source_dtype: str
    target: str  # path of the file, relative to the new checkpoint
    target_offset: int  # bytes
    target_strides: tuple[int, int]  # elements
    target_dtype: str
    shape: tuple[int, int]
    added: float  # a number that is added to each value
    scaled: bool  # whether the elements of one side are quantised: values are codes times scales


@dataclass(frozen=True)
class SourceState:
    """The state of the source files of a plan."""

    stamps: Sequence[Stamp]

    def __str__(self) -> str:
        """Returns the text for the manifest."""
        return f"{self.shared}:{_digest([one.exact for one in self.stamps])}"

    @property
    def shared(self) -> str:
        """Returns the part that is the same on all machines that see the files."""
        return _digest([one.shared for one in self.stamps])


@dataclass(eq=False)
class PlanData:
    """A conversion that is proved from headers alone."""

    source: Checkpoint
    destination: Destination
    target: TargetOptions
    joined: Joined
    layout: Layout
    names: Names  # of the target
    outputs: list[TargetFile]
    side: SideFiles
    copied: list[Path]  # the source files that are copied whole
    facts: dict[str, Any]  # the content of the manifest
    remarks: list[str]  # sentences for the user on files that the output does not have

    @cached_property
    def digest(self) -> str:
        """Returns a digest of everything that determines the bytes of the output."""
        return hashlib.sha256(shown(json.dumps(self.facts, sort_keys=True)).encode()).hexdigest()

    def state(self, refresh: bool = False) -> SourceState:
        """Returns the state of the source files now; with `refresh`, lists the stores that have
        them.
        """
        files = [*self.source.layout.files, *map(str, self.copied)]
        if refresh:
            for copy in {id(one): one for one in map(sparse_copy.of, files) if one}.values():
                copy.list()
        return SourceState([stamp(file) for file in files])

    def key(self, checksum: str, shared: str) -> str:
        """Returns a digest of the bytes that a run writes; the same command has the same one, on
        all its ranks.

        shared: that of the source's state. A run that continues another one compares the whole
        state too (Destination.staging).
        """
        return _digest(f"{self.digest} {checksum} {shared}")

    @property
    def nbytes(self) -> int:
        """Returns the size of all files to be written, in bytes."""
        return sum(o.size for o in self.outputs)

    def copies(self) -> Iterator[PlannedCopy]:
        """Yields all copies, in the order of the source files. A large plan has a million."""
        sources, outputs = self.source.layout.files, self.outputs
        for row, at in zip(self.joined.copies, self.joined.first_bytes().tolist(), strict=True):
            c = dict(zip(COPY.names or (), row.item(), strict=True))
            cast = self.joined.casts[c["cast"]]
            wide, width = dtypes.itemsize(cast.source), dtypes.itemsize(cast.target)
            yield PlannedCopy(
                self.joined.name(c["tensor"]),
                str(sources[c["src_file"]]),
                c["src_at"],
                (c["src_pitch"] // wide, c["src_step"] // wide),
                cast.source,
                outputs[c["dst_file"]].path,
                at,
                (c["dst_pitch"] // width, c["dst_step"] // width),
                cast.target,
                (c["rows"], c["run"]),
                cast.offset,
                c["grid"] != UNSCALED,
            )

    def json(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        copies = self.joined.copies
        padding = sum(
            int(gaps(s.pieces, s.numel)[0][:, 1].sum()) * len(s) * dtypes.itemsize(s.dtype)
            for s in self.layout.stored
            if s.padding
        )
        moved = (
            np.bincount(copies["cast"], copies["rows"] * copies["run"], len(self.joined.casts))
            .astype("i8")
            .tolist()
        )
        return {
            "source": {
                "path": str(self.source.path),
                "format": self.source.format,
                "files": len(self.source.layout.files),
                "tensors": len(self.source),
                "parallel": str(self.source.parallel),
                "mapping": self.source.mapping.name,
            },
            "target": {
                "path": str(self.destination.path),
                "format": self.target.format,
                "parallel": str(self.target.parallel),
                "mapping": self.facts["mapping"]["name"],
                "tensors": sum(map(len, self.layout.stored)),
                "files": [{"path": o.path, "bytes": o.size} for o in self.outputs],
                "bytes": self.nbytes,
            },
            "copies": len(copies),
            "casts": {
                f"{a} -> {b}": n
                for (a, b, offset, _), n in zip(self.joined.casts, moved, strict=True)
                if a != b and not offset
            },
            "offsets": {
                f"{a} {offset:+g} -> {b}": n
                for (a, b, offset, _), n in zip(self.joined.casts, moved, strict=True)
                if offset
            },
            "padding_bytes": int(padding),
            "carried": self.facts.get("carried"),
            "ignored": dict(grouped(self.source.layout.ignored)),
            "optimizer": self.facts.get("optimizer"),
            "left_behind": self.facts.get("left_behind", self.source.left_behind()),
            "inexact": self.facts["inexact"],
            "notes": [*self.facts["notes"], *self.remarks],
            "plan": self.digest,
        }

    def summary(self) -> str:
        """Returns the plan as text for people."""
        p = self.json()
        s, t = p["source"], p["target"]
        sizes = [  # a Hugging Face directory is not sharded
            f", {self.source.parallel}" * self.source.is_megatron,
            f", {self.target.parallel}" * self.destination.format.megatron,
        ]
        lines = [
            (
                f"{s['format']} {s['path']} ({s['mapping']}{sizes[0]}):"
                f" {counted(s['tensors'], 'logical tensor')} in {counted(s['files'], 'file')}"
            ),
            (
                f"  -> {t['format']} {t['path']} ({t['mapping']}{sizes[1]}):"
                f" {counted(t['tensors'], 'stored tensor')}, {counted(len(t['files']), 'file')},"
                f" {t['bytes']:,} bytes"
            ),
            (
                f"{p['copies']:,} copies; every element of the target is written exactly once;"
                " every element of the source is used or listed below as ignored"
            ),
        ]
        lines += [f"cast {k}: {n:,} elements" for k, n in p["casts"].items()]
        lines += [f"padding of the vocabulary: {p['padding_bytes']:,} bytes of zeros"] * bool(
            p["padding_bytes"]
        )
        if unchanged := p["carried"]:
            tensors = counted(unchanged["tensors"], "tensor")
            lines.append(f"carried unchanged: {tensors}, {unchanged['bytes']:,} bytes")
        if state := p["optimizer"]:
            lines += _optimizer_lines(state, not self.destination.helps)
        lines += [f"ignored: {k} ({why})" for k, why in p["ignored"].items()]
        lines += [f"left behind: {', '.join(p['left_behind'])}"] * bool(p["left_behind"])
        lines += [f"inexact: {text}" for text in p["inexact"].values()]
        return "\n".join(map(printable, lines + p["notes"]))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _optimizer_lines(state: Mapping[str, Any], compared: bool) -> Iterator[str]:
    """Yields sentences on the optimizer that is kept. `state` is its entry in the manifest.

    compared: whether the master copies are compared with the weights already.
    """
    proved = f"; of {counted(state['proved'], 'weight')} the master copy, when rounded, " + (
        "will be compared with the weight"
        if not compared
        else "is the weight within the precision of fp16"
        if state.get("half")
        else "is the weight bit for bit"
    )
    yield (
        f"optimizer ({state['stored_as']}): {', '.join(state['states'])} are kept"
        + proved * bool(state["proved"])
    )
    if found := state.get("loss_scalers"):
        yield "loss scaler: " + ", ".join(f"{k} {v:g}" for k, v in found[0].items()) + " are kept"
    if state.get("no_loss_scaler"):
        yield (
            "loss scaler: the run trained in fp16, and its checkpoint has none, so training goes on"
            " with --initial-loss-scale"
        )
    if num := state["unproved"]:
        yield f"{counted(num, 'weight')} have no master copy that could prove their states' names"
    if without := state["without"]:
        yield f"parameters without optimizer state: {', '.join(without[:8])}" + (
            f" and {len(without) - 8:,} more" * (len(without) > 8)
        )


def grouped(ignored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the ignored keys and their reasons; keys with the same reason are counted."""
    by_reason: dict[str, list[str]] = {}
    for key, why in ignored.items():
        by_reason.setdefault(why, []).append(key)
    for why, keys in by_reason.items():
        yield (keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more"), why
