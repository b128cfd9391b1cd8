"""DST/hf: the Hugging Face files of the model, which all checkpoints of a save directory share."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mckpt.errors import DestinationError, SourceError
from mckpt.formats.hf_config import CONFIG
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.storage.files import stamp
from mckpt.storage.staging import sync


class SideFiles:
    """The files of DST/hf for one checkpoint, by name: the source path of each, or its content."""

    def __init__(self, root: Path, files: Mapping[str, Path | bytes]) -> None:
        self.path, self.files = root / "hf", files
        paths = [source for source in files.values() if isinstance(source, Path)]
        self._stamps = {path: stamp(path) for path in paths}  # bytes and mtime when it was planned

    def check_unchanged(self) -> None:
        """Raises SourceError if a file cannot be read, or has changed since the plan was made."""
        for source, planned in self._stamps.items():
            if stamp(source) != planned:
                raise SourceError(
                    f"{source}: was changed since the plan was made; run the command again when"
                    " nothing writes there"
                )

    def refuse_other(self) -> None:
        """Raises DestinationError if an existing DST/hf differs from this one in any byte.
        Otherwise a checkpoint would be read with the wrong config.
        """
        self.check_unchanged()
        if not self.files or not os.path.lexists(self.path):
            return
        for name, source in self.files.items():
            path = self.path / name
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
        if (self.path / MAPPING).is_file() and MAPPING not in self.files:
            raise DestinationError(
                f"{self.path / MAPPING}: is the family file of other checkpoints here, and this one"
                " has none. Write to another directory"
            )

    def publish(self, staging: Path) -> None:
        """Moves the files to DST/hf, unless it exists already."""
        if not self.files or self.path.exists():
            return
        folder = staging / "hf"
        shutil.rmtree(folder, ignore_errors=True)
        for name, source in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                path.write_bytes(source)
            else:
                shutil.copyfile(source, path)
            sync(path)
        self.check_unchanged()  # a file may have changed during the copy
        os.rename(folder, self.path)


def _same(source: Path | bytes, path: Path) -> bool:
    return (
        path.read_bytes() == source
        if isinstance(source, bytes)
        else filecmp.cmp(source, path, shallow=False)
    )
