"""Models on the Hugging Face Hub: downloads the files of a Hugging Face directory that mckpt
reads.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mckpt.errors import SourceError, UsageError
from mckpt.formats.hf_config import ADAPTER, CONFIG, SIDE_FILES
from mckpt.formats.hf_files import INDEX, SINGLE, index_files
from mckpt.storage import hub, sparse_copy
from mckpt.storage.addresses import HubName
from mckpt.storage.staging import MANIFEST
from mckpt.storage.stores import Object

# Everything but weights, at the top of a repository.
SMALL = (CONFIG, MANIFEST, ADAPTER[0], *INDEX.values(), *SIDE_FILES)


def local(name: HubName, *, weights: bool = True) -> Path:
    """Downloads a model into the cache of huggingface_hub, with its weights or without, and returns
    its directory there. Of a repository without config.json that has one archive of NeMo 1, returns
    the path of the archive.

    Raises the errors of `storage.hub.fetch`, and SourceError if it has several archives.
    """
    root = hub.fetch(name, SMALL)
    # the directory of a snapshot has the name of its commit, so a branch may move meanwhile
    at_commit = name._replace(revision=root.name)
    if weights and not any((root / file).exists() for file in (CONFIG, ADAPTER[0])):
        archives = sorted(file for file in _files(at_commit, root) if file.endswith(".nemo"))
        if len(archives) > 1:
            raise SourceError(
                f"{name}: has {len(archives)} archives of NeMo 1: {', '.join(archives)}. Download"
                f" one with `hf download {name.repo} FILE`, and give its path"
            )
        if archives:
            return hub.fetch(at_commit, [glob.escape(archives[0])]) / archives[0]
    if weights:
        for kind in INDEX:
            if (root / INDEX[kind]).exists():
                hub.fetch(at_commit, list(map(glob.escape, index_files(root / INDEX[kind]))))
                break
            # transformers reads the single file first; without it, one file of any name
            for pattern in (SINGLE[kind], "*.safetensors" if kind == ".safetensors" else ""):
                if pattern:
                    hub.fetch(at_commit, [pattern])
                if any(root.glob(f"*{kind}")):
                    return root
    return root


def _files(name: HubName, root: Path) -> list[str]:
    """Returns the names of the files at the top of a repository; offline those in the cache."""
    return [path.name for path in root.iterdir()] if hub.offline() else list(hub.sizes(name))


def streamed(name: HubName) -> Path:
    """Returns a directory of a model on the Hub whose weights are read from there when they are
    needed, if they are not in the cache. Everything else is downloaded into the cache.

    Raises as `local`.
    """
    if hub.offline():
        return local(name)
    kind = ".safetensors"
    root = hub.fetch(name, SMALL)
    at_commit = name._replace(revision=root.name)
    sizes = hub.sizes(at_commit)
    names = sorted(file for file in sizes if file.endswith(kind))
    if (root / INDEX[kind]).exists():
        names = [file for file in index_files(root / INDEX[kind]) if file in sizes]
    elif SINGLE[kind] in names:
        names = [SINGLE[kind]]
    if not names or all((root / file).exists() for file in names):
        return local(name)
    store = _HubFiles(at_commit, {file: sizes[file] for file in names})
    folder = sparse_copy.load(name, store, name.repo.rpartition("/")[2])
    for small in root.rglob("*"):
        name_here = small.relative_to(root)
        if small.is_file() and str(name_here) not in names:
            (folder / name_here).parent.mkdir(exist_ok=True)
            (folder / name_here).symlink_to(small.resolve())
    sparse_copy.fill(folder)
    return folder


class _HubFiles(NamedTuple):
    """Files of a model on the Hub as a `stores.Store` that is only read."""

    name: HubName  # at a commit, so that the files cannot change
    sizes: Mapping[str, int]  # bytes, by name

    def list(self) -> dict[str, Object]:
        commit = self.name.revision or ""
        return {file: Object(size, commit, 0) for file, size in self.sizes.items()}

    def read(self, name: str, at: int, nbytes: int, version: str = "") -> bytes:
        return hub.read_range(self.name, name, at, nbytes)

    def write(self, name: str, data: bytes | Path) -> str:
        raise UsageError(f"{self.name}: `mckpt push` writes to the Hub")

    def remove(self, names: Iterable[str]) -> None:
        raise UsageError(f"{self.name}: `mckpt push` writes to the Hub")
