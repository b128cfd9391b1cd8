"""Every pickle of a .metadata is either read as Python's own unpickler reads it, or refused."""

from __future__ import annotations

import io
import pickle
import random
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from mckpt.containers import dcp_metadata
from mckpt.errors import MckptError
from tests.helpers.lazy import torch


def many(shared: bool, planner: bool) -> Any:
    """Returns torch's Metadata of tensors in hundreds of chunks each, with numbers of every width
    and objects among the items.
    """
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    size = torch.Size
    tensors: dict[str, Any] = {}
    items: dict[Any, Any] = {}
    for key, dtype, grid, each in (
        ("a", "float32", (3, 300, 1), (1, 1, 70_000)),
        ("b.w", "bfloat16", (400,), (70_000,)),
        ("one", "int64", (), ()),
    ):
        shape = [n * e for n, e in zip(grid, each, strict=True)]
        offsets = [[i * e for i, e in zip(index, each, strict=True)] for index in np.ndindex(grid)]
        same = size(each)
        chunks = [m.ChunkStorageMetadata(size(o), same if shared else size(each)) for o in offsets]
        tensors[key] = m.TensorStorageMetadata(
            m.TensorProperties(getattr(torch, dtype)), size(shape), chunks
        )
        for n, chunk in enumerate(chunks):
            at = n * (1 << 23 if key == "a" else 100)  # the numbers grow beyond 2**31
            index = m.MetadataIndex(
                key, chunk.offsets if shared else size(chunk.offsets), n if n % 50 == 0 else None
            )
            items[index] = _StorageInfo(f"__{n % 7}_0.distcp", at, 1000 + n)
            if n % 90 == 0:
                tensors[f"{key}/shard_{n}"] = m.BytesStorageMetadata()
                items[m.MetadataIndex(f"{key}/shard_{n}")] = _StorageInfo("__0_0.distcp", 7 * n, 9)
    return m.Metadata(
        tensors, {key: (key, chunks[0].offsets) for key in tensors} if planner else None, items
    )


def read(data: bytes) -> Any:
    try:
        return dcp_metadata.read_metadata(data)
    except MckptError as e:
        return str(e)


class Kept:
    """Stands for any class that a .metadata names, and keeps its state."""

    def __new__(cls, *args: Any) -> Kept:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if type(state) is dict else {"dtype": state[0]})


class OfPython(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return {"Size": tuple, "OrderedDict": OrderedDict}.get(name) or type(name, (Kept,), {})


def by_python(data: bytes) -> Any:
    """Returns the tensors and items in the pickle of a .metadata, in order, as Python's own
    unpickler makes them.
    """
    value = OfPython(io.BytesIO(data)).load()
    tensors = {
        key: (t.properties.dtype.__name__, t.size, [(c.offsets, c.sizes) for c in t.chunks])
        for key, t in value.state_dict_metadata.items()
        if hasattr(t, "chunks")
    }
    stored = value.storage_data.items()
    return list(tensors.items()), [
        ((k.fqn, getattr(k, "offset", None)), (v.relative_path, v.offset, v.length))
        for k, v in stored
    ]


def found(data: bytes) -> Any:
    """Returns the same as by_python, read by mckpt."""
    md = dcp_metadata.read_metadata(data)
    return list(md.tensors.items()), list(md.items.items())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_chunks_and_items_are_read_as_python_reads_them(protocol: int) -> None:
    for shared, planner in ((False, False), (True, False), (False, True), (True, True)):
        data = pickle.dumps(many(shared, planner), protocol)
        md = dcp_metadata.read_metadata(data)
        assert len(md.items) == 900 + 400 + 1 + 16 and md.tensors["a"][1] == (3, 300, 70_000), (
            shared,
            planner,
        )
        assert found(data) == by_python(data), (shared, planner)


class ByHand:
    """Builds a .metadata of one tensor in 400 chunks, opcode by opcode. A case can insert opcodes
    that no pickler writes. All chunks but the first are empty, so only their number shows that some
    are missing.
    """

    def __init__(self) -> None:
        self.head, self.num = bytearray(b"\x80\x04"), 0
        module = "torch.distributed.checkpoint.metadata"
        names = (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
        )
        for name in names:
            setattr(self, name, self.known(f"c{module}\n{name}\n".encode()))
        self.info = self.known(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n")
        self.size, self.dtype = self.known(b"ctorch\nSize\n"), self.known(b"ctorch\nfloat32\n")

    def known(self, opcodes: bytes) -> bytes:
        """Puts an object into the memo and pops it; returns the opcodes that get it."""
        self.head += opcodes + b"\x940"
        self.num += 1
        return b"j" + struct.pack("<I", self.num - 1)

    def text(self, text: str) -> bytes:
        return self.known(b"\x8c" + bytes([len(text)]) + text.encode())

    def axis(self, n: int) -> bytes:
        """Returns the opcodes of torch.Size([n])."""
        return self.size + b"(M" + struct.pack("<H", n) + b"t\x85R"

    def chunk(self, n: int) -> bytes:
        """One of 400, which puts itself into the memo."""
        return (
            self.ChunkStorageMetadata
            + b")\x81}("
            + self.offsets
            + self.axis(n)
            + self.sizes
            + self.axis(0 if n else 400)
            + b"ub\x94"
        )

    def of_chunk(self, offset: bytes) -> bytes:
        """Returns the opcodes of an item at that offset."""
        index = (
            self.MetadataIndex
            + b")\x81}(\x8c\x03fqn\x8c\x01a\x8c\x06offset"
            + offset
            + b"\x8c\x05indexNub"
        )
        return (
            index
            + self.info
            + b")\x81}(\x8c\x0drelative_path\x8c\x0c__0_0.distcp"
            + b"\x8c\x06offsetK\x00\x8c\x06lengthK\x09ub"
        )

    def in_chunk(self, offsets: bytes) -> bytes:
        """Returns the opcodes of a chunk at those offsets."""
        return self.ChunkStorageMetadata + b")\x81}(\x8c\x07offsets" + offsets + b"\x8c\x05sizesNub"

    def whole(
        self, chunks: bytes = b"", items: bytes = b"", planner: bytes = b"N", file: bytes = b""
    ) -> bytes:
        """`chunks` behind the chunks, `items` behind the items, `planner` as planner_data; `file`
        gets the name of a file of those in the middle.
        """
        words = (
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "properties",
            "chunks",
            "fqn",
            "index",
            "relative_path",
            "length",
        )
        word = {w: self.text(w) for w in words}
        self.offsets, self.sizes, offset, of_size = (
            self.text(w) for w in ("offsets", "sizes", "offset", "size")
        )
        key, name = self.text("a"), self.text("__0_0.distcp")
        self.name, self.other = name, self.text("__1_0.distcp")
        self.first_chunk = self.num  # of the memo entries
        tensor = (
            key
            + self.TensorStorageMetadata
            + b")\x81}("
            + word["properties"]
            + self.TensorProperties
        )
        tensor += (
            b")\x81}\x8c\x05dtype"
            + self.dtype
            + b"sb"
            + of_size
            + self.axis(400)
            + word["chunks"]
            + b"]("
        )
        tensor += b"".join(map(self.chunk, range(400))) + chunks + b"eub"
        rows = b""
        for n in range(400):
            rows += (
                self.MetadataIndex
                + b")\x81}("
                + word["fqn"]
                + key
                + offset
                + self.axis(n)
                + word["index"]
                + b"Nub"
            )
            rows += (
                self.info
                + b")\x81}("
                + word["relative_path"]
                + (file if file and 100 <= n < 300 else name)
            )
            rows += offset + b"M" + struct.pack("<H", n) + word["length"] + b"K\x09ub"
        body = (
            self.Metadata
            + b")\x81}("
            + word["state_dict_metadata"]
            + b"}("
            + tensor
            + b"u"
            + word["planner_data"]
            + planner
        )
        return bytes(self.head) + body + word["storage_data"] + b"}(" + rows + items + b"uub."


def get(n: int) -> bytes:
    return b"j" + struct.pack("<I", n)


def test_chunks_that_change_after_they_were_built_are_read_or_refused() -> None:
    """Streams that no pickler writes are read as Python reads them, or refused."""
    made = ByHand()
    assert len(read(made.whole()).items) == 400
    other, chunk, over = made.other, made.first_chunk, made.other + b"r" + made.name[1:] + b"0"
    state = b"}(" + made.offsets + made.axis(0) + made.sizes + made.axis(0) + b"ub"
    cases = {
        "a chunk again": ByHand().whole(chunks=get(chunk + 200)),
        "the last chunk popped": ByHand().whole(chunks=b"0"),
        "the last chunk put again": ByHand().whole(chunks=b"\x94"),
        "the last chunk filled": ByHand().whole(chunks=state),
        "the last chunk in a tuple": ByHand().whole(chunks=b"\x85"),
        "a persistent id": ByHand().whole(chunks=b"K\x00Q"),
        "the persistent id of none": ByHand().whole(chunks=b"NQ"),
        "a state for slots": ByHand().whole(chunks=b"N}(\x8c\x03endK\x07u\x86b"),
        "a file's name put over before": ByHand().whole(planner=over + b"N"),
        "a file's name put over behind": ByHand().whole(items=over),
        "a file's name put later": ByHand().whole(file=get(chunk + 400), items=other + b"\x940"),
        "a persistent id of none elsewhere": ByHand().whole(planner=b"NQ0N"),
        "a chunk filled with nothing": ByHand().whole(planner=get(chunk + 200) + b"Nb0N"),
        "a chunk filled with less": ByHand().whole(planner=get(chunk + 200) + b"N}\x86b0N"),
        "a chunk in an item": ByHand().whole(items=made.of_chunk(get(chunk + 200) + b"\x85")),
        "a chunk in a chunk": (
            ByHand().whole(planner=b"}\x8c\x01x" + made.in_chunk(get(chunk + 200)) + b"s")
        ),
        "a chunk in planner_data": ByHand().whole(planner=b"}\x8c\x01x" + get(chunk + 200) + b"s"),
        "a chunk deep in it": (
            ByHand().whole(
                planner=b"}\x8c\x01xccollections\nOrderedDict\n)R\x8c\x01y" + get(chunk + 9) + b"ss"
            )
        ),
        "a chunk in a call in it": (
            ByHand().whole(planner=b"}\x8c\x01xcbuiltins\nlist\n" + get(chunk + 9) + b"\x85Rs")
        ),
    }
    accepted = 0
    for name, data in cases.items():
        if isinstance(said := read(data), str):
            assert said.startswith(".metadata: "), name
        else:
            accepted += 1
            assert found(data) == by_python(data), name
    assert accepted >= 8


def test_chunks_of_two_shapes_in_turns_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader returns them in the order of the pickle."""
    made = ByHand()

    def chunk(n: int) -> bytes:
        offsets, sizes = made.offsets + made.axis(n), made.sizes + made.axis(0 if n else 400)
        return (
            made.ChunkStorageMetadata
            + b")\x81}("
            + (sizes + offsets + b"ub\x94" if n % 2 else offsets + sizes + b"ub")
        )

    monkeypatch.setattr(made, "chunk", chunk)
    data = made.whole()
    assert [o for o, _ in read(data).tensors["a"][2]] == [(n,) for n in range(400)]
    assert found(data) == by_python(data)


def test_names_longer_than_255_bytes_are_read() -> None:
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    items = {
        m.MetadataIndex(f"{n:0{250 + n % 6}}"): _StorageInfo("__0_0.distcp", n, 9)
        for n in range(400)
    }
    tensors = {key.fqn.encode().decode(): m.BytesStorageMetadata() for key in items}
    data = pickle.dumps(m.Metadata(tensors, None, items), 4)
    assert len(read(data).items) == 400 and found(data) == by_python(data)


def ranked(layers: int, experts: int, per_layer: bool, num: random.Random) -> Any:
    """Returns torch's Metadata of chunks in the order in which ranks wrote them. Each rank has
    strings of its own, and numbers, lengths of names and order vary.
    """
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    size, tensors, written = torch.Size, {}, []
    for layer in range(layers):
        key = f"layers.{layer if per_layer else 'all'}.weight"
        shape = (experts, 4, 300) if per_layer else (layers, experts, 4, 300)
        described = tensors.setdefault(
            key, m.TensorStorageMetadata(m.TensorProperties(torch.bfloat16), size(shape), [])
        )
        for expert, part in np.ndindex(experts, 4):
            at = [expert, part, 0] if per_layer else [layer, expert, part, 0]
            described.chunks.append(
                m.ChunkStorageMetadata(size(at), size([1] * (len(at) - 1) + [300]))
            )
            written.append((key, at, len(described.chunks) - 1))
    num.shuffle(written)
    items: dict[Any, Any] = {}
    for rank in range(4):
        keys = {key: key.encode().decode() for key in tensors}
        for n in range(2):
            name = f"__{10**rank}_{n}.distcp"
            for key, at, index in written[2 * rank + n :: 8]:
                where = num.choice((7, 300, 1 << 20, 1 << 33)), num.choice((9, 999))
                items[m.MetadataIndex(keys[key], size(at), index)] = _StorageInfo(name, *where)
    for n in range(600):
        tensors[f"objects/shard_{n}"] = m.BytesStorageMetadata()
        items[m.MetadataIndex(f"objects/shard_{n}")] = _StorageInfo("__0_0.distcp", n, 9)
    return m.Metadata(tensors, None, items)


@pytest.mark.parametrize("per_layer", [False, True])
def test_metadata_gathered_from_ranks_is_read_as_python_reads_it(per_layer: bool) -> None:
    """The numbers of chunks and items take 1 to 9 bytes in turns, and their names are texts in some
    and memo entries in others.
    """
    data = pickle.dumps(ranked(6, 200, per_layer, random.Random(per_layer)), 4)
    assert found(data) == by_python(data)


def test_deep_or_shared_planner_data_is_read() -> None:
    """Lists nested 10**5 deep do not exhaust the stack, and 2**200 shared ones do not take for
    ever.
    """
    value = many(False, False)
    nested = pickle.dumps(value, 4).replace(
        b"\x8c\x0cplanner_data\x94N", b"\x8c\x0cplanner_data\x94" + b"]" * 100_000 + b"a" * 99_999
    )
    assert len(dcp_metadata.read_metadata(nested).items) == 1317
    shared: Any = []
    for _ in range(200):
        shared = [shared, shared]
    value.planner_data = {"a": shared}
    assert len(dcp_metadata.read_metadata(pickle.dumps(value, 4)).items) == 1317


@pytest.mark.parametrize("which", ["in order", "gathered"])
def test_damaged_metadata_is_read_as_python_reads_it_or_refused(which: str) -> None:
    """The damage changes any byte, or moves some bytes."""
    rng = random.Random(1)
    data = pickle.dumps(many(False, False) if which == "in order" else ranked(2, 60, True, rng), 4)
    sound = 0
    for n in range(150):
        body = bytearray(data)
        at, other = rng.randrange(len(body)), rng.randrange(len(body))
        if n % 3:
            body[at] = rng.choice((rng.randrange(256), body[other]))
        else:
            body[at:at] = body[other : other + rng.randrange(1, 300)]
        if not isinstance(read(bytes(body)), str):
            assert found(bytes(body)) == by_python(bytes(body))
            sound += 1
    assert 0 < sound < 150
