"""DST/hf: the Hugging Face files of the model, which all checkpoints of a save directory share."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mckpt.checkpoint import description
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import DestinationError, SourceError
from mckpt.formats.carried import FILES
from mckpt.formats.hf_config import CONFIG, side_files
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.storage import sparse_copy
from mckpt.storage.files import Stamp, TargetFile, checksum_of, mode_of, stamp_to_copy
from mckpt.storage.staging import STAGING, sync


class SideFiles:
    """The files of DST/hf for one checkpoint, by name: the source path of each, or its content."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, Path | bytes],
        carried: Sequence[TargetFile] = (),
    ) -> None:
        """carried: files of carried tensors, which a run writes to the directory hf of its staging
        directory.
        """
        self.path, self.files = root / "hf", files
        self.carried = {Path(file.path).name: file.size for file in carried}
        paths = [source for source in files.values() if isinstance(source, Path)]
        for path in paths:
            sparse_copy.whole(path)
        self._stamps = {path: _state(stamp_to_copy(path)) for path in paths}  # when it was planned

    def check_unchanged(self) -> None:
        """Raises SourceError if a file cannot be read, or has changed since the plan was made."""
        for source, planned in self._stamps.items():
            if _state(stamp_to_copy(source)) != planned:
                raise SourceError(
                    f"{source}: was changed since the plan was made; run the command again when"
                    " nothing writes there"
                )

    def recorded(self) -> dict[str, Any]:
        """Returns the manifest's entry on the files, none for a checkpoint without them."""
        entries = {
            name: {
                "bytes": len(source) if isinstance(source, bytes) else source.stat().st_size,
                "checksum": checksum_of(source),
            }
            for name, source in self.files.items()
        }
        return {"hf": entries} if entries else {}

    def missing(self) -> list[str]:
        """Returns a sentence for each file that is not in DST/hf."""
        paths = [self.path / name for name in self.files]
        return [f"{path}: is missing" for path in paths if not path.is_file()]

    def refuse_other(self) -> None:
        """Raises DestinationError if an existing DST/hf differs from this one in any byte.
        Otherwise a checkpoint would be read with the wrong config.

        In an object store a killed run may have sent some of the files. A run sends the config
        after the other files of a model, and then the carried tensors.
        """
        self.check_unchanged()
        if not self.files or not os.path.lexists(self.path):
            return
        in_store = sparse_copy.of(self.path) is not None
        half_sent = in_store and not (self.path / CONFIG).is_file()
        for name, source in self.files.items():
            path = self.path / name
            if half_sent and not path.is_file():
                continue
            if not path.is_file() or not _same(source, path):
                what = (
                    "describes another model"
                    if name == CONFIG and path.is_file()
                    else "is not the source's"
                )
                raise DestinationError(
                    f"{path}: {what}; all checkpoints of one save directory share its hf. Write to"
                    f" another directory, or delete {self.path.parent} if you need none of its"
                    " checkpoints"
                )
        for name in {path.name for path in self.path.glob(FILES)} | self.carried.keys():
            there = self.path / name
            if in_store and not there.is_file():
                continue
            if not there.is_file() or there.stat().st_size != self.carried.get(name):
                raise other_tensors(there)
        if (self.path / MAPPING).is_file() and MAPPING not in self.files:
            raise DestinationError(
                f"{self.path / MAPPING}: is the family file of other checkpoints here, and this one"
                " has none. Write to another directory"
            )

    def publish(self, staging: Path) -> None:
        """Moves the files to DST/hf. If it exists already, only compares the carried tensors."""
        folder = staging / "hf"
        if not self.files:
            return
        if self.path.exists():
            for name in self.carried:
                if not filecmp.cmp(folder / name, self.path / name, shallow=False):
                    raise other_tensors(self.path / name)
            return
        for name, source in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                path.write_bytes(source)
            else:
                path.touch(mode_of(source))
                shutil.copyfile(source, path)
            sync(path)
        self.check_unchanged()  # a file may have changed during the copy
        for inner, _, _ in os.walk(folder):
            sync(Path(inner))
        os.rename(folder, self.path)
        # after a power cut, no checkpoint may be there without these files
        sync(self.path.parent)


def carry(source: Checkpoint, root: Path) -> None:
    """Copies the directory hf of a checkpoint, with its carried tensors, to a save directory in
    which its training will save.

    Raises DestinationError if that has another one.
    """
    own, to = source.files.hf_directory, root / "hf"
    if own is None or os.path.realpath(own) == os.path.realpath(to):
        return
    weights = [TargetFile.copy(path.name, path) for path in sorted(own.glob(FILES))]
    names = [CONFIG, *side_files(own).kept, *(file.path for file in weights)]
    side = SideFiles(root, {name: own / name for name in names}, weights)
    side.refuse_other()
    if not to.exists():
        from tempfile import TemporaryDirectory

        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=STAGING, dir=root) as folder:
            side.publish(Path(folder))


def refuse_changed(source: Checkpoint, given: Collection[str] = ()) -> None:
    """Raises SourceError if a file that is copied beside the weights is not as mckpt wrote it.

    given: names of files that the user gives in the place of the source's.
    """
    own = source.files.side_directory
    if own is not None:
        recorded = {n: facts for n, facts in source.files.recorded_side.items() if n not in given}
        description.refuse_changed_side(own, recorded)


def other_tensors(path: Path) -> DestinationError:
    """Returns the error for a file of carried tensors in DST/hf that differs from the source's."""
    return DestinationError(
        f"{path}: is not the source's; all checkpoints of one save directory share its hf. Write to"
        " another directory"
    )


def _state(stamp: Stamp) -> tuple[int | str, ...]:
    """Returns a stamp without the inode, for which some network filesystems make up numbers."""
    return *stamp.shared, stamp.exact[0]


def _same(source: Path | bytes, path: Path) -> bool:
    sparse_copy.whole(path)
    return (
        path.read_bytes() == source
        if isinstance(source, bytes)
        else filecmp.cmp(source, path, shallow=False)
    )
