"""Output appears when it is complete, by rename, and nothing else in the destination is touched.

Everything is written in `DST/.mckpt-<plan>/data`, inside the destination: the same filesystem by construction. A run that dies leaves that
directory, which no loader takes for a checkpoint, and the same command goes on in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mckpt.errors import DestinationError, StorageError
from mckpt.formats import hf
from mckpt.formats.save_directory import RELEASE, TRACKER, iteration_of, tracked

STAGING = ".mckpt-"
MANIFEST = "mckpt.json"
CONFIG = "config.json"


class Destination:
    """Where one checkpoint goes: a unit of a Megatron save directory, or (unit None) a Hugging Face directory."""

    def __init__(self, root: Path, unit: str | None, source: Path, *, overwrite: bool = False, update_tracker: bool = False) -> None:
        self.root, self.unit, self.overwrite, self.update_tracker = Path(os.path.abspath(root)), unit, overwrite, update_tracker
        self.path = self.root / unit if unit else self.root
        self._refuse_near(source)
        if self.root.exists() and not self.root.is_dir():
            raise DestinationError(f"{self.root}: is a file; a directory is wanted")
        self._refuse_occupied()

    def _refuse_near(self, source: Path) -> None:
        here, there = self.root.resolve(), source.resolve()
        if here == there:
            raise DestinationError(f"{self.root}: is the source itself; write to another directory")
        if here in there.parents or there in here.parents:
            where = "above" if here in there.parents else "inside"
            raise DestinationError(f"{self.root}: lies {where} the source {source}; write to a directory apart from it")

    def _refuse_occupied(self) -> None:
        occupied = self._occupants()
        if not occupied:
            return
        if not self.overwrite:
            raise DestinationError(
                f"{self.path}: already holds {occupied[0]}{' and more' * (len(occupied) > 1)}; say --overwrite to replace it"
            )
        foreign = [name for name in occupied if not self._ours(name)]
        if foreign:
            raise DestinationError(
                f"{self.path}: holds {foreign[0]}, which is no part of a checkpoint; --overwrite replaces a directory that holds one checkpoint only"
            )

    def _occupants(self) -> list[str]:
        if not self.path.is_dir():
            return [self.path.name] if self.path.exists() else []
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(STAGING))

    def _ours(self, name: str) -> bool:
        if self.unit is None:
            known = {CONFIG, MANIFEST, "generation_config.json", *hf.INDEX.values()}
            return name in known or (name.endswith((".safetensors", ".bin"))) or (self.path / CONFIG).is_file()
        parts = (
            ".metadata",
            "metadata.json",
            "common.pt",
            MANIFEST,
            "megatron_args.sh",
            "megatron_args.json",
            "run_config.yaml",
            "train_state.pt",
        )
        return name in parts or name.startswith("mp_rank_") or name.endswith(".distcp")

    @contextmanager
    def staging(self, plan: str, resume: bool = True) -> Iterator[Path]:
        """The staging directory of a plan, locked; what it holds stays there if the body raises, and is used again with `resume`."""
        made = [p for p in (self.root, *self.root.parents) if not p.exists()]
        folder = self.root / f"{STAGING}{plan[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StorageError(f"{folder}: cannot be made: {e.strerror or e}") from e
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DestinationError(f"{folder}: another mckpt is writing here") from None
            if not resume:
                for inner in (p for p in folder.iterdir() if p.name != "lock"):
                    shutil.rmtree(inner)
            for p in made:
                sync(p.parent)
            yield folder
        finally:
            os.close(lock)

    def publish(self, staging: Path, side: Sequence[tuple[str, Path]] = ()) -> None:
        """Staged data becomes the checkpoint. `side` are files of DST/hf, written before the checkpoint appears."""
        try:
            data = staging / "data"
            for folder, _, names in os.walk(data):
                for name in names:
                    sync(Path(folder) / name)
                sync(Path(folder))
            if self.unit is None:
                self._publish_hf(data, staging)
            else:
                self._publish_side(side, staging)
                self._publish_unit(data, staging)
            shutil.rmtree(staging)
            sync(self.root)
        except OSError as e:
            raise StorageError(
                f"{self.path}: cannot be put in place: {e.strerror or e} ({e.filename}); the complete data is in {staging}"
            ) from e

    def _publish_unit(self, data: Path, staging: Path) -> None:
        if self.path.exists():
            os.rename(self.path, staging / "replaced")
        os.rename(data, self.path)
        sync(self.root)
        assert self.unit is not None
        if self._moves_tracker(iteration_of(self.unit)):
            text = self.unit if self.unit == RELEASE else str(iteration_of(self.unit))
            beside = self.root / f"{TRACKER}.mckpt"
            beside.write_text(text)
            sync(beside)
            os.rename(beside, self.root / TRACKER)

    def _moves_tracker(self, iteration: int | None) -> bool:
        if self.update_tracker or not (self.root / TRACKER).exists():
            return True
        now = tracked(self.root)
        return now is not None and iteration is not None and iteration > now

    def _publish_side(self, side: Sequence[tuple[str, Path]], staging: Path) -> None:
        final = self.root / "hf"
        if not side or final.exists():
            return
        folder = staging / "hf"
        for name, source in side:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            sync(path)
        os.rename(folder, final)

    def _publish_hf(self, data: Path, staging: Path) -> None:
        old = self._occupants()
        for name in sorted(old, key=lambda n: n != CONFIG):  # without config.json first, so that no mixture of old and new can be loaded
            os.rename(self.path / name, staging / f"replaced-{name}")
        names = sorted(p.name for p in data.iterdir())
        for name in sorted(names, key=lambda n: (n == CONFIG, n)):
            os.rename(data / name, self.path / name)
            if name != CONFIG:
                continue
            sync(self.path)

    def refuse_other_side(self, side: Sequence[tuple[str, Path]]) -> None:
        """DestinationError if DST/hf is there and describes another model."""
        config = self.root / "hf" / CONFIG
        mine = dict(side).get(CONFIG)
        if config.exists() and mine is not None and config.read_bytes() != mine.read_bytes():
            raise DestinationError(
                f"{config}: describes another model; checkpoints of one save directory share DST/hf. Write to another directory"
            )


def sync(path: Path) -> None:
    """fsync of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
