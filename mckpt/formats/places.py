"""Places of checkpoints: a directory of this machine, a model on the Hub, or a URL of an object
store. All of them are read as a local directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mckpt.errors import DestinationError, SourceError
from mckpt.formats import hf_hub
from mckpt.formats.megatron.save_directory import is_iteration_name
from mckpt.storage import hub, sparse_copy, stores
from mckpt.storage.staging import STAGING

_SIDE = "hf/"  # the directory of Hugging Face files in a save directory


def local(path: str | Path, *, weights: bool = True) -> Path:
    """Returns the directory of a place.

    A model on the Hub is downloaded into the cache of huggingface_hub, with its weights or without.
    For a URL it is a sparse copy (`storage.sparse_copy`), whose bytes are downloaded when they are
    read.

    Raises UsageError, SourceError, StorageError or MissingExtra.
    """
    url = stores.parse(path)
    return hf_hub.local(path, weights=weights) if url is None else _sparse_copy(url)


def target(path: str | Path) -> Path:
    """Returns the absolute directory of a place to write to; for a URL its sparse copy.

    Raises DestinationError if the bucket of the URL does not exist.
    """
    url = stores.parse(path)
    if url is None:
        return Path(os.path.abspath(path))
    try:
        return sparse_copy.load(url, stores.open_store(url), url.name)
    except SourceError as error:
        raise DestinationError(str(error)) from None


def _sparse_copy(url: stores.Url) -> Path:
    if is_iteration_name(url.name) and "/" in url.path:
        # the tracker and hf/, which are beside the checkpoint, belong to it, and the journals
        # show whether it is complete
        parts = (f"{url.name}/", _SIDE, STAGING)
        parent = url.parent
        root = sparse_copy.load(
            parent,
            stores.open_store(parent),
            parent.name,
            lambda name: "/" not in name or name.startswith(parts),
        )
        root = root / url.name
    else:
        root = sparse_copy.load(url, stores.open_store(url), url.name)
    ready(root)
    return root


def ready(root: Path, checkpoint: Path | None = None) -> None:
    """Downloads what opening a checkpoint reads: the headers of its files, and those of hf/ beside
    it. Does nothing for directories of this machine.

    checkpoint: its directory; None: a directory without iterations.
    """
    found = sparse_copy.of(root)
    if found is None:
        return
    side = found.root / _SIDE.rstrip("/")
    sparse_copy.fill(side)
    if checkpoint is not None:
        sparse_copy.fill(checkpoint)
    elif not any(is_iteration_name(name.split("/")[0]) for name in found.objects):
        sparse_copy.fill(root)


@contextmanager
def streamed(path: str | Path) -> Iterator[Path]:
    """Yields the directory of a place without downloading its weights: those of a model on the Hub
    that are not in the cache are read when they are needed, and not kept.

    Raises as `local`.
    """
    if hub.parse(path) is None or stores.parse(path) is not None or hub.offline():
        yield local(path)
    else:
        yield hf_hub.streamed(path)
