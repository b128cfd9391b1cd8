"""Models on the Hugging Face Hub: downloads the files of a Hugging Face directory that mckpt
reads.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mckpt.containers import safetensors
from mckpt.formats.hf_files import INDEX, SINGLE, index_files
from mckpt.storage import hub

FIRST_READ = 128 << 10  # bytes; the header of a shard with 1,000 tensors has about as many
THREADS = 8  # requests at the same time, as many as huggingface_hub makes

# Config, tokenizer, indices, code, licence: everything but weights, at the top of a repository.
SMALL = (
    *("*.json", "*.jsonl", "*.yaml", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"),
    *("*.md", "LICENSE*", "NOTICE*"),
)


def local(path: str | Path, *, weights: bool = True) -> Path:
    """Returns the directory of a path; a model on the Hub, `org/name[@revision]`, is downloaded
    into the cache of huggingface_hub first, with its weights or without.

    Raises the errors of `storage.hub.fetch`.
    """
    name = hub.parse(path)
    if name is None:
        return Path(path)
    root = hub.fetch(name, SMALL)
    # the directory of a snapshot is named after its commit, so a branch that moves does not matter
    at_commit = name._replace(revision=root.name)
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


@contextmanager
def headers(path: str | Path) -> Iterator[Path]:
    """Yields the directory of a path, for commands that read only the headers of the weights.

    For a model on the Hub whose weights are not in the cache, this is a temporary directory: its
    safetensors files have the header and the size of those on the Hub, and holes in the place of
    the tensors. Raises as `local`.
    """
    name, kind = hub.parse(path), ".safetensors"
    if name is None or hub.offline():
        yield local(path)
        return
    root = hub.fetch(name, SMALL)
    at_commit = name._replace(revision=root.name)
    sizes = hub.sizes(at_commit)
    names = sorted(file for file in sizes if file.endswith(kind))
    if (root / INDEX[kind]).exists():
        names = [file for file in index_files(root / INDEX[kind]) if file in sizes]
    elif SINGLE[kind] in names:
        names = [SINGLE[kind]]
    if not names or all((root / file).exists() for file in names):
        yield local(path)
        return
    with tempfile.TemporaryDirectory(prefix="mckpt-") as temporary:
        folder = Path(temporary) / name.repo.rpartition("/")[2]
        folder.mkdir()
        for small in root.iterdir():
            if small.is_file() and small.name not in names:
                (folder / small.name).symlink_to(small.resolve())
        with ThreadPoolExecutor(THREADS) as pool:
            heads = pool.map(lambda file: _header(at_commit, file, sizes[file]), names)
            for file, head in zip(names, heads, strict=True):
                (folder / file).write_bytes(head)
                os.truncate(folder / file, sizes[file])
        yield folder


def _header(name: hub.Name, file: str, size: int) -> bytes:
    """Returns the beginning of a safetensors file up to the end of its header, and maybe more."""
    head = hub.read_range(name, file, 0, min(FIRST_READ, size))
    wanted = 8 + int.from_bytes(head[:8], "little")
    # a length that cannot be true is reported by whoever reads the file
    if len(head) < wanted <= min(size, safetensors.MAX_HEADER):
        head += hub.read_range(name, file, len(head), wanted - len(head))
    return head


def hint(path: Path) -> str:
    """Returns the cure for a path that does not exist, where it might mean a model on the Hub."""
    if hub.parse(f"hf://{path}") is not None and str(path).count("/") == 1:
        return f"; for a model of that name on the Hugging Face Hub, give hf://{path}"
    return ""
