"""Output appears when it is complete, by rename, and nothing else in the destination is touched.

Everything is written in `DST/.mckpt-<plan>/data`, inside the destination: the same filesystem by construction. A run that dies leaves that
directory, which no loader takes for a checkpoint, and the same command goes on in it.
"""

from __future__ import annotations

import fcntl
import filecmp
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mckpt.errors import DestinationError, StorageError
from mckpt.formats.entry import read_file
from mckpt.formats.save_directory import RELEASE, TRACKER, iteration_of, tracked

STAGING = ".mckpt-"
MANIFEST = "mckpt.json"
CONFIG = "config.json"
PUBLISHING = "publishing"  # in a staging directory: what stands in DST may be half of this run's output

# What a checkpoint of each kind consists of, for --overwrite; whatever mckpt wrote is in its manifest besides.
HF_PARTS = (
    CONFIG, MANIFEST, "generation_config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip
UNIT_PARTS = (
    MANIFEST, ".metadata", "metadata.json", "common.pt", "*.distcp", "megatron_args.sh", "megatron_args.json", "run_config.yaml", "train_state.pt",
    "mp_rank_*/model_optim_rng.pt", "mp_rank_*/distrib_optim.pt",
)  # fmt: skip


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
        foreign = self._foreign()
        if foreign:
            raise DestinationError(
                f"{self.path}: holds {foreign[0]}{f' and {len(foreign) - 1} more' * (len(foreign) > 1)}, which is no part of a checkpoint; "
                "--overwrite replaces a directory that holds one checkpoint and nothing else: move it away, or write to another directory"
            )

    def _occupants(self) -> list[str]:
        """What is in the way. Half of an output that a killed run was putting in place is not: the same command replaces it."""
        if not self.path.is_dir():
            return [self.path.name] if os.path.lexists(self.path) else []
        half: set[str] = set()
        for mark in self.root.glob(f"{STAGING}*/{PUBLISHING}"):
            with suppress(ValueError):  # cut short: then nothing had been moved
                half.update(json.loads(mark.read_text()))
        if self.unit is not None:
            return [] if self.unit in half else sorted(p.name for p in self.path.iterdir())
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(STAGING) and p.name not in half)

    def _foreign(self) -> list[str]:
        """Files, and links to directories, that no checkpoint of this kind has and that its manifest does not name."""
        if not self.path.is_dir():
            return [self.path.name]
        written: set[str] = set()
        with suppress(OSError, ValueError, TypeError, KeyError):
            written.update(json.loads((self.path / MANIFEST).read_bytes())["files"])
        parts = HF_PARTS if self.unit is None else UNIT_PARTS
        out = []
        for folder, inner, names in os.walk(self.path):
            here = Path(folder).relative_to(self.path)
            if self.unit is None and here == Path():
                inner[:] = [d for d in inner if not d.startswith(STAGING)]
            links = [d for d in inner if (Path(folder) / d).is_symlink()]
            for name in (*names, *links):
                path = (here / name).as_posix()
                if path not in written and not any(p.count("/") == path.count("/") and fnmatch.fnmatchcase(path, p) for p in parts):
                    out.append(path)
        return sorted(out)

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
                for inner in (p for p in folder.iterdir() if p.is_dir()):
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
            with self._alone():
                self._refuse_occupied()  # it may have been filled since it was looked at
                self.refuse_other_side(side)
                mark = staging / PUBLISHING
                mark.write_text(json.dumps([self.unit] if self.unit else sorted(p.name for p in data.iterdir())))
                sync(mark)
                sync(staging)
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While other runs of mckpt wait to put their output into the same directory."""
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @staticmethod
    def _put_aside(path: Path, staging: Path) -> None:
        """Move what is replaced into the staging directory, which goes when all is done."""
        aside = staging / "replaced"
        aside.mkdir(exist_ok=True)
        os.rename(path, aside / str(len(list(aside.iterdir()))))  # a killed run may have left some there

    def _publish_unit(self, data: Path, staging: Path) -> None:
        if os.path.lexists(self.path):
            self._put_aside(self.path, staging)
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
        shutil.rmtree(folder, ignore_errors=True)
        for name, source in side:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            sync(path)
        os.rename(folder, final)

    def _publish_hf(self, data: Path, staging: Path) -> None:
        old = [p.name for p in self.path.iterdir() if not p.name.startswith(STAGING)]
        for name in sorted(old, key=lambda n: n != CONFIG):  # without config.json first, so that no mixture of old and new can be loaded
            self._put_aside(self.path / name, staging)
        names = sorted(p.name for p in data.iterdir())
        for name in sorted(names, key=lambda n: (n == CONFIG, n)):
            os.rename(data / name, self.path / name)
            if name != CONFIG:
                continue
            sync(self.path)

    def refuse_other_side(self, side: Sequence[tuple[str, Path]]) -> None:
        """DestinationError if DST/hf is there and is not the `side` of this checkpoint to the byte: it would be read with the wrong one."""
        final = self.root / "hf"
        if not side or not os.path.lexists(final):
            return
        for name, source in side:
            path = final / name
            if not path.is_file() or not filecmp.cmp(source, path, shallow=False):
                what = "describes another model" if name == CONFIG and path.is_file() else "is not the source's"
                raise DestinationError(f"{path}: {what}; all checkpoints of one save directory share its hf. Write to another directory")

    def tracker_note(self) -> str | None:
        """What to say when the tracker will go on naming another checkpoint than this one; None if it will name this one."""
        if self.unit is None or self._moves_tracker(iteration_of(self.unit)):
            return None
        now = read_file(self.root / TRACKER, 4096).decode("utf-8", "replace").strip()
        if now == (self.unit if self.unit == RELEASE else str(iteration_of(self.unit))):
            return None
        return f"{self.root / TRACKER} says {now[:40]!r}, and goes on naming that checkpoint and not {self.unit}; say --update-tracker to change it"


def sync(path: Path) -> None:
    """fsync of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
