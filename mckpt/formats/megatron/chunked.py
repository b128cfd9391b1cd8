"""Directories of chunks, which are parts of whole, unsharded tensors in any files.

`zarr_directory` finds the file of each chunk of a zarr directory. A directory of
torch.distributed.checkpoint is read here:

.metadata          which chunk of which key lies where (a pickle)
    __R_I.distcp       items one after the other, each a torch.save file of one chunk or object

`torch_dist`, `torch_dcp`, `fsdp_dtensor` and `mfsdp_v2` are such directories. They differ in their
keys, and `torch_dist` alone has a metadata.json.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mckpt.containers import torch_file, torch_spans
from mckpt.containers.dcp_metadata import Metadata, read_metadata
from mckpt.containers.entries import Entry, Span
from mckpt.containers.torch_spans import Item
from mckpt.errors import SourceError, UsageError
from mckpt.formats.base import (
    Names,
    Problems,
    Shown,
    group,
    packed,
    stored_buffer,
    stored_shape,
)
from mckpt.formats.megatron.torch_dist_writing import MARKER, METADATA
from mckpt.geometry.box import Box, Stored, range_boxes, row_major
from mckpt.lazy import numpy as np
from mckpt.lazy import pattern
from mckpt.mapping import Bound
from mckpt.storage import descriptors
from mckpt.storage.files import opened, unreadable
from mckpt.values.dtypes import itemsize, numpy_dtype

if TYPE_CHECKING:
    from mckpt.formats.megatron.optimizer import flat

# files open at once while a layout is read; a save has one or two for each rank
MAX_OPEN = 32

Key = tuple[str, int, int]  # of a stored tensor, and its layer and expert, where the key names them
Keys = Callable[[Bound], list[Key]]  # the keys of a rule


def stacked_keys(b: Bound) -> list[Key]:
    """Returns the keys of stacked tensors. Their leading axes are the layers and experts, unless
    the key names these.
    """
    return [(key, layer, 0) for key, layer in b.global_keys()]


class Chunked(ABC):
    """The index of a directory, and the places of its chunks."""

    notes: tuple[str, ...] = ()

    def __init__(self, root: Path, metadata: Metadata) -> None:
        self.root, self.metadata = root, metadata
        self.files = sorted({item[0] for item in metadata.items.values()})
        self.number = {name: i for i, name in enumerate(self.files)}

    def object(self, key: str) -> tuple[Any, Any]:
        """Returns the value of an object, and the places of its storages."""
        # A call for a container of tensors alone would be a mistake of mckpt.
        raise NotImplementedError("it has tensors only")

    @abstractmethod
    def spans(self, problems: list[str], beside: list[Item]) -> Iterator[Span]:
        """Returns the tensors of all chunks, the records and tensors of all objects, and those of
        the files `beside`.
        """

    def check_sizes(self) -> None:  # noqa: B027
        """Raises SourceError for files whose size does not fit their content, even if nothing reads
        that content. Does nothing where opening or reading the files finds that.
        """

    def place(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], files: Files
    ) -> tuple[int, int]:
        """Returns the number of a chunk's file, and the byte at which the chunk's data begins: that
        of its item, which has no header.
        """
        file, at, _ = self.metadata.items[key, offsets]
        return self.number[file], at

    def strides(self, key: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the strides, in elements, of a chunk of these sizes; None if it is dense."""
        return None

    @cached_property
    def paths(self) -> list[str]:
        """Returns the paths of its files, in the order of their numbers."""
        return [str(self.root / f) for f in self.files]

    @staticmethod
    def read(path: str, base: int = 0, length: int | None = None) -> tuple[Any, Any]:
        """Returns the value of a torch.save file, which may be a part of a file, and the places of
        its storages.
        """
        with opened(path) as fd:
            return torch_file.read(fd, path, base, length)

    def show(self, most: int | None) -> Shown:
        """Returns every stored tensor, with the number of its chunks."""
        tensors = self.metadata.tensors
        rows = [
            (key, dtype, size, {"chunks": len(chunks)})
            for key, (dtype, size, chunks) in tensors.items()
        ]
        facts = {"files": len(self.files), "objects": len(self.metadata.objects)}
        return Shown(facts, rows[:most], Counter(t[:2] for t in tensors.values()))

    def stored(
        self,
        bound: list[Bound],
        names: Names,
        problems: Problems,
        keys: Keys = stacked_keys,
    ) -> list[Stored]:
        """Returns the chunks of these rules; what is missing or of another shape becomes one of
        `problems`.
        """
        scope = names.scope()
        stored: list[Stored] = []
        with Files(self.root) as files:
            for b in bound:
                found: dict[Box, list[tuple[int, int, Entry]]] = {}
                whole = packed(b.rule, scope)
                layers = set(b.layers.tolist())
                for key, layer, expert in keys(b):
                    if key not in self.metadata.tensors:
                        if not b.rule.alias:
                            problems.missing(f"{key} is missing")
                        continue
                    _, size, chunks = self.metadata.tensors[key]
                    size, axes = self.metadata.flattened.get(key, size), b.axes(scope)
                    if (
                        b.rule.tp == "vocab"
                        and len(size) > len(axes)
                        and size[len(axes)] >= whole.shape[0]
                    ):
                        whole = packed(b.rule, scope, size[len(axes)])
                    wanted = (*axes, *stored_shape(b.rule, whole))
                    if size != wanted:
                        problems.missing(
                            f"{key} is {list(size)}, and should be {list(wanted)} by its dims"
                        )
                        continue
                    for _, offsets, sizes in sorted(
                        (self.metadata.items[key, offsets], offsets, sizes)
                        for offsets, sizes in chunks
                    ):
                        instance = layer, expert
                        for region, entries in self._chunk(
                            b, key, instance, layers, offsets, sizes, files
                        ):
                            found.setdefault(region, []).extend(entries)
                for region, entries in found.items():
                    shape, pieces = stored_buffer(b.rule, whole, region)
                    stored += group(
                        b.rule.key,
                        shape,
                        pieces,
                        entries,
                        problems,
                        replica=b.rule.alias,
                        padding=b.rule.tp == "vocab",
                        carried=b.rule.carried,
                    )
        return stored

    def _chunk(
        self,
        b: Bound,
        key: str,
        instance: tuple[int, int],
        layers: set[int],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        files: Files,
    ) -> Iterator[tuple[Box, list[tuple[int, int, Entry]]]]:
        """Yields the parts of one chunk: a region, and the entries of the layers and experts that
        hold it. The leading axes are outermost, so each entry is one part of the chunk.

        instance: the layer and expert of the key, where it names them. layers: those of the rule.
        """
        layer, expert = instance
        if b.rule.stack:
            yield from self._layers_of_tower(key, offsets, sizes, files)
            return
        dtype, axes = self.metadata.tensors[key][0], len(b.rule.stacked())
        size = itemsize(dtype)
        file, at = self.place(key, offsets, sizes, files)
        strides = self.strides(key, sizes)
        for box in self._boxes(key, offsets, sizes):
            region = Box(tuple(box.offset[axes:]), tuple(box.shape[axes:]))
            steps = strides or row_major(box.shape)
            view = None if steps[axes:] == row_major(region.shape) else steps[axes:]
            entries = []
            for index in itertools.product(*map(range, box.shape[:axes])):
                numbers = (o + i for o, i in zip(box.offset[:axes], index, strict=True))
                named = dict(zip(b.rule.stacked(), numbers, strict=True))
                if "layer" in named:
                    named["layer"] = b.stack[named["layer"]] if b.stack else named["layer"]
                    if named["layer"] not in layers:  # another rule has this layer
                        continue
                start = at + size * sum(i * n for i, n in zip(index, steps[:axes], strict=True))
                entry = Entry(dtype, region.shape, file, start, view)
                entries.append((named.get("layer", layer), named.get("expert", expert), entry))
            at += math.prod(box.shape) * size
            if entries and all(region.shape):
                yield region, entries

    def _layers_of_tower(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], files: Files
    ) -> Iterator[tuple[Box, list[tuple[int, int, Entry]]]]:
        """Yields the parts of one chunk of a tensor with the layers of a tower, one for each of
        them. The regions count the rows of all layers.
        """
        dtype, whole, _ = self.metadata.tensors[key]
        rows = self.metadata.flattened.get(key, whole)[1]
        file, at = self.place(key, offsets, sizes, files)
        strides = self.strides(key, sizes)
        for box in self._boxes(key, offsets, sizes):
            steps, shape = strides or row_major(box.shape), tuple(box.shape[1:])
            view = None if steps[1:] == row_major(shape) else steps[1:]
            for n in range(box.shape[0]):
                first = (box.offset[0] + n) * rows + box.offset[1]
                start = at + n * steps[0] * itemsize(dtype)
                entry = Entry(dtype, shape, file, start, view)
                yield Box((first, *box.offset[2:]), shape), [(0, 0, entry)]
            at += math.prod(box.shape) * itemsize(dtype)

    def _boxes(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Box]:
        """Returns the boxes of a tensor whose elements a chunk holds, one box after the other.

        Up to megatron-core 0.14 a chunk of an optimizer's state may be a range of one rank's shard:
        its axes are the numbers of the shard along each axis, and a range of its elements.
        """
        whole = self.metadata.flattened.get(key)
        if whole is None:
            return [Box(offsets, sizes)]
        grid = self.metadata.tensors[key][1][:-1]
        shard = tuple(n // ways for n, ways in zip(whole, grid, strict=True))
        first = [o * n for o, n in zip(offsets[:-1], shard, strict=True)]
        return [
            Box(tuple(f + o for f, o in zip(first, box.offset, strict=True)), box.shape)
            for box in range_boxes(shard, offsets[-1], offsets[-1] + sizes[-1])
        ]

    def extents(self, key: str) -> Iterator[flat.Extent]:
        """Yields the chunks of a tensor of one axis."""
        from mckpt.formats.megatron.optimizer import flat

        dtype, _, chunks = self.metadata.tensors[key]
        with Files(self.root) as files:
            for offsets, sizes in chunks:
                low = offsets[0]
                yield flat.Extent(
                    low, low + sizes[0], dtype, *self.place(key, offsets, sizes, files)
                )


class Files:
    """The files of a directory that were read last, kept open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fds: OrderedDict[str, int] = OrderedDict()

    def fd(self, file: str) -> int:
        """Returns a descriptor, which is valid until the next call."""
        if file not in self.fds:
            if len(self.fds) == MAX_OPEN:
                descriptors.close(self.fds.popitem(last=False)[1])
            try:
                self.fds[file] = descriptors.open_file(self.root / file)
            except OSError as e:
                raise unreadable(self.root / file, e) from e
        self.fds.move_to_end(file)
        return self.fds[file]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self.fds.values():
            descriptors.close(fd)


MODEL = "model."  # prefix of the keys of weights in torch_dcp and fsdp_dtensor
# bytes at the beginning of a .metadata that contain the first keys
HEAD = 1 << 20


def has_keys(root: Path, prefix: str, most: int = HEAD) -> bool:
    """Returns whether a directory without metadata.json has keys that begin with a prefix.

    most: the bytes at the beginning of the .metadata that are searched; -1: all.
    """
    if (root / MARKER).exists() or not (root / METADATA).is_file():
        return False
    try:
        with open(root / METADATA, "rb") as f:
            head = f.read(most)
    except OSError as e:
        raise unreadable(root / METADATA, e) from e
    # Before a string of a pickle stands its length, in one byte (torch) or in four (mckpt).
    starts = re.finditer(re.escape(prefix.encode()) + rb"[a-z.0-9_]*", head)
    return any(
        len(m[0]) in (head[at - 1], int.from_bytes(head[at - 4 : at], "little"))
        for m in starts
        for at in [m.start()]
    )


# what NeMo puts into the keys of a model, and of an optimizer's state of it
_WRAPPED = pattern(
    r"(?:^|(?<=\.))(?:module\.|model\.(?:module\.)?)(?=(?:embedding|decoder|output_layer|mtp)\.)"
)


def unwrapped(key: str) -> str:
    """Returns the key of Megatron-Core for a key of NeMo; other keys stay as they are."""
    return _WRAPPED.sub("", key, count=1)


def wrapping(keys: Iterable[str]) -> tuple[str, ...]:
    """Returns a note if keys of a model are those of NeMo."""
    found = next((match[0] for key in keys if (match := _WRAPPED.match(key))), None)
    return (f"its keys begin with `{found}`, as NeMo writes them",) if found else ()


def _unwrapped(metadata: Metadata) -> Metadata:
    """Returns an index with the keys of Megatron-Core in place of those of NeMo."""
    return Metadata(
        {unwrapped(key): found for key, found in metadata.tensors.items()},
        [unwrapped(key) for key in metadata.objects],
        {(unwrapped(key), at): item for (key, at), item in metadata.items.items()},
        {unwrapped(key): shape for key, shape in metadata.flattened.items()},
    )


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

    def __init__(self, root: Path, nemo: bool = False) -> None:
        """nemo: the keys may be those of NeMo."""
        metadata = read_metadata(root / METADATA)
        if nemo and (notes := wrapping(metadata.tensors)):
            metadata, self.notes = _unwrapped(metadata), notes
        super().__init__(root, metadata)
        absent = [name for name in self.files if not (root / name).is_file()]
        if absent:
            raise SourceError.of(f"{root}: {METADATA} names files that are not there:", absent)

    def object(self, key: str) -> tuple[Any, Any]:
        """Returns the value of an object, and the places of its storages."""
        file, offset, length = self.metadata.items[key, None]
        return self.read(str(self.root / file), offset, length)

    def settings(self, name: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
        """Yields the keys that have this form, and what matched: those of objects, and of tensors,
        which torch makes of settings such as `lr` that are tensors.
        """
        for key in (*self.metadata.tensors, *self.metadata.objects):
            if one := name.fullmatch(key):
                yield one, key

    def setting(self, key: str) -> Any:
        """Returns an object, or the number in a tensor of one element."""
        return self.number_at(key) if key in self.metadata.tensors else self.object(key)[0]

    def raw(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Yields the bytes of objects and of tensors of one chunk, unread."""
        with Files(self.root) as files:
            for key in keys:
                _, _, chunks = self.metadata.tensors.get(key, (None, None, [(None, None)]))
                file, offset, length = self.metadata.items[key, chunks[0][0]]
                yield descriptors.pread(files.fd(file), length, offset)

    def number_at(self, key: str) -> float:
        """Returns the number in a tensor of one element. Raises UsageError for other tensors."""
        dtype, shape, chunks = self.metadata.tensors[key]
        if math.prod(shape) != 1:
            raise UsageError(
                f"{self.root}: {key} is a tensor of {list(shape)}, where mckpt knows numbers only;"
                " give --no-optimizer to convert the weights alone"
            )
        with Files(self.root) as files:
            file, at = self.place(key, *chunks[0], files)
            data = descriptors.pread(files.fd(self.files[file]), itemsize(dtype), at)
        number = np.frombuffer(data, numpy_dtype(dtype))[0]
        return int(number) if "int" in dtype else float(number)

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
