"""Output appears when it is complete, by rename, and nothing else in the destination is touched.

Everything is written in `DST/.mckpt-<plan>/data`, inside the destination: the same filesystem by
construction. A run that dies leaves that directory, which no loader takes for a checkpoint, and the
same command goes on in it.
"""

from __future__ import annotations

import fcntl
import filecmp
import fnmatch
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mckpt.errors import DestinationError, SourceError, StorageError
from mckpt.formats.megatron.save_directory import MAPPING, RELEASE, TRACKER, iteration_of, tracked
from mckpt.storage.files import read_file, stamp
from mckpt.storage.staging import LOCK, MANIFEST, OVER, STAGING, lock, locked, sync

Side = Sequence[tuple[str, Path | bytes]]  # files of DST/hf: where each is now, or its content

CONFIG = "config.json"
# in a staging directory: {name: [identity]} of its output, some of which may stand in DST already
PUBLISHING = "publishing"
REPLACED = "replaced"  # in a staging directory: what stood in DST, until the new output is complete

# What a checkpoint of each kind consists of, for --overwrite; whatever mckpt wrote is in its
# manifest besides.
HF_PARTS = (
    CONFIG,
    MANIFEST,
    "generation_config.json",
    "*.safetensors",
    "*.index.json",
    "pytorch_model*.bin",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
)
UNIT_PARTS = (
    MANIFEST,
    ".metadata",
    "metadata.json",
    "common.pt",
    "*.distcp",
    "megatron_args.sh",
    "megatron_args.json",
    "run_config.yaml",
    "train_state.pt",
    "mp_rank_*/model_optim_rng.pt",
    "mp_rank_*/distrib_optim.pt",
)


class Destination:
    """Where one checkpoint goes: a unit of a Megatron save directory, or (unit None) a Hugging Face
    directory.
    """

    def __init__(
        self,
        root: Path,
        unit: str | None,
        source: Path,
        *,
        overwrite: bool = False,
        update_tracker: bool = False,
        helps: bool = False,
    ) -> None:
        """helps: do not look yet whether something is in the way; the caller calls `check` later,
        or rank 0 looks.
        """
        self.root, self.unit, self.overwrite, self.update_tracker = (
            Path(os.path.abspath(root)),
            unit,
            overwrite,
            update_tracker,
        )
        self.path = self.root / unit if unit else self.root
        self._staging: Path | None = None  # of the plan that runs
        # bytes and mtime of the side files when they were planned
        self._side: dict[Path, tuple[int, int]] = {}
        self._refuse_near(source)
        if self.root.exists() and not self.root.is_dir():
            raise DestinationError(f"{self.root}: is a file; a directory is wanted")
        if not helps:  # it may be the work of the others, who were done before this one began
            self.refuse_occupied()

    def _refuse_near(self, source: Path) -> None:
        here, there = self.root.resolve(), source.resolve()
        if here == there:
            raise DestinationError(f"{self.root}: is the source itself; write to another directory")
        if here in there.parents or there in here.parents:
            where = "above" if here in there.parents else "inside"
            raise DestinationError(
                f"{self.root}: lies {where} the source {source}; write to a directory apart from it"
            )

    def refuse_occupied(self, staging: Path | None = None) -> None:
        """DestinationError if something is in the way of the plan of `staging`.

        Before that is known, any interrupted run might be it.
        """
        occupied = self._occupants(staging)
        if not occupied:
            return
        if not self.overwrite:
            raise DestinationError(
                f"{self.path}: already holds {occupied[0]}{' and more' * (len(occupied) > 1)}; say"
                " --overwrite to replace it"
            )
        foreign = self._foreign()
        if foreign:
            raise DestinationError(
                f"{self.path}: holds"
                f" {foreign[0]}{f' and {len(foreign) - 1} more' * (len(foreign) > 1)}, which is no"
                " part of a checkpoint; --overwrite replaces a directory that holds one checkpoint"
                " and nothing else: move it away, or write to another directory"
            )

    def _occupants(self, staging: Path | None) -> list[str]:
        """What is in the way.

        What a killed run of the same plan had put in place is not: the same command replaces it.
        """
        if not self.path.is_dir():
            return [self.path.name] if os.path.lexists(self.path) else []
        half: dict[str, set[str]] = {}
        for folder in self.root.glob(f"{STAGING}*") if staging is None else [staging]:
            for name, identities in _marked(folder).items():
                half.setdefault(name, set()).update(identities)
        if self.unit is not None:
            ours = self.unit in half and _identity(self.path) in half[self.unit]
            return [] if ours else sorted(p.name for p in self.path.iterdir())
        there = sorted(p for p in self.path.iterdir() if not p.name.startswith(STAGING))
        return [p.name for p in there if p.name not in half or _identity(p) not in half[p.name]]

    def _foreign(self) -> list[str]:
        """Files, and links to directories, that no checkpoint of this kind has and that its
        manifest does not name.
        """
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
                if path not in written and not any(
                    p.count("/") == path.count("/") and fnmatch.fnmatchcase(path, p) for p in parts
                ):
                    out.append(path)
        return sorted(out)

    def staging_directory(self, plan: str) -> Path:
        """Where the files of a plan are until they are complete."""
        return self.root / f"{STAGING}{plan[:16]}"

    def manifest(self) -> dict[str, Any]:
        """That of the checkpoint in place; {} if there is none."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.path / MANIFEST).read_bytes())
            return found
        return {}

    def refuse(self, staging: Path, run: str) -> None:
        """Raises what `staging` would raise for this run, and changes nothing: for a rank that
        waits for the one that calls it.
        """
        self._refuse(staging)
        with suppress(FileNotFoundError):
            if (staging / LOCK).read_text() != run and locked(staging / LOCK):
                raise DestinationError(f"{staging}: another mckpt is writing here")
        self._refuse_read_only(staging / LOCK)

    def check(self) -> None:
        """Raises what a run would raise before it writes; a run that was interrupted here may be
        the one that would go on.
        """
        self._refuse(None)
        self._refuse_read_only(self.root)

    @staticmethod
    def _refuse_read_only(path: Path) -> None:
        there = next(p for p in (path, *path.parents) if os.path.exists(p))
        if not os.access(there, os.W_OK):
            raise StorageError(f"{path}: cannot be made: no leave to write {there}")

    def _refuse(self, staging: Path | None) -> None:
        self.refuse_occupied(staging)
        self._check_side(self._side)

    @contextmanager
    def staging(self, plan: str, resume: bool = True, run: str = "") -> Iterator[Path]:
        """The staging directory of a plan, locked; what it holds stays there if the body raises,
        and is used again with `resume`.

        While it is locked, its lock says which `run` holds it.
        """
        made = [p for p in (self.root, *self.root.parents) if not p.exists()]
        folder = self._staging = self.staging_directory(plan)
        self._refuse(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StorageError(f"{folder}: cannot be made: {e.strerror or e}") from e
        try:
            if not lock(held):
                raise DestinationError(f"{folder}: another mckpt is writing here")
            os.ftruncate(held, 0)
            os.write(held, run.encode())
            os.fsync(held)  # where another machine's rank reads it
            if not resume:
                for inner in (p for p in folder.iterdir() if p.is_dir() and p.name != REPLACED):
                    shutil.rmtree(inner)
            for p in made:
                sync(p.parent)
            yield folder
        finally:
            os.close(held)
            # NFS keeps the name of an open file: only now can its directory go
            with suppress(OSError):
                os.rmdir(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}{OVER}"), ignore_errors=True)

    def left_over(self) -> list[tuple[Path, int]]:
        """Staging directories here that neither this plan nor any running mckpt has, and what each
        takes on the disk, in bytes.
        """
        out = []
        for folder in sorted(self.root.glob(f"{STAGING}*")):
            with suppress(OSError):
                if folder != self._staging and folder.is_dir() and not locked(folder / LOCK):
                    paths = [
                        Path(inner) / name for inner, _, names in os.walk(folder) for name in names
                    ]
                    out.append((folder, sum(os.lstat(p).st_blocks * 512 for p in paths)))
        return out

    def publish(self, staging: Path, side: Side = ()) -> None:
        """Staged data becomes the checkpoint.

        `side` are files of DST/hf, written before the checkpoint appears.
        """
        try:
            data = staging / "data"
            for folder, _, names in os.walk(data):
                for name in names:
                    sync(Path(folder) / name)
                sync(Path(folder))
            with self._alone():
                self.refuse_occupied(staging)  # it may have been filled since it was looked at
                self.refuse_other_side(side)
                self._publish_side(side, staging)
                mark = self._mark(
                    {self.unit: data} if self.unit else {p.name: p for p in data.iterdir()}, staging
                )
                if self.unit is None:
                    self._publish_hf(data, staging)
                else:
                    self._publish_unit(data, staging)
                os.unlink(mark)
                self._remove(staging)
        except OSError as e:
            raise StorageError(
                f"{self.path}: cannot be put in place: {e.strerror or e} ({e.filename}); the"
                f" complete data is in {staging}"
            ) from e

    @staticmethod
    def _remove(staging: Path) -> None:
        """Without its mark it is of no harm.

        By another name first: other ranks write into it as long as they find it.
        """
        over = staging.with_name(f"{staging.name}{OVER}")
        shutil.rmtree(over, ignore_errors=True)
        os.replace(staging, over)
        shutil.rmtree(over, ignore_errors=True)

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
    def _mark(output: dict[str, Path], staging: Path) -> Path:
        """Writes down what is about to be put in place, beside what runs killed before had put
        there.
        """
        marked = _marked(staging)
        for name, path in output.items():
            marked.setdefault(name, set()).add(_identity(path))
        mark, beside = staging / PUBLISHING, staging / f"{PUBLISHING}.new"
        beside.write_text(
            json.dumps({name: sorted(identities) for name, identities in marked.items()})
        )
        sync(beside)
        os.replace(beside, mark)
        sync(staging)
        return mark

    @staticmethod
    def _put_aside(path: Path, staging: Path) -> None:
        """Move what is replaced into the staging directory, which goes when all is done."""
        aside = staging / REPLACED
        aside.mkdir(exist_ok=True)
        # a killed run may have left some there
        os.rename(path, aside / str(len(list(aside.iterdir()))))

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
            sync(self.root)

    def _moves_tracker(self, iteration: int | None) -> bool:
        if self.update_tracker or not (self.root / TRACKER).exists():
            return True
        now = tracked(self.root)
        return now is not None and iteration is not None and iteration > now

    def _publish_side(self, side: Side, staging: Path) -> None:
        final = self.root / "hf"
        if not side or final.exists():
            return
        folder = staging / "hf"
        shutil.rmtree(folder, ignore_errors=True)
        for name, source in side:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                path.write_bytes(source)
            else:
                shutil.copyfile(source, path)
            sync(path)
        self._check_side(source for _, source in side)  # while it was copied, too
        os.rename(folder, final)

    def _publish_hf(self, data: Path, staging: Path) -> None:
        old = [p.name for p in self.path.iterdir() if not p.name.startswith(STAGING)]
        # without config.json first, so that no mixture of old and new can be loaded
        for name in sorted(old, key=lambda n: n != CONFIG):
            self._put_aside(self.path / name, staging)
        names = sorted(p.name for p in data.iterdir() if p.name != CONFIG)
        for name in names:
            os.rename(data / name, self.path / name)
        # config.json makes it a checkpoint: after a power cut it must not be there without the rest
        sync(self.path)
        os.rename(data / CONFIG, self.path / CONFIG)
        sync(self.path)

    def refuse_other_side(self, side: Side) -> None:
        """DestinationError if DST/hf is there and is not the `side` of this checkpoint to the byte:
        it would be read with the wrong one.

        SourceError if a file of `side` cannot be read, or is not the one that it was when this was
        asked first.
        """
        self._check_side(source for _, source in side)
        final = self.root / "hf"
        if not side or not os.path.lexists(final):
            return
        for name, source in side:
            path = final / name
            if not path.is_file() or not _same(source, path):
                what = (
                    "describes another model"
                    if name == CONFIG and path.is_file()
                    else "is not the source's"
                )
                raise DestinationError(
                    f"{path}: {what}; all checkpoints of one save directory share its hf. Write to"
                    " another directory"
                )
        if (final / MAPPING).is_file() and MAPPING not in dict(side):
            raise DestinationError(
                f"{final / MAPPING}: is the family file of other checkpoints here, and this one has"
                " none. Write to another directory"
            )

    def _check_side(self, sources: Iterable[Path | bytes]) -> None:
        for source in (s for s in sources if isinstance(s, Path)):
            now = stamp(source)
            if self._side.setdefault(source, now) != now:
                raise SourceError(
                    f"{source}: was changed since the plan was made; run the command again when"
                    " nothing writes there"
                )

    def tracker_note(self) -> str | None:
        """What to say when the tracker will go on naming another checkpoint than this one; None if
        it will name this one.
        """
        if self.unit is None or self._moves_tracker(iteration_of(self.unit)):
            return None
        now = read_file(self.root / TRACKER, 4096).decode("utf-8", "replace").strip()
        if now == (self.unit if self.unit == RELEASE else str(iteration_of(self.unit))):
            return None
        return (
            f"{self.root / TRACKER} says {now[:40]!r}, and goes on naming that checkpoint and not"
            f" {self.unit}; say --update-tracker to change it"
        )


def _same(source: Path | bytes, path: Path) -> bool:
    return (
        path.read_bytes() == source
        if isinstance(source, bytes)
        else filecmp.cmp(source, path, shallow=False)
    )


def _marked(staging: Path) -> dict[str, set[str]]:
    """What runs with this staging directory were putting in place when they were killed: the
    identities of each name.
    """
    with suppress(OSError, ValueError, AttributeError, TypeError):  # there is none, mostly
        return {
            name: set(identities)
            for name, identities in json.loads((staging / PUBLISHING).read_text()).items()
        }
    return {}


def _identity(path: Path) -> str:
    """Tells a file from all others that may have its name; a rename leaves it.

    Of a directory: that of the first file below.
    """
    if path.is_dir() and not path.is_symlink():
        path = min((p for p in path.rglob("*") if not p.is_dir()), default=path)
    found = os.lstat(path)
    return f"{found.st_ino} {found.st_mtime_ns}"
