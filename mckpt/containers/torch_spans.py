"""The records and tensors of a file of torch.save, as ranges of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.entries import Span
from mckpt.errors import MckptError, SourceError
from mckpt.storage.files import opened
from mckpt.values.dtypes import itemsize


class Item(NamedTuple):
    """A file of torch.save, or an item of a .distcp."""

    path: str
    name: str = ""  # what the item is called; the names of its tensors follow it
    base: int = 0  # offset in the file
    length: int | None = None  # bytes; None: to the end of the file


def spans(items: Iterable[Item], problems: list[str], keep: str = "") -> Iterator[Span]:
    """Yields the records of all items, and the tensors in them. The errors of damaged items and of
    hostile pickles are added to `problems`.

    keep: the key of a dict whose tensors keep their own names, such as the `model` of a state dict.

    A tensor that is a view of every second element, for example, has the range from its first to
    its last element.
    """
    reader = torch_file.TorchFileReader()
    for item in items:
        try:
            for span in _spans(item, reader):
                yield span._replace(name=span.name.removeprefix(f"{keep}.") if keep else span.name)
        except MckptError as e:
            problems.append(f"{e}")


def _spans(item: Item, reader: torch_file.TorchFileReader) -> Iterator[Span]:
    """Yields the records of one item, and the tensors in it."""
    path, name, base, length = item
    where = f"{path}: {name}" if name else path
    with opened(path) as fd:
        records = torch_file.records(fd, where, base, length)
        for record, (at, nbytes, crc) in records.items():
            yield Span(f"{name} record {record}".lstrip(), path, at, nbytes, crc=crc)
        value, data = reader.read(fd, where, base, length, records)
    for key, view in _tensors(value, name):
        if not math.prod(view.shape):
            continue
        size, (at, room) = itemsize(view.dtype), data[view.storage]
        last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        start, nbytes = view.offset * size, (last + 1) * size
        if start + nbytes > room:
            raise SourceError(f"{where}: {key} reaches past the {room:,} bytes of its storage")
        yield Span(key, path, at + start, nbytes, view.dtype)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, safe_pickle.TensorView]]:
    """Yields the tensors in a value from a pickle, with the keys that lead to them."""
    seen: set[int] = set()
    left = [(name, value)]
    while left:
        path, v = left.pop()
        if id(v) in seen:
            continue
        if isinstance(v, (dict, list, tuple, safe_pickle.Record)):
            seen.add(id(v))
        if isinstance(v, safe_pickle.Record):
            if (view := safe_pickle.as_tensor(v)) is not None:
                yield path, view
            else:
                left += [(path, part) for part in (v.args, v.state, v.items, v.entries)]
        elif isinstance(v, dict):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in v.items()]
        elif isinstance(v, (list, tuple)):
            left += [(f"{path}[{i}]", inner) for i, inner in enumerate(v)]
