"""Places of checkpoints: a directory or an archive of this machine, a model on the Hub, or a URL of
an object store. All of them are read as a local directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mckpt.errors import DestinationError, SourceError, shown
from mckpt.formats.megatron.save_directory import VERL_HF, VERL_WEIGHTS, is_iteration_name
from mckpt.storage import addresses, sparse_copy
from mckpt.storage.staging import STAGING

NEMO = ".nemo"  # ends the name of an archive of NeMo 1
_SIDE = "hf/"  # the directory of Hugging Face files in a save directory


def local(path: str | Path, *, weights: bool = True) -> Path:
    """Returns the directory of a place.

    A model on the Hub is downloaded into the cache of huggingface_hub, with its weights or without.
    For a URL it is a sparse copy (`storage.sparse_copy`), whose bytes are downloaded when they are
    read; so it is for an archive of NeMo (`storage.archive`), wherever it lies.

    Raises UsageError, SourceError, StorageError or MissingExtra.
    """
    if (url := addresses.url_of(path)) is not None:
        return _sparse_copy(url)
    if (name := addresses.hub_name_of(path)) is not None:
        from mckpt.formats import hf_hub

        return _unpacked(hf_hub.local(name, weights=weights))
    return _unpacked(Path(path))


def _unpacked(path: Path) -> Path:
    """Returns the directory that an archive of NeMo stands for; another path as it is."""
    if path.suffix != NEMO or not path.is_file():
        return path
    from mckpt.storage.archive import Archive

    archive = Archive(path)
    return sparse_copy.load(shown(str(path)), archive, path.name, note=archive.note)


def target(path: str | Path) -> Path:
    """Returns the absolute directory of a place to write to; for a URL its sparse copy.

    Raises DestinationError if the bucket of the URL does not exist.
    """
    url = addresses.url_of(path)
    if url is None:
        return Path(os.path.abspath(path))
    try:
        return _loaded(url)
    except SourceError as error:
        raise DestinationError(str(error)) from None


def _loaded(url: addresses.Url, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """Returns the sparse copy of a URL. keep: which objects to show."""
    from mckpt.storage import stores

    return sparse_copy.load(url, stores.open_store(url), url.name, keep)


def _sparse_copy(url: addresses.Url) -> Path:
    if is_iteration_name(url.name) and "/" in url.path:
        # the tracker and hf/, which are beside the checkpoint, belong to it, and the journals
        # show whether it is complete
        parts = (f"{url.name}/", _SIDE, STAGING)
        root = _loaded(url.parent, lambda name: "/" not in name or name.startswith(parts))
        root = root / url.name
    elif url.name.endswith(NEMO) and "/" in url.path:
        found = _loaded(url.parent, lambda name: f"{name}/".startswith(f"{url.name}/")) / url.name
        root = _unpacked(found)
        if root != found:
            return root
    else:
        root = _loaded(url)
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
        if checkpoint.name == VERL_WEIGHTS:
            sparse_copy.fill(checkpoint.with_name(VERL_HF))
    elif not any(is_iteration_name(name.split("/")[0]) for name in found.objects):
        sparse_copy.fill(root)


@contextmanager
def streamed(path: str | Path) -> Iterator[Path]:
    """Yields the directory of a place without downloading its weights: those of a model on the Hub
    that are not in the cache are read when they are needed, and not kept.

    Raises as `local`.
    """
    name = addresses.hub_name_of(path)
    if name is None or addresses.url_of(path) is not None:
        yield local(path)
        return
    from mckpt.formats import hf_hub

    yield _unpacked(hf_hub.streamed(name))


def hint(path: Path) -> str:
    """Returns the cure for a path that does not exist, where it might mean a model on the Hub."""
    if addresses.hub_name_of(f"hf://{path}") is not None and str(path).count("/") == 1:
        return f"; for a model of that name on the Hugging Face Hub, give hf://{path}"
    return ""
