"""A directory of torch.distributed.checkpoint: chunks of whole, unsharded tensors.

    .metadata          which chunk of which key lies where (a pickle)
    __R_I.distcp       items one after the other, each a torch.save file of one chunk or object

`torch_dist`, `torch_dcp` and `fsdp_dtensor` are such directories. They differ in their keys, and
`torch_dist` alone has a metadata.json.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mckpt.containers import torch_file, torch_spans
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.containers.entries import Span
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError
from mckpt.formats.megatron.chunked import Chunked, Files, Key, Keys
from mckpt.formats.megatron.torch_dist_writing import MARKER, METADATA
from mckpt.mapping import Bound
from mckpt.storage import descriptors
from mckpt.storage.files import unreadable
from mckpt.values.dtypes import itemsize

MODEL = "model."  # prefix of the keys of weights in torch_dcp and fsdp_dtensor
# bytes at the beginning of a .metadata that contain the first keys
HEAD = 1 << 20


def has_keys(root: Path, prefix: str) -> bool:
    """Returns whether a directory without metadata.json has keys that begin with a prefix."""
    if (root / MARKER).exists() or not (root / METADATA).is_file():
        return False
    try:
        with open(root / METADATA, "rb") as f:
            head = f.read(HEAD)
    except OSError as e:
        raise unreadable(root / METADATA, e) from e
    # The byte before a string of a pickle is its length, or a part of it.
    starts = re.finditer(re.escape(prefix.encode()) + rb"[a-z.0-9_]*", head)
    return any(head[m.start() - 1] == len(m[0]) for m in starts)


def single_keys(b: Bound) -> list[Key]:
    """Returns the keys of tensors of one layer and one expert each."""
    layers, experts = b.instances()
    return list(zip(b.keys(), layers.tolist(), experts.tolist(), strict=True))


def listed(keys: list[Key]) -> Keys:
    """Returns the same keys for every rule."""
    return lambda _: keys


def names_of(bound: Iterable[Bound]) -> set[str]:
    """Returns the keys of all tensors of one layer and one expert."""
    return {key for b in bound for key, _, _ in single_keys(b)}


class Directory(Chunked):
    """The index of a directory, and the places of its chunks."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, read_metadata(root / METADATA))
        absent = [name for name in self.files if not (root / name).is_file()]
        if absent:
            raise SourceError.of(f"{root}: {METADATA} names files that are not there:", absent)

    def object(self, key: str) -> tuple[Any, Any]:
        """Returns the value of an object, and the places of its storages."""
        file, offset, length = self.metadata.items[key, None]
        return self.read(str(self.root / file), offset, length)

    def raw(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Yields the bytes of objects, unread."""
        with Files(self.root) as files:
            for key in keys:
                file, offset, length = self.metadata.items[key, None]
                yield descriptors.pread(files.fd(file), length, offset)

    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        """Returns the records and tensors of all items, and of the files `beside`."""
        items = [
            Item(str(self.root / file), f"{key} at {list(offsets)}" if offsets else key, *place)
            for (key, offsets), (file, *place) in self.metadata.items.items()
        ]
        return torch_spans.spans(items + beside, problems)

    def check_sizes(self) -> None:
        """Raises SourceError for files that end before the end of their last item, even if nothing
        reads that item.
        """
        ends = dict.fromkeys(self.files, 0)
        last: dict[str, str] = {}
        for (key, _), (file, at, length) in self.metadata.items.items():
            if at + length > ends[file]:
                ends[file], last[file] = at + length, key
        sizes = {file: os.path.getsize(self.root / file) for file in self.files}
        short = [
            f"{f} has {sizes[f]:,} bytes, but its last item ({last[f]}) ends at byte {end:,}"
            for f, end in ends.items()
            if sizes[f] < end
        ]
        if short:
            raise SourceError.of(
                f"{self.root}: files are truncated, or {METADATA} belongs to another checkpoint;"
                " copy them again:",
                short,
            )

    def place(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], files: Files
    ) -> tuple[int, int]:
        """Returns the number of a chunk's file, and the byte at which the chunk's data begins."""
        dtype = self.metadata.tensors[key][0]
        file, base, length = self.metadata.items[key, offsets]
        where = f"{self.root / file}: {key} at {list(offsets)}"
        nbytes = math.prod(sizes) * itemsize(dtype)
        at = torch_file.item_data_offset(files.fd(file), base, length, nbytes, where, dtype, sizes)
        return self.number[file], at
