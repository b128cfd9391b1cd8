"""The plan of a conversion: the whole job as data, proved from headers, and how it is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.conversion.publishing import Destination, Side
from mckpt.conversion.target import Progress, Target
from mckpt.errors import SourceError, StorageError, UsageError, counted
from mckpt.execute.ranks import Ranks, Session
from mckpt.formats import hf
from mckpt.geometry.box import Layout, gaps
from mckpt.geometry.join import Joined
from mckpt.storage.files import TargetFile
from mckpt.storage.staging import MANIFEST
from mckpt.values import dtypes


@dataclass(eq=False)
class Plan:
    """The whole job, proved from headers alone. Nothing is written before `run`."""

    source: Checkpoint
    destination: Destination
    target: Target
    joined: Joined
    layout: Layout
    outputs: list[TargetFile]
    side: Side  # files of DST/hf
    copied: list[Path]  # sources of outputs that are copied whole
    facts: dict[str, Any]  # what the manifest says

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the output's bytes."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all files to be written."""
        return sum(o.size for o in self.outputs)

    def json(self) -> dict[str, Any]:
        """The plan as plain data."""
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
                for (a, b), n in zip(self.joined.casts, moved, strict=True)
                if a != b
            },
            "padding_bytes": int(padding),
            "ignored": dict(_short(self.source.layout.ignored)),
            "left_behind": self.source.left_behind(),
            "inexact": self.facts["inexact"],
            "notes": self.facts["notes"],
            "plan": self.digest,
        }

    def summary(self) -> str:
        """The plan for people."""
        p = self.json()
        s, t = p["source"], p["target"]
        lines = [
            (
                f"{s['format']} {s['path']} ({s['mapping']}, {s['parallel']}):"
                f" {counted(s['tensors'], 'logical tensor')} in {counted(s['files'], 'file')}"
            ),
            (
                f"  -> {t['format']} {t['path']} ({t['mapping']}, {t['parallel']}):"
                f" {counted(t['tensors'], 'stored tensor')}, {counted(len(t['files']), 'file')},"
                f" {t['bytes']:,} bytes"
            ),
            (
                f"{p['copies']:,} copies; every element of the target is written once, every"
                " element of the source is used or named here"
            ),
        ]
        lines += [f"cast {k}: {n:,} elements" for k, n in p["casts"].items()]
        lines += [f"padding of the vocabulary: {p['padding_bytes']:,} bytes of zeros"] * bool(
            p["padding_bytes"]
        )
        lines += [f"ignored: {k} ({why})" for k, why in p["ignored"].items()]
        lines += [f"left behind: {', '.join(p['left_behind'])}"] * bool(p["left_behind"])
        lines += [f"inexact: {text}" for text in p["inexact"].values()]
        return "\n".join(lines + p["notes"])

    def run(
        self,
        *,
        max_memory: int | str = "64MiB",
        threads: int = 0,
        checksum: str = "crc32",
        allow_overflow: bool = False,
        resume: bool = True,
        check_replicas: bool = False,
        ranks: Ranks | None = None,
        progress: Progress | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Write it; returns the manifest.

        A run that dies is gone on with by the same call, unless `resume` is False.

        Several processes do it together if each calls this with its own `ranks`; all return when
        the checkpoint is in place. `tell` gets what people should know though nothing failed.
        """
        budget = hf.parse_size(max_memory) if isinstance(max_memory, str) else max_memory
        stamps = self._stamps()
        key = hashlib.sha256(f"{self.digest} {checksum} {stamps}".encode()).hexdigest()

        def move(session: Session) -> list[str]:
            from mckpt.execute.engine import Overflow, execute

            try:
                return execute(
                    self.joined.copies,
                    self.joined.casts,
                    self.source.layout.files,
                    self.outputs,
                    session.staging / "data",
                    max_memory=budget,
                    threads=threads,
                    checksum=checksum,
                    allow_overflow=allow_overflow,
                    grids=self.joined.grids,
                    session=session,
                    progress=progress,
                )
            except Overflow as e:
                raise UsageError(f"{self.joined.name(e.tensor)}: {e.where}") from e

        session = Session(self.destination.staging_directory(key), ranks or Ranks(), tell)
        if session.ranks.rank:
            return self._help(session, move)
        if session.ranks.size == 1:  # before anything is made
            dropped = self._look_through(check_replicas)
        with self.destination.staging(key, resume, session.ranks.name) as staging, session:
            session.open()
            if session.ranks.size > 1:  # the others are told of what is found
                dropped = self._look_through(check_replicas)
            sums = move(session)
            if self._stamps() != stamps:
                raise SourceError(
                    f"{self.source.path}: was changed while it was read; run the command again when"
                    " nothing writes there"
                )
            files = {
                o.path: {"bytes": o.size, "checksum": s}
                for o, s in zip(self.outputs, sums, strict=True)
            }
            manifest = {**self.facts, "plan": self.digest, "dropped": dropped, "files": files}
            (staging / "data" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            self.destination.publish(staging, self.side)
        return manifest

    def _look_through(self, check_replicas: bool) -> list[str]:
        """What is dropped, in words. SourceError if copies of one tensor differ."""
        reader = self.source.reader
        if (check_replicas or self.source.format == "hf") and (apart := reader.check_replicas()):
            raise SourceError.of(
                f"{self.source.path}: holds copies of one tensor that differ, and it is not known"
                " which is meant:",
                apart,
            )
        return reader.padding()

    def _help(self, session: Session, move: Callable[[Session], list[str]]) -> dict[str, Any]:
        """What the other ranks do: their share, and wait for rank 0 to publish."""

        def finished(late: bool) -> bool:
            """Whether what this plan writes is in place, and the run is over.

            With --overwrite an earlier run may have put it there, and nothing in it tells: this
            rank would go home, and rank 0, who is about to replace it, would lack it. So it stays
            for as long as rank 0 waits for a rank that does not come. Then either rank 0 is done,
            or it is so late that it finds this one missing, and does its share: the output is right
            in any order, and no wait is longer than that.
            """
            return (late or not self.destination.overwrite) and self.destination.manifest().get(
                "plan"
            ) == self.digest

        try:
            with session:
                session.join(
                    finished, lambda: self.destination.refuse(session.staging, session.ranks.name)
                )
                move(session)
                session.listen()
        except (StorageError, OSError):  # as Gone, or as whatever a file that went away led to
            if (
                session.staging.exists()
                or (manifest := self.destination.manifest()).get("plan") != self.digest
            ):
                raise
            return manifest

    def _stamps(self) -> list[int]:
        """When the sources were last changed: a resumed run must not mix two states of them."""
        return [
            Path(f).stat().st_mtime_ns for f in [*self.source.layout.files, *map(str, self.copied)]
        ]


def _short(ignored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Ignored keys, those of one reason counted."""
    by_reason: dict[str, list[str]] = {}
    for key, why in ignored.items():
        by_reason.setdefault(why, []).append(key)
    for why, keys in by_reason.items():
        yield (keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more"), why
