"""The zip container of torch.save: laid out from names and sizes alone, and read from any file that
torch wrote.

    | header data.pkl | ... | header data/0 | bytes, 64-byte aligned | crc, size | header data/1 |
    ... | version | directory |

The bytes equal those of torch's own writer (2.13; caffe2/serialize/inline_container.cc over miniz):
no compression, each record aligned by an 'FB' extra field, a data descriptor behind each record
that has bytes, zip64 fields if a size or a header's offset reaches 2**32 - 1. So
torch.load(mmap=True) works, and torch's offset arithmetic holds. Nothing here reads or writes
tensor data.

Sizes and offsets are in bytes. Offsets count from the start of the file when reading, from the
start of the container when laying out.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mckpt.containers import torch_stream
from mckpt.containers.safe_pickle import MAX_BYTES, Storage, as_tensor, contiguous, emitted, loads
from mckpt.errors import SourceError
from mckpt.storage.descriptors import pread
from mckpt.values import dtypes

_WIDE = 0xFFFFFFFF  # a zip64 field stores sizes and offsets from this value on
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
# pickles that a TorchFileReader keeps: two of any size, because files come stage by stage, and more
# if they are small; a value takes 10 times the memory of its pickle
_MAX_KNOWN, _MAX_KNOWN_BYTES = 2, 1 << 20
_SERIALIZATION_ID = b"0" * 40  # torch writes a hash of record names and crcs, and only logs it

Ranges = dict[str, tuple[int, int]]  # storage key -> (offset, bytes)
Records = dict[str, tuple[int, int, int | None]]  # name -> (offset, bytes, crc32 or None)


# ------------------------------------------------------------------------------------------ writing


class _ZipEntry(NamedTuple):
    name: bytes
    at: int  # offset of its local header
    start: int  # offset of its data
    size: int
    data: bytes | None  # None: tensor data, which the caller writes

    def zip64(self, compressed: int) -> bytes:
        """Returns the zip64 extra field, b"" if it is not needed.

        compressed: the compressed size; torch writes 0 in the local header.
        """
        body = struct.pack("<QQ", self.size, compressed) if self.size >= _WIDE else b""
        body += struct.pack("<Q", self.at) if self.at >= _WIDE else b""
        return struct.pack("<HH", 1, len(body)) + body if body else b""

    def local(self) -> bytes:
        """Returns the local header, padded so that the data is aligned.

        Its sizes and crc are 0; the descriptor has them.
        """
        wide = self.zip64(0)
        pad = self.start - self.at - 30 - len(self.name) - len(wide) - 4
        extra = wide + b"FB" + struct.pack("<H", pad) + b"Z" * pad
        flags = 0x0808 if self.size else 0x0800
        return (
            _LOCAL.pack(0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
            + self.name
            + extra
        )

    def descriptor(self, crc: int) -> bytes:
        """Returns the data descriptor, which follows the data; b"" if there is no data."""
        if not self.size:
            return b""
        return struct.pack(
            "<IIQQ" if self.zip64(0) else "<IIII", 0x08074B50, crc, self.size, self.size
        )

    def central(self, crc: int) -> bytes:
        wide, small, at = self.zip64(self.size), min(self.size, _WIDE), min(self.at, _WIDE)
        flags, n = 0x0808 if self.size else 0x0800, len(self.name)
        return (
            _CENTRAL.pack(
                0x02014B50, 0, 0, flags, 0, 0, 0, crc, small, small, n, len(wide), 0, 0, 0, 0, at
            )
            + self.name
            + wide
        )


class TorchFile:
    """The layout of a torch.save file, with all of its bytes but the tensor data.

    stem: the name of the folder in the zip.
    storages: key -> bytes.
    known: the bytes of storages that are known already, such as those of small numbers; the others
        are filled in later.

    `data` has the place of each storage, `size` is the size of the file.
    """

    def __init__(
        self,
        stem: str,
        pickle: bytes,
        storages: dict[str, int],
        known: dict[str, bytes] | None = None,
    ) -> None:
        self._entries: list[_ZipEntry] = []
        self._end = 0
        self.data: Ranges = {}
        self._stem = stem
        self._add("data.pkl", len(pickle), pickle)
        for name, data in (
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ):
            self._add(name, len(data), data)
        for key, size in storages.items():
            content = (known or {}).get(key, None if size else b"")
            self.data[key] = (self._add(f"data/{key}", size, content), size)
        for name, data in (("version", b"3\n"), (".data/serialization_id", _SERIALIZATION_ID)):
            self._add(name, len(data), data)
        central = sum(46 + len(e.name) + len(e.zip64(e.size)) for e in self._entries)
        self._central = self._end  # offset of the directory
        self.size: int = self._end + central + _END64.size + _LOCATOR.size + _END.size

    def _add(self, name: str, size: int, data: bytes | None) -> int:
        entry = _ZipEntry(f"{self._stem}/{name}".encode(), self._end, 0, size, data)
        bare = self._end + 30 + len(entry.name) + len(entry.zip64(0)) + 4
        entry = entry._replace(start=bare + -bare % 64)
        self._entries.append(entry)
        self._end = entry.start + size + len(entry.descriptor(0))
        return entry.start

    def fixed(self, crc_of: Callable[[int, int], int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of everything but the tensor data, in order, neighbours joined.

        crc_of(offset, nbytes): the crc32 of a range of data; called in order of the offsets. None
            writes 0 as crc, which torch ignores and `unzip -t` does not.
        """
        piece, begin, central = bytearray(), 0, bytearray()
        for e in self._entries:
            piece += e.local()
            if e.data is None:
                yield begin, bytes(piece)
                crc, piece, begin = (
                    crc_of(e.start, e.size) if crc_of else 0,
                    bytearray(),
                    e.start + e.size,
                )
            else:
                crc = zlib.crc32(e.data)
                piece += e.data
            piece += e.descriptor(crc)
            central += e.central(crc)
        at, count, length = self._central, len(self._entries), len(central)
        central += _END64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, length, at)
        central += _LOCATOR.pack(0x07064B50, 0, at + length, 1)
        few = min(count, 0xFFFF)
        central += _END.pack(0x06054B50, 0, 0, few, few, min(length, _WIDE), min(at, _WIDE), 0)
        yield begin, bytes(piece + central)


def fixed_of_items(
    items: Sequence[TorchFile], at: Sequence[int]
) -> Callable[[Callable[[int, int], int] | None], Iterable[tuple[int, bytes]]]:
    """Returns the function `TargetFile.fixed` of a file of several containers.

    at: the byte at which each of them begins.
    """

    def fixed(crc_of: Callable[[int, int], int] | None) -> Iterable[tuple[int, bytes]]:
        for base, container in zip(at, items, strict=True):
            inner = None if crc_of is None else (lambda at, n, base=base: crc_of(base + at, n))
            for where, data in container.fixed(inner):
                yield base + where, data

    return fixed


def lay_out(value: Any, stem: str = "archive") -> TorchFile:
    """Lays out a torch.save file of `value`.

    stem: the folder in the zip, which is the file's name without its suffix, or `archive` in a
        .distcp.

    Raises PickleError for a value that has no place in a checkpoint.
    """
    emitter = emitted(value)
    return TorchFile(stem, emitter.done(), emitter.storages, emitter.known)


# ------------------------------------------------------------------------------------------ reading


def _pread(fd: int, nbytes: int, at: int, where: str) -> bytes:
    got = pread(fd, nbytes, at)
    while len(got) < nbytes:
        more = pread(fd, nbytes - len(got), at + len(got))
        if not more:
            raise SourceError(
                f"{where}: {nbytes} bytes at {at} are needed, the file has {len(got)} of them: it"
                " is cut short"
            )
        got += more
    return got


def read(fd: int, where: str, base: int = 0, length: int | None = None) -> tuple[Any, Ranges]:
    """Reads a torch.save file, or an item of a .distcp; returns its value and {storage key: (offset
    in the file, bytes)}.

    where: names the file in errors.
    base, length: the range of the item in the file.

    Reads no tensor data. Raises SourceError if the container is damaged or torch would not write
    it, PickleError if its pickle is hostile or damaged.
    """
    return _read(fd, where, base, length, _loaded)


class TorchFileReader:
    """Reads many files, and parses equal pickles of files that follow each other once.

    The ranks of one pipeline stage have equal pickles, unless their args name the rank, and so have
    the items of a .distcp that have one shape and dtype. Pickles are compared whole, not by a hash.
    Files with equal pickles share one value, which must not be changed.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Any, list[Storage]]] = OrderedDict()
        self._num_bytes = 0

    def read(
        self,
        fd: int,
        where: str,
        base: int = 0,
        length: int | None = None,
        known: Records | None = None,
    ) -> tuple[Any, Ranges]:
        """Reads one file, as the function `read` does. known: what `records` has returned for it,
        which is not read again.
        """
        return _read(fd, where, base, length, self._loaded, known)

    def _loaded(self, data: bytes, where: str) -> tuple[Any, list[Storage]]:
        found = self._known.pop(data, None)
        if found is None:
            found = _loaded(data, where)
            self._num_bytes += len(data)
        self._known[data] = found
        while len(self._known) > _MAX_KNOWN and self._num_bytes > _MAX_KNOWN_BYTES:
            self._num_bytes -= len(self._known.popitem(last=False)[0])
        return found


def _loaded(data: bytes, where: str) -> tuple[Any, list[Storage]]:
    """Returns the value of a pickle and the storages that it names, each once."""
    storages: list[Storage] = []
    value = loads(data, where, storages=storages)
    return value, list({(storage.key, storage.nbytes): storage for storage in storages}.values())


def _read(
    fd: int,
    where: str,
    base: int,
    length: int | None,
    load: Callable[[bytes, str], tuple[Any, list[Storage]]],
    known: Records | None = None,
) -> tuple[Any, Ranges]:
    room = os.fstat(fd).st_size - base
    length = room if length is None else length
    if base < 0 or length < 0 or length > room:
        raise SourceError(
            f"{where}: {length} bytes at {base} are needed, the file has {max(room, 0)} there:"
            " it is cut short"
        )
    if pread(fd, min(length, len(torch_stream.MAGIC)), base) == torch_stream.MAGIC:
        return torch_stream.read(fd, where, base, length)
    found: Records = known or dict(_directory(fd, where, base, length))
    records = {name: (at, size) for name, (at, size, _) in found.items()}
    if "data.pkl" not in records:
        raise SourceError(
            f"{where}: a zip of {len(records)} records without data.pkl: not a file of torch.save"
            " (a TorchScript archive?)"
        )
    if "byteorder" in records:
        start, size = records["byteorder"]
        order = _pread(fd, min(size, 16), start, where)
        if order != b"little":
            raise SourceError(
                f"{where}: written on a {order.decode('ascii', 'replace')}-endian machine; re-save"
                " it on a little-endian one"
            )
    start, size = records["data.pkl"]
    if size > MAX_BYTES:
        raise SourceError(
            f"{where}: its data.pkl has {size} bytes; at most {MAX_BYTES} are read here"
        )
    value, storages = load(_pread(fd, size, start, where), where)
    ranges = {name[5:]: at for name, at in records.items() if name.startswith("data/")}
    problems = {}
    for storage in storages:
        there = ranges.get(storage.key, (0, -1))[1]
        if storage.nbytes > there:
            problems[storage.key[:80]] = (
                f"storage {storage.key[:80]!r} has {storage.nbytes} bytes, "
                + (f"its record {there}" if there >= 0 else "and there is no record of it")
            )
    if problems:
        raise SourceError.of(
            f"{where}: its pickle names bytes that it does not hold:", problems.values()
        )
    return value, ranges


def records(fd: int, where: str, base: int = 0, length: int | None = None) -> Records:
    """Returns {record: (offset in the file, bytes, crc32)} of a torch.save file, or of an item of a
    .distcp; nothing for a file from before torch 1.6, which has no records.

    The crc32 is None if the writer left it out.
    """
    length = os.fstat(fd).st_size - base if length is None else length
    if pread(fd, min(length, len(torch_stream.MAGIC)), base) == torch_stream.MAGIC:
        return {}
    found = _directory(fd, where, base, length)
    return {name: (at, size, crc or None) for name, (at, size, crc) in found.items()}


def stem_of(fd: int) -> str:
    """Returns the folder of the records in a torch.save file: the name without its suffix under
    which torch.save wrote the file, `archive` if it got no name, and "" before torch 1.6.
    """
    head = pread(fd, 512, 0)
    length = int.from_bytes(head[26:28], "little") if head[:4] == b"PK\3\4" else 0
    return head[30 : 30 + length].decode("utf-8", "replace").partition("/")[0]


def _directory(fd: int, where: str, base: int, length: int) -> dict[str, tuple[int, int, int]]:
    """Reads the directory of a zip; returns {record name without its stem: (offset in the file,
    bytes, crc32)}.

    Proves that the records lie inside the zip and do not overlap.
    """
    # torch writes no comment behind the end record, so it is at the end of the file
    tail = _pread(fd, min(length, 128), base + length - min(length, 128), where)
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\5\6":
        raise SourceError(f"{where}: {_no_zip(pread(fd, min(length, 64), base), length)}")
    _, disk, disk2, here, count, size, offset, comment = _END.unpack_from(tail, at)
    end = length - _END.size
    if tail[at - _LOCATOR.size :][:4] == b"PK\6\7" and at >= _LOCATOR.size + _END64.size:
        _, _, end64, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        end = length - _END.size - _LOCATOR.size - _END64.size
        magic, _, _, _, disk, disk2, here, count, size, offset = _END64.unpack_from(
            tail, at - _LOCATOR.size - _END64.size
        )
        if end64 != end:
            raise SourceError(
                f"{where}: its zip64 end record should be at {end64}, and is at {end} of {length}"
                " bytes: padded or cut"
            )
        if magic != 0x06064B50:
            raise SourceError(f"{where}: has no zip64 end record at {end}: damaged")
    if disk or disk2 or here != count or comment or offset + size != end:
        raise SourceError(
            f"{where}: a directory of {size} bytes at {offset} should end at {end} of {length}:"
            " padded, cut or not of torch"
        )
    if size > MAX_BYTES or count * 46 > size:
        raise SourceError(
            f"{where}: a directory of {count} records in {size} bytes; at least 46 each, at most"
            f" {MAX_BYTES} in all"
        )
    raw, at = _pread(fd, size, base + offset, where), 0
    found: dict[str, tuple[int, int, int]] = {}
    spans: list[tuple[int, int, str]] = []
    headers: list[tuple[int, int, int, str]] = []
    for _ in range(count):
        if at + 46 > size or raw[at : at + 4] != b"PK\1\2":
            raise SourceError(
                f"{where}: directory entry {len(headers)} of {count} does not begin at byte"
                f" {offset + at}"
            )
        _, _, _, flags, method, _, _, crc, packed, nbytes, n, extra, note, _, _, _, start = (
            _CENTRAL.unpack_from(raw, at)
        )
        name = raw[at + 46 : at + 46 + n].decode("utf-8", "replace")
        packed, nbytes, start = _zip64(
            raw[at + 46 + n : at + 46 + n + extra], packed, nbytes, start, name, where
        )
        at += 46 + n + extra + note
        if method or flags & 1 or packed != nbytes:
            raise SourceError(
                f"{where}: record {name[:80]!r} is compressed or encrypted ({packed} bytes for"
                f" {nbytes}); torch's never are"
            )
        headers.append((start, nbytes, crc, name))
    if at != size:
        raise SourceError(f"{where}: {count} records fill {at} of the directory's {size} bytes")
    for start, nbytes, crc, name in headers:
        begin = _data_start(fd, base, start, nbytes, limit=offset, name=name, where=where)
        short = name.split("/", 1)[-1]
        if short in found:
            raise SourceError(f"{where}: record {name[:80]!r} is there twice")
        found[short] = (base + begin, nbytes, crc)
        spans.append((start, begin + nbytes, name))
    spans.sort()
    for (_, one, name), (two, _, other) in itertools.pairwise(spans):
        if two < one:
            raise SourceError(
                f"{where}: record {name[:80]!r} ends at {one}, inside it at {two} begins"
                f" {other[:80]!r}"
            )
    return found


def _zip64(
    extra: bytes, packed: int, nbytes: int, start: int, name: str, where: str
) -> tuple[int, int, int]:
    """Returns the true (packed, nbytes, start) of a directory entry.

    Those that do not fit in the entry are in its extra field 1, in the order nbytes, packed, start.
    """
    if _WIDE not in (packed, nbytes, start):
        return packed, nbytes, start
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1 and at + 4 + size <= len(extra):
            wide = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            needed = [nbytes == _WIDE, packed == _WIDE, start == _WIDE]
            if len(wide) >= sum(needed):
                nbytes, packed, start = (
                    wide.pop(0) if n else v
                    for n, v in zip(needed, (nbytes, packed, start), strict=True)
                )
                return packed, nbytes, start
        at += 4 + size
    raise SourceError(
        f"{where}: record {name[:80]!r} has 4 GiB or more, and no zip64 field with its size"
    )


def _data_start(
    fd: int, base: int, start: int, nbytes: int, *, limit: int, name: str, where: str
) -> int:
    """Returns the offset in the zip of a record's bytes; the directory begins at `limit`."""
    if start + 30 > limit:
        raise SourceError(
            f"{where}: record {name[:80]!r} begins at {start}, behind the records' end at {limit}"
        )
    head = _pread(fd, 30, base + start, where)
    if head[:4] != b"PK\3\4":
        raise SourceError(f"{where}: no record header at {start}, where {name[:80]!r} should begin")
    begin = (
        start + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    )
    if begin + nbytes > limit:
        raise SourceError(
            f"{where}: record {name[:80]!r} has {nbytes} bytes at {begin}, the records end at"
            f" {limit}: its size is wrong"
        )
    return begin


def _no_zip(head: bytes, length: int) -> str:
    """Returns the reason why a file that does not end like a zip is refused."""
    cure = 'torch.save(torch.load(path, map_location="cpu", weights_only=True), path)'
    if head[:2] == b"PK":
        return (
            f"a zip of torch.save whose end is missing after {length} bytes: cut short, or padded"
        )
    if head[257:262] == b"ustar" or b"storages" in head:
        return (
            "the tar format of torch before 0.1.10; re-save it with a torch that still reads it:"
            f" {cure}"
        )
    return (
        f"not a file of torch.save: {length} bytes that begin with {head[:8].hex(' ') or 'nothing'}"
    )


# (dtype, shape, bytes of the item) -> its bytes before the data
_HEADS: dict[tuple[str, tuple[int, ...], int], bytes] = {}
_MAX_HEADS = 4096  # of 1 KB; a checkpoint has some hundred kinds of chunk


def item_data_offset(
    fd: int, base: int, length: int, nbytes: int, where: str, dtype: str, shape: tuple[int, ...]
) -> int:
    """Returns the offset in the file of a tensor's data, given its item in a .distcp.

    base, length: the range of the item in the file.
    nbytes, dtype, shape: those of the tensor, which must be row-major.

    The bytes before the data of an item depend only on its dtype, its shape and torch's version. So
    the first item of a kind is parsed (`read`). The others must begin with the same bytes and have
    the same length, which takes one small read. Raises SourceError if the item is not one row-major
    tensor of that dtype and shape.
    """
    head = _HEADS.get((dtype, shape, length))
    if (
        head is not None
        and pread(fd, len(head), base) == head
        and os.fstat(fd).st_size >= base + length
    ):
        return base + len(head)
    value, ranges = read(fd, where, base, length)
    view = as_tensor(value)
    if view is None or view.dtype != dtype or view.shape != shape:
        found = f"{view.dtype} {list(view.shape)}" if view else "no tensor"
        raise SourceError(
            f"{where}: the item at {base} should be {dtype} {list(shape)}, it is {found}"
        )
    if view.strides != contiguous(shape) and nbytes > dtypes.itemsize(dtype):
        raise SourceError(
            f"{where}: the item at {base} has strides {list(view.strides)}, it should be"
            f" {list(contiguous(shape))}"
        )
    at = ranges[view.storage][0] + view.offset * dtypes.itemsize(dtype)
    # torch writes no longer head than 4 KiB
    if at - base <= 1 << 12 and nbytes == math.prod(shape) * dtypes.itemsize(dtype):
        if len(_HEADS) >= _MAX_HEADS:
            _HEADS.clear()
        _HEADS[dtype, shape, length] = _pread(fd, at - base, base, where)
    return at
