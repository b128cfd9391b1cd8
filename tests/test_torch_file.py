"""The container of torch.save and the metadata of torch_dist, against torch's own code."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import pickle
import random
import struct
import time
import zipfile
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from mckpt.containers import dcp_metadata, torch_file
from mckpt.containers import safe_pickle as sp
from mckpt.containers.safe_pickle import scanning
from mckpt.errors import MckptError, SourceError
from tests.door import emit

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def sample():
    g = torch.Generator().manual_seed(1)
    base = torch.randn(4, 6, generator=g)
    return {
        "args": argparse.Namespace(a=1, dtype=torch.bfloat16, name="modèle"),
        "model": OrderedDict(
            w=base,
            half=base.half(),
            b=base.bfloat16(),
            f8=base.to(torch.float8_e4m3fn),
            empty=torch.zeros(0),
            one=torch.tensor(3),
        ),
        "view": base.t()[1:, 2:],
        "local._extra_state": None,
    }


def rebuilt(path, stem):
    """The file at `path` laid out again from what was read of it, its data copied."""
    data = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    value, ranges = torch_file.read(fd, str(path))
    os.close(fd)
    laid = torch_file.lay_out(value, stem)
    assert laid.data == ranges
    out = bytearray(laid.size)
    for at, n in laid.data.values():
        out[at : at + n] = data[at : at + n]
    for at, piece in laid.fixed(lambda at, n: zlib.crc32(out[at : at + n])):
        out[at : at + len(piece)] = piece
    return data, bytes(out)


def without_id(data):
    """The file but for the serialization id and its checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        info = z.infolist()[-1]
        assert info.filename.endswith("serialization_id")
        at = data.index(b"PK\7\10", info.header_offset)
        central = data.rindex(b"PK\1\2")
    blank = bytearray(data)
    blank[at - 40 : at + 8] = bytes(48)
    blank[central + 16 : central + 20] = bytes(4)
    return bytes(blank)


@pytest.fixture
def saved(tmp_path):
    torch.save(sample(), tmp_path / "s.pt")
    return tmp_path / "s.pt"


def test_equals_torchs_own_writer(saved):
    golden, ours = rebuilt(saved, "s")
    assert without_id(golden) == without_id(ours)
    assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it(saved, mmap):
    saved.write_bytes(rebuilt(saved, "s")[1])
    with torch.serialization.safe_globals([argparse.Namespace]):
        got = torch.load(saved, weights_only=True, mmap=mmap)
    want = sample()
    assert vars(got["args"]) == vars(want["args"]) and torch.equal(got["view"], want["view"])
    assert all(
        torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        for a, b in zip(got["model"].values(), want["model"].values(), strict=True)
    )
    assert (
        got["view"].untyped_storage().data_ptr() == got["model"]["w"].untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("numel", [0, 1, 1 << 20, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_layout_of_any_size(tmp_path, numel):
    """Against torch's skip_data; past 4 GiB both files are sparse."""
    path = tmp_path / "big.pt"
    value = {
        "a": torch.empty(numel, dtype=torch.uint8, device="meta"),
        "b": torch.empty(3, device="meta"),
    }
    with torch.serialization.skip_data():
        torch.save({k: torch.empty(v.shape, dtype=v.dtype) for k, v in value.items()}, path)
    laid = torch_file.lay_out(
        {"a": sp.tensor("uint8", (numel,), "0"), "b": sp.tensor("float32", (3,), "1")}, "big"
    )
    assert path.stat().st_size == laid.size
    fd = os.open(path, os.O_RDONLY)
    assert torch_file.read(fd, "big")[1] == laid.data
    for at, piece in laid.fixed():
        golden = os.pread(fd, len(piece), at)
        # the serialization id and its two crcs
        assert sum(x != y for x, y in zip(golden, piece, strict=True)) <= 48
    os.close(fd)


def test_cut_and_padded_files_are_refused(saved, tmp_path):
    data = saved.read_bytes()
    path = tmp_path / "cut.pt"
    with zipfile.ZipFile(saved) as z:
        places = {i.header_offset + d for i in z.infolist() for d in (0, 20, 64)} | {
            len(data) - d for d in (1, 21, 22, 23, 42, 98, 99)
        }
    for body in [data[:at] for at in places] + [
        data + b"\0",
        data + bytes(200),
        b"",
        b"\0" * 100,
        b"junk" + data,
    ]:
        path.write_bytes(body)
        with open(path, "rb") as f, pytest.raises(SourceError, match=r"cut\.pt: "):
            torch_file.read(f.fileno(), "cut.pt")


def refused(tmp_path, data, match):
    path = tmp_path / "bad.pt"
    path.write_bytes(data)
    with open(path, "rb") as f, pytest.raises(SourceError, match=match):
        torch_file.read(f.fileno(), "bad.pt")


def test_lying_zips_are_refused(saved, tmp_path):
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as z:
        infos = {i.filename.split("/", 1)[1]: i for i in z.infolist()}
    central = {}
    at = data.index(b"PK\1\2")
    for name in infos:
        central[name] = at
        n, extra = struct.unpack_from("<HH", data, at + 28)
        at += 46 + n + extra

    def patched(at, fmt, *values):
        out = bytearray(data)
        struct.pack_into(fmt, out, at, *values)
        return bytes(out)

    refused(tmp_path, patched(central["data/0"] + 20, "<II", 1 << 30, 1 << 30), "its size lies")
    refused(tmp_path, patched(central["data/0"] + 20, "<II", 200, 200), "begins")
    refused(
        tmp_path, patched(central["data/0"] + 20, "<II", 4, 4), "names bytes that it does not hold"
    )
    refused(tmp_path, patched(central["data/0"] + 10, "<H", 8), "compressed")
    refused(tmp_path, patched(central["data/0"] + 42, "<I", 1 << 31), "behind")
    refused(tmp_path, patched(central["data/0"] + 42, "<I", 3), "no record header")
    refused(tmp_path, patched(central["data/0"] + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), "zip64")
    refused(tmp_path, data.replace(b"data/1", b"data/0"), "twice")
    refused(tmp_path, data.replace(b"little", b"bigbig"), "endian")
    refused(tmp_path, data.replace(b"data.pkl", b"date.pkl"), "without data.pkl")


def test_old_formats_say_how_to_go_on(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path, (tmp_path / "old.pt").read_bytes(), "before 1.6, .* re-save it")


def test_flips_in_a_file_raise_nothing_else(saved, tmp_path):
    data, rng = saved.read_bytes(), random.Random(3)
    path = tmp_path / "flip.pt"
    for _ in range(1500):
        body = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        path.write_bytes(body)
        with open(path, "rb") as f:
            try:
                value, _ = torch_file.read(f.fileno(), "x")
                for v in (value if isinstance(value, dict) else {}).values():
                    sp.as_tensor(v)
            except MckptError:
                pass


def test_many_records_are_cheap(tmp_path):
    value = {f"layers.{i}": sp.tensor("bfloat16", (2, 3), str(i)) for i in range(20_000)}
    laid = torch_file.lay_out(value, "m")
    with open(tmp_path / "m.pt", "wb+") as f:
        for at, piece in laid.fixed():
            os.pwrite(f.fileno(), piece, at)
        os.truncate(f.fileno(), laid.size)
        got, ranges = torch_file.read(f.fileno(), "m")
    assert ranges == laid.data and len(got) == 20_000
    assert len(torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)) == 20_000


def test_equal_pickles_are_parsed_once(tmp_path, monkeypatch):
    parsed = []
    original = torch_file.loads
    monkeypatch.setattr(
        torch_file, "loads", lambda *a, **k: parsed.append(a[1]) or original(*a, **k)
    )
    values = [{"args": stage, "w": sp.tensor("bfloat16", (2, 3), "0")} for stage in range(3)]
    reader = torch_file.TorchFileReader()
    for stage in (0, 0, 1, 1, 1, 0, 2, 2, 1):  # 1 was dropped for 2
        laid = torch_file.lay_out(values[stage], "m")
        path = tmp_path / "m.pt"
        path.write_bytes(b"")
        with open(path, "rb+") as f:
            for at, piece in laid.fixed():
                os.pwrite(f.fileno(), piece, at)
            value, ranges = reader.read(f.fileno(), str(stage))
            assert (
                value["args"] == stage
                and ranges == laid.data == torch_file.read(f.fileno(), "read")[1]
            )
    assert [p for p in parsed if p != "read"] == ["0", "1", "2", "1"]
    # what a pickle names is looked for in each file
    body = torch_file.TorchFile("m", sp.dumps(values[0]), {})
    path.write_bytes(b"".join(piece for _, piece in body.fixed()))
    with open(path, "rb") as f:
        for _ in range(2):
            with pytest.raises(SourceError, match="there is no record of it"):
                reader.read(f.fileno(), "m")


def test_items_are_found_by_their_heads(tmp_path, monkeypatch):
    torch_file._HEADS.clear()
    path = tmp_path / "__0_0.distcp"
    items = []
    with open(path, "wb") as f:
        for t in (
            torch.ones(2, 3),
            torch.zeros(2, 3),
            torch.ones(3, 2).t(),
            torch.ones(2, 3).bfloat16(),
            torch.ones(5)[1:3],
        ):
            body = io.BytesIO()
            torch.save(t, body)
            items.append((f.tell(), len(body.getvalue()), t))
            f.write(body.getvalue())
    reads = []
    original = torch_file.read
    monkeypatch.setattr(torch_file, "read", lambda *a: reads.append(a) or original(*a))
    with open(path, "rb") as f:
        for at, length, t in items:
            dtype = str(t.dtype)[6:]
            find = (f.fileno(), at, length, t.nbytes, "x", dtype, tuple(t.shape))
            if not t.is_contiguous():
                with pytest.raises(SourceError, match="strides"):
                    torch_file.item_data_offset(*find)
                continue
            where = torch_file.item_data_offset(*find)
            assert (
                os.pread(f.fileno(), t.nbytes, where)
                == t.contiguous().view(torch.uint8).numpy().tobytes()
            )
        assert len(reads) == 4  # the second is known by the first
        at, length, _ = items[0]
        for dtype, shape in (("bfloat16", (2, 3)), ("float32", (3, 2))):
            with pytest.raises(SourceError, match="should be"):
                torch_file.item_data_offset(f.fileno(), at, length, 24, "x", dtype, shape)
        with pytest.raises(SourceError):
            torch_file.item_data_offset(
                f.fileno(), items[-1][0] + 1, length, 24, "x", "float32", (2, 3)
            )


# ---------------------------------------------------------------------------------------- .metadata

TENSORS = {
    "decoder.fc2.weight": (
        "bfloat16",
        (4, 6, 8),
        [((i, 0, c * 4), (1, 6, 4)) for i in range(4) for c in range(2)],
    ),
    "emb": ("float32", (10, 4), [((0, 0), (7, 4)), ((7, 0), (3, 4))]),
    "f8": ("float8_e4m3fn", (3, 4), [((0, 0), (3, 4))]),
    "decoder._extra_state/shard_0_1": None,
}


def write_dist(path, tensors=TENSORS):
    """A directory whose every tensor is 0, 1, 2 ... -> its items."""
    items, end = [], 0
    with open(path / "__0_0.distcp", "wb") as f:
        for key, tensor in tensors.items():
            for offsets, sizes in tensor[2] if tensor else [(None, None)]:
                laid = torch_file.lay_out(sp.tensor(tensor[0], sizes, "0") if tensor else [None])
                body = bytearray(laid.size)
                for at, piece in laid.fixed():
                    body[at : at + len(piece)] = piece
                if tensor:
                    whole = torch.arange(math.prod(tensor[1])).reshape(tensor[1])
                    cut = (
                        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
                        .to(getattr(torch, tensor[0]))
                        .contiguous()
                    )
                    at, n = laid.data["0"]
                    body[at : at + n] = cut.view(torch.uint8).numpy().tobytes()
                f.write(body)
                items.append((key, offsets, "__0_0.distcp", end, laid.size))
                end += laid.size
    (path / ".metadata").write_bytes(emit(tensors, items))
    return items


def test_torch_reads_the_metadata_and_items(tmp_path):
    items = write_dist(tmp_path)
    state = {k: torch.zeros(t[1], dtype=getattr(torch, t[0])) for k, t in TENSORS.items() if t}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for key, got in state.items():
        assert torch.equal(
            got.float(), torch.arange(got.numel()).reshape(got.shape).to(got.dtype).float()
        ), key
    md = dcp_metadata.read_metadata(tmp_path / ".metadata")
    assert md.tensors == {k: t for k, t in TENSORS.items() if t} and md.objects == [
        "decoder._extra_state/shard_0_1"
    ]
    assert [(*k, *v) for k, v in md.items.items()] == items


def test_reads_what_torch_and_megatron_write(tmp_path):
    dcp.save(
        {"a": {"w": torch.ones(4, 6), "n": 3}}, checkpoint_id=str(tmp_path / "d"), no_dist=True
    )
    md = dcp_metadata.read_metadata(tmp_path / "d" / ".metadata")
    assert (
        md.tensors == {"a.w": ("float32", (4, 6), [((0, 0), (4, 6))])}
        and md.objects == ["a.n"]
        and md.planner_data
    )
    file, at, length = md.items["a.w", (0, 0)]
    with open(tmp_path / "d" / file, "rb") as f:
        where = torch_file.item_data_offset(f.fileno(), at, length, 96, "x", "float32", (4, 6))
        assert os.pread(f.fileno(), 96, where) == struct.pack("<f", 1) * 24
    # the plans that Megatron-Core appends, and its own class names
    value = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    value.all_local_plans = [value.state_dict_metadata, value.storage_data]
    value.mcore_data = {}
    plain = dcp_metadata.read_metadata(pickle.dumps(value, 4))
    assert plain.tensors == md.tensors and plain.items == md.items
    assert dcp_metadata.read_metadata(pickle.dumps(value, 2)).items == md.items
    renamed = pickle.dumps(value, 2).replace(
        b"torch.distributed.checkpoint.metadata\nMetadata\n",
        b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n",
    )
    assert dcp_metadata.read_metadata(renamed).items == md.items


def test_all_that_is_wrong_is_listed():
    def error(tensors, items):
        with pytest.raises(SourceError) as e:
            dcp_metadata.read_metadata(emit(tensors, items), "m")
        return str(e.value)

    one = ("a", (0,), "f", 0, 1)
    assert "reaches out of" in error({"a": ("float32", (4,), [((0,), (5,))])}, [one])
    assert "hold 3 elements, the tensor [4] has 4" in error(
        {"a": ("float32", (4,), [((0,), (3,))])}, [one]
    )
    assert "overlap" in error(
        {"a": ("float32", (4,), [((0,), (2,)), ((1,), (2,))])}, [one, ("a", (1,), "f", 0, 1)]
    )
    four = [((0, 0), (2, 2)), ((0, 1), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]
    assert "overlap" in error(
        {"a": ("float32", (4, 4), four)}, [("a", o, "f", 0, 1) for o, _ in four]
    )
    assert "rank" in error({"a": ("float32", (4,), [((0, 0), (4, 1))])}, [one])
    assert "complex64" in error({"a": ("complex64", (4,), [((0,), (4,))])}, [one])
    assert "1 of 1 chunks have no item" in error({"a": ("float32", (4,), [((0,), (4,))])}, [])
    both = error({"a": ("float32", (4,), [((0,), (3,))]), "b": None}, [("a", (0,), "../f", 0, 1)])
    assert "not a file name" in both and "hold 3" in both and "object without an item" in both
    assert "offset -1" in error({"b": None}, [("b", None, "f", -1, 1)])
    for name in ("/etc/passwd", "..", "a/b", "", "a\0b"):
        assert "not a file name" in error({"b": None}, [("b", None, name, 0, 1)])


def test_uneven_chunks_tile():
    chunks = [
        ((0, 0), (2, 3)),
        ((0, 3), (1, 1)),
        ((1, 3), (1, 1)),
        ((2, 0), (2, 1)),
        ((2, 1), (2, 3)),
    ]
    tensors = {"a": ("float32", (4, 4), chunks)}
    items = [("a", o, "f", 0, 1) for o, _ in chunks]
    assert dcp_metadata.read_metadata(emit(tensors, items)).tensors == tensors


def test_many_chunks_are_cheap():
    """The scan reads chunks and items as whole objects, whoever wrote them: 20,000 take 0.3 s,
    opcode by opcode 0.9 s.
    """
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunks = [((i, j, 0), (1, 1, 300)) for i in range(100) for j in range(200)]
    files = [f"__{n}_0.distcp" for n in range(7)]
    items = [("a", o, files[o[0] % 7], n * 1000, 1000) for n, (o, _) in enumerate(chunks)]
    at = np.arange(len(chunks))
    rows = dcp_metadata.Items(
        ["a"], None, np.array([o for o, _ in chunks]), at // 200 % 7, at * 1000, 1000
    )
    chunk = dcp_metadata.Chunks("a", rows.offsets, (1, 1, 300))
    pieces = dcp_metadata.emit_metadata(
        {"a": ("float32", (100, 200, 300))}, [], [chunk], [rows], files
    )
    ours = b"".join(piece.data() for piece in pieces)
    size, kinds = torch.Size, of_torch
    described = kinds.TensorStorageMetadata(
        kinds.TensorProperties(torch.float32),
        size((100, 200, 300)),
        [kinds.ChunkStorageMetadata(size(o), size(s)) for o, s in chunks],
    )
    stored = {
        kinds.MetadataIndex(key, size(o)): _StorageInfo(file, at, n)
        for key, o, file, at, n in items
    }
    theirs = pickle.dumps(kinds.Metadata({"a": described}, {"a": ("a",)}, stored))
    for data in (ours, theirs):
        assert len(scanning._OBJECT.findall(data)) > 59_000  # of 60,000 objects
        began = time.process_time()
        found = dcp_metadata.read_metadata(data)
        assert time.process_time() - began < 2
        assert (
            found.tensors == {"a": ("float32", (100, 200, 300), chunks)}
            and [(*k, *v) for k, v in found.items.items()] == items
        )


def many(shared: bool, planner: bool) -> Any:
    """torch's Metadata of tensors in hundreds of chunks each, with numbers of every width and
    objects among the items.
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
            at = n * (1 << 23 if key == "a" else 100)  # to beyond 2**31
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
    """Any class that a .metadata names, which keeps its state."""

    def __new__(cls, *args: Any) -> Kept:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if type(state) is dict else {"dtype": state[0]})


class OfPython(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return {"Size": tuple, "OrderedDict": OrderedDict}.get(name) or type(name, (Kept,), {})


def by_python(data: bytes) -> Any:
    """The tensors and items in the pickle of a .metadata, in order, as Python's own unpickler makes
    them.
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
    """The same as mckpt reads it."""
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
    """A .metadata of one tensor in 400 chunks, opcode by opcode, with what no pickler writes put
    where a case wants it.

    All but the first chunk are empty, so that nothing else tells that some are not there.
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
        """Puts it into the memo and pops it; what gets it."""
        self.head += opcodes + b"\x940"
        self.num += 1
        return b"j" + struct.pack("<I", self.num - 1)

    def text(self, text: str) -> bytes:
        return self.known(b"\x8c" + bytes([len(text)]) + text.encode())

    def axis(self, n: int) -> bytes:
        """torch.Size([n])."""
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
        """An item at that offset."""
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
        """A chunk at those offsets."""
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


def test_chunks_that_are_touched_again() -> None:
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


def test_chunks_of_two_shapes_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are returned in the order of the pickle."""
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


def test_long_names() -> None:
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
    """torch's Metadata of chunks in the order in which ranks wrote them, with strings of their own;
    numbers, lengths of names and order vary.
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
    """Chunks and items whose numbers take 1 to 9 bytes in turns, and whose names are texts here and
    memo entries there.
    """
    data = pickle.dumps(ranked(6, 200, per_layer, random.Random(per_layer)), 4)
    assert found(data) == by_python(data)


def test_planner_data_nests_and_shares_as_it_likes() -> None:
    """Neither lists nested 10**5 deep nor 2**200 shared ones exhaust the stack or take for ever."""
    value = many(False, False)
    nested = pickle.dumps(value, 4).replace(
        b"\x8c\x0cplanner_data\x94N", b"\x8c\x0cplanner_data\x94" + b"]" * 100_000 + b"a" * 99_999
    )
    assert len(dcp_metadata.read_metadata(nested).items) == 1317
    shared: Any = []
    for _ in range(200):
        shared = [shared, shared]
    value.planner_data = {"a": shared}
    assert dcp_metadata.read_metadata(pickle.dumps(value, 4)).planner_data is not None


@pytest.mark.parametrize("which", ["in order", "gathered"])
def test_damaged_metadata_is_read_as_python_reads_it_or_refused(which: str) -> None:
    """Damaged metadata is either read as Python reads it, or refused with a MckptError.

    The damage changes any byte, or moves some bytes.
    """
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


def test_numbers_of_every_width():
    """A row of opcodes has the width of its largest number, and torch reads the same from it."""
    for largest in (1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 2**62):
        at, names = np.array([0, largest, 7]), ["a", "é"]
        tensors = {"w": ("float32", (3, 5)), "s": ("float32", ())}
        chunks = [
            dcp_metadata.Chunks("w", np.array([[0, 0], [1, 0], [2, 0]]), (1, 5)),
            dcp_metadata.Chunks("s", np.empty((1, 0), "i8"), ()),
        ]
        items = [
            dcp_metadata.Items(["w"], None, chunks[0].offsets, np.array([0, 1, 0]), at, largest),
            dcp_metadata.Items(["s"], np.array([0]), chunks[1].offsets, np.array([1]), at[1:2], 4),
            dcp_metadata.Items(["o/1", "o/2"], None, None, np.array([1, 0]), at[:2], 9),
            dcp_metadata.Items([], None, None, at[:0], at[:0], 9),
        ]
        pieces = dcp_metadata.emit_metadata(tensors, ["o/1", "o/2"], chunks, items, names)
        data = b"".join(piece.data() for piece in pieces)
        assert [piece.nbytes for piece in pieces] == [len(piece.data()) for piece in pieces]
        wanted = {
            ("w", (0, 0)): ("a", 0, largest),
            ("w", (1, 0)): ("é", largest, largest),
            ("w", (2, 0)): ("a", 7, largest),
            ("s", ()): ("é", largest, 4),
            ("o/1", None): ("é", 0, 9),
            ("o/2", None): ("a", largest, 9),
        }
        found, theirs = dcp_metadata.read_metadata(data), pickle.loads(data)
        assert found.items == wanted and found.objects == ["o/1", "o/2"]
        assert found.tensors == {
            "w": ("float32", (3, 5), [((i, 0), (1, 5)) for i in range(3)]),
            "s": ("float32", (), [((), ())]),
        }
        stored = {
            (k.fqn, k.offset): (v.relative_path, v.offset, v.length)
            for k, v in theirs.storage_data.items()
        }
        assert stored == wanted
        described = theirs.state_dict_metadata["w"]
        assert (described.size, [c.offsets[0] for c in described.chunks]) == ((3, 5), [0, 1, 2])


def test_flips_in_metadata_raise_nothing_else(tmp_path):
    write_dist(tmp_path)
    dcp.save(
        {"a": {"w": torch.ones(4, 6), "n": 3}}, checkpoint_id=str(tmp_path / "d"), no_dist=True
    )
    rng = random.Random(4)
    for path in (tmp_path / ".metadata", tmp_path / "d" / ".metadata"):
        data = path.read_bytes()
        for n in range(1500):
            body = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            with contextlib.suppress(MckptError):
                dcp_metadata.read_metadata(
                    bytes(body[: len(body) if n % 3 else rng.randrange(len(body))])
                )
